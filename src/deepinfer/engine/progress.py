"""A bar for work on many prompts, where somebody can see it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError
from deepinfer.core.protocols import ProgressFn

__all__ = ["is_interactive", "progress_bar"]


def is_interactive() -> bool:
    """Whether standard error is a terminal, or this is a notebook."""
    if "ipykernel" in sys.modules:
        return True
    return sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def progress_bar(
    progress: bool | ProgressFn | None, total: int, *, many: bool = True
) -> Iterator[Callable[[int, int], None]]:
    """Reports progress for the length of a `with` block.

    Args:
        progress: True or False for a bar or none, None for a bar when `many` and somebody can see it, or a function.
        total: Units in all.
        many: Whether a bar is worth drawing.

    Yields:
        A function to call with (done, total).
    """
    if callable(progress):
        yield progress
        return
    if progress is not None:
        checks.check_bool("progress", progress, ConfigError)
    if progress is False or (progress is None and not (many and is_interactive())):
        yield _silent
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, unit="output", dynamic_ncols=True) as bar:

        def report(done: int, total: int) -> None:
            if done > bar.n:
                bar.update(done - bar.n)

        yield report


def _silent(done: int, total: int) -> None:
    """Reports nothing."""
