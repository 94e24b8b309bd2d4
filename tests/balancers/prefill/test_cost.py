"""The cost of a prompt: its formula, and the largest chunk that fits a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.balancers.prefill import PrefillCost
from deepinfer.core.errors import ConfigError
from deepinfer.scheduling import StepCoefficients, StepTimeModel


def test_formula_and_arrays() -> None:
    cost = PrefillCost(token_s=2.0, pair_s=3.0, prefix_token_s=5.0)
    assert cost.seconds(prefix=7.0, tokens=11.0) == 5 * 7 + 2 * 11 + 3 * (2 * 7 * 11 + 11**2)
    both = cost.seconds(np.array([0.0, 7.0]), np.array([1.0, 11.0]))
    assert both.tolist() == [5.0, cost.seconds(7.0, 11.0)]


def test_agrees_with_the_fitted_model_of_scheduling() -> None:
    fitted = StepCoefficients(step_s=1e-3, token_s=2e-5, prefix_token_s=1e-7, pair_s=3e-10)
    cost, model = PrefillCost.of(fitted), StepTimeModel(fitted)
    for prefix, tokens in ((0, 1), (0, 5000), (100_000, 777)):
        whole = cost.step_s + cost.seconds(float(prefix), float(tokens))
        assert whole == pytest.approx(model.predict([(prefix, tokens)]))


def test_rate_and_crossover() -> None:
    cost = PrefillCost.of_rate(20_000, crossover_tokens=65_536)
    short, long = cost.seconds(0.0, 1.0), cost.seconds(0.0, 65_536.0)
    assert short == pytest.approx(5e-5, rel=1e-3)
    assert long == pytest.approx(2 * 65_536 / 20_000)
    assert PrefillCost.of_rate(10.0).pair_s == 0.0


@given(
    prefix=st.integers(0, 10**6),
    seconds=st.floats(0, 100),
    cap=st.integers(0, 40_000),
    token=st.sampled_from([0.0, 1e-6, 5e-5]),
    pair=st.sampled_from([0.0, 1e-12, 1e-9]),
    read=st.sampled_from([0.0, 1e-8]),
)
def test_largest_fits_and_one_more_does_not(
    prefix: int, seconds: float, cap: int, token: float, pair: float, read: float
) -> None:
    cost = PrefillCost(token_s=token, pair_s=pair, prefix_token_s=read)
    found = cost.largest(float(prefix), seconds, cap)
    assert 0 <= found <= cap
    slack = 1e-9 * (1.0 + seconds)
    if found:
        assert cost.seconds(float(prefix), float(found)) <= seconds + slack
    if found < cap:
        assert cost.seconds(float(prefix), float(found + 1)) >= seconds - slack


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, True, "1"])
def test_bad_coefficients_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="token_s"):
        PrefillCost(token_s=value)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        PrefillCost.of_rate(10.0, crossover_tokens=0.0)
