"""Deterministic mode through whole engines: one request, one stream of tokens and bits of log probabilities."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer import Engine, SamplingParams
from deepinfer.models import load_model
from deepinfer.models.deepseek_v41 import DeepseekV41
from deepinfer.testing import unique_streams

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "oracle_v41"
PROMPT = [(i * 7 + i * i) % 120 + 5 for i in range(75)]
PARAMS = SamplingParams(
    temperature=0.8, top_p=0.9, seed=7, max_tokens=10, ignore_eos=True, logprobs=0
)
OTHER = PARAMS.replace(temperature=0.0, max_tokens=14)


@pytest.fixture(scope="module")
def model() -> DeepseekV41:
    return load_model(GOLDEN, rounding="full")  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def stream(
    model: DeepseekV41,
    *,
    neighbours: int = 0,
    chunk: int = 64,
    depth: int = 0,
    preempted_at: int = 0,
    warm: bool = False,
    threads: int = 1,
    drafter: str | None = None,
    params: SamplingParams = PARAMS,
    deterministic: bool = True,
) -> list[tuple[int, float]]:
    """Tokens and log probabilities of the request, and a check that what the options say took place."""
    torch.set_num_threads(threads)
    config: dict[str, Any] = {
        "deterministic": deterministic, "max_num_seqs": neighbours + 1, "max_model_len": 128,
        "prefill_chunk_tokens": chunk, "async_depth": depth, "block_size": 8, "num_blocks": 400,
    }  # fmt: skip
    with Engine(model=model, config=config, drafter=drafter) as engine:
        if warm:
            engine.generate(PROMPT, OTHER.replace(max_tokens=1))
        for index in range(neighbours // 2):
            engine.add_request(PROMPT[index : 20 + 9 * index], OTHER)
        engine.add_request(PROMPT, params, rid="it", keep_output=True)
        for index in range(neighbours // 2, neighbours):
            engine.add_request([9 + index, *PROMPT[: 5 * index]], OTHER)
        for number in range(1, 400):
            engine.step()
            if number == preempted_at:
                engine.preempt("it")
            if not engine.has_unfinished:
                break
        output = engine.take_output("it")[0]
        engine.check()
        stats = engine.stats()
    assert output.usage.cached == (72 if warm else 0)
    assert not output.approximate_prefix
    assert stats.cache.allocated_total == neighbours + 1 + warm + bool(preempted_at)
    assert output.logprobs is not None
    return [(entry.token_id, entry.logprob) for entry in output.logprobs]


def test_one_stream_over_neighbours_chunks_and_depths(model: DeepseekV41) -> None:
    def run(**options: Any) -> Sequence[tuple[int, float]]:
        return stream(model, **options)

    found = unique_streams(run, {"neighbours": [0, 1, 5, 12], "chunk": [7, 64], "depth": [0, 1]})
    assert found.count == 1, found


def test_one_stream_over_preemption_hits_and_threads(model: DeepseekV41) -> None:
    def run(**options: Any) -> Sequence[tuple[int, float]]:
        return stream(model, neighbours=2, **options)

    cases = {"preempted_at": [4], "warm": [False, True], "threads": [1, 2], "depth": [1]}
    found = unique_streams(run, cases)
    assert found.count == 1, found


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_one_stream_with_and_without_drafts(model: DeepseekV41, temperature: float) -> None:
    def run(**options: Any) -> Sequence[tuple[int, float]]:
        params = PARAMS.replace(temperature=temperature)
        return stream(model, neighbours=1, params=params, **options)

    cases = {
        "drafter": [None, "dspark"], "preempted_at": [0, 3], "warm": [False, True], "depth": [0, 1]
    }  # fmt: skip
    found = unique_streams(run, cases)
    assert found.count == 1, found


def test_one_stream_alone_and_in_company_under_any_schedule(model: DeepseekV41) -> None:
    """Alone without drafts, and in a batch with drafts of which a random number is verified."""

    class Dice:
        random = random.Random(3)

        def choose(self, confidences: Sequence[Sequence[float]], num_running: int) -> list[int]:
            return [self.random.randint(0, len(row)) for row in confidences]

    params = [
        PARAMS.replace(temperature=(0.0, 0.7, 1.1)[i % 3], seed=i, max_tokens=9) for i in range(12)
    ]
    prompts = [PROMPT[i : 12 + 3 * i] for i in range(12)]
    config = {"deterministic": True, "max_model_len": 96, "max_num_seqs": 12, "block_size": 8}
    with Engine(model=model, config={**config, "max_num_seqs": 1}) as engine:
        alone = engine.generate(prompts, params)
    for depth in (0, 1):
        with Engine(
            model=model, drafter="dspark", verify=Dice(), config={**config, "async_depth": depth}
        ) as engine:
            together = engine.generate(prompts, params)
            assert engine.stats().draft_rows_saved > 20
        assert sum(output.usage.accepted for output in together)
        for one, other in zip(alone, together, strict=True):
            assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)


def test_control_without_the_mode(model: DeepseekV41) -> None:
    """Plain products give other bits in other company, so the tests above can fail."""

    def run(**options: Any) -> Sequence[tuple[int, float]]:
        return stream(model, deterministic=False, **options)

    assert unique_streams(run, {"neighbours": [0, 1, 5, 12], "chunk": [7, 64]}).count > 1


def test_two_processes(model: DeepseekV41) -> None:
    """Another process, with another number of threads."""
    code = (
        "import sys, torch; sys.path.insert(0, sys.argv[1])\n"
        "import test_engine_determinism as tests\n"
        "model = tests.load_model(tests.GOLDEN, rounding='full')\n"
        "found = tests.stream(model, neighbours=3, threads=2)\n"
        "print([(token, value.hex()) for token, value in found])"
    )
    folder = str(Path(__file__).resolve().parent)
    other = subprocess.run(
        [sys.executable, "-c", code, folder], capture_output=True, text=True, check=True
    )
    here = [(token, value.hex()) for token, value in stream(model)]
    assert other.stdout.strip() == str(here)
