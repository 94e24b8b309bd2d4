"""Whether a concrete JSON value is in a value set, and the values of finite sets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deepinfer.grammar.json_schema.algebra import TYPES, Algebra
from deepinfer.grammar.json_schema.formula import (
    FALSE,
    NOTHING,
    Conjunction,
    Contains,
    Formula,
    ItemCount,
    Items,
    Properties,
    PropertyCount,
    Unique,
    evaluate,
)
from deepinfer.grammar.json_schema.numbers import finite_numbers, number_holds
from deepinfer.grammar.json_schema.values import JsonValue, freeze, type_of

__all__ = ["Concrete"]


class Concrete:
    """Answers about single values.

    Args:
        algebra: The schemas.
    """

    def __init__(self, algebra: Algebra) -> None:
        self._algebra = algebra

    def holds(self, value: JsonValue, wanted: Conjunction) -> bool:
        """Whether a value is in a value set. Values are nested 200 levels deep at most."""
        if wanted == NOTHING:
            return False
        kind = type_of(value)
        formula = self._algebra.of_set(wanted, kind)
        return evaluate(formula, lambda atom: self._atom(atom, value))

    def _atom(self, atom: Formula, value: JsonValue) -> bool:
        kind, content = value
        if kind == "number":
            return number_holds(atom, content)
        if kind == "string":
            return self._algebra.strings.holds(atom, content)
        if isinstance(atom, PropertyCount | ItemCount):
            return atom.low <= len(content) and (atom.high is None or len(content) <= atom.high)
        if isinstance(atom, Properties):
            inside = (v for k, v in content if self._algebra.strings.holds(atom.keys, k))
            return self._quantified(atom.every, inside, atom.value)
        if isinstance(atom, Items):
            return self._quantified(atom.every, content[atom.start : atom.stop], atom.value)
        if isinstance(atom, Contains):
            count = sum(self.holds(item, atom.value) for item in content)
            return atom.low <= count and (atom.high is None or count <= atom.high)
        if isinstance(atom, Unique):
            return (len(set(content)) == len(content)) == atom.holds
        raise TypeError(f"{atom!r} does not speak of {kind} values")

    def _quantified(self, every: bool, values: Any, wanted: Conjunction) -> bool:
        found = (self.holds(value, wanted) for value in values)
        return all(found) if every else any(found)

    def members(self, wanted: Conjunction, limit: int) -> list[JsonValue] | None:
        """The values of a finite set, or None when it is infinite, larger than the limit, or not known to be finite."""
        if wanted == NOTHING:
            return []
        found: list[JsonValue] = []
        for kind in TYPES:
            formula = self._algebra.of_set(wanted, kind)
            if formula == FALSE:
                continue
            if kind in ("null", "true", "false"):
                found.append((kind, None))
            elif kind == "number":
                numbers = finite_numbers(formula)
                if numbers is None:
                    return None
                found += [("number", number) for number in sorted(numbers)]
            elif kind == "string":
                texts = self._algebra.strings.finite(formula)
                if texts is None:
                    return None
                found += [("string", text) for text in sorted(texts)]
            else:
                named = self._named(wanted, kind)
                if named is None:
                    return None
                found += [value for value in named if self.holds(value, wanted)]
            if len(found) > limit:
                return None
        return found

    def _named(self, wanted: Conjunction, kind: str) -> list[JsonValue] | None:
        """Values of a type among those that some positive literal lists."""
        for literal in sorted(wanted):
            if literal > 0:
                values = list(self._listed(literal))
                if values:
                    return [v for v in dict.fromkeys(values) if type_of(v) == kind]
        return None

    def _listed(self, number: int) -> Iterator[JsonValue]:
        node = self._algebra.nodes[number]
        if node.value is not None:
            yield node.value
        elif node.schema is not None:
            schema = node.schema
            if isinstance(schema.get("enum"), list):
                yield from (freeze(value, node.pointer) for value in schema["enum"])
            elif "const" in schema and self._algebra.active(node, "const"):
                yield freeze(schema["const"], node.pointer)
