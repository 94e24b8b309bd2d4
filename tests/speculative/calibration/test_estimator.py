"""Acceptance from confidence and margin."""

from __future__ import annotations

import json

import numpy as np
import pytest

from deepinfer.core.errors import ConfigError, ShapeError
from deepinfer.speculative import AcceptanceEstimator
from deepinfer.speculative.calibration import auroc
from deepinfer.speculative.calibration.sequential import sigmoid


def blocks(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Logits, margins, accepted, and the true probabilities, of which each knows a part."""
    generator = np.random.default_rng(seed)
    z, m = generator.normal(0.5, 1.5, (count, 3)), generator.exponential(2.0, (count, 3))
    true = sigmoid(0.4 * z + 0.9 * m - 1.5)
    accepted = np.cumprod(generator.random((count, 3)) < true, 1).sum(1)
    return z, m, accepted, true


def test_it_finds_the_law() -> None:
    z, m, accepted, true = blocks(20_000)
    found = AcceptanceEstimator(3).fit(z, m, accepted).predict(z, m)
    assert np.abs(found - true).mean() < 0.02
    hits = accepted > 0
    both = auroc(found[:, 0], hits)
    assert both > auroc(z[:, 0], hits) + 0.1
    assert both > auroc(m[:, 0], hits) + 0.01


def test_what_was_not_looked_at_was_not_rejected() -> None:
    z, m, accepted, _ = blocks(20_000)
    verified = np.random.default_rng(1).integers(0, 4, len(z))
    whole = AcceptanceEstimator(3).fit(z, m, accepted).predict(z, m)
    part = AcceptanceEstimator(3).fit(z, m, np.minimum(accepted, verified), verified).predict(z, m)
    assert np.abs(whole - part).mean() < 0.03
    wrong = AcceptanceEstimator(3).fit(z, m, np.minimum(accepted, verified)).predict(z, m)
    assert np.abs(whole - wrong).mean() > 0.1


def test_it_learns_and_forgets() -> None:
    made = AcceptanceEstimator(3, capacity=500)
    z, m, accepted, true = blocks(6000)
    assert np.allclose(made.predict(z, m), sigmoid(z)), "nothing is known: confidences as they are"
    for at in range(0, 6000, 60):
        part = slice(at, at + 60)
        made.update(z[part], m[part], accepted[part], np.full(60, 3))
    error = np.abs(made.refit().predict(z, m) - true).mean()
    assert error < 0.06 < np.abs(sigmoid(z) - true).mean()
    for _ in range(40):
        made.update(z[:60], m[:60], np.zeros(60, int), np.full(60, 3))
    assert made.refit().predict(z, m)[:, 0].max() < 0.2


def test_few_trials_change_nothing_and_one_kind_of_outcome_stays_finite() -> None:
    made = AcceptanceEstimator(1)
    made.update(np.ones((63, 1)), None, np.zeros(63, int), np.ones(63, int))
    assert made.refit().coefficients[0].tolist() == [1, 0, 0, 0, 0]
    made.update(np.ones((2000, 1)), None, np.zeros(2000, int), np.ones(2000, int))
    assert 0 < made.refit().predict([[1.0]])[0, 0] < 0.05
    assert np.isfinite(made.coefficients).all()


def test_a_fit_that_begins_at_another_ends_where_it_should() -> None:
    """Refits follow data that change: their predictions are as many as come true, however wrong the fit before was."""
    made = AcceptanceEstimator(1, capacity=1000)
    generator = np.random.default_rng(3)
    for turn in range(60):
        z, m = generator.normal(turn % 7 - 3, 3, (400, 1)), generator.exponential(4, (400, 1))
        sharp = 8.0 if turn % 3 else -2.0
        accepted = (generator.random(400) < sigmoid(sharp * (m[:, 0] - turn % 5))).astype(int)
        made.update(z, m, accepted, np.ones(400, int))
        made.refit()
        trials = made._trials[0, : min(1000, 400 * (turn + 1))]
        predicted = made.predict(trials[:, :1], trials[:, 1:2])
        assert abs(predicted.mean() - trials[:, 2].mean()) < 0.01


def test_missing_and_broken_input() -> None:
    made = AcceptanceEstimator(2)
    z = np.array([[np.nan, 1.0], [np.inf, -np.inf]])
    found = made.predict(z, [[np.nan, -3.0], [np.inf, 1e9]])
    assert np.isnan(found[0, 0])
    assert ((found[1] >= 0) & (found[1] <= 1)).all()
    made.update(z, None, [0, 1], [2, 2])
    made.update(np.zeros((0, 2)), np.zeros((0, 2)), [], [])
    made.refit()
    for wrong in ([[1.0]], [[1.0, 2.0, 3.0]]):
        with pytest.raises(ShapeError):
            made.predict(wrong)
        with pytest.raises(ShapeError):
            made.predict([[1.0, 2.0]], wrong)
    with pytest.raises(ConfigError, match="capacity"):
        AcceptanceEstimator(2, capacity=0)


def test_files(tmp_path) -> None:
    z, m, accepted, _ = blocks(3000)
    made = AcceptanceEstimator(3).fit(z, m, accepted)
    made.save(tmp_path / "fit.json")
    again = AcceptanceEstimator.load(tmp_path / "fit.json")
    assert np.array_equal(again.predict(z, m), made.predict(z, m))
    values = json.loads((tmp_path / "fit.json").read_text())
    for name, wrong in (
        ("format", 1),
        ("coefficients", [[1.0]]),
        ("coefficients", [[None] * 5]),
        ("coefficients", "x"),
    ):
        with pytest.raises(ConfigError):
            AcceptanceEstimator.from_dict({**values, name: wrong})
    (tmp_path / "fit.json").write_text("{")
    with pytest.raises(ConfigError, match="no JSON"):
        AcceptanceEstimator.load(tmp_path / "fit.json")
