"""Rate of the FP8 tensor core instruction of Hopper, its left operand in registers or in shared memory."""

from __future__ import annotations

import torch
from harness import Built, Case
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deepinfer.kernels.triton.gluon_names import block_barrier

STEPS = 2000


@gluon.jit
def rate_kernel(out, steps, REGISTERS: gl.constexpr, N: gl.constexpr, APART: gl.constexpr, tile: gl.constexpr):  # fmt: skip
    """Multiplies the same two tiles again and again; APART: into four sums in turn."""
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 4)
    rows: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    b = gl.allocate_shared_memory(gl.float8e4nv, [N, 128], tile)
    a = gl.allocate_shared_memory(gl.float8e4nv, [64, 128], tile)
    b.store(gl.full((N, 128), 1.0, gl.float32, rows).to(gl.float8e4nv))
    a.store(gl.full((64, 128), 1.0, gl.float32, rows).to(gl.float8e4nv))
    fence_async_shared()
    block_barrier()
    zero = gl.zeros((64, N), gl.float32, acc_layout)
    s0 = zero
    s1 = zero
    r = a.slice(0, 32, dim=1).load(a_layout)
    for _ in range(steps):
        if REGISTERS:
            for i in gl.static_range(4):
                c = b.slice(32 * i, 32, dim=1).permute((1, 0))
                if APART and i % 2 == 1:
                    s1 = warpgroup_mma(r, c, s1, is_async=True)
                else:
                    s0 = warpgroup_mma(r, c, s0, is_async=True)
        else:
            s0 = warpgroup_mma(a, b.permute((1, 0)), s0, is_async=True)
        s0, s1 = warpgroup_mma_wait(0, [s0, s1])
    at = gl.arange(0, 64, layout=gl.SliceLayout(1, acc_layout))
    gl.store(out + gl.program_id(0) * 64 + at, gl.sum(s0 + s1, 1))


def cases() -> list[Case]:
    """One to four warpgroups a multiprocessor."""
    found = []
    tile = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8)
    for groups in (1, 2, 4):
        for n in (16, 64, 128):
            for variant in ("registers", "registers apart", "shared"):

                def build(
                    small: bool, groups: int = groups, n: int = n, variant: str = variant
                ) -> Built:
                    programs = 132 * groups
                    out = torch.empty(programs * 64, device="cuda")
                    given = (out, STEPS, variant != "shared", n, variant == "registers apart", tile)

                    def run() -> None:
                        rate_kernel[(programs,)](*given, num_warps=4)

                    return Built(run, dict, 2 * programs * STEPS * 64 * n * 128, 1.0, "fp8")

                found.append(Case("m64k32 FP8", f"n {n}, {groups} warpgroups", variant, build))
    return found
