"""Subtrees merged into one trie, against building it from the strings."""

from __future__ import annotations

import random

import pytest

from deepinfer.grammar.slices import residue_of
from deepinfer.grammar.trie import TokenTrie
from deepinfer.grammar.trie_merge import strings_behind


def strings(seed: int) -> list[bytes]:
    rng = random.Random(seed)
    return sorted({bytes(rng.choices(b"abc", k=rng.randint(1, 6))) for _ in range(200)})


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("count", [1, 2, 7, 30])
def test_equals_the_trie_of_the_strings(seed, count):
    texts = strings(seed)
    trie = TokenTrie.build(texts)
    nodes = sorted(random.Random(seed).sample(range(1, len(trie)), count))
    ways = {trie.find(t[:n]): t[:n] for t in texts for n in range(1, len(t) + 1)}
    pairs = [
        (texts[rank][len(ways[node]) :], rank)
        for node in nodes
        for rank in range(trie.rank_lows[node], trie.rank_highs[node])
        if texts[rank] != ways[node]
    ]
    merged = strings_behind(trie, nodes)
    if not pairs:
        assert len(merged.trie) == 1
        return
    built = residue_of(pairs)
    for name, array in built.trie.arrays().items():
        assert array.tolist() == merged.trie.arrays()[name].tolist(), name
    assert built.offset.tolist() == merged.offset.tolist()
    for place in range(len(built.offset) - 1):
        here = slice(built.offset[place], built.offset[place + 1])
        assert sorted(built.ranks[here].tolist()) == sorted(merged.ranks[here].tolist())


def test_nothing_behind_leaves():
    trie = TokenTrie.build([b"a", b"b"])
    assert len(strings_behind(trie, [1, 2]).trie) == 1
