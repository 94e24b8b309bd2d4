"""A state of the automaton as a stack of frames that are walked one by one."""

from __future__ import annotations

from collections.abc import Callable

from deepinfer.grammar.automaton import Automaton
from deepinfer.grammar.bag_nodes import bag_after
from deepinfer.grammar.finite import Branch, Keys, strings_of
from deepinfer.grammar.first_bytes import first_bytes
from deepinfer.grammar.nodes import (
    AFTER,
    ALT,
    AND,
    CONS,
    EMPTY,
    EPS,
    LIT,
    NOT,
    REF,
    REP,
    SET,
    TAG,
    UNKNOWN,
    BagNode,
    Node,
)
from deepinfer.grammar.truncation import saturate

__all__ = ["BAG", "END", "EXCEPT", "FrameNodes", "PARTS", "REPEAT", "STRINGS", "Task", "UNIT"]

END, UNIT, STRINGS, PARTS, REPEAT, BAG, EXCEPT = range(7)
_JOINED = 7

Task = tuple[int, "int | Branch | Node", Node, Node]
"""How to walk the top of a stack, with what, the rest below it, and the stack."""

MAX_STACKS = 64
"""Stacks side by side that are walked one by one; more are walked together, as whole states."""

MANY_KEYS = 4
"""So many members that begin with a string are walked together."""

MAX_JOINED = 8
"""Frames that are walked as one because the upper ones may be left anywhere."""


class FrameNodes:
    """Takes states of an automaton apart.

    Args:
        automaton: The automaton.
        wide: Whether many tokens begin in a state's frame; it is also told whether that is a set or a repeat.
        is_shared: Whether a node is an expression that other grammars may hold too.
        longest: Most bytes of a set, as bits, that a token holds in a row, or any number from one on that is enough.
    """

    def __init__(
        self,
        automaton: Automaton,
        wide: Callable[[int, bool], bool],
        is_shared: Callable[[Node], bool],
        longest: Callable[[int, int], int],
    ) -> None:
        self._automaton = automaton
        self._wide = wide
        self._is_shared = is_shared
        self._longest = longest
        self._store = self.store = automaton.store
        self._ways: dict[int, tuple[int, int | Branch | Node]] = {}
        self._joins: dict[tuple[int, ...], tuple[int, bool, bool]] = {}
        self._wide_frames: dict[int, bool] = {}
        self._branches: dict[int, Branch | None] = {}
        self._members: dict[int, tuple[Keys | None, list[Node]]] = {}

    def node(self, state: int) -> Node:
        """The node of a state."""
        return self._automaton.node_of(state)

    def state(self, node: Node) -> int:
        """The state of a node."""
        return node.state if node.state >= 0 else self._automaton.state_of(node)

    def stacks(self, node: Node) -> list[Node]:
        """The stacks of a node that are walked one by one; none when they are too many."""
        if node.kind != ALT:
            return [node]
        if len(node.parts) > MAX_STACKS:
            return []
        return [part for part in node.parts if self._automaton.is_live(part)]

    def quick_task(self, node: Node) -> Task | None:
        """As `task`, for a stack whose top frame was met before and is walked alone; else None."""
        if node.kind != CONS:
            return None
        frame = node.a
        if isinstance(frame, BagNode):
            return BAG, frame, node.b, node
        way = self._ways.get(frame.uid, (EXCEPT, 0))
        return (*way, node.b, node) if way[0] < EXCEPT else None

    def task(self, stack: Node) -> Task:
        """How the top of a stack is walked.

        Args:
            stack: A stack, no union.

        Returns:
            One of

            - `END`: nothing is left; the frames end in a bag's member, or in a rest that is not known.
            - `STRINGS` and their tree.
            - `PARTS` and a node: alternatives that are walked one by one, see `parts`.
            - `REPEAT` and a repeat, one copy of which is walked at a time, see `copy`.
            - `EXCEPT` and the tree of strings that must not come, in the place of which the stack `without` is walked.
            - `BAG` and the bag.
            - `UNIT` and the state of the frames over an unknown rest, their counters saturated.
        """
        if stack.kind in (TAG, UNKNOWN):
            return END, 0, self._store.eps, stack
        frame, rest = self.split(stack)
        way = self._ways.get(frame.uid)
        if way is None:
            way = self._ways[frame.uid] = self._way(frame)
        if way[0] == EXCEPT and not self._ends_plainly(frame, rest):
            return (*self._joined(stack), stack)
        if way[0] == _JOINED:
            return (*self._joined(stack), stack)
        return (*way, rest, stack)

    def _way(self, frame: Node) -> tuple[int, int | Branch | Node]:
        kind = frame.kind
        if isinstance(frame, BagNode):
            return BAG, frame
        branch = self.branch(frame)
        if branch is not None:
            return STRINGS, branch
        if kind == AND:
            strings = self._excluded(frame)
            if strings is not None:
                return EXCEPT, strings
        if kind == REF and self._divides(frame):
            return PARTS, frame
        if kind == REP and not self._is_shared(frame):
            return REPEAT, frame
        saturated = self._saturated(frame)
        state = self.state(self._store.cons(saturated, self._store.unknown))
        if self._wide(state, kind in (SET, REP)):
            return _JOINED, 0
        if kind == ALT and len(frame.parts) <= MAX_STACKS and self._divides(frame):
            return PARTS, frame
        return UNIT, state

    def _saturated(self, frame: Node) -> Node:
        """A frame with its counts as far as a token can tell them apart."""
        if frame.kind == REP and frame.a.kind == SET and max(frame.low, frame.high) > 1:
            limit = self._longest(frame.a.mask, max(frame.low, frame.high))
            high = -1 if frame.high > limit else frame.high
            return self._store.rep(frame.a, min(frame.low, limit + 1), high)
        return saturate(self._store, frame)

    def _divides(self, frame: Node, nesting: int = 4) -> bool:
        """Whether alternatives are better walked one by one: values of JSON, which begin with bytes of their own."""
        for part in frame.parts if frame.kind == ALT else (frame.a,):
            first = self.split(part)[0]
            if first.kind == LIT and first.text[0] in b'"[{':
                return True
            inside = first if part.kind == CONS or first.kind == REF else part
            if nesting and inside.kind in (ALT, REF) and self._divides(inside, nesting - 1):
                return True
        return False

    def copy(self, frame: Node, rest: Node) -> Node:
        """One copy of a repeat, and what is left of it, and the rest below it."""
        store = self._store
        high = frame.high - 1 if frame.high > 0 else -1
        left = store.rep(frame.a, max(frame.low - 1, 0), high)
        return store.push(frame.a, store.cons(left, rest))

    def parts(self, frame: Node) -> list[Node]:
        """The alternatives of a frame, each over an unknown rest; finite sets of strings are one."""
        store = self._store
        parts = frame.parts if frame.kind == ALT else (frame.a,)
        live = [part for part in parts if self._automaton.is_live(part)]
        finite = [part for part in live if self.branch(part) is not None]
        others = [part for part in live if self.branch(part) is None]
        if finite:
            others.append(store.plain_alt(finite, joined=False) if len(finite) > 1 else finite[0])
        return [store.push(part, store.unknown) for part in others]

    def branch(self, node: Node) -> Branch | None:
        """The strings of a node that has few; None for others."""
        if node.uid not in self._branches:
            self._branches[node.uid] = strings_of(node)
        return self._branches[node.uid]

    def split(self, node: Node) -> tuple[Node, Node]:
        """Top frame, which is no stack itself, and rest of a stack."""
        if node.kind != CONS:
            return node, self._store.eps
        head, rest = node.a, node.b
        while head.kind == CONS:
            head, rest = head.a, self._store.cons(head.b, rest)
        return head, rest

    def _joined(self, stack: Node) -> tuple[int, int, Node]:
        """The top frames of a stack that are walked as one, as a state over an unknown rest; and the rest.

        A frame that may be left behind each of many bytes, like the inside of a string, is walked with the next one, so
        that it is left in few places.
        """
        store, node = self._store, stack
        frames: list[Node] = []
        names: tuple[int, ...] = ()
        while True:
            frame, node = self.split(node)
            names = (*names, frame.uid)
            frames.append(frame)
            known = self._joins.get(names)
            if known is None:
                saturated = self._saturated(frame)
                alone = self.state(store.cons(saturated, store.unknown))
                is_wide = self._wide(alone, frame.kind in (SET, REP))
                state = 0
                if not is_wide and not frame.nullable:
                    result = store.unknown
                    for part in reversed(frames):
                        result = store.cons(self._saturated(part), result)
                    state = self.state(result)
                known = self._joins[names] = (state, is_wide, frame.nullable)
            if known[0] and not (len(frames) < MAX_JOINED and self._begins_wide(node)):
                return UNIT, known[0], node
            if node.kind == ALT or len(frames) == MAX_JOINED:
                return UNIT, self.state(stack), store.eps
            if node.kind in (EPS, TAG, UNKNOWN):
                result = store.eps if node.kind == EPS else store.unknown
                for part in reversed(frames):
                    result = store.cons(self._saturated(part), result)
                return UNIT, self.state(result), node

    def _begins_wide(self, node: Node) -> bool:
        """Whether the next frame may be left behind each of many bytes, so that it is no place to stop."""
        if node.kind in (EPS, ALT, TAG, UNKNOWN):
            return False
        frame = self.split(node)[0]
        found = self._wide_frames.get(frame.uid)
        if found is None:
            found = False
            if not isinstance(frame, BagNode) and frame.kind not in (LIT, REF):
                alone = self._store.cons(self._saturated(frame), self._store.unknown)
                found = self._wide(self.state(alone), frame.kind in (SET, REP))
            self._wide_frames[frame.uid] = found
        return found

    def whole(self, stack: Node) -> tuple[int, Node]:
        """The top frames of any stack as a state over an unknown rest, and the rest."""
        _, state, rest = self._joined(stack)
        return state, rest

    def uncounted(self, state: int) -> tuple[int, int, int]:
        """A state whose top frame is a repeat of bounded count, as if the count had no bounds.

        Args:
            state: Frames over an unknown rest.

        Returns:
            The state without the bounds, and the bounds; (0, 0, 255) for other states.
        """
        node, store = self.node(state), self._store
        frame, rest = (node.a, node.b) if node.kind == CONS else (node, store.eps)
        if frame.kind != REP or frame.high <= 0:
            return 0, 0, 255
        return self.state(store.cons(store.rep(frame.a, 0, -1), rest)), frame.low, frame.high

    def repeated(self, state: int) -> int:
        """The state of one copy of the repeat that is a state's top frame."""
        node = self.node(state)
        return self.state((node.a if node.kind == CONS else node).a)

    def step(self, state: int, byte: int) -> int:
        """The state behind a byte."""
        return self._automaton.step(state, byte)

    def left(self, state: int) -> bool:
        """Whether the frames of a walk may be left in a state without another byte."""
        return self.node(state).exposed

    def is_unknown(self, state: int) -> bool:
        """Whether nothing of the frames is left in a state."""
        return self.node(state).kind == UNKNOWN

    def _excluded(self, frame: Node) -> Branch | None:
        """For a repeat without some strings: those strings. They are not in what `without` gives."""
        others, excluded = _divided(frame)
        if len(others) != 1 or others[0].kind != REP or others[0].high >= 0:
            return None
        return self.branch(self._store.alt(excluded)) if excluded else None

    def _ends_plainly(self, frame: Node, rest: Node) -> bool:
        """Whether the byte with which the rest begins can never be one of the repeat."""
        first = self.split(rest)[0]
        if first.kind != LIT:
            return False
        repeat, byte = _divided(frame)[0][0], first.text[0]
        if not first_bytes(repeat, 30) >> byte & 1:
            return True
        return not self._automaton.step(self.state(repeat), byte)

    def without(self, stack: Node) -> tuple[Node, int]:
        """For a stack whose way is `EXCEPT`: the stack without the exception, and the byte that ends its strings."""
        frame, rest = self.split(stack)
        return self._store.cons(_divided(frame)[0][0], rest), self.split(rest)[0].text[0]

    def members(self, pick: Node) -> tuple[Keys | None, list[Node]]:
        """What is left of the members of a bag: those that begin with a string, when they are many; and the others."""
        found = self._members.get(pick.uid)
        if found is None:
            parts = pick.parts if pick.kind == ALT else (pick,)
            pairs: list[tuple[bytes, Node]] = []
            others: list[Node] = []
            for part in parts:
                if not self.is_live(part):
                    continue
                frame, rest = (part.a, part.b) if part.kind == CONS else (part, self._store.eps)
                if frame.kind == CONS:
                    frame, rest = self.split(part)
                if frame.kind == LIT and rest.tags:
                    pairs.append((frame.text, rest))
                else:
                    others.append(part)
            if len(pairs) < MANY_KEYS:
                found = (None, [part for part in parts if self.is_live(part)])
            else:
                found = (Keys(pairs), others)
            self._members[pick.uid] = found
        return found

    def is_live(self, node: Node) -> bool:
        """Whether a node's language is not empty."""
        return node.live is True or self._automaton.is_live(node)

    @staticmethod
    def separator(bag: BagNode) -> Node | None:
        """What stands before the next member of a bag: None where one may come at once."""
        return bag.spec.separator if bag.place == AFTER else None

    @staticmethod
    def pick(bag: BagNode) -> Node:
        """What is left of the members of a bag."""
        return bag.spec.union if bag.place == AFTER else bag.pick

    def push_unknown(self, node: Node) -> Node:
        """A node over an unknown rest."""
        return self._store.push(node, self._store.unknown)

    def behind_member(self, bag: BagNode, member: int, rest: Node) -> Node | None:
        """What follows when a member of a bag is over.

        Args:
            bag: The bag before the member.
            member: Which member, as a bit.
            rest: What stands below the bag.

        Returns:
            The bag behind the member, and `rest`; None when the bag does not allow the member.
        """
        after = bag.spec.advance(bag.bag, member.bit_length() - 1)
        if after is None:
            return None
        return self._store.cons(bag_after(self._store, bag.spec, after), rest)

    @staticmethod
    def allowed(bag: BagNode) -> int:
        """The members that a bag allows next, as bits."""
        return bag.spec.allowed(bag.bag)

    @staticmethod
    def is_end(node: Node) -> bool:
        """Whether no byte can follow."""
        return node.kind in (EPS, EMPTY)

    def forget(self) -> None:
        """Drops what was worked out; it is worked out again."""
        self._ways.clear()
        self._joins.clear()
        self._branches.clear()
        self._wide_frames.clear()
        self._members.clear()


def _divided(frame: Node) -> tuple[list[Node], list[Node]]:
    """The parts of an intersection: those that are no complements, and what the complements exclude."""
    others = [part for part in frame.parts if part.kind != NOT]
    return others, [part.a for part in frame.parts if part.kind == NOT]
