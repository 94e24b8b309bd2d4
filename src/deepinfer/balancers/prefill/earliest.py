"""Prompts go where they are expected to be done first, with regard for those who come behind."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

from deepinfer.balancers.base import RouteRequest
from deepinfer.balancers.decision import Decision
from deepinfer.balancers.fleet import Fleet
from deepinfer.balancers.prefill.cost import PrefillCost
from deepinfer.balancers.prefill.prefix_index import PrefixIndex
from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError

__all__ = ["EarliestCompletion", "cached_tokens"]

_NOBODY = Decision(None, "no_ready_worker")


class EarliestCompletion:
    """Waiting work plus the prompt's own cost on that worker, weighted; the lowest sum wins.

    ```text
    score(w) = waiting seconds of w + own_weight * seconds of the part of the prompt that w does not hold
    ```

    One rule covers both wishes: a worker that holds the prefix has less to run, and a busy one lets the prompt wait.
    With a weight of 1 it is the prompt's own time to the first token. That is selfish: a second of work delays this
    prompt once, and every prompt that comes behind it once more, while a second of waiting is only its own. A weight
    above 1 counts the others in; it follows prefixes further, leaves the fleet less to do, and in the end every one
    waits less. A prefix that everyone shares never gathers everyone on one worker, since its queue grows.

    `fleet.waiting_s` must be told of dispatches: pass `own_seconds` of the target to `Fleet.sent`.

    Args:
        cost: What prompts cost.
        index: Which worker holds which prefix, or None without prefix caches.
        block_tokens: Tokens of a block of the request's keys.
        own_weight: Weight of the prompt's own work, at least 1.
        is_shared: Whether all workers read one store: the longest prefix that anyone holds counts for everyone.

    Raises:
        ConfigError: A number is out of range.

    Examples:
        >>> from deepinfer.balancers import Fleet, WorkerSnapshot
        >>> fleet = Fleet([WorkerSnapshot(name="a", waiting_s=0.5), WorkerSnapshot(name="b", waiting_s=0.25)])
        >>> router = EarliestCompletion(PrefillCost(token_s=1e-4))
        >>> router.decide(RouteRequest(rid="r", prompt_tokens=2_500), fleet)
        Decision(target=1, reason='earliest_completion', predicted=0.5)
    """

    def __init__(
        self,
        cost: PrefillCost,
        index: PrefixIndex | None = None,
        *,
        block_tokens: int = 512,
        own_weight: float = 3.0,
        is_shared: bool = False,
    ) -> None:
        self.cost = cost
        self.index = index
        self.block_tokens = checks.check_int("block_tokens", block_tokens, 1, 2**31, ConfigError)
        self.own_weight = checks.check_float("own_weight", own_weight, 1.0, 1e6, ConfigError)
        self.is_shared = is_shared

    def decide(self, request: RouteRequest, fleet: Fleet) -> Decision:
        """Chooses the worker with the lowest score.

        Args:
            request: The prompt, with its block keys.
            fleet: The workers.

        Returns:
            The choice; `predicted` is the seconds until the prompt is done there. Ties go to the worker with fewer
            requests; among those that still tie, the request's id decides, so that an idle fleet is used evenly.
        """
        own = self.own_seconds(request, fleet)
        score = fleet.waiting_s + self.own_weight * own
        if not fleet.ready.all():
            score = np.where(fleet.ready, score, np.inf)
        if not score.size or (best := score.min()) == np.inf:
            return _NOBODY
        tied = np.flatnonzero(score == best)
        if tied.size > 1:
            requests = fleet.num_requests[tied]
            tied = tied[requests == requests.min()]
        target = int(
            tied[
                zlib.crc32(request.rid.encode(errors="surrogatepass")) % tied.size
                if tied.size > 1
                else 0
            ]
        )
        predicted = float(fleet.waiting_s[target] + own[target])
        return Decision(target, "earliest_completion", predicted)

    def own_seconds(self, request: RouteRequest, fleet: Fleet) -> npt.NDArray[np.float64]:
        """What the prompt costs each worker, its cached prefix left out.

        Args:
            request: The prompt.
            fleet: The workers.

        Returns:
            Seconds, shape [workers].
        """
        hits = cached_tokens(request, fleet, self.index, self.block_tokens)
        if self.is_shared and hits.size:
            hits = np.full_like(hits, hits.max())
        return self.cost.seconds(hits, request.prompt_tokens - hits)


def cached_tokens(
    request: RouteRequest, fleet: Fleet, index: PrefixIndex | None, block_tokens: int
) -> npt.NDArray[np.float64]:
    """Tokens of a prompt that each worker need not run.

    Args:
        request: The prompt.
        fleet: The workers.
        index: Which worker holds which prefix, or None.
        block_tokens: Tokens of a block.

    Returns:
        Tokens, shape [workers], at most all but one: the last token of a prompt always runs.
    """
    if index is None or not request.block_keys:
        return np.zeros(len(fleet))
    hits = index.match_rows(request.block_keys, fleet) * float(block_tokens)
    most: npt.NDArray[np.float64] = np.minimum(hits, request.prompt_tokens - 1.0)
    return most
