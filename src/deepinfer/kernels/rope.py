"""Rotation of the last channels of heads by the positions of their tokens.

Adjacent channels are one complex number: (x[2i], x[2i + 1]) times (cos, sin) of its angle, computed in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.core.errors import ShapeError
from deepinfer.kernels import contract
from deepinfer.kernels.host import is_plain
from deepinfer.kernels.reference import rope as reference
from deepinfer.kernels.registry import Operation

__all__ = ["apply_rope"]

ROPE = Operation(
    "apply_rope",
    "Tensor? x, Tensor phases, Tensor? positions, bool inverse, Tensor(a!) out",
)
OPERATIONS = (ROPE,)

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def apply_rope(
    x: Tensor,
    phases: Tensor,
    positions: Tensor | None = None,
    *,
    inverse: bool = False,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Rotates the last `2 * phases.shape[1]` channels of each head; the others stay as they are.

    Args:
        x: Shape [tokens, heads, channels] or [tokens, channels], any float dtype; rows may lie apart.
        phases: Cosine and sine of each pair, shape [places, rope_dim / 2, 2], fp32: a row a token, or a table.
        positions: Row of the table for each token, shape [tokens], int32 or int64; its number when None. A token of a row
            that the table does not have stays as it is, on every device.
        inverse: Rotate back: by the conjugate.
        out: Where the result goes, shape and dtype of `x`. Give `x` itself to rotate in place: then the other channels are
            neither read nor written. A new tensor when None.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        The result, shape and dtype of `x`. The bits are those of separate multiplications and one addition in fp32, on
        every device.

    Raises:
        ShapeError: A shape, dtype or stride is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    contract.check_floats("x", x)
    check_phases(phases, positions, x)
    if out is not None and (out.shape != x.shape or out.dtype != x.dtype):
        raise ShapeError(
            f"out is {tuple(out.shape)} of {out.dtype}; it must be {tuple(x.shape)} of {x.dtype}.",
            argument="out", expected=tuple(x.shape), found=tuple(out.shape),
        )  # fmt: skip
    if is_plain(x, backend):
        return reference.apply_rope(x, phases, positions, inverse, out)
    result = torch.empty_like(x) if out is None else out
    if result.numel():
        phases = phases if phases.is_contiguous() else phases.contiguous()
        ROPE(backend, None if result is x else x, phases, positions, inverse, result)
    return result


def check_phases(phases: Tensor, positions: Tensor | None, x: Tensor) -> None:
    """Refuses rotations that do not fit the tokens."""
    contract.check_dtype("phases", phases, torch.float32)
    contract.check_shape("phases", phases, (None, None, 2), "places, rope_dim / 2, 2")
    if x.dim() not in (2, 3) or 2 * phases.shape[1] > x.shape[-1]:
        raise ShapeError(
            f"x has shape {tuple(x.shape)} and phases {tuple(phases.shape)}; x must be [tokens, heads, channels] or "
            "[tokens, channels] with at least two channels for each pair.",
            argument="x", expected="[tokens, heads, channels]", found=tuple(x.shape),
        )  # fmt: skip
    if positions is not None:
        contract.check_dtype("positions", positions, torch.int32, torch.int64)
        contract.check_shape("positions", positions, (x.shape[0],), "tokens")
    elif phases.shape[0] < x.shape[0]:
        raise ShapeError(
            f"phases have {phases.shape[0]} rows for {x.shape[0]} tokens; give one a token, or positions.",
            argument="phases", expected=x.shape[0], found=phases.shape[0],
        )  # fmt: skip


def _always(*args: object) -> None:
    """The reference serves every call."""


@ROPE.register("torch", supports=_always)
def _torch(
    x: Tensor | None, phases: Tensor, positions: Tensor | None, inverse: bool, out: Tensor
) -> None:
    reference.apply_rope(out if x is None else x, phases, positions, inverse, out)


def _refusal(
    x: Tensor | None, phases: Tensor, positions: Tensor | None, inverse: bool, out: Tensor
) -> str | None:
    source = out if x is None else x
    if source.dtype not in _FLOATS:
        return f"the values are {source.dtype}, and it takes fp32, bf16 and fp16"
    if source.numel() // source.shape[-1] >= 2**31:
        return (
            f"{source.numel() // source.shape[-1]} heads of all tokens are more than 32 bits number"
        )
    if source.stride(-1) != 1 or out.stride(-1) != 1:
        return "the channels of a head do not lie side by side"
    return contract.triton_refusal(source, *(t for t in (phases, positions, out) if t is not None))


@ROPE.register("triton", supports=_refusal, priority=10)
def _triton(
    x: Tensor | None, phases: Tensor, positions: Tensor | None, inverse: bool, out: Tensor
) -> None:
    import deepinfer.kernels.triton.norm_launch as launch

    to = out if out.dim() == 3 else out.unsqueeze(1)
    source = to if x is None else x if x.dim() == 3 else x.unsqueeze(1)
    places = None if positions is None else positions.contiguous()
    launch.rope(source, phases, places, inverse, to)
