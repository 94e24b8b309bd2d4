"""Launch of the sparse MLA decode of Hopper, for arguments that were already checked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from deepinfer.kernels.configs import attention as configs
from deepinfer.kernels.triton.gemm_launch import num_sms
from deepinfer.kernels.triton.launches import cdiv, next_power_of_2
from deepinfer.kernels.triton.mla_decode import mla_decode_kernel
from deepinfer.kernels.triton.mla_decode_few import mla_decode_few_kernel
from deepinfer.kernels.triton.mla_merge import merge_states

__all__ = ["Ends", "FewTuning", "Scope", "WideTuning", "decode"]

_LOG2E = 1.4426950408889634
_SHIFT = 4294967296.0  # tiles hold 2^-32 of the values
_MOST_SLOTS = (1 << 31) - 1


@dataclass(frozen=True)
class Scope:
    """A cache with a list of its slots for each row.

    Attributes:
        cache: Shape [pages, bytes], uint8; pages begin at multiples of 16 bytes.
        indices: Shape [rows, width], int32, last stride 1.
        lengths: Entries of each list that count, shape [rows], int32, or None.
        is_fp4: Whether rows are of 288 bytes; else of 528.
        page_size: Rows of a page.
    """

    cache: Tensor
    indices: Tensor
    lengths: Tensor | None
    is_fp4: bool
    page_size: int

    @property
    def pages(self) -> tuple[Tensor, Tensor, int, int]:
        """Words, scales, slots and the distance of pages in units of 16 bytes."""
        slots = min(self.cache.shape[0] * self.page_size, _MOST_SLOTS)
        scales = self.cache.view(torch.int16) if self.is_fp4 else self.cache
        return self.cache.view(torch.int32), scales, slots, self.cache.stride(0) // 16


@dataclass(frozen=True)
class Ends:
    """What happens to a row's output at last.

    Attributes:
        sink: Shape [heads], fp32, or None.
        phases: Shape [entries, 32, 2], fp32, or None.
        phase_index: Entry of each row, shape [rows], int32, or None.
    """

    sink: Tensor | None
    phases: Tensor | None
    phase_index: Tensor | None


@dataclass(frozen=True)
class WideTuning:
    """How rows of many heads run.

    Attributes:
        lead: Registers a thread of the warpgroup that makes logits.
        follow: Registers of the other one that multiplies; those that decode have the rest of 504.
    """

    lead: int
    follow: int


@dataclass(frozen=True)
class FewTuning:
    """How rows of 32 heads at most run.

    Attributes:
        warps: Warps that decode, 4 or 8.
        keys: Keys that are decoded at once, 16 or 32.
        lead: Registers a thread of the warpgroup that makes logits.
        follow: Registers of the one that makes the output; those that decode have the rest.
    """

    warps: int
    keys: int
    lead: int
    follow: int


def decode(
    q: Tensor,
    first: Scope,
    second: Scope | None,
    ends: Ends,
    scale: float,
    split_keys: int,
    out: Tensor,
    lse: Tensor,
    tuning: WideTuning | FewTuning | None = None,
) -> None:
    """Attention of rows to the picked slots of one or two caches.

    Args:
        q: Shape [rows, heads, 512], bf16, last stride 1.
        first: The first cache.
        second: The second cache, or None.
        ends: Sink and rotation.
        scale: Factor of the logits.
        split_keys: Keys of a part, a multiple of 64; 0 for whole rows, negative to choose.
        out: Shape [rows, heads, 512], bf16, last stride 1.
        lse: Shape [rows, heads], fp32.
        tuning: How it runs; None for the table's.
    """
    rows, heads, _ = q.shape
    tiles = sum(cdiv(s.indices.shape[1], 64) for s in (first, second) if s is not None)
    if split_keys < 0:
        split_keys = configs.split_keys(rows, heads, 64 * tiles, num_sms(q.device.index))
    part = split_keys // 64 or max(tiles, 1)
    splits = max(cdiv(tiles, part), 1)
    if splits == 1:
        _launch(q, first, second, ends, scale, 1, part, out, lse, tuning)
        return
    v = torch.empty((rows, splits, heads, 512), dtype=torch.float32, device=q.device)
    s = torch.empty((rows, splits, heads), dtype=torch.float32, device=q.device)
    _launch(q, first, second, Ends(None, None, None), scale, splits, part, v, s, tuning)
    merge_states(v, s, ends.sink, ends.phases, ends.phase_index, out, lse)


def _launch(
    q: Tensor,
    first: Scope,
    second: Scope | None,
    ends: Ends,
    scale: float,
    splits: int,
    part: int,
    out: Tensor,
    lse: Tensor,
    tuning: WideTuning | FewTuning | None,
) -> None:
    rows, heads, channels = q.shape
    if q.stride(1) != channels or (rows > 1 and q.stride(0) != heads * channels):
        q = q.contiguous()
    block = 64 if heads > 32 else max(8, next_power_of_2(heads))
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
    flat = q.view(rows * heads, channels)
    q_desc = TensorDescriptor(flat, list(flat.shape), [channels, 1], [block, channels], layout)
    words, scales, limit, page16 = first.pages
    more = first if second is None else second
    extra_words, extra_scales, extra_limit, extra_page16 = more.pages
    units = rows * cdiv(heads, block) * splits
    partial = splits > 1
    if block == 64:
        kernel = mla_decode_kernel
        wide = tuning if isinstance(tuning, WideTuning) else WideTuning(*configs.WIDE)
        sizes = {"FOLLOWERS": wide.follow, "REGISTERS": 504 - wide.lead - wide.follow}
    else:
        kernel = mla_decode_few_kernel
        few = tuning if isinstance(tuning, FewTuning) else FewTuning(*configs.FEW[block])
        rest = (504 if few.warps == 4 else 512) - few.lead - few.follow
        sizes = {
            "HEADS": block, "WARPS": few.warps, "KEYS": few.keys, "FOLLOWERS": few.follow,
            "REGISTERS": rest * 4 // few.warps,
        }  # fmt: skip
    kernel[(min(units, num_sms(q.device.index)),)](
        q_desc, words, scales, first.indices, first.indices if first.lengths is None else first.lengths,
        extra_words, extra_scales, more.indices, more.indices if more.lengths is None else more.lengths,
        out, lse, lse if ends.sink is None else ends.sink.contiguous(),
        lse if ends.phases is None else ends.phases.contiguous(),
        first.indices if ends.phase_index is None else ends.phase_index.contiguous(),
        0 if ends.phases is None else len(ends.phases), units, splits, part, heads, first.indices.shape[1], 0 if second is None else more.indices.shape[1],
        limit, extra_limit, page16, extra_page16, first.indices.stride(0), more.indices.stride(0),
        out.stride(0), out.stride(1) if partial else 0, out.stride(-2),
        lse.stride(0), lse.stride(1) if partial else 0, lse.stride(-1), scale * _LOG2E * _SHIFT,
        FP4=first.is_fp4, PAGE=first.page_size, LENGTHS=first.lengths is not None,
        EXTRA=second is not None, EXTRA_FP4=more.is_fp4, EXTRA_PAGE=more.page_size,
        EXTRA_LENGTHS=second is not None and more.lengths is not None,
        SINK=ends.sink is not None, ROTATE=ends.phases is not None, INDEXED=ends.phase_index is not None,
        PARTIAL=partial, DEPTH=2, num_warps=4, **sizes,
    )  # fmt: skip
