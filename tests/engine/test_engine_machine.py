"""Any order of calls on a whole engine: every request gets the tokens it gets alone, or a reason why not."""

from __future__ import annotations

import functools
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from deepinfer import Engine, SamplingParams
from deepinfer.core import FinishReason, OutputDelta
from deepinfer.core.errors import RequestError
from deepinfer.testing import ToyConfig, ToyModel, ToyTokenizer

MAX_LEN = 40


def toy(draft: bool, window: int = 0) -> ToyModel:
    return ToyModel(
        ToyConfig(
            vocab_size=24,
            max_position_embeddings=MAX_LEN,
            dspark_block_size=4 * draft,
            draft_errors=3,
            sliding_window=window,
            narrows=window > 0,
        )
    )


@functools.cache
def alone(
    prompt: tuple[int, ...], params: SamplingParams, window: int
) -> tuple[tuple[Any, ...], ...]:
    config = {"max_num_seqs": 1, "prefix_cache": False}
    model = toy(False, window)
    with Engine(model=model, tokenizer=ToyTokenizer(24), config=config) as engine:
        return tuple(
            (o.text, o.token_ids, o.finish_reason, o.logprobs)
            for o in engine.generate(prompt, params)
        )


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 18),
    temperature=st.sampled_from([0.0, 0.0, 0.0, 0.9]),
    seed=st.integers(0, 3),
    n=st.sampled_from([1, 1, 1, 2]),
    stop=st.sampled_from([(), (), (), ("ab", "c")]),
    stop_token_ids=st.sampled_from([(), (7,), (9, 20)]),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, 1]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.0, 1.5]),
)


class EngineMachine(RuleBasedStateMachine):
    """Adds, steps, aborts, preempts, interrupts and breaks."""

    make_engine: Any = Engine

    @initialize(
        draft=st.sampled_from([True, True, False]),
        seqs=st.integers(1, 4),
        chunk=st.integers(5, 9),
        spare=st.integers(0, 20),
        depth=st.integers(0, 1),
        window=st.sampled_from([0, 0, 1, 2, 3]),
        block_size=st.sampled_from([2, 4, 8]),
        blocks=st.integers(0, 30),
        host=st.sampled_from([0, 0, 3]),
    )
    def start(
        self,
        draft: bool,
        seqs: int,
        chunk: int,
        spare: int,
        depth: int,
        window: int,
        block_size: int,
        blocks: int,
        host: int,
    ) -> None:
        self.window = window
        self.model = toy(draft, window)
        self.engine = self.make_engine(
            model=self.model,
            tokenizer=ToyTokenizer(24),
            drafter="dspark" if draft else None,
            config={
                "max_num_seqs": seqs,
                "prefill_chunk_tokens": chunk,
                "max_num_batched_tokens": seqs + spare,
                "async_depth": depth,
                "block_size": block_size,
                "num_blocks": -(-MAX_LEN // block_size) + blocks,
                "host_cache_bytes": host * 20 * block_size,
                "num_window_slots": host,
                "replay": "exact",
            },
        )
        self.asked: dict[str, tuple[tuple[int, ...], SamplingParams]] = {}
        self.deltas: dict[str, list[OutputDelta]] = {}
        self.count = 0

    @rule(length=st.integers(1, 20), params=PARAMS)
    def add_and_step(self, length: int, params: SamplingParams) -> None:
        self.add(length, params)
        self.step(3)

    @rule(length=st.integers(1, 20), params=PARAMS)
    def add(self, length: int, params: SamplingParams) -> None:
        first = self.count % 3 * 5  # so that some begin alike
        prompt = tuple((first + i * i) % 20 + 4 for i in range(length))
        rid = self.engine.add_request(prompt, params, rid=f"r{self.count}")
        self.count += 1
        self.asked[rid] = (prompt, params)
        self.deltas[rid] = []

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.take(self.engine.step())
            self.engine.check()

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), chance=st.integers(0, 2))
    def abort(self, data: st.DataObject, chance: int) -> None:
        if chance:
            return
        rid = data.draw(st.sampled_from(sorted(self.asked)))
        self.engine.abort(rid)
        self.engine.abort(rid)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.engine.preempt(data.draw(st.sampled_from(sorted(self.asked))))

    @precondition(lambda self: self.asked)
    @rule(chance=st.integers(0, 3))
    def reset_prefix_cache(self, chance: int) -> None:
        if chance == 0:
            self.engine.reset_prefix_cache()

    @precondition(lambda self: self.asked)
    @rule()
    def interrupt(self) -> None:
        self.fail_once(KeyboardInterrupt())

    @precondition(lambda self: self.asked)
    @rule(chance=st.integers(0, 3))
    def fail(self, chance: int) -> None:
        if chance == 0:
            self.fail_once(RuntimeError("planted"))

    def fail_once(self, error: BaseException) -> None:
        def fault(batch: object) -> None:
            raise error

        self.model.fault = fault
        try:
            self.take(self.engine.step())
        except KeyboardInterrupt:
            assert isinstance(error, KeyboardInterrupt)
        finally:
            self.model.fault = None

    def take(self, deltas: list[OutputDelta]) -> None:
        for delta in deltas:
            self.deltas[delta.rid].append(delta)
            ended = [d for d in self.deltas[delta.rid] if d.finished]
            assert len({d.index for d in ended}) == len(ended)
            if len(ended) == self.asked[delta.rid][1].n:
                self.compare(delta.rid)

    def compare(self, rid: str) -> None:
        """Everything that came is the beginning of what comes alone; all of it, without a reason why not."""
        deltas = self.deltas.pop(rid)
        for index, wanted in enumerate(alone(*self.asked.pop(rid), self.window)):
            mine = [delta for delta in deltas if delta.index == index]
            assert [delta.finished for delta in mine] == [False] * (len(mine) - 1) + [True]
            text = "".join(delta.text for delta in mine)
            tokens = tuple(token for delta in mine for token in delta.token_ids)
            logprobs = tuple(entry for delta in mine for entry in delta.logprobs or ())
            reason = mine[-1].finish_reason
            assert mine[-1].usage.generated == len(tokens)
            if reason in (FinishReason.ABORT, FinishReason.ERROR):
                assert wanted[1][: len(tokens)] == tokens
                if reason is FinishReason.ERROR:
                    assert isinstance(mine[-1].error, RequestError)
                    assert "planted" in str(mine[-1].error)
            else:
                assert (text, tokens, reason) == wanted[:3]
                assert logprobs == (wanted[3] or ())

    @invariant()
    def books_add_up(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(60 * (len(self.asked) + 1)):
            if not self.engine.has_unfinished:
                break
            self.step(1)
        assert not self.asked
        assert not self.engine.has_unfinished
        assert self.engine._parts.cache.num_held == 0
        self.engine.close()


def machine_settings(examples: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=20,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def test_any_order_of_calls() -> None:
    run_state_machine_as_test(EngineMachine, settings=machine_settings(40))


def test_the_machine_finds_a_planted_fault() -> None:
    def engine_that_keeps_rejected_drafts(**parts: Any) -> Engine:
        engine = Engine(**parts)
        cache = engine._parts.runner.cache  # type: ignore[attr-defined]
        cache.truncate = lambda slot, length: None
        return engine

    class Broken(EngineMachine):
        make_engine = staticmethod(engine_that_keeps_rejected_drafts)

    with pytest.raises(Exception):  # noqa: B017, PT011 - any failure at all shows that it was seen
        run_state_machine_as_test(Broken, settings=machine_settings(40))
