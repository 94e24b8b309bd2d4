"""Twins of small functions for a few tokens on the CPU, where the number and price of calls are the cost.

With one token a torch call costs more than its arithmetic, and a numpy call about a third of it. Each function here
computes what its torch twin computes, in fp32, on the same memory; `fits` says when it may be used.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "enter_sublayer",
    "fits",
    "leave_sublayer",
    "normalise",
    "rms_norm",
    "round_fp8",
    "round_mxfp4",
    "route",
    "swiglu",
]

_MOST_VALUES = 4096
_ONE = np.float32(1)
_EXPONENT = np.int32(0x7F800000)
_dot, _divide = np.dot, np.divide
_max, _sum = np.maximum.reduce, np.add.reduce


def fits(x: Tensor, *parameters: Tensor) -> bool:
    """Whether `x` holds few fp32 values on the CPU, and nothing needs a gradient."""
    return (
        x.is_cpu
        and x.numel() <= _MOST_VALUES
        and x.dtype is torch.float32
        and not x.requires_grad
        and not any(p.requires_grad for p in parameters)
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Twin of `norm.rms_norm`; `weight` is fp32."""
    return torch.from_numpy(_rms_norm(x.numpy(), weight.numpy(), eps))


def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    squares = _sum(x * x, -1, keepdims=True)
    out: np.ndarray = x / np.sqrt(squares * np.float32(1 / x.shape[-1]) + np.float32(eps))
    out *= weight
    return out


# ---- rounding ----


def round_fp8(x: Tensor) -> Tensor:
    """Twin of `kernels.round_fp8` with groups of 32: the same bits."""
    return _round(x.numpy(), *_FP8)


def round_mxfp4(x: Tensor) -> Tensor:
    """Twin of `kernels.round_mxfp4`: the same bits."""
    return _round(x.numpy(), *_MXFP4)


_FP8 = (np.float32(1e-4), np.int32(0x1FFFFF), np.float32(2.0**-14), np.float32(1.5 * 2**20))
_MXFP4 = (
    np.float32(6 * 2.0**-126),
    np.int32(0x3FFFFF),
    np.float32(2.0**-2),
    np.float32(1.5 * 2**22),
)


def _round(
    x: np.ndarray, smallest: np.float32, carry: np.int32, floor: np.float32, magic: np.float32
) -> Tensor:
    """Rounds groups of 32 to a few mantissa bits, above a floor that hangs on the group's largest value.

    `carry` lifts the exponent where the largest value exceeds the format's largest mantissa, so that the masked
    bits are the group's power of two; below `floor` times it, values have the fixed step of subnormals. Adding and
    taking away 1.5 * 2^23 steps rounds to nearest, ties to even.
    """
    groups = x.reshape(-1, 32)
    largest = np.maximum(_max(np.abs(groups), -1, keepdims=True), smallest)
    bound = ((largest.view(np.int32) + carry) & _EXPONENT).view(np.float32)
    anchor = np.maximum((groups.view(np.int32) & _EXPONENT).view(np.float32), bound * floor)
    anchor *= magic
    rounded = groups + anchor
    rounded -= anchor
    return torch.from_numpy(rounded.reshape(x.shape))


# ---- stream mixing ----


def enter_sublayer(
    streams: Tensor,
    pre: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    iterations: int,
    norm_eps: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Twin of `hyper_connection.enter_sublayer`: next pre, post, mix, and the normed input."""
    values, n = streams.numpy(), streams.shape[1]
    flat = values.reshape(values.shape[0], -1)
    m = F.linear(torch.from_numpy(flat), fn).numpy()
    squares = _sum(flat * flat, -1, keepdims=True)
    m = m / np.sqrt(squares * np.float32(1 / flat.shape[-1]) + np.float32(norm_eps))
    m *= np.repeat(scale.numpy(), _part_sizes(n))
    m += base.numpy()
    gates = _ONE / (_ONE + np.exp(-m[:, : 2 * n]))
    post = gates[:, n:]
    post += post
    mix = m[:, 2 * n :].reshape(-1, n, n)
    mix = np.exp(mix - _max(mix, -1, keepdims=True))
    mix /= _sum(mix, -1, keepdims=True)
    mix += np.float32(eps)
    mix = normalise(mix, iterations, eps)
    u = np.matmul(pre.numpy()[:, None], values)[:, 0]
    y = _rms_norm(u, norm_weight.numpy(), norm_eps)
    next_pre = gates[:, :n] + np.float32(eps)
    tensor = torch.from_numpy
    return tensor(next_pre), tensor(post), tensor(mix), tensor(y)


def leave_sublayer(streams: Tensor, output: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """Twin of `hyper_connection.leave_sublayer`."""
    out = np.matmul(mix.numpy().transpose(0, 2, 1), streams.numpy())
    out += post.numpy()[:, :, None] * output.numpy()[:, None]
    return torch.from_numpy(out)


@functools.cache
def _part_sizes(n: int) -> np.ndarray:
    return np.array([n, n, n * n])


def normalise(k: np.ndarray, iterations: int, eps: float) -> np.ndarray:
    """The loop of `hyper_connection.sinkhorn`: one product and one division a half step, the same bits.

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
    columns, rows = _summing_matrices(n, eps)
    entries = np.ones((tokens, n * n + 1), np.float32)
    entries[:, :-1] = k.reshape(tokens, n * n)
    sums = np.empty_like(entries)
    _divide(entries, _dot(entries, columns, sums), entries)
    for _ in range(iterations - 1):
        _divide(entries, _dot(entries, rows, sums), entries)
        _divide(entries, _dot(entries, columns, sums), entries)
    return entries[:, :-1].reshape(tokens, n, n)


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


# ---- experts ----


def route(scores: Tensor, bias: Tensor, topk: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Twin of the choice in `moe.Gate`: weights and expert ids from router products."""
    s = np.sqrt(np.logaddexp(scores.numpy(), np.float32(0)))
    order = np.argsort(-(s + bias.numpy()), -1, kind="stable")
    experts = np.sort(order[:, :topk], -1)
    weights = s[np.arange(len(s))[:, None], experts]
    weights *= np.float32(scaling) / (_sum(weights, -1, keepdims=True) + np.float32(1e-20))
    return torch.from_numpy(weights), torch.from_numpy(experts)


def swiglu(gate_up: Tensor, limit: float, weights: Tensor) -> Tensor:
    """Twin of `moe.clamped_swiglu`."""
    values = gate_up.numpy()
    half = values.shape[-1] // 2
    most = np.float32(limit)
    gate = np.minimum(values[:, :half], most)
    up = np.maximum(np.minimum(values[:, half:], most), -most)
    up *= gate / (_ONE + np.exp(-gate))
    up[: len(weights)] *= weights.numpy()[:, None]
    return torch.from_numpy(up)
