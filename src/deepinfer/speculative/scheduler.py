"""How many drafts of each request are worth verifying."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer.core import _checks as checks
from deepinfer.core.errors import AnticipationError, ConfigError
from deepinfer.speculative._arrays import matrix, shape_error
from deepinfer.speculative.cost import StepCostModel
from deepinfer.speculative.survival import best_lengths, best_slots, falling_survival, in_range

__all__ = ["BudgetDecision", "VerificationScheduler", "VerifyPlan"]

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]
_NEVER = np.float32(0)


@dataclass(frozen=True, slots=True)
class BudgetDecision:
    """How many draft slots a step verifies.

    Attributes:
        k: Slots, anchors not counted.
        theta: Expected tokens a second with them.
        seconds: Expected seconds of the step.
        baseline_theta: Expected tokens a second when everything is verified.
        off_theta: Expected tokens a second when nothing is.
    """

    k: int
    theta: float
    seconds: float
    baseline_theta: float
    off_theta: float


@dataclass(frozen=True, slots=True)
class VerifyPlan:
    """What one step verifies.

    Attributes:
        lengths: Drafts of each request, shape [requests], int64; anchors not counted.
        k: Their sum.
        rows: Rows that are scored: one anchor a request, and the drafts.
        theta: Expected tokens a second, as it was when the number of slots was chosen.
        seconds: Expected seconds of the step.
    """

    lengths: _Ints
    k: int
    rows: int
    theta: float
    seconds: float

    @property
    def cu_rows(self) -> _Ints:
        """First row of each request, and the number of all, shape [requests + 1], int64; made anew each time."""
        out = np.empty(self.lengths.size + 1, np.int64)
        out[0] = 0
        np.add.accumulate(self.lengths + 1, out=out[1:])
        return out


class VerificationScheduler:
    """Spends verification rows where drafts are likely to survive, as long as they pay for their time.

    With K slots the best choice is the K that survive best, which are prefixes by themselves. So the one question is
    K: `argmax (R + survivals of the first K) / seconds(R + K)`.

    Why two inputs: a confidence of position 2 was computed from the token that was drawn at position 1. If K is
    chosen by looking at it, the token at position 1 has a say in whether it is verified, and the output law changes
    (at temperature 1 one example gives 0.85 / 0.15 instead of 0.70 / 0.30). `search="global"` therefore wants K from
    confidences of an earlier step (`lagged`); the live ones only say where the K slots go. `search="early_stop"` looks
    at slots one by one and stops at the first that does not pay, before it sees the next: legal with live ones, but
    it gets stuck on a cost that rises in stairs. Requests whose tokens cannot depend on the schedule, greedy or
    Gumbel-coupled ones, are free of all this: name them in `invariant`.

    Args:
        cost: Seconds of a step.
        search: "global" (best K of all), "early_stop" (Algorithm 1 of the DSpark paper), "uniform" (the best length
            that all requests share, from `lagged`), "static" (each up to its first confidence below `threshold`) or
            "all".
        min_drafts: Drafts of each request that are always verified, whatever the capacity.
        max_drafts: Most drafts of a request; None takes all.
        min_gain: Trim only when that is expected to give this share more tokens a second than verifying everything;
            below it everything is verified, which costs no planning on the device. "early_stop" cannot heed it.
        min_survival: Slots that survive with this probability or less are no candidates.
        threshold: Confidence of "static".

    Raises:
        ConfigError: An option is out of range.

    Examples:
        >>> from deepinfer.speculative import prefix_survival
        >>> cost = StepCostModel.additive(9.9e-3, 12e-6)
        >>> scheduler = VerificationScheduler(cost)
        >>> before = prefix_survival([[0.9, 0.7], [0.4, 0.1]])  # of the step before
        >>> live = prefix_survival([[0.9, 0.8], [0.5, 0.01]])
        >>> scheduler.plan(live, lagged=before).lengths.tolist()
        [2, 2]
        >>> scheduler = VerificationScheduler(StepCostModel.additive(1e-3, 1e-3))  # rows are dear
        >>> scheduler.plan(live, lagged=before).lengths.tolist()
        [1, 0]
        >>> scheduler.plan(live, invariant=True).lengths.tolist()  # greedy or coupled
        [1, 0]
    """

    def __init__(
        self,
        cost: StepCostModel,
        *,
        search: str = "global",
        min_drafts: int = 0,
        max_drafts: int | None = None,
        min_gain: float = 0.0,
        min_survival: float = 1e-6,
        threshold: float = 0.5,
    ) -> None:
        if not isinstance(cost, StepCostModel):
            checks.fail("cost", cost, "a StepCostModel", ConfigError)
        self.cost = cost
        self.search = checks.check_choice(
            "search", search, ("global", "early_stop", "uniform", "static", "all"), ConfigError
        )
        self.min_drafts = checks.check_int("min_drafts", min_drafts, 0, 256, ConfigError)
        self.max_drafts = checks.optional(
            max_drafts,
            lambda v: checks.check_int("max_drafts", v, self.min_drafts, 256, ConfigError),
        )
        self.min_gain = checks.check_float("min_gain", min_gain, 0.0, 10.0, ConfigError)
        self.min_survival = checks.check_float("min_survival", min_survival, 0.0, 1.0, ConfigError)
        self.threshold = checks.check_float("threshold", threshold, 0.0, 1.0, ConfigError)
        if cost.is_flat and search in ("global", "early_stop", "uniform"):
            warnings.warn(
                "the step cost model is flat: rows look free, so every draft will be verified. Time steps of "
                "several sizes (StepCostModel.from_samples).",
                stacklevel=2,
            )

    def budget(
        self, survival: Any, *, capacity: int | None = None, sampling_requests: int | None = None
    ) -> BudgetDecision:
        """Chooses K, by the early stop if that is the search, else the best of all: "uniform", "static" and "all" have none.

        Args:
            survival: Survival of each slot, shape [requests, drafts]. Lagged ones, but for an early stop and requests that
                are invariant: see `plan`, which refuses what this cannot see.
            capacity: Most rows of the step, anchors included; None has no limit.
            sampling_requests: Requests that make a token in this step; None counts all. Others' rows cost time and
                give nothing.

        Returns:
            The decision.

        Raises:
            ConfigError: `capacity` or `sampling_requests` is out of range.
            ShapeError: There are not two axes.
        """
        cut = self._cut(survival)
        requests = cut.shape[0]
        _check_limits(capacity, sampling_requests, requests)
        falling = falling_survival(cut, self.min_survival)
        if falling.size and not falling[0] <= 1.0:
            falling = falling_survival(in_range(cut), self.min_survival)
        k, theta, seconds = self._budget(falling, requests, capacity, sampling_requests)
        found = (float(theta[k]), float(seconds[k]), float(theta[-1]), float(theta[0]))
        return BudgetDecision(k, *found)

    def allocate(self, survival: Any, k: int, *, capacity: int | None = None) -> _Ints:
        """Gives K slots to those that survive best.

        Args:
            survival: Survival of each slot, shape [requests, drafts].
            k: Slots.
            capacity: Most rows of the step, anchors included.

        Returns:
            Drafts of each request, shape [requests], int64.

        Raises:
            ConfigError: `capacity` is out of range.
            ShapeError: There are not two axes.
        """
        cut = self._cut(survival)
        _check_limits(capacity, None, cut.shape[0])
        if capacity is not None:
            k = min(k, max(0, capacity - cut.shape[0]))
        return self._with_floor(best_lengths(cut, k), cut, capacity)

    def plan(
        self,
        live: Any,
        *,
        lagged: Any = None,
        invariant: Any = None,
        capacity: int | None = None,
        sampling_requests: int | None = None,
    ) -> VerifyPlan:
        """Plans one step.

        Args:
            live: Survival of the drafts at hand, shape [requests, drafts], from 0 to 1 and never rising along a row, as
                `prefix_survival` gives it. Where a NaN or a number outside would choose K, it counts as 0 or 1.
            lagged: Survival as it was known at least one step ago, before the drafts at hand were made, shape
                [requests, drafts] or any number of requests; needed where the search would anticipate.
            invariant: Whether each request's tokens cannot depend on the schedule, shape [requests]; True says that none
                can, None that all can. If some can, `lagged` must be shaped like `live`.
            capacity: Most rows of the step, anchors included. Anchors and `min_drafts` are kept even if they are more.
            sampling_requests: Requests that make a token in this step; None counts all.

        Returns:
            The plan.

        Raises:
            AnticipationError: The search would look at drafts that are still to be judged; also where `lagged` is `live`.
            ConfigError: `capacity` or `sampling_requests` is out of range.
            ShapeError: Shapes do not fit.
        """
        cut = self._cut(live)
        requests, drafts = cut.shape
        if capacity is not None or sampling_requests is not None:
            _check_limits(capacity, sampling_requests, requests)
        known = self._known(cut, None if lagged is live else lagged, invariant)
        theta = None
        if self.search == "all":
            lengths, k = np.full(requests, drafts, np.int64), requests * drafts
        elif self.search == "static":
            lengths = self._static(cut)
            k = int(lengths.sum())
        elif self.search == "uniform":
            length = min(drafts, self._uniform(known, requests, capacity, sampling_requests))
            lengths, k = np.full(requests, length, np.int64), requests * length
        else:
            falling = falling_survival(known, self.min_survival)
            if falling.size and not falling[0] <= 1.0:  # a number that is no survival
                cut, known = in_range(cut), in_range(known)
                falling = falling_survival(known, self.min_survival)
            most, rates, seconds = self._budget(falling, requests, capacity, sampling_requests)
            theta = float(rates[most])
            last = falling[most - 1] if most and known is cut else None
            lengths, k = best_slots(cut, most, self.min_survival, last)
            if k == most and not self.min_drafts:
                return VerifyPlan(lengths, k, requests + k, theta, float(seconds[k]))
        if capacity is not None and k > max(0, capacity - requests):
            # Slots that were not chosen do not compete: one behind a draft must not decide about it.
            chosen = np.where(np.arange(drafts) < lengths[:, None], cut, _NEVER)
            lengths, k = best_slots(chosen, max(0, capacity - requests))
        lengths = self._with_floor(lengths, cut, capacity)
        return self._priced(cut, lengths, sampling_requests, theta)

    def _cut(self, survival: Any) -> npt.NDArray[np.float32]:
        values = matrix("survival", survival, "[requests, drafts]", np.float32)
        return values if self.max_drafts is None else values[:, : self.max_drafts]

    def _known(
        self, live: npt.NDArray[np.float32], lagged: Any, invariant: Any
    ) -> npt.NDArray[np.float32]:
        """What K may be chosen by."""
        if self.search not in ("global", "uniform"):
            return live
        free = None
        if invariant is not None:
            if invariant is True:
                return live
            free = np.asarray(invariant, bool)
            if free.shape != (len(live),):
                raise shape_error("invariant", free.shape, f"[requests={len(live)}]")
            if free.all():
                return live
        if lagged is None:
            raise AnticipationError(
                f'search="{self.search}" without lagged confidences, or with the live ones as lagged, would let drafts '
                "decide whether they are verified, which changes the output law. Pass lagged= (LaggedConfidence), use "
                'search="early_stop", or mark the requests that are greedy or coupled in invariant=, which may be True.'
            )
        known = self._cut(lagged)
        if free is not None and free.any():
            if known.shape != live.shape:
                raise shape_error("lagged", known.shape, f"{live.shape} as the live ones are")
            known = np.where(free[:, None], live, known)
        return known

    def _budget(
        self,
        falling: npt.NDArray[np.float32],
        requests: int,
        capacity: int | None,
        sampling: int | None,
    ) -> tuple[int, _Floats, _Floats]:
        """How many slots; expected tokens a second and seconds of each number of them."""
        if capacity is not None:
            falling = falling[: max(0, capacity - requests)]
        most = falling.size
        tokens = np.empty(most + 1)
        tokens[0] = requests if sampling is None else sampling
        tokens[1:] = falling
        np.add.accumulate(tokens, out=tokens)
        seconds = self.cost.table(requests + most + 1)[requests : requests + most + 1]
        drafting = self.cost.draft_seconds(requests)
        if drafting:
            seconds = seconds + drafting
        theta = tokens / seconds if requests else np.zeros(most + 1)
        if self.search == "early_stop":
            falls = theta[1:] <= theta[:-1]
            k = int(falls.argmax()) if falls.any() else most
        else:
            k = int(theta.argmax())
            if self.min_gain and theta[k] < theta[most] * (1.0 + self.min_gain):
                k = most  # not after an early stop: that would look at what it stopped before
        return k, theta, seconds

    def _static(self, survival: npt.NDArray[np.float32]) -> _Ints:
        before = np.concatenate([np.ones((survival.shape[0], 1), np.float32), survival[:, :-1]], 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            confidence = np.where(before > 0, survival / before, 0.0)
        lengths: _Ints = np.cumprod(confidence >= self.threshold, 1).sum(1).astype(np.int64)
        return lengths

    def _uniform(
        self,
        survival: npt.NDArray[np.float32],
        requests: int,
        capacity: int | None,
        sampling: int | None,
    ) -> int:
        survival, drafts = in_range(survival), survival.shape[1]
        base = float(requests if sampling is None else sampling)
        scale = requests / max(1, survival.shape[0])
        tokens = base + scale * np.concatenate([[0.0], survival.sum(0, dtype=np.float64).cumsum()])
        rows = requests * np.arange(1, drafts + 2)
        theta = tokens / self.cost.seconds(requests, rows)
        if capacity is not None:
            theta = theta[: max(1, min(drafts, capacity // max(requests, 1) - 1) + 1)]
        best = int(theta.argmax())
        return theta.size - 1 if theta[best] < theta[-1] * (1.0 + self.min_gain) else best

    def _with_floor(
        self, lengths: _Ints, survival: npt.NDArray[np.float32], capacity: int | None
    ) -> _Ints:
        floor = min(self.min_drafts, survival.shape[1])
        if not floor or not lengths.size or int(lengths.min()) >= floor:
            return lengths
        raised: _Ints = np.maximum(lengths, floor)
        if capacity is not None and int(raised.sum()) > capacity - lengths.size:
            # What the floor took is taken from the least likely slots of the others, never from the floor itself.
            taken = np.arange(floor, survival.shape[1]) < raised[:, None]
            above = np.where(taken, survival[:, floor:], _NEVER)
            room = capacity - lengths.size * (1 + floor)
            raised = floor + best_slots(above, max(0, room))[0]
        return raised

    def _priced(
        self,
        survival: npt.NDArray[np.float32],
        lengths: _Ints,
        sampling: int | None,
        theta: float | None,
    ) -> VerifyPlan:
        requests, k = lengths.size, int(lengths.sum())
        rows = requests + k
        seconds = float(self.cost.table(rows + 1)[rows]) + self.cost.draft_seconds(requests)
        if theta is None:
            taken = np.arange(survival.shape[1]) < lengths[:, None]
            tokens = float(in_range(survival[taken]).sum(dtype=np.float64))
            tokens += requests if sampling is None else sampling
            theta = tokens / seconds if requests else 0.0
        return VerifyPlan(lengths, k, rows, theta, seconds)


def _check_limits(capacity: object, sampling_requests: object, requests: int) -> None:
    if capacity is not None:
        checks.check_int("capacity", capacity, 0, 2**63, ConfigError)
    if sampling_requests is not None:
        checks.check_int("sampling_requests", sampling_requests, 0, requests, ConfigError)
