"""Expressions as readable text, for messages and debugging."""

from __future__ import annotations

from deepinfer.grammar._ir_nodes import (
    ALL_BYTES,
    Alt,
    And,
    Bag,
    Bytes,
    Empty,
    Eps,
    Expr,
    Literal,
    Not,
    Ref,
    Repeat,
    Seq,
)


def _byte(value: int) -> str:
    char = chr(value)
    if char in '\\]^-["':
        return "\\" + char
    return char if 0x20 < value < 0x7F else f"\\x{value:02X}"


def bytes_to_text(mask: int) -> str:
    """A byte set as a character class with ranges, `.` for all bytes."""
    if mask == ALL_BYTES:
        return "."
    inverted = mask.bit_count() > 128
    rest = ALL_BYTES & ~mask if inverted else mask
    pieces = []
    while rest:
        first = (rest & -rest).bit_length() - 1
        run = rest >> first
        length = (~run & (run + 1)).bit_length() - 1
        last = first + length - 1
        pieces.append(_byte(first) if length == 1 else f"{_byte(first)}-{_byte(last)}")
        rest &= ~(((1 << length) - 1) << first)
    return f"[{'^' if inverted else ''}{''.join(pieces)}]"


def _times(low: int, high: int | None) -> str:
    if (low, high) in {(0, None), (1, None), (0, 1)}:
        return {(0, None): "*", (1, None): "+", (0, 1): "?"}[(low, high)]
    if low == high:
        return f"{{{low}}}"
    return f"{{{low},{'' if high is None else high}}}"


def _pieces(node: Expr) -> list[str | Expr] | str:
    """Text of a leaf, or text and children of an inner node in the order of printing."""
    if isinstance(node, Empty):
        return "(nothing)"
    if isinstance(node, Eps):
        return '""'
    if isinstance(node, Bytes):
        return bytes_to_text(node.mask)
    if isinstance(node, Literal):
        return '"' + "".join(_byte(b) if b != 0x20 else " " for b in node.text) + '"'
    if isinstance(node, Ref):
        return node.name
    out: list[str | Expr] = []
    if isinstance(node, Seq | Alt | And):
        joint = {Seq: " ", Alt: " | ", And: " & "}[type(node)]
        for position, part in enumerate(node.parts):
            out += [joint, part] if position else [part]
        return ["(", *out, ")"]
    if isinstance(node, Not):
        return ["!", node.expr]
    if isinstance(node, Repeat):
        return [node.expr, _times(node.low, node.high)]
    if isinstance(node, Bag):
        out = ["<ordered " if node.ordered else "<any order "]
        for index, member in enumerate(node.members):
            out += [f"{index}:", member.expr, _times(member.low, member.high)]
            out.append(f"@{member.group} " if member.group is not None else " ")
        out += ["by ", node.separator, f" total {_times(node.low, node.high)}"]
        for clause in node.clauses:
            terms = [str(i) for i in sorted(clause.positive)]
            terms += [f"!{i}" for i in sorted(clause.negative)]
            out.append(f" needs {' or '.join(terms) or 'nothing possible'}")
        return [*out, ">"]
    return type(node).__name__


def to_text(expr: Expr, *, limit: int = 10_000) -> str:
    """The expression in a notation like that of regular expressions.

    Args:
        expr: The expression.
        limit: Most characters; longer text ends with "...".

    Returns:
        The text. Juxtaposition with a blank is concatenation, `|` union, `&` intersection, `!` complement.
    """
    out: list[str] = []
    size = 0
    stack: list[str | Expr] = [expr]
    while stack and size <= limit:
        item = stack.pop()
        if isinstance(item, Expr):
            pieces = _pieces(item)
            if isinstance(pieces, str):
                stack.append(pieces)
            else:
                stack.extend(reversed(pieces))
            continue
        out.append(item)
        size += len(item)
    text = "".join(out)
    return text if len(text) <= limit and not stack else text[:limit] + "..."
