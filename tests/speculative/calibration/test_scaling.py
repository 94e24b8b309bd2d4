"""Temperatures and margins: an over-confident head is put right, on data that the fit has not seen."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from deepinfer.core.errors import ConfigError, ShapeError
from deepinfer.speculative.calibration import (
    MarginEstimator,
    OnlineTemperatureScaling,
    SequentialIsotonicScaling,
    SequentialTemperatureScaling,
    auroc,
    calibration_report,
)
from deepinfer.speculative.calibration.sequential import sigmoid

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
HEAT = np.array([2.5, 2.0, 1.6, 1.0, 0.7])


def blocks(count: int, seed: int) -> tuple[Floats, Ints]:
    """Logits of a head that is too sure by the factors of HEAT, and accepted drafts."""
    generator = np.random.default_rng(seed)
    truth = generator.normal(1.0, 1.5, (count, HEAT.size))
    passed = generator.random(truth.shape) < sigmoid(truth)
    return truth * HEAT, np.cumprod(passed, 1).sum(1)


def errors(confidence: Floats, accepted: Ints) -> list[float]:
    reports = calibration_report(np.cumprod(confidence, 1), accepted)
    return [report.ece for report in reports]


def test_sequential_scaling_recovers_the_temperatures() -> None:
    scaling = SequentialTemperatureScaling().fit(*blocks(20_000, 1))
    logits, accepted = blocks(20_000, 2)
    assert scaling.temperatures == pytest.approx(HEAT, rel=0.2)
    before, after = errors(sigmoid(logits), accepted), errors(scaling.transform(logits), accepted)
    assert max(after) < 0.02, "the bar of the DSpark paper's first position"
    assert before[0] > 4 * after[0]
    for position in range(HEAT.size):
        same = [
            auroc(c[:, position], accepted > position) for c in (logits, scaling.transform(logits))
        ]
        assert same[0] == same[1], "a temperature never changes the order of one position"


def test_trimmed_blocks_are_not_rejections() -> None:
    logits, accepted = blocks(20_000, 3)
    verified = np.random.default_rng(4).integers(0, 6, len(accepted))
    seen = np.minimum(accepted, verified)
    right = SequentialTemperatureScaling().fit(logits, seen, verified)
    wrong = SequentialTemperatureScaling().fit(logits, seen)
    assert right.temperatures == pytest.approx(HEAT, rel=0.3)
    assert (
        abs(np.log(wrong.temperatures / HEAT)).max()
        > 2 * abs(np.log(right.temperatures / HEAT)).max()
    )


def test_positions_that_nobody_saw_stay_as_they_are() -> None:
    scaling = SequentialTemperatureScaling().fit(np.ones((3, 2)), [1, 1, 0], [1, 1, 1])
    assert scaling.temperatures[1] == 1.0


def test_files_and_pickles(tmp_path: Path) -> None:
    scaling = SequentialTemperatureScaling().fit(*blocks(500, 5))
    scaling.save(tmp_path / "sts.json")
    for other in (
        SequentialTemperatureScaling.load(tmp_path / "sts.json"),
        pickle.loads(pickle.dumps(scaling)),
    ):
        assert other.temperatures.tolist() == scaling.temperatures.tolist()
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ConfigError, match="format"):
        SequentialTemperatureScaling.load(tmp_path / "bad.json")
    (tmp_path / "bad.json").write_text("no json")
    with pytest.raises(ConfigError, match=r"bad\.json"):
        SequentialTemperatureScaling.load(tmp_path / "bad.json")


def test_a_table_for_other_blocks_is_refused() -> None:
    scaling = SequentialTemperatureScaling().fit(*blocks(100, 6))
    with pytest.raises(ShapeError, match="drafts=5"):
        scaling.transform(np.zeros((1, 4)))
    with pytest.raises(ConfigError, match="fit"):
        SequentialTemperatureScaling().transform(np.zeros((1, 4)))
    with pytest.raises(ConfigError, match="logits"):
        scaling.fit(np.full((2, 2), np.nan), [0, 0])
    with pytest.raises(ConfigError, match="grid"):
        SequentialTemperatureScaling([0.0])


def test_online_scaling_follows_and_heeds_the_censoring_rule() -> None:
    online = OnlineTemperatureScaling(5, prior=8.0)
    generator = np.random.default_rng(7)
    for step in range(300):
        logits, accepted = blocks(64, 100 + step)
        verified = generator.integers(0, 6, 64)
        online.update(logits, np.minimum(accepted, verified), verified)
    assert online.temperatures == pytest.approx(HEAT, rel=0.25)
    logits, accepted = blocks(20_000, 8)
    assert max(errors(online.transform(logits), accepted)) < 0.03


def test_online_scaling_forgets() -> None:
    online = OnlineTemperatureScaling(1, decay=0.9)
    generator = np.random.default_rng(9)
    for heat in (1.0, 3.0):
        for _ in range(100):
            truth = generator.normal(0.5, 1.5, (64, 1))
            accepted = (generator.random((64, 1)) < sigmoid(truth)).sum(1)
            online.update(truth * heat, accepted, np.ones(64, int))
        assert online.temperatures[0] == pytest.approx(heat, rel=0.3)


def test_online_scaling_ignores_what_was_not_looked_at() -> None:
    online = OnlineTemperatureScaling(3)
    online.update(np.full((4, 3), 5.0), [0, 0, 0, 0], [0, 0, 0, 0])
    online.update(np.full((4, 3), np.nan), [3, 3, 3, 3], [3, 3, 3, 3])
    assert online.temperatures.tolist() == [1.0, 1.0, 1.0]


def test_margins_become_confidences() -> None:
    generator = np.random.default_rng(10)
    estimator = MarginEstimator(2)

    def draw(count: int) -> tuple[Floats, Ints]:
        margin = generator.exponential(2.0, (count, 2))
        passed = generator.random((count, 2)) < sigmoid(np.array([0.9, 0.5]) * margin - 1.0)
        return margin, np.cumprod(passed, 1).sum(1)

    for _ in range(100):
        margin, accepted = draw(64)
        estimator.update(margin, accepted, np.full(64, 2))
    assert estimator.coefficients == pytest.approx(np.array([[0.9, -1.0], [0.5, -1.0]]), abs=0.15)
    margin, accepted = draw(20_000)
    assert max(errors(estimator.predict(margin), accepted)) < 0.02


def test_margins_that_know_nothing_fall_back_to_the_mean() -> None:
    estimator = MarginEstimator(1)
    assert estimator.predict([[3.0]]).tolist() == [[0.5]]
    margin = np.linspace(0, 10, 1000)[:, None]
    estimator.update(
        margin, (margin[:, 0] < 5).astype(int), np.ones(1000, int)
    )  # the wrong way round
    assert estimator.predict([[0.0], [9.0]])[:, 0] == pytest.approx([0.5, 0.5], abs=0.01)
    assert estimator.predict([[np.nan]]).tolist() == [[0.0]]


@pytest.mark.parametrize("kind", [SequentialTemperatureScaling, SequentialIsotonicScaling])
def test_what_was_not_verified_may_be_missing(kind) -> None:
    """As recorders leave it: NaN behind the end of a shorter block."""
    generator = np.random.default_rng(1)
    logits = generator.normal(1.0, 1.0, (200, 3))
    verified = generator.integers(0, 4, 200)
    accepted = np.minimum(generator.integers(0, 4, 200), verified)
    holes = np.where(np.arange(3) < verified[:, None], logits, np.nan)
    found, wanted = kind().fit(holes, accepted, verified), kind().fit(logits, accepted, verified)
    assert found.to_dict() == wanted.to_dict()
    with pytest.raises(ConfigError, match=r"block .*draft"):
        kind().fit(holes, accepted)


def test_other_widths_and_what_is_no_prediction() -> None:
    with pytest.raises(ShapeError, match="drafts=2"):
        OnlineTemperatureScaling(2).transform([[1.0, 2.0, 3.0]])
    with pytest.raises(ShapeError, match=r"survival\[0\]"):
        calibration_report([0.3, 0.4], [1, 0])
    with pytest.raises(ConfigError, match=r"survival\[1\]"):
        calibration_report([[0.3], [np.nan]], [1, 0])
    with pytest.raises(ShapeError, match="accepted"):
        calibration_report([[0.3]], ["x"])
