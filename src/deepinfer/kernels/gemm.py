"""Matrix products D = A B^T: bf16, FP8 with block scales, FP8 with MXFP4 weights; dense and by groups.

An operand with scales is a pair (values, scales):

| values | scales |
| --- | --- |
| e4m3 [..., rows, K] | fp32 [..., rows, K/128] for activations, [..., rows/128, K/128] for weights |
| e4m3 [..., rows, K] | e8m0 for 32 channels: [..., rows, K/32] for activations, [..., rows/32, K/32] for weights |
| packed e2m1 [..., rows, K/2], uint8, even channel in the low four bits | e8m0 [..., rows, K/32] |
| e2m1 as `prepare_mxfp4_weights` returns it, [..., rows, K/8], int32 | int32 [..., K/128 + 1, rows] |

Quotients are rounded up. e8m0 is float8_e8m0fnu, or uint8 with its bytes.

The sums of every element run over K in one order, whatever the number of rows; a row's result never hangs on the
others. NaN in a row of A or its scales makes that row NaN and no other. Zero rows launch nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels import contract, gemm_backends
from deepinfer.kernels import gemm_operands as operands
from deepinfer.kernels.gemm_backends import CONTIGUOUS_ALIGNMENT
from deepinfer.kernels.reference import gemm as reference
from deepinfer.kernels.registry import Operation

__all__ = [
    "CONTIGUOUS_ALIGNMENT",
    "bf16_gemm_nt",
    "fp8_fp4_gemm_nt",
    "fp8_gemm_nt",
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nt_masked",
    "m_grouped_fp8_fp4_gemm_nt_contiguous",
    "m_grouped_fp8_fp4_gemm_nt_masked",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
]

Pair = tuple[Tensor, Tensor]

_FP8 = (torch.float8_e4m3fn,)
_FP4 = (torch.uint8, torch.int32)
_BF16 = (torch.bfloat16,)

_OPERANDS = "Tensor a, Tensor? a_scale, Tensor b, Tensor? b_scale, Tensor(x!) d"
DENSE = Operation("gemm_nt", _OPERANDS)
CONTIGUOUS = Operation(
    "m_grouped_gemm_nt_contiguous", f"{_OPERANDS}, Tensor layout, int? expected_m"
)
MASKED = Operation("m_grouped_gemm_nt_masked", f"{_OPERANDS}, Tensor counts, int? expected_m")
OPERATIONS = (DENSE, CONTIGUOUS, MASKED)


def bf16_gemm_nt(
    a: Tensor, b: Tensor, d: Tensor | None = None, *, backend: str | None = None
) -> Tensor:
    """Product of bf16 matrices with fp32 sums.

    Args:
        a: Shape [M, K], bf16; rows may lie apart.
        b: Shape [N, K], bf16, contiguous.
        d: Shape [M, N], bf16 or fp32, written and returned; a new bf16 tensor when None.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        A B^T, shape [M, N].

    Raises:
        ShapeError: A shape, dtype or stride is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    return _dense((a, None), (b, None), d, _BF16, _BF16, backend)


def fp8_gemm_nt(a: Pair, b: Pair, d: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """Product of e4m3 matrices with block scales.

    Args:
        a: Values [M, K] e4m3 and their scales, fp32 [M, ceil(K/128)] or e8m0 [M, ceil(K/32)]; as
            `per_token_cast_to_fp8(x, 128, scale_dtype=torch.float32)` makes the first and `per_token_cast_to_fp8(x)` the
            second. e8m0 is float8_e8m0fnu, or uint8 with its bytes.
        b: Values [N, K] e4m3 and their scales, fp32 [ceil(N/128), ceil(K/128)] or e8m0 [ceil(N/32), ceil(K/32)]; as
            `per_block_cast_to_fp8(w, 128, scale_dtype=torch.float32)` and `per_block_cast_to_fp8(w)` make them. Give a and
            b scales of one kind: other mixes take slower kernels, or the reference.
        d: Shape [M, N], bf16 or fp32, written and returned; a new bf16 tensor when None.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        A B^T, shape [M, N].

    Raises:
        ShapeError: A shape, dtype or stride is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    return _dense(a, b, d, _FP8, _FP8, backend)


def fp8_fp4_gemm_nt(
    a: Pair, b: Pair, d: Tensor | None = None, *, backend: str | None = None
) -> Tensor:
    """Product of e4m3 activations with MXFP4 weights; otherwise as `fp8_gemm_nt`.

    Args:
        a: Values [M, K] e4m3 and their scales, fp32 [M, ceil(K/128)] or e8m0 [M, ceil(K/32)] (float8_e8m0fnu, or uint8
            with its bytes).
        b: Packed values [N, K/2] uint8 and their scales [N, K/32], or both as `prepare_mxfp4_weights` returns them.
        d: Shape [M, N], bf16 or fp32, written and returned; a new bf16 tensor when None.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        A B^T, shape [M, N].

    Raises:
        ShapeError: A shape, dtype or stride is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    return _dense(a, b, d, _FP8, _FP4, backend)


def m_grouped_bf16_gemm_nt_contiguous(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    grouped_layout: Tensor,
    expected_m: int | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Each row's product with the weights of its group, bf16; see `m_grouped_fp8_gemm_nt_contiguous`.

    Args:
        a: Shape [M, K], bf16.
        b: Shape [groups, N, K], bf16, contiguous.
        d: Shape [M, N], bf16 or fp32, written and returned.
        grouped_layout: Group of each row, shape [M], int32.
        expected_m: As there.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        `d`.

    Raises:
        ShapeError: A shape, dtype or stride is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    return _contiguous((a, None), (b, None), d, grouped_layout, expected_m, _BF16, _BF16, backend)


def m_grouped_fp8_gemm_nt_contiguous(
    a: Pair,
    b: Pair,
    d: Tensor,
    grouped_layout: Tensor,
    expected_m: int | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Each row's product with the weights of its group.

    The rows of a group lie together, and each group begins at a multiple of `CONTIGUOUS_ALIGNMENT` rows; padding stands
    behind them. On a CPU another layout is refused; on a GPU nobody looks, and such rows get the product of another group.

    Args:
        a: Values [M, K] e4m3 and their scales, as `fp8_gemm_nt` takes them.
        b: Values [groups, N, K] e4m3 and their scales, as `fp8_gemm_nt` takes them, for each group; contiguous.
        d: Shape [M, N], bf16 or fp32, written and returned.
        grouped_layout: Group of each row, shape [M], int32; rows of -1, or of another group that is not there, are
            padding, and their part of `d` is left alone.
        expected_m: Rows that a group is likely to have; it chooses the size of the tiles, never the result.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        `d`.

    Raises:
        ShapeError: A shape, dtype or stride is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    return _contiguous(a, b, d, grouped_layout, expected_m, _FP8, _FP8, backend)


def m_grouped_fp8_fp4_gemm_nt_contiguous(
    a: Pair,
    b: Pair,
    d: Tensor,
    grouped_layout: Tensor,
    expected_m: int | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Each row's product with the MXFP4 weights of its group; otherwise as `m_grouped_fp8_gemm_nt_contiguous`.

    Args:
        a: Values [M, K] e4m3 and their scales, as `fp8_fp4_gemm_nt` takes them.
        b: Packed values [groups, N, K/2] uint8 and their scales [groups, N, K/32], or both as `prepare_mxfp4_weights`
            returns them; contiguous.
        d: Shape [M, N], bf16 or fp32, written and returned.
        grouped_layout: Group of each row, shape [M], int32.
        expected_m: As there.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        `d`.

    Raises:
        ShapeError: A shape, dtype or stride is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    return _contiguous(a, b, d, grouped_layout, expected_m, _FP8, _FP4, backend)


def m_grouped_bf16_gemm_nt_masked(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    masked_m: Tensor,
    expected_m: int | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Products of the first rows of each group, bf16; see `m_grouped_fp8_gemm_nt_masked`.

    Args:
        a: Shape [groups, max_m, K], bf16, contiguous.
        b: Shape [groups, N, K], bf16, contiguous.
        d: Shape [groups, max_m, N], bf16 or fp32, written and returned.
        masked_m: Rows of each group, shape [groups], int32.
        expected_m: As there.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        `d`.

    Raises:
        ShapeError: A shape, dtype or stride is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    return _masked((a, None), (b, None), d, masked_m, expected_m, _BF16, _BF16, backend)


def m_grouped_fp8_gemm_nt_masked(
    a: Pair,
    b: Pair,
    d: Tensor,
    masked_m: Tensor,
    expected_m: int | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Products of the first rows of each group; nothing waits for the host, so graphs can hold it.

    Args:
        a: Values [groups, max_m, K] e4m3, contiguous, and their scales, fp32 [groups, max_m, ceil(K/128)] or e8m0
            [groups, max_m, ceil(K/32)].
        b: Values [groups, N, K] e4m3, contiguous, and their scales, fp32 [groups, ceil(N/128), ceil(K/128)] or e8m0
            [groups, ceil(N/32), ceil(K/32)].
        d: Shape [groups, max_m, N], bf16 or fp32, written and returned; what lies behind a group's rows is left
            alone.
        masked_m: Rows of each group, shape [groups], int32, on the device; a group of zero rows reads no weights. What
            is not in 0 to max_m stands for the nearest that is.
        expected_m: Rows that a group is likely to have; it chooses the size of the tiles, never the result.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        `d`.

    Raises:
        ShapeError: A shape, dtype or stride is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    return _masked(a, b, d, masked_m, expected_m, _FP8, _FP8, backend)


def m_grouped_fp8_fp4_gemm_nt_masked(
    a: Pair,
    b: Pair,
    d: Tensor,
    masked_m: Tensor,
    expected_m: int | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Products of the first rows of each group with MXFP4 weights; otherwise as `m_grouped_fp8_gemm_nt_masked`.

    Args:
        a: Values [groups, max_m, K] e4m3, contiguous, and their scales, fp32 [groups, max_m, ceil(K/128)] or e8m0
            [groups, max_m, ceil(K/32)].
        b: Packed values [groups, N, K/2] uint8 and their scales [groups, N, K/32], or both as `prepare_mxfp4_weights`
            returns them; contiguous.
        d: Shape [groups, max_m, N], bf16 or fp32, written and returned.
        masked_m: Rows of each group, shape [groups], int32, on the device.
        expected_m: As there.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        `d`.

    Raises:
        ShapeError: A shape, dtype or stride is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    return _masked(a, b, d, masked_m, expected_m, _FP8, _FP4, backend)


def _dense(a, b, d, a_dtype, b_dtype, backend):  # type: ignore[no-untyped-def]
    (x, xs), (w, ws) = a, b
    k = operands.operand("a", x, a_dtype, 2)
    operands.same_k(k, operands.operand("b", w, b_dtype, 2))
    operands.scales("a", x, xs, k, weights=False)
    operands.scales("b", w, ws, k, weights=True)
    if d is None:
        d = x.new_empty((x.shape[0], w.shape[0]), dtype=torch.bfloat16)
    else:
        operands.out(d, (x.shape[0], w.shape[0]), "M, N")
    if d.numel():
        DENSE(backend, x, xs, w, ws, d)
    return d


def _contiguous(a, b, d, layout, expected_m, a_dtype, b_dtype, backend):  # type: ignore[no-untyped-def]
    (x, xs), (w, ws) = a, b
    k = operands.operand("a", x, a_dtype, 2)
    operands.same_k(k, operands.operand("b", w, b_dtype, 3))
    operands.scales("a", x, xs, k, weights=False)
    operands.scales("b", w, ws, k, weights=True)
    contract.check_dtype("grouped_layout", layout, torch.int32)
    contract.check_shape("grouped_layout", layout, (x.shape[0],), "M")
    operands.aligned_groups(layout, w.shape[0])
    operands.expected_rows(expected_m)
    operands.out(d, (x.shape[0], w.shape[1]), "M, N")
    if d.numel():
        CONTIGUOUS(backend, x, xs, w, ws, d, layout, expected_m)
    return d


def _masked(a, b, d, counts, expected_m, a_dtype, b_dtype, backend):  # type: ignore[no-untyped-def]
    (x, xs), (w, ws) = a, b
    k = operands.operand("a", x, a_dtype, 3)
    operands.same_k(k, operands.operand("b", w, b_dtype, 3))
    operands.scales("a", x, xs, k, weights=False)
    operands.scales("b", w, ws, k, weights=True)
    contract.check_shape("b", w, (x.shape[0], None, None), "groups, N, K")
    contract.check_dtype("masked_m", counts, torch.int32)
    contract.check_shape("masked_m", counts, (x.shape[0],), "groups")
    operands.expected_rows(expected_m)
    operands.out(d, (*x.shape[:2], w.shape[1]), "groups, max_m, N")
    if d.numel():
        MASKED(backend, x, xs, w, ws, d, counts, expected_m)
    return d


def _always(*args: object) -> None:
    """References serve every call."""


DENSE.register("torch", supports=_always)(reference.dense)


@CONTIGUOUS.register("torch", supports=_always)
def _contiguous_torch(x, xs, w, ws, d, layout, expected_m=None):  # type: ignore[no-untyped-def]
    reference.contiguous(x, xs, w, ws, d, layout)


@MASKED.register("torch", supports=_always)
def _masked_torch(x, xs, w, ws, d, counts, expected_m=None):  # type: ignore[no-untyped-def]
    reference.masked(x, xs, w, ws, d, counts)


gemm_backends.register(DENSE, CONTIGUOUS, MASKED)
