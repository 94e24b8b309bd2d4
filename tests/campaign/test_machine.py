"""Random machines: a short campaign in every run of the suite, a long one on demand, and Hypothesis on top."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from deepinfer.testing import Machine, MachineConfig, Mutation, run_campaign, shrink


def test_short_campaign() -> None:
    report = run_campaign(600, seed=20)
    assert report.violations == []
    assert report.num_actions >= 600
    assert report.counts["replayed"] >= 1
    assert {"stop", "length", "abort", "error"} <= set(report.outcomes)


@pytest.mark.benchmark
def test_long_campaign() -> None:
    report = run_campaign(100_000, seed=5_000)
    assert [str(violation) for violation in report.violations] == []


def test_same_seed_same_campaign() -> None:
    first, second = (run_campaign(120, seed=3) for _ in range(2))
    assert (first.counts, first.outcomes) == (second.counts, second.outcomes)
    assert first.num_steps == second.num_steps


class LosesTokens(Mutation):
    """The longest sequences forget a token when they come back."""

    def scheduler(self, scheduler: Any) -> None:
        books = scheduler._books
        admit = books.admit

        def forgetful(sequence: Any, allocation: Any, hit: Any) -> None:
            admit(sequence, allocation, hit)
            if sequence.epoch:
                books.table.settled[sequence.slot] += 1

        books.admit = forgetful


def test_shrunk_violations_are_small_and_fail_alike() -> None:
    report = run_campaign(2_000, mutation=LosesTokens, most_violations=1)
    (violation,) = report.violations
    small = shrink(violation, LosesTokens)
    assert len(small.actions) <= 4
    assert type(small.error) is type(violation.error)
    assert "actions" in str(small)
    assert report.to_dict()["violations"] == [str(violation)]


def test_real_interrupts_are_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(MachineConfig())

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(machine.engine, "step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        machine.do(("step", {"times": 1}))


CONFIGS = st.builds(
    MachineConfig,
    depth=st.integers(0, 1),
    drafts=st.sampled_from([0, 2, 4]),
    window=st.sampled_from([0, 1, 3]),
    num_seqs=st.integers(1, 4),
    chunk=st.integers(5, 9),
    spare_budget=st.integers(0, 20),
    block_size=st.sampled_from([2, 4, 8]),
    spare_blocks=st.integers(0, 16),
    num_host=st.sampled_from([0, 3]),
    order=st.sampled_from(["fcfs", "priority", "longest_prefix", "shortest_uncached"]),
    whole_prompt=st.booleans(),
    faults=st.just(False),
)


class Rules(RuleBasedStateMachine):
    """The machine's actions as rules, so that Hypothesis looks for an order that fails."""

    @initialize(config=CONFIGS)
    def start(self, config: MachineConfig) -> None:
        self.machine = Machine(config)

    @rule(seed=st.integers(0, 10_000), max_tokens=st.integers(1, 18))
    def add(self, seed: int, max_tokens: int) -> None:
        drawn = self.machine.config.draw_request(random.Random(seed))
        params = {**drawn["params"], "max_tokens": max_tokens}
        self.machine.do(("add", {**drawn, "params": params}))

    @rule(times=st.integers(1, 5))
    def step(self, times: int) -> None:
        self.machine.do(("step", {"times": times}))

    @precondition(lambda self: self.machine.unfinished)
    @rule(name=st.sampled_from(["abort", "preempt", "preempt"]), pick=st.integers(0, 9))
    def take(self, name: str, pick: int) -> None:
        self.machine.do((name, {"pick": pick}))

    @rule(chance=st.integers(0, 5))
    def reset(self, chance: int) -> None:
        if chance == 0:
            self.machine.do(("reset", {}))

    @rule(site=st.sampled_from(["load", "save"]), after=st.integers(0, 2))
    def fail_copy(self, site: str, after: int) -> None:
        self.machine.do(("fail", {"site": site, "after": after}))

    def teardown(self) -> None:
        if hasattr(self, "machine"):
            self.machine.finish()


def test_hypothesis_finds_no_order_that_fails() -> None:
    run_state_machine_as_test(
        Rules,
        settings=settings(
            max_examples=15,
            stateful_step_count=20,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_configurations_are_values() -> None:
    config = MachineConfig.random(random.Random(5))
    assert config == MachineConfig.random(random.Random(5))
    assert dataclasses.replace(config, depth=0).depth == 0
