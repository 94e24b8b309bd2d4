"""Launch of inserts two values at a time, for arguments that were already checked."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from deepinfer.kernels import contract
from deepinfer.kernels.formats import KVCacheFormat
from deepinfer.kernels.triton.launches import cdiv, launch
from deepinfer.kernels.triton.quant_launch import hardware_level
from deepinfer.kernels.triton.small_floats import E2M1_E4M3, E2M1_E8M0, E4M3_E8M0

__all__ = ["aligned", "constants", "gather_pairs", "insert_pairs", "serves_gather", "serves_pairs"]


def serves_pairs(
    x: Tensor,
    cache: Tensor,
    form: KVCacheFormat,
    kind: torch.dtype,
    *,
    gates: Tensor | None,
    state: Tensor | None,
    weight: Tensor | None,
    phases: Tensor | None,
    latents: Tensor | None,
) -> bool:
    """Whether rows can be read and written two values at a time, on a chip that computes with pairs of bf16.

    Args:
        x: Rows, shape [tokens, channels]; this and the others as in `insert_rows`.
        cache: Shape [pages, bytes].
        form: Format of the cache.
        kind: Dtype that values pass through.
        gates: Shape [tokens, channels], or None.
        state: Shape [requests, ring, 2, channels], or None.
        weight: Gains, shape [channels], or None.
        phases: Cosines and sines, shape [entries, rotated / 2, 2], or None.
        latents: Rows before the rotation, shape [rows, channels], or None.

    Returns:
        True if `insert_pairs` can be called.
    """
    if kind != torch.bfloat16 or not _has_pairs(x, cache, form):
        return False
    wide = x.dtype == torch.float32
    if not wide and (x.dtype != kind or gates is not None):
        return False
    # Without a norm, fp32 rows are coded as they are.
    if wide and weight is None:
        return False
    if weight is not None and weight.dtype != kind:
        return False
    given = (x, weight, gates, state, phases, latents)
    return all(_even(t) for t in given if t is not None)


def serves_gather(cache: Tensor, out: Tensor, form: KVCacheFormat) -> bool:
    """Whether rows of e2m1 can be read eight values at a time, on a chip that computes with pairs of bf16.

    Args:
        cache: Shape [pages, bytes].
        out: Shape [rows, channels].
        form: Format of the cache.

    Returns:
        True if `gather_pairs` can be called.
    """
    if form.code_bits != 4 or out.dtype != torch.bfloat16 or not _has_pairs(out, cache, form):
        return False
    return (cache.data_ptr() | cache.stride(0) | cache.shape[1]) % 4 == 0 and _even(out)


def gather_pairs(
    cache: Tensor,
    slots: Tensor,
    out: Tensor,
    form: KVCacheFormat,
    page_size: int,
    sizes: tuple[int, int],
) -> None:
    """Reads rows of a cache; see `gather_rows`. `sizes`: rows and warps of a program."""
    from deepinfer.kernels.triton.cache_gather_pairs import cache_gather_pairs_kernel

    rows, warps = sizes
    words = cache.view(torch.int32)
    launch(
        cache_gather_pairs_kernel, cdiv(len(slots), rows), words, cache, slots, out.view(torch.int32), len(slots),
        cache.shape[0], words.stride(0), cache.stride(0), out.stride(0) // 2, CHANNELS=form.coded_channels,
        GROUP=form.group, E4M3=form.scale_type == "e4m3", ROW_STRIDE=form.row_stride, SCALE_STRIDE=form.scale_stride,
        SCALES_AT=form.scales_offset(page_size), PAGE=page_size, ROWS=rows, num_warps=warps,
    )  # fmt: skip


def _has_pairs(x: Tensor, cache: Tensor, form: KVCacheFormat) -> bool:
    """Whether a chip computes with pairs, and a cache holds nothing but codes and scales of a byte."""
    if form.tail_channels or form.scale_type == "fp32":
        return False
    # Two codes of e4m3 are one number.
    if form.code_bits == 8 and (cache.data_ptr() | cache.stride(0) | cache.shape[1]) % 2:
        return False
    return hardware_level(x) == 2 and contract.has_gluon()


def _even(x: Tensor) -> bool:
    """Whether all rows begin at a pair."""
    odd = x.data_ptr() // x.element_size()
    for stride in x.stride()[:-1]:
        odd |= stride
    return odd % 2 == 0 and x.data_ptr() % (2 * x.element_size()) == 0


@lru_cache(maxsize=64)
def constants(form: KVCacheFormat, page_size: int) -> dict[str, int]:
    """What the kernel must know of a format.

    Args:
        form: The format.
        page_size: Rows of a page.
    """
    small = E2M1_E4M3 if form.scale_type == "e4m3" else E2M1_E8M0
    return {
        "CHANNELS": form.coded_channels, "FORMAT": E4M3_E8M0 if form.code_bits == 8 else small,
        "GROUP": form.group, "ROW_STRIDE": form.row_stride, "SCALE_STRIDE": form.scale_stride,
        "SCALES_AT": form.scales_offset(page_size), "PAGE": page_size,
    }  # fmt: skip


def _pairs(x: Tensor | None, other: Tensor) -> tuple[Tensor, int]:
    """Pairs of a tensor's values as integers and the distance of its rows in pairs; another tensor and 0 for None."""
    if x is None:
        return other, 0
    words = x.view(torch.int64 if x.element_size() == 4 else torch.int32)
    return words, words.stride(0)


def insert_pairs(
    x: Tensor, cache: Tensor, slots: Tensor, form: KVCacheFormat, page_size: int, sizes: tuple[int, int, int, bool],
    *, gates: Tensor | None, state: Tensor | None, requests: Tensor | None, last: Tensor | None,
    weight: Tensor | None, eps: float, phases: Tensor | None, phase_index: Tensor | None,
    positions: Tensor | None, floors: Tensor | None, latents: Tensor | None, early: bool,
) -> None:  # fmt: skip
    """Writes rows into a cache; see `insert_rows`.

    `sizes`: rows and warps of a program, pairs of a thread, and whether turned channels may be spread over a warp.
    """
    from deepinfer.kernels.triton.cache_pairs import cache_pairs_kernel

    rows, warps, each, shared = sizes
    turned = 0 if phases is None else phases.shape[1]
    words, stride_x = _pairs(x, x)
    others = [_pairs(t, words) for t in (gates, latents, phases)]
    (gate_words, stride_gates), (latent_words, stride_latents), (turns, stride_phases) = others
    ring = words if state is None else state.view(torch.int64)
    codes = cache.view(torch.int16) if form.code_bits == 8 else cache
    launch(
        cache_pairs_kernel, cdiv(len(slots), rows),
        words, gate_words, ring, slots if requests is None else requests, slots if last is None else last,
        words if weight is None else weight.view(torch.int32), turns,
        slots if phase_index is None else phase_index, slots if positions is None else positions,
        slots if floors is None else floors, slots, latent_words, codes, cache,
        len(slots), x.shape[0], cache.shape[0], 0 if state is None else state.shape[0],
        0 if phases is None else phases.shape[0], eps, stride_x, stride_gates,
        0 if state is None else ring.stride(0), 0 if state is None else ring.stride(1),
        1 if state is None else state.shape[1], stride_latents, stride_phases, codes.stride(0),
        cache.stride(0), WIDE=x.dtype == torch.float32, PAIR=gates is not None,
        HAS_LAST=last is not None, HAS_NORM=weight is not None, HAS_FLOOR=floors is not None,
        HAS_LATENTS=latents is not None, HAS_PHASE_INDEX=phase_index is not None,
        ROPE=0 if phases is None else 2 * phases.shape[1], **constants(form, page_size), ROWS=rows, EACH=each,
        EARLY=early, SHARED=shared and turned > 0 and turned & (turned - 1) == 0, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip


def aligned(*tensors: Tensor) -> bool:
    """Whether all rows of fp32 begin at multiples of 16 bytes.

    Args:
        tensors: Of any shape, last stride 1.
    """
    starts = (x.data_ptr() | 4 * stride for x in tensors for stride in x.stride()[:-1])
    return all(start % 16 == 0 for start in starts)
