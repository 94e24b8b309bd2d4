"""Structural tags: a JSON form of free text, constants, schemas and tags, as several serving engines take it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from deepinfer.core.errors import GrammarSyntaxError, GrammarTooLarge, UnsupportedKeyword
from deepinfer.grammar import ir
from deepinfer.grammar.combine import Assembly
from deepinfer.grammar.free_text import encoded, text_before, text_without
from deepinfer.grammar.grammar import Grammar
from deepinfer.grammar.tags import triggered

__all__ = ["compile_structural_tag"]

MAX_NESTING = 64
"""Formats in one another that are read."""

Ends = tuple[bytes, ...]
"""Strings of which one must follow, or none when nothing has to."""


def compile_structural_tag(spec: Mapping[str, Any] | str) -> Grammar:
    """A grammar from the JSON form of structural tags.

    Two forms are read. `{"type": "structural_tag", "format": ...}`, where a format is one of

    | `type` | fields | matches |
    |---|---|---|
    | `const_string` | `value` | that text |
    | `json_schema` | `json_schema` | what `compile_json_schema` takes |
    | `regex` | `pattern` | what `compile_regex` takes |
    | `grammar` | `grammar` | what `compile_ebnf` takes |
    | `any_text` | `excludes` | text without those strings, and without the end of the tag around it |
    | `sequence`, `or` | `elements` | formats one after the other, or any one of them |
    | `optional`, `star`, `plus` | `content` | a format at most once, any number of times, at least once |
    | `repeat` | `content`, `min`, `max` | a format several times; a negative `max` is no bound |
    | `tag` | `begin`, `content`, `end` | the two texts with a format between; `end` may be a list |
    | `triggered_tags` | `triggers`, `tags`, `at_least_one`, `stop_after_first`, `excludes` | see `tagged_text` |
    | `tags_with_separator` | `tags`, `separator`, `at_least_one`, `stop_after_first` | tags, separated |

    and the older `{"structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}`.

    Args:
        spec: The form, as a mapping or as JSON text.

    Returns:
        The grammar.

    Raises:
        GrammarSyntaxError: The form is malformed; the message holds a JSON pointer to the fault.
        UnsupportedKeyword: A format type is not known; `path` points to it.
        GrammarTooLarge: Formats are nested too deeply.

    Examples:
        >>> grammar = compile_structural_tag(
        ...     {"format": {"type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]"}, "end": "</n>"}}
        ... )
        >>> grammar.matches("<n>7</n>")
        True
    """
    if isinstance(spec, str):
        try:
            spec = json.loads(spec)
        except (json.JSONDecodeError, RecursionError) as error:
            raise GrammarSyntaxError(f"the structural tag is no JSON: {error}") from error
    if not isinstance(spec, Mapping):
        raise GrammarSyntaxError(
            f"a structural tag is a JSON object, and this one is a {type(spec).__name__}"
        )
    builder = _Builder()
    if "structures" in spec:
        expr = builder.legacy(spec)
    elif "format" in spec:
        expr = builder.build(spec["format"], "/format", (), 0)
    else:
        raise GrammarSyntaxError("a structural tag needs a format, or structures and triggers")
    return builder.assembly.grammar(expr, "structural_tag")


def _fail(message: str, path: str) -> NoReturn:
    raise GrammarSyntaxError(f"at {path or '/'}: {message}")


def _field(value: Mapping[str, Any], name: str, kind: type, path: str, default: Any = None) -> Any:
    found = value.get(name, default)
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        _fail(f"{name} is {found!r}; it must be a {kind.__name__}", path)
    return found


class _Builder:
    def __init__(self) -> None:
        self.assembly = Assembly()
        self.kinds: dict[str, Callable[[Mapping[str, Any], str, Ends, int], ir.Expr]] = {
            "const_string": self._constant,
            "json_schema": self._schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._either,
            "optional": self._repeated,
            "star": self._repeated,
            "plus": self._repeated,
            "repeat": self._repeated,
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    def legacy(self, spec: Mapping[str, Any]) -> ir.Expr:
        tags = [
            {
                "begin": structure.get("begin"),
                "end": structure.get("end"),
                "content": {"type": "json_schema", "json_schema": structure.get("schema") or {}},
            }
            for structure in _field(spec, "structures", Sequence, "")
        ]
        options = {"tags": tags, "triggers": spec.get("triggers")}
        return self._triggered({**spec, **options}, "", (), 0)

    def build(self, value: Any, path: str, ends: Ends, depth: int) -> ir.Expr:
        """The expression of a format together with the string that ends it."""
        if depth > MAX_NESTING:
            raise GrammarTooLarge(
                f"the structural tag nests more than {MAX_NESTING} formats; flatten it",
                resource="nesting",
                limit=MAX_NESTING,
                found=depth,
            )
        if not isinstance(value, Mapping):
            _fail(f"a format is a JSON object, and this one is a {type(value).__name__}", path)
        kind = value.get("type")
        if kind not in self.kinds:
            raise UnsupportedKeyword(
                f"at {path}: format type {kind!r} is not known; known are {', '.join(self.kinds)}",
                path=f"{path}/type",
                keyword=str(kind),
            )
        return self.kinds[kind](value, path, ends, depth)

    def _ended(self, expr: ir.Expr, ends: Ends) -> ir.Expr:
        return ir.seq(expr, ir.alt(*map(ir.literal, ends))) if ends else expr

    def _embedded(self, compile_: Callable[[], Grammar], path: str, ends: Ends) -> ir.Expr:
        try:
            return self._ended(self.assembly.add(compile_()), ends)
        except GrammarSyntaxError as error:
            raise GrammarSyntaxError(
                f"at {path}: {error}",
                line=error.line,
                column=error.column,
                position=error.position,
            ) from error
        except UnsupportedKeyword as error:
            inner = f"{path}{error.path or ''}"
            raise UnsupportedKeyword(
                f"at {path}: {error}", path=inner, keyword=error.keyword
            ) from error

    def _constant(self, value: Mapping[str, Any], path: str, ends: Ends, depth: int) -> ir.Expr:
        text = _field(value, "value", str, path)
        return self._ended(ir.literal(encoded([text], "value")[0]) if text else ir.EPS, ends)

    def _schema(self, value: Mapping[str, Any], path: str, ends: Ends, depth: int) -> ir.Expr:
        from deepinfer.grammar.json_schema import compile_json_schema

        schema = value.get("json_schema")
        return self._embedded(
            lambda: compile_json_schema({} if schema is None else schema),
            f"{path}/json_schema",
            ends,
        )

    def _regex(self, value: Mapping[str, Any], path: str, ends: Ends, depth: int) -> ir.Expr:
        from deepinfer.grammar.regex import compile_regex

        pattern = _field(value, "pattern", str, path)
        return self._embedded(lambda: compile_regex(pattern), f"{path}/pattern", ends)

    def _grammar(self, value: Mapping[str, Any], path: str, ends: Ends, depth: int) -> ir.Expr:
        from deepinfer.grammar.ebnf import compile_ebnf

        text = _field(value, "grammar", str, path)
        return self._embedded(lambda: compile_ebnf(text), f"{path}/grammar", ends)

    def _any_text(self, value: Mapping[str, Any], path: str, ends: Ends, depth: int) -> ir.Expr:
        excludes = encoded(_field(value, "excludes", list, path, []), "an excluded string")
        if not ends:
            return text_without(excludes)
        return ir.alt(*(text_before(end, ends, excludes) for end in ends))

    def _sequence(self, value: Mapping[str, Any], path: str, ends: Ends, depth: int) -> ir.Expr:
        elements = _field(value, "elements", list, path)
        if not elements:
            return self._ended(ir.EPS, ends)
        last = len(elements) - 1
        return ir.seq(
            *(
                self.build(element, f"{path}/elements/{at}", ends if at == last else (), depth + 1)
                for at, element in enumerate(elements)
            )
        )

    def _either(self, value: Mapping[str, Any], path: str, ends: Ends, depth: int) -> ir.Expr:
        elements = _field(value, "elements", list, path)
        return ir.alt(
            *(
                self.build(element, f"{path}/elements/{at}", ends, depth + 1)
                for at, element in enumerate(elements)
            )
        )

    def _repeated(self, value: Mapping[str, Any], path: str, ends: Ends, depth: int) -> ir.Expr:
        bounds: dict[str, tuple[int, int | None]] = {
            "optional": (0, 1),
            "star": (0, None),
            "plus": (1, None),
        }
        if value["type"] == "repeat":
            low = _field(value, "min", int, path, 0)
            most = _field(value, "max", int, path, -1)
            high = None if most < 0 else most
            if low < 0 or (high is not None and high < low):
                _fail(f"min {low} and max {most} are in the wrong order", path)
        else:
            low, high = bounds[value["type"]]
        content = self.build(value.get("content"), f"{path}/content", (), depth + 1)
        return self._ended(ir.repeat(content, low, high), ends)

    def _tag_parts(self, value: Any, path: str, depth: int) -> tuple[bytes, ir.Expr]:
        if not isinstance(value, Mapping):
            _fail(f"a tag is a JSON object, and this one is a {type(value).__name__}", path)
        begin = _field(value, "begin", str, path)
        found = value.get("end", "")
        given = found if isinstance(found, list) else [found]
        if "" in given or not given:
            closing: Ends = ()  # the tag ends with its content
        else:
            closing = encoded(given, f"at {path}: end")
        content = self.build(value.get("content"), f"{path}/content", closing, depth + 1)
        return encoded([begin], f"at {path}: begin")[0], content

    def _tag(self, value: Mapping[str, Any], path: str, ends: Ends, depth: int) -> ir.Expr:
        begin, body = self._tag_parts(value, path, depth)
        return self._ended(ir.seq(ir.literal(begin), body), ends)

    def _tags(self, value: Mapping[str, Any], path: str, depth: int) -> list[tuple[bytes, ir.Expr]]:
        return [
            self._tag_parts(tag, f"{path}/tags/{at}", depth)
            for at, tag in enumerate(_field(value, "tags", list, path))
        ]

    def _triggered(self, value: Mapping[str, Any], path: str, ends: Ends, depth: int) -> ir.Expr:
        return triggered(
            self._tags(value, path, depth),
            encoded(_field(value, "triggers", list, path), f"at {path}: a trigger"),
            at_least_one=_field(value, "at_least_one", bool, path, False),
            stop_after_first=_field(value, "stop_after_first", bool, path, False),
            excludes=encoded(_field(value, "excludes", list, path, []), "an excluded string"),
            ends=ends,
        )

    def _separated(self, value: Mapping[str, Any], path: str, ends: Ends, depth: int) -> ir.Expr:
        tags = ir.alt(
            *(ir.seq(ir.literal(begin), body) for begin, body in self._tags(value, path, depth))
        )
        separator = _field(value, "separator", str, path)
        between = ir.literal(encoded([separator], "separator")[0]) if separator else ir.EPS
        some = tags
        if not _field(value, "stop_after_first", bool, path, False):
            some = ir.seq(tags, ir.star(ir.seq(between, tags)))
        if not _field(value, "at_least_one", bool, path, False):
            some = ir.optional(some)
        return self._ended(some, ends)
