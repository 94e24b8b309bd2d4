"""Steps of fixed shape against ragged ones."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer.core.errors import InvariantBroken
from deepinfer.core.plan import BlockUpdate
from deepinfer.kernels.fused import fused_kernels
from deepinfer.models.deepseek_v41 import DeepseekV41, ForwardBatch, Segment, SlotCache
from deepinfer.models.deepseek_v41.decode_inputs import DecodeInputs, cannot_decode, row_values
from deepinfer.models.deepseek_v41.decode_pass import DecodePass
from deepinfer.models.deepseek_v41.decode_step import DecodeStep
from deepinfer.models.deepseek_v41.hyper_connection import collapse, initial_pre

TOLERANCE = 2e-4
SLOTS, MAX_TOKENS, BLOCK = 5, 96, 16


def paged_cache(model: DeepseekV41, shuffle: random.Random | None = None) -> SlotCache:
    if shuffle is None:
        return model.new_cache(SLOTS, MAX_TOKENS, 40)
    blocks = list(range(SLOTS * MAX_TOKENS // BLOCK))
    cache = model.new_cache(SLOTS, MAX_TOKENS, 40, num_blocks=len(blocks), block_size=BLOCK)
    shuffle.shuffle(blocks)
    each = MAX_TOKENS // BLOCK
    cache.apply_updates(
        [BlockUpdate(slot=s, first=0, blocks=tuple(blocks[s * each : (s + 1) * each])) for s in range(SLOTS)]
    )  # fmt: skip
    return cache


def prefill(model: DeepseekV41, cache: SlotCache, lengths: dict[int, int], ids: np.ndarray, **options: int) -> None:  # fmt: skip
    for slot, length in lengths.items():
        at = 0
        while at < length:
            count = min(32, length - at)
            segment = Segment(slot, at, count, **options)
            part = torch.from_numpy(ids[slot, at : at + count].copy())
            model(ForwardBatch(part, (segment,)), cache)
            at += count


def tensors(cache: SlotCache) -> list[Tensor]:
    return [*cache.rows.tensors(), cache.tokens, *cache.tails.values()]


def run_fixed(
    step: DecodeStep,
    cache: SlotCache,
    rows: list[tuple[Segment, list[int]]],
    shape: tuple[int, int],
    context: int = MAX_TOKENS,
    future: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    segments = tuple(s for s, _ in rows)
    assert not cannot_decode(segments, cache)
    cache.begin(segments)
    floors = cache.full_floors(segments)
    inputs = DecodeInputs.empty(*shape)
    values = [
        row_values(s, floor, from_future=future is not None)
        for s, floor in zip(segments, floors, strict=True)
    ]
    inputs.fill([ids for _, ids in rows], values)
    out = step(inputs, context, future)
    cache.commit(segments)
    used = [i * shape[1] + t for i, s in enumerate(segments) for t in range(s.num_tokens)]
    return out.logits[used], None if out.features is None else out.features[used]


def run_ragged(
    model: DeepseekV41, cache: SlotCache, rows: list[tuple[Segment, list[int]]]
) -> tuple[Tensor, Tensor | None]:
    ids = torch.tensor([i for _, row in rows for i in row])
    out = model(ForwardBatch(ids, tuple(s for s, _ in rows)), cache)
    return model.compute_logits(out.hidden), out.features


@pytest.fixture(params=["none", "cache", "full", "full, deterministic"])
def model(request, small_config, random_model) -> DeepseekV41:
    level, *mode = request.param.split(", ")
    made = random_model(small_config(), level).set_deterministic(bool(mode))
    made.set_engram_token_map(range(160))
    return made


def are_equal(model: DeepseekV41, one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit in deterministic mode, and closely without."""
    return (
        torch.equal(one, other)
        if model.deterministic
        else torch.allclose(one, other, atol=TOLERANCE)
    )


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_random_mixtures_equal_ragged_steps(model, paged, seed) -> None:
    rng = random.Random(seed)
    shuffle = random.Random(seed) if paged else None
    one, other = paged_cache(model, shuffle), paged_cache(model, shuffle and random.Random(seed))
    ids = np.random.default_rng(seed).integers(5, 150, (SLOTS, MAX_TOKENS))
    lengths = {slot: rng.choice([1, 2, 5, 7, 8, 9, 16, 31, 40, 63]) for slot in range(SLOTS)}
    for cache in (one, other):
        prefill(model, cache, lengths, ids)
    step = DecodeStep(model, other)
    for _ in range(5):
        rows = []
        for slot in rng.sample(range(SLOTS), rng.randint(1, SLOTS)):
            at, count = one.lengths[slot], rng.randint(1, 5)
            rows.append((Segment(slot, at, count), ids[slot, at : at + count].tolist()))
        shape = (rng.randint(len(rows), 6), rng.randint(max(len(r[1]) for r in rows), 6))
        context = rng.choice([c for c in (16, 32, 64, 96) if c >= max(s.end for s, _ in rows)])
        wanted, features = run_ragged(model, one, rows)
        logits, found = run_fixed(step, other, rows, shape, context)
        assert are_equal(model, logits, wanted)
        assert are_equal(model, found, features)
        assert torch.equal(logits.argmax(-1), wanted.argmax(-1))
        for a, b in zip(tensors(one), tensors(other), strict=True):
            assert are_equal(model, a.float(), b.float())
        for segment, row in rows:  # rejected drafts are run over
            back = rng.randint(0, len(row) - 1)
            for cache in (one, other):
                cache.truncate(segment.slot, segment.end - back)


def test_the_layers_own_forward_runs_in_the_pass(small_model, small_config) -> None:
    ids = np.random.default_rng(0).integers(5, 150, (SLOTS, MAX_TOKENS))
    small_model.set_engram_token_map(range(160))
    one, other = paged_cache(small_model), paged_cache(small_model)
    for cache in (one, other):
        prefill(small_model, cache, {0: 41, 3: 6}, ids)
    rows = [(Segment(3, 6, 2), [9, 10]), (Segment(0, 41, 1), [11])]
    wanted, _ = run_ragged(small_model, one, rows)
    segments = tuple(s for s, _ in rows)
    other.begin(segments)
    inputs = DecodeInputs.empty(2, 2)
    inputs.fill([r for _, r in rows], [row_values(s, 0) for s in segments])
    frequencies = small_model._frequencies_on(torch.device("cpu"))
    with torch.inference_mode():
        run = DecodePass(inputs, other, frequencies, 64, fused_kernels("cpu"))
        run.engram_rows = small_model.engram_hash.rows(run.history(small_model.engram_hash.ngram))
        streams = small_model.embed.weight[run.ids].unsqueeze(1).repeat(1, 4, 1)
        pre = initial_pre(4, 4, torch.device("cpu"))
        for layer in small_model.layers:
            streams, pre = layer(streams, pre, run)
        logits = small_model.compute_logits(collapse(streams, pre))
    assert torch.allclose(logits[[0, 1, 2]], wanted, atol=TOLERANCE)


def test_padding_changes_nothing(small_model) -> None:
    ids = np.random.default_rng(0).integers(5, 150, (SLOTS, MAX_TOKENS))
    cache = paged_cache(small_model, random.Random(0))
    prefill(small_model, cache, dict.fromkeys(range(SLOTS), 33), ids)
    before = [t.clone() for t in tensors(cache)]
    step = DecodeStep(small_model, cache)
    inputs = DecodeInputs.empty(4, 3)
    inputs.fill([], [])
    inputs.values[:, 0] = 95  # what an unused row says does not count
    inputs.values[1:, 1] = torch.tensor([1, 2, 3])
    step(inputs, MAX_TOKENS)
    for a, b in zip(before, tensors(cache), strict=True):
        assert torch.equal(a, b)


def test_tokens_sampled_on_the_device(small_model) -> None:
    ids = np.random.default_rng(1).integers(5, 150, (SLOTS, MAX_TOKENS))
    one, other = paged_cache(small_model), paged_cache(small_model)
    for cache in (one, other):
        prefill(small_model, cache, {1: 20, 2: 9}, ids)
    rows = [(Segment(2, 9, 1), [77]), (Segment(1, 20, 2), [78, 12])]
    wanted, _ = run_ragged(small_model, one, rows)
    future = torch.tensor([0, 78, 77, 0, 0])
    unknown = [(s, [0, *row[1:]]) for s, row in rows]
    logits, _ = run_fixed(DecodeStep(small_model, other), other, unknown, (3, 2), 64, future)
    assert torch.allclose(logits, wanted, atol=TOLERANCE)
    assert int(other.tokens[1, 20]) == 78


def test_windows_begin_at_their_floors(model) -> None:
    """Behind a replay and a narrowed prompt, decode rows see windows that begin later."""
    ids = np.random.default_rng(2).integers(5, 150, (SLOTS, MAX_TOKENS))
    caches = paged_cache(model, random.Random(2)), paged_cache(model, random.Random(2))
    for cache in caches:
        prefill(model, cache, {0: 40}, ids, full_start=35)
        blocks = cache.table.host[0, :2].tolist()
        cache.apply_updates([BlockUpdate(slot=4, first=0, blocks=(*blocks, *cache.table.host[4, 2:].tolist()))])  # fmt: skip
        cache.adopt_prefix(4, ids[0, :32])
        options = {"window_start": 29, "pool_start": 32, "full_start": 30}
        segment = Segment(4, 29, 3, **options)
        model(ForwardBatch(torch.from_numpy(ids[0, 29:32].copy()), (segment,)), cache)
        segment = Segment(4, 32, 2, **options)
        model(ForwardBatch(torch.from_numpy(ids[0, 32:34].copy()), (segment,)), cache)
    one, other = caches
    step = DecodeStep(model, other)
    for k in range(4):
        rows = [
            (Segment(0, 40 + k, 1, full_start=35), [20 + k]),
            (Segment(4, 34 + k, 1, window_start=29, pool_start=32, full_start=30), [30 + k]),
        ]
        wanted, _ = run_ragged(model, one, copy.copy(rows))
        logits, _ = run_fixed(step, other, rows, (2, 1), 64)
        assert are_equal(model, logits, wanted)


def test_what_has_no_fixed_shape(small_model) -> None:
    cache = paged_cache(small_model)
    assert "two segments" in cannot_decode((Segment(0, 3, 1), Segment(0, 4, 1)), cache)
    assert "replays" in cannot_decode((Segment(0, 3, 1, pool_start=4),), cache)
    assert "replays" in cannot_decode((Segment(0, 3, 1, full_start=4),), cache)
    assert "longer" in cannot_decode((Segment(0, 3, 30),), cache)
    assert cannot_decode((Segment(0, 3, 1), Segment(1, 3, 2)), cache) == ""
    with pytest.raises(InvariantBroken, match="do not fit"):
        DecodeInputs.empty(1, 1).fill([[1], [2]], [[0] * 6, [0] * 6])
