"""Recorded decode steps; on the CPU a recording is a call, on a GPU a graph."""

from __future__ import annotations

import pytest
import torch

from deepinfer.core.errors import ConfigError
from deepinfer.engine.graph_buckets import bucket_for, recorded_rows
from deepinfer.engine.graphs import (
    DecodeGraphs,
    GraphBucket,
    GraphRow,
    context_buckets,
    row_buckets,
)
from deepinfer.models import load_model
from deepinfer.models.deepseek_v41 import DeepseekV41, ForwardBatch, Segment, SlotCache

PROMPTS = {0: [0, 11, 12, 13, 14], 1: [0, 30, 31], 3: [0, *range(40, 90)]}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=DEVICES)
def model(request) -> DeepseekV41:
    return load_model("nano", device=request.param, dtype=torch.float32, rounding="none")


@pytest.fixture
def cache(model) -> SlotCache:
    cache = model.new_cache(4, 512, 64)
    prefill(model, cache)
    return cache


def prefill(model: DeepseekV41, cache: SlotCache) -> None:
    device = cache.device
    batch = [(slot, 0, ids) for slot, ids in PROMPTS.items()]
    model(ForwardBatch.from_segments(batch, device=device), cache)


def eager(model: DeepseekV41, cache: SlotCache, rows: list[GraphRow]) -> torch.Tensor:
    ids = torch.tensor([i for row in rows for i in row.ids])
    out = model(ForwardBatch(ids, tuple(row.segment for row in rows), None, ids.numpy()), cache)
    return model.compute_logits(out.hidden)


def test_shapes_are_recorded_when_they_first_come(model, cache) -> None:
    graphs = DecodeGraphs(model, cache, on_demand=True)
    for _ in range(2):
        rows = [GraphRow(Segment(s, cache.lengths[s], 1), [9]) for s in (0, 1, 3)]
        assert graphs.try_run(rows) is not None
    assert graphs.buckets == (GraphBucket(4, 1, 512),)
    assert graphs.stats.hits == {GraphBucket(4, 1, 512): 2}
    assert graphs.try_run([GraphRow(Segment(0, cache.lengths[0], 18), [9] * 18)]) is None
    assert graphs.stats.misses == {"no bucket": 1}
    rows = [GraphRow(Segment(s, cache.lengths[s], n), [9] * n) for s, n in ((0, 1), (1, 6), (3, 3))]
    assert graphs.try_run(rows) is not None
    assert graphs.try_run([GraphRow(Segment(0, cache.lengths[0], 1), [9])]) is not None
    assert graphs.buckets == (
        GraphBucket(4, 1, 512),
        GraphBucket(12, 1, 512),
        GraphBucket(1, 1, 512),
    )


def test_shapes_on_demand_are_few() -> None:
    def shape(rows: int, context: int) -> GraphBucket:
        return bucket_for(rows, context, most_rows=90, most_context=10_000)

    assert shape(1, 5) == GraphBucket(1, 1, 1024)
    assert shape(33, 1025) == GraphBucket(48, 1, 4096)
    assert shape(81, 4097) == GraphBucket(90, 1, 10_000)
    found = {shape(r, c).rows for r in range(1, 91) for c in range(1, 10_001, 70)}
    assert sorted(found) == [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 90]
    rows = [recorded_rows(n) for n in range(1, 5000)]
    assert rows == sorted(rows)
    assert all(0 <= size - n < max(4, 0.5 * n) for n, size in enumerate(rows, 1))
    assert len(set(rows)) < 40
    assert all(recorded_rows(size) == size for size in set(rows))


def test_greedy_tokens_equal_eager_ones(model, cache) -> None:
    other = model.new_cache(4, 512, 64)
    prefill(model, other)
    future = torch.zeros(4, dtype=torch.int64, device=cache.device)
    graphs = DecodeGraphs(model, cache, future=future)
    report = graphs.warmup([GraphBucket(4, 1, 64), GraphBucket(4, 1, 256), GraphBucket(2, 1, 256)])
    assert len(report.buckets) == 3
    assert report.skipped == ""
    last = {0: 20, 1: 21, 3: 22}
    future[[0, 1, 3]] = torch.tensor([20, 21, 22], device=future.device)
    for _ in range(24):
        slots = [3, 0, 1]
        rows = [GraphRow(Segment(s, other.lengths[s], 1), [last[s]]) for s in slots]
        wanted = eager(model, other, rows)
        unknown = [GraphRow(Segment(s, cache.lengths[s], 1), [0], from_future=True) for s in slots]
        run = graphs.try_run(unknown)
        assert run is not None
        found = run.logits[list(run.offsets)]
        assert torch.allclose(found, wanted, atol=1e-3)
        tokens = found.argmax(-1)
        assert torch.equal(tokens, wanted.argmax(-1))
        future[torch.tensor(slots, device=future.device)] = tokens
        last.update(zip(slots, tokens.tolist(), strict=True))
    assert cache.lengths == other.lengths
    # The longest row leaves the short context on the way, at 64 tokens.
    assert graphs.stats.hits == {GraphBucket(4, 1, 64): 13, GraphBucket(4, 1, 256): 11}
    assert graphs.stats.padded_tokens == 24
    graphs.close()
    assert graphs.try_run(unknown) is None


@pytest.mark.parametrize("padded", [False, True])
def test_verify_rows_of_several_lengths(model, cache, padded: bool) -> None:
    other = model.new_cache(4, 512, 64)
    prefill(model, other)
    graphs = DecodeGraphs(model, cache)
    graphs.warmup([GraphBucket(4, 6, 512) if padded else GraphBucket(16, 1, 512)])
    for _ in range(3):
        rows = [
            GraphRow(Segment(0, cache.lengths[0], 6), [7, 8, 9, 10, 11, 12]),
            GraphRow(Segment(3, cache.lengths[3], 1), [5]),
            GraphRow(Segment(1, cache.lengths[1], 3), [5, 6, 7]),
        ]
        wanted = eager(model, other, rows)
        run = graphs.try_run(rows, copy_features=True)
        places = [o + t for o, r in zip(run.offsets, rows, strict=True) for t in range(len(r.ids))]
        assert run.offsets == ((0, 6, 12) if padded else (0, 6, 7))
        assert graphs.stats.padded_tokens % (14 if padded else 6) == 0
        assert torch.allclose(run.logits[places], wanted, atol=1e-3)
        for each in (cache, other):
            each.truncate(0, each.lengths[0] - 4)


def test_tokens_as_rows_have_the_bits_of_the_general_pass(model, cache) -> None:
    model.set_deterministic(True)
    try:
        other = model.new_cache(4, 512, 64)
        for each in (cache, other):
            for slot in PROMPTS:
                each.reset(slot)
            prefill(model, each)
        graphs = DecodeGraphs(model, cache)
        graphs.warmup([GraphBucket(12, 1, 512)])
        for _ in range(4):
            rows = [
                GraphRow(Segment(s, cache.lengths[s], n), list(range(7, 7 + n)))
                for s, n in ((3, 6), (0, 1), (1, 4))
            ]
            wanted = eager(model, other, rows)
            run = graphs.try_run(rows)
            assert torch.equal(run.logits[:11], wanted)
            for each in (cache, other):
                each.truncate(3, each.lengths[3] - 4)
    finally:
        model.set_deterministic(False)


def test_what_fits_no_recording_changes_nothing(model, cache) -> None:
    graphs = DecodeGraphs(model, cache)
    graphs.warmup([GraphBucket(2, 1, 64)])
    lengths = list(cache.lengths)
    at = cache.lengths
    assert graphs.try_run([]) is None
    assert graphs.try_run([GraphRow(Segment(0, at[0], 3), [1, 2, 3])]) is None
    assert graphs.try_run([GraphRow(Segment(s, at[s], 1), [1]) for s in (0, 1, 3)]) is None
    assert graphs.try_run([GraphRow(Segment(0, at[0], 1), [1], from_future=True)]) is None
    late = Segment(0, at[0], 1, pool_start=at[0] + 1)
    assert graphs.try_run([GraphRow(late, [1])]) is None
    assert graphs.stats.misses == {
        "no rows": 1, "no bucket": 2, "ids unknown": 1, "not a decode step": 1
    }  # fmt: skip
    assert cache.lengths == lengths
    for rows, tokens in ((69, 1), (5, 2)):
        with pytest.raises(ConfigError, match=f"rows {rows}"):
            graphs.warmup([GraphBucket(rows, tokens, 64)])


def test_arithmetic_that_was_switched_after_recording(model, cache) -> None:
    graphs = DecodeGraphs(model, cache)
    graphs.warmup([GraphBucket(1, 1, 64)])
    row = GraphRow(Segment(0, 5, 1), [1])
    model.deterministic = True
    try:
        assert graphs.try_run([row]) is None
    finally:
        model.deterministic = False
    assert graphs.stats.misses == {"other arithmetic": 1}
    assert graphs.try_run([row]) is not None


def test_a_step_that_cannot_be_recorded(model, cache, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs = DecodeGraphs(model, cache)
    monkeypatch.setattr(graphs, "_record", refuse)
    assert "not permitted" in graphs.warmup([GraphBucket(1, 1, 64)]).skipped
    assert graphs.try_run([GraphRow(Segment(0, 5, 1), [1])]) is None
    assert graphs.stats.misses == {"unsupported": 1}


def test_bucket_tables() -> None:
    assert row_buckets(1) == (1,)
    assert row_buckets(20) == (1, 2, 4, 8, 16, 20)
    assert row_buckets(300)[-4:] == (240, 256, 288, 300)
    assert context_buckets(100) == (100,)
    assert context_buckets(1500) == (256, 512, 1024, 1500)
