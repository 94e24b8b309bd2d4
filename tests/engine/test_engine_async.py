"""The asyncio twin: the same outputs, nobody waits for ever, nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import pytest

from deepinfer import AsyncEngine, Engine, SamplingParams
from deepinfer.core import FinishReason, OutputDelta
from deepinfer.core.errors import (
    ConfigError,
    EngineDead,
    InvalidRequest,
    InvariantBroken,
    RequestError,
    RequestTooLong,
)
from deepinfer.scheduling import Scheduler
from deepinfer.testing import ToyModel, ToyTokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = GREEDY.replace(max_tokens=400)
T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(work, 60)

    return asyncio.run(bounded())


DEPTHS = [0]


@pytest.fixture(params=[0, 1], autouse=True)
def depth(request: pytest.FixtureRequest) -> int:
    """Every test runs without and with steps ahead of their results."""
    DEPTHS[0] = request.param
    return request.param


def make(model: ToyModel | None = None, **parts: Any) -> AsyncEngine:
    config = {"max_num_seqs": 3, "prefill_chunk_tokens": 7, "async_depth": DEPTHS[0]}
    return AsyncEngine(model=model or ToyModel(), tokenizer=ToyTokenizer(), config=config, **parts)


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "deepinfer-engine"]


def test_salts_keep_tenants_apart() -> None:
    prompt = [5 + i % 40 for i in range(300)]

    async def work() -> list[int]:
        cached = []
        async with make() as engine:
            for salt in ("a", "b", "a"):
                outputs = await engine.generate(prompt, GREEDY, cache_salt=salt)
                cached.append(outputs[0].usage.cached)
            async with engine.stream(prompt, GREEDY, cache_salt="c") as stream:
                cached.append((await anext(stream)).usage.cached)
        return cached

    assert run(work()) == [0, 0, 256, 0]


def test_outputs_are_those_of_the_engine() -> None:
    prompts = ["abc", [5, 6, 7], "a longer prompt"]

    async def work() -> list[Any]:
        async with make() as engine:
            return await engine.generate(prompts, GREEDY)

    outputs = run(work())
    with Engine(model=ToyModel(), tokenizer=ToyTokenizer()) as engine:
        wanted = engine.generate(prompts, GREEDY)
    assert [(o.text, o.token_ids, o.usage) for o in outputs] == [
        (o.text, o.token_ids, o.usage) for o in wanted
    ]
    assert threads() == []


def test_many_callers_at_once() -> None:
    async def one(engine: AsyncEngine, i: int) -> list[int]:
        tokens: list[int] = []
        async for delta in engine.stream([5, i], GREEDY):
            tokens += delta.token_ids
        return tokens

    async def work() -> list[list[int]]:
        async with make() as engine:
            found = await asyncio.gather(*(one(engine, i) for i in range(4, 20)))
            await engine.check()
            return found

    assert run(work()) == [ToyModel().greedy([5, i], 12) for i in range(4, 20)]


def test_samples_and_mixed_params() -> None:
    async def work() -> None:
        async with make() as engine:
            outputs = await engine.generate(["a", "b"], [GREEDY.replace(n=2), {"max_tokens": 3}])
            assert [o.index for o in outputs] == [0, 1, 0]

    run(work())


class TestErrors:
    def test_bad_requests(self) -> None:
        async def work() -> None:
            async with make() as engine:
                with pytest.raises(InvalidRequest):
                    await engine.generate(["abc", ""], GREEDY)
                with pytest.raises(RequestTooLong):
                    await anext(engine.stream([5] * 600))
                outputs = await engine.generate(["abc", ""], GREEDY, on_error="return")
                assert [o.finish_reason for o in outputs] == [
                    FinishReason.LENGTH,
                    FinishReason.ERROR,
                ]
                with pytest.raises(ConfigError):
                    await engine.generate("a", on_error="no")
                await engine.check()
                assert (await engine.stats()).requests_running == 0

        run(work())

    def test_failing_step_reaches_every_waiter_and_the_engine_goes_on(self) -> None:
        model = ToyModel()

        def fault(batch: object) -> None:
            if model.num_forwards == 3:
                raise RuntimeError("planted")

        model.fault = fault

        async def read(engine: AsyncEngine) -> None:
            async for _ in engine.stream("abc", GREEDY):
                pass

        async def work() -> None:
            async with make(model) as engine:
                results = await asyncio.gather(
                    *(read(engine) for _ in range(3)),
                    engine.generate("abc", GREEDY),
                    return_exceptions=True,
                )
                errors = [r for r in results if isinstance(r, RequestError)]
                assert errors
                assert all("planted" in str(error) for error in errors)
                model.fault = None
                outputs = await engine.generate("abc", GREEDY)
                assert outputs[0].finish_reason is FinishReason.LENGTH
                model.num_forwards = 0
                model.fault = fault
                with pytest.raises(RequestError) as caught:
                    await engine.generate(["abc", "def"], GREEDY)
                assert len(caught.value.outputs) == 2  # type: ignore[attr-defined]

        run(work())

    def test_broken_books_reach_every_waiter(self) -> None:
        class Broken(Scheduler):
            def apply(self, result):  # type: ignore[no-untyped-def]
                if result.step == 4:
                    raise InvariantBroken("planted")
                return super().apply(result)

        async def work() -> None:
            engine = make(scheduler=Broken)
            results = await asyncio.gather(
                *(engine.generate("abc", LONG) for _ in range(5)), return_exceptions=True
            )
            assert all(isinstance(r, EngineDead) for r in results)
            with pytest.raises(EngineDead, match="planted"):
                await engine.generate("abc", LONG)
            await engine.close()

        run(work())

    def test_a_dying_thread_answers_everybody(self, monkeypatch) -> None:
        async def work() -> None:
            engine = make()

            def broken() -> None:
                raise MemoryError("planted")

            monkeypatch.setattr(engine._engine, "_advance", broken)
            results = await asyncio.gather(
                *(engine.generate("abc", LONG) for _ in range(3)), return_exceptions=True
            )
            assert all(isinstance(r, EngineDead) for r in results)
            with pytest.raises(EngineDead):
                await engine.generate("abc", LONG)
            await engine.close()

        run(work())


class TestCancel:
    def test_cancelled_reader_aborts(self) -> None:
        async def read(engine: AsyncEngine) -> None:
            async for _ in engine.stream("abc", LONG):
                pass

        async def work() -> None:
            async with make() as engine:
                task = asyncio.create_task(read(engine))
                await asyncio.sleep(0.02)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await engine.check()
                stats = await engine.stats()
                assert stats.requests_finished == {"abort": 1}

        run(work())

    def test_timeout_aborts_though_the_stream_is_kept(self) -> None:
        async def drain(stream: AsyncIterator[OutputDelta]) -> None:
            while True:  # what is queued already comes at once
                await asyncio.wait_for(anext(stream), 0.01)

        async def work() -> None:
            model = ToyModel()
            async with make(model) as engine:
                stream = engine.stream("abc", LONG)
                await anext(stream)
                model.fault = lambda batch: time.sleep(0.2)
                with pytest.raises(TimeoutError):
                    await drain(stream)
                model.fault = None
                assert (await engine.stats()).requests_finished == {"abort": 1}
                with pytest.raises(StopAsyncIteration):
                    await anext(stream)

        run(work())

    def test_cancelled_generate_aborts_all(self) -> None:
        async def work() -> None:
            async with make() as engine:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await engine.generate(["abc"] * 8, LONG)
                stats = await engine.stats()
                assert stats.requests_running == stats.requests_waiting == 0
                await engine.check()

        run(work())

    @pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.003, 0.01])
    def test_at_any_moment(self, delay_s: float) -> None:
        async def work() -> None:
            async with make() as engine:
                tasks = [asyncio.create_task(engine.generate(["abc"] * 3, LONG)) for _ in range(4)]
                keeper = asyncio.create_task(engine.generate([5, 6], GREEDY))
                await asyncio.sleep(delay_s)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                assert list((await keeper)[0].token_ids) == ToyModel().greedy([5, 6], 12)
                stats = await engine.stats()
                assert stats.requests_running == stats.requests_waiting == 0
                await engine.check()

        run(work())

    def test_closed_and_dropped_streams_abort(self) -> None:
        async def work() -> None:
            async with make() as engine:
                async with engine.stream("abc", LONG) as stream:
                    await anext(stream)
                await stream.aclose()
                with pytest.raises(StopAsyncIteration):
                    await anext(stream)
                other = engine.stream("abc", LONG)
                await anext(other)
                del other
                gc.collect()
                engine.stream("never read", LONG)
                stats = await engine.stats()
                while stats.requests_running:
                    await asyncio.sleep(0.001)
                    stats = await engine.stats()
                assert stats.requests_finished == {"abort": 2}
                assert stats.requests_added == 2

        run(work())

    def test_abort_by_id(self) -> None:
        async def work() -> None:
            async with make() as engine:
                task = asyncio.create_task(engine.stream("abc", LONG, rid="mine").outputs())
                await asyncio.sleep(0.01)
                (partial,) = await engine.abort("mine")
                assert partial.finish_reason is FinishReason.ABORT
                assert (await task)[0].token_ids == partial.token_ids
                assert await engine.abort("mine") == []

        run(work())


class TestClose:
    def test_waiters_end(self) -> None:
        async def work() -> None:
            engine = make()
            tasks = [asyncio.create_task(engine.generate("abc", LONG)) for _ in range(5)]
            await asyncio.sleep(0.01)
            await engine.close()
            await engine.close()
            for task in tasks:
                with contextlib.suppress(EngineDead):
                    assert (await task)[0].finish_reason is FinishReason.ABORT
            for call in (engine.stats(), engine.generate("a"), engine.abort("x")):
                with pytest.raises(EngineDead):
                    await call
            with pytest.raises(EngineDead):
                await anext(engine.stream("a"))

        run(work())
        assert threads() == []

    def test_unused_engine(self) -> None:
        async def work() -> None:
            async with make():
                pass

        run(work())

    def test_idle_thread_ends_and_comes_back(self) -> None:
        async def work() -> None:
            async with make() as engine:
                engine._worker._idle_s = 0.01
                for _ in range(3):
                    await engine.generate("abc", GREEDY)
                    limit = time.monotonic() + 20
                    while threads() and time.monotonic() < limit:
                        await asyncio.sleep(0.005)
                    assert threads() == []

        run(work())

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    @pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
    def test_a_fork_starts_its_own_thread(self) -> None:
        engine = make()
        wanted = run(engine.generate("abc", GREEDY))[0].token_ids
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            try:
                same = run(engine.generate("abc", GREEDY))[0].token_ids == wanted
            finally:
                os._exit(0 if same else 1)
        assert os.waitpid(child, 0)[1] == 0
        run(engine.close())

    def test_an_event_loop_that_is_gone_holds_nothing(self) -> None:
        engine = make()

        async def leave() -> None:
            stream = engine.stream("abc", LONG)
            await anext(stream)
            kept.append(stream)

        kept: list[Any] = []
        run(leave())

        async def look() -> None:
            stats = await engine.stats()
            while stats.requests_running:
                await asyncio.sleep(0.001)
                stats = await engine.stats()
            assert stats.requests_finished == {"abort": 1}
            assert (await engine.generate("abc", GREEDY))[0].finished
            await engine.close()

        run(look())

    def test_engine_or_parts(self) -> None:
        with Engine(model=ToyModel()) as engine, pytest.raises(ConfigError, match="both an engine"):
            AsyncEngine(engine, tokenizer=ToyTokenizer())
        assert repr(make()).startswith("AsyncEngine(ToyModel")


class TestSharedStream:
    """Several tasks that read one stream."""

    @pytest.mark.parametrize("cut", [False, True])
    def test_all_end(self, cut: bool) -> None:
        async def work() -> list[int]:
            async with make() as engine:
                stream = engine.stream("abc", LONG if cut else GREEDY)

                tokens: list[int] = []

                async def read() -> None:
                    async for delta in stream:
                        tokens.extend(delta.token_ids)

                readers = [asyncio.create_task(read()) for _ in range(3)]
                if cut:
                    await asyncio.sleep(0.05)
                    await stream.aclose()
                await asyncio.wait_for(asyncio.gather(*readers), 10)
                return tokens

        tokens = run(work())
        ids = ToyTokenizer().encode("abc")
        assert tokens == ToyModel().greedy(ids, len(tokens))
        assert cut or len(tokens) == 12

    def test_all_end_when_it_is_refused_or_cancelled(self) -> None:
        async def work() -> list[Any]:
            async with make() as engine:
                refused = engine.stream([5] * 600, GREEDY)
                readers = [asyncio.create_task(refused.outputs()) for _ in range(2)]
                found = await asyncio.gather(*readers, return_exceptions=True)
                cancelled = engine.stream("abc", LONG)
                readers = [asyncio.create_task(cancelled.outputs()) for _ in range(2)]
                await asyncio.sleep(0)
                readers[0].cancel()
                await asyncio.wait(readers, timeout=10)
                assert all(reader.done() for reader in readers)
                return found

        found = run(work())
        assert [type(error) for error in found] == [RequestTooLong] * 2


def test_controls() -> None:
    async def work() -> None:
        async with make() as engine:
            with engine.trace() as trace:
                stream = engine.stream("abc", GREEDY, rid="mine", priority=1)
                first = await anext(stream)
                await engine.pause()
                other = asyncio.create_task(engine.generate("xyz", GREEDY))
                steps = (await engine.stats()).steps
                await asyncio.sleep(0.05)
                assert (await engine.stats()).steps == steps
                assert not other.done()
                await engine.preempt("mine")
                await engine.reset_prefix_cache()
                await engine.resume()
                tokens = [*first.token_ids]
                async for delta in stream:
                    tokens += delta.token_ids
                assert tokens == ToyModel().greedy([0, 4, 5, 6], 12)
                assert (await other)[0].finished
            assert len(trace) > 0

    run(work())
