"""The engine's own work on a GPU: steps ahead of their results, and copies to pinned memory beside the steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer import Engine, SamplingParams
from deepinfer.engine import FutureTokens, HostTier
from deepinfer.models import load_model
from deepinfer.models.deepseek_v41 import DeepseekV41

pytestmark = pytest.mark.gpu
GOLDEN = Path(__file__).resolve().parents[1] / "data" / "oracle_v41"
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0)
LONG = [(i * 7 + i * i) % 120 + 5 for i in range(230)]
SAME = {"deterministic": True, "max_model_len": 256}


@pytest.fixture(scope="module")
def model() -> DeepseekV41:
    return load_model(GOLDEN, device="cuda", rounding="full")  # type: ignore[return-value]


@pytest.mark.parametrize("drafter", [None, "dspark"])
def test_depths_agree_bit_for_bit(model: DeepseekV41, drafter: str | None) -> None:
    prompts = [LONG[: 20 + 30 * i] for i in range(6)]
    params = [GREEDY.replace(max_tokens=10 + i) for i in range(6)]
    params[1] = params[1].replace(logprobs=None)
    params[2] = params[2].replace(temperature=0.8, seed=3, frequency_penalty=0.5)
    found: list[Any] = []
    for depth in (0, 1, 1):
        config = {**SAME, "async_depth": depth, "max_num_seqs": 3, "prefill_chunk_tokens": 48}
        with Engine(model=model, config=config, drafter=drafter) as engine:
            engine._parts.runner._check_ids = len(found) == 2
            outputs = engine.generate(prompts, params)
            engine.check()
        found.append([(o.token_ids, o.logprobs) for o in outputs])
    assert found[0] == found[1] == found[2]


def test_prefixes_come_back_from_pinned_memory(model: DeepseekV41) -> None:
    prompts = [[first, *LONG[1:]] for first in (5, 6, 7)]
    config = {
        **SAME, "block_size": 8, "num_blocks": 40, "max_num_seqs": 1, "async_depth": 1,
        "host_cache_bytes": 4 << 20, "num_window_slots": 4,
    }  # fmt: skip
    with Engine(model=model, config=config) as engine:
        tier = engine._parts.runner.host_tier
        assert tier._blocks.is_pinned()
        cold = [engine.generate(prompt, GREEDY)[0] for prompt in prompts]
        for _ in range(3):
            warm = [engine.generate(prompt, GREEDY)[0] for prompt in prompts]
            assert [(o.token_ids, o.logprobs) for o in warm] == [
                (o.token_ids, o.logprobs) for o in cold
            ]
        engine.check()
        stats = engine.stats()
    assert stats.cache.host_hit_tokens_total > 0
    assert stats.host_copies_failed == 0


def test_collect_does_not_wait_for_what_was_launched_behind(model: DeepseekV41) -> None:
    """A long kernel stands in for the next forward pass: the tokens of the step before it come sooner."""
    with Engine(model=model, config={**SAME, "async_depth": 1}) as engine:
        runner = engine._parts.runner
        engine.generate(LONG[:20], GREEDY.replace(logprobs=None))
        original, waited = runner.forward, []

        def forward(plan: Any, requests: Any) -> Any:
            handle = original(plan, requests)
            torch.cuda._sleep(200_000_000)  # about a tenth of a second
            event = torch.cuda.Event()
            event.record()
            waited.append(event)
            return handle

        collect = runner.collect
        early = []

        def collecting(handle: Any) -> Any:
            result = collect(handle)
            early.append(not waited[-1].query())
            return result

        runner.forward, runner.collect = forward, collecting
        engine.generate(LONG[:20], GREEDY.replace(max_tokens=4, logprobs=None))
    assert early[:3] == [True, True, True]


def test_future_tokens_stay_on_the_device() -> None:
    tokens = FutureTokens(4, vocab_size=100, device="cuda")
    tokens.put([3, 1], torch.tensor([7, -1], device="cuda"))
    assert tokens.take([1, 3]).tolist() == [0, 7]


def test_host_tier_gives_pinned_memory_back() -> None:
    tier = HostTier(4, 1 << 20, device="cuda")
    assert tier.size_bytes == 4 << 20
    tier.close()
    tier.close()
    assert tier.size_bytes == 0
