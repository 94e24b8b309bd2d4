"""Rules that others route by, to stand beside: each in a few lines, with its source.

None is meant for production here. `EarliestCompletion` is what they are compared with.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from deepinfer.balancers.base import RouteRequest
from deepinfer.balancers.decision import Decision
from deepinfer.balancers.fleet import Fleet
from deepinfer.balancers.prefill.prefix_index import PrefixIndex
from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError

__all__ = [
    "DynamoCost",
    "LeastRequests",
    "LeastWork",
    "LoadAware",
    "LongestPrefix",
    "PowerOfTwo",
    "RandomChoice",
    "RoundRobin",
    "SglangCacheAware",
]

_NOBODY = Decision(None, "no_ready_worker")
_Array = npt.NDArray[np.float64] | npt.NDArray[np.int64]


def _lowest(score: _Array, ready: npt.NDArray[np.bool_], reason: str) -> Decision:
    """The ready worker with the lowest score; ties go to the lowest index."""
    if not ready.any():
        return _NOBODY
    masked = np.where(ready, score, np.inf)
    target = int(masked.argmin())
    return Decision(target, reason, float(masked[target]))


class RoundRobin:
    """Each in turn."""

    def __init__(self) -> None:
        self._next = 0

    def decide(self, request: RouteRequest, fleet: Fleet) -> Decision:
        """The next ready worker.

        Args:
            request: The request.
            fleet: The workers.

        Returns:
            The choice.
        """
        for step in range(len(fleet)):
            target = (self._next + step) % len(fleet)
            if fleet.ready[target]:
                self._next = target + 1
                return Decision(target, "round_robin")
        return _NOBODY


class RandomChoice:
    """Anyone, with equal probability.

    Args:
        seed: Seed of the draws.
    """

    def __init__(self, seed: int = 0) -> None:
        self._generator = np.random.default_rng(seed)

    def decide(self, request: RouteRequest, fleet: Fleet) -> Decision:
        """A ready worker at random.

        Args:
            request: The request.
            fleet: The workers.

        Returns:
            The choice.
        """
        ready = np.flatnonzero(fleet.ready)
        if not ready.size:
            return _NOBODY
        return Decision(int(ready[self._generator.integers(ready.size)]), "random")


class LeastRequests:
    """The worker with the fewest requests, as load balancers of web servers do."""

    def decide(self, request: RouteRequest, fleet: Fleet) -> Decision:
        """The least loaded worker by count.

        Args:
            request: The request.
            fleet: The workers.

        Returns:
            The choice; `predicted` is its requests.
        """
        return _lowest(fleet.num_requests, fleet.ready, "least_requests")


class LeastWork:
    """The worker with the fewest seconds of waiting work."""

    def decide(self, request: RouteRequest, fleet: Fleet) -> Decision:
        """The least loaded worker by predicted seconds.

        Args:
            request: The request.
            fleet: The workers.

        Returns:
            The choice; `predicted` is the seconds that wait there.
        """
        return _lowest(fleet.waiting_s, fleet.ready, "least_work")


class PowerOfTwo:
    """The better of two random workers, by waiting work (Mitzenmacher 2001).

    Args:
        seed: Seed of the draws.
    """

    def __init__(self, seed: int = 0) -> None:
        self._generator = np.random.default_rng(seed)

    def decide(self, request: RouteRequest, fleet: Fleet) -> Decision:
        """The better of two.

        Args:
            request: The request.
            fleet: The workers.

        Returns:
            The choice; `predicted` is the seconds that wait there.
        """
        ready = np.flatnonzero(fleet.ready)
        if not ready.size:
            return _NOBODY
        count = min(2, ready.size)
        pair = np.sort(ready[self._generator.choice(ready.size, count, replace=False)])
        target = int(pair[fleet.waiting_s[pair].argmin()])
        return Decision(target, "power_of_two", float(fleet.waiting_s[target]))


class _WithIndex:
    def __init__(self, index: PrefixIndex, *, block_tokens: int = 512) -> None:
        self.index = index
        self.block_tokens = checks.check_int("block_tokens", block_tokens, 1, 2**31, ConfigError)

    def _matched_share(self, request: RouteRequest, fleet: Fleet) -> npt.NDArray[np.float64]:
        matched = self.index.match_rows(request.block_keys, fleet) * self.block_tokens
        return np.minimum(matched / request.prompt_tokens, 1.0)


class LongestPrefix(_WithIndex):
    """Whoever holds most of the prompt; collapses as soon as everyone shares a first block.

    Args:
        index: Which worker holds which prefix.
        block_tokens: Tokens of a block.
    """

    def decide(self, request: RouteRequest, fleet: Fleet) -> Decision:
        """The longest match.

        Args:
            request: The request.
            fleet: The workers.

        Returns:
            The choice.
        """
        matched = self.index.match_rows(request.block_keys, fleet)
        decision = _lowest(-matched, fleet.ready, "longest_prefix")
        return Decision(decision.target, decision.reason)


class SglangCacheAware(_WithIndex):
    """SGLang's router: the longest match, unless the loads differ too much (sgl-router, `cache_aware`).

    Args:
        index: Which worker holds which prefix.
        block_tokens: Tokens of a block.
        balance_abs: Difference of the highest and lowest request count above which load decides.
        balance_rel: Their ratio above which load decides; both must hold.
        match_threshold: Share of the prompt from which a match is followed.
    """

    def __init__(
        self,
        index: PrefixIndex,
        *,
        block_tokens: int = 512,
        balance_abs: int = 32,
        balance_rel: float = 1.1,
        match_threshold: float = 0.5,
    ) -> None:
        super().__init__(index, block_tokens=block_tokens)
        self.balance_abs = checks.check_int("balance_abs", balance_abs, 0, 2**31, ConfigError)
        self.balance_rel = checks.check_float("balance_rel", balance_rel, 0.0, 1e9, ConfigError)
        self.match_threshold = checks.check_float(
            "match_threshold", match_threshold, 0.0, 1.0, ConfigError
        )
        self._sent: dict[str, int] = {}  # tokens sent to each worker: the size of its tree

    def decide(self, request: RouteRequest, fleet: Fleet) -> Decision:
        """Load when it is uneven, else the match, else the smallest tree.

        Args:
            request: The request.
            fleet: The workers.

        Returns:
            The choice.
        """
        ready = np.flatnonzero(fleet.ready)
        if not ready.size:
            return _NOBODY
        load = fleet.num_requests[ready]
        high, low = int(load.max()), int(load.min())
        share = self._matched_share(request, fleet)
        if high - low > self.balance_abs and high > self.balance_rel * low:
            decision = _lowest(fleet.num_requests, fleet.ready, "least_requests")
        elif share[ready].max() > self.match_threshold:
            decision = _lowest(-share, fleet.ready, "longest_prefix")
        else:
            sizes = np.array([self._sent.get(name, 0) for name in fleet.names])
            decision = _lowest(sizes, fleet.ready, "smallest_tree")
        if decision.target is not None:
            name = fleet.names[decision.target]
            new = round((1.0 - share[decision.target]) * request.prompt_tokens)
            self._sent[name] = self._sent.get(name, 0) + new
        return Decision(decision.target, decision.reason)


class DynamoCost(_WithIndex):
    """NVIDIA Dynamo's router: blocks to run plus blocks that decode, the lowest sum wins (`kv_router`).

    Args:
        index: Which worker holds which prefix.
        block_tokens: Tokens of a block.
        overlap_weight: Weight of the blocks to run.
    """

    def __init__(
        self, index: PrefixIndex, *, block_tokens: int = 512, overlap_weight: float = 1.0
    ) -> None:
        super().__init__(index, block_tokens=block_tokens)
        self.overlap_weight = checks.check_float(
            "overlap_weight", overlap_weight, 0.0, 1e9, ConfigError
        )

    def decide(self, request: RouteRequest, fleet: Fleet) -> Decision:
        """The lowest sum.

        Args:
            request: The request.
            fleet: The workers.

        Returns:
            The choice; `predicted` is the sum in blocks.
        """
        matched = self.index.match_rows(request.block_keys, fleet) * self.block_tokens
        own = np.maximum(request.prompt_tokens - matched, 0)
        to_run = (fleet.waiting_tokens + own) / self.block_tokens
        active = (fleet.kv_tokens + request.prompt_tokens) / self.block_tokens
        return _lowest(self.overlap_weight * to_run + active, fleet.ready, "dynamo_cost")


class LoadAware(_WithIndex):
    """The load-aware rule of vLLM's production stack: matched share less a penalty for load above the mean.

    Args:
        index: Which worker holds which prefix.
        block_tokens: Tokens of a block.
        beta: Weight of the penalty.
    """

    def __init__(self, index: PrefixIndex, *, block_tokens: int = 512, beta: float = 1.0) -> None:
        super().__init__(index, block_tokens=block_tokens)
        self.beta = checks.check_float("beta", beta, 0.0, 1e9, ConfigError)

    def decide(self, request: RouteRequest, fleet: Fleet) -> Decision:
        """The highest score.

        Args:
            request: The request.
            fleet: The workers.

        Returns:
            The choice; `predicted` is its score, negated.
        """
        if not fleet.ready.any():
            return _NOBODY
        load = fleet.num_requests
        mean = float(load[fleet.ready].mean())
        score = self._matched_share(request, fleet) - self.beta * (load - mean) / max(1.0, mean)
        return _lowest(-score, fleet.ready, "load_aware")
