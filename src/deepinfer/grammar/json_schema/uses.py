"""What became of each keyword of a schema."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.grammar.json_schema.dialect import ANNOTATIONS
from deepinfer.grammar.report import Report, ReportEntry, Status

if TYPE_CHECKING:
    from deepinfer.grammar.json_schema.nodes import Node

__all__ = ["Uses"]

_KNOWN = frozenset(
    [
        "$ref",
        "$dynamicRef",
        "$recursiveRef",
        "type",
        "enum",
        "const",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "properties",
        "patternProperties",
        "additionalProperties",
        "propertyNames",
        "required",
        "minProperties",
        "maxProperties",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "prefixItems",
        "items",
        "additionalItems",
        "minItems",
        "maxItems",
        "contains",
        "minContains",
        "maxContains",
        "uniqueItems",
        "unevaluatedProperties",
        "unevaluatedItems",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "then",
        "else",
        "format",
    ]
)


class Uses:
    """Collects the report of one compilation.

    Args:
        warn: Whether keywords that cannot be enforced are noted instead of refused.
    """

    def __init__(self, warn: bool) -> None:
        self.warn = warn
        self._nodes: dict[int, Node] = {}
        self._notes: dict[tuple[int, str], tuple[Status, str]] = {}

    def enter(self, node: Node) -> None:
        """Notes that a node's keywords are in use."""
        self._nodes.setdefault(node.number, node)

    def note(self, node: Node, keyword: str, status: Status, why: str) -> None:
        """Notes the fate of one keyword, where it is not simply enforced."""
        self._notes[node.number, keyword] = (status, why)

    def report(self) -> Report:
        """Every keyword of every schema that was reached, in the order in which they were met."""
        entries = []
        for number, node in self._nodes.items():
            schema = node.schema
            hidden = node.resource.dialect.ref_hides_siblings and "$ref" in schema
            for keyword in schema:
                status: Status = "enforced"
                noted = self._notes.get((number, keyword))
                why = ""
                if noted is not None:
                    status, why = noted
                elif keyword in ("contentEncoding", "contentMediaType"):
                    status, why = "ignored", "an annotation"
                elif keyword in ANNOTATIONS:
                    continue
                elif hidden and keyword != "$ref":
                    status, why = "ignored", "void beside $ref in this draft"
                elif keyword not in _KNOWN:
                    status, why = "ignored", "not a keyword"
                elif not node.resource.dialect.knows(keyword):
                    status, why = "ignored", "not a keyword of this draft"
                entries.append(ReportEntry(f"{node.pointer}/{keyword}", keyword, status, why))
        return Report(tuple(entries))
