"""Mask rows put together from the walks of single frames, which are shared by all stacks that hold them.

The bytes of a token run through the top frame of the stack, perhaps leave it for the next one, and so on. What a frame
does with the tokens depends on the frame and on the places in the tries where it is entered, and on nothing else. So a
frame's walk is done once for each such pair and remembered: the white space behind every comma, the inside of every
string, and the members of an object whatever came before are walked once in a grammar.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer.grammar.automaton import Automaton
from deepinfer.grammar.bitmask import MaskRow
from deepinfer.grammar.finite import Branch
from deepinfer.grammar.first_bytes import first_bytes
from deepinfer.grammar.frame_entries import Entry
from deepinfer.grammar.frame_nodes import BAG, EXCEPT, PARTS, REPEAT, STRINGS, UNIT, Task
from deepinfer.grammar.frame_tokens import Tokens
from deepinfer.grammar.frame_units import FrameUnits
from deepinfer.grammar.nodes import EPS, BagNode, Node
from deepinfer.grammar.vocab import TokenVocab

__all__ = ["FrameRows", "TooManyFrames"]

Int32Array = NDArray[np.int32]

MAX_TASKS = 400
"""Frames that one row may run through, those of the alternatives within it included; one that is entered at many places,
or that was not walked before, counts for more.
"""

PLACES_A_TASK, TASKS_A_WALK, WALKS_A_MERGE = 50, 8, 10

MAX_FAILURES = 3
"""Rows of a recursive grammar after which its states are no more taken apart."""

MAX_NESTING = 24
"""Frames within one another that are taken apart."""

EVERY = -1
"""All members of bags."""


class TooManyFrames(Exception):
    """A state runs through so many frames that it is better walked as a whole."""


@dataclass(eq=False, slots=True)
class Piece:
    """What the frames above some end do with the tokens from one entry.

    Attributes:
        tokens: Those that end inside of them.
        ids: More of them, as tuples of ids.
        ends: Where the end is reached: (member of the bag whose end it is, as a bit; 0 for an unknown rest; entry).
    """

    tokens: tuple[Tokens, ...]
    ids: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, Entry], ...]


class _Run:
    """What one run through frames has found, and what is left to do."""

    __slots__ = ("agenda", "ends", "ids", "tokens")

    def __init__(self) -> None:
        self.agenda: dict[int, tuple[Node, list[Entry]]] = {}
        self.tokens: dict[int, Tokens] = {}
        self.ids: list[tuple[int, ...]] = []
        self.ends: dict[int, list[Entry]] = {}

    def push(self, node: Node, entry: Entry) -> None:
        known = self.agenda.get(node.uid)
        if known is None:
            self.agenda[node.uid] = (node, [entry])
        else:
            known[1].append(entry)

    def take(self, piece: Piece) -> None:
        for tokens in piece.tokens:
            self.tokens[id(tokens)] = tokens
        self.ids += piece.ids


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
        self._tasks: dict[int, list[Task]] = {}
        self._firsts: dict[int, int] = {}
        self._pieces: dict[tuple[int, Entry, int], Piece] = {}
        self._choices: dict[tuple[int, Entry, int], Piece] = {}
        self._rows: dict[tuple[int, int] | None, list[Tokens]] = {}
        self._id_sets: dict[frozenset[int], Tokens] = {}
        self._id_groups: dict[tuple[int, ...], tuple[list[tuple[int, ...]], Tokens]] = {}
        self._nesting = self._num_tasks = self._num_failures = 0
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
        if self._units.is_full:
            self.forget()
        with self._automaton.at_work:
            self._nesting = 0
            self._num_tasks = -self._work()
            node = self._nodes.node(state)
            if node.recursive and self._num_failures > MAX_FAILURES:
                raise TooManyFrames
            try:
                place = self._place(node)
                out = self._rows.get(place)
                if out is not None:
                    return out
                found = self._run([node], self._units.root, EVERY)
            except TooManyFrames:
                self._num_failures += 1
                if node.recursive:
                    raise
                return [self._units.unit(state, self._units.root).tokens]
        out = list(found.tokens)
        if found.ids:
            out.append(self._tokens(found.ids))
        if place is not None:
            self._rows[place] = out
        return out

    def _place(self, node: Node) -> tuple[int, int] | None:
        """A name of what is walked for a node that is one frame over a rest: counts that no token tells apart share it."""
        tasks = self._tasks.get(node.uid)
        if tasks is None:
            tasks = self._tasks[node.uid] = self._cut(node)
        if len(tasks) == 1 and tasks[0][0] == UNIT:
            return tasks[0][1], tasks[0][2].uid  # type: ignore[return-value]
        return None

    def _tokens(self, groups: Sequence[tuple[int, ...]]) -> Tokens:
        """The tokens with some ids: one object for equal sets of ids."""
        distinct = {id(group): group for group in groups}
        name = tuple(sorted(distinct))
        known = self._id_groups.get(name)
        if known is None:
            ids = frozenset().union(*distinct.values())
            tokens = self._id_sets.get(ids)
            if tokens is None:
                tokens = self._id_sets[ids] = Tokens.of_ids(ids)
            # The groups are kept, so that no other one takes their names.
            known = self._id_groups[name] = (list(distinct.values()), tokens)
        return known[1]

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

    def _run(self, nodes: list[Node], entry: Entry, members: int) -> Piece:
        """Runs through the frames of some nodes up to their end.

        Args:
            nodes: The nodes.
            entry: Where they are entered.
            members: Members of bags whose ends count, as bits.
        """
        run, units, known = _Run(), self._units, self._tasks
        entries_of, strings_of = units.entries, units.strings.of
        for node in nodes:
            run.push(node, entry)
        agenda = run.agenda
        while agenda:
            node, entries = agenda.pop(next(iter(agenda)))
            entry = entries[0] if len(entries) == 1 else entries_of.merged(entries)
            joined = entries_of.known(entry)
            if joined is None:
                if not self._first(node) & entries_of.labels(entry):
                    continue  # none of the strings goes on
                joined = entries_of.joined(entry)
            entry = joined
            self._num_tasks += 1 + entry.num_nodes // PLACES_A_TASK
            if self._num_tasks + self._work() > MAX_TASKS:
                raise TooManyFrames
            tasks = known.get(node.uid)
            if tasks is None:
                tasks = known[node.uid] = self._cut(node)
            for way, what, rest, stack in tasks:
                exits: Entry | None
                if stack.tags and not stack.tags & members:
                    continue
                if way == STRINGS:
                    ids, exits = strings_of(what, entry)  # type: ignore[arg-type]
                    if ids:
                        run.ids.append(ids)
                elif way == UNIT:
                    unit = units.unit(what, entry)  # type: ignore[arg-type]
                    if not unit.tokens.is_empty:
                        run.tokens[id(unit.tokens)] = unit.tokens
                    exits = unit.exits
                elif way == PARTS:
                    exits = self._through(what, entry, run)  # type: ignore[arg-type]
                elif way == REPEAT:
                    if what.nullable and rest.kind > EPS:  # type: ignore[union-attr]
                        run.push(rest, entry)
                    run.push(self._nodes.copy(what, rest), entry)  # type: ignore[arg-type]
                    continue
                elif way == BAG:
                    self._through_bag(what, rest, entry, run)  # type: ignore[arg-type]
                    continue
                elif way == EXCEPT:
                    self._through_except(what, stack, entry, members, run)  # type: ignore[arg-type]
                    continue
                else:
                    run.ends.setdefault(stack.tags, []).append(entry)
                    continue
                if exits is not None and rest.kind > EPS:  # a byte can follow
                    run.push(rest, exits)
        ends = tuple([(tag, entries_of.merged(some)) for tag, some in run.ends.items()])
        return Piece(tuple(run.tokens.values()), tuple(run.ids), ends)

    def _first(self, node: Node) -> int:
        """Bytes with which the strings of a node may begin, as bits, perhaps more."""
        found = self._firsts.get(node.uid)
        if found is None:
            found = self._firsts[node.uid] = first_bytes(node, MAX_NESTING)
        return found

    def _work(self) -> int:
        """What was worked out so far rather than found, in tasks."""
        units = self._units
        return TASKS_A_WALK * (units.num_walks + WALKS_A_MERGE * units.entries.num_merged)

    def _cut(self, node: Node) -> list[Task]:
        nodes = self._nodes
        task = nodes.quick_task(node)
        if task is not None:
            return [task]
        stacks = nodes.stacks(node)
        if not stacks:
            raise TooManyFrames
        return [nodes.task(stack) for stack in stacks if not nodes.is_end(stack)]

    def _piece(self, name: int, nodes: list[Node], entry: Entry, members: int) -> Piece:
        """What some nodes with a known end do, remembered under the name of a node."""
        key = (name, entry, members)
        found = self._pieces.get(key)
        if found is None:
            self._nesting += 1
            if self._nesting > MAX_NESTING:
                raise TooManyFrames
            found = self._pieces[key] = self._run(nodes, entry, members)
            self._nesting -= 1
        return found

    def _through(self, frame: Node, entry: Entry, run: _Run) -> Entry | None:
        """Runs through the alternatives of a frame; returns where it is left."""
        key = (frame.uid, entry, 0)
        piece = self._pieces.get(key)
        if piece is None:
            piece = self._piece(frame.uid, self._nodes.parts(frame), entry, 0)
        run.take(piece)
        return piece.ends[0][1] if piece.ends else None

    def _through_bag(self, bag: BagNode, rest: Node, entry: Entry, run: _Run) -> None:
        """Runs through a bag up to the end of its next member."""
        nodes = self._nodes
        if bag.nullable and not nodes.is_end(rest):
            run.push(rest, entry)
        pick = nodes.pick(bag)
        allowed = pick.tags & nodes.allowed(bag)
        if not allowed:
            return
        separator = nodes.separator(bag)
        if separator is not None:
            if not nodes.is_live(separator):
                return
            piece = self._piece(separator.uid, [nodes.push_unknown(separator)], entry, EVERY)
            run.take(piece)
            if not piece.ends:
                return
            entry = self._units.entries.joined(piece.ends[0][1])
        key = (pick.uid, entry, allowed)
        choice = self._choices.get(key)
        if choice is None:
            choice = self._choices[key] = self._choose(pick, entry, allowed)
        run.take(choice)
        for member, exits in choice.ends:
            follows = nodes.behind_member(bag, member, rest)
            if follows is not None and not nodes.is_end(follows):
                run.push(follows, exits)

    def _choose(self, pick: Node, entry: Entry, allowed: int) -> Piece:
        """What the allowed members of a bag do, each up to its end."""
        run = _Run()
        ends: list[tuple[int, Entry]] = []
        keys, others = self._nodes.members(pick)
        left = [(part, entry) for part in others]
        if keys is not None:
            spelled, over = self._units.strings.keys(keys, entry)
            for members, ids in spelled:
                if members & allowed:
                    run.ids.append(ids)
            left += [(rest, exits) for number, exits in over for rest in keys.rests[number]]
        for part, start in left:
            members = part.tags & allowed
            if members:
                piece = self._piece(part.uid, [part], start, members)
                run.take(piece)
                ends += piece.ends
        return Piece(tuple(run.tokens.values()), tuple(run.ids), tuple(ends))

    def _through_except(
        self, strings: Branch, stack: Node, entry: Entry, members: int, run: _Run
    ) -> None:
        """Runs through a repeat without some strings, and what follows it."""
        plain, closing = self._nodes.without(stack)
        banned = self._units.strings.behind_strings(strings, closing, entry)
        if banned is None:
            run.push(plain, entry)
        elif stack.tags and banned.is_exact:
            piece = self._piece(plain.uid, [plain], entry, members)
            tokens = self._units.strings.without(piece.tokens, piece.ids, banned)
            run.tokens[id(tokens)] = tokens
            for member, exits in piece.ends:
                left = self._units.entries.restricted(exits, banned.others)
                run.ends.setdefault(member, []).append(left)
        else:
            state, rest = self._nodes.whole(stack)
            unit = self._units.unit(state, entry)
            if not unit.tokens.is_empty:
                run.tokens[id(unit.tokens)] = unit.tokens
            if unit.exits is not None and not self._nodes.is_end(rest):
                run.push(rest, unit.exits)

    def forget(self) -> None:
        """Drops everything remembered; it is computed again when needed."""
        self._units.forget()
        for kept in (self._tasks, self._pieces, self._choices, self._id_sets, self._id_groups):
            kept.clear()
        self.generation += 1
