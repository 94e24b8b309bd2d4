"""The twin computes what the inference model computes, and what the golden numbers say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from nano import rounding
from nano.draft import Anchors, TrainDraft, base_logits, confidence_logits
from nano.engram import NgramRows
from nano.evaluate import greedy_drafts, middle_anchors
from nano.export import assign_tensors, checkpoint_tensors
from nano.lockstep import Lockstep, continue_prompts
from nano.storage import load_state
from nano.trunk import Clamp, Trunk
from safetensors.torch import load_file
from tiny_training import VOCAB, random_trunk, text_rows
from torch import Tensor

from deepinfer.models import load_model, save_pretrained
from deepinfer.models.deepseek_v41 import DeepseekV41, DeepseekV41Config, ForwardBatch

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "oracle_v41"
PLAIN = 2e-4
"""Tolerance of the golden set without rounding."""


@pytest.fixture
def golden_twin(monkeypatch: pytest.MonkeyPatch) -> tuple[Trunk, TrainDraft]:
    """The golden weights in the twin, with all rounding off."""
    for name in ("cache_fp8", "cache_fp4", "cache_mxfp4"):
        monkeypatch.setattr(rounding, name, lambda x: x)
    c = DeepseekV41Config.from_pretrained(GOLDEN)
    token_map = json.loads((GOLDEN / "engram_token_map.json").read_text())
    trunk = Trunk(c, NgramRows(c, token_map), context=64)
    draft = TrainDraft(trunk)
    assign_tensors(trunk, draft, load_file(GOLDEN / "model.safetensors"))
    trunk.sparse = True
    draft.blend.zero_()
    return trunk, draft


@pytest.fixture
def golden_ids() -> Tensor:
    """The golden prompt, padded to whole windows, shape [1, 40]."""
    ids = load_file(GOLDEN / "golden.safetensors")["input_ids.0"].long()
    return torch.nn.functional.pad(ids, (0, -len(ids) % 8))[None]


@torch.no_grad()
def test_golden_logits_and_draft(golden_twin: tuple[Trunk, TrainDraft], golden_ids: Tensor) -> None:
    trunk, draft = golden_twin
    golden = load_file(GOLDEN / "golden.safetensors")
    tokens = len(golden["input_ids.0"])
    out = trunk.frozen(golden_ids, features=True)
    torch.testing.assert_close(
        trunk.logits(out.hidden)[0, :tokens], golden["plain.logits.0"], atol=PLAIN, rtol=0
    )
    torch.testing.assert_close(
        out.features[0, :tokens], golden["plain.dspark.target_features"], atol=PLAIN, rtol=0
    )

    anchor, W = int(golden["dspark.anchor_position"]), trunk.c.sliding_window
    anchors = middle_anchors(golden_ids, W)
    at = anchors.at.clone()
    at[0, anchor // W - 1] = anchor
    anchors = Anchors(at, golden_ids.gather(1, at.flatten(1)).view(at.shape), anchors.reach)
    hidden, _ = draft(out.features, anchors)
    w, block = draft.head_weights(), anchor // W - 1
    logits = base_logits(hidden, draft.trunk_head(), w)[block]
    torch.testing.assert_close(
        logits, golden["plain.dspark.base_logits"].view_as(logits), atol=PLAIN, rtol=0
    )
    tokens_found = greedy_drafts(draft, out.features, anchors)[0, block, 0]
    assert tokens_found.tolist() == golden["plain.dspark.draft_tokens"].flatten().tolist()
    previous = torch.cat([golden_ids[0, anchor : anchor + 1], tokens_found[:-1]])
    confidence = confidence_logits(hidden[block], previous, w)
    expected = golden["plain.dspark.confidence_raw_hidden"].view_as(confidence)
    torch.testing.assert_close(confidence, expected, atol=PLAIN, rtol=0)


@torch.no_grad()
def differences(
    trunk: Trunk, draft: TrainDraft, model: DeepseekV41, ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Largest differences in units of the spread: logits by row, draft logits by slot, confidences.

    Args:
        trunk: The twin.
        draft: Its draft.
        model: The inference model.
        ids: One row, shape [1, T].
    """
    out = trunk.frozen(ids, features=True)
    expected = model.logits(ids[0])
    logits = (trunk.logits(out.hidden)[0] - expected).abs().amax(-1) / expected.std()

    anchor, W, S = 40, trunk.c.sliding_window, trunk.c.dspark_block_size
    cache = model.new_cache(1, ids.shape[1], max_step_tokens=ids.shape[1])
    given = model(ForwardBatch.from_segments([(0, 0, ids[0, :anchor].tolist())]), cache)
    model.draft.extend_context(given.features, range(anchor), [0] * anchor, cache)
    proposed = model.draft.propose([int(ids[0, anchor])], [anchor], [0], cache)
    anchors = middle_anchors(ids, W)
    at = anchors.at.clone()
    block = anchor // W - 1
    at[0, block] = anchor
    anchors = Anchors(at, ids.gather(1, at.flatten(1)).view(at.shape), anchors.reach)
    hidden, _ = draft(out.features, anchors)
    w, previous = draft.head_weights(), ids[0, anchor : anchor + S]
    twin = base_logits(hidden, draft.trunk_head(), w)[block]
    drafted = (twin - proposed.base_logits[0]).abs().amax(-1) / proposed.base_logits.std()
    confidence = torch.sigmoid(confidence_logits(hidden[block], previous, w))
    return (
        logits,
        drafted,
        (confidence - model.draft.confidence(proposed.hidden[0], previous)).abs(),
    )


def test_stored_model_is_the_twin(trunk: Trunk, tmp_path: Path) -> None:
    """Weights that bf16 holds exactly: storing them rounds what the twin rounds, and nothing else."""
    trunk.sparse = True
    trunk.blend.fill_(1.0)
    draft = TrainDraft(trunk)
    with torch.no_grad():
        for name, parameter in [*trunk.named_parameters(), *draft.named_parameters()]:
            if name.endswith(("wo_b", "w2")):
                parameter.normal_(std=0.1)
            parameter.copy_(parameter.bfloat16())
    save_pretrained(checkpoint_tensors(trunk, draft), tmp_path / "stored", config=trunk.c)
    token_map = json.dumps(list(range(VOCAB)))
    (tmp_path / "stored" / "engram_token_map.json").write_text(token_map)
    model = load_model(tmp_path / "stored", rounding="full")
    for found in differences(trunk, draft, model, text_rows(1, 128)):
        assert found.max() < 1e-4


def test_trained_model_after_export(trained: Path, data_folder: Path) -> None:
    c = DeepseekV41Config.from_pretrained(data_folder)
    trunk = Trunk(c, NgramRows(c, range(VOCAB)), context=128)
    trunk.load_state_dict(load_state(trained, "trunk")[0])
    trunk.sparse = True
    draft = TrainDraft(trunk)
    draft.load_state_dict(load_state(trained, "draft")[0])
    model = load_model(trained / "checkpoint", rounding="full")
    assert trunk.blend == 1
    logits, drafted, confidence = differences(trunk, draft, model, text_rows(1, 128))
    # Embedding and head are stored in bf16, which moves values over rounding edges.
    assert logits.median() < 0.03
    assert drafted.median() < 0.03
    assert confidence.max() < 0.01


def test_export_and_import_are_inverse(trunk: Trunk, tmp_path: Path) -> None:
    draft = TrainDraft(trunk)
    for layer in (*trunk.layers, *draft.stages):
        layer.gate_bias.normal_()
    tensors = checkpoint_tensors(trunk, draft)
    torch.manual_seed(77)
    again = Trunk(trunk.c, None, context=16)
    draft_again = TrainDraft(again)
    assign_tensors(again, draft_again, tensors)
    for ours, theirs in ((trunk, again), (draft, draft_again)):
        expected = ours.state_dict()
        for name, tensor in theirs.state_dict().items():
            assert torch.equal(tensor, expected[name]), name
    # and the loader takes every tensor under its name
    save_pretrained(tensors, tmp_path / "plain", config=trunk.c, layout="plain")
    (tmp_path / "plain" / "engram_token_map.json").write_text(json.dumps(list(range(VOCAB))))
    model = load_model(tmp_path / "plain", rounding="none")
    assert torch.equal(model.layers[2].attn.wq_a.weight, trunk.layers[2].wq_a)


@torch.no_grad()
def test_cut_windows_change_only_what_follows(trunk: Trunk) -> None:
    trunk.sparse = True
    ids = text_rows(2, 64)
    whole = trunk.frozen(ids).hidden
    start = torch.tensor([0, 37])
    cut = trunk(ids, clamp=Clamp(encoder=start, decoder=start)).hidden
    torch.testing.assert_close(cut[0], whole[0])
    torch.testing.assert_close(cut[1, :37], whole[1, :37])
    assert not torch.allclose(cut[1, 37:], whole[1, 37:])


@torch.no_grad()
def test_lockstep_decode_is_the_dense_forward(trunk: Trunk) -> None:
    trunk.sparse = True
    trunk.blend.fill_(1.0)
    ids = text_rows(3, 96)
    lockstep = Lockstep(trunk, 3, 96)
    stepped = torch.stack([lockstep.step(column) for column in ids.unbind(1)], 1)
    dense = trunk.frozen(ids).hidden
    off = (stepped - dense).abs().amax(-1)
    assert (off < 1e-3).float().mean() > 0.9  # the rest: rounding edges
    assert off.median() < 1e-5


def test_continuations() -> None:
    trunk = random_trunk()
    trunk.sparse = True
    trunk.blend.fill_(1.0)
    prompts = text_rows(3, 16)
    heat = torch.tensor([0.0, 0.0, 5.0])

    def rows(seed: int, max_seconds: float = 1e9) -> Tensor:
        return continue_prompts(trunk, prompts, 16, heat, seed, max_seconds)

    first, again, other = rows(1), rows(1), rows(2)
    assert first.shape == (3, 32)
    assert torch.equal(first[:, :16], prompts)
    assert torch.equal(first, again)
    assert torch.equal(first[:2], other[:2])
    assert not torch.equal(first[2], other[2])
    hidden = trunk.frozen(first).hidden
    greedy = trunk.logits(hidden).argmax(-1)[:2, 15:-1]
    assert (greedy == first[:2, 16:]).float().mean() > 0.9
    assert rows(1, max_seconds=0.0).shape[1] < 32
