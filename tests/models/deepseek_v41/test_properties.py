"""Properties of the random small model: causality, chunking, ties, replay, twins."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from deepinfer.models.deepseek_v41 import DeepseekV41, ForwardBatch, Segment, small_cpu
from deepinfer.models.deepseek_v41.topk import topk_lowest_index

LENGTH = 80


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 159, (LENGTH,), generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module")
def one_shot(small_model, ids) -> torch.Tensor:
    return small_model.logits(ids)


def test_every_mechanism_bites(small_model, ids) -> None:
    """Otherwise the other tests here would prove little."""
    seen = {}
    attention = small_model.layers[6].attn
    hook = attention.register_forward_hook(lambda _, args, out: seen.update(run=args[1]))
    small_model.logits(ids)
    hook.remove()
    config, visible = small_model.config, torch.arange(1, LENGTH + 1)
    assert (seen["run"].selected.sum(-1) == visible.clamp_max(config.index_topk)).all()
    candidates = seen["run"].candidates.sum(-1)
    assert (candidates < visible)[
        config.candidate_topk_blocks * config.candidate_block_size :
    ].all()


def test_strict_causality(small_model, ids, one_shot) -> None:
    for at in (0, 1, 7, 8, 33, 64, LENGTH - 1):
        changed = ids.clone()
        changed[at] = (changed[at] + 1) % 159
        logits = small_model.logits(changed)
        assert torch.allclose(logits[:at], one_shot[:at], atol=2e-5)
        assert (logits[at] - one_shot[at]).abs().max() > 1e-3


def test_a_prefix_has_the_same_logits(small_model, ids, one_shot) -> None:
    for length in (1, 2, 9, 40, 79):
        logits = small_model.logits(ids[:length])
        assert torch.allclose(logits, one_shot[:length], atol=2e-5)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 8, 13, 16, 31, 32])
def test_chunks_equal_one_shot(size, small_model, ids, one_shot, run_chunks) -> None:
    logits, _ = run_chunks(small_model, ids, [size])
    assert torch.allclose(logits, one_shot, atol=5e-5)


@pytest.mark.parametrize("seed", range(4))
def test_batches_equal_alone(seed, small_model, ids, one_shot) -> None:
    rng = random.Random(seed)
    cache = small_model.new_cache(5, LENGTH + 4, 24)
    done = {4: 0, 1: 0, 2: 0}
    while min(done.values()) < LENGTH:
        segments, kept = [], {}
        for slot in rng.sample(sorted(done), len(done)):
            right = min(rng.choice([1, 1, 1, 4, 17]), LENGTH - done[slot])
            if right:
                wrong = [rng.randrange(159) for _ in range(rng.randint(0, 4))]
                part = ids[done[slot] : done[slot] + right].tolist()
                segments.append((slot, done[slot], part + wrong))
                kept[slot] = right
        hidden = small_model(ForwardBatch.from_segments(segments), cache).hidden
        row = 0
        for slot, at, part in segments:
            logits = small_model.compute_logits(hidden[row : row + kept[slot]])
            assert torch.allclose(logits, one_shot[at : at + kept[slot]], atol=5e-5)
            row += len(part)
            done[slot] += kept[slot]
            cache.truncate(slot, done[slot])


@pytest.mark.parametrize("size", [LENGTH, 16, 3, 1])
def test_planted_ties_go_to_the_lower_row(
    size, random_model, small_config, ids, run_chunks
) -> None:
    """With index keys of zero all scores are equal, so every query must take its lowest visible rows."""
    model = random_model(small_config())
    for layer in model.layers:
        if layer.attn.indexer is not None and layer.attn.indexer.wk is not None:
            layer.attn.indexer.wk.weight.zero_()
    wanted = model.logits(ids)
    seen = {}
    hook = model.layers[2].attn.register_forward_hook(
        lambda _, args, out: seen.update(selected=args[1].selected)
    )
    model.logits(ids)
    hook.remove()
    rows = torch.arange(LENGTH // 2)
    visible = (torch.arange(LENGTH) + 1) // 2
    lowest = rows < visible.clamp_max(model.config.index_topk).unsqueeze(-1)
    assert torch.equal(seen["selected"], lowest)
    cache = model.new_cache(1, LENGTH, LENGTH)
    logits, _ = run_chunks(model, ids, [size], cache)
    assert torch.allclose(logits, wanted, atol=5e-5)


@pytest.mark.parametrize("shape", [(1, 5), (3, 64), (7, 300), (2, 5000)])
def test_topk_lowest_index(shape) -> None:
    rng = np.random.default_rng(0)
    for pool in ([0.0, -0.0], [0.0, -1.5, 2.0, -np.inf], list(rng.normal(size=9)), [np.inf, 1e-40]):
        scores = rng.choice(np.array(pool, dtype=np.float32), shape)
        for k in (1, 3, shape[1]):
            order = np.lexsort((np.broadcast_to(np.arange(shape[1]), shape), -(scores + 0.0)), -1)
            wanted = np.sort(order[..., :k], -1)
            assert np.array_equal(topk_lowest_index(torch.from_numpy(scores), k).numpy(), wanted)


@pytest.mark.parametrize("rounding", ["none", "full"])
def test_small_cpu_twins(rounding, random_model, small_config, ids, monkeypatch) -> None:
    """The paths for a few tokens compute what the torch code computes."""
    model = random_model(small_config(), rounding)
    batches = [(0, 0, ids[:40].tolist()), *((0, at, [int(ids[at])]) for at in range(40, 48))]

    def hidden() -> torch.Tensor:
        cache = model.new_cache(1, 64, 40)
        return torch.cat([model(ForwardBatch.from_segments([b]), cache).hidden for b in batches])

    with_twins = hidden()
    monkeypatch.setattr(small_cpu, "fits", lambda *_: False)
    without = hidden()
    assert not torch.equal(with_twins, without)
    close = (with_twins - without).abs().amax(-1) < 1e-4
    # A value at a rounding edge may land in the next bin; it must stay rare.
    assert close.all() if rounding == "none" else close.float().mean() > 0.8


@pytest.mark.parametrize("change", ["in place", "storage", "parameter", "hook"])
def test_changed_weights_are_seen(change, random_model, small_config, ids) -> None:
    """The path for a few tokens looks parameters up once, but does not miss what happens to them later."""
    model, seen = random_model(small_config()), []

    def decode(kept: DeepseekV41) -> torch.Tensor:
        cache = kept.new_cache(1, 16, 16)
        return kept(ForwardBatch.from_segments([(0, 0, ids[:3].tolist())]), cache).hidden

    before, norm = decode(model), model.layers[3].attn.q_norm
    if change == "in place":
        norm.weight.mul_(3)
    elif change == "storage":
        norm.weight.data = norm.weight.data * 3
    elif change == "parameter":
        norm.weight = torch.nn.Parameter(norm.weight * 3, requires_grad=False)
    else:
        norm.register_forward_hook(lambda _, args, out: seen.append(out * 3) or seen[-1])
    after = decode(model)
    fresh = random_model(small_config())
    fresh.layers[3].attn.q_norm.weight.mul_(3)
    assert not torch.allclose(before, after, atol=1e-2)
    assert torch.allclose(decode(fresh), after, atol=1e-3)


def copy_prefix(cache, source: int, target: int, ids: torch.Tensor) -> None:
    """Pool rows and index keys of a prefix, as a prefix cache would bring them."""
    for layer, rows in cache.pools.items():
        count = len(ids) // cache.config.compress_ratios[layer]
        rows[target, :count] = rows[source, :count]
        cache.index_keys[layer][target, :count] = cache.index_keys[layer][source, :count]
    cache.adopt_prefix(target, ids)


@pytest.mark.parametrize("hit", [60, 64])
def test_a_long_enough_replay_is_exact(hit, random_model, small_config, ids) -> None:
    """Replaying layers * (window - 1) tokens brings every window back; one window is an approximation."""
    model = random_model(small_config(sliding_window=4))
    bound = model.config.num_hidden_layers * (model.config.sliding_window - 1)
    cold = model.logits(ids)
    errors = {}
    for replay in (4, bound):
        cache = model.new_cache(2, 96, LENGTH)
        model(ForwardBatch.from_segments([(0, 0, ids.tolist())]), cache)
        pools = {layer: rows[0].clone() for layer, rows in cache.pools.items()}
        copy_prefix(cache, 0, 1, ids[:hit])
        start = hit - replay
        segments = (
            Segment(1, start, replay, window_start=start, pool_start=hit),
            Segment(1, hit, LENGTH - hit, window_start=start, pool_start=hit),
        )
        batch = ForwardBatch(ids[start:], segments, None, ids[start:].numpy())
        logits = model.compute_logits(model(batch, cache).hidden)[replay:]
        errors[replay] = (logits - cold[hit:]).abs().max()
        for layer, rows in cache.pools.items():
            count = hit // model.config.compress_ratios[layer]
            assert torch.equal(rows[1, :count], pools[layer][:count]), "replay wrote a cached row"
    assert errors[bound] < 5e-5
    assert errors[4] > 1e-2


def test_a_replay_across_an_odd_hit_completes_the_open_pair(
    random_model, small_config, ids
) -> None:
    model = random_model(small_config(sliding_window=4))
    bound, hit = model.config.num_hidden_layers * 3, 61
    cold = model.logits(ids)
    cache = model.new_cache(2, 96, LENGTH)
    model(ForwardBatch.from_segments([(0, 0, ids.tolist())]), cache)
    copy_prefix(cache, 0, 1, ids[:hit])
    start = hit - bound
    replay = Segment(1, start, bound, window_start=start, pool_start=hit)
    model(ForwardBatch(ids[start:hit], (replay,), None, ids[start:hit].numpy()), cache)
    suffix = Segment(1, hit, LENGTH - hit, window_start=start, pool_start=hit)
    out = model(ForwardBatch(ids[hit:], (suffix,), None, ids[hit:].numpy()), cache)
    assert torch.allclose(model.compute_logits(out.hidden), cold[hit:], atol=5e-5)


def test_bf16_follows_fp32(random_model, small_config, ids, run_chunks) -> None:
    # Everything is selected, so that no choice can flip.
    config = small_config(index_topk=80, candidate_topk_blocks=64, num_experts_per_tok=8)
    wide = random_model(config).logits(ids)
    model = random_model(config, "none", torch.bfloat16)
    assert model.layers[0].attn.wq_a.weight.dtype == torch.bfloat16
    assert model.head.weight.dtype == model.layers[0].ffn.gate.weight.dtype == torch.float32
    narrow = model.logits(ids)
    assert narrow.dtype == torch.float32
    assert (narrow - wide).abs().mean() < 0.05 * wide.std()
    logits, cache = run_chunks(model, ids, [20, 1])
    assert cache.kv.dtype == torch.bfloat16
    assert (logits - wide).abs().mean() < 0.05 * wide.std()
    full = random_model(config, "full", torch.bfloat16)
    logits, _ = run_chunks(full, ids, [20, 1])
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("spread", [1, 8, 60])
def test_sinkhorn_of_one_token(spread) -> None:
    scores = np.random.default_rng(spread).normal(0, spread, (50, 4, 4))
    k = np.exp(scores - scores.max(-1, keepdims=True)).astype(np.float32) + np.float32(1e-6)
    together = small_cpu.normalise(k, 20, 1e-6)
    alone = np.concatenate([small_cpu.normalise(one[None], 20, 1e-6) for one in k])
    np.testing.assert_allclose(alone, together, rtol=2e-5, atol=1e-9)
