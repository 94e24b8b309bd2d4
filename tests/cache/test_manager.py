"""What the manager does, one behaviour a test."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer.cache import (
    BlockCacheManager,
    BlockRemoved,
    BlockStored,
    CacheIdentity,
    MediaSpan,
    ReplayPolicy,
)
from deepinfer.core import FakeClock, MemorySink, Request, SamplingParams
from deepinfer.core.errors import ConfigError, InvariantBroken
from deepinfer.core.plan import CopyKind
from deepinfer.core.protocols import Hit


def make(**options: Any) -> BlockCacheManager:
    defaults: dict[str, Any] = {"num_slots": 4, "num_blocks": 16, "block_size": 4}
    return BlockCacheManager(**{**defaults, **options})


def request(rid: str, ids: Any, **fields: Any) -> Request:
    return Request(rid=rid, prompt_token_ids=tuple(ids), **fields)


def run(cache: BlockCacheManager, wanted: Request, step: int = 0, keep: bool = False) -> Hit:
    """Looks up, allocates, settles all, and releases."""
    ids = wanted.prompt_token_ids
    hit = cache.lookup(wanted, ids, len(ids))
    assert cache.allocate(wanted, hit, upto=len(ids)) is not None
    cache.check()
    cache.settle(wanted, ids, len(ids), step)
    cache.check()
    if not keep:
        cache.release(wanted, -1)
        cache.check()
    return hit


def test_a_prefix_is_shared_and_new_blocks_follow_it() -> None:
    cache = make()
    run(cache, request("a", range(10)), keep=True)
    second = request("b", [*range(8), 50, 51])
    hit = cache.lookup(second, second.prompt_token_ids, 9)
    assert (hit.num_tokens, hit.blocks) == (8, (0, 1))
    assert cache.blocks_for(second, hit, upto=10) == 1
    given = cache.allocate(second, hit, upto=10)
    assert given is not None
    assert given.blocks == (0, 1, 3)
    assert given.num_tokens == 12
    updates, copies = cache.take_updates()
    assert [(u.slot, u.first, u.blocks) for u in updates] == [(0, 0, (0, 1, 2)), (1, 0, (0, 1, 3))]
    assert copies == ()
    assert (cache.freed_by(second), cache.freed_by(request("x", [1]))) == (1, 0)
    cache.allocate(second, None, upto=17)
    assert [(u.slot, u.first, u.blocks) for u in cache.take_updates()[0]] == [(1, 3, (4, 5))]
    assert cache.take_updates() == ((), ())
    cache.check()


def test_lookup_changes_nothing() -> None:
    cache = make()
    run(cache, request("a", range(10)))
    before = (cache.stats(), list(cache._books.index), cache.peek(3))
    again = request("b", range(10))
    hit = cache.lookup(again, again.prompt_token_ids, 9)
    assert hit.num_tokens == 8
    assert hit == cache.lookup(again, again.prompt_token_ids, 9)
    assert cache.blocks_for(again, hit, upto=10) == 3  # both shared blocks are idle
    assert (cache.stats(), list(cache._books.index), cache.peek(3)) == before


def test_lookup_of_a_cold_prompt_hashes_one_block() -> None:
    calls = []

    def counting(data: bytes) -> bytes:
        calls.append(1)
        return bytes(32)

    cache = make(hash_fn=counting)
    wanted = request("a", range(64))
    cache.lookup(wanted, wanted.prompt_token_ids, 63)
    assert len(calls) == 2  # the root and the first block


def test_limit_caps_the_hit() -> None:
    cache = make()
    run(cache, request("a", range(20)))
    wanted = request("b", range(20))
    ids = wanted.prompt_token_ids
    found = [cache.lookup(wanted, ids, limit).num_tokens for limit in (0, 3, 4, 11, 12, 20, 99)]
    assert found == [0, 0, 4, 8, 12, 16, 16]  # at least one token is left to run


def test_no_room_changes_nothing() -> None:
    cache = make(num_slots=2, num_blocks=4)
    first, second, third = (request(rid, [i] * 6) for i, rid in enumerate("abc"))
    assert cache.allocate(first, None, upto=8) is not None
    before = cache.stats()
    assert cache.allocate(second, None, upto=12) is None
    assert cache.allocate(second, None, upto=8, reserve=1) is None
    assert cache.allocate(first, None, upto=17) is None
    after = cache.stats()
    assert after.refused_total == before.refused_total + 3
    assert (after.free_blocks, after.held_slots) == (before.free_blocks, before.held_slots)
    assert cache.allocate(second, None, upto=8) is not None
    assert cache.allocate(second, None, upto=3) is not None  # it never shrinks
    assert len(cache.holding(second).blocks) == 2  # type: ignore[union-attr]
    assert cache.allocate(third, None, upto=0) is None  # no slot
    assert cache.holding(third) is None
    cache.check()


def test_two_passes_let_every_planned_hit_survive() -> None:
    cache = make(num_blocks=4)
    run(cache, request("old", [7] * 9))  # two idle cached blocks, two blank ones
    taker, sharer = request("taker", [1] * 9), request("sharer", [7] * 9)
    hit = cache.lookup(sharer, sharer.prompt_token_ids, 8)
    need = cache.blocks_for(taker, None, 4) + cache.blocks_for(sharer, hit, 9)
    assert need == cache.num_free_blocks == 4
    assert cache.allocate(taker, None, upto=0) is not None
    assert cache.allocate(sharer, hit, upto=8) is not None
    assert cache.allocate(taker, None, upto=4) is not None
    assert cache.allocate(sharer, None, upto=9) is not None
    cache.check()


def test_a_stale_hit_is_refused_whole() -> None:
    cache = make(num_blocks=3)
    run(cache, request("old", [7] * 9))
    sharer = request("sharer", [7] * 9)
    hit = cache.lookup(sharer, sharer.prompt_token_ids, 8)
    assert hit.num_tokens == 8
    cache.allocate(request("taker", [1] * 8), None, upto=8)
    assert cache.allocate(sharer, hit, upto=8) is None
    cache.check()
    assert cache.lookup(sharer, sharer.prompt_token_ids, 8).num_tokens == 4  # the tail went first


def test_a_hit_whose_block_moved_to_the_host_meanwhile_is_refused() -> None:
    cache = make(num_blocks=3, num_host_blocks=4)
    run(cache, request("old", [7] * 9))
    sharer = request("sharer", [7] * 9)
    hit = cache.lookup(sharer, sharer.prompt_token_ids, 8)
    cache.allocate(request("taker", [1] * 8), None, upto=8)
    assert cache.allocate(sharer, hit, upto=8) is None
    assert cache.allocate(sharer, hit, upto=0) is None
    cache.check()
    hit = cache.lookup(sharer, sharer.prompt_token_ids, 8)
    assert (len(hit.blocks), len(hit.host_blocks)) == (1, 1)
    cache.release(request("taker", [1] * 8), -1)
    assert cache.allocate(sharer, hit, upto=9) is not None
    cache.check()


def test_salts_and_media_and_prompt_logprobs() -> None:
    spans = {
        "one": [MediaSpan(start=1, end=3, digest=b"1")],
        "two": [MediaSpan(start=1, end=3, digest=b"2")],
    }
    cache = make(media=lambda r: spans[r.images[0]])
    run(cache, request("a", range(10)))
    run(cache, request("b", range(10), cache_salt="t"))
    run(cache, request("c", range(10), images=("one",)))
    for rid, fields, expected in (
        ("d", {}, 8),
        ("e", {"cache_salt": "t"}, 8),
        ("f", {"cache_salt": "u"}, 0),
        ("g", {"images": ("one",)}, 8),
        ("h", {"images": ("two",)}, 0),
        ("i", {"params": SamplingParams(prompt_logprobs=1)}, 0),
    ):
        wanted = request(rid, range(10), **fields)  # type: ignore[arg-type]
        assert cache.lookup(wanted, wanted.prompt_token_ids, 9).num_tokens == expected, rid
    blind = make()
    run(blind, request("a", range(10), images=("one",)))
    assert blind.stats().stored_blocks_total == 0


def test_other_identities_share_nothing() -> None:
    first = make(identity=CacheIdentity(model=b"1"))
    run(first, request("a", range(10)))
    keys = {entry.key for entry in first._books.index}
    second = make(identity=CacheIdentity(model=b"2"))
    run(second, request("a", range(10)))
    assert keys.isdisjoint({entry.key for entry in second._books.index})


def test_prefix_cache_can_be_off() -> None:
    cache = make(prefix_cache=False)
    run(cache, request("a", range(10)))
    assert run(cache, request("b", range(10))) == Hit()
    assert cache.stats().idle_blocks == 0


def test_host_tier_saves_on_eviction_and_loads_on_a_hit() -> None:
    sink = MemorySink()
    cache = make(num_blocks=3, num_host_blocks=2, sink=sink, clock=FakeClock())
    run(cache, request("a", [1] * 9))
    cache.take_updates()
    run(cache, request("b", [2] * 12))
    copies = cache.take_updates()[1]
    assert [(c.kind, c.device, c.host) for c in copies] == [
        (CopyKind.SAVE_BLOCK, 1, 0),
        (CopyKind.SAVE_BLOCK, 0, 1),
    ]
    again = request("c", [1] * 9)
    hit = cache.lookup(again, again.prompt_token_ids, 8)
    assert (hit.num_tokens, hit.blocks, hit.host_blocks) == (8, (), (1, 0))
    assert cache.blocks_for(again, hit, upto=9) == 3
    assert cache.allocate(again, hit, upto=0) is not None
    assert cache.take_updates()[1] == ()
    cache.check()
    # A host block may be written over only behind the copy that reads it.
    assert cache.allocate(again, None, upto=9) is not None
    copies = cache.take_updates()[1]
    assert [(c.kind, c.host, c.rid) for c in copies] == [
        (CopyKind.LOAD_BLOCK, 1, "c"),
        (CopyKind.SAVE_BLOCK, 1, ""),
        (CopyKind.LOAD_BLOCK, 0, "c"),
        (CopyKind.SAVE_BLOCK, 1, ""),
    ]
    assert cache.lookup(request("d", [1] * 9), [1] * 9, 8).blocks == ()  # not known to have worked
    cache.settle(again, again.prompt_token_ids, 9, 1)
    assert len(cache.lookup(request("d", [1] * 9), [1] * 9, 8).blocks) == 2
    cache.check()
    stats = cache.stats()
    assert (stats.host_hit_tokens_total, stats.loaded_blocks_total) == (8, 2)
    stored = [event.tier for event in sink.of_type(BlockStored)]
    assert stored.count("host") == stats.saved_blocks_total
    assert {event.tier for event in sink.of_type(BlockRemoved)} == {"device", "host"}


def test_failed_loads_are_forgotten_and_nothing_of_theirs_is_published() -> None:
    cache = make(num_blocks=3, num_host_blocks=8)
    run(cache, request("a", [1] * 9))
    run(cache, request("b", [2] * 12))
    again = request("c", [1] * 9)
    hit = cache.lookup(again, again.prompt_token_ids, 8)
    assert len(hit.host_blocks) == 2
    cache.allocate(again, hit, upto=9)
    cache.load_failed(again)
    cache.settle(again, again.prompt_token_ids, 9, 1)
    cache.check()
    cache.release(again, -1)
    assert cache.lookup(again, again.prompt_token_ids, 8) == Hit()
    assert cache.stats().failed_loads_total == 1
    cache.load_failed(request("unknown", [1]))
    cache.check()


def test_a_request_may_end_between_the_two_passes() -> None:
    cache = make(num_blocks=3, num_host_blocks=8)
    run(cache, request("a", [1] * 9))
    run(cache, request("b", [2] * 12))
    again = request("c", [1] * 9)
    cache.take_updates()
    for grown in (0, 8):
        hit = cache.lookup(again, again.prompt_token_ids, 8)
        assert len(hit.host_blocks) == 2
        cache.allocate(again, hit, upto=0)
        cache.allocate(again, None, upto=grown)
        cache.check()
        cache.release(again, -1)
        cache.check()
        updates, copies = cache.take_updates()
        assert updates == ()
        assert [c.kind for c in copies if c.rid] == []


def windowed(**options: Any) -> BlockCacheManager:
    defaults: dict[str, Any] = {
        "replay": ReplayPolicy(mode="off", window=4, layers=2),
        "num_window_slots": 2,
        "window_rows": 6,
        "ring_spare": 2,
    }
    return make(**{**defaults, **options})


def test_windows_are_saved_at_the_last_block_border_and_restored() -> None:
    cache = windowed()
    run(cache, request("a", range(10)))
    (copy,) = cache.take_updates()[1]
    assert (copy.kind, copy.device, copy.host, copy.end_position) == (
        CopyKind.SAVE_WINDOWS,
        0,
        0,
        8,
    )
    again = request("b", range(14))
    hit = cache.lookup(again, again.prompt_token_ids, 13)
    assert (hit.num_tokens, hit.window_slot, hit.replay_start) == (8, 0, 8)
    assert not hit.approximate
    cache.allocate(again, hit, upto=14)
    (copy,) = cache.take_updates()[1]
    assert (copy.kind, copy.device, copy.host, copy.end_position, copy.rid) == (
        CopyKind.LOAD_WINDOWS, 0, 0, 8, "b",
    )  # fmt: skip
    cache.check()
    near = request("c", range(11))  # the last window of the prompt reaches back before the hit
    assert cache.lookup(near, near.prompt_token_ids, 10) == Hit()


@pytest.mark.parametrize(("length", "saved"), [(8, 1), (10, 1), (11, 0), (3, 0)])
def test_windows_are_saved_only_while_the_ring_holds_them(length: int, saved: int) -> None:
    cache = windowed()
    run(cache, request("a", range(length)))
    assert len(cache.take_updates()[1]) == saved


def test_windows_are_not_saved_under_a_running_prefill() -> None:
    cache = windowed()
    wanted = request("a", range(30))
    cache.allocate(wanted, None, upto=30)
    cache.settle(wanted, wanted.prompt_token_ids, 8, step=0)
    cache.release(wanted, after_step=1)
    assert cache.take_updates()[1] == ()
    cache.step_done(1)
    cache.allocate(wanted, None, upto=30)
    cache.settle(wanted, wanted.prompt_token_ids, 8, step=2)
    cache.release(wanted, after_step=1)
    assert len(cache.take_updates()[1]) == 1


def test_windows_are_not_saved_under_the_prefill_of_a_resumed_request() -> None:
    cache = windowed()
    wanted = request("a", range(6))
    ids = list(range(30))  # 24 of them were generated before it lost its slot
    for step, known, saved in ((0, 30, 0), (2, 9, 1)):
        cache.allocate(wanted, None, upto=30)
        cache.settle(wanted, ids[:known], 8, step)
        cache.release(wanted, after_step=step + 1)
        assert len(cache.take_updates()[1]) == saved
        cache.step_done(step + 1)


def test_window_slots_expire_and_go_least_recently_used_first() -> None:
    clock = FakeClock()
    cache = windowed(window_ttl_s=10.0, clock=clock)
    for number in range(3):
        run(cache, request(str(number), [number] * 8))
        clock.advance(1.0)
    assert [c.host for c in cache.take_updates()[1]] == [0, 1, 0]
    for number, expected in ((0, 0), (1, 8), (2, 8)):
        wanted = request("x", [number] * 16)
        assert cache.lookup(wanted, wanted.prompt_token_ids, 15).num_tokens == expected
    clock.advance(8.5)
    wanted = request("x", [1] * 16)
    assert cache.lookup(wanted, wanted.prompt_token_ids, 15) == Hit()
    cache.check()


def test_the_hit_that_leaves_fewest_tokens_wins_and_of_equal_ones_the_exact() -> None:
    cache = windowed(replay=ReplayPolicy(mode="bounded", window=4, layers=2))
    run(cache, request("a", range(8)))  # windows at 8
    run(cache, request("b", range(15)), keep=True)  # blocks up to 12, no windows
    wanted = request("c", range(20))
    hit = cache.lookup(wanted, wanted.prompt_token_ids, 19)
    assert (hit.num_tokens, hit.window_slot, hit.replay_start) == (8, 0, 8)
    assert not hit.approximate
    longer = request("d", range(18))
    run(cache, longer, keep=True)
    hit = cache.lookup(wanted, wanted.prompt_token_ids, 19)
    assert (hit.num_tokens, hit.window_slot, hit.replay_start) == (16, None, 12)
    assert hit.approximate


def test_resumed_requests_find_what_they_generated() -> None:
    cache = make()
    wanted = request("a", range(6))
    ids = [*range(6), 90, 91, 92, 93]
    cache.allocate(wanted, None, upto=9)
    cache.settle(wanted, ids, 9, 0)
    cache.release(wanted, -1)
    assert cache.lookup(wanted, ids, 9).num_tokens == 8
    assert cache.lookup(wanted, [*range(6), 90, 7, 92, 93], 9).num_tokens == 4
    assert cache.lookup(wanted, ids, 9).num_tokens == 8


def test_rereads_of_preempted_requests_are_not_hits() -> None:
    cache = make()
    wanted = request("a", range(10))
    run(cache, wanted)
    run(cache, wanted)
    stats = cache.stats()
    assert (stats.queried_tokens_total, stats.hit_tokens_total, stats.reread_tokens_total) == (
        10,
        0,
        8,
    )
    run(cache, request("b", range(10)))
    stats = cache.stats()
    assert (stats.hit_tokens_total, stats.hit_ratio) == (8, 0.4)


def test_events_tell_what_can_be_found() -> None:
    sink = MemorySink()
    cache = make(num_blocks=2, sink=sink, clock=FakeClock())
    run(cache, request("a", [1, 2, 3, 4, 5]))
    (stored,) = sink.of_type(BlockStored)
    assert stored.parent == CacheIdentity().root_key()
    assert stored.token_ids == b"\1\0\0\0\2\0\0\0\3\0\0\0\4\0\0\0"
    run(cache, request("b", [9] * 8))
    (removed,) = sink.of_type(BlockRemoved)
    assert (removed.key, removed.tier) == (stored.key, "device")


def test_reset_prefix_cache_forgets_even_what_is_held() -> None:
    cache = make()
    run(cache, request("idle", [1] * 9))
    held = request("held", [2] * 20)
    cache.allocate(held, None, upto=20)
    cache.settle(held, held.prompt_token_ids, 9, 0)
    cache.reset_prefix_cache()
    cache.check()
    cache.settle(held, held.prompt_token_ids, 20, 1)  # computed with what is now void
    cache.check()
    for ids in ([1] * 9, [2] * 20):
        wanted = request("x", ids)
        assert cache.lookup(wanted, wanted.prompt_token_ids, 19) == Hit()
    cache.release(held, -1)
    assert cache.stats().free_blocks == 16


def test_reset_takes_everything_back() -> None:
    cache = windowed(num_host_blocks=2, num_blocks=3)
    run(cache, request("a", [1] * 9))
    cache.allocate(request("b", [2] * 12), None, upto=12)
    cache.release(request("b", [2] * 12), after_step=5)
    cache.reset()
    cache.check()
    assert cache.take_updates() == ((), ())
    assert (cache.num_free_blocks, cache.num_held, len(list(cache._books.index))) == (3, 0, 0)
    assert cache.peek(1) == ((0, 3),)


def test_more_than_there_is_cannot_be_settled() -> None:
    cache = make()
    wanted = request("a", range(6))
    cache.allocate(wanted, None, upto=6)
    with pytest.raises(InvariantBroken, match="settled 9 tokens of 'a'"):
        cache.settle(wanted, list(range(20)), 9, 0)
    with pytest.raises(InvariantBroken, match="settled 7 tokens"):
        cache.settle(wanted, list(range(6)), 7, 0)
    cache.settle(request("unknown", [1]), [1], 1, 0)


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="block_size"):
        make(block_size=0)
    with pytest.raises(ConfigError, match="max_tokens"):
        make(max_tokens=0)
    assert make(max_tokens=10).capacity_tokens == 10
    assert make(max_tokens=1000).capacity_tokens == 64
    assert make(max_tokens=10).allocate(request("a", [1]), None, upto=11) is None
    assert "0 of 4 slots held" in repr(make())


@pytest.mark.parametrize(
    "plant",
    [
        lambda books, held: held.table.append(held.table[0]),
        lambda books, held: setattr(held, "settled", 99),
        lambda books, held: setattr(held, "settled", 3),  # then a block is findable too early
        lambda books, held: books.chains.clear(),
        lambda books, held: books.chains["a"].hasher.ids.__setitem__(0, b"other"),
        lambda books, held: held.table.reverse(),
        lambda books, held: books.pool.forget(held.table[0]),
        lambda books, held: setattr(held, "slot_generation", 5),
        lambda books, held: books.index.drop_device(held.table[0]),
    ],
)
def test_check_finds_planted_faults(plant) -> None:
    cache = make()
    run(cache, request("a", [*range(10)]), keep=True)
    plant(cache._books, cache._books.held["a"])
    with pytest.raises(InvariantBroken):
        cache.check()
