"""Attention of queries to cached rows picked by index, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.formats import KVCacheFormat
from deepinfer.kernels.reference.cache import gather_rows

__all__ = ["attend", "attend_cached", "merge_states", "picked", "rotate_back"]

_ROWS = 64  # queries at a time, so that the gathered keys stay small


def picked(
    cache: Tensor, indices: Tensor, lengths: Tensor | None, form: KVCacheFormat, page_size: int
) -> tuple[Tensor, Tensor]:
    """Keys of a list of slots, and which of them count.

    Args:
        cache: Shape [pages, bytes], uint8.
        indices: Slots, shape [rows, width], int32.
        lengths: Entries of each list that count, shape [rows], or None for all.
        form: Format of the cache.
        page_size: Rows of a page.

    Returns:
        Keys, shape [rows, width, channels], fp32, zeros where they do not count; shape [rows, width], bool.
    """
    rows, width = indices.shape
    known = (indices >= 0) & (indices < cache.shape[0] * page_size)
    if lengths is not None:
        known &= torch.arange(width, device=indices.device) < lengths[:, None]
    keys = torch.empty((rows, width, form.channels), dtype=torch.float32, device=cache.device)
    slots = indices.masked_fill(~known, -1).flatten()
    gather_rows(cache, slots, keys.view(-1, form.channels), form, page_size)
    return keys, known


def attend(
    q: Tensor,
    keys: Tensor,
    known: Tensor,
    scale: float,
    sink: Tensor | None,
    phases: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Softmax over known keys, with keys as values, in the dtype of the keys.

    The highest logit is taken first, then the shares are summed in the order of the list; a sink takes its share last.

    Args:
        q: Shape [rows, heads, channels].
        keys: Shape [rows, width, channels], fp32 or fp64.
        known: Keys that count, shape [rows, width], bool.
        scale: Factor of the logits.
        sink: Logit without a value, shape [heads], or None.
        phases: Cosine and sine of each rotated pair, shape [rows, rotated / 2, 2], or None.

    Returns:
        Shape [rows, heads, channels]; logarithm of the summed exponentials without the sink, shape [rows, heads], +inf
        where no key counts.
    """
    logits = torch.einsum("thd,tkd->thk", q.to(keys.dtype), keys) * scale
    logits = logits.masked_fill(~known[:, None], -torch.inf)
    lse = torch.logsumexp(logits, -1) if logits.shape[-1] else logits.new_full(q.shape[:2], -torch.inf)  # fmt: skip
    bare = lse == -torch.inf
    shares = torch.exp(logits - lse.masked_fill(bare, 0)[..., None])
    out = torch.einsum("thk,tkd->thd", shares, keys)
    if sink is not None:
        out = out / (1 + torch.exp(sink.to(keys.dtype) - lse))[..., None]
    out = out.masked_fill(bare[..., None], 0)
    return rotate_back(out, phases), lse.masked_fill(bare, torch.inf)


def rotate_back(out: Tensor, phases: Tensor | None) -> Tensor:
    """Inverse rotation of pairs of the last channels.

    Args:
        out: Shape [rows, heads, channels].
        phases: Cosine and sine of each pair, shape [rows, rotated / 2, 2], or None.

    Returns:
        Same shape and dtype.
    """
    if phases is None:
        return out
    cos, sin = phases.to(out.dtype).unsqueeze(1).unbind(-1)
    rotated = 2 * cos.shape[-1]
    even, odd = out[..., -rotated:].unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack((even * cos + odd * sin, odd * cos - even * sin), -1).flatten(-2)
    return torch.cat((out[..., :-rotated], pairs), -1)


def attend_cached(
    q: Tensor,
    scopes: list[tuple[Tensor, Tensor, Tensor | None, KVCacheFormat, int]],
    sink: Tensor | None,
    phases: Tensor | None,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attention to rows of one or two caches.

    Args:
        q: Shape [rows, heads, channels].
        scopes: Cache, indices, lengths, format and page size of each list; see `picked`.
        sink: Shape [heads], or None.
        phases: Shape [rows, rotated / 2, 2], or None.
        scale: Factor of the logits.
        out: Shape [rows, heads, channels].
        lse: Shape [rows, heads], fp32.
    """
    for low in range(0, q.shape[0], _ROWS):
        part = slice(low, low + _ROWS)
        found = [
            picked(c, i[part], None if n is None else n[part], form, page)
            for c, i, n, form, page in scopes
        ]
        keys = torch.cat([k for k, _ in found], 1)
        known = torch.cat([k for _, k in found], 1)
        y, log = attend(q[part], keys, known, scale, sink, None if phases is None else phases[part])
        out[part] = y.to(out.dtype)
        lse[part] = log


def merge_states(
    v: Tensor, s: Tensor, sink: Tensor | None, phases: Tensor | None, out: Tensor, lse: Tensor
) -> None:
    """Merges attention over parts of a list, from first to last.

    Args:
        v: Attention to each part, shape [rows, parts, heads, channels].
        s: Logarithms of summed exponentials, shape [rows, parts, heads], fp32; +-inf for a part without keys.
        sink: Shape [heads], or None.
        phases: Shape [rows, rotated / 2, 2], or None.
        out: Shape [rows, heads, channels].
        lse: Shape [rows, heads], fp32.
    """
    bare = s.isinf()
    highest = s.masked_fill(bare, -torch.inf).amax(1) if s.shape[1] else s.new_full(lse.shape, -torch.inf)  # fmt: skip
    none = highest == -torch.inf
    highest = highest.masked_fill(none, 0)
    total = torch.zeros_like(highest)
    acc = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for part in range(s.shape[1]):
        weight = torch.exp(s[:, part] - highest).masked_fill(bare[:, part], 0)
        total = total + weight
        value = v[:, part].float().masked_fill(bare[:, part, :, None], 0)
        acc = acc + weight[..., None] * value
    log = highest + total.log()
    weight = 1 / total.masked_fill(none, 1)
    if sink is not None:
        weight = weight / (1 + torch.exp(sink - log))
    weight = weight.masked_fill(none, 0)
    out.copy_(rotate_back(acc * weight[..., None], phases))
    lse.copy_(log.masked_fill(none, torch.inf))
