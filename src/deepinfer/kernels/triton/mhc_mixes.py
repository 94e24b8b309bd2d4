"""Coefficients of hyper-connections for four streams: projection, and the part behind it, with tokens side by side."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "mhc_coefficients_kernel",
    "mhc_project_kernel",
    "mhc_split_kernel",
    "sinkhorn_kernel",
]


@triton.jit
def _halves(x, TOKENS: tl.constexpr, WIDTH: tl.constexpr):
    """The even and the odd columns of a tile."""
    return tl.split(tl.reshape(x, [TOKENS, WIDTH // 2, 2]))


@triton.jit
def _columns4(x, TOKENS: tl.constexpr):
    """The four columns of a tile, each as a vector of tokens."""
    even, odd = _halves(x, TOKENS, 4)
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _joined4(a, b, c, d, TOKENS: tl.constexpr):
    """Four vectors as the columns of a tile."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [TOKENS, 4])


@triton.jit
def _inverse(x, FAST: tl.constexpr):
    """1 / x; FAST: by the approximation of the chip, whose last digit may differ."""
    if FAST:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / x


@triton.jit
def _soft_row(a, b, c, d, eps, FAST: tl.constexpr):
    """A row of a softmax, plus eps."""
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - top), tl.exp(b - top), tl.exp(c - top), tl.exp(d - top)
    share = _inverse(a + b + c + d, FAST)
    return a * share + eps, b * share + eps, c * share + eps, d * share + eps


@triton.jit
def _over_sum(a, b, c, d, eps, FAST: tl.constexpr):
    """Four numbers over their sum."""
    share = _inverse(a + b + c + d + eps, FAST)
    return a * share, b * share, c * share, d * share


@triton.jit
def _sinkhorn(k, iterations, eps, TOKENS: tl.constexpr, FAST: tl.constexpr):
    """Doubly stochastic matrices from scores; both as tiles [TOKENS, 16], a matrix row by row."""
    # Letters are rows, digits are columns; a tile of sixteen columns is cut into those of equal digits.
    even, odd = _halves(k, TOKENS, 16)
    zero, two = _halves(even, TOKENS, 8)
    one, three = _halves(odd, TOKENS, 8)
    a0, b0, c0, d0 = _columns4(zero, TOKENS)
    a1, b1, c1, d1 = _columns4(one, TOKENS)
    a2, b2, c2, d2 = _columns4(two, TOKENS)
    a3, b3, c3, d3 = _columns4(three, TOKENS)
    a0, a1, a2, a3 = _soft_row(a0, a1, a2, a3, eps, FAST)
    b0, b1, b2, b3 = _soft_row(b0, b1, b2, b3, eps, FAST)
    c0, c1, c2, c3 = _soft_row(c0, c1, c2, c3, eps, FAST)
    d0, d1, d2, d3 = _soft_row(d0, d1, d2, d3, eps, FAST)
    a0, b0, c0, d0 = _over_sum(a0, b0, c0, d0, eps, FAST)
    a1, b1, c1, d1 = _over_sum(a1, b1, c1, d1, eps, FAST)
    a2, b2, c2, d2 = _over_sum(a2, b2, c2, d2, eps, FAST)
    a3, b3, c3, d3 = _over_sum(a3, b3, c3, d3, eps, FAST)
    for _ in range(iterations - 1):
        a0, a1, a2, a3 = _over_sum(a0, a1, a2, a3, eps, FAST)
        b0, b1, b2, b3 = _over_sum(b0, b1, b2, b3, eps, FAST)
        c0, c1, c2, c3 = _over_sum(c0, c1, c2, c3, eps, FAST)
        d0, d1, d2, d3 = _over_sum(d0, d1, d2, d3, eps, FAST)
        a0, b0, c0, d0 = _over_sum(a0, b0, c0, d0, eps, FAST)
        a1, b1, c1, d1 = _over_sum(a1, b1, c1, d1, eps, FAST)
        a2, b2, c2, d2 = _over_sum(a2, b2, c2, d2, eps, FAST)
        a3, b3, c3, d3 = _over_sum(a3, b3, c3, d3, eps, FAST)
    a = _joined4(a0, a1, a2, a3, TOKENS)
    b = _joined4(b0, b1, b2, b3, TOKENS)
    c = _joined4(c0, c1, c2, c3, TOKENS)
    d = _joined4(d0, d1, d2, d3, TOKENS)
    both = tl.join(tl.join(a, c), tl.join(b, d))  # [TOKENS, 4, 2, 2]: column, then row
    return tl.reshape(tl.permute(tl.reshape(both, [TOKENS, 4, 4]), (0, 2, 1)), [TOKENS, 16])


@triton.jit(do_not_specialize=["tokens"])
def sinkhorn_kernel(
    scores, out, tokens, iterations, eps, TOKENS: tl.constexpr, FAST: tl.constexpr
):  # fmt: skip
    """Doubly stochastic 4x4 matrices of tokens, one token a thread."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    there = (token < tokens)[:, None]
    at = token.to(tl.int64)[:, None] * 16 + tl.arange(0, 16)[None, :]
    k = tl.load(scores + at, mask=there, other=0.0)
    tl.store(out + at, _sinkhorn(k, iterations, eps, TOKENS, FAST), mask=there)


@triton.jit
def mhc_split_kernel(fn, parts, size, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """Writes each coefficient of the projection as the sum of SPLIT short numbers; parts of a kind lie together."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < size
    w = tl.load(fn + at, mask=there, other=0.0)
    for part in tl.static_range(SPLIT):
        value = w.to(parts.dtype.element_ty)
        tl.store(parts + part * size + at, value, mask=there)
        w = w - value.to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def mhc_project_kernel(
    streams, pre, fn, sums, collapsed, tokens, parts, x_token, x_stream, CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Reads a piece of the channels of all streams once: projections, squares, and the sum that enters a sublayer.

    SPLIT: how many numbers `mhc_split_kernel` made of a coefficient; 0 for fp32 products with the projection itself. A
    row of `sums` has 24 projections, the squares, and seven zeros.
    """
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    there = token < tokens
    token = token.to(tl.int64)
    part = tl.program_id(0)
    n = tl.arange(0, 32)
    m = tl.zeros([TOKENS, 32], tl.float32)
    squares = tl.zeros([TOKENS], tl.float32)
    kind = streams.dtype.element_ty
    for block in range(BLOCKS):
        c = (part * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        inside = there[:, None] & (c < CHANNELS)[None, :]
        known = (c < CHANNELS)[:, None] & (n < 24)[None, :]
        entering = tl.zeros([TOKENS, BLOCK], tl.float32)
        for i in tl.static_range(4):
            at = streams + token[:, None] * x_token + i * x_stream + c[None, :]
            s = tl.load(at, mask=inside, other=0.0)
            wide = s.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
            entering += tl.load(pre + token * 4 + i, mask=there, other=0.0)[:, None] * wide
            w = fn + n[None, :] * (4 * CHANNELS) + i * CHANNELS + c[:, None]
            if SPLIT == 0:
                w = tl.load(w, mask=known, other=0.0)
                m = tl.dot(wide, w, m, input_precision="tf32x3")
            for p in tl.static_range(SPLIT):
                m = tl.dot(s, tl.load(w + p * (96 * CHANNELS), mask=known, other=0.0), m)
        tl.store(collapsed + token[:, None] * CHANNELS + c[None, :], entering.to(kind), mask=inside)
    to = sums + (token * parts + part) * 32
    m = tl.where((n == 24)[None, :], squares[:, None], m)
    tl.store(to[:, None] + n[None, :], m, mask=there[:, None])


@triton.jit
def _eight(x, at, TOKENS: tl.constexpr):
    """Eight of the columns of rows of 32."""
    eights = tl.reshape(x, [TOKENS, 4, 8])
    return tl.sum(tl.where((tl.arange(0, 4) == at)[None, :, None], eights, 0.0), axis=1)


@triton.jit(do_not_specialize=["tokens"])
def mhc_coefficients_kernel(
    sums, base, scale, pre, post, mix, tokens, iterations, norm_eps, eps, CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr, PARTS: tl.constexpr, PIECES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Sums of the parts, then the three kinds of coefficients of tokens.

    Args:
        sums: Shape [tokens, PARTS * PIECES, 32]: 24 projections, the squares, zeros.
        base: Bias of the coefficients, shape [24].
        scale: Shape [3].
        pre: Shape [tokens, 4], written.
        post: Shape [tokens, 4], written.
        mix: Shape [tokens, 16], written.
        tokens: Tokens.
        iterations: Of the normalisation.
        norm_eps: Added to the mean square.
        eps: Added in the mixing.
        CHANNELS: Channels of a stream.
        TOKENS: Tokens of a program.
        PARTS: Parts, added one after the other.
        PIECES: Pieces of a part, added one after the other before; 1 where who made them added them.
        FAST: Whether quotients may be the chip's approximations.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    there = (token < tokens)[:, None]
    eight, sixteen = tl.arange(0, 8)[None, :], tl.arange(0, 16)[None, :]
    gate_scale, gate_base = tl.load(scale + eight // 4), tl.load(base + eight)
    score_scale, score_base = tl.load(scale + 2), tl.load(base + 8 + sixteen)
    n = tl.arange(0, 32)[None, :]
    # Tokens behind the last are the last again, and not stored.
    at = sums + tl.minimum(token, tokens - 1).to(tl.int64)[:, None] * (PARTS * PIECES * 32) + n
    total = tl.zeros([TOKENS, 32], tl.float32)
    for part in tl.static_range(PARTS):
        some = tl.zeros([TOKENS, 32], tl.float32)
        for piece in tl.static_range(PIECES):
            some += tl.load(at + (part * PIECES + piece) * 32)
        total += some
    square = tl.sum(tl.where(n == 24, total, 0.0), axis=1, keep_dims=True)
    factor = tl.rsqrt(square / (4 * CHANNELS) + norm_eps)
    gates = _eight(total, 0, TOKENS) * factor * gate_scale + gate_base
    gates = _inverse(1.0 + tl.exp(-gates), FAST)
    token = token.to(tl.int64)[:, None]
    tl.store(pre + token * 4 + eight, gates + eps, mask=there & (eight < 4))
    tl.store(post + token * 4 + eight - 4, 2.0 * gates, mask=there & (eight >= 4))
    scores = tl.join(_eight(total, 1, TOKENS), _eight(total, 2, TOKENS))
    scores = tl.reshape(tl.permute(scores, (0, 2, 1)), [TOKENS, 16])
    scores = scores * factor * score_scale + score_base
    k = _sinkhorn(scores, iterations, eps, TOKENS, FAST)
    tl.store(mix + token * 16 + sixteen, k, mask=there)
