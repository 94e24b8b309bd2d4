"""The fleet simulator beside a plain loop over steps, written without its parts."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.balancers.prefill import PrefillCost, PrefixIndex, RoundRobin
from deepinfer.balancers.simulator import (
    DecodeConfig,
    FleetSimulator,
    PrefillConfig,
    TransferConfig,
)
from deepinfer.balancers.traffic import TraceRecord

BLOCK = 4
STEP, TOKEN, PAIR = 0.1, 1e-3, 1e-6


def play_prompts(
    records: list[TraceRecord], chunk: int, room: int
) -> tuple[list[float], list[int], float]:
    """First tokens, hits and busy seconds of one engine of one rank."""
    first, hits, busy, now = [0.0] * len(records), [-1] * len(records), 0.0, 0.0
    done = [0] * len(records)
    cache: list[int] = []  # oldest first
    open_jobs = list(range(len(records)))
    while open_jobs:
        here = [i for i in open_jobs if records[i].arrival_s <= now]
        if not here:
            now = records[open_jobs[0]].arrival_s
            continue
        left, seconds, ran = chunk, STEP, []
        for i in here:
            if not left:
                break
            record = records[i]
            if done[i] <= max(hits[i], 0):
                found = 0
                while found < record.input_tokens // BLOCK and record.block_ids[found] in cache:
                    found += 1
                hits[i] = done[i] = min(found * BLOCK, record.input_tokens - 1)
            tokens = min(left, record.input_tokens - done[i])
            seconds += TOKEN * tokens + PAIR * (2 * done[i] * tokens + tokens**2)
            left -= tokens
            ran.append((i, tokens))
        now += seconds
        busy += seconds
        for i, tokens in ran:
            done[i] += tokens
            for key in reversed(records[i].block_ids[: done[i] // BLOCK][:room]):
                if key in cache:
                    cache.remove(key)
                cache.append(key)
            del cache[: max(0, len(cache) - room)]
            if done[i] == records[i].input_tokens:
                first[i] = now
                open_jobs.remove(i)
    return first, hits, busy


def play_decode(
    records: list[TraceRecord], first: list[float], ranks: int, delay: float
) -> tuple[list[float], float]:
    """Last tokens and busy seconds of one decode engine, ranks in turn."""
    finish, busy, now = list(first), 0.0, 0.0
    coming = sorted((t + delay, i) for i, t in enumerate(first) if records[i].output_tokens > 1)
    running: list[list[int]] = []  # index, rank, tokens held, tokens left
    number = 0
    while coming or running:
        while coming and coming[0][0] <= now:
            i = coming.pop(0)[1]
            record = records[i]
            running.append([i, number % ranks, record.input_tokens + 1, record.output_tokens - 1])
            number += 1
        if not running:
            now = coming[0][0]
            continue
        of_rank = [[job for job in running if job[1] == rank] for rank in range(ranks)]
        seconds = max(0.5 + 0.1 * len(jobs) + 1e-3 * sum(j[2] for j in jobs) for jobs in of_rank)
        now += seconds
        busy += seconds
        for job in running:
            job[2] += 1
            job[3] -= 1
            if not job[3]:
                finish[job[0]] = now
        running = [job for job in running if job[3]]
    return finish, busy


@pytest.mark.parametrize("seed", range(12))
def test_equals_a_plain_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    engines, chunk, room = int(rng.integers(1, 4)), int(rng.integers(3, 60)), int(rng.integers(12))
    times = np.cumsum(rng.exponential(0.05, 40))
    records = []
    for number, time_s in enumerate(times.tolist()):
        shared = int(rng.integers(0, 4))
        tokens = int(rng.integers(1, 30)) + BLOCK * shared
        ids = [*range(shared), *range(100 * number + 50, 100 * number + 100)][: tokens // BLOCK]
        records.append(
            TraceRecord(time_s, tokens, int(rng.integers(1, 6)), tuple(ids), BLOCK if ids else 0)
        )
    index = PrefixIndex()
    simulator = FleetSimulator(
        PrefillConfig(
            num_engines=engines,
            cost=PrefillCost(token_s=TOKEN, pair_s=PAIR, step_s=STEP),
            chunk_tokens=chunk,
            chunk_multiple=1,
            cache_blocks=room,
            block_tokens=BLOCK,
        ),
        RoundRobin(),
        index=index,
        decode=DecodeConfig(num_ranks=3, step_s=0.5, request_s=0.1, kv_token_s=1e-3),
        decode_router=RoundRobin(),
        transfer=TransferConfig(token_bytes=0, fixed_bytes=0, latency_s=0.25),
    )
    report = simulator.run(records)
    first, hits, busy = [0.0] * 40, [0] * 40, []
    for engine in range(engines):
        mine = list(range(engine, 40, engines))
        got = play_prompts([records[i] for i in mine], chunk, room)
        for i, begin, hit in zip(mine, got[0], got[1], strict=True):
            first[i], hits[i] = begin, hit
        busy.append(got[2])
    finish, decode_busy = play_decode(records, first, 3, 0.25)
    assert report.hit_tokens.tolist() == hits
    np.testing.assert_allclose(report.arrival_s + report.ttft_s, first, rtol=1e-12)
    np.testing.assert_allclose(report.prefill_busy_s, busy, rtol=1e-12)
    np.testing.assert_allclose(report.finish_s, finish, rtol=1e-12)
    assert report.decode_busy_s.sum() == pytest.approx(decode_busy)
    assert len(index) <= room * engines, "the index claims what the caches hold"
    index.check()
