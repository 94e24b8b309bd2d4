"""The strings behind several nodes of a trie as one trie."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from deepinfer.grammar.bitmask import run_starts
from deepinfer.grammar.slices import Residue
from deepinfer.grammar.trie import TokenTrie

__all__ = ["strings_behind"]

Int32Array = NDArray[np.int32]


def strings_behind(trie: TokenTrie, nodes: Sequence[int]) -> Residue:
    """What follows some nodes, merged level by level.

    Args:
        trie: The trie.
        nodes: Its nodes, distinct.

    Returns:
        The strings behind the nodes without the ways to them, with the ranks of the strings of `trie` that each stands
        for. What ends at a node itself is left out.
    """
    at = np.asarray(nodes, dtype=np.int32)
    group = np.zeros(len(at), dtype=np.int32)
    labels, parents = [np.zeros(1, np.uint8)], [np.zeros(1, np.int32)]
    starts = [0, 1]
    end_group: list[Int32Array] = []
    end_rank: list[Int32Array] = []
    while True:
        low = trie.first_child[at]
        count = trie.first_child[at + 1] - low
        total = int(count.sum())
        if not total:
            break
        ends = np.cumsum(count, dtype=np.int32)
        child = np.repeat(low - ends + count, count) + np.arange(total, dtype=np.int32)
        key = np.repeat(group, count).astype(np.int64) * 256 + trie.label_bytes[child]
        order = np.argsort(key, kind="stable")
        new = run_starts(key[order])
        distinct = key[order[new]]
        place = np.empty(total, dtype=np.int32)
        place[order] = np.cumsum(new, dtype=np.int32) - 1
        base = starts[-1]
        labels.append((distinct & 255).astype(np.uint8))
        parents.append((distinct >> 8).astype(np.int32))
        starts.append(base + len(distinct))
        at, group = child, place + np.int32(base)
        rank = trie.rank[at]
        whole = rank >= 0
        end_group.append(group[whole])
        end_rank.append(rank[whole])
    label, parent = np.concatenate(labels), np.concatenate(parents)
    size = len(label)
    nothing = np.zeros(0, np.int32)
    groups = np.concatenate([nothing, *end_group])
    ranks = np.concatenate([nothing, *end_rank])
    is_end = np.zeros(size, dtype=np.int32)
    is_end[groups] = 1
    below = is_end.copy()
    for level in range(len(starts) - 2, 0, -1):
        first, here = starts[level - 1], slice(starts[level], starts[level + 1])
        sums = np.bincount(parent[here] - first, below[here], starts[level] - first)
        below[first : starts[level]] += sums.astype(np.int32)
    first_child = np.ones(size + 1, dtype=np.int32)
    first_child[1:] += np.cumsum(np.bincount(parent[1:], minlength=size)).astype(np.int32)
    # The strings below a node come behind its own and those below its elder siblings.
    rank_low = np.zeros(size, dtype=np.int32)
    for level in range(1, len(starts) - 1):
        here = slice(starts[level], starts[level + 1])
        before = np.cumsum(below[here]) - below[here]
        above = parent[here]
        offset = before - before[first_child[above] - starts[level]]
        rank_low[here] = rank_low[above] + is_end[above] + offset
    order = np.argsort(rank_low[groups], kind="stable")
    strings = np.bincount(rank_low[groups], minlength=int(below[0]))
    return Residue(
        TokenTrie(
            label,
            parent,
            first_child,
            np.where(is_end > 0, rank_low, -1).astype(np.int32),
            rank_low,
            rank_low + below,
            np.asarray(starts, dtype=np.int32),
        ),
        np.concatenate([[0], np.cumsum(strings)]).astype(np.int32),
        ranks[order],
    )
