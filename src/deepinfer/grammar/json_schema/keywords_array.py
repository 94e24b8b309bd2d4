"""Keywords of arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.grammar.json_schema.formula import (
    ANYTHING,
    Contains,
    Formula,
    ItemCount,
    Items,
    Unique,
)
from deepinfer.grammar.json_schema.keywords_scalar import count

if TYPE_CHECKING:
    from deepinfer.grammar.json_schema.algebra import Algebra
    from deepinfer.grammar.json_schema.nodes import Node

__all__ = ["own", "prefix_keyword"]


def prefix_keyword(algebra: Algebra, node: Node) -> tuple[str | None, str]:
    """The keyword that lists schemas by position, if present, and the one for the items behind them."""
    schema = node.schema
    if (
        node.resource.dialect.draft >= 2020
        and "prefixItems" in schema
        and algebra.active(node, "prefixItems")
    ):
        return "prefixItems", "items"
    if isinstance(schema.get("items"), list):
        # Newer drafts have no such form; schemas without `$schema` use it all the same.
        return "items", "additionalItems"
    return None, "items"


def own(algebra: Algebra, node: Node) -> list[Formula]:
    """Formulas of the keywords of arrays."""
    schema = node.schema
    parts: list[Formula] = []
    prefix, rest = prefix_keyword(algebra, node)
    size = 0
    if prefix is not None and algebra.active(node, prefix):
        if not isinstance(schema[prefix], list):
            raise algebra.malformed(node, prefix, "a list of schemas")
        size = len(schema[prefix])
        for index in range(size):
            value = algebra.child(node, prefix, str(index))
            if value != ANYTHING:
                parts.append(Items(index, index + 1, value, True))
    if rest in schema and algebra.active(node, rest):
        value = algebra.child(node, rest)
        if value != ANYTHING:
            parts.append(Items(size, None, value, True))
    low, high = count(algebra, node, "minItems"), count(algebra, node, "maxItems")
    if low:
        parts.append(ItemCount(low, None))
    if high is not None:
        parts.append(ItemCount(0, high))
    if "contains" in schema and algebra.active(node, "contains"):
        least, most = count(algebra, node, "minContains"), count(algebra, node, "maxContains")
        least = 1 if least is None else least
        if least or most is not None:
            value = algebra.child(node, "contains")
            if most is not None and most < least:
                parts.append(ItemCount(0, 0).negated())
                parts.append(ItemCount(0, 0))
            elif value == ANYTHING:
                parts.append(ItemCount(least, most))
            else:
                parts.append(Contains(value, least, most))
    if schema.get("uniqueItems") is True and algebra.active(node, "uniqueItems"):
        parts.append(Unique(node.number))
    return parts
