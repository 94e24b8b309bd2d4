"""Engram: rows of hashed n-gram tables, and the gate through which their value enters the residual streams.

hash    R_n = xor over k < n of (a_k * multiplier_k) in int64, wrapping; row = R_n mod prime + offset, never negative
lookup  e4m3 codes times one e8m0 scale per group of channels
gate    g = sigmoid(sign(d) * sqrt(max(|d|, 1e-6))), d = <x * q_weight, key * k_weight> / (rms(x) rms(key) sqrt(channels));
        x + g * value
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.core.errors import ShapeError
from deepinfer.kernels import contract
from deepinfer.kernels.host import is_plain, is_readable
from deepinfer.kernels.reference import engram as reference
from deepinfer.kernels.registry import Operation

__all__ = ["engram_gate", "engram_hash", "engram_lookup"]

HASH = Operation(
    "engram_hash",
    "Tensor history, Tensor token_map, Tensor multipliers, Tensor primes, Tensor offsets, int pad_id, "
    "Tensor(a!) out",
)
LOOKUP = Operation("engram_lookup", "Tensor rows, Tensor table, Tensor scale, Tensor(a!) out")
GATE = Operation(
    "engram_gate",
    "Tensor streams, Tensor projected, Tensor q_weight, Tensor k_weight, float eps, Tensor? is_image, "
    "Tensor(a!) out",
)
OPERATIONS = (HASH, LOOKUP, GATE)

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def engram_hash(
    history: Tensor,
    token_map: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    pad_id: int,
    *,
    backend: str | None = None,
) -> Tensor:
    """Table rows of the n-grams that end at each token.

    Args:
        history: Id of each token and of those before it, newest first, shape [tokens, n], int64. From the newest id on
            that is no id of the vocabulary (negative before the start and on images), all older ones count as padding.
        token_map: Folded id of each token id, shape [vocab], int64.
        multipliers: Odd factors of the current token and those before it, shape [n], int64.
        primes: Rows of each column's part of the table, shape [(n - 1) * heads], int64, positive:
            the rows of others mean nothing, and a CPU refuses 0.
        offsets: First row of each part, same shape.
        pad_id: Folded id of padding.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Rows, shape [tokens, (n - 1) * heads], int64; column order is n-gram size (2 to n), then head. Products wrap, and
        the remainder of a negative one is not negative.

    Raises:
        ShapeError: A shape or dtype is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    contract.check_shape("history", history, (None, None), "tokens, n")
    n = history.shape[1]
    given = {"history": history, "token_map": token_map, "multipliers": multipliers, "primes": primes, "offsets": offsets}  # fmt: skip
    for name, x in given.items():
        contract.check_dtype(name, x, torch.int64)
    contract.check_shape("token_map", token_map, (None,), "vocab")
    if not len(token_map):
        raise ShapeError(
            "token_map is empty; it needs the folded id of each id of the vocabulary.",
            argument="token_map", expected="at least one id", found=0,
        )  # fmt: skip
    contract.check_shape("multipliers", multipliers, (n,), "n")
    contract.check_shape("offsets", offsets, tuple(primes.shape), "columns")
    if n < 2 or primes.dim() != 1 or len(primes) % (n - 1):
        raise ShapeError(
            f"history holds {n} tokens and primes have shape {tuple(primes.shape)}; n-grams of 2 to {n} tokens need a "
            f"multiple of {max(1, n - 1)} columns.",
            argument="primes", expected=f"multiple of {max(1, n - 1)}", found=tuple(primes.shape),
        )  # fmt: skip
    if len(primes) and is_readable(primes) and int(primes.min()) < 1:
        raise ShapeError(
            f"primes go down to {int(primes.min())}; each part of the table has at least 1 row. A GPU does not look.",
            argument="primes", expected="at least 1", found=int(primes.min()),
        )  # fmt: skip
    if is_plain(history, backend):
        return reference.engram_hash(history, token_map, multipliers, primes, offsets, pad_id)
    out = history.new_empty((history.shape[0], len(primes)))
    if out.numel():
        HASH(backend, history, token_map, multipliers, primes, offsets, pad_id, out)
    return out


def engram_lookup(
    rows: Tensor,
    table: Tensor,
    scale: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    backend: str | None = None,
) -> Tensor:
    """Gathers rows of a table and dequantises them.

    Args:
        rows: Shape [tokens, columns], int64. A row that the table does not have (-1, or beyond its end) gives zeros.
        table: Codes, shape [table rows, channels], float8_e4m3fn or their bytes; rows may lie apart.
        scale: Shape [table rows, channels / group], float8_e8m0fnu or their bytes; rows may lie apart.
        dtype: Of the result; the product is made in fp32.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Shape [tokens, columns * channels]; NaN where a code or a scale is NaN.

    Raises:
        ShapeError: A shape or dtype is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    contract.check_float_dtype("dtype", dtype)
    contract.check_dtype("rows", rows, torch.int64)
    contract.check_shape("rows", rows, (None, None), "tokens, columns")
    contract.check_dtype("table", table, torch.float8_e4m3fn, torch.uint8)
    contract.check_shape("table", table, (None, None), "table rows, channels")
    contract.check_dtype("scale", scale, torch.float8_e8m0fnu, torch.uint8)
    contract.check_shape("scale", scale, (table.shape[0], None), "table rows, groups")
    channels, groups = table.shape[1], scale.shape[1]
    if not channels or not groups or channels % groups:
        raise ShapeError(
            f"the table has {channels} channels and {groups} scales a row; groups must be of one size.",
            argument="scale", expected="a divisor of the channels", found=groups,
        )  # fmt: skip
    if not table.shape[0]:
        shape = (rows.shape[0], rows.shape[1] * channels)
        return torch.zeros(shape, dtype=dtype, device=table.device)
    if is_plain(table, backend):
        return reference.engram_lookup(rows, table, scale, dtype)
    tokens, columns = rows.shape
    out = torch.empty((tokens, columns * channels), dtype=dtype, device=table.device)
    if out.numel():
        LOOKUP(backend, rows, table.view(torch.uint8), scale.view(torch.uint8), out)
    return out


def engram_gate(
    streams: Tensor,
    projected: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float = 1e-20,
    is_image: Tensor | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Adds a value to every stream, through a gate that compares the stream with its key.

    Args:
        streams: Residual streams, shape [tokens, n, channels], any float dtype; tokens and streams may lie apart.
        projected: Keys of the streams, then the value, shape [tokens, (n + 1) * channels].
        q_weight: Gains of the streams, shape [n, channels], any float dtype.
        k_weight: Gains of the keys, shape [n, channels], any float dtype.
        eps: Added to every mean square.
        is_image: True for image tokens, which get nothing, shape [tokens], bool; None when there is none.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        The new streams, same shape and dtype, contiguous. Computed in fp32; the bits of a token do not depend on others.

    Raises:
        ShapeError: A shape or dtype is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    contract.check_floats("streams", streams)
    contract.check_shape("streams", streams, (None, None, None), "tokens, streams, channels")
    tokens, n, channels = streams.shape
    contract.check_shape("projected", projected, (tokens, (n + 1) * channels), "tokens, (streams + 1) * channels")  # fmt: skip
    contract.check_shape("q_weight", q_weight, (n, channels), "streams, channels")
    contract.check_shape("k_weight", k_weight, (n, channels), "streams, channels")
    for name, x in {"projected": projected, "q_weight": q_weight, "k_weight": k_weight}.items():
        contract.check_floats(name, x)
    if is_image is not None:
        contract.check_dtype("is_image", is_image, torch.bool)
        contract.check_shape("is_image", is_image, (tokens,), "tokens")
    if is_plain(streams, backend):
        return reference.add_engram(streams, projected, q_weight, k_weight, eps, is_image)
    out = torch.empty_like(streams, memory_format=torch.contiguous_format)
    if out.numel():
        GATE(backend, streams, projected, q_weight, k_weight, eps, is_image, out)
    return out


def _always(*args: object) -> None:
    """The references serve every call."""


@HASH.register("torch", supports=_always)
def _hash_torch(
    history: Tensor,
    token_map: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    pad_id: int,
    out: Tensor,
) -> None:
    out.copy_(reference.engram_hash(history, token_map, multipliers, primes, offsets, pad_id))


@LOOKUP.register("torch", supports=_always)
def _lookup_torch(rows: Tensor, table: Tensor, scale: Tensor, out: Tensor) -> None:
    out.copy_(reference.engram_lookup(rows, table, scale, out.dtype))


@GATE.register("torch", supports=_always)
def _gate_torch(
    streams: Tensor,
    projected: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    is_image: Tensor | None,
    out: Tensor,
) -> None:
    out.copy_(reference.add_engram(streams, projected, q_weight, k_weight, eps, is_image))


def _hash_refusal(
    history: Tensor,
    token_map: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    pad_id: int,
    out: Tensor,
) -> str | None:
    return contract.triton_refusal(history, token_map, multipliers, primes, offsets, out)


@HASH.register("triton", supports=_hash_refusal, priority=10)
def _hash_triton(
    history: Tensor,
    token_map: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    pad_id: int,
    out: Tensor,
) -> None:
    import deepinfer.kernels.triton.engram_launch as launch

    token_map, multipliers = token_map.contiguous(), multipliers.contiguous()
    primes, offsets = primes.contiguous(), offsets.contiguous()
    history = history if history.stride(-1) == 1 else history.contiguous()
    launch.engram_hash(history, token_map, multipliers, primes, offsets, pad_id, out)


def _lookup_refusal(rows: Tensor, table: Tensor, scale: Tensor, out: Tensor) -> str | None:
    channels, groups = table.shape[1], scale.shape[1]
    if channels & (channels - 1) or groups & (groups - 1):
        return f"rows of {channels} channels in {groups} groups are not powers of two"
    if table.stride(1) != 1 or (groups > 1 and scale.stride(1) != 1):
        return "the channels of a row do not lie side by side"
    return contract.triton_refusal(rows, table, scale, out)


@LOOKUP.register("triton", supports=_lookup_refusal, priority=10)
def _lookup_triton(rows: Tensor, table: Tensor, scale: Tensor, out: Tensor) -> None:
    import deepinfer.kernels.triton.engram_launch as launch

    launch.engram_lookup(rows.contiguous(), table, scale, out)


def _gate_refusal(
    streams: Tensor,
    projected: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    is_image: Tensor | None,
    out: Tensor,
) -> str | None:
    if any(t.dtype not in _FLOATS for t in (streams, projected, q_weight, k_weight)):
        return "it takes fp32, bf16 and fp16"
    if streams.shape[2] > 32768:
        return f"a stream has {streams.shape[2]} channels, and it takes 32768"
    if streams.shape[2] > 1 and (streams.stride(2) != 1 or projected.stride(1) != 1):
        return "the channels of a stream do not lie side by side"
    others = (projected, q_weight, k_weight, out)
    return contract.triton_refusal(streams, *others, *(() if is_image is None else (is_image,)))


@GATE.register("triton", supports=_gate_refusal, priority=10)
def _gate_triton(
    streams: Tensor,
    projected: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    is_image: Tensor | None,
    out: Tensor,
) -> None:
    import deepinfer.kernels.triton.engram_launch as launch

    images = None if is_image is None else is_image.contiguous()
    launch.engram_gate(
        streams, projected, q_weight.contiguous(), k_weight.contiguous(), eps, images, out
    )
