"""Drafters and schedules that give nonsense, or fail: the text is the same, or the error says whose fault it is."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from deepinfer import SamplingParams
from deepinfer.core.errors import EngineDead, RequestError, ShapeError
from deepinfer.core.protocols import DraftBatch, DraftView
from deepinfer.speculative import StepCostModel
from deepinfer.testing import ToyModel

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
PROMPTS = [[5, 6], [7], [5, 6, 7, 8]]
COST = StepCostModel.additive(1e-3, 1e-4)
NAN = math.nan


class Made:
    """Proposes what a function makes of the number of rows and of the call."""

    draft_length = 4

    def __init__(self, make: Callable[[int, int], Any]) -> None:
        self.make, self.calls = make, 0

    def propose(self, view: DraftView, max_drafts: int) -> Any:
        self.calls += 1
        return self.make(len(view.rids), self.calls)


def batch(
    ids: Sequence[float], confidences: Sequence[float] = (), margins: Sequence[float] = ()
) -> Any:
    def make(rows: int, call: int) -> DraftBatch:
        return DraftBatch(
            token_ids=(tuple(ids),) * rows,
            confidences=(tuple(confidences),) * rows if confidences else (),
            margins=(tuple(margins),) * rows if margins else (),
        )

    return make


BLOCKS = {
    "no drafts": batch([]),
    "placeholders": batch([5, -1, -1, -1], [0.9, NAN, NAN, NAN]),
    "only placeholders": batch([-1, -1, -1, -1]),
    "confidences that are no numbers": batch([5, 6, 7, 8], [NAN] * 4),
    "confidences out of range": batch([5, 6, 7, 8], [math.inf, -math.inf, 2.0, -1.0]),
    "no confidences": batch([5, 6, 7, 8]),
    "margins that are no numbers": batch([5, 6, 7, 8], [0.5] * 4, [NAN, math.inf, -1.0, 0.0]),
    "fewer confidences than drafts": batch([5, 6, 7, 8], [0.9]),
    "more drafts than may be": batch([5] * 50, [0.9] * 50, [1.0] * 50),
    "ids out of the vocabulary": batch([10**9, 5], [0.9, 0.9]),
    "confidences of some rows": lambda rows, call: DraftBatch(
        token_ids=((5, 6, 7),) * rows, confidences=tuple((0.5,) * (i % 4) for i in range(rows))
    ),
}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("verify", [None, COST])
@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
def test_blocks_of_any_kind(make_engine, depth: int, verify: Any, blocks: Any) -> None:
    engine = make_engine(drafter=Made(blocks), verify=verify, config={"async_depth": depth})
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [list(o.token_ids) for o in outputs] == [ToyModel().greedy(p, 30) for p in PROMPTS]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (
            lambda rows: DraftBatch(token_ids=((5,),) * (rows - 1)),
            ShapeError,
            "gave 2 blocks for 3 rows",
        ),
        (lambda rows: None, ShapeError, "gave none blocks for 3 rows"),
        (
            lambda rows: DraftBatch(token_ids=((5,),) * rows, confidences=((0.5,),)),
            ShapeError,
            "gave 1 rows of confidences for 3 rows",
        ),
        (lambda rows: 1 / 0, ZeroDivisionError, "division"),
    ],
)
def test_a_drafter_that_fails_once(make_engine, depth, wrong, error, message) -> None:
    def make(rows: int, call: int) -> Any:
        return wrong(rows) if call == 4 else batch([5, 6])(rows, call)

    engine = make_engine(
        drafter=Made(make), config={"async_depth": depth, "max_num_batched_tokens": 40}
    )
    with pytest.raises(RequestError, match=message) as found:
        engine.generate(PROMPTS, GREEDY)
    assert isinstance(found.value.__cause__, error)
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [list(o.token_ids) for o in outputs] == [ToyModel().greedy(p, 30) for p in PROMPTS]


class Trims:
    """A schedule at the last moment that does anything."""

    def __init__(self, trim: Callable[..., Any]) -> None:
        self._trim = trim
        self.taught = 0

    def choose(self, confidences: Sequence[Sequence[float]], num_running: int) -> list[int]:
        return [9] * len(confidences)

    def trim(self, confidences: Any, counts: Any, other_rows: int, *, margins: Any) -> Any:
        assert len(confidences) == len(counts) == len(margins)
        return self._trim(counts)

    def learn(self, confidences: Any, verified: Any, accepted: Any, *, margins: Any) -> None:
        assert all(
            0 <= a <= v <= len(c) for a, v, c in zip(accepted, verified, confidences, strict=True)
        )
        self.taught += len(verified)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("length", [-3, 0, 1.9, 10**9, True])
def test_lengths_of_any_size(make_engine, drafting_model, depth: int, length: Any) -> None:
    policy = Trims(lambda counts: [length] * len(counts))
    engine = make_engine(
        drafting_model, drafter="dspark", verify=policy, config={"async_depth": depth}
    )
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [list(o.token_ids) for o in outputs] == [ToyModel().greedy(p, 30) for p in PROMPTS]
    assert bool(policy.taught) == (length >= 1)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (lambda counts: counts[1:], "trim of Trims gave 2 lengths for 3 rows"),
        (lambda counts: None, "trim of Trims gave none lengths"),
        (lambda counts: [NAN] * len(counts), "NaN"),
    ],
)
def test_lengths_that_are_none(make_engine, drafting_model, lengths, message) -> None:
    config = {"max_num_batched_tokens": 40}
    engine = make_engine(drafting_model, drafter="dspark", verify=Trims(lengths), config=config)
    with pytest.raises(RequestError, match=message):
        engine.generate(PROMPTS, GREEDY)


@pytest.mark.parametrize("chosen", [[1], None, [NAN, NAN, NAN], "abc"])
def test_a_planner_that_gives_nonsense_is_named(drafting_model, chosen: Any) -> None:
    from deepinfer import Engine

    class Wrong:
        def choose(self, confidences: Any, num_running: int) -> Any:
            return chosen

    engine = Engine(
        model=drafting_model, drafter="dspark", verify=Wrong(), config={"max_num_seqs": 3}
    )
    with pytest.raises(EngineDead, match="choose of Wrong gave"):
        engine.generate(PROMPTS, GREEDY)


class DiceAtTheLastMoment:
    """Drafts or not, and trims to any length."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def choose(self, confidences: Any, num_running: int) -> list[int]:
        raise AssertionError("a scheduler that knows `drafts` asks nothing else")

    def drafts(self, num_requests: int) -> bool:
        return self.random.random() < 0.7

    def trim(self, confidences: Any, counts: Any, other_rows: int, *, margins: Any) -> list[int]:
        return [self.random.randint(0, count) for count in counts]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 1.1])
def test_lengths_chosen_at_the_last_moment_change_no_token(
    make_engine, drafting_model, depth: int, temperature: float
) -> None:
    params = [
        GREEDY.replace(temperature=temperature, seed=seed, max_tokens=20 + seed)
        for seed in range(8)
    ]
    prompts = [[5 + seed, 6][: 1 + seed % 2] for seed in range(8)]
    config = {"async_depth": depth, "max_num_batched_tokens": 40}
    plain = make_engine(drafting_model, config=config).generate(prompts, params)
    engine = make_engine(
        drafting_model, drafter="dspark", verify=DiceAtTheLastMoment(3), config=config
    )
    rids = [
        engine.add_request(p, one, keep_output=True) for p, one in zip(prompts, params, strict=True)
    ]
    dice = random.Random(7)
    while engine.has_unfinished:
        engine.step()
        if dice.random() < 0.2:  # also between launch and result of a verify step, at depth 1
            engine.preempt(dice.choice(rids))
    outputs = [output for rid in rids for output in engine.take_output(rid)]
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    stats = engine.stats()
    assert stats.draft_tokens_accepted > 0


@pytest.mark.parametrize(
    "cost",
    [
        StepCostModel([1, 4, 8, 18], [5.0, 1.0, 9.0, 2.0]),
        StepCostModel([1, 18], [1.0, 1.5], draft={1: 100.0, 3: 5.0}, plain={1: 1.0}),
        StepCostModel([1, 18], [1e-9, 2e-9], plain={1: 1e9}),
        StepCostModel([100, 200], [1.0, 2.0], graph_sizes=[150]),
    ],
)
def test_costs_that_make_no_sense(make_engine, drafting_model, cost: StepCostModel) -> None:
    engine = make_engine(drafting_model, drafter="dspark", verify=cost)
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [list(o.token_ids) for o in outputs] == [ToyModel().greedy(p, 30) for p in PROMPTS]


@pytest.mark.parametrize("budget", [3, 4, 7])
def test_no_room_for_drafts(make_engine, drafting_model, budget: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = make_engine(
            drafting_model, drafter="dspark", verify=COST,
            config={"max_num_batched_tokens": budget, "prefill_chunk_tokens": 2},
        )  # fmt: skip
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [list(o.token_ids) for o in outputs] == [ToyModel().greedy(p, 30) for p in PROMPTS]
