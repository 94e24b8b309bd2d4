"""Draws from rows of logits: a pass that marks the few tokens that can win, and a row's choice among them.

A token wins by `score = logit / temperature - log(E)`, where `E = -log(u)` is exponential. The highest score of a row of mass M
lies below `log(M) - log(n)` only once in exp(n) draws, so a pass marks the tokens with `E <= n * mass / M`, about n of a
chunk, and takes no logarithm: `1 - u <= E` bounds it. Among the marked tokens scores are exact, in fp64. A row in which none
reaches the bound, or in which they don't fit, is drawn as a whole.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.philox import chosen_word, fast_log2_exponential, token_words
from deepinfer.kernels.triton.sampling_draw import exact_scores, kept_values, limits_of, scale_of
from deepinfer.kernels.triton.sampling_judge import group_masses, limit_of_row
from deepinfer.kernels.triton.sampling_keys import larger
from deepinfer.kernels.triton.sampling_whole import best_before

__all__ = ["choice_kernel", "marks_kernel"]


@triton.jit(do_not_specialize=["stream"])
def marks_kernel(
    logits,
    temperatures,
    seeds,
    positions,
    cuts,
    cut_ids,
    marks,
    tops,
    sums,
    groups,
    masses,
    num_open,
    vocab,
    stride,
    num_chunks,
    stream,
    WARM: tl.constexpr,
    CUT: tl.constexpr,
    JUDGED: tl.constexpr,
    EXPECTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One chunk of one row: which tokens can win, its highest logit and mass; with JUDGED maxima and masses of groups.

    A group is 16 tokens, four neighbours in each of four places: token `w * BLOCK / 4 + 4 * g + j` of the chunk is bit
    `4 * w + j` of group g. What the cut drops counts nowhere. Masses are in units of that of the highest logit of the chunk.
    The counts of open rows begin at 0.
    """
    GROUPS: tl.constexpr = BLOCK // 16
    to = tl.program_id(0).to(tl.int64)
    if JUDGED:  # noqa: SIM102 - known when it is compiled
        if to == 0:
            tl.store(num_open + tl.arange(0, 32), tl.zeros((32,), tl.int32))
    row = to // num_chunks
    first = (to % num_chunks).to(tl.int32) * BLOCK
    at = first + tl.arange(0, BLOCK)
    values = tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf")).to(
        tl.float32
    )
    if CUT:
        limits = limits_of(tl.load(cuts + row), tl.load(cut_ids + row), first, BLOCK)
        values = tl.where(values <= limits, float("-inf"), values)
    g = tl.arange(0, GROUPS)
    best = tl.reduce(tl.reduce(tl.reshape(values, (4, GROUPS, 4)), 0, larger), 1, larger)
    highest = tl.reduce(best, 0, larger)
    tl.store(tops + to, highest)
    if JUDGED:
        tl.store(groups + to * GROUPS + g, best)
    temperature = tl.full((), 1.0, tl.float64)
    if WARM:
        temperature = tl.load(temperatures + row).to(tl.float64)
    if temperature > 0:
        anchor = tl.where(highest == float("-inf"), 0.0, highest)
        mass = tl.exp2((values - anchor) * scale_of(temperature))
        part = tl.sum(tl.sum(tl.reshape(mass, (4, GROUPS, 4)), 0), 1)
        total = tl.sum(part, 0)
        tl.store(sums + to, total)
        if JUDGED:
            tl.store(masses + to * GROUPS + g, part)
        seed = tl.load(seeds + row).to(tl.int64)
        position = tl.load(positions + row).to(tl.int64)
        quarter = tl.arange(0, BLOCK // 4) + first // 4
        w0, w1, w2, w3 = token_words(seed, position, quarter, stream)
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(BLOCK)
        # 1 + (1 - u), rounded down, from the upper bits of the word; the factor is above all rounding.
        near = (((words ^ 0xFFFFFFFF) >> 9) | 0x3F800000).to(tl.float32, bitcast=True)
        factor = (EXPECTED * 1.0001) / tl.maximum(total, 1.0)
        marked = tl.reshape(near <= mass * factor + 1.0000002, (4, GROUPS, 4))
        bit = tl.arange(0, 4)[:, None, None] * 4 + tl.arange(0, 4)[None, None, :]
        mark = tl.sum(tl.sum(tl.where(marked, 1 << bit, 0), 0), 1)
        tl.store(marks + to * GROUPS + g, mark.to(tl.int16))


@triton.jit
def _listed(
    x, marks, groups, tokens, vocab, num_chunks, highest, factor, least, seed, position, stream, cut, cut_id,
    CUT: tl.constexpr, FAST: tl.constexpr, BLOCK: tl.constexpr, ALL_GROUPS: tl.constexpr, LIST: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    """Lists the marked tokens whose score in fp32 is `least` at least, in units of log 2; how many, -1 for too many."""
    GROUPS: tl.constexpr = BLOCK // 16
    g = tl.arange(0, ALL_GROUPS)
    mark = tl.load(marks + g, mask=g < num_chunks * GROUPS, other=0)
    some = (mark != 0).to(tl.int32)
    num_some = tl.sum(some, 0)
    place = tl.cumsum(some, 0) - some
    tl.store(groups + place, g, mask=(some > 0) & (place < LIST))
    tl.debug_barrier()
    i = tl.arange(0, LIST)
    group = tl.load(groups + i, mask=i < num_some, other=0)
    left = tl.load(marks + group, mask=i < num_some, other=0).to(tl.int32) & 0xFFFF
    first = group // GROUPS * BLOCK + group % GROUPS * 4
    count = 0
    while tl.max(left, 0) > 0:
        # The lowest bit that is left, by the exponent of its number.
        bit = ((left & -left).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        at = first + (bit >> 2) * (BLOCK // 4) + (bit & 3)
        inside = (left > 0) & (at < vocab)
        values = tl.load(x + at, mask=inside, other=float("-inf")).to(tl.float32)
        values = kept_values(values, at, cut, cut_id, CUT)
        words = chosen_word(seed, position, at, stream)
        scores = (values - highest) * factor - fast_log2_exponential(words, FAST)
        good = ((values > float("-inf")) & (scores >= least)).to(tl.int32)
        to = count + tl.cumsum(good, 0) - good
        tl.store(tokens + to, at, mask=(good > 0) & (to < MOST))
        count += tl.sum(good, 0)
        left = left & (left - 1)
    tl.debug_barrier()
    return tl.where((num_some > LIST) | (count > MOST), -1, count)


@triton.jit
def _best(alive, scores, ids):
    """The token of the highest score among those alive, ties to the lowest id; 2^31 - 1 if there is none."""
    top = tl.max(tl.where(alive, scores, float("-inf")), 0)
    return tl.min(tl.where(alive & (scores == top), ids, 2147483647), 0)


@triton.jit
def _weight_of(x, highest, factor, RANK: tl.constexpr):
    """What a token weighs among those before another."""
    weight = x * 0.0 + 1.0
    if RANK == 0:
        weight = tl.exp2((x - highest) * factor)
    return weight


@triton.jit
def _add_two(a, b, c, d):
    return a + c, b + d


@triton.jit(do_not_specialize=["stream"])
def choice_kernel(
    logits,
    temperatures,
    shares,
    seeds,
    positions,
    cuts,
    cut_ids,
    marks,
    tops,
    sums,
    groups,
    masses,
    scratch,
    levels,
    ends,
    end_ids,
    waiting,
    facts,
    num_open,
    open_rows,
    arrived,
    out,
    vocab,
    stride,
    num_chunks,
    num_rows,
    stream,
    WARM: tl.constexpr,
    CUT: tl.constexpr,
    JUDGED: tl.constexpr,
    RANK: tl.constexpr,
    EXPECTED: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LIST: tl.constexpr,
    MOST: tl.constexpr,
):
    """Writes the token of one row: of the marked tokens that are kept, the one of the highest score.

    With JUDGED a token is kept when what is before it weighs less than the row's share: masses and top-p, or with RANK
    numbers and top-k. Maxima and masses of groups bound that weight; a row whose next token they leave in question is open:
    its `levels` are that token, then the best one before it, and so on, up to four, -1 for none. A row that is drawn as a
    whole is open in the second list, with `waiting` -1 and the end of the tokens that count. `facts` are the highest logit of
    a row, what may be before a kept token, and the error of that.
    """
    ALL_GROUPS: tl.constexpr = CHUNKS * (BLOCK // 16)
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * stride
    c = tl.arange(0, CHUNKS)
    chunk_tops = tl.load(tops + row * num_chunks + c, mask=c < num_chunks, other=float("-inf"))
    highest = tl.reduce(chunk_tops, 0, larger)
    temperature = tl.full((), 1.0, tl.float64)
    if WARM:
        temperature = tl.load(temperatures + row).to(tl.float64)
    is_good = (highest > float("-inf")) & (highest < float("inf"))
    is_greedy = temperature <= 0
    if JUDGED == 0:
        # The highest logit for a temperature of NaN, too.
        is_greedy = (temperature > 0) == 0
    token = -1
    end_id = -2
    if is_good & is_greedy:
        start = tl.min(tl.where(chunk_tops == highest, c, CHUNKS), 0) * BLOCK
        at = start + tl.arange(0, BLOCK)
        values = tl.load(x + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        token = tl.min(tl.where(values == highest, at, 2147483647), 0)
    if is_good & (temperature > 0):
        seed = tl.load(seeds + row).to(tl.int64)
        position = tl.load(positions + row).to(tl.int64)
        cut = tl.full((), float("-inf"), tl.float32)
        cut_id = 2147483647
        if CUT:
            cut = tl.load(cuts + row)
            cut_id = tl.load(cut_ids + row)
        factor = scale_of(temperature)
        some = chunk_tops > float("-inf")
        parts = tl.load(sums + row * num_chunks + c, mask=some, other=0.0)
        total = tl.sum(parts * tl.exp2((chunk_tops - highest) * factor), 0)
        least = tl.log2(total) - tl.log2(EXPECTED * 1.0)
        mine = scratch + row * (LIST + MOST)
        count = _listed(
            x, marks + row * num_chunks * (BLOCK // 16), mine, mine + LIST, vocab, num_chunks, highest, factor,
            least - 0.01, seed, position, stream, cut, cut_id, CUT, FAST, BLOCK, ALL_GROUPS, LIST, MOST,
        )  # fmt: skip
        i = tl.arange(0, MOST)
        ids = tl.load(mine + LIST + i, mask=i < count, other=0)
        scores = exact_scores(
            x, ids, i < count, highest, temperature, seed, position, stream, cut, cut_id, CUT
        )
        alive = scores >= least.to(tl.float64) * 0.6931471805599453
        found = _best(alive, scores, ids)
        if JUDGED:
            token = -1
            values = tl.load(x + ids, mask=i < count, other=float("-inf")).to(tl.float32)
            limit, slack = limit_of_row(shares, row, total, vocab, RANK)
            best, part = group_masses(
                tops, groups, masses, row, num_chunks, highest, factor, BLOCK // 16, ALL_GROUPS
            )
            if RANK:
                part = tl.where(best > float("-inf"), 16.0, 0.0)
            searching = found < 2147483647
            asked = 0
            end = cut
            end_id = tl.minimum(cut_id, 2147483646)
            while searching:
                value = tl.load(x + found).to(tl.float32)
                own = _weight_of(best, highest, factor, RANK)
                least_weight, most_weight = tl.reduce(
                    (tl.where(best > value, own, 0.0), tl.where(best >= value, part, 0.0)),
                    0,
                    _add_two,
                )
                most_weight -= _weight_of(value, highest, factor, RANK)
                is_in = most_weight < limit - slack
                is_out = least_weight > limit + slack
                searching = found < 0
                if is_in:
                    token = found
                    end_id = end_id * 0 - 2
                else:
                    end = value
                    end_id = found - 1
                    if is_out:
                        alive &= (values > value) | ((values == value) & (ids < found))
                        found = _best(alive, scores, ids)
                        searching = found < 2147483647
                    else:
                        asked = asked * 0 + 1
            tl.store(arrived + row, 0)
            tl.store(ends + row, end)
            tl.store(facts + row * 4, highest)
            tl.store(facts + row * 4 + 1, limit)
            tl.store(facts + row * 4 + 2, slack)
            tl.store(waiting + row, -1)
            if asked == 1:
                for level in tl.static_range(4):
                    tl.store(levels + row * 4 + level, tl.where(found < 2147483647, found, -1))
                    if found < 2147483647:
                        value = tl.load(x + found).to(tl.float32)
                        alive &= (values > value) | ((values == value) & (ids < found))
                        found = _best(alive, scores, ids)
            if end_id > -2:
                which = 1 - asked
                to = tl.atomic_add(num_open + which * 4, 1)
                tl.store(open_rows + which * num_rows + to, row.to(tl.int32))
        else:
            token = found
            if found == 2147483647:
                token = best_before(
                    x, vocab, cut, cut_id, highest, temperature, seed, position, stream, FAST, 2048
                )
                token = tl.where(token < vocab, token, -1)
    if JUDGED:
        tl.store(end_ids + row, end_id)
    if end_id == -2:
        tl.store(out + row, token.to(out.dtype.element_ty))
