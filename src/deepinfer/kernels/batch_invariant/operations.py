"""The operations, served by torch on CPU tensors and by Triton on CUDA tensors."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from deepinfer.core.errors import ShapeError
from deepinfer.kernels.batch_invariant import cpu
from deepinfer.kernels.batch_invariant.backend import Backend, uses_triton
from deepinfer.kernels.reference.experts import ExpertOrder

__all__ = [
    "expert_linear",
    "grouped_linear",
    "index_scores",
    "linear",
    "log_softmax",
    "mean_square",
    "mix_streams",
    "pair_linear",
    "rms_norm",
    "row_sum",
    "sinkhorn",
    "sparse_attention",
    "sum_streams",
]


def linear(x: Tensor, weight: Tensor, *, backend: Backend | None = None) -> Tensor:
    """Product with a matrix, accumulated in fp32.

    Args:
        x: Rows, shape [..., in_channels], fp32 or bf16.
        weight: Matrix, shape [out_channels, in_channels], dtype of `x`.
        backend: "torch", "triton", or None for that of the device.

    Returns:
        Shape [..., out_channels], dtype of `x`.

    Raises:
        ShapeError: Shapes or dtypes do not fit.
        UnsupportedHardware: The backend cannot serve the device, or the CPU's products depend on a row's place.
    """
    _check_product(x, weight, weight.dim() == 2 and x.shape[-1] == weight.shape[1])
    return _kernels(x, backend).linear(x, weight)


def grouped_linear(x: Tensor, weight: Tensor, *, backend: Backend | None = None) -> Tensor:
    """One matrix for each group of channels.

    Args:
        x: Rows, shape [tokens, groups, in_channels], fp32 or bf16.
        weight: Matrices, shape [groups, out_channels, in_channels], dtype of `x`.
        backend: As in `linear`.

    Returns:
        Shape [tokens, groups, out_channels], dtype of `x`.

    Raises:
        ShapeError: Shapes or dtypes do not fit.
        UnsupportedHardware: As in `linear`.
    """
    fits = x.dim() == weight.dim() == 3 and x.shape[1:] == (weight.shape[0], weight.shape[2])
    _check_product(x, weight, fits)
    return _kernels(x, backend).grouped_linear(x, weight)


def expert_linear(
    x: Tensor, weight: Tensor, counts: Sequence[int] | Tensor, *, backend: Backend | None = None
) -> Tensor:
    """Each expert's matrix times its own rows.

    Args:
        x: Rows in the order of their experts, shape [rows, in_channels], fp32 or bf16.
        weight: Matrices, shape [experts, out_channels, in_channels], dtype of `x`.
        counts: Rows of each expert, in sum the rows of `x`; on CUDA best a tensor there, shape [experts], int64.
        backend: As in `linear`.

    Returns:
        Shape [rows, out_channels], dtype of `x`.

    Raises:
        ShapeError: Shapes or dtypes do not fit.
        UnsupportedHardware: As in `linear`.
    """
    fits = x.dim() == 2 and weight.dim() == 3 and x.shape[1] == weight.shape[2]
    _check_product(x, weight, fits and len(counts) == weight.shape[0])
    return _kernels(x, backend).expert_linear(x, weight, counts)


def pair_linear(
    x: Tensor,
    weight: Tensor,
    order: ExpertOrder,
    rows_per_input: int,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """Each pair's row times the matrix of the pair's expert.

    Args:
        x: Rows, shape [pairs / rows_per_input, in_channels], fp32 or bf16.
        weight: Matrices, shape [experts, out_channels, in_channels], dtype of `x`.
        order: Of the pairs, from `expert_order` of the device's `deepinfer.kernels.fused`.
        rows_per_input: Consecutive pairs that share a row of `x`.
        backend: As in `linear`.

    Returns:
        Shape [pairs, out_channels], in the order of the pairs, dtype of `x`.

    Raises:
        ShapeError: Shapes or dtypes do not fit.
        UnsupportedHardware: As in `linear`.
    """
    fits = x.dim() == 2 and weight.dim() == 3 and x.shape[1] == weight.shape[2]
    _check_product(x, weight, fits and len(x) * rows_per_input == len(order.experts))
    return _kernels(x, backend).pair_linear(x, weight, order, rows_per_input)


def sparse_attention(
    queries: Tensor,
    kv: Tensor,
    index: Tensor,
    valid: Tensor,
    sink: Tensor,
    scale: float,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """Attention of tokens to rows of a table, with a sink; one latent is key and value. Computed in fp32.

    A token's bits depend on its list of rows, its order and its width; a masked row adds exact zeros. Lists of one
    fixed width thus make a token independent of its batch.

    Args:
        queries: Shape [tokens, heads, head_dim], fp32 or bf16.
        kv: The table, shape [table, head_dim]; rows that a list names must be finite, masked or not.
        index: Rows of each token, shape [tokens, rows], int64.
        valid: False masks a row, shape [tokens, rows], bool.
        sink: Logit of each head whose value is zero, shape [heads], fp32.
        scale: Factor on q . k.
        backend: As in `linear`.

    Returns:
        Shape [tokens, heads, head_dim], dtype of `queries`; zeros where no row is valid.

    Raises:
        ShapeError: Shapes do not fit.
        UnsupportedHardware: The backend cannot serve the device.
    """
    if queries.dim() != 3 or kv.dim() != 2 or index.shape != valid.shape or index.dim() != 2:
        _refuse_attention(queries, kv, index, valid)
    if queries.shape[2] != kv.shape[1] or len(index) != len(queries):
        _refuse_attention(queries, kv, index, valid)
    if not len(queries):
        return torch.empty_like(queries)
    return _kernels(queries, backend).sparse_attention(queries, kv, index, valid, sink, scale)


def index_scores(
    queries: Tensor,
    weights: Tensor,
    keys: Tensor,
    visible: Tensor | None = None,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """Weighted sum over heads of the positive part of q . k, in fp32 and in fixed tiles of keys.

    Args:
        queries: Shape [groups, tokens, heads, dim].
        weights: Shape [groups, tokens, heads], fp32.
        keys: Shape [groups, rows, dim]; the leading axis may have any stride.
        visible: Rows that each query sees, from the first on; the scores of the others are -inf. Shape [groups,
            tokens], int64; None for all.
        backend: As in `linear`.

    Returns:
        Shape [groups, tokens, rows], fp32. A score depends on its query, its key and the key's row.

    Raises:
        UnsupportedHardware: The backend cannot serve the device.
    """
    if not keys.shape[1]:
        return weights.new_empty(*weights.shape[:2], 0)
    return _kernels(queries, backend).index_scores(queries, weights, keys, visible)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, backend: Backend | None = None) -> Tensor:
    """Root-mean-square norm over the last axis, in fp32.

    Args:
        x: Shape [..., channels].
        weight: Gains, shape [channels].
        eps: Added to the mean square.
        backend: As in `linear`.

    Returns:
        Shape and dtype of `x`.
    """
    return _kernels(x, backend).rms_norm(x, weight, eps)


def mean_square(x: Tensor, *, backend: Backend | None = None) -> Tensor:
    """Mean of the squares over the last axis of `x`, shape [..., channels]: shape [..., 1], fp32."""
    return _kernels(x, backend).mean_square(x)


def row_sum(x: Tensor, *, backend: Backend | None = None) -> Tensor:
    """Sum over the last axis of `x`, shape [..., channels]: shape [..., 1], fp32."""
    return _kernels(x, backend).row_sum(x)


def log_softmax(x: Tensor, *, backend: Backend | None = None) -> Tensor:
    """Logarithm of the softmax over the last axis of `x`, shape [rows, channels]: same shape, fp32."""
    return _kernels(x, backend).log_softmax(x)


def sinkhorn(
    scores: Tensor, iterations: int, eps: float, *, backend: Backend | None = None
) -> Tensor:
    """Doubly stochastic matrices: softmax over the last axis, then column and row normalisation in turn.

    Args:
        scores: Shape [tokens, n, n], fp32.
        iterations: Column normalisations; one fewer row normalisations lie between them.
        eps: Added to the softmax and to every sum.
        backend: As in `linear`.

    Returns:
        Shape [tokens, n, n], fp32.
    """
    return _kernels(scores, backend).sinkhorn(scores, iterations, eps)


def sum_streams(streams: Tensor, weights: Tensor, *, backend: Backend | None = None) -> Tensor:
    """Weighted sum of residual streams, in fp32.

    Args:
        streams: Shape [tokens, n, channels].
        weights: Shape [tokens, n], fp32.
        backend: As in `linear`.

    Returns:
        Shape [tokens, channels], dtype of `streams`.
    """
    return _kernels(streams, backend).sum_streams(streams, weights)


def mix_streams(
    streams: Tensor, output: Tensor, post: Tensor, mix: Tensor, *, backend: Backend | None = None
) -> Tensor:
    """Streams behind a sublayer: stream j is `post[j] * output + sum_i mix[i, j] * streams[i]`, in fp32.

    Args:
        streams: Shape [tokens, n, channels].
        output: Shape [tokens, channels].
        post: Shape [tokens, n], fp32.
        mix: Shape [tokens, n, n], fp32.
        backend: As in `linear`.

    Returns:
        Shape and dtype of `streams`.
    """
    return _kernels(streams, backend).mix_streams(streams, output, post, mix)


def _kernels(x: Tensor, backend: Backend | None) -> ModuleType:
    if not uses_triton(x, backend):
        return cpu
    # Imported on use: a machine without CUDA needs no Triton.
    from deepinfer.kernels.batch_invariant import cuda

    return cuda


def _check_product(x: Tensor, weight: Tensor, fits: bool) -> None:
    dtypes = (torch.float32, torch.bfloat16)
    if fits and x.dtype == weight.dtype and x.dtype in dtypes:
        return
    raise ShapeError(
        f"x is {tuple(x.shape)} of {x.dtype} and weight is {tuple(weight.shape)} of {weight.dtype}; the inner axes "
        "must agree and both must be fp32 or both bf16.",
        argument="weight", expected="[..., out_channels, in_channels]", found=tuple(weight.shape),
    )  # fmt: skip


def _refuse_attention(queries: Tensor, kv: Tensor, index: Tensor, valid: Tensor) -> None:
    shapes = [tuple(t.shape) for t in (queries, kv, index, valid)]
    raise ShapeError(
        f"queries, kv, index and valid are {shapes}; they must be [tokens, heads, head_dim], [table, head_dim] and "
        "twice [tokens, rows].",
        argument="queries", expected="[tokens, heads, head_dim]", found=shapes[0],
    )  # fmt: skip
