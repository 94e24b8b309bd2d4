"""Fits the duration of a step to timed steps: weighted, robust, and without negative coefficients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.scheduling.cost_report import BucketError, FitRejection, FitReport, StepCoefficients
from deepinfer.scheduling.step_work import PREFIX_BUCKETS, StepSample, bucket_name, bucket_of

__all__ = ["fit_step_cost"]

_ROUNDS = 30
_CUT = 3.5  # robust standard deviations
_FLOOR = 0.005  # relative residuals below this are never outliers


def fit_step_cost(
    samples: Sequence[StepSample],
    *,
    prior: StepCoefficients | None = None,
    min_samples: int = 16,
    max_residual_share: float = 0.1,
    max_outlier_share: float = 0.25,
) -> FitReport:
    """Fits the coefficients of a step to samples.

    Residuals are relative, so that short steps count as much as long ones. The first rounds minimise their absolute
    values, which a minority of wild samples cannot move; the last ones are least squares over the samples within
    3.5 robust standard deviations. Columns are scaled to the same size, so prefixes of a million tokens leave the
    problem well conditioned. No coefficient is negative. The result is deterministic.

    Args:
        samples: Timed steps. Chunks with prefixes must be among them to learn what prefixes cost, and chunks of
            several sizes to tell the cost of a step from that of its tokens.
        prior: What is kept where the samples say little, or nothing; None keeps 0.
        min_samples: Fewest samples.
        max_residual_share: Largest root mean square residual, as a share of the mean duration.
        max_outlier_share: Largest share of outliers.

    Returns:
        The report; it says whether and why the fit is rejected.
    """
    count = len(samples)
    if count < max(min_samples, len(StepCoefficients.__dataclass_fields__)):
        return FitReport(
            coefficients=None, rejection=FitRejection.TOO_FEW_SAMPLES, num_samples=count
        )
    features = np.array([(1, *s.work[:-1], s.work.is_mixed) for s in samples], float)
    seconds = np.array([sample.seconds for sample in samples])
    names = tuple(StepCoefficients.__dataclass_fields__)
    before = np.array([getattr(prior, name) for name in names]) if prior else np.zeros(len(names))
    solution, inliers = _robust(features, seconds, before, 0.1 if prior else 0.0)
    predicted = features @ solution
    error = (predicted - seconds)[inliers]
    share = float(np.sqrt(np.mean(error**2)) / seconds[inliers].mean())
    outliers = count - int(inliers.sum())
    coefficients = StepCoefficients(**dict(zip(names, solution.tolist(), strict=True)))
    rejection = None
    if outliers > max_outlier_share * count:
        rejection = FitRejection.TOO_MANY_OUTLIERS
    elif share > max_residual_share:
        rejection = FitRejection.LARGE_RESIDUAL
    elif features[:, 2].any() and coefficients.token_s + coefficients.pair_s <= 0.0:
        rejection = FitRejection.NO_COST_PER_TOKEN
    return FitReport(
        coefficients=coefficients,
        rejection=rejection,
        num_samples=count,
        num_outliers=outliers,
        residual_share=share,
        buckets=_bucket_errors(samples, inliers, (predicted - seconds) / seconds),
        undetermined=tuple(
            name for name, column in zip(names, features.T, strict=True) if not column.any()
        ),
    )


def _robust(
    features: NDArray[Any], seconds: NDArray[Any], before: NDArray[Any], prior_weight: float
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Coefficients, and which samples are no outliers."""
    scale = (
        seconds.copy()
    )  # what residuals are relative to: first the measured, then the predicted seconds
    weights = np.ones(len(seconds))
    inliers = np.ones(len(seconds), bool)
    solution = before
    for number in range(_ROUNDS):
        rows = features * (weights / scale)[:, None]
        new = _solve(rows, seconds * weights / scale, before, prior_weight)
        settled = np.allclose(features @ new, features @ solution, rtol=1e-9, atol=0.0)
        solution = new
        predicted = np.maximum(features @ solution, 1e-3 * seconds)
        residual = (seconds - predicted) / predicted
        if number < _ROUNDS // 2:
            # Least absolute residuals, as weighted least squares.
            weights = 1.0 / np.sqrt(np.maximum(np.abs(residual), 1e-4))
            scale = np.minimum(seconds, predicted) if number < 3 else predicted
            continue
        spread = 1.4826 * float(np.median(np.abs(residual)))
        inside = np.abs(residual) <= max(_CUT * spread, _FLOOR)
        settled = settled and bool((inside == inliers).all())
        inliers, weights, scale = inside, inside.astype(float), predicted
        if settled:
            break
    return solution, inliers


def _solve(
    rows: NDArray[Any], target: NDArray[Any], before: NDArray[Any], prior_weight: float
) -> NDArray[Any]:
    """Least squares without negative entries; what no row speaks of keeps its value from before."""
    size = np.sqrt(np.mean(rows**2, axis=0))
    known = size > 0.0
    result = before.copy()
    scaled = rows[:, known] / size[known]
    if prior_weight:
        # Rows that pull, weakly and in units of shares of the duration, to the coefficients from before.
        anchor = prior_weight * np.eye(int(known.sum()))
        scaled = np.vstack([scaled, anchor])
        target = np.concatenate([target, prior_weight * (before * size)[known]])
    upper = np.asarray(np.linalg.qr(np.column_stack([scaled, target]), mode="r"))
    result[known] = _nonnegative(upper[:, :-1], upper[:, -1]) / size[known]
    return result


def _nonnegative(matrix: NDArray[Any], target: NDArray[Any]) -> NDArray[Any]:
    """Least squares with every entry at least 0, by the active set method of Lawson and Hanson."""
    size = matrix.shape[1]
    solution = np.zeros(size)
    free = np.zeros(size, bool)
    tolerance = 1e-12 * float(np.abs(matrix.T @ target).max(initial=0.0))
    for _ in range(4 * size):
        slope = matrix.T @ (target - matrix @ solution)
        slope[free] = -np.inf
        if free.all() or slope.max() <= tolerance:
            break
        free[int(slope.argmax())] = True
        while free.any():
            trial = np.zeros(size)
            trial[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            below = free & (trial <= 0.0)
            if not below.any():
                solution = trial
                break
            step = np.min(solution[below] / (solution[below] - trial[below]))
            solution = np.where(free, solution + step * (trial - solution), 0.0)
            free &= solution > 1e-15 * max(float(solution.max()), 1e-300)
            solution[~free] = 0.0
    return solution


def _bucket_errors(
    samples: Sequence[StepSample], inliers: NDArray[Any], error: NDArray[Any]
) -> tuple[BucketError, ...]:
    buckets = np.array([bucket_of(sample.work) for sample in samples])
    found = []
    for index in range(-1, len(PREFIX_BUCKETS)):
        inside = error[(buckets == index) & inliers]
        if inside.size:
            found.append(
                BucketError(
                    bucket=bucket_name(index),
                    num_samples=int(inside.size),
                    mean_error=float(np.abs(inside).mean()),
                    mean_bias=float(inside.mean()),
                )
            )
    return tuple(found)
