"""Drafts of JSON Schema: which one a schema speaks, and which keywords it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepinfer.core.errors import ConfigError

__all__ = ["ANNOTATIONS", "DRAFTS", "Dialect", "dialect_of", "find_dialect"]

_CORE = [
    "$ref",
    "$defs",
    "definitions",
    "$schema",
    "$id",
    "id",
    "$anchor",
    "$dynamicRef",
    "$dynamicAnchor",
]
_CORE += ["$recursiveRef", "$recursiveAnchor", "$vocabulary", "$comment"]
_APPLICATOR = [
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "then",
    "else",
    "dependentSchemas",
    "properties",
]
_APPLICATOR += [
    "patternProperties",
    "additionalProperties",
    "propertyNames",
    "prefixItems",
    "items",
    "contains",
]
_APPLICATOR += ["additionalItems", "dependencies"]
_UNEVALUATED = ["unevaluatedProperties", "unevaluatedItems"]
_VALIDATION = ["type", "const", "enum", "multipleOf", "maximum", "exclusiveMaximum", "minimum"]
_VALIDATION += [
    "exclusiveMinimum",
    "maxLength",
    "minLength",
    "pattern",
    "maxItems",
    "minItems",
    "uniqueItems",
]
_VALIDATION += [
    "maxContains",
    "minContains",
    "maxProperties",
    "minProperties",
    "required",
    "dependentRequired",
]

ANNOTATIONS = frozenset(
    [
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "$schema",
        "$id",
        "id",
        "$anchor",
        "$dynamicAnchor",
        "$recursiveAnchor",
        "$defs",
        "definitions",
        "$vocabulary",
    ]
)
"""Keywords that restrict nothing by definition."""

_SINCE = {
    "const": 6,
    "contains": 6,
    "propertyNames": 6,
    "if": 7,
    "then": 7,
    "else": 7,
    "dependentRequired": 2019,
    "dependentSchemas": 2019,
    "minContains": 2019,
    "maxContains": 2019,
    "unevaluatedProperties": 2019,
    "unevaluatedItems": 2019,
    "$anchor": 2019,
    "$recursiveRef": 2019,
    "prefixItems": 2020,
    "$dynamicRef": 2020,
}

_VOCABULARIES = {
    "core": _CORE,
    "applicator": _APPLICATOR,
    "unevaluated": _UNEVALUATED,
    "validation": _VALIDATION,
    "format-annotation": ["format"],
    "format-assertion": ["format"],
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """One draft, with the vocabularies that are in force.

    Attributes:
        draft: 4, 6, 7, 2019 or 2020.
        keywords: Keywords that are in force, or None for all of the draft.
        assert_formats: True or False when the meta-schema says whether `format` is asserted, else None.
    """

    draft: int
    keywords: frozenset[str] | None = None
    assert_formats: bool | None = None

    def knows(self, keyword: str) -> bool:
        """Whether a keyword restricts values in this dialect."""
        if self.keywords is not None and keyword not in self.keywords:
            return False
        return _SINCE.get(keyword, 0) <= self.draft

    @property
    def ref_hides_siblings(self) -> bool:
        """Whether `$ref` makes the other keywords beside it void (drafts 4 to 7)."""
        return self.draft <= 7

    @property
    def id_keyword(self) -> str:
        """Keyword that names a schema."""
        return "id" if self.draft == 4 else "$id"


DRAFTS: dict[str, Dialect] = {
    "4": Dialect(4),
    "6": Dialect(6),
    "7": Dialect(7),
    "2019-09": Dialect(2019),
    "2020-12": Dialect(2020),
}

_URIS = {
    "http://json-schema.org/draft-04/schema": "4",
    "http://json-schema.org/draft-06/schema": "6",
    "http://json-schema.org/draft-07/schema": "7",
    "https://json-schema.org/draft/2019-09/schema": "2019-09",
    "https://json-schema.org/draft/2020-12/schema": "2020-12",
}


def find_dialect(name: str) -> Dialect:
    """The dialect of a draft's name.

    Args:
        name: "4", "6", "7", "2019-09" or "2020-12", with or without "draft" before it.

    Returns:
        The dialect.

    Raises:
        ConfigError: There is no such draft.
    """
    short = name.lower().removeprefix("draft").lstrip("-")
    if short not in DRAFTS:
        raise ConfigError(
            f"draft {name!r} is not known; use one of {', '.join(DRAFTS)}",
            field="draft",
            value=name,
        )
    return DRAFTS[short]


def dialect_of(schema: Any) -> Dialect | None:
    """The dialect that a schema's `$schema` names, or None when it names none that is built in."""
    uri = schema.get("$schema") if isinstance(schema, dict) else None
    if not isinstance(uri, str):
        return None
    uri = uri.removesuffix("#").removesuffix("/")
    uri = uri.replace("https://json-schema.org/draft-0", "http://json-schema.org/draft-0")
    uri = uri.replace("http://json-schema.org/draft/20", "https://json-schema.org/draft/20")
    name = _URIS.get(uri)
    return None if name is None else DRAFTS[name]


def with_vocabulary(base: Dialect, vocabulary: dict[str, Any]) -> Dialect:
    """A dialect whose keywords are those of the vocabularies that a meta-schema lists."""
    keywords: set[str] = set(_CORE)
    asserted: bool | None = None
    for uri in vocabulary:
        name = uri.rstrip("/").rsplit("/", 1)[-1]
        keywords.update(_VOCABULARIES.get(name, ()))
        if name == "format-assertion":
            asserted = True
    return Dialect(base.draft, frozenset(keywords), asserted)
