"""The costly parts of a step as functions that are compiled, or run as they are when that fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from .attention import attention_inputs
from .engram import engram_inject
from .indexing import index_loss, select_rows
from .layer import attend_and_finish

GRAPHS_PER_PART = 32
"""Compiled variants of one part (pool sizes, with and without gradient) before it would run eagerly."""

TOLERANCE = 0.05
"""Largest relative difference of a loss between compiled and eager, in bf16 with rounding flips."""

Log = Callable[..., None]


class CompiledPart:
    """A function, compiled for each new set of shapes at its first call.

    An error while compiling or running the compiled form is reported once, and from then on the
    function runs eagerly. Running out of memory is passed on: eager needs more.

    Args:
        function: A pure function of tensors, weights and constants.
        backend: Compiler backend of `torch.compile`.
        log: Called with `event`, `part` and `error` when compiling failed.
    """

    def __init__(self, function: Callable[..., Any], backend: str, log: Log) -> None:
        self.eager, self.log = function, log
        self.compiled = torch.compile(function, dynamic=False, fullgraph=True, backend=backend)
        self.failed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        if not self.failed:
            try:
                return self.compiled(*args, **kwargs)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                self.failed = True
                self.log(event="compiling failed", part=self.eager.__name__, error=str(error)[:500])
        return self.eager(*args, **kwargs)


def agree(compiled: Sequence[float], eager: Sequence[float], report: Any, what: str) -> bool:
    """Whether losses differ by what reordered sums explain; logs both, and that eager is used if not."""
    same = all(abs(a - b) <= TOLERANCE * abs(b) for a, b in zip(compiled, eager, strict=True))
    event = "compiled" if same else "compiled form is off; eager is used"
    report.log(event=event, part=what, compiled=list(compiled), eager=list(eager))
    return same


@dataclass(frozen=True)
class Parts:
    """The costly parts of the trunk."""

    engram: Callable[..., Any] = engram_inject
    inputs: Callable[..., Any] = attention_inputs
    select: Callable[..., Any] = select_rows
    index_loss: Callable[..., Any] = index_loss
    rest: Callable[..., Any] = attend_and_finish


EAGER = Parts()


def compile_parts(parts: Any, backend: str, log: Log) -> Any:
    """The same record of parts, each compiled on use."""
    torch._dynamo.config.recompile_limit = GRAPHS_PER_PART
    torch._dynamo.config.accumulated_recompile_limit = 16 * GRAPHS_PER_PART
    compiled = (CompiledPart(getattr(parts, f.name), backend, log) for f in fields(parts))
    return type(parts)(*compiled)
