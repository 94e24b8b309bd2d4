"""Confidences as they were known some steps ago."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError
from deepinfer.speculative._arrays import shape_error
from deepinfer.speculative.survival import prefix_survival

__all__ = ["LaggedConfidence"]


class LaggedConfidence:
    """Keeps the survivals of the last steps, so that a budget never sees the drafts that it decides about.

    A request is known by its id together with a generation, so that a slot that was given to another request does not
    inherit its confidences. A request without a record counts as certain to survive: it is verified whole until
    something is known.

    Args:
        num_drafts: Drafts of a block.
        lag: How many pushes ago `get` looks, at least 1.

    Raises:
        ConfigError: A number is out of range.

    Examples:
        >>> lagged = LaggedConfidence(num_drafts=2, lag=1)
        >>> lagged.push([7], [[0.5, 0.5]])
        >>> lagged.get([7, 8]).tolist()
        [[0.5, 0.25], [1.0, 1.0]]
    """

    def __init__(self, num_drafts: int, lag: int = 2) -> None:
        self.num_drafts = checks.check_int("num_drafts", num_drafts, 1, 256, ConfigError)
        self.lag = checks.check_int("lag", lag, 1, 64, ConfigError)
        self._steps: deque[dict[Any, tuple[int, npt.NDArray[np.float32]]]] = deque(maxlen=lag)

    def push(self, ids: Sequence[Any], confidence: Any, generations: Sequence[int] = ()) -> None:
        """Takes the confidences of a step.

        Args:
            ids: Requests, hashable.
            confidence: Probability that each draft is accepted if all before it are, shape [requests, drafts]. Rows
                may be shorter than a block; the rest does not survive.
            generations: Generation of each id; empty when ids are never used again.

        Raises:
            ShapeError: There is not one row a request.
        """
        survival = prefix_survival(confidence) if len(ids) else np.zeros((0, 0), np.float32)
        if survival.shape[0] != len(ids) or survival.shape[1] > self.num_drafts:
            raise shape_error(
                "confidence", survival.shape, f"[{len(ids)}, drafts <= {self.num_drafts}]"
            )
        known = dict(self._steps[-1]) if self._steps else {}  # who skips a step keeps its record
        for key, generation, row in zip(
            ids, self._generations(ids, generations), survival, strict=True
        ):
            known[key] = (generation, row)
        self._steps.append(known)

    def get(self, ids: Sequence[Any], generations: Sequence[int] = ()) -> npt.NDArray[np.float32]:
        """Survivals as they were known `lag` pushes ago.

        Args:
            ids: Requests.
            generations: Generation of each id.

        Returns:
            Survivals, shape [requests, drafts], float32.
        """
        out = np.ones((len(ids), self.num_drafts), np.float32)
        if len(self._steps) < self.lag:
            return out
        known = self._steps[0]
        for at, (key, generation) in enumerate(
            zip(ids, self._generations(ids, generations), strict=True)
        ):
            found = known.get(key)
            if found is not None and found[0] == generation:
                row = found[1]
                out[at, : row.size] = row
                out[at, row.size :] = 0.0
        return out

    def forget(self, ids: Sequence[Any]) -> None:
        """Drops requests that ended.

        Args:
            ids: Requests; unknown ones change nothing.
        """
        for step in self._steps:
            for key in ids:
                step.pop(key, None)

    @staticmethod
    def _generations(ids: Sequence[Any], generations: Sequence[int]) -> Sequence[int]:
        if generations and len(generations) != len(ids):
            raise shape_error("generations", (len(generations),), f"[requests={len(ids)}]")
        return generations or [0] * len(ids)
