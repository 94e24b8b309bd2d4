"""Drafts of every kind of request: the same tokens as without, under any schedule of verification."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from letter_grammar import Pattern, compile_regex

from deepinfer import Engine, SamplingParams
from deepinfer.core import FinishReason
from deepinfer.core.errors import RequestError
from deepinfer.core.protocols import DraftBatch, DraftView
from deepinfer.core.types import Output
from deepinfer.engine import DRAFTERS
from deepinfer.scheduling import Scheduler
from deepinfer.testing import ToyModel, ToyTokenizer

PLAIN = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.7},
    "hot": {"temperature": 1.5},
    "nucleus": {"temperature": 1.0, "top_p": 0.8},
    "filtered": {"temperature": 0.9, "top_k": 7, "min_p": 0.05},
    "penalised": {"temperature": 0.8, "frequency_penalty": 0.6, "repetition_penalty": 1.2},
    "penalised greedily": {"presence_penalty": 1.0},
    "biased": {"temperature": 0.6, "logit_bias": {9: 3.0, 12: -2.0}},
    "two samples": {"temperature": 1.0, "n": 2},
    "with log probabilities": {"temperature": 1.0, "logprobs": 2},
    "constrained": {"temperature": 1.0, "regex": "|".join(["abcdef", "01234567", "xyz"] * 9)},
    "constrained greedily": {"regex": "|".join(["abcdef", "01234567"] * 4)},
    "constrained and short": {"temperature": 0.5, "regex": "ab|cd|ef", "ignore_eos": False},
    "constrained and penalised": {
        "temperature": 1.0,
        "regex": "|".join(["abc"] * 30),
        "presence_penalty": 2.0,
    },
}


def params_of(seed: int = 11) -> list[SamplingParams]:
    return [PLAIN.replace(seed=seed + i, **kind) for i, kind in enumerate(KINDS.values())]


class Hindsight:
    """Proposes the known output, with a wrong token here and there."""

    draft_length = 4

    def __init__(self, prompts: Sequence[Sequence[int]], outputs: Sequence[Output]) -> None:
        self.known = [
            (*prompt, *output.token_ids) for prompt, output in zip(prompts, outputs, strict=True)
        ]
        self.seen: list[DraftView] = []

    def propose(self, view: DraftView, max_drafts: int) -> DraftBatch:
        self.seen.append(view)
        rows = [self.one(tuple(ids)) for ids in view.token_ids]
        confidences = tuple((0.5,) * len(row) for row in rows)
        return DraftBatch(token_ids=tuple(rows), confidences=confidences)

    def one(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        fits = [known for known in self.known if known[: len(ids)] == ids]
        if not fits:  # ahead of the results, one that has ended may be drafted for once more
            assert any(ids[: len(known)] == known for known in self.known), "other text"
            return ()
        row = list(fits[0][len(ids) : len(ids) + self.draft_length])
        row += [3] * (self.draft_length - len(row))
        if len(ids) % 3 == 0:
            row[len(ids) % 4] = 60
        return tuple(row)


class Dice:
    """A schedule that nothing explains."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.chosen: set[int] = set()

    def choose(self, confidences: Sequence[Sequence[float]], num_running: int) -> list[int]:
        lengths = [self.random.randint(0, len(row)) for row in confidences]
        self.chosen.update(lengths)
        return lengths


def key(output: Output) -> tuple[Any, ...]:
    return (
        output.token_ids, output.text, output.finish_reason, output.stop_reason, output.logprobs
    )  # fmt: skip


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_any_request_under_any_schedule(make_engine, depth: int, seed: int) -> None:
    params = params_of(100 * seed)
    prompts = [[5 + i, 6, 7][: 1 + (i + seed) % 3] for i in range(len(params))]
    plain = make_engine(grammar=compile_regex).generate(prompts, params)
    owners = [p for p, one in zip(prompts, params, strict=True) for _ in range(one.n)]
    drafter, dice = Hindsight(owners, plain), Dice(seed)
    engine = make_engine(
        drafter=drafter,
        grammar=compile_regex,
        scheduler=lambda limits, cache: Scheduler(limits, cache, verify_lengths=dice),
        config={"async_depth": depth, "max_num_seqs": 6, "max_num_batched_tokens": 40},
    )
    outputs = engine.generate(prompts, params)
    assert list(map(key, outputs)) == list(map(key, plain))
    assert dice.chosen == {0, 1, 2, 3, 4}
    assert all(output.usage.accepted for output in outputs if len(output.token_ids) > 6)
    temperatures = {t for view in drafter.seen for t in view.temperatures}
    assert {0.7, 1.5} <= temperatures


def test_preempted_between_blocks(make_engine) -> None:
    params = params_of()
    prompts = [[5 + i, 6] for i in range(len(params))]
    plain = make_engine(grammar=compile_regex).generate(prompts, params)
    owners = [p for p, one in zip(prompts, params, strict=True) for _ in range(one.n)]
    engine = make_engine(
        drafter=Hindsight(owners, plain), grammar=compile_regex, config={"async_depth": 1}
    )
    rids = [
        engine.add_request(p, one, keep_output=True) for p, one in zip(prompts, params, strict=True)
    ]
    dice = random.Random(5)
    while engine.has_unfinished:
        engine.step()
        if dice.random() < 0.3:
            engine.preempt(dice.choice(rids))
    outputs = [output for rid in rids for output in engine.take_output(rid)]
    assert list(map(key, outputs)) == list(map(key, plain))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_end_inside_a_block(make_engine, temperature: float) -> None:
    """Stop token, stop string, length and end of sequence, at every place of a block."""
    base = PLAIN.replace(temperature=temperature, seed=4)
    whole = make_engine().generate([[5, 6]], base)[0]
    tokens, text = whole.token_ids, whole.text
    for at in range(1, 14):
        cases = [base.replace(max_tokens=at), base.replace(stop=text[at : at + 2])]
        if tokens.index(tokens[at]) == at:
            cases += [base.replace(stop_token_ids=(tokens[at],), max_tokens=at + 1 + at % 2)]
        for params in cases:
            plain = make_engine().generate([[5, 6]], params)[0]
            output = make_engine(drafter=Hindsight([[5, 6]], [whole])).generate([[5, 6]], params)
            assert key(output[0]) == key(plain)
            assert output[0].usage.accepted <= output[0].usage.generated
            assert output[0].usage.generated == len(output[0].token_ids)


def test_a_stop_wins_over_the_length_in_one_block(make_engine) -> None:
    base = PLAIN.replace(temperature=0.9, seed=4)
    whole = make_engine().generate([[5, 6]], base)[0]
    at = next(i for i in range(4, 20) if whole.token_ids.index(whole.token_ids[i]) == i)
    params = base.replace(stop_token_ids=(whole.token_ids[at],), max_tokens=at + 2)
    output = make_engine(drafter=Hindsight([[5, 6]], [whole])).generate([[5, 6]], params)[0]
    assert output.finish_reason is FinishReason.STOP
    assert output.token_ids == whole.token_ids[: at + 1]


def test_seeded_and_unseeded_neighbours(make_engine) -> None:
    """Rows with and without a seed of their own in one batch do not touch each other."""
    seeded = PLAIN.replace(temperature=1.0, seed=1)
    params = [seeded, seeded.replace(seed=None), seeded]
    alone = make_engine().generate([[5, 6]], seeded)[0]
    engine = make_engine(drafter=Hindsight([[5, 6]], [alone]), config={"seed": 3})
    plain = make_engine(config={"seed": 3}).generate([[5, 6]] * 3, params)
    engine._parts.drafter.known = [(5, 6, *output.token_ids) for output in plain]
    outputs = engine.generate([[5, 6]] * 3, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert outputs[0].token_ids == outputs[2].token_ids == alone.token_ids


def test_a_grammar_completed_inside_a_block_ends_there(make_engine) -> None:
    params = PLAIN.replace(regex="ab|cd|ef")
    plain = make_engine(grammar=compile_regex).generate([[5, 6]], params)[0]
    assert len(plain.token_ids) == 3

    class Longer(Hindsight):
        def one(self, ids: tuple[int, ...]) -> tuple[int, ...]:
            row = self.known[0][len(ids) :]
            return (*row, *row, *row, 9)[:4] if row else (9, 9, 9, 9)

    engine = make_engine(drafter=Longer([[5, 6]], [plain]), grammar=compile_regex)
    output = engine.generate([[5, 6]], params)[0]
    assert key(output) == key(plain)
    assert output.usage.accepted >= 1
    assert output.usage.verified == output.usage.accepted  # the nines were never run


@pytest.mark.parametrize("depth", [0, 1])
def test_drafts_that_a_grammar_refuses_are_not_run(make_engine, depth: int) -> None:
    params = PLAIN.replace(regex="|".join(["abcdef", "uvwxyz"] * 12), temperature=0.7, seed=2)
    plain = make_engine(grammar=compile_regex).generate([[5, 6]], params)[0]

    class Half(Hindsight):
        def one(self, ids: tuple[int, ...]) -> tuple[int, ...]:
            row = super().one(ids)
            return (*row[:2], row[0], row[3]) if len(row) == 4 else row

    engine = make_engine(
        drafter=Half([[5, 6]], [plain]), grammar=compile_regex, config={"async_depth": depth}
    )
    runner, drafts = engine._parts.runner, []
    sample = runner.sample

    def looking(handle: Any, masks: Any = None) -> Any:
        drafts.extend(handle.drafts.values())
        return sample(handle, masks)

    runner.sample = looking
    output = engine.generate([[5, 6]], params)[0]
    assert key(output) == key(plain)
    assert drafts
    letters = [frozenset(ToyTokenizer().encode(s, add_bos=False)) for s in ("abcdef", "uvwxyz")]
    for draft in drafts:
        kinds = [token in letters[0] for token in draft]
        assert all(a != b for a, b in itertools.pairwise(kinds))


def test_a_mask_that_fails_behind_a_draft_fails_its_request_alone(make_engine) -> None:
    broken = Pattern(["abc", "abc", "abc", "abc"])

    class Failing(type(broken.start())):  # type: ignore[misc]
        def fill_mask(self, row: Any) -> None:
            if self.at == 2:
                raise ValueError("no mask here")
            super().fill_mask(row)

    broken.start = lambda: Failing(broken)  # type: ignore[method-assign]

    class Letters(Hindsight):
        def one(self, ids: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(ToyTokenizer().encode("aaaa", add_bos=False))

    engine = make_engine(drafter=Letters([], []), grammar=lambda params: broken)
    outputs = engine.generate(
        [[5, 6], [5, 7]], [PLAIN.replace(regex="x"), PLAIN], on_error="return"
    )
    assert isinstance(outputs[0].error, RequestError | ValueError)
    assert list(outputs[1].token_ids) == ToyModel().greedy([5, 7], 24)


@pytest.mark.parametrize("drafter", ["dspark", "ngram"])
def test_structured_output_of_nano(drafter: str) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"type": "integer"}},
        "required": ["name", "size"],
        "additionalProperties": False,
    }
    base = SamplingParams(max_tokens=40, seed=1, temperature=0.8)
    params = [
        base.replace(json_schema=schema),
        base.replace(regex="(ab|cd){3}[0-9]{2}", temperature=0.0),
        base.replace(regex="(true|false)(, (true|false)){4}", seed=5, frequency_penalty=0.3),
    ]
    prompts = ['{"name": "abc", "size": 12}\n{"name": "', "abcdab12 abcdab13 ", "true, false"]
    config = {"max_num_seqs": 3, "max_model_len": 256, "rounding": "none"}
    with Engine.from_pretrained("nano", config=config) as engine:
        plain = engine.generate(prompts, params)
        with engine.replace(drafter=DRAFTERS.create(drafter, engine.model)) as drafted:
            outputs = drafted.generate(prompts, params)
            drafted.check()
    assert [o.text for o in outputs] == [o.text for o in plain]
    assert [o.finish_reason for o in outputs] == [o.finish_reason for o in plain]
    assert set(json.loads(outputs[0].text)) == {"name", "size"}
    assert sum(o.usage.accepted for o in outputs) > 3
