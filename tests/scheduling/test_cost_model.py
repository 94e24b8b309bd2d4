"""The cost of steps: predictions, the largest chunk, fits to noisy samples, and refits while running."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from deepinfer.core import PlanRow, RowRole, StepPlan
from deepinfer.core.errors import ConfigError
from deepinfer.scheduling import (
    Chunk,
    FitRejection,
    StepCoefficients,
    StepSample,
    StepTimeModel,
    StepWork,
    fit_step_cost,
)

# 3 ms a step, and per token 20 ps, 1.2 µs, and 1.5 fs a pair.
TRUE = StepCoefficients(step_s=3e-3, prefix_token_s=2e-8, token_s=1.2e-6, pair_s=1.5e-12)
FULL = dataclasses.replace(
    TRUE,
    ended_prompt_s=2e-3,
    decode_row_s=5e-5,
    decode_context_token_s=1e-9,
    ended_prefix_token_s=3e-8,
    mixed_step_s=2e-3,
)
FITTED = ("step_s", "prefix_token_s", "token_s", "pair_s")


def prefill_samples(
    count: int, noise: float, seed: int, coefficients: StepCoefficients = TRUE
) -> list[StepSample]:
    """Single chunks of all sizes behind prefixes up to a million tokens."""
    draw = random.Random(seed)
    model = StepTimeModel(coefficients)
    samples = []
    for _ in range(count):
        prefix = draw.choice((0, round(2 ** draw.uniform(10, 20)), draw.randrange(2**20)))
        tokens = draw.choice((round(2 ** draw.uniform(6, 15)), draw.randrange(1, 2**15)))
        work = StepWork.of([(prefix, tokens)])
        samples.append(StepSample(work, model.seconds(work) * draw.gauss(1.0, noise)))
    return samples


def mixed_samples(count: int, noise: float, seed: int) -> list[StepSample]:
    draw = random.Random(seed)
    model = StepTimeModel(FULL)
    samples = []
    for _ in range(count):
        chunks = [
            Chunk(
                draw.choice((0, draw.randrange(2**18))),
                draw.randrange(1, 4000),
                draw.random() < 0.5,
            )
            for _ in range(draw.randrange(3))
        ]
        decode = [draw.randrange(100_000) for _ in range(draw.randrange(0 if chunks else 1, 64))]
        work = StepWork.of(chunks, decode)
        samples.append(StepSample(work, model.seconds(work) * draw.gauss(1.0, noise)))
    return samples


def test_formula() -> None:
    model = StepTimeModel(
        StepCoefficients(
            step_s=1.0,
            prefix_token_s=0.5,
            token_s=0.25,
            pair_s=0.125,
            ended_prompt_s=8.0,
            decode_row_s=16.0,
            decode_context_token_s=0.0625,
            ended_prefix_token_s=32.0,
            mixed_step_s=128.0,
        )
    )
    assert model.predict([]) == 1.0
    assert model.predict([(4, 2)]) == 1.0 + 2.0 + 0.5 + 0.125 * (16 + 4)
    assert model.predict([Chunk(0, 2, True), (4, 2)]) == model.predict([(4, 2)]) + 0.5 + 0.5 + 8.0
    assert model.predict([], [16, 32]) == 1.0 + 2 * 16.0 + 3.0
    assert model.predict([], [16, 32], num_drafts=4) == 1.0 + 2 * 16.0 + 3.0 + 1.0
    assert model.predict([(99, 0)]) == 1.0
    assert model.predict([Chunk(4, 2, True)]) == model.predict([(4, 2)]) + 8.0 + 4 * 32.0
    assert model.predict([(4, 2)], [16]) == model.predict([(4, 2)]) + 16.0 + 1.0 + 128.0


def test_work_of_a_plan() -> None:
    def row(role: RowRole, first: int, count: int, drafts: int = 0) -> PlanRow:
        return PlanRow(
            rid="a", slot=0, first_position=first, num_tokens=count, num_drafts=drafts, role=role
        )

    plan = StepPlan(
        step=0,
        rows=(
            row(RowRole.REPLAY, 100, 28),
            row(RowRole.LAST_PREFILL, 128, 10),
            row(RowRole.PREFILL, 0, 7),
            row(RowRole.DECODE, 50, 1),
            row(RowRole.VERIFY, 60, 4, 3),
        ),
    )
    expected = StepWork.of([(100, 28), Chunk(128, 10, True), (0, 7)], [50, 60], num_drafts=3)
    assert StepWork.of_plan(plan) == expected
    assert expected == StepWork(228, 48, 28 * 228 + 10 * 266 + 49, 1, 2, 110, 128, 128)


def test_largest_chunk_behind_long_prefixes() -> None:
    model = StepTimeModel(TRUE)
    target = model.predict([(0, 32_768)])
    prefixes = (0, 64 * 1024, 256 * 1024, 1024 * 1024)
    found = [model.largest(prefix, target, 32_768) for prefix in prefixes]
    assert found == [32_768, 27_554, 17_729, 4_585]
    blind = StepTimeModel(dataclasses.replace(TRUE, prefix_token_s=0.0))
    found = [blind.largest(prefix, target, 32_768) for prefix in prefixes]
    assert found == [32_768, 28_439, 20_294, 9_388]


small = st.floats(0.0, 1e-3)


@settings(max_examples=200, deadline=None)
@given(
    coefficients=st.builds(
        StepCoefficients,
        step_s=st.floats(0.0, 0.1),
        prefix_token_s=st.sampled_from([0.0, 1e-9, 2e-8]),
        token_s=st.sampled_from([0.0, 1e-15, 1e-9, 1.2e-6]) | small,
        pair_s=st.sampled_from([0.0, 1e-20, 1.5e-12]) | st.floats(0.0, 1e-9),
        decode_row_s=small,
    ),
    prefix=st.integers(0, 2**21),
    seconds=st.floats(0.0, 10.0),
    cap=st.integers(0, 40_000),
    others=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 4000)), max_size=2),
    decode=st.lists(st.integers(0, 10_000), max_size=3),
)
def test_largest_is_the_largest(
    coefficients: StepCoefficients,
    prefix: int,
    seconds: float,
    cap: int,
    others: list[tuple[int, int]],
    decode: list[int],
) -> None:
    model = StepTimeModel(coefficients)
    found = model.largest(prefix, seconds, cap, others, decode)
    assert 0 <= found <= cap
    if found:
        assert model.predict([*others, (prefix, found)], decode) <= seconds
    if found < cap:
        assert model.predict([*others, (prefix, found + 1)], decode) > seconds


@pytest.mark.parametrize("prefix", [0, 12_345, 1_000_000])
def test_a_time_that_fits_exactly_is_used(prefix: int) -> None:
    model = StepTimeModel(TRUE)
    for tokens in (*range(1, 400), *range(20_000, 20_400)):
        seconds = model.predict([(prefix, tokens)])
        assert model.largest(prefix, seconds, 32_768) == tokens
        assert model.largest(prefix, seconds, tokens + 1) == tokens


def test_no_time_means_no_chunk() -> None:
    model = StepTimeModel(TRUE)
    assert model.largest(0, 3e-3, 100) == 0
    assert model.largest(0, float("nan"), 100) == 0
    assert model.largest(0, 1.0, 0) == 0
    assert model.largest(0, float("inf"), 100) == 100


@pytest.mark.parametrize("seed", range(4))
def test_noisy_samples_give_the_coefficients_back(seed: int) -> None:
    fitted = StepTimeModel.fit(prefill_samples(400, 0.02, seed)).coefficients
    for name in FITTED:
        assert getattr(fitted, name) == pytest.approx(getattr(TRUE, name), rel=0.01), name


def test_a_warm_up_sample_and_other_wild_ones_do_not_matter() -> None:
    samples = prefill_samples(400, 0.02, 1)
    for index in range(0, 60):
        samples[index] = dataclasses.replace(samples[index], seconds=samples[index].seconds * 33)
    samples[0] = dataclasses.replace(samples[0], seconds=7.234)
    model = StepTimeModel.fit(samples)
    for name in FITTED:
        wanted = pytest.approx(getattr(TRUE, name), rel=0.02)
        assert getattr(model.coefficients, name) == wanted, name
    assert model.report is not None
    assert 60 <= model.report.num_outliers <= 66


def test_all_terms_are_told_apart_in_mixed_steps() -> None:
    model = StepTimeModel.fit(mixed_samples(600, 0.01, 0))
    for name, value in dataclasses.asdict(FULL).items():
        assert getattr(model.coefficients, name) == pytest.approx(value, rel=0.05), name
    assert model.report is not None
    assert model.report.undetermined == ()
    named = [bucket.bucket for bucket in model.report.buckets]
    assert named == ["no chunks", "0", "1-16383", "16384-65535", "65536-262143"]
    assert sum(bucket.num_samples for bucket in model.report.buckets) >= 595
    assert all(bucket.mean_error < 0.02 for bucket in model.report.buckets)
    assert all(abs(bucket.mean_bias) < 0.005 for bucket in model.report.buckets)


def test_exact_samples_fit_exactly_and_no_term_turns_negative() -> None:
    exact = StepTimeModel.fit(prefill_samples(100, 0.0, 0)).coefficients
    for name in FITTED:
        assert getattr(exact, name) == pytest.approx(getattr(TRUE, name), rel=1e-6), name
    # Without any cost of a step, noise would push c below 0.
    flat = dataclasses.replace(TRUE, step_s=0.0, prefix_token_s=0.0)
    for seed in range(30):
        fitted = fit_step_cost(prefill_samples(24, 0.05, seed, flat)).coefficients
        assert fitted is not None
        assert min(dataclasses.asdict(fitted).values()) >= 0.0


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        (prefill_samples(15, 0.0, 0), FitRejection.TOO_FEW_SAMPLES),
        (prefill_samples(200, 0.25, 0), FitRejection.LARGE_RESIDUAL),
        (
            [
                dataclasses.replace(s, seconds=s.seconds * (1 + (i % 3 == 0)))
                for i, s in enumerate(prefill_samples(200, 0.001, 0))
            ],
            FitRejection.TOO_MANY_OUTLIERS,
        ),
        (
            [StepSample(s.work, 0.01) for s in prefill_samples(50, 0.0, 0)],
            FitRejection.NO_COST_PER_TOKEN,
        ),
    ],
)
def test_bad_fits_are_rejected_and_the_model_stays(
    samples: list[StepSample], reason: FitRejection
) -> None:
    report = fit_step_cost(samples)
    assert (report.rejection, report.is_accepted) == (reason, False)
    assert report.num_samples == len(samples)
    model = StepTimeModel(TRUE, version=3)
    assert model.refit(samples).rejection is reason
    assert model.report == report
    assert (model.coefficients, model.version) == (TRUE, 3)
    with pytest.raises(ConfigError, match=str(reason)) as caught:
        StepTimeModel.fit(samples)
    assert caught.value.value == report


def test_refits_follow_a_device_that_slows_down() -> None:
    model = StepTimeModel(TRUE, window=64, refit_every=32)
    slow = dataclasses.replace(TRUE, token_s=2.4e-6)
    samples = prefill_samples(400, 0.02, 5, slow)
    for sample in samples[:31]:
        model.observe_work(*dataclasses.astuple(sample))
    assert model.version == 0
    for sample in samples[31:]:
        model.observe_work(sample.work, sample.seconds)
    assert model.version >= 8
    assert model.coefficients.token_s == pytest.approx(2.4e-6, rel=0.05)
    assert model.num_samples <= 6 * 64


def test_long_prefixes_are_not_forgotten_over_a_day_of_short_prompts() -> None:
    model = StepTimeModel(StepCoefficients(), window=64, refit_every=100)
    for sample in prefill_samples(300, 0.02, 2):
        model.observe_work(sample.work, sample.seconds)
    draw = random.Random(0)
    truth = StepTimeModel(FULL)
    for _ in range(3000):
        tokens, decode = draw.randrange(1, 2000), [draw.randrange(5000)] * 8
        model.observe([(0, tokens)], truth.predict([(0, tokens)], decode), decode)
    k = model.coefficients
    assert k.prefix_token_s == pytest.approx(TRUE.prefix_token_s, rel=0.05)
    assert k.decode_row_s > 0.0
    assert model.num_samples > 3 * 64


def test_what_new_samples_do_not_speak_of_stays() -> None:
    model = StepTimeModel(FULL, refit_every=0)
    for sample in prefill_samples(100, 0.02, 0):
        model.observe_work(sample.work, sample.seconds)
    report = model.refit()
    assert report.is_accepted
    assert report.undetermined == (
        "ended_prompt_s",
        "decode_row_s",
        "decode_context_token_s",
        "ended_prefix_token_s",
        "mixed_step_s",
    )
    assert model.coefficients.decode_row_s == FULL.decode_row_s
    assert model.coefficients.decode_context_token_s == FULL.decode_context_token_s


def test_chunks_of_one_size_do_not_throw_the_model_off() -> None:
    # Behind prefixes, g L and 2 a L x cannot be told apart when every chunk has the same x.
    model = StepTimeModel(TRUE, refit_every=0)
    truth = StepTimeModel(TRUE)
    draw = random.Random(0)
    for _ in range(200):
        chunk = (draw.randrange(2**18), 4096)
        model.observe([chunk], truth.predict([chunk]) * draw.gauss(1, 0.02))
    model.refit()
    for tokens in (512, 4096, 32_768):
        chunk = (2**17, tokens)
        assert model.predict([chunk]) == pytest.approx(truth.predict([chunk]), rel=0.1)


def test_fits_are_deterministic() -> None:
    samples = mixed_samples(300, 0.02, 4)
    assert fit_step_cost(samples) == fit_step_cost(list(samples))


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_durations_are_refused(seconds: float) -> None:
    model = StepTimeModel(TRUE)
    with pytest.raises(ConfigError, match="seconds"):
        model.observe([(0, 1)], seconds)
    assert model.num_samples == 0


def test_negative_coefficients_are_refused() -> None:
    with pytest.raises(ConfigError, match="token_s"):
        StepTimeModel(StepCoefficients(token_s=-1e-9))


def test_saved_models_come_back_for_what_they_were_made(tmp_path: Path) -> None:
    model = StepTimeModel(FULL, fingerprint="model-a on a test device", version=7)
    path = tmp_path / "cost.json"
    model.save(path)
    back = StepTimeModel.load(path, fingerprint="model-a on a test device", refit_every=5)
    assert back.to_dict() == model.to_dict()
    assert (back.coefficients, back.version, back.refit_every) == (FULL, 7, 5)
    assert StepTimeModel.load(path).coefficients == FULL
    with pytest.raises(ConfigError, match="fingerprint"):
        StepTimeModel.load(path, fingerprint="model-b")
    for values in ({}, {**model.to_dict(), "format": "x"}, {**model.to_dict(), "token": 1}, [1]):
        path.write_text(json.dumps(values))
        with pytest.raises(ConfigError):
            StepTimeModel.load(path)
    unknown = {**model.to_dict(), "coefficients": {"token_seconds": 1.0}}
    with pytest.raises(ConfigError, match="did you mean"):
        StepTimeModel.from_dict(unknown)
    path.write_text("{")
    with pytest.raises(ConfigError, match="no JSON"):
        StepTimeModel.load(path)
