"""What a recorded step is asked, and what it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.engine.graph_buckets import GraphBucket
from deepinfer.engine.graph_inputs import StepInputs
from deepinfer.models.deepseek_v41.batch import Segment
from deepinfer.models.deepseek_v41.decode_step import DecodeOutput

__all__ = ["GraphRow", "GraphRun", "RecordedStep", "StepColumns"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GraphRow:
    """One request of a step.

    Attributes:
        segment: Its tokens.
        ids: Their ids; the first counts for nothing when `from_future`.
        from_future: Whether the first id is the one sampled last for the slot, which the host may not know yet.
    """

    segment: Segment
    ids: Sequence[int]
    from_future: bool = False


class StepColumns(NamedTuple):
    """Requests of a step, each with some known tokens from a position on, one entry a row.

    Attributes:
        slots: Their slots, each once.
        host_slots: The same, shape [rows], int64.
        starts: Their first positions, shape [rows], int64.
        window_starts: As in `PlanRows`, shape [rows], int64.
        pool_starts: As in `PlanRows`, shape [rows], int64.
        full_starts: As in `PlanRows`, shape [rows], int64.
        counts: Their tokens, at least 1 each, shape [rows], int64.
    """

    slots: list[int]
    host_slots: Ints
    starts: Ints
    window_starts: Ints
    pool_starts: Ints
    full_starts: Ints
    counts: Ints


@dataclass(frozen=True, slots=True)
class GraphRun:
    """What a recorded step gave; tensors are overwritten by the next step.

    Attributes:
        bucket: Its shape.
        logits: Shape [bucket.rows * bucket.tokens, vocab], fp32, padding included.
        hidden: Shape [rows * tokens, hidden].
        features: Draft features, shape [rows * tokens, width]; None without a draft, or when they were fed or not wanted.
        is_fed: Whether the draft was given the features of all tokens.
        offsets: Row of `logits` and the others where each request's tokens begin, in the order they were given.
    """

    bucket: GraphBucket
    logits: Tensor
    hidden: Tensor
    features: Tensor | None
    is_fed: bool
    offsets: Sequence[int]


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One recorded step, or a call where nothing can be recorded.

    Attributes:
        inputs: What it reads.
        call: The step.
        deterministic: In which arithmetic it was recorded.
        graph: The recording, or None.
        output: What it gives, or None.
    """

    inputs: StepInputs
    call: Callable[[], DecodeOutput]
    deterministic: bool
    graph: Any = None
    output: DecodeOutput | None = None
    _views: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def behind_first(self, rows: int, tokens: int) -> Tensor:
        """Where the ids of rows of one length begin, but for the first of each, shape [rows, tokens - 1].

        Args:
            rows: Rows.
            tokens: Tokens of each.
        """
        key = rows, tokens
        if key not in self._views:
            ids = self.inputs.inputs.ids.view(-1)[: rows * tokens]
            self._views[key] = ids.view(rows, tokens)[:, 1:]
        return self._views[key]

    def replay(self) -> DecodeOutput:
        """Runs the step."""
        if self.graph is None or self.output is None:
            return self.call()
        self.graph.replay()
        return self.output
