"""Scheduled lengths in front of an engine: bounds, off and on again, probes; and the same text in the engine."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer.core.errors import ConfigError
from deepinfer.core.protocols import VerifyLengthPolicy
from deepinfer.speculative import (
    OnlineTemperatureScaling,
    ScheduledLengths,
    StepCostModel,
    VerificationScheduler,
)

DEAR = StepCostModel.additive(1e-3, 1e-3)


def policy(**options: Any) -> ScheduledLengths:
    return ScheduledLengths(VerificationScheduler(DEAR), **options)


def test_lengths_stay_within_the_blocks() -> None:
    made = policy()
    assert isinstance(made, VerifyLengthPolicy)
    assert list(made.choose([[0.99, 0.99], [0.99], []], 3)) == [2, 1, 0]
    assert list(made.choose([], 5)) == []
    assert list(made.choose([[], []], 2)) == [0, 0]


def test_other_rows_cost_time() -> None:
    cost = StepCostModel([8, 9, 64], [1.0, 3.0, 4.0])
    made = ScheduledLengths(VerificationScheduler(cost))
    assert list(made.choose([[0.9, 0.9]], 1)) == [2], "three rows are as dear as eight"
    assert list(made.choose([[0.9, 0.9]], 8)) == [0], "a ninth row is dear"


def test_off_and_on_again_with_hysteresis() -> None:
    made = policy(off_gain=0.1, hysteresis=0.3, probe_every=1000)
    assert made.choose([[0.6, 0.3]], 1) == [0]
    assert not made.is_on
    assert made.choose([[0.85, 0.3]], 1) == [0], "it would do to stay on, and not to begin"
    assert made.choose([[1.0, 1.0, 1.0]], 1) == [3]
    assert made.is_on
    assert made.choose([[0.85, 0.3]], 1) == [1]


def test_probes_find_out_that_text_became_easy() -> None:
    made = policy(probe_every=4)
    found = [made.choose([[0.01, 0.01], []], 2)[0] for _ in range(8)]
    assert found == [0, 0, 0, 1, 0, 0, 0, 1]
    made = policy(probe_every=16)
    found = [made.choose([[0.01, 0.01]], 1)[0] for _ in range(60)]
    assert [at for at, length in enumerate(found, 1) if length] == [4, 12, 28, 44, 60]
    made.choose([[1.0, 1.0]], 1)  # on: the gaps begin anew
    found = [made.choose([[0.01, 0.01]], 1)[0] for _ in range(12)]
    assert found[2] or found[3]


def test_confidences_are_calibrated() -> None:
    made = policy(calibration=OnlineTemperatureScaling(2, prior=1.0))
    assert made.wants_outcomes
    sure = [[0.97, 0.97]] * 20
    before = sum(made.choose(sure, 20))
    for _ in range(80):
        made.learn(sure, [2] * 20, [0, 1] * 10)
    assert before == 20
    assert sum(made.choose(sure, 20)) < 20
    assert not policy().wants_outcomes
    with pytest.raises(ConfigError, match="calibration"):
        policy(calibration=0.5)


def test_bad_options() -> None:
    with pytest.raises(ConfigError, match="probe_every"):
        policy(probe_every=0)
    with pytest.raises(ConfigError, match="hysteresis"):
        policy(hysteresis=-1.0)


def test_the_engine_gives_the_same_text_under_any_schedule() -> None:
    deepinfer = pytest.importorskip("deepinfer")
    pytest.importorskip("torch")
    params = deepinfer.SamplingParams(max_tokens=20, temperature=0.0)
    prompts = ["def area(r):\n    return", "import os\nimport", "class Point:\n    def"]

    def run(policy: ScheduledLengths | None, **options: Any) -> tuple[list[Any], int]:
        from deepinfer.scheduling import Scheduler

        config = deepinfer.EngineConfig(deterministic=True)
        if policy is not None:
            options["scheduler"] = lambda limits, cache: Scheduler(
                limits, cache, verify_lengths=policy
            )
        with deepinfer.Engine.from_pretrained("nano", config=config, **options) as engine:
            outs = engine.generate(prompts, params)
            return [out.token_ids for out in outs], sum(out.usage.verified for out in outs)

    wanted, _ = run(None)
    whole, rows = run(None, drafter="dspark")
    cost = StepCostModel.additive(1e-3, 1e-4)
    scheduled, fewer = run(
        ScheduledLengths(VerificationScheduler(cost), probe_every=8), drafter="dspark"
    )
    assert whole == wanted
    assert scheduled == wanted
    assert 0 < fewer < rows
