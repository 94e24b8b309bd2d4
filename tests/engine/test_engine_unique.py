"""One request has one stream of tokens and log probabilities, whatever runs beside it and however it is run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from deepinfer import SamplingParams
from deepinfer.models import load_model
from deepinfer.testing.engine_determinism import (
    EngineSituation,
    engine_situations,
    engine_stream,
    unique_engine_streams,
)

PROMPT = [(i * 7 + i * i) % 480 + 5 for i in range(150)]
SAME = {"deterministic": True}
FEW = [
    EngineSituation(),
    EngineSituation(3, 40, 1),
    EngineSituation(2, 512, 1, is_warm=True),
    EngineSituation(1, 64, 0, preemptions=2),
]


def test_few_situations_on_the_cpu() -> None:
    model = load_model("nano", dtype=torch.float32)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
    prompt = PROMPT[:70]
    found = unique_engine_streams(model, prompt, FEW, params, SAME)
    assert found.count == 1, found.groups
    assert len(engine_stream(model, prompt, FEW[3], params)) == 6
    assert unique_engine_streams(model, prompt, FEW, params).count > 1


def test_situations_cover_what_they_should() -> None:
    cases = list(engine_situations())
    assert {c.neighbours + 1 for c in cases} >= {1, 2, 3, 8, 17, 32, 64}
    for name in ("chunk", "async_depth", "is_warm", "preemptions"):
        assert len({getattr(c, name) for c in cases}) > 1
    assert max(c.neighbours for c in engine_situations(4)) == 3


@pytest.fixture(scope="module")
def model():
    return load_model("nano", device="cuda", dtype=torch.bfloat16)


@pytest.mark.gpu
class TestOnTheGpu:
    @pytest.mark.parametrize("hot", [{"temperature": 0}, {"temperature": 0.9, "seed": 5}])
    def test_one_stream(self, model, hot) -> None:
        params = SamplingParams(max_tokens=32, ignore_eos=True, logprobs=0, **hot)
        cases = list(engine_situations())[:: 3 if "seed" in hot else 2]
        found = unique_engine_streams(model, PROMPT, cases, params, SAME)
        assert found.count == 1, found.groups

    def test_without_recordings(self, model) -> None:
        options = [{**SAME, "cuda_graphs": recorded} for recorded in (True, False)]
        streams = {engine_stream(model, PROMPT, FEW[1], **more) for more in options}
        assert len(streams) == 1

    def test_control(self, model) -> None:
        cases = [EngineSituation(n, c) for n, c in ((0, 512), (7, 40), (31, 512), (63, 64))]
        assert unique_engine_streams(model, PROMPT, cases).count > 1

    def test_two_processes(self, model) -> None:
        code = (
            "import sys; sys.path.insert(0, sys.argv[1])\n"
            "import torch, test_engine_unique as t\n"
            "from deepinfer.models import load_model\n"
            "model = load_model('nano', device='cuda', dtype=torch.bfloat16)\n"
            "print(t.engine_stream(model, t.PROMPT, t.FEW[3], **t.SAME))"
        )
        here = os.path.dirname(__file__)
        run = subprocess.run([sys.executable, "-c", code, here], capture_output=True, text=True)
        wanted = engine_stream(model, PROMPT, FEW[1], **SAME)
        assert run.stdout.strip() == str(wanted), run.stderr[-2000:]
