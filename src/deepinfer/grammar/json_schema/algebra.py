"""Schemas as boolean formulas, type by type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deepinfer.core.errors import GrammarSyntaxError, GrammarTooLarge, UnsupportedKeyword
from deepinfer.grammar.json_schema import keywords_array, keywords_object, keywords_scalar
from deepinfer.grammar.json_schema.budget import Budget
from deepinfer.grammar.json_schema.formula import (
    ANYTHING,
    FALSE,
    NOTHING,
    TRUE,
    Conjunction,
    Formula,
    ItemCount,
    Items,
    NumberIn,
    Properties,
    StringIn,
    conjunction,
    disjunction,
    negate,
)
from deepinfer.grammar.json_schema.implication import implication
from deepinfer.grammar.json_schema.nodes import Node, Nodes
from deepinfer.grammar.json_schema.references import Resource, escape
from deepinfer.grammar.json_schema.strings import Strings
from deepinfer.grammar.json_schema.unevaluated import with_unevaluated
from deepinfer.grammar.json_schema.uses import Uses
from deepinfer.grammar.json_schema.values import JsonValue, freeze, type_of

__all__ = ["TYPES", "Algebra"]

TYPES = ("null", "false", "true", "number", "string", "object", "array")
"""JSON types; the two booleans are types of their own."""

_MAX_NESTING = 120


class Algebra:
    """Turns nodes into formulas, one for each JSON type.

    Args:
        nodes: The nodes.
        strings: Answers about strings.
        uses: Where every keyword's fate is noted.
        assert_formats: Whether `format` restricts strings.
        budget: What the compilation may still take.
    """

    def __init__(
        self, nodes: Nodes, strings: Strings, uses: Uses, assert_formats: bool, budget: Budget
    ) -> None:
        self.budget = budget
        self.nodes = nodes
        self.strings = strings
        self.uses = uses
        self.assert_formats = assert_formats
        # Whether two formulas of a type exclude each other; set by the one who can tell.
        self.exclusive: Callable[[Formula, Formula, str], bool] = lambda a, b, kind: False
        # Whether implications become conditions on members rather than cases.
        self.by_clauses = True
        # Declared keys in the order in which they were met.
        self.key_order: dict[str, int] = {}
        self._formulas: dict[tuple[int, str], Formula] = {}
        self._open: set[tuple[int, str]] = set()

    def of_literal(self, literal: int, kind: str) -> Formula:
        """The formula of one signed node for values of a type."""
        if literal == 0:
            return FALSE
        key = (literal, kind)
        known = self._formulas.get(key)
        if known is None:
            if literal < 0:
                known = negate(self.of_literal(-literal, kind), self.budget.spend)
            else:
                known = self._guarded(literal, kind)
            self._formulas[key] = known
        return known

    def of_set(self, value: Conjunction, kind: str) -> Formula:
        """The formula of a value set for values of a type."""
        return conjunction([self.of_literal(literal, kind) for literal in sorted(value)])

    def _guarded(self, number: int, kind: str) -> Formula:
        key = (number, kind)
        self.budget.spend(8)
        node = self.nodes[number]
        if key in self._open:
            raise UnsupportedKeyword(
                f"the schema at {node.pointer!r} refers to itself without describing a part of the value; "
                "break the cycle",
                path=node.pointer,
                keyword="$ref",
            )
        if len(self._open) >= _MAX_NESTING:
            raise GrammarTooLarge(
                f"more than {_MAX_NESTING} schemas apply to one value through nested keywords at {node.pointer!r}; "
                "flatten them",
                resource="nesting",
                limit=_MAX_NESTING,
                found=_MAX_NESTING + 1,
            )
        self._open.add(key)
        try:
            return self._formula(node, kind)
        finally:
            self._open.discard(key)

    def _formula(self, node: Node, kind: str) -> Formula:
        if node.value is not None:
            return self._equals(node.value, node, kind)
        if node.choice is not None:
            return disjunction([self.of_set(value, kind) for value in node.choice])
        schema: Mapping[str, Any] = node.schema
        dialect = node.resource.dialect
        self.uses.enter(node)
        if dialect.ref_hides_siblings and "$ref" in schema:
            return self.of_set(self.target(node, "$ref"), kind)
        base = self.without_unevaluated(node, kind)
        if base == FALSE:
            return FALSE
        return with_unevaluated(self, node, kind, base)

    def without_unevaluated(self, node: Node, kind: str) -> Formula:
        """The formula of a node's keywords, `unevaluated*` left aside."""
        parts = self.own(node, kind)
        if any(part == FALSE for part in parts):
            return FALSE
        parts += self.applied(node, kind)
        return conjunction(parts)

    def own(self, node: Node, kind: str) -> list[Formula]:
        """Formulas of the keywords that apply no schema to the same value."""
        schema = node.schema
        parts = [self._type(node, kind)] if "type" in schema else []
        if parts and parts[0] == FALSE:
            return parts
        for keyword in ("enum", "const"):
            if keyword in schema and self.active(node, keyword):
                parts.append(self._named(node, keyword, kind))
        if kind == "number":
            parts += keywords_scalar.number(self, node)
        elif kind == "string":
            parts += keywords_scalar.string(self, node)
        elif kind == "object":
            parts += keywords_object.own(self, node)
        elif kind == "array":
            parts += keywords_array.own(self, node)
        return parts

    def applied(self, node: Node, kind: str) -> list[Formula]:
        """Formulas of the keywords that apply schemas to the same value."""
        schema = node.schema
        parts: list[Formula] = []
        for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            if keyword in schema and self.active(node, keyword):
                parts.append(self.of_set(self.target(node, keyword), kind))
        for child in self.children(node, "allOf"):
            parts.append(self.of_set(child, kind))
            if parts[-1] == FALSE:
                return parts
        if "anyOf" in schema and self.active(node, "anyOf"):
            parts.append(disjunction([self.of_set(c, kind) for c in self.children(node, "anyOf")]))
        if "oneOf" in schema and self.active(node, "oneOf"):
            parts.append(self._one_of(self.children(node, "oneOf"), kind))
        if "not" in schema and self.active(node, "not"):
            parts.append(negate(self.of_set(self.child(node, "not"), kind), self.budget.spend))
        if "if" in schema and self.active(node, "if"):
            parts.append(self._conditional(node, kind))
        if kind == "object":
            parts += keywords_object.dependent(self, node)
        return parts

    def _one_of(self, children: list[Conjunction], kind: str) -> Formula:
        branches = [f for f in (self.of_set(c, kind) for c in children) if f != FALSE]
        options = []
        for index, branch in enumerate(branches):
            self.budget.spend(len(branches))
            others = [
                negate(other, self.budget.spend)
                for place, other in enumerate(branches)
                if place != index and not self.exclusive(branch, other, kind)
            ]
            options.append(conjunction([branch, *others]))
        return disjunction(options)

    def _conditional(self, node: Node, kind: str) -> Formula:
        parts = []
        for keyword in ("if", "then", "else"):
            value = self.child(node, keyword) if keyword in node.schema else ANYTHING
            parts.append(self.of_set(value, kind))
        test, then, other = parts
        if then == TRUE and other == TRUE:
            return TRUE
        fails = negate(test, self.budget.spend)
        if kind == "object":
            return conjunction([self.implies(test, then), self.implies(fails, other)])
        return disjunction([conjunction([test, then]), conjunction([fails, other])])

    def _type(self, node: Node, kind: str) -> Formula:
        if not self.active(node, "type"):
            return TRUE
        named = node.schema["type"]
        names = [named] if isinstance(named, str) else named
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self.malformed(node, "type", "a type's name or a list of them")
        parts: list[Formula] = []
        for name in names:
            if name == kind or (name == "boolean" and kind in ("true", "false")):
                parts.append(TRUE)
            elif name == "integer":
                if kind == "number":
                    old = node.resource.dialect.draft == 4
                    parts.append(
                        keywords_scalar.WRITTEN_INTEGER if old else keywords_scalar.INTEGER
                    )
            elif name not in ("null", "boolean", "number", "string", "object", "array"):
                raise self.malformed(node, "type", "one of the seven types' names")
        return disjunction(parts)

    def _named(self, node: Node, keyword: str, kind: str) -> Formula:
        """`enum` and `const`."""
        pointer = f"{node.pointer}/{keyword}"
        given = node.schema[keyword]
        if keyword == "enum" and not isinstance(given, list):
            raise self.malformed(node, keyword, "a list of values")
        values = given if keyword == "enum" else [given]
        frozen = [
            v for v in (self._frozen(value, pointer) for value in values) if type_of(v) == kind
        ]
        if kind == "string":
            return StringIn(frozenset(content for _, content in frozen)) if frozen else FALSE
        if kind == "number":
            return NumberIn(frozenset(content for _, content in frozen)) if frozen else FALSE
        return disjunction([self._equals(value, node, kind) for value in dict.fromkeys(frozen)])

    def _frozen(self, value: Any, pointer: str) -> JsonValue:
        return freeze(value, pointer)

    def _equals(self, value: JsonValue, node: Node, kind: str) -> Formula:
        """A value of a type equals a frozen value."""
        if type_of(value) != kind:
            return FALSE
        content = value[1]
        if kind == "string":
            return StringIn(frozenset((content,)))
        if kind == "number":
            return NumberIn(frozenset((content,)))
        parts: list[Formula] = []
        self.budget.spend(8 * len(content or ()))
        if kind == "array":
            parts.append(ItemCount(len(content), len(content)))
            for index, item in enumerate(content):
                want = self.nodes.frozen(item, node.resource, node.pointer)
                parts.append(Items(index, index + 1, want, True))
        elif kind == "object":
            names = frozenset(name for name, _ in content)
            for name, member in content:
                key = StringIn(frozenset((name,)))
                want = self.nodes.frozen(member, node.resource, node.pointer)
                parts.append(Properties(key, ANYTHING, False))
                parts.append(Properties(key, want, True))
            others = StringIn(names, False) if names else TRUE
            parts.append(Properties(others, NOTHING, True))
        return conjunction(parts)

    # What the keyword modules need.

    def implies(self, condition: Formula, consequent: Formula) -> Formula:
        """Where a formula over objects holds, another one does."""
        otherwise = negate(condition, self.budget.spend)
        return implication(condition, otherwise, consequent, by_clauses=self.by_clauses)

    def active(self, node: Node, keyword: str) -> bool:
        """Whether a keyword restricts values in the node's dialect."""
        return node.resource.dialect.knows(keyword)

    def child(self, node: Node, *path: str) -> Conjunction:
        """The value set of a sub-schema at a path below a node."""
        schema: Any = node.schema
        pointer = node.pointer
        for part in path:
            schema = schema[int(part)] if isinstance(schema, list) else schema[part]
            pointer = f"{pointer}/{escape(part)}"
        return self.nodes.of(schema, node.resource, pointer, node.scope)

    def children(self, node: Node, keyword: str) -> list[Conjunction]:
        """Value sets of a list of sub-schemas; empty when the keyword is absent."""
        given = node.schema.get(keyword)
        if given is None or not self.active(node, keyword):
            return []
        if not isinstance(given, list) or not given:
            raise self.malformed(node, keyword, "a list of schemas that is not empty")
        return [self.child(node, keyword, str(index)) for index in range(len(given))]

    def target(self, node: Node, keyword: str) -> Conjunction:
        """The value set that a reference names."""
        reference = node.schema[keyword]
        where = f"{node.pointer}/{keyword}"
        if not isinstance(reference, str):
            raise self.malformed(node, keyword, "a URI reference")
        place = self.nodes.registry.resolve(reference, node.resource, where, keyword)
        scope: tuple[Resource, ...] = node.scope
        if self.nodes.dynamic:
            if keyword == "$dynamicRef":
                name = reference.partition("#")[2]
                self.nodes.registry.index(place.resource)
                if name in place.resource.dynamic and place is place.resource.anchors.get(name):
                    for resource in scope:
                        if name in resource.dynamic:
                            place = resource.anchors[name]
                            break
            elif keyword == "$recursiveRef" and place.schema.get("$recursiveAnchor") is True:
                raise self.unsupported(node, keyword, "with $recursiveAnchor; use $dynamicRef")
            scope = self.nodes.extend(scope, place.resource)
        return self.nodes.of(place.schema, place.resource, place.pointer, scope)

    def malformed(self, node: Node, keyword: str, wanted: str) -> GrammarSyntaxError:
        """The error of a keyword whose value has the wrong form."""
        found = repr(node.schema[keyword])
        found = found if len(found) <= 60 else found[:57] + "..."
        return GrammarSyntaxError(f"{keyword} at {node.pointer!r} is {found}; it must be {wanted}")

    def unsupported(self, node: Node, keyword: str, why: str) -> UnsupportedKeyword:
        """The error of a keyword that cannot be enforced."""
        path = f"{node.pointer}/{keyword}"
        return UnsupportedKeyword(
            f"{keyword} at {path!r} cannot be enforced: {why}; change it, or pass on_unsupported='warn'",
            path=path,
            keyword=keyword,
        )

    def skip(self, node: Node, keyword: str, why: str) -> None:
        """Leaves a keyword aside with a note, or refuses the schema, as the caller asked.

        Raises:
            UnsupportedKeyword: Keywords that cannot be enforced are errors.
        """
        if not self.uses.warn:
            raise self.unsupported(node, keyword, why)
        self.uses.note(node, keyword, "ignored", why)
