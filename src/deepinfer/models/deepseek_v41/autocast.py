"""Keeps `torch.autocast` out: where a value is rounded is part of the model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["without_autocast"]

P = ParamSpec("P")
T = TypeVar("T")


def without_autocast(function: Callable[P, T]) -> Callable[P, T]:
    """Turns `torch.autocast` off for the length of each call.

    Args:
        function: Computes with tensors.

    Returns:
        The function, with the same results inside and outside of autocast regions.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        active = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        if not active:
            return function(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            for kind in active:
                stack.enter_context(torch.autocast(kind, enabled=False))
            return function(*args, **kwargs)

    return run
