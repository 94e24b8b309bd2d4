"""A state of the automaton as a stack of frames that are walked one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deepinfer.grammar.automaton import Automaton
from deepinfer.grammar.bag_nodes import _after, _close, bag_body
from deepinfer.grammar.nodes import (
    AFTER,
    ALT,
    AND,
    CONS,
    EMPTY,
    EPS,
    LIT,
    NOT,
    REP,
    SET,
    TRIE,
    UNKNOWN,
    BagNode,
    Node,
)
from deepinfer.grammar.truncation import saturate

__all__ = ["BagHead", "FrameNodes"]

MAX_STACKS = 12
"""Stacks side by side that are walked one by one; more are walked together, as whole states."""

MAX_FINITE = 2000
"""Nodes that are looked at to see that a set of strings is finite."""

MAX_JOINED = 8
"""Frames that are walked as one because the upper ones may be left anywhere."""


@dataclass(frozen=True, slots=True)
class BagHead:
    """A state of a walk over the members of a bag that are not told apart yet.

    Attributes:
        tags: Members that may be the one that began, as bits.
        ends: Those of them that may end here.
        node: What is left of them.
    """

    tags: int
    ends: int
    node: Node


class FrameNodes:
    """Takes states of an automaton apart.

    Args:
        automaton: The automaton.
    """

    def __init__(self, automaton: Automaton) -> None:
        self._automaton = automaton
        self._store = automaton._store
        self._heads: dict[int, BagHead] = {}

    def node(self, state: int) -> Node:
        """The node of a state."""
        return self._automaton._nodes[state]

    def state(self, node: Node) -> int:
        """The state of a node."""
        return node.state if node.state >= 0 else self._automaton._state_of(node)

    def stacks(self, node: Node) -> list[Node]:
        """The stacks of a node that are walked one by one; the node alone when they are too many."""
        if node.kind != ALT:
            return [node]
        return list(node.parts) if len(node.parts) <= MAX_STACKS else []

    def split(self, node: Node) -> tuple[Node, Node]:
        """Top frame, which is no stack itself, and rest of a stack."""
        if node.kind != CONS:
            return node, self._store.eps
        head, rest = node.a, node.b
        while head.kind == CONS:
            head, rest = head.a, self._store.cons(head.b, rest)
        return head, rest

    def unit(self, node: Node, wide: Callable[[int, bool], bool]) -> tuple[int, Node]:
        """The top frames of a stack that are walked as one, and the rest.

        That is one frame; where it may be left behind each of many bytes, like the inside of a string, it is walked with
        the next one, so that it is left in few places.

        Args:
            node: A stack.
            wide: Whether many tokens begin in a state's frame; it is also told whether that is a set or a repeat.

        Returns:
            The state of the frames over an unknown rest, their counters saturated; and the rest.
        """
        store = self._store
        frames: list[Node] = []
        stack, any_wide = node, False
        while True:
            frame, node = self.split(node)
            frame = saturate(store, frame)
            frames.append(frame)
            alone = self.state(store.cons(frame, store.unknown))
            is_wide = wide(alone, frame.kind in (SET, REP))
            any_wide = any_wide or is_wide
            if node.kind == EPS or not any_wide or not (is_wide or frame.nullable):
                break
            if node.kind == ALT or len(frames) == MAX_JOINED:
                return self.state(stack), store.eps
        result = store.unknown
        for part in reversed(frames):
            result = store.cons(part, result)
        return self.state(result), node

    def uncounted(self, state: int) -> tuple[int, int]:
        """A state whose top frame is a repeat of bounded count, as if the count had no bound.

        Args:
            state: Frames over an unknown rest.

        Returns:
            The state without the bound, and the bound; (0, 0) for other states.
        """
        node = self.node(state)
        if node.kind != CONS or node.a.kind != REP or node.a.high <= 0:
            return 0, 0
        store = self._store
        return self.state(store.cons(store.rep(node.a.a, 0, -1), node.b)), node.a.high

    def left(self, state: int) -> bool:
        """Whether the frames of a walk may be left in a state without another byte."""
        return self.node(state).exposed

    def is_unknown(self, state: int) -> bool:
        """Whether nothing of the frames is left in a state."""
        return self.node(state).kind == UNKNOWN

    def head(self, state: int) -> BagHead:
        """What a state reached in the walk of a bag's members means."""
        found = self._heads.get(state)
        if found is None:
            node = self.node(state)
            found = self._heads[state] = BagHead(node.tags, node.ends, node)
        return found

    def next_member(self, frame: Node, rest: Node) -> Node | None:
        """For a bag between two members: the separator, the bag's next member, and `rest`. None for other frames."""
        if isinstance(frame, BagNode) and frame.place == AFTER:
            return self._store.push(bag_body(self._store, frame), rest)
        return None

    @staticmethod
    def is_bag(frame: Node) -> bool:
        """Whether a frame is a bag between two members, or before one that is not chosen yet."""
        return isinstance(frame, BagNode)

    def endless_members(self, pick: Node, loops: Callable[[int], bool]) -> int:
        """Members of a bag of which any text may be the beginning, however it goes on.

        Those are members whose frame is a loop, perhaps without some finite set of strings, such as the keys that are declared:
        whatever was read, longer strings remain.

        Args:
            pick: What is left of the members.
            loops: Whether a state is led back to itself by every character of the text.

        Returns:
            Such members as bits, any of which may be the one; 0 when there are none.
        """
        for part in pick.parts if pick.kind == ALT else (pick,):
            frame, _ = self.split(part)
            if frame.kind != AND:
                continue
            others = [p for p in frame.parts if not (p.kind == NOT and self._is_finite(p.a))]
            if len(others) == 1 and others[0].kind == REP and loops(self.state(others[0])):
                return part.tags
        return 0

    @staticmethod
    def _is_finite(node: Node) -> bool:
        """Whether a node is seen at once to hold strings of bounded length only."""
        stack = [node]
        for _ in range(MAX_FINITE):
            if not stack:
                return True
            node = stack.pop()
            if node.kind in (ALT, AND):
                stack += node.parts
            elif node.kind == CONS:
                stack += (node.a, node.b)
            elif node.kind not in (EMPTY, EPS, SET, LIT, TRIE):
                return False
        return not stack

    def behind_member(self, bag: BagNode, member: int, node: Node, rest: Node) -> Node | None:
        """What follows when a member of a bag was told from the others.

        Args:
            bag: The bag before the member.
            member: Which member, as a bit.
            node: What is left of the members.
            rest: What stands below the bag.

        Returns:
            The rest of that member, the bag behind it, and `rest`; None when the bag does not allow the member.
        """
        after = bag.spec.advance(bag.bag, member.bit_length() - 1)
        if after is None:
            return None
        store = self._store
        return _close(store, node, member, store.cons(_after(store, bag.spec, after), rest))

    def allowed(self, bag: BagNode) -> int:
        """The members that a bag allows next, as bits."""
        return bag.spec.allowed(bag.bag)

    @property
    def end(self) -> Node:
        """The empty stack."""
        return self._store.eps

    @staticmethod
    def is_end(node: Node) -> bool:
        """Whether no byte can follow."""
        return node.kind in (EPS, EMPTY)

    def forget(self) -> None:
        """Drops what was worked out; it is worked out again."""
        self._heads.clear()
