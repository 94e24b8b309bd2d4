"""The matrix products in Triton: for Hopper, and for every GPU that Triton has."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from deepinfer.kernels import contract
from deepinfer.kernels.configs import gemm as configs
from deepinfer.kernels.registry import Operation

__all__ = ["CONTIGUOUS_ALIGNMENT", "channels", "register"]

CONTIGUOUS_ALIGNMENT = 128
"""Each group of a contiguous layout begins at a multiple of so many rows."""

_BF16 = torch.bfloat16
_CODES_OF = {torch.uint8: 2, torch.int32: 8}


@lru_cache(maxsize=64)
def _device_name(index: int) -> str:
    return torch.cuda.get_device_name(index)


def _tuning(
    table: tuple[configs.Row, ...], x: Tensor, n: int, k: int, rows: int
) -> tuple[int, ...]:
    name = _device_name(x.device.index) if x.is_cuda else ""
    return _sizes(table, name, n, k, rows)


# Every call asks, and a model has few shapes.
_sizes = lru_cache(maxsize=4096)(configs.lookup)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def channels(x: Tensor) -> int:
    """K of an operand: codes of four bits lie two in a byte, or eight in a prepared word."""
    return x.shape[-1] * _CODES_OF.get(x.dtype, 1)


def _hopper_refusal(
    x: Tensor, xs: Tensor | None, w: Tensor, ws: Tensor | None, d: Tensor
) -> str | None:
    """Why the kernels for Hopper cannot multiply these."""
    scaled = xs is not None and ws is not None
    reason = contract.gluon_refusal(*((x, xs, w, ws, d) if scaled else (x, w, d)))
    if reason is not None:
        return reason
    k = channels(w)
    if not w.is_contiguous() or w.data_ptr() % 16 or x.data_ptr() % 16:
        return (
            "bulk copies need contiguous weights, and tokens and weights at multiples of 16 bytes"
        )
    if x.dtype == _BF16:
        return None if k % 8 == 0 else f"K is {k}, and bulk copies need a multiple of 8 for bf16"
    if xs is None or ws is None:
        return "operands without scales are bf16 only"
    if w.dtype == torch.uint8:
        return "MXFP4 weights must be prepared (prepare_mxfp4_weights)"
    if w.dtype == torch.int32:
        return _prepared_refusal(w, ws, k) or (
            _powers_refusal("tokens", xs, k) if xs.itemsize == 1 else _fp32_refusal(xs, k)
        )
    if xs.itemsize == 1 and ws.itemsize == 1:
        if k % 128 or ws.shape[-2] != _ceil(w.shape[-2], 32):
            return "with e8m0 scales, K must be a multiple of 128 and the weights have one scale for 32 rows"
        return _powers_refusal("tokens", xs, k) or _powers_refusal("weights", ws, k)
    if k % 16:
        return f"K is {k}, and bulk copies need a multiple of 16 for fp8"
    if ws.dtype != torch.float32 or ws.shape[-2:] != (_ceil(w.shape[-2], 128), _ceil(k, 128)):
        return "the weights do not have fp32 scales for blocks of 128x128"
    if ws.stride(-1) != 1:
        return "the scales of the weights do not lie side by side"
    return _fp32_refusal(xs, k)


def _fp32_refusal(xs: Tensor, k: int) -> str | None:
    """Why scales of tokens cannot be read as fp32 for 128 channels."""
    if xs.dtype != torch.float32:
        return "the scales of the tokens are not fp32"
    good = xs.shape[-1] == _ceil(k, 128)
    return None if good else "the tokens do not have one scale for 128 channels"


def _powers_refusal(name: str, s: Tensor, k: int) -> str | None:
    """Why e8m0 scales for 32 channels cannot be read as words."""
    if s.shape[-1] != k // 32 or s.stride(-1) != 1:
        return f"the {name} do not have one e8m0 scale for 32 channels, side by side"
    if s.data_ptr() % 4 or any(n % 4 for n in s.stride()[:-1]):
        return f"the scales of the {name} do not begin at multiples of 4 bytes in every row"
    return None


def _prepared_refusal(w: Tensor, ws: Tensor, k: int) -> str | None:
    """Why these are not weights that `prepare_mxfp4_weights` made."""
    if ws.dtype != torch.int32 or ws.shape[-2:] != (k // 128 + 1, _ceil(w.shape[-2], 4) * 4):
        return "the scales are not those that prepare_mxfp4_weights returned with the values"
    return None if ws.is_contiguous() else "the prepared scales are not contiguous"


def _dense_refusal(
    x: Tensor, xs: Tensor | None, w: Tensor, ws: Tensor | None, d: Tensor
) -> str | None:
    return _hopper_refusal(x, xs, w, ws, d)


def _dense_hopper(x: Tensor, xs: Tensor | None, w: Tensor, ws: Tensor | None, d: Tensor) -> None:
    from deepinfer.kernels.triton.gemm_launch import SwappedTuning, grouped_swapped, num_sms

    (m, k), n = (x.shape[0], channels(w)), w.shape[0]
    if x.stride(0) * x.itemsize % 16:
        x = x.contiguous()
    if xs is not None and ws is not None and w.dtype == torch.int32:
        _folded(x, xs, w[None], ws[None], None, d, m)
    elif xs is not None and ws is not None and m <= 64:
        if xs.itemsize == 1:
            sizes = _tuning(configs.DENSE_FP8_32, x, n, k, m)
            sizes = configs.FEW_FP8_32 if n <= configs.FEW_WEIGHTS else sizes
        else:
            sizes = _tuning(configs.DENSE_FP8, x, n, k, m)
            sizes = configs.SPLIT_FP8 if configs.dense_split(n, k) == 2 else sizes
        if sizes[0] < 8:
            _tall(x, xs, w[None], ws[None], None, d, sizes)
            return
        grouped_swapped(
            x.contiguous()[None],
            _bytes(xs)[None],
            w[None],
            _bytes(ws)[None],
            None,
            d[None],
            SwappedTuning(*sizes),
        )
    else:
        sizes = _tuning(configs.TALL_BF16 if xs is None else configs.TALL_FP8, x, n, k, m)
        if xs is not None and xs.itemsize == 1:
            sizes = _tuning(configs.TALL_FP8_32, x, n, k, m)
        elif xs is not None and configs.dense_split(n, k) == 2:
            sizes = configs.TALL_SPLIT
        elif configs.takes_narrow_tiles(m, n, num_sms(x.device.index)):
            sizes = configs.TALL_NARROW
        _tall(x, xs, w[None], None if ws is None else ws[None], None, d, sizes)


def _folded(
    x: Tensor, xs: Tensor, w: Tensor, ws: Tensor, rows_of: Tensor | None, d: Tensor, rows: int
) -> None:
    """Prepared MXFP4 weights; `rows` of a group, on average where each row has its group."""
    import deepinfer.kernels.triton.folded_decoded_launch as many
    import deepinfer.kernels.triton.folded_ragged_launch as ragged
    import deepinfer.kernels.triton.grouped_folded_launch as few
    from deepinfer.kernels.triton.gemm_launch import SwappedTuning

    n, k = w.shape[1], channels(w)
    wide = xs.itemsize == 4
    if rows_of is not None and x.dim() == 2:
        table = configs.CONTIGUOUS_MXFP4 if wide else configs.CONTIGUOUS_MXFP4_32
        rows = _most_rows(rows)
    else:
        table = configs.FOLDED_MXFP4 if wide else configs.FOLDED_MXFP4_32
    sizes = _spanned(_tuning(table, x, n, k, rows), k)
    x, xs = x.contiguous(), _bytes(xs)
    if sizes[0] == 0 and rows_of is not None:
        ragged.folded_ragged(x, xs, w, ws, rows_of, d, ragged.RaggedTuning(sizes[1]))
    elif sizes[0] < 8:
        many.folded_decoded(x, xs, w, ws, rows_of, d, many.DecodedTuning(*sizes))
    else:
        few.grouped_folded(x, xs, w, ws, rows_of, d, SwappedTuning(*sizes))


def _tall(
    x: Tensor, xs: Tensor | None, w: Tensor, ws: Tensor | None, layout: Tensor | None, d: Tensor,
    sizes: tuple[int, ...],
) -> None:  # fmt: skip
    from deepinfer.kernels.triton.gemm_launch import gemm_tall, tall_tuning

    if xs is not None and ws is not None:
        xs, ws = _bytes(xs), _bytes(ws)
    gemm_tall(x, xs, w, ws, layout, d, tall_tuning(*sizes))


def _bytes(scale: Tensor) -> Tensor:
    return scale.view(torch.uint8) if scale.itemsize == 1 else scale


def _spanned(sizes: tuple[int, ...], k: int) -> tuple[int, ...]:
    """The same sizes, with a span that divides the steps of K."""
    if sizes[0] >= 8 and sizes[3] == 2 and k % 256:
        return (*sizes[:3], 1, *sizes[4:])
    return sizes


def _contiguous_refusal(
    x: Tensor,
    xs: Tensor | None,
    w: Tensor,
    ws: Tensor | None,
    d: Tensor,
    layout: Tensor,
    expected: int | None = None,
) -> str | None:
    return _hopper_refusal(x, xs, w, ws, d) or contract.gluon_refusal(x, layout)


def _contiguous_hopper(
    x: Tensor,
    xs: Tensor | None,
    w: Tensor,
    ws: Tensor | None,
    d: Tensor,
    layout: Tensor,
    expected: int | None = None,
) -> None:
    import deepinfer.kernels.triton.gemm_launch as launch

    if xs is not None and ws is not None and w.dtype == torch.int32:
        _folded(x, xs, w, ws, layout.contiguous(), d, expected or CONTIGUOUS_ALIGNMENT)
        return
    if x.stride(0) * x.itemsize % 16:
        x = x.contiguous()
    n, k = w.shape[1:]
    rows = _most_rows(expected or CONTIGUOUS_ALIGNMENT)
    if xs is not None and ws is not None and rows <= 64:
        few = configs.MASKED_FP8 if xs.itemsize == 4 else configs.MASKED_FP8_32
        swapped = launch.SwappedTuning(*_tuning(few, x, n, k, rows))
        launch.grouped_swapped(
            x.contiguous()[None], _bytes(xs)[None], w, _bytes(ws), layout.contiguous(), d[None], swapped, each=True
        )  # fmt: skip
        return
    table = configs.TALL_BF16 if xs is None else configs.CONTIGUOUS_FP8
    sizes = _tuning(table, x, n, k, x.shape[0] // w.shape[0])
    if xs is not None and xs.itemsize == 1:
        sizes = _tuning(configs.TALL_FP8_32, x, n, k, x.shape[0])
    _tall(x, xs, w, ws, layout.contiguous(), d, sizes)


def _most_rows(expected: int) -> int:
    """Rows that most groups do not exceed, so that they are one tile."""
    return expected + 2 * math.isqrt(expected)


def _masked_refusal(
    x: Tensor,
    xs: Tensor | None,
    w: Tensor,
    ws: Tensor | None,
    d: Tensor,
    counts: Tensor,
    expected: int | None = None,
) -> str | None:
    if x.dtype == _BF16:
        return "it has no groups of few bf16 tokens"
    return _hopper_refusal(x, xs, w, ws, d) or contract.gluon_refusal(x, counts)


def _masked_hopper(
    x: Tensor,
    xs: Tensor,
    w: Tensor,
    ws: Tensor,
    d: Tensor,
    counts: Tensor,
    expected: int | None = None,
) -> None:
    import deepinfer.kernels.triton.gemm_launch as launch

    n, k = w.shape[1], channels(w)
    rows = expected or x.shape[1]
    if w.dtype == torch.int32:
        _folded(x, xs, w, ws, counts.contiguous(), d, rows)
        return
    table = configs.MASKED_FP8 if xs.itemsize == 4 else configs.MASKED_FP8_32
    sizes = _tuning(table, x, n, k, rows)
    launch.grouped_swapped(
        x.contiguous(),
        _bytes(xs),
        w,
        _bytes(ws),
        counts.contiguous(),
        d,
        launch.SwappedTuning(*sizes),
    )


def _portable_refusal(
    x: Tensor, xs: Tensor | None, w: Tensor, ws: Tensor | None, d: Tensor, *rest: object
) -> str | None:
    reason = contract.triton_refusal(*(t for t in (x, xs, w, ws, d) if t is not None))
    if reason is not None:
        return reason
    if xs is None or ws is None:
        return None
    if w.dtype == torch.int32:
        return "prepared MXFP4 weights are read by the kernels for Hopper only"
    n, k = w.shape[-2], channels(w)
    if xs.shape[-1] not in (_ceil(k, 32), _ceil(k, 128)) or xs.shape[-2] != x.shape[-2]:
        return "the tokens do not have one scale for 32 or 128 channels"
    if ws.shape[-1] not in (_ceil(k, 32), _ceil(k, 128)) or ws.stride(-1) != 1:
        return "the weights do not have one scale for 32 or 128 channels, side by side"
    if ws.shape[-2] not in (n, _ceil(n, 32), _ceil(n, 128)):
        return "the weights do not have one scale for 1, 32 or 128 rows"
    return None


def _portable(
    x: Tensor,
    xs: Tensor | None,
    w: Tensor,
    ws: Tensor | None,
    d: Tensor,
    mode: int,
    rows_of: Tensor,
) -> None:
    import deepinfer.kernels.triton.gemm_portable_launch as launch

    sizes = _tuning(configs.PORTABLE, x, w.shape[-2], channels(w), x.shape[-2])
    launch.gemm_portable(x, xs, w, ws, d, mode, rows_of, sizes)


def register(dense: Operation, contiguous: Operation, masked: Operation) -> None:
    """Adds the implementations in Triton to the three operations."""
    dense.register("triton", name="hopper", supports=_dense_refusal, priority=20)(_dense_hopper)
    contiguous.register("triton", name="hopper", supports=_contiguous_refusal, priority=20)(
        _contiguous_hopper
    )
    masked.register("triton", name="hopper", supports=_masked_refusal, priority=20)(_masked_hopper)
    dense.register("triton", supports=_portable_refusal, priority=10)(
        lambda x, xs, w, ws, d: _portable(x[None], _lead(xs), w[None], _lead(ws), d[None], 0, d)
    )
    contiguous.register("triton", supports=_portable_refusal, priority=10)(
        lambda x, xs, w, ws, d, layout, expected=None: _portable(
            x[None], _lead(xs), w, ws, d[None], 1, layout.contiguous()
        )
    )
    masked.register("triton", supports=_portable_refusal, priority=10)(
        lambda x, xs, w, ws, d, counts, expected=None: _portable(
            x, xs, w, ws, d, 2, counts.contiguous()
        )
    )


def _lead(x: Tensor | None) -> Tensor | None:
    return None if x is None else x[None]
