"""Checks of what callers pass in: token ids, texts, and parts of this package."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from deepinfer.core._checks import show
from deepinfer.core.errors import ConfigError

__all__ = ["MAX_IDS", "as_id", "check_ids", "check_part", "check_text"]

MAX_IDS = 1 << 24
"""Ids that a vocabulary may have: a state and an id are packed into one number."""


def as_id(value: Any) -> int:
    """A token id as a plain integer; those of NumPy and torch are taken.

    Args:
        value: The id.

    Returns:
        It, of any size.

    Raises:
        ConfigError: It is no integer.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(
            f"a token id is {show(value)} ({type(value).__name__}); give an integer",
            field="token_id",
            value=value,
            limit="an integer",
        ) from None


def check_ids(name: str, ids: Iterable[int], limit: int) -> tuple[int, ...]:
    """Distinct ids of a vocabulary, ascending.

    Args:
        name: What they are called in messages.
        ids: The ids.
        limit: How many ids there are.

    Returns:
        Plain integers.

    Raises:
        ConfigError: They are no sequence of integers, or one is out of range.
    """
    if isinstance(ids, str | bytes) or not hasattr(ids, "__iter__"):
        raise ConfigError(
            f"{name} is {show(ids)} ({type(ids).__name__}); give a sequence of token ids",
            field=name,
            value=ids,
            limit="a sequence of integers",
        )
    out = tuple(sorted({as_id(index) for index in ids}))
    for index in out:
        if not 0 <= index < limit:
            raise ConfigError(
                f"{name} holds {index}, which is outside of the vocabulary of {limit} ids; give ids from 0 to "
                f"{limit - 1}",
                field=name,
                value=index,
                limit=f"0..{limit - 1}",
            )
    return out


def check_text(name: str, value: Any) -> None:
    """Refuses what is no `str`.

    Args:
        name: What it is called in messages.
        value: The text.

    Raises:
        ConfigError: It is no text.
    """
    if not isinstance(value, str):
        raise ConfigError(
            f"{name} is {show(value)} ({type(value).__name__}); give a str",
            field=name,
            value=value,
            limit="a str",
        )


def check_part(name: str, value: Any, kind: type, hint: str) -> None:
    """Refuses what is no object of this package's own.

    Args:
        name: What it is called in messages.
        value: The object.
        kind: What it must be.
        hint: What to do.

    Raises:
        ConfigError: It is of another kind.
    """
    if not isinstance(value, kind):
        raise ConfigError(
            f"{name} is {show(value)}, which is no {kind.__name__}; {hint}",
            field=name,
            value=value,
            limit=f"a {kind.__name__}",
        )
