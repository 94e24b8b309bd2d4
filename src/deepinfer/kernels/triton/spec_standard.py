"""Standard verification: partial sums of both laws, the test of each draft, and a draw from what the target has above.

Numbers come from the noise of tokens: purpose 2 tests a draft, 3 draws what replaces it, 4 what follows the last one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.philox import (
    exact_gumbel,
    exact_uniform,
    fast_log2_exponential,
    token_words,
)
from deepinfer.kernels.triton.sampling_keys import larger
from deepinfer.kernels.triton.spec_rows import first_row, length_of, verified_length

__all__ = [
    "chosen_token_kernel",
    "law_sums_kernel",
    "residual_chunk_kernel",
    "standard_accept_kernel",
]


@triton.jit
def law_sums_kernel(
    target,
    draft,
    row_temperatures,
    temperatures,
    lengths,
    tops,
    sums,
    best,
    vocab,
    num_rows,
    stride_target,
    stride_request,
    stride_draft,
    num_chunks,
    WARM: tl.constexpr,
    DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One chunk of a target row, or of a draft row behind them: highest logit, its token, sum of exponentials."""
    to = tl.program_id(0).to(tl.int64)
    row = to // num_chunks
    at = (to % num_chunks).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
    temperature = tl.full((), 1.0, tl.float64)
    needed = True
    if row < num_rows:
        x = target + row * stride_target
        if WARM:
            temperature = tl.load(row_temperatures + row).to(tl.float64)
    else:
        request = (row - num_rows) // DRAFTS
        step = (row - num_rows) % DRAFTS
        x = draft + request * stride_request + step * stride_draft
        needed = step < length_of(lengths, request, DRAFTS)
        if WARM:
            temperature = tl.load(temperatures + request).to(tl.float64)
    if needed:
        values = tl.load(x + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        highest = tl.reduce(values, 0, larger)
        anchor = tl.where(highest == float("-inf"), 0.0, highest)
        # Finite in fp32, so that it keeps the highest value itself: 0 * infinity would be NaN.
        factor = tl.where(temperature > 0, tl.minimum(1.4426950408889634 / temperature, 3e38), 0.0)
        factor = factor.to(tl.float32)
        tl.store(tops + to, highest)
        tl.store(sums + to, tl.sum(tl.where(values > float("-inf"), tl.exp2((values - anchor) * factor), 0.0), 0))  # fmt: skip
        tl.store(best + to, tl.min(tl.where(values == highest, at, 2147483647), 0))


@triton.jit
def _law(tops, sums, best, row, num_rows, num_chunks, temperature, CHUNKS: tl.constexpr):
    """Highest logit of a row, its token, and the log of the row's sum relative to it, fp64; NaN behind the last row."""
    is_row = row < num_rows
    row = tl.where(is_row, row, 0)
    c = tl.arange(0, CHUNKS)
    inside = c < num_chunks
    top = tl.load(tops + row * num_chunks + c, mask=inside, other=float("-inf"))
    part = tl.load(sums + row * num_chunks + c, mask=inside, other=0.0).to(tl.float64)
    highest = tl.where(is_row, tl.reduce(top, 0, larger), float("nan"))
    scale = tl.where(temperature > 0, temperature, 1.0)
    below = (top.to(tl.float64) - highest.to(tl.float64)) / scale
    total = tl.log(tl.sum(tl.where(part > 0, part * tl.exp(below), 0.0), 0))
    token = tl.load(best + row * num_chunks + c, mask=inside, other=2147483647)
    return highest, tl.min(tl.where(top == highest, token, 2147483647), 0), total


@triton.jit
def standard_accept_kernel(
    target,
    draft,
    drafts,
    lengths,
    temperatures,
    seeds,
    positions,
    tops,
    sums,
    best,
    out,
    num_accepted,
    next_rows,
    next_laws,
    vocab,
    num_rows,
    stride_target,
    stride_request,
    stride_draft,
    stride_drafts,
    num_chunks,
    WARM: tl.constexpr,
    DRAWN: tl.constexpr,
    DRAFTS: tl.constexpr,
    WIDTH: tl.constexpr,
    REQUESTS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Tests the drafts of one request one by one; says from which rows and laws the token behind them is drawn."""
    request = tl.program_id(0).to(tl.int64)
    mine = drafts + request * stride_drafts
    length = length_of(lengths, request, DRAFTS)
    verified = verified_length(mine, length, DRAFTS, WIDTH)
    first = first_row(lengths, tl.program_id(0), DRAFTS, REQUESTS)
    temperature = tl.full((), 1.0, tl.float64)
    if WARM:
        temperature = tl.load(temperatures + request).to(tl.float64)
    scale = tl.where(temperature > 0, temperature, 1.0)
    seed = tl.load(seeds + request).to(tl.int64)
    position = tl.load(positions + request).to(tl.int64)
    accepted = 0
    going = True
    p_top, token, p_log = _law(tops, sums, best, first, num_rows, num_chunks, temperature, CHUNKS)
    q_top = p_top
    q_log = p_log
    while going & (accepted < verified):
        x = tl.load(mine + accepted).to(tl.int64)
        known = x < vocab
        x = tl.where(known, x, 0)
        row = tl.minimum(first + accepted, num_rows - 1)
        logit = tl.load(target + row * stride_target + x).to(tl.float64)
        log_p = (logit - p_top.to(tl.float64)) / scale - p_log
        log_q = tl.zeros((), tl.float64)
        if DRAWN:
            q_row = num_rows + request * DRAFTS + accepted
            q_top, _, q_log = _law(
                tops, sums, best, q_row, q_row + 1, num_chunks, temperature, CHUNKS
            )
            logit = tl.load(draft + request * stride_request + accepted.to(tl.int64) * stride_draft + x).to(tl.float64)  # fmt: skip
            log_q = (logit - q_top.to(tl.float64)) / scale - q_log
        number = exact_uniform(seed, position + accepted, x, tl.full((), 2, tl.int32))
        # A draft that its law cannot have drawn counts as chosen; so does one of hardly any share that the target forbids.
        is_chosen = (log_q > float("-inf")) == 0
        log_q = tl.where(is_chosen, 0.0, log_q)
        if DRAWN:
            is_chosen |= (known == 0) | ((log_p == float("-inf")) & (log_q <= -12.429216196844383))
            q_log = tl.where(is_chosen, float("inf"), q_log)
        passes = known & (tl.log(number) + log_q < log_p)
        passes = tl.where(temperature > 0, passes, known & (x == token))
        passes &= (p_top > float("-inf")) & (p_top < float("inf")) & (temperature == temperature)
        going = passes
        if passes:
            tl.store(out + request * (DRAFTS + 1) + accepted, x)
            accepted += 1
            p_top, token, p_log = _law(
                tops, sums, best, first + accepted, num_rows, num_chunks, temperature, CHUNKS
            )
    j = tl.arange(0, WIDTH)
    tl.store(
        out + request * (DRAFTS + 1) + j, tl.full([WIDTH], -1, tl.int64), mask=(j >= accepted) & (j <= DRAFTS)
    )  # fmt: skip
    tl.store(num_accepted + request, accepted.to(tl.int64))
    # Whether a draft was refused, or all were kept.
    refused = accepted < verified
    tl.store(next_rows + request * 2, tl.minimum(first + accepted, num_rows - 1))
    tl.store(next_rows + request * 2 + 1, tl.where(refused, accepted, -1).to(tl.int64))
    # Without a temperature there is no law either.
    tl.store(
        next_laws + request * 4,
        tl.where(temperature == temperature, p_top.to(tl.float64), float("inf")),
    )
    tl.store(next_laws + request * 4 + 1, p_log)
    tl.store(next_laws + request * 4 + 2, q_top.to(tl.float64))
    tl.store(next_laws + request * 4 + 3, q_log)


@triton.jit
def residual_chunk_kernel(
    target,
    draft,
    drafts,
    temperatures,
    seeds,
    positions,
    num_accepted,
    next_rows,
    next_laws,
    tokens,
    scores,
    vocab,
    stride_target,
    stride_request,
    stride_draft,
    stride_drafts,
    num_chunks,
    WARM: tl.constexpr,
    DRAWN: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best token of one chunk, with its score, for the draw behind the accepted drafts of a request."""
    to = tl.program_id(0).to(tl.int64)
    request = to // num_chunks
    chunk = (to % num_chunks).to(tl.int32)
    row = tl.load(next_rows + request * 2)
    refused = tl.load(next_rows + request * 2 + 1)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    temperature = tl.full((), 1.0, tl.float64)
    if WARM:
        temperature = tl.load(temperatures + request).to(tl.float64)
    is_drawn = temperature > 0
    scale = tl.where(is_drawn, temperature, 1.0)
    factor = tl.minimum(1.0 / scale, 3e38).to(tl.float32)
    x = tl.load(target + row * stride_target + at, mask=at < vocab, other=float("-inf"))
    x = x.to(tl.float32)
    p_top = tl.load(next_laws + request * 4)
    values = (x - p_top.to(tl.float32)) * factor
    if is_drawn & (refused >= 0):
        if DRAWN:
            log_p = values - tl.load(next_laws + request * 4 + 1).to(tl.float32)
            q = tl.load(
                draft + request * stride_request + refused * stride_draft + at, mask=at < vocab, other=float("-inf")
            ).to(tl.float32)  # fmt: skip
            q_top = tl.load(next_laws + request * 4 + 2).to(tl.float32)
            q_log = tl.load(next_laws + request * 4 + 3).to(tl.float32)
            log_q = (q - q_top) * factor - q_log
            dropped = tl.load(drafts + request * stride_drafts + refused)
            point = tl.where(at == dropped, 0.0, float("-inf"))
            log_q = tl.where(q_log == float("inf"), point, log_q)
            share = 1.0 - tl.exp(log_q - log_p)
            # What differs by rounding alone is not above.
            above = (log_p > log_q) & (share > 1e-6)
            values = tl.where(above, log_p + tl.log(tl.where(above, share, 1.0)), float("-inf"))
        else:
            dropped = tl.load(drafts + request * stride_drafts + refused)
            values = tl.where(at == dropped, float("-inf"), values)
    highest = tl.max(values, 0)
    token = -1
    score = tl.full((), float("-inf"), tl.float64)
    if highest > float("-inf"):
        if is_drawn:
            stream = tl.where(refused >= 0, 3, 4).to(tl.int32)
            seed = tl.load(seeds + request).to(tl.int64)
            position = tl.load(positions + request).to(tl.int64) + tl.load(num_accepted + request)
            quarter = tl.arange(0, BLOCK // 4) + chunk * (BLOCK // 4)
            w0, w1, w2, w3 = token_words(seed, position, quarter, stream)
            words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(BLOCK)
            rough = (values - highest) * 1.4426950408889634 - fast_log2_exponential(words, FAST)
            rough = tl.where(values > float("-inf"), rough, float("-inf"))
            open_ = rough >= tl.max(rough, 0) - 1e-3
            left = tl.sum(open_.to(tl.int32), 0)
            last = -1
            while left > 0:
                last = tl.min(tl.where(open_ & (at > last), at, 2147483647), 0)
                value = tl.max(tl.where(at == last, values, float("-inf")), 0).to(tl.float64)
                own = value + exact_gumbel(seed, position, last, stream)
                token = tl.where(own > score, last, token)
                score = tl.where(own > score, own, score)
                left -= 1
        else:
            token = tl.min(tl.where(values == highest, at, 2147483647), 0)
            score = highest.to(tl.float64)
    tl.store(tokens + to, token)
    tl.store(scores + to, score)


@triton.jit
def chosen_token_kernel(
    drafts,
    num_accepted,
    next_rows,
    next_laws,
    tokens,
    scores,
    out,
    stride_drafts,
    num_chunks,
    DRAFTS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """The best token of the chunks behind the accepted drafts; the refused draft where nothing is above its law."""
    request = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS)
    inside = c < num_chunks
    token = tl.load(tokens + request * num_chunks + c, mask=inside, other=-1)
    score = tl.load(scores + request * num_chunks + c, mask=inside, other=float("-inf"))
    best = tl.max(score, 0)
    chosen = tl.min(tl.where((score == best) & (token >= 0), token, 2147483647), 0).to(tl.int64)
    refused = tl.load(next_rows + request * 2 + 1)
    if chosen == 2147483647:
        chosen = tl.full((), -1, tl.int64)
        if refused >= 0:
            chosen = tl.load(drafts + request * stride_drafts + refused).to(tl.int64)
    p_top = tl.load(next_laws + request * 4)
    good = (p_top > float("-inf")) & (p_top < float("inf"))
    accepted = tl.load(num_accepted + request)
    tl.store(out + request * (DRAFTS + 1) + accepted, tl.where(good, chosen, -1))
