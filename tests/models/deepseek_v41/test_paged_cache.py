"""Pools in blocks: the same bits as one block a slot, whatever the block tables, and nothing else is touched."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from deepinfer.core.errors import ConfigError, InvariantBroken
from deepinfer.core.plan import BlockUpdate
from deepinfer.models.deepseek_v41 import ForwardBatch, SlotCache
from deepinfer.models.deepseek_v41.block_table import BlockTable, flat_index

BLOCK = 8


class Blocks:
    """Gives a slot blocks as it grows, in a random order."""

    def __init__(self, cache: SlotCache, seed: int = 0) -> None:
        self.cache = cache
        self.free = list(range(cache.num_blocks))
        random.Random(seed).shuffle(self.free)

    def grow(self, slot: int, tokens: int) -> None:
        held = self.cache.table.counts[slot]
        wanted = -(-tokens // self.cache.block_size) - held
        blocks = tuple(self.free.pop() for _ in range(max(wanted, 0)))
        self.cache.apply_updates([BlockUpdate(slot=slot, first=held, blocks=blocks)])


def random_steps(seed: int, slots: int, length: int, most: int):
    """Segments of ragged steps with some wrong tokens, and what is kept of each."""
    rng = random.Random(seed)
    ids = [[rng.randrange(159) for _ in range(length)] for _ in range(slots)]
    done = [0] * slots
    while min(done) < length:
        segments, kept = [], {}
        for slot in rng.sample(range(slots), rng.randint(1, slots)):
            right = min(rng.choice([1, 1, 2, 5, most - 3]), length - done[slot])
            if right:
                wrong = [rng.randrange(159) for _ in range(rng.randint(0, 3))]
                part = ids[slot][done[slot] : done[slot] + right] + wrong
                segments.append((slot, done[slot], part))
                kept[slot] = done[slot] + right
        if segments:
            yield segments, kept
        for slot, end in kept.items():
            done[slot] = end


@pytest.mark.parametrize("rounding", ["none", "full"])
@pytest.mark.parametrize("seed", range(3))
def test_paged_equals_contiguous(seed, rounding, random_model, small_config) -> None:
    model = random_model(small_config(), rounding)
    plain = model.new_cache(3, 72, 24)
    paged = model.new_cache(3, 72, 24, num_blocks=40, block_size=BLOCK)
    blocks = Blocks(paged, seed)
    for segments, kept in random_steps(seed, 3, 64, 24):
        batch = ForwardBatch.from_segments(segments)
        for segment in batch.segments:
            blocks.grow(segment.slot, segment.end)
        wanted, found = model(batch, plain), model(batch, paged)
        assert torch.equal(found.hidden, wanted.hidden)
        assert torch.equal(found.features, wanted.features)
        for slot, end in kept.items():
            plain.truncate(slot, end)
            paged.truncate(slot, end)


def test_paged_golden(golden_model, golden, golden_ids) -> None:
    cache = golden_model.new_cache(2, 48, 16, num_blocks=9, block_size=6)
    blocks, at, rows = Blocks(cache, 5), 0, []
    for size in (11, 1, 1, 7, 13):
        blocks.grow(1, at + size)
        part = golden_ids[at : at + size].tolist()
        out = golden_model(ForwardBatch.from_segments([(1, at, part)]), cache)
        rows.append(golden_model.compute_logits(out.hidden))
        at += size
    assert (torch.cat(rows) - golden["plain.logits.0"]).abs().max() < 2e-4


def test_only_own_blocks_are_read_and_written(small_model) -> None:
    """NaN in every foreign block, and in what lies behind the tokens of the own ones, reaches nothing."""
    ids = [(7 * i) % 150 for i in range(30)]
    clean = small_model.new_cache(1, 64, 32, num_blocks=16, block_size=BLOCK)
    dirty = small_model.new_cache(1, 64, 32, num_blocks=16, block_size=BLOCK)
    for tensor in (*dirty.pools.values(), *dirty.index_keys.values()):
        tensor.fill_(torch.nan)
    update = BlockUpdate(slot=0, first=0, blocks=(3, 11, 0, 15))
    outs = []
    for cache in (clean, dirty):
        cache.apply_updates([update])
        for start, end in ((0, 1), (1, 17), (17, 18), (18, 30)):
            out = small_model(ForwardBatch.from_segments([(0, start, ids[start:end])]), cache)
            outs.append(out.hidden)
    for one, other in zip(outs[:4], outs[4:], strict=True):
        assert torch.equal(one, other)
    foreign = sorted(set(range(16)) - set(update.blocks))
    for tensor in (*dirty.pools.values(), *dirty.index_keys.values()):
        assert tensor[foreign].isnan().all()


def test_padding_of_shorter_requests_reads_nothing(small_model) -> None:
    """Beside a longer request, the list of a short one is padded; NaN in its unwritten blocks stays there."""
    outs = []
    for fill in (0.0, torch.nan):
        cache = small_model.new_cache(3, 64, 32, num_blocks=16, block_size=BLOCK)
        for tensor in (*cache.pools.values(), *cache.index_keys.values()):
            tensor.fill_(fill)
        updates = [(0, (3, 11, 0, 15)), (1, (5,)), (2, (7,))]
        cache.apply_updates(BlockUpdate(slot=s, first=0, blocks=b) for s, b in updates)
        steps = [[(0, 0, [7] * 20)], [(0, 20, [3]), (1, 0, [9]), (2, 0, [4, 5])]]
        outs += [small_model(ForwardBatch.from_segments(part), cache).hidden for part in steps]
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[1], outs[3])


def test_blocks_and_tables_outlive_a_slot(small_model) -> None:
    cache = small_model.new_cache(2, 64, 32, num_blocks=16, block_size=BLOCK)
    cache.apply_updates([BlockUpdate(slot=0, first=0, blocks=(5, 2))])
    small_model(ForwardBatch.from_segments([(0, 0, list(range(16)))]), cache)
    before = {s: pool[[5, 2]].clone() for s, pool in cache.pools.items()}
    cache.reset(0)
    for source, pool in cache.pools.items():
        assert torch.equal(pool[[5, 2]], before[source])
        assert pool[5].abs().sum() > 0
    assert cache.table.counts == [2, 0]
    assert cache.windows[:, 0].abs().sum() == 0
    cache.apply_updates([BlockUpdate(slot=0, first=0, blocks=(9,))])
    assert cache.table.counts == [1, 0]
    assert cache.table.host[0, 0] == 9


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (BlockUpdate(slot=2, first=0, blocks=(1,)), "slots 0 to 1"),
        (BlockUpdate(slot=0, first=2, blocks=(1,)), "slot 0 has 1 of at most 4"),
        (BlockUpdate(slot=0, first=1, blocks=(1, 2, 3, 4)), "slot 0 has 1 of at most 4"),
        (BlockUpdate(slot=0, first=1, blocks=(16,)), "blocks are 0 to 15"),
        (BlockUpdate(slot=0, first=1, blocks=(3, -1)), "blocks are 0 to 15"),
    ],
)
def test_updates_that_do_not_fit(update, message, small_model) -> None:
    cache = small_model.new_cache(2, 32, 16, num_blocks=16, block_size=BLOCK)
    cache.apply_updates([BlockUpdate(slot=0, first=0, blocks=(7,))])
    with pytest.raises(InvariantBroken, match=message):
        cache.apply_updates([update])
    assert cache.table.counts == [1, 0]
    with pytest.raises(InvariantBroken, match="no blocks"):
        small_model.new_cache(2, 32).apply_updates([update])


def test_missing_blocks(small_model) -> None:
    cache = small_model.new_cache(1, 32, 16, num_blocks=16, block_size=BLOCK)
    cache.apply_updates([BlockUpdate(slot=0, first=0, blocks=(7,))])
    small_model(ForwardBatch.from_segments([(0, 0, [3] * 8)]), cache)
    with pytest.raises(InvariantBroken, match="its 1 blocks have room for 8"):
        small_model(ForwardBatch.from_segments([(0, 8, [3])]), cache)
    assert cache.lengths == [8]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"num_blocks": 4, "block_size": 7}, "block_size is 7; it must be a multiple of 2"),
        ({"num_blocks": 4, "block_size": 0}, "block_size is 0"),
    ],
)
def test_sizes(options, message, small_model) -> None:
    with pytest.raises(ConfigError, match=message):
        small_model.new_cache(1, 32, 16, **options)


def test_flat_index() -> None:
    rng = np.random.default_rng(1)
    table = rng.permutation(30).reshape(3, 10)
    slots = rng.integers(0, 3, (5, 1))
    rows = rng.integers(0, 40, (5, 7))
    found = flat_index(table, slots, rows, 4)
    for i in range(5):
        for j in range(7):
            block = table[slots[i, 0], rows[i, j] // 4]
            assert found[i, j] == block * 4 + rows[i, j] % 4
    tensors = [torch.from_numpy(a) for a in (table, slots, rows)]
    assert torch.equal(flat_index(*tensors, 4), torch.from_numpy(found))


def test_one_block_a_slot_is_the_identity() -> None:
    table = BlockTable(4, 10, None, 10, torch.device("cpu"))
    assert table.host.tolist() == [[0], [1], [2], [3]]
    slots, rows = np.array([[2], [0]]), np.array([[0, 9], [3, 4]])
    assert flat_index(table.host, slots, rows, 10).tolist() == [[20, 29], [3, 4]]
