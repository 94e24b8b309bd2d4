"""Documents, base URIs, anchors: where a reference leads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urljoin

from deepinfer.core.errors import GrammarSyntaxError, GrammarTooLarge, UnsupportedKeyword
from deepinfer.grammar.json_schema.dialect import Dialect, dialect_of, with_vocabulary

__all__ = ["Place", "Registry", "Resource", "escape"]

_ONE: tuple[str, ...] = (
    "not",
    "if",
    "then",
    "else",
    "propertyNames",
    "contains",
    "contentSchema",
    "additionalItems",
)
_ONE += ("additionalProperties", "unevaluatedProperties", "unevaluatedItems", "items")
_LIST: tuple[str, ...] = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAP: tuple[str, ...] = (
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
    "dependentSchemas",
    "dependencies",
)
_MAX_SCHEMAS = 2_000_000


class Resource:
    """A schema with a URI of its own: the root of a document, or a part with `$id`.

    Attributes:
        uri: Absolute URI, without a fragment; empty for a document without one.
        schema: The schema.
        dialect: The draft that it speaks.
        pointer: Where it stands in its document.
        anchors: Schemas by plain name, with their pointers.
        dynamic: Names among the anchors that are dynamic.
    """

    __slots__ = ("anchors", "dialect", "dynamic", "pointer", "schema", "uri")

    def __init__(self, uri: str, schema: Any, dialect: Dialect, pointer: str) -> None:
        self.uri = uri
        self.schema = schema
        self.dialect = dialect
        self.pointer = pointer
        self.anchors: dict[str, Place] = {}
        self.dynamic: set[str] = set()


class Place:
    """A schema, the resource that it belongs to, and its pointer in the document."""

    __slots__ = ("pointer", "resource", "schema")

    def __init__(self, schema: Any, resource: Resource, pointer: str) -> None:
        self.schema = schema
        self.resource = resource
        self.pointer = pointer


class Registry:
    """All documents that a compilation may refer to.

    Args:
        schema: The root schema.
        dialect: The draft to use where `$schema` names none.
        resources: Other documents by absolute URI.
    """

    def __init__(self, schema: Any, dialect: Dialect, resources: Mapping[str, Any]) -> None:
        self._default = dialect
        self._others = {uri.removesuffix("#"): other for uri, other in resources.items()}
        self._by_uri: dict[str, Resource] = {}
        self._by_schema: dict[int, Resource] = {}
        self._indexed: set[int] = set()
        self.root = self._document(schema, "")

    def _document(self, schema: Any, uri: str) -> Resource:
        dialect = self._dialect(schema, self._default)
        own = self._own_uri(schema, dialect)
        absolute = urljoin(uri, own) if own else uri
        resource = Resource(absolute, schema, dialect, "" if not uri else uri + "#")
        self._by_uri.setdefault(absolute, resource)
        if uri:
            self._by_uri[uri] = resource
        if isinstance(schema, dict):
            self._by_schema[id(schema)] = resource
        return resource

    def _dialect(self, schema: Any, inherited: Dialect) -> Dialect:
        if not isinstance(schema, dict) or "$schema" not in schema:
            return inherited
        known = dialect_of(schema)
        if known is not None:
            return known
        meta = schema["$schema"]
        other = self._others.get(meta.removesuffix("#")) if isinstance(meta, str) else None
        if isinstance(other, dict) and other is not schema:
            base = dialect_of(other) or inherited
            vocabulary = other.get("$vocabulary")
            return with_vocabulary(base, vocabulary) if isinstance(vocabulary, dict) else base
        return inherited

    def _own_uri(self, schema: Any, dialect: Dialect) -> str:
        """The URI that a schema gives itself, without a fragment; empty when it has none."""
        if not isinstance(schema, dict):
            return ""
        if dialect.ref_hides_siblings and "$ref" in schema:
            return ""
        own = schema.get(dialect.id_keyword)
        return own.split("#", 1)[0] if isinstance(own, str) else ""

    def enter(self, schema: Any, resource: Resource, pointer: str) -> Resource:
        """The resource that a schema inside `resource` belongs to: itself when it has a URI of its own."""
        if not isinstance(schema, dict):
            return resource
        known = self._by_schema.get(id(schema))
        if known is not None:
            return known
        if "$id" not in schema and "id" not in schema and "$schema" not in schema:
            return resource
        dialect = self._dialect(schema, resource.dialect)
        own = self._own_uri(schema, dialect)
        if not own:
            return resource
        found = Resource(urljoin(resource.uri, own), schema, dialect, pointer)
        self._by_schema[id(schema)] = found
        self._by_uri.setdefault(found.uri, found)
        return found

    def resolve(self, reference: str, resource: Resource, where: str, keyword: str) -> Place:
        """Where a reference leads.

        Args:
            reference: The value of `$ref`.
            resource: The resource that it stands in.
            where: Pointer of the keyword, for messages.
            keyword: The keyword.

        Returns:
            The place.

        Raises:
            UnsupportedKeyword: It leads to a document that is not known.
            GrammarSyntaxError: It leads to nothing.
        """
        base, _, fragment = reference.partition("#")
        target = resource
        if base:
            target = self._find(urljoin(resource.uri, base), reference, where, keyword)
        fragment = unquote(fragment)
        if not fragment:
            return Place(target.schema, target, target.pointer)
        if fragment.startswith("/"):
            return self._follow(fragment, target, reference, where)
        self.index(target)
        found = target.anchors.get(fragment)
        if found is None:
            raise GrammarSyntaxError(
                f"{keyword} {reference!r} at {where!r} names an anchor that does not exist; define it"
            )
        return found

    def _find(self, uri: str, reference: str, where: str, keyword: str) -> Resource:
        found = self._by_uri.get(uri)
        if found is None:
            self.index(self.root)
            for known in list(self._by_uri.values()):
                self.index(known)
            found = self._by_uri.get(uri)
        if found is None and uri in self._others:
            found = self._document(self._others[uri], uri)
            self.index(found)
        if found is None:
            schema = _standard(uri)
            if schema is not None:
                found = self._document(schema, uri)
        if found is None:
            raise UnsupportedKeyword(
                f"{keyword} {reference!r} at {where!r} leads to {uri!r}, which is not in this document; "
                "pass it in resources=",
                path=where,
                keyword=keyword,
            )
        return found

    def _follow(self, fragment: str, resource: Resource, reference: str, where: str) -> Place:
        schema, pointer = resource.schema, resource.pointer
        for part in fragment[1:].split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(schema, Mapping) and key in schema:
                schema = schema[key]
            elif isinstance(schema, list) and key.isdigit() and int(key) < len(schema):
                schema = schema[int(key)]
            else:
                raise GrammarSyntaxError(
                    f"reference {reference!r} at {where!r} leads to nothing: there is no {key!r}; correct the pointer"
                )
            pointer = f"{pointer}/{part}"
            resource = self.enter(schema, resource, pointer)
        return Place(schema, resource, pointer)

    def index(self, resource: Resource) -> None:
        """Finds every anchor and URI below a resource."""
        if id(resource) in self._indexed:
            return
        self._indexed.add(id(resource))
        stack: list[tuple[Any, Resource, str]] = [(resource.schema, resource, resource.pointer)]
        seen = 0
        while stack:
            schema, owner, pointer = stack.pop()
            if not isinstance(schema, dict):
                continue
            seen += 1
            if seen > _MAX_SCHEMAS:
                raise GrammarTooLarge(
                    f"the document has more than {_MAX_SCHEMAS} schemas; use a smaller one",
                    resource="schemas",
                    limit=_MAX_SCHEMAS,
                    found=seen,
                )
            owner = self.enter(schema, owner, pointer)
            self._indexed.add(id(owner))
            self._anchor(schema, owner, pointer)
            if owner.dialect.ref_hides_siblings and "$ref" in schema:
                keep = {k: schema[k] for k in ("definitions", "$defs") if k in schema}
                children = list(_children(keep))
            else:
                children = list(_children(schema))
            stack.extend((child, owner, f"{pointer}/{path}") for path, child in children)

    def _anchor(self, schema: dict[str, Any], owner: Resource, pointer: str) -> None:
        names = []
        if owner.dialect.draft >= 2019:
            names.append(schema.get("$anchor"))
        dynamic = schema.get("$dynamicAnchor") if owner.dialect.draft >= 2020 else None
        if isinstance(dynamic, str):
            owner.dynamic.add(dynamic)
            names.append(dynamic)
        if owner.dialect.draft <= 7:
            own = schema.get(owner.dialect.id_keyword)
            if isinstance(own, str) and "#" in own and not own.endswith("#"):
                names.append(own.split("#", 1)[1])
        for name in names:
            if isinstance(name, str):
                owner.anchors.setdefault(name, Place(schema, owner, pointer))


def _children(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Sub-schemas with their relative pointers."""
    for key in _ONE:
        if key in schema and isinstance(schema[key], dict):
            yield key, schema[key]
    for key in _LIST:
        if isinstance(schema.get(key), list):
            for index, child in enumerate(schema[key]):
                yield f"{key}/{index}", child
    for key in _MAP:
        if isinstance(schema.get(key), dict):
            for name, child in schema[key].items():
                yield f"{key}/{escape(name)}", child


def escape(name: str) -> str:
    """A member's name as a part of a JSON pointer.

    Raises:
        GrammarSyntaxError: It is no text, which JSON has no place for.
    """
    if not isinstance(name, str):
        raise GrammarSyntaxError(
            f"a schema has a member named {name!r} ({type(name).__name__}); names are texts"
        )
    return name.replace("~", "~0").replace("/", "~1")


def _standard(uri: str) -> Any:
    """A published meta-schema, or None."""
    if "json-schema.org/" not in uri:
        return None
    try:
        from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]
    except ImportError:
        return None
    for candidate in (uri, uri + "#"):
        found = REGISTRY.get(candidate)
        if found is not None:
            return found.contents
    return None
