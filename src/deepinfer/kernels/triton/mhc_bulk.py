"""Projection of four bf16 streams on Hopper: one warp copies ahead, two warpgroups read each value once."""

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
def _copies(
    descs, rings, bars, tokens, parts, x_stream, CHANNELS: gl.constexpr, BLOCKS: gl.constexpr,
    DEPTH: gl.constexpr,
):  # fmt: skip
    """Fills the ring: 64 channels of a stream of 128 tokens, and their coefficients."""
    x_desc, high_desc, low_desc = descs
    x_ring, high_ring, low_ring = rings
    full, empty = bars
    slot = 0
    phase = 1
    for item in range(gl.program_id(0), gl.cdiv(tokens, 128) * parts, gl.num_programs(0)):
        token = item // parts * 128
        start = item % parts * (64 * BLOCKS)
        for step in range(4 * BLOCKS):
            c = start + step // 4 * 64
            stream = step % 4
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            mbarrier.expect(bar, 24576)
            x = stream * x_stream + c
            load_tile(x_desc, [token, x], bar, x_ring.index(2 * slot))
            load_tile(x_desc, [token + 64, x], bar, x_ring.index(2 * slot + 1))
            load_tile(high_desc, [0, stream * CHANNELS + c], bar, high_ring.index(slot))
            load_tile(low_desc, [0, stream * CHANNELS + c], bar, low_ring.index(slot))
            slot += 1
            if slot == DEPTH:
                slot = 0
                phase ^= 1


@gluon.jit
def _products(
    given, rings, bars, tokens, parts, CHANNELS: gl.constexpr, BLOCKS: gl.constexpr,
    DEPTH: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Projections, squares and entering sums of 64 tokens of each item."""
    pre, sums, collapsed = given
    x_ring, high_ring, low_ring = rings
    full, empty = bars
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    c = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    n = gl.arange(0, 32, layout=gl.SliceLayout(0, sums_layout))
    slot = 0
    phase = 0
    for item in range(gl.program_id(0), gl.cdiv(tokens, 128) * parts, gl.num_programs(0)):
        part = item % parts
        first = item // parts * 128 + 64 * PART
        row = first + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        there = row < tokens
        row = row.to(gl.int64)
        weight = pre + row * 4
        weights = (
            gl.load(weight, mask=there, other=0.0),
            gl.load(weight + 1, mask=there, other=0.0),
            gl.load(weight + 2, mask=there, other=0.0),
            gl.load(weight + 3, mask=there, other=0.0),
        )
        to = collapsed + row[:, None] * CHANNELS + (part * (64 * BLOCKS) + c)[None, :]
        m = gl.zeros([64, 32], gl.float32, sums_layout)
        squares = gl.zeros([64, 64], gl.float32, layout)
        for block in range(BLOCKS):
            entering = gl.zeros([64, 64], gl.float32, layout)
            for i in gl.static_range(4):
                mbarrier.wait(full.index(slot), phase)
                x = x_ring.index(2 * slot + PART)
                m = warpgroup_mma(x, high_ring.index(slot).permute((1, 0)), m, is_async=True)
                m = warpgroup_mma(x, low_ring.index(slot).permute((1, 0)), m, is_async=True)
                v = x.load(layout).to(gl.float32)
                squares += v * v
                entering += weights[i][:, None] * v
                m = warpgroup_mma_wait(0, [m])
                mbarrier.arrive(empty.index(slot), count=1)
                slot += 1
                if slot == DEPTH:
                    slot = 0
                    phase ^= 1
            gl.store(to + block * 64, entering.to(gl.bfloat16), mask=there[:, None])
        at = sums + (row * parts + part) * 32
        gl.store(at + 24, gl.sum(squares, axis=1), mask=there)
        token = first + gl.arange(0, 64, layout=gl.SliceLayout(1, sums_layout))
        at = sums + ((token.to(gl.int64) * parts + part) * 32)[:, None] + n[None, :]
        gl.store(at, m, mask=(token < tokens)[:, None] & (n < 24)[None, :])


@gluon.jit(do_not_specialize=["tokens", "parts"])
def mhc_project_bulk_kernel(
    x_desc, high_desc, low_desc, pre, sums, collapsed, tokens, parts, x_stream,
    CHANNELS: gl.constexpr, BLOCKS: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """As `mhc_project_kernel`, for pieces of 64 * BLOCKS channels, with coefficients as two bf16 numbers.

    A row of `sums` has 24 projections, the squares, and room for seven numbers more.
    """
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [2 * DEPTH, 64, 64], x_desc.layout)
    high_ring = gl.allocate_shared_memory(high_desc.dtype, [DEPTH, 32, 64], high_desc.layout)
    low_ring = gl.allocate_shared_memory(low_desc.dtype, [DEPTH, 32, 64], low_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(DEPTH):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    descs = (x_desc, high_desc, low_desc)
    rings = (x_ring, high_ring, low_ring)
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
