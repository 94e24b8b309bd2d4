"""Recall of copied random spans inside held-out code, teacher-forced and running free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.models.deepseek_v41 import DeepseekV41, ForwardBatch

from .metrics import Rate

DISTANCES = (64, 128, 256, 512, 1024, 1536)
SPAN, CUE = 24, 8
BEFORE = 384
"""Tokens of code before the span: with the longest distance the sequence stays within 2,048 tokens."""
ROW_TOKENS = BEFORE + DISTANCES[-1] + SPAN
ROWS = 32
SLOTS = 8
CHUNK = 512
SEED = 5


@dataclass(frozen=True)
class Recall:
    """Recall at one distance.

    Attributes:
        tokens: Greedy tokens that are right when the right ones are given up to each.
        spans: Spans that come out exactly when nothing but the cue is given.
    """

    tokens: Rate
    spans: Rate


def recall_rows(stream: Sequence[int], ordinary: Sequence[int], num_rows: int) -> list[list[int]]:
    """Rows of text with a random span each after `BEFORE` tokens.

    Args:
        stream: Tokens of the text, at least `ROW_TOKENS`.
        ordinary: Ids that random spans are drawn from.
        num_rows: Rows, at evenly spaced places of the text.

    Returns:
        Rows of `ROW_TOKENS` ids.
    """
    starts = torch.linspace(0, len(stream) - ROW_TOKENS, num_rows).long().tolist()
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.randint(len(ordinary), (num_rows, SPAN), generator=generator).tolist()
    rows = []
    for start, span in zip(starts, drawn, strict=True):
        row = list(stream[start : start + ROW_TOKENS])
        row[BEFORE : BEFORE + SPAN] = [ordinary[i] for i in span]
        rows.append(row)
    return rows


@torch.inference_mode()
def measure(model: DeepseekV41, rows: Sequence[Sequence[int]]) -> dict[int, Recall]:
    """Recall by distance.

    Every row is read once. Where a distance is reached, the span is put in again, the model's tokens are taken, and
    the cache is cut back to where the text goes on, so a row's distances do not see each other's copies.

    Args:
        model: The model.
        rows: From `recall_rows`.

    Returns:
        Recall at each of `DISTANCES`.
    """
    right: dict[int, list[Tensor]] = {distance: [] for distance in DISTANCES}
    free: dict[int, list[Tensor]] = {distance: [] for distance in DISTANCES}
    for first in range(0, len(rows), SLOTS):
        reader = _Reader(model, rows[first : first + SLOTS])
        for distance in DISTANCES:
            reader.read_to(BEFORE + distance)
            forced, own = reader.copy()
            answer = reader.spans[:, CUE:]
            right[distance].append(forced == answer)
            free[distance].append((own == answer).all(1))
    return {
        distance: Recall(_rate(torch.cat(right[distance])), _rate(torch.cat(free[distance])))
        for distance in DISTANCES
    }


def _rate(outcomes: Tensor) -> Rate:
    return Rate(int(outcomes.sum()), outcomes.numel())


class _Reader:
    """Reads rows side by side, a slot each."""

    def __init__(self, model: DeepseekV41, rows: Sequence[Sequence[int]]) -> None:
        self.model = model
        self.ids = torch.tensor(rows)
        self.spans = self.ids[:, BEFORE : BEFORE + SPAN]
        self.at = 0
        self.cache = model.new_cache(
            len(rows), self.ids.shape[1], max_step_tokens=CHUNK, max_rollback=SPAN
        )

    def read_to(self, end: int) -> None:
        """Reads the text up to a position."""
        while self.at < end:
            stop = min(end, self.at + CHUNK)
            self._run(self.ids[:, self.at : stop])

    def copy(self) -> tuple[Tensor, Tensor]:
        """Greedy tokens behind the cue, each [rows, SPAN - CUE]: given the span, and given its cue only."""
        here = self.at
        cue = self._run(self.spans[:, :CUE])[:, -1:].argmax(-1)
        rest = self._run(self.spans[:, CUE:-1]).argmax(-1)
        forced = torch.cat((cue, rest), 1)
        self._cut(here + CUE)
        own = [cue]
        while len(own) < SPAN - CUE:
            own.append(self._run(own[-1]).argmax(-1))
        self._cut(here)
        return forced, torch.cat(own, 1)

    def _run(self, ids: Tensor) -> Tensor:
        segments = [(slot, self.at, row) for slot, row in enumerate(ids.tolist())]
        device = self.model.embed.weight.device
        batch = ForwardBatch.from_segments(segments, device=device)
        hidden = self.model(batch, self.cache).hidden
        self.at += ids.shape[1]
        if ids.shape[1] > SPAN:
            return hidden
        logits = self.model.compute_logits(hidden).cpu().view(*ids.shape, -1)
        image = self.model.config.image_token_id
        if image is not None:
            logits[..., image] = -torch.inf  # stands for an image, so no engine generates it
        return logits

    def _cut(self, length: int) -> None:
        for slot in range(self.cache.num_slots):
            self.cache.truncate(slot, length)
        self.at = length
