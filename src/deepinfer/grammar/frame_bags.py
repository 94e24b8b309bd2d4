"""What the members of a bag do with the tokens of a vocabulary until it is known which one has begun; remembered."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from deepinfer.grammar.frame_entries import Entry, EntryStore, Keep, Places, WalkSpace
from deepinfer.grammar.frame_nodes import FrameNodes
from deepinfer.grammar.frame_tokens import Tokens, TokenSets
from deepinfer.grammar.frame_walk import Found
from deepinfer.grammar.mask_slices import SliceTests
from deepinfer.grammar.mask_splits import MIN_STRINGS
from deepinfer.grammar.mask_states import StateRows
from deepinfer.grammar.nodes import Node
from deepinfer.grammar.slices import Slice
from deepinfer.grammar.vocab import TokenVocab

__all__ = ["BagUnit", "BagUnits"]

MAX_BAG_NODES = 1500
"""Nodes at which the members of a bag may still be several; with more the state is walked as a whole."""


@dataclass(eq=False, slots=True)
class BagUnit:
    """What the members of a bag do with the tokens from one entry, up to where the member is known.

    Attributes:
        groups: Tokens by the members that may be the one that began, as bits.
        known: (member as a bit, what is left of it, where it became known).
    """

    groups: list[tuple[int, Tokens]] = field(default_factory=list)
    known: list[tuple[int, Node, Entry]] = field(default_factory=list)


class BagUnits:
    """Walks the members of bags, each once for each entry.

    A member is a whole expression, say a key, a colon and a value. Members are walked together as long as a token may belong
    to several, and then each goes its own way. The walk does not look at which members a bag still allows, so bags in
    all states share it.

    Args:
        vocab: The vocabulary.
        states: The automaton's transitions.
        nodes: Its states taken apart.
        entries: Where frames are entered.
        sets: Makes sets of tokens.
        main: The vocabulary's trie.
        text: The slice of string text, and its tests.
    """

    def __init__(
        self,
        vocab: TokenVocab,
        states: StateRows,
        nodes: FrameNodes,
        entries: EntryStore,
        sets: TokenSets,
        main: WalkSpace,
        text: tuple[Slice, SliceTests],
    ) -> None:
        self._vocab = vocab
        self._states = states
        self._nodes = nodes
        self._entries = entries
        self._sets = sets
        self._main = main
        self._tests = [text]
        self._units: dict[tuple[int, Entry], BagUnit | None] = {}
        self.size_bytes = 0

    def unit(self, pick: Node, entry: Entry) -> BagUnit | None:
        """The members of a bag from an entry; None where they cannot be told apart for too long."""
        key = (pick.uid, entry)
        if key in self._units:
            return self._units[key]
        state = self._nodes.state(pick)
        groups: dict[int, Found] = {}
        known: dict[tuple[int, int], tuple[int, Node, Places]] = {}
        text, tests = self._tests[0]
        for space, nodes, keep in entry.segments:
            if space.is_main and nodes == (0,) and text.outside is not None:
                # String text may fit whatever it is, so that only tokens that hold something else need a look.
                reached = self._nodes.head(state)
                if tests.may_hold(state) and tests.loops(state) and not reached.ends:
                    members, rests = reached.tags, text.rests
                else:
                    rests = text.outside
                    members = self._nodes.endless_members(
                        pick, lambda at: tests.may_hold(at) and tests.loops(at)
                    )
                if members:
                    group = groups.setdefault(members, Found())
                    group.words.append(self._sets.slice_words(text, keep))
                    space = self._main.inner(rests)
            if not self._walk_bag(space, keep, [(node, state) for node in nodes], groups, known):
                self._units[key] = None
                return None
        unit = BagUnit()
        for tags, found in groups.items():
            unit.groups.append((tags, self._sets.tokens(found, found.words)))
        for member, node, places in known.values():
            where = self._entries.of(places)
            if where is not None:
                unit.known.append((member, node, where))
        self._units[key] = unit
        self.size_bytes += 2000 + sum(tokens.size_bytes for _, tokens in unit.groups)
        return unit

    def _walk_bag(
        self,
        space: WalkSpace,
        keep: Keep | None,
        frontier: list[tuple[int, int]],
        groups: dict[int, Found],
        known: dict[tuple[int, int], tuple[int, Node, Places]],
    ) -> bool:
        trie = space.trie
        children, labels, ranks = trie.children, trie.labels, trie.ranks
        classes, head = self._states.classes, self._nodes.head
        found: dict[int, list[int]] = {}
        loops: dict[int, list[int]] = {}
        wide_entry = space.is_main
        visited = 0
        while frontier:
            out: list[tuple[int, int]] = []
            for node, state in frontier:
                low, high = children[node], children[node + 1]
                if low == high:
                    continue
                row, live = self._states.moves_of(state)
                if not node:
                    pairs = self._bag_root(space, keep, row, found, known)
                elif live is not None and len(live) <= high - low:
                    pairs = [(labels.find(byte, low, high), after) for byte, after in live]
                else:
                    pairs = [(child, row[classes[labels[child]]]) for child in range(low, high)]
                for child, after in pairs:
                    if child < 0 or not after:
                        continue
                    reached = head(after)
                    tags = reached.tags
                    if ranks[child] >= 0:
                        found.setdefault(tags, []).append(ranks[child])
                    if children[child] == children[child + 1]:
                        continue
                    if tags & (tags - 1) and wide_entry:
                        settled = self._settled(labels[child], node, child, after)
                        if settled:
                            loops.setdefault(settled, []).append(child)
                            continue
                    ends = tags if not tags & (tags - 1) else reached.ends
                    while ends:
                        member = ends & -ends
                        ends ^= member
                        key = (member, reached.node.uid)
                        entry = known.get(key)
                        if entry is None:
                            entry = known[key] = (member, reached.node, Places())
                        entry[2].at(space, keep).append(child)
                    if tags & (tags - 1):
                        out.append((child, after))
            frontier = out
            visited += len(out)
            if visited > MAX_BAG_NODES:
                return False
        for tags, some in found.items():
            groups.setdefault(tags, Found()).tokens.append(
                (space, keep, np.array(some, dtype=np.int32))
            )
        # Below these nodes the members stay as many as they are until something else than string text comes.
        text = self._tests[0][0]
        for state, nodes in loops.items():
            below = self._sets.below(nodes, keep)
            group = groups.setdefault(head(state).tags, Found())
            group.words.append(self._sets.slice_words(text, below))
            rests = self._main.inner(text.rests)
            if not self._walk_bag(rests, below, [(0, state)], groups, known):
                return False
        return True

    def _bag_root(
        self,
        space: WalkSpace,
        keep: Keep | None,
        row: tuple[int, ...],
        found: dict[int, list[int]],
        known: dict[tuple[int, int], tuple[int, Node, Places]],
    ) -> list[tuple[int, int]]:
        """The first step of a bag's walk: whole classes of bytes after which one member is left.

        Returns:
            The (node, state) that are left to look at.
        """
        out: list[tuple[int, int]] = []
        for after, (nodes, inner, ranks) in zip(
            row, space.first_step(self._states.classes), strict=True
        ):
            if not after or not nodes:
                continue
            reached = self._nodes.head(after)
            if reached.tags & (reached.tags - 1):
                out += [(node, after) for node in nodes]
                continue
            if ranks:
                found.setdefault(reached.tags, []).extend(ranks)
            if inner:
                key = (reached.tags, reached.node.uid)
                entry = known.get(key)
                if entry is None:
                    entry = known[key] = (reached.tags, reached.node, Places())
                entry[2].at(space, keep).extend(inner)
        return out

    def _settled(self, byte: int, above: int, node: int, state: int) -> int:
        """A state that string text leads back to itself and whose tokens are those below a node; 0 if there is none.

        The way to the node is whole characters, or whole ones and the first byte of another.
        """
        trie, whole = self._main.trie, self._vocab.whole_text
        if trie.rank_highs[node] - trie.rank_lows[node] < MIN_STRINGS or not whole[above]:
            return 0
        tests = self._tests[0][1]
        target = state if whole[node] else tests.settles(byte, state)
        if not target or not tests.may_hold(target) or not tests.loops(target):
            return 0
        reached = self._nodes.head(target)
        return 0 if reached.ends or reached.tags != self._nodes.head(state).tags else target

    def forget(self) -> None:
        """Drops everything remembered; it is computed again when needed."""
        self._units.clear()
        self.size_bytes = 0
