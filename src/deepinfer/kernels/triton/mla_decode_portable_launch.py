"""Launch of the portable sparse MLA decode, for arguments that were already checked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels.configs import attention as configs
from deepinfer.kernels.formats import KVCacheFormat
from deepinfer.kernels.triton.launches import cdiv
from deepinfer.kernels.triton.mla_decode_portable import mla_decode_portable_kernel
from deepinfer.kernels.triton.mla_merge import merge_states

__all__ = ["PortableScope", "PortableTuning", "decode_portable"]

_LOG2E = 1.4426950408889634
_MOST_SLOTS = (1 << 31) - 1


@dataclass(frozen=True)
class PortableScope:
    """A cache with a list of its slots for each row.

    Attributes:
        cache: Shape [pages, bytes], uint8.
        indices: Shape [rows, width], int32, last stride 1.
        lengths: Entries of each list that count, shape [rows], int32, or None.
        form: Format of the cache.
        page_size: Rows of a page.
    """

    cache: Tensor
    indices: Tensor
    lengths: Tensor | None
    form: KVCacheFormat
    page_size: int

    @property
    def pages(self) -> tuple[Tensor, Tensor, int, int]:
        """Bytes, 16-bit words (where rows have bf16 channels), slots and the distance of pages in bytes."""
        slots = min(self.cache.shape[0] * self.page_size, _MOST_SLOTS)
        words = self.cache.view(torch.int16) if self.form.tail_channels else self.cache
        return self.cache, words, slots, self.cache.stride(0)


@dataclass(frozen=True)
class PortableTuning:
    """How rows are tiled.

    Attributes:
        heads: Heads of a program, a power of two, at least 16.
        keys: Keys of a tile, a power of two, at least 16.
        num_warps: Warps of a program.
    """

    heads: int
    keys: int
    num_warps: int


def decode_portable(
    q: Tensor,
    first: PortableScope,
    second: PortableScope | None,
    sink: Tensor | None,
    phases: Tensor | None,
    phase_index: Tensor | None,
    scale: float,
    split_keys: int,
    out: Tensor,
    lse: Tensor,
    tuning: PortableTuning | None = None,
    num_sms: int = 132,
) -> None:
    """Attention of rows to the picked slots of one or two caches.

    Args:
        q: Shape [rows, heads, channels], bf16 or fp32, last stride 1.
        first: The first cache.
        second: The second cache, or None.
        sink: Shape [heads], fp32, or None.
        phases: Shape [entries, rotated / 2, 2], fp32, or None.
        phase_index: Entry of each row, shape [rows], int32, or None.
        scale: Factor of the logits.
        split_keys: Keys of a part, a multiple of 64; 0 for whole rows, negative to choose.
        out: Shape [rows, heads, channels], last stride 1.
        lse: Shape [rows, heads], fp32.
        tuning: How it runs; None for the table's.
        num_sms: Multiprocessors of the device.
    """
    rows, heads, _ = q.shape
    if tuning is None:
        tuning = PortableTuning(*configs.portable(q.dtype == torch.float32, heads))
    tiles = sum(cdiv(s.indices.shape[1], 64) for s in (first, second) if s is not None)
    if split_keys < 0:
        split_keys = configs.split_keys(rows * cdiv(heads, tuning.heads), 1, 64 * tiles, num_sms)
    part = split_keys or max(tiles, 1) * 64
    splits = max(cdiv(tiles * 64, part), 1)
    if splits == 1:
        _launch(q, first, second, sink, phases, phase_index, scale, 1, part, out, lse, tuning)
        return
    v = torch.empty((rows, splits, *q.shape[1:]), dtype=torch.float32, device=q.device)
    s = torch.empty((rows, splits, heads), dtype=torch.float32, device=q.device)
    _launch(q, first, second, None, None, None, scale, splits, part, v, s, tuning)
    merge_states(v, s, sink, phases, phase_index, out, lse)


def _launch(
    q: Tensor,
    first: PortableScope,
    second: PortableScope | None,
    sink: Tensor | None,
    phases: Tensor | None,
    phase_index: Tensor | None,
    scale: float,
    splits: int,
    part: int,
    out: Tensor,
    lse: Tensor,
    tuning: PortableTuning,
) -> None:
    rows, heads, channels = q.shape
    cache, tails, limit, page_bytes = first.pages
    more = first if second is None else second
    extra_cache, extra_tails, extra_limit, extra_page_bytes = more.pages
    partial = splits > 1
    mla_decode_portable_kernel[(rows * splits, cdiv(heads, tuning.heads))](
        q, cache, tails, first.indices, first.indices if first.lengths is None else first.lengths,
        extra_cache, extra_tails, more.indices, more.indices if more.lengths is None else more.lengths,
        out, lse, lse if sink is None else sink.contiguous(), lse if phases is None else phases.contiguous(),
        first.indices if phase_index is None else phase_index.contiguous(), 0 if phases is None else len(phases),
        splits, part, heads, first.indices.shape[1], 0 if second is None else more.indices.shape[1],
        limit, extra_limit, page_bytes, extra_page_bytes, q.stride(0), q.stride(1),
        first.indices.stride(0), more.indices.stride(0),
        out.stride(0), out.stride(1) if partial else 0, out.stride(-2),
        lse.stride(0), lse.stride(1) if partial else 0, lse.stride(-1), scale * _LOG2E,
        FORM=first.form.name, PAGE=first.page_size, LENGTHS=first.lengths is not None,
        EXTRA=second is not None, EXTRA_FORM=more.form.name, EXTRA_PAGE=more.page_size,
        EXTRA_LENGTHS=second is not None and more.lengths is not None,
        SINK=sink is not None, ROTATED=0 if phases is None else 2 * phases.shape[1],
        INDEXED=phase_index is not None, PARTIAL=partial,
        DIM=channels, HEADS=tuning.heads, KEYS=tuning.keys, num_warps=tuning.num_warps, num_stages=1,
    )  # fmt: skip
