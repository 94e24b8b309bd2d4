"""What one cached forward takes and gives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.core.errors import InvalidRequest, InvariantBroken

__all__ = [
    "ForwardBatch",
    "ForwardOutput",
    "Segment",
    "positions_of",
    "repeat_over",
    "to_device",
]


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive positions of one request.

    Attributes:
        slot: Cache slot of the request.
        start: Position of the first token.
        num_tokens: Tokens, at least 1.
        window_start: Lowest position whose window row may be read; above 0 only for a bounded replay and the
            tokens right behind it.
        pool_start: Lowest position from which pool rows and index keys are written; above `start` only where
            a cached prefix already holds them.
        full_start: Lowest position that runs every layer; tokens before it stop behind the last layer that owns a
            pool. Window rows of the layers above are read from here on only.
    """

    slot: int
    start: int
    num_tokens: int
    window_start: int = 0
    pool_start: int = 0
    full_start: int = 0

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tokens of one step: segments of one or several requests, one after the other.

    Attributes:
        input_ids: Token ids, shape [tokens], int64, on the model's device.
        segments: Where they stand. Segments of one slot follow each other in position order.
        images: Embeddings of the tokens whose id is the image token, in batch order, shape [image_tokens, hidden].
        host_ids: The ids on the host when they are known there, shape [tokens], int64; they are checked
            before anything runs.
    """

    input_ids: Tensor
    segments: tuple[Segment, ...]
    images: Tensor | None = None
    host_ids: np.ndarray | None = None

    @classmethod
    def from_segments(
        cls,
        segments: Iterable[tuple[int, int, Sequence[int]]],
        *,
        images: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> ForwardBatch:
        """Builds a batch from (slot, first position, token ids) triples.

        Raises:
            InvalidRequest: No segment, a segment without tokens, or ids that are not integers.
        """
        parts, plan = [], []
        for slot, start, ids in segments:
            row = np.asarray(ids)
            if row.ndim != 1 or row.size == 0 or row.dtype.kind not in "iu":
                raise InvalidRequest(
                    f"The segment of slot {slot} at position {start} holds ids of shape {row.shape} and type "
                    f"{row.dtype}; it must hold at least one integer token id.",
                    field="segments", value=row.shape, limit="[tokens], integer",
                )  # fmt: skip
            parts.append(row)
            plan.append(Segment(int(slot), int(start), row.size))
        if not parts:
            raise InvalidRequest(
                "The batch has no segment; give at least one.", field="segments", limit=">= 1"
            )
        host_ids = np.concatenate(parts).astype(np.int64, copy=False)
        tensor = torch.from_numpy(host_ids)
        if device is not None:
            tensor = tensor.to(device)
        return cls(tensor, tuple(plan), images, host_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens in the batch."""
        return self.input_ids.shape[0]

    @property
    def positions(self) -> Tensor:
        """Position of every token, shape [tokens], int64, on the device of `input_ids`."""
        return to_device(self.host_positions(), self.input_ids.device)

    @property
    def slots(self) -> Tensor:
        """Slot of every token, shape [tokens], int64, on the device of `input_ids`."""
        return to_device(self.host_slots(), self.input_ids.device)

    @property
    def last_rows(self) -> list[int]:
        """Index of each segment's last token, in segment order."""
        return (np.cumsum([s.num_tokens for s in self.segments]) - 1).tolist()

    def host_positions(self) -> np.ndarray:
        """Position of every token, shape [tokens], int64."""
        return positions_of(self.segments)

    def host_slots(self) -> np.ndarray:
        """Slot of every token, shape [tokens], int64."""
        return self.per_token([s.slot for s in self.segments])

    def per_token(self, values: Sequence[int]) -> np.ndarray:
        """Repeats one value a segment over the segment's tokens, shape [tokens], int64."""
        return repeat_over(self.segments, values)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """An array on a device; on a GPU through pinned memory, so that the host does not wait for what runs there."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def positions_of(segments: Sequence[Segment]) -> np.ndarray:
    """Position of every token of some segments, shape [tokens], int64."""
    if len(segments) == 1:
        return np.arange(segments[0].start, segments[0].end)
    return np.concatenate([np.arange(s.start, s.end) for s in segments])


def repeat_over(segments: Sequence[Segment], values: Sequence[int]) -> np.ndarray:
    """Repeats one value a segment over the segment's tokens, shape [tokens], int64."""
    return np.repeat(np.array(values, dtype=np.int64), [s.num_tokens for s in segments])


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What one step gives.

    Attributes:
        hidden: Collapsed streams before the final norm, shape [kept tokens, hidden]; `compute_logits` takes rows of
            it.
        features: Mean streams that entered the draft's target layers, side by side, shape [kept tokens, targets *
            hidden]; None without a draft.
        kept: Batch rows that `hidden` and `features` cover, ascending, shape [kept tokens], int64, on the host; None
            for all of them. The others stopped behind the last KV source, see `Segment.full_start`.
    """

    hidden: Tensor
    features: Tensor | None
    kept: np.ndarray | None = None

    def rows_of(self, batch_rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """Where batch rows are in `hidden` and `features`.

        Args:
            batch_rows: Rows of the batch, shape [rows].

        Returns:
            Shape [rows], int64.

        Raises:
            InvariantBroken: One of them did not run every layer.
        """
        wanted = np.asarray(batch_rows, dtype=np.int64)
        if self.kept is None:
            return wanted
        found = np.searchsorted(self.kept, wanted)
        known = found < len(self.kept)
        known[known] = self.kept[found[known]] == wanted[known]
        if not known.all():
            raise InvariantBroken(
                f"Batch row {wanted[~known][0]} stopped behind the last KV source and has no hidden row; lower the "
                "full_start of its segment."
            )
        return found
