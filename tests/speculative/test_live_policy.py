"""Lengths chosen when the drafts are there."""

from __future__ import annotations

import math

import numpy as np
import pytest

from deepinfer.core.errors import ConfigError, ShapeError
from deepinfer.core.protocols import VerifyLengthPolicy
from deepinfer.speculative import (
    AcceptanceEstimator,
    LiveLengths,
    OnlineTemperatureScaling,
    SequentialTemperatureScaling,
    StepCostModel,
    VerificationScheduler,
)

DEAR = StepCostModel.additive(1.0, 1.0)
CHEAP = StepCostModel.additive(1.0, 1e-6)


def live(cost: StepCostModel = DEAR, **options) -> LiveLengths:
    return LiveLengths(VerificationScheduler(cost), **options)


def test_lengths_fit_the_blocks() -> None:
    made = live(CHEAP)
    assert isinstance(made, VerifyLengthPolicy)
    assert made.trim([[0.9] * 5, [0.9] * 5, [0.9]], [5, 2, 1]) == [5, 2, 1]
    assert made.trim([], []) == []
    assert made.trim([[], [0.9]], [0, 1]) == [0, 1]
    assert made.trim([[0.9, 0.9]], [0]) == [0]


def test_rows_without_confidences_are_verified_whole() -> None:
    made = live()
    assert made.trim([[], [0.01, 0.01], []], [3, 2, 0]) == [3, 0, 0]
    assert made.trim([[], []], [4, 4]) == [4, 4]


def test_a_broken_head_costs_speed_and_nothing_else() -> None:
    made = live()
    rows = [[math.nan, 0.9], [0.9, math.nan, 0.9], [-1.0, 2.0], [math.inf, 0.5]]
    assert made.trim(rows, [2, 3, 2, 2]) == [0, 1, 0, 1]
    assert made.drafts(4) in (True, False)
    assert all(map(math.isfinite, made.to_dict()["switch"]["mean_survival"]))


def test_other_rows_cost_time() -> None:
    cost = StepCostModel([8, 9, 64], [1.0, 3.0, 4.0])
    assert live(cost).trim([[0.9, 0.9]], [2]) == [2], "three rows are as dear as eight"
    assert live(cost).trim([[0.9, 0.9]], [2], 7) == [0], "a ninth row is dear"
    assert live(cost).trim([[0.9, 0.9], []], [2, 6]) == [0, 6], "so are those of unknown drafts"


def test_an_early_stop_never_falls_back_to_whole_blocks() -> None:
    """Appendix A of the DSpark paper: the second confidence reads the first draft, and must not decide about it."""
    cost = StepCostModel([1, 2, 3], [1.0, 2.0, 1 / 0.45])
    for second in (0.0, 0.9):
        made = LiveLengths(VerificationScheduler(cost, search="early_stop"))
        assert made.drafts(1)
        assert [made.trim([[0.8, second]], [2]) for _ in range(3)] == [[0]] * 3


@pytest.mark.parametrize("search", ["global", "all", "static", "uniform", "early_stop"])
@pytest.mark.parametrize("scaling", [None, AcceptanceEstimator])
def test_a_limit_holds_always(search: str, scaling: type[AcceptanceEstimator] | None) -> None:
    """While a calibration learns, in steps that are not looked at, and where no plan pays."""
    for limit in (2, 0):
        made = LiveLengths(
            VerificationScheduler(CHEAP, search=search, max_drafts=limit),
            calibration=scaling and scaling(5),
        )
        for _ in range(40):
            assert not made.skips(4)
            lengths = made.trim([[0.9] * 5] * 3 + [[]], [5, 5, 1, 5])
            assert max(lengths) <= limit
            if made.wants_outcomes:
                made.learn([[0.9] * 5] * 4, lengths, lengths)
        assert max(made.choose([[0.9] * 5], 1)) <= limit
        assert made.drafts(4) == (limit > 0)


def test_a_threshold_is_what_is_verified() -> None:
    made = LiveLengths(VerificationScheduler(CHEAP, search="static", threshold=0.5))
    assert [made.trim([[0.9, 0.4], [0.2, 0.9]], [2, 2]) for _ in range(40)] == [[1, 0]] * 40
    taught = LiveLengths(
        VerificationScheduler(CHEAP, search="static"), calibration=AcceptanceEstimator(2)
    )
    for _ in range(200):
        lengths = taught.trim([[0.99, 0.01]] * 64, [2] * 64)
        if taught.wants_outcomes:
            taught.learn([[0.99, 0.01]] * 64, lengths, [min(1, n) for n in lengths])
    assert lengths.count(1) == 63, "all but the one that is explored"


def test_what_is_no_scheduler_or_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="scheduler"):
        LiveLengths(DEAR)
    with pytest.raises(ShapeError, match="confidences"):
        live().trim([[0.9]], [1, 1])


def test_whole_blocks_or_none_for_schedulers_that_ask_row_by_row() -> None:
    made = live(StepCostModel([1, 100], [2.0, 101.0], draft={1: 1.0}))
    assert made.choose([[0.9, 0.9], []], 2) == [2, 0]
    made.trim([[0.01, 0.01]] * 48, [2] * 48)
    for _ in range(12):
        made.choose([[0.9, 0.9], []], 2)
    assert made.choose([[0.9, 0.9], []], 2) == [0, 0]
    assert not made.is_on


def test_a_plan_that_wins_nothing_is_not_made_every_step(monkeypatch) -> None:
    looks = []

    def watched(cost: StepCostModel) -> LiveLengths:
        made = live(cost)
        plan = made.scheduler.plan
        monkeypatch.setattr(
            made.scheduler, "plan", lambda *a, **k: looks.append(1) or plan(*a, **k)
        )
        return made

    free, dear = (
        watched(StepCostModel.additive(1.0, 1e-9)),
        watched(StepCostModel.additive(1.0, 1.0)),
    )
    assert all(free.trim([[0.5, 0.1]] * 4, [2] * 4) == [2] * 4 for _ in range(80))
    assert len(looks) == 5
    assert all(dear.trim([[0.5, 0.1]] * 4, [2] * 4) == [0] * 4 for _ in range(10))
    assert len(looks) == 15


def test_outcomes_are_wanted_now_and_then() -> None:
    made = live(calibration=OnlineTemperatureScaling(2))
    wanted = []
    for _ in range(16):
        made.trim([[0.5, 0.1]] * 4, [2] * 4)
        wanted.append(made.wants_outcomes)
    assert sum(wanted) == 4


def test_fitted_temperatures_change_lengths() -> None:
    logits, accepted = [[3.0, 3.0]] * 100, [0] * 60 + [2] * 40
    scaling = SequentialTemperatureScaling().fit(logits, accepted)
    sure = [[0.95, 0.95]] * 2
    cost = StepCostModel.additive(1.0, 1.5)
    assert live(cost).trim(sure, [2, 2]) == [2, 2]
    assert live(cost, calibration=scaling).trim(sure, [2, 2]) == [0, 0]
    assert live(cost, calibration=scaling).calibration is scaling


def test_temperatures_are_learnt_from_what_was_verified_only(tmp_path) -> None:
    """Of three drafts one is verified, and half of those are kept: 95 % becomes about 50 %, the others are not judged."""
    made = live(CHEAP, calibration=OnlineTemperatureScaling(3, prior=1.0))
    rows = [[0.95] * 3] * 40
    before = made._calibrated(np.array(rows, np.float32))
    for _ in range(64):
        made.learn(rows, [1] * 40, [0, 1] * 20)
    after = made._calibrated(np.array(rows, np.float32))
    assert before[0, 0] == pytest.approx(0.95, abs=1e-6)
    assert after[0, 0] < 0.62
    made.calibration.save(tmp_path / "online.json")
    again = OnlineTemperatureScaling.load(tmp_path / "online.json")
    assert again.temperatures.tolist() == made.calibration.temperatures.tolist()
    again.update([[2.0, 2.0, 2.0]], [3], [3])
    assert made.to_dict()["calibration"]["temperatures"] != again.temperatures.tolist()


def test_margins_say_what_confidences_do_not() -> None:
    """Confidences are all alike, and margins tell: learnt from outcomes, lengths follow the margins."""
    made = live(StepCostModel.additive(50.0, 1.0), calibration=AcceptanceEstimator(1))
    confidences, margins = [[0.6]] * 40, [[8.0], [0.1]] * 20
    seen = []
    for _ in range(60):
        seen.append(made.trim(confidences, [1] * 40, margins=margins))
        made.learn(
            confidences,
            seen[-1],
            [a * n for a, n in zip([1, 0] * 20, seen[-1], strict=True)],
            margins=margins,
        )
    assert sum(lengths[1::2].count(1) for lengths in seen[-30:]) < 30, "and one now and then"
    assert all(sum(lengths) <= 20 for lengths in seen[-30:]), "within the budget"


def test_a_scaling_that_is_none(tmp_path) -> None:
    for wrong in (0.7, SequentialTemperatureScaling(), "online"):
        with pytest.raises(ConfigError, match="calibration"):
            live(calibration=wrong)
    (tmp_path / "x.json").write_text("[1")
    with pytest.raises(ConfigError, match="no JSON"):
        OnlineTemperatureScaling.load(tmp_path / "x.json")
    values = OnlineTemperatureScaling(2).to_dict()
    for name, wrong in (("format", "x"), ("trials", [[1.0]]), ("hits", None), ("decay", 3.0)):
        with pytest.raises(ConfigError):
            OnlineTemperatureScaling.from_dict({**values, name: wrong})


def test_arrays_are_planned_as_lists_are() -> None:
    rng = np.random.default_rng(3)
    for cost in (DEAR, CHEAP, StepCostModel.additive(1.0, 0.05)):
        for calibration in (None, AcceptanceEstimator(5)):
            one, other = live(cost, calibration=calibration), live(cost)
            for _ in range(6):
                values, gaps = rng.uniform(0.0, 1.0, (2, 40, 5))
                counts = rng.integers(0, 6, 40)
                found = one.trim(values, counts, 3, margins=gaps)
                assert isinstance(found, np.ndarray)
                expected = other.trim(values.tolist(), counts.tolist(), 3, margins=gaps.tolist())
                if calibration is None:
                    assert found.tolist() == expected
                assert (found <= counts).all()
                one.learn(values, counts, counts // 2, margins=gaps)


def test_a_step_without_a_look_is_known_before_the_drafts_are() -> None:
    made = live(CHEAP)
    rows, counts = [[0.9] * 5] * 16, [5] * 16
    assert not made.skips(16)
    assert made.trim(rows, counts) == counts
    skipped = 0
    while not made.wants_outcomes or not skipped:
        assert made.skips(16)
        skipped += 1
    assert skipped >= 15
    made.learn(rows, counts, [3] * 16)
    assert made.skips(16)
    assert made.skips(16)
    assert not made.wants_outcomes
    assert made.skips(15)
    assert not made.wants_outcomes, "about as many"
    assert made.skips(13)
    assert made.wants_outcomes, "another load is looked at at once"


def test_a_look_that_nobody_answered_is_taken_at_the_next_drafts() -> None:
    made = live(CHEAP)
    rows, counts = [[0.9] * 5] * 16, [5] * 16
    made.trim(rows, counts)
    while made.skips(16):
        pass
    assert not made.skips(16)
    assert made.trim(rows, counts) == counts
    assert made.skips(16)


def test_results_may_come_one_step_late() -> None:
    made = live(CHEAP, calibration=AcceptanceEstimator(5, min_trials=5000))
    rows, counts = np.full((16, 5), 0.9), np.full(16, 5)
    wanted = False
    for step in range(40):
        before, wanted = wanted, made.skips(16) and made.wants_outcomes
        assert made.is_on
        assert not (before and wanted), f"the step behind one that is looked at, {step}"
        if before:
            made.learn(rows, counts, np.full(16, 3))
    assert made.calibration.num_trials > 2 * 16 * 4
    assert made.skips(16), "no drafts had to be waited for"


def test_what_is_new_learns_from_steps_that_did_not_wait() -> None:
    made = live(CHEAP, calibration=AcceptanceEstimator(5, min_trials=5000))
    rows, counts = np.full((16, 5), 0.9), np.full(16, 5)
    told = []
    for _ in range(8):
        assert made.skips(16)
        told.append(made.wants_outcomes)
        if told[-1]:
            made.learn(rows, counts, np.full(16, 3))
    assert told == [True, False, False, False] * 2
    assert made.calibration.num_trials == 2 * 16 * 4
    assert made.to_dict()["switch"]["blocks"] == 32


def test_a_look_back_brings_planning_about() -> None:
    """Drafts that are hard now, of a step that was verified whole: the next one is planned."""
    made = live(StepCostModel.additive(1e-3, 1e-3))
    easy, hard, counts = np.full((16, 5), 0.9999), np.full((16, 5), 0.01), np.full(16, 5)
    assert made.trim(easy, counts).tolist() == [5] * 16
    while True:
        assert made.skips(16)
        if made.wants_outcomes:
            break
    made.learn(hard, counts, np.zeros(16, int))
    assert not made.skips(16)
    assert made.trim(hard, counts).tolist() == [0] * 16


def test_rows_that_can_save_nothing_are_not_planned(monkeypatch) -> None:
    made = live(StepCostModel.additive(1.0, 1e-9))
    easy, hard, counts = np.full((16, 5), 0.9), np.full((16, 5), 0.01), np.full(16, 5)
    made.trim(easy, counts)
    monkeypatch.setattr(made.scheduler, "plan", lambda *a, **k: pytest.fail("planned"))
    for _ in range(40):
        assert made.skips(16)
        if made.wants_outcomes:
            made.learn(hard, counts, np.zeros(16, int))
    assert made.to_dict()["switch"]["blocks"] > 16


def test_few_blocks_are_looked_at_together() -> None:
    made = live(CHEAP, calibration=AcceptanceEstimator(5, min_trials=40))
    rows, counts = np.full((6, 5), 0.9), np.full(6, 5)
    blocks = []
    for _ in range(6):
        assert made.skips(6)
        if made.wants_outcomes:
            made.learn(rows, counts, np.full(6, 3), margins=rows)
        blocks.append(made.to_dict()["switch"]["blocks"])
    assert blocks == [0, 0, 18, 18, 18, 18]
    assert made.calibration.num_trials == 18 * 4


def test_looks_that_take_long_are_rare_and_have_to_win_more() -> None:
    rows, counts = [[0.9, 0.9, 0.1, 0.1, 0.1]] * 8, [5] * 8
    cost = StepCostModel.additive(1e-3, 1e-5)
    quick, slow = live(cost), live(cost)
    slow.took(5e-3)
    assert sum(quick.trim(rows, counts)) < 40
    assert slow.trim(rows, counts) == counts
    slow._planning_s = slow._looking_s = 5e-3
    assert slow._rest(1e-3) == 255
