"""Keywords of objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from deepinfer.core.errors import GrammarTooLarge
from deepinfer.grammar.json_schema.formula import (
    ANYTHING,
    NOTHING,
    TRUE,
    Formula,
    Properties,
    PropertyCount,
    StringIn,
    conjunction,
    disjunction,
    negate,
    unit_atoms,
)
from deepinfer.grammar.json_schema.keywords_scalar import checked_pattern, count

if TYPE_CHECKING:
    from deepinfer.grammar.json_schema.algebra import Algebra
    from deepinfer.grammar.json_schema.nodes import Node

_MAX_PROPERTIES = 10_000

__all__ = ["declared_keys", "dependent", "has_key", "own"]


def has_key(name: str) -> Properties:
    """The object has a member of that name."""
    return Properties(StringIn(frozenset((name,))), ANYTHING, False)


def own(algebra: Algebra, node: Node) -> list[Formula]:
    """Formulas of the keywords of objects that apply no schema to the object itself."""
    schema = node.schema
    parts: list[Formula] = []
    keys, formulas = _members(algebra, node)
    parts += formulas
    if "additionalProperties" in schema and algebra.active(node, "additionalProperties"):
        value = algebra.child(node, "additionalProperties")
        if value != ANYTHING:
            parts.append(Properties(negate(keys), value, True))
    if "propertyNames" in schema and algebra.active(node, "propertyNames"):
        names = algebra.of_set(algebra.child(node, "propertyNames"), "string")
        if names != TRUE:
            parts.append(Properties(negate(names), NOTHING, True))
    for name in _names(algebra, node, "required"):
        parts.append(has_key(name))
    low, high = count(algebra, node, "minProperties"), count(algebra, node, "maxProperties")
    if low:
        parts.append(PropertyCount(low, None))
    if high is not None:
        parts.append(PropertyCount(0, high))
    parts += _dependent_required(algebra, node)
    return parts


def declared_keys(algebra: Algebra, node: Node) -> Formula:
    """Keys that `properties` and `patternProperties` speak of."""
    return _members(algebra, node)[0]


def _members(algebra: Algebra, node: Node) -> tuple[Formula, list[Formula]]:
    schema = node.schema
    parts: list[Formula] = []
    languages: list[Formula] = []
    if "properties" in schema and algebra.active(node, "properties"):
        members = _mapping(algebra, node, "properties")
        if len(members) > _MAX_PROPERTIES:
            raise GrammarTooLarge(
                f"properties at {node.pointer!r} declares {len(members)} members, more than {_MAX_PROPERTIES}; "
                "use fewer",
                resource="members",
                limit=_MAX_PROPERTIES,
                found=len(members),
            )
        for name in members:
            algebra.key_order.setdefault(name, len(algebra.key_order))
            key = StringIn(frozenset((name,)))
            parts.append(Properties(key, algebra.child(node, "properties", name), True))
        if members:
            languages.append(StringIn(frozenset(members)))
    if "patternProperties" in schema and algebra.active(node, "patternProperties"):
        for source in _mapping(algebra, node, "patternProperties"):
            pattern = checked_pattern(algebra, node, "patternProperties", source)
            if pattern is not None:
                languages.append(pattern)
                value = algebra.child(node, "patternProperties", source)
                if value != ANYTHING:
                    parts.append(Properties(pattern, value, True))
    return disjunction(languages), parts


def _dependent_required(algebra: Algebra, node: Node) -> list[Formula]:
    parts: list[Formula] = []
    for keyword in ("dependentRequired", "dependencies"):
        if keyword not in node.schema or not algebra.active(node, keyword):
            continue
        for name, wanted in _mapping(algebra, node, keyword).items():
            if isinstance(wanted, list):
                if not all(isinstance(other, str) for other in wanted):
                    raise algebra.malformed(node, keyword, "lists of names")
                wants: Formula = conjunction([has_key(other) for other in wanted])
            elif keyword == "dependencies" and isinstance(wanted, str):  # draft 3 style
                wants = has_key(wanted)
            elif keyword == "dependencies":
                continue
            else:
                raise algebra.malformed(node, keyword, "lists of names")
            absent = has_key(name).negated()
            parts += [disjunction([absent, piece]) for piece in unit_atoms(wants)]
    return parts


def dependent(algebra: Algebra, node: Node) -> list[Formula]:
    """Formulas of the keywords that apply a schema to the object when it has a member."""
    parts: list[Formula] = []
    for name, keyword in dependent_schemas(algebra, node):
        value = algebra.of_set(algebra.child(node, keyword, name), "object")
        if value != TRUE:
            parts.append(algebra.implies(has_key(name), value))
    return parts


def dependent_schemas(algebra: Algebra, node: Node) -> list[tuple[str, str]]:
    """Names of members on which a schema depends, with the keyword that says so."""
    found = []
    for keyword in ("dependentSchemas", "dependencies"):
        if keyword in node.schema and algebra.active(node, keyword):
            for name, value in _mapping(algebra, node, keyword).items():
                if not (keyword == "dependencies" and isinstance(value, list | str)):
                    found.append((name, keyword))
    return found


def _mapping(algebra: Algebra, node: Node, keyword: str) -> Mapping[str, Any]:
    value = node.schema[keyword]
    if not isinstance(value, Mapping):
        raise algebra.malformed(node, keyword, "an object")
    return value


def _names(algebra: Algebra, node: Node, keyword: str) -> list[str]:
    if keyword not in node.schema or not algebra.active(node, keyword):
        return []
    value = node.schema[keyword]
    if isinstance(value, bool):  # draft 3 wrote required: true inside a property
        algebra.skip(node, keyword, "a boolean is no list of names (draft 3)")
        return []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise algebra.malformed(node, keyword, "a list of names")
    return value
