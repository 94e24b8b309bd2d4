"""Temperatures that follow the traffic, from verified drafts only."""

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
from deepinfer.speculative.calibration.sequential import sigmoid
from deepinfer.speculative.calibration.trials import verified_trials

__all__ = ["OnlineTemperatureScaling"]

_Floats = npt.NDArray[np.float64]
_FORMAT = "deepinfer-online-temperatures-1"
_LOW, _HIGH, _BINS = -8.0, 8.0, 64


class OnlineTemperatureScaling:
    """One temperature a position, fitted to a histogram of logits and outcomes that slowly forgets.

    A draft counts as a trial only when it was verified and all drafts before it were accepted: what was not looked at
    was not rejected. With few trials a position leans on the temperature that fits all positions together.

    Args:
        num_drafts: Drafts of a block.
        decay: What an update leaves of the trials before it; 0.999 forgets half in 700 updates.
        prior: Trials that the common temperature counts as.

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(self, num_drafts: int, *, decay: float = 0.999, prior: float = 64.0) -> None:
        self.num_drafts = checks.check_int("num_drafts", num_drafts, 1, 256, ConfigError)
        self.decay = checks.check_float("decay", decay, 0.0, 1.0, ConfigError)
        self.prior = checks.check_float("prior", prior, 0.0, 1e12, ConfigError)
        self._trials = np.zeros((num_drafts, _BINS))
        self._hits = np.zeros((num_drafts, _BINS))
        self._logits = np.zeros((num_drafts, _BINS))  # sums, so that a bin stands for its mean
        self._grid = np.geomspace(1 / 8, 8, 49)

    def update(self, logits: Any, accepted: Any, verified: Any) -> None:
        """Takes the blocks of a step.

        Args:
            logits: Confidence logits, before any scaling, shape [blocks, drafts].
            accepted: Drafts of each block that were accepted, shape [blocks].
            verified: Drafts of each block that were verified, shape [blocks].

        Raises:
            ShapeError: Shapes do not fit.
        """
        values = self._blocks(logits)
        rows, columns, hits = verified_trials(values, accepted, verified)
        clipped = np.clip(values[rows, columns], _LOW, _HIGH)
        bins = np.minimum(((clipped - _LOW) / (_HIGH - _LOW) * _BINS).astype(np.int64), _BINS - 1)
        for sums in (self._trials, self._hits, self._logits):
            sums *= self.decay
        np.add.at(self._trials, (columns, bins), 1.0)
        np.add.at(self._hits, (columns, bins), hits)
        np.add.at(self._logits, (columns, bins), clipped)

    @property
    def temperatures(self) -> _Floats:
        """One temperature a position, shape [drafts]; 1 before anything was seen."""
        common = self._fit(self._trials.sum(0), self._hits.sum(0), self._logits.sum(0))
        found = np.empty(self.num_drafts)
        for position in range(self.num_drafts):
            trials = self._trials[position]
            weight = trials.sum() / (trials.sum() + self.prior) if trials.any() else 0.0
            own = self._fit(trials, self._hits[position], self._logits[position])
            found[position] = np.exp(weight * np.log(own) + (1.0 - weight) * np.log(common))
        return found

    def transform(self, logits: Any) -> _Floats:
        """Calibrated confidences.

        Args:
            logits: Confidence logits, shape [blocks, drafts].

        Returns:
            Probability that each draft is accepted if all before it are, shape [blocks, drafts].

        Raises:
            ShapeError: Blocks do not have `num_drafts` drafts.
        """
        return sigmoid(self._blocks(logits) / self.temperatures)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that `from_dict` takes: what was learnt, not only the temperatures."""
        return {
            "format": _FORMAT,
            "decay": self.decay,
            "prior": self.prior,
            "temperatures": self.temperatures.tolist(),
            "trials": self._trials.tolist(),
            "hits": self._hits.tolist(),
            "logits": self._logits.tolist(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> OnlineTemperatureScaling:
        """Goes on where another one stopped.

        Args:
            values: What `to_dict` gave.

        Returns:
            The scaling.

        Raises:
            ConfigError: The values are none of such a scaling.
        """
        checks.check_mapping("temperatures", values, ConfigError)
        if values.get("format") != _FORMAT:
            checks.fail("format", values.get("format"), repr(_FORMAT), ConfigError)
        try:
            sums = [np.array(values[name], float) for name in ("trials", "hits", "logits")]
            made = cls(len(sums[0]), decay=values["decay"], prior=values["prior"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the values of the scaling are not whole ({error!r}); give what `to_dict` gave.",
                field="values",
            ) from error
        shape = (made.num_drafts, _BINS)
        if any(array.shape != shape or not np.isfinite(array).all() for array in sums):
            checks.fail("trials", [array.shape for array in sums], f"finite, {shape}", ConfigError)
        trials, hits = sums[:2]
        if not ((hits >= 0) & (hits <= trials * (1.0 + 1e-9))).all():
            checks.fail("hits", "some", "from 0 to the trials of their bin", ConfigError)
        made._trials, made._hits, made._logits = sums
        return made

    def save(self, path: str | Path) -> None:
        """Writes what was learnt to a JSON file.

        Args:
            path: The file; it is replaced.
        """
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> OnlineTemperatureScaling:
        """Reads what another one learnt from a JSON file.

        Args:
            path: The file.

        Returns:
            The scaling.

        Raises:
            ConfigError: The file holds no such scaling.
        """
        return cls.from_dict(read_json(path, "online scaling"))

    def __repr__(self) -> str:
        shown = ", ".join(f"{value:.2f}" for value in self.temperatures)
        return f"OnlineTemperatureScaling([{shown}])"

    def _blocks(self, logits: Any) -> _Floats:
        shape = f"[blocks, drafts={self.num_drafts}]"
        values: _Floats = matrix("logits", logits, shape)
        if values.shape[1] != self.num_drafts:
            raise shape_error("logits", values.shape, shape)
        return values

    def _fit(self, trials: _Floats, hits: _Floats, logits: _Floats) -> float:
        """The temperature with the highest likelihood."""
        known = trials > 0
        if not known.any():
            return 1.0
        mean = logits[known] / trials[known]
        scaled = mean / self._grid[:, None]
        likelihood = -(
            hits[known] * np.logaddexp(0.0, -scaled)
            + (trials[known] - hits[known]) * np.logaddexp(0.0, scaled)
        ).sum(1)
        return float(self._grid[int(likelihood.argmax())])
