"""Blocks of drafts from recordings: one launch for what the draft does between two steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.core.errors import InvariantBroken
from deepinfer.engine.recording import record_call
from deepinfer.models.deepseek_v41.cache import SlotCache
from deepinfer.models.deepseek_v41.decode_draft import DraftStep
from deepinfer.models.deepseek_v41.model import DeepseekV41
from deepinfer.sampling import CoupledDraw
from deepinfer.sampling.rng import SeedWords

__all__ = ["DraftGraphs", "PendingBlocks"]

_Output = tuple[Tensor, Tensor, Tensor, Tensor]
_ANCHOR, _POSITION, _SLOT, _FIRST, _SEED_LOW, _SEED_HIGH, _TEMPERATURE = range(7)


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
        self._recordings: dict[tuple[int, bool], _Recording] = {}
        self._pool: Any = None
        self.runs: dict[int, int] = {}
        self.unsupported = ""

    def draft(
        self,
        anchor_ids: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
        *,
        temperatures: Sequence[float] = (),
        seeds: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Proposes a block for each request.

        Args:
            anchor_ids: Newest token of each request.
            positions: Its position, one behind the last features that the draft was given.
            slots: The requests' slots.
            temperatures: Temperature of each request; empty takes the likeliest tokens of all.
            seeds: Seed of each request's noise; needed with temperatures.

        Returns:
            Draft tokens, shape [rows, block], int64, their confidences and their margins, shape [rows, block], fp32, valid
            until the next call; None when it has to be done without a recording.

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
        words = None
        if temperatures:
            seed_words = np.array(seeds, dtype=np.uint64)
            columns = [seed_words & np.uint64(0xFFFFFFFF), seed_words >> np.uint64(32)]
            columns.append(np.array(temperatures, dtype=np.float64).view(np.uint64))
            words = np.array(columns).view(np.int64)
        values = np.array([anchor_ids, positions, slots, firsts], dtype=np.int64)
        output = self._run(values, words)
        if output is None:
            return None
        count = len(slots)
        return output[0][:count], output[1][:count], output[2][:count]

    def start(
        self, values: NDArray[np.int64], words: NDArray[np.int64] | None = None
    ) -> PendingBlocks | None:
        """`draft` of columns; nothing waits for the device.

        Args:
            values: Anchors, their positions, slots, and lowest position whose features the draft has seen without a gap,
                shape [4, rows], int64.
            words: Low and high words of seeds, and the bits of temperatures as float64, shape [3, rows], int64; None takes
                the likeliest tokens of all.

        Returns:
            The blocks to be, to be waited for before the next start; None when it has to be done without a recording.
        """
        output = self._run(values, words)
        if output is None:
            return None
        count = values.shape[1]
        tokens, packed = output[0][:count], output[3]
        if self._cache.device.type != "cuda":
            return PendingBlocks(tokens, packed[:count].numpy())
        recording = self._recordings[_size(count, self._cache.num_slots), words is not None]
        if recording.packed is None:
            recording.packed = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            recording.found = recording.packed.numpy()
        recording.packed.copy_(packed, non_blocking=True)
        recording.done.record()
        return PendingBlocks(tokens, recording.found[:count], recording.done)

    def _run(self, values: NDArray[np.int64], words: NDArray[np.int64] | None) -> _Output | None:
        count = values.shape[1]
        recording = self._recording(count, is_drawn=words is not None)
        if recording is None:
            return None
        host = recording.values
        if recording.sent is not None:
            recording.sent.synchronize()
        host[: _FIRST + 1, :count] = values
        if words is not None:
            host[_SEED_LOW:, :count] = words
        if recording.sent is not None:
            recording.inputs.copy_(recording.host, non_blocking=True)
            recording.sent.record()
        output = recording.replay()
        self.runs[recording.rows] += 1
        return output

    def write_context(self, features: Tensor, at: Tensor, index: Tensor) -> None:
        """As `DraftStep.write_context`."""
        self._step.write_context(features, at, index)

    def close(self) -> None:
        """Drops the recordings and their memory."""
        self._recordings.clear()
        self._pool = None

    def _recording(self, count: int, *, is_drawn: bool) -> _Recording | None:
        if self.unsupported or not count:
            return None
        rows = _size(count, self._cache.num_slots)
        key = (rows, is_drawn)
        if key not in self._recordings:
            try:
                self._recordings[key] = self._record(rows, is_drawn=is_drawn)
            except Exception as error:  # whatever it is, blocks can be made without
                self.close()
                self.unsupported = f"{rows} rows could not be recorded: {error}"
                return None
            self.runs.setdefault(rows, 0)
        return self._recordings[key]

    def _record(self, rows: int, *, is_drawn: bool) -> _Recording:
        device = self._cache.device
        height = _TEMPERATURE + 1 if is_drawn else _FIRST + 1
        inputs = torch.zeros(height, rows, dtype=torch.int64, device=device)
        host, sent, done = inputs, None, None
        if device.type == "cuda":
            host = torch.zeros(height, rows, dtype=torch.int64, pin_memory=True)
            sent, done = torch.cuda.Event(), torch.cuda.Event()
        columns = [inputs[i] for i in (_ANCHOR, _POSITION, _SLOT, _FIRST)]
        draw = None
        if is_drawn:
            words = SeedWords(inputs[_SEED_LOW].unsqueeze(-1), inputs[_SEED_HIGH].unsqueeze(-1))
            draw = CoupledDraw(inputs[_TEMPERATURE].view(torch.float64), words)

        def call() -> _Output:
            found = self._step.draft_greedy(*columns, draw)
            return *found, torch.stack([part.double() for part in found], 1)

        if device.type != "cuda":
            return _Recording(rows, inputs, host, host.numpy(), sent, done, call)
        graph, output = record_call(call, device, self._pool)
        self._pool = self._pool or graph.pool()
        return _Recording(rows, inputs, host, host.numpy(), sent, done, call, graph, output)


@dataclass(frozen=True, slots=True)
class PendingBlocks:
    """Blocks that were launched.

    Attributes:
        tokens: Their tokens on the device, shape [rows, block], int64, valid until the next start.
        packed: Host memory for tokens, confidences and margins, shape [rows, 3, block], float64.
        done: Event behind the copy to it, or None.
    """

    tokens: Tensor
    packed: NDArray[np.float64]
    done: Any = None

    def wait(self) -> NDArray[np.float64]:
        """Tokens, confidences and margins, shape [rows, 3, block], float64, in which ids are exact."""
        if self.done is not None:
            self.done.synchronize()
        return self.packed.copy()


def _size(count: int, most: int) -> int:
    return min(1 << (count - 1).bit_length(), most)


@dataclass(slots=True)
class _Recording:
    """One recorded block, or a call where nothing can be recorded."""

    rows: int
    inputs: Tensor
    host: Tensor  # what is sent to `inputs`, or the same tensor
    values: NDArray[np.int64]  # the same as an array
    sent: Any  # events behind the copy, and behind that of the results, where there is one
    done: Any
    call: Callable[[], _Output]
    graph: Any = None
    output: _Output | None = None
    packed: Tensor | None = None  # pinned
    found: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))  # the same as an array

    def replay(self) -> _Output:
        if self.graph is None or self.output is None:
            return self.call()
        self.graph.replay()
        return self.output
