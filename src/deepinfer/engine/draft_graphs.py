"""Blocks of drafts from recordings: one launch for what the draft does between two steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer.core.errors import InvariantBroken
from deepinfer.engine.recording import record_call
from deepinfer.models.deepseek_v41.batch import to_device
from deepinfer.models.deepseek_v41.cache import SlotCache
from deepinfer.models.deepseek_v41.decode_draft import DraftStep
from deepinfer.models.deepseek_v41.model import DeepseekV41

__all__ = ["DraftGraphs"]

_ANCHOR, _POSITION, _SLOT, _FIRST = range(4)


class DraftGraphs:
    """Proposes blocks from recordings by number of rows, each made when it is first needed.

    Where there is no GPU, a recording is a call of the step: the same results, and no faster.

    Args:
        model: A model with a draft.
        cache: Its cache; recordings hold its addresses.

    Attributes:
        runs: Blocks proposed from each number of rows that was recorded.
        unsupported: Why nothing more can be recorded, or "".

    Raises:
        ConfigError: The draft cannot run steps of fixed shape over this cache.
    """

    def __init__(self, model: DeepseekV41, cache: SlotCache) -> None:
        self._step = DraftStep(model, cache)
        self._cache = cache
        self._recordings: dict[int, _Recording] = {}
        self._pool: Any = None
        self.runs: dict[int, int] = {}
        self.unsupported = ""

    def draft_greedy(
        self, anchor_ids: Sequence[int], positions: Sequence[int], slots: Sequence[int]
    ) -> tuple[Tensor, Tensor] | None:
        """Proposes a block for each request and chains it greedily.

        Args:
            anchor_ids: Newest token of each request.
            positions: Its position, one behind the last features that the draft was given.
            slots: The requests' slots.

        Returns:
            Draft tokens, shape [rows, block], int64, and their confidences, shape [rows, block], fp32, valid until the
            next call; None when it has to be done without a recording.

        Raises:
            InvariantBroken: The features right before an anchor were not given.
        """
        firsts = []
        for slot, at in zip(slots, positions, strict=True):
            first, end = self._cache.draft_spans[slot]
            if end != at or first == end:
                raise InvariantBroken(
                    f"The draft has features of slot {slot} for positions {first} to {end - 1}, but "
                    f"the anchor is at {at}; give it the features of every final token first."
                )
            firsts.append(first)
        count = len(slots)
        recording = self._recording(count)
        if recording is None or not count:
            return None
        values = np.array([anchor_ids, positions, slots, firsts], dtype=np.int64)
        recording.inputs[:, :count].copy_(to_device(values, self._cache.device))
        tokens, confidences = recording.replay()
        self.runs[recording.rows] += 1
        return tokens[:count], confidences[:count]

    def close(self) -> None:
        """Drops the recordings and their memory."""
        self._recordings.clear()
        self._pool = None

    def _recording(self, count: int) -> _Recording | None:
        if self.unsupported or not count:
            return None
        rows = min(1 << (count - 1).bit_length(), self._cache.num_slots)
        if rows not in self._recordings:
            try:
                self._recordings[rows] = self._record(rows)
            except Exception as error:  # whatever it is, blocks can be made without
                self.close()
                self.unsupported = f"{rows} rows could not be recorded: {error}"
                return None
            self.runs[rows] = 0
        return self._recordings[rows]

    def _record(self, rows: int) -> _Recording:
        device = self._cache.device
        inputs = torch.zeros(4, rows, dtype=torch.int64, device=device)
        columns = [inputs[i] for i in (_ANCHOR, _POSITION, _SLOT, _FIRST)]

        def call() -> tuple[Tensor, Tensor]:
            return self._step.draft_greedy(*columns)

        if device.type != "cuda":
            return _Recording(rows, inputs, call)
        graph, output = record_call(call, device, self._pool)
        self._pool = self._pool or graph.pool()
        return _Recording(rows, inputs, call, graph, output)


@dataclass(frozen=True, slots=True)
class _Recording:
    """One recorded block, or a call where nothing can be recorded."""

    rows: int
    inputs: Tensor
    call: Callable[[], tuple[Tensor, Tensor]]
    graph: Any = None
    output: tuple[Tensor, Tensor] | None = None

    def replay(self) -> tuple[Tensor, Tensor]:
        if self.graph is None or self.output is None:
            return self.call()
        self.graph.replay()
        return self.output
