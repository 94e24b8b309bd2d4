"""JSON Schemas as grammars."""

from __future__ import annotations

from deepinfer.grammar.json_schema.compiler import compile_json_schema
from deepinfer.grammar.json_schema.whitespace import Whitespace

__all__ = ["Whitespace", "compile_json_schema"]
