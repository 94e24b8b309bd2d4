"""Whether drafting pays: by load, with hysteresis, and probes that cost little."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.core.errors import ConfigError
from deepinfer.speculative import DraftSwitch, StepCostModel

PLAIN = {1: 1e-3, 64: 1.2e-3, 256: 2e-3}
COST = StepCostModel(
    [1, 6, 384, 1536], [1e-3, 1e-3, 2e-3, 9e-3], draft={1: 5e-4, 256: 5e-3}, plain=PLAIN
)
GOOD = np.tile(np.float32([0.8, 0.6, 0.5, 0.4, 0.3]), (64, 1))


def test_the_load_decides_at_once() -> None:
    switch = DraftSwitch(COST)
    assert switch.draws(256), "nothing is known yet"
    assert not switch.draws(0)
    switch.note(GOOD)
    assert switch.draws(1)
    assert switch.promise == pytest.approx((1 + GOOD[0].sum()) / 1.5 - 1, rel=1e-3)
    assert not switch.draws(256)
    assert not switch.is_on
    assert switch.draws(1), "no new block is needed to begin again"
    assert switch.is_on


def test_hysteresis() -> None:
    switch = DraftSwitch(COST, off_gain=0.1, hysteresis=0.5, probe_share=0.0)
    for _ in range(8):
        switch.note(np.full((64, 1), 0.2, np.float32))  # 1.2 tokens in 1.5 of the time: 20 % less
    found = [switch.draws(1) for _ in range(40)]
    assert found == [True] * 11 + [False] * 29, "beginnings are given a chance"
    for _ in range(8):
        switch.note(np.full((64, 1), 0.6, np.float32))
    assert not switch.draws(1), "7 % would do to stay on, and not to begin"
    switch.note(np.ones((64, 2), np.float32))
    assert switch.draws(1)
    switch.note(np.full((64, 1), 0.6, np.float32))
    assert all(switch.draws(1) for _ in range(40))


def steps_of(switch: DraftSwitch, requests: int, survival: float, steps: int) -> list[bool]:
    """What the switch says, step by step, when blocks survive so well."""
    found = []
    for _ in range(steps):
        found.append(switch.draws(requests))
        if found[-1]:
            switch.note(np.full((requests, 5), survival, np.float32))
    return found


@pytest.mark.parametrize(("requests", "survival"), [(256, 0.01), (256, 0.3), (64, 0.05), (1, 0.05)])
def test_probes_lose_their_share_of_the_time(requests: int, survival: float) -> None:
    switch = DraftSwitch(COST, probe_share=0.01)
    steps_of(switch, requests, survival, 300)
    assert not switch.is_on
    found = steps_of(switch, requests, survival, 60_000)
    assert any(found)
    rows = np.arange(requests, 6 * requests + 1)
    theta = (requests + survival * (rows - requests)) / COST.seconds(requests, rows)
    seconds = float(COST.seconds(requests, rows)[theta.argmax()])
    lost = sum(found) * (
        seconds - theta.max() * seconds / (requests / COST.plain_seconds(requests))
    )
    assert 0.002 < lost / (len(found) * COST.plain_seconds(requests)) < 0.013
    assert not any(steps_of(DraftSwitch(COST, probe_share=0.0), requests, survival, 400)[300:])


@pytest.mark.parametrize("requests", [16, 64])
def test_answers_that_begin_hard_are_looked_at_again_soon(requests: int) -> None:
    switch = DraftSwitch(COST)
    steps_of(switch, requests, 0.05, 60)
    assert not switch.is_on
    steps_of(switch, requests, 0.9, 90)
    assert switch.is_on


def test_probes_that_find_nothing_become_rare() -> None:
    switch = DraftSwitch(COST)
    found = steps_of(switch, 256, 0.05, 2000)
    begins = [at for at in range(1, 2000) if found[at] and not found[at - 1]]
    gaps = np.diff(begins)
    assert 24 <= begins[0] <= 48
    assert len(begins) <= 7
    assert (gaps[1:] > 1.5 * gaps[:-1]).all()


@pytest.mark.parametrize("requests", [1, 16, 64])
def test_a_probe_finds_that_text_became_easy(requests: int) -> None:
    switch = DraftSwitch(COST)
    steps_of(switch, requests, 0.01, 300)
    assert not switch.is_on
    steps_of(switch, requests, 0.9, 5000)
    assert switch.is_on


def test_the_first_blocks_of_a_probe_do_not_count() -> None:
    """What the draft proposes with little behind it says nothing of what it does later."""
    switch = DraftSwitch(COST, probe_share=1.0)
    steps_of(switch, 64, 0.01, 100)
    drafted = 0
    while not switch.is_on and drafted < 40:
        if switch.draws(64):
            drafted += 1
            switch.note(np.full((64, 5), 0.0 if drafted <= 4 else 0.9, np.float32))
    assert switch.is_on
    assert drafted < 12


def test_a_probe_in_which_nothing_is_drafted_ends() -> None:
    switch = DraftSwitch(COST, probe_share=0.1)
    steps_of(switch, 64, 0.01, 100)
    found = [switch.draws(64) for _ in range(5000)]
    assert 0 < sum(found) < 2500
    assert not found[-1] or not all(found[-60:])


def test_bad_options() -> None:
    for name in ("off_gain", "hysteresis", "probe_share"):
        with pytest.raises(ConfigError, match=name):
            DraftSwitch(COST, **{name: -2.0})


def test_asleep_or_awake_it_says_the_same() -> None:
    rng = np.random.default_rng(5)
    asleep, awake = DraftSwitch(COST), DraftSwitch(COST)
    for switch in (asleep, awake):
        switch.note(GOOD)
    requests, slept = 256, 0
    for step in range(4000):
        if step % 500 == 499:
            requests = int(rng.choice([1, 128, 256]))
        slept += asleep._asleep > 0
        awake._asleep = 0
        found = [switch.draws(requests) for switch in (asleep, awake)]
        assert found[0] == found[1], step
        if found[0]:
            survival = GOOD * np.float32(rng.uniform(0.5, 1.0))
            for switch in (asleep, awake):
                switch.note(survival)
                switch.compare(100.0, 90.0)
    assert 1000 < slept < 3999
