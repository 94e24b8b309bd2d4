"""A matcher in the form that the engine's protocols ask for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from deepinfer.grammar.compiled import CompiledGrammar
from deepinfer.grammar.matcher import GrammarMatcher

__all__ = ["RequestGrammar", "RequestOptions"]


class RequestOptions:
    """A grammar with what one request adds to it (`deepinfer.core.protocols.Grammar`).

    Args:
        compiled: The grammar.
        stop_ids: Ids that end the output besides those of the vocabulary. Each is allowed where the output may end and
            nowhere else, also where the grammar would take it as text.
        after_token: Token behind which the grammar begins, such as the end of reasoning; None for the first token.

    Raises:
        ConfigError: An id is outside of the vocabulary.
    """

    def __init__(
        self,
        compiled: CompiledGrammar,
        *,
        stop_ids: Iterable[int] = (),
        after_token: int | None = None,
    ) -> None:
        self.compiled = compiled
        self._first = compiled.matcher(
            stop_ids=[*compiled.vocab.eos_ids, *stop_ids], after_token=after_token
        )

    def start(self) -> RequestGrammar:
        """The state before the first token."""
        return RequestGrammar(self._first.fork())

    def __repr__(self) -> str:
        return f"RequestOptions({self.compiled!r})"


class RequestGrammar:
    """`deepinfer.core.protocols.GrammarState` over a matcher.

    Args:
        matcher: The matcher; it is moved, not copied.
    """

    def __init__(self, matcher: GrammarMatcher) -> None:
        self.matcher = matcher

    @property
    def is_done(self) -> bool:
        """Whether nothing but the end can follow."""
        return self.matcher.is_complete()

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Moves over tokens; on the first that does not fit it stays before all of them: False."""
        count = self.matcher.accept_tokens(token_ids)
        if count == len(token_ids):
            return True
        self.matcher.rollback(count)
        return False

    def fill_mask(self, row: Any) -> None:
        """Writes the allowed tokens into a row of int32 words."""
        self.matcher.fill_bitmask(row)

    def fill_draft(self, rows: Any, draft_ids: Sequence[int]) -> int:
        """Writes one row a position of a drafted continuation; see `GrammarMatcher.fill_draft`."""
        return self.matcher.fill_draft(rows, 0, draft_ids)

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last tokens accepted."""
        self.matcher.rollback(num_tokens)

    def clone(self) -> RequestGrammar:
        """An independent copy."""
        return RequestGrammar(self.matcher.fork())

    def __repr__(self) -> str:
        return f"RequestGrammar({self.matcher!r})"
