"""Structured output: regular expressions, JSON Schemas and grammars as masks over the tokens of a vocabulary.

A front end (`compile_regex`, `compile_json_schema`, `compile_ebnf`, `choices`, ...) turns its input into a `Grammar`,
which knows nothing of tokens. `Grammar.bind` gives a `CompiledGrammar` over the tokens of a `TokenVocab`, and each
output gets a `GrammarMatcher` of it, which fills the masks. All of it needs NumPy and no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.core.lazy import lazy_exports

if TYPE_CHECKING:
    from deepinfer.grammar.apply import apply_bitmask_ as apply_bitmask_
    from deepinfer.grammar.batch import fill_batch as fill_batch
    from deepinfer.grammar.bitmask import allocate_bitmask as allocate_bitmask
    from deepinfer.grammar.choice import any_json as any_json
    from deepinfer.grammar.choice import choices as choices
    from deepinfer.grammar.combine import concatenate as concatenate
    from deepinfer.grammar.combine import either as either
    from deepinfer.grammar.compiled import CompiledGrammar as CompiledGrammar
    from deepinfer.grammar.ebnf import compile_ebnf as compile_ebnf
    from deepinfer.grammar.grammar import Grammar as Grammar
    from deepinfer.grammar.json_schema import Whitespace as Whitespace
    from deepinfer.grammar.json_schema import compile_json_schema as compile_json_schema
    from deepinfer.grammar.library import GrammarLibrary as GrammarLibrary
    from deepinfer.grammar.library import compile_kind as compile_kind
    from deepinfer.grammar.matcher import GrammarMatcher as GrammarMatcher
    from deepinfer.grammar.regex import compile_regex as compile_regex
    from deepinfer.grammar.report import Report as Report
    from deepinfer.grammar.report import ReportEntry as ReportEntry
    from deepinfer.grammar.structural_tag import compile_structural_tag as compile_structural_tag
    from deepinfer.grammar.tags import Tag as Tag
    from deepinfer.grammar.tags import any_text as any_text
    from deepinfer.grammar.tags import reasoning as reasoning
    from deepinfer.grammar.tags import tagged_text as tagged_text
    from deepinfer.grammar.tools import tool_calls as tool_calls
    from deepinfer.grammar.vocab import TokenVocab as TokenVocab

_EXPORTS = {
    "CompiledGrammar": "deepinfer.grammar.compiled",
    "Grammar": "deepinfer.grammar.grammar",
    "GrammarLibrary": "deepinfer.grammar.library",
    "GrammarMatcher": "deepinfer.grammar.matcher",
    "Report": "deepinfer.grammar.report",
    "ReportEntry": "deepinfer.grammar.report",
    "Tag": "deepinfer.grammar.tags",
    "TokenVocab": "deepinfer.grammar.vocab",
    "Whitespace": "deepinfer.grammar.json_schema",
    "allocate_bitmask": "deepinfer.grammar.bitmask",
    "any_json": "deepinfer.grammar.choice",
    "any_text": "deepinfer.grammar.tags",
    "apply_bitmask_": "deepinfer.grammar.apply",
    "choices": "deepinfer.grammar.choice",
    "compile_ebnf": "deepinfer.grammar.ebnf",
    "compile_json_schema": "deepinfer.grammar.json_schema",
    "compile_kind": "deepinfer.grammar.library",
    "compile_regex": "deepinfer.grammar.regex",
    "compile_structural_tag": "deepinfer.grammar.structural_tag",
    "concatenate": "deepinfer.grammar.combine",
    "either": "deepinfer.grammar.combine",
    "fill_batch": "deepinfer.grammar.batch",
    "reasoning": "deepinfer.grammar.tags",
    "tagged_text": "deepinfer.grammar.tags",
    "tool_calls": "deepinfer.grammar.tools",
}

__all__ = [
    "CompiledGrammar",
    "Grammar",
    "GrammarLibrary",
    "GrammarMatcher",
    "Report",
    "ReportEntry",
    "Tag",
    "TokenVocab",
    "Whitespace",
    "allocate_bitmask",
    "any_json",
    "any_text",
    "apply_bitmask_",
    "choices",
    "compile_ebnf",
    "compile_json_schema",
    "compile_kind",
    "compile_regex",
    "compile_structural_tag",
    "concatenate",
    "either",
    "fill_batch",
    "reasoning",
    "tagged_text",
    "tool_calls",
]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
