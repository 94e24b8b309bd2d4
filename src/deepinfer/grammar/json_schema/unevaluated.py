"""`unevaluatedProperties` and `unevaluatedItems`, by cases.

What a schema evaluates depends on which of the schemas applied to the same value hold. The ways in which they hold
are finitely many cases that exclude each other; in each case the evaluated keys are a fixed language, and the
evaluated items are a prefix and what some `contains` match. `unevaluated*` then speaks of the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.core.errors import GrammarTooLarge
from deepinfer.grammar.json_schema.formula import (
    ANYTHING,
    FALSE,
    NOTHING,
    TRUE,
    Conjunction,
    Formula,
    Items,
    Properties,
    conjunction,
    disjunction,
    negate,
)
from deepinfer.grammar.json_schema.keywords_array import prefix_keyword
from deepinfer.grammar.json_schema.keywords_object import (
    declared_keys,
    dependent_schemas,
    has_key,
)

if TYPE_CHECKING:
    from deepinfer.grammar.json_schema.algebra import Algebra
    from deepinfer.grammar.json_schema.nodes import Node

__all__ = ["with_unevaluated"]

_MAX_CASES = 256
_KEYWORDS = {"object": "unevaluatedProperties", "array": "unevaluatedItems"}

# What is evaluated: the keys (a formula over strings); the first items (None: all of them); items of these kinds.
Evaluated = tuple[Formula, int | None, frozenset[Conjunction]]
Case = tuple[Formula, Evaluated]
_NONE: Evaluated = (FALSE, 0, frozenset())
_ALL: Evaluated = (TRUE, None, frozenset())


def with_unevaluated(algebra: Algebra, node: Node, kind: str, base: Formula) -> Formula:
    """Adds what `unevaluated*` asks of a value of a type to the formula of the other keywords.

    Args:
        algebra: The schemas.
        node: The schema.
        kind: The type of the value.
        base: The formula of the other keywords.

    Returns:
        The whole formula.

    Raises:
        GrammarTooLarge: There are too many cases.
        UnsupportedKeyword: The schema applies itself to the same value.
    """
    keyword = _KEYWORDS.get(kind)
    if keyword is None or keyword not in node.schema or not algebra.active(node, keyword):
        return base
    wanted = algebra.child(node, keyword)
    if wanted == ANYTHING:
        return base
    options = []
    for formula, evaluated in _Cases(algebra, kind).of_node(node, whole=False):
        options.append(conjunction([formula, *_rest(algebra, node, kind, wanted, evaluated)]))
    return disjunction(options)


def _rest(
    algebra: Algebra, node: Node, kind: str, wanted: Conjunction, evaluated: Evaluated
) -> list[Formula]:
    keys, first, matched = evaluated
    if kind == "object":
        return [] if keys == TRUE else [Properties(negate(keys), wanted, True)]
    if first is None:
        return []
    value = algebra.nodes.choice((wanted, *sorted(matched, key=sorted)), node)
    return [] if value == ANYTHING else [Items(first, None, value, True)]


class _Cases:
    def __init__(self, algebra: Algebra, kind: str) -> None:
        self._algebra = algebra
        self._kind = kind
        self._open: list[int] = []

    def of_set(self, value: Conjunction) -> list[Case]:
        """Cases in which a value set of one positive literal at most holds."""
        if value == NOTHING:
            return []
        if not value:
            return [(TRUE, _NONE)]
        (literal,) = value
        node = self._algebra.nodes[literal]
        if node.schema is None:
            return [(self._algebra.of_set(value, self._kind), _NONE)]
        return self.of_node(node, whole=True)

    def of_node(self, node: Node, *, whole: bool) -> list[Case]:
        """Cases of a schema; `whole` with its own `unevaluated*`, which evaluates everything."""
        algebra, kind = self._algebra, self._kind
        keyword = _KEYWORDS[kind]
        if whole and keyword in node.schema and algebra.active(node, keyword):
            return [(algebra.of_literal(node.number, kind), _ALL)]
        if node.number in self._open:
            raise algebra.unsupported(node, keyword, "the schema applies itself to the same value")
        if whole and not self._may_evaluate(node):
            return [(algebra.of_literal(node.number, kind), _NONE)]
        self._open.append(node.number)
        try:
            return self._combine(node)
        finally:
            self._open.pop()

    def _may_evaluate(self, node: Node) -> bool:
        """Whether a schema has a keyword that evaluates, or that applies a schema that might."""
        names = {
            "$ref",
            "$dynamicRef",
            "$recursiveRef",
            "allOf",
            "anyOf",
            "oneOf",
            "if",
            "then",
            "else",
        }
        if self._kind == "object":
            names |= {"properties", "patternProperties", "additionalProperties", "dependentSchemas"}
            names.add("dependencies")
        else:
            names |= {"prefixItems", "items", "additionalItems", "contains"}
        return not names.isdisjoint(node.schema)

    def _combine(self, node: Node) -> list[Case]:
        algebra, kind, schema = self._algebra, self._kind, node.schema
        # The whole formula stands in every case: cases only have to tell the evaluated parts apart.
        base = algebra.without_unevaluated(node, kind)
        cases: list[Case] = [(base, self._own(node))]
        for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            if keyword in schema and algebra.active(node, keyword):
                cases = _product(cases, self.of_set(algebra.target(node, keyword)))
        for child in algebra.children(node, "allOf"):
            cases = _product(cases, self.of_set(child))
        for keyword in ("anyOf", "oneOf"):
            for child in algebra.children(node, keyword):
                cases = _product(cases, self._either(child))
        if "if" in schema and algebra.active(node, "if"):
            test = algebra.child(node, "if")
            then = algebra.child(node, "then") if "then" in schema else ANYTHING
            other = algebra.child(node, "else") if "else" in schema else ANYTHING
            held = _product(self.of_set(test), self.of_set(then))
            failed = _product([(negate(algebra.of_set(test, kind)), _NONE)], self.of_set(other))
            cases = _product(cases, _merged([*held, *failed]))
        if kind == "object":
            for name, keyword in dependent_schemas(algebra, node):
                present = _product(
                    [(has_key(name), _NONE)], self.of_set(algebra.child(node, keyword, name))
                )
                absent: Case = (has_key(name).negated(), _NONE)
                cases = _product(cases, _merged([*present, absent]))
        return cases

    def _either(self, child: Conjunction) -> list[Case]:
        """A schema holds, or fails and evaluates nothing."""
        held = self.of_set(child)
        if all(evaluated == _NONE for _, evaluated in held):
            return [(TRUE, _NONE)]
        return _merged([*held, (negate(self._algebra.of_set(child, self._kind)), _NONE)])

    def _own(self, node: Node) -> Evaluated:
        algebra, schema = self._algebra, node.schema
        if self._kind == "object":
            if "additionalProperties" in schema and algebra.active(node, "additionalProperties"):
                return _ALL
            return (declared_keys(algebra, node), 0, frozenset())
        prefix, rest = prefix_keyword(algebra, node)
        if rest in schema and algebra.active(node, rest):
            return _ALL
        first = len(schema[prefix]) if prefix is not None else 0
        matched: frozenset[Conjunction] = frozenset()
        if (
            "contains" in schema
            and node.resource.dialect.draft >= 2020
            and algebra.active(node, "contains")
        ):
            matched = frozenset((algebra.child(node, "contains"),))
        return (FALSE, first, matched)


def _product(left: list[Case], right: list[Case]) -> list[Case]:
    if right == [(TRUE, _NONE)]:
        return left
    pairs = []
    for formula, evaluated in left:
        for other, more in right:
            both = conjunction([formula, other])
            if both != FALSE:
                pairs.append((both, _union(evaluated, more)))
    return _merged(pairs)


def _union(left: Evaluated, right: Evaluated) -> Evaluated:
    first = None if left[1] is None or right[1] is None else max(left[1], right[1])
    return (disjunction([left[0], right[0]]), first, left[2] | right[2])


def _merged(cases: list[Case]) -> list[Case]:
    """Cases that evaluate the same, joined."""
    grouped: dict[Evaluated, list[Formula]] = {}
    for formula, evaluated in cases:
        grouped.setdefault(evaluated, []).append(formula)
    if len(grouped) > _MAX_CASES:
        raise GrammarTooLarge(
            f"unevaluated* has more than {_MAX_CASES} cases of what is evaluated; use fewer choices beside it",
            resource="cases",
            limit=_MAX_CASES,
            found=len(grouped),
        )
    return [(disjunction(formulas), evaluated) for evaluated, formulas in grouped.items()]
