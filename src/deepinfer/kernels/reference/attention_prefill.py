"""Attention of query rows to keys picked by index, or to a band of keys, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["band_attention", "sparse_attention"]

_ROWS = 64


def sparse_attention(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lengths: Tensor | None,
    extra_kv: Tensor | None,
    extra_indices: Tensor | None,
    extra_lengths: Tensor | None,
    sink: Tensor | None,
    phases: Tensor | None,
    scale: float,
    out: Tensor,
    max_logits: Tensor,
    lse: Tensor,
) -> None:
    """Writes the attention of each row to the keys of its two lists; see `flash_mla_sparse_fwd`.

    Args:
        q: Shape [rows, heads, dim], any float dtype; fp64 is computed in fp64, the others in fp32.
        kv: Shape [keys, dim].
        indices: Shape [rows, width], int32; negative and too large ones are skipped.
        lengths: Leading indices of each row that count, shape [rows], int32, or None for all.
        extra_kv: Keys of the second list, shape [extra keys, dim], or None.
        extra_indices: Shape [rows, extra width], int32, or None.
        extra_lengths: Shape [rows], int32, or None.
        sink: Shape [heads], fp32, or None.
        phases: Cosine and sine of each pair of the last channels, shape [rows, pairs, 2], fp32, or None.
        scale: Factor on q . k.
        out: Shape [rows, heads, channels]; the first channels of a key are its value.
        max_logits: Shape [rows, heads], fp32.
        lse: Shape [rows, heads], fp32.
    """
    for low in range(0, q.shape[0], _ROWS):
        rows = slice(low, low + _ROWS)
        keys, valid = _gather(kv, indices[rows], None if lengths is None else lengths[rows], q)
        if extra_kv is not None and extra_indices is not None:
            counts = None if extra_lengths is None else extra_lengths[rows]
            more, more_valid = _gather(extra_kv, extra_indices[rows], counts, q)
            keys, valid = torch.cat((keys, more), 1), torch.cat((valid, more_valid), 1)
        found = _attend(q[rows], keys, valid, sink, scale, out.shape[-1])
        y = found[0]
        if phases is not None:
            y = _turn_back(y, phases[rows])
        out[rows], max_logits[rows], lse[rows] = y.to(out.dtype), found[1], found[2]


def band_attention(
    q: Tensor,
    kv: Tensor,
    starts: Tensor,
    lengths: Tensor,
    extra_kv: Tensor | None,
    extra_indices: Tensor | None,
    extra_lengths: Tensor | None,
    sink: Tensor | None,
    phases: Tensor | None,
    scale: float,
    window: int,
    out: Tensor,
    max_logits: Tensor,
    lse: Tensor,
) -> None:
    """The same where the first list of a row is `lengths` keys from `starts` on, at most `window`."""
    indices = starts[:, None] + torch.arange(window, device=q.device, dtype=torch.int32)
    sparse_attention(
        q, kv, indices, lengths, extra_kv, extra_indices, extra_lengths, sink, phases, scale, out, max_logits, lse
    )  # fmt: skip


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _gather(
    kv: Tensor, indices: Tensor, lengths: Tensor | None, q: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys, zero where there is none, and which places hold one."""
    valid = (indices >= 0) & (indices < kv.shape[0])
    if lengths is not None:
        valid &= torch.arange(indices.shape[1], device=q.device) < lengths[:, None]
    if kv.shape[0] == 0:
        return kv.new_zeros((*indices.shape, kv.shape[1]), dtype=_wide(q)), valid
    keys = kv[torch.where(valid, indices, 0).long()].to(_wide(q))
    return keys.masked_fill(~valid[..., None], 0), valid


def _attend(
    q: Tensor, keys: Tensor, valid: Tensor, sink: Tensor | None, scale: float, channels: int
) -> tuple[Tensor, Tensor, Tensor]:
    logits = torch.bmm(q.to(keys.dtype), keys.transpose(1, 2)) * scale
    logits = logits.masked_fill(~valid[:, None, :], -torch.inf)
    if not keys.shape[1]:
        logits = logits.new_full((*logits.shape[:2], 1), -torch.inf)
        keys = keys.new_zeros((keys.shape[0], 1, keys.shape[2]))
    highest = logits.amax(-1)
    shares = torch.exp(logits - highest.masked_fill(highest == -torch.inf, 0)[..., None])
    total = shares.sum(-1)
    lse = torch.where(highest == -torch.inf, torch.inf, highest + total.log())
    y = torch.bmm(shares, keys[..., :channels])
    whole = total
    if sink is not None:
        whole = total + torch.exp(
            sink.to(total.dtype) - highest.masked_fill(highest == -torch.inf, 0)
        )
    y = y * torch.where(total == 0, 0, 1 / whole)[..., None]
    return y, highest, lse


def _turn_back(y: Tensor, phases: Tensor) -> Tensor:
    width = 2 * phases.shape[1]
    even, odd = y[..., -width:].unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = phases[:, None, :, 0].to(y.dtype), phases[:, None, :, 1].to(y.dtype)
    turned = torch.stack((even * cos + odd * sin, odd * cos - even * sin), -1).flatten(-2)
    return torch.cat((y[..., :-width], turned), -1)
