"""Snapshots in columns: own dispatches count at once, reports replace them, old reports change nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.balancers import (
    Decision,
    DecodeBalancer,
    Fleet,
    ReplicaBalancer,
    RouteRequest,
    WorkerSnapshot,
    WorkerState,
)
from deepinfer.core.errors import ConfigError, InvalidRequest, Unschedulable
from deepinfer.core.plan import LoadSnapshot
from deepinfer.core.types import Request


def test_views_of_engine_types() -> None:
    request = RouteRequest.of(Request(rid="a", prompt_token_ids=(1, 2, 3)), session="s")
    assert (request.rid, request.prompt_tokens, request.session) == ("a", 3, "s")
    load = LoadSnapshot(
        time_s=2.0,
        num_running=3,
        num_waiting=1,
        waiting_tokens=70,
        cached_tokens=500,
        predicted_s=0.5,
    )
    fleet = Fleet([WorkerSnapshot.of("w", load, max_requests=8)])
    assert fleet.num_requests.tolist() == [4]
    assert fleet.waiting_s.tolist() == [0.5]
    assert fleet.kv_tokens.tolist() == [500]
    assert fleet.max_requests.tolist() == [8]
    assert Decision(0, "x").is_placed
    assert not Decision(None, "no_room").is_placed


def test_a_router_as_a_balancer_of_replicas() -> None:
    balancer = ReplicaBalancer(DecodeBalancer())
    request = Request(rid="r", prompt_token_ids=(1, 2, 3))
    loads = [
        LoadSnapshot(
            time_s=1.0, num_running=n, num_waiting=0, cached_tokens=9, capacity_tokens=room
        )
        for n, room in ((3, 100), (2, 100), (1, 10))
    ]
    assert balancer.route(request, loads) == 1  # the last one has no room
    with pytest.raises(Unschedulable, match="no_kv_room"):
        balancer.route(request, loads[2:])


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="prompt_tokens is 0"):
        RouteRequest(rid="a", prompt_tokens=0)
    with pytest.raises(InvalidRequest, match="output_tokens"):
        RouteRequest(rid="a", prompt_tokens=1, output_tokens=float("nan"))
    with pytest.raises(ConfigError, match="num_running is -1"):
        WorkerSnapshot(name="a", num_running=-1)
    with pytest.raises(ConfigError, match="two workers"):
        Fleet([WorkerSnapshot(name="a"), WorkerSnapshot(name="a")])
    with pytest.raises(ConfigError, match="no worker 'b'"):
        Fleet([WorkerSnapshot(name="a")]).index("b")


def test_dispatches_count_until_a_later_report() -> None:
    fleet = Fleet([WorkerSnapshot(name="a"), WorkerSnapshot(name="b")])
    fleet.sent(0, now_s=1.0, waiting_tokens=10, waiting_s=0.1, kv_tokens=12)
    fleet.sent(0, now_s=3.0, waiting_tokens=5, kv_tokens=6)
    assert fleet.waiting_tokens.tolist() == [15, 0]
    fleet.update(WorkerSnapshot(name="a", time_s=2.0, num_running=1, cached_tokens=12))
    assert fleet.num_requests.tolist() == [2, 0]  # the second one is not in that report
    assert fleet.waiting_tokens.tolist() == [5, 0]
    assert fleet.kv_tokens.tolist() == [18, 0]


def test_late_reports_are_ignored_but_not_deaths() -> None:
    fleet = Fleet([WorkerSnapshot(name="a", time_s=5.0, num_running=2)])
    fleet.update(WorkerSnapshot(name="a", time_s=4.0, num_running=9))
    assert fleet.num_requests.tolist() == [2]
    fleet.sent(0, now_s=6.0)
    fleet.update(WorkerSnapshot(name="a", time_s=4.0, state=WorkerState.DEAD))
    assert fleet.ready.tolist() == [False]
    assert fleet.num_requests.tolist() == [0]


def test_new_workers_join() -> None:
    fleet = Fleet()
    fleet.update(WorkerSnapshot(name="a"))
    fleet.update(WorkerSnapshot(name="b", state=WorkerState.DRAINING))
    assert fleet.names == ["a", "b"]
    assert fleet.ready.tolist() == [True, False]
    twin = fleet.copy()
    twin.sent(0, now_s=1.0)
    assert fleet.num_requests.tolist() == [0, 0]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.booleans()), max_size=30))
def test_columns_equal_the_last_report_plus_later_dispatches(
    moves: list[tuple[int, int, bool]],
) -> None:
    fleet = Fleet([WorkerSnapshot(name=str(i)) for i in range(3)])
    reported = [(0.0, 0)] * 3
    sent: list[list[tuple[float, int]]] = [[], [], []]
    for now, (worker, tokens, is_report) in enumerate(moves, 1):
        if is_report:
            fleet.update(WorkerSnapshot(name=str(worker), time_s=float(now), waiting_tokens=tokens))
            reported[worker] = (float(now), tokens)
        else:
            fleet.sent(worker, now_s=float(now), waiting_tokens=tokens)
            sent[worker].append((float(now), tokens))
    for worker in range(3):
        since, tokens = reported[worker]
        later = [amount for time, amount in sent[worker] if time > since]
        assert fleet.waiting_tokens[worker] == tokens + sum(later)
        assert fleet.num_requests[worker] == len(later)


def test_a_late_death_does_not_let_older_reports_in() -> None:
    fleet = Fleet([WorkerSnapshot(name="a", time_s=10.0, num_running=2)])
    fleet.update(WorkerSnapshot(name="a", time_s=5.0, state=WorkerState.DEAD))
    fleet.update(WorkerSnapshot(name="a", time_s=7.0, num_running=9))
    assert fleet.ready.tolist() == [False], "a report from before the last one says nothing new"
    fleet.update(WorkerSnapshot(name="a", time_s=11.0, num_running=1))
    assert (fleet.ready.tolist(), fleet.num_requests.tolist()) == ([True], [1])


def test_dispatches_that_were_counted_out_of_order_end_with_their_report() -> None:
    fleet = Fleet([WorkerSnapshot(name="a")])
    fleet.sent(0, now_s=5.0, waiting_tokens=1)
    fleet.sent(0, now_s=3.0, waiting_tokens=10)
    fleet.update(WorkerSnapshot(name="a", time_s=4.0))
    assert fleet.waiting_tokens.tolist() == [1]


@pytest.mark.parametrize(
    "values",
    [
        {"index": -1},
        {"index": 1},
        {"waiting_s": float("nan")},
        {"waiting_s": -1.0},
        {"waiting_tokens": -1},
        {"waiting_tokens": 2**62},
        {"kv_tokens": -1},
        {"now_s": float("nan")},
    ],
)
def test_a_dispatch_that_makes_no_sense_is_refused(values: dict[str, float]) -> None:
    fleet = Fleet([WorkerSnapshot(name="a")])
    name = next(iter(values))
    with pytest.raises(ConfigError, match=name):
        fleet.sent(**{"index": 0, "now_s": 1.0, **values})  # type: ignore[arg-type]
    assert fleet.num_requests.tolist() == [0]


def test_views_that_make_no_sense_are_refused() -> None:
    for values in ({"state": "ready"}, {"state": 0}, {"time_s": float("nan")}, {"time_s": None}):
        with pytest.raises(ConfigError, match=next(iter(values))):
            WorkerSnapshot(**{"name": "a", **values})  # type: ignore[arg-type]
    for keys in ("abc", ["a"], None):
        with pytest.raises(InvalidRequest, match="block_keys"):
            RouteRequest(rid="r", prompt_tokens=1, block_keys=keys)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="WorkerSnapshot"):
        Fleet(["a"])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="WorkerSnapshot"):
        Fleet().update("a")  # type: ignore[arg-type]
