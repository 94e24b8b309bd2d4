"""Structured output: regular expressions, JSON Schemas and grammars as masks over the tokens of a vocabulary.

A front end turns its input into a `Grammar`, which knows nothing of tokens. It needs NumPy and no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.core.lazy import lazy_exports

if TYPE_CHECKING:
    from deepinfer.grammar.grammar import Grammar as Grammar
    from deepinfer.grammar.regex import compile_regex as compile_regex
    from deepinfer.grammar.report import Report as Report
    from deepinfer.grammar.report import ReportEntry as ReportEntry

_EXPORTS = {
    "Grammar": "deepinfer.grammar.grammar",
    "Report": "deepinfer.grammar.report",
    "ReportEntry": "deepinfer.grammar.report",
    "compile_regex": "deepinfer.grammar.regex",
}

__all__ = [
    "Grammar",
    "Report",
    "ReportEntry",
    "compile_regex",
]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
