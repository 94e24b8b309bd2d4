"""Calls of tools as DeepSeek-V4.1 writes them, with every argument held to its schema.

```
<｜DSML｜ calls>
<｜DSML｜ invoke name="get_weather">
<｜DSML｜ parameter name="city" string="true">Oslo</｜DSML｜ parameter>
<｜DSML｜ parameter name="days" string="false">3</｜DSML｜ parameter>
</｜DSML｜ invoke>
</｜DSML｜ calls>
```

A text stands as it is (`string="true"`), everything else as JSON (DeepSeek-V4.1 chat format).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deepinfer.core.errors import EmptyLanguage, GrammarSyntaxError, UnsupportedKeyword
from deepinfer.grammar import ir
from deepinfer.grammar.combine import Assembly
from deepinfer.grammar.free_text import encoded, text_without
from deepinfer.grammar.grammar import Grammar
from deepinfer.grammar.regex import regex_to_expr
from deepinfer.grammar.report import Report, ReportEntry
from deepinfer.grammar.tags import triggered

__all__ = ["tool_calls"]

_MARK = "｜DSML｜"
_OPEN = f"<{_MARK} calls>"
_CLOSE = f"</{_MARK} calls>"
_MAX_DEPTH = 8
_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_ANNOTATIONS = {
    "$comment",
    "default",
    "deprecated",
    "description",
    "examples",
    "readOnly",
    "title",
    "type",
    "writeOnly",
}


def tool_calls(
    tools: Sequence[Mapping[str, Any]], *, required: bool = False, parallel: bool = True
) -> Grammar:
    """A grammar of an answer that may call tools, in the format of DeepSeek-V4.1.

    The answer is text, and once it opens a block of calls, that block is complete, names tools that exist, and passes
    each argument that is required, in any order, with a value of its schema. Nothing follows the block. The mark
    `｜DSML｜` is a control token of the published vocabulary: name its id in `text_ids` of `Grammar.bind`.

    Args:
        tools: The tools, in the OpenAI form (`{"type": "function", "function": {...}}`) or the function alone:
            `name`, and `parameters`, a JSON Schema of an object whose properties are listed.
        required: Whether the answer is a block of calls, without text before it.
        parallel: Whether a block may hold several calls.

    Returns:
        The grammar. Its report names each property whose text is held to less than its schema says.

    Raises:
        EmptyLanguage: There are no tools.
        GrammarSyntaxError: A tool is malformed.
        UnsupportedKeyword: A schema cannot be enforced; `path` points to the keyword, from the list of tools.
    """
    if not tools:
        raise EmptyLanguage("there are no tools; give one, or use any_text")
    builder = _Builder()
    invoke = ir.alt(*(builder.invoke(tool, f"/{at}") for at, tool in enumerate(tools)))
    calls = ir.repeat(invoke, 1, None if parallel else 1)
    body = ir.seq(ir.literal(b"\n"), calls, ir.literal(_CLOSE.encode()))
    if required:
        expr = ir.seq(ir.literal(f"\n\n{_OPEN}".encode()), body)
    else:
        expr = triggered(
            [(_OPEN.encode(), body)],
            [_OPEN.encode()],
            at_least_one=False,
            stop_after_first=True,
        )
    builder.assembly.report += Report(tuple(builder.entries))
    return builder.assembly.grammar(expr, "tool_calls")


class _Builder:
    def __init__(self) -> None:
        self.assembly = Assembly()
        self.entries: list[ReportEntry] = []

    def invoke(self, tool: Mapping[str, Any], path: str) -> ir.Expr:
        """One call of a tool."""
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str):
            raise GrammarSyntaxError(
                f"at {path}: a tool is an object with a name; found {tool!r:.80}"
            )
        schema = function.get("parameters") or {}
        properties = schema.get("properties", {}) if isinstance(schema, Mapping) else None
        if not isinstance(properties, Mapping):
            raise GrammarSyntaxError(
                f"at {path}: the parameters of {name!r} are no schema of an object with properties"
            )
        needed = schema.get("required", ())
        for key in needed:
            if key not in properties:
                raise GrammarSyntaxError(
                    f"at {path}: {name!r} requires {key!r}, which is not among its properties; add it"
                )
        members = [
            ir.Member(
                self.parameter(schema, key, value, f"{path}/parameters/properties/{key}"),
                int(key in needed),
                1,
            )
            for key, value in properties.items()
        ]
        (head,) = encoded([f'<{_MARK} invoke name="{name}">\n'], "the name of a tool")
        arguments = ir.bag(members, ir.literal(b"\n")) if members else ir.EPS
        return ir.seq(ir.literal(head), arguments, ir.literal(f"\n</{_MARK} invoke>\n".encode()))

    def parameter(self, root: Mapping[str, Any], key: str, schema: Any, path: str) -> ir.Expr:
        """One argument: a text as it is, or anything else as JSON."""
        forms = []
        text = self.text(root, schema, path)
        if text is not None:
            forms.append(ir.seq(ir.literal(b'true">'), text))
        other = self.other(root, schema, path)
        if other is not None:
            forms.append(ir.seq(ir.literal(b'false">'), other))
        (head,) = encoded([f'<{_MARK} parameter name="{key}" string="'], "the name of a parameter")
        return ir.seq(
            ir.literal(head), ir.alt(*forms), ir.literal(f"</{_MARK} parameter>".encode())
        )

    def text(
        self, root: Mapping[str, Any], schema: Any, path: str, depth: int = 0
    ) -> ir.Expr | None:
        """What a text argument may be, or None when no text fits."""
        schema = _resolved(root, schema)
        if "string" not in _kinds(root, schema):
            return None
        parts = [text_without([_MARK.encode()])]
        for keyword, value in schema.items() if isinstance(schema, Mapping) else ():
            if keyword in ("enum", "const"):
                listed = value if keyword == "enum" else [value]
                texts = [text.encode() for text in listed if isinstance(text, str)]
                parts.append(ir.alt(*map(ir.literal, texts)))
            elif keyword == "pattern":
                parts.append(regex_to_expr(value, search=True))
            elif keyword in ("minLength", "maxLength"):
                bounds = (int(value), None) if keyword == "minLength" else (0, int(value))
                parts.append(ir.repeat(regex_to_expr(r"[\s\S]"), *bounds))
            elif keyword in ("anyOf", "oneOf") and depth < _MAX_DEPTH:
                ways = [self.text(root, way, f"{path}/{keyword}", depth + 1) for way in value]
                parts.append(ir.alt(*(way for way in ways if way is not None)))
            elif keyword == "allOf" and depth < _MAX_DEPTH:
                every = [self.text(root, way, f"{path}/{keyword}", depth + 1) for way in value]
                parts += [ir.EMPTY if way is None else way for way in every]
            elif keyword not in _ANNOTATIONS:
                note = "a text argument is held to pattern, length, enum, const and combinations of these"
                self.entries.append(ReportEntry(f"{path}/{keyword}", keyword, "approximated", note))
        text = ir.intersect(*parts)
        return None if isinstance(text, ir.Empty) else text

    def other(self, root: Mapping[str, Any], schema: Any, path: str) -> ir.Expr | None:
        """What an argument that is no text may be, or None when nothing fits."""
        from deepinfer.grammar.json_schema import compile_json_schema

        others = sorted(_kinds(root, _resolved(root, schema)) - {"string"})
        if not others:
            return None
        whole: dict[str, Any] = {"allOf": [schema, {"type": others}]}
        whole |= {key: root[key] for key in ("$defs", "definitions", "$schema") if key in root}
        try:
            return self.assembly.add(compile_json_schema(whole))
        except EmptyLanguage:
            return None
        except UnsupportedKeyword as error:
            raise UnsupportedKeyword(
                f"at {path}: {error}", path=f"{path}{error.path or ''}", keyword=error.keyword
            ) from error


def _resolved(root: Mapping[str, Any], schema: Any) -> Any:
    """What a schema of nothing but a local reference refers to."""
    for _ in range(32):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            break
        pointer = schema["$ref"]
        if not pointer.startswith("#/"):
            break
        target: Any = root
        for step in pointer[2:].split("/"):
            step = step.replace("~1", "/").replace("~0", "~")
            target = target.get(step) if isinstance(target, Mapping) else None
        if target is None:
            break
        schema = target
    return schema


def _kinds(root: Mapping[str, Any], schema: Any, depth: int = 0) -> set[str]:
    """Types that values of a schema may have, as far as its top says."""
    if not isinstance(schema, Mapping):
        return set() if schema is False else set(_TYPES)
    named = schema.get("type", list(_TYPES))
    kinds = {named} if isinstance(named, str) else set(named)
    if "number" in kinds:
        kinds.add("integer")
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        texts = {isinstance(value, str) for value in values}
        kinds &= (
            {"string"} if texts == {True} else _TYPES - {"string"} if texts == {False} else _TYPES
        )
    if depth < _MAX_DEPTH:
        for keyword in ("anyOf", "oneOf"):
            ways = [
                _kinds(root, _resolved(root, way), depth + 1) for way in schema.get(keyword, ())
            ]
            kinds &= set().union(*ways) if ways else kinds
        for way in schema.get("allOf", ()):
            kinds &= _kinds(root, _resolved(root, way), depth + 1)
    return kinds
