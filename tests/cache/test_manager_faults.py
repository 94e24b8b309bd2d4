"""Faults that serving engines have had, and rules that came of them, as far as the cache's books decide them."""

from __future__ import annotations

import importlib.util
import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from deepinfer.cache import BlockCacheManager, ReplayPolicy
from deepinfer.cache.block_keys import sha256
from deepinfer.core import Request
from deepinfer.core.errors import InvariantBroken
from deepinfer.core.plan import CopyKind
from deepinfer.core.protocols import Hit

spec = importlib.util.spec_from_file_location("device", Path(__file__).with_name("device.py"))
assert spec is not None
assert spec.loader is not None
device_module: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(device_module)
signatures = device_module.signatures

BLOCK = 4


def make(**options: Any) -> BlockCacheManager:
    defaults: dict[str, Any] = {"num_slots": 4, "num_blocks": 16, "block_size": BLOCK}
    return BlockCacheManager(**{**defaults, **options})


def request(rid: str, ids: Any, **fields: Any) -> Request:
    return Request(rid=rid, prompt_token_ids=tuple(ids), **fields)


def find(cache: BlockCacheManager, wanted: Request) -> Hit:
    return cache.lookup(wanted, wanted.prompt_token_ids, len(wanted.prompt_token_ids))


def run(cache: BlockCacheManager, wanted: Request, step: int = 0, after: int | None = -1) -> Hit:
    ids = wanted.prompt_token_ids
    hit = find(cache, wanted)
    assert cache.allocate(wanted, hit, upto=len(ids)) is not None
    cache.settle(wanted, ids, len(ids), step)
    if after is not None:
        cache.release(wanted, after)
    cache.check()
    return hit


def test_b8_a_slot_is_not_given_out_while_a_step_still_reads_its_table() -> None:
    cache = make(num_slots=1)
    first, second = request("a", [1] * 6), request("b", [2] * 6)
    given = cache.allocate(first, None, upto=6)
    assert given is not None
    cache.settle(first, first.prompt_token_ids, 6, 0)
    cache.release(first, after_step=1)  # stopped in step 0, and step 1 is in flight
    assert cache.peek(1) == ()
    assert cache.allocate(second, None, upto=6) is None
    assert cache.num_quarantined_blocks == 2
    cache.check()
    assert cache.step_done(1) == 3
    again = cache.allocate(second, None, upto=6)
    assert again is not None
    assert (again.slot, again.slot_generation) == (given.slot, given.slot_generation + 1)


def test_b10_what_can_never_fit_is_visible_before_it_waits() -> None:
    cache = make(num_blocks=3)
    assert cache.capacity_tokens == 12
    assert cache.allocate(request("a", [1] * 12), None, upto=13) is None
    assert cache.allocate(request("b", [1] * 12), None, upto=12) is not None


def test_b12_a_refusal_keeps_nothing_from_those_behind_it() -> None:
    cache = make(num_blocks=4)
    holder = request("holder", [1] * 8)
    cache.allocate(holder, None, upto=8)
    head = request("head", [2] * 12)
    assert cache.allocate(head, find(cache, head), upto=12) is None
    assert cache.allocate(holder, None, upto=12) is not None
    assert cache.allocate(request("small", [3] * 4), None, upto=4) is not None
    cache.check()


@pytest.mark.parametrize("host", [0, 8])
@pytest.mark.parametrize(("blocks", "off"), list(itertools.product([1, 2, 3], [-1, 0, 1])))
def test_b17_prompts_at_block_borders_twice_and_preempted(blocks: int, off: int, host: int) -> None:
    cache = make(num_host_blocks=host)
    length = blocks * BLOCK + off
    ids = list(range(length))
    expected = (length - 1) // BLOCK * BLOCK
    for turn in range(2):
        wanted = request(f"r{turn}", ids)
        for _ in range(2):  # run, lose the slot, run again
            hit = find(cache, wanted)
            assert hit.num_tokens in (0, expected)
            assert hit.num_tokens < length  # never nothing to run
            given = cache.allocate(wanted, hit, upto=length + 1)
            assert given is not None
            assert len(given.blocks) == -(-(length + 1) // BLOCK)
            assert len(set(given.blocks)) == len(given.blocks)
            cache.settle(wanted, ids, length, 0)
            cache.release(wanted, -1)
            cache.check()
    assert find(cache, request("last", ids)).num_tokens == expected


def test_b18_equal_prompts_in_one_step_keep_their_own_pages() -> None:
    cache = make()
    first, second = request("a", range(8)), request("b", range(8))
    one, two = (cache.allocate(r, find(cache, r), upto=8) for r in (first, second))
    assert one is not None
    assert two is not None
    assert set(one.blocks).isdisjoint(two.blocks)
    cache.settle(first, range(8), 8, 0)
    cache.settle(second, range(8), 8, 0)
    cache.check()
    assert cache.stats().duplicate_blocks_total == 2
    assert cache.holding(second) is not None
    assert cache.holding(second).blocks == two.blocks  # type: ignore[union-attr]
    pool = cache._books.pool
    assert all(pool.references(block) == 1 for block in two.blocks)
    cache.allocate(second, None, upto=12)
    cache.release(first, -1)
    cache.settle(second, [*range(12)], 12, 1)
    cache.check()
    cache.release(second, -1)
    cache.check()
    longer = request("c", range(13))
    assert find(cache, longer).num_tokens == 12


def test_b18_a_page_that_stood_for_a_duplicate_may_go_and_the_duplicate_takes_its_place() -> None:
    cache = make(num_blocks=6)
    first, second = request("a", range(8)), request("b", range(8))
    for wanted in (first, second):
        cache.allocate(wanted, None, upto=8)
    for wanted in (first, second):
        cache.settle(wanted, range(8), 8, 0)
    cache.release(first, -1)
    filler = request("f", [9] * 16)
    assert cache.allocate(filler, None, upto=16) is not None  # evicts the pages of the first
    cache.release(filler, -1)
    cache.allocate(second, None, upto=12)
    cache.settle(second, range(12), 12, 1)
    cache.check()
    assert find(cache, request("c", range(13))).num_tokens == 12


@pytest.mark.parametrize("phase", ["waiting", "admitted", "in flight", "settled", "quarantined"])
def test_b19_ending_a_request_twice_in_any_phase_frees_once(phase: str) -> None:
    cache = make(num_host_blocks=2, num_window_slots=1)
    wanted = request("a", range(10))
    find(cache, wanted)
    if phase != "waiting":
        cache.allocate(wanted, find(cache, wanted), upto=10)
    if phase in ("settled", "quarantined"):
        cache.settle(wanted, wanted.prompt_token_ids, 10, 0)
    after = 1 if phase in ("in flight", "quarantined") else -1
    cache.release(wanted, after)
    cache.check()
    cache.settle(wanted, wanted.prompt_token_ids, 10, 1)  # its result comes afterwards
    cache.release(wanted, after)
    cache.load_failed(wanted)
    cache.check()
    cache.step_done(1)
    cache.step_done(1)
    cache.check()
    assert cache.num_free_blocks == 16
    assert cache._books.chains == {}


def test_b29_the_check_walks_even_where_all_counters_agree() -> None:
    cache = make()
    run(cache, request("a", range(8)), after=None)
    run(cache, request("b", range(50, 58)), after=None)
    one, two = (cache._books.held[rid] for rid in "ab")
    one.table[0], two.table[0] = two.table[0], one.table[0]
    with pytest.raises(InvariantBroken):
        cache.check()


def test_b30_only_settled_ids_are_published() -> None:
    cache = make()
    wanted = request("a", range(6))
    cache.allocate(wanted, None, upto=12)  # drafts of a step in flight reach into the third block
    cache.settle(wanted, [*range(7)], 7, 0)
    cache.check()
    assert cache.stats().stored_blocks_total == 1
    cache.settle(wanted, [*range(9), 77], 8, 1)
    cache.check()
    assert cache.stats().stored_blocks_total == 2
    assert find(cache, request("b", range(9))).num_tokens == 8
    with pytest.raises(InvariantBroken, match="not known yet"):
        cache.settle(wanted, [*range(9), -1, -1, -1], 12, 2)


@pytest.mark.parametrize("settled", range(11))
def test_b32_ending_a_prefill_at_any_length_frees_every_page_once(settled: int) -> None:
    cache = make()
    wanted = request("a", range(30))
    cache.allocate(wanted, None, upto=settled + 5)
    cache.settle(wanted, wanted.prompt_token_ids, settled, 0)
    cache.release(wanted, after_step=1)
    cache.check()
    cache.step_done(1)
    cache.check()
    stats = cache.stats()
    assert (stats.idle_blocks, stats.free_blocks) == (settled // BLOCK, 16 - settled // BLOCK)


def test_b33_cancels_and_retries_on_a_shared_page_leave_others_alone() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        cache = make(num_slots=3, num_blocks=9)
        device = device_module.Device(3, 9, BLOCK, ring=16, rows=0)
        stem = list(range(BLOCK))  # a prefix of exactly one page
        alive: dict[str, tuple[Request, int]] = {}
        for number in range(25):
            if alive and (len(alive) == 3 or rng.random() < 0.5):
                rid = rng.choice(sorted(alive))
                wanted, slot = alive.pop(rid)
                right = signatures(wanted.prompt_token_ids)
                assert device.read(slot, len(right)) == right
                cache.release(wanted, after_step=number - rng.randint(0, 1))
            else:
                wanted = request(str(number), stem + [number] * rng.randint(0, 5))
                hit, length = find(cache, wanted), wanted.num_prompt_tokens
                given = cache.allocate(wanted, hit, upto=length)
                if given is not None:
                    device.carry_out(*cache.take_updates())
                    right = signatures(wanted.prompt_token_ids)
                    assert device.read(given.slot, hit.num_tokens) == right[: hit.num_tokens]
                    device.write(given.slot, hit.num_tokens, right[hit.num_tokens :])
                    alive[wanted.rid] = (wanted, given.slot)
                    if rng.random() < 0.7:
                        cache.settle(wanted, wanted.prompt_token_ids, length, number)
            cache.step_done(number - 1)
            cache.check()


def test_b35_blocks_of_this_step_are_not_hits() -> None:
    cache = make()
    first, second = request("a", [*range(12), 3]), request("b", [*range(12), 4])
    cache.allocate(first, find(cache, first), upto=13)
    assert find(cache, second) == Hit()
    cache.settle(first, first.prompt_token_ids, 13, 0)
    assert find(cache, second).num_tokens == 12


@pytest.mark.parametrize("digest", [lambda data: b"", lambda data: bytes([len(data) % 2])])
def test_b36_a_collision_is_a_miss(digest) -> None:
    cache = make(hash_fn=digest)
    run(cache, request("a", [1] * 16))
    run(cache, request("b", [2] * 16))
    run(cache, request("c", [*([2] * 8), *([1] * 8)]), after=None)
    device_entries = [entry.ids for entry in cache._books.index]
    assert len(device_entries) == 1
    assert find(cache, request("d", [2] * 16)) == Hit()
    assert find(cache, request("e", [1] * 16)).num_tokens == 4
    # The same ids one block further on are another block.
    assert find(cache, request("f", [1] * 16, cache_salt="other")) == Hit()
    cache.check()


def test_b36_nothing_behind_a_collision_is_published() -> None:
    def digest(data: bytes) -> bytes:
        return b"same" if data[-1:] == b"\0" and data[-4] in (1, 2) else sha256(data)

    cache = make(hash_fn=digest)
    run(cache, request("a", [1] * 4 + [3] * 8))
    run(cache, request("b", [2] * 4 + [4] * 8))
    assert len(list(cache._books.index)) == 3
    assert find(cache, request("c", [1] * 4 + [4] * 9)).num_tokens == 4
    assert find(cache, request("d", [2] * 4 + [3] * 9)) == Hit()


def test_b37_windows_cost_no_blocks() -> None:
    policy = ReplayPolicy(mode="bounded", window=1024, layers=20)
    cache = make(num_blocks=760, block_size=128, replay=policy)
    wanted = request("long", range(97_000))
    assert cache.blocks_for(wanted, None, upto=97_001) == 758
    assert cache.allocate(wanted, None, upto=97_001) is not None


def test_b38_a_warm_run_says_that_window_rows_must_be_rebuilt() -> None:
    policy = ReplayPolicy(mode="bounded", window=4, layers=2)
    cache = make(num_slots=1, replay=policy)
    assert run(cache, request("cold", range(13))) == Hit()
    run(
        cache, request("other", range(90, 99))
    )  # the slot, and so its ring, was another's meanwhile
    hit = find(cache, request("warm", range(13)))
    assert (hit.num_tokens, hit.replay_start, hit.replay_tokens) == (12, 8, 4)
    assert hit.approximate


def test_i1_i2_i3_i4_after_every_call_of_a_full_life() -> None:
    cache = make(num_blocks=5, num_host_blocks=2)

    def count() -> None:
        cache.check()
        s = cache.stats()
        total = s.free_blocks + s.quarantined_blocks + s.held_blocks + s.idle_blocks
        assert total == s.num_blocks

    wanted, sharer = request("a", range(9)), request("b", range(9))
    count()
    cache.allocate(wanted, None, upto=9)
    count()
    cache.settle(wanted, wanted.prompt_token_ids, 9, 0)
    count()
    cache.allocate(sharer, find(cache, sharer), upto=9)
    count()
    pool = cache._books.pool
    table = cache.holding(wanted).blocks  # type: ignore[union-attr]
    assert [pool.references(block) for block in table] == [2, 2, 1]
    cache.release(wanted, after_step=3)
    count()
    assert not any(map(pool.is_free, table))
    cache.step_done(3)
    count()
    assert [pool.references(block) for block in table] == [1, 1, 0]
    entry = cache._books.index.of_block(table[1])
    assert entry is not None
    assert entry.ids == b"".join(i.to_bytes(4, "little") for i in range(4, 8))
    cache.release(sharer, -1)
    count()
    assert cache.num_free_blocks == 5


def test_r1_hits_end_on_the_grid_leave_a_token_and_exceed_the_window() -> None:
    cache = make(replay=ReplayPolicy(mode="bounded", window=8, layers=1))
    run(cache, request("a", range(21)))
    found = {n: find(cache, request(str(n), range(n))).num_tokens for n in range(1, 22)}
    assert found == {n: (h if (h := (n - 1) // 4 * 4) > 8 else 0) for n in range(1, 22)}


def test_r3_the_table_of_a_hit_covers_every_row_from_the_first_replayed_one() -> None:
    cache = make(replay=ReplayPolicy(mode="bounded", window=6, layers=1))
    run(cache, request("a", range(13)))
    wanted = request("b", range(13))
    hit = find(cache, wanted)
    assert (hit.num_tokens, hit.replay_start) == (12, 6)
    given = cache.allocate(wanted, hit, upto=13)
    assert given is not None
    assert len(given.blocks) == 4
    assert given.blocks[:3] == hit.blocks


def test_r4_r8_a_hit_is_not_published_again_and_what_a_bounded_replay_wrote_is_not_kept() -> None:
    policy = ReplayPolicy(mode="bounded", window=4, layers=2)
    cache = make(replay=policy, num_window_slots=4, window_rows=6, ring_spare=8)
    run(cache, request("a", range(9)))
    cache._books.index.drop_window(next(e for e in cache._books.index if e.window >= 0))
    cache.take_updates()
    before = {entry.device for entry in cache._books.index}
    wanted = request("b", range(11))
    hit = run(cache, wanted)
    assert hit.approximate
    assert {entry.device for entry in cache._books.index} == before
    assert cache.take_updates()[1] == ()  # rows before position 8 came from the replay
    longer = request("c", range(16))
    assert run(cache, longer).approximate
    # Blocks behind the hit are published, marked, and their window rows hold nothing that was replayed ...
    assert {e.approximate for e in cache._books.index if e.device not in before} == {True}
    (copy,) = cache.take_updates()[1]
    assert (copy.kind, copy.end_position) == (CopyKind.SAVE_WINDOWS, 16)
    # ... and so is every hit that includes them, however its windows come back.
    again = find(cache, request("d", range(30)))
    assert (again.num_tokens, again.window_slot is not None, again.approximate) == (16, True, True)


def test_r8_the_deterministic_class_keeps_what_follows_an_approximate_hit_private() -> None:
    policy = ReplayPolicy(mode="bounded", window=4, layers=2)
    cache = make(replay=policy, deterministic=True, num_window_slots=2, window_rows=4, ring_spare=4)
    run(cache, request("a", range(11)))
    cache._books.index.drop_window(next(e for e in cache._books.index if e.window >= 0))
    stored = cache.stats().stored_blocks_total
    cache.take_updates()
    assert run(cache, request("b", range(16))).approximate
    assert cache.stats().stored_blocks_total == stored
    assert cache.take_updates()[1] == ()


def test_r11_exact_hits_replay_the_halo_and_are_published_as_a_full_run() -> None:
    policy = ReplayPolicy(mode="exact", window=4, layers=2, narrowed=False)
    cache = make(replay=policy, deterministic=True)
    run(cache, request("a", range(40)))
    wanted = request("b", [*range(32), *range(70, 80)])
    hit = run(cache, wanted)
    assert (hit.num_tokens, hit.replay_start, hit.approximate) == (32, 32 - 7, False)
    assert not any(entry.approximate for entry in cache._books.index)
    assert find(cache, request("c", wanted.prompt_token_ids)).num_tokens == 40
    assert find(cache, request("d", range(13))) == Hit()  # twice the halo is 14 tokens
