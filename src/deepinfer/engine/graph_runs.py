"""A running step, or the part of it that decodes, to the rows of a recorded step, and back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.core.plan import RowRole
from deepinfer.engine.decode_lane import DecodeLane
from deepinfer.engine.graphs import DecodeGraphs, GraphRow, GraphRun
from deepinfer.engine.step_state import RunningRow, RunningStep
from deepinfer.models.deepseek_v41.batch import ForwardOutput, Segment, to_device
from deepinfer.models.deepseek_v41.decode_books import DecodeRows

__all__ = ["Recorded", "run_recorded"]

_ROLES = (RowRole.DECODE, RowRole.VERIFY)


@dataclass(frozen=True, slots=True)
class Recorded:
    """The rows of a step that came from a recording, and those that still have to run.

    Attributes:
        run: What the recording gave; valid until the next step is launched, features excepted.
        rest: Rows that the recording could not run, such as chunks of prompts.
    """

    run: GraphRun
    rest: list[RunningRow]

    def logits(self, step: RunningStep) -> Tensor:
        """Logits of a step that has no other rows, shape [logits rows, vocab], fp32."""
        if not step.rows and self.run.bucket.tokens == 1:
            return self.run.logits[: step.lane_count]
        wanted = [] if step.lane is None else list(step.lane.offsets)
        for running in step.rows:
            end = running.offset + running.num_tokens
            wanted.extend(range(end - running.num_logits, end))
        if wanted == list(range(len(wanted))):
            return self.run.logits[: len(wanted)]
        return self.run.logits[to_device(np.array(wanted), self.run.logits.device)]

    def join(self, output: ForwardOutput) -> ForwardOutput:
        """Puts the output of the other rows behind this one; their offsets move along.

        Args:
            output: What `rest` gave when it was run as a batch of its own.

        Returns:
            All rows; features are those of the other rows alone when the recording gave none.
        """
        hidden, features = self.run.hidden, output.features
        count = len(hidden)
        for running in self.rest:
            running.offset += count
        if self.run.features is not None and features is not None:
            features = torch.cat((self.run.features, features))
        kept = output.kept
        if kept is not None:
            kept = np.concatenate((np.arange(count), count + np.asarray(kept)))
        return ForwardOutput(torch.cat((hidden, output.hidden)), features, kept)


def run_recorded(step: RunningStep, graphs: DecodeGraphs, *, feeds: bool) -> Recorded | None:
    """Runs the decode and verify rows of a step from a recording if they fit one.

    Offsets of these rows are set then.

    Args:
        step: The step; its drafts are known.
        graphs: The recordings; made with the runner's future tokens.
        feeds: Whether the drafter is to learn of the tokens.

    Returns:
        What was run, or None when nothing has changed and all rows have to run.
    """
    if step.lane is not None:  # then no other row decodes
        return _run_lane(step, step.lane, graphs, feeds=feeds)
    rows: list[GraphRow] = []
    used: list[RunningRow] = []
    rest: list[RunningRow] = []
    for running in step.rows:
        row = running.row
        missing = running.num_tokens - len(running.known) - len(running.draft)
        if row.role not in _ROLES or missing not in (0, 1) or (missing and running.known):
            rest.append(running)
            continue
        segment = Segment(
            row.slot,
            running.start,
            running.num_tokens,
            row.window_start,
            row.pool_start,
            row.full_start,
        )
        ids = (*running.known, *(0,) * missing, *running.draft)
        rows.append(GraphRow(segment, ids, from_future=bool(missing)))
        used.append(running)
    run = graphs.try_run(rows, features=feeds, copy_features=feeds)
    if run is None:
        return None
    for running, offset in zip(used, run.offsets, strict=True):
        running.offset = offset
        running.is_fed = run.is_fed
    return Recorded(run, rest)


def _run_lane(
    step: RunningStep, lane: DecodeLane, graphs: DecodeGraphs, *, feeds: bool
) -> Recorded | None:
    company = lane.company
    starts = (lane.starts, lane.window_starts, lane.pool_starts, lane.full_starts)
    rows = DecodeRows(company.slots, company.host_slots, *starts)
    run = graphs.try_run_decode(rows, lane.ids, lane.is_future, features=feeds)
    if run is None:
        return None
    lane.offsets = run.offsets
    return Recorded(run, step.rows)
