"""Drafts from a smaller language model with the same vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError
from deepinfer.core.views import DraftBatch, DraftView
from deepinfer.speculative.generate import CausalTarget, causal_target
from deepinfer.speculative.noise import CounterNoise, DrawStream, NoiseSource

__all__ = ["ModelDrafter"]


class ModelDrafter:
    """Runs a smaller causal language model ahead of the target, one token at a time.

    It reads tokens only, so it serves any target whose token ids mean the same. Its cache follows the text: what the
    target rejected is cropped away at the next call. With a temperature it draws with the noise that the coupled rule
    gives the target.

    Args:
        model: The smaller model.
        draft_length: Most drafts of a row.
        device: Where the model takes its tokens.
        noise: Makes the source of noise from the seeds of the rows.

    Raises:
        ConfigError: `draft_length` is out of range, or the model is no target.
    """

    def __init__(
        self,
        model: CausalTarget,
        draft_length: int = 4,
        *,
        device: torch.device | str = "cpu",
        noise: Callable[[Sequence[int]], NoiseSource] = CounterNoise,
    ) -> None:
        self._model = causal_target("model", model)
        self._draft_length = checks.check_int("draft_length", draft_length, 1, 256, ConfigError)
        self._device = torch.device(device)
        self._noise = noise
        # Of each slot: the cache, and the tokens in it.
        self._known: dict[int, tuple[Any, list[int]]] = {}

    @property
    def draft_length(self) -> int:
        """Most drafts of a row."""
        return self._draft_length

    def release(self, slot: int) -> None:
        """Forgets a sequence.

        Args:
            slot: Its slot; one that is not known is ignored.
        """
        self._known.pop(slot, None)

    @torch.inference_mode()
    def propose(self, view: DraftView, max_drafts: int) -> DraftBatch:
        """Proposes for each row.

        Args:
            view: The rows, with their tokens.
            max_drafts: Most drafts a row.

        Returns:
            Drafts.

        Raises:
            ConfigError: The view holds no tokens.
        """
        if len(view.token_ids) != len(view.slots):
            checks.fail("view.token_ids", len(view.token_ids), "one text a row", ConfigError)
        count = min(max_drafts, self._draft_length)
        rows = [self._row(view, row, slot, count) for row, slot in enumerate(view.slots)]
        return DraftBatch(token_ids=tuple(rows))

    def _row(self, view: DraftView, row: int, slot: int, count: int) -> tuple[int, ...]:
        text = list(view.token_ids[row])
        if count < 1 or not text:
            return ()
        cache, seen = self._known.pop(slot, (None, []))
        # The last token is always run again: its logits were not kept.
        kept = min(_common(seen, text), len(text) - 1)
        if not kept:
            cache = None
        elif kept < len(seen):
            cache = self._model.crop(cache, kept)
        drafts: list[int] = []
        new = text[kept:]
        while True:
            ids = torch.tensor(new, device=self._device)
            out = self._model.forward(ids, cache, num_logits=1)
            cache = out.cache
            drafts.append(self._choose(out.logits[-1], view, row, len(text) + len(drafts)))
            if len(drafts) == count:
                break
            new = drafts[-1:]
        self._known[slot] = (cache, text + drafts[:-1])
        return tuple(drafts)

    def _choose(self, logits: torch.Tensor, view: DraftView, row: int, position: int) -> int:
        temperature = view.temperatures[row] if view.temperatures else 0.0
        if temperature:
            source = self._noise(view.seeds)
            drawn = source.gumbel([row], [position], len(logits), DrawStream.SHARED)[0]
            logits = logits.double() / temperature + torch.from_numpy(drawn).to(logits.device)
        return int(logits.argmax())


def _common(first: list[int], second: list[int]) -> int:
    """Length of the common beginning."""
    most = min(len(first), len(second))
    if first[:most] == second[:most]:
        return most
    return next(at for at in range(most) if first[at] != second[at])
