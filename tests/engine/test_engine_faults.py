"""What fails, fails alone, with its cause, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref

import pytest
import torch

from deepinfer import Engine, SamplingParams
from deepinfer.core import FinishReason, MemorySink
from deepinfer.core.errors import (
    ConfigError,
    EngineDead,
    InvalidLogits,
    InvalidRequest,
    InvariantBroken,
    RequestError,
    Unschedulable,
)
from deepinfer.core.protocols import DraftBatch
from deepinfer.sampling import PerRequest, Sampler
from deepinfer.scheduling import Scheduler
from deepinfer.testing import ToyModel, ToyTokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = GREEDY.replace(max_tokens=200)


class Planted(Exception):
    """Raised by tests."""


def fail_on(count: int, error: BaseException):  # type: ignore[no-untyped-def]
    """A fault at one forward pass only."""
    left = [count]

    def fault(batch: object) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise error

    return fault


class TestForward:
    @pytest.mark.parametrize("at", [1, 2, 5])
    def test_failure_ends_the_requests_of_its_step(self, make_engine, at: int) -> None:
        model = ToyModel()
        engine = make_engine(model)
        rids = [engine.add_request([5, i], GREEDY) for i in range(4, 9)]
        cause = Planted("in the forward pass")
        model.fault = fail_on(at, cause)
        ends = {}
        while engine.has_unfinished:
            for delta in engine.step():
                if delta.finished:
                    ends[delta.rid] = delta
            engine.check()
        failed = [rid for rid in rids if ends[rid].finish_reason is FinishReason.ERROR]
        assert failed == rids[:3]  # three slots
        for rid in failed:
            assert isinstance(ends[rid].error, RequestError)
            assert ends[rid].error.rid == rid
            assert ends[rid].error.__cause__ is cause
        for rid in rids[3:]:
            assert ends[rid].finish_reason is FinishReason.LENGTH
        assert engine.stats().failed_steps == 1
        output = engine.generate([5, 6], GREEDY)[0]
        assert list(output.token_ids) == ToyModel().greedy([5, 6], 12)

    def test_generate_raises_and_carries_the_outputs(self, make_engine) -> None:
        model = ToyModel()
        model.fault = fail_on(2, Planted())
        engine = make_engine(model)
        with pytest.raises(RequestError, match="Planted") as caught:
            engine.generate(["a", "b", "c", "d"], GREEDY)
        outputs = caught.value.outputs  # type: ignore[attr-defined]
        assert [o.finish_reason for o in outputs] == [FinishReason.ERROR] * 3 + [
            FinishReason.LENGTH
        ]
        assert len(outputs[0].token_ids) == 1
        model.fault = fail_on(2, Planted())
        outputs = engine.generate(["a", "b"], GREEDY, on_error="return")
        assert all(isinstance(output.error, RequestError) for output in outputs)

    def test_stream_raises(self, make_engine) -> None:
        model = ToyModel()
        model.fault = fail_on(3, Planted())
        engine = make_engine(model)
        stream = engine.stream("abc", GREEDY)
        with pytest.raises(RequestError, match="Planted"):
            list(stream)
        assert list(stream) == []
        assert not engine.has_unfinished

    def test_out_of_memory_is_no_exception_to_this(self, make_engine) -> None:
        model = ToyModel()
        model.fault = fail_on(1, torch.OutOfMemoryError("no room"))
        engine = make_engine(model)
        with pytest.raises(RequestError, match="no room"):
            engine.generate("abc", GREEDY)
        assert engine.generate("abc", GREEDY)[0].finished


class TestSampling:
    def test_one_row_of_nan_ends_one_request(self, make_engine) -> None:
        def poison(row: torch.Tensor, request: object, output: object) -> None:
            if len(output) == 4:  # type: ignore[arg-type]
                row.fill_(float("nan"))

        sampler = Sampler(processors=[PerRequest(poison, rids=["bad"])])
        engine = make_engine(sampler=sampler)
        engine.add_request([5, 6], GREEDY, rid="bad", keep_output=True)
        engine.add_request([5, 6], GREEDY, rid="good", keep_output=True)
        while engine.has_unfinished:
            engine.step()
            engine.check()
        bad, good = engine.take_output("bad")[0], engine.take_output("good")[0]
        assert isinstance(bad.error, InvalidLogits)
        assert bad.error.rid == "bad"
        assert list(bad.token_ids) == ToyModel().greedy([5, 6], 4)
        assert list(good.token_ids) == ToyModel().greedy([5, 6], 12)

    def test_raising_processor_ends_the_step(self, make_engine) -> None:
        def explode(logits: object, rows: object) -> None:
            raise Planted

        engine = make_engine(sampler=Sampler(processors=[explode]))
        with pytest.raises(RequestError, match="Planted"):
            engine.generate("abc", GREEDY)


def test_raising_detokenizer_ends_its_request_alone(make_engine) -> None:
    class Stream:
        def __init__(self, fails: bool) -> None:
            self.fails = fails

        def push(self, token_id: int) -> str:
            if self.fails:
                raise Planted
            return "x"

        def finish(self) -> str:
            return ""

    class Tokenizer(ToyTokenizer):
        count = 0

        def stream(self) -> Stream:
            self.count += 1
            return Stream(self.count == 1)

    engine = make_engine(tokenizer=Tokenizer())
    outputs = engine.generate(["a", "b"], GREEDY, on_error="return")
    assert isinstance(outputs[0].error, RequestError)
    assert outputs[1].text == "x" * 12


def test_raising_sink_aborts_its_request_alone(make_engine) -> None:
    engine = make_engine()

    def sink(delta: object) -> None:
        raise Planted

    engine.add_request("abc", LONG, sink=sink)
    other = engine.add_request("abc", GREEDY)
    engine.step()
    engine.check()
    ends = []
    while engine.has_unfinished:
        ends += [delta.rid for delta in engine.step() if delta.finished]
    assert ends == [other]
    assert engine.stats().requests_finished == {"abort": 1, "length": 1}


def test_raising_stats_sink_is_dropped(make_engine) -> None:
    class Raising(MemorySink):
        def record(self, event: object) -> None:
            raise Planted

    assert make_engine(sink=Raising()).generate("abc", GREEDY)[0].finished


class TestInterrupt:
    @pytest.mark.parametrize("at", [1, 2, 4])
    def test_in_generate_leaves_no_requests(self, make_engine, at: int) -> None:
        model = ToyModel()
        engine = make_engine(model)
        rid = engine.add_request([5, 6], GREEDY)
        model.fault = fail_on(at, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            engine.generate(["a", "b", "c", "d"], LONG)
        engine.check()
        model.fault = None
        tokens: list[int] = []
        while engine.has_unfinished:
            for delta in engine.step():
                assert delta.rid == rid
                tokens += delta.token_ids
            engine.check()
        assert tokens == ToyModel().greedy([5, 6], 12)  # the bystander was run again, unharmed

    def test_while_a_result_is_applied(self, make_engine) -> None:
        class Interrupted(Scheduler):
            def apply(self, result):  # type: ignore[no-untyped-def]
                progress = super().apply(result)
                if result.step == 2:
                    raise KeyboardInterrupt
                return progress

        engine = make_engine(scheduler=Interrupted)
        rid = engine.add_request([5, 6], GREEDY)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(["a"], LONG)
        engine.check()
        ends = {}
        while engine.has_unfinished:
            ends |= {delta.rid: delta for delta in engine.step() if delta.finished}
        assert "interrupted" in str(ends[rid].error)
        assert engine.generate("a", GREEDY)[0].finished

    @pytest.mark.parametrize("line", range(0, 60, 3))
    def test_anywhere_in_the_books(self, make_engine, line: int) -> None:
        """Strikes at one line after another of an abort, a submission, and the end of a request."""
        engine = make_engine()
        left = [line]

        def strike(frame, event, argument):  # type: ignore[no-untyped-def]
            name = frame.f_code.co_filename
            if "deepinfer/engine/loop" not in name and "deepinfer/scheduling" not in name:
                return strike if "deepinfer" in name else None
            left[0] -= event == "line"
            if left[0] == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
            return strike

        for prepare, call in (
            (lambda: engine.add_request([5], LONG, rid="a"), lambda: engine.abort("a")),
            (lambda: None, lambda: engine.add_request([5, 6], GREEDY.replace(n=3))),
            (lambda: engine.add_request([5], GREEDY.replace(max_tokens=1)), engine.step),
        ):
            prepare()
            left[0] = line + 1
            before = sys.gettrace()
            sys.settrace(strike)
            with contextlib.suppress(KeyboardInterrupt):
                call()
            sys.settrace(before)
            if line % 2:  # as generate does when it is interrupted
                for rid in ("a", f"request-{engine._num_named}"):
                    engine.abort(rid)
            engine.check()
            while engine.has_unfinished:
                engine.step()
            output = engine.generate([5, 6], GREEDY)[0]
            assert list(output.token_ids) == ToyModel().greedy([5, 6], 12)

    def test_between_prompts(self, make_engine) -> None:
        class Tokenizer(ToyTokenizer):
            def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
                if text == "c":
                    raise KeyboardInterrupt
                return super().encode(text, add_bos=add_bos)

        engine = make_engine(tokenizer=Tokenizer())
        with pytest.raises(KeyboardInterrupt):
            engine.generate(["a", "b", "c"], LONG)
        assert not engine.has_unfinished
        engine.check()


class TestBrokenParts:
    def test_broken_books_end_the_engine_and_every_waiter(self) -> None:
        class Broken(Scheduler):
            def apply(self, result):  # type: ignore[no-untyped-def]
                if result.step == 3:
                    raise InvariantBroken("planted")
                return super().apply(result)

        engine = Engine(model=ToyModel(), tokenizer=ToyTokenizer(), scheduler=Broken)
        stream = engine.stream("abc", LONG)
        with pytest.raises(EngineDead, match="planted") as caught:
            engine.generate(["a", "b"], LONG)
        assert isinstance(caught.value.__cause__, InvariantBroken)
        with pytest.raises(EngineDead, match="planted"):
            list(stream)
        for call in (engine.step, lambda: engine.generate("a"), lambda: engine.stream("a")):
            with pytest.raises(EngineDead, match="planted"):
                call()
        assert not engine.has_unfinished
        engine.close()

    def test_scheduler_that_plans_nothing_lets_nobody_wait(self) -> None:
        class Lazy(Scheduler):
            def plan(self, now):  # type: ignore[no-untyped-def]
                return None

        with (
            Engine(model=ToyModel(), tokenizer=ToyTokenizer(), scheduler=Lazy) as engine,
            pytest.raises(Unschedulable, match="plans nothing"),
        ):
            engine.generate("abc", GREEDY)

    def test_check_sees_lost_requests(self, make_engine) -> None:
        engine = make_engine()
        rid = engine.add_request("abc", GREEDY)
        engine._parts.scheduler.abort(rid)
        with pytest.raises(InvariantBroken, match="the scheduler knows 0"):
            engine.check()
        engine.abort(rid)
        engine.check()

    @pytest.mark.parametrize(
        "drafts",
        [
            lambda n: DraftBatch(token_ids=((63, 99),) * n),
            lambda n: DraftBatch(token_ids=((),) * n),
            lambda n: DraftBatch(token_ids=((7,) * 40,) * n),
            lambda n: DraftBatch(token_ids=((-1,),) * n),
        ],
    )
    def test_useless_drafts_harm_nothing(self, make_engine, drafts) -> None:
        class Drafter:
            draft_length = 4

            def propose(self, view, max_drafts):  # type: ignore[no-untyped-def]
                return drafts(len(view.rids))

        engine = make_engine(drafter=Drafter())
        outputs = engine.generate([[5, 6], [7, 8]], GREEDY)
        assert list(outputs[0].token_ids) == ToyModel().greedy([5, 6], 12)
        assert list(outputs[1].token_ids) == ToyModel().greedy([7, 8], 12)

    def test_raising_drafter_ends_the_step(self, make_engine) -> None:
        class Drafter:
            draft_length = 4

            def propose(self, view, max_drafts):  # type: ignore[no-untyped-def]
                raise Planted

        engine = make_engine(drafter=Drafter())
        with pytest.raises(RequestError, match="Planted"):
            engine.generate("abc", GREEDY)


class TestClose:
    def test_gives_everything_back(self, make_engine) -> None:
        model = ToyModel()
        engine = Engine(model=model, tokenizer=ToyTokenizer(), drafter=None)
        cache = weakref.ref(engine._parts.runner.cache)
        gone = weakref.ref(model)
        engine.generate("abc", GREEDY)
        engine.add_request("abc", LONG, keep_output=True)
        engine.step()
        engine.close()
        engine.close()
        del model
        gc.collect()
        assert cache() is None
        assert gone() is None
        assert "closed" in repr(engine)

    def test_drafter_gives_the_cache_back(self, drafting_model) -> None:
        from deepinfer.engine import DSparkDrafter

        drafter = DSparkDrafter(drafting_model)
        engine = Engine(model=drafting_model, drafter=drafter)
        cache = weakref.ref(engine._parts.runner.cache)
        engine.close()
        gc.collect()
        assert cache() is None

    def test_use_afterwards(self) -> None:
        with Engine(model=ToyModel(), tokenizer=ToyTokenizer()) as engine:
            rid = engine.add_request("abc", LONG)
        for call in (
            engine.step,
            lambda: engine.generate("abc"),
            lambda: engine.generate("abc", on_error="raise"),
            lambda: engine.stream("abc"),
            lambda: engine.add_request("abc"),
            lambda: engine.replace(drafter=None),
        ):
            with pytest.raises(EngineDead, match=r"close\(\) was called"):
                call()
        assert engine.abort(rid) == []
        assert engine.stats().requests_finished == {"abort": 1}
        assert engine.model is None


def test_several_threads_share_an_engine(make_engine) -> None:
    engine = make_engine()
    found: dict[int, list[int]] = {}

    def work(i: int) -> None:
        found[i] = [
            token for _ in range(3) for token in engine.generate([5, i], GREEDY)[0].token_ids
        ]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {i: ToyModel().greedy([5, i], 12) * 3 for i in range(4, 10)}


def test_options_that_a_model_cannot_meet_are_refused(monkeypatch) -> None:
    monkeypatch.delattr(ToyModel, "set_deterministic")
    with pytest.raises(ConfigError, match="has no set_deterministic"):
        Engine(model=ToyModel(), config={"deterministic": True})


class TestCallsFromInside:
    """A sink or a part that calls the engine back while a step runs."""

    @pytest.mark.parametrize(
        "call",
        [
            lambda engine: engine.step(),
            lambda engine: engine.generate([9, 9], GREEDY),
            lambda engine: next(engine.stream([9, 9], GREEDY)),
        ],
    )
    def test_a_step_is_refused(self, make_engine, call) -> None:
        engine = make_engine()
        errors = []

        def sink(delta: object) -> None:
            with pytest.raises(RequestError, match="from inside a step") as caught:
                call(engine)
            errors.append(caught.value)

        engine.add_request([5, 6], GREEDY, sink=sink)
        engine.add_request([5, 7], GREEDY, rid="other", keep_output=True)
        while engine.has_unfinished:
            engine.step()
            engine.check()
        assert errors
        assert list(engine.take_output("other")[0].token_ids) == ToyModel().greedy([5, 7], 12)

    def test_requests_can_be_added_and_aborted(self, make_engine) -> None:
        model = ToyModel()
        engine = make_engine(model)
        engine.add_request([5, 6], GREEDY, rid="gone")
        engine.add_request([5, 7], GREEDY, rid="stays", keep_output=True)

        def fault(batch: object) -> None:
            if model.num_forwards == 3:
                engine.abort("gone")
                engine.add_request([5, 8], GREEDY, rid="new", keep_output=True)

        model.fault = fault
        while engine.has_unfinished:
            engine.step()
            engine.check()
        assert engine.stats().requests_finished == {"abort": 1, "length": 2}
        for rid, prompt in (("stays", [5, 7]), ("new", [5, 8])):
            assert list(engine.take_output(rid)[0].token_ids) == ToyModel().greedy(prompt, 12)


def test_one_failure_names_each_of_its_requests(make_engine) -> None:
    def explode(logits: object, rows: object) -> None:
        raise InvalidRequest("planted")

    engine = make_engine(sampler=Sampler(processors=[explode]))
    outputs = engine.generate([[5, 6], [5, 7]], GREEDY, on_error="return")
    assert [o.error.rid for o in outputs] == [o.rid for o in outputs]  # type: ignore[union-attr]
    assert all(isinstance(output.error, InvalidRequest) for output in outputs)
