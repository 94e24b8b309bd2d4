"""Copies of keys by index into shared memory and nothing else: what the L2 cache gives to a kernel that gathers."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def _gather_kernel(kv, indices, out, rows, WIDTH: gl.constexpr, DEPTH: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
    ring = gl.allocate_shared_memory(gl.bfloat16, [DEPTH, 32, 512], shared)
    d = gl.arange(0, 512, layout=gl.SliceLayout(0, layout))
    r = gl.arange(0, 32, layout=gl.SliceLayout(1, layout))
    slot = 0
    for row in range(gl.program_id(0), rows, gl.num_programs(0)):
        for first in range(0, WIDTH, 32):
            key = gl.load(indices + row * WIDTH + first + r)
            _load(ring.index(slot), kv + (key.to(gl.int64) * 512)[:, None] + d[None, :])
            async_copy.commit_group()
            async_copy.wait_group(DEPTH - 1)
            slot += 1
            if slot == DEPTH:
                slot = 0
        gl.store(out + row, 1.0)
    async_copy.wait_group(0)


def gather(kv: torch.Tensor, indices: torch.Tensor, out: torch.Tensor, depth: int) -> None:
    """Copies every key that is named, `depth` tiles of 32 keys at once on each multiprocessor."""
    rows, width = indices.shape
    _gather_kernel[(132,)](kv, indices, out, rows, WIDTH=width, DEPTH=depth, num_warps=8)
