"""The drafter of a `DraftModule`: keeps the context of each sequence and proposes blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError, InvariantBroken
from deepinfer.core.views import DraftBatch, DraftView
from deepinfer.speculative._arrays import shape_error
from deepinfer.speculative.draft_module import DraftModule, KeyValues, TargetEnds
from deepinfer.speculative.noise import CounterNoise, DrawStream, NoiseSource

__all__ = ["BlockDrafter"]

_FIRST_ROWS = 64


class _Context:
    """Keys and values of one sequence, in buffers that double when they are full."""

    def __init__(self) -> None:
        self.first = self.end = 0
        self._buffers: list[tuple[Tensor, Tensor]] = []

    def begin(self, position: int) -> None:
        self.first = self.end = position

    def cut(self, position: int) -> None:
        self.end = position

    def append(self, rows: KeyValues) -> None:
        start, count = self.end - self.first, rows[0][0].shape[2]
        if not self._buffers or self._buffers[0][0].shape[2] < start + count:
            room = max(_FIRST_ROWS, 2 * (start + count))
            grown = []
            for layer, (keys, _) in enumerate(rows):
                wide = keys.new_empty(2, *keys.shape[:2], room, keys.shape[3])
                if start:
                    for at, old in enumerate(self._buffers[layer]):
                        wide[at, :, :, :start] = old[:, :, :start]
                grown.append((wide[0], wide[1]))
            self._buffers = grown
        for buffers, new in zip(self._buffers, rows, strict=True):
            for buffer, values in zip(buffers, new, strict=True):
                buffer[:, :, start : start + count] = values
        self.end += count

    def rows(self, position: int) -> KeyValues:
        """Rows strictly before a position."""
        count = position - self.first
        return [(keys[:, :, :count], values[:, :, :count]) for keys, values in self._buffers]


class BlockDrafter:
    """Proposes with a `DraftModule`; `observe` must be given the target's features of every settled token.

    Drafts of one row depend on its own tokens and features alone. With a temperature a draft is drawn with the noise
    that the coupled rule gives the target, so that both often agree.

    Args:
        module: The draft, on the target's device.
        ends: Embedding and head of the target.
        noise: Makes the source of noise from the seeds of the rows.

    Raises:
        ConfigError: The target's embedding or head is of another size than the draft.
    """

    def __init__(
        self,
        module: DraftModule,
        ends: TargetEnds,
        *,
        noise: Callable[[Sequence[int]], NoiseSource] = CounterNoise,
    ) -> None:
        _check_ends(module, ends)
        self.module = module
        self._ends = ends
        self._noise = noise
        self._contexts: dict[int, _Context] = {}

    @property
    def draft_length(self) -> int:
        """Drafts of one block."""
        return self.module.config.block_size

    def release(self, slot: int) -> None:
        """Forgets a sequence.

        Args:
            slot: Its slot; one that is not known is ignored.
        """
        self._contexts.pop(slot, None)

    @torch.inference_mode()
    def observe(self, features: Tensor, positions: Sequence[int], slots: Sequence[int]) -> None:
        """Extends contexts. A position that was given before replaces it and all behind it; a gap begins anew.

        Args:
            features: Features of settled tokens, shape [tokens, taps * hidden].
            positions: Their positions, one a token, rising by one within a slot.
            slots: Their slots, one a token.

        Raises:
            ShapeError: The arguments differ in length.
        """
        count = len(positions)
        if features.ndim != 2 or len(features) != count or len(slots) != count:
            found = (tuple(features.shape), count, len(slots))
            raise shape_error("features, positions and slots", found, "[tokens, ...] each")
        at = 0
        while at < count:
            end = at + 1
            while (
                end < count and slots[end] == slots[at] and positions[end] == positions[end - 1] + 1
            ):
                end += 1
            where = torch.arange(positions[at], positions[at] + end - at, device=features.device)
            context = self._contexts.setdefault(slots[at], _Context())
            if context.first < positions[at] <= context.end:
                context.cut(positions[at])
            else:
                context.begin(positions[at])
            context.append(self.module.context_rows(features[at:end][None], where[None]))
            at = end

    @torch.inference_mode()
    def propose(self, view: DraftView, max_drafts: int) -> DraftBatch:
        """Proposes for each row; the whole block is always computed, as it was trained, and cut afterwards.

        Args:
            view: The rows.
            max_drafts: Most drafts a row.

        Returns:
            One block a row, cut to `max_drafts`, with confidences where the draft has that head.

        Raises:
            InvariantBroken: The features right before an anchor were not given.
        """
        checks.check_int("max_drafts", max_drafts, 0, 2**20, ConfigError)
        tokens, confidences = [], []
        for row, slot in enumerate(view.slots):
            block, survival = self._block(view, row, slot)
            tokens.append(tuple(block[:max_drafts]))
            confidences.append(tuple(survival[:max_drafts]))
        has_any = self.module.confidence is not None
        return DraftBatch(
            token_ids=tuple(tokens), confidences=tuple(confidences) if has_any else ()
        )

    def _block(self, view: DraftView, row: int, slot: int) -> tuple[list[int], list[float]]:
        module, anchor = self.module, view.positions[row]
        context = self._contexts.get(slot)
        end = 0 if context is None else context.end
        if context is None or end != anchor:
            raise InvariantBroken(
                f"the draft has features of slot {slot} up to position {end - 1} and the anchor is at {anchor}; call "
                "observe with the features of every settled token before proposing."
            )
        device = module.combiner.weight.device
        anchor_id = torch.tensor([view.anchor_ids[row]], device=device)
        at = torch.tensor([[anchor]], device=device)
        hidden = module.block_hidden(anchor_id[None], at, context.rows(anchor), self._ends)[0]
        base = self._ends.lm_head(hidden)
        temperature = view.temperatures[row] if view.temperatures else 0.0
        noise = None
        if temperature:
            places = range(anchor + 1, anchor + 1 + module.config.block_size)
            drawn = self._noise(view.seeds).gumbel(
                [row] * len(places), list(places), base.shape[-1], DrawStream.SHARED
            )
            noise = torch.from_numpy(drawn).to(device, torch.float32)[None]
        tokens, _ = module.head.sample(
            base, anchor_id, hidden, temperature=temperature, noise=noise
        )
        previous = torch.cat([anchor_id[None], tokens[:, :-1]], 1)
        logits = module.confidence_logits(hidden, previous)
        survival = [] if logits is None else torch.sigmoid(logits[0]).tolist()
        return tokens[0].tolist(), survival


def _check_ends(module: DraftModule, ends: TargetEnds) -> None:
    """Refuses ends of another size, as far as they tell theirs."""
    vocab, hidden = module.config.vocab_size, module.config.hidden_size
    for name in ("embed", "lm_head"):
        weight = getattr(getattr(ends, name), "weight", None)
        if not isinstance(weight, Tensor) or weight.ndim != 2:
            continue
        rows, width = weight.shape
        if width != hidden or rows < vocab or (name == "lm_head" and rows > vocab):
            limit = f"({vocab}, {hidden}), the draft's vocab_size and hidden_size"
            checks.fail(f"the shape of ends.{name}.weight", (rows, width), limit, ConfigError)
