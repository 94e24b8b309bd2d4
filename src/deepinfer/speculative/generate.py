"""Generation of one sequence with a target model and a drafter, outside of an engine."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError, InvalidLogits
from deepinfer.core.protocols import Drafter
from deepinfer.core.types import FinishReason
from deepinfer.core.views import DraftView
from deepinfer.speculative._arrays import shape_error
from deepinfer.speculative._tensors import as_integers, check_within
from deepinfer.speculative.noise import CounterNoise
from deepinfer.speculative.rejection import RejectionSampler

__all__ = [
    "CausalTarget",
    "GenerationStats",
    "SpeculativeGeneration",
    "TargetOutput",
    "speculative_generate",
]


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """What a target gives for some tokens.

    Attributes:
        logits: Of the last rows that were asked for, shape [rows, vocab].
        features: Hidden states that a draft reads, shape [tokens, features], or None.
        cache: The state behind these tokens; the target's own affair.
    """

    logits: Tensor
    features: Tensor | None
    cache: Any


class CausalTarget(Protocol):
    """A causal language model, as generation sees it."""

    def forward(self, input_ids: Tensor, cache: Any = None, *, num_logits: int = 0) -> TargetOutput:
        """Runs the tokens that follow what is in the cache.

        Args:
            input_ids: Tokens, shape [tokens], int64.
            cache: What the call before returned; None starts a sequence.
            num_logits: Last rows whose logits are wanted; 0 says all.
        """
        ...

    def crop(self, cache: Any, length: int) -> Any:
        """Forgets tokens.

        Args:
            cache: A cache; it may be changed.
            length: Tokens that stay.

        Returns:
            The cache to go on with.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStats:
    """How drafting went. Only tokens of the output count as accepted: what came behind a stop does not.

    Attributes:
        steps: Runs of the target after the prompt.
        tokens: Tokens that these gave; the first token comes of the prompt's run and is not among them.
        drafted: Drafts that were verified, by place in their block, first place first.
        accepted: Drafts that became output, by place.
        draft_s: Seconds in the drafter.
        verify_s: Seconds in the target and in the verdict, the prompt left out.
    """

    steps: int
    tokens: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    draft_s: float
    verify_s: float

    @property
    def accepted_length(self) -> float:
        """Tokens a run of the target, its own one included; 0 when there was none."""
        return self.tokens / self.steps if self.steps else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeGeneration:
    """An output.

    Attributes:
        token_ids: What was generated, without the prompt; a stop token is the last of them.
        finish_reason: STOP at a stop token, LENGTH otherwise.
        stats: How drafting went.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: GenerationStats


def causal_target(argument: str, model: Any) -> CausalTarget:
    """A target, or an error.

    Args:
        argument: Name of the argument.
        model: What was given.

    Returns:
        The same.

    Raises:
        ConfigError: It cannot forget tokens, or cannot run.
    """
    if not (hasattr(model, "forward") and hasattr(model, "crop")):
        hint = "TransformersTarget(model) makes one of a model of transformers."
        checks.fail(argument, model, "a CausalTarget, with forward and crop", ConfigError, hint)
    target: CausalTarget = model
    return target


@torch.inference_mode()
def speculative_generate(
    target: CausalTarget,
    drafter: Drafter | None,
    input_ids: Sequence[int] | Tensor,
    max_new_tokens: int,
    *,
    stop_token_ids: Collection[int] | Tensor | int | None = (),
    max_drafts: int | None = None,
    temperature: float = 0.0,
    seed: int = 0,
) -> SpeculativeGeneration:
    """Continues one sequence; whatever the drafter proposes, the tokens are those that the target alone would give.

    Every token is the target's own choice: at temperature 0 the likeliest one, ties to the lowest id; above it the one
    that noise of `seed` and of the token's position picks. Drafts only decide how many of these choices one run of the
    target makes. A run over several tokens adds up in another order than runs over one, so where two tokens differ by
    less than the target's rounding, either may win.

    Args:
        target: The model.
        drafter: Proposes tokens, as slot 0; None decodes one token a run. A drafter with `observe(features, positions,
            slots)` is given the features of settled tokens, in order; one with `release(slot)` is told to forget the slot
            before and after. Negative ids and those outside of the vocabulary end a draft.
        input_ids: The prompt, shape [tokens], one token or more.
        max_new_tokens: Most tokens to generate.
        stop_token_ids: Tokens that end the output; a tensor, a number alone or None will do.
        max_drafts: Most drafts a step; None for the drafter's `draft_length`.
        temperature: 0, or what logits are divided by.
        seed: Of the noise, from 0 to 2**64 - 1.

    Returns:
        Tokens, why they ended, and counts.

    Raises:
        ConfigError: A number is out of range, `target` or `drafter` is none, or the drafter reads features and the target
            gives none.
        InvalidLogits: The target gave a row without any finite logit.
        ShapeError: The prompt is empty or not one sequence of token ids.
    """
    checks.check_int("max_new_tokens", max_new_tokens, 1, 2**31, ConfigError)
    checks.check_float("temperature", temperature, 0.0, 1e6, ConfigError)
    checks.check_int("seed", seed, 0, 2**64 - 1, ConfigError)
    causal_target("target", target)
    max_drafts = _most_drafts(drafter, max_drafts)
    prompt = as_integers("input_ids", input_ids)
    if prompt.ndim != 1 or not len(prompt):
        wanted = "[tokens], with one token or more"
        if prompt.ndim == 2 and len(prompt) == 1:
            wanted += ": give input_ids[0]"
        raise shape_error("input_ids", tuple(prompt.shape), wanted)
    check_within("input_ids", prompt, 0, 2**31 - 1, "any id")
    stops = _stops(stop_token_ids)
    release = getattr(drafter, "release", lambda slot: None)
    release(0)
    try:
        return _generated(
            _Run(target, drafter, prompt, temperature, seed), max_new_tokens, max_drafts, stops
        )
    finally:
        release(0)


def _generated(
    run: _Run, max_new_tokens: int, max_drafts: int, stops: frozenset[int]
) -> SpeculativeGeneration:
    first = len(run.tokens) - 1
    reason = FinishReason.STOP if run.tokens[-1] in stops else FinishReason.LENGTH
    end = first + max_new_tokens
    while reason is not FinishReason.STOP and len(run.tokens) < end:
        emitted = run.step(min(max_drafts, end - len(run.tokens) - 1), stops)
        if emitted[-1] in stops:
            reason = FinishReason.STOP
    return SpeculativeGeneration(
        token_ids=tuple(run.tokens[first:]),
        finish_reason=reason,
        stats=run.stats(),
    )


def _most_drafts(drafter: Drafter | None, max_drafts: int | None) -> int:
    """Most drafts a step of a drafter."""
    if max_drafts is not None:
        checks.check_int("max_drafts", max_drafts, 0, 2**16, ConfigError)
    if drafter is None:
        return 0
    hint = (
        "Give an object such as NgramDrafter() or BlockDrafter(...); ModelDrafter(TransformersTarget(model)) makes one "
        "of a smaller model."
    )
    if not callable(getattr(drafter, "propose", None)):
        checks.fail("drafter", drafter, "None or an object with propose", ConfigError, hint)
    if max_drafts is not None:
        return max_drafts
    most = getattr(drafter, "draft_length", None)
    hint = "Give max_drafts, or let the drafter say how many it proposes."
    return checks.check_int("the drafter's draft_length", most, 1, 2**16, ConfigError, hint)


def _stops(stop_token_ids: Any) -> frozenset[int]:
    found = stop_token_ids.tolist() if hasattr(stop_token_ids, "tolist") else stop_token_ids
    if found is None or isinstance(found, int):
        found = () if found is None else (found,)
    if isinstance(found, str) or not isinstance(found, Iterable):
        checks.fail("stop_token_ids", stop_token_ids, "a collection of token ids", ConfigError)
    ids = [token.item() if hasattr(token, "item") else token for token in found]
    return frozenset(
        checks.check_int("stop_token_ids", token, -(2**63), 2**63, ConfigError) for token in ids
    )


class _Run:
    """One sequence on its way; its last token is the anchor and not yet in the cache."""

    def __init__(
        self,
        target: CausalTarget,
        drafter: Drafter | None,
        prompt: Tensor,
        temperature: float,
        seed: int,
    ) -> None:
        self._target, self._drafter, self._device = target, drafter, prompt.device
        self._temperature, self._seed = temperature, seed
        self._sampler = RejectionSampler("coupled" if temperature else "greedy")
        self._noise = CounterNoise([seed]) if temperature else None
        self._observe = getattr(drafter, "observe", None)
        self._steps = self._emitted = 0
        self._drafted: list[int] = []
        self._accepted: list[int] = []
        self._draft_s = self._verify_s = 0.0
        self.tokens: list[int] = prompt.tolist()
        out = target.forward(prompt, None, num_logits=1)
        self._cache = out.cache
        self._settle(out.features, 0, len(prompt))
        self.tokens += self._judge(out.logits, [])

    def step(self, max_drafts: int, stops: frozenset[int]) -> list[int]:
        """Drafts, verifies and appends; returns the new tokens, one at least."""
        began = time.perf_counter()
        drafts = self._propose(max_drafts) if max_drafts else []
        drafted = time.perf_counter()
        anchor = len(self.tokens) - 1
        ids = torch.tensor([self.tokens[anchor], *drafts], device=self._device)
        out = self._target.forward(ids, self._cache)
        emitted = self._judge(out.logits, drafts)
        settled = len(emitted)
        if settled <= len(drafts):
            self._cache = self._target.crop(out.cache, anchor + settled)
        else:
            self._cache = out.cache
        for at, token in enumerate(emitted):
            if token in stops:
                emitted = emitted[: at + 1]
                break
        self.tokens += emitted
        verified = time.perf_counter()
        self._settle(out.features, anchor, settled)
        self._count(len(drafts), min(settled - 1, len(emitted)), len(emitted))
        self._draft_s += drafted - began + time.perf_counter() - verified
        self._verify_s += verified - drafted
        return emitted

    def stats(self) -> GenerationStats:
        """The counts so far."""
        return GenerationStats(
            steps=self._steps,
            tokens=self._emitted,
            drafted=tuple(self._drafted),
            accepted=tuple(self._accepted),
            draft_s=self._draft_s,
            verify_s=self._verify_s,
        )

    def _propose(self, max_drafts: int) -> list[int]:
        if self._drafter is None:
            return []
        anchor = len(self.tokens) - 1
        view = DraftView(
            rids=("0",),
            slots=(0,),
            anchor_ids=(self.tokens[anchor],),
            positions=(anchor,),
            token_ids=(self.tokens,),
            temperatures=(self._temperature,) if self._temperature else (),
            seeds=(self._seed,) if self._temperature else (),
        )
        batch = self._drafter.propose(view, max_drafts)
        if not hasattr(batch, "token_ids"):
            hint = f"{type(self._drafter).__name__}.propose gave something else."
            checks.fail("drafts", batch, "a DraftBatch", ConfigError, hint)
        found = batch.token_ids
        drafts: list[int] = []
        try:
            for token in found[0][:max_drafts] if len(found) else ():
                if not 0 <= token < self._vocab_size:
                    break
                drafts.append(int(token))
        except (RuntimeError, TypeError, ValueError):
            hint = f"{type(self._drafter).__name__}.propose gave something else."
            checks.fail("drafts", found, "token ids of one row", ConfigError, hint)
        return drafts

    def _judge(self, logits: Tensor, drafts: list[int]) -> list[int]:
        """The target's own tokens: those drafts that agree with it, and the one behind them."""
        self._vocab_size = logits.shape[-1]
        if self._temperature:
            # Below the highest first, so that the smallest temperature leaves that one.
            highest = torch.finfo(torch.float64).max
            logits = logits.double().nan_to_num(nan=-torch.inf, posinf=highest, neginf=-torch.inf)
            logits = (logits - logits.amax(-1, keepdim=True)) / self._temperature
        result = self._sampler(
            logits,
            torch.tensor([drafts], dtype=torch.int64, device=logits.device).view(1, -1),
            torch.tensor([len(drafts)], device=logits.device),
            [len(self.tokens)],
            noise=self._noise,
        )
        if bool(result.is_bad[0]):
            raise InvalidLogits(
                f"the target gave a row of logits without a finite entry at or behind position {len(self.tokens)}; "
                "check its weights and dtype."
            )
        emitted: list[int] = result.tokens[0, : int(result.num_accepted[0]) + 1].tolist()
        return emitted

    def _settle(self, features: Tensor | None, first: int, count: int) -> None:
        """Gives the drafter the features of tokens that stay."""
        if self._observe is None:
            return
        if features is None:
            raise ConfigError(
                f"{type(self._drafter).__name__} reads features and the target gives none; a target of transformers gives "
                "those of its taps: TransformersTarget(model, taps=...).",
                field="target",
            )
        self._observe(features[:count], range(first, first + count), [0] * count)

    def _count(self, drafted: int, accepted: int, emitted: int) -> None:
        self._steps += 1
        self._emitted += emitted
        for _ in range(drafted - len(self._drafted)):
            self._drafted.append(0)
            self._accepted.append(0)
        for at in range(drafted):
            self._drafted[at] += 1
            self._accepted[at] += at < accepted
