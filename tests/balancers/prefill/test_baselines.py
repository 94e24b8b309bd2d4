"""Rules of others: each does what its source says, and none routes to a worker that is not ready."""

from __future__ import annotations

from collections import Counter

import pytest

from deepinfer.balancers import Fleet, Router, RouteRequest, WorkerSnapshot, WorkerState
from deepinfer.balancers.prefill import (
    CacheUpdate,
    DynamoCost,
    LeastRequests,
    LeastWork,
    LoadAware,
    LongestPrefix,
    PowerOfTwo,
    PrefixIndex,
    RandomChoice,
    RoundRobin,
    SglangCacheAware,
)

DEAD = WorkerState.DEAD


def fleet(*workers: dict[str, object]) -> Fleet:
    return Fleet(
        WorkerSnapshot(name="abcdefgh"[i], **values)  # type: ignore[arg-type]
        for i, values in enumerate(workers)
    )


def prompt(tokens: int = 2048, *keys: str) -> RouteRequest:
    return RouteRequest(rid="r", prompt_tokens=tokens, block_keys=keys)


def index() -> PrefixIndex:
    made = PrefixIndex()
    made.apply(CacheUpdate(worker="b", sequence=0, stored=("1", "2", "3")))
    return made


ALL: dict[str, Router] = {
    "round_robin": RoundRobin(),
    "random": RandomChoice(1),
    "least_requests": LeastRequests(),
    "least_work": LeastWork(),
    "power_of_two": PowerOfTwo(1),
    "longest_prefix": LongestPrefix(index()),
    "sglang": SglangCacheAware(index()),
    "dynamo": DynamoCost(index()),
    "load_aware": LoadAware(index()),
}


@pytest.mark.parametrize("name", sorted(ALL))
def test_only_ready_workers(name: str) -> None:
    router = ALL[name]
    assert isinstance(router, Router)
    workers = fleet({}, {"state": DEAD}, {}, {"state": WorkerState.DRAINING}, {})
    chosen = {router.decide(prompt(2048, "1", "2"), workers).target for _ in range(50)}
    assert chosen <= {0, 2, 4}
    assert router.decide(prompt(), fleet({"state": DEAD})).target is None
    assert router.decide(prompt(), Fleet()).target is None


def test_round_robin_skips() -> None:
    router = RoundRobin()
    workers = fleet({}, {"state": DEAD}, {})
    assert [router.decide(prompt(), workers).target for _ in range(5)] == [0, 2, 0, 2, 0]


def test_least() -> None:
    workers = fleet({"num_running": 3, "waiting_s": 0.1}, {"num_waiting": 2, "waiting_s": 0.5})
    assert LeastRequests().decide(prompt(), workers).target == 1
    assert LeastWork().decide(prompt(), workers).target == 0


def test_random_rules_repeat_by_seed() -> None:
    workers = fleet(*({"waiting_s": float(i)} for i in range(8)))
    for rule in (RandomChoice, PowerOfTwo):
        one, two, other = rule(3), rule(3), rule(4)
        first = [one.decide(prompt(), workers).target for _ in range(40)]
        assert first == [two.decide(prompt(), workers).target for _ in range(40)]
        assert first != [other.decide(prompt(), workers).target for _ in range(40)]
    counts = Counter(PowerOfTwo(0).decide(prompt(), workers).target for _ in range(1))
    assert 7 not in counts, "the worst of all is never the better of two"


def test_longest_prefix_ignores_load() -> None:
    workers = fleet({}, {"num_waiting": 10_000})
    assert LongestPrefix(index()).decide(prompt(2048, "1"), workers).target == 1


def test_sglang_follows_load_when_it_is_uneven() -> None:
    rule = SglangCacheAware(index())
    request = prompt(2048, "1", "2", "3")
    assert rule.decide(request, fleet({}, {"num_waiting": 32})).reason == "longest_prefix"
    assert rule.decide(request, fleet({}, {"num_waiting": 33})).reason == "least_requests"
    assert rule.decide(prompt(2048, "1"), fleet({}, {})).reason == "smallest_tree"  # a quarter


def test_sglang_fills_the_smallest_tree() -> None:
    rule = SglangCacheAware(index())
    targets = [rule.decide(prompt(1000 * (i + 1)), fleet({}, {}, {})).target for i in range(4)]
    assert targets == [0, 1, 2, 0]


def test_dynamo_adds_what_runs_and_what_decodes() -> None:
    rule = DynamoCost(index(), overlap_weight=1.0)
    request = prompt(2048, "1", "2", "3")  # b has 3 of 4 blocks
    assert rule.decide(request, fleet({}, {"cached_tokens": 512 * 2})).target == 1
    assert rule.decide(request, fleet({}, {"cached_tokens": 512 * 4})).target == 0


def test_load_aware_weighs_match_against_load() -> None:
    request = prompt(2048, "1", "2", "3")
    assert LoadAware(index()).decide(request, fleet({}, {"num_running": 1})).target == 0
    assert LoadAware(index(), beta=0.5).decide(request, fleet({}, {"num_running": 1})).target == 1
