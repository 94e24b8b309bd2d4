"""The DSpark draft against the golden set, and its context window."""

from __future__ import annotations

import pytest
import torch

from deepinfer.core.errors import InvariantBroken, ShapeError
from deepinfer.models.deepseek_v41 import ForwardBatch
from deepinfer.sampling import CoupledDraw


@pytest.mark.parametrize("mode", ["plain", "qat"])
@pytest.mark.parametrize("size", [33, 7, 1])
def test_golden_block(mode, size, load_golden, golden, golden_ids) -> None:
    model = load_golden(mode)
    cache = model.new_cache(3, 64, 33)
    anchor = int(golden["dspark.anchor_position"])
    rows = []
    for at in range(0, len(golden_ids), size):
        batch = ForwardBatch.from_segments([(0, at, golden_ids[at : at + size].tolist())])
        rows.append(model(batch, cache).features)
    features = torch.cat(rows)
    stable = golden["qat.row_noise.0"] < (2e-4 if mode == "qat" else 1)
    assert (features - golden[f"{mode}.dspark.target_features"])[stable].abs().max() < 1e-4
    for at in range(0, anchor, size):
        span = range(at, min(at + size, anchor))
        model.draft.extend_context(
            features[span.start : span.stop], list(span), [2] * len(span), cache
        )
    ids, positions, slots = [int(golden_ids[anchor])], [anchor], [2]
    out = model.draft.propose(ids, positions, slots, cache)
    assert (out.base_logits[0] - golden[f"{mode}.dspark.base_logits"]).abs().max() < 1e-3
    tokens, confidences = model.draft.draft_greedy(ids, positions, slots, cache)
    assert tokens[0].tolist() == golden[f"{mode}.dspark.draft_tokens"].tolist()
    wanted = torch.sigmoid(golden[f"{mode}.dspark.confidence_raw_hidden"])
    assert (confidences[0] - wanted).abs().max() < 1e-4
    before = torch.tensor([ids[0], *tokens[0, :-1].tolist()])
    logits = out.base_logits[0] + model.draft.markov_bias(before)
    assert (logits - golden[f"{mode}.dspark.logits"]).abs().max() < 1e-3


def seed_context(model, cache, slot: int, length: int) -> torch.Tensor:
    ids = torch.arange(length) * 7 % 150
    out = model(ForwardBatch.from_segments([(slot, 0, ids.tolist())]), cache)
    model.draft.extend_context(out.features, range(length), [slot] * length, cache)
    return out.features


def test_requests_do_not_see_each_other(small_model) -> None:
    draft, lengths = small_model.draft, [3, 21, 8, 1]
    cache = small_model.new_cache(4, 64, 32)
    alone = []
    for slot, length in enumerate(lengths):
        seed_context(small_model, cache, slot, length)
        alone.append(draft.draft_greedy([5 + slot], [length], [slot], cache))
    slots = [2, 0, 3, 1]
    tokens, confidences = draft.draft_greedy(
        [5 + s for s in slots], [lengths[s] for s in slots], slots, cache
    )
    for row, slot in enumerate(slots):
        assert torch.equal(tokens[row], alone[slot][0][0])
        assert (confidences[row] - alone[slot][1][0]).abs().max() < 1e-5


def test_only_the_window_before_the_anchor_counts(small_model) -> None:
    draft, window = small_model.draft, small_model.config.sliding_window
    cache = small_model.new_cache(2, 64, 32)
    features = seed_context(small_model, cache, 0, 20)
    out = draft.propose([9], [20], [0], cache)
    draft.extend_context(features[20 - window :], range(20 - window, 20), [1] * window, cache)
    assert torch.allclose(
        draft.propose([9], [20], [1], cache).base_logits, out.base_logits, atol=1e-5
    )
    changed = features[20 - window :].clone()
    changed[0] += 1
    draft.extend_context(changed, range(20 - window, 20), [1] * window, cache)
    assert not torch.allclose(
        draft.propose([9], [20], [1], cache).base_logits, out.base_logits, atol=1e-4
    )


def test_rejected_rows_are_overwritten(small_model) -> None:
    draft = small_model.draft
    cache = small_model.new_cache(2, 64, 32)
    features = seed_context(small_model, cache, 0, 20)
    wanted = draft.propose([9], [20], [0], cache).base_logits
    draft.extend_context(features[:17], range(17), [1] * 17, cache)
    draft.extend_context(features[:3] * 2, range(17, 20), [1] * 3, cache)
    draft.extend_context(features[17:], range(17, 20), [1] * 3, cache)
    assert torch.allclose(draft.propose([9], [20], [1], cache).base_logits, wanted, atol=1e-5)


def test_missing_context_is_an_error(small_model) -> None:
    cache = small_model.new_cache(1, 64, 32)
    with pytest.raises(InvariantBroken, match="extend_context"):
        small_model.draft.propose([9], [0], [0], cache)
    seed_context(small_model, cache, 0, 6)
    with pytest.raises(InvariantBroken, match="anchor is at 8"):
        small_model.draft.propose([9], [8], [0], cache)
    cache.truncate(0, 4)
    with pytest.raises(InvariantBroken, match="0 to 3"):
        small_model.draft.propose([9], [6], [0], cache)
    assert small_model.draft.propose([9], [4], [0], cache).base_logits.shape == (1, 4, 160)


def test_a_long_prompt_at_once(small_model) -> None:
    """More rows than a ring holds: only those within reach are written."""
    draft = small_model.draft
    cache = small_model.new_cache(2, 64, 16, max_rollback=4)
    ids = (torch.arange(50) * 7 % 150).tolist()
    features = []
    for at in range(0, 50, 16):
        batch = ForwardBatch.from_segments([(0, at, ids[at : at + 16])])
        features.append(small_model(batch, cache).features)
        count = len(features[-1])
        draft.extend_context(features[-1], range(at, at + count), [0] * count, cache)
    draft.extend_context(torch.cat(features), range(50), [1] * 50, cache)
    cache.lengths[1] = 50
    for anchor in (50, 46):
        cache.truncate(0, anchor)
        cache.truncate(1, anchor)
        out = draft.propose([9, 9], [anchor] * 2, [0, 1], cache)
        assert torch.allclose(out.base_logits[0], out.base_logits[1], atol=1e-5)


def test_arguments_of_different_length(small_model) -> None:
    cache = small_model.new_cache(1, 64, 16)
    with pytest.raises(ShapeError, match="3 feature rows, 2 positions and 3 slots"):
        small_model.draft.extend_context(torch.zeros(3, 128), [0, 1], [0] * 3, cache)


def test_drafts_are_drawn_with_the_noise_of_their_positions(small_model) -> None:
    draft, length = small_model.draft, 9
    cache = small_model.new_cache(4, 64, 32)
    for slot in (0, 1):
        seed_context(small_model, cache, slot, length)
    where = [5, 6], [length, length], [0, 1]
    out = draft.propose(*where, cache)
    tokens, confidences = draft.draft_coupled(*where, cache, temperatures=[0.0, 1.3], seeds=[4, 9])
    greedy, sure = draft.draft_greedy(*where, cache)
    assert torch.equal(tokens[0], greedy[0])
    assert torch.equal(confidences[0], sure[0])
    assert not torch.equal(tokens[1], greedy[1])
    before = 6
    for index, token in enumerate(tokens[1].tolist()):
        scores = out.base_logits[1:, index] + draft.markov_bias(torch.tensor([before]))
        draw = CoupledDraw.of([1.3], [9])
        assert token == int(draw(scores, torch.tensor([length + 1 + index])))
        before = token
