"""`unevaluatedProperties` and `unevaluatedItems`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.grammar.json_schema.formula import Formula

if TYPE_CHECKING:
    from deepinfer.grammar.json_schema.algebra import Algebra
    from deepinfer.grammar.json_schema.nodes import Node

__all__ = ["with_unevaluated"]


def with_unevaluated(algebra: Algebra, node: Node, kind: str, base: Formula) -> Formula:
    """Adds what `unevaluated*` asks of a value of a type to the formula of the other keywords."""
    keyword = {"object": "unevaluatedProperties", "array": "unevaluatedItems"}.get(kind)
    if keyword is None or keyword not in node.schema or not algebra.active(node, keyword):
        return base
    algebra.skip(node, keyword, "not yet")
    return base
