from __future__ import annotations

import gc

import pytest

from deepinfer.cache import HostTier, PrefixIndex, WindowSlots
from deepinfer.cache.block_keys import sha256
from deepinfer.cache.index_entry import IndexEntry
from deepinfer.cache.prefix_index import Outcome
from deepinfer.core.errors import ConfigError, InvariantBroken


def publish(index: PrefixIndex, parent: IndexEntry, ids: bytes, block: int, key: bytes = b""):
    return index.publish(parent, key or sha256(parent.key + ids), ids, b"", block)


def test_an_entry_needs_its_ids_and_its_parent() -> None:
    index = PrefixIndex(4)
    root, other = index.root("", b"root"), index.root("salt", b"root")
    entry, outcome, freed = publish(index, root, b"aa", 2, b"k")
    assert (outcome, freed) == (Outcome.STORED, -1)
    assert index.find(root, b"k", b"aa", b"") is entry
    assert index.find(root, b"k", b"ab", b"") is None
    assert index.find(root, b"k", b"aa", b"image") is None
    assert index.find(other, b"k", b"aa", b"") is None
    assert index.find(entry, b"k", b"aa", b"") is None  # the same block one further on


def test_the_first_of_equal_blocks_stays() -> None:
    index = PrefixIndex(4)
    root = index.root("", b"root")
    first, _, _ = publish(index, root, b"aa", 2)
    again, outcome, _ = publish(index, root, b"aa", 3)
    assert again is first
    assert outcome is Outcome.DUPLICATE
    assert first.device == 2
    assert index.of_block(3) is None


def test_a_collision_stores_nothing() -> None:
    index = PrefixIndex(4)
    root = index.root("", b"root")
    first, _, _ = publish(index, root, b"aa", 2, b"k")
    assert publish(index, root, b"bb", 3, b"k") == (None, Outcome.COLLISION, -1)
    assert index.find(root, b"k", b"aa", b"") is first


def test_an_orphan_makes_room_for_the_same_block_under_a_new_parent() -> None:
    index = PrefixIndex(4)
    root = index.root("", b"root")
    parent, _, _ = publish(index, root, b"aa", 0)
    child, _, _ = publish(index, parent, b"bb", 1)
    index.drop_device(0)
    assert not parent.alive
    new_parent, _, _ = publish(index, root, b"aa", 2)
    assert index.find(new_parent, child.key, b"bb", b"") is None
    new_child, outcome, freed = publish(index, new_parent, b"bb", 3)
    assert (outcome, freed) == (Outcome.STORED, 1)
    assert not child.alive
    assert index.find(new_parent, new_child.key, b"bb", b"") is new_child
    index.check(lambda block: block in (2, 3))


def test_an_entry_lives_while_any_tier_holds_it_and_takes_its_windows_along() -> None:
    changes = []
    index = PrefixIndex(
        4,
        HostTier(1),
        WindowSlots(2),
        lambda entry, tier, stored: changes.append((tier, stored)),
    )
    root = index.root("", b"root")
    entry, _, _ = publish(index, root, b"aa", 0)
    assert index.add_window(entry, now=1.0) == 0
    assert index.add_host(entry) == 0
    index.drop_device(0)
    assert entry.alive
    other, _, _ = publish(index, root, b"bb", 0)
    assert index.add_host(other) == 0  # the only host block; the first entry had it
    assert not entry.alive
    assert len(index.windows or ()) == 0
    index.check(lambda block: block == 0)
    assert changes == [
        ("device", True),
        ("host", True),
        ("device", False),
        ("device", True),
        ("host", False),
        ("host", True),
    ]


def test_roots_of_unused_salts_are_forgotten() -> None:
    index = PrefixIndex(4)
    for number in range(100):
        index.root(str(number), b"key")
    gc.collect()
    assert len(index._roots) == 0
    root = index.root("used", b"key")
    publish(index, root, b"aa", 0)
    del root
    gc.collect()
    assert len(index._roots) == 1


def test_check_finds_planted_faults() -> None:
    def broken(plant) -> None:
        index = PrefixIndex(4, HostTier(2), WindowSlots(2))
        root = index.root("", b"root")
        first, _, _ = publish(index, root, b"aa", 0)
        second, _, _ = publish(index, first, b"bb", 1)
        index.add_host(second)
        index.add_window(second, 0.0)
        index.check(lambda block: block < 2)
        plant(index, first, second)
        with pytest.raises(InvariantBroken):
            index.check(lambda block: block < 2)

    broken(lambda i, a, b: setattr(a, "ids", b"xx"))  # stored ids are not the key's
    broken(lambda i, a, b: setattr(b, "device", 0))  # one page under two nodes
    broken(lambda i, a, b: i._by_block.__setitem__(3, a))
    broken(lambda i, a, b: setattr(a, "device", -1))
    broken(lambda i, a, b: setattr(a, "host", 1))
    broken(lambda i, a, b: setattr(b, "host", -1))
    broken(lambda i, a, b: setattr(b, "window", 1))
    broken(lambda i, a, b: setattr(a, "alive", False))
    broken(lambda i, a, b: i._entries.pop(a.key))
    broken(lambda i, a, b: i.host._free.append(0))


def test_lru_places() -> None:
    tier = HostTier(2)
    a, b, c = (IndexEntry(key) for key in (b"a", b"b", b"c"))
    assert tier.put(a) == (0, None)
    assert tier.put(b) == (1, None)
    tier.touch(0)
    assert tier.put(c) == (1, b)
    tier.pin(0)
    tier.pin(0)
    tier.pin(1)
    assert tier.put(b) is None
    assert dict(tier.items()) == {0: a, 1: c}
    tier.remove(0)
    assert (len(tier), tier.num_used, tier.pins()) == (1, 2, {0: 2, 1: 1})
    tier.unpin(0)
    tier.unpin(0)
    tier.unpin(1)
    assert (tier.num_used, tier.get(0), tier.get(1)) == (1, None, c)
    tier.check()
    assert "1 of 2 used" in repr(tier)
    with pytest.raises(ConfigError, match="num_host_blocks"):
        HostTier(-1)


def test_window_slots_age() -> None:
    slots = WindowSlots(1, ttl_s=10.0)
    slots.put(IndexEntry(b"a"))
    slots.note_use(0, now=5.0)
    assert slots.is_fresh(0, 15.0)
    assert not slots.is_fresh(0, 15.1)
    with pytest.raises(ConfigError, match="window_ttl_s"):
        WindowSlots(1, ttl_s=0.0)
