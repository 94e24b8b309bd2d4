"""Speculative decoding changes the number of steps and nothing else."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import pytest
import torch

from deepinfer import SamplingParams
from deepinfer.core import FinishReason
from deepinfer.core.errors import ConfigError
from deepinfer.core.protocols import DraftBatch, DraftView
from deepinfer.engine import DSparkDrafter
from deepinfer.sampling import PerRequest, Sampler
from deepinfer.scheduling import Scheduler
from deepinfer.testing import ToyConfig, ToyModel, ToyTokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
PROMPTS: list[Sequence[int]] = [[5 + i, *range(6, 6 + 5 * i)] for i in range(7)]


class NGram:
    """Looks the last token up in the text so far; needs no model."""

    draft_length = 3

    def __init__(self) -> None:
        self.views: list[DraftView] = []

    def propose(self, view: DraftView, max_drafts: int) -> DraftBatch:
        self.views.append(view)
        return DraftBatch(token_ids=tuple(self.one(ids, max_drafts) for ids in view.token_ids))

    def one(self, ids: Sequence[int], count: int) -> tuple[int, ...]:
        for at in range(len(ids) - 2, -1, -1):
            if ids[at] == ids[-1]:
                return tuple(ids[at + 1 : at + 1 + count])
        return ()


@pytest.mark.parametrize("errors", [0, 1, 2, 3, 7])
def test_tokens_are_those_without_drafts(make_engine, errors: int) -> None:
    model = ToyModel(ToyConfig(dspark_block_size=5, draft_errors=errors))
    engine = make_engine(model, drafter="dspark")
    for prompt, output in zip(PROMPTS, engine.generate(PROMPTS, GREEDY), strict=True):
        assert list(output.token_ids) == ToyModel().greedy(prompt, 30)
        usage = output.usage
        assert usage.generated == 30
        assert 0 <= usage.accepted <= usage.verified <= usage.drafted
        if errors == 0:
            assert usage.accepted == usage.verified >= 20
        if errors == 1:
            assert usage.accepted == 0


def test_drafts_save_steps(make_engine, drafting_model) -> None:
    steps = []
    for drafter in (None, "dspark"):
        engine = make_engine(drafting_model, drafter=drafter)
        engine.generate([5, 6], GREEDY)
        steps.append(engine.stats().steps)
    assert steps[1] < 0.7 * steps[0]


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_every_length(make_engine, drafting_model, max_tokens: int) -> None:
    engine = make_engine(drafting_model, drafter="dspark")
    output = engine.generate([5, 6], GREEDY.replace(max_tokens=max_tokens))[0]
    assert list(output.token_ids) == ToyModel().greedy([5, 6], max_tokens)
    assert output.finish_reason is FinishReason.LENGTH


def test_context_filled_to_the_last_token(make_engine, drafting_model) -> None:
    engine = make_engine(drafting_model, drafter="dspark", config={"max_model_len": 20})
    output = engine.generate([5] * 9, GREEDY)[0]
    assert list(output.token_ids) == ToyModel().greedy([5] * 9, 11)


def test_stops_inside_a_block(make_engine) -> None:
    model = ToyModel(ToyConfig(dspark_block_size=5, draft_errors=0))
    tokens = ToyModel().greedy([5, 6], 30)
    engine = make_engine(model, drafter="dspark")
    for at in range(1, 12):
        if tokens.index(tokens[at]) != at:
            continue
        output = engine.generate([5, 6], GREEDY.replace(stop_token_ids=(tokens[at],)))[0]
        assert list(output.token_ids) == tokens[: at + 1]
        assert output.usage.generated == at + 1
        assert output.usage.accepted <= at
        engine.check()
    text = ToyTokenizer().decode(tokens)
    before, verified, accepted = engine.stats(), 0, 0
    for at in range(1, 20):
        stop = text[at : at + 2]
        plain = make_engine().generate([5, 6], GREEDY.replace(stop=stop))[0]
        output = engine.generate([5, 6], GREEDY.replace(stop=stop))[0]
        assert (output.text, output.token_ids) == (plain.text, plain.token_ids)
        assert output.stop_reason == plain.stop_reason
        stats = engine.stats()
        verified, accepted = verified + output.usage.verified, accepted + output.usage.accepted
        assert stats.draft_tokens_verified - before.draft_tokens_verified == verified
        assert stats.draft_tokens_accepted - before.draft_tokens_accepted == accepted


def test_logprobs_come_with_accepted_drafts(make_engine, drafting_model) -> None:
    params = GREEDY.replace(logprobs=2, prompt_logprobs=1)
    plain = make_engine().generate([5, 6, 7], params)[0]
    output = make_engine(drafting_model, drafter="dspark").generate([5, 6, 7], params)[0]
    assert output.logprobs == plain.logprobs
    assert output.prompt_logprobs == plain.prompt_logprobs
    pieces = list(make_engine(drafting_model, drafter="dspark").stream([5, 6, 7], params))
    assert tuple(e for d in pieces for e in d.logprobs or ()) == plain.logprobs
    assert all(len(d.logprobs or ()) == len(d.token_ids) for d in pieces)


def test_drawn_and_penalised_rows_are_drafted_too(make_engine, drafting_model) -> None:
    mixed = [
        GREEDY,
        GREEDY.replace(temperature=0.8, seed=3),
        GREEDY.replace(frequency_penalty=1.0),
        GREEDY.replace(logit_bias={9: 3.0}),
    ]
    prompts = [[5, 6]] * 4
    config = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    plain = make_engine(config=config).generate(prompts, mixed)
    engine = make_engine(drafting_model, drafter="dspark", config=config)
    outputs = engine.generate(prompts, mixed)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert all(o.usage.drafted > 0 for o in outputs)


def test_any_row_can_be_verified(make_engine) -> None:
    """A choice depends on logits, seed and position only, so drawing with drafts draws the same tokens."""
    params = [
        GREEDY.replace(temperature=0.7, seed=i, frequency_penalty=i / 4, top_k=9) for i in range(4)
    ]
    prompts = [[5, 6, 7]] * 4
    plain = make_engine().generate(prompts, params)

    class Cheat(NGram):
        def one(self, ids: Sequence[int], count: int) -> tuple[int, ...]:
            for output in plain:
                known = [5, 6, 7, *output.token_ids]
                if known[: len(ids)] == list(ids):
                    return (*known[len(ids) : len(ids) + 2], 0)[:count]
            raise AssertionError("the text so far is not that without drafts")

    engine = make_engine(drafter=Cheat())
    outputs = engine.generate(prompts, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert min(o.usage.accepted for o in outputs) > 10


def test_processors_see_every_token_before_theirs(make_engine) -> None:
    def force(row: torch.Tensor, request: object, output: Sequence[int]) -> None:
        row[(sum(output) * 3 + len(output) * 7) % 60 + 4] = 100.0

    sampler = Sampler(processors=[PerRequest(force)])
    plain = make_engine(sampler=sampler).generate([5, 6], GREEDY)[0].token_ids

    class Right(NGram):
        def one(self, ids: Sequence[int], count: int) -> tuple[int, ...]:
            return plain[len(ids) - 2 : len(ids) - 2 + count]

    output = make_engine(sampler=sampler, drafter=Right()).generate([5, 6], GREEDY)[0]
    assert output.token_ids == plain
    assert output.usage.accepted > 20
    assert len(set(plain)) > 5


def test_own_drafter(make_engine) -> None:
    drafter = NGram()
    engine = make_engine(drafter=drafter)
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [list(o.token_ids) for o in outputs] == [ToyModel().greedy(p, 30) for p in PROMPTS]
    for view in drafter.views:
        for ids, anchor, at in zip(view.token_ids, view.anchor_ids, view.positions, strict=True):
            assert ids[-1] == anchor or len(ids) != at + 1


def test_preemption_and_cancelled_steps_keep_the_draft_right(make_engine) -> None:
    model = ToyModel(ToyConfig(dspark_block_size=5, draft_errors=4))
    engine = make_engine(model, drafter="dspark")
    rid = engine.add_request([5, 6], GREEDY.replace(max_tokens=60))
    tokens: list[int] = []
    count = 0
    while engine.has_unfinished:
        count += 1
        if count in (3, 5, 9):
            engine._parts.scheduler.preempt(rid)
        if count in (4, 7):

            def interrupt(batch: object) -> None:
                raise KeyboardInterrupt

            model.fault = interrupt
            with pytest.raises(KeyboardInterrupt):
                engine.step()
            model.fault = None
        for delta in engine.step():
            tokens += delta.token_ids
        engine.check()
    assert tokens == ToyModel().greedy([5, 6], 60)


def test_model_without_a_draft_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no DSpark draft"):
        DSparkDrafter(ToyModel())


def test_block_that_does_not_fit_a_chunk_widens_it(make_engine, drafting_model) -> None:
    engine = make_engine(drafting_model, drafter="dspark", config={"prefill_chunk_tokens": 2})
    assert engine._parts.limits.prefill_chunk_tokens == 6
    assert list(engine.generate([5, 6], GREEDY)[0].token_ids) == ToyModel().greedy([5, 6], 30)


@pytest.mark.parametrize("depth", [0, 1])
def test_confidences_decide_how_many_drafts_are_verified(
    make_engine, drafting_model, depth: int
) -> None:
    """They come with the results, of the whole block, however few of its drafts were verified."""

    class Unsure(DSparkDrafter):
        def propose(self, view: DraftView, max_drafts: int) -> DraftBatch:
            proposed = super().propose(view, max_drafts)
            levels = [[0.9, 0.8, 0.7, 0.6, 0.5] if int(s) % 2 else [0.3] * 5 for s in view.slots]
            return DraftBatch(
                token_ids=proposed.token_ids, confidences=tuple(tuple(row) for row in levels)
            )

    class Threshold:
        def __init__(self) -> None:
            self.asked: set[tuple[float, ...]] = set()

        def choose(self, confidences: Sequence[Sequence[float]], num_running: int) -> list[int]:
            self.asked.update(tuple(row) for row in confidences)
            return [1 + sum(level >= 0.7 for level in row[1:]) for row in confidences]

    policy = Threshold()
    engine = make_engine(
        drafting_model,
        drafter=Unsure(drafting_model),
        scheduler=lambda limits, cache: Scheduler(limits, cache, verify_lengths=policy),
        config={"async_depth": depth, "max_num_seqs": 2},
    )
    runner, lengths, seen = engine._parts.runner, {}, []
    collect = runner.collect

    def looking(handle):
        result = collect(handle)
        for row, found in zip(handle.plan.rows, result.rows, strict=True):
            if row.num_drafts:
                assert len(found.draft_confidences) == 5
                lengths.setdefault(found.draft_confidences[0], []).append(row.num_drafts)
            else:
                assert found.draft_confidences == ()
        seen.append(result)
        return result

    runner.collect = looking
    outputs = engine.generate(PROMPTS[:2], GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        assert list(output.token_ids) == ToyModel().greedy(prompt, 30)
    assert policy.asked >= {(0.9, 0.8, 0.7, 0.6, 0.5), (0.3,) * 5}
    late = 2 + depth  # the first blocks are verified before any confidences are known
    assert set(lengths[0.3][late:]) == {1}
    assert set(lengths[0.9][late:-2]) == {3}
    assert pickle.loads(pickle.dumps(seen[-2])).rows == seen[-2].rows
