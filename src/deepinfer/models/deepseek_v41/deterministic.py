"""The switch between fast arithmetic and arithmetic whose rows do not depend on the batch."""

from __future__ import annotations

from torch import nn

__all__ = ["set_deterministic"]


def set_deterministic(model: nn.Module, enabled: bool) -> None:
    """Sets `deterministic` on every module that has it, and on the layer stacks.

    Args:
        model: The model or a part of it.
        enabled: The new value.
    """
    for module in model.modules():
        for holder in (module, getattr(module, "_stack", None)):
            if holder is not None and hasattr(holder, "deterministic"):
                holder.deterministic = enabled
