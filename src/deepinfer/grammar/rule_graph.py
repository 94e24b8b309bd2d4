"""Which rules reach which, and what can be said of an expression once that is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from deepinfer.grammar._ir_nodes import (
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

__all__ = [
    "components",
    "fold",
    "is_cyclic",
    "left_references",
    "nullable_node",
    "productive_node",
    "quick_nullable",
    "quick_productive",
    "references",
    "solve",
]

_ONE = (Literal, Bytes)


def references(expr: Expr) -> list[str]:
    """Names of the rules that an expression mentions, each once, in the order of their first mention."""
    if not expr.has_ref:
        return []
    names: dict[str, None] = {}
    seen: set[int] = set()
    stack = [expr]
    while stack:
        node = stack.pop()
        if isinstance(node, Ref):
            names[node.name] = None
            continue
        if id(node) not in seen:
            seen.add(id(node))
            stack.extend([child for child in reversed(node.children()) if child.has_ref])
    return list(names)


def components(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Strongly connected components, each after the components that it reaches.

    Args:
        graph: Successors of each vertex; successors that are no vertices are left out.
    """
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    on_path: set[str] = set()
    path: list[str] = []
    out: list[list[str]] = []
    for root in graph:
        if root in order:
            continue
        work: list[tuple[str, list[str]]] = [(root, [n for n in graph[root] if n in graph])]
        order[root] = low[root] = len(order)
        path.append(root)
        on_path.add(root)
        while work:
            vertex, rest = work[-1]
            if rest:
                other = rest.pop()
                if other not in order:
                    order[other] = low[other] = len(order)
                    path.append(other)
                    on_path.add(other)
                    work.append((other, [n for n in graph[other] if n in graph]))
                elif other in on_path:
                    low[vertex] = min(low[vertex], order[other])
                continue
            work.pop()
            if work:
                above = work[-1][0]
                low[above] = min(low[above], low[vertex])
            if low[vertex] == order[vertex]:
                component = []
                while True:
                    member = path.pop()
                    on_path.discard(member)
                    component.append(member)
                    if member == vertex:
                        break
                out.append(component)
    return out


def is_cyclic(component: list[str], graph: Mapping[str, Iterable[str]]) -> bool:
    """Whether a component of `components` holds a cycle."""
    return len(component) > 1 or component[0] in graph[component[0]]


def fold(
    root: Expr,
    value: Callable[[Expr, list[bool]], bool],
    known: dict[int, bool],
    quick: Callable[[Expr], bool | None] = lambda _: None,
) -> bool:
    """Evaluate a property bottom up without recursion.

    Args:
        root: The expression.
        value: The property of a node from those of its children, in order.
        known: Results by `id` of node; read and filled.
        quick: The property of a node where it can be told at once, else None.
    """
    stack = [root]
    while stack:
        node = stack[-1]
        if id(node) in known:
            stack.pop()
            continue
        at_once = quick(node)
        if at_once is not None:
            known[id(node)] = at_once
            stack.pop()
            continue
        children = node.children()
        missing = [child for child in children if id(child) not in known]
        if missing:
            stack.extend(missing)
            continue
        known[id(node)] = value(node, [known[id(child)] for child in children])
        stack.pop()
    return known[id(root)]


def _bag_nullable(bag: Bag) -> bool:
    if bag.low or any(member.low for member in bag.members):
        return False
    return all(clause.negative for clause in bag.clauses)


def nullable_node(node: Expr, children: list[bool], rules: Mapping[str, bool]) -> bool:
    """Whether a node matches the empty string, from its children and the rules that do."""
    if isinstance(node, Ref):
        return rules.get(node.name, False)
    if isinstance(node, Eps):
        return True
    if isinstance(node, Bytes | Literal | Empty):
        return False
    if isinstance(node, Seq | And):
        return all(children)
    if isinstance(node, Alt):
        return any(children)
    if isinstance(node, Not):
        return not children[0]
    if isinstance(node, Repeat):
        return node.low == 0 or children[0]
    return isinstance(node, Bag) and _bag_nullable(node)


def quick_nullable(node: Expr) -> bool | None:
    """Whether a node matches the empty string, where its own fields tell."""
    if isinstance(node, Bytes | Literal):
        return False
    if isinstance(node, Seq):
        for part in node.parts:
            if isinstance(part, Bytes | Literal):
                return False
    elif isinstance(node, Repeat):
        return True if node.low == 0 else None
    elif isinstance(node, Bag):
        return _bag_nullable(node)
    return None


def quick_productive(node: Expr) -> bool | None:
    """Whether a node matches anything, where its own fields tell."""
    return None if node.has_ref or isinstance(node, Empty) else True


def productive_node(node: Expr, children: list[bool], rules: Mapping[str, bool]) -> bool:
    """Whether a node matches anything, from its children; intersections and bags count as if they did."""
    if isinstance(node, Ref):
        return rules.get(node.name, False)
    if isinstance(node, Seq):
        return all(children)
    if isinstance(node, Alt):
        return any(children)
    if isinstance(node, Repeat):
        return node.low == 0 or children[0]
    if isinstance(node, Bag):
        members = children[1:]
        if node.low and not any(members):
            return False
        if any(m.low and not member for m, member in zip(node.members, members, strict=True)):
            return False
        return all(c.negative or any(members[i] for i in c.positive) for c in node.clauses)
    return not isinstance(node, Empty)


def solve(
    order: list[list[str]],
    graph: Mapping[str, Iterable[str]],
    rules: Mapping[str, Expr],
    node_value: Callable[[Expr, list[bool], Mapping[str, bool]], bool],
    quick: Callable[[Expr], bool | None],
    dead: frozenset[Expr] = frozenset(),
) -> dict[str, bool]:
    """Least fixed point of a monotone property over rules.

    Args:
        order: Components of the rules, callees first.
        graph: References of each rule.
        rules: The rules.
        node_value: The property of a node from its children and the rules.
        quick: The property of a node where it can be told at once, else None. Not used if there are dead ones.
        dead: Expressions for which the property is False.
    """
    values: dict[str, bool] = {}

    def value(node: Expr, children: list[bool]) -> bool:
        return (not dead or node not in dead) and node_value(node, children, values)

    at_once = (lambda _: None) if dead else quick
    settled: dict[int, bool] = {}
    for component in order:
        if not is_cyclic(component, graph):
            values[component[0]] = fold(rules[component[0]], value, settled, at_once)
            continue
        for name in component:
            values[name] = False
        changed = True
        while changed:
            changed = False
            for name in component:
                # Nodes depend on values that still change, so results last for one rule only.
                if not values[name] and fold(rules[name], value, {}, at_once):
                    values[name] = changed = True
    return values


def left_references(
    expr: Expr, nullable: Callable[[Expr], bool], known: dict[int, frozenset[str]]
) -> frozenset[str]:
    """Rules with which a string of the expression may begin.

    Args:
        expr: The expression.
        nullable: Whether an expression matches the empty string.
        known: Results by `id` of node; read and filled.
    """
    stack = [expr]
    while stack:
        node = stack[-1]
        if id(node) in known:
            stack.pop()
            continue
        if not node.has_ref or (isinstance(node, Seq) and isinstance(node.parts[0], _ONE)):
            known[id(node)] = frozenset()
            stack.pop()
            continue
        first = _first_children(node, nullable)
        missing = [child for child in first if id(child) not in known]
        if missing:
            stack.extend(missing)
            continue
        if isinstance(node, Ref):
            known[id(node)] = frozenset((node.name,))
        else:
            known[id(node)] = frozenset().union(*[known[id(child)] for child in first])
        stack.pop()
    return known[id(expr)]


def _first_children(node: Expr, nullable: Callable[[Expr], bool]) -> list[Expr]:
    children = node.children()
    if not isinstance(node, Seq):
        return list(children)
    first = []
    for child in children:
        first.append(child)
        if not nullable(child):
            break
    return first
