"""How many drafts an engine verifies: its `verify` part, and the step costs that a schedule needs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer.core import _checks as checks
from deepinfer.core.config import EngineConfig
from deepinfer.core.errors import ConfigError
from deepinfer.core.protocols import VerifyLengthPolicy
from deepinfer.engine.cost_fit import fit_costs
from deepinfer.engine.fingerprint import fingerprint as engine_facts
from deepinfer.engine.graph_buckets import recorded_rows
from deepinfer.engine.loop import EngineLoop
from deepinfer.engine.step_timing import Crowd, Fixed, FixedLive, Probe, most_tokens
from deepinfer.speculative import (
    AcceptanceEstimator,
    LiveLengths,
    ScheduledLengths,
    StepCostModel,
    VerificationScheduler,
)

if TYPE_CHECKING:
    from deepinfer.engine.assemble import Parts

__all__ = [
    "cost_fingerprint",
    "profile_parts",
    "profile_steps",
    "set_verification",
    "verify_policy",
]


def verify_policy(
    verify: Any, draft_length: int = 0, *, plans_ahead: bool = False
) -> VerifyLengthPolicy | None:
    """The policy that an engine's `verify` stands for.

    Args:
        verify: None or "all", a `StepCostModel`, a `VerificationScheduler`, or a policy.
        draft_length: Most drafts of a row; a policy made here learns to calibrate so many.
        plans_ahead: Whether the runner cannot shorten rows once they are drafted.

    Returns:
        The policy; None verifies every draft.

    Raises:
        ConfigError: It is none of these.
    """
    if verify is None or verify == "all":
        return None
    if isinstance(verify, StepCostModel):
        verify = VerificationScheduler(verify)
    if isinstance(verify, VerificationScheduler):
        calibration = AcceptanceEstimator(draft_length) if draft_length else None
        if plans_ahead:
            return ScheduledLengths(verify, calibration=calibration)
        return LiveLengths(verify, calibration=calibration)
    if not isinstance(verify, VerifyLengthPolicy) or isinstance(verify, type):
        raise ConfigError(
            f"verify is {verify!r}; it must be 'all', 'scheduled', a StepCostModel, a VerificationScheduler, or an "
            "object with choose(confidences, num_running).",
            field="verify",
            value=verify,
            limit="'all', 'scheduled', a cost model or a policy",
        )
    return verify


def _use_policy(scheduler: Any, runner: Any, policy: VerifyLengthPolicy | None) -> None:
    if not hasattr(scheduler, "verify_lengths"):
        raise ConfigError(
            f"{type(scheduler).__name__} has no verify_lengths, so verify cannot reach it; give the policy to the "
            "scheduler itself, or use deepinfer.scheduling.Scheduler.",
            field="verify",
        )
    trims = hasattr(policy, "trim")
    if trims and not hasattr(runner, "length_policy"):
        raise ConfigError(
            f"{type(runner).__name__} has no length_policy, so {type(policy).__name__} cannot shorten its rows; give a "
            "policy that plans ahead, such as ScheduledLengths.",
            field="verify",
        )
    scheduler.verify_lengths = policy
    if hasattr(runner, "length_policy"):
        runner.length_policy = policy


def set_verification(config: EngineConfig, parts: Parts, verify: Any) -> None:
    """Gives an engine its `verify`; "scheduled" times its steps first.

    Args:
        config: Options of the engine.
        parts: Its parts.
        verify: As in `Engine`.

    Raises:
        ConfigError: There is no drafter, the scheduler cannot be told, `verify` is unusable, or it is a cost model of
            something else.
    """
    if parts.drafter is None:
        raise ConfigError(
            f"verify is {verify!r}, and the engine has no drafter whose drafts could be verified; give one, such as "
            "drafter='dspark', or leave verify out: with replace(drafter=None), say verify=None too.",
            field="verify",
        )
    if isinstance(verify, str) and verify == "scheduled":
        verify = profile_parts(config, parts)
    elif isinstance(verify, StepCostModel) and verify.fingerprint:
        here = cost_fingerprint(config, parts)
        if verify.fingerprint != here:
            raise ConfigError(
                f"the cost model was measured for {verify.fingerprint}, and this engine is {here}: another model, "
                "device, number of threads or option. Measure again with engine.profile_steps().",
                field="verify",
                value=verify.fingerprint,
                limit=here,
            )
    plans_ahead = not hasattr(parts.runner, "length_policy")
    policy = verify_policy(verify, parts.limits.draft_length, plans_ahead=plans_ahead)
    _use_policy(parts.scheduler, parts.runner, policy)


def profile_parts(
    config: EngineConfig,
    parts: Parts,
    *,
    context_tokens: int = 64,
    max_requests: int | None = None,
    repeats: int = 4,
) -> StepCostModel:
    """`profile_steps` of an engine's parts.

    Args:
        config: Options of the engine.
        parts: Its parts, without unfinished requests.
        context_tokens: Tokens of each prompt.
        max_requests: Most requests at once; None for `max_num_seqs`.
        repeats: Steps timed of each size.

    Returns:
        The model.

    Raises:
        ConfigError: A number is out of range, or the steps cannot be timed.
    """
    limits = parts.limits
    most = checks.optional(
        max_requests,
        lambda v: checks.check_int("max_requests", v, 1, limits.max_num_seqs, ConfigError),
    )
    checks.check_int("context_tokens", context_tokens, 1, 2**31, ConfigError)
    steps = most_tokens(limits.draft_length, repeats)
    prompt_len = max(1, min(context_tokens, limits.max_model_len - steps))
    left_out = {*parts.info.eos_token_ids, *parts.ungenerated_ids}
    ids = [token for token in range(parts.info.vocab_size) if token not in left_out] or [0]
    drawn = np.random.default_rng(0).integers(len(ids), size=prompt_len)
    return profile_steps(
        parts.loop,
        draft_length=limits.draft_length,
        max_requests=most or limits.max_num_seqs,
        prompt=[ids[at] for at in drawn.tolist()],
        max_model_len=limits.max_model_len,
        fingerprint=cost_fingerprint(config, parts),
        repeats=repeats,
    )


def cost_fingerprint(config: EngineConfig, parts: Parts) -> str:
    """What a cost model holds for: model, device, threads, versions and the options that change a step's time.

    Args:
        config: Options of the engine.
        parts: Its parts.

    Returns:
        Sixteen hexadecimal digits.
    """
    facts = engine_facts(config, parts)
    kept = {key: facts[key] for key in ("deepinfer", "torch", "device_name", "threads", "model")}
    names = ("deterministic", "cuda_graphs", "rounding", "dtype", "async_depth", "max_num_seqs")
    kept["options"] = {name: facts["config"][name] for name in names}
    kept["drafter"] = facts["parts"].get("drafter")
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def profile_steps(
    loop: EngineLoop,
    *,
    draft_length: int,
    max_requests: int,
    prompt: Sequence[int],
    max_model_len: int,
    fingerprint: str = "",
    repeats: int = 4,
) -> StepCostModel:
    """Times steps that decode and verify, for 1, 2, 4, ... requests, with whole blocks of drafts and with half of them.

    Half of a block for twice as many requests is as many rows, and so each number of requests shares a size with the next:
    that tells what rows cost from what requests add, see `fit_costs`, with few shapes to record. Sizes between are
    interpolated. Steps without drafts are timed for every other number of requests. Most requests come first, and some of
    them leave for the next number, so that prompts are run twice in all. The steps are those of the engine
    itself, with everything that a step costs on the host; of the steps of one size the fastest counts. Nothing of it enters
    the engine's statistics.

    Args:
        loop: The loop, without live requests.
        draft_length: Most drafts of a row.
        max_requests: Most requests at once.
        prompt: Token ids that every request begins with.
        max_model_len: Most tokens of a request.
        fingerprint: What the samples hold for.
        repeats: Steps timed of each size.

    Returns:
        The model.

    Raises:
        ConfigError: Requests are unfinished, or the scheduler cannot be told how much to verify.
    """
    checks.check_int("repeats", repeats, 1, 1000, ConfigError)
    if loop.num_live:
        raise ConfigError(
            f"{loop.num_live} requests are unfinished; profile an engine that has nothing to do."
        )
    scheduler: Any = loop.scheduler
    recorder, before = loop.recorder, getattr(scheduler, "verify_lengths", None)
    trims = hasattr(loop.runner, "length_policy")
    policy, probe = FixedLive(draft_length) if trims else Fixed(), Probe()
    if draft_length:
        _use_policy(scheduler, loop.runner, policy)
    loop.recorder = probe
    counts = [1 << k for k in range(max_requests.bit_length()) if 1 << k < max_requests]
    counts.append(max_requests)
    drafts = [n for n in (draft_length, (draft_length + 1) // 2 - 1) if n > 0]
    phases = [(drafts, counts)] if drafts else []
    phases.append(([0], sorted({*counts[::2], max_requests}) if drafts else counts))
    found: list[tuple[int, int, float, float]] = []
    try:
        for lengths, sizes in phases:
            crowd = Crowd(loop, probe, policy, prompt, max_model_len)
            try:
                for count in reversed(sizes):  # more than fit the cache give nothing
                    found += [(count, *one) for one in crowd.timed(count, lengths, repeats)]
            finally:
                crowd.disperse()
    finally:
        loop.recorder = recorder
        if draft_length:
            _use_policy(scheduler, loop.runner, before)
    if not found:
        raise ConfigError(
            f"no step could be timed: a prompt of {len(prompt)} tokens does not fit; give fewer context_tokens."
        )
    return fit_costs(
        found,
        recorded_rows if getattr(loop.runner, "graph_steps", 0) else None,
        fingerprint=fingerprint,
    )
