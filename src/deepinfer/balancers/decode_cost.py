"""How long a decode step takes on one rank, as a line in requests and in tokens held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError, ShapeError

__all__ = ["DecodeCost"]

_ROUNDS = 12
_MIN_SAMPLES = 8


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Seconds of a step: `base_s + request_s * requests + kv_token_s * tokens held`.

    Attributes:
        base_s: Seconds of a step whatever it holds.
        request_s: Seconds that a request adds.
        kv_token_s: Seconds that a token in the cache adds.

    Raises:
        ConfigError: A coefficient is negative or no number.

    Examples:
        >>> DecodeCost(8e-3, 1e-4, 6e-9).seconds(60, 1_000_000)
        0.02
    """

    base_s: float
    request_s: float
    kv_token_s: float

    def __post_init__(self) -> None:
        """Checks the coefficients."""
        for name in ("base_s", "request_s", "kv_token_s"):
            checks.check_float(name, getattr(self, name), 0.0, 1e9, ConfigError)

    def seconds(self, requests: Any, kv_tokens: Any) -> Any:
        """Seconds of a step.

        Args:
            requests: Requests that decode, a number or an array.
            kv_tokens: Tokens that they hold, of the same shape.

        Returns:
            Seconds, of that shape.
        """
        return self.base_s + self.request_s * requests + self.kv_token_s * kv_tokens

    @classmethod
    def fit(cls, requests: Any, kv_tokens: Any, seconds: Any) -> DecodeCost:
        """Fits the coefficients to timed steps.

        The fit minimises absolute relative errors, so single slow steps do not bend it, and coefficients that come out
        negative are set to 0.

        Args:
            requests: Requests of each step, shape [samples].
            kv_tokens: Tokens that they held, shape [samples].
            seconds: How long each step took, shape [samples], above 0.

        Returns:
            The cost.

        Raises:
            ShapeError: The arrays differ in length.
            ConfigError: There are fewer than eight samples, or their durations are not above 0.
        """
        columns = [np.asarray(column, np.float64) for column in (requests, kv_tokens, seconds)]
        if len({column.shape for column in columns}) != 1 or columns[0].ndim != 1:
            shapes = ", ".join(str(column.shape) for column in columns)
            raise ShapeError(f"the samples have shapes {shapes}; give three equal ones [samples].")
        if len(columns[0]) < _MIN_SAMPLES or not (columns[2] > 0).all():
            raise ConfigError(
                f"{len(columns[0])} samples, the shortest {columns[2].min(initial=0.0):g} s, make no fit; time at "
                f"least {_MIN_SAMPLES} steps of different sizes.",
                field="seconds",
                limit=f"at least {_MIN_SAMPLES} samples above 0",
            )
        matrix = np.stack((np.ones_like(columns[0]), columns[0], columns[1]), axis=1)
        used = [0, 1, 2]
        while True:
            found = _robust(matrix[:, used] / columns[2][:, None])
            if (found >= 0).all() or len(used) == 1:
                break
            used.pop(int(found.argmin()))
        coefficients = np.zeros(3)
        coefficients[used] = np.maximum(found, 0.0)
        return cls(*coefficients.tolist())


def _robust(matrix: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Coefficients whose sums come closest to 1 for every row, by reweighted least squares."""
    scale = np.abs(matrix).max(0)
    scale[scale == 0] = 1.0
    matrix = matrix / scale
    weight = np.ones(len(matrix))
    found: npt.NDArray[np.float64] = np.zeros(matrix.shape[1])
    for _ in range(_ROUNDS):
        root = np.sqrt(weight)
        found = np.asarray(np.linalg.lstsq(matrix * root[:, None], root, rcond=None)[0])
        weight = 1.0 / np.maximum(np.abs(matrix @ found - 1.0), 1e-4)
    result: npt.NDArray[np.float64] = found / scale
    return result
