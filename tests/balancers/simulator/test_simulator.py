"""The fleet simulator: exact small cases, nothing lost, and equal runs for equal arguments."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.balancers.prefill import (
    EarliestCompletion,
    LeastRequests,
    LeastWork,
    PrefillCost,
    PrefixIndex,
    RoundRobin,
    TierRouter,
)
from deepinfer.balancers.simulator import (
    CacheKind,
    DecodeConfig,
    FleetChange,
    FleetChangeKind,
    FleetSimulator,
    PrefillConfig,
    Slo,
    TransferConfig,
)
from deepinfer.balancers.traffic import TraceRecord, generate_chat_trace
from deepinfer.core.errors import ConfigError

COST = PrefillCost(token_s=1e-3, step_s=0.1)
ONE = PrefillConfig(num_engines=1, cost=COST, block_tokens=4, cache_blocks=100)


def record(arrival_s: float, tokens: int, output: int = 1, *ids: int) -> TraceRecord:
    return TraceRecord(arrival_s, tokens, output, ids, 4 if ids else 0)


def test_one_engine_by_hand() -> None:
    report = FleetSimulator(ONE, RoundRobin()).run(
        [record(0.0, 1000), record(0.5, 2000), record(0.6, 500), record(9.0, 100)]
    )
    # A step of 1.1 s; then both that came meanwhile, 0.1 + 2.5 s; then idle until 9.
    assert report.ttft_s.tolist() == pytest.approx([1.1, 3.2, 3.1, 0.2])
    assert report.prefill_busy_s.tolist() == pytest.approx([1.1 + 2.6 + 0.2])
    assert report.end_s == pytest.approx(9.2)
    assert report.num_unserved == 0


def test_hits_by_hand() -> None:
    first, again = record(0.0, 8, 1, 1, 2), record(1.0, 13, 1, 1, 2, 3, 9)
    report = FleetSimulator(ONE, RoundRobin()).run([first, again, record(2.0, 8, 1, 1, 2)])
    assert report.hit_tokens.tolist() == [0, 8, 7], "the last token of a prompt always runs"
    assert report.hit_blocks.tolist() == [0, 2, 2]
    assert report.blocks.tolist() == [2, 3, 2]
    assert report.ttft_s.tolist() == pytest.approx([0.108, 0.105, 0.101])


@pytest.mark.parametrize(
    ("cache", "blocks", "hits"),
    [
        (CacheKind.NONE, 100, [0, 0, 0]),
        (CacheKind.ENGINE, 100, [0, 0, 8]),
        (CacheKind.STORE, 100, [0, 8, 8]),
        (CacheKind.ENGINE, 1, [0, 0, 4]),
    ],
)
def test_kinds_of_caches(cache: CacheKind, blocks: int, hits: list[int]) -> None:
    config = dataclasses.replace(ONE, num_engines=2, cache=cache, cache_blocks=blocks)
    trace = [record(float(i), 9, 1, 1, 2, 10 + i) for i in range(3)]
    assert FleetSimulator(config, RoundRobin()).run(trace).hit_tokens.tolist() == hits


def test_lockstep_ranks_wait_for_the_slowest() -> None:
    config = dataclasses.replace(ONE, num_ranks=2, chunk_tokens=1000, chunk_multiple=1)
    report = FleetSimulator(config, RoundRobin()).run([record(0.0, 2000), record(0.0, 500)])
    # The first is alone in its first step; then 1000 beside 500, both done after 1.1 + 1.1 s.
    assert report.ttft_s.tolist() == pytest.approx([2.2, 2.2])
    assert report.prefill_efficiency == pytest.approx((0.6 + 0.1 + 0.75) / 2.2)


def test_chunks_by_time() -> None:
    config = dataclasses.replace(ONE, chunk_s=0.3, chunk_multiple=100)
    report = FleetSimulator(config, RoundRobin()).run([record(0.0, 750)])
    assert report.ttft_s.tolist() == pytest.approx([0.75 + 3 * 0.1])


def test_a_target_below_one_chunk_still_moves() -> None:
    config = dataclasses.replace(ONE, chunk_s=1e-6)
    assert FleetSimulator(config, RoundRobin()).run([record(0.0, 300)]).num_unserved == 0


def test_decode_by_hand() -> None:
    decode = DecodeConfig(num_ranks=2, step_s=1.0, request_s=0.5, kv_token_s=0.0)
    transfer = TransferConfig(token_bytes=0, fixed_bytes=0, latency_s=0.25)
    simulator = FleetSimulator(
        dataclasses.replace(ONE, num_engines=2),
        RoundRobin(),
        decode=decode,
        decode_router=LeastRequests(),
        transfer=transfer,
    )
    report = simulator.run([record(0.0, 900, 3), record(0.5, 900, 2)])
    # First tokens at 1.0 and 1.5; at the ranks at 1.25 and 1.75. Steps of 1.5 s begin at 1.25, 2.75, 4.25.
    assert report.ttft_s.tolist() == pytest.approx([1.0, 1.0])
    assert report.finish_s.tolist() == pytest.approx([4.25, 4.25])
    assert report.tpot_s.tolist() == pytest.approx([3.25 / 2, 2.75])
    assert report.decode_busy_s.tolist() == pytest.approx([3.0])


def test_router_sees_its_own_dispatches() -> None:
    """A burst between two reports must not go to one engine (vllm 36748: counts that lag behind)."""
    config = dataclasses.replace(ONE, num_engines=4)
    trace = [record(0.0, 1000) for _ in range(8)]
    simulator = FleetSimulator(config, LeastWork(), event_delay_s=50.0)
    assert np.bincount(simulator.run(trace).engine).tolist() == [2, 2, 2, 2]


def change(time_s: float, engine: int, kind: FleetChangeKind, decode: bool = False) -> FleetChange:
    return FleetChange(time_s=time_s, engine=engine, kind=kind, is_decode=decode)


def test_failure_reroutes_and_forgets() -> None:
    index = PrefixIndex()
    config = dataclasses.replace(ONE, num_engines=2)
    simulator = FleetSimulator(
        config,
        EarliestCompletion(COST, index, block_tokens=4),
        index=index,
        changes=[change(0.5, 0, FleetChangeKind.FAIL), change(5.0, 0, FleetChangeKind.JOIN)],
    )
    trace = [record(0.0, 1000, 1, *range(250)) for _ in range(2)]
    report = simulator.run([*trace, record(9.0, 1000, 1, *range(250))])
    assert report.num_unserved == 0
    assert report.retries.sum() == 1
    assert report.engine.tolist()[:2] == [1, 1]
    assert report.engine[2] == 1, "the engine that came back has lost its blocks"
    index.check()


def test_a_drained_engine_finishes_what_it_has() -> None:
    config = dataclasses.replace(ONE, num_engines=2)
    trace = [record(0.0, 1000), record(0.0, 1000), *(record(0.6, 100) for _ in range(6))]
    report = FleetSimulator(
        config, LeastWork(), changes=[change(0.5, 0, FleetChangeKind.DRAIN)]
    ).run(trace)
    assert report.num_unserved == 0
    assert report.retries.sum() == 0
    assert set(report.engine[2:].tolist()) == {1}


def test_without_anyone_requests_wait() -> None:
    changes = [change(0.0, 0, FleetChangeKind.FAIL), change(7.0, 0, FleetChangeKind.JOIN)]
    report = FleetSimulator(ONE, LeastWork(), changes=changes).run([record(1.0, 900)])
    assert report.ttft_s.tolist() == pytest.approx([7.0])
    assert (
        FleetSimulator(ONE, LeastWork(), changes=changes[:1]).run([record(1.0, 9)]).num_unserved
        == 1
    )


CHANGES = st.lists(
    st.builds(
        change,
        st.floats(0, 40),
        st.integers(0, 2),
        st.sampled_from(list(FleetChangeKind)),
        st.booleans(),
    ),
    max_size=8,
)


@settings(max_examples=25, deadline=None)
@given(changes=CHANGES, seed=st.integers(0, 100), delay=st.sampled_from([0.0, 0.3]))
def test_nothing_is_lost_and_runs_repeat(
    changes: list[FleetChange], seed: int, delay: float
) -> None:
    trace = generate_chat_trace(60, rate_per_s=3.0, seed=seed, mean_output_tokens=20)
    # In the end everybody is back.
    changes = [
        *changes,
        *(change(50.0, e, FleetChangeKind.JOIN, d) for e in range(3) for d in (False, True)),
    ]

    def run() -> tuple[FleetSimulator, object]:
        index = PrefixIndex()
        config = PrefillConfig(num_engines=3, num_ranks=2, chunk_s=0.2)
        router = TierRouter(EarliestCompletion(config.cost, index), 3, bounds=(8_192,))
        simulator = FleetSimulator(
            config,
            router,
            index=index,
            decode=DecodeConfig(num_engines=3, num_ranks=2, max_requests=4),
            decode_router=_ByRoom(),
            changes=changes,
            event_delay_s=delay,
            round_s=5.0,
        )
        report = simulator.run(trace)
        index.check()
        return simulator, report

    (_, one), (_, two) = run(), run()
    assert one.num_unserved == 0  # type: ignore[attr-defined]
    assert not np.isnan(one.finish_s).any()  # type: ignore[attr-defined]
    assert (one.finish_s > one.arrival_s).all()  # type: ignore[attr-defined]
    np.testing.assert_equal(dataclasses.asdict(one), dataclasses.asdict(two))  # type: ignore[call-overload]


class _ByRoom(LeastRequests):
    """The rank with the fewest requests, none when all are full."""

    def decide(self, request, fleet):  # type: ignore[no-untyped-def]
        decision = super().decide(request, fleet)
        if decision.target is not None and fleet.num_requests[decision.target] >= 4:
            return dataclasses.replace(decision, target=None)
        return decision


def test_report_figures() -> None:
    report = FleetSimulator(ONE, RoundRobin()).run([record(0.0, 1000), record(5.0, 20_000)])
    assert report.goodput(Slo(ttft_s=2.0)) == pytest.approx(1 / report.end_s)
    assert report.ttft_percentile(50, tier=0) == pytest.approx(1.1)
    assert np.isnan(report.ttft_percentile(50, tier=3))
    assert set(report.summary()) >= {"block_hit_rate", "ttft_p99_s", "busy_max_over_mean"}


def test_bad_options() -> None:
    with pytest.raises(ConfigError, match="decode_router"):
        FleetSimulator(ONE, RoundRobin(), decode=DecodeConfig())
    with pytest.raises(ConfigError, match="engines 0 to 0"):
        FleetSimulator(ONE, RoundRobin(), changes=[change(0.0, 1, FleetChangeKind.FAIL)])
    for options in (
        {"num_engines": 0},
        {"chunk_s": 0.0},
        {"chunk_tokens": 64},
        {"block_tokens": 0},
    ):
        with pytest.raises(ConfigError):
            dataclasses.replace(ONE, **options)
    with pytest.raises(ConfigError):
        DecodeConfig(step_s=0.0, request_s=0.0, kv_token_s=0.0)
