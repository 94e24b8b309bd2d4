"""Errors about regular expressions, schemas and grammars; a branch of the tree in `deepinfer.core.errors`."""

from __future__ import annotations

from deepinfer.core.error_base import DeepInferError

__all__ = [
    "EmptyLanguage",
    "GrammarError",
    "GrammarSyntaxError",
    "GrammarTooLarge",
    "UnsupportedKeyword",
    "VocabularyMismatch",
]


class GrammarError(DeepInferError):
    """Base of the errors about regular expressions, schemas and grammars."""


class UnsupportedKeyword(GrammarError, ValueError):
    """A schema uses a keyword that cannot be enforced.

    Attributes:
        path: JSON pointer to the keyword, or None.
        keyword: The keyword, or None.
    """

    def __init__(
        self, message: str, *, path: str | None = None, keyword: str | None = None
    ) -> None:
        super().__init__(message)
        self.path = path
        self.keyword = keyword


class GrammarSyntaxError(GrammarError, ValueError):
    """A regular expression, schema or grammar text does not parse.

    Attributes:
        line: Line of the fault, from 1, or None.
        column: Column of the fault, from 1, in code points, or None.
        position: Offset of the fault in the text, from 0, in code points, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        line: int | None = None,
        column: int | None = None,
        position: int | None = None,
    ) -> None:
        super().__init__(message)
        self.line = line
        self.column = column
        self.position = position


class EmptyLanguage(GrammarError, ValueError):
    """The grammar accepts no string at all."""


class GrammarTooLarge(GrammarError, ValueError):
    """A grammar needs more of some resource than its budget allows.

    Attributes:
        resource: What ran out, with its unit, such as "states", "bytes", "ms" or "nesting", or None.
        limit: The budget, in that unit, or None.
        found: What was needed when the work stopped; the whole need may be larger. Or None.
    """

    def __init__(
        self,
        message: str,
        *,
        resource: str | None = None,
        limit: float | None = None,
        found: float | None = None,
    ) -> None:
        super().__init__(message)
        self.resource = resource
        self.limit = limit
        self.found = found


class VocabularyMismatch(GrammarError, ValueError):
    """A compiled grammar is used with another vocabulary than it was compiled for."""
