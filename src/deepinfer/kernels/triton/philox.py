"""Device functions of the noise of tokens: Philox4x32-10 words, and Gumbel noise exact and fast."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

__all__ = [
    "chosen_word",
    "exact_gumbel",
    "exact_uniform",
    "fast_log2_exponential",
    "log2_of",
    "token_words",
]


@triton.jit
def token_words(seed, position, block, stream):
    """The four words of each block of four tokens, uint32.

    `seed` and `position` are numbers, int64; `block` is the token id >> 2, a number or a tensor.
    """
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c0 = (position & 0xFFFFFFFF).to(tl.uint32)
    c2 = tl.zeros((), tl.uint32) + stream.to(tl.uint32)
    c3 = tl.zeros((), tl.uint32)
    # The first round by hand: three of its words are the same for all tokens.
    p0 = c0.to(tl.uint64) * 0xD2511F53
    p1 = c2.to(tl.uint64) * 0xCD9E8D57
    a0 = (p1 >> 32).to(tl.uint32) ^ k0
    c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
    c3 = p0.to(tl.uint32)
    c1 = p1.to(tl.uint32)
    w0 = block.to(tl.uint32) ^ a0
    # The second: of its products one is the same for all.
    k0 += 0x9E3779B9
    k1 += 0xBB67AE85
    q0 = w0.to(tl.uint64) * 0xD2511F53
    q1 = c2.to(tl.uint64) * 0xCD9E8D57
    s0 = (q1 >> 32).to(tl.uint32) ^ c1 ^ k0
    w2 = (q0 >> 32).to(tl.uint32) ^ c3 ^ k1
    w3 = q0.to(tl.uint32)
    s1 = q1.to(tl.uint32)
    # The third: the first word is still the same for all.
    k0 += 0x9E3779B9
    k1 += 0xBB67AE85
    r0 = s0.to(tl.uint64) * 0xD2511F53
    r1 = w2.to(tl.uint64) * 0xCD9E8D57
    w0 = (r1 >> 32).to(tl.uint32) ^ s1 ^ k0
    w2 = w3 ^ (r0 >> 32).to(tl.uint32) ^ k1
    w1 = r1.to(tl.uint32)
    w3 = r0.to(tl.uint32)
    for _ in tl.static_range(7):
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
        t0 = w0.to(tl.uint64) * 0xD2511F53
        t1 = w2.to(tl.uint64) * 0xCD9E8D57
        w0 = (t1 >> 32).to(tl.uint32) ^ w1 ^ k0
        w2 = (t0 >> 32).to(tl.uint32) ^ w3 ^ k1
        w1 = t1.to(tl.uint32)
        w3 = t0.to(tl.uint32)
    return w0, w1, w2, w3


@triton.jit
def chosen_word(seed, position, token, stream):
    """The word of each token, uint32."""
    w0, w1, w2, w3 = token_words(seed, position, token >> 2, stream)
    which = token & 3
    return tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))


@triton.jit
def exact_uniform(seed, position, token, stream):
    """`(word + 0.5) / 2**32` of each token, fp64."""
    return (
        chosen_word(seed, position, token, stream).to(tl.float64) + 0.5
    ) * 2.3283064365386963e-10


@triton.jit
def exact_gumbel(seed, position, token, stream):
    """Gumbel noise of each token, fp64."""
    return -tl.log(-tl.log(exact_uniform(seed, position, token, stream)))


@triton.jit
def log2_of(x, FAST: tl.constexpr):
    """log2 of normal numbers; with FAST by one instruction of the chip."""
    if FAST:
        return libdevice.fast_log2f(x)
    return tl.log2(x)


@triton.jit
def fast_log2_exponential(word, FAST: tl.constexpr):
    """log2(-log(u)) of words in fp32: minus Gumbel noise over log 2, with an error below 1e-4."""
    signed = word.to(tl.int32, bitcast=True)
    upper = signed < 0
    # The distance to the nearer end, so that the tail keeps its digits.
    near = (signed ^ (signed >> 31)).to(
        tl.float32
    ) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    e = log2_of(tl.where(upper, 1.0 - near, near), FAST) * -0.6931471805599453
    series = near * (1.0 + near * (0.5 + near * 0.3333333333))
    e = tl.where(upper & (near < 0.015625), series, e)
    return log2_of(e, FAST)
