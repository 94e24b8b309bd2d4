"""Tiles of many tokens on Hopper: 64 rows of tokens and a block of weights, in e4m3 with scales or in bf16."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deepinfer.kernels.triton.gluon_names import write_tile, written_tiles
from deepinfer.kernels.triton.rings import advance

__all__ = [
    "give_back",
    "group_of_tile",
    "known_group",
    "next_operands",
    "operands",
    "parts_tile",
    "place_tile",
    "plain_tile",
    "scaled_tile",
    "send_tile",
    "store_tile",
]


@gluon.jit
def place_tile(tile, M, N, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BAND: gl.constexpr):
    """First row and column of a tile; a band of row tiles is passed by all columns before the next band."""
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    band = tile // (BAND * tiles_n)
    height = gl.minimum(tiles_m - band * BAND, BAND)
    at = tile - band * BAND * tiles_n
    return (band * BAND + at % height) * BLOCK_M, (at // height) * BLOCK_N


@gluon.jit
def known_group(group, num_groups):
    """A group, or -1 where there is none of this number."""
    return gl.where(group < num_groups, group, -1)


@gluon.jit
def group_of_tile(layout, num_groups, tile, M, N, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BAND: gl.constexpr):  # fmt: skip
    """Group of the first row of a tile, -1 for none that there is; of the last tile behind the last."""
    tile = gl.minimum(tile, gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N) - 1)
    m, _ = place_tile(tile, M, N, BLOCK_M, BLOCK_N, BAND)
    return known_group(gl.load(layout + m), num_groups)


@gluon.jit
def store_tile(
    acc, out, groups, m, n, M, N, stride_om, GROUPED: gl.constexpr, BLOCK_N: gl.constexpr
):
    """Writes a tile, but for rows whose group is negative."""
    THREADS: gl.constexpr = BLOCK_N // 8 if BLOCK_N < 256 else 32
    to_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // THREADS, THREADS], [4, 1], [1, 0])
    y = gl.convert_layout(acc.to(out.dtype.element_ty), to_layout)
    _store_rows(y, out, groups, m, n, M, N, stride_om, GROUPED, to_layout)


@gluon.jit
def _store_rows(
    y, out, groups, m, n, M, N, stride_om, GROUPED: gl.constexpr, to_layout: gl.constexpr
):
    """Writes rows, but for those whose group is negative."""
    rows = m + gl.arange(0, 64, layout=gl.SliceLayout(1, to_layout))
    columns = n + gl.arange(0, y.shape[1], layout=gl.SliceLayout(0, to_layout))
    used = rows < M
    if GROUPED:
        used = used & (gl.convert_layout(groups, gl.SliceLayout(1, to_layout)) >= 0)
    to = out + rows.to(gl.int64)[:, None] * stride_om + columns[None, :]
    gl.store(to, y, mask=used[:, None] & (columns < N)[None, :])


@gluon.jit
def send_tile(
    acc, out, out_desc, rooms, whole, groups, m, n, M, N, stride_om, GROUPED: gl.constexpr, PART: gl.constexpr,
    ROOMS: gl.constexpr, TURN: gl.constexpr,
):  # fmt: skip
    """Writes 64 rows and 64 columns by a bulk copy, which goes on while others are multiplied; by threads if not `whole`.

    Results of a tile go through ROOMS rooms of a warpgroup in turn; this is number TURN of them.
    """
    to_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    room = rooms.index(PART * ROOMS + TURN % ROOMS)
    if TURN == 0:
        written_tiles(0)
    elif TURN >= ROOMS:
        written_tiles(ROOMS - 1)
    room.store(acc.to(out_desc.dtype))
    if GROUPED:
        if whole:
            fence_async_shared()
            write_tile(out_desc, [m, n], room)
        else:
            y = room.load(to_layout)
            _store_rows(y, out, groups, m, n, M, N, stride_om, GROUPED, to_layout)
    else:
        fence_async_shared()
        write_tile(out_desc, [m, n], room)


@gluon.jit
def operands(rings, slot, PART: gl.constexpr, PARTS: gl.constexpr):
    """64 tokens and the weights of a step."""
    return rings[0].index(slot * PARTS + PART), rings[1].index(slot)


@gluon.jit
def next_operands(rings, bars, slot, phase, PART: gl.constexpr, PARTS: gl.constexpr):
    """64 tokens and the weights of a step, as soon as they are there."""
    mbarrier.wait(bars[0].index(slot), phase)
    return operands(rings, slot, PART, PARTS)


@gluon.jit
def give_back(bars, slot):
    """Says that this warpgroup has read a place of the ring."""
    mbarrier.arrive(bars[1].index(slot), count=1)


@gluon.jit
def scaled_tile(rings, bars, steps, slot, phase, never, PART: gl.constexpr, PARTS: gl.constexpr, SPLIT: gl.constexpr,
                DEPTH: gl.constexpr, acc_layout: gl.constexpr):  # fmt: skip
    """One tile of e4m3 and 128 columns, its blocks of 128 channels one after the other.

    With SPLIT 2 the even and the odd steps, of which there are as many, are added up apart, and their sums last. `never` is
    false, but the compiler does not know: so a product takes the registers of the one before, and waits for them.
    """
    rows: gl.constexpr = gl.SliceLayout(1, acc_layout)
    acc = gl.zeros((64, 128), gl.float32, acc_layout)
    last = acc
    part = acc
    for _ in range(steps // SPLIT):
        for turn in gl.static_range(SPLIT):
            x, w = next_operands(rings, bars, slot, phase, PART, PARTS)
            part = warpgroup_mma(x, w.permute((1, 0)), part, use_acc=never, is_async=True)
            scale = rings[2].index(slot * PARTS + PART).load(rows)
            scale *= rings[3].index(slot).slice(0, 1).load(rows).broadcast_to([64])
            part = warpgroup_mma_wait(0, [part])
            give_back(bars, slot)
            if turn == 0:
                acc += part * scale[:, None]
            else:
                last += part * scale[:, None]
            if SPLIT == 2 and turn == 0:
                # Nothing is in flight; but no sum may be left for later, while the next product takes its registers.
                acc = warpgroup_mma_wait(0, [acc])
            slot, phase = advance(slot, phase, DEPTH)
    if SPLIT == 2:
        acc += last
    return acc, slot, phase


@gluon.jit
def plain_tile(rings, bars, steps, slot, phase, PART: gl.constexpr, PARTS: gl.constexpr, BLOCK_N: gl.constexpr,
               DEPTH: gl.constexpr, acc_layout: gl.constexpr):  # fmt: skip
    """One tile of bf16."""
    _full, empty = bars
    acc = gl.zeros((64, BLOCK_N), gl.float32, acc_layout)
    for step in range(steps):
        x, w = next_operands(rings, bars, slot, phase, PART, PARTS)
        acc = warpgroup_mma(x, w.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, [acc])
        # The products of the step before are done, so its slot is free.
        mbarrier.arrive(
            empty.index(gl.where(slot == 0, DEPTH - 1, slot - 1)), count=1, pred=step > 0
        )
        slot, phase = advance(slot, phase, DEPTH)
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(empty.index(gl.where(slot == 0, DEPTH - 1, slot - 1)), count=1)
    return acc, slot, phase


@gluon.jit
def parts_tile(own, part_steps, rings, bars, steps, slot, phase, PART: gl.constexpr, PARTS: gl.constexpr,
               BLOCK_N: gl.constexpr, DEPTH: gl.constexpr, acc_layout: gl.constexpr):  # fmt: skip
    """One tile of bf16 whose channels are added up in parts; `own` is room for the sums so far."""
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, acc_layout))
    columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, acc_layout))
    # Every thread reads back what it wrote itself.
    at = own + rows[:, None] * BLOCK_N + columns[None, :]
    acc, slot, phase = plain_tile(
        rings, bars, gl.minimum(part_steps, steps), slot, phase, PART, PARTS, BLOCK_N, DEPTH, acc_layout
    )  # fmt: skip
    first = part_steps
    while first < steps:
        gl.store(at, acc)
        acc, slot, phase = plain_tile(
            rings, bars, gl.minimum(part_steps, steps - first), slot, phase, PART, PARTS, BLOCK_N, DEPTH, acc_layout
        )  # fmt: skip
        acc += gl.load(at)
        first += part_steps
    return acc, slot, phase
