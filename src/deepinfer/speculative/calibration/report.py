"""How far predicted survival is from what happened, position by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError
from deepinfer.speculative._arrays import shape_error
from deepinfer.speculative.calibration.trials import block_counts

__all__ = ["PositionReport", "ReliabilityBin", "auroc", "calibration_report", "expected_error"]

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """Predictions of one range.

    Attributes:
        low: Lower end, included.
        high: Upper end, excluded but for 1.
        mean_prediction: Their mean.
        mean_outcome: Share of them that came true.
        count: How many.
    """

    low: float
    high: float
    mean_prediction: float
    mean_outcome: float
    count: int


@dataclass(frozen=True, slots=True)
class PositionReport:
    """Predictions at one position of a block.

    Attributes:
        position: Position, from 0.
        count: Predictions.
        ece: Expected calibration error: mean distance of prediction and outcome over the bins, weighted by count.
        auroc: Probability that one that came true was predicted higher than one that did not, ties half; NaN when
            all came out alike.
        brier: Mean squared distance of prediction and outcome.
        mean_prediction: Mean of the predictions.
        mean_outcome: Share that came true.
        reliability: Bins that hold any.
    """

    position: int
    count: int
    ece: float
    auroc: float
    brier: float
    mean_prediction: float
    mean_outcome: float
    reliability: tuple[ReliabilityBin, ...]


def calibration_report(
    survival: Sequence[Sequence[float]] | Any, accepted: Sequence[int] | Any, *, bins: int = 20
) -> tuple[PositionReport, ...]:
    """Compares predicted survival with what was accepted.

    Args:
        survival: Predicted probability that each draft and all before it are accepted, one row a block; rows may
            have different lengths: only drafts that were verified belong in.
        accepted: Drafts of each block that were accepted, from its begin, shape [blocks].
        bins: Bins of equal width from 0 to 1.

    Returns:
        One report for each position that any block reaches.

    Raises:
        ConfigError: `bins` is out of range, or a prediction is NaN.
        ShapeError: There is not one row and one number of accepted drafts a block.
    """
    checks.check_int("bins", bins, 1, 100_000, ConfigError)
    rows = [np.asarray(row, float) for row in survival]
    counts = block_counts("accepted", accepted, len(rows))
    for at, row in enumerate(rows):
        if row.ndim != 1:
            raise shape_error(f"survival[{at}]", row.shape, "[drafts]: one row a block")
        if np.isnan(row).any():
            limit = "numbers; leave out drafts that were not verified"
            checks.fail(f"survival[{at}]", row.tolist(), limit, ConfigError)
    reports = []
    for position in range(max((row.size for row in rows), default=0)):
        reached = [at for at, row in enumerate(rows) if row.size > position]
        predicted = np.array([rows[at][position] for at in reached])
        outcome = (counts[reached] > position).astype(float)
        reliability = _reliability(predicted, outcome, bins)
        reports.append(
            PositionReport(
                position=position,
                count=len(reached),
                ece=_ece(reliability),
                auroc=auroc(predicted, outcome),
                brier=float(((predicted - outcome) ** 2).mean()),
                mean_prediction=float(predicted.mean()),
                mean_outcome=float(outcome.mean()),
                reliability=reliability,
            )
        )
    return tuple(reports)


def expected_error(predicted: Any, outcome: Any, *, bins: int = 20) -> float:
    """Expected calibration error.

    Args:
        predicted: Probabilities, shape [n].
        outcome: 1 where it came true, else 0, shape [n].
        bins: Bins of equal width from 0 to 1.

    Returns:
        From 0 to 1; NaN without predictions.
    """
    values = np.asarray(predicted, float)
    if not values.size:
        return float("nan")
    which = _bin(values, bins)
    gaps = np.bincount(which, values - np.asarray(outcome, float), minlength=bins)
    return float(np.abs(gaps).sum() / values.size)


def auroc(predicted: Any, outcome: Any) -> float:
    """Area under the receiver operating characteristic, exact, ties half.

    Args:
        predicted: Scores, shape [n].
        outcome: 1 where it came true, else 0, shape [n].

    Returns:
        From 0 to 1; NaN when all came out alike.
    """
    scores, labels = np.asarray(predicted, float), np.asarray(outcome) > 0.5
    positive = int(labels.sum())
    negative = labels.size - positive
    if not positive or not negative:
        return float("nan")
    _, inverse, count = np.unique(scores, return_inverse=True, return_counts=True)
    rank = (np.cumsum(count) - (count - 1) / 2.0)[inverse]  # ties share the mean of their ranks
    return float((rank[labels].sum() - positive * (positive + 1) / 2.0) / (positive * negative))


def _bin(values: _Floats, bins: int) -> npt.NDArray[np.int64]:
    return np.clip((values * bins).astype(np.int64), 0, bins - 1)


def _reliability(predicted: _Floats, outcome: _Floats, bins: int) -> tuple[ReliabilityBin, ...]:
    which = _bin(predicted, bins)
    count = np.bincount(which, minlength=bins)
    sums = np.bincount(which, predicted, minlength=bins)
    hits = np.bincount(which, outcome, minlength=bins)
    return tuple(
        ReliabilityBin(
            float(at / bins),
            float((at + 1) / bins),
            float(sums[at] / count[at]),
            float(hits[at] / count[at]),
            int(count[at]),
        )
        for at in np.flatnonzero(count)
    )


def _ece(reliability: tuple[ReliabilityBin, ...]) -> float:
    total = sum(item.count for item in reliability)
    gap = sum(item.count * abs(item.mean_prediction - item.mean_outcome) for item in reliability)
    return gap / total if total else float("nan")
