"""Config and parts as given to the parts of a working engine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.cache import SlotCacheManager
from deepinfer.core.clock import Clock, MonotonicClock
from deepinfer.core.config import EngineConfig
from deepinfer.core.errors import ConfigError
from deepinfer.core.protocols import CacheManager, ModelInfo, StatsSink, Tokenizer
from deepinfer.engine.cache_setup import (
    CacheShape,
    device_of,
    fit_blocks,
    fit_chunk,
    fit_model_len,
    make_host_tier,
    make_manager,
    narrows,
    window_layers,
)
from deepinfer.engine.constraints import GrammarMasks
from deepinfer.engine.drafter import make_drafter
from deepinfer.engine.guarded_sink import GuardedSink
from deepinfer.engine.loop import EngineLoop
from deepinfer.engine.memory import allocating
from deepinfer.engine.part_checks import (
    Owner,
    check_callable,
    check_model,
    check_part,
    forget_slots,
    is_factory,
)
from deepinfer.engine.parts import (
    EngineDrafter,
    EngineRunner,
    EngineScheduler,
    model_info,
    ungenerated_ids,
)
from deepinfer.engine.prompts import PromptEncoder
from deepinfer.engine.runner import ModelRunner
from deepinfer.engine.stats import StatsRecorder
from deepinfer.engine.structured import StructuredOutput
from deepinfer.engine.verification import set_verification
from deepinfer.sampling import Sampler
from deepinfer.scheduling import (
    Scheduler,
    SchedulerLimits,
    StepCoefficients,
    StepTimeModel,
    TimedChunks,
)

__all__ = ["PART_NAMES", "Parts", "assemble"]

PART_NAMES = (
    "model",
    "tokenizer",
    "runner",
    "scheduler",
    "cache",
    "sampler",
    "drafter",
    "verify",
    "grammar",
    "sink",
    "clock",
)
_MIN_CHUNK = 16
_FIRST_CHUNK = 512  # until steps were timed
_MAX_SCATTER = 0.25  # of step times around their fit: a rough one keeps a target better than none


@dataclass(slots=True, kw_only=True)
class Parts:
    """The parts of one engine.

    Attributes:
        info: Facts of the model.
        limits: What plans stay within.
        cache: Hands out slots.
        scheduler: Plans.
        drafter: Proposes drafts, or None.
        runner: Runs plans.
        clock: Time of events.
        encoder: Makes requests of prompts.
        loop: Moves them on.
        device: Where the model is.
        owner: Marks the parts that no other engine may use meanwhile.
        ungenerated_ids: Ids that no output may hold.
    """

    info: ModelInfo
    limits: SchedulerLimits
    cache: Any
    scheduler: EngineScheduler
    drafter: EngineDrafter | None
    runner: EngineRunner
    clock: Clock
    encoder: PromptEncoder
    loop: EngineLoop
    device: torch.device
    owner: Owner
    ungenerated_ids: tuple[int, ...] = ()

    def close(self, successor: Parts | None = None) -> None:
        """Aborts every request and lets go of model and cache.

        Args:
            successor: Parts that stay in use; a runner that is among them is left open.
        """
        self.loop.shut_down()
        if successor is None or self.runner is not successor.runner:
            self.runner.close()
        self.owner.give_back()
        self.drafter = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def assemble(
    config: EngineConfig,
    *,
    model: Any = None,
    tokenizer: Any = None,
    runner: Any = None,
    scheduler: Any = None,
    cache: Any = None,
    sampler: Any = None,
    drafter: Any = None,
    verify: Any = None,
    grammar: Any = None,
    sink: StatsSink | None = None,
    clock: Clock | None = None,
) -> Parts:
    """Makes the parts that were not given.

    Args:
        config: Options.
        model: The model; needed without a runner.
        tokenizer: Text to ids and back, or None.
        runner: A runner, or None for `ModelRunner`.
        scheduler: A scheduler, the name of an order policy, something called with (limits, cache) that returns a
            scheduler, or None for `Scheduler`.
        cache: "blocks", "slots", a cache manager, something called with (limits) that returns one, or None for
            "blocks", and for "slots" with a runner.
        sampler: A sampler, or None for `Sampler`.
        drafter: A drafter, its registered name such as "dspark", something called with (model) that returns one,
            or None to decode without drafts.
        verify: How many drafts are verified, as in `Engine`; None for all.
        grammar: Called with the `SamplingParams` of a constrained request, or None for `StructuredOutput` with a
            tokenizer that tells its vocabulary, and for none without.
        sink: Takes events, or None.
        clock: Time of events, or None for the monotonic clock.

    Returns:
        The parts.

    Raises:
        ConfigError: An option cannot be met, a part is missing, lacks a method, or belongs to another engine.
    """
    if model is None and runner is None:
        raise ConfigError(
            "an engine needs a model or a runner, and got neither; use Engine.from_pretrained(...) or "
            "Engine(model=load_model(...)).",
            field="model",
        )
    if runner is not None:
        check_part("runner", runner, EngineRunner)
    if model is not None and runner is None:
        check_model(model)
    for name, part, protocol in (
        ("tokenizer", tokenizer, Tokenizer),
        ("sink", sink, StatsSink),
        ("clock", clock, Clock),
    ):
        if part is not None:
            check_part(name, part, protocol)
    check_callable("sampler", sampler, "(logits, rows)")
    check_callable("grammar", grammar, "(params)")
    if config.deterministic and not hasattr(model, "set_deterministic"):
        raise ConfigError(
            f"deterministic is True, and {type(model).__name__} has no set_deterministic; use a model that has it, or "
            "deterministic=False.",
            field="deterministic",
            value=True,
            limit="False",
        )
    owner = Owner()
    try:
        for name, part in (("runner", runner), ("scheduler", scheduler), ("cache", cache)):
            if not (part is None or isinstance(part, str | type) or callable(part)):
                owner.claim(name, part)
        info: ModelInfo = runner.info if runner is not None else model_info(model, tokenizer)
        drafter = make_drafter(drafter, model)
        owner.claim("drafter", drafter)
        clock = clock or MonotonicClock()
        cached = _Cached(config, info, model, runner, drafter, cache, scheduler)
        limits = cached.limits
        guarded = None if sink is None else GuardedSink(sink)
        model_cache, cache, host_tier, shape = cached.make(guarded, clock)
        if runner is not None:
            forget_slots(runner, cache.num_slots)
        scheduler = _make_scheduler(scheduler, config, limits, cache, clock)
        never = () if model is None else ungenerated_ids(model, tokenizer)
        if runner is None:
            runner = ModelRunner(
                model,
                sampler if sampler is not None else Sampler(),
                info=info,
                num_slots=cache.num_slots,
                max_model_len=limits.max_model_len,
                max_step_tokens=limits.prefill_chunk_tokens,
                drafter=drafter,
                may_draft=getattr(scheduler, "may_draft", None),
                ungenerated_ids=never,
                device=device_of(model),
                cache=model_cache,
                cache_shape=shape,
                host_tier=host_tier,
                deterministic=config.deterministic,
                record=None if config.cuda_graphs else False,
            )
    except BaseException:
        owner.give_back()
        raise
    if grammar is None and hasattr(tokenizer, "vocabulary"):
        grammar = StructuredOutput(tokenizer, info.vocab_size, tuple(info.eos_token_ids))
    masks = GrammarMasks(info.vocab_size, info.eos_token_ids)
    if isinstance(runner, ModelRunner):
        runner.num_legal = masks.num_legal
    recorder = StatsRecorder(sink)
    parts = Parts(
        info=info,
        limits=limits,
        cache=cache,
        scheduler=scheduler,
        drafter=drafter,
        runner=runner,
        clock=clock,
        encoder=PromptEncoder(
            info,
            tokenizer,
            grammar=grammar,
            seed=config.seed,
            image_token_id=getattr(getattr(model, "config", None), "image_token_id", None),
        ),
        loop=EngineLoop(scheduler, runner, masks, recorder, clock, tokenizer, config.async_depth),
        device=device_of(model),
        owner=owner,
        ungenerated_ids=never,
    )
    if verify is not None and verify != "all":
        try:
            set_verification(config, parts, verify)
        except BaseException:
            parts.close()
            raise
    return parts


class _Cached:
    """Limits, cache manager and the model's cache, which depend on each other's sizes."""

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        model: Any,
        runner: Any,
        drafter: EngineDrafter | None,
        cache: Any,
        scheduler: Any,
    ) -> None:
        if runner is not None:
            model = None
        given: CacheShape | None = getattr(runner, "cache_shape", None)
        if cache is None:
            cache = getattr(scheduler, "cache", None)
        if cache is None:
            in_blocks = runner is None or (given is not None and given.num_blocks is not None)
            cache = "blocks" if in_blocks else "slots"
        if isinstance(cache, str) and cache not in ("blocks", "slots"):
            raise ConfigError(
                f"cache is {cache!r}; it must be 'blocks', 'slots', a cache manager, or something that makes one.",
                field="cache",
                value=cache,
                limit="'blocks' or 'slots'",
            )
        self._config, self._info, self._model, self._cache = config, info, model, cache
        self._runner, self._given = runner, given
        draft_length = drafter.draft_length if drafter is not None else 0
        longest = config.max_model_len
        if longest is not None and longest > info.max_model_len:
            raise ConfigError(
                f"max_model_len is {longest}, and the model takes sequences of at most {info.max_model_len} "
                "tokens. Lower it.",
                field="max_model_len",
                value=longest,
                limit=f"at most {info.max_model_len}",
            )
        chunk = fit_chunk(model, config, longest or info.max_model_len)
        chunk = max(chunk, draft_length + 1)
        self._num_blocks: int | None = None
        is_narrow = False
        longest = longest or info.max_model_len
        if given is not None:
            longest = min(longest, given.max_model_len)
            chunk = min(chunk, given.max_step_tokens)
            is_narrow = narrows(runner.cache, config)
        with allocating(config.max_num_seqs, longest):
            if cache == "blocks" and model is not None:
                longest, self._num_blocks = fit_blocks(
                    model, config, chunk, info.max_model_len, device_of(model)
                )
            elif model is not None and config.max_model_len is None:
                longest = fit_model_len(model, config.max_num_seqs, chunk, longest)
            if model is not None:
                is_narrow = narrows(model.new_cache(1, min(longest, _MIN_CHUNK), chunk), config)
        self.limits = SchedulerLimits(
            max_model_len=longest,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            prefill_chunk_tokens=chunk,
            eos_token_ids=info.eos_token_ids,
            draft_length=draft_length,
            async_depth=config.async_depth,
            window=info.window,
            narrows=is_narrow,
        )

    def make(self, sink: StatsSink | None, clock: Clock) -> tuple[Any, Any, Any, CacheShape]:
        """The model's cache, the manager of its books, and host memory (two may be None), and the measures."""
        limits, config, model = self.limits, self._config, self._model
        cache = self._cache
        if cache == "slots":
            cache = SlotCacheManager(limits.max_num_seqs, limits.max_model_len)
        elif is_factory(cache, "allocate"):
            cache = cache(limits)
        elif cache != "blocks":
            check_part("cache", cache, CacheManager)
            cache.reset()  # what it knows is in the memory of another cache
        shape = CacheShape(
            num_slots=getattr(cache, "num_slots", limits.max_num_seqs),
            max_model_len=limits.max_model_len,
            max_step_tokens=limits.prefill_chunk_tokens,
            num_blocks=getattr(cache, "num_blocks", self._num_blocks),
            block_size=getattr(cache, "block_size", config.block_size),
            draft_length=limits.draft_length,
            window_layers=None if model is None else window_layers(model, config),
        )
        if model is None:
            if cache == "blocks" and self._given is not None:
                runner = self._runner
                cache = make_manager(
                    runner.cache, self._given, config, self._info, runner.host_tier,
                    sink=sink, clock=clock,
                )  # fmt: skip
            return None, cache, None, shape
        if isinstance(cache, SlotCacheManager):
            with allocating(shape.num_slots, shape.max_model_len):
                shape = dataclasses.replace(shape, num_blocks=None)
                return shape.make_contiguous(model), cache, None, shape
        with allocating(shape.num_slots, shape.max_model_len):
            model_cache = shape.make(model)
            host_tier = make_host_tier(model_cache, config, device_of(model))
        if cache == "blocks":
            cache = make_manager(
                model_cache, shape, config, self._info, host_tier, sink=sink, clock=clock
            )
        return model_cache, cache, host_tier, shape


def _make_scheduler(
    scheduler: Any, config: EngineConfig, limits: SchedulerLimits, cache: Any, clock: Clock
) -> Any:
    if scheduler is None or isinstance(scheduler, str):
        chunks = None
        if config.target_step_s is not None:
            most = limits.prefill_chunk_tokens
            chunks = TimedChunks(
                StepTimeModel(StepCoefficients(), max_residual_share=_MAX_SCATTER),
                config.target_step_s,
                max_tokens=most,
                min_tokens=min(most, max(limits.window, _MIN_CHUNK)),
                window=limits.window,
                first_tokens=min(most, _FIRST_CHUNK),
            )
        scheduler = Scheduler(limits, cache, order=scheduler or "fcfs", chunks=chunks, clock=clock)
    elif is_factory(scheduler, "plan"):
        scheduler = scheduler(limits, cache)
    check_part("scheduler", scheduler, EngineScheduler)
    return scheduler
