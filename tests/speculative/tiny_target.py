"""A small random causal language model whose cache is the text itself, in float64 so that no two tokens tie."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deepinfer.speculative import TargetEnds, TargetOutput

VOCAB, HIDDEN, TAPS = 12, 16, (-1, 0)


class TinyTarget(nn.Module):
    """One attention layer; `forwards` records the length of every call, `crops` every crop."""

    def __init__(self, seed: int = 0, vocab: int = VOCAB, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(vocab, HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, vocab)
        self.double().requires_grad_(False)
        self.embed.weight.mul_(scale)
        self.ends = TargetEnds(
            lambda ids: self.embed(ids).float(), lambda rows: self.lm_head(rows.double()).float()
        )
        self.forwards: list[int] = []
        self.crops: list[int] = []

    def states(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Features and final states of texts, shape [rows, tokens, ...]."""
        x = self.embed(ids)
        q, k, v = self.qkv(x + 0.3 * torch.sin(torch.arange(ids.shape[1]).double())[:, None]).chunk(
            3, -1
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.cat([x, x + y], -1), torch.tanh(x + 2 * y)

    def forward(self, input_ids: Tensor, cache: Any = None, *, num_logits: int = 0) -> TargetOutput:
        cache = input_ids if cache is None else torch.cat([cache, input_ids])
        self.forwards.append(len(input_ids))
        features, final = self.states(cache[None])
        count = len(input_ids)
        logits = self.lm_head(final[0, -(num_logits or count) :])
        return TargetOutput(logits, features[0, -count:].float(), cache)

    def crop(self, cache: Any, length: int) -> Any:
        assert 0 < length < len(cache)
        self.crops.append(length)
        return cache[:length]

    def alone(self, prompt: list[int], count: int, stops: set[int] = frozenset()) -> list[int]:  # type: ignore[assignment]
        """Greedy decoding written out."""
        text = list(prompt)
        while len(text) < len(prompt) + count:
            _, final = self.states(torch.tensor([text]))
            text.append(int(self.lm_head(final[0, -1]).argmax()))
            if text[-1] in stops:
                break
        return text[len(prompt) :]
