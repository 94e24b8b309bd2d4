"""One of a list of texts, and any JSON value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from deepinfer.core._checks import show
from deepinfer.core.errors import ConfigError, EmptyLanguage, GrammarSyntaxError
from deepinfer.grammar import ir
from deepinfer.grammar.grammar import Grammar

if TYPE_CHECKING:
    from deepinfer.grammar.json_schema import Whitespace

__all__ = ["any_json", "choices"]


def choices(options: Iterable[str | bytes]) -> Grammar:
    """A grammar of a list of outputs.

    Args:
        options: The outputs, each a text (encoded as UTF-8) or raw bytes; doubles count once. There may be many
            thousands of them: common beginnings are shared.

    Returns:
        The grammar.

    Raises:
        ConfigError: One is neither text nor bytes.
        EmptyLanguage: There are none.
        GrammarSyntaxError: A text holds a lone surrogate, which UTF-8 cannot hold.

    Examples:
        >>> answer = choices(["yes", "no"])
        >>> answer.matches("yes"), answer.matches("ye")
        (True, False)
    """
    if isinstance(options, str | bytes):
        options = [options]  # one output, never its characters
    if not hasattr(options, "__iter__"):
        raise ConfigError(
            f"the choices are {show(options)}; give a list of texts", field="options", value=options
        )
    texts = set()
    for index, option in enumerate(options):
        if not isinstance(option, str | bytes):
            raise ConfigError(
                f"choice {index} is {show(option)} ({type(option).__name__}); give a text or bytes",
                field="options",
                value=option,
                limit="str or bytes",
            )
        try:
            texts.add(option if isinstance(option, bytes) else option.encode())
        except UnicodeEncodeError:
            raise GrammarSyntaxError(
                f"choice {index} holds a lone surrogate, which no UTF-8 output can hold; remove it",
                position=index,
            ) from None
    if not texts:
        raise EmptyLanguage("there are no choices; give one text at least")
    return Grammar(ir.Rules.of(_prefix_tree(sorted(texts))), source="choices")


def _prefix_tree(texts: list[bytes]) -> ir.Expr:
    """An expression of sorted, different strings that shares their beginnings; built on a stack."""
    # A frame: strings [low, high) share their first `depth` bytes, and `shared` more from there.
    done: list[ir.Expr] = []
    stack: list[tuple[int, int, int, int]] = [(0, len(texts), 0, -1)]
    while stack:
        low, high, depth, count = stack.pop()
        first, last = texts[low], texts[high - 1]
        if high - low == 1:
            done.append(ir.literal(first[depth:]))
            continue
        shared = depth
        while shared < len(first) and first[shared] == last[shared]:
            shared += 1
        prefix = ir.literal(first[depth:shared])
        if count >= 0:  # the branches are done
            branches = done[len(done) - count :]
            del done[len(done) - count :]
            ends_here = ir.EPS if len(first) == shared else ir.EMPTY
            done.append(ir.seq(prefix, ir.alt(ends_here, *branches)))
            continue
        groups: list[tuple[int, int]] = []
        at = low + (len(first) == shared)
        while at < high:
            end = at + 1
            while end < high and texts[end][shared] == texts[at][shared]:
                end += 1
            groups.append((at, end))
            at = end
        stack.append((low, high, depth, len(groups)))
        stack += [(begin, end, shared, -1) for begin, end in reversed(groups)]
    return done[0]


def any_json(*, whitespace: Whitespace | None = None) -> Grammar:
    """A grammar of every JSON value, nested as deep as one likes.

    Args:
        whitespace: Where white space may stand and how much of it; None is the default of `compile_json_schema`.

    Returns:
        The grammar.

    Examples:
        >>> any_json().matches('{"a": [1, null]}')
        True
    """
    from deepinfer.grammar.json_schema import compile_json_schema

    grammar = (
        compile_json_schema({})
        if whitespace is None
        else compile_json_schema({}, whitespace=whitespace)
    )
    return Grammar(grammar.rules, source="any_json")
