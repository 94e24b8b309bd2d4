"""From rules to nodes: references are resolved, recursive rules become `REF` nodes."""

from __future__ import annotations

from collections.abc import Mapping

from deepinfer.core.errors import GrammarSyntaxError
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
from deepinfer.grammar.bag_nodes import bag_start
from deepinfer.grammar.bag_state import BagSpec
from deepinfer.grammar.liveness import is_live
from deepinfer.grammar.node_store import NodeStore
from deepinfer.grammar.nodes import Node

__all__ = ["Lowering"]


class Lowering:
    """Turns expressions into nodes of a store.

    Args:
        store: Where the nodes go.
        rules: Rules by name, free of left recursion.
        nullable: Names of the recursive rules that match the empty string.
        recursive: Names of all recursive rules.
        search_states: Bound of one search for dead ends.

    Attributes:
        dead: Intersections, complements and bags that turned out to match nothing.
    """

    def __init__(
        self,
        store: NodeStore,
        rules: Mapping[str, Expr],
        nullable: frozenset[str],
        recursive: frozenset[str],
        search_states: int,
    ) -> None:
        self._store = store
        self._rules = rules
        self._nullable = nullable
        self._recursive = recursive
        self._search_states = search_states
        self._by_id: dict[int, Node] = {}
        self._by_name: dict[str, Node] = {}
        self._pending: list[str] = []
        self._num_bags = 0
        self.dead: set[Expr] = set()

    def start(self, name: str) -> Node:
        """The node of a rule, with everything that it needs."""
        node = self._rule(name)
        if node is None:
            node = self._lower(self._rules[name])
            self._by_name[name] = node
        while self._pending:
            pending = self._pending.pop()
            self._by_name[pending].a = self._lower(self._rules[pending])
        return node

    def _rule(self, name: str) -> Node | None:
        node = self._by_name.get(name)
        if node is None and name in self._recursive:
            node = self._by_name[name] = self._store.reference(name in self._nullable)
            self._pending.append(name)
        return node

    def _lower(self, root: Expr) -> Node:
        known = self._by_id
        stack = [root]
        while stack:
            expr = stack[-1]
            if id(expr) in known:
                stack.pop()
                continue
            if isinstance(expr, Ref):
                node = self._rule(expr.name)
                if node is None:
                    body = self._rules[expr.name]
                    node = known.get(id(body))
                    if node is None:
                        stack.append(body)
                        continue
                    self._by_name[expr.name] = node
                known[id(expr)] = node
                stack.pop()
                continue
            missing = False
            for child in expr.children():
                if id(child) not in known:
                    leaf = self._leaf(child)
                    if leaf is not None:
                        known[id(child)] = leaf
                    else:
                        missing = True
                        stack.append(child)
            if not missing:
                node = self._node(expr)
                if node is self._store.empty and isinstance(expr, And | Not | Bag):
                    self.dead.add(expr)
                known[id(expr)] = node
                stack.pop()
        return known[id(root)]

    def _leaf(self, expr: Expr) -> Node | None:
        """Node of a literal or byte set, else None."""
        kind = type(expr)
        if kind is Literal:
            return self._store.literal(expr.text)  # type: ignore[attr-defined]
        if kind is Bytes:
            mask: int = expr.mask  # type: ignore[attr-defined]
            if mask & (mask - 1) == 0:
                return self._store.literal(bytes((mask.bit_length() - 1,)))
            return self._store.byte_set(mask)
        return None

    def _node(self, expr: Expr) -> Node:
        store, known = self._store, self._by_id
        kind = type(expr)
        if kind is Seq:
            node = store.eps
            cons = store.cons
            for part in reversed(expr.children()):
                node = cons(known[id(part)], node)
            return node
        if isinstance(expr, Alt):
            return self._alt(expr)
        if isinstance(expr, Repeat):
            high = -1 if expr.high is None else expr.high
            return store.rep(known[id(expr.expr)], expr.low, high)
        if isinstance(expr, And):
            return self._settled(store.conj(self._plain([known[id(p)] for p in expr.parts])))
        if isinstance(expr, Not):
            return self._settled(store.neg(self._plain([known[id(expr.expr)]])[0]))
        if isinstance(expr, Bag):
            return self._bag(expr)
        if kind is Eps:
            return store.eps
        if kind is Empty:
            return store.empty
        leaf = self._leaf(expr)
        if leaf is not None:
            return leaf
        raise GrammarSyntaxError(f"{kind.__name__} is not an expression of this form")

    def _alt(self, expr: Alt) -> Node:
        store, known = self._store, self._by_id
        texts = [part.text for part in expr.parts if isinstance(part, Literal)]
        if len(texts) < 4:
            return store.alt([known[id(part)] for part in expr.parts])
        others = [known[id(part)] for part in expr.parts if not isinstance(part, Literal)]
        return store.alt([store.choice(texts), *others])

    def _plain(self, nodes: list[Node]) -> list[Node]:
        if any(node.recursive for node in nodes):
            raise GrammarSyntaxError(
                "an intersection or complement holds a recursive rule; only rules without recursion can be"
                " intersected or complemented: move the operation inside the rule"
            )
        return nodes

    def _settled(self, node: Node) -> Node:
        return node if is_live(self._store, node, self._search_states) else self._store.empty

    def _bag(self, expr: Bag) -> Node:
        known = self._by_id
        self._num_bags += 1
        members = [known[id(member.expr)] for member in expr.members]
        spec = BagSpec(self._num_bags, expr, members, known[id(expr.separator)])
        return bag_start(self._store, spec)
