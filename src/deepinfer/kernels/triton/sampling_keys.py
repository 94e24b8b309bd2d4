"""Device functions that find cuts: keys in the order of the logits, masses as integers, searches bit by bit."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "count_search",
    "first_bit",
    "id_search",
    "key_of",
    "larger",
    "least_kept_key",
    "mass_of",
    "mass_search",
    "value_of",
]


@triton.jit
def larger(a, b):
    """The larger of two; NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def key_of(x):
    """Unsigned integers in the order of fp32 values; both zeros are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def value_of(key):
    """The fp32 value of a key."""
    bits = (key ^ 0x80000000).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def mass_of(x, highest, temperature):
    """`exp((x - highest) / temperature)` in units of 2^-42, int64; `temperature` is fp64."""
    relative = (x.to(tl.float64) - highest.to(tl.float64)) / temperature
    scaled = tl.exp(relative) * 4398046511104.0
    # To the nearest integer, ties to even: the sum has no room for a fraction.
    return ((scaled + 6755399441055744.0) - 6755399441055744.0).to(tl.int64)


@triton.jit
def first_bit(low, high):
    """The highest bit in which two keys differ, 0 if none; and what they have in common above it."""
    bits = low ^ high
    bits |= bits >> 1
    bits |= bits >> 2
    bits |= bits >> 4
    bits |= bits >> 8
    bits |= bits >> 16
    return bits - (bits >> 1), high & (bits ^ 0xFFFFFFFF)


@triton.jit
def count_search(keys, used, k, low, high, STEPS: tl.constexpr):
    """The k-th largest of the used keys, which lie in [low, high]; at most that with STEPS below 32.

    With fewer than k used keys, a key that is not above the lowest.
    """
    bit, found = first_bit(low, high)
    step = 0
    while (bit > 0) & (step < STEPS):
        trial = found | bit
        count = tl.sum((used & (keys >= trial)).to(tl.int32), 0)
        found = tl.where(count >= k, trial, found)
        bit = bit >> 1
        step += 1
    return found


@triton.jit
def mass_search(keys, mass, target, low, high, FEW: tl.constexpr):
    """The largest key such that the masses of it and all larger ones reach the target; keys lie in [low, high].

    FEW says that there are at most 256, whose halves of 21 bits can be summed as int32.
    """
    bit, found = first_bit(low, high)
    lower = (mass & 0x1FFFFF).to(tl.int32)
    upper = (mass >> 21).to(tl.int32)
    while bit > 0:
        trial = found | bit
        inside = keys >= trial
        if FEW:
            total = tl.sum(tl.where(inside, upper, 0), 0).to(tl.int64) << 21
            total += tl.sum(tl.where(inside, lower, 0), 0)
        else:
            total = tl.sum(tl.where(inside, mass, 0), 0)
        found = tl.where(total >= target, trial, found)
        bit = bit >> 1
    return found


@triton.jit
def id_search(ids, used, k, vocab):
    """The k-th smallest of the used ids, which are below `vocab`, at most 2^30."""
    found = tl.zeros((), tl.int32)
    bit, _ = first_bit(tl.zeros((), tl.uint32), tl.zeros((), tl.uint32) + vocab)
    bit = bit.to(tl.int32)
    while bit > 0:
        trial = found | bit
        # How many are below the trial decides whether the answer is.
        count = tl.sum((used & (ids < trial)).to(tl.int32), 0)
        found = tl.where(count < k, trial, found)
        bit = bit >> 1
    return found


@triton.jit
def least_kept_key(highest, temperature, min_p):
    """The smallest key whose value has at least the share `min_p` of the highest probability, fp64 like `temperature`."""
    lowest = tl.log(min_p)
    near = key_of((highest.to(tl.float64) + lowest * temperature).to(tl.float32)).to(tl.int64)
    keys = tl.maximum(near - 8 + tl.arange(0, 16), 0).to(tl.uint32)
    relative = (value_of(keys).to(tl.float64) - highest.to(tl.float64)) / temperature
    top = key_of(highest)
    found = tl.min(tl.where((relative >= lowest) & (keys <= top), keys, top), 0)
    return tl.where(min_p > 0, found, tl.zeros((), tl.uint32))
