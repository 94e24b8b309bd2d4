"""The last rounds of a row in one program: tokens are judged and drawn again until one is kept."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.sampling_draw import kept_values, scale_of
from deepinfer.kernels.triton.sampling_judge import verdict
from deepinfer.kernels.triton.sampling_keys import key_of
from deepinfer.kernels.triton.sampling_rows import noise_of, temperature_of, top_p_of
from deepinfer.kernels.triton.sampling_whole import best_before, exact_mass

__all__ = ["settle_kernel"]


@triton.jit
def _weight_before(
    x, vocab, end, end_id, highest, factor, RANK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The fp32 mass of the tokens up to an end; with RANK their number."""
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(x + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        values = kept_values(values, at, end, end_id, True)
        if RANK:
            mass += tl.where(values > float("-inf"), 1.0, 0.0)
        else:
            mass += tl.exp2((values - highest) * factor)
    return tl.sum(mass, 0)


@triton.jit(do_not_specialize=["stream"])
def settle_kernel(
    logits,
    temperatures,
    shares,
    seeds,
    positions,
    cuts,
    cut_ids,
    ends,
    end_ids,
    waiting,
    facts,
    out,
    vocab,
    stride,
    stream,
    WARM: tl.constexpr,
    RANK: tl.constexpr,
    CUT: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Finishes one row, if it is open."""
    row = tl.program_id(0).to(tl.int64)
    end_id = tl.load(end_ids + row)
    if end_id >= -1:
        x = logits + row * stride
        temperature = temperature_of(temperatures, row, WARM)
        top_p = top_p_of(shares, row, RANK == 0)
        end = tl.load(ends + row)
        token = tl.load(waiting + row)
        highest = tl.load(facts + row * 4)
        limit = tl.load(facts + row * 4 + 1)
        slack = tl.load(facts + row * 4 + 2)
        factor = scale_of(temperature)
        seed, position = noise_of(seeds, positions, row)
        # Exact integers, made once when fp32 sums leave a token open.
        target = tl.full((), -1, tl.int64)
        none = tl.zeros((), tl.uint32)
        is_open = True
        # Each round has fewer tokens than the one before, half of them on average: the limit is never met.
        rounds = 0
        while is_open & (rounds < 4096):
            rounds += 1
            if token < 0:
                token = best_before(
                    x, vocab, end, end_id, highest, temperature, seed, position, stream, FAST, BLOCK
                )
                token = tl.minimum(token, vocab - 1)
                end = tl.load(x + token).to(tl.float32)
                end_id = token - 1
            weight = _weight_before(x, vocab, end, end_id, highest, factor, RANK, BLOCK)
            is_in, is_out = verdict(weight, limit, slack)
            if (is_in | is_out) == 0:
                if target < 0:
                    all_key = none
                    all_id = 2147483647
                    if CUT:
                        all_key = key_of(tl.load(cuts + row))
                        all_id = tl.load(cut_ids + row)
                    exact = exact_mass(x, vocab, all_key, all_id, highest, temperature, none, 2048)
                    target = tl.maximum(tl.ceil(exact.to(tl.float64) * top_p).to(tl.int64), 1)
                above = exact_mass(x, vocab, key_of(end), end_id, highest, temperature, none, 2048)
                is_in = above < target
            is_open = is_in == 0
            if is_open:
                # The next one is drawn from the tokens before this one.
                token = token * 0 - 1
        tl.store(out + row, token.to(out.dtype.element_ty))
