from __future__ import annotations

import pytest

from deepinfer.cache import SlotCacheManager
from deepinfer.core import Request
from deepinfer.core.errors import ConfigError, InvariantBroken


def request(rid: str) -> Request:
    return Request(rid=rid, prompt_token_ids=(5,))


def test_lowest_free_slot_goes_first_and_its_generation_rises() -> None:
    cache = SlotCacheManager(num_slots=3, slot_tokens=8)
    first = cache.allocate(request("a"), None, upto=4)
    second = cache.allocate(request("b"), None, upto=4)
    assert first is not None
    assert second is not None
    assert (first.slot, first.slot_generation, second.slot) == (0, 0, 1)
    cache.release(request("a"), after_step=-1)
    again = cache.allocate(request("c"), None, upto=8)
    assert again is not None
    assert (again.slot, again.slot_generation) == (0, 1)
    cache.check()


def test_peek_tells_what_comes_and_changes_nothing() -> None:
    cache = SlotCacheManager(num_slots=3, slot_tokens=8)
    cache.allocate(request("a"), None, upto=1)
    before = cache.stats()
    seen = cache.peek(5)
    assert cache.peek(5) == seen
    assert cache.stats() == before
    given = [cache.allocate(request(rid), None, upto=1) for rid in ("b", "c")]
    assert tuple((g.slot, g.slot_generation) for g in given if g) == seen
    assert cache.peek(1) == ()


def test_asking_again_gives_the_same_slot() -> None:
    cache = SlotCacheManager(num_slots=1, slot_tokens=8)
    assert cache.allocate(request("a"), None, upto=2) == cache.allocate(request("a"), None, upto=8)
    assert cache.stats().allocated_total == 1


def test_no_room_changes_nothing() -> None:
    cache = SlotCacheManager(num_slots=1, slot_tokens=8)
    assert cache.allocate(request("a"), None, upto=9) is None
    assert cache.allocate(request("a"), None, upto=8, reserve=1) is None
    assert cache.allocate(request("a"), None, upto=8) is not None
    assert cache.allocate(request("b"), None, upto=1) is None
    stats = cache.stats()
    assert (stats.free_slots, stats.held_slots, stats.refused_total) == (0, 1, 3)


def test_slot_waits_for_its_last_step() -> None:
    cache = SlotCacheManager(num_slots=1, slot_tokens=8)
    cache.allocate(request("a"), None, upto=8)
    cache.release(request("a"), after_step=4)
    assert cache.allocate(request("b"), None, upto=8) is None
    assert cache.step_done(3) == 0
    assert cache.stats().quarantined_slots == 1
    cache.check()
    assert cache.step_done(4) == 1
    assert cache.allocate(request("b"), None, upto=8) is not None
    cache.check()


def test_release_after_a_done_step_is_immediate_and_twice_is_harmless() -> None:
    cache = SlotCacheManager(num_slots=1, slot_tokens=8)
    cache.step_done(5)
    cache.allocate(request("a"), None, upto=8)
    cache.release(request("a"), after_step=5)
    cache.release(request("a"), after_step=9)
    cache.release(request("unknown"), after_step=9)
    assert cache.num_free_blocks == 1
    cache.check()


def test_settled_tokens_are_counted() -> None:
    cache = SlotCacheManager(num_slots=2, slot_tokens=8)
    cache.allocate(request("a"), None, upto=8)
    cache.settle(request("a"), [5] * 4, 4, step=0)
    cache.settle(request("unknown"), [5] * 4, 4, step=0)
    assert cache.stats().settled_tokens == 4
    assert cache.stats().used_ratio == 0.5
    assert cache.lookup(request("a"), [5] * 4, 4).num_tokens == 0


def test_a_slot_is_one_block() -> None:
    cache = SlotCacheManager(num_slots=2, slot_tokens=8)
    assert (cache.num_blocks, cache.block_size, cache.capacity_tokens) == (2, 8, 8)
    assert cache.blocks_for(request("a"), None, upto=8) == 1
    assert cache.freed_by(request("a")) == 0
    cache.allocate(request("a"), None, upto=1)
    assert cache.blocks_for(request("a"), None, upto=8) == 0
    assert (cache.freed_by(request("a")), cache.freed_by(request("b"))) == (1, 0)
    assert cache.take_updates() == ((), ())
    cache.load_failed(request("a"))
    cache.release(request("a"), after_step=1)
    assert (cache.num_held, cache.num_free_blocks, cache.num_quarantined_blocks) == (0, 1, 1)
    cache.reset()
    assert cache.num_free_blocks == 2
    assert cache.peek(2) == ((0, 2), (1, 1))
    cache.check()


def test_check_finds_planted_faults() -> None:
    def broken(plant) -> None:
        cache = SlotCacheManager(num_slots=2, slot_tokens=8)
        cache.allocate(request("a"), None, upto=8)
        cache.check()
        plant(cache)
        with pytest.raises(InvariantBroken):
            cache.check()

    broken(lambda cache: cache._slots._free.append(0))
    broken(lambda cache: cache._slots._free.clear())
    broken(lambda cache: cache.settle(request("a"), [5] * 9, 9, step=0))
    broken(lambda cache: cache._slots._generation.__setitem__(0, 5))
    broken(lambda cache: cache._slots._quarantine.__setitem__(3, [1]))
    broken(
        lambda cache: (cache._slots._quarantine.__setitem__(-1, [1]), cache._slots._free.clear())
    )


def test_sizes_are_checked() -> None:
    with pytest.raises(ConfigError, match="num_slots"):
        SlotCacheManager(num_slots=0, slot_tokens=8)
    with pytest.raises(ConfigError, match="slot_tokens"):
        SlotCacheManager(num_slots=1, slot_tokens=0)
    assert "2 slots of 8 tokens" in repr(SlotCacheManager(num_slots=2, slot_tokens=8))
