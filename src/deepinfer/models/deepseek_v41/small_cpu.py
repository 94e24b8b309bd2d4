"""Twins on arrays of small functions, for a few tokens on the CPU, where the number and price of calls are the cost.

With one token a torch call costs more than its arithmetic, and a numpy call about a third of it. Each function here
computes what its torch twin computes, in fp32; `fits` says when it may be used.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from deepinfer.models.deepseek_v41.topk import topk_lowest_index

__all__ = [
    "MOST_STEP_VALUES",
    "apply_rope_",
    "candidate_mask",
    "engram_gate",
    "enter_sublayer",
    "fits",
    "leave_sublayer",
    "normalise",
    "quiet",
    "rms_norm",
    "round_fp8",
    "round_mxfp4",
    "round_nvfp4",
    "route",
    "swiglu",
]

MOST_STEP_VALUES = 2**15
"""Most values of the widest tensor of a step that runs on arrays from end to end."""

_MOST_VALUES = 4096
_ONE = np.float32(1)
_EXPONENT = np.int32(0x7F800000)
_divide = np.divide
_max, _sum = np.maximum.reduce, np.add.reduce


def fits(x: Tensor, most_values: int = _MOST_VALUES) -> bool:
    """Whether `x` holds few fp32 values on the CPU, and gradients are off (numpy would hide from them)."""
    return (
        x.is_cpu
        and x.numel() <= most_values
        and x.dtype is torch.float32
        and not torch.is_grad_enabled()
    )


def quiet() -> np.errstate:
    """Context in which overflow and NaN pass without numpy's warnings, as they do in torch."""
    return np.errstate(all="ignore")


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Twin of `norm.rms_norm`."""
    out: np.ndarray = x / _root_mean_square(x, eps)
    out *= weight
    return out


def _root_mean_square(x: np.ndarray, eps: float) -> np.ndarray | np.float32:
    """The root of the mean square over the last axis plus eps, shape [..., 1], or a number for one row."""
    channels = x.shape[-1]
    if x.size == channels:
        return np.float32(math.sqrt(float(np.vdot(x, x)) / channels + eps))
    squares = _sum(x * x, -1, keepdims=True)
    root: np.ndarray = np.sqrt(squares * np.float32(1 / channels) + np.float32(eps))
    return root


# ---- rounding ----


def round_fp8(x: np.ndarray) -> np.ndarray:
    """Twin of `kernels.round_fp8` with groups of 32: the same bits below 2^100."""
    return _round_groups(x, *_FP8)


def round_mxfp4(x: np.ndarray) -> np.ndarray:
    """Twin of `kernels.round_mxfp4`: the same bits below 2^100."""
    return _round_groups(x, *_MXFP4)


def round_nvfp4(x: np.ndarray) -> np.ndarray:
    """Twin of `kernels.round_nvfp4`: the same bits below 2^100."""
    groups = x.reshape(-1, 16)
    largest = _max(np.abs(groups), -1, keepdims=True, initial=_NVFP4_SMALLEST)
    scale = _to_grid(np.minimum(largest / _SIX, _FP8_MAX), _FP8_NORMAL, _FP8_STEP)
    rounded = _to_grid(np.maximum(np.minimum(groups / scale, _SIX), -_SIX), _FP4_NORMAL, _FP4_STEP)
    rounded *= scale
    return rounded.reshape(x.shape)


def _bits(value: float) -> np.int32:
    return np.float32(value).view(np.int32)


# Exponent bits that turn a power of two into 1.5 * 2^23 rounding steps of 3 or 1 mantissa bits below it.
_FP8_STEP, _FP4_STEP = np.int32((20 << 23) | 0x400000), np.int32((22 << 23) | 0x400000)
# Smallest normal numbers; below them, steps stay as they are.
_FP8_NORMAL, _FP4_NORMAL = _bits(2.0**-6), _bits(1.0)
_SIX, _FP8_MAX, _NVFP4_SMALLEST = np.float32(6), np.float32(448), np.float32(6 * 2.0**-9)
# Lift of the exponent beyond the largest mantissa, least exponent, normal numbers below the top, and steps.
_FP8 = (np.int32(0x1FFFFF), _bits(2.0**-14), np.int32(14 << 23), _FP8_STEP)
_MXFP4 = (np.int32(0x3FFFFF), _bits(2.0**-124), np.int32(2 << 23), _FP4_STEP)


def _round_groups(
    x: np.ndarray, carry: np.int32, least: np.int32, below: np.int32, step: np.int32
) -> np.ndarray:
    """Rounds groups of 32 to a few mantissa bits, with a smallest step that hangs on the group's largest value."""
    groups = x.reshape(-1, 32)
    lifted = groups.view(np.int32) + carry
    lifted &= _EXPONENT
    top = _max(lifted, -1, keepdims=True, initial=least)
    top -= below
    return _to_grid(groups, top, step).reshape(x.shape)


def _to_grid(x: np.ndarray, normal: np.ndarray | np.int32, step: np.int32) -> np.ndarray:
    """Rounds to nearest, ties to even, by adding and taking away 1.5 * 2^23 steps; works on exponent bits."""
    bits = x.view(np.int32) & _EXPONENT
    np.maximum(bits, normal, out=bits)
    bits += step
    anchor = bits.view(np.float32)
    rounded: np.ndarray = x + anchor
    rounded -= anchor
    return rounded


# ---- stream mixing ----


def enter_sublayer(
    streams: np.ndarray,
    pre: np.ndarray,
    products: np.ndarray,
    base: np.ndarray,
    scale: np.ndarray,
    norm_weight: np.ndarray,
    iterations: int,
    norm_eps: float,
    eps: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Twin of `hyper_connection.enter_sublayer`; `products` are those of the streams with `fn`.

    Returns:
        The normed input, the next pre, post and mix.
    """
    tokens, n, _ = streams.shape
    flat = streams.reshape(tokens, -1)
    m = products / _root_mean_square(flat, norm_eps)
    m *= scale.take(_parts(n))
    m += base
    gates = _ONE / (_ONE + np.exp(-m[:, : 2 * n]))
    post = gates[:, n:]
    post += post
    mix = m[:, 2 * n :].reshape(-1, n, n)
    mix = np.exp(mix - _max(mix, -1, keepdims=True))
    mix /= _sum(mix, -1, keepdims=True)
    mix += np.float32(eps)
    mix = normalise(mix, iterations, eps)
    summed = pre.dot(streams[0]) if tokens == 1 else np.matmul(pre[:, None], streams)[:, 0]
    y = rms_norm(summed, norm_weight, norm_eps)
    return y, gates[:, :n] + np.float32(eps), post, mix


def leave_sublayer(
    streams: np.ndarray, output: np.ndarray, post: np.ndarray, mix: np.ndarray
) -> np.ndarray:
    """Twin of `hyper_connection.leave_sublayer`."""
    out: np.ndarray
    if len(streams) == 1:
        out = mix[0].T.dot(streams[0])
        out += post.T * output
        return out[None]
    out = np.matmul(mix.transpose(0, 2, 1), streams)
    out += post[:, :, None] * output[:, None]
    return out


@functools.cache
def _parts(n: int) -> np.ndarray:
    return np.repeat(np.arange(3), [n, n, n * n])


def normalise(k: np.ndarray, iterations: int, eps: float) -> np.ndarray:
    """The loop of `hyper_connection.sinkhorn`: one product and one division a half step.

    A matrix is a row of n * n entries and a constant 1; the product with one of two constant matrices gives every
    entry's column or row sum plus eps, and leaves the constant alone.

    Args:
        k: Positive matrices, shape [tokens, n, n], fp32.
        iterations: Column normalisations; one fewer row normalisations lie between them.
        eps: Added to every sum.

    Returns:
        Shape [tokens, n, n], fp32.
    """
    tokens, n, _ = k.shape
    if tokens == 1 and n == 4:
        return _normalise_one(k, iterations, eps)
    columns, rows = _summing_matrices(n, eps)
    entries = np.ones((tokens, n * n + 1), np.float32)
    entries[:, :-1] = k.reshape(tokens, n * n)
    sums = np.empty_like(entries)
    _divide(entries, entries.dot(columns, sums), entries)
    for _ in range(iterations - 1):
        _divide(entries, entries.dot(rows, sums), entries)
        _divide(entries, entries.dot(columns, sums), entries)
    return entries[:, :-1].reshape(tokens, n, n)


def _normalise_one(k: np.ndarray, iterations: int, eps: float) -> np.ndarray:
    """`normalise` for one matrix of four streams: its factors by row and column, as Python numbers.

    One call of numpy costs more than the arithmetic of a half step. With k[i, j] / (r[i] * c[j]) for the matrix so
    far, a column sum plus eps times c[j] is the new c[j], so that eps enters as `eps * c`; likewise for rows.
    """
    (a0, a1, a2, a3), (b0, b1, b2, b3), (c0, c1, c2, c3), (d0, d1, d2, d3) = k[0].tolist()
    a = b = c = d = w = x = y = z = 1.0  # reciprocal factors of the rows; factors of the columns
    p = q = r = s = 1.0  # factors of the rows
    for left in range(iterations, 0, -1):
        w = a0 * a + b0 * b + c0 * c + d0 * d + eps * w
        x = a1 * a + b1 * b + c1 * c + d1 * d + eps * x
        y = a2 * a + b2 * b + c2 * c + d2 * d + eps * y
        z = a3 * a + b3 * b + c3 * c + d3 * d + eps * z
        if left == 1:
            break
        e, f, g, h = 1.0 / w, 1.0 / x, 1.0 / y, 1.0 / z
        p = a0 * e + a1 * f + a2 * g + a3 * h + eps * p
        q = b0 * e + b1 * f + b2 * g + b3 * h + eps * q
        r = c0 * e + c1 * f + c2 * g + c3 * h + eps * r
        s = d0 * e + d1 * f + d2 * g + d3 * h + eps * s
        a, b, c, d = 1.0 / p, 1.0 / q, 1.0 / r, 1.0 / s
    rows = np.array(((a,), (b,), (c,), (d,)), np.float32)
    return k * rows / np.array((w, x, y, z), np.float32)


@functools.cache
def _summing_matrices(n: int, eps: float) -> tuple[np.ndarray, np.ndarray]:
    ones, identity = np.ones((n, n)), np.eye(n)
    matrices = []
    for block in (np.kron(ones, identity), np.kron(identity, ones)):
        matrix = np.zeros((n * n + 1, n * n + 1), np.float32)
        matrix[:-1, :-1] = block
        matrix[-1, :-1] = eps
        matrix[-1, -1] = 1
        matrices.append(matrix)
    return matrices[0], matrices[1]


# ---- attention ----


def apply_rope_(x: np.ndarray, phases: np.ndarray) -> np.ndarray:
    """Twin of `rope.apply_rope_`, in place."""
    tail = x[..., x.shape[-1] - 2 * phases.shape[-1] :].view(np.complex64)
    tail *= phases
    return x


def candidate_mask(scores: Tensor, num_visible: Tensor, num_blocks: int, block_size: int) -> Tensor:
    """Twin of `indexer.candidate_mask`."""
    values = scores.numpy()
    rows = values.shape[-1]
    blocks = -(-rows // block_size)
    padded = np.full((*values.shape[:-1], blocks * block_size), -np.inf, np.float32)
    padded[..., :rows] = values
    best = _max(padded.reshape(*values.shape[:-1], blocks, block_size), -1)
    newest = np.maximum(num_visible.numpy() - 1, 0)[..., None] // block_size
    visible = best > -np.inf
    np.copyto(best, np.inf, where=(np.arange(blocks) == newest) & visible)
    picked = topk_lowest_index(torch.from_numpy(best), min(num_blocks, blocks)).numpy()
    kept = np.zeros(best.shape, dtype=bool)
    np.put_along_axis(kept, picked, True, -1)
    kept &= visible
    mask = kept.repeat(block_size, -1)[..., :rows]
    mask &= values > -np.inf
    return torch.from_numpy(mask)


# ---- Engram ----


def engram_gate(
    x: np.ndarray, key_value: np.ndarray, q_weight: np.ndarray, k_weight: np.ndarray, eps: float
) -> np.ndarray:
    """Twin of the gate of `engram.Engram` for text: the new streams."""
    kv = key_value.reshape(len(x), x.shape[1] + 1, -1)
    key, value = kv[:, :-1], kv[:, -1:]
    weighted = q_weight * k_weight
    weighted = weighted * key
    dot = _sum(weighted * x, -1, keepdims=True)
    width = np.float32(1 / x.shape[-1])
    scale = _sum(x * x, -1, keepdims=True) * width + np.float32(eps)
    scale *= _sum(key * key, -1, keepdims=True) * width + np.float32(eps)
    dot /= np.sqrt(scale * np.float32(x.shape[-1]))
    gate = np.copysign(np.sqrt(np.maximum(np.abs(dot), np.float32(1e-6))), dot)
    gate *= dot != 0
    out: np.ndarray = x + value / (_ONE + np.exp(-gate))
    return out


# ---- experts ----


def route(
    scores: np.ndarray, bias: np.ndarray, topk: int, scaling: float
) -> tuple[np.ndarray, np.ndarray]:
    """Twin of the choice in `moe.Gate`: weights and expert ids from router products."""
    s = np.sqrt(np.logaddexp(scores, np.float32(0)))
    experts = (-(s + bias)).argsort(-1, "stable")[:, :topk]
    experts.sort(-1)
    weights = s[np.arange(len(s))[:, None], experts]
    weights *= np.float32(scaling) / (_sum(weights, -1, keepdims=True) + np.float32(1e-20))
    return weights, experts


def swiglu(gate_up: np.ndarray, limit: float, weights: np.ndarray) -> np.ndarray:
    """Twin of `moe.clamped_swiglu`."""
    half = gate_up.shape[-1] // 2
    most = np.float32(limit)
    gate = np.minimum(gate_up[:, :half], most)
    up: np.ndarray = np.minimum(gate_up[:, half:], most)
    np.maximum(up, -most, out=up)
    up *= gate
    np.negative(gate, out=gate)
    np.exp(gate, out=gate)
    gate += _ONE
    up /= gate
    up[: len(weights)] *= weights[:, None]
    return up
