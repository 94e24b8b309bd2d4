"""Rules made fit for the automaton: checked, without left recursion, with the facts that the lowering needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deepinfer.core.errors import GrammarSyntaxError
from deepinfer.grammar._ir_nodes import Empty, Expr
from deepinfer.grammar._ir_rules import Rules
from deepinfer.grammar.budget import Budget
from deepinfer.grammar.left_recursion import LeftRecursion
from deepinfer.grammar.rule_graph import (
    components,
    is_cyclic,
    nullable_node,
    productive_node,
    quick_nullable,
    quick_productive,
    references,
    solve,
)

__all__ = ["Plan", "normalise"]


@dataclass(frozen=True)
class Plan:
    """Rules without left recursion.

    Attributes:
        start: Name of the start rule.
        rules: The rules that the start reaches. Rules that match nothing are `Empty`.
        recursive: Rules that reach themselves.
        nullable: Recursive rules that match the empty string.
    """

    start: str
    rules: Mapping[str, Expr]
    recursive: frozenset[str]
    nullable: frozenset[str]


def normalise(rules: Rules, budget: Budget, dead: frozenset[Expr] = frozenset()) -> Plan:
    """Check rules and remove left recursion.

    Args:
        rules: The grammar.
        budget: Bounds; its time is checked.
        dead: Expressions that are known to match nothing.

    Raises:
        GrammarSyntaxError: A rule is not defined.
        GrammarTooLarge: A bound is passed.
    """
    graph = _reachable(rules)
    used: dict[str, Expr] = {name: rules.rules[name] for name in graph}
    order = components(graph)
    if not dead and not any(is_cyclic(component, graph) for component in order):
        return Plan(rules.start, used, frozenset(), frozenset())
    productive = solve(order, graph, used, productive_node, quick_productive, dead)
    if not all(productive.values()):
        used = {name: expr if productive[name] else Empty() for name, expr in used.items()}
        graph = {name: references(expr) for name, expr in used.items()}
        order = components(graph)
    nullable = solve(order, graph, used, nullable_node, quick_nullable)
    work = LeftRecursion(used, nullable)
    left = {name: sorted(work.first_rules(expr)) for name, expr in used.items()}
    for component in components(left):
        budget.check(0)
        if is_cyclic(component, left):
            work.remove(component)
    if len(work.rules) > len(used) or any(work.rules[n] is not used[n] for n in used):
        changed = Rules(rules.start, work.rules)
        graph = _reachable(changed)
        used = {name: work.rules[name] for name in graph}
        order = components(graph)
        nullable = solve(order, graph, used, nullable_node, quick_nullable)
    recursive = frozenset(
        name for component in order if is_cyclic(component, graph) for name in component
    )
    return Plan(rules.start, used, recursive, frozenset(n for n in recursive if nullable[n]))


def _reachable(rules: Rules) -> dict[str, list[str]]:
    """References of every rule that the start reaches."""
    graph: dict[str, list[str]] = {}
    stack = [rules.start]
    while stack:
        name = stack.pop()
        if name in graph:
            continue
        body = rules.rules.get(name)
        if body is None:
            known = ", ".join(sorted(rules.rules)[:10]) or "none"
            raise GrammarSyntaxError(
                f"rule {name!r} is not defined; define it, or use one of: {known}"
            )
        graph[name] = references(body)
        stack.extend(graph[name])
    return graph
