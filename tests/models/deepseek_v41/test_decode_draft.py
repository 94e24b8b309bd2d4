"""Draft steps of fixed shape against the ragged ones."""

from __future__ import annotations

import pytest
import torch

from deepinfer.core.errors import ConfigError
from deepinfer.models.deepseek_v41 import DeepseekV41, ForwardBatch
from deepinfer.models.deepseek_v41.decode_draft import DraftStep, num_final

TOLERANCE = 2e-4
LENGTHS = {0: 3, 2: 30, 3: 17}


@pytest.fixture(params=["none", "full"])
def model(request, small_config, random_model) -> DeepseekV41:
    made = random_model(small_config(), request.param)
    made.set_engram_token_map(range(160))
    return made


def test_context_and_block_equal_the_ragged_ones(model) -> None:
    caches = [model.new_cache(4, 64, 32) for _ in range(2)]
    ids = torch.randint(5, 150, (4, 64), generator=torch.Generator().manual_seed(0))
    for cache in caches:
        batch = ForwardBatch.from_segments([(s, 0, ids[s, :n]) for s, n in LENGTHS.items()])
        out = model(batch, cache)
        positions = [p for n in LENGTHS.values() for p in range(n)]
        slots = [s for s, n in LENGTHS.items() for _ in range(n)]
        model.draft.extend_context(out.features, positions, slots, cache)
    one, other = caches
    step = DraftStep(model, other)
    counts = {0: 2, 2: 0, 3: 3}
    first = torch.tensor([LENGTHS[s] for s in LENGTHS])
    slots = torch.tensor(list(LENGTHS))
    features = torch.randn(3, 4, out.features.shape[1], generator=torch.Generator().manual_seed(1))
    for i, (slot, count) in enumerate(counts.items()):
        if count:
            at = range(LENGTHS[slot], LENGTHS[slot] + count)
            model.draft.extend_context(features[i, :count], at, [slot] * count, one)
    final = torch.tensor(list(counts.values()))
    step.extend_context(features.flatten(0, 1), first, slots, final)
    assert torch.allclose(one.windows, other.windows, atol=TOLERANCE)
    anchors, positions = torch.tensor([7, 8, 9]), first + final
    wanted, confidence = model.draft.draft_greedy(anchors, positions, slots, one)
    before = [t.clone() for t in other.rows.tensors()]
    seen = torch.tensor([one.draft_spans[s][0] for s in LENGTHS])
    tokens, found, margins = step.draft_greedy(anchors, positions, slots, seen)
    assert torch.equal(tokens, wanted)
    assert torch.allclose(
        margins, model.draft.draft_blocks(anchors, positions, slots, one)[2], atol=TOLERANCE
    )
    assert (margins > 0).all()
    assert torch.allclose(found, confidence, atol=TOLERANCE)
    for a, b in zip(before, other.rows.tensors(), strict=True):
        assert torch.equal(a, b)


def test_features_before_a_gap_are_not_seen(small_model) -> None:
    cache = small_model.new_cache(1, 64, 32)
    width = len(small_model.config.dspark_target_layer_ids) * small_model.config.hidden_size
    features = torch.randn(12, width, generator=torch.Generator().manual_seed(1))
    small_model.draft.extend_context(features[:4], range(4), [0] * 4, cache)
    small_model.draft.extend_context(features[4:], range(6, 14), [0] * 8, cache)
    arguments = torch.tensor([9]), torch.tensor([14]), torch.tensor([0])
    step = DraftStep(small_model, cache)
    wanted, confidence = small_model.draft.draft_greedy(*arguments, cache)
    tokens, found, _ = step.draft_greedy(*arguments, torch.tensor([cache.draft_spans[0][0]]))
    assert torch.equal(tokens, wanted)
    assert torch.allclose(found, confidence, atol=TOLERANCE)
    _, wrong, _ = step.draft_greedy(*arguments, torch.tensor([13]))
    assert not torch.allclose(wrong, confidence, atol=TOLERANCE)


def test_num_final() -> None:
    ids = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 6, 7]])
    chosen = torch.tensor([[6, 7, 8], [6, 9, 8], [9, 7, 8], [6, 7, 8], [6, 7, 8]])
    counts = torch.tensor([3, 3, 3, 2, 0])
    assert num_final(ids, counts, chosen).tolist() == [3, 2, 1, 2, 0]
    assert num_final(ids[:, :1], counts, chosen[:, :1]).tolist() == [1, 1, 1, 1, 0]


def test_a_model_without_a_draft(small_config, random_model) -> None:
    fields = {"num_nextn_predict_layers": 0, "compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1]}
    model = random_model(small_config(**fields, dspark_target_layer_ids=[]))
    with pytest.raises(ConfigError, match="no draft"):
        DraftStep(model, model.new_cache(1, 64, 32))
