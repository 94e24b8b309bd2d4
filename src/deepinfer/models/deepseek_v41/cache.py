"""The key-value cache of a few requests: one slot each, flat tensors over slots."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.core.errors import ConfigError, InvariantBroken, RequestTooLong
from deepinfer.models.deepseek_v41.batch import Segment
from deepinfer.models.deepseek_v41.config import DeepseekV41Config

__all__ = ["SlotCache"]


class SlotCache:
    """Everything that a request leaves behind between steps.

    Window rows sit in rings: position p is at ring index `p % ring_size`. A ring has room for the window and one
    whole step, so the rows that a step writes never overwrite rows that it, or a shorter repeat of it, still reads.
    All window rings and pools are views of one tensor, `kv`, so that one gather serves both.

    Attributes:
        num_slots: Slots.
        max_tokens: Tokens that one slot holds.
        max_step_tokens: Tokens that one request may run in one step.
        max_rollback: Tokens that `truncate` can take back.
        ring_size: Rows of a window ring.
        kv: Every window and pool row, shape [rows, head_dim].
        windows: Window rings, shape [layers + stages, slots, ring_size, head_dim]; draft stages come last.
        rings: The same by layer, each of shape [slots * ring_size, head_dim].
        pools: Pool rows by KV source layer, shape [slots, pool_rows, head_dim].
        index_keys: Index keys by KV source layer, shape [slots, pool_rows, index_head_dim].
        tails: Recent values and gates by KV source layer of ratio 2, as a ring, shape [slots, tail_size, 2,
            head_dim], fp32.
        tokens: Token history, shape [slots, max_tokens], int64.
        lengths: Tokens held by each slot.
        has_images: Whether a slot may hold image tokens.
        draft_spans: Positions [first, end) whose target features the draft has seen, by slot.
    """

    def __init__(
        self,
        config: DeepseekV41Config,
        num_slots: int,
        max_tokens: int,
        max_step_tokens: int = 512,
        *,
        max_rollback: int = 16,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Allocates the cache; memory grows with `num_slots * max_tokens`.

        Args:
            config: The model's configuration.
            num_slots: Slots, at least 1.
            max_tokens: Tokens that one slot holds, at most `max_position_embeddings`.
            max_step_tokens: Tokens that one request may run in one step.
            max_rollback: Tokens that `truncate` can take back, at most `max_step_tokens`.
            device: Where the tensors live.
            dtype: Dtype of the rows; values rounded to FP8 and FP4 are exact in bf16.

        Raises:
            ConfigError: A size is out of range.
        """
        limits = {
            "num_slots": (num_slots, 2**20),
            "max_tokens": (max_tokens, config.max_position_embeddings),
            "max_step_tokens": (max_step_tokens, 2**20),
            "max_rollback": (max_rollback, 2**20),
        }
        for name, (value, high) in limits.items():
            if not 1 <= value <= high:
                raise ConfigError(
                    f"{name} is {value}; it must be from 1 to {high}.",
                    field=name,
                    value=value,
                    limit=f"1 to {high}",
                )
        self.config = config
        self.num_slots = num_slots
        self.max_tokens = max_tokens
        self.max_step_tokens = max_step_tokens
        self.max_rollback = min(max_rollback, max_step_tokens)
        self.ring_size = config.sliding_window + max_step_tokens
        self.tail_size = self.max_rollback + 2
        self.device = torch.device(device or "cpu")
        rings = config.num_hidden_layers + config.num_nextn_predict_layers
        window_rows = rings * num_slots * self.ring_size
        self.pool_rows = {
            s: -(-max_tokens // config.compress_ratios[s]) for s in config.kv_source_layer_ids
        }
        total = window_rows + num_slots * sum(self.pool_rows.values())
        self.kv = torch.zeros(total, config.head_dim, device=device, dtype=dtype)
        self.windows = self.kv[:window_rows].view(rings, num_slots, self.ring_size, config.head_dim)
        self.rings = [ring.view(-1, config.head_dim) for ring in self.windows]
        self.pools: dict[int, Tensor] = {}
        self.pool_offsets: dict[int, int] = {}
        at = window_rows
        for source, rows in self.pool_rows.items():
            self.pool_offsets[source] = at
            self.pools[source] = self.kv[at : at + num_slots * rows].view(
                num_slots, rows, config.head_dim
            )
            at += num_slots * rows
        self.index_keys = {
            source: torch.zeros(num_slots, rows, config.index_head_dim, device=device, dtype=dtype)
            for source, rows in self.pool_rows.items()
        }
        self.tails = {
            source: torch.zeros(
                num_slots, self.tail_size, 2, config.head_dim, dtype=torch.float32, device=device
            )
            for source in config.kv_source_layer_ids
            if config.compress_ratios[source] == 2
        }
        self.tokens = torch.zeros(num_slots, max_tokens, dtype=torch.int64, device=device)
        self.lengths = [0] * num_slots
        self.has_images = [False] * num_slots
        self.draft_spans = [(0, 0)] * num_slots
        self._high_water = [0] * num_slots

    @property
    def size_bytes(self) -> int:
        """Memory of all tensors, in bytes."""
        tensors = (self.kv, self.tokens, *self.index_keys.values(), *self.tails.values())
        return sum(t.numel() * t.element_size() for t in tensors)

    def reset(self, slot: int) -> None:
        """Empties a slot; what its last request left behind is overwritten with zeros."""
        self._check_slot(slot)
        used = self._high_water[slot]
        if used:
            self.windows[:, slot, :used].zero_()
            for source, rows in self.pool_rows.items():
                ratio = self.config.compress_ratios[source]
                self.pools[source][slot, : min(rows, used // ratio + 1)].zero_()
                self.index_keys[source][slot, : min(rows, used // ratio + 1)].zero_()
            for tail in self.tails.values():
                tail[slot].zero_()
            self.tokens[slot, :used].zero_()
        self.lengths[slot] = self._high_water[slot] = 0
        self.has_images[slot] = False
        self.draft_spans[slot] = (0, 0)

    def truncate(self, slot: int, length: int) -> None:
        """Takes back the newest tokens of a slot, as after rejected drafts.

        Args:
            slot: The slot.
            length: Tokens to keep, at most `max_rollback` below the tokens held.

        Raises:
            InvariantBroken: `length` is above the tokens held, or too far below them to be restored.
        """
        self._check_slot(slot)
        held = self.lengths[slot]
        if not held - self.max_rollback <= length <= held or length < 0:
            raise InvariantBroken(
                f"Slot {slot} holds {held} tokens and cannot be cut to {length}: at most {self.max_rollback} tokens "
                "can be taken back. Reset the slot, or make the cache with a larger max_rollback."
            )
        self.lengths[slot] = length
        first, end = self.draft_spans[slot]
        self.draft_spans[slot] = (min(first, length), min(end, length))

    def adopt_prefix(self, slot: int, token_ids: Tensor) -> None:
        """Declares a prefix whose pool rows and index keys were copied into an empty slot.

        Its window rows are still missing: run the last tokens of the prefix again, in a segment whose
        `window_start` is its own start and whose `pool_start` is the length of the prefix.

        Args:
            slot: The slot; it must be empty.
            token_ids: The prefix, shape [tokens], int64.

        Raises:
            InvariantBroken: The slot is not empty.
            RequestTooLong: The prefix does not fit.
        """
        self._check_slot(slot)
        length = token_ids.shape[0]
        if self.lengths[slot]:
            raise InvariantBroken(
                f"Slot {slot} holds {self.lengths[slot]} tokens; reset it before adopting a prefix."
            )
        self._check_room(slot, length)
        self.tokens[slot, :length] = token_ids
        self.has_images[slot] = self.config.image_token_id is not None
        self.lengths[slot] = self._high_water[slot] = length

    def begin(self, segments: tuple[Segment, ...]) -> None:
        """Checks the segments of a step before anything is written.

        Args:
            segments: What the step is going to run.

        Raises:
            InvariantBroken: A segment does not continue its slot, is longer than a step, or names no slot.
            RequestTooLong: A segment ends beyond the slot.
        """
        ends: dict[int, int] = {}
        steps: dict[int, int] = {}
        for s in segments:
            self._check_slot(s.slot)
            held = ends.get(s.slot, self.lengths[s.slot])
            replays = s.slot not in ends and s.window_start == s.start and s.pool_start == held
            if (
                s.num_tokens < 1
                or s.start < 0
                or (s.start != held and not (replays and s.start < held))
            ):
                raise InvariantBroken(
                    f"Slot {s.slot} holds {held} tokens; a segment of {s.num_tokens} tokens at position {s.start} "
                    "does not continue it. Truncate or reset the slot first."
                )
            steps[s.slot] = steps.get(s.slot, 0) + s.num_tokens
            if steps[s.slot] > self.max_step_tokens:
                raise InvariantBroken(
                    f"Slot {s.slot} runs {steps[s.slot]} tokens in one step; the cache was made for at most "
                    f"{self.max_step_tokens}. Use smaller chunks or a larger max_step_tokens."
                )
            self._check_room(s.slot, s.end)
            ends[s.slot] = s.end
        for slot, end in ends.items():
            self._high_water[slot] = max(self._high_water[slot], end)

    def commit(self, segments: tuple[Segment, ...]) -> None:
        """Counts the tokens of a step that was written."""
        for s in segments:
            self.lengths[s.slot] = s.end

    def _check_room(self, slot: int, length: int) -> None:
        if length > self.max_tokens:
            raise RequestTooLong(
                f"Slot {slot} would hold {length} tokens; it has room for {self.max_tokens}. "
                "Shorten the request or make the cache with a larger max_tokens.",
                limit_tokens=self.max_tokens, asked_tokens=length,
            )  # fmt: skip

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise InvariantBroken(
                f"There is no slot {slot}; the cache has slots 0 to {self.num_slots - 1}."
            )
