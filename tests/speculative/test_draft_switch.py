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
GOOD = np.tile(np.float32([0.8, 0.6, 0.5, 0.4, 0.3]), (8, 1))


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
    switch.note(np.full((4, 1), 0.6, np.float32))  # 1.6 tokens in 1.5 of the time: not 10 % more
    assert not switch.draws(1)
    switch.note(np.full((4, 1), 0.9, np.float32))
    assert not switch.draws(1), "27 % would do to stay on, and not to begin"
    switch.note(np.ones((4, 2), np.float32))
    assert switch.draws(1)
    switch.note(np.full((4, 1), 0.9, np.float32))
    assert switch.draws(1)


def test_probes_cost_their_share_of_the_time() -> None:
    switch = DraftSwitch(COST, probe_share=0.01)
    switch.note(0.01 * GOOD)
    steps = 40_000
    drafted = sum(switch.draws(256) for _ in range(steps))
    assert drafted > 0
    extra = float(COST.seconds(256, 1536)) - 2e-3
    assert 0.003 < drafted * extra / (steps * 2e-3) < 0.012
    assert not any(DraftSwitch(COST, probe_share=0.0).draws(0) for _ in range(10))


def test_a_probe_finds_that_text_became_easy() -> None:
    switch = DraftSwitch(COST, probe_share=0.2)
    switch.note(0.01 * GOOD)
    for _ in range(10_000):
        if switch.draws(64):
            switch.note(np.ones((64, 5), np.float32))
        if switch.is_on:
            break
    assert switch.is_on


def test_the_first_blocks_of_a_probe_do_not_count() -> None:
    """What the draft proposes with little behind it says nothing of what it does later."""
    switch = DraftSwitch(COST, probe_share=1.0)
    switch.note(0.01 * GOOD)
    kept = []
    for turn in range(10_000):
        if switch.draws(64):
            switch.note(np.full((64, 5), turn, np.float32) / 20_000)
            kept.append((turn, float(switch._seen[-1, 0])))
            if len(kept) == 5:
                break
    assert [round(20_000 * value) for _, value in kept[:4]] != [turn for turn, _ in kept[:4]]
    assert round(20_000 * kept[4][1]) == kept[4][0]


def test_bad_options() -> None:
    for name in ("off_gain", "hysteresis", "probe_share"):
        with pytest.raises(ConfigError, match=name):
            DraftSwitch(COST, **{name: -2.0})
