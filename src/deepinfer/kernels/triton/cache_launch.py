"""Launches of the cache kernels, for arguments that were already checked."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor

from deepinfer.kernels import contract
from deepinfer.kernels.configs import cache as configs
from deepinfer.kernels.formats import KVCacheFormat
from deepinfer.kernels.triton.cache_gather import cache_gather_kernel, cache_state_kernel
from deepinfer.kernels.triton.cache_insert import cache_insert_kernel
from deepinfer.kernels.triton.cache_pairs_launch import (
    aligned,
    gather_pairs,
    insert_pairs,
    serves_gather,
    serves_pairs,
)
from deepinfer.kernels.triton.launches import cdiv, interpreted, launch
from deepinfer.kernels.triton.quant_launch import hardware_level

__all__ = ["CacheTuning", "constants", "gather_rows", "insert_rows", "keep_state"]

_STATE_TOKENS = 8
_SCALES = {"e8m0": 0, "e4m3": 1, "fp32": 2}


@dataclass(frozen=True)
class CacheTuning:
    """How rows are spread over programs; bits do not depend on it.

    Attributes:
        rows: Rows of a program, a power of two.
        num_warps: Warps of a program.
        pairs: Whether bf16 is rounded and coded two values at a time, on chips that can (compute capability 9.0 and above).
        each: Pairs of a thread side by side, with pairs.
        shared: Whether turned channels may be spread over a warp by way of shared memory, with pairs.
    """

    rows: int
    num_warps: int
    pairs: bool = True
    each: int = 8
    shared: bool = False


@lru_cache(maxsize=64)
def constants(form: KVCacheFormat, page_size: int, native: bool) -> dict[str, int | bool]:
    """What the kernels must know of a format.

    Args:
        form: The format.
        page_size: Rows of a page.
        native: Whether the chip casts to and from e4m3.
    """
    width = 1 << (form.coded_channels - 1).bit_length()
    return {
        "CODED": form.coded_channels, "WIDTH": width, "TAIL": form.tail_channels, "BITS": form.code_bits,
        "GROUP": form.group, "SCALE": _SCALES[form.scale_type], "ROW_STRIDE": form.row_stride,
        "TAIL_AT": form.tail_offset, "SCALE_STRIDE": form.scale_stride,
        "SCALES_AT": form.scales_offset(page_size), "PAGE": page_size, "NATIVE": native,
    }  # fmt: skip


def insert_rows(
    x: Tensor,
    cache: Tensor,
    slots: Tensor,
    form: KVCacheFormat,
    page_size: int,
    tuning: CacheTuning | None,
    *,
    kind: torch.dtype,
    gates: Tensor | None = None,
    state: Tensor | None = None,
    requests: Tensor | None = None,
    last: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 0.0,
    phases: Tensor | None = None,
    phase_index: Tensor | None = None,
    positions: Tensor | None = None,
    floors: Tensor | None = None,
    latents: Tensor | None = None,
    early: bool = False,
) -> None:
    """Writes rows into a cache; the arguments are those of `deepinfer.kernels.cache.compress_norm`.

    Args:
        x: Rows, shape [tokens, channels], last stride 1.
        cache: Shape [pages, bytes], uint8.
        slots: Shape [rows], integers; rows of slots that the cache does not have are written nowhere.
        form: Format of the cache.
        page_size: Rows of a page.
        tuning: Sizes; None for those of the tables.
        kind: Dtype that values pass through between the steps.
        gates: Shape [tokens, channels], for pools of two tokens.
        state: Shape [requests, ring, 2, channels], tokens of earlier steps.
        requests: Request of each token, shape [tokens].
        last: Token of each row, shape [rows]; None when they are the same.
        weight: Gains of the norm, shape [channels].
        eps: Added to the mean square.
        phases: Cosines and sines, shape [entries, rotated / 2, 2], fp32.
        phase_index: Entry of each row, shape [rows]; None when it is the row.
        positions: Position of each token, shape [tokens].
        floors: First position that may be written, of each token, shape [tokens].
        latents: Rows before the rotation, shape [rows, channels], written.
        early: Whether `keep_state`, called next, may begin while this launch ends.
    """
    rows = slots.shape[0]
    if (tuning is None or tuning.pairs) and serves_pairs(
        x, cache, form, kind, gates=gates, state=state, weight=weight, phases=phases, latents=latents,
    ):  # fmt: skip
        sizes = configs.lookup_pairs(rows, form.channels, latents is not None)
        if tuning is not None:
            sizes = tuning.rows, tuning.num_warps, tuning.each, tuning.shared
        insert_pairs(
            x, cache, slots, form, page_size, sizes, gates=gates, state=state,
            requests=requests, last=last, weight=weight, eps=eps, phases=phases, phase_index=phase_index,
            positions=positions, floors=floors, latents=latents, early=early,
        )  # fmt: skip
        return
    if tuning is None:
        plain = weight is None and phases is None
        sizes = configs.lookup_insert(rows, form.channels, plain)
        tuning = CacheTuning(*(sizes if latents is None else configs.lookup_compress(rows)))
    options = {} if interpreted() else {"enable_fp_fusion": False}
    launch(
        cache_insert_kernel,
        cdiv(rows, tuning.rows),
        x,
        x if gates is None else gates,
        x if state is None else state,
        slots if requests is None else requests,
        slots if last is None else last,
        x if weight is None else weight,
        x if phases is None else phases,
        slots if phase_index is None else phase_index,
        slots if positions is None else positions,
        slots if floors is None else floors,
        slots,
        x if latents is None else latents,
        cache,
        rows,
        x.shape[0],
        cache.shape[0],
        0 if state is None else state.shape[0],
        0 if phases is None else phases.shape[0],
        eps,
        x.stride(0),
        0 if gates is None else gates.stride(0),
        0 if state is None else state.stride(0),
        0 if state is None else state.stride(1),
        1 if state is None else state.shape[1],
        0 if latents is None else latents.stride(0),
        0 if phases is None else phases.stride(0),
        cache.stride(0),
        PAIR=gates is not None,
        HAS_LAST=last is not None,
        HAS_NORM=weight is not None,
        HAS_FLOOR=floors is not None,
        HAS_LATENTS=latents is not None,
        HAS_PHASE_INDEX=phase_index is not None,
        ROPE=0 if phases is None else 2 * phases.shape[1],
        KIND=getattr(triton.language, _TYPES[kind]),
        **{k: v for k, v in constants(form, page_size, _native(x)).items() if k != "WIDTH"},
        FUSED=not interpreted(),
        ROWS=tuning.rows,
        ALIGNED=gates is not None and state is not None and aligned(x, gates, state),
        PAIRS=tuning.pairs and kind == torch.bfloat16 and hardware_level(x) == 2,
        num_warps=tuning.num_warps,
        **options,
    )


_TYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def gather_rows(
    cache: Tensor,
    slots: Tensor,
    out: Tensor,
    form: KVCacheFormat,
    page_size: int,
    tuning: CacheTuning | None,
) -> None:
    """Reads rows of a cache.

    Args:
        cache: Shape [pages, bytes], uint8.
        slots: Shape [rows], integers; zeros are written for those that the cache does not have.
        out: Shape [rows, channels], last stride 1.
        form: Format of the cache.
        page_size: Rows of a page.
        tuning: Sizes; None for those of the tables.
    """
    rows = slots.shape[0]
    tuning = tuning or CacheTuning(*configs.lookup_gather(rows, form.channels))
    if tuning.pairs and serves_gather(cache, out, form):
        sizes = tuning.rows, tuning.num_warps
        gather_pairs(cache, slots, out, form, page_size, sizes)
        return
    launch(
        cache_gather_kernel,
        cdiv(rows, tuning.rows),
        cache,
        slots,
        out,
        rows,
        cache.shape[0],
        cache.stride(0),
        out.stride(0),
        **constants(form, page_size, _native(out)),
        ROWS=tuning.rows,
        num_warps=tuning.num_warps,
    )


def keep_state(
    x: Tensor,
    gates: Tensor,
    requests: Tensor,
    positions: Tensor,
    state: Tensor,
    early: bool = False,
) -> None:
    """Keeps the last tokens of each request; see `deepinfer.kernels.cache.compress_norm`.

    Args:
        x: Rows, shape [tokens, channels].
        gates: Shape [tokens, channels].
        requests: Request of each token, shape [tokens].
        positions: Position of each token, shape [tokens].
        state: Shape [requests, ring, 2, channels].
        early: Whether to begin while `insert_rows`, called just before with the same, ends.
    """
    early = early and hardware_level(x) == 2
    launch(
        cache_state_kernel, cdiv(x.shape[0], _STATE_TOKENS),
        x, gates, requests, positions, state, x.shape[0], state.shape[0], x.stride(0),
        gates.stride(0), state.stride(0), state.stride(1), state.shape[1], CHANNELS=x.shape[1],
        BLOCK=512, TOKENS=_STATE_TOKENS, EARLY=early, num_warps=4, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


def _native(x: Tensor) -> bool:
    """Whether the chip has casts to and from e4m3; Triton's interpreter has wrong ones."""
    return not interpreted() and contract.capability(x.device) >= (8, 9)
