"""An engine whose decode and verify steps come from recordings gives the tokens of one without."""

from __future__ import annotations

import pytest
import torch

from deepinfer import Engine, SamplingParams
from deepinfer.engine.graphs import GraphBucket
from deepinfer.models import load_model

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PROMPTS = [[0, 11, 12, 13], [0, *range(30, 75)], [0, 99]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("drafter", [None, "dspark"])
def test_tokens_are_the_same(device, depth, drafter) -> None:
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
                graphs = runner.make_graphs()
                graphs.warmup([GraphBucket(4, 1, 256), GraphBucket(4, 6, 256)])
            outputs = engine.generate(PROMPTS, params)
            found.append([o.token_ids for o in outputs])
            if recorded:
                assert sum(graphs.stats.hits.values()) > 3
                assert set(graphs.stats.misses) <= {"not a decode step"}
    assert found[0] == found[1]
