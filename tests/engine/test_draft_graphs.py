"""Blocks of drafts from recordings are those of the draft itself."""

from __future__ import annotations

import pytest
import torch

from deepinfer import Engine, SamplingParams
from deepinfer.core.errors import ConfigError, InvariantBroken
from deepinfer.engine.draft_graphs import DraftGraphs
from deepinfer.models import load_model
from deepinfer.models.deepseek_v41 import DeepseekV41, ForwardBatch

PROMPTS = [[0, *range(30, 75)], [0, 11, 12, 13], [0, 99, 98, 97, 96]]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=DEVICES)
def model(request) -> DeepseekV41:
    return load_model("nano", device=request.param, dtype=torch.float32, rounding="none")


def test_blocks_are_the_same(model) -> None:
    cache, device = model.new_cache(4, 128, 64), model.embed.weight.device
    slots, lengths = [3, 0, 1], [len(p) for p in PROMPTS]
    rows = [(s, 0, p) for s, p in zip(slots, PROMPTS, strict=True)]
    out = model(ForwardBatch.from_segments(rows, device=device), cache)
    positions = [at for n in lengths for at in range(n)]
    model.draft.extend_context(
        out.features, positions, [s for s, n in zip(slots, lengths, strict=True) for _ in range(n)], cache
    )  # fmt: skip
    graphs = DraftGraphs(model, cache)
    for some in ([0, 1, 2], [2], [1, 0, 2], [0]):
        where, at = [slots[i] for i in some], [lengths[i] for i in some]
        anchors = [5 + i for i in some]
        wanted, confidences = model.draft.draft_greedy(anchors, at, where, cache)
        tokens, found, margins = graphs.draft(anchors, at, where)
        assert (margins > 0).all()
        assert torch.equal(tokens, wanted)
        assert torch.allclose(found, confidences, atol=1e-4)
    assert graphs.runs == {4: 2, 1: 2}
    draws = {"temperatures": [0.0, 1.0, 0.6], "seeds": [3, 2**64 - 1, 2**33]}
    drawn, _ = model.draft.draft_coupled([5, 6, 7], lengths, slots, cache, **draws)
    assert torch.equal(graphs.draft([5, 6, 7], lengths, slots, **draws)[0], drawn)
    wanted, _ = model.draft.draft_greedy([5, 6, 7], lengths, slots, cache)
    assert torch.equal(drawn[0], wanted[0])
    assert not torch.equal(drawn[1], wanted[1])
    with pytest.raises(InvariantBroken, match="give it the features"):
        graphs.draft([5], [lengths[0] + 1], [3])
    assert graphs.draft([], [], []) is None


def test_what_cannot_be_recorded_runs_as_it_is(model, monkeypatch) -> None:
    cache = model.new_cache(2, 64, 64)
    out = model(ForwardBatch.from_segments([(0, 0, PROMPTS[1])], device=cache.device), cache)
    model.draft.extend_context(out.features, range(4), [0] * 4, cache)
    graphs = DraftGraphs(model, cache)

    def refuse(rows: int, **options: object) -> None:
        raise RuntimeError("operation not permitted")

    monkeypatch.setattr(graphs, "_record", refuse)
    for _ in range(2):
        assert graphs.draft([5], [4], [0]) is None
    assert "not permitted" in graphs.unsupported
    with pytest.raises(ConfigError, match="packed"):
        DraftGraphs(model, model.new_cache(2, 64, 64, storage="packed"))


@pytest.mark.parametrize("depth", [0, 1])
def test_engines_propose_from_recordings(model, depth) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    found = []
    for recorded in (False, True):
        config = {
            "max_num_seqs": 3, "max_model_len": 128, "async_depth": depth, "cuda_graphs": recorded
        }  # fmt: skip
        with Engine(model=model, config=config, drafter="dspark") as engine:
            drafter = engine._parts.drafter
            if recorded and not model.embed.weight.is_cuda:
                drafter.record()
                engine._parts.runner.make_graphs(on_demand=True)  # which feed the drafter
            outputs = engine.generate(PROMPTS, params)
            found.append([(o.token_ids, o.usage.drafted, o.usage.accepted) for o in outputs])
            graphs = drafter._graphs
            assert (graphs is not None) is recorded
            assert not recorded or sum(graphs.runs.values()) > 3
    assert found[0] == found[1]
    assert sum(accepted for *_, accepted in found[0]) > 5
    assert drafter._graphs is None
