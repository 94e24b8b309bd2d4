"""Timed steps taken apart."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.engine.cost_fit import fit_costs
from deepinfer.engine.graph_buckets import recorded_rows
from deepinfer.speculative import VerificationScheduler, prefix_survival


def samples(rounded=lambda n: n) -> list[tuple[int, int, float, float]]:
    found = []
    for count in (1, 2, 4, 8, 16):
        found += [(count, count, 1e-3 + 1e-5 * count, 0.0)] * 2
        for length in range(1, 6):
            rows = count * (length + 1)
            seconds = 2e-3 + 3e-5 * rounded(rows) + 1e-4 * count
            found.append((count, rows, seconds, 5e-4))
            found.append((count, rows, 1.02 * seconds, 5e-4))
            found.append((count, rows, 3 * seconds, 5e-4))  # something disturbed it
    return found


@pytest.mark.parametrize("rounded", [None, recorded_rows])
def test_rows_and_requests_are_told_apart(rounded) -> None:
    size = rounded or (lambda n: n)
    cost = fit_costs(samples(size), rounded, fingerprint="here")
    assert cost.fingerprint == "here"
    for count in (1, 2, 4, 8, 16):
        assert cost.plain_seconds(count) == pytest.approx(1e-3 + 1e-5 * count)
        for rows in range(2 * count, 6 * count + 1):
            expected = 2e-3 + 3e-5 * size(rows) + 1e-4 * count
            assert float(cost.seconds(count, rows)) == pytest.approx(expected, rel=0.03), (
                count,
                rows,
            )
    assert min(cost.draft.values()) >= 0
    assert bool(cost.graph_sizes) == (rounded is not None)


def test_disturbed_steps_do_not_count() -> None:
    """Some sizes were timed while something else ran, all repeats of them."""
    found = [
        (count, rows, seconds * (1.8 if rows in (24, 40) else 1.0), drafting)
        for count, rows, seconds, drafting in samples()
    ]
    cost = fit_costs(found)
    for count in (1, 2, 4, 16):
        for rows in range(2 * count, 6 * count + 1, count):
            if rows not in (24, 40):
                expected = 2e-3 + 3e-5 * rows + 1e-4 * count
                assert float(cost.seconds(count, rows)) == pytest.approx(expected, rel=0.2)


def test_steps_that_never_draft() -> None:
    cost = fit_costs([(1, 1, 2.0, 0.0), (4, 4, 3.0, 0.0), (4, 4, 2.5, 0.0)])
    assert cost.tokens == (1, 4)
    assert cost.plain_seconds(4) == 2.5
    assert not cost.draft


def test_noise_leaves_a_usable_model() -> None:
    cost = fit_costs(
        [(1, 1, 1.0, 0.1), (1, 2, 9.0, 0.1), (1, 3, 1.0, 0.1), (2, 4, 0.5, 0.2), (2, 6, 0.4, 0.2)]
    )
    assert (cost.table(8) > 0).all()
    assert min(cost.draft.values()) >= 0


def test_rows_that_look_free_are_no_reason_to_warn() -> None:
    samples = [(count, count * (1 + k), 1e-3, 1e-4) for count in (1, 2, 4) for k in (0, 1, 2)]
    cost = fit_costs(samples)
    assert not cost.is_flat
    VerificationScheduler(cost)  # warnings are errors


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_few_sizes_are_enough_for_good_plans(noise: float) -> None:
    """Experts make the first rows dear, later ones are cheaper: plans from 10 sizes against the best of the true curve."""
    rng = np.random.default_rng(0)

    def true_s(requests: int, rows: int) -> float:
        rows = recorded_rows(rows)
        return 8e-3 + 60e-3 * (1 - (1 - 6 / 384) ** rows) + 4e-5 * rows + 2e-6 * requests

    counts = [1 << k for k in range(9)]
    found = [
        (c, c * (n + 1), true_s(c, c * (n + 1)) * (1 + noise * rng.exponential()), 1e-6)
        for c in counts
        for n in (5, 2)
        for _ in range(4)
    ]
    found += [(c, c, 0.9 * true_s(c, c), 0.0) for c in counts]
    scheduler = VerificationScheduler(fit_costs(found, recorded_rows))
    assert len(scheduler.cost.tokens) == 10
    for requests in (1, 4, 16, 24, 60, 100, 128, 256):
        survival = prefix_survival(rng.beta(2, 1, (requests, 5)))
        rows = scheduler.plan(survival, invariant=True).rows
        tokens = requests + np.concatenate([[0.0], np.sort(survival.ravel())[::-1].cumsum()])
        rates = [t / true_s(requests, requests + k) for k, t in enumerate(tokens)]
        assert rates[rows - requests] > (0.99 if noise else 0.995) * max(rates), requests
