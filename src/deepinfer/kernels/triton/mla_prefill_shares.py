"""Shares of keys in the sparse attention of many query rows on Hopper: exponentials, their base and their sums."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from deepinfer.kernels.triton.gluon_names import block_barrier
from deepinfer.kernels.triton.mla_prefill_ends import origin

__all__ = ["follow", "send", "sum_columns"]


@gluon.jit
def sum_columns(p):
    """Sums over the columns that a thread holds: [64, 64] to [64, 4]."""
    return gl.sum(gl.sum(p.reshape([64, 8, 4, 2]), 3), 1)


@gluon.jit
def follow(acc, sums, base, new):
    """Outputs and sums of a base, for a new one."""
    fade = gl.exp2(base - origin(new))
    sums = sums * gl.convert_layout(fade, gl.SliceLayout(1, sums.type.layout))[:, None]
    acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, sums, new


@gluon.jit
def send(s, mask, scale, highest, base, bases, shares, message, PART: gl.constexpr):
    """Shares of this warpgroup's keys to shared memory; new maximum and base, and the shares."""
    s = s * scale + mask[None, :]
    top = gl.max(s, axis=1)
    highest = gl.maximum(highest, top)
    # The base follows the highest logit only when the shares would get large.
    new = gl.where(top > base + 8.0, top, base)
    bases.index(PART).store(new)
    p = gl.exp2(s - origin(new)[:, None])
    shares.store(p.to(gl.bfloat16))
    fence_async_shared()
    block_barrier()
    mbarrier.arrive(message, count=1)
    return highest, new, p
