"""Manifold-constrained hyper-connections (mHC): four residual streams, mixed by a doubly stochastic matrix.

Each sublayer computes three things from the streams: `pre`, how the NEXT sublayer sums the streams into its
input (so a sublayer reads with the `pre` of the one before it); `post`, how its own output is spread over the
streams; and `mix`, the matrix by which the streams themselves move on.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["StreamMix", "collapse", "expand", "initial_pre", "sinkhorn", "stream_mix"]


class StreamMix(NamedTuple):
    """Coefficients of one sublayer, all fp32.

    Attributes:
        pre: Weights by which the next sublayer sums the streams, shape [tokens, streams].
        post: Weights by which this sublayer's output enters the streams, shape [tokens, streams].
        mix: Stream i enters stream j with weight `mix[:, i, j]`, shape [tokens, streams, streams].
    """

    pre: Tensor
    post: Tensor
    mix: Tensor


def sinkhorn(scores: Tensor, iterations: int, eps: float) -> Tensor:
    """Doubly stochastic matrices: softmax over the last axis, then column and row normalisation in turn.

    Args:
        scores: Scores, shape [tokens, n, n], fp32.
        iterations: Column normalisations; one fewer row normalisations lie between them.
        eps: Added to the softmax and to every sum.

    Returns:
        The matrices, shape [tokens, n, n], fp32; columns sum to 1 up to `eps`.
    """
    k = torch.softmax(scores, -1) + eps
    if k.device.type == "cpu" and not k.requires_grad:
        return _normalise_on_cpu(k, iterations, eps)
    k = k / (k.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        k = k / (k.sum(-1, keepdim=True) + eps)
        k = k / (k.sum(-2, keepdim=True) + eps)
    return k


def _normalise_on_cpu(k: Tensor, iterations: int, eps: float) -> Tensor:
    """The loop of `sinkhorn` where calls are the cost: one product and one division a half step.

    A matrix is a row of n * n entries and a constant 1; the product with `columns` or `rows` gives every
    entry's sum plus eps, and leaves the constant alone.
    """
    tokens, n, _ = k.shape
    columns, rows = _summing_matrices(n, eps)
    entries = np.ones((tokens, n * n + 1), np.float32)
    entries[:, :-1] = k.numpy().reshape(tokens, n * n)
    sums = np.empty_like(entries)
    dot, divide = np.dot, np.divide
    divide(entries, dot(entries, columns, sums), entries)
    for _ in range(iterations - 1):
        divide(entries, dot(entries, rows, sums), entries)
        divide(entries, dot(entries, columns, sums), entries)
    return torch.from_numpy(entries[:, :-1].reshape(tokens, n, n))


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


def stream_mix(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    iterations: int,
    norm_eps: float,
    eps: float,
) -> StreamMix:
    """Mixing coefficients of one sublayer.

    Args:
        streams: Residual streams, shape [tokens, n, channels].
        fn: Projection, shape [n * (n + 2), n * channels], fp32.
        base: Bias, shape [n * (n + 2)], fp32.
        scale: Factor of each part (pre, post, mix) repeated over it, shape [n * (n + 2)], fp32.
        iterations: Sinkhorn iterations.
        norm_eps: Added to the mean square over all streams of a token.
        eps: The `hc_eps` of the configuration.

    Returns:
        The coefficients.
    """
    n = streams.shape[1]
    flat = streams.flatten(1).float()
    mean_square = flat.square().mean(-1, keepdim=True)
    m = torch.addcmul(base, F.linear(flat, fn) * torch.rsqrt(mean_square + norm_eps), scale)
    gates = torch.sigmoid(m[:, : 2 * n])
    mix = sinkhorn(m[:, 2 * n :].unflatten(-1, (n, n)), iterations, eps)
    return StreamMix(gates[:, :n] + eps, 2 * gates[:, n:], mix)


def initial_pre(num_tokens: int, streams: int, device: torch.device) -> Tensor:
    """Weights of the very first sublayer: stream 0 alone, shape [tokens, streams], fp32."""
    pre = torch.zeros(num_tokens, streams, device=device)
    pre[:, 0] = 1
    return pre


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Sublayer input: the weighted sum of the streams in fp32, shape [tokens, channels], in the streams' dtype."""
    return torch.bmm(pre.unsqueeze(1), streams.float()).squeeze(1).to(streams.dtype)


def expand(streams: Tensor, output: Tensor, mixes: StreamMix) -> Tensor:
    """Streams behind a sublayer, in fp32 and then in the streams' dtype.

    Args:
        streams: Streams before it, shape [tokens, n, channels].
        output: The sublayer's output, shape [tokens, channels].
        mixes: Its coefficients. Stream j becomes `post[j] * output + sum_i mix[i, j] * streams[i]`: the sum
            runs over the FIRST axis of `mix`.

    Returns:
        The new streams, same shape and dtype as `streams`.
    """
    added = mixes.post.unsqueeze(-1) * output.float().unsqueeze(1)
    return torch.baddbmm(added, mixes.mix.transpose(1, 2), streams.float()).to(streams.dtype)
