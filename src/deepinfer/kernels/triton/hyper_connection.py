"""The two ends of a sublayer between residual streams, one launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.core.errors import ShapeError
from deepinfer.kernels.triton.rounding import round_groups

__all__ = ["enter_streams", "leave_streams"]

_STREAMS = 4
_COEFFICIENTS = 20
# Sizes that hang on the channels alone: a row's sums have one order, whatever its batch.
_TOKENS = 16
_FEW = 64
_PROJECTED = 64
_GROUPS = 32


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _row(a, b, c, d, eps):
    """A row of a softmax, plus eps."""
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - top), tl.exp(b - top), tl.exp(c - top), tl.exp(d - top)
    share = 1.0 / (a + b + c + d)
    return a * share + eps, b * share + eps, c * share + eps, d * share + eps


@triton.jit
def _over_sum(a, b, c, d, eps):
    share = 1.0 / (a + b + c + d + eps)
    return a * share, b * share, c * share, d * share


@triton.jit
def _entering(streams, pre, token, c, inside, CHANNELS: tl.constexpr):
    """The weighted sum of a token's streams, rounded to their dtype, in fp32; of the shape of the channels `c`."""
    v = tl.zeros(c.shape, tl.float32)
    for i in tl.static_range(4):
        at = streams + (token * 4 + i) * CHANNELS + c
        v += tl.load(pre + token * 4 + i) * tl.load(at, mask=inside, other=0.0).to(tl.float32)
    return v.to(streams.dtype.element_ty).to(tl.float32)


@triton.jit
def _times(s, w, m):
    """Adds the product of streams with fp32 weights; narrow streams are exact, and weights become three such numbers."""
    if s.dtype == tl.float32:
        return tl.dot(s, w, m, input_precision="tf32x3")
    large = w.to(s.dtype)
    rest = w - large.to(tl.float32)
    middle = rest.to(s.dtype)
    small = (rest - middle.to(tl.float32)).to(s.dtype)
    m = tl.dot(s, small, m)
    m = tl.dot(s, middle, m)
    return tl.dot(s, large, m)


@triton.jit(do_not_specialize=["num_tokens"])
def _project(
    streams, pre, fn, sums, num_tokens, parts, CHANNELS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums over a piece of the channels of all streams: projections of tokens, and squares behind them."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    there = token < num_tokens
    part = tl.program_id(1)
    c = part * BLOCK + tl.arange(0, BLOCK)
    inside = there[:, None] & (c < CHANNELS)[None, :]
    rows = tl.arange(0, 32)
    in_fn = (rows < 24)[None, :] & (c < CHANNELS)[:, None]
    # All that is read is asked for before anything is waited for.
    at = streams + token[:, None] * (4 * CHANNELS) + c[None, :]
    s0 = tl.load(at, mask=inside, other=0.0)
    s1 = tl.load(at + CHANNELS, mask=inside, other=0.0)
    s2 = tl.load(at + 2 * CHANNELS, mask=inside, other=0.0)
    s3 = tl.load(at + 3 * CHANNELS, mask=inside, other=0.0)
    of = fn + rows[None, :] * (4 * CHANNELS) + c[:, None]
    w0 = tl.load(of, mask=in_fn, other=0.0)
    w1 = tl.load(of + CHANNELS, mask=in_fn, other=0.0)
    w2 = tl.load(of + 2 * CHANNELS, mask=in_fn, other=0.0)
    w3 = tl.load(of + 3 * CHANNELS, mask=in_fn, other=0.0)
    p0 = tl.load(pre + token * 4, mask=there, other=0.0)[:, None]
    p1 = tl.load(pre + token * 4 + 1, mask=there, other=0.0)[:, None]
    p2 = tl.load(pre + token * 4 + 2, mask=there, other=0.0)[:, None]
    p3 = tl.load(pre + token * 4 + 3, mask=there, other=0.0)[:, None]
    m = tl.zeros([TOKENS, 32], tl.float32)
    m = _times(s0, w0, m)
    m = _times(s1, w1, m)
    m = _times(s2, w2, m)
    m = _times(s3, w3, m)
    s0, s1, s2, s3 = s0.to(tl.float32), s1.to(tl.float32), s2.to(tl.float32), s3.to(tl.float32)
    squares = s0 * s0 + s1 * s1 + s2 * s2 + s3 * s3
    entering = p0 * s0 + p1 * s1 + p2 * s2 + p3 * s3
    entering = entering.to(streams.dtype.element_ty).to(tl.float32)
    m = tl.where((rows == 24)[None, :], tl.sum(squares, axis=1)[:, None], m)
    m = tl.where((rows == 25)[None, :], tl.sum(entering * entering, axis=1)[:, None], m)
    to = sums + (token[:, None] * parts + part) * 32 + rows[None, :]
    tl.store(to, m, mask=there[:, None])


@triton.jit
def _enter(
    streams, pre, sums, base, scale, gains, mixes, following, coefficients, y, x, parts,
    iterations, norm_eps, eps, CHANNELS: tl.constexpr, ROUND: tl.constexpr, GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Coefficients of a token, by its first program, and a piece of its normed input."""
    token = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    kind = streams.dtype.element_ty
    rows = tl.arange(0, 32)
    part = tl.arange(0, PARTS)[:, None]
    at = sums + (token * parts + part) * 32 + rows[None, :]
    m = tl.sum(tl.load(at, mask=part < parts, other=0.0), axis=0)
    squares = tl.sum(tl.where(rows == 24, m, 0.0), axis=0)
    input_squares = tl.sum(tl.where(rows == 25, m, 0.0), axis=0)
    factor = tl.rsqrt(input_squares / CHANNELS + norm_eps)
    c = (piece * GROUPS + tl.arange(0, GROUPS))[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = c < CHANNELS
    gain = tl.load(gains + c, mask=inside, other=0.0).to(tl.float32)
    v = (_entering(streams, pre, token, c, inside, CHANNELS) * factor * gain).to(kind)
    tl.store(y + token * CHANNELS + c, v, mask=inside)
    if ROUND:
        rounded = round_groups(v.to(tl.float32), 1)
        tl.store(x + token * CHANNELS + c, rounded.to(kind), mask=inside)
    if piece == 0:
        m = m * tl.rsqrt(squares / (4 * CHANNELS) + norm_eps)
        factors = tl.load(scale + tl.where(rows < 4, 0, tl.where(rows < 8, 1, 2)))
        m = m * factors + tl.load(base + rows, mask=rows < 24, other=0.0)
        # The first eight are wanted as a vector, the others as scalars; memory turns one into the other.
        tl.store(following + token * 4 + rows, _sigmoid(m) + eps, mask=rows < 4)
        post = (rows >= 4) & (rows < 8)
        tl.store(coefficients + token * 20 + rows - 4, 2.0 * _sigmoid(m), mask=post)
        tl.store(mixes + token * 32 + rows, m)
        tl.debug_barrier()
        k = mixes + token * 32 + 8
        a0, a1, a2, a3 = _row(tl.load(k), tl.load(k + 1), tl.load(k + 2), tl.load(k + 3), eps)
        b0, b1, b2, b3 = _row(tl.load(k + 4), tl.load(k + 5), tl.load(k + 6), tl.load(k + 7), eps)
        c0, c1, c2, c3 = _row(tl.load(k + 8), tl.load(k + 9), tl.load(k + 10), tl.load(k + 11), eps)
        d0, d1, d2, d3 = _row(
            tl.load(k + 12), tl.load(k + 13), tl.load(k + 14), tl.load(k + 15), eps
        )
        a0, b0, c0, d0 = _over_sum(a0, b0, c0, d0, eps)
        a1, b1, c1, d1 = _over_sum(a1, b1, c1, d1, eps)
        a2, b2, c2, d2 = _over_sum(a2, b2, c2, d2, eps)
        a3, b3, c3, d3 = _over_sum(a3, b3, c3, d3, eps)
        for _ in range(iterations - 1):
            a0, a1, a2, a3 = _over_sum(a0, a1, a2, a3, eps)
            b0, b1, b2, b3 = _over_sum(b0, b1, b2, b3, eps)
            c0, c1, c2, c3 = _over_sum(c0, c1, c2, c3, eps)
            d0, d1, d2, d3 = _over_sum(d0, d1, d2, d3, eps)
            a0, b0, c0, d0 = _over_sum(a0, b0, c0, d0, eps)
            a1, b1, c1, d1 = _over_sum(a1, b1, c1, d1, eps)
            a2, b2, c2, d2 = _over_sum(a2, b2, c2, d2, eps)
            a3, b3, c3, d3 = _over_sum(a3, b3, c3, d3, eps)
        out = coefficients + token * 20 + 4
        tl.store(out, a0)
        tl.store(out + 1, a1)
        tl.store(out + 2, a2)
        tl.store(out + 3, a3)
        tl.store(out + 4, b0)
        tl.store(out + 5, b1)
        tl.store(out + 6, b2)
        tl.store(out + 7, b3)
        tl.store(out + 8, c0)
        tl.store(out + 9, c1)
        tl.store(out + 10, c2)
        tl.store(out + 11, c3)
        tl.store(out + 12, d0)
        tl.store(out + 13, d1)
        tl.store(out + 14, d2)
        tl.store(out + 15, d3)


def enter_streams(
    streams: Tensor,
    pre: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    *,
    iterations: int,
    norm_eps: float,
    eps: float,
    round_input: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mixing coefficients and normed input; see `deepinfer.kernels.reference.hyper_connection.enter_streams`.

    Raises:
        ShapeError: There are not four streams.
    """
    tokens, channels = _check(streams)
    device, wide = streams.device, torch.float32
    mixes = torch.empty(tokens, 32, dtype=wide, device=device)
    following = torch.empty(tokens, _STREAMS, dtype=wide, device=device)
    coefficients = torch.empty(tokens, _COEFFICIENTS, dtype=wide, device=device)
    y = torch.empty(tokens, channels, dtype=streams.dtype, device=device)
    x = torch.empty_like(y) if round_input else y
    if tokens:
        block = min(_PROJECTED, max(16, triton.next_power_of_2(channels)))
        parts = triton.cdiv(channels, block)
        sums = torch.empty(tokens, parts, 32, dtype=wide, device=device)
        at_once = _TOKENS if tokens <= _FEW else 2 * _TOKENS
        _project[(triton.cdiv(tokens, at_once), parts)](
            streams, pre, fn, sums, tokens, parts, CHANNELS=channels, TOKENS=at_once, BLOCK=block,
            num_warps=4,
        )  # fmt: skip
        groups = min(_GROUPS, triton.next_power_of_2(triton.cdiv(channels, 32)))
        _enter[(tokens, triton.cdiv(channels, groups * 32))](
            streams, pre, sums, base, scale, norm_weight, mixes, following, coefficients, y, x,
            parts, iterations, norm_eps, eps, CHANNELS=channels, ROUND=round_input, GROUPS=groups,
            PARTS=triton.next_power_of_2(parts), num_warps=4,
        )  # fmt: skip
    return following, coefficients, y, x


@triton.jit
def _leave(
    streams, output, coefficients, routed, out, parts, CHANNELS: tl.constexpr,
    HAS_ROUTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < CHANNELS
    kind = streams.dtype.element_ty
    o = tl.load(output + token * CHANNELS + c, mask=inside, other=0.0).to(tl.float32)
    if HAS_ROUTED:
        total = tl.zeros([BLOCK], tl.float32)
        for part in range(parts):
            at = routed + (token * parts + part) * CHANNELS + c
            total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        o = (total + o).to(kind).to(tl.float32)
    values = coefficients + token * 20
    for j in tl.static_range(4):
        v = tl.load(values + j) * o
        for i in tl.static_range(4):
            at = streams + (token * 4 + i) * CHANNELS + c
            s = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            v += tl.load(values + 4 + i * 4 + j) * s
        tl.store(out + (token * 4 + j) * CHANNELS + c, v.to(kind), mask=inside)


def leave_streams(
    streams: Tensor, output: Tensor, coefficients: Tensor, routed: Tensor | None = None
) -> Tensor:
    """Streams behind a sublayer; see `deepinfer.kernels.reference.hyper_connection.leave_streams`.

    Raises:
        ShapeError: There are not four streams.
    """
    tokens, channels = _check(streams)
    out = torch.empty_like(streams)
    if tokens:
        block = min(512, triton.next_power_of_2(channels))
        _leave[(tokens, triton.cdiv(channels, block))](
            streams, output, coefficients, output if routed is None else routed, out,
            0 if routed is None else routed.shape[1], CHANNELS=channels,
            HAS_ROUTED=routed is not None, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


def _check(streams: Tensor) -> tuple[int, int]:
    tokens, count, channels = streams.shape
    if count != _STREAMS or not streams.is_contiguous():
        raise ShapeError(
            f"streams have shape {tuple(streams.shape)}; this kernel takes four contiguous streams. Use the reference.",
            argument="streams", expected=("tokens", _STREAMS, "channels"), found=tuple(streams.shape),
        )  # fmt: skip
    return tokens, channels
