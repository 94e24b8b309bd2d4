"""Confidences as they were known some steps ago."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
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
    something is known. Records stay until `forget`: call it for requests that ended, or every push copies them.

    In each step `get` comes first and `push` second: so a lag of 1 gives those of the step before. With `push` first a lag
    of 1 would give the very confidences of the step, which must not choose its budget; take 2 at least then. And drafts
    are drawn with numbers of their own step (`DrawStream`), or old confidences still tell of the new drafts.

    Args:
        num_drafts: Drafts of a block.
        lag: How many pushes ago `get` looks, at least 1.

    Raises:
        ConfigError: A number is out of range.

    Examples:
        >>> lagged = LaggedConfidence(num_drafts=2, lag=1)
        >>> for confidence in ([0.5, 0.5], [0.9, 0.9]):
        ...     known = lagged.get([7])  # for the budget of this step
        ...     lagged.push([7], [confidence])  # for later ones
        >>> known.tolist()
        [[0.5, 0.25]]
        >>> lagged.get([8]).tolist()
        [[1.0, 1.0]]
    """

    def __init__(self, num_drafts: int, lag: int = 2) -> None:
        self.num_drafts = checks.check_int("num_drafts", num_drafts, 1, 256, ConfigError)
        self.lag = checks.check_int("lag", lag, 1, 64, ConfigError)
        self._steps: deque[dict[Any, tuple[int, npt.NDArray[np.float32]]]] = deque(maxlen=lag)

    def push(self, ids: Sequence[Any], confidence: Any, generations: Sequence[int] = ()) -> None:
        """Takes the confidences of a step.

        Args:
            ids: Requests, hashable, each once; an array of integers will do.
            confidence: Probability that each draft is accepted if all before it are, shape [requests, drafts]. Rows
                may be shorter than a block; the rest does not survive.
            generations: Generation of each id; empty when ids are never used again.

        Raises:
            ConfigError: An id comes twice or cannot be looked up.
            ShapeError: There is not one row a request.
        """
        ids = _keys(ids)
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
        if len(set(ids)) != len(ids):
            checks.fail("ids", ids, "requests that come once each", ConfigError)
        self._steps.append(known)

    def get(self, ids: Sequence[Any], generations: Sequence[int] = ()) -> npt.NDArray[np.float32]:
        """Survivals as they were known `lag` pushes ago.

        Args:
            ids: Requests.
            generations: Generation of each id.

        Returns:
            Survivals, shape [requests, drafts], float32.
        """
        ids = _keys(ids)
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
        ids = _keys(ids)
        for step in self._steps:
            for key in ids:
                step.pop(key, None)

    @staticmethod
    def _generations(ids: Sequence[Any], generations: Sequence[int]) -> Sequence[int]:
        if not len(generations):
            return [0] * len(ids)
        if len(generations) != len(ids):
            raise shape_error("generations", (len(generations),), f"[requests={len(ids)}]")
        found: Any = generations
        return found.tolist() if hasattr(found, "tolist") else generations


def _keys(ids: Any) -> Sequence[Any]:
    """Ids that are equal where they say the same: a tensor is equal to nothing but itself."""
    found = ids.tolist() if hasattr(ids, "tolist") else ids
    if any(hasattr(key, "detach") or not isinstance(key, Hashable) for key in found):
        checks.fail("ids", ids, "hashable: integers or strings, not tensors or lists", ConfigError)
    keys: Sequence[Any] = found
    return keys
