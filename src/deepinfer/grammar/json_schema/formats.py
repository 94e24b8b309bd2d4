"""String formats as languages of decoded text."""

from __future__ import annotations

from deepinfer.grammar.ir import Expr
from deepinfer.grammar.json_schema.spelling import Spelling

__all__ = ["FORMATS", "format_expr"]

FORMATS: dict[str, str | None] = {}


def format_expr(name: str, spelling: Spelling) -> Expr:
    raise NotImplementedError
