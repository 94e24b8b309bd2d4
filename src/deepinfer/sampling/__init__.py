"""Choosing tokens: counter-based noise, filters, penalties, log probabilities, processors and the sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.core.lazy import lazy_exports

if TYPE_CHECKING:
    from deepinfer.sampling.coupled import CoupledDraw as CoupledDraw
    from deepinfer.sampling.filters import Candidates as Candidates
    from deepinfer.sampling.filters import filter_logits as filter_logits
    from deepinfer.sampling.filters import top_logits as top_logits
    from deepinfer.sampling.logprobs import log_partition as log_partition
    from deepinfer.sampling.logprobs import prompt_logprobs as prompt_logprobs
    from deepinfer.sampling.logprobs import token_logprobs as token_logprobs
    from deepinfer.sampling.penalties import apply_allowed_ids as apply_allowed_ids
    from deepinfer.sampling.penalties import apply_logit_bias as apply_logit_bias
    from deepinfer.sampling.penalties import apply_penalties as apply_penalties
    from deepinfer.sampling.penalties import apply_token_bitmask as apply_token_bitmask
    from deepinfer.sampling.processors import AllowTokens as AllowTokens
    from deepinfer.sampling.processors import ForbidTokens as ForbidTokens
    from deepinfer.sampling.processors import LogitsProcessor as LogitsProcessor
    from deepinfer.sampling.processors import PerRequest as PerRequest
    from deepinfer.sampling.rng import Stream as Stream
    from deepinfer.sampling.rng import child_seed as child_seed
    from deepinfer.sampling.rng import gumbel_noise as gumbel_noise
    from deepinfer.sampling.rng import noise_bits as noise_bits
    from deepinfer.sampling.rng import philox4x32 as philox4x32
    from deepinfer.sampling.rng import resolve_seed as resolve_seed
    from deepinfer.sampling.sampler import FAILED_TOKEN as FAILED_TOKEN
    from deepinfer.sampling.sampler import InvalidLogits as InvalidLogits
    from deepinfer.sampling.sampler import Sampled as Sampled
    from deepinfer.sampling.sampler import Sampler as Sampler

_EXPORTS = {
    "AllowTokens": "deepinfer.sampling.processors",
    "Candidates": "deepinfer.sampling.filters",
    "CoupledDraw": "deepinfer.sampling.coupled",
    "FAILED_TOKEN": "deepinfer.sampling.sampler",
    "ForbidTokens": "deepinfer.sampling.processors",
    "InvalidLogits": "deepinfer.sampling.sampler",
    "LogitsProcessor": "deepinfer.sampling.processors",
    "PerRequest": "deepinfer.sampling.processors",
    "Sampled": "deepinfer.sampling.sampler",
    "Sampler": "deepinfer.sampling.sampler",
    "Stream": "deepinfer.sampling.rng",
    "apply_allowed_ids": "deepinfer.sampling.penalties",
    "apply_logit_bias": "deepinfer.sampling.penalties",
    "apply_penalties": "deepinfer.sampling.penalties",
    "apply_token_bitmask": "deepinfer.sampling.penalties",
    "child_seed": "deepinfer.sampling.rng",
    "filter_logits": "deepinfer.sampling.filters",
    "gumbel_noise": "deepinfer.sampling.rng",
    "log_partition": "deepinfer.sampling.logprobs",
    "noise_bits": "deepinfer.sampling.rng",
    "philox4x32": "deepinfer.sampling.rng",
    "prompt_logprobs": "deepinfer.sampling.logprobs",
    "resolve_seed": "deepinfer.sampling.rng",
    "token_logprobs": "deepinfer.sampling.logprobs",
    "top_logits": "deepinfer.sampling.filters",
}

__all__ = [*sorted(_EXPORTS)]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
