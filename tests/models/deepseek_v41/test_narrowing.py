"""Rows that stop behind the last KV source: the same numbers as a masked full pass, however the prompt is cut."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from deepinfer.core.errors import InvariantBroken
from deepinfer.models.deepseek_v41 import (
    DeepseekV41,
    DeepseekV41Config,
    ForwardBatch,
    Segment,
    SlotCache,
    Truncation,
    narrowing_of,
)

LENGTH = 60


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 159, (LENGTH + 20,), generator=torch.Generator().manual_seed(11))


def run(
    model: DeepseekV41, cache: SlotCache, segments: list[Segment], ids: torch.Tensor
) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """Logits by position of the rows that are left, and all their features."""
    parts = torch.cat([ids[s.start : s.end] for s in segments])
    batch = ForwardBatch(parts, tuple(segments), None, parts.numpy())
    out = model(batch, cache)
    rows = np.arange(len(parts)) if out.kept is None else out.kept
    assert len(out.hidden) == len(out.features) == len(rows)
    logits = model.compute_logits(out.hidden)
    at = batch.host_positions()[rows].tolist()
    return dict(zip(at, logits, strict=True)), out.features


def narrow_chunks(
    model: DeepseekV41, ids: torch.Tensor, sizes: list[int], full_start: int, cache: SlotCache
) -> dict[int, torch.Tensor]:
    at, found, sizes = 0, {}, list(sizes)
    while at < len(ids):
        size = min(sizes.pop(0) if len(sizes) > 1 else sizes[0], len(ids) - at)
        segment = Segment(0, at, size, full_start=full_start)
        found |= run(model, cache, [segment], ids)[0]
        at += size
    return found


@pytest.mark.parametrize("full_start", [1, 9, 30, 52, 59])
@pytest.mark.parametrize("sizes", [[LENGTH], [16], [7], [1], [33, 1], [50, 3]])
def test_any_chunks_equal_the_masked_pass(full_start, sizes, small_model, ids) -> None:
    wanted = small_model.logits(ids[:LENGTH], truncation=Truncation(full_start=full_start))
    cache = small_model.new_cache(1, 96, LENGTH)
    found = narrow_chunks(small_model, ids[:LENGTH], sizes, full_start, cache)
    assert sorted(found) == list(range(full_start, LENGTH))
    for position, row in found.items():
        assert torch.allclose(row, wanted[position], atol=5e-5), position


def test_narrowing_changes_numbers(small_model, ids) -> None:
    """Otherwise equal numbers would prove nothing; the row at the cut differs, and the first rows of all do not."""
    full = small_model.logits(ids[:LENGTH])
    narrow = small_model.logits(ids[:LENGTH], truncation=Truncation(full_start=52))
    assert (full - narrow)[52].abs().max() > 1e-2
    assert (full - narrow)[LENGTH - 1].abs().max() > 1e-3
    assert torch.equal(full, small_model.logits(ids[:LENGTH], truncation=Truncation()))
    window = small_model.config.sliding_window
    assert window == LENGTH - 52


def test_full_start_of_zero_is_the_plain_step(small_model, ids) -> None:
    plain, zero = small_model.new_cache(1, 96, LENGTH), small_model.new_cache(1, 96, LENGTH)
    for start, end in ((0, 40), (40, 41), (41, LENGTH)):
        batch = ForwardBatch.from_segments([(0, start, ids[start:end].tolist())])
        wanted = small_model(batch, plain)
        segment = Segment(0, start, end - start, full_start=0)
        found = small_model(ForwardBatch(ids[start:end], (segment,), None, None), zero)
        assert found.kept is None
        assert torch.equal(found.hidden, wanted.hidden)
        assert torch.equal(found.features, wanted.features)


def test_pools_are_those_of_the_full_pass(small_model, ids) -> None:
    """Rows that stop write the same pool rows and index keys; windows above the cut stay empty."""
    full, narrow = (small_model.new_cache(1, 96, LENGTH) for _ in range(2))
    small_model(ForwardBatch.from_segments([(0, 0, ids[:LENGTH].tolist())]), full)
    narrow_chunks(small_model, ids[:LENGTH], [LENGTH], 52, narrow)
    for source, pool in full.pools.items():
        assert torch.allclose(narrow.pools[source], pool, atol=1e-5)
        assert torch.allclose(narrow.index_keys[source], full.index_keys[source], atol=1e-5)
    first = narrowing_of(small_model.config).first_layer
    assert torch.allclose(narrow.windows[:first], full.windows[:first], atol=1e-5)
    for layer in range(first, small_model.config.num_hidden_layers):
        used = narrow.windows[layer, 0].abs().sum(-1) > 0
        assert used.nonzero().flatten().tolist() == list(range(52, LENGTH))


@pytest.mark.parametrize("seed", range(4))
def test_packed_requests_equal_alone(seed, small_model, ids) -> None:
    """Prompts of other lengths and cuts, decode and verify rows share steps; some rows drop out of them."""
    rng = random.Random(seed)
    lengths = [rng.randint(10, LENGTH) for _ in range(4)]
    window = small_model.config.sliding_window
    cuts = [max(0, n - window) for n in lengths]
    wanted = [small_model.logits(ids, truncation=Truncation(full_start=cut)) for cut in cuts]
    cache = small_model.new_cache(4, 96, 32)
    done = [0] * 4
    while min(n - d for n, d in zip([x + 6 for x in lengths], done, strict=True)) > 0:
        segments = []
        for slot in rng.sample(range(4), rng.randint(1, 4)):
            left = lengths[slot] + 6 - done[slot]
            if left > 0:
                size = min(left, rng.choice([1, 2, 9, 32]))
                segments.append(Segment(slot, done[slot], size, full_start=cuts[slot]))
                done[slot] += size
        if not segments:
            continue
        parts = torch.cat([ids[s.start : s.end] for s in segments])
        batch = ForwardBatch(parts, tuple(segments), None, parts.numpy())
        out = small_model(batch, cache)
        logits = small_model.compute_logits(out.hidden)
        at = 0
        for s in segments:
            kept = [p for p in range(s.start, s.end) if p >= s.full_start]
            rows = out.rows_of([at + p - s.start for p in kept])
            for row, position in zip(rows, kept, strict=True):
                expected = wanted[s.slot][position]
                assert torch.allclose(logits[row], expected, atol=5e-5), (s, position)
            at += s.num_tokens


def test_rows_that_stopped_have_no_logits(small_model, ids) -> None:
    cache = small_model.new_cache(1, 96, 32)
    segment = Segment(0, 0, 20, full_start=17)
    out = small_model(ForwardBatch(ids[:20], (segment,), None, None), cache)
    assert out.kept.tolist() == [17, 18, 19]
    assert out.rows_of([19, 17]).tolist() == [2, 0]
    with pytest.raises(InvariantBroken, match="Batch row 16 stopped"):
        out.rows_of([17, 16])
    nothing = small_model(
        ForwardBatch(ids[20:24], (Segment(0, 20, 4, full_start=30),), None, None), cache
    )
    assert nothing.hidden.shape == (0, 64)
    assert nothing.features.shape == (0, 128)
    assert nothing.kept.tolist() == []


def test_the_draft_sees_the_kept_rows_only(small_model, ids) -> None:
    """Features of kept rows seed the draft as a window of them would."""
    window = small_model.config.sliding_window
    cut = LENGTH - window
    cache = small_model.new_cache(2, 96, LENGTH)
    _, features = run(small_model, cache, [Segment(0, 0, LENGTH, full_start=cut)], ids)
    small_model.draft.extend_context(features, range(cut, LENGTH), [0] * window, cache)
    found = small_model.draft.propose([9], [LENGTH], [0], cache)
    narrow_chunks(
        small_model, ids[:LENGTH], [LENGTH], cut, other := small_model.new_cache(1, 96, 60)
    )
    other.reset(0)
    _, pieces = [], []
    for at in range(0, LENGTH, 13):
        size = min(13, LENGTH - at)
        _, part = run(small_model, other, [Segment(0, at, size, full_start=cut)], ids)
        kept = range(max(at, cut), at + size)
        small_model.draft.extend_context(part, kept, [0] * len(kept), other)
        pieces.append(part)
    assert torch.allclose(torch.cat(pieces), features, atol=5e-5)
    wanted = small_model.draft.propose([9], [LENGTH], [0], other)
    assert torch.allclose(found.base_logits, wanted.base_logits, atol=5e-5)


@pytest.mark.parametrize("targets", [[2, 4, 7], [4], [3, 5]])
def test_target_layers_at_and_below_the_cut(targets, random_model, small_config, ids) -> None:
    """Features that were taken from all rows are cut to the kept ones."""
    model = random_model(small_config(dspark_target_layer_ids=targets))
    whole, narrow = (model.new_cache(1, 96, LENGTH) for _ in range(2))
    _, wanted = run(model, whole, [Segment(0, 0, LENGTH)], ids)
    _, found = run(model, narrow, [Segment(0, 0, LENGTH, full_start=52)], ids)
    assert found.shape == (LENGTH - 52, 64 * len(targets))
    below = 64 * sum(target <= 4 for target in targets)
    assert torch.allclose(found[:, :below], wanted[52:, :below], atol=1e-4)


@pytest.mark.parametrize("full_start", [6, 14, 20])
def test_images(full_start, small_model) -> None:
    ids = torch.tensor([5, 6, 7, *[159] * 9, 8, 9, 10, 11, *[159] * 2, 12, 13, 14, 15])
    images = torch.randn(11, 64, generator=torch.Generator().manual_seed(5)) * 0.5
    wanted = small_model.logits(ids, images, truncation=Truncation(full_start=full_start))
    cache = small_model.new_cache(1, 32, 32)
    segment = Segment(0, 0, len(ids), full_start=full_start)
    out = small_model(ForwardBatch(ids, (segment,), images, ids.numpy()), cache)
    logits = small_model.compute_logits(out.hidden)
    assert torch.allclose(logits, wanted[full_start:], atol=5e-5)


def test_layout_check(small_config) -> None:
    found = narrowing_of(small_config())
    assert (found.first_layer, found.window_layers, found.reason) == (4, 4, "")
    assert found.exact_replay(8) == 4 * 7 + 1
    engram = narrowing_of(small_config(engram_layer_ids=[0, 5], engram_num_embeddings=[5190, 5436]))
    assert engram.first_layer is None
    assert engram.window_layers == 8
    assert "layer 5 has an Engram" in engram.reason
    window_only = narrowing_of(small_config(compress_ratios=[0, 2, 2, 2, 1, 1, 1, 0, 0]))
    assert "layer 7 has ratio 0" in window_only.reason
    pairs = narrowing_of(
        small_config(compress_ratios=[0, 2, 2, 2, 2, 2, 2, 2, 0], kv_source_layer_ids=[1, 2, 4])
    )
    assert "layer 4 has ratio 2" in pairs.reason


def test_a_layout_that_cannot_narrow(random_model, small_config, ids) -> None:
    model = random_model(small_config(engram_layer_ids=[0, 5], engram_num_embeddings=[5190, 5436]))
    cache = model.new_cache(1, 96, 32)
    batch = ForwardBatch(ids[:9], (Segment(0, 0, 9, full_start=4),), None, None)
    with pytest.raises(InvariantBroken, match="layer 5 has an Engram"):
        model(batch, cache)
    assert cache.lengths == [0]


def test_the_published_layout(repo_root) -> None:
    folder = repo_root / "tests" / "data" / "deepseek_v41_flash"
    found = narrowing_of(DeepseekV41Config.from_pretrained(folder))
    assert found.first_layer == found.window_layers == 20
    assert found.exact_replay(128) == 20 * 127 + 1
