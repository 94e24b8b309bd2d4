"""Projection of four bf16 streams on Hopper: one warp copies ahead, two warpgroups read each value once.

A program keeps the coefficients of its channels in shared memory and passes over tokens, so that the L2 cache hands out
little more than the streams.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deepinfer.kernels.triton.gluon_names import load_tile

__all__ = ["mhc_project_bulk_kernel"]


@gluon.jit
def _copies_of_tile(
    descs, rings, bars, token, start, x_stream, slot, phase, CHANNELS: gl.constexpr,
    BLOCKS: gl.constexpr, DEPTH: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Fills the ring with the streams of 128 tokens, 64 channels of each; the FIRST time with coefficients too."""
    x_desc, high_desc, low_desc = descs
    x_ring, w_tiles = rings
    full, empty = bars
    for step in range(4 * BLOCKS):
        c = start + step // 4 * 64
        stream = step % 4
        mbarrier.wait(empty.index(slot), phase)
        bar = full.index(slot)
        mbarrier.expect(bar, 24576 if FIRST else 16384)
        x = stream * x_stream + c
        load_tile(x_desc, [token, x], bar, x_ring.index(2 * slot))
        load_tile(x_desc, [token + 64, x], bar, x_ring.index(2 * slot + 1))
        if FIRST:
            w = w_tiles.index(step)
            load_tile(high_desc, [0, stream * CHANNELS + c], bar, w.slice(0, 32))
            load_tile(low_desc, [0, stream * CHANNELS + c], bar, w.slice(32, 32))
        slot += 1
        if slot == DEPTH:
            slot = 0
            phase ^= 1
    return slot, phase


@gluon.jit
def _copies(
    descs, rings, bars, tokens, parts, x_stream, CHANNELS: gl.constexpr, BLOCKS: gl.constexpr,
    DEPTH: gl.constexpr,
):  # fmt: skip
    """Copies for all tiles of a program."""
    start = gl.program_id(0) % parts * (64 * BLOCKS)
    tile = gl.program_id(0) // parts
    step = gl.num_programs(0) // parts
    slot, phase = _copies_of_tile(
        descs, rings, bars, tile * 128, start, x_stream, gl.to_tensor(0), gl.to_tensor(1), CHANNELS, BLOCKS, DEPTH, True
    )  # fmt: skip
    for more in range(tile + step, gl.cdiv(tokens, 128), step):
        slot, phase = _copies_of_tile(
            descs, rings, bars, more * 128, start, x_stream, slot, phase, CHANNELS, BLOCKS, DEPTH, False
        )  # fmt: skip


@gluon.jit
def _step(m, squares, entering, weight, never_at, x, w, layout: gl.constexpr):
    """A tile of 64 tokens and 64 channels of a stream; when it returns, nothing reads the tile any more."""
    m = warpgroup_mma(x, w.permute((1, 0)), m, is_async=True)
    v = x.load(layout).to(gl.float32)
    squares += gl.sum(gl.reshape(v * v, [64, 8, 8]), axis=2)
    # The registers must have been filled before the slot is given back. A store that waits for them says so: it is never
    # made, as arithmetic gives no NaN with these digits.
    faulty = squares.to(gl.int32, bitcast=True) == 0x7F812345
    at = gl.convert_layout(never_at, gl.SliceLayout(1, squares.type.layout))[:, None]
    gl.store(at + gl.zeros_like(squares).to(gl.int32), squares, mask=faulty)
    entering += weight[:, None] * v
    return warpgroup_mma_wait(0, [m]), squares, entering


@gluon.jit
def _weights(pre, tile, tokens, PART: gl.constexpr, layout: gl.constexpr):
    """The weights of the four streams for the 64 tokens of a tile; zeros behind the last one."""
    row = tile * 128 + 64 * PART + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    at = pre + row.to(gl.int64) * 4
    there = row < tokens
    a = gl.load(at, mask=there, other=0.0)
    b = gl.load(at + 1, mask=there, other=0.0)
    c = gl.load(at + 2, mask=there, other=0.0)
    return a, b, c, gl.load(at + 3, mask=there, other=0.0)


@gluon.jit
def _products(
    given, rings, bars, tokens, parts, CHANNELS: gl.constexpr, BLOCKS: gl.constexpr,
    DEPTH: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Projections, squares and entering sums of 64 tokens of each tile."""
    pre, sums, collapsed = given
    x_ring, w_tiles = rings
    full, empty = bars
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    c = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    part = gl.program_id(0) % parts
    slot = 0
    phase = 0
    stride = gl.num_programs(0) // parts
    following = _weights(pre, gl.program_id(0) // parts, tokens, PART, layout)
    for tile in range(gl.program_id(0) // parts, gl.cdiv(tokens, 128), stride):
        weights = following
        following = _weights(pre, tile + stride, tokens, PART, layout)
        first = tile * 128 + 64 * PART
        row = first + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        there = (row < tokens)[:, None]
        row = row.to(gl.int64)
        to = collapsed + row[:, None] * CHANNELS + (part * (64 * BLOCKS) + c)[None, :]
        never_at = sums + (row * parts + part) * 32
        none = gl.zeros([64, 64], gl.float32, layout)
        total = gl.sum(gl.reshape(gl.zeros([64, 64], gl.float32, sums_layout), [64, 2, 32]), axis=1)
        square = gl.sum(none, axis=1)
        for block in range(BLOCKS):
            m = gl.zeros([64, 64], gl.float32, sums_layout)
            squares = gl.sum(gl.reshape(none, [64, 8, 8]), axis=2)
            entering = none
            for i in gl.static_range(4):
                mbarrier.wait(full.index(slot), phase)
                m, squares, entering = _step(
                    m, squares, entering, weights[i], never_at, x_ring.index(2 * slot + PART),
                    w_tiles.index(4 * block + i), layout,
                )  # fmt: skip
                mbarrier.arrive(empty.index(slot), count=1)
                slot += 1
                if slot == DEPTH:
                    slot = 0
                    phase ^= 1
            gl.store(to + block * 64, entering.to(gl.bfloat16), mask=there)
            # The blocks of a part are added as `mhc_coefficients_kernel` adds those of programs.
            square += gl.convert_layout(gl.sum(squares, axis=1), gl.SliceLayout(1, layout))
            total += gl.sum(gl.reshape(m, [64, 2, 32]), axis=1)
        token = first + gl.arange(0, 64, layout=gl.SliceLayout(1, total.type.layout))
        n = gl.arange(0, 32, layout=gl.SliceLayout(0, total.type.layout))
        square = gl.convert_layout(square, gl.SliceLayout(1, total.type.layout))
        total = gl.where((n == 24)[None, :], square[:, None], total)
        at = sums + ((token.to(gl.int64) * parts + part) * 32)[:, None] + n[None, :]
        gl.store(at, total, mask=(token < tokens)[:, None])


@gluon.jit(do_not_specialize=["tokens", "parts"])
def mhc_project_bulk_kernel(
    x_desc, high_desc, low_desc, pre, sums, collapsed, tokens, parts, x_stream,
    CHANNELS: gl.constexpr, BLOCKS: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """As `mhc_project_kernel`, for parts of 64 * BLOCKS channels, with coefficients as two bf16 numbers.

    A program has one part, and every num_programs / parts-th tile of 128 tokens.

    Args:
        x_desc: Streams of 64 tokens, 64 channels of them.
        high_desc: Coefficients as bf16, 64 channels of them.
        low_desc: What bf16 leaves of them.
        pre: Weights of the streams, shape [tokens, 4].
        sums: Shape [tokens, parts, 32]: 24 projections, the squares, zeros.
        collapsed: Weighted sums of the streams.
        tokens: Tokens.
        parts: Parts of the channels.
        x_stream: Distance of streams.
        CHANNELS: Channels of a stream.
        BLOCKS: How often 64 channels are a part.
        DEPTH: Slots of the ring.
    """
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [2 * DEPTH, 64, 64], x_desc.layout)
    w_tiles = gl.allocate_shared_memory(high_desc.dtype, [4 * BLOCKS, 64, 64], high_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(DEPTH):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    descs = (x_desc, high_desc, low_desc)
    rings = (x_ring, w_tiles)
    bars = (full, empty)
    given = (pre, sums, collapsed)
    gl.warp_specialize(
        [
            (_products, (given, rings, bars, tokens, parts, CHANNELS, BLOCKS, DEPTH, 0)),
            (_products, (given, rings, bars, tokens, parts, CHANNELS, BLOCKS, DEPTH, 1)),
            (_copies, (descs, rings, bars, tokens, parts, x_stream, CHANNELS, BLOCKS, DEPTH)),
        ],
        [4, 1],
        [240, 24],
    )
