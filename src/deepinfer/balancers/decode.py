"""Which rank decodes a request: even in requests and even in tokens held, since a step waits for the slowest rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from deepinfer.balancers.base import RouteRequest
from deepinfer.balancers.decision import Decision
from deepinfer.balancers.decode_cost import DecodeCost
from deepinfer.balancers.decode_outputs import OutputLengths
from deepinfer.balancers.fleet import Fleet
from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError

__all__ = ["DecodeBalancer", "DecodeMode"]

DecodeMode = Literal["normalised", "published", "cost"]
"""Rules of `DecodeBalancer`."""

_Scores = npt.NDArray[np.float64]


class DecodeBalancer:
    """Routes requests to decode ranks by two numbers of each: its requests, and the tokens that they hold.

    Some parts of a step take time by request, attention takes it by token held, and ranks that run in lockstep wait for
    the slowest. Balancing one number leaves the other uneven: long requests meet on ranks with few.

    - `"normalised"`: how far each number would be above its mean over the ranks, with the request, the excess in requests
      counted twice: the rank where the larger of the two is smallest. The weight makes most requests go by requests, and
      leaves the ranks that hold the fewest tokens to the long ones.
    - `"published"`: a short request goes to the rank with the fewest requests, and among equals to the one that holds the
      most tokens; a long one goes to the rank that holds the fewest tokens.
    - `"cost"`: the rank whose step is predicted to be shortest with the request.

    A rank takes a request only when it has a free place and room for the tokens of the prompt and of the answer.

    Args:
        mode: The rule.
        requests_weight: Weight of the excess in requests against that in tokens, for `"normalised"`.
        long_tokens: Tokens from which a request is long, for `"published"`.
        cost: Cost of a step, for `"cost"` and for predictions; `"cost"` needs one.
        reserve_tokens: Tokens to keep free on every rank, for what running requests will generate.
        outputs: What predicts the answers of requests that name no length; None: only the prompt needs room.

    Raises:
        ConfigError: A number is out of range, or `"cost"` was asked for without a cost.

    Examples:
        >>> from deepinfer.balancers import WorkerSnapshot
        >>> fleet = Fleet([
        ...     WorkerSnapshot(name="a", num_running=9, cached_tokens=90_000),
        ...     WorkerSnapshot(name="b", num_running=10, cached_tokens=60_000),
        ... ])
        >>> DecodeBalancer().decide(RouteRequest(rid="r", prompt_tokens=30_000), fleet).target
        1
        >>> DecodeBalancer().decide(RouteRequest(rid="r", prompt_tokens=100), fleet).target
        1
    """

    def __init__(
        self,
        mode: DecodeMode = "normalised",
        *,
        requests_weight: float = 2.0,
        long_tokens: int = 8_192,
        cost: DecodeCost | None = None,
        reserve_tokens: int = 0,
        outputs: OutputLengths | None = None,
    ) -> None:
        self.mode = checks.check_choice("mode", mode, _RULES, ConfigError)
        self.requests_weight = checks.check_float(
            "requests_weight", requests_weight, 0.0, 1e6, ConfigError, open_low=True
        )
        self.long_tokens = checks.check_int("long_tokens", long_tokens, 0, 2**62, ConfigError)
        self.reserve_tokens = checks.check_int(
            "reserve_tokens", reserve_tokens, 0, 2**62, ConfigError
        )
        self.outputs = outputs
        self.cost = cost
        if mode == "cost" and cost is None:
            raise ConfigError(
                "mode is 'cost' without a cost; pass cost=DecodeCost(...) or DecodeCost.fit(...).",
                field="cost",
            )

    def decide(self, request: RouteRequest, fleet: Fleet) -> Decision:
        """Chooses a rank.

        Args:
            request: What is to be placed; `prompt_tokens` is what it holds when it arrives.
            fleet: The ranks.

        Returns:
            The choice; `predicted` is the step of that rank in seconds when a cost is known. No target when no rank has
            room: reason `"no_rank_ready"`, `"no_place"` or `"no_kv_room"`.
        """
        answer = request.output_tokens
        if answer is None:
            answer = self.outputs.remaining(0) if self.outputs is not None else 0.0
        tokens = request.prompt_tokens
        able = fleet.ready
        if not able.any():
            return Decision(None, "no_rank_ready")
        able = able & ((fleet.max_requests == 0) | (fleet.num_requests < fleet.max_requests))
        if not able.any():
            return Decision(None, "no_place")
        needed = tokens + answer + self.reserve_tokens
        able = able & (
            (fleet.capacity_tokens == 0) | (fleet.kv_tokens + needed <= fleet.capacity_tokens)
        )
        if not able.any():
            return Decision(None, "no_kv_room")
        scores, reason = _RULES[self.mode](self, tokens, fleet)
        target = int(np.where(able, scores, np.inf).argmin())
        predicted = None
        if self.cost is not None:
            requests, kv = int(fleet.num_requests[target]), int(fleet.kv_tokens[target])
            predicted = float(self.cost.seconds(requests + 1, kv + tokens))
        return Decision(target, reason, predicted)

    def decide_many(
        self, requests: Sequence[RouteRequest], fleet: Fleet, *, now_s: float
    ) -> list[Decision]:
        """Places requests that wait together, long ones first, each with regard to those before.

        Args:
            requests: What is to be placed.
            fleet: The ranks; placed requests are counted in it at once (`Fleet.sent`).
            now_s: The time on the clock of the fleet's reports, in seconds.

        Returns:
            A choice for each request, in the order given.
        """
        order = sorted(range(len(requests)), key=lambda index: -requests[index].prompt_tokens)
        decisions: list[Decision] = [Decision(None, "no_rank_ready")] * len(requests)
        for index in order:
            decision = self.decide(requests[index], fleet)
            if decision.target is not None:
                tokens = requests[index].prompt_tokens
                fleet.sent(decision.target, now_s=now_s, kv_tokens=tokens)
            decisions[index] = decision
        return decisions

    def _normalised(self, tokens: int, fleet: Fleet) -> tuple[_Scores, str]:
        # Means over the ranks that share the load; drained ranks would lower them.
        requests, kv = fleet.num_requests, fleet.kv_tokens
        share = fleet.ready.sum()
        mean_requests = (requests[fleet.ready].sum() + 1) / share
        mean_kv = (kv[fleet.ready].sum() + tokens) / share
        over_requests = self.requests_weight * ((requests + 1) / mean_requests - 1.0)
        over_kv = (kv + tokens) / mean_kv - 1.0
        return np.maximum(over_requests, over_kv), "least_worse_share"

    def _published(self, tokens: int, fleet: Fleet) -> tuple[_Scores, str]:
        kv = fleet.kv_tokens.astype(np.float64)
        if tokens >= self.long_tokens:
            return kv, "long_to_least_kv"
        return fleet.num_requests - kv / (kv.max() + 1.0), "short_to_fewest_requests"

    def _cost(self, tokens: int, fleet: Fleet) -> tuple[_Scores, str]:
        cost = self.cost or DecodeCost(0.0, 0.0, 0.0)
        scores = cost.seconds(fleet.num_requests + 1, fleet.kv_tokens + tokens)
        return scores, "shortest_step"


_RULES: dict[str, Callable[[DecodeBalancer, int, Fleet], tuple[_Scores, str]]] = {
    "normalised": DecodeBalancer._normalised,
    "published": DecodeBalancer._published,
    "cost": DecodeBalancer._cost,
}
