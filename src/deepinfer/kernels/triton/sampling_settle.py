"""The last rounds of a row in one program: tokens are judged and drawn again until one is kept."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.sampling_cut import row_options
from deepinfer.kernels.triton.sampling_draw import kept_values, scale_of
from deepinfer.kernels.triton.sampling_keys import key_of, least_kept_key
from deepinfer.kernels.triton.sampling_rounds import verdict
from deepinfer.kernels.triton.sampling_whole import best_before, cut_whole_row, exact_mass

__all__ = ["settle_kernel"]


@triton.jit
def _before(x, vocab, cut, cut_id, highest, factor, BLOCK: tl.constexpr):
    """Count and fp32 mass of the tokens above a cut."""
    count = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(x + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        values = kept_values(values, at, cut, cut_id, True)
        count += (values > float("-inf")).to(tl.int32)
        mass += tl.exp2((values - highest) * factor)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit(do_not_specialize=["stream"])
def settle_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    cuts,
    cut_ids,
    waiting,
    facts,
    out,
    vocab,
    stride,
    stream,
    WARM: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Finishes one row, if it is open."""
    row = tl.program_id(0).to(tl.int64)
    cut_id = tl.load(cut_ids + row)
    if cut_id >= -1:
        x = logits + row * stride
        temperature, k, top_p, min_p = row_options(
            temperatures, top_ks, top_ps, min_ps, row, vocab, WARM, TOP_K, TOP_P, MIN_P
        )
        cut = tl.load(cuts + row)
        token = tl.load(waiting + row)
        highest = tl.load(facts + row * 4)
        total = tl.load(facts + row * 4 + 1)
        least_total = tl.load(facts + row * 4 + 2)
        factor = scale_of(temperature)
        seed = tl.load(seeds + row).to(tl.int64)
        position = tl.load(positions + row).to(tl.int64)
        # Exact integers, made once when fp32 sums leave a token open.
        target = tl.full((), -1, tl.int64)
        least = tl.zeros((), tl.uint32)
        if MIN_P:
            least = least_kept_key(highest, temperature, min_p)
        is_open = True
        # Each round has fewer tokens than the one before, half of them on average: the limit is never met.
        rounds = 0
        while is_open & (rounds < 4096):
            rounds += 1
            if token < 0:
                token = best_before(
                    x, vocab, cut, cut_id, highest, temperature, seed, position, stream, FAST, BLOCK
                )
                token = tl.minimum(token, vocab - 1)
                cut = tl.load(x + token).to(tl.float32)
                cut_id = token - 1
            count, mass = _before(x, vocab, cut, cut_id, highest, factor, BLOCK)
            own = tl.exp2((cut - highest) * factor)
            is_in, is_out = verdict(count, mass, own, total, least_total, k, vocab, top_p, TOP_P)
            if TOP_P:  # noqa: SIM102 - known when it is compiled
                if (is_in | is_out) == 0:
                    if target < 0:
                        all_key, all_id = cut_whole_row(
                            x,
                            vocab,
                            highest,
                            temperature,
                            k,
                            least * 0,
                            top_p,
                            least,
                            TOP_K,
                            False,
                            2048,
                        )
                        exact = exact_mass(
                            x, vocab, all_key, all_id, highest, temperature, least, 2048
                        )
                        target = tl.maximum(tl.ceil(exact.to(tl.float64) * top_p).to(tl.int64), 1)
                    key = key_of(cut)
                    above = exact_mass(x, vocab, key, cut_id, highest, temperature, least, 2048)
                    is_in = above < target
            is_open = is_in == 0
            if is_open:
                # The next one is drawn from the tokens before this one.
                token = token * 0 - 1
        tl.store(out + row, token.to(out.dtype.element_ty))
