"""A trial of decode balancers: ranks in lockstep, requests that come and end, and how even the steps are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from deepinfer.balancers.base import Router, RouteRequest, WorkerSnapshot
from deepinfer.balancers.decode_cost import DecodeCost
from deepinfer.balancers.fleet import Fleet
from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError

__all__ = ["DecodeTrial", "TrialReport", "run_decode_trial"]


@dataclass(frozen=True, slots=True)
class TrialReport:
    """What came of a trial; means over the steps after the warm-up.

    Attributes:
        efficiency: Mean step of the ranks over the longest, from 0 to 1: the part of the time that ranks do not wait.
        requests_spread: Most requests of a rank over the mean.
        kv_spread: Most tokens held by a rank over the mean.
        num_finished: Requests that ended, in all steps.
        num_waiting: Requests that no rank took by the end.
        mean_running: Mean number of running requests.
        over_capacity: Part of the steps in which a rank held more than its cache can, from 0 to 1.
    """

    efficiency: float
    requests_spread: float
    kv_spread: float
    num_finished: int
    num_waiting: int
    mean_running: float
    over_capacity: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTrial:
    """What is tried.

    Attributes:
        ranks: Ranks that wait for each other in every step.
        requests_per_rank: Requests a rank: kept constant in a closed loop, and on average in an open one.
        prompt_tokens: Tokens that requests hold on arrival, to be drawn from, each above 0.
        output_tokens: Tokens that they generate, one for each entry of `prompt_tokens`, each above 0.
        is_open: False: whenever a request ends, the next one comes. True: they come at random, at the rate that keeps
            `requests_per_rank` on average.
        steps: Steps.
        warm_up: Steps before counting begins.
        cost: Cost of a step.
        capacity_tokens: Tokens that a rank can hold, or 0 for no limit.
        seed: Seed of the draws; equal trials give equal reports.

    Raises:
        ConfigError: A number is out of range.
    """

    ranks: int = 32
    requests_per_rank: int = 60
    prompt_tokens: Sequence[int]
    output_tokens: Sequence[int]
    is_open: bool = False
    steps: int = 1_500
    warm_up: int = 500
    cost: DecodeCost = field(default_factory=lambda: DecodeCost(8e-3, 1e-4, 6e-9))
    capacity_tokens: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks the numbers."""
        for name in ("ranks", "requests_per_rank", "steps"):
            checks.check_int(name, getattr(self, name), 1, 10**9, ConfigError)
        checks.check_int("warm_up", self.warm_up, 0, self.steps - 1, ConfigError)
        checks.check_int("capacity_tokens", self.capacity_tokens, 0, 2**62, ConfigError)
        lengths = (len(self.prompt_tokens), len(self.output_tokens))
        if lengths[0] != lengths[1] or not lengths[0]:
            raise ConfigError(
                f"there are {lengths[0]} prompts and {lengths[1]} outputs; give as many of one as of the "
                "other, at least one.",
                field="output_tokens",
            )
        for name in ("prompt_tokens", "output_tokens"):
            least = min(getattr(self, name))
            checks.check_int(f"the smallest of {name}", least, 1, 2**48, ConfigError)


class _Requests:
    """Running requests in columns."""

    def __init__(self) -> None:
        self.rank = np.zeros(0, np.int64)
        self.kv = np.zeros(0, np.int64)
        self.left = np.zeros(0, np.int64)

    def add(self, rows: list[tuple[int, int, int]]) -> None:
        new = np.array(rows, np.int64).T
        self.rank = np.concatenate((self.rank, new[0]))
        self.kv = np.concatenate((self.kv, new[1]))
        self.left = np.concatenate((self.left, new[2]))

    def step(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Generates a token each; ranks and tokens of those that ended."""
        self.kv += 1
        self.left -= 1
        stays = self.left > 0
        ended = self.rank[~stays], self.kv[~stays]
        if len(ended[0]):
            self.rank, self.kv, self.left = self.rank[stays], self.kv[stays], self.left[stays]
        return ended


def run_decode_trial(router: Router, trial: DecodeTrial) -> TrialReport:
    """Runs a trial on ranks that start full, their requests at random places in their answers.

    Args:
        router: The balancer.
        trial: What is tried.

    Returns:
        The report.
    """
    rng = np.random.default_rng(trial.seed)
    prompts = np.asarray(trial.prompt_tokens, np.int64)
    outputs = np.asarray(trial.output_tokens, np.int64)
    fleet = Fleet(
        WorkerSnapshot(name=f"rank{i}", capacity_tokens=trial.capacity_tokens)
        for i in range(trial.ranks)
    )
    total = trial.ranks * trial.requests_per_rank
    # Running answers are found more often the longer they are.
    first = rng.choice(len(outputs), total, p=outputs / outputs.sum())
    done = (rng.random(total) * outputs[first]).astype(np.int64)
    waiting = [
        (int(p), int(o)) for p, o in zip(prompts[first] + done, outputs[first] - done, strict=True)
    ]
    running = _Requests()
    spreads: list[tuple[float, float, float, int, bool]] = []
    limit = trial.capacity_tokens or np.iinfo(np.int64).max
    finished = 0
    number = 0
    for step in range(trial.steps):
        if step:
            missing = total - len(running.rank) - len(waiting)
            count = rng.poisson(total / outputs.mean()) if trial.is_open else max(0, missing)
            drawn = rng.integers(len(prompts), size=count)
            waiting += zip(prompts[drawn].tolist(), outputs[drawn].tolist(), strict=True)
        placed: list[tuple[int, int, int]] = []
        still: list[tuple[int, int]] = []
        for tokens, answer in waiting:
            number += 1
            request = RouteRequest(rid=str(number), prompt_tokens=tokens)
            target = router.decide(request, fleet).target
            if target is None:
                still.append((tokens, answer))
                continue
            placed.append((target, tokens, answer))
            fleet.num_requests[target] += 1
            fleet.kv_tokens[target] += tokens
        waiting = still
        if placed:
            running.add(placed)
        if step >= trial.warm_up and len(running.rank):
            seconds = trial.cost.seconds(fleet.num_requests, fleet.kv_tokens)
            spreads.append(
                (
                    float(seconds.mean() / seconds.max()),
                    float(fleet.num_requests.max() / fleet.num_requests.mean()),
                    float(fleet.kv_tokens.max() / fleet.kv_tokens.mean()),
                    len(running.rank),
                    bool(fleet.kv_tokens.max() > limit),
                )
            )
        fleet.kv_tokens += fleet.num_requests
        ranks, kv = running.step()
        np.subtract.at(fleet.num_requests, ranks, 1)
        np.subtract.at(fleet.kv_tokens, ranks, kv)
        finished += len(ranks)
    means = np.mean(spreads, axis=0).tolist() if spreads else [1.0, 1.0, 1.0, 0.0, 0.0]
    return TrialReport(
        efficiency=means[0],
        requests_spread=means[1],
        kv_spread=means[2],
        num_finished=finished,
        num_waiting=len(waiting),
        mean_running=means[3],
        over_capacity=means[4],
    )
