"""Config and parts as given to the parts of a working engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.cache import SlotCacheManager
from deepinfer.core import _checks as checks
from deepinfer.core.clock import Clock, MonotonicClock
from deepinfer.core.config import EngineConfig
from deepinfer.core.errors import ConfigError
from deepinfer.core.protocols import ModelInfo, StatsSink
from deepinfer.engine.constraints import GrammarMasks
from deepinfer.engine.drafter import DRAFTERS
from deepinfer.engine.loop import EngineLoop
from deepinfer.engine.memory import allocating, free_bytes
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
from deepinfer.sampling import Sampler
from deepinfer.scheduling import Scheduler, SchedulerLimits

__all__ = ["PART_NAMES", "Parts", "assemble", "device_of", "fit_model_len", "refuse_unbuilt"]

PART_NAMES = (
    "model",
    "tokenizer",
    "runner",
    "scheduler",
    "cache",
    "sampler",
    "drafter",
    "grammar",
    "sink",
    "clock",
)
_MIN_FITTED_TOKENS = 256


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

    def close(self, successor: Parts | None = None) -> None:
        """Aborts every request and lets go of model and cache.

        Args:
            successor: Parts that stay in use; a runner that is among them is left open.
        """
        self.loop.shut_down()
        if successor is None or self.runner is not successor.runner:
            self.runner.close()
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
        cache: A cache manager, something called with (limits) that returns one, or None for `SlotCacheManager`.
        sampler: A sampler, or None for `Sampler`.
        drafter: A drafter, its registered name such as "dspark", something called with (model) that returns one,
            or None to decode without drafts.
        grammar: Called with the `SamplingParams` of a constrained request, or None.
        sink: Takes events, or None.
        clock: Time of events, or None for the monotonic clock.

    Returns:
        The parts.

    Raises:
        ConfigError: An option cannot be met, a part is missing, or a part lacks a method.
    """
    refuse_unbuilt(config)
    if model is None and runner is None:
        raise ConfigError(
            "an engine needs a model or a runner, and got neither; use Engine.from_pretrained(...) or "
            "Engine(model=load_model(...)).",
            field="model",
        )
    if runner is not None:
        _check_part("runner", runner, EngineRunner)
    _check_callable("sampler", sampler, "(logits, rows)")
    _check_callable("grammar", grammar, "(params)")
    info: ModelInfo = runner.info if runner is not None else model_info(model, tokenizer)
    drafter = _make_drafter(drafter, model)
    limits = _limits(config, info, drafter, model if runner is None else None)
    if cache is None:
        cache = SlotCacheManager(limits.max_num_seqs, limits.max_model_len)
    elif _is_factory(cache, "allocate"):
        cache = cache(limits)
    clock = clock or MonotonicClock()
    if scheduler is None or isinstance(scheduler, str):
        scheduler = Scheduler(limits, cache, order=scheduler or "fcfs", clock=clock)
    elif _is_factory(scheduler, "plan"):
        scheduler = scheduler(limits, cache)
    _check_part("scheduler", scheduler, EngineScheduler)
    if runner is None:
        with allocating(limits):
            runner = ModelRunner(
                model,
                sampler if sampler is not None else Sampler(),
                info=info,
                num_slots=getattr(cache, "num_slots", limits.max_num_seqs),
                max_model_len=limits.max_model_len,
                max_step_tokens=limits.prefill_chunk_tokens,
                drafter=drafter,
                may_draft=getattr(scheduler, "may_draft", None),
                ungenerated_ids=ungenerated_ids(model, tokenizer),
                device=device_of(model),
            )
    masks, recorder = GrammarMasks(info.vocab_size), StatsRecorder(sink)
    return Parts(
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
    )


def device_of(model: Any) -> torch.device:
    """Where a model is.

    Args:
        model: Any model, or None.

    Returns:
        Its `device`, or that of its first parameter, or the CPU.
    """
    device = getattr(model, "device", None)
    if device is None and hasattr(model, "parameters"):
        device = next(model.parameters()).device
    return torch.device(device if device is not None else "cpu")


def fit_model_len(model: Any, num_slots: int, max_step_tokens: int, limit: int) -> int:
    """The longest sequence for which all slots fit into half of the memory that is free.

    Args:
        model: Has `new_cache`.
        num_slots: Slots.
        max_step_tokens: Most tokens of one request in one step.
        limit: The model's own limit in tokens.

    Returns:
        Tokens, at most `limit`, a multiple of 128 when below it.

    Raises:
        ConfigError: Not even 256 tokens fit.
    """
    short = min(limit, _MIN_FITTED_TOKENS)
    if limit <= 2 * short:
        return limit
    step = min(max_step_tokens, 2 * short)
    sizes = [model.new_cache(1, tokens, step).size_bytes for tokens in (short, 2 * short)]
    per_token = (sizes[1] - sizes[0]) / short
    fixed = sizes[0] - per_token * short
    fixed *= max(1.0, max_step_tokens / step)
    room = free_bytes(device_of(model)) / 2 / num_slots - fixed
    fitted = int(room / max(per_token, 1e-9)) // 128 * 128
    if fitted < short:
        raise ConfigError(
            f"the cache of {num_slots} requests does not fit: {free_bytes(device_of(model)) >> 20} MiB are free, half "
            f"of them for the cache, and one request of {short} tokens takes "
            f"{(fixed + per_token * short) / 2**20:.0f} MiB. Lower max_num_seqs or prefill_chunk_tokens.",
            field="max_num_seqs",
            value=num_slots,
        )
    return min(limit, fitted)


def _limits(
    config: EngineConfig, info: ModelInfo, drafter: EngineDrafter | None, model: Any
) -> SchedulerLimits:
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
    chunk = min(config.prefill_chunk_tokens, longest or info.max_model_len)
    chunk = max(chunk, draft_length + 1)
    if longest is None:
        longest = info.max_model_len
        if model is not None:
            longest = fit_model_len(model, config.max_num_seqs, chunk, longest)
    return SchedulerLimits(
        max_model_len=longest,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        prefill_chunk_tokens=chunk,
        eos_token_ids=info.eos_token_ids,
        draft_length=draft_length,
    )


def refuse_unbuilt(config: EngineConfig) -> None:
    """Refuses options that this version cannot meet.

    Args:
        config: Options.

    Raises:
        ConfigError: Such an option is set.
    """
    for name, is_asked, instead in (("deterministic", config.deterministic, "False"),):
        if is_asked:
            value = getattr(config, name)
            raise ConfigError(
                f"{name}={value} is not built into this version of the engine; use {instead}.",
                field=name,
                value=value,
                limit=instead,
            )


def _make_drafter(drafter: Any, model: Any) -> EngineDrafter | None:
    if drafter is None:
        return None
    if isinstance(drafter, str):
        drafter = DRAFTERS.create(drafter, model)
    elif _is_factory(drafter, "propose"):
        drafter = drafter(model)
    _check_part("drafter", drafter, EngineDrafter)
    return drafter


def _is_factory(part: Any, method: str) -> bool:
    return isinstance(part, type) or (isinstance(part, Callable) and not hasattr(part, method))  # type: ignore[arg-type]


def _check_part(name: str, part: Any, protocol: Any) -> None:
    wanted = sorted(
        member
        for base in protocol.__mro__
        for member in {*vars(base), *getattr(base, "__annotations__", {})}
        if not member.startswith("_")
    )
    missing = [member for member in wanted if not hasattr(part, member)]
    if missing:
        raise ConfigError(
            f"{name} is {checks.show(part)}, which lacks {', '.join(missing)}; a {name} has "
            f"{', '.join(wanted)}.",
            field=name,
            value=part,
        )


def _check_callable(name: str, part: Any, arguments: str) -> None:
    is_class = name == "sampler" and isinstance(part, type)  # calling it would make one, not sample
    if is_class or not (part is None or callable(part)):
        raise ConfigError(
            f"{name} is {checks.show(part)}; a {name} is called with {arguments}."
            f"{' Give an object of the class.' if is_class else ''}",
            field=name,
            value=part,
        )
