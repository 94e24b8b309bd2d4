"""Output of 64 heads from registers to memory on Hopper, with the inverse rotation of the last channels."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["store_half"]


@gluon.jit
def _rotate(x, phases, pairs):
    """Inverse rotation of pairs of channels, the first ones that there are angles for: [64, 64]."""
    even, odd = gl.split(x.reshape([64, 32, 2]))
    at = gl.arange(0, 32, layout=gl.SliceLayout(0, even.type.layout))
    c = gl.load(phases + 2 * at, mask=at < pairs, other=1.0)[None, :]
    s = gl.load(phases + 2 * at + 1, mask=at < pairs, other=0.0)[None, :]
    y = gl.join(even * c + odd * s, odd * c - even * s)
    return gl.convert_layout(y.reshape([64, 64]), x.type.layout, assert_trivial=True)


@gluon.jit
def _store(x, to, head, heads, stride_h):
    """Writes 64 channels of 64 heads."""
    if to.dtype.element_ty == gl.float32:
        layout: gl.constexpr = x.type.layout
        y = x
    else:
        # Lanes trade with lanes of their warp, so that each has eight channels side by side.
        layout: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]],
            [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
            [[16, 0], [32, 0]],
            [],
            [64, 64],
        )
        y = gl.convert_layout(x.to(to.dtype.element_ty), layout)
    h = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    gl.store(to + (h * stride_h)[:, None] + d[None, :], y, mask=(head + h < heads)[:, None])


@gluon.jit
def _quarters(x):
    """[64, 256] to four of [64, 64]."""
    a, b = gl.split(x.reshape([64, 2, 128]).permute((0, 2, 1)))
    a0, a1 = gl.split(a.reshape([64, 2, 64]).permute((0, 2, 1)))
    b0, b1 = gl.split(b.reshape([64, 2, 64]).permute((0, 2, 1)))
    return a0, a1, b0, b1


@gluon.jit
def store_half(
    acc, to, phases, phase_index, entries, row, head, heads, stride_h, ROTATE: gl.constexpr, INDEXED: gl.constexpr
):  # fmt: skip
    """Writes 256 channels of 64 heads, the last 64 rotated back unless `phases` does not have the row's entry."""
    x0, x1, x2, x3 = _quarters(acc)
    if ROTATE:
        entry = row
        if INDEXED:
            entry = gl.load(phase_index + row)
        pairs = gl.where((entry >= 0) & (entry < entries), 32, 0)
        x3 = _rotate(x3, phases + entry.to(gl.int64) * 64, pairs)
    _store(x0, to, head, heads, stride_h)
    _store(x1, to + 64, head, heads, stride_h)
    _store(x2, to + 128, head, heads, stride_h)
    _store(x3, to + 192, head, heads, stride_h)
