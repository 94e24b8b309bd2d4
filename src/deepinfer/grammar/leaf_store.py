"""The nodes that are not made of others, and the books on all nodes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from deepinfer.grammar.cuts import CutStore
from deepinfer.grammar.nodes import (
    ALT,
    BAG,
    CHOICE,
    EMPTY,
    EPS,
    NOT,
    REF,
    SET,
    TAG,
    UNKNOWN,
    BagNode,
    Node,
)

if TYPE_CHECKING:
    from deepinfer.grammar.bag_state import BagSpec, BagState
    from deepinfer.grammar.budget import Budget

__all__ = ["LeafStore"]


class LeafStore:
    """Counts nodes and keeps those that are not made of others.

    Args:
        budget: Bounds on the number of nodes and the time; None for none.
        counter_limit: Counters above it saturate in `truncate`.

    Attributes:
        counter_limit: As given.
        num_nodes: Nodes made so far.
        cuts: The partitions of the bytes that occur.
        empty: The language without a string.
        eps: The language of the empty string.
        all: The language of all byte strings.
        unknown: The rest below a cut stack.
    """

    def __init__(self, budget: Budget | None = None, counter_limit: int = 128) -> None:
        self.counter_limit = counter_limit
        self._sets: dict[int, Node] = {}
        self._literals: dict[bytes, Node] = {}
        self._tries: dict[tuple[int, int, int, int], Node] = {}
        self._kept: list[list[bytes]] = []
        self._cons: dict[int, Node] = {}
        self._alts: dict[tuple[int, ...], Node] = {}
        self._unions: dict[tuple[int, ...], Node] = {}
        self._ands: dict[tuple[int, ...], Node] = {}
        self._nots: dict[int, Node] = {}
        self._reps: dict[tuple[int, int, int], Node] = {}
        self._bags: dict[tuple[int, int, int, BagState], Node] = {}
        self._tags: dict[int, Node] = {}
        self.num_nodes = 0
        self.nesting = 0
        self._check = budget.check if budget is not None else _unbounded
        self.cuts = CutStore()
        self.empty = self._new(EMPTY, False, False, 1 << 30)
        self.eps = self._new(EPS, True, True, 0)
        self.eps.depth = 0
        self.eps.cut = self.empty.cut = self.cuts.nothing
        self.empty.depth = 0
        self.all = self._new(NOT, True, True, 0)
        self.all.a = self.empty
        self.all.cut = self.cuts.everything
        self.all.targets = (self.all,)
        self.unknown = self._new(UNKNOWN, False, True, 0)
        self.unknown.exposed = True
        self.unknown.cut = self.cuts.nothing
        self._nots[self.empty.uid] = self.all

    def _new(self, kind: int, nullable: bool, live: bool | None, least: int) -> Node:
        uid = self.num_nodes
        self.num_nodes = uid + 1
        if not uid & 1023:
            self._check(uid)
        return Node(kind, uid, nullable, live, least)

    @property
    def byte_sets(self) -> Iterable[int]:
        """Masks of all byte sets that nodes were made of."""
        return self._sets

    @property
    def literals(self) -> Iterable[bytes]:
        """All literal strings that nodes were made of."""
        for strings in self._kept:
            yield from strings
        yield from self._literals

    def byte_set(self, mask: int) -> Node:
        """One byte of a set; the mask is not 0."""
        node = self._sets.get(mask)
        if node is None:
            node = self._sets[mask] = self._new(SET, False, True, 1)
            node.mask = mask
            node.targets = (self.eps,)
            node.cut = self.cuts.cut((mask,))
        return node

    def reference(self, nullable: bool) -> Node:
        """A recursive rule whose body is set later as attribute `a`."""
        node = self._new(REF, nullable, True, 0 if nullable else 1)
        node.recursive = True
        return node

    def tag(self, member: int) -> Node:
        """The end of a member of a bag."""
        node = self._tags.get(member)
        if node is None:
            node = self._tags[member] = self._new(TAG, False, True, 0)
            node.tags = node.ends = 1 << member
            node.cut = self.cuts.nothing
        return node

    def bag_node(
        self, spec: BagSpec, bag: BagState, place: int, pick: Node, nullable: bool
    ) -> Node:
        """The node of a bag in a state; see `deepinfer.grammar.bag_nodes` for when to make one."""
        key = (spec.number, place, pick.uid, bag)
        found = self._bags.get(key)
        if found is None:
            uid = self.num_nodes
            self.num_nodes = uid + 1
            if not uid & 1023:
                self._check(uid)
            # A member that has begun may have become a dead end, such as a key that a pattern rules out by now.
            live = True if place != CHOICE or has_live_member(spec, bag, pick) else None
            node = BagNode(BAG, uid, nullable, live, 0 if nullable else 1)
            node.spec = spec
            node.bag = bag
            node.place = place
            node.pick = pick
            node.body = None
            node.recursive = spec.recursive
            node.counted = spec.counted(bag, self.counter_limit)
            found = self._bags[key] = node
        return found


def _unbounded(num_states: int) -> None:
    """Stands for a budget where there is none."""


def has_live_member(spec: BagSpec, bag: BagState, pick: Node) -> bool:
    """Whether one of the members that a bag allows is known to be no dead end."""
    allowed = spec.allowed(bag)
    for part in pick.parts if pick.kind == ALT else (pick,):
        if part.live and part.tags & allowed:
            return True
    return False
