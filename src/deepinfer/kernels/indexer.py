"""Index scores: how much each query of the sparse attention wants each key."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.core.errors import ShapeError
from deepinfer.kernels import contract
from deepinfer.kernels.configs import indexer as configs
from deepinfer.kernels.devices import on_device
from deepinfer.kernels.reference import indexer as reference
from deepinfer.kernels.reference.cast import cast_back
from deepinfer.kernels.registry import Operation

__all__ = ["fp8_fp4_mqa_logits", "fp8_mqa_logits"]

_ARGUMENTS = "Tensor q, Tensor keys, Tensor scale, Tensor weights, Tensor starts, Tensor ends, Tensor(x!) out"
FP8 = Operation("fp8_mqa_logits", _ARGUMENTS)
FP4 = Operation("fp8_fp4_mqa_logits", _ARGUMENTS)
OPERATIONS = (FP8, FP4)

_FP8 = torch.float8_e4m3fn


def fp8_mqa_logits(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    *,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """`out[t, s] = sf[s] * sum over h of weights[t, h] * max(q[t, h] . k[s], 0)`.

    The heads are summed in one order, and a score never hangs on other queries or keys.

    Args:
        q: Queries, shape [T, heads, dim], e4m3; their scale belongs into `weights`.
        kv: Keys, shape [S, dim], e4m3, and the scale of each, shape [S], fp32.
        weights: Shape [T, heads], fp32.
        cu_seq_len_k_start: First key that each query sees, shape [T], int32.
        cu_seq_len_k_end: Key behind the last one it sees, shape [T], int32.
        out: Shape [T, S], fp32 or bf16, written and returned; a new fp32 tensor when None.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Shape [T, S]; -inf where a query does not see a key.

    Raises:
        ShapeError: A shape, dtype or stride is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    keys, scale = kv
    contract.check_shape("q", q, (None, None, None), "T, heads, dim")
    contract.check_dtype("kv[0]", keys, _FP8)
    contract.check_dtype("kv[1]", scale, torch.float32)
    contract.check_shape("kv[0]", keys, (None, q.shape[-1]), "S, dim")
    contract.check_shape("kv[1]", scale, (keys.shape[0],), "S")
    return _call(FP8, q, keys, scale, weights, cu_seq_len_k_start, cu_seq_len_k_end, out, backend)


def fp8_fp4_mqa_logits(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    *,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """The same scores of MXFP4 keys.

    On Hopper the keys are recast to e4m3 with one scale each before the products, which changes nothing as long as the
    four scales of a key are within a factor of 2^14 of one another; smaller groups are rounded to multiples of 2^-15
    of the largest's unit.

    Args:
        q: Queries, shape [T, heads, dim], e4m3.
        kv: Keys, shape [S, dim / 2], packed e2m1 as uint8, and their scales, shape [S, dim / 32], e8m0.
        weights: Shape [T, heads], fp32.
        cu_seq_len_k_start: First key that each query sees, shape [T], int32.
        cu_seq_len_k_end: Key behind the last one it sees, shape [T], int32.
        out: Shape [T, S], fp32 or bf16, written and returned; a new fp32 tensor when None.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Shape [T, S]; -inf where a query does not see a key.

    Raises:
        ShapeError: A shape, dtype or stride is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    keys, scale = kv
    contract.check_shape("q", q, (None, None, None), "T, heads, dim")
    if q.shape[-1] % 32:
        raise ShapeError(
            f"q has heads of {q.shape[-1]} channels; keys in MXFP4 need a multiple of 32.",
            argument="q", expected="[T, heads, multiple of 32]", found=tuple(q.shape),
        )  # fmt: skip
    contract.check_dtype("kv[0]", keys, torch.uint8)
    contract.check_dtype("kv[1]", scale, torch.uint8, torch.float8_e8m0fnu)
    contract.check_shape("kv[0]", keys, (None, q.shape[-1] // 2), "S, dim / 2")
    contract.check_shape("kv[1]", scale, (keys.shape[0], q.shape[-1] // 32), "S, dim / 32")
    return _call(FP4, q, keys, scale, weights, cu_seq_len_k_start, cu_seq_len_k_end, out, backend)


def _call(
    op: Operation,
    q: Tensor,
    keys: Tensor,
    scale: Tensor,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    out: Tensor | None,
    backend: str | None,
) -> Tensor:
    contract.check_dtype("q", q, _FP8)
    contract.check_shape("q", q, (None, None, None), "T, heads, dim")
    t, s = q.shape[0], keys.shape[0]
    contract.check_dtype("weights", weights, torch.float32)
    contract.check_shape("weights", weights, (t, q.shape[1]), "T, heads")
    for name, x in (("cu_seq_len_k_start", starts), ("cu_seq_len_k_end", ends)):
        contract.check_dtype(name, x, torch.int32)
        contract.check_shape(name, x, (t,), "T")
    if out is None:
        out = weights.new_empty((t, s))
    else:
        contract.check_dtype("out", out, torch.float32, torch.bfloat16)
        contract.check_shape("out", out, (t, s), "T, S")
        contract.check_last_stride("out", out)
    if out.numel():
        op(backend, q, keys, scale, weights, starts, ends, out)
    return out


def _always(*args: object) -> None:
    """The references serve every call."""


@FP8.register("torch", supports=_always)
def _fp8_torch(q, keys, scale, weights, starts, ends, out):  # type: ignore[no-untyped-def]
    values = cast_back(keys, scale[:, None], block=(1, keys.shape[1]))
    reference.mqa_logits(q, values, weights, starts, ends, out)


@FP4.register("torch", supports=_always)
def _fp4_torch(q, keys, scale, weights, starts, ends, out):  # type: ignore[no-untyped-def]
    reference.mqa_logits(q, cast_back(keys, scale), weights, starts, ends, out)


def _refusal(q, keys, scale, weights, starts, ends, out):  # type: ignore[no-untyped-def]
    reason = contract.gluon_refusal(q, keys, scale, weights, starts, ends, out)
    if reason is None and (q.shape[2] != 128 or q.shape[1] not in (8, 16, 32, 64)):
        return f"it takes 8, 16, 32 or 64 heads of 128, not {q.shape[1]} of {q.shape[2]}"
    return reason


@FP8.register("triton", name="hopper", supports=_refusal, priority=20)
def _fp8_hopper(q, keys, scale, weights, starts, ends, out):  # type: ignore[no-untyped-def]
    import deepinfer.kernels.triton.indexer_launch as launch

    tuning = launch.IndexTuning(*configs.lookup(q.shape[1]))
    rows = weights if weights.stride(1) == 1 else weights.contiguous()
    with on_device(q):
        launch.index_scores(
            q.contiguous(), keys.contiguous(), scale.contiguous(), rows, starts.contiguous(), ends.contiguous(), out,
            tuning,
        )  # fmt: skip


@FP4.register("triton", name="hopper", supports=_refusal, priority=20)
def _fp4_hopper(q, keys, scale, weights, starts, ends, out):  # type: ignore[no-untyped-def]
    import deepinfer.kernels.triton.indexer_launch as launch

    with on_device(q):
        wide, one = launch.recast_keys(keys.contiguous(), scale.contiguous().view(torch.uint8))
    _fp8_hopper(q, wide, one, weights, starts, ends, out)
