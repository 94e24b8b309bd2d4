"""How the tokens of one state differ from those of another."""

from __future__ import annotations

from dataclasses import dataclass, field

from deepinfer.grammar.mask_states import StateRows
from deepinfer.grammar.trie import TokenTrie

__all__ = ["Difference", "difference"]

MAX_PAIRS = 1500
"""Nodes that are compared before the two states count as too different."""


@dataclass
class Difference:
    """What turns the tokens of one state into those of another.

    Attributes:
        cleared: Ranges of ranks that are not live, each (low, high).
        added: Ranks that are live; some may lie in a cleared range of an ancestor, never the other way round.
    """

    cleared: list[tuple[int, int]] = field(default_factory=list)
    added: list[int] = field(default_factory=list)


def difference(trie: TokenTrie, states: StateRows, state: int, base: int) -> Difference | None:
    """Walks two states side by side wherever they lead to different ones.

    Args:
        trie: The vocabulary's trie.
        states: The automaton's transitions.
        state: The state whose tokens are asked for.
        base: The state whose tokens are known.

    Returns:
        What to clear in the tokens of `base` and then to add, or None when the states differ at too many nodes.

    Raises:
        NeedsDepth: A transition depends on frames that are cut off.
    """
    out = Difference()
    find, children, classes = trie.labels.find, trie.children, states.classes
    stack = [(0, state, base)]
    count = 0
    while stack:
        node, one, other = stack.pop()
        low, high = children[node], children[node + 1]
        if low == high:
            continue
        row = states.moves(one)[0]
        against = states.moves(other)[0] if other else (0,) * states.num_classes
        differing = [
            index
            for index, (after, expected) in enumerate(zip(row, against, strict=True))
            if after != expected
        ]
        if not differing:
            continue
        bytes_of = [byte for index in differing for byte in states.members[index]]
        if len(bytes_of) <= high - low:
            nodes = [found for byte in bytes_of if (found := find(byte, low, high)) >= 0]
        else:
            wanted = set(bytes_of)
            nodes = [child for child in range(low, high) if trie.labels[child] in wanted]
        count += len(nodes)
        if count > MAX_PAIRS:
            return None
        for child in nodes:
            index = classes[trie.labels[child]]
            after, expected = row[index], against[index]
            if not after:
                out.cleared.append((int(trie.rank_low[child]), int(trie.rank_high[child])))
                continue
            if not expected and trie.ranks[child] >= 0:
                out.added.append(trie.ranks[child])
            stack.append((child, after, expected))
    return out
