"""The cached forward against the golden set: chunks, decode, verify with rollback, batches, slot reuse."""

from __future__ import annotations

import random

import pytest
import torch

from deepinfer.models.deepseek_v41 import ForwardBatch

TOLERANCE = 2e-4


@pytest.mark.parametrize("size", range(1, 34))
def test_chunked_prefill(size, golden_model, golden, golden_ids, run_chunks) -> None:
    logits, _ = run_chunks(golden_model, golden_ids, [size])
    assert (logits - golden["plain.logits.0"]).abs().max() < TOLERANCE


@pytest.mark.parametrize("prompt", [1, 2, 7, 8, 9, 16, 31])
def test_prefill_then_decode(prompt, golden_model, golden, golden_ids, run_chunks) -> None:
    logits, _ = run_chunks(golden_model, golden_ids, [prompt, 1])
    assert (logits - golden["plain.logits.0"]).abs().max() < TOLERANCE


@pytest.mark.parametrize("mode", ["qat", "actqat"])
@pytest.mark.parametrize("sizes", [[33], [1], [10, 1], [5]])
def test_rounded_modes(mode, sizes, load_golden, golden, golden_ids, run_chunks) -> None:
    logits, _ = run_chunks(load_golden(mode), golden_ids, sizes)
    rows = golden["qat.row_noise.0"] < 2e-4
    if mode == "actqat":
        rows[6:21] = False  # one value at a rounding edge, see test_golden_sequence
    assert (logits - golden[f"{mode}.logits.0"])[rows].abs().max() < 1e-3


@pytest.mark.parametrize("seed", range(8))
def test_verify_with_rollback(seed, golden_model, golden, golden_ids, run_chunks) -> None:
    rng = random.Random(seed)
    start = rng.randint(1, 12)
    _, cache = run_chunks(golden_model, golden_ids[:start], [rng.randint(1, start)])
    wanted, at = golden["plain.logits.0"], start
    while at < len(golden_ids):
        right = rng.randint(1, min(6, len(golden_ids) - at))
        wrong = rng.randint(0, 6 - right) if right < 6 else 0
        ids = golden_ids[at : at + right].tolist() + [rng.randrange(126) for _ in range(wrong)]
        out = golden_model(ForwardBatch.from_segments([(0, at, ids)]), cache)
        logits = golden_model.compute_logits(out.hidden[:right])
        assert (logits - wanted[at : at + right]).abs().max() < TOLERANCE
        at += right
        cache.truncate(0, at)


@pytest.mark.parametrize("seed", range(6))
def test_ragged_batches(seed, golden_model, golden, golden_ids) -> None:
    """Requests of different lengths and chunk sizes share steps; one of them rolls back."""
    rng = random.Random(seed)
    slots = rng.sample(range(7), 4)
    cache = golden_model.new_cache(7, 48, 33)
    done = dict.fromkeys(slots, 0)
    offset = {slot: rng.randint(0, 3) for slot in slots}
    while any(n < len(golden_ids) for n in done.values()):
        live = [s for s in slots if done[s] < len(golden_ids) and rng.random() < 0.8]
        rng.shuffle(live)
        if not live:
            continue
        segments, right = [], {}
        for slot in live:
            at = done[slot]
            size = rng.choice([1, 1, 2, 3, 5, 12, 33][offset[slot] :])
            right[slot] = min(size, len(golden_ids) - at)
            ids = golden_ids[at : at + right[slot]].tolist()
            ids += [rng.randrange(126) for _ in range(rng.randint(0, 2))]
            segments.append((slot, at, ids[:33]))
            right[slot] = min(right[slot], 33)
        batch = ForwardBatch.from_segments(segments)
        logits = golden_model.compute_logits(golden_model(batch, cache).hidden)
        row = 0
        for slot, at, ids in segments:
            n = right[slot]
            wanted = golden["plain.logits.0"][at : at + n]
            assert (logits[row : row + n] - wanted).abs().max() < TOLERANCE, (slot, at, n)
            row += len(ids)
            done[slot] = at + n
            cache.truncate(slot, at + n)


def test_slot_reuse_leaves_no_trace(golden_model, golden_ids, run_chunks) -> None:
    cache = golden_model.new_cache(2, 96, 40)
    fresh = [t.clone() for t in tensors_of(cache)]
    other = golden_ids.flip(0)
    wanted, _ = run_chunks(golden_model, other, [33])
    _, cache = run_chunks(golden_model, golden_ids, [11], cache, slot=1)
    cache.truncate(1, 30)
    cache.reset(1)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(cache), fresh, strict=True))
    logits, _ = run_chunks(golden_model, other, [33], cache, slot=1)
    assert torch.equal(logits, wanted)


def test_a_broken_neighbour_changes_nothing(golden_model, golden_ids, run_chunks) -> None:
    """Rows of other slots are never read, not even with weight zero."""
    wanted, _ = run_chunks(golden_model, golden_ids, [4])
    cache = golden_model.new_cache(3, 96, 40)
    for tensor in tensors_of(cache):
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
    cache.kv[cache.rows.null_row] = 0
    cache._high_water = [96] * 3
    cache.reset(1)
    logits, _ = run_chunks(golden_model, golden_ids, [4], cache, slot=1)
    assert torch.equal(logits, wanted)


def tensors_of(cache) -> list[torch.Tensor]:
    return [cache.kv, cache.tokens, *cache.index_keys.values(), *cache.tails.values()]
