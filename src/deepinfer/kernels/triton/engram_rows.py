"""Engram: hashes of n-grams, rows of the table in bf16, and the gate that adds a value to the streams."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.small_floats import e4m3_values, e8m0_values

__all__ = ["engram_gate_kernel", "engram_hash_kernel", "engram_lookup_kernel"]


@triton.jit(do_not_specialize=["tokens", "vocab", "pad"])
def engram_hash_kernel(
    history, token_map, multipliers, primes, offsets, out, tokens, vocab, pad, h_token,
    NGRAM: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of the n-grams that end at each token; a column is an n-gram size and a head."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    there = token < tokens
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    size = column // HEADS + 2
    broken = tl.zeros([TOKENS], tl.int32)
    mixed = tl.zeros([TOKENS, BLOCK], tl.int64)
    for n in tl.static_range(NGRAM):
        found = tl.load(history + token * h_token + n, mask=there, other=-1)
        broken = broken | ((found < 0) | (found >= vocab)).to(tl.int32)
        folded = tl.load(token_map + found, mask=there & (broken == 0), other=0)
        folded = tl.where(broken != 0, pad.to(tl.int64), folded) * tl.load(multipliers + n)
        mixed = tl.where((size > n)[None, :], mixed ^ folded[:, None], mixed)
    prime = tl.load(primes + column, mask=inside, other=1)[None, :]
    row = mixed % prime
    # The remainder has the sign of the hash here, but a product that wrapped is negative and its row is not.
    row = tl.where(row < 0, row + prime, row)
    row += tl.load(offsets + column, mask=inside, other=0)[None, :]
    to = out + token[:, None] * COLUMNS + column[None, :]
    tl.store(to, row, mask=there[:, None] & inside[None, :])


@triton.jit
def _row_of(rows, at, count, table_rows):
    """Rows of the table, and which of them it has."""
    row = tl.load(rows + at, mask=at < count, other=-1)
    found = (row >= 0) & (row < table_rows)
    return tl.where(found, row, 0), found


@triton.jit
def _codes_of(
    table, scale, row, found, t_row, s_row, group, GROUP: tl.constexpr, STREAM: tl.constexpr
):
    """Codes [groups, GROUP] and scales [groups] of groups of rows."""
    modifier: tl.constexpr = ".cg" if STREAM else ""
    start = table + row * t_row + group * GROUP
    c = tl.arange(0, GROUP)[None, :]
    codes = tl.load(start[:, None] + c, mask=found[:, None], other=0, cache_modifier=modifier)
    return codes, tl.load(scale + row * s_row + group, mask=found, other=127)


@triton.jit(do_not_specialize=["count", "table_rows"])
def engram_lookup_kernel(
    rows, table, scale, out, count, table_rows, t_row, s_row, CHANNELS: tl.constexpr,
    GROUP: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
    STREAM: tl.constexpr,
):  # fmt: skip
    """Gathers e4m3 rows and multiplies them by their e8m0 scales; zeros for a row that the table does not have.

    A program takes ROWS rows STEPS times; the codes of the next ones are on their way while some are written. With STREAM the
    caches are told that nothing is used twice.
    """
    GROUPS: tl.constexpr = CHANNELS // GROUP
    modifier: tl.constexpr = ".cs" if STREAM else ""
    f = tl.arange(0, ROWS * GROUPS)
    group = f % GROUPS
    c = tl.arange(0, GROUP)[None, :]
    at = tl.program_id(0).to(tl.int64) * (ROWS * STEPS) + f // GROUPS
    row, found = _row_of(rows, at, count, table_rows)
    codes, factor = _codes_of(table, scale, row, found, t_row, s_row, group, GROUP, STREAM)
    if STEPS > 1:
        row, found = _row_of(rows, at + ROWS, count, table_rows)
    for step in tl.static_range(STEPS):
        if step + 1 < STEPS:
            later, factor_later = _codes_of(
                table, scale, row, found, t_row, s_row, group, GROUP, STREAM
            )
        if step + 2 < STEPS:
            row, found = _row_of(rows, at + (step + 2) * ROWS, count, table_rows)
        v = e4m3_values(codes, HARDWARE) * e8m0_values(factor)[:, None]
        to = out + (at + step * ROWS) * CHANNELS + group * GROUP
        there = (at + step * ROWS < count)[:, None]
        tl.store(to[:, None] + c, v.to(out.dtype.element_ty), mask=there, cache_modifier=modifier)
        if step + 1 < STEPS:
            codes, factor = later, factor_later


@triton.jit
def _gains(q_weight, k_weight, stream, c, CHANNELS: tl.constexpr):
    """Products of the gains of a stream and of its key."""
    at = stream * CHANNELS + c
    gain = tl.load(q_weight + at, mask=c < CHANNELS, other=0.0).to(tl.float32)
    return gain * tl.load(k_weight + at, mask=c < CHANNELS, other=0.0).to(tl.float32)


@triton.jit
def _three_sums(a, b, c, x, y, z):
    return a + x, b + y, c + z


@triton.jit
def _row(x, key, value, c, inside):
    """A piece of a stream and its key in fp32, and of the value."""
    s = tl.load(x + c, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(key + c, mask=inside, other=0.0).to(tl.float32)
    return s, k, tl.load(value + c, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["tokens", "steps"])
def engram_gate_kernel(
    streams, projected, q_weight, k_weight, is_image, out, tokens, steps, x_token, x_stream,
    p_token, eps,
    STREAMS: tl.constexpr, CHANNELS: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    HAS_IMAGE: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Adds a gated value to one stream of steps tokens; a row is MAIN channels and at most REST more.

    ONE: a program takes one token, and asks for its gains when its values are on their way.
    """
    stream = tl.program_id(0) % STREAMS
    c = tl.arange(0, MAIN)
    d = MAIN + tl.arange(0, max(1, REST))
    if not ONE:
        gain = _gains(q_weight, k_weight, stream, c, CHANNELS)
        if REST > 0:
            gain_of_rest = _gains(q_weight, k_weight, stream, d, CHANNELS)
    kind = out.dtype.element_ty
    for step in range(1 if ONE else steps):
        # The last program may take the last token more than once, and writes it alike.
        token = tl.program_id(0) // STREAMS * (1 if ONE else steps) + step
        token = tl.minimum(token, tokens - 1).to(tl.int64)
        x = streams + token * x_token + stream * x_stream
        key = projected + token * p_token + stream * CHANNELS
        value = projected + token * p_token + STREAMS * CHANNELS
        inside, more = c < CHANNELS, d < CHANNELS
        s, k, v = _row(x, key, value, c, inside)
        if REST > 0:
            t, h, w = _row(x, key, value, d, more)
        if ONE:
            gain = _gains(q_weight, k_weight, stream, c, CHANNELS)
            if REST > 0:
                gain_of_rest = _gains(q_weight, k_weight, stream, d, CHANNELS)
        dots, squares, keyed = s * gain * k, s * s, k * k
        if REST > 0:
            dots = tl.sum(tl.reshape(dots, [MAIN // REST, REST]), axis=0) + t * gain_of_rest * h
            squares = tl.sum(tl.reshape(squares, [MAIN // REST, REST]), axis=0) + t * t
            keyed = tl.sum(tl.reshape(keyed, [MAIN // REST, REST]), axis=0) + h * h
        # All three at once: threads wait for each other once.
        dot, square, keyed = tl.reduce((dots, squares, keyed), 0, _three_sums)
        square = square / CHANNELS + eps
        dot *= tl.rsqrt(square * (keyed / CHANNELS + eps) * CHANNELS)
        root = tl.sqrt(tl.maximum(tl.abs(dot), 1e-6))
        root = tl.where(dot > 0, root, tl.where(dot < 0, -root, dot))  # a NaN stays one
        gate = 1.0 / (1.0 + tl.exp(-root))
        if HAS_IMAGE:
            gate = tl.where(tl.load(is_image + token) != 0, 0.0, gate)
        to = out + (token * STREAMS + stream) * CHANNELS
        tl.store(to + c, (s + gate * v.to(tl.float32)).to(kind), mask=inside)
        if REST > 0:
            tl.store(to + d, (t + gate * w.to(tl.float32)).to(kind), mask=more)
