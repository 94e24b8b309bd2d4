"""Manifold-constrained hyper-connections (mHC): several residual streams, mixed by doubly stochastic matrices.

Around each sublayer, with X the n streams of a token and m the projection of all of them, over their root mean square:

    pre'  = sigmoid(scale[0] * m[:n] + base[:n]) + eps               how the NEXT sublayer sums the streams
    post  = 2 * sigmoid(scale[1] * m[n:2n] + base[n:2n])             how the output enters the streams
    mix   = sinkhorn(scale[2] * m[2n:] + base[2n:])                  how the streams move on
    input = sum over i of pre[i] * X[i]                              with the pre of the sublayer BEFORE
    X'[j] = post[j] * output + sum over i of mix[i, j] * X[i]        the sum runs over the FIRST axis of mix

All of it is fp32; streams, input and output are in the dtype of the streams. The bits of a token do not depend on others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.core.errors import ShapeError
from deepinfer.kernels import contract
from deepinfer.kernels.host import is_plain
from deepinfer.kernels.norm import rms_norm
from deepinfer.kernels.reference import mhc as reference
from deepinfer.kernels.reference.mhc import prepare_mhc_projection
from deepinfer.kernels.registry import Operation

__all__ = ["mhc_head", "mhc_post", "mhc_pre", "prepare_mhc_projection", "sinkhorn"]

SINKHORN = Operation("sinkhorn", "Tensor scores, int iterations, float eps, Tensor(a!) out")
PRE = Operation(
    "mhc_pre",
    "Tensor streams, Tensor pre, Tensor fn, Tensor base, Tensor scale, int iterations, float norm_eps, "
    "float eps, Tensor(a!) following, Tensor(b!) post, Tensor(c!) mix, Tensor(d!) out",
)
POST = Operation(
    "mhc_post", "Tensor streams, Tensor output, Tensor post, Tensor mix, Tensor(a!) out"
)
HEAD = Operation("mhc_head", "Tensor streams, Tensor pre, Tensor(a!) out")
OPERATIONS = (SINKHORN, PRE, POST, HEAD)

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def sinkhorn(
    scores: Tensor, iterations: int = 20, eps: float = 1e-6, *, backend: str | None = None
) -> Tensor:
    """Doubly stochastic matrices: softmax over the last axis, then column and row normalisation in turn.

    Args:
        scores: Shape [tokens, n, n], fp32.
        iterations: Column normalisations, 1 or more; one fewer row normalisations lie between them.
        eps: Added to the softmax and to every sum.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Shape [tokens, n, n], fp32; columns sum to 1 up to `eps`. NaN throughout a matrix with a NaN.

    Raises:
        ShapeError: A shape or dtype is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    contract.check_dtype("scores", scores, torch.float32)
    contract.check_floats("scores", scores)
    _check_iterations(iterations)
    contract.check_shape(
        "scores", scores, (None, scores.shape[-1], scores.shape[-1]), "tokens, n, n"
    )
    if is_plain(scores, backend):
        return reference.sinkhorn(scores, iterations, eps)
    out = torch.empty_like(scores, memory_format=torch.contiguous_format)
    if out.numel():
        SINKHORN(backend, scores, iterations, eps, out)
    return out


def mhc_pre(
    streams: Tensor,
    pre: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    iterations: int = 20,
    norm_eps: float = 1e-20,
    eps: float = 1e-6,
    norm_weight: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input of a sublayer and its coefficients, with one reading of the streams.

    Args:
        streams: Residual streams, shape [tokens, n, channels], any float dtype; tokens and streams may lie apart.
        pre: Weights of the input sum, from the sublayer before, shape [tokens, n], fp32.
        fn: Projection, shape [n * (n + 2), n * channels], fp32; or what `prepare_mhc_projection` made of it, bf16. With bf16
            streams the kernel multiplies by 16 bits of it either way.
        base: Bias of the coefficients, shape [n * (n + 2)], fp32.
        scale: Factors of the pre, post and mix parts, shape [3], fp32.
        iterations: Of Sinkhorn.
        norm_eps: Added to every mean square.
        eps: Added in the mixing.
        norm_weight: Gains of the RMS norm of the input, shape [channels], any float dtype; None for no norm.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        The input, shape [tokens, channels], dtype of `streams`; post, shape [tokens, n]; mix, shape [tokens, n, n]; the
        next sublayer's pre, shape [tokens, n]; the last three fp32.

    Raises:
        ShapeError: A shape or dtype is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    tokens, n, channels = _check_streams(streams)
    _check_iterations(iterations)
    contract.check_shape("pre", pre, (tokens, n), "tokens, streams")
    matrix, axes = (n * (n + 2), n * channels), "coefficients, streams * channels"
    prepared = fn.dtype == torch.bfloat16
    contract.check_shape(
        "fn", fn, (2, *matrix) if prepared else matrix, f"parts, {axes}" if prepared else axes
    )
    contract.check_shape("base", base, (n * (n + 2),), "coefficients")
    contract.check_shape("scale", scale, (3,), "parts")
    for name, x in (("pre", pre), ("base", base), ("scale", scale)):
        contract.check_dtype(name, x, torch.float32)
    contract.check_dtype("fn", fn, torch.float32, torch.bfloat16)
    if norm_weight is not None:
        _check_gains(norm_weight, channels)
    if is_plain(streams, backend):
        return reference.mhc_pre(
            streams, pre, fn, base, scale, iterations, norm_eps, eps, norm_weight
        )
    out = streams.new_empty((tokens, channels))
    following, post = pre.new_empty((tokens, n)), pre.new_empty((tokens, n))
    mix = pre.new_empty((tokens, n, n))
    if out.numel():
        PRE(
            backend, streams, pre, fn, base, scale, iterations, norm_eps, eps, following, post, mix, out
        )  # fmt: skip
    if norm_weight is not None:
        out = rms_norm(out, norm_weight, norm_eps, backend=backend)
    return out, post, mix, following


def mhc_post(
    streams: Tensor, output: Tensor, post: Tensor, mix: Tensor, *, backend: str | None = None
) -> Tensor:
    """Streams behind a sublayer.

    Args:
        streams: Streams before it, shape [tokens, n, channels], any float dtype; tokens and streams may lie apart.
        output: Its output, shape [tokens, channels], same dtype.
        post: Weights by which the output enters, shape [tokens, n], fp32.
        mix: Stream i enters stream j with weight `mix[:, i, j]`, shape [tokens, n, n], fp32.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        The new streams, same shape and dtype as `streams`, contiguous.

    Raises:
        ShapeError: A shape or dtype is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    tokens, n, channels = _check_streams(streams)
    contract.check_shape("output", output, (tokens, channels), "tokens, channels")
    contract.check_dtype("output", output, streams.dtype)
    contract.check_shape("post", post, (tokens, n), "tokens, streams")
    contract.check_shape("mix", mix, (tokens, n, n), "tokens, streams, streams")
    for name, x in (("post", post), ("mix", mix)):
        contract.check_dtype(name, x, torch.float32)
    if is_plain(streams, backend):
        return reference.mhc_post(streams, output, post, mix)
    out = torch.empty_like(streams, memory_format=torch.contiguous_format)
    if out.numel():
        POST(backend, streams, output, post, mix, out)
    return out


def mhc_head(
    streams: Tensor,
    pre: Tensor,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-20,
    *,
    backend: str | None = None,
) -> Tensor:
    """What leaves the last layer: the sum of the streams with the last sublayer's weights, normed when asked.

    Args:
        streams: Shape [tokens, n, channels], any float dtype; tokens and streams may lie apart.
        pre: Weights, shape [tokens, n], fp32.
        norm_weight: Gains of an RMS norm of the sum, shape [channels], any float dtype; None for no norm.
        norm_eps: Added to its mean square.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Shape [tokens, channels], dtype of `streams`; the sum is made in fp32.

    Raises:
        ShapeError: A shape or dtype is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    tokens, n, channels = _check_streams(streams)
    contract.check_shape("pre", pre, (tokens, n), "tokens, streams")
    contract.check_dtype("pre", pre, torch.float32)
    if norm_weight is not None:
        _check_gains(norm_weight, channels)
    if is_plain(streams, backend):
        return reference.mhc_head(streams, pre, norm_weight, norm_eps)
    out = streams.new_empty((tokens, channels))
    if out.numel():
        HEAD(backend, streams, pre, out)
    return out if norm_weight is None else rms_norm(out, norm_weight, norm_eps, backend=backend)


def _check_iterations(iterations: int) -> None:
    if iterations < 1:
        raise ShapeError(
            f"iterations is {iterations}; there must be at least 1.",
            argument="iterations", expected="at least 1", found=iterations,
        )  # fmt: skip


def _check_gains(norm_weight: Tensor, channels: int) -> None:
    contract.check_floats("norm_weight", norm_weight)
    contract.check_shape("norm_weight", norm_weight, (channels,), "channels")


def _check_streams(streams: Tensor) -> tuple[int, int, int]:
    contract.check_floats("streams", streams)
    contract.check_shape("streams", streams, (None, None, None), "tokens, streams, channels")
    return streams.shape[0], streams.shape[1], streams.shape[2]


def _always(*args: object) -> None:
    """The references serve every call."""


@SINKHORN.register("torch", supports=_always)
def _sinkhorn_torch(scores: Tensor, iterations: int, eps: float, out: Tensor) -> None:
    out.copy_(reference.sinkhorn(scores, iterations, eps))


@PRE.register("torch", supports=_always)
def _pre_torch(
    streams: Tensor,
    pre: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    iterations: int,
    norm_eps: float,
    eps: float,
    *outputs: Tensor,
) -> None:
    following, post, mix, out = outputs
    made = reference.mhc_pre(streams, pre, fn, base, scale, iterations, norm_eps, eps)
    for to, value in zip((out, post, mix, following), made, strict=True):
        to.copy_(value)


@POST.register("torch", supports=_always)
def _post_torch(streams: Tensor, output: Tensor, post: Tensor, mix: Tensor, out: Tensor) -> None:
    out.copy_(reference.mhc_post(streams, output, post, mix))


@HEAD.register("torch", supports=_always)
def _head_torch(streams: Tensor, pre: Tensor, out: Tensor) -> None:
    out.copy_(reference.mhc_head(streams, pre))


def _streams_refusal(streams: Tensor, *others: Tensor) -> str | None:
    if streams.shape[1] != 4:
        return f"there are {streams.shape[1]} streams, and it is for 4"
    if streams.dtype not in _FLOATS:
        return f"the streams are {streams.dtype}, and it takes fp32, bf16 and fp16"
    if streams.shape[2] > 1 and streams.stride(2) != 1:
        return "the channels of a stream do not lie side by side"
    return contract.triton_refusal(streams, *others)


def _sinkhorn_refusal(scores: Tensor, iterations: int, eps: float, out: Tensor) -> str | None:
    if scores.shape[-1] != 4:
        return f"the matrices are {scores.shape[-1]}x{scores.shape[-1]}, and it is for 4x4"
    return contract.triton_refusal(scores, out)


@SINKHORN.register("triton", supports=_sinkhorn_refusal, priority=10)
def _sinkhorn_triton(scores: Tensor, iterations: int, eps: float, out: Tensor) -> None:
    import deepinfer.kernels.triton.mhc_launch as launch

    launch.sinkhorn(scores.contiguous(), iterations, eps, out)


def _pre_refusal(
    streams: Tensor,
    pre: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    iterations: int,
    norm_eps: float,
    eps: float,
    *outputs: Tensor,
) -> str | None:
    return _streams_refusal(streams, pre, fn, base, scale, *outputs)


@PRE.register("triton", supports=_pre_refusal, priority=10)
def _pre_triton(
    streams: Tensor,
    pre: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    iterations: int,
    norm_eps: float,
    eps: float,
    *outputs: Tensor,
) -> None:
    import deepinfer.kernels.triton.mhc_launch as launch

    if fn.dim() == 3 and streams.dtype != torch.bfloat16:
        fn = fn.float().sum(0)
    given = (pre.contiguous(), fn.contiguous(), base.contiguous(), scale.contiguous())
    launch.mhc_pre(streams, *given, iterations, norm_eps, eps, *outputs)


def _post_refusal(
    streams: Tensor, output: Tensor, post: Tensor, mix: Tensor, out: Tensor
) -> str | None:
    return _streams_refusal(streams, output, post, mix, out)


@POST.register("triton", supports=_post_refusal, priority=10)
def _post_triton(streams: Tensor, output: Tensor, post: Tensor, mix: Tensor, out: Tensor) -> None:
    import deepinfer.kernels.triton.mhc_launch as launch

    if output.stride(-1) != 1:
        output = output.contiguous()
    launch.mhc_post(streams, output, post.contiguous(), mix.contiguous(), out)


def _head_refusal(streams: Tensor, pre: Tensor, out: Tensor) -> str | None:
    return _streams_refusal(streams, pre, out)


@HEAD.register("triton", supports=_head_refusal, priority=10)
def _head_triton(streams: Tensor, pre: Tensor, out: Tensor) -> None:
    import deepinfer.kernels.triton.mhc_launch as launch

    launch.mhc_head(streams, pre.contiguous(), out)
