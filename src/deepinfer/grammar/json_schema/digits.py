"""A bound on the digits of numbers, which some models never stop to write."""

from __future__ import annotations

import functools

from deepinfer.grammar._ir_nodes import Alt, And, Expr, Repeat, Seq
from deepinfer.grammar._ir_walk import walk
from deepinfer.grammar.ir import alt, intersect, repeat, seq

__all__ = ["capped"]


@functools.lru_cache(maxsize=1024)
def capped(expr: Expr, most: int | None) -> Expr:
    """Spellings of numbers whose digits repeat a bounded number of times.

    Every repeat without a bound gets one. What is under a complement stays as it is, so that the result never holds a
    spelling that `expr` does not hold.

    Args:
        expr: The spellings; its repeats are of single digits.
        most: The bound of each repeat; None for none.

    Returns:
        Fewer spellings of the same kind.
    """
    if most is None:
        return expr
    done: dict[int, Expr] = {}
    for node in walk(expr):
        new = node
        if isinstance(node, Seq):
            new = seq(*(done[id(part)] for part in node.parts))
        elif isinstance(node, Alt):
            new = alt(*(done[id(part)] for part in node.parts))
        elif isinstance(node, And):
            new = intersect(*(done[id(part)] for part in node.parts))
        elif isinstance(node, Repeat):
            high = max(node.low, most) if node.high is None else node.high
            new = repeat(done[id(node.expr)], node.low, high)
        done[id(node)] = new
    return done[id(expr)]
