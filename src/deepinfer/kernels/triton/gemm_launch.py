"""Launches of the matrix products of Hopper, for arguments that were already checked."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from deepinfer.kernels.triton.descriptors import list_layout, listed, matrix, tile_layout
from deepinfer.kernels.triton.gemm_powers import spread_powers_kernel
from deepinfer.kernels.triton.gemm_tall import gemm_tall_kernel
from deepinfer.kernels.triton.grouped_list import used_tiles_kernel
from deepinfer.kernels.triton.grouped_swapped import grouped_swapped_kernel
from deepinfer.kernels.triton.launches import launch

__all__ = [
    "SwappedTuning",
    "TallTuning",
    "can_send",
    "gemm_tall",
    "grouped_swapped",
    "list_layout",
    "listed",
    "matrix",
    "num_sms",
    "register_shares",
    "spread_powers",
    "tall_tuning",
    "tile_layout",
    "used_tiles",
]


@dataclass(frozen=True)
class SwappedTuning:
    """How few tokens are multiplied: weights are the tall operand.

    Attributes:
        block_m: Tokens a tile: 16, 32 or 64; for prepared MXFP4 weights also 8 or 128.
        parts: Warpgroups, each with 64 rows of weights: 1 or 2.
        depth: Steps in the ring of shared memory.
        span: Steps of 128 channels copied at once, for prepared MXFP4 weights: 1 or 2.
        per_sm: Programs a multiprocessor; with more than one the registers are shared out.
        split: 2 to let two warpgroups add up the even and the odd steps of the same 64 rows of weights, for FP8; that is
            another order of the sum.
        ahead: 1 to begin the next product before one is added, for FP8 with scales for 128 channels, not split.
    """

    block_m: int
    parts: int
    depth: int
    span: int = 1
    per_sm: int = 1
    split: int = 1
    ahead: int = 0


@dataclass(frozen=True)
class TallTuning:
    """How many tokens are multiplied: tokens are the tall operand.

    Attributes:
        parts: Warpgroups, each with 64 rows of tokens: 1 or 2.
        block_n: Columns a tile: 128, 256 for bf16 and for FP8 with scales for 128 channels, which is then multiplied 64
            columns at a time, tokens out of registers; 64 for FP8 with scales for 32 channels.
        depth: Steps in the ring of shared memory.
        band: Row tiles that are passed by all columns together.
        split: 2 to add up the even and the odd steps apart, as `SwappedTuning.split` does; for 128 columns of FP8.
        spread: 1 to write the powers before as fp32, as they are read, for FP8 with groups of 32; the bits are the same.
        rooms: For FP8 and 256 columns: rooms of 64 x 64 results of a warpgroup, through which bulk copies write bf16; 0 to
            let the threads write. What bulk copies cannot reach, the threads write.
    """

    parts: int
    block_n: int
    depth: int
    band: int = 8
    split: int = 1
    spread: int = 0
    rooms: int = 0


# Made once for each of the few entries of the tables.
tall_tuning = lru_cache(maxsize=256)(TallTuning)


@lru_cache(maxsize=64)
def num_sms(device_index: int) -> int:
    """Multiprocessors of a CUDA device."""
    return int(torch.cuda.get_device_properties(device_index).multi_processor_count)


def spread_powers(x_scale: Tensor, w_scale: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The scales of tokens and weights for 32 channels, as the products of many tokens read them.

    Args:
        x_scale: Shape [M, K / 32], e8m0 as uint8, last stride 1.
        w_scale: Shape [groups, N / 32, K / 32], e8m0 as uint8, last stride 1.
        n: Rows of weights of a group.

    Returns:
        fp32, shapes [K / 128, M, 4] and [K / 128, groups * N / 128, 4 groups of channels, 4 blocks of rows].
    """
    m, steps = x_scale.shape[0], x_scale.shape[1] // 4
    blocks = w_scale.shape[0] * -(-n // 128)
    x_powers = x_scale.new_empty((steps, m, 4), dtype=torch.float32)
    w_powers = x_scale.new_empty((steps, blocks, 4, 4), dtype=torch.float32)
    x_programs = -(-m // 64)
    launch(
        spread_powers_kernel, (x_programs + -(-blocks // 16), -(-steps // 8), 1),
        x_scale, w_scale, x_powers, w_powers, m, n, steps, x_programs, blocks, x_scale.stride(0), w_scale.stride(0),
        w_scale.stride(1), BLOCK=64, num_warps=4,
    )  # fmt: skip
    return x_powers, w_powers


@lru_cache(maxsize=256)
def register_shares(tuning: SwappedTuning) -> tuple[dict[str, int], int]:
    """How the registers of a multiprocessor are dealt out.

    Returns:
        Options of the launch, and the registers of a thread that multiplies; the warp that copies has 24.
    """
    threads = 128 * (tuning.parts + 1)
    registers = min(65536 // tuning.per_sm // threads // 8 * 8, 255)
    share = (registers * threads // 128 - 24) // tuning.parts // 8 * 8
    return {} if tuning.per_sm == 1 else {"maxnreg": registers}, min(share, 240)


def can_send(out: Tensor) -> bool:
    """Whether bulk copies can write a matrix."""
    return out.dtype == torch.bfloat16 and out.stride(0) % 8 == 0 and out.data_ptr() % 16 == 0


def used_tiles(rows_of: Tensor, groups: int, block_m: int) -> Tensor:
    """Number of the tiles of rows that have work, and their first rows.

    Args:
        rows_of: Group of each row, shape [M], int32; none that is not in 0 to `groups` - 1.
        groups: Number of groups.
        block_m: Rows of a tile.

    Returns:
        Shape [tiles + 1], int32; what lies behind the last is not written.
    """
    found = rows_of.new_empty(-(-len(rows_of) // block_m) + 1)
    launch(
        used_tiles_kernel,
        1,
        rows_of,
        found,
        len(rows_of),
        groups,
        ROWS=block_m,
        BLOCK=4096,
        num_warps=16,
    )
    return found


def grouped_swapped(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    counts: Tensor | None,
    out: Tensor,
    tuning: SwappedTuning,
    each: bool = False,
) -> None:
    """Multiplies the first `counts[g]` tokens of each group with the group's weights.

    Args:
        x: Tokens, shape [groups, max_m, K], e4m3, contiguous.
        x_scale: Shape [groups, max_m, K / 128], fp32, any strides; or [groups, max_m, K / 32], e8m0 as uint8, with such
            scales of the weights.
        weight: Shape [groups, N, K], e4m3, contiguous.
        w_scale: Shape [groups, N / 128, K / 128], fp32, or [groups, N / 32, K / 32], e8m0 as uint8; last stride 1.
        counts: Shape [groups], int32, or None for `max_m` everywhere.
        out: Shape [groups, max_m, N], bf16 or fp32, last stride 1.
        tuning: Sizes of the tiles.
        each: `counts` is instead the group of each row, shape [max_m], -1 for none, one group a tile and no rows behind
            others of -1 in a tile; `x`, its scales and `out` then have one group.
    """
    groups, max_m, k = x.shape
    n = weight.shape[1]
    tiles_of = (
        used_tiles(counts, weight.shape[0], tuning.block_m) if each and counts is not None else out
    )
    small = w_scale.dtype == torch.uint8
    if small:
        x_scale, w_scale = x_scale.view(torch.int32), w_scale.view(torch.int32)
    rows = 64 * tuning.parts // tuning.split
    w_desc = matrix(weight.view(-1, k), rows, 128)
    x_desc = matrix(x.view(groups * max_m, k), tuning.block_m, 128)
    tiles = groups * -(-max_m // tuning.block_m) * -(-n // rows)
    grid = min(tiles, num_sms(x.device.index) * tuning.per_sm)
    options, registers = register_shares(tuning)
    launch(
        grouped_swapped_kernel,
        grid,
        w_desc,
        x_desc,
        out,
        w_scale,
        x_scale,
        counts if counts is not None else out,
        tiles_of,
        groups,
        n,
        max_m,
        -(-k // 128),
        out.stride(0),
        out.stride(1),
        w_scale.stride(0),
        w_scale.stride(1),
        x_scale.stride(0),
        x_scale.stride(1),
        x_scale.stride(2),
        COUNTED=0 if counts is None else 2 if each else 1,
        GROUP=32 if small else 128,
        PARTS=tuning.parts,
        BLOCK_M=tuning.block_m,
        SPLIT=tuning.split,
        DEPTH=tuning.depth,
        REGISTERS=registers,
        AHEAD=tuning.ahead == 1,
        num_warps=4,
        **options,
    )


def gemm_tall(
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    w_scale: Tensor | None,
    layout: Tensor | None,
    out: Tensor,
    tuning: TallTuning,
    part_k: int | None = None,
) -> None:
    """Multiplies tokens with weights, or each tile of tokens with the weights of its group.

    Args:
        x: Tokens, shape [M, K], e4m3 or bf16, last stride 1.
        x_scale: Shape [M, K / 128], fp32, any strides, or [M, K / 32], e8m0 as uint8; None for bf16.
        weight: Shape [groups, N, K], as `x`, contiguous; one group without a layout.
        w_scale: Shape [groups, N / 128, K / 128], fp32, or [groups, N / 32, K / 32], e8m0 as uint8, last stride 1; None
            for bf16.
        layout: Group of each row, shape [M], int32, -1 for rows that are left alone; one group a tile.
        out: Shape [M, N], bf16 or fp32, last stride 1.
        tuning: Sizes of the tiles.
        part_k: For bf16: so many channels are added up apart, a multiple of 64, and their sums from the first to the last.
    """
    m, k = x.shape
    groups, n, _ = weight.shape
    scaled = x_scale is not None
    small = x_scale is not None and w_scale is not None and x_scale.dtype == torch.uint8
    spread = small and tuning.spread == 1
    powers = None
    if x_scale is not None and w_scale is not None and spread:
        powers = spread_powers(x_scale, w_scale, n)
    elif x_scale is not None and w_scale is not None and small:
        x_scale, w_scale = x_scale.view(torch.int32), w_scale.view(torch.int32)
    block_k = 128 if scaled else 64
    block_m = 64 * tuning.parts
    steps = -(-k // block_k)
    x_desc = matrix(x, 64, block_k)
    w_desc = matrix(weight.view(groups * n, k), tuning.block_n, block_k)
    tiles = -(-m // block_m) * -(-n // tuning.block_n)
    scale = x_scale if x_scale is not None else out
    factor = w_scale if w_scale is not None else out[None]
    grid = min(tiles, num_sms(x.device.index))
    cut = part_k is not None and part_k < k
    rooms = tuning.rooms if can_send(out) else 0
    sums = out
    if cut:
        sums = x.new_empty(grid * block_m * tuning.block_n, dtype=torch.float32)
    launch(
        gemm_tall_kernel,
        grid,
        x_desc,
        w_desc,
        out,
        scale if powers is None else listed(powers[0], 256),
        factor if powers is None else listed(powers[1], 32),
        layout if layout is not None else out,
        sums,
        m,
        n,
        steps,
        groups,
        part_k // block_k if cut and part_k is not None else steps,
        out.stride(0),
        scale.stride(0),
        scale.stride(1),
        factor.stride(0) if powers is None else -(-n // 128) * 16,
        factor.stride(1) if powers is None else powers[1].stride(0),
        matrix(out, 64, 64) if rooms else out,
        SCALED=scaled,
        GROUPED=layout is not None,
        PARTS=tuning.parts,
        BLOCK_N=tuning.block_n,
        BAND=tuning.band,
        SPLIT=tuning.split,
        GROUP=32 if small else 128,
        CUT=cut,
        DEPTH=tuning.depth,
        SPREAD=spread,
        ROOMS=rooms,
        num_warps=4,
    )
