"""Mask rows put together from the walks of single frames, which are shared by all stacks that hold them.

The bytes of a token run through the top frame of the stack, perhaps leave it for the next one, and so on. What a frame
does with the tokens depends on the frame and on the places in the tries where it is entered, and on nothing else. So a
frame's walk is done once for each such pair and remembered: the white space behind every comma, the inside of every
string, and the keys of an object whatever keys came before are walked once in a grammar.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepinfer.grammar.automaton import Automaton
from deepinfer.grammar.bitmask import MaskRow
from deepinfer.grammar.frame_entries import Entry
from deepinfer.grammar.frame_tokens import Tokens
from deepinfer.grammar.frame_units import FrameUnits
from deepinfer.grammar.nodes import BagNode, Node
from deepinfer.grammar.vocab import TokenVocab

__all__ = ["FrameRows", "TooManyFrames"]

Int32Array = NDArray[np.int32]

MAX_TASKS = 400
"""Frames that one row may run through."""

MAX_KEPT_BYTES = 48 << 20
"""Memory of the remembered walks; past it they are forgotten."""


class TooManyFrames(Exception):
    """A state runs through so many frames that it is better walked as a whole."""


class FrameRows:
    """Computes rows from frames.

    Args:
        automaton: The automaton.
        vocab: The vocabulary.
    """

    def __init__(self, automaton: Automaton, vocab: TokenVocab) -> None:
        self._automaton = automaton
        self._vocab = vocab
        self._units = FrameUnits(automaton, vocab)
        self._nodes = self._units.nodes
        self._tasks: dict[int, list[tuple[Node, int, Node]]] = {}
        self._empty = np.zeros(vocab.num_words, dtype=np.int32)
        self.generation = 0

    @property
    def num_full_walks(self) -> int:
        """Walks over most of the vocabulary's trie so far."""
        return self._units.num_dense_nodes // max(1, len(self._vocab.trie) // 2)

    def parts(self, state: int) -> list[Tokens]:
        """The tokens of a state, in parts that other states share.

        Args:
            state: A live state.

        Returns:
            The parts; their union is the row. Lists of the same objects are equal rows, as long as `generation` stays.

        Raises:
            TooManyFrames: Better walk the state as a whole.
            GrammarTooLarge: The automaton ran out of its budget.
        """
        if self._units.size_bytes > MAX_KEPT_BYTES:
            self.forget()
        with self._automaton._lock, self._automaton._budget:
            return self._parts(self._nodes.node(state))

    def row(self, parts: list[Tokens]) -> MaskRow:
        """The row of some parts."""
        if not parts:
            return MaskRow(self._empty)
        dense = [words for part in parts if (words := part.words) is not None]
        if len(parts) == 1 and not dense:
            return MaskRow(self._empty, parts[0].index, parts[0].values)
        out = dense[0].copy() if dense else self._empty.copy()
        for words in dense[1:]:
            np.bitwise_or(out, words, out=out)
        for part in parts:
            if part.index is not None and part.values is not None:
                out[part.index] |= part.values
        if dense:
            return MaskRow(out, owns_base=True)
        return MaskRow.compact(out, self._empty, self._vocab.full_row)

    def _parts(self, node: Node) -> list[Tokens]:
        units = self._units
        agenda: dict[int, tuple[Node, list[Entry]]] = {node.uid: (node, [units.root])}
        out: dict[int, Tokens] = {}
        count = 0
        while agenda:
            node, entries = agenda.pop(next(iter(agenda)))
            count += 1
            if count > MAX_TASKS:
                raise TooManyFrames
            entry = entries[0] if len(entries) == 1 else units.entries.merged(entries)
            tasks = self._tasks.get(node.uid)
            if tasks is None:
                tasks = self._tasks[node.uid] = self._cut(node)
            for frame, state, rest in tasks:
                if state:
                    unit = units.unit(state, entry)
                    if not unit.tokens.is_empty:
                        out[id(unit.tokens)] = unit.tokens
                    if unit.exits is None or self._nodes.is_end(rest):
                        continue
                    after = [(rest, unit.exits)]
                else:
                    after = self._advance_bag(frame, rest, entry, out)
                for below, exits in after:
                    known = agenda.get(below.uid)
                    if known is None:
                        agenda[below.uid] = (below, [exits])
                    else:
                        known[1].append(exits)
        return list(out.values())

    def _cut(self, node: Node) -> list[tuple[Node, int, Node]]:
        """For each stack of a node: its top frame; the state of the frames to walk, 0 for a bag; the rest below them."""
        nodes = self._nodes
        stacks = nodes.stacks(node)
        if not stacks:
            raise TooManyFrames
        tasks: list[tuple[Node, int, Node]] = []
        for stack in stacks:
            if nodes.is_end(stack):
                continue
            frame, rest = nodes.split(stack)
            if nodes.is_bag(frame):
                tasks.append((frame, 0, rest))
            else:
                tasks.append((frame, *nodes.unit(stack, self._units.is_wide)))
        return tasks

    def _advance_bag(
        self, bag: Node, rest: Node, entry: Entry, out: dict[int, Tokens]
    ) -> list[tuple[Node, Entry]]:
        """Runs through a bag up to its next member; returns what comes then and where it is entered."""
        nodes = self._nodes
        after: list[tuple[Node, Entry]] = []
        if bag.nullable and not nodes.is_end(rest):
            after.append((rest, entry))
        between = nodes.next_member(bag, rest)
        if between is not None:
            if not nodes.is_end(between):
                after.append((between, entry))
            return after
        if not isinstance(bag, BagNode):
            raise TooManyFrames
        unit = self._units.bags.unit(bag.pick, entry)
        if unit is None:
            raise TooManyFrames
        allowed = nodes.allowed(bag)
        for tags, tokens in unit.groups:
            if tags & allowed and not tokens.is_empty:
                out[id(tokens)] = tokens
        for member, node, places in unit.known:
            if member & allowed:
                follows = nodes.behind_member(bag, member, node, rest)
                if follows is not None and not nodes.is_end(follows):
                    after.append((follows, places))
        return after

    def forget(self) -> None:
        """Drops everything remembered; it is computed again when needed."""
        self._units.forget()
        self._tasks.clear()
        self.generation += 1
