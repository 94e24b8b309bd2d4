"""The engine: prompts in, text out."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from deepinfer.core import _checks as checks
from deepinfer.core.config import EngineConfig
from deepinfer.core.errors import ConfigError, InvalidRequest
from deepinfer.core.params import SamplingParams
from deepinfer.core.protocols import ModelInfo, ProgressFn
from deepinfer.core.types import Output, OutputDelta
from deepinfer.engine.assemble import PART_NAMES, Parts, assemble
from deepinfer.engine.batching import generate
from deepinfer.engine.controls import EngineControls
from deepinfer.engine.loading import as_config, load_parts
from deepinfer.engine.outputs import OutputBuilder, Sink
from deepinfer.engine.prompts import Prompt, as_params
from deepinfer.engine.streaming import TokenStream

__all__ = ["Engine"]

Params = SamplingParams | Mapping[str, Any]


class Engine(EngineControls):
    """Generates text with one model: `generate`, `stream`, or a loop of `add_request`, `step` and `abort`.

    Every part can be given or left to its default. A failing request ends alone, with a typed error; a failing
    forward pass ends the requests of its step; the engine stays usable either way. Methods may be called from
    several threads; one step runs at a time. Use it as a context manager, or call `close`, to give the
    memory back.

    Args:
        model: A `DeepseekV41`, or a model with the same interface; needed without a runner.
        tokenizer: Needed for text, messages and stop strings; without it prompts and outputs are token ids.
        config: Options.
        runner: Runs plans; None for `ModelRunner`.
        scheduler: A scheduler, an order policy's name ("fcfs", "priority"), or something called with
            (limits, cache) that returns a scheduler.
        cache: "blocks" (blocks that requests with equal beginnings share), "slots" (one contiguous slot a request),
            a cache manager, or something called with (limits) that returns one; None for "blocks".
        sampler: Chooses tokens; None for `Sampler`.
        drafter: "dspark" for the model's own draft, "ngram", a drafter, or None to decode without drafts. Drafts change
            how many steps an output takes and nothing else.
        verify: How many drafts of each row are verified: None or "all"; "scheduled", as many as pay, by step times that
            are measured at the start; a `deepinfer.speculative.StepCostModel` with times measured before; a
            `VerificationScheduler`; or a policy with `choose(confidences, num_running)`.
        grammar: Called with the `SamplingParams` of a constrained request; returns a compiled grammar.
        sink: Takes events (`deepinfer.core.events`).
        clock: Time of events.

    Raises:
        ConfigError: An option cannot be met, a part is missing, or a part lacks a method.

    Examples:
        >>> from deepinfer.testing import ToyModel, ToyTokenizer
        >>> with Engine(model=ToyModel(), tokenizer=ToyTokenizer()) as engine:
        ...     output = engine.generate("abc", SamplingParams(max_tokens=4, temperature=0))[0]
        >>> output.usage.prompt, output.usage.generated, str(output.finish_reason)
        (4, 4, 'length')
    """

    def __init__(
        self,
        *,
        model: Any = None,
        tokenizer: Any = None,
        config: EngineConfig | Mapping[str, Any] | None = None,
        runner: Any = None,
        scheduler: Any = None,
        cache: Any = None,
        sampler: Any = None,
        drafter: Any = None,
        verify: Any = None,
        grammar: Any = None,
        sink: Any = None,
        clock: Any = None,
    ) -> None:
        self._given = {name: value for name, value in locals().items() if name in PART_NAMES}
        self.config = as_config(config)
        self._parts: Parts = assemble(self.config, **self._given)
        self._encoder, self._loop = self._parts.encoder, self._parts.loop
        self._lock = threading.RLock()
        self._undelivered: list[OutputDelta] = []
        self._kept: dict[str, list[OutputBuilder]] = {}
        self._num_named = 0
        self._closed = False

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo: str | os.PathLike[str] = "nano",
        *,
        config: EngineConfig | Mapping[str, Any] | None = None,
        revision: str | None = None,
        packed: bool = False,
        progress: bool | ProgressFn | None = None,
        **overrides: Any,
    ) -> Engine:
        """Loads a checkpoint and its tokenizer, and makes an engine of them.

        Args:
            path_or_repo: "nano" (inside the package), a checkpoint folder, or a hub repository "owner/name".
            config: Options.
            revision: Branch, tag or commit of a hub repository.
            packed: Keep quantised weights as their bytes: less memory, slower.
            progress: Whether loading draws a bar, as in `deepinfer.models.load_model`.
            overrides: Fields of `EngineConfig`, such as `max_num_seqs=4`, and parts, such as `drafter="dspark"`.

        Returns:
            The engine.

        Raises:
            ConfigError: An option is unknown (the message gives the nearest known one) or cannot be met.
            ModelError: The checkpoint is missing, damaged, or not cached while the network is off.
            UnsupportedHardware: The device is not there.
        """
        config, given = load_parts(path_or_repo, config, revision, packed, progress, overrides)
        return cls(config=config, **given)

    @property
    def model(self) -> Any:
        """The model, or None when only a runner was given."""
        return self._given["model"]

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, or None."""
        return self._given["tokenizer"]

    @property
    def info(self) -> ModelInfo:
        """Facts of the model."""
        return self._parts.info

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt plus output."""
        return self._parts.limits.max_model_len

    @property
    def has_unfinished(self) -> bool:
        """Whether a call of `step` can bring anything."""
        with self._lock:
            self._loop.reap()
            can_run = self._loop.num_live and not self._loop.is_paused
            return bool(can_run or self._undelivered)

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        progress: bool | ProgressFn | None = None,
        on_error: Literal["raise", "return"] = "raise",
        cache_salt: str | None = None,
    ) -> list[Output]:
        """Continues one prompt or many.

        Args:
            prompts: Text, token ids, messages, or a list of those; a single prompt is a list of one.
            params: One for all prompts, or one a prompt; None for the defaults.
            progress: Whether to draw a bar; None for on a terminal or in a notebook, with several prompts. A
                function is called with (samples done, samples in all).
            on_error: "raise" refuses a bad prompt before anything runs, and raises the first error of a step once
                all is done; its `outputs` attribute holds all outputs. "return" sets `Output.error` instead.
            cache_salt: Prefixes are shared only among requests of the same salt, such as one a tenant, or of none.

        Returns:
            The outputs in order of the prompts, `n` in a row for a prompt with `n` samples.

        Raises:
            RequestError: A prompt or an option is unusable, a prompt does not fit, or a step failed.
            EngineDead: The engine is closed, or stopped.
        """
        checks.check_choice("on_error", on_error, ("raise", "return"), ConfigError)
        raises = on_error == "raise"
        return generate(self, prompts, params, progress, raise_errors=raises, cache_salt=cache_salt)

    def stream(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        rid: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> TokenStream:
        """Continues one prompt piece by piece.

        Args:
            prompt: Text, token ids, or messages.
            params: Sampling options.
            rid: Id of the request; None for a new one.
            priority: Lower runs first under the "priority" order.
            cache_salt: As in `generate`.

        Returns:
            An iterator over deltas; closing or dropping it aborts the request. An error that ends the request is
            raised by it.

        Raises:
            RequestError: The prompt or an option is unusable, does not fit, or the id is taken.
            EngineDead: The engine is closed, or stopped.
        """
        one = as_params(params, 1)[0]
        stream = TokenStream(self, self._new_rid() if rid is None else rid, one.n)
        try:
            self._submit(prompt, one, stream.sink, stream.rid, priority, cache_salt)
        except BaseException:
            stream.disown()
            raise
        return stream

    def add_request(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        rid: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        sink: Sink | None = None,
        keep_output: bool = False,
    ) -> str:
        """Takes a request without running anything.

        Args:
            prompt: Text, token ids, or messages.
            params: Sampling options.
            rid: Id of the request; None for a new one.
            priority: Lower runs first under the "priority" order.
            cache_salt: As in `generate`.
            sink: Called with each delta, from inside `step`; without one `step` returns them.
            keep_output: Keep the whole output for `take_output`.

        Returns:
            The id.

        Raises:
            RequestError: The prompt or an option is unusable, does not fit, or the id is taken.
            EngineDead: The engine is closed, or stopped.
        """
        one = as_params(params, 1)[0]
        checks.check_bool("keep_output", keep_output, ConfigError)
        with self._lock:
            rid = self._new_rid() if rid is None else rid
            taker = self._undelivered.append if sink is None else sink
            builders = self._submit(prompt, one, taker, rid, priority, cache_salt)
            if keep_output:
                self._kept[rid] = builders
            return rid

    def step(self) -> list[OutputDelta]:
        """Runs one step, if there is anything to run.

        Returns:
            Deltas of requests added without a sink, this step's and those that came up since the last call.
            Every request ends in exactly one delta a sample with a finish reason.

        Raises:
            EngineDead: The engine is closed, or stopped.
        """
        with self._lock:
            self._loop.run_step()
            deltas = list(self._undelivered)
            self._undelivered.clear()
            return deltas

    def abort(self, rid: str) -> list[Output]:
        """Ends a request now; nothing is generated for it any more.

        Args:
            rid: Its id; an `InvalidRequest` is raised for anything but text.

        Returns:
            What its unfinished samples had produced; nothing for an id that is unknown or finished.
        """
        checks.check_text("rid", rid, InvalidRequest)
        with self._lock:
            return [builder.output() for builder in self._loop.abort(rid)]

    def take_output(self, rid: str) -> list[Output]:
        """The outputs of a request added with `keep_output`; forgets them once all are finished.

        Args:
            rid: Its id.

        Returns:
            One output a sample, finished or not.

        Raises:
            InvalidRequest: No output is kept under this id.
        """
        checks.check_text("rid", rid, InvalidRequest)
        with self._lock:
            builders = self._kept.get(rid)
            if builders is None:
                raise InvalidRequest(
                    f"no output is kept for {rid!r}; add it with keep_output=True, and take it once.",
                    rid=rid,
                )
            if not self._loop.has(rid):
                del self._kept[rid]
            return [builder.output() for builder in builders]

    def replace(self, **parts: Any) -> Engine:
        """An engine with some parts changed; this one is closed.

        Args:
            parts: Parts by name, as for the class, or `config`.

        Returns:
            The new engine, with the same model; for a moment both have a cache.

        Raises:
            ConfigError: A name is unknown, a part unusable, or requests are unfinished.
            EngineDead: The engine is closed, or stopped.
        """
        checks.check_keys("Engine.replace", parts, {*PART_NAMES, "config"}, ConfigError)
        with self._lock:
            self._loop.raise_if_dead()
            if self._loop.num_live or self._undelivered:
                raise ConfigError(
                    f"unfinished requests: {self._loop.num_live}; finish or abort them before parts "
                    "are replaced."
                )
            with self._parts.owner.handing_over():
                new = type(self)(**{**self._given, "config": self.config, **parts})
            self._close(new._parts)
            return new

    def close(self) -> None:
        """Aborts every request and gives the memory back; calling it twice is harmless."""
        self._close()

    def _close(self, successor: Parts | None = None) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._parts.close(successor)
            self._given = dict.fromkeys(self._given)
            self._kept.clear()

    def _submit(
        self, prompt: Prompt, params: SamplingParams, sink: Sink, rid: str, priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[OutputBuilder]:  # fmt: skip
        with self._lock:
            self._loop.raise_if_dead()
            now = self._parts.clock.now()
            requests = self._encoder.requests(
                prompt, params, rid, priority, arrival_s=now, cache_salt=cache_salt
            )
            return self._loop.submit(rid, requests, sink)

    def _advance(self) -> bool:
        with self._lock:
            return self._loop.run_step()

    def _new_rid(self) -> str:
        with self._lock:
            while True:
                self._num_named += 1
                rid = f"request-{self._num_named}"
                if not self._loop.has(rid) and rid not in self._kept:
                    return rid

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        model = type(self.model).__name__ if self.model is not None else "no model"
        state = "closed" if self._closed else f"{self._loop.num_live} unfinished"
        return f"Engine({model}, {state})"
