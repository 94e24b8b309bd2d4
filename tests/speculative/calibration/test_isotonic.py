"""Temperatures with monotone curves behind them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from deepinfer.core.errors import ConfigError, ShapeError
from deepinfer.speculative import (
    LiveLengths,
    SequentialIsotonicScaling,
    SequentialTemperatureScaling,
    StepCostModel,
    VerificationScheduler,
    calibration_report,
)
from deepinfer.speculative.calibration.sequential import sigmoid


def bent_head(blocks: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logits, and drafts accepted: the truth bends where no temperature follows, and depends on the draft before."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0.5, 2.0, (blocks, 3))
    truth = 0.15 + 0.5 * sigmoid(3.0 * logits) + 0.2 * sigmoid(logits)
    truth[:, 1:] *= 0.7 + 0.3 * sigmoid(logits[:, :-1])
    hits = rng.random((blocks, 3)) < truth
    return logits, hits.cumprod(1).sum(1)


def errors(confidence: np.ndarray, accepted: np.ndarray) -> list[float]:
    return [r.ece for r in calibration_report(np.cumprod(confidence, 1), accepted)]


def test_errors_that_a_temperature_leaves_go_away() -> None:
    fit, test = bent_head(8000), bent_head(8000, seed=1)
    one = SequentialTemperatureScaling().fit(*fit)
    both = SequentialIsotonicScaling().fit(*fit)
    assert min(errors(one.transform(test[0]), test[1])) > 0.025
    assert max(errors(both.transform(test[0]), test[1])) < 0.02
    assert 0 < both.transform(test[0]).min() < both.transform(test[0]).max() <= 1
    assert both.temperatures[0] == one.temperatures[0], "the first position is scaled alike"


def test_products_are_survivals_of_the_curves() -> None:
    """By hand: one position, two parts of 25 blocks, one made-up block each."""
    logits = np.array([[-1.0]] * 25 + [[1.0]] * 25)
    made = SequentialIsotonicScaling(2).fit(logits, [1] * 5 + [0] * 20 + [1] * 20 + [0] * 5)
    t = made.temperatures[0]
    low, high = sigmoid(np.array([-1.0, 1.0]) / t)
    expected = [(5 + low) / 26, (20 + high) / 26]
    assert made.transform([[-1.0], [1.0]])[:, 0] == pytest.approx(expected)
    assert made.curves[0][0] == pytest.approx([low, high])
    between = made.transform([[0.0]])[0, 0]
    assert between == pytest.approx(np.interp(0.5, [low, high], expected))
    assert made.transform([[60.0]])[0, 0] == pytest.approx(expected[1]), (
        "level behind the last knot"
    )


def test_neighbours_in_the_wrong_order_are_pooled() -> None:
    logits = np.array([[-2.0]] * 25 + [[0.0]] * 25 + [[2.0]] * 25)
    accepted = [1] * 15 + [0] * 10 + [1] * 10 + [0] * 15 + [1] * 24 + [0]
    made = SequentialIsotonicScaling(3).fit(logits, accepted)
    found = made.transform([[-2.0], [0.0], [2.0]])[:, 0]
    assert found[0] == pytest.approx(found[1])
    assert found[0] == pytest.approx(0.5, abs=0.02)
    assert found[2] > 0.9
    z = np.linspace(-8, 8, 200)[:, None]
    assert (np.diff(made.transform(z)[:, 0]) >= 0).all()


def test_only_what_was_verified_counts() -> None:
    """Position 2 was run in half of the blocks, and kept there as often as the first draft was."""
    logits = np.full((400, 2), 1.0)
    accepted = np.array([2, 0] * 100 + [1, 0] * 100)
    verified = np.array([2] * 200 + [1] * 200)
    made = SequentialIsotonicScaling().fit(logits, accepted, verified)
    assert np.cumprod(made.transform([[1.0, 1.0]])) == pytest.approx([0.5, 0.5], abs=0.01)
    unseen = SequentialIsotonicScaling().fit(logits, accepted, np.ones(400, int))
    assert unseen.transform([[1.0, 1.0]])[0, 1] == pytest.approx(sigmoid(np.array(1.0)))


def test_few_blocks_and_odd_numbers() -> None:
    one = SequentialIsotonicScaling().fit([[3.0, -3.0]], [1])
    assert (one.transform([[3.0, -3.0]]) > 0).all()
    found = one.transform([[math.nan, 1.0], [1.0, math.nan], [-math.inf, 1.0]])
    assert np.isnan(found[0]).all()
    assert np.isnan(found[1]).tolist() == [False, True]
    assert found[2].tolist() == [0.0, 0.0]
    with pytest.raises(ConfigError, match="fit first"):
        SequentialIsotonicScaling().transform([[1.0]])
    with pytest.raises(ConfigError, match="at least one block"):
        SequentialIsotonicScaling().fit(np.zeros((0, 2)), [])
    with pytest.raises(ShapeError):
        one.transform([[1.0]])
    with pytest.raises(ConfigError, match="knots"):
        SequentialIsotonicScaling(0)


def test_a_fit_is_kept(tmp_path) -> None:
    logits, accepted = bent_head(500)
    made = SequentialIsotonicScaling().fit(logits, accepted)
    made.save(tmp_path / "x.json")
    again = SequentialIsotonicScaling.load(tmp_path / "x.json")
    assert np.array_equal(again.transform(logits), made.transform(logits))
    values = made.to_dict()
    for wrong in (
        {"format": "x"},
        {"curves": values["curves"][:1]},
        {"curves": [[[0.5, 0.4], [0.1, 0.2]]] * 3},
        {"curves": [[[0.5], [1.2]]] * 3},
        {"curves": "x"},
        {"temperatures": [0.0]},
    ):
        with pytest.raises(ConfigError):
            SequentialIsotonicScaling.from_dict({**values, **wrong})
    (tmp_path / "y.json").write_text("{")
    with pytest.raises(ConfigError, match="no isotonic scaling"):
        SequentialIsotonicScaling.load(tmp_path / "y.json")


def test_a_schedule_takes_it() -> None:
    logits, accepted = [[3.0, 3.0]] * 100, [0] * 60 + [2] * 40
    scaling = SequentialIsotonicScaling().fit(logits, accepted)
    cost = StepCostModel.additive(1.0, 1.5)

    def lengths(calibration: object, width: int) -> list[int]:
        policy = LiveLengths(VerificationScheduler(cost), calibration=calibration)
        return policy.trim([[0.95] * width] * 2, [width] * 2)

    assert lengths(None, 2) == [2, 2]
    assert lengths(scaling, 2) == [0, 0]
    assert lengths(scaling, 1) == [0, 0]
    assert lengths(scaling, 3) == [0, 0]
    with pytest.raises(ConfigError, match="calibration"):
        lengths(SequentialIsotonicScaling(), 2)
