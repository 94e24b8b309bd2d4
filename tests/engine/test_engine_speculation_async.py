"""Schedules that learn while callers come, stop, abort and lose their slots: the tokens are those of decoding without drafts."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import pytest
from letter_grammar import compile_regex

from deepinfer import AsyncEngine, Engine, SamplingParams
from deepinfer.core.errors import DeepInferError
from deepinfer.speculative import (
    AcceptanceEstimator,
    LiveLengths,
    OnlineTemperatureScaling,
    StepCostModel,
    VerificationScheduler,
)
from deepinfer.testing import ToyConfig, ToyModel, ToyTokenizer

COSTS = {
    "rows are free": StepCostModel.additive(1e-3, 1e-9),
    "some rows pay": StepCostModel.additive(1e-3, 3e-4),
    "stairs": StepCostModel([2, 4, 8, 16, 24], [1e-3, 1.2e-3, 1.3e-3, 2e-3, 5e-3]),
    "drafting does not pay": StepCostModel.additive(1e-4, 5e-2, request_s=1e-2),
}


def some_params(dice: random.Random) -> SamplingParams:
    """Any kind of request."""
    values: dict[str, Any] = {
        "max_tokens": dice.randint(2, 40),
        "ignore_eos": True,
        "temperature": dice.choice([0.0, 0.0, 0.7, 1.2]),
        "seed": dice.randrange(2**63),
    }
    kinds: list[dict[str, Any]] = [
        {}, {}, {}, {"top_p": 0.8}, {"presence_penalty": 0.8}, {"logprobs": 1},
        {"regex": "|".join(["abc", "0123"] * dice.randint(1, 9))},
        {"stop_token_ids": tuple(dice.sample(range(5, 40), 6))}, {"stop": (dice.choice("abcxyz"),)},
    ]  # fmt: skip
    return SamplingParams(**{**values, **dice.choice(kinds)})


async def attack(
    engine: Engine, prompts: list[list[int]], params: list[SamplingParams], dice: random.Random
) -> list[tuple[list[int], Any, bool]]:
    """Tokens and reason of each request, and whether it was cut off."""

    async def one(caller: AsyncEngine, at: int) -> tuple[list[int], Any, bool]:
        await asyncio.sleep(dice.random() * 0.05)
        cut = dice.randint(1, 12) if dice.random() < 0.25 else None
        tokens: list[int] = []
        reason = None
        async with caller.stream(prompts[at], params[at], rid=f"r{at}") as stream:
            async for delta in stream:
                tokens += delta.token_ids
                reason = delta.finish_reason or reason
                if cut is not None and len(tokens) >= cut:
                    await caller.abort(f"r{at}")
                    return tokens, reason, True
        return tokens, reason, False

    async def pester(caller: AsyncEngine) -> None:
        while True:
            await asyncio.sleep(dice.random() * 0.01)
            with contextlib.suppress(DeepInferError):  # it waits, or has ended
                await caller.preempt(f"r{dice.randrange(len(prompts))}")

    async with AsyncEngine(engine) as caller:
        trouble = asyncio.create_task(pester(caller))
        found = await asyncio.gather(*[one(caller, at) for at in range(len(prompts))])
        trouble.cancel()
        await caller.check()
    return found


@pytest.mark.parametrize("cost", list(COSTS))
@pytest.mark.parametrize("seed", range(6))
def test_a_learning_schedule_under_attack(cost: str, seed: int) -> None:
    dice = random.Random(100 * seed + len(cost))
    prompts = [[dice.randint(5, 40) for _ in range(dice.randint(1, 9))] for _ in range(10)]
    params = [some_params(dice) for _ in prompts]
    config: dict[str, Any] = {
        "max_num_seqs": dice.randint(2, 4), "prefill_chunk_tokens": dice.choice([3, 64]),
        "async_depth": seed % 2, "max_num_batched_tokens": dice.choice([16, 40]), "deterministic": True,
    }  # fmt: skip
    parts: dict[str, Any] = {"tokenizer": ToyTokenizer(), "grammar": compile_regex}
    with Engine(model=ToyModel(), config=config, **parts) as engine:
        plain = engine.generate(prompts, params)
    calibration = [
        None, OnlineTemperatureScaling(5), AcceptanceEstimator(5, min_trials=dice.choice([4, 60]))
    ][seed % 3]  # fmt: skip
    policy = LiveLengths(
        VerificationScheduler(COSTS[cost]), calibration=calibration, probe_share=0.5
    )
    model = ToyModel(ToyConfig(dspark_block_size=5))
    engine = Engine(model=model, drafter="dspark", verify=policy, config=config, **parts)
    found = asyncio.run(asyncio.wait_for(attack(engine, prompts, params, dice), 60))
    for (tokens, reason, is_cut), output in zip(found, plain, strict=True):
        wanted = list(output.token_ids)
        if is_cut:
            assert tokens == wanted[: len(tokens)]
        else:
            assert (tokens, reason) == (wanted, output.finish_reason)
    assert policy.to_dict()["switch"]["blocks"] > 0
