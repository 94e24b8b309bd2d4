"""Attention of many query rows: to keys picked by index, or to a window, with a second list of keys in the same call.

One latent row is key and value of all heads, as in DeepSeek-V3.2 to V4.1. The keys of a row are taken in tiles of 64
from the beginning of its list, so that a row's bits depend on its own query and list alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.core.errors import ShapeError
from deepinfer.kernels import attention_prefill_backends, contract
from deepinfer.kernels.registry import Operation

__all__ = ["flash_mla_sparse_fwd", "owned_indices", "swa_attention", "window_bands"]

_TAIL = "Tensor? extra_kv, Tensor? extra_indices, Tensor? extra_lengths, Tensor? sink, Tensor? phases, float scale, "
_OUTPUTS = "Tensor(x!) out, Tensor(y!) max_logits, Tensor(z!) lse"
SPARSE = Operation(
    "flash_mla_sparse_fwd",
    f"Tensor q, Tensor kv, Tensor indices, Tensor? lengths, {_TAIL}{_OUTPUTS}",
)
WINDOW = Operation(
    "swa_attention",
    f"Tensor q, Tensor kv, Tensor starts, Tensor lengths, {_TAIL}int window, {_OUTPUTS}",
)
OPERATIONS = (SPARSE, WINDOW)

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float | None = None,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    *,
    extra_kv: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    phases: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of each query row to the keys that its list names.

    A key that a list names twice counts twice. NaN in a query or in a key that is named goes into the row's output,
    and nowhere else. The result has the same bits in every call, whatever the other rows are.

    Args:
        q: Queries, shape [s_q, h_q, d], bf16, fp16 or fp32; any strides with the last one 1.
        kv: Keys, shape [s_kv, 1, d], dtype of `q`; the first `d_v` channels are the value.
        indices: Keys of each row, shape [s_q, 1, topk], int32; those outside of [0, s_kv) are skipped.
        sm_scale: Factor on q . k; d ** -0.5 when None.
        d_v: Channels of a value, at most d.
        attn_sink: One more logit of each head, whose value is zero, shape [h_q], fp32; -inf for none, +inf makes the
            output zero.
        topk_length: Leading indices of each row that count, shape [s_q], int32; all when None.
        extra_kv: Keys of a second list, shape [s_extra, 1, d], dtype of `q`.
        extra_indices: The second list, shape [s_q, 1, extra_topk], int32.
        extra_topk_length: Leading indices of it that count, shape [s_q], int32; all when None.
        phases: Cosine and sine of the pairs of the output's last channels, shape [s_q, pairs, 2], fp32: these channels
            are rotated back by them.
        out: Shape [s_q, h_q, d_v], written and returned; a new tensor when None.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Output, shape [s_q, h_q, d_v], dtype of `q`, zero for a row without keys; the highest logit, shape [s_q, h_q],
        fp32, -inf for a row without keys; natural logarithm of the sum of exponentials of the logits, without the
        sink, shape [s_q, h_q], fp32, +inf for a row without keys.

    Raises:
        ShapeError: A shape, dtype or stride is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    s_q, h_q, d = _check_query(q, d_v)
    contract.check_dtype("indices", indices, torch.int32)
    contract.check_shape("indices", indices, (s_q, 1, None), "s_q, 1, topk")
    contract.check_last_stride("indices", indices)
    _check_lengths("topk_length", topk_length, s_q)
    shared = _shared(q, kv, d, attn_sink, extra_kv, extra_indices, extra_topk_length, phases, d_v)
    results = _results(q, d_v, out)
    if s_q and h_q:
        scale = d**-0.5 if sm_scale is None else float(sm_scale)
        SPARSE(backend, q, kv[:, 0], indices[:, 0], topk_length, *shared, scale, *results)
    return results


def swa_attention(
    q: Tensor,
    kv: Tensor,
    bands: tuple[Tensor, Tensor],
    window: int = 128,
    sm_scale: float | None = None,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    *,
    extra_kv: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    phases: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of each query row to a band of consecutive keys, and to the keys of a list if there is one.

    Args:
        q: Queries, shape [s_q, h_q, d], bf16, fp16 or fp32; any strides with the last one 1.
        kv: Keys, shape [s_kv, 1, d], dtype of `q`; the first `d_v` channels are the value.
        bands: First key of each row and number of its keys, each of shape [s_q], int32, as `window_bands` makes them.
        window: Most keys of a band; longer bands are cut to it.
        sm_scale: Factor on q . k; d ** -0.5 when None.
        d_v: Channels of a value, at most d.
        attn_sink: One more logit of each head, whose value is zero, shape [h_q], fp32.
        extra_kv: Keys of the list, as selected rows of a pool, shape [s_extra, 1, d], dtype of `q`.
        extra_indices: The list, shape [s_q, 1, extra_topk], int32; those outside of [0, s_extra) are skipped.
        extra_topk_length: Leading indices of it that count, shape [s_q], int32; all when None.
        phases: Cosine and sine of the pairs of the output's last channels, shape [s_q, pairs, 2], fp32: these channels
            are rotated back by them.
        out: Shape [s_q, h_q, d_v], written and returned; a new tensor when None.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Output, highest logit and log-sum-exp, as of `flash_mla_sparse_fwd`.

    Raises:
        ShapeError: A shape, dtype or stride is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    s_q, h_q, d = _check_query(q, d_v)
    starts, lengths = bands
    _check_lengths("bands", starts, s_q)
    _check_lengths("bands", lengths, s_q)
    if window < 1:
        raise ShapeError(
            f"window is {window}; it must be at least 1.", argument="window", expected=">= 1", found=window
        )  # fmt: skip
    shared = _shared(q, kv, d, attn_sink, extra_kv, extra_indices, extra_topk_length, phases, d_v)
    results = _results(q, d_v, out)
    if s_q and h_q:
        scale = d**-0.5 if sm_scale is None else float(sm_scale)
        WINDOW(backend, q, kv[:, 0], starts, lengths, *shared, scale, window, *results)
    return results


def window_bands(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, rows: int, window: int = 128
) -> tuple[Tensor, Tensor]:
    """Bands of keys for sequences that lie one behind the other: each query sees itself and what came before it.

    The last query of a sequence stands at its last key, so that a chunk's queries may follow keys of earlier chunks.

    Args:
        cu_seqlens_q: Where the queries of each sequence begin, and the end of all, shape [sequences + 1], int32.
        cu_seqlens_k: Where its keys begin, and the end of all, shape [sequences + 1], int32.
        rows: Query rows, at least 0; those behind the last sequence get no keys.
        window: Keys of a query, itself among them; at least 1.

    Returns:
        First key and number of keys of each row, each of shape [rows], int32.

    Raises:
        ShapeError: The two do not count the same sequences or are no int32, or a number is too small.
    """
    contract.check_dtype("cu_seqlens_q", cu_seqlens_q, torch.int32)
    contract.check_dtype("cu_seqlens_k", cu_seqlens_k, torch.int32)
    for name, number, least in (("rows", rows, 0), ("window", window, 1)):
        if number < least:
            raise ShapeError(
                f"{name} is {number}; it must be at least {least}.",
                argument=name, expected=f">= {least}", found=number,
            )  # fmt: skip
    if cu_seqlens_q.shape != cu_seqlens_k.shape or cu_seqlens_q.dim() != 1 or not len(cu_seqlens_q):
        raise ShapeError(
            f"cu_seqlens_q has shape {tuple(cu_seqlens_q.shape)} and cu_seqlens_k {tuple(cu_seqlens_k.shape)}; both "
            "must be [sequences + 1].",
            argument="cu_seqlens_k", expected=tuple(cu_seqlens_q.shape), found=tuple(cu_seqlens_k.shape),
        )  # fmt: skip
    row = torch.arange(rows, device=cu_seqlens_q.device, dtype=cu_seqlens_q.dtype)
    if len(cu_seqlens_q) == 1:
        none = torch.zeros_like(row, dtype=torch.int32)
        return none, none.clone()
    last = len(cu_seqlens_q) - 2
    sequence = (torch.searchsorted(cu_seqlens_q, row, right=True) - 1).clamp(0, last)
    end = cu_seqlens_k[sequence + 1] - (cu_seqlens_q[sequence + 1] - 1 - row)
    begin = torch.maximum(cu_seqlens_k[sequence], end - window)
    lengths = torch.where(row < cu_seqlens_q[-1], (end - begin).clamp_min(0), 0)
    return begin.int(), lengths.int()


def owned_indices(
    indices: Tensor, rank: int, world_size: int, interleave: int = 1
) -> tuple[Tensor, Tensor]:
    """The keys of each list that a rank owns, as local ids and moved to the front, for attention over parts of the keys.

    Key `i` belongs to rank `i // interleave % world_size`. Each rank attends to its own keys without a sink, and
    `merge_attn_states` joins the results by their log-sum-exp.

    Args:
        indices: Global ids, shape [s_q, 1, topk] or [s_q, topk], int32; negative ones are skipped.
        rank: The rank, in [0, world_size).
        world_size: Number of ranks.
        interleave: Consecutive keys that a rank owns.

    Returns:
        Local ids in the order of the list, -1 behind them, shape of `indices`, int32, and how many each row has,
        shape [s_q], int32.

    Raises:
        ShapeError: `rank`, `world_size` or `interleave` is out of range, or `indices` are no int32.
    """
    contract.check_dtype("indices", indices, torch.int32)
    if not 0 <= rank < world_size or interleave < 1:
        raise ShapeError(
            f"rank is {rank}, world_size {world_size} and interleave {interleave}; it must be 0 <= rank < world_size "
            "and interleave >= 1.",
            argument="rank", expected=f"[0, {world_size})", found=rank,
        )  # fmt: skip
    block = torch.div(indices, interleave, rounding_mode="floor")
    mine = (indices >= 0) & (block % world_size == rank)
    local = torch.div(block, world_size, rounding_mode="floor") * interleave + indices % interleave
    # Those of others go to one more column behind the end.
    to = torch.where(mine, mine.cumsum(-1) - 1, indices.shape[-1])
    wide = indices.new_full((*indices.shape[:-1], indices.shape[-1] + 1), -1)
    wide.scatter_(-1, to, torch.where(mine, local, -1))
    return wide[..., :-1], mine.sum(-1).flatten().int()


def _check_query(q: Tensor, d_v: int) -> tuple[int, int, int]:
    contract.check_dtype("q", q, *_FLOATS)
    contract.check_shape("q", q, (None, None, None), "s_q, h_q, d")
    contract.check_last_stride("q", q)
    s_q, h_q, d = q.shape
    if not 1 <= d_v <= d:
        raise ShapeError(
            f"d_v is {d_v}; it must lie in [1, {d}], the channels of q.",
            argument="d_v", expected=f"[1, {d}]", found=d_v,
        )  # fmt: skip
    return s_q, h_q, d


def _check_keys(name: str, kv: Tensor, q: Tensor) -> None:
    contract.check_dtype(name, kv, q.dtype)
    contract.check_shape(name, kv, (None, 1, q.shape[2]), "keys, 1, d")
    contract.check_last_stride(name, kv)


def _check_lengths(name: str, x: Tensor | None, rows: int) -> None:
    if x is not None:
        contract.check_dtype(name, x, torch.int32)
        contract.check_shape(name, x, (rows,), "s_q")


def _shared(
    q: Tensor,
    kv: Tensor,
    d: int,
    sink: Tensor | None,
    extra_kv: Tensor | None,
    extra_indices: Tensor | None,
    extra_lengths: Tensor | None,
    phases: Tensor | None,
    d_v: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Checks the arguments that both operations have, and returns those behind the first list."""
    s_q, h_q, _ = q.shape
    _check_keys("kv", kv, q)
    if (extra_kv is None) != (extra_indices is None):
        raise ShapeError(
            "only one of extra_kv and extra_indices is given; give both, or none.",
            argument="extra_indices", expected="both or none", found="one",
        )  # fmt: skip
    rows = None
    if extra_kv is not None and extra_indices is not None:
        _check_keys("extra_kv", extra_kv, q)
        contract.check_dtype("extra_indices", extra_indices, torch.int32)
        contract.check_shape("extra_indices", extra_indices, (s_q, 1, None), "s_q, 1, extra_topk")
        contract.check_last_stride("extra_indices", extra_indices)
        rows = extra_kv[:, 0]
    _check_lengths("extra_topk_length", extra_lengths, s_q)
    if sink is not None:
        contract.check_dtype("attn_sink", sink, torch.float32)
        contract.check_shape("attn_sink", sink, (h_q,), "h_q")
    if phases is not None:
        contract.check_dtype("phases", phases, torch.float32)
        contract.check_shape("phases", phases, (s_q, None, 2), "s_q, pairs, 2")
        if not 0 < 2 * phases.shape[1] <= d_v:
            raise ShapeError(
                f"phases has {phases.shape[1]} pairs; the output has {d_v} channels. Give None for no rotation.",
                argument="phases", expected=f"[1, {d_v // 2}]", found=phases.shape[1],
            )  # fmt: skip
    lists = None if extra_indices is None else extra_indices[:, 0]
    return rows, lists, extra_lengths, sink, phases


def _results(q: Tensor, d_v: int, out: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    s_q, h_q, _ = q.shape
    if out is None:
        out = q.new_empty((s_q, h_q, d_v))
    else:
        contract.check_dtype("out", out, q.dtype)
        contract.check_shape("out", out, (s_q, h_q, d_v), "s_q, h_q, d_v")
        contract.check_last_stride("out", out)
    max_logits = q.new_empty((s_q, h_q), dtype=torch.float32)
    return out, max_logits, torch.empty_like(max_logits)


attention_prefill_backends.register(SPARSE, WINDOW)
