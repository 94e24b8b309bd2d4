"""Draws from rows of logits: a pass that scores groups of tokens, and a row's choice among the tokens of the few best groups.

A token wins by `score = logit / temperature - log(E)`, where `E = -log(u)` is exponential. The highest score of a row of mass M
lies below `log(M) - log(n)` only once in exp(n) draws, so only tokens from there on are worth a look: about n of a row. The
pass takes `1 - u`, which is below E and bits of the word of the noise, and keeps the best of 16 tokens: a bound from above, which
is close for all tokens that can win. Nothing is summed over a program. Among the tokens of the groups that reach the bound
scores are exact, in fp64. A row in which none reaches it, or in which groups don't fit, is drawn as a whole.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.philox import log2_of, token_words
from deepinfer.kernels.triton.sampling_draw import exact_scores, limits_of, scale_of
from deepinfer.kernels.triton.sampling_judge import append_open, limit_of_row
from deepinfer.kernels.triton.sampling_keys import larger
from deepinfer.kernels.triton.sampling_rows import chunk_of, is_finite, noise_of, temperature_of
from deepinfer.kernels.triton.sampling_whole import best_before

__all__ = ["choice_kernel", "group_scores_kernel"]


@triton.jit(do_not_specialize=["stream"])
def group_scores_kernel(
    logits,
    temperatures,
    seeds,
    positions,
    cuts,
    cut_ids,
    groups,
    masses,
    scores,
    lists,
    num_open,
    vocab,
    stride,
    num_chunks,
    stream,
    WARM: tl.constexpr,
    CUT: tl.constexpr,
    FAST: tl.constexpr,
    LIST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Maximum, mass and best score of each group of a chunk of one row; the last two relative to the first, the score in bits.

    A group is 16 tokens, four neighbours in each of four places: token `w * BLOCK / 4 + 4 * g + j` of the chunk is in g. What
    the cut drops counts nowhere. The counts of open rows, and of the lists of rows, begin at 0.
    """
    GROUPS: tl.constexpr = BLOCK // 16
    to, row, first, _, values = chunk_of(logits, vocab, stride, num_chunks, BLOCK)
    seed, position = noise_of(seeds, positions, row)
    temperature = temperature_of(temperatures, row, WARM)
    if first == 0:
        tl.store(lists + row * (LIST + 1), 0)
        if to == 0:
            tl.store(num_open + tl.arange(0, 8), tl.zeros((8,), tl.int32))
    quarter = tl.arange(0, BLOCK // 4) + first // 4
    w0, w1, w2, w3 = token_words(seed, position, quarter, stream)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(BLOCK)
    # 1 - u, rounded down, from the upper bits of the word: 0 is possible, and a score of +inf then.
    near = (((words ^ 0xFFFFFFFF) >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    if CUT:
        limits = limits_of(tl.load(cuts + row), tl.load(cut_ids + row), first, BLOCK)
        values = tl.where(values <= limits, float("-inf"), values)
    places = tl.reshape(values, (4, GROUPS, 4))
    best = tl.reduce(tl.reduce(places, 0, larger), 1, larger)
    g = to * GROUPS + tl.arange(0, GROUPS)
    tl.store(groups + g, best)
    if temperature > 0:
        anchor = tl.where(best == float("-inf"), 0.0, best)
        scaled = (places - anchor[None, :, None]) * scale_of(temperature)
        tl.store(masses + g, tl.sum(tl.sum(tl.exp2(scaled), 0), 1))
        score = scaled - log2_of(tl.reshape(near, (4, GROUPS, 4)), FAST)
        tl.store(scores + g, tl.max(tl.max(score, 0), 1))


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
    groups,
    masses,
    scores,
    lists,
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
    stream,
    WARM: tl.constexpr,
    CUT: tl.constexpr,
    STRICT: tl.constexpr,
    JUDGED: tl.constexpr,
    RANK: tl.constexpr,
    EXPECTED: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LIST: tl.constexpr,
):
    """Writes the token of one row: of the tokens that can win and are kept, the one of the highest score.

    With STRICT nothing is drawn at a temperature of NaN.

    With JUDGED a token is kept when what is before it weighs less than the row's share: masses and top-p, or with RANK
    numbers and top-k. Maxima and masses of groups bound that weight; a row whose next token they leave in question is open:
    its `levels` are that token, then the best one before it, and so on, up to eight, -1 for none. A row that is drawn as a
    whole has `waiting` -1 and the end of the tokens that count. `facts` are the highest logit of a row, what may be before
    a kept token, and the error of that.
    """
    GROUPS: tl.constexpr = BLOCK // 16
    ALL_GROUPS: tl.constexpr = CHUNKS * GROUPS
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * stride
    g = tl.arange(0, ALL_GROUPS)
    at_groups = row * num_chunks * GROUPS + g
    there = g < num_chunks * GROUPS
    best = tl.load(groups + at_groups, mask=there, other=float("-inf"))
    # Of a greedy row the others are not written, and not used.
    part = tl.load(masses + at_groups, mask=there, other=0.0)
    tops = tl.load(scores + at_groups, mask=there, other=float("-inf"))
    highest = tl.reduce(best, 0, larger)
    temperature = temperature_of(temperatures, row, WARM)
    is_good = is_finite(highest)
    is_greedy = temperature <= 0
    if STRICT == 0:
        # The highest logit for a temperature of NaN, too.
        is_greedy = (temperature > 0) == 0
    token = -1
    end_id = -2
    if is_good & is_greedy:
        start = tl.min(tl.where(best == highest, g, ALL_GROUPS), 0) // GROUPS * BLOCK
        at = start + tl.arange(0, BLOCK)
        values = tl.load(x + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        token = tl.min(tl.where(values == highest, at, 2147483647), 0)
    if is_good & (temperature > 0):
        seed, position = noise_of(seeds, positions, row)
        cut = tl.full((), float("-inf"), tl.float32)
        cut_id = 2147483647
        if CUT:
            cut = tl.load(cuts + row)
            cut_id = tl.load(cut_ids + row)
        factor = scale_of(temperature)
        some = best > float("-inf")
        above = (best - highest) * factor
        part = tl.where(some, part * tl.exp2(above), 0.0)
        total = tl.sum(part, 0)
        least = tl.log2(total) - tl.log2(EXPECTED * 1.0)
        chosen = some & (tops + above >= least - 0.01)
        count = tl.sum(chosen.to(tl.int32), 0)
        # Few are: an atomic operation for each takes less than places for all. Nothing hangs on the order.
        mine = lists + row * (LIST + 1)
        place = tl.atomic_add(mine + g * 0, 1, mask=chosen)
        tl.store(mine + 1 + place, g, mask=chosen & (place < LIST))
        tl.debug_barrier()
        i = tl.arange(0, LIST * 16)
        group = tl.load(mine + 1 + i // 16, mask=i // 16 < count, other=0)
        ids = group // GROUPS * BLOCK + ((i >> 2) & 3) * (BLOCK // 4) + group % GROUPS * 4 + (i & 3)
        inside = (i // 16 < count) & (count <= LIST) & (ids < vocab)
        noisy = exact_scores(
            x, ids, inside, highest, temperature, seed, position, stream, cut, cut_id, CUT
        )
        alive = inside & (noisy >= least.to(tl.float64) * 0.6931471805599453)
        found = _best(alive, noisy, ids)
        if JUDGED:
            token = -1
            values = tl.load(x + ids, mask=inside, other=float("-inf")).to(tl.float32)
            limit, slack = limit_of_row(shares, row, total, vocab, RANK)
            if RANK:
                part = tl.where(some, 16.0, 0.0)
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
                        found = _best(alive, noisy, ids)
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
                for level in tl.static_range(8):
                    tl.store(levels + row * 8 + level, tl.where(found < 2147483647, found, -1))
                    if found < 2147483647:
                        value = tl.load(x + found).to(tl.float32)
                        alive &= (values > value) | ((values == value) & (ids < found))
                        found = _best(alive, noisy, ids)
                append_open(num_open, open_rows, row)
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
