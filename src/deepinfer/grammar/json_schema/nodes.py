"""Sub-schemas as numbered nodes: the literals of conjunctions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinfer.core.errors import GrammarSyntaxError, GrammarTooLarge
from deepinfer.grammar.json_schema.formula import ANYTHING, NOTHING, Conjunction
from deepinfer.grammar.json_schema.references import Registry, Resource, escape
from deepinfer.grammar.json_schema.values import JsonValue, freeze

__all__ = ["Node", "Nodes"]

_MAX_NODES = 200_000
# Schemas of scalar keywords only are one node wherever they stand, unless a keyword depends on the place.
_PLACED = frozenset(
    ["$ref", "$dynamicRef", "$recursiveRef", "$id", "id", "$schema", "$anchor", "$dynamicAnchor"]
)


class Node:
    """A sub-schema.

    Attributes:
        number: Its number, from 1; a literal is the number or its negative.
        schema: The schema: a mapping, or None when the node is a value or a choice.
        value: The value that the node consists of, for `const` and the like, else None.
        choice: Value sets whose union the node is, else None.
        resource: The resource that it belongs to.
        pointer: Where it stands.
        scope: Resources with dynamic anchors that were entered on the way here, outermost first.
    """

    __slots__ = ("choice", "number", "pointer", "resource", "schema", "scope", "value")

    def __init__(
        self,
        number: int,
        schema: Any,
        resource: Resource,
        pointer: str,
        scope: tuple[Resource, ...],
    ) -> None:
        self.number = number
        self.schema = schema
        self.resource = resource
        self.pointer = pointer
        self.scope = scope
        self.value: JsonValue | None = None
        self.choice: tuple[Conjunction, ...] | None = None


class Nodes:
    """Interns sub-schemas.

    Args:
        registry: The documents.
        dynamic: Whether dynamic references are in use, so that the way to a schema matters.
    """

    def __init__(self, registry: Registry, dynamic: bool) -> None:
        self.registry = registry
        self.dynamic = dynamic
        self.all: list[Node] = []
        self._known: dict[object, int] = {}

    def __getitem__(self, number: int) -> Node:
        return self.all[abs(number) - 1]

    def _add(
        self,
        key: object,
        schema: Any,
        resource: Resource,
        pointer: str,
        scope: tuple[Resource, ...],
    ) -> int:
        number = len(self.all) + 1
        if number > _MAX_NODES:
            raise GrammarTooLarge(
                f"the schema needs more than {_MAX_NODES} sub-schemas; use a smaller one",
                resource="schemas",
                limit=_MAX_NODES,
                found=number,
            )
        self.all.append(Node(number, schema, resource, pointer, scope))
        self._known[key] = number
        return number

    def of(
        self, schema: Any, resource: Resource, pointer: str, scope: tuple[Resource, ...]
    ) -> Conjunction:
        """The value set of a schema.

        Args:
            schema: The schema.
            resource: The resource of the schema around it.
            pointer: Where it stands.
            scope: Scope of the schema around it.

        Returns:
            Everything, nothing, or one positive literal.

        Raises:
            GrammarSyntaxError: It is neither a mapping nor a boolean.
        """
        if schema is True:
            return ANYTHING
        if schema is False:
            return NOTHING
        if not isinstance(schema, Mapping):
            raise GrammarSyntaxError(
                f"the schema at {pointer!r} is {type(schema).__name__}; a schema is an object or a boolean"
            )
        for name in schema:
            if not isinstance(name, str):
                escape(name)  # says what is wrong
        if not schema:
            return ANYTHING
        key: object = None
        if len(schema) <= 8 and not _PLACED & schema.keys():
            items = []
            for name, value in schema.items():
                if not isinstance(value, str | int | float | None):
                    break
                items.append((name, type(value), value))
            else:
                key = (resource.dialect, frozenset(items))
        if key is None:
            resource = self.registry.enter(schema, resource, pointer)
            if self.dynamic:
                scope = self.extend(scope, resource)
            key = (id(schema), id(resource), tuple(map(id, scope)))
        number = self._known.get(key)
        if number is None:
            number = self._add(key, schema, resource, pointer, scope)
        return frozenset((number,))

    def extend(self, scope: tuple[Resource, ...], resource: Resource) -> tuple[Resource, ...]:
        """The scope after entering a resource; it grows by one that is the first with some dynamic anchor."""
        if resource in scope:
            return scope
        self.registry.index(resource)
        names = resource.dynamic
        if names and any(all(name not in r.dynamic for r in scope) for name in names):
            return (*scope, resource)
        return scope

    def value(self, value: Any, resource: Resource, pointer: str) -> Conjunction:
        """The set of one JSON value."""
        return self.frozen(freeze(value, pointer), resource, pointer)

    def frozen(self, value: JsonValue, resource: Resource, pointer: str) -> Conjunction:
        """The set of one frozen value."""
        key = ("value", value)
        number = self._known.get(key)
        if number is None:
            number = self._add(key, None, resource, pointer, ())
            self.all[number - 1].value = value
        return frozenset((number,))

    def choice(self, sets: tuple[Conjunction, ...], near: Node) -> Conjunction:
        """The union of value sets, as one literal."""
        if any(not value for value in sets):
            return ANYTHING
        kept = tuple(dict.fromkeys(value for value in sets if value != NOTHING))
        if not kept:
            return NOTHING
        if len(kept) == 1 and len(kept[0]) == 1:
            return kept[0]
        key = ("choice", frozenset(kept))
        number = self._known.get(key)
        if number is None:
            number = self._add(key, None, near.resource, near.pointer, ())
            self.all[number - 1].choice = kept
        return frozenset((number,))
