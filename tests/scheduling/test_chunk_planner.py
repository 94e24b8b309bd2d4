"""Chunks by time: how long they are, what happens to tails, and that prompts always get on."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from deepinfer.core.errors import ConfigError
from deepinfer.scheduling import StepCoefficients, StepTimeModel, StepWork, TimedChunks, shape_chunk

# 1 ms a step, 10 µs a token, 0.1 ms a decoding row, 2 ms for the end of a prompt.
MODEL = StepTimeModel(
    StepCoefficients(
        step_s=1e-3,
        prefix_token_s=1e-8,
        token_s=1e-5,
        pair_s=1e-11,
        ended_prompt_s=2e-3,
        decode_row_s=1e-4,
    )
)
EMPTY = StepWork()


def timed(target_s: float = 0.051, **options: object) -> TimedChunks:
    return TimedChunks(MODEL, target_s, **{"min_tokens": 100, **options})  # type: ignore[arg-type]


def test_a_chunk_fills_the_time_that_decoding_leaves() -> None:
    policy = timed()
    alone = policy.chunk(0, 100_000, 32_768, EMPTY)
    beside = policy.chunk(0, 100_000, 32_768, StepWork.of([], [500] * 100))
    assert MODEL.predict([(0, alone)]) <= 0.051 < MODEL.predict([(0, alone + 1)])
    assert MODEL.predict([(0, beside)], [500] * 100) <= 0.051
    assert alone - beside == pytest.approx(1000, rel=0.05)
    assert policy.chunk(50_000, 50_000, 32_768, EMPTY) < alone


def test_the_limits_of_tokens_hold() -> None:
    assert timed(10.0).chunk(0, 100_000, 50_000, EMPTY) == 32_768
    assert timed(10.0).chunk(0, 100_000, 700, EMPTY) == 700
    assert timed(10.0, max_tokens=500).chunk(0, 100_000, 32_768, EMPTY) == 500


def test_steps_without_decoding_rows_may_be_longer() -> None:
    policy = timed(0.011, idle_target_s=0.051)
    assert policy.chunk(0, 100_000, 32_768, EMPTY) > 4000
    assert policy.chunk(0, 100_000, 32_768, StepWork.of([], [0])) < 1000


def test_decoding_that_takes_all_the_time_does_not_stop_prompts() -> None:
    policy = timed(0.01)
    busy = StepWork.of([], [500] * 200)
    assert MODEL.seconds(busy) > 0.01
    assert policy.chunk(0, 5000, 32_768, busy) == 100
    assert policy.chunk(0, 5000, 60, busy) == 60
    # One prompt gets on; the next one waits.
    assert policy.chunk(0, 5000, 32_768, busy.plus(0, 100)) == 0


def test_a_second_prompt_gets_what_is_left_if_it_is_worth_a_row() -> None:
    policy = timed()
    assert policy.chunk(0, 9000, 32_768, EMPTY.plus(0, 2000)) > 2000
    assert policy.chunk(0, 9000, 32_768, EMPTY.plus(0, 4900)) == 0
    assert policy.chunk(0, 20, 32_768, EMPTY.plus(0, 4000)) == 20


def test_the_end_of_a_prompt_must_fit_with_what_it_costs() -> None:
    policy = timed(slack=0.0)
    fits = policy.chunk(0, 100_000, 32_768, EMPTY)
    assert policy.chunk(0, fits - 400, 32_768, EMPTY) == fits - 400
    # The prompt would fit, and the 2 ms of its end would not.
    assert policy.chunk(0, fits - 50, 32_768, EMPTY) == -(-(fits - 50) // 2)


def test_short_tails_are_taken_along_or_split_evenly() -> None:
    policy = timed(window=128, min_tokens=200)
    fits = policy.chunk(0, 100_000, 32_768, EMPTY)
    # A tail of 192 tokens that exceeds the target by less than 5 % ...
    generous = timed(window=128, min_tokens=200, slack=0.1)
    assert generous.chunk(0, fits + 192, 32_768, EMPTY) == fits + 192
    # ... and one that exceeds it by more.
    strict = timed(window=128, min_tokens=200, slack=0.01)
    assert strict.chunk(0, fits + 192, 32_768, EMPTY) == -(-(fits + 192) // 2)
    # Where the step has no room for it, there is no choice.
    assert generous.chunk(0, fits + 192, fits, EMPTY) == -(-(fits + 192) // 2)
    # A longer tail is a chunk of its own.
    assert strict.chunk(0, fits + 200, 32_768, EMPTY) == fits


def test_the_last_chunk_holds_the_window_when_little_is_left() -> None:
    policy = timed(0.0012, window=128, min_tokens=16)
    assert policy.chunk(0, 200, 150, EMPTY) == 19
    assert policy.chunk(0, 140, 130, EMPTY) == 12
    assert policy.chunk(0, 140, 140, EMPTY) == 140
    assert policy.chunk(0, 120, 100, EMPTY) <= 100


def test_chunks_end_on_the_grain_where_that_costs_little() -> None:
    policy = timed(grain=128)
    chunk = policy.chunk(37, 100_000, 32_768, EMPTY)
    free = timed().chunk(37, 100_000, 32_768, EMPTY)
    assert (37 + chunk) % 128 == 0
    assert 0 <= free - chunk < 128
    assert timed(0.003, grain=128).chunk(0, 100_000, 32_768, EMPTY) == 199  # 128 would lose a third
    assert policy.chunk(37, 301, 32_768, EMPTY) == 301  # the end of a prompt is where it is


def test_before_a_fit_the_chunks_of_a_step_have_a_fixed_length() -> None:
    policy = TimedChunks(StepTimeModel(StepCoefficients(), refit_every=0), 0.05, first_tokens=300)
    assert policy.chunk(0, 1000, 32_768, EMPTY) == 300
    assert policy.chunk(0, 250, 32_768, EMPTY) == 250
    assert policy.chunk(0, 1000, 32_768, EMPTY.plus(0, 20)) == 280
    assert policy.chunk(0, 1000, 32_768, EMPTY.plus(0, 250)) == 0
    assert policy.predict(EMPTY) is None
    policy.observe(EMPTY.plus(0, 10), 0.0)
    policy.observe(EMPTY.plus(0, 10), 0.1)
    assert policy.model.num_samples == 1  # type: ignore[attr-defined]


def test_it_predicts_what_the_model_says() -> None:
    work = StepWork.of([(0, 100)], [5])
    assert timed().predict(work) == MODEL.seconds(work)


@pytest.mark.parametrize(
    "options",
    [
        {"target_s": 0.0},
        {"idle_target_s": -1.0},
        {"min_tokens": 0},
        {"max_tokens": 10},
        {"slack": 2.0},
    ],
)
def test_bad_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        timed(**options)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 40_000),
    target_s=st.floats(0.0005, 0.2),
    window=st.sampled_from([0, 128]),
    min_tokens=st.integers(1, 512),
    grain=st.sampled_from([1, 64]),
    cap=st.integers(1, 40_000),
    decode_rows=st.integers(0, 300),
)
def test_any_prompt_is_run_in_full(
    length: int,
    target_s: float,
    window: int,
    min_tokens: int,
    grain: int,
    cap: int,
    decode_rows: int,
) -> None:
    policy = TimedChunks(MODEL, target_s, window=window, min_tokens=min_tokens, grain=grain)
    work = StepWork.of([], [1000] * decode_rows)
    done, chunks = 0, []
    while done < length:
        chunk = policy.chunk(done, length - done, cap, work)
        assert 1 <= chunk <= min(cap, 32_768, length - done)
        # What the scheduler does to it changes little: tails are right already.
        shaped = shape_chunk(chunk, done, length - done, cap, window=window, grain=1)
        assert shaped == chunk or cap < 2 * window or length - done < 2 * window
        done += chunk
        chunks.append(chunk)
    if len(chunks) > 1 and cap >= 2 * window:
        assert chunks[-1] >= window
