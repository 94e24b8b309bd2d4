"""An engine whose decode and verify steps come from recordings gives the tokens of one without."""

from __future__ import annotations

import pytest
import torch

from deepinfer import Engine, SamplingParams
from deepinfer.engine.graphs import GraphBucket
from deepinfer.models import load_model

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [[GraphBucket(4, 1, 256), GraphBucket(4, 6, 256)], [GraphBucket(24, 1, 256)], None]
PROMPTS = [[0, 11, 12, 13], [0, *range(30, 75)], [0, 99]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("drafter", [None, "dspark"])
@pytest.mark.parametrize("shapes", SHAPES)
def test_tokens_are_the_same(device, depth, drafter, shapes) -> None:
    model = load_model("nano", device=device, dtype=torch.float32, rounding="none")
    params = [
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=3, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
    ]
    found = []
    for recorded in (False, True):
        options = {"max_num_seqs": 4, "max_model_len": 256, "async_depth": depth}
        with Engine(model=model, config=options, drafter=drafter) as engine:
            runner = engine._parts.runner
            if recorded:
                graphs = runner.make_graphs(on_demand=shapes is None)
                graphs.warmup(shapes or [])
            outputs = engine.generate(PROMPTS, params)
            found.append([o.token_ids for o in outputs])
            if recorded:
                assert sum(graphs.stats.hits.values()) > 3
                assert set(graphs.stats.misses) <= {"no rows"}
    assert found[0] == found[1]


@pytest.mark.parametrize("drafter", [None, "dspark"])
def test_prompts_that_arrive_beside_decoders(drafter) -> None:
    model = load_model("nano", dtype=torch.float32, rounding="none")
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    found = []
    for recorded in (False, True):
        options = {"max_num_seqs": 4, "max_model_len": 256, "prefill_chunk_tokens": 24}
        with Engine(model=model, config=options, drafter=drafter) as engine:
            if recorded:
                graphs = engine._parts.runner.make_graphs()
                graphs.warmup([GraphBucket(4, 1, 256), GraphBucket(4, 6, 256)])
            tokens: dict[str, list[int]] = {}
            for turn, ids in enumerate(PROMPTS):
                engine.add_request(ids, params, rid=str(turn))
                for _ in range(2):
                    for delta in engine.step():
                        tokens.setdefault(delta.rid, []).extend(delta.token_ids)
            while engine.has_unfinished:
                for delta in engine.step():
                    tokens.setdefault(delta.rid, []).extend(delta.token_ids)
            found.append(tokens)
    assert found[0] == found[1]
    assert sum(graphs.stats.hits.values()) > 10


class OnAndOff:
    """Verifies some drafts for some steps, none for as many, and so on."""

    def __init__(self, period: int) -> None:
        self.period, self.turn = period, 0

    def choose(self, confidences, num_running) -> list[int]:
        self.turn += 1
        return [(self.turn // self.period + 1) % 2 * (1 + self.turn % 3)] * len(confidences)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("period", [10**6, 4, 1])
def test_steps_that_feed_the_draft_themselves(device, depth, period) -> None:
    """Recorded steps give the draft what it is given otherwise, and steps that verify nothing give it nothing."""
    model = load_model("nano", device=device, dtype=torch.float32, rounding="none")
    params = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=3, max_tokens=33, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=25, ignore_eos=True),
    ]
    found = []
    for fed in (False, True):
        options = {"max_num_seqs": 4, "max_model_len": 256, "async_depth": depth}
        with Engine(
            model=model, config=options, drafter="dspark", verify=OnAndOff(period)
        ) as engine:
            runner = engine._parts.runner
            if fed:
                engine._parts.drafter.record()
                graphs = runner.make_graphs(on_demand=True)
                assert graphs.feed is not None
            else:
                engine._parts.drafter.drop_graphs()
                runner.drop_graphs()
            outputs = engine.generate(PROMPTS, params)
            engine.check()
            found.append(([o.token_ids for o in outputs], engine.stats().draft_tokens_accepted))
    assert found[0][0] == found[1][0]
    features = {bucket.features for bucket in graphs.stats.hits}
    assert set(graphs.stats.misses) <= {"no rows"}
    if period == 10**6:
        assert found[0][1] == found[1][1], "the draft saw the same"
        assert True in features
    else:
        assert found[1][1] > 0, "drafts go on behind steps that the draft saw nothing of"
    if period == 4:
        assert features == {True, False}
