"""Engines by length of context, reassigned each round by what each length costs."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from deepinfer.balancers.base import Router, RouteRequest
from deepinfer.balancers.decision import Decision
from deepinfer.balancers.fleet import Fleet
from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError

__all__ = ["DEFAULT_BOUNDS", "TierRouter", "assign_tiers"]

DEFAULT_BOUNDS = (16_384, 65_536, 262_144)
"""Upper ends of all tiers but the last: below 16K, 64K and 256K tokens of context, and the rest."""


def assign_tiers(
    load: Sequence[float],
    num_engines: int,
    old: Sequence[int] | None = None,
    *,
    hysteresis: float = 0.25,
) -> npt.NDArray[np.int64]:
    """Shares engines out over tiers in proportion to the work of each, by largest remainders.

    Args:
        load: Work of each tier in the round before, in any unit, shape [tiers].
        num_engines: Engines to share out.
        old: Tier of each engine in the round before, shape [engines], or None.
        hysteresis: An engine changes its tier only when a tier's fair share differs from what it has by more than
            half an engine plus this. A move costs the engine's cache, so noise should not cause one.

    Returns:
        Tier of each engine, shape [engines]. A tier with work has at least one engine as long as there are enough;
        with fewer engines than busy tiers the busiest have one each. Engines keep their tier where they can. Ties
        go to the lower tier and the lower engine.

    Raises:
        ConfigError: A number is out of range.

    Examples:
        >>> assign_tiers([6.0, 3.0, 0.0, 1.0], 8).tolist()
        [0, 0, 0, 0, 0, 1, 1, 3]
        >>> assign_tiers([5.0, 4.0, 0.0, 1.0], 8, old=[0, 0, 0, 0, 0, 1, 1, 3]).tolist()  # 4.0 / 3.2 / 0.8
        [0, 0, 0, 0, 1, 1, 1, 3]
    """
    checks.check_int("num_engines", num_engines, 0, 2**20, ConfigError)
    checks.check_float("hysteresis", hysteresis, 0.0, 100.0, ConfigError)
    work = np.asarray(load, float)
    if work.ndim != 1 or not work.size or not np.isfinite(work).all() or (work < 0).any():
        checks.fail("load", load, "one finite number from 0 for each tier", ConfigError)
    if old is not None and (
        len(old) != num_engines or any(not 0 <= tier < work.size for tier in old)
    ):
        checks.fail("old", old, f"{num_engines} tiers from 0 to {work.size - 1}", ConfigError)
    if not work.any():  # nothing is known: stay, or spread evenly
        if old is not None:
            return np.array(old, np.int64)
        return np.arange(num_engines, dtype=np.int64) * work.size // max(num_engines, 1)
    tiny = np.finfo(float).tiny  # a busy tier stays above 0 however small its share
    fair = np.where(work > 0, np.maximum(work / work.sum() * num_engines, tiny), 0.0)
    counts = _largest_remainder(fair, num_engines)
    if old is None:
        return np.repeat(np.arange(work.size), counts)
    had = np.bincount(np.asarray(old, np.int64), minlength=work.size)
    if _is_close(had, fair, hysteresis, num_engines):
        return np.array(old, np.int64)
    return _move_least(np.asarray(old, np.int64), had, counts)


def _largest_remainder(fair: npt.NDArray[np.float64], total: int) -> npt.NDArray[np.int64]:
    busy = np.flatnonzero(fair > 0)
    counts = np.zeros(fair.size, np.int64)
    if total < busy.size:
        counts[busy[np.argsort(-fair[busy], kind="stable")[:total]]] = 1
        return counts
    counts[busy] = np.maximum(1, np.floor(fair[busy]).astype(np.int64))
    # Too many when small tiers were rounded up to one: take from those that have most above their share.
    while counts.sum() > total:
        excess = np.where(counts > 1, counts - fair, -np.inf)
        counts[int(excess.argmax())] -= 1
    while counts.sum() < total:
        counts[int((fair - counts).argmax())] += 1
    return counts


def _is_close(
    had: npt.NDArray[np.int64], fair: npt.NDArray[np.float64], hysteresis: float, total: int
) -> bool:
    starved = (fair > 0) & (had == 0)
    if starved.any() and total >= np.count_nonzero(fair > 0):
        return False
    return bool((np.abs(had - fair) <= 0.5 + hysteresis).all())


def _move_least(
    old: npt.NDArray[np.int64], had: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    new = old.copy()
    wanted = [
        tier for tier in range(counts.size) for _ in range(max(0, int(counts[tier] - had[tier])))
    ]
    for tier in range(counts.size):
        surplus = max(0, int(had[tier] - counts[tier]))
        # The last engines of a tier move, so that the first ones keep their caches for long.
        for engine in np.flatnonzero(old == tier)[::-1][:surplus]:
            new[engine] = wanted.pop(0)
    return new


class TierRouter:
    """Short prompts never wait behind long ones: each tier of context lengths has engines of its own.

    Inside a tier another router chooses. A tier without a ready engine uses its neighbours, the longer one first.

    Args:
        inner: Chooses among the engines of a tier.
        num_engines: Engines of the fleet, in the order of its columns.
        bounds: Upper ends of all tiers but the last, in tokens, rising.
        hysteresis: See `assign_tiers`.

    Attributes:
        tiers: Tier of each engine, shape [engines]; evenly spread before the first round.

    Raises:
        ConfigError: The bounds do not rise, or a number is out of range.
    """

    def __init__(
        self,
        inner: Router,
        num_engines: int,
        *,
        bounds: Sequence[int] = DEFAULT_BOUNDS,
        hysteresis: float = 0.25,
    ) -> None:
        self.inner = inner
        if not isinstance(bounds, Sequence):
            checks.fail("bounds", bounds, "rising numbers of tokens above 0", ConfigError)
        self.bounds = tuple(bounds)
        for low, high in zip((0, *self.bounds), self.bounds, strict=False):
            if not isinstance(high, int) or isinstance(high, bool) or high <= low:
                checks.fail("bounds", bounds, "rising numbers of tokens above 0", ConfigError)
        checks.check_int("num_engines", num_engines, 1, 2**20, ConfigError)
        self.hysteresis = checks.check_float("hysteresis", hysteresis, 0.0, 100.0, ConfigError)
        self.num_tiers = len(self.bounds) + 1
        self.tiers = np.arange(num_engines, dtype=np.int64) * self.num_tiers // num_engines

    def tier_of(self, context_tokens: int) -> int:
        """Tier of a request.

        Args:
            context_tokens: Its whole context.

        Returns:
            The tier; a bound itself belongs to the tier above it.
        """
        return int(np.searchsorted(self.bounds, context_tokens, side="right"))

    def reassign(self, load: Sequence[float]) -> npt.NDArray[np.int64]:
        """Begins a round.

        Args:
            load: Seconds of work of each tier in the round before, shape [tiers].

        Returns:
            Tier of each engine from now on, shape [engines].

        Raises:
            ConfigError: There is not one finite number from 0 for each tier.
        """
        if len(load) != self.num_tiers:
            checks.fail("load", load, f"{self.num_tiers} numbers", ConfigError)
        self.tiers = assign_tiers(load, self.tiers.size, self.tiers, hysteresis=self.hysteresis)  # type: ignore[arg-type]
        return self.tiers

    def decide(self, request: RouteRequest, fleet: Fleet) -> Decision:
        """Chooses among the engines of the request's tier.

        Args:
            request: The request.
            fleet: The engines, as many as the router was made for; later ones belong to every tier.

        Returns:
            The inner router's choice.
        """
        tier = self.tier_of(request.prompt_tokens)
        belongs = np.ones(len(fleet), bool)
        known = self.tiers[: len(fleet)]
        order = (*range(tier, self.num_tiers), *range(tier - 1, -1, -1))
        for candidate in order:
            belongs[: known.size] = known == candidate
            ready = fleet.ready & belongs
            if ready.any():
                part = copy.copy(fleet)
                part.ready = ready
                decision = self.inner.decide(request, part)
                if decision.is_placed and candidate != tier:
                    return Decision(decision.target, "other_tier", decision.predicted)
                return decision
        return Decision(None, "no_ready_worker")
