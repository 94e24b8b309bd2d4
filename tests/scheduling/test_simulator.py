"""Scheduler and cache on a virtual clock: times that can be worked out by hand, and whole traces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deepinfer.cache import BlockCacheManager
from deepinfer.core import PlanRow, Request, RowRole, SamplingParams, StepPlan
from deepinfer.core.errors import ConfigError, InvariantBroken
from deepinfer.scheduling import (
    Scheduler,
    SchedulerLimits,
    Simulator,
    StepCoefficients,
    StepTimeModel,
    StepWork,
    TimedChunks,
)
from deepinfer.testing import generate_chat_trace, summarize_trace, to_requests

# 1 s a step and 0.125 s a prompt token: exact in binary.
PLAIN = StepTimeModel(StepCoefficients(step_s=1.0, token_s=0.125))
REAL = StepTimeModel(
    StepCoefficients(
        step_s=5e-3,
        prefix_token_s=2e-9,
        token_s=3e-5,
        pair_s=2e-11,
        ended_prompt_s=2e-3,
        decode_row_s=1e-4,
        decode_context_token_s=1e-9,
    )
)


def request(rid: str, length: int, output: int, arrival_s: float = 0.0) -> Request:
    return Request(
        rid=rid,
        prompt_token_ids=(len(rid) + ord(rid[0]),) * length,
        params=SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True),
        arrival_s=arrival_s,
    )


def scheduler(
    *,
    num_blocks: int = 4000,
    block_size: int = 64,
    chunks: Any = None,
    prefix_cache: bool = True,
    **limits: Any,
) -> Scheduler:
    given = {"max_model_len": 80_000, "max_num_seqs": 32, "prefill_chunk_tokens": 8192, **limits}
    cache = BlockCacheManager(
        num_slots=given["max_num_seqs"],
        num_blocks=num_blocks,
        block_size=block_size,
        prefix_cache=prefix_cache,
    )
    options = {} if chunks is None else {"chunks": chunks}
    return Scheduler(SchedulerLimits(**given), cache, **options)


def test_times_by_hand() -> None:
    run = Simulator(scheduler(prefill_chunk_tokens=8), PLAIN).run(
        [request("a", 16, 3), request("b", 8, 2, arrival_s=2.5)]
    )
    # Steps: a[0:8] to 2 s, a[8:16] to 4 s, a and b[0:8] to 6 s, a and b to 7 s.
    assert [(step.start_s, step.end_s) for step in run.steps] == [(0, 2), (2, 4), (4, 6), (6, 7)]
    a, b = run.requests
    assert (a.first_token_s, a.finish_s, a.output_tokens) == (4.0, 7.0, 3)
    assert (b.first_token_s, b.finish_s, b.time_to_first_token_s) == (6.0, 7.0, 3.5)
    assert run.inter_token_s.tolist() == [2.0, 1.0, 1.0]
    assert run.arrivals == {"a": 0.0, "b": 2.5}
    assert (run.num_steps, run.prefill_tokens, run.decode_tokens) == (4, 24, 3)
    assert (run.duration_s, run.busy_s, run.longest_step_s) == (7.0, 7.0, 2.0)
    summary = run.summary()
    assert summary["ttft_p50_s"] == 3.75
    assert summary["itl_p99_s"] == pytest.approx(1.98)
    assert summary["output_tokens_per_s"] == 5 / 7
    assert summary["prompt_tokens_per_s"] == 24 / 7


def test_idle_time_passes_until_the_next_arrival() -> None:
    run = Simulator(scheduler(), PLAIN).run([request("a", 8, 1, 10.0), request("b", 8, 1, 100.0)])
    assert [step.start_s for step in run.steps] == [10.0, 100.0]
    assert (run.start_s, run.end_s, run.busy_s) == (10.0, 102.0, 4.0)


def test_no_request_is_no_step() -> None:
    run = Simulator(scheduler(), PLAIN).run([])
    assert (run.num_steps, run.duration_s, run.hit_rate) == (0, 0.0, 0.0)
    assert run.summary()["ttft_p99_s"] == 0.0


def test_the_host_counts_only_where_nothing_hides_it() -> None:
    trace = [request("a", 8, 6)]
    free = Simulator(scheduler(), PLAIN).run(trace)
    slow = Simulator(scheduler(), PLAIN, host_s=0.5).run(trace)
    hidden = Simulator(scheduler(async_depth=1), PLAIN, host_s=0.5, async_depth=1).run(trace)
    assert slow.duration_s == free.duration_s + 0.5 * 6
    assert hidden.duration_s == free.duration_s
    assert hidden.requests[0].output_tokens == 6


def test_equal_seeds_give_equal_runs() -> None:
    trace = list(to_requests(generate_chat_trace(30, seed=1, mean_input_tokens=800)))

    def run(**options: Any) -> dict[str, Any]:
        return Simulator(scheduler(), REAL, **options).run(trace).summary()

    assert run() == run(seed=5)
    assert run(noise=0.1) == run(noise=0.1)
    assert run(noise=0.1) != run(noise=0.1, seed=1)
    assert run(noise=0.1)["finished"] == 30


def test_prefixes_of_a_trace_are_hit() -> None:
    records = generate_chat_trace(60, seed=2, mean_input_tokens=2000)
    run = Simulator(scheduler(num_blocks=20_000), REAL).run(to_requests(records))
    assert run.summary()["finished"] == 60
    # In tokens, and without the blocks that are still being run when the next request comes.
    assert 0.7 < run.hit_rate / summarize_trace(records).reusable_share < 1.05
    cold = Simulator(scheduler(num_blocks=20_000, prefix_cache=False), REAL).run(
        to_requests(records)
    )
    assert cold.hit_rate == 0.0
    assert cold.prefill_tokens == sum(record.input_tokens for record in records)
    assert run.prefill_tokens < 0.8 * cold.prefill_tokens


def test_a_cache_that_is_too_small_preempts_and_all_requests_end() -> None:
    trace = [request(name, 200, 400) for name in "abcdefgh"]
    tight = scheduler(num_blocks=40, max_num_seqs=8)
    run = Simulator(tight, REAL).run(trace)
    assert run.preemptions > 0
    assert [timing.output_tokens for timing in run.requests] == [400] * 8
    assert sum(len(step.plan.preempted) for step in run.steps) == run.preemptions
    tight.check()


def test_requests_that_cannot_run_are_counted() -> None:
    run = Simulator(scheduler(max_model_len=100), PLAIN).run(
        [request("a", 200, 1), request("b", 8, 1)]
    )
    assert run.rejected == ("a",)
    assert [timing.rid for timing in run.requests] == ["b"]


def test_time_can_be_bounded() -> None:
    run = Simulator(scheduler(), PLAIN).run([request("a", 8, 100)], max_time_s=10.0)
    assert run.end_s == 10.0
    assert run.requests[0].finish_s is None
    assert 0 < run.requests[0].output_tokens < 100


def test_accepted_drafts_come_together() -> None:
    trace = [request("a", 8, 60)]

    def run(acceptance: float) -> Any:
        limits = {"draft_length": 3, "prefill_chunk_tokens": 8}
        return Simulator(scheduler(**limits), PLAIN, acceptance=acceptance).run(trace)

    assert run(0.0).num_steps == 60
    assert run(1.0).num_steps == pytest.approx(16, abs=2)
    assert run(0.0).num_steps > run(0.5).num_steps > run(1.0).num_steps
    gaps = run(1.0).inter_token_s
    assert len(gaps) == 59
    assert (gaps == 0.0).sum() >= 40


def test_steps_need_not_be_kept() -> None:
    run = Simulator(scheduler(), PLAIN, keep_steps=False).run([request("a", 8, 5)])
    assert run.steps == ()
    assert run.num_steps == 5


def test_chunks_by_time_keep_steps_within_the_target() -> None:
    records = generate_chat_trace(60, seed=4, rate_per_s=4.0, mean_input_tokens=3000)
    target_s = 0.05

    def run(chunks: Any, **limits: Any) -> Any:
        return Simulator(scheduler(chunks=chunks, num_blocks=20_000, **limits), REAL).run(
            to_requests(records)
        )

    timed = run(TimedChunks(REAL, target_s), prefill_chunk_tokens=32_768)
    fixed = run(None, prefill_chunk_tokens=8192)
    assert timed.longest_step_s <= 1.06 * target_s
    assert np.percentile(timed.inter_token_s, 99) <= 1.06 * target_s
    assert fixed.longest_step_s > 3 * target_s
    assert timed.summary()["finished"] == 60
    # It costs some throughput of prompts: more steps, each with its fixed cost.
    assert timed.busy_s < 1.2 * fixed.busy_s


def test_a_model_that_learns_on_the_way_finds_the_target() -> None:
    records = generate_chat_trace(80, seed=5, rate_per_s=3.0, mean_input_tokens=3000)
    model = StepTimeModel(StepCoefficients(), refit_every=32)
    policy = TimedChunks(model, 0.05, first_tokens=2048)
    run = Simulator(
        scheduler(chunks=policy, num_blocks=20_000, prefill_chunk_tokens=32_768),
        REAL,
        noise=0.02,
    ).run(to_requests(records))
    assert model.version > 3
    late = [
        (StepWork.of_plan(step.plan), step.end_s - step.start_s)
        for step in run.steps[len(run.steps) // 2 :]
    ]
    errors = [abs(model.seconds(work) / seconds - 1) for work, seconds in late]
    assert float(np.mean(errors)) < 0.05
    assert float(np.mean([seconds < 0.055 for _, seconds in late])) > 0.97


def test_unordered_arrivals_are_refused() -> None:
    with pytest.raises(ConfigError, match="arrival_s"):
        Simulator(scheduler(), PLAIN).run([request("a", 8, 1, 5.0), request("b", 8, 1, 4.0)])


class Stuck:
    """A scheduler that has work and plans none."""

    has_unfinished = True

    def add(self, request: Request) -> None:
        pass

    def plan(self, now: float) -> None:
        return None


def test_a_scheduler_that_is_stuck_is_found_out() -> None:
    with pytest.raises(InvariantBroken, match="plans nothing"):
        Simulator(Stuck(), PLAIN).run([request("a", 8, 1)])  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"async_depth": 2}, {"noise": -1.0}, {"acceptance": 1.5}])
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Simulator(scheduler(), PLAIN, **options)


def test_columns_and_rows_of_a_plan_add_up_alike() -> None:
    roles = list(RowRole)
    rows = tuple(
        PlanRow(
            rid=str(i),
            slot=i,
            first_position=7 * i,
            num_tokens=4,
            num_drafts=3 if roles[i % 5] is RowRole.VERIFY else 0,
            role=roles[i % 5],
        )
        for i in range(10)
    )
    work = StepWork.of_plan(StepPlan(step=0, rows=rows))
    chunks = [
        (r.first_position, 4, r.role is RowRole.LAST_PREFILL) for r in rows if r.role in roles[:3]
    ]
    decode = [r.first_position for r in rows if r.role in roles[3:]]
    assert work == StepWork.of(chunks, decode, num_drafts=6)  # type: ignore[arg-type]
    assert StepWork.of_plan(StepPlan(step=0, rows=rows[3:5])).max_prefix == -1
