"""The automaton that grammars run on: states as numbers, built when they are needed."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.core.errors import EmptyLanguage
from deepinfer.grammar._ir_nodes import Expr
from deepinfer.grammar._ir_rules import Rules
from deepinfer.grammar.budget import Budget, GrammarLimits
from deepinfer.grammar.byte_classes import ByteClasses
from deepinfer.grammar.cuts import Cut
from deepinfer.grammar.liveness import is_live, prune
from deepinfer.grammar.lowering import Lowering
from deepinfer.grammar.moves import compute_moves, target_of
from deepinfer.grammar.node_store import NodeStore
from deepinfer.grammar.nodes import ALT, CONS, Node
from deepinfer.grammar.normalise import normalise
from deepinfer.grammar.truncation import truncate

__all__ = ["Automaton", "DEAD"]

DEAD = 0
"""The state from which nothing can be accepted."""


class Automaton:
    """A lazily built deterministic automaton over bytes, with a stack inside its states where rules are recursive.

    A state is a number; equal numbers mean equal residual languages (the converse holds up to normal form). Rows of
    `table` are filled by `expand`; a state that cannot reach acceptance is `DEAD`, so whoever follows the table never
    runs into a corner. Safe to use from several threads: rows that are there are read without a lock.

    Args:
        rules: The grammar.
        limits: Bounds on states, memory and time.
        counter_limit: Counters above it saturate in `truncate`; at least the longest token in bytes.

    Raises:
        EmptyLanguage: The grammar accepts nothing.
        GrammarSyntaxError: A rule is not defined, or an intersection holds a recursive rule.
        GrammarTooLarge: A bound of `limits` is passed.

    Attributes:
        start: The first state.
        byte_class: Class of each byte, shape [256], uint8.
        num_classes: Number of classes. Bytes of one class are never told apart.
        table: Next states, shape [capacity, num_classes], int32, C order; -1 where not computed yet. The array is
            replaced when it grows: read the attribute again after a call that may add states.
    """

    def __init__(
        self, rules: Rules, *, limits: GrammarLimits | None = None, counter_limit: int = 128
    ) -> None:
        self.limits = limits or GrammarLimits()
        self._budget = Budget(self.limits)
        self._lock = threading.RLock()
        self._work = _Work(self._lock, self._budget)
        self._store = NodeStore(self._budget, counter_limit)
        with self._budget:
            root = self._lower(rules)
        if root is self._store.empty:
            raise EmptyLanguage(
                "the grammar accepts no string at all, so every output would be refused; check contradictions in it"
            )
        classes = ByteClasses(self._store.byte_sets, self._store.literals)
        self._classes = classes
        self.byte_class: NDArray[np.uint8] = classes.byte_class
        self.num_classes: int = classes.num_classes
        self._class_of = classes.byte_class.tolist()
        self.table: NDArray[np.int32] = np.full((64, self.num_classes), -1, np.int32)
        self._nodes: list[Node] = [self._store.empty]
        self._store.empty.state = DEAD
        self._expanded = bytearray(64)
        self.table[DEAD] = DEAD
        self._expanded[DEAD] = 1
        self._truncated: dict[tuple[int, int], int] = {}
        self.start: int = self._state_of(root)

    def _lower(self, rules: Rules) -> Node:
        dead: frozenset[Expr] = frozenset()
        while True:
            plan = normalise(rules, self._budget, dead)
            lowering = Lowering(
                self._store, plan.rules, plan.nullable, plan.recursive, self.limits.search_states
            )
            root = lowering.start(plan.start)
            if not plan.recursive or lowering.dead <= dead:
                return root
            # What matches nothing may leave recursive rules without an end: find those again.
            dead |= lowering.dead

    @property
    def store(self) -> NodeStore:
        """What makes the nodes of the states, for the parts of this package that take states apart."""
        return self._store

    @property
    def at_work(self) -> AbstractContextManager[None]:
        """Holds the automaton for one thread, with the time of `limits`; whoever makes nodes of `store` is in it."""
        return self._work

    def node_of(self, state: int) -> Node:
        """The node of a state."""
        return self._nodes[state]

    def state_of(self, node: Node) -> int:
        """The state of a node of `store`, which gets a number if it has none. Call it `at_work`."""
        state = node.state
        return state if state >= 0 else self._state_of(node)

    def is_live(self, node: Node) -> bool:
        """Whether a node's language is not empty, as far as a search sees. Call it `at_work`."""
        live = node.live
        return is_live(self._store, node, self.limits.search_states) if live is None else live

    @property
    def num_states(self) -> int:
        """States that have a number so far, `DEAD` included."""
        return len(self._nodes)

    @property
    def size_bytes(self) -> int:
        """Estimated memory in bytes, the table included."""
        return int(self.table.nbytes) + self._store.num_nodes * 300

    def _state_of(self, node: Node) -> int:
        state = node.state
        if state >= 0:
            return state
        state = len(self._nodes)
        if state == self.table.shape[0]:
            grown = np.full((2 * state, self.num_classes), -1, np.int32)
            grown[:state] = self.table
            self.table = grown
            self._expanded.extend(bytes(state))
        self._nodes.append(node)
        node.state = state
        return state

    def expand(self, state: int) -> None:
        """Fill the whole row of a state in `table`; does nothing when it is there.

        Raises:
            GrammarTooLarge: A bound is passed.
        """
        if self._expanded[state]:
            return
        with self._lock, self._budget:
            if not self._expanded[state]:
                self._fill(state)

    def _fill(self, state: int) -> None:
        store, node = self._store, self._nodes[state]
        cut = node.cut or compute_moves(store, node)
        numbers = [DEAD]
        for target in node.targets:
            numbers.append(self._number(target))
        self.table[state] = np.array(numbers, np.int32)[self._places(cut)]
        self._expanded[state] = 1

    def _number(self, target: Node) -> int:
        if target.live is not True or target.kind == ALT:
            target = prune(self._store, target, self.limits.search_states)
        if target.kind == CONS and target.a.kind == CONS:
            target = self._store.push(target.a, target.b)
        number = target.state
        return number if number >= 0 else self._state_of(target)

    def _places(self, cut: Cut) -> NDArray[np.intp]:
        index = cut.index
        if index is None:
            index = cut.index = self._classes.index(cut.masks)
        return index

    def _advance(self, state: int, byte: int) -> int:
        """Fill one entry of the table: what one step needs, which is a fraction of a row. Call it `at_work`."""
        number = self._number(target_of(self._store, self._nodes[state], byte))
        self.table[state, self._class_of[byte]] = number
        return number

    def expand_many(self, states: Iterable[int] | NDArray[np.integer]) -> None:
        """Fill the rows of several states; those that are there cost next to nothing.

        Args:
            states: State numbers, repeats allowed.

        Raises:
            GrammarTooLarge: A bound is passed; rows filled before stay.
        """
        wanted = states.tolist() if isinstance(states, np.ndarray) else states
        done = self._expanded
        missing = [state for state in wanted if not done[state]]
        if not missing:
            return
        with self._lock, self._budget:
            for state in missing:
                if not self._expanded[state]:
                    self._fill(state)

    def step(self, state: int, byte: int) -> int:
        """The state after one byte.

        Args:
            state: A state.
            byte: 0..255.

        Returns:
            The next state; `DEAD` when the byte cannot come.

        Raises:
            GrammarTooLarge: A bound is passed.
        """
        found = self.table.item(state, self._class_of[byte])
        if found >= 0:
            return found
        with self._lock, self._budget:
            return self._advance(state, byte)

    def run(self, state: int, data: bytes) -> int:
        """The state after several bytes; `DEAD` as soon as one cannot come."""
        classes, item = self._class_of, self.table.item
        for place, byte in enumerate(data):
            found = item(state, classes[byte])
            if found < 0:
                return self._run_on(state, data[place:])
            state = found
            if state == DEAD:
                break
        return state

    def _run_on(self, state: int, data: bytes) -> int:
        """As `run`, with the lock held once for all bytes."""
        classes = self._class_of
        with self._lock, self._budget:
            for byte in data:
                found = self.table.item(state, classes[byte])
                state = found if found >= 0 else self._advance(state, byte)
                if state == DEAD:
                    break
        return state

    def accepting(self, state: int) -> bool:
        """Whether the bytes so far are a whole string of the grammar."""
        return self._nodes[state].nullable

    def live(self, state: int) -> bool:
        """Whether acceptance can still be reached; True also where a search for a dead end was given up."""
        node = self._nodes[state]
        if node.live is None:
            with self._lock, self._budget:
                return is_live(self._store, node, self.limits.search_states)
        return node.live

    def depth(self, state: int) -> int:
        """Frames of the deepest stack of a state: the parts that wait one below the other; 0 at the end."""
        return self._nodes[state].depth

    def truncate(self, state: int, depth: int) -> int:
        """The state with its top frames over an unknown rest, and with counters saturated.

        A row of the result holds for every state that has the same top frames, up to bytes after which `uncertain`
        is True, and for walks of no more bytes than the counter limit.

        Args:
            state: A state.
            depth: Frames to keep, at least 1.

        Returns:
            A state; `state` itself when nothing is cut or saturated.
        """
        key = (state, depth)
        found = self._truncated.get(key)
        if found is None:
            with self._lock, self._budget:
                node = truncate(self._store, self._nodes[state], max(1, depth))
                found = self._truncated[key] = self._state_of(node)
        return found

    def uncertain(self, state: int) -> bool:
        """Whether a stack has been popped below the cut of a truncated state, so that more than the row may follow."""
        return self._nodes[state].exposed

    def describe(self, state: int) -> str:
        """The state as text, for debugging."""
        from deepinfer.grammar.node_text import node_text

        return node_text(self._nodes[state])


class _Work(AbstractContextManager[None]):
    """A lock, and the time of a budget."""

    def __init__(self, lock: AbstractContextManager[object], budget: Budget) -> None:
        self._lock = lock
        self._budget = budget

    def __enter__(self) -> None:
        self._lock.__enter__()
        self._budget.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._budget.__exit__(*error)
        self._lock.__exit__(*error)
