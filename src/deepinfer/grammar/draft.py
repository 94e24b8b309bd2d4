"""Mask rows of several positions at once: drafted continuations and trees of them."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

from deepinfer.core.errors import ConfigError, ShapeError
from deepinfer.grammar.bitmask import row_of

if TYPE_CHECKING:
    from deepinfer.grammar.matcher import GrammarMatcher

__all__ = ["fill_draft", "fill_tree"]


def fill_draft(matcher: GrammarMatcher, bitmask: Any, row: int, draft_ids: Sequence[int]) -> int:
    """Writes the rows of a drafted continuation; see `GrammarMatcher.fill_draft`."""
    _check_first(row)
    words = matcher.compiled.vocab.num_words
    state = matcher.state
    matcher._fill(state, row_of(bitmask, row, words))
    count = 0
    for draft in draft_ids:
        after = matcher._next(state, draft)
        if not after:
            break
        state = after
        count += 1
        matcher._fill(state, row_of(bitmask, row + count, words))
    # Rows behind a draft that cannot be accepted are never sampled from; they repeat the last one, so that no row is
    # without an allowed token.
    last = row_of(bitmask, row + count, words)
    for later in range(count + 1, len(draft_ids) + 1):
        row_of(bitmask, row + later, words)[:] = last
    return count


def fill_tree(
    matcher: GrammarMatcher,
    bitmask: Any,
    parents: Sequence[int],
    token_ids: Sequence[int],
    row: int,
) -> list[bool]:
    """Writes the rows of a tree of drafted tokens; see `GrammarMatcher.fill_tree`."""
    _check_first(row)
    if len(parents) != len(token_ids):
        raise ConfigError(
            f"{len(parents)} parents and {len(token_ids)} tokens; give one of each a node",
            field="parents",
            value=len(parents),
        )
    words = matcher.compiled.vocab.num_words
    states = [matcher.state]
    fits = [True]
    matcher._fill(states[0], row_of(bitmask, row, words))
    for node, (parent, token_id) in enumerate(zip(parents, token_ids, strict=True)):
        if not isinstance(parent, Integral) or not -1 <= parent < node:
            raise ConfigError(
                f"node {node} has parent {parent!r}; a parent is -1 or stands before its node",
                field="parents",
                value=parent,
                limit=f"-1..{node - 1}",
            )
        above = parent + 1
        after = matcher._next(states[above], token_id) if fits[above] else 0
        states.append(after)
        fits.append(bool(after))
        out = row_of(bitmask, row + 1 + node, words)
        if after:
            matcher._fill(after, out)
        else:
            out[:] = row_of(bitmask, row + above, words)
    return fits[1:]


def _check_first(row: int) -> None:
    """Rows count up from the first: from a negative one they would run over the end to the beginning."""
    if not isinstance(row, Integral) or row < 0:
        raise ShapeError(
            f"row is {row!r}; give the first of the rows to write, from 0 up",
            argument="row",
            expected="at least 0",
            found=row,
        )
