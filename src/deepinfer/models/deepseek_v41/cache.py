"""The key-value cache of a few requests: state by slot, and pools by slot or in blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor

from deepinfer.core.errors import InvariantBroken, RequestTooLong
from deepinfer.core.plan import BlockUpdate
from deepinfer.models.deepseek_v41.batch import Segment, to_device
from deepinfer.models.deepseek_v41.block_table import BlockTable, flat_index
from deepinfer.models.deepseek_v41.cache_checks import check_sizes, check_storage
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.narrowing import narrowing_of
from deepinfer.models.deepseek_v41.packed_rows import PackedRows
from deepinfer.models.deepseek_v41.rounding import RoundingLevel
from deepinfer.models.deepseek_v41.row_formats import RowFormats
from deepinfer.models.deepseek_v41.row_storage import PlainRows
from deepinfer.models.deepseek_v41.saved_rows import SavedRows

__all__ = ["SlotCache"]


class SlotCache(SavedRows):
    """Everything that requests leave behind between steps.

    A slot holds what belongs to one running request: window rows of every layer in rings (position p is at ring index
    `p % ring_size`), compressor tails, draft windows and the token history. A ring has room for the window and one
    whole step, so the rows that a step writes never overwrite rows that it, or a shorter repeat of it, still reads.

    Pool rows and index keys lie in blocks of `block_size` tokens, and `table` says which blocks a slot reads and
    writes. Several slots may hold a block of a shared prefix, which is never written again. Without `num_blocks` each
    slot has one block of its own for all its tokens: the same code, and easy to read.

    Attributes:
        num_slots: Slots.
        max_tokens: Tokens that one slot holds.
        max_step_tokens: Tokens that one request may run in one step.
        max_rollback: Tokens that `truncate` can take back.
        ring_size: Rows of a window ring.
        table: Blocks by slot.
        block_rows: Pool rows of one block by KV source layer.
        rows: Window rows, pool rows and index keys.
        tails: Recent values and gates by KV source layer of ratio 2, as a ring, shape [slots, tail_size, 2,
            head_dim], fp32.
        tokens: Token history, shape [slots, max_tokens], int64.
        lengths: Tokens held by each slot.
        adopted: Tokens of each slot that came with adopted blocks.
        has_images: Whether a slot may hold image tokens.
        window_starts: Lowest position of each slot from which all window rows were written.
        full_spans: Positions [first, end) of each slot whose rows ran every layer.
        draft_spans: Positions [first, end) whose target features the draft has seen, by slot.
        narrowing: Where rows drop out, see `Narrowing`.
    """

    def __init__(
        self,
        config: DeepseekV41Config,
        num_slots: int,
        max_tokens: int,
        max_step_tokens: int = 512,
        *,
        num_blocks: int | None = None,
        block_size: int = 128,
        storage: Literal["plain", "packed"] = "plain",
        rounding: RoundingLevel = "full",
        window_layers: int | None = None,
        max_rollback: int = 16,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Allocates the cache; memory grows with `num_slots * max_tokens`, or with `num_blocks`.

        Args:
            config: The model's configuration.
            num_slots: Slots, at least 1.
            max_tokens: Tokens that one slot holds, at most `max_position_embeddings`.
            max_step_tokens: Tokens that one request may run in one step.
            num_blocks: Blocks of the pools, or None for one block a slot.
            block_size: Tokens in one block, a multiple of every ratio, so that no pair straddles two blocks; unused
                without `num_blocks`.
            storage: "plain": rows in `dtype`. "packed": rows in the published byte formats, which take an eighth of the
                memory of fp32 or less, and are unpacked when they are read.
            rounding: Rounding level of the model that writes the rows; "none" has no packed form.
            window_layers: Layers, from 0 on, whose windows `save_windows` saves; None for those that a prompt needs
                whose rows drop out, see `Narrowing`.
            max_rollback: Tokens that `truncate` can take back, at most `max_step_tokens`.
            device: Where the tensors live.
            dtype: Dtype of the rows; values rounded to FP8 and FP4 are exact in bf16.

        Raises:
            ConfigError: A size is out of range.
        """
        ratios = {s: config.compress_ratios[s] for s in config.kv_source_layer_ids}
        block_size = check_sizes(
            config, num_slots, max_tokens, max_step_tokens, max_rollback, num_blocks, block_size
        )
        check_storage(storage, rounding)
        if storage == "packed" and num_blocks is None:
            block_size += (
                -block_size % 8
            )  # the scales of a page of index keys begin at a multiple of 4 bytes
        self.config = config
        self.narrowing = narrowing_of(config)
        self.num_slots = num_slots
        self.max_tokens = max_tokens
        self.max_step_tokens = max_step_tokens
        self.max_rollback = min(max_rollback, max_step_tokens)
        self.ring_size = config.sliding_window + max_step_tokens
        self.tail_size = self.max_rollback + 2
        self.device = torch.device(device or "cpu")
        self.table = BlockTable(num_slots, max_tokens, num_blocks, block_size, self.device)
        self.block_rows = {source: block_size // ratio for source, ratio in ratios.items()}
        self.window_layers = self.narrowing.window_layers
        if window_layers is not None:
            self.window_layers = min(window_layers, config.num_hidden_layers)
        self.formats = RowFormats.of(config, rounding, dtype)
        self.rows: PlainRows | PackedRows = (PackedRows if storage == "packed" else PlainRows)(
            config, num_slots, self.ring_size, self.table.num_blocks, self.block_rows, self.device, dtype,
            self.formats,
        )  # fmt: skip
        self.tails = {
            source: torch.zeros(
                num_slots, self.tail_size, 2, config.head_dim, dtype=torch.float32, device=device
            )
            for source, ratio in ratios.items()
            if ratio == 2
        }
        self.tokens = torch.zeros(num_slots, max_tokens, dtype=torch.int64, device=device)
        self.lengths = [0] * num_slots
        self.adopted = [0] * num_slots
        self.has_images = [False] * num_slots
        self.window_starts = [0] * num_slots
        self.full_spans = [(0, 0)] * num_slots
        self.draft_spans = [(0, 0)] * num_slots
        self._high_water = [0] * num_slots

    @property
    def kv(self) -> Tensor:
        """Every window and pool row of the plain form, shape [rows, head_dim]; see `PlainRows`."""
        return cast(PlainRows, self.rows).kv

    @property
    def windows(self) -> Tensor:
        """Window rings of the plain form, shape [layers + stages, slots, ring_size, head_dim]."""
        return cast(PlainRows, self.rows).windows

    @property
    def pools(self) -> dict[int, Tensor]:
        """Pool rows by KV source layer, shape [blocks, block_rows, head_dim]; bytes in the packed form."""
        return self.rows.pools

    @property
    def index_keys(self) -> dict[int, Tensor]:
        """Index keys by KV source layer, shape [blocks, block_rows, index_head_dim]; pages in the packed form."""
        return self.rows.index_keys

    @property
    def block_size(self) -> int:
        """Tokens in one block."""
        return self.table.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return self.table.num_blocks

    @property
    def size_bytes(self) -> int:
        """Memory of all tensors, in bytes."""
        tensors = (*self.rows.tensors(), self.tokens, *self.tails.values())
        return sum(t.numel() * t.element_size() for t in tensors)

    # ---- addresses ----

    def pool_index(self, source: int, slots: np.ndarray, rows: Tensor) -> Tensor:
        """Where pool rows of slots lie, as `rows.attend` takes them.

        Args:
            source: KV source layer.
            slots: Slot of each token, shape [tokens], int64.
            rows: Rows within each slot's pool, shape [tokens, rows], int64, on the host or the cache's device.

        Returns:
            Shape [tokens, rows], int64, on the cache's device.
        """
        offset, block_rows = self.rows.pool_offsets[source], self.block_rows[source]
        if rows.is_cpu:
            index = flat_index(self.table.host, slots[:, None], rows.numpy(), block_rows)
            index += offset
            return to_device(index, self.device)
        on_device = to_device(slots, self.device).unsqueeze(1)
        return flat_index(self.table.device, on_device, rows, block_rows) + offset

    def visible_keys(self, source: int, slots: np.ndarray, count: int) -> Tensor:
        """The first `count` index keys of some slots, shape [slots, count, index_head_dim]."""
        blocks = self.table.host[slots, : -(-count // self.block_rows[source])]
        return self.rows.keys(source, blocks)[:, :count]

    # ---- life of a slot ----

    def apply_updates(self, block_updates: Iterable[BlockUpdate]) -> None:
        """Writes block table entries; before the forward pass of the plan that carries them.

        Args:
            block_updates: New entries in order; one whose `first` is 0 starts a new table.

        Raises:
            InvariantBroken: An update does not fit the table.
        """
        self.table.apply(block_updates)

    def reset(self, slot: int) -> None:
        """Empties a slot; what its last request left behind in it is overwritten with zeros.

        Blocks belong to whoever hands them out: neither they nor the block table change.
        """
        self._check_slot(slot)
        used = self._high_water[slot]
        if used:
            self.rows.clear_windows(slot, used)
            if self.table.is_identity:
                ratios = self.config.compress_ratios
                rows = {s: min(n, used // ratios[s] + 1) for s, n in self.block_rows.items()}
                self.rows.clear_block(slot, rows)
            for tail in self.tails.values():
                tail[slot].zero_()
            self.tokens[slot, :used].zero_()
        self.lengths[slot] = self.adopted[slot] = self._high_water[slot] = 0
        self.has_images[slot] = False
        self.window_starts[slot] = 0
        self.full_spans[slot] = self.draft_spans[slot] = (0, 0)

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
        self.adopted[slot] = min(self.adopted[slot], length)
        self.window_starts[slot] = min(self.window_starts[slot], length)
        for spans in (self.full_spans, self.draft_spans):
            first, end = spans[slot]
            spans[slot] = (min(first, length), min(end, length))

    def adopt_prefix(self, slot: int, token_ids: Tensor | Sequence[int] | np.ndarray) -> None:
        """Declares a prefix whose pool rows and index keys an empty slot has in its blocks, and gives its token ids.

        Its window rows are still missing: run the last tokens of the prefix again, in a segment whose
        `window_start` is its own start and whose `pool_start` is the length of the prefix, or restore them with
        `load_windows`. Nothing is written to the blocks of the prefix.

        Args:
            slot: The slot; it must be empty.
            token_ids: The prefix, shape [tokens], integers; Engram looks back at them.

        Raises:
            InvariantBroken: The slot is not empty, or has no blocks for the prefix.
            RequestTooLong: The prefix does not fit.
        """
        self._check_slot(slot)
        ids = torch.as_tensor(token_ids, dtype=torch.int64)
        length = ids.shape[0]
        if self.lengths[slot]:
            raise InvariantBroken(
                f"Slot {slot} holds {self.lengths[slot]} tokens; reset it before adopting a prefix."
            )
        self._check_room(slot, length)
        self.tokens[slot, :length] = ids
        self.has_images[slot] = self.config.image_token_id is not None
        self.lengths[slot] = self.adopted[slot] = self._high_water[slot] = length
        self.window_starts[slot] = length

    # ---- steps ----

    def begin(self, segments: tuple[Segment, ...]) -> None:
        """Checks the segments of a step before anything is written.

        Args:
            segments: What the step is going to run.

        Raises:
            InvariantBroken: A segment does not continue its slot, is longer than a step, names no slot, has no blocks
                for its tokens, or would read or overwrite rows that it must not.
            RequestTooLong: A segment ends beyond the slot.
        """
        ends: dict[int, int] = {}
        steps: dict[int, int] = {}
        starts: dict[int, int] = {}
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
            starts[s.slot] = self._check_reach(s, starts.get(s.slot, self.window_starts[s.slot]))
            ends[s.slot] = s.end
        for slot, end in ends.items():
            self._high_water[slot] = max(self._high_water[slot], end)

    def full_floors(self, segments: Sequence[Segment]) -> list[int]:
        """Lowest position whose window rows each segment may read in the layers from `narrowing.first_layer` on.

        That is where its rows begin to run these layers, or higher where rows in between never ran them, as behind
        windows that were restored for the layers below only.
        """
        spans: dict[int, tuple[int, int]] = {}
        floors = []
        for s in segments:
            first, end = spans.get(s.slot, self.full_spans[s.slot])
            kept = max(s.start, s.full_start)
            floor = max(s.full_start, s.window_start)
            if kept < s.end:
                first = first if first < end == kept else kept
                spans[s.slot] = (first, s.end)
                floor = max(floor, first)
            floors.append(floor)
        return floors

    def commit(self, segments: tuple[Segment, ...]) -> None:
        """Counts the tokens of a step that was written."""
        for s in segments:
            first, end = self.full_spans[s.slot]
            kept = max(s.start, s.full_start)
            if kept < s.end:
                self.full_spans[s.slot] = (first if first < end == kept else kept, s.end)
            self.window_starts[s.slot] = min(self.window_starts[s.slot], s.start)
            self.lengths[s.slot] = s.end

    def _check_reach(self, s: Segment, window_start: int) -> int:
        """Checks what a segment reads and writes; returns from where on its slot has window rows behind it."""
        lowest = max(s.window_start, s.start - self.config.sliding_window + 1, 0)
        if lowest < window_start and lowest < s.start:
            raise InvariantBroken(
                f"The segment at position {s.start} of slot {s.slot} reads window rows from position {lowest} on, "
                f"but they were written from {window_start} on only. Set its window_start, or restore the windows."
            )
        if s.start < self.adopted[s.slot] > s.pool_start:
            raise InvariantBroken(
                f"The segment at position {s.start} of slot {s.slot} would write pool rows of its adopted prefix of "
                f"{self.adopted[s.slot]} tokens; its pool_start is {s.pool_start}. Set it to the prefix's length."
            )
        if s.full_start and self.narrowing.first_layer is None:
            raise InvariantBroken(
                f"full_start is {s.full_start}, but rows cannot drop out: {self.narrowing.reason}. Use 0."
            )
        return min(window_start, s.start)

    def _check_room(self, slot: int, length: int) -> None:
        if length > self.max_tokens:
            raise RequestTooLong(
                f"Slot {slot} would hold {length} tokens; it has room for {self.max_tokens}. "
                "Shorten the request or make the cache with a larger max_tokens.",
                limit_tokens=self.max_tokens, asked_tokens=length,
            )  # fmt: skip
        if length > self.table.tokens(slot):
            raise InvariantBroken(
                f"Slot {slot} would hold {length} tokens; its {self.table.counts[slot]} blocks have room for "
                f"{self.table.tokens(slot)}. Give it more with apply_updates."
            )

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise InvariantBroken(
                f"There is no slot {slot}; the cache has slots 0 to {self.num_slots - 1}."
            )
