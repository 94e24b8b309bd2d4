"""Places of a ring in shared memory, which one warp fills and others read."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["advance"]


@gluon.jit
def advance(slot, phase, DEPTH: gl.constexpr):
    """The next place of a ring of DEPTH, and the phase of its barriers, which turns with every round."""
    slot += 1
    if slot == DEPTH:
        slot = 0
        phase ^= 1
    return slot, phase
