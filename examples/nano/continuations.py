"""The trunk's own continuations, generated with the inference model: what the draft will meet."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.models.deepseek_v41 import DeepseekV41, ForwardBatch, Segment

PREFILL_SLOTS = 128


def _batch(ids: Tensor, slots: range, start: int) -> ForwardBatch:
    """One segment a slot; ids [slots, tokens]."""
    return ForwardBatch(ids.reshape(-1), tuple(Segment(s, start, ids.shape[1]) for s in slots))


def continue_prompts(
    model: DeepseekV41, prompts: Tensor, num_tokens: int, temperature: Tensor, seed: int
) -> Tensor:
    """Extends equally long prompts in lockstep.

    Args:
        model: The inference model.
        prompts: Token ids, shape [rows, prompt_tokens], int64, on the model's device.
        num_tokens: Tokens to generate.
        temperature: Per row, shape [rows]; 0 is greedy.
        seed: Fixes the draws.

    Returns:
        Prompts with their continuations, shape [rows, prompt_tokens + num_tokens].
    """
    rows, length = prompts.shape
    cache = model.new_cache(rows, length + num_tokens, max_step_tokens=length)
    generator = torch.Generator(device=prompts.device).manual_seed(seed)
    hot = temperature > 0
    scale = torch.where(hot, temperature, 1.0)[:, None]

    def choose(logits: Tensor) -> Tensor:
        drawn = torch.multinomial((logits / scale).softmax(-1), 1, generator=generator)[:, 0]
        return torch.where(hot, drawn, logits.argmax(-1))

    hidden = []
    for first in range(0, rows, PREFILL_SLOTS):
        slots = range(first, min(rows, first + PREFILL_SLOTS))
        out = model(_batch(prompts[first : slots.stop], slots, 0), cache)
        hidden.append(out.hidden.view(len(slots), length, -1)[:, -1])
    sequence = [prompts, choose(model.compute_logits(torch.cat(hidden)))[:, None]]
    for step in range(num_tokens - 1):
        out = model(_batch(sequence[-1], range(rows), length + step), cache)
        sequence.append(choose(model.compute_logits(out.hidden))[:, None])
    return torch.cat(sequence, 1)
