"""Temperatures first, then a curve that only rises: survivals that are what happens, position by position."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError
from deepinfer.speculative._arrays import matrix, shape_error
from deepinfer.speculative._saved import read_json, write_json
from deepinfer.speculative.calibration.sequential import (
    SequentialTemperatureScaling,
    positive_numbers,
    sigmoid,
)
from deepinfer.speculative.calibration.trials import recorded_blocks

__all__ = ["SequentialIsotonicScaling"]

_FORMAT = "deepinfer-isotonic-1"
_LEAST_BLOCKS = 25  # of a knot
_Floats = npt.NDArray[np.float64]


class SequentialIsotonicScaling:
    """Sequential Temperature Scaling, and behind each temperature a monotone curve of few knots.

    A temperature can make a head less sure of itself; it cannot bend the curve between what the head says and what
    happens. Position k is fitted with all before it frozen: a temperature as in `SequentialTemperatureScaling`, which gives
    `x = survival of k - 1 * sigmoid(z / T)`, and then isotonic regression of "drafts 1 to k were all accepted" on x: the
    blocks in order of x are cut into `knots` parts with as many blocks each, and neighbours whose shares are in the wrong
    order are pooled. Between the parts' means the curve is linear; a survival is never above that of the position before.

    A curve never turns the order of two drafts with different x around, but it may make them equal.

    Args:
        knots: Most parts; each has at least 25 blocks.
        bins: As in `SequentialTemperatureScaling`.

    Attributes:
        temperatures: One a position, shape [drafts]; empty before the fit.
        curves: Of each position x and survival of its knots, rising, shape [2, knots] each.

    Raises:
        ConfigError: A number is out of range.

    Examples:
        >>> scaling = SequentialIsotonicScaling().fit([[2.0]] * 100, [1] * 50 + [0] * 50)
        >>> round(float(scaling.transform([[2.0]])[0, 0]), 2)
        0.5
    """

    def __init__(self, knots: int = 20, *, bins: int = 20) -> None:
        self.knots = checks.check_int("knots", knots, 1, 10_000, ConfigError)
        self.bins = checks.check_int("bins", bins, 1, 100_000, ConfigError)
        self.temperatures: _Floats = np.zeros(0)
        self.curves: tuple[_Floats, ...] = ()

    def fit(self, logits: Any, accepted: Any, verified: Any = None) -> SequentialIsotonicScaling:
        """Fits temperatures and curves.

        Args:
            logits: Confidence logits of each draft, before any scaling, shape [blocks, drafts].
            accepted: Drafts of each block that were accepted, from its begin, shape [blocks].
            verified: Drafts of each block that were verified, shape [blocks]; None says all. A block counts up to there.

        Returns:
            Itself.

        Raises:
            ConfigError: There is no block, or the logit of a verified draft is NaN.
            ShapeError: Shapes do not fit.
        """
        values, counts, seen = recorded_blocks(logits, accepted, verified)
        blocks, drafts = values.shape
        temperatures, curves = np.ones(drafts), []
        before = np.ones(blocks)
        steps = SequentialTemperatureScaling(bins=self.bins)
        for position in range(drafts):
            shown = seen > position
            outcome = (counts[shown] > position).astype(float)
            z = values[:, position]
            if shown.any():
                temperatures[position] = steps.best(before[shown], z[shown], outcome)
            x = before * sigmoid(z / temperatures[position])
            curves.append(self._curve(x[shown], outcome))
            before = _bent(curves[-1], x, before)
        self.temperatures, self.curves = temperatures, tuple(curves)
        return self

    def transform(self, logits: Any) -> _Floats:
        """Calibrated confidences.

        Args:
            logits: Confidence logits, shape [blocks, drafts].

        Returns:
            Probability that each draft is accepted if all before it are, shape [blocks, drafts]; their products are the
            survivals that were fitted. NaN logits give NaN.

        Raises:
            ConfigError: It was not fitted.
            ShapeError: Blocks are not as long as those of the fit.
        """
        values = matrix("logits", logits, "[blocks, drafts]")
        self._check_fitted()
        if values.shape[1] != len(self.curves):
            raise shape_error("logits", values.shape, f"[blocks, drafts={len(self.curves)}]")
        out = np.empty(values.shape)
        before = np.ones(len(values))
        for position, curve in enumerate(self.curves):
            x = before * sigmoid(values[:, position] / self.temperatures[position])
            survival = _bent(curve, x, before)
            with np.errstate(invalid="ignore"):
                out[:, position] = np.where(before == 0, 0.0, survival / before)
            before = survival
        return out

    def to_dict(self) -> dict[str, Any]:
        """Plain values that `from_dict` takes.

        Raises:
            ConfigError: It was not fitted.
        """
        self._check_fitted()
        return {
            "format": _FORMAT,
            "temperatures": self.temperatures.tolist(),
            "curves": [curve.tolist() for curve in self.curves],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SequentialIsotonicScaling:
        """Takes a fit from plain values.

        Args:
            values: What `to_dict` gave.

        Returns:
            The scaling.

        Raises:
            ConfigError: The values are no such fit.
        """
        checks.check_mapping("an isotonic scaling", values, ConfigError)
        if values.get("format") != _FORMAT:
            checks.fail("format", values.get("format"), repr(_FORMAT), ConfigError)
        made = cls()
        made.temperatures = positive_numbers("temperatures", values.get("temperatures"))
        curves: Any = values.get("curves")
        if not isinstance(curves, list | tuple) or len(curves) != made.temperatures.size:
            checks.fail("curves", curves, "one a temperature", ConfigError)
        made.curves = tuple([_checked(curve) for curve in curves])
        return made

    def save(self, path: str | Path) -> None:
        """Writes the fit to a JSON file.

        Args:
            path: The file; it is replaced.

        Raises:
            ConfigError: It was not fitted.
        """
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> SequentialIsotonicScaling:
        """Reads a fit from a JSON file.

        Args:
            path: The file.

        Returns:
            The scaling.

        Raises:
            ConfigError: The file holds no such fit.
        """
        return cls.from_dict(read_json(path, "isotonic scaling"))

    def __repr__(self) -> str:
        knots = [curve.shape[1] for curve in self.curves]
        return f"SequentialIsotonicScaling(knots by position {knots})"

    def _check_fitted(self) -> None:
        if not self.curves:
            checks.fail("curves", "none", "fitted; call fit first", ConfigError)

    def _curve(self, x: _Floats, outcome: _Floats) -> _Floats:
        """Knots of the monotone curve, shape [2, knots]."""
        parts = max(1, min(self.knots, x.size // _LEAST_BLOCKS))
        edges = np.unique(np.quantile(x, np.linspace(0, 1, parts + 1)[1:-1])) if x.size else x
        part = np.searchsorted(edges, x, side="right")
        columns = [np.bincount(part, w, len(edges) + 1) for w in (np.ones_like(x), x, outcome)]
        count, total, hits = np.array(columns)[:, columns[0] > 0]
        if not count.size:
            return np.array([[0.0, 1.0], [0.0, 1.0]])  # nobody looked: as it is
        mean = total / count
        # One made-up block says what the temperature says, so that no share is 0 or 1 by chance.
        return np.stack([mean, _pooled((hits + mean) / (count + 1.0), count)])


def _bent(curve: _Floats, x: _Floats, before: _Floats) -> _Floats:
    """Survivals of a curve: from 0 to its first knot and on to the others in lines, level behind the last."""
    known = np.concatenate([[0.0], curve[0]]), np.concatenate([[0.0], curve[1]])
    found: _Floats = np.minimum(np.interp(x, *known), before)
    return found


def _pooled(shares: _Floats, weights: _Floats) -> _Floats:
    """The nearest numbers that never fall: neighbours in the wrong order become their mean."""
    pools: list[tuple[float, float, int]] = []
    for share, weight in zip(shares.tolist(), weights.tolist(), strict=True):
        pools.append((share, weight, 1))
        while len(pools) > 1 and pools[-2][0] >= pools[-1][0]:
            (one, a, n), (other, b, m) = pools[-2:]
            pools[-2:] = [((one * a + other * b) / (a + b), a + b, n + m)]
    return np.concatenate([np.full(n, share) for share, _, n in pools])


def _checked(curve: Any) -> _Floats:
    try:
        found = np.asarray(curve, float)
    except (TypeError, ValueError):
        found = np.zeros(0)
    is_curve = found.ndim == 2 and found.shape[0] == 2 and found.shape[1] > 0
    if not is_curve or not ((found >= 0) & (found <= 1)).all() or (np.diff(found) < 0).any():
        checks.fail("curves", curve, "two rising rows of numbers from 0 to 1 each", ConfigError)
    return found
