"""Sequential Temperature Scaling: one temperature a position, fitted in order (DSpark paper, 3.2.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError
from deepinfer.speculative._arrays import matrix, shape_error
from deepinfer.speculative._saved import read_json, write_json
from deepinfer.speculative.calibration.report import expected_error
from deepinfer.speculative.calibration.trials import recorded_blocks

__all__ = ["SequentialTemperatureScaling", "sigmoid"]

_FORMAT = "deepinfer-sts-1"
_Floats = npt.NDArray[np.float64]


class SequentialTemperatureScaling:
    """Divides the logits of each position by a temperature of its own, so that predicted survival is what happens.

    Position k is fitted with all before it frozen: of a grid, the temperature whose survivals
    `prod over i <= k of sigmoid(z_i / T_i)` have the lowest expected calibration error against "drafts 1 to k were all
    accepted". A temperature never changes the order of the drafts of one position.

    The paper leaves open the grid, the bins and who counts. Here: 97 temperatures from 1/4 to 4, evenly in the
    logarithm; 20 bins of equal width; and only blocks that were verified at least up to the position. Trimmed blocks
    would otherwise count as rejected where nobody looked.

    Args:
        grid: Temperatures to try, above 0; None takes the default.
        bins: Bins of the calibration error.

    Attributes:
        temperatures: One a position, shape [drafts]; empty before the fit.

    Raises:
        ConfigError: A temperature is not above 0, or `bins` is out of range.

    Examples:
        >>> scaling = SequentialTemperatureScaling().fit([[2.0], [2.0], [2.0], [2.0]], [1, 1, 0, 0])
        >>> float(scaling.transform([[2.0]])[0, 0]) < 0.63  # half of them were accepted, not 88 %
        True
    """

    def __init__(self, grid: Sequence[float] | None = None, *, bins: int = 20) -> None:
        values = np.geomspace(0.25, 4.0, 97) if grid is None else positive_numbers("grid", grid)
        # The nearest to 1 first: of equally good temperatures the one that changes least is taken.
        self.grid: _Floats = values[np.argsort(np.abs(np.log(values)), kind="stable")]
        self.bins = checks.check_int("bins", bins, 1, 100_000, ConfigError)
        self.temperatures: _Floats = np.zeros(0)

    def fit(self, logits: Any, accepted: Any, verified: Any = None) -> SequentialTemperatureScaling:
        """Fits the temperatures.

        Args:
            logits: Confidence logits of each draft, before any scaling, shape [blocks, drafts].
            accepted: Drafts of each block that were accepted, from its begin, shape [blocks].
            verified: Drafts of each block that were verified, shape [blocks]; None says all.

        Returns:
            Itself.

        Raises:
            ConfigError: There is no block, or the logit of a verified draft is NaN.
            ShapeError: Shapes do not fit.
        """
        values, counts, seen = recorded_blocks(logits, accepted, verified)
        blocks, drafts = values.shape
        temperatures = np.ones(drafts)
        before = np.ones(blocks)
        for position in range(drafts):
            shown = seen > position
            if shown.any():
                outcome = (counts[shown] > position).astype(float)
                temperatures[position] = self.best(before[shown], values[shown, position], outcome)
            before = before * sigmoid(values[:, position] / temperatures[position])
        self.temperatures = temperatures
        return self

    def best(self, before: _Floats, logits: _Floats, outcome: _Floats) -> float:
        """The temperature of one position.

        Args:
            before: Calibrated survival of the position before, shape [blocks]; 1 for the first.
            logits: Confidence logits of the position, shape [blocks].
            outcome: 1 where it and all before it were accepted, else 0, shape [blocks].

        Returns:
            Of the grid, the temperature with the lowest calibration error; of equally good ones the nearest to 1.
        """
        errors = [
            expected_error(before * sigmoid(logits / temperature), outcome, bins=self.bins)
            for temperature in self.grid
        ]
        return float(self.grid[int(np.argmin(errors))])

    def transform(self, logits: Any) -> _Floats:
        """Calibrated confidences.

        Args:
            logits: Confidence logits, shape [blocks, drafts].

        Returns:
            Probability that each draft is accepted if all before it are, shape [blocks, drafts].

        Raises:
            ConfigError: It was not fitted.
            ShapeError: Blocks are not as long as those of the fit: other temperatures would be needed.
        """
        values = matrix("logits", logits, "[blocks, drafts]")
        self._check_fitted()
        if values.shape[1] != self.temperatures.size:
            raise shape_error("logits", values.shape, f"[blocks, drafts={self.temperatures.size}]")
        return sigmoid(values / self.temperatures)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that `from_dict` takes.

        Raises:
            ConfigError: It was not fitted.
        """
        self._check_fitted()
        return {"format": _FORMAT, "temperatures": self.temperatures.tolist()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SequentialTemperatureScaling:
        """Takes fitted temperatures from plain values.

        Args:
            values: What `to_dict` gave.

        Returns:
            The scaling.

        Raises:
            ConfigError: The values are no temperatures.
        """
        checks.check_mapping("temperatures", values, ConfigError)
        if values.get("format") != _FORMAT:
            checks.fail("format", values.get("format"), repr(_FORMAT), ConfigError)
        made = cls()
        made.temperatures = positive_numbers("temperatures", values.get("temperatures"))
        return made

    def save(self, path: str | Path) -> None:
        """Writes the temperatures to a JSON file.

        Args:
            path: The file; it is replaced.

        Raises:
            ConfigError: It was not fitted.
        """
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> SequentialTemperatureScaling:
        """Reads temperatures from a JSON file.

        Args:
            path: The file.

        Returns:
            The scaling.

        Raises:
            ConfigError: The file holds no temperatures.
        """
        return cls.from_dict(read_json(path, "temperatures"))

    def _check_fitted(self) -> None:
        if not self.temperatures.size:
            checks.fail("temperatures", "none", "fitted; call fit first", ConfigError)

    def __repr__(self) -> str:
        shown = ", ".join(f"{value:.2f}" for value in self.temperatures)
        return f"SequentialTemperatureScaling([{shown}])"


def positive_numbers(name: str, values: Any) -> _Floats:
    """Numbers above 0, or an error.

    Args:
        name: Their name.
        values: The numbers.

    Returns:
        The numbers, shape [n], float64.

    Raises:
        ConfigError: There is none, or one is not finite and above 0.
    """
    try:
        found = np.asarray(() if values is None else values, float)
    except (TypeError, ValueError):
        found = np.zeros(0)
    if found.ndim != 1 or not found.size or not (np.isfinite(found) & (found > 0)).all():
        checks.fail(name, values, "a list of numbers above 0, at least one", ConfigError)
    return found


def sigmoid(values: _Floats) -> _Floats:
    """The logistic function, without overflow.

    Args:
        values: Any numbers.

    Returns:
        From 0 to 1, shaped alike.
    """
    decay = np.exp(-np.abs(values))
    return np.where(values >= 0, 1.0, decay) / (1.0 + decay)
