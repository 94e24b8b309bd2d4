"""`compile_json_schema`: from the text of a schema to a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Literal, NamedTuple

from deepinfer.core._checks import check_int
from deepinfer.core.errors import ConfigError, GrammarSyntaxError, GrammarTooLarge
from deepinfer.grammar.argument_checks import check_part
from deepinfer.grammar.grammar import Grammar
from deepinfer.grammar.json_schema.algebra import Algebra
from deepinfer.grammar.json_schema.budget import Budget
from deepinfer.grammar.json_schema.dialect import DRAFTS, find_dialect
from deepinfer.grammar.json_schema.emit import Emitter
from deepinfer.grammar.json_schema.forms import Forms
from deepinfer.grammar.json_schema.nodes import Nodes
from deepinfer.grammar.json_schema.objects import OBJECT_RESOURCES, normal
from deepinfer.grammar.json_schema.references import Registry
from deepinfer.grammar.json_schema.strings import Strings
from deepinfer.grammar.json_schema.uses import Uses
from deepinfer.grammar.json_schema.whitespace import Whitespace

__all__ = ["compile_json_schema"]

_MAX_TEXT = 64 << 20
_DEFAULT_WHITESPACE = Whitespace()


def compile_json_schema(
    schema: str | Mapping[str, Any] | bool,
    *,
    whitespace: Whitespace = _DEFAULT_WHITESPACE,
    additional: Literal["schema", "closed"] = "schema",
    order: Literal["any", "declared"] = "any",
    on_unsupported: Literal["error", "warn"] = "error",
    formats: Literal["assert", "annotate"] = "assert",
    escapes: Literal["canonical", "any"] = "canonical",
    max_digits: int | None = 64,
    draft: str | None = None,
    resources: Mapping[str, Any] | None = None,
    budget_ms: float | None = 1500.0,
) -> Grammar:
    r"""A grammar of the JSON texts whose value a schema accepts.

    Schemas are predicates, so keywords are compiled as such: `allOf`, siblings of `$ref`, `not`, `oneOf`,
    `if`/`then`/`else` and the `dependent*` keywords are worked out by boolean algebra on schemas, and the grammar
    accepts a text exactly when its value is valid, within the spellings below. A keyword that cannot be enforced
    is refused by name, never ignored in silence.

    Spellings. Numbers under constraints are plain decimals, or have one digit before the point and an exponent of
    up to three digits; other numbers have every spelling. Strings without a constraint, or with lengths only, have
    every spelling; keys by name and strings under patterns, formats or finite sets are spelled as JSON writers do
    (`escapes="any"` adds the rest, such as `\u0061` for `a`). A declared key occurs once at most; keys that no
    part of the schema names one by one are not remembered, so an output may repeat one of those. Lone surrogates are
    no text and never generated.

    Args:
        schema: The schema, as JSON text or parsed. Text keeps decimal numbers exact.
        whitespace: Where white space may stand.
        additional: "schema": undeclared keys as the schema says. "closed": an object that declares keys or key
            patterns has no others.
        order: "any": members of objects in any order, as JSON has it; the grammar then accepts every valid text, and
            a model remains free to follow the declared order. "declared": only in the order in which the schema
            declares them, undeclared ones last; fewer choices for the model, but texts in other orders are refused.
        on_unsupported: "error": refuse a schema with keywords that cannot be enforced. "warn": leave those keywords
            aside and list them in the report.
        formats: Whether `format` restricts strings ("assert") or not. Unknown formats never do.
        escapes: Spellings of characters in constrained strings: "canonical" or "any".
        max_digits: Most digits that a number repeats without need in one place, such as the zeros of `1.000`, >= 1: a loop
            that some models never leave. What a bound or a constant needs is never cut, and a complement excludes no less.
            Digits under a `multipleOf` that is no product of 2 and 5 have no bound. None for no bound anywhere.
        draft: The draft where `$schema` names none: "4", "6", "7", "2019-09" or "2020-12" (None: that one).
        resources: Other schemas that references may lead to, by absolute URI. Nothing is ever fetched.
        budget_ms: CPU time that the compilation may take, in milliseconds, > 0; None for no bound.

    Returns:
        The grammar. Its report has one entry for each keyword that was reached.

    Raises:
        GrammarSyntaxError: The schema is malformed.
        UnsupportedKeyword: A keyword cannot be enforced; `path` is its JSON pointer.
        EmptyLanguage: No value satisfies the schema.
        GrammarTooLarge: The schema needs more than the limits on its size.
        ConfigError: An option is out of range.
    """
    for name, value, allowed in (
        ("additional", additional, ("schema", "closed")),
        ("order", order, ("any", "declared")),
        ("on_unsupported", on_unsupported, ("error", "warn")),
        ("formats", formats, ("assert", "annotate")),
        ("escapes", escapes, ("canonical", "any")),
    ):
        if value not in allowed:
            raise ConfigError(
                f"{name} is {value!r}; use {' or '.join(map(repr, allowed))}",
                field=name,
                value=value,
            )
    check_part("whitespace", whitespace, Whitespace, "make one with Whitespace(...)")
    if max_digits is not None:
        check_int("max_digits", max_digits, 1, 1 << 20, ConfigError, "None is no bound.")
    if budget_ms is not None and not budget_ms > 0:
        raise ConfigError(
            f"budget_ms is {budget_ms!r}; use a number > 0 or None",
            field="budget_ms",
            value=budget_ms,
        )
    budget = Budget(budget_ms)
    parsed = _parse(schema) if isinstance(schema, str) else schema
    dialect = DRAFTS["2020-12"] if draft is None else find_dialect(draft)
    registry = Registry(parsed, dialect, resources or {})
    dynamic = _is_dynamic(schema, parsed, resources)
    options = _Options(
        whitespace,
        additional == "closed",
        order == "declared",
        formats == "assert",
        escapes == "any",
        max_digits,
    )
    try:
        try:
            return _compile(registry, dynamic, on_unsupported == "warn", options, budget, True)
        except GrammarTooLarge as error:
            if error.resource not in OBJECT_RESOURCES:
                raise
            # Many conditions on one member: telling the cases apart is cheaper.
            return _compile(registry, dynamic, on_unsupported == "warn", options, budget, False)
    except RecursionError as error:
        raise GrammarTooLarge(
            "the schema's expressions are nested too deeply; flatten its values and patterns",
            resource="nesting",
        ) from error


class _Options(NamedTuple):
    whitespace: Whitespace
    closed: bool
    ordered: bool
    assert_formats: bool
    every_spelling: bool
    max_digits: int | None


def _compile(
    registry: Registry,
    dynamic: bool,
    warn: bool,
    options: _Options,
    budget: Budget,
    by_clauses: bool,
) -> Grammar:
    nodes = Nodes(registry, dynamic)
    uses = Uses(warn)
    strings = Strings(every_spelling=options.every_spelling, budget=budget)
    algebra = Algebra(nodes, strings, uses, options.assert_formats, budget)
    algebra.by_clauses = by_clauses
    forms = Forms(algebra, options.closed)
    root = registry.root
    scope = nodes.extend((), root) if dynamic else ()
    start = normal(nodes.of(root.schema, root, root.pointer, scope))
    forms.build(start)
    emitter = Emitter(algebra, forms, options.whitespace, options.ordered, options.max_digits)
    rules = emitter.rules(start)
    return Grammar(rules, report=uses.report(), source="json_schema")


def _parse(text: str) -> Any:
    """JSON text with exact decimals."""
    if len(text) > _MAX_TEXT:
        raise GrammarTooLarge(
            f"the schema has {len(text)} characters, more than {_MAX_TEXT}; use a smaller one",
            resource="characters",
            limit=_MAX_TEXT,
            found=len(text),
        )
    try:
        return json.loads(text, parse_float=Decimal, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise GrammarSyntaxError(
            f"the schema is not JSON: {error.msg} at line {error.lineno}, column {error.colno}; correct it",
            line=error.lineno,
            column=error.colno,
            position=error.pos,
        ) from error
    except ValueError as error:
        raise GrammarSyntaxError(f"the schema is not JSON: {error}; correct it") from error
    except RecursionError as error:
        raise GrammarTooLarge(
            "the schema is nested too deeply to be parsed; flatten it", resource="nesting"
        ) from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _is_dynamic(schema: object, parsed: Any, resources: Mapping[str, Any] | None) -> bool:
    """Whether any document has references that depend on the way to them."""
    marks = ("$dynamicRef", "$recursiveRef")
    if isinstance(schema, str) and not resources:
        return any(mark in schema for mark in marks) or "json-schema.org/draft/20" in schema
    stack: list[Any] = [parsed, *(resources or {}).values()]
    while stack:
        node = stack.pop()
        if isinstance(node, Mapping):
            if any(mark in node for mark in marks):
                return True
            reference = node.get("$ref")
            if isinstance(reference, str) and "json-schema.org/draft/20" in reference:
                return True
            stack.extend(v for v in node.values() if isinstance(v, Mapping | list))
        elif isinstance(node, list):
            stack.extend(v for v in node if isinstance(v, Mapping | list))
    return False
