"""A state's tokens from those of a state that most bytes lead to: only where the two differ is walked.

Before a key that must not be one of a few, or behind the first characters of what must occur somewhere in a string, nearly
every byte leads to one state, the inside of the string. From there on the tokens are known.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from deepinfer.grammar.frame_loops import StateLoops
from deepinfer.grammar.frame_nodes import FrameNodes
from deepinfer.grammar.mask_states import StateRows
from deepinfer.grammar.trie import TokenTrie

__all__ = ["Split", "compare"]

MAX_NODES = 1000
"""Nodes that are compared before two states count as too different."""

MAX_GONE = 20_000
"""Strings that are walked again."""

MAX_PAIRS = 50
"""Pairs of states that are compared."""


@dataclass(slots=True)
class Split:
    """Where the tokens of a state are not those of another.

    Attributes:
        gone: Nodes whose subtrees, the string that ends at the node included, are no longer what they were.
        nodes: Nodes from which the state is to be walked on, each below one of `gone` or where the other state is dead.
        states: Their states.
    """

    gone: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)


def compare(
    trie: TokenTrie,
    states: StateRows,
    nodes: FrameNodes,
    loops: StateLoops,
    state: int,
    base: int,
) -> Split | None:
    """Walks two states side by side wherever they lead to different ones.

    Args:
        trie: The trie.
        states: The automaton's transitions.
        nodes: Its states taken apart.
        loops: Which states lead back to themselves: those are not compared but walked.
        state: The state whose tokens are asked for, at the root of the trie.
        base: The state whose tokens are known.

    Returns:
        Where they differ; None when that is at too many nodes.
    """
    out = Split()
    find, children, labels, classes = trie.labels.find, trie.children, trie.labels, states.classes
    members, moves, left = states.members, states.moves_of, nodes.left
    differing: dict[tuple[int, int], bytes] = {}
    stack = [(0, state, base)]
    count = num_gone = 0
    while stack:
        node, one, other = stack.pop()
        low, high = children[node], children[node + 1]
        row, against = moves(one)[0], moves(other)[0]
        bytes_of = differing.get((one, other))
        if bytes_of is None:
            if len(differing) == MAX_PAIRS:
                return None
            bytes_of = differing[one, other] = bytes(
                [
                    byte
                    for index, (after, expected) in enumerate(zip(row, against, strict=True))
                    if after != expected
                    for byte in members[index]
                ]
            )
        if len(bytes_of) <= high - low:
            below = [child for byte in bytes_of if (child := find(byte, low, high)) >= 0]
        else:
            below = [child for child in range(low, high) if labels[child] in bytes_of]
        count += len(below)
        if count > MAX_NODES:
            return None
        for child in below:
            index = classes[labels[child]]
            after, expected = row[index], against[index]
            if after and expected and not left(after) and not left(expected):
                if children[child] == children[child + 1]:
                    continue
                if not loops.bytes_of(after):
                    stack.append((child, after, expected))
                    continue
            if expected:
                out.gone.append(child)
                num_gone += trie.rank_highs[child] - trie.rank_lows[child]
                if num_gone > MAX_GONE:
                    return None
            if after:
                out.nodes.append(child)
                out.states.append(after)
    return out
