"""Decode ranks: even in requests and in tokens held, never to a rank that is not ready or has no room."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.balancers import (
    DecodeBalancer,
    DecodeCost,
    DecodeTrial,
    Fleet,
    OutputLengths,
    RouteRequest,
    TrialReport,
    WorkerSnapshot,
    WorkerState,
    run_decode_trial,
)
from deepinfer.core.errors import ConfigError, ShapeError

COST = DecodeCost(8e-3, 1e-4, 6e-9)


def chat(number: int = 4_000, seed: int = 1) -> tuple[list[int], list[int]]:
    """Prompts and answers with the quantiles of published chat traffic: long prompts are ten times the median."""
    rng = np.random.default_rng(seed)
    prompts = np.clip(rng.lognormal(np.log(7_000), 1.1, number), 100, 123_000).astype(int)
    answers = np.clip(rng.lognormal(np.log(290), 0.6, number), 1, 2_000).astype(int)
    return prompts.tolist(), answers.tolist()


class ByCount:
    """A rule that looks at requests only."""

    def decide(self, request: RouteRequest, fleet: Fleet):  # type: ignore[no-untyped-def]
        from deepinfer.balancers import Decision

        return Decision(int(fleet.num_requests.argmin()), "fewest_requests")


def trial(router: object = None, **changes: object) -> TrialReport:
    prompts, answers = chat()
    given_ = {"prompt_tokens": prompts, "output_tokens": answers, "steps": 600, "warm_up": 200}
    chosen = router or DecodeBalancer()
    return run_decode_trial(chosen, DecodeTrial(**{**given_, **changes}))  # type: ignore[arg-type]


@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
@pytest.mark.parametrize("ranks", [32, 64])
def test_ranks_wait_little_for_each_other(ranks: int, is_open: bool) -> None:
    report = trial(ranks=ranks, is_open=is_open)
    assert report.efficiency >= 0.975
    assert report.requests_spread <= 1.08
    assert report.kv_spread <= 1.08
    assert report.num_waiting == 0


def test_equal_seeds_give_equal_reports() -> None:
    few = {"ranks": 4, "steps": 60, "warm_up": 20, "is_open": True}
    assert trial(**few) == trial(**few)
    assert trial(**few) != trial(**few, seed=1)


def test_rules_in_order() -> None:
    """One dimension is not enough; the published rule is nearly as good as the others."""
    reports = {
        "count": trial(ByCount(), ranks=16),
        "published": trial(DecodeBalancer("published"), ranks=16),
        "cost": trial(DecodeBalancer("cost", cost=COST), ranks=16),
        "normalised": trial(ranks=16),
    }
    assert reports["count"].efficiency < 0.94
    assert reports["count"].kv_spread > 1.25
    assert min(reports[name].efficiency for name in ("published", "cost", "normalised")) > 0.965
    assert reports["cost"].kv_spread > reports["normalised"].kv_spread


def fleet_of(*loads: tuple[int, int], **changes: int) -> Fleet:
    return Fleet(
        WorkerSnapshot(name=str(i), num_running=n, cached_tokens=kv, **changes)
        for i, (n, kv) in enumerate(loads)
    )


def ask(tokens: int, fleet: Fleet, mode: str = "normalised", **options: object) -> int | None:
    balancer = DecodeBalancer(mode, **options)  # type: ignore[arg-type]
    return balancer.decide(RouteRequest(rid="r", prompt_tokens=tokens), fleet).target


def test_published_rule() -> None:
    fleet = fleet_of((5, 90_000), (5, 95_000), (9, 20_000))
    assert ask(8_191, fleet, "published") == 1  # the fewest requests, then the most tokens
    assert ask(8_192, fleet, "published") == 2  # the fewest tokens
    assert ask(1_000, fleet, "published", long_tokens=500) == 2


def test_normalised_rule_looks_at_the_worse_number() -> None:
    fleet = fleet_of((9, 95_000), (11, 70_000))
    assert ask(100, fleet) == 0
    assert ask(60_000, fleet) == 1
    assert ask(100, fleet_of((3, 30), (3, 30), (3, 30))) == 0  # ties: the lowest


def test_cost_rule_and_prediction() -> None:
    fleet = fleet_of((10, 800_000), (60, 100_000))
    decision = DecodeBalancer("cost", cost=COST).decide(
        RouteRequest(rid="r", prompt_tokens=1_000), fleet
    )
    assert decision.target == 0  # 8 + 1.1 + 4.8 ms against 8 + 6.1 + 0.6 ms
    fleet = fleet_of((10, 1_200_000), (60, 100_000))
    decision = DecodeBalancer("cost", cost=COST).decide(
        RouteRequest(rid="r", prompt_tokens=1_000), fleet
    )
    assert decision.target == 1
    assert decision.predicted == pytest.approx(8e-3 + 61e-4 + 6e-9 * 101_000)


def test_admission_needs_a_place_and_room() -> None:
    full = fleet_of((4, 10), (4, 10), max_requests=4)
    assert (
        DecodeBalancer().decide(RouteRequest(rid="r", prompt_tokens=5), full).reason == "no_place"
    )
    tight = fleet_of((1, 900), (2, 700), capacity_tokens=1_000)
    assert ask(100, tight) == 0
    assert ask(101, tight) == 1
    decision = DecodeBalancer().decide(RouteRequest(rid="r", prompt_tokens=301), tight)
    assert (decision.target, decision.reason) == (None, "no_kv_room")
    answer = RouteRequest(rid="r", prompt_tokens=100, output_tokens=100)
    assert DecodeBalancer().decide(answer, tight).target == 1
    assert ask(100, tight, reserve_tokens=150) == 1
    lengths = OutputLengths(prior_tokens=150)
    assert ask(100, tight, outputs=lengths) == 1


def test_predicted_answers_keep_ranks_within_their_room() -> None:
    """Admission by the prompt alone lets caches overflow as the answers grow."""
    prompts, answers = [2_000] * 50, [400, 2_000] * 25
    room = {"capacity_tokens": 50_000, "requests_per_rank": 30, "ranks": 4}
    fixed = {"prompt_tokens": prompts, "output_tokens": answers, "steps": 500, "warm_up": 300}
    without = trial(DecodeBalancer(), **room, **fixed)
    lengths = OutputLengths()
    for answer in answers * 10:
        lengths.observe(answer)
    guided = trial(DecodeBalancer(outputs=lengths, reserve_tokens=8_000), **room, **fixed)
    assert without.over_capacity > 0.9
    assert guided.over_capacity < 0.05
    assert guided.num_waiting > 0  # the others wait at the router; none is lost


def test_waiting_requests_are_placed_long_ones_first() -> None:
    fleet = fleet_of((0, 0), (0, 0))
    requests = [RouteRequest(rid=str(n), prompt_tokens=n) for n in (10, 10, 1_000, 990)]
    decisions = DecodeBalancer().decide_many(requests, fleet, now_s=1.0)
    assert [decision.target for decision in decisions] == [0, 1, 0, 1]
    assert fleet.kv_tokens.tolist() == [1_010, 1_000]
    assert fleet.num_requests.tolist() == [2, 2]


class TestReportedFaults:
    """Faults that were reported against other routers of decode requests."""

    def test_vllm_36748_48808_long_contexts_do_not_pile_up(self) -> None:
        """Ranks were chosen by their number of requests, and long contexts met on few of them."""
        by_count, both = Fleet(fleet_snapshots(8)), Fleet(fleet_snapshots(8))
        rng = np.random.default_rng(0)
        for number in range(400):
            long = number % 8 == 0
            tokens = int(rng.integers(60_000, 100_000)) if long else int(rng.integers(50, 500))
            request = RouteRequest(rid=str(number), prompt_tokens=tokens)
            for fleet, router in ((by_count, ByCount()), (both, DecodeBalancer())):
                target = router.decide(request, fleet).target
                assert target is not None
                fleet.sent(target, now_s=0.0, kv_tokens=tokens)
        assert by_count.kv_tokens.max() > 2 * by_count.kv_tokens.mean()
        assert both.kv_tokens.max() < 1.2 * both.kv_tokens.mean()
        assert both.num_requests.max() < 1.2 * both.num_requests.mean()

    def test_vllm_40279_counts_do_not_drift_between_reports(self) -> None:
        """Between two reports all requests went to the rank that had been idle in the last one."""
        fleet = Fleet(fleet_snapshots(4))
        fleet.update(WorkerSnapshot(name="0", time_s=1.0))
        for number in range(1, 4):
            name = str(number)
            fleet.update(WorkerSnapshot(name=name, time_s=1.0, num_running=2, cached_tokens=200))
        balancer = DecodeBalancer()
        requests = [RouteRequest(rid=str(n), prompt_tokens=100) for n in range(10)]
        balancer.decide_many(requests, fleet, now_s=2.0)
        assert fleet.num_requests.tolist() == [4, 4, 4, 4]

    def test_requests_that_wait_are_asked_about_again(self) -> None:
        fleet = fleet_of((1, 990), capacity_tokens=1_000)
        request = RouteRequest(rid="r", prompt_tokens=100)
        assert DecodeBalancer().decide(request, fleet).target is None
        fleet.update(WorkerSnapshot(name="0", time_s=1.0, capacity_tokens=1_000))
        assert DecodeBalancer().decide(request, fleet).target == 0


def fleet_snapshots(number: int) -> list[WorkerSnapshot]:
    return [WorkerSnapshot(name=str(index)) for index in range(number)]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_only_ready_ranks_with_room_are_chosen(data: st.DataObject) -> None:
    loads = st.tuples(
        st.sampled_from(WorkerState),
        st.integers(0, 6),
        st.integers(0, 1_000),
        st.sampled_from((0, 4, 6)),
        st.sampled_from((0, 800, 1_200)),
    )
    workers = data.draw(st.lists(loads, min_size=1, max_size=6))
    fleet = Fleet(
        WorkerSnapshot(
            name=str(index),
            state=state,
            num_running=requests,
            cached_tokens=kv,
            max_requests=most,
            capacity_tokens=room,
        )
        for index, (state, requests, kv, most, room) in enumerate(workers)
    )
    mode = data.draw(st.sampled_from(("normalised", "published", "cost")))
    tokens = data.draw(st.integers(1, 20_000))
    request = RouteRequest(rid="r", prompt_tokens=tokens)
    before = fleet.copy()
    decision = DecodeBalancer(mode, cost=COST).decide(request, fleet)
    assert DecodeBalancer(mode, cost=COST).decide(request, fleet) == decision
    assert (fleet.num_requests == before.num_requests).all()  # asking changes nothing
    able = [
        index
        for index, (state, requests, kv, most, room) in enumerate(workers)
        if state is WorkerState.READY
        and (most == 0 or requests < most)
        and (room == 0 or kv + tokens <= room)
    ]
    assert decision.target in able if able else decision.target is None


def test_cost_is_fitted_to_steps() -> None:
    rng = np.random.default_rng(0)
    requests = rng.integers(1, 100, 200)
    kv = rng.integers(1_000, 2_000_000, 200)
    seconds = COST.seconds(requests, kv) * rng.normal(1.0, 0.01, 200)
    seconds[3] = 4.0  # a step that compiled something
    found = DecodeCost.fit(requests, kv, seconds)
    assert found.base_s == pytest.approx(COST.base_s, rel=0.03)
    assert found.request_s == pytest.approx(COST.request_s, rel=0.03)
    assert found.kv_token_s == pytest.approx(COST.kv_token_s, rel=0.03)
    falling = DecodeCost.fit(requests, kv, 1.0 + 1e-8 * kv - 1e-4 * requests)
    assert falling.request_s == 0.0
    with pytest.raises(ShapeError, match="three equal ones"):
        DecodeCost.fit([1, 2], [1], [1, 2])
    with pytest.raises(ConfigError, match="make no fit"):
        DecodeCost.fit([1] * 4, [1] * 4, [1] * 4)


def test_lengths_of_answers() -> None:
    lengths = OutputLengths(prior_tokens=100, memory=50)
    assert lengths.remaining(30) == 70.0
    assert lengths.remaining(500) == 1.0
    for _ in range(300):
        lengths.observe(10)
        lengths.observe(1_000)
    assert lengths.remaining(0) == pytest.approx(505, rel=0.1)
    assert lengths.remaining(100) == pytest.approx(900, rel=0.05)  # only the long ones are left
    for _ in range(500):
        lengths.observe(10)
    assert lengths.remaining(0) == pytest.approx(10, rel=0.1)  # old ones fade
    with pytest.raises(ConfigError, match="tokens is -1"):
        lengths.observe(-1)


def test_bad_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="'cost' without a cost"):
        DecodeBalancer("cost")
    with pytest.raises(ConfigError, match="mode is 'kv'"):
        DecodeBalancer("kv")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="1 prompts and 2 outputs"):
        DecodeTrial(prompt_tokens=[1], output_tokens=[1, 2])


@pytest.mark.parametrize(
    ("lengths", "match"),
    [
        ({"prompt_tokens": [0, 5]}, "prompt_tokens"),
        ({"output_tokens": [3, 0]}, "output_tokens"),
        ({"capacity_tokens": -1}, "capacity_tokens"),
    ],
)
def test_lengths_of_a_trial_are_checked(lengths: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        DecodeTrial(**{"prompt_tokens": [5, 5], "output_tokens": [3, 3], **lengths})  # type: ignore[arg-type]
