"""The engine for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError, DeepInferError
from deepinfer.core.params import SamplingParams
from deepinfer.core.types import FinishReason, Output, OutputDelta
from deepinfer.engine.engine import Engine
from deepinfer.engine.outputs import OutputBuilder, as_request_error
from deepinfer.engine.prompts import Prompt, as_params, split_prompts
from deepinfer.engine.stats import EngineStats
from deepinfer.engine.trace import Trace
from deepinfer.engine.worker import AsyncSink, EngineWorker

__all__ = ["AsyncEngine", "AsyncTokenStream"]

Params = SamplingParams | Mapping[str, Any]
T = TypeVar("T")


class AsyncTokenStream(AsyncIterator[OutputDelta]):
    """Deltas of one request; the request is submitted when the first one is awaited.

    Cancelling the task that awaits a delta, closing the stream, leaving its `async with` block, or dropping it
    aborts the request.

    Args:
        worker: The engine's thread.
        engine: The engine.
        prompt: The prompt.
        params: Sampling options.
        rid: Id of the request.
        priority: Lower runs first.
        cache_salt: Requests share cached prefixes only when it is equal.

    Attributes:
        rid: Id of the request.
    """

    def __init__(
        self,
        worker: EngineWorker,
        engine: Engine,
        prompt: Prompt,
        params: SamplingParams,
        rid: str,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        self.rid = rid
        self._worker = worker
        self._engine = engine
        self._prompt = prompt
        self._params = params
        self._priority = priority
        self._cache_salt = cache_salt
        self._sink: AsyncSink | None = None
        self._builders: list[OutputBuilder] = []
        self._open = params.n
        self._refused: BaseException | None = None

    async def submit(self) -> None:
        """Submits the request, once.

        Raises:
            RequestError: The prompt or an option is unusable, does not fit, or the id is taken.
            EngineDead: The engine is closed, or stopped.
        """
        if self._sink is not None or self._open <= 0:
            return
        self._sink = sink = AsyncSink(self._worker, self.rid)
        try:
            self._builders = await _call(
                self._worker,
                lambda: self._engine._submit(
                    self._prompt,
                    self._params,
                    sink.push,
                    self.rid,
                    self._priority,
                    self._cache_salt,
                ),
            )
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                self._abort()
            else:
                self._refused = error
            self._open = 0
            sink.queue.put_nowait(None)  # for other tasks that wait on this stream
            raise

    async def __anext__(self) -> OutputDelta:
        delta = await self._next()
        if delta is None:
            raise StopAsyncIteration
        if delta.error is not None:
            self._abort()
            raise delta.error
        return delta

    async def _next(self) -> OutputDelta | None:
        await self.submit()
        if self._open <= 0 or self._sink is None:
            return None
        try:
            delta = await self._sink.queue.get()
        except BaseException:
            self._abort()
            raise
        if delta is not None:
            self._open -= delta.finished
        if self._open <= 0:
            self._sink.queue.put_nowait(None)  # for other tasks that wait on this stream
        return delta

    async def outputs(self) -> list[Output]:
        """Waits for the end.

        Returns:
            One output a sample; a failed one has `error` set.

        Raises:
            RequestError: The request was refused.
            EngineDead: The engine is closed, or stopped.
        """
        while await self._next() is not None:
            pass
        if self._refused is not None:  # another task was told
            raise self._refused
        return [builder.output() for builder in self._builders]

    async def aclose(self) -> None:
        """Aborts the request unless it is finished; calling it twice is harmless."""
        self._abort()

    def _abort(self) -> None:
        if self._open > 0 and self._sink is not None:
            with contextlib.suppress(DeepInferError):  # a closed engine has aborted it already
                self._worker.call(lambda: self._engine.abort(self.rid))
        self._open = 0

    async def __aenter__(self) -> AsyncTokenStream:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._abort()

    def __del__(self) -> None:
        if getattr(self, "_open", 0) > 0 and self._sink is not None:
            self._engine._loop.abort_later(self.rid)


class AsyncEngine:
    """The asyncio twin of `Engine`: the same requests and outputs, awaited.

    Steps run on one background thread, so the event loop is never blocked by a forward pass. Every awaited call
    ends: with its result, with the error that ended its request, or with `EngineDead`. Use it as an async context
    manager, or await `close`.

    Args:
        engine: The engine to run; it belongs to this object from now on.
        parts: Instead of `engine`: what `Engine` takes.

    Raises:
        ConfigError: As `Engine` says.

    Examples:
        >>> from deepinfer.testing import ToyModel, ToyTokenizer
        >>> async def main():
        ...     async with AsyncEngine(model=ToyModel(), tokenizer=ToyTokenizer()) as engine:
        ...         return await engine.generate(["abc", "def"], SamplingParams(max_tokens=4))
        >>> [output.usage.prompt for output in asyncio.run(main())]
        [4, 4]
    """

    def __init__(self, engine: Engine | None = None, **parts: Any) -> None:
        if engine is not None and parts:
            raise ConfigError(
                f"both an engine and {', '.join(parts)} are given; give the engine, or its parts."
            )
        self._engine = engine if engine is not None else Engine(**parts)
        self._worker = EngineWorker(self._engine)
        self._numbers = itertools.count(1)

    @classmethod
    def from_pretrained(
        cls, path_or_repo: str | os.PathLike[str] = "nano", **options: Any
    ) -> AsyncEngine:
        """Loads a checkpoint, as `Engine.from_pretrained` does; blocks while it loads.

        Args:
            path_or_repo: "nano", a checkpoint folder, or a hub repository "owner/name".
            options: As for `Engine.from_pretrained`.

        Returns:
            The engine.

        Raises:
            DeepInferError: As `Engine.from_pretrained` says.
        """
        return cls(Engine.from_pretrained(path_or_repo, **options))

    async def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        on_error: Literal["raise", "return"] = "raise",
        cache_salt: str | None = None,
    ) -> list[Output]:
        """Continues one prompt or many; cancelling the call aborts them.

        Args:
            prompts: As in `Engine.generate`.
            params: As in `Engine.generate`.
            on_error: As in `Engine.generate`.
            cache_salt: As in `Engine.generate`.

        Returns:
            The outputs in order of the prompts.

        Raises:
            RequestError: A prompt or an option is unusable, does not fit, or a step failed.
            EngineDead: The engine is closed, or stopped.
        """
        checks.check_choice("on_error", on_error, ("raise", "return"), ConfigError)
        items = split_prompts(prompts)
        all_params = as_params(params, len(items))
        streams = [
            self.stream(prompt, one, cache_salt=cache_salt)
            for prompt, one in zip(items, all_params, strict=True)
        ]
        outputs: list[Output] = []
        try:
            refused: dict[str, DeepInferError] = {}
            for stream in streams:
                try:
                    await stream.submit()
                except Exception as error:
                    if on_error == "raise":
                        raise
                    refused[stream.rid] = _typed(error, stream.rid)
            for stream in streams:
                if stream.rid in refused:
                    outputs.append(
                        Output(
                            rid=stream.rid,
                            finish_reason=FinishReason.ERROR,
                            error=refused[stream.rid],
                        )
                    )
                else:
                    outputs += await stream.outputs()
        except BaseException:
            for stream in streams:
                await stream.aclose()
            raise
        failed = next((output.error for output in outputs if output.error is not None), None)
        if failed is not None and on_error == "raise":
            failed.outputs = outputs  # type: ignore[attr-defined]
            raise failed
        return outputs

    def stream(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        rid: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncTokenStream:
        """Continues one prompt piece by piece: `async for delta in engine.stream(prompt)`.

        Args:
            prompt: Text, token ids, or messages.
            params: Sampling options.
            rid: Id of the request; None for a new one.
            priority: Lower runs first under the "priority" order.
            cache_salt: As in `Engine.generate`.

        Returns:
            The stream; it submits the request when it is first awaited, and raises what is wrong with it then.

        Raises:
            InvalidRequest: The options are unusable.
        """
        one = as_params(params, 1)[0]
        rid = f"async-{next(self._numbers)}" if rid is None else rid
        return AsyncTokenStream(self._worker, self._engine, prompt, one, rid, priority, cache_salt)

    async def abort(self, rid: str) -> list[Output]:
        """Ends a request; whoever awaits it gets its end.

        Args:
            rid: Its id.

        Returns:
            What its unfinished samples had produced; nothing for an id that is unknown or finished.

        Raises:
            EngineDead: The engine is closed.
        """
        return await _call(self._worker, lambda: self._engine.abort(rid))

    async def preempt(self, rid: str) -> None:
        """Takes slot and cache of a request's running samples; see `Engine.preempt`."""
        await _call(self._worker, lambda: self._engine.preempt(rid))

    async def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix; see `Engine.reset_prefix_cache`."""
        await _call(self._worker, self._engine.reset_prefix_cache)

    async def pause(self) -> None:
        """Stops running steps, once those in flight are applied; requests are still taken, and whoever awaits them waits."""
        await _call(self._worker, self._engine.pause)

    async def resume(self) -> None:
        """Goes on after `pause`."""
        await _call(self._worker, self._engine.resume)

    def trace(self, capacity: int = 200_000) -> Trace:
        """Records where the time goes while its `with` block runs; see `Engine.trace`."""
        return self._engine.trace(capacity)

    async def stats(self) -> EngineStats:
        """Counters since the start, and how busy the engine is; raises `EngineDead` once it is closed."""
        return await _call(self._worker, self._engine.stats)

    async def check(self) -> None:
        """Walks the books of every part; raises `InvariantBroken` when they do not add up."""
        await _call(self._worker, self._engine.check)

    async def close(self) -> None:
        """Aborts every request, ends the thread and gives the memory back; calling it twice is harmless."""
        await asyncio.to_thread(self._worker.close)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"Async{self._engine!r}"


async def _call(worker: EngineWorker, function: Callable[[], T]) -> T:
    return await asyncio.wrap_future(worker.call(function))


def _typed(error: Exception, rid: str) -> DeepInferError:
    return error if isinstance(error, DeepInferError) else as_request_error(error, rid)
