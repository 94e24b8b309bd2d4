"""A prefix hit: adopted blocks, a bounded or exact replay of the window before them, and the rest of the prompt.

R1 to R12 are the rules of a replay, (i) to (vi) its invariants, B38 and B52 known ways to get it wrong; here is what the
model does about them.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from deepinfer.core.errors import InvariantBroken
from deepinfer.core.plan import BlockUpdate
from deepinfer.models.deepseek_v41 import (
    DeepseekV41,
    ForwardBatch,
    Segment,
    SlotCache,
    Truncation,
)

BLOCK, WINDOW, LENGTH = 8, 4, 80
EXACT = 4 * (WINDOW - 1) + 1


@pytest.fixture(scope="module")
def model(random_model, small_config) -> DeepseekV41:
    return random_model(small_config(sliding_window=WINDOW))


@pytest.fixture(scope="module")
def bitwise_model(random_model, small_config) -> DeepseekV41:
    return random_model(small_config(sliding_window=WINDOW), "full").set_deterministic()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 159, (LENGTH + 20,), generator=torch.Generator().manual_seed(7))


def new_cache(model: DeepseekV41, slots: int = 4) -> SlotCache:
    return model.new_cache(slots, 120, LENGTH, num_blocks=80, block_size=BLOCK)


def step(model: DeepseekV41, cache: SlotCache, ids, *segments: Segment):
    """Runs segments; `ids` belongs to all slots, or is a list by slot."""
    parts = [(ids[s.slot] if isinstance(ids, list) else ids)[s.start : s.end] for s in segments]
    together = torch.cat(parts)
    return model(ForwardBatch(together, segments, None, together.numpy()), cache)


def cold(model: DeepseekV41, cache: SlotCache, ids, full_start: int, length: int = LENGTH):
    """The whole prompt in slot 0, whose blocks are 0, 1, 2, ..."""
    blocks = tuple(range(-(-(length + 16) // BLOCK)))
    cache.reset(0)
    cache.apply_updates([BlockUpdate(slot=0, first=0, blocks=blocks)])
    out = step(model, cache, ids, Segment(0, 0, length, full_start=full_start))
    return model.compute_logits(out.hidden), out.features


def adopt(cache: SlotCache, slot: int, ids: torch.Tensor, hit: int, fresh: int) -> None:
    """The first blocks of slot 0, then new ones from `fresh` on."""
    cache.reset(slot)
    blocks = (*range(hit // BLOCK), *range(fresh, fresh + 16 - hit // BLOCK))
    cache.apply_updates([BlockUpdate(slot=slot, first=0, blocks=blocks[:15])])
    cache.adopt_prefix(slot, ids[:hit])


def warm_segments(slot: int, hit: int, start: int, full_start: int, length: int = LENGTH):
    bounds = {"window_start": start, "pool_start": hit, "full_start": full_start}
    return (
        Segment(slot, start, hit - start, **bounds),
        Segment(slot, hit, length - hit, **bounds),
    )


def warm(model, cache, ids, hit: int, start: int, full_start: int, fresh: int = 40):
    adopt(cache, 1, ids, hit, fresh)
    out = step(model, cache, ids, *warm_segments(1, hit, start, full_start))
    rows = out.rows_of(range(max(hit, full_start) - start, LENGTH - start))
    return model.compute_logits(out.hidden[rows]), out.features[rows]


def block_bytes(cache: SlotCache, blocks: range) -> list[torch.Tensor]:
    return [cache.save_block(block) for block in blocks]


FULL_STARTS = [0, LENGTH - WINDOW, LENGTH - 30]


@pytest.mark.parametrize("full_start", FULL_STARTS)
@pytest.mark.parametrize("hit", [56, 64, 72])
def test_i_exact_replay_equals_cold(hit, full_start, model, bitwise_model, ids) -> None:
    """(i), R11: as many tokens again as the layers that run for all rows can see back."""
    layers = model.config.num_hidden_layers if full_start == 0 else 4
    start = min(hit, full_start or hit) - layers * (WINDOW - 1) - 1
    for one, bitwise in ((model, False), (bitwise_model, True)):
        cache = new_cache(one)
        wanted, features = cold(one, cache, ids, full_start)
        found, found_features = warm(one, cache, ids, hit, start, full_start)
        if bitwise:
            assert torch.equal(found, wanted[-len(found) :])
            assert torch.equal(found_features, features[-len(found) :])
        else:
            assert torch.allclose(found, wanted[-len(found) :], atol=5e-5)


@pytest.mark.parametrize("full_start", FULL_STARTS)
def test_exact_replay_needs_its_length(full_start, bitwise_model, ids) -> None:
    """The bound is no larger than it must be by much: half of it is not exact."""
    hit = 64
    cache = new_cache(bitwise_model)
    wanted, _ = cold(bitwise_model, cache, ids, full_start)
    last = min(hit, full_start or hit)
    found, _ = warm(bitwise_model, cache, ids, hit, last - EXACT // 2, full_start)
    assert not torch.equal(found, wanted[-len(found) :])


@pytest.mark.parametrize("full_start", [0, LENGTH - WINDOW, 50, 70])
@pytest.mark.parametrize(("hit", "replay"), [(56, WINDOW), (64, WINDOW), (72, 2 * WINDOW), (24, 9)])
def test_iii_bounded_replay_equals_the_masked_pass(hit, replay, full_start, model, ids) -> None:
    """(iii): the same truncation from scratch, with masks and no cache; and it is not the full computation."""
    start = hit - replay
    cut = Truncation(window_start=start, pool_start=hit, full_start=full_start)
    wanted = model.logits(ids[:LENGTH], truncation=cut)[max(hit, full_start) :]
    cache = new_cache(model)
    full, _ = cold(model, cache, ids, full_start)
    found, _ = warm(model, cache, ids, hit, start, full_start)
    assert torch.allclose(found, wanted, atol=5e-5)
    if hit - full_start > 0 or full_start == 0:
        assert (found - full[-len(found) :]).abs().max() > 1e-3


@pytest.mark.parametrize("chunks", [[3, 1], [16], [1], [5, 2, 9]])
@pytest.mark.parametrize("full_start", [0, LENGTH - WINDOW, 58])
def test_chunks_after_a_hit(chunks, full_start, model, ids) -> None:
    """R7: replay and suffix in steps of any length, odd ones too, so that pairs wait in the tails."""
    hit, start = 56, 56 - WINDOW
    cut = Truncation(window_start=start, pool_start=hit, full_start=full_start)
    wanted = model.logits(ids, truncation=cut)
    cache = new_cache(model)
    cold(model, cache, ids, full_start)
    adopt(cache, 1, ids, hit, 40)
    at, chunks = start, list(chunks)
    while at < LENGTH + 20:
        size = chunks.pop(0) if len(chunks) > 1 else chunks[0]
        size = min(size, (hit if at < hit else LENGTH + 20) - at)
        segment = Segment(1, at, size, start, hit, full_start)
        out = step(model, cache, ids, segment)
        kept = [p for p in range(at, at + size) if p >= max(hit, full_start)]
        rows = out.rows_of([p - at for p in kept])
        logits = model.compute_logits(out.hidden[rows])
        assert torch.allclose(logits, wanted[kept], atol=5e-5)
        at += size


@pytest.mark.parametrize("full_start", [0, LENGTH - WINDOW])
@pytest.mark.parametrize("replay", [WINDOW, EXACT])
def test_iv_cached_blocks_stay_as_they_are(replay, full_start, model, ids) -> None:
    """(iv), R4: no hit writes a byte of a cached block, in the replay or after it."""
    hit = 64
    cache = new_cache(model)
    cold(model, cache, ids, full_start)
    before = block_bytes(cache, range(hit // BLOCK))
    own = block_bytes(cache, range(hit // BLOCK, LENGTH // BLOCK))
    warm(model, cache, ids, hit, hit - replay, full_start)
    for at in range(LENGTH, LENGTH + 9):
        step(model, cache, ids, Segment(1, at, 1, hit - replay, hit, full_start))
    for one, other in zip(block_bytes(cache, range(hit // BLOCK)), before, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(
        block_bytes(cache, range(hit // BLOCK, LENGTH // BLOCK)), own, strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("full_start", [0, LENGTH - WINDOW, 70])
def test_b38_stale_rings_reach_nothing(full_start, bitwise_model, ids) -> None:
    """B38, B52, R5, (v): whatever a slot's rings and tails held before, replayed and suffix rows read none of it."""
    model, hit = bitwise_model, 64
    cache = new_cache(model)
    cold(model, cache, ids, full_start)
    wanted, features = warm(model, cache, ids, hit, hit - WINDOW, full_start)
    adopt(cache, 1, ids, hit, 40)
    cache.windows[:, 1] = torch.nan
    for tail in cache.tails.values():
        tail[1] = torch.nan
    for block in range(40, 55):
        for tensor in (*cache.pools.values(), *cache.index_keys.values()):
            tensor[block] = torch.nan
    out = step(model, cache, ids, *warm_segments(1, hit, hit - WINDOW, full_start))
    rows = out.rows_of(range(max(hit, full_start) - hit + WINDOW, LENGTH - hit + WINDOW))
    assert torch.equal(model.compute_logits(out.hidden[rows]), wanted)
    assert torch.equal(out.features[rows], features)
    for at in range(LENGTH, LENGTH + 2 * WINDOW):
        segment = Segment(1, at, 1, hit - WINDOW, hit, full_start)
        assert step(model, cache, ids, segment).hidden.isfinite().all()


def test_b38_cold_then_warm_in_the_same_slot(bitwise_model, ids) -> None:
    """The slot that held the request before is given out again, without a reset of its rings."""
    model, hit, full_start = bitwise_model, 64, LENGTH - WINDOW
    cache = new_cache(model)
    cold(model, cache, ids, full_start)
    wanted, _ = warm(model, cache, ids, hit, hit - WINDOW, full_start)
    cold(model, cache, ids, full_start)
    adopt(cache, 0, ids, hit, 60)
    segments = warm_segments(0, hit, hit - WINDOW, full_start)
    out = step(model, cache, ids, *segments)
    rows = out.rows_of(range(full_start - hit + WINDOW, LENGTH - hit + WINDOW))
    assert torch.equal(model.compute_logits(out.hidden[rows]), wanted)


@pytest.mark.parametrize("seed", range(3))
def test_r9_packed_replays_equal_alone(seed, bitwise_model, ids) -> None:
    """R9: replays and suffixes of several requests, other cold prompts and decode rows are one ragged batch."""
    model, rng = bitwise_model, random.Random(seed)
    prompts = [ids.clone() for _ in range(4)]
    hits = [0, *(rng.choice([24, 40, 64]) for _ in range(3))]
    for slot in (1, 2, 3):
        prompts[slot][hits[slot] :] = ids[hits[slot] :].flip(0)
    cuts = [0, *(rng.choice([0, LENGTH - WINDOW]) for _ in range(3))]
    caches = [new_cache(model) for _ in range(2)]
    alone: dict[int, torch.Tensor] = {}
    for number, cache in enumerate(caches):
        cold(model, cache, ids, 0)
        segments: list[Segment] = [Segment(0, LENGTH, 1)]
        for slot in rng.sample([1, 2, 3], 3):
            adopt(cache, slot, prompts[slot], hits[slot], 16 * slot + 2)
            segments += warm_segments(slot, hits[slot], hits[slot] - WINDOW, cuts[slot])
        if number:
            out = step(model, cache, prompts, *segments)
            logits, at = model.compute_logits(out.hidden), 0
            for s in segments:
                kept = [p for p in range(s.start, s.end) if p >= s.full_start]
                rows = out.rows_of([at + p - s.start for p in kept])
                assert torch.equal(logits[rows], alone[s.slot, s.start])
                at += s.num_tokens
        else:
            for s in segments:
                out = step(model, cache, prompts, s)
                alone[s.slot, s.start] = model.compute_logits(out.hidden)
        assert cache.lengths == [LENGTH + 1, LENGTH, LENGTH, LENGTH]


@pytest.mark.parametrize("full_start", [LENGTH - WINDOW, LENGTH - 2 * WINDOW])
def test_the_draft_after_a_hit(full_start, bitwise_model, ids) -> None:
    """The pass that rebuilds the windows gives the draft its context too."""
    model, hit, start = bitwise_model, 64, 64 - EXACT
    cache = new_cache(model)
    _, features = cold(model, cache, ids, full_start)
    model.draft.extend_context(features, range(full_start, LENGTH), [0] * len(features), cache)
    _, features = warm(model, cache, ids, hit, start, full_start)
    model.draft.extend_context(features, range(full_start, LENGTH), [1] * len(features), cache)
    out = model.draft.propose([9, 9], [LENGTH] * 2, [0, 1], cache)
    assert torch.equal(out.base_logits[0], out.base_logits[1])


def test_engram_looks_back_at_the_tokens_of_the_prefix(model, ids) -> None:
    """The n-grams of the first replayed tokens end in ids that were not run again."""
    hit, start = 64, 64 - WINDOW
    cache = new_cache(model)
    cold(model, cache, ids, 0)
    right, _ = warm(model, cache, ids, hit, start, 0)
    changed = ids.clone()
    changed[start - 1] = (changed[start - 1] + 1) % 159
    adopt(cache, 1, changed, hit, 40)
    out = step(model, cache, ids, *warm_segments(1, hit, start, 0))
    wrong = model.compute_logits(out.hidden[WINDOW:])
    assert (right - wrong).abs().max() > 1e-3


def test_r12_decode_and_verify_rows_never_drop_out(model, ids) -> None:
    """R12: behind the prompt a step is the same with and without `full_start`, so it can be a recorded one."""
    full_start = LENGTH - WINDOW
    caches = [new_cache(model) for _ in range(2)]
    for cache in caches:
        cold(model, cache, ids, full_start)
    for at, size in ((LENGTH, 1), (LENGTH + 1, 5), (LENGTH + 6, 1)):
        outs = [
            step(model, cache, ids, Segment(0, at, size, full_start=start))
            for cache, start in zip(caches, (full_start, 0), strict=True)
        ]
        assert outs[0].kept is outs[1].kept is None
        assert torch.equal(outs[0].hidden, outs[1].hidden)


def test_r10_every_row_has_logits_when_nothing_is_left_out(model, ids) -> None:
    cache = new_cache(model)
    logits, features = cold(model, cache, ids, 0)
    assert len(logits) == len(features) == LENGTH
    assert torch.allclose(logits, model.logits(ids[:LENGTH]), atol=5e-5)


def test_vi_what_is_run_again(bitwise_model, ids) -> None:
    """(vi), R2, R3: a replay of the window is W rows, and the suffix may follow in the same step or a later one."""
    model, hit, start = bitwise_model, 64, 64 - WINDOW
    cache = new_cache(model)
    cold(model, cache, ids, 0)
    adopt(cache, 1, ids, hit, 40)
    replay, suffix = warm_segments(1, hit, start, 0)
    assert replay.num_tokens == WINDOW
    together = step(model, cache, ids, replay, suffix).hidden
    adopt(cache, 1, ids, hit, 40)
    first = step(model, cache, ids, replay).hidden
    second = step(model, cache, ids, suffix).hidden
    assert torch.equal(torch.cat((first, second)), together)


@pytest.mark.parametrize(
    "changes", [{"window_start": 0}, {"pool_start": 56}, {"pool_start": 0}, {"start": 61}]
)
def test_replays_that_would_do_harm(changes, model, ids) -> None:
    """R4, R5: what would read rows that nobody wrote, or write rows that others share, is refused before it runs."""
    cache = new_cache(model)
    cold(model, cache, ids, 0)
    adopt(cache, 1, ids, 64, 40)
    replay, _ = warm_segments(1, 64, 64 - WINDOW, 0)
    with pytest.raises(InvariantBroken, match="holds 64 tokens"):
        step(model, cache, ids, dataclasses.replace(replay, **changes))
    assert cache.lengths[1] == 64


def test_a_suffix_must_not_look_behind_a_short_replay(model, ids) -> None:
    cache = new_cache(model)
    cold(model, cache, ids, 0)
    adopt(cache, 1, ids, 64, 40)
    step(model, cache, ids, Segment(1, 62, 2, 62, 64))
    with pytest.raises(InvariantBroken, match="from position 61 on, but they were written from 62"):
        step(model, cache, ids, Segment(1, 64, 3, 0, 64))
    step(model, cache, ids, Segment(1, 64, 3, 62, 64))


def test_the_second_part_of_a_replay_must_not_write_the_prefix(model, ids) -> None:
    hit, start = 64, 64 - 2 * WINDOW
    cache = new_cache(model)
    cold(model, cache, ids, 0)
    adopt(cache, 1, ids, hit, 40)
    step(model, cache, ids, Segment(1, start, WINDOW, start, hit))
    with pytest.raises(InvariantBroken, match="adopted prefix of 64 tokens; its pool_start is 60"):
        step(model, cache, ids, Segment(1, start + WINDOW, WINDOW, start, 60))
    step(model, cache, ids, Segment(1, start + WINDOW, WINDOW, start, hit))


def test_a_suffix_without_windows_is_refused(model, ids) -> None:
    """A hit whose windows were neither replayed nor restored must not read the slot's old rows."""
    cache = new_cache(model)
    cold(model, cache, ids, 0)
    adopt(cache, 1, ids, 64, 40)
    with pytest.raises(InvariantBroken, match="were written from 64 on only"):
        step(model, cache, ids, Segment(1, 64, 5, 0, 64))
