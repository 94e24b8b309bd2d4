"""How much of the drafts is verified: the `verify` part, and step times that it is decided by."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from deepinfer import Engine, SamplingParams
from deepinfer.core.errors import ConfigError
from deepinfer.core.protocols import DraftBatch, DraftView
from deepinfer.engine.verification import verify_policy
from deepinfer.speculative import (
    LiveLengths,
    ModelDrafter,
    NgramDrafter,
    OnlineTemperatureScaling,
    ScheduledLengths,
    StepCostModel,
    TargetOutput,
    VerificationScheduler,
    speculative_generate,
)
from deepinfer.testing import ToyModel, ToyTokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
DEAR = StepCostModel([1, 2, 40], [1.0, 2.0, 40.0])  # so long that planning takes no time
FREE = StepCostModel([1, 40], [1.0, 1.0001])


class Always:
    def __init__(self, length: int) -> None:
        self.length = length

    def choose(self, confidences: Sequence[Sequence[float]], num_running: int) -> list[int]:
        return [self.length] * len(confidences)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_policy_decides(make_engine, drafting_model, depth: int) -> None:
    verified = []
    for verify in (None, "all", Always(2), Always(0)):
        engine = make_engine(
            drafting_model, drafter="dspark", verify=verify, config={"async_depth": depth}
        )
        output = engine.generate([5, 6], GREEDY)[0]
        assert list(output.token_ids) == ToyModel().greedy([5, 6], 30)
        verified.append(output.usage.verified)
    assert verified[0] == verified[1] > verified[2] > verified[3]


def test_costs_decide(make_engine, drafting_model) -> None:
    """The toy is sure by half of each draft: where rows are dear none pays, where they are free all do."""
    found = {}
    for name, cost in (("dear", DEAR), ("free", FREE)):
        engine = make_engine(
            drafting_model, drafter="dspark", verify=LiveLengths(VerificationScheduler(cost))
        )
        output = engine.generate([5, 6], GREEDY)[0]
        assert list(output.token_ids) == ToyModel().greedy([5, 6], 30)
        found[name] = output.usage.verified / engine.stats().steps
    assert found["dear"] < 1.5 < 3.5 < found["free"]


def test_steps_are_timed(make_engine, drafting_model) -> None:
    engine = make_engine(drafting_model, drafter="dspark", config={"max_num_batched_tokens": 32})
    engine.generate([5, 6, 7], GREEDY)
    before = engine.stats()
    cost = engine.profile_steps(repeats=1)
    after = engine.stats()
    assert (after.steps, after.requests_added) == (before.steps, before.requests_added)
    assert not engine.has_unfinished
    engine.check()
    assert cost.tokens == (3, 6, 9, 12, 18)  # 1 to 3 requests of 3 and 6 rows
    assert sorted(cost.draft) == [1, 2, 3]
    assert sorted(cost.plain) == [1, 3], "every other number, and the most"
    assert min(cost.plain.values()) > 0
    assert len(cost.fingerprint) == 16
    output = engine.generate([5, 6, 7], GREEDY)[0]
    assert list(output.token_ids) == ToyModel().greedy([5, 6, 7], 30)
    assert output.usage.verified > 50  # the schedule of the profile is gone


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("drafter", [None, NgramDrafter(2)])
def test_steps_are_timed_whatever_drafts(make_engine, depth: int, drafter: object) -> None:
    engine = make_engine(drafter=drafter, config={"async_depth": depth})
    cost = engine.profile_steps(context_tokens=4, max_requests=2, repeats=1)
    assert {1, 2} <= set(cost.tokens)
    assert not engine.has_unfinished


def test_costs_are_kept_and_hold_for_one_engine(make_engine, drafting_model, tmp_path) -> None:
    engine = make_engine(drafting_model, drafter="dspark")
    cost = engine.profile_steps(context_tokens=2, max_requests=1, repeats=1)
    cost.save(tmp_path / "cost.json")
    kept = StepCostModel.load(tmp_path / "cost.json")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a toy's steps may take the same time whatever they run
        engine = make_engine(drafting_model, drafter="dspark", verify=kept)
        assert isinstance(engine._parts.scheduler.verify_lengths, LiveLengths)
        with pytest.raises(ConfigError, match="Measure again with"):
            make_engine(drafting_model, drafter="dspark", verify=kept, config={"max_num_seqs": 2})


def test_scheduled_measures_by_itself(drafting_model) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = Engine(
            model=drafting_model,
            tokenizer=ToyTokenizer(),
            drafter="dspark",
            verify="scheduled",
            config={"max_num_seqs": 2, "max_model_len": 128},
        )
    with engine:
        assert engine.stats().steps == 0
        output = engine.generate([5, 6], GREEDY)[0]
        assert list(output.token_ids) == ToyModel().greedy([5, 6], 30)
        other = engine.replace(verify=None)
    with other:
        assert other._parts.scheduler.verify_lengths is None


def test_misuse_is_refused(make_engine, drafting_model) -> None:
    with pytest.raises(ConfigError, match="has no drafter whose drafts"):
        make_engine(verify="scheduled")
    for wrong in ("sometimes", 3, Always):
        with pytest.raises(ConfigError, match="it must be 'all', 'scheduled'"):
            make_engine(drafting_model, drafter="dspark", verify=wrong)
    engine = make_engine(drafting_model, drafter="dspark")
    engine.add_request([5, 6], GREEDY)
    with pytest.raises(ConfigError, match="profile an engine that has nothing to do"):
        engine.profile_steps()
    with pytest.raises(ConfigError, match="max_requests"):
        engine.profile_steps(max_requests=99)


def test_a_policy_that_plans_ahead_learns_too(make_engine, drafting_model) -> None:
    scaling = OnlineTemperatureScaling(5)
    policy = ScheduledLengths(VerificationScheduler(FREE), calibration=scaling)
    engine = make_engine(drafting_model, drafter="dspark", verify=policy)
    output = engine.generate([5, 6], GREEDY)[0]
    assert list(output.token_ids) == ToyModel().greedy([5, 6], 30)
    assert output.usage.verified > 20
    assert scaling.to_dict() != OnlineTemperatureScaling(5).to_dict()


def test_what_verify_stands_for() -> None:
    assert verify_policy(FREE).scheduler.search == "global"
    own = VerificationScheduler(DEAR, search="early_stop")
    assert verify_policy(own).scheduler is own
    assert isinstance(verify_policy(own, 5), LiveLengths)
    assert isinstance(verify_policy(own, 5, plans_ahead=True), ScheduledLengths)


@pytest.mark.parametrize("depth", [0, 1])
def test_counts_by_position(make_engine, drafting_model, depth: int) -> None:
    engine = make_engine(
        drafting_model, drafter="dspark", verify=Always(3), config={"async_depth": depth}
    )
    text = ToyTokenizer().decode(ToyModel().greedy([5, 6], 30))
    params = [GREEDY, GREEDY.replace(temperature=0.8, seed=3), GREEDY.replace(stop=text[17:20])]
    outputs = engine.generate([[5, 6]] * 3, params)
    stats = engine.stats()
    places = stats.drafts_by_position
    assert len(places) == 5
    assert [sum(column) for column in zip(*places, strict=True)][1:] == [
        stats.draft_tokens_verified,
        stats.draft_tokens_accepted,
    ]
    assert stats.draft_tokens_accepted == sum(o.usage.accepted for o in outputs)
    for counts in places:
        assert counts.proposed >= counts.verified >= counts.accepted
    assert list(places) == sorted(places, reverse=True)
    assert places[0].proposed == places[4].proposed
    assert 0 < places[4].verified < places[2].verified  # blocks before anything was known
    assert stats.draft_rows_saved == sum(c.proposed - c.verified for c in places) > 20
    assert make_engine().stats().drafts_by_position == ()


class Recomputed:
    """A model as a target of `ModelDrafter`: its cache is the text."""

    def __init__(self, model: ToyModel) -> None:
        self.model = model

    def forward(self, input_ids: Tensor, cache: Any = None, *, num_logits: int = 0) -> TargetOutput:
        text = [*(cache or ()), *input_ids.tolist()]
        return TargetOutput(self.model.logits(text)[-(num_logits or len(input_ids)) :], None, text)

    def crop(self, cache: Any, length: int) -> Any:
        return cache[:length]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_model_drafts_with_the_noise_that_the_engine_draws_with(make_engine, depth: int) -> None:
    drafter = ModelDrafter(Recomputed(ToyModel()), 3)
    engine = make_engine(ToyModel(), drafter=drafter, config={"async_depth": depth})
    drawn = [GREEDY.replace(temperature=1.0, seed=seed) for seed in (3, 2**63 + 5)]
    outputs = engine.generate([[5, 6], [7, 8, 9]], drawn)
    usages = [output.usage for output in outputs]
    assert all(usage.accepted == usage.verified > 15 for usage in usages)
    assert len(set(outputs[0].token_ids)) > 5, "no law of one token"
    assert not drafter._known, "what it kept of requests that ended is gone"
    alone = speculative_generate(
        Recomputed(ToyModel()), drafter, [5, 6], 30, temperature=1.0, seed=3
    )
    assert alone.token_ids == tuple(outputs[0].token_ids)


class Guess:
    """Drafts without confidences: what the toy goes on with, or one token over and over."""

    draft_length = 4

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.texts = [tuple(text) for text in texts]

    def propose(self, view: DraftView, max_drafts: int) -> DraftBatch:
        return DraftBatch(token_ids=tuple(self.row(tuple(t), max_drafts) for t in view.token_ids))

    def row(self, text: tuple[int, ...], count: int) -> tuple[int, ...]:
        known = next((t for t in self.texts if t[: len(text)] == text), text + (3,) * count)
        return known[len(text) : len(text) + count]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_policy_decides_about_drafts_without_confidences_too(make_engine, depth: int) -> None:
    """About the blocks that follow the first of a request, as with any drafter."""
    found = []
    for verify in (None, Always(2), Always(0)):
        engine = make_engine(
            ToyModel(), drafter=Guess(()), verify=verify, config={"async_depth": depth}
        )
        output = engine.generate([5, 6], GREEDY)[0]
        assert list(output.token_ids) == ToyModel().greedy([5, 6], 30)
        found.append([place.verified for place in engine.stats().drafts_by_position])
    whole, two, none = found
    assert whole[2] > 10
    assert two[1] > 10 > two[2]
    assert sum(none) < 10


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("right", [True, False])
def test_drafts_without_confidences_are_judged_by_how_they_fare(
    make_engine, depth: int, right: bool
) -> None:
    cost = StepCostModel([1, 5, 40], [1.0, 1.5, 12.0])
    prompts = [[5, 6], [7], [8, 9]]
    texts = [[*prompt, *ToyModel().greedy(prompt, 300)] for prompt in prompts]
    drafter = Guess(texts if right else ())
    engine = make_engine(ToyModel(), drafter=drafter, verify=cost, config={"async_depth": depth})
    outputs = engine.generate(prompts, GREEDY.replace(max_tokens=300))
    for text, prompt, output in zip(texts, prompts, outputs, strict=True):
        assert list(output.token_ids) == text[len(prompt) :]
    assert engine._parts.scheduler.verify_lengths.is_on is right
    verified = sum(output.usage.verified for output in outputs)
    accepted = sum(output.usage.accepted for output in outputs)
    if right:
        assert accepted == verified > 600
    else:
        assert verified < 1600, "four a token of each, until it is known that none is accepted"
