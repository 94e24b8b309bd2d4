"""Steps planned ahead of their results: the same tokens, and every known way to get them wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from deepinfer import Engine, Output, SamplingParams
from deepinfer.core import FinishReason
from deepinfer.core.errors import InvalidLogits, InvariantBroken, RequestError
from deepinfer.core.protocols import DraftBatch
from deepinfer.engine import FutureTokens
from deepinfer.sampling import PerRequest, Sampler
from deepinfer.testing import ToyConfig, ToyModel, ToyTokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = GREEDY.replace(max_tokens=60)


class Planted(Exception):
    """Raised by tests."""


def run(engine: Engine, prompts: Any, params: Any) -> list[tuple[Any, ...]]:
    """What the outputs of a batch show, and the engine's books checked after every step."""
    rids = [
        engine.add_request(prompt, one, keep_output=True)
        for prompt, one in zip(prompts, params, strict=True)
    ]
    while engine.has_unfinished:
        engine.step()
        engine.check()
    return [shown(output) for rid in rids for output in engine.take_output(rid)]


def shown(output: Output) -> tuple[Any, ...]:
    return (
        output.text,
        output.token_ids,
        output.finish_reason,
        output.stop_reason,
        output.logprobs,
        output.prompt_logprobs,
    )


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 20),
    temperature=st.sampled_from([0.0, 0.0, 0.8]),
    seed=st.integers(0, 3),
    n=st.sampled_from([1, 1, 2]),
    stop=st.sampled_from([(), (), ("ab", "c")]),
    stop_token_ids=st.sampled_from([(), (7,), (9, 20)]),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, 1]),
    prompt_logprobs=st.sampled_from([None, None, 0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
    regex=st.sampled_from([None, None, "letters"]),
)


class Letters:
    """A grammar: letters in pairs that rise, then a full stop."""

    def start(self) -> LettersState:
        return LettersState()


class LettersState:
    def __init__(self) -> None:
        self.ids: list[int] = []

    @property
    def is_done(self) -> bool:
        return len(self.ids) >= 9

    def accept(self, token_ids: Sequence[int]) -> bool:
        for token in token_ids:
            if not self.allows(token):
                return False
            self.ids.append(token)
        return True

    def rollback(self, num_tokens: int) -> None:
        del self.ids[len(self.ids) - num_tokens :]

    def allows(self, token: int) -> bool:
        last = self.ids[-1] if self.ids else 4
        return 4 <= token < 24 and token % 3 != last % 3

    def fill_mask(self, row: Any) -> None:
        row.fill_(0)
        for token in range(4, 24):
            if self.allows(token):
                row[token >> 5] |= 1 << (token & 31)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    requests=st.lists(st.tuples(st.integers(1, 16), PARAMS), min_size=1, max_size=6),
    draft=st.booleans(),
    seqs=st.integers(1, 4),
    chunk=st.integers(6, 9),
    spare=st.integers(0, 12),
    blocks=st.integers(12, 30),
)
def test_depths_give_the_same(
    requests: list[tuple[int, SamplingParams]],
    draft: bool,
    seqs: int,
    chunk: int,
    spare: int,
    blocks: int,
) -> None:
    prompts = [[(i * 3 + j * j) % 20 + 4 for j in range(n)] for i, (n, _) in enumerate(requests)]
    found = []
    for depth in (0, 1):
        config = ToyConfig(
            vocab_size=24, max_position_embeddings=40, dspark_block_size=4 * draft, draft_errors=3
        )

        def nudge(row: torch.Tensor, request: object, output: Sequence[int]) -> None:
            row[(sum(output) * 3 + len(output)) % 20 + 4] += 3.0

        with Engine(
            model=ToyModel(config),
            tokenizer=ToyTokenizer(24),
            drafter="dspark" if draft else None,
            sampler=Sampler(processors=[PerRequest(nudge, rids=["request-2"])]),
            grammar=lambda params: Letters(),
            config={
                "async_depth": depth,
                "max_num_seqs": seqs,
                "prefill_chunk_tokens": chunk,
                "max_num_batched_tokens": seqs + spare,
                "num_blocks": blocks,
                "block_size": 4,
            },
        ) as engine:
            found.append(run(engine, prompts, [params for _, params in requests]))
    assert found[0] == found[1]


def test_a_step_is_launched_before_the_one_before_it_is_collected(make_engine) -> None:
    engine = make_engine(config={"async_depth": 1})
    runner = engine._parts.runner
    calls = []
    for name in ("forward", "sample", "collect"):
        original = getattr(runner, name)

        def spy(first: Any, *rest: Any, name: str = name, original: Any = original) -> Any:
            calls.append((name, first.step))
            return original(first, *rest)

        setattr(runner, name, spy)
    engine.generate([5, 6], GREEDY.replace(max_tokens=3))
    assert calls == [
        ("forward", 0), ("sample", 0),
        ("forward", 1), ("collect", 0), ("sample", 1),
        ("forward", 2), ("collect", 1), ("sample", 2),
        ("collect", 2),
    ]  # fmt: skip


class TestEnds:
    def test_row_behind_a_stop_is_void(self, make_engine) -> None:
        """B9, B15: what a row samples behind the end is never shown, and nothing else is lost."""
        tokens = ToyModel().greedy([5, 6], 12)
        engine = make_engine(config={"async_depth": 1})
        params = GREEDY.replace(stop_token_ids=(tokens[4],))
        outputs = engine.generate([[5, 6], [7, 8]], [params, GREEDY])
        assert list(outputs[0].token_ids) == tokens[: tokens.index(tokens[4]) + 1]
        assert list(outputs[1].token_ids) == ToyModel().greedy([7, 8], 12)
        stats = engine.stats()
        assert stats.void_rows == 1
        assert stats.generated_tokens == sum(o.usage.generated for o in outputs)
        assert stats.cache.quarantined_slots == stats.cache.quarantined_blocks == 0

    def test_known_ends_run_no_void_rows(self, make_engine) -> None:
        engine = make_engine(config={"async_depth": 1})
        engine.generate([[5, 6], [7, 8]], GREEDY)
        assert engine.stats().void_rows == 0

    def test_nothing_stays_in_flight(self, make_engine) -> None:
        engine = make_engine(config={"async_depth": 1})
        rid = engine.add_request([5, 6], LONG)
        for _ in range(4):
            engine.step()
        engine.abort(rid)
        assert engine._parts.scheduler.num_in_flight == 0
        assert engine.stats().cache.free_blocks == engine.stats().cache.num_blocks

    @pytest.mark.parametrize("num_steps", range(1, 7))
    def test_abort_in_flight_gives_nothing_more(self, make_engine, num_steps: int) -> None:
        """B9: an abort between launch and collect of a chunk."""
        engine = make_engine(config={"async_depth": 1})
        rid = engine.add_request("a prompt in several chunks", LONG)
        other = engine.add_request("xyz", GREEDY)
        for _ in range(num_steps):
            engine.step()
        output = engine.abort(rid)[0]
        assert all(token >= 0 for token in output.token_ids)
        after = []
        tokens = []
        while engine.has_unfinished:
            for delta in engine.step():
                (after if delta.rid == rid else tokens).extend(delta.token_ids)
            engine.check()
        assert after == []
        assert tokens == ToyModel().greedy([0, 27, 28, 29], 12)[-len(tokens) :]
        assert other


class TestFailures:
    @pytest.mark.parametrize("at", [1, 2, 5, 9])
    def test_failing_forward_ends_its_rows_and_those_behind_it(self, make_engine, at: int) -> None:
        model = ToyModel()
        engine = make_engine(model, config={"async_depth": 1})
        rids = [engine.add_request([5, i], GREEDY, keep_output=True) for i in range(4, 10)]
        cause = Planted()

        def fault(batch: object) -> None:
            if model.num_forwards == at:
                raise cause

        model.fault = fault
        while engine.has_unfinished:
            engine.step()
            engine.check()
        outputs = [engine.take_output(rid)[0] for rid in rids]
        failed = [o for o in outputs if o.error is not None]
        assert 1 <= len(failed) <= 3
        for output in failed:
            assert isinstance(output.error, RequestError)
            assert output.error.__cause__ is cause
        for index, output in enumerate(outputs):
            wanted = ToyModel().greedy([5, 4 + index], 12)
            assert list(output.token_ids) == wanted[: len(output.token_ids)]
            assert output.error is not None or len(output.token_ids) == 12
        assert engine.stats().failed_steps == 1

    @pytest.mark.parametrize("where", ["sample", "collect"])
    def test_failing_runner_call(self, make_engine, where: str) -> None:
        engine = make_engine(config={"async_depth": 1})
        runner = engine._parts.runner
        original = getattr(runner, where)

        def fail(handle: Any, *rest: Any) -> Any:
            if handle.step == 3:
                raise Planted
            return original(handle, *rest)

        setattr(runner, where, fail)
        outputs = engine.generate([[5, 6], [7, 8]], GREEDY, on_error="return")
        assert all(isinstance(o.error, RequestError) for o in outputs)
        assert all(isinstance(o.error.__cause__, Planted) for o in outputs)
        engine.check()
        assert list(engine.generate([5, 6], GREEDY)[0].token_ids) == ToyModel().greedy([5, 6], 12)

    def test_failing_drafter_ends_both_steps(self, make_engine) -> None:
        class Drafter:
            draft_length = 3
            left = 3

            def propose(self, view: Any, max_drafts: int) -> DraftBatch:
                return DraftBatch(token_ids=((9,),) * len(view.rids))

            def observe(self, *args: Any) -> None:
                self.left -= 1
                if self.left == 0:
                    raise Planted

        model = ToyModel(ToyConfig(dspark_block_size=3))
        engine = make_engine(model, drafter=Drafter(), config={"async_depth": 1})
        outputs = engine.generate([[5, 6], [7, 8]], GREEDY, on_error="return")
        assert all(isinstance(o.error.__cause__, Planted) for o in outputs)
        assert list(engine.generate([5, 6], GREEDY)[0].token_ids) == ToyModel().greedy([5, 6], 12)

    def test_row_of_nan_ends_alone_while_the_next_step_runs(self, make_engine) -> None:
        """The token that could not be chosen is run in the void row of the next step."""

        def poison(row: torch.Tensor, request: object, output: Sequence[int]) -> None:
            if len(output) == 4:
                row.fill_(float("nan"))

        sampler = Sampler(processors=[PerRequest(poison, rids=["bad"])])
        engine = make_engine(sampler=sampler, config={"async_depth": 1})
        engine.add_request([5, 6], GREEDY, rid="bad", keep_output=True)
        engine.add_request([5, 6], GREEDY, rid="good", keep_output=True)
        while engine.has_unfinished:
            engine.step()
            engine.check()
        bad, good = engine.take_output("bad")[0], engine.take_output("good")[0]
        assert isinstance(bad.error, InvalidLogits)
        assert list(bad.token_ids) == ToyModel().greedy([5, 6], 4)
        assert list(good.token_ids) == ToyModel().greedy([5, 6], 12)
        assert engine.stats().failed_steps == 0

    @pytest.mark.parametrize("where", ["forward", "sample", "collect", "apply"])
    @pytest.mark.parametrize("step", [0, 1, 4])
    def test_interrupt(self, make_engine, where: str, step: int) -> None:
        engine = make_engine(config={"async_depth": 1})
        part = engine._parts.scheduler if where == "apply" else engine._parts.runner
        original = getattr(part, where)
        left = [1]

        def strike(first: Any, *rest: Any) -> Any:
            out = original(first, *rest)
            if first.step == step and left[0]:
                left[0] = 0
                raise KeyboardInterrupt
            return out

        setattr(part, where, strike)
        rid = engine.add_request([5, 6], GREEDY, keep_output=True)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(["a", "b", "c", "d"], LONG)
        engine.check()
        while engine.has_unfinished:
            engine.step()
            engine.check()
        output = engine.take_output(rid)[0]
        wanted = ToyModel().greedy([5, 6], 12)
        if where == "apply":
            assert "interrupted" in str(output.error)
            assert list(output.token_ids) == wanted[: len(output.token_ids)]
        else:
            assert list(output.token_ids) == wanted  # run again, unharmed


class TestLedger:
    def test_pressure_with_an_output_in_flight(self, make_engine) -> None:
        """B1, B2: two requests in a cache for one and a half."""
        found = []
        for depth in (0, 1):
            config = {
                "async_depth": depth, "max_num_seqs": 2, "block_size": 2, "num_blocks": 16,
                "max_model_len": 32, "prefix_cache": False,
            }  # fmt: skip
            engine = make_engine(config=config)
            params = GREEDY.replace(max_tokens=20)
            found.append(run(engine, [[5, 6, 7], [8, 9, 10]], [params] * 2))
            assert engine.stats().preemptions > 0
            assert [list(tokens) for _, tokens, *_ in found[-1]] == [
                ToyModel().greedy(prompt, 20) for prompt in ([5, 6, 7], [8, 9, 10])
            ]
        assert found[0] == found[1]

    def test_rows_that_miss_a_step(self, make_engine) -> None:
        """B3: a budget that two requests with drafts do not both fit."""
        model = ToyModel(ToyConfig(dspark_block_size=4, draft_errors=2))
        config = {"async_depth": 1, "max_num_seqs": 2, "max_num_batched_tokens": 2}
        engine = make_engine(model, drafter="dspark", config=config)
        found = run(engine, [[5, 6], [7, 8]], [LONG.replace(max_tokens=20)] * 2)
        assert [list(tokens) for _, tokens, *_ in found] == [
            ToyModel().greedy(prompt, 20) for prompt in ([5, 6], [7, 8])
        ]

    def test_long_prompt_beside_decoders(self, make_engine) -> None:
        """B4: chunks of one prompt beside three outputs, no drafts and no preemption."""
        config = {"async_depth": 1, "max_num_seqs": 4, "max_num_batched_tokens": 10}
        engine = make_engine(config=config)
        prompts = [[5, 6], [7, 8], [9, 10], [i % 50 + 5 for i in range(70)]]
        found = run(engine, prompts, [LONG.replace(max_tokens=20)] * 4)
        assert [list(tokens) for _, tokens, *_ in found] == [
            ToyModel().greedy(prompt, 20) for prompt in prompts
        ]
        assert engine.stats().preemptions == 0

    @pytest.mark.parametrize("num_steps", [2, 3, 6])
    def test_reset_in_the_middle(self, make_engine, num_steps: int) -> None:
        """B6: the output ends with the right token, and no step later than it must."""
        engine = make_engine(config={"async_depth": 1})
        rid = engine.add_request([5, 6], GREEDY, keep_output=True)
        for _ in range(num_steps):
            engine.step()
        engine.reset_prefix_cache()
        engine.check()
        before = engine.stats()
        while engine.has_unfinished:
            engine.step()
            engine.check()
        assert list(engine.take_output(rid)[0].token_ids) == ToyModel().greedy([5, 6], 12)
        missing = 12 - before.generated_tokens
        assert engine.stats().steps - before.steps <= missing + 2

    def test_all_drafts_rejected_at_block_edges(self, make_engine) -> None:
        """B7: rolled back over the edges of blocks and windows."""
        config = ToyConfig(dspark_block_size=5, draft_errors=1, sliding_window=4)
        options = {"async_depth": 1, "block_size": 2, "num_blocks": 40, "max_model_len": 40}
        engine = make_engine(ToyModel(config), drafter="dspark", config=options)
        found = run(engine, [[5, 6], [7, 8, 9]], [GREEDY] * 2)
        assert engine.stats().draft_tokens_accepted == 0
        assert [list(tokens) for _, tokens, *_ in found] == [
            ToyModel(ToyConfig(sliding_window=4)).greedy(prompt, 12)
            for prompt in ([5, 6], [7, 8, 9])
        ]

    def test_slot_given_to_another_at_once(self, make_engine) -> None:
        """B8, B38: one slot, handed on from step to step."""
        config = {"async_depth": 1, "max_num_seqs": 1, "block_size": 2, "num_blocks": 20}
        engine = make_engine(ToyModel(ToyConfig(sliding_window=3)), config=config)
        prompts = [[5 + i, 6, 7 + i] for i in range(5)]
        found = run(engine, prompts, [GREEDY.replace(max_tokens=3)] * 5)
        assert [list(tokens) for _, tokens, *_ in found] == [
            ToyModel(ToyConfig(sliding_window=3)).greedy(prompt, 3) for prompt in prompts
        ]

    def test_preempted_tokens_are_kept(self, make_engine) -> None:
        """B15: a token that was sampled when its request lost the slot is output, not sampled again."""
        engine = make_engine(config={"async_depth": 1})
        rid = engine.add_request([5, 6], GREEDY, keep_output=True)
        for _ in range(4):
            engine.step()
        engine.preempt(rid)
        engine.check()
        while engine.has_unfinished:
            engine.step()
            engine.check()
        assert list(engine.take_output(rid)[0].token_ids) == ToyModel().greedy([5, 6], 12)
        assert engine.stats().generated_tokens == 12


class TestHost:
    @pytest.mark.parametrize("depth", [0, 1])
    def test_processor_that_forces_two_tokens(self, make_engine, depth: int) -> None:
        """B14: it sees every token before its own."""
        seen = []

        def force(row: torch.Tensor, request: object, output: Sequence[int]) -> None:
            seen.append(tuple(output))
            wanted = {0: 30, 1: 31}.get(len(output))
            if wanted is not None:
                row.fill_(-torch.inf)
                row[wanted] = 0.0

        engine = make_engine(
            sampler=Sampler(processors=[PerRequest(force)]), config={"async_depth": depth}
        )
        output = engine.generate([5, 6], GREEDY)[0]
        assert output.token_ids[:2] == (30, 31)
        assert 30 not in output.token_ids[2:] or 31 not in output.token_ids[2:3]
        assert [seen[i] for i in range(12)] == [output.token_ids[:i] for i in range(12)]

    def test_masks_stay_with_their_rows_when_drafts_are_short(self, make_engine) -> None:
        """B22, B23: a drafter that proposes less than the plan made room for, beside a grammar."""

        class Short:
            draft_length = 4

            def propose(self, view: Any, max_drafts: int) -> DraftBatch:
                return DraftBatch(token_ids=tuple(((9,), ())[i % 2] for i in range(len(view.rids))))

        for depth in (0, 1):
            engine = make_engine(
                drafter=Short(),
                grammar=lambda params: Letters(),
                config={"async_depth": depth, "max_num_batched_tokens": 32},
            )
            prompts = [[5, 6], [7, 8], [9, 10]]
            outputs = engine.generate(prompts, [GREEDY, GREEDY.replace(regex="x"), GREEDY])
            state = LettersState()
            assert state.accept(outputs[1].token_ids)
            assert len(outputs[1].token_ids) == 9
            for prompt, output in zip(prompts[::2], outputs[::2], strict=True):
                assert list(output.token_ids) == ToyModel().greedy(prompt, 12)

    def test_prompt_as_long_as_a_verify_row(self, make_engine) -> None:
        """B21: a prompt of drafts + 1 tokens is a prompt."""
        for depth in (0, 1):
            model = ToyModel(ToyConfig(dspark_block_size=4))
            engine = make_engine(model, drafter="dspark", config={"async_depth": depth})
            prompts = [[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]]
            for prompt, output in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
                assert list(output.token_ids) == ToyModel().greedy(prompt, 12)

    def test_grammar_after_preemption(self, make_engine) -> None:
        """B24: no drafts and no mask of before."""
        model = ToyModel(ToyConfig(dspark_block_size=4))
        engine = make_engine(
            model, drafter="dspark", grammar=lambda p: Letters(), config={"async_depth": 1}
        )
        rid = engine.add_request([5, 6], GREEDY.replace(regex="x"), keep_output=True)
        for count in range(60):
            if not engine.has_unfinished:
                break
            if count in (3, 6, 7):
                engine.preempt(rid)
            engine.step()
            engine.check()
        output = engine.take_output(rid)[0]
        assert LettersState().accept(output.token_ids)
        assert output.finish_reason is FinishReason.STOP


class TestFutureTokens:
    def test_ids_are_taken_once(self) -> None:
        tokens = FutureTokens(3, vocab_size=10, check=True)
        tokens.put([2, 0], torch.tensor([4, 5]))
        assert tokens.take([0, 2]).tolist() == [5, 4]
        for slot in (0, 1):
            with pytest.raises(InvariantBroken, match="no sampled token"):
                tokens.take([slot])
        tokens.put([1], torch.tensor([-1]))
        assert tokens.take([1]).tolist() == [0]
        tokens.put([1], torch.tensor([10]))
        with pytest.raises(InvariantBroken, match="no sampled token"):
            tokens.take([1])

    def test_a_runner_that_loses_one_is_seen(self, make_engine) -> None:
        engine = make_engine(config={"async_depth": 1})
        engine._parts.runner._future.put = lambda slots, tokens: None
        with pytest.raises(RequestError, match="no sampled token"):
            engine.generate([5, 6], GREEDY)


class TestPause:
    @pytest.mark.parametrize("depth", [0, 1])
    def test_pause_and_resume(self, make_engine, depth: int) -> None:
        engine = make_engine(config={"async_depth": depth})
        rid = engine.add_request([5, 6], GREEDY, keep_output=True)
        engine.step()
        engine.pause()
        engine.pause()
        steps = engine.stats().steps
        assert engine._parts.scheduler.num_in_flight == 0
        engine.step()
        assert not engine.has_unfinished
        assert engine.stats().steps == steps
        with pytest.raises(RequestError, match="paused"):
            engine.generate([7, 8], GREEDY)
        with pytest.raises(RequestError, match="paused"):
            next(engine.stream([7, 8], GREEDY))
        engine.resume()
        while engine.has_unfinished:
            engine.step()
        assert list(engine.take_output(rid)[0].token_ids) == ToyModel().greedy([5, 6], 12)
