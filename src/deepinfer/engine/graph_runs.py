"""A running step to the rows of a recorded step, and back."""

from __future__ import annotations

import torch

from deepinfer.core.plan import RowRole
from deepinfer.engine.graphs import DecodeGraphs, GraphRow
from deepinfer.engine.step_state import RunningStep
from deepinfer.models.deepseek_v41.batch import Segment

__all__ = ["run_recorded"]

_ROLES = (RowRole.DECODE, RowRole.VERIFY)


def run_recorded(step: RunningStep, graphs: DecodeGraphs, *, with_features: bool) -> bool:
    """Runs a step from a recording if it is a decode or verify step that fits one.

    Offsets, logits and features of the step are set then. Logits are valid until the next step is launched; features
    are the step's own.

    Args:
        step: The step; its drafts are known.
        graphs: The recordings; made with the runner's future tokens.
        with_features: Whether the drafter wants features.

    Returns:
        Whether it was run; otherwise nothing has changed.
    """
    rows: list[GraphRow] = []
    for running in step.rows:
        row = running.row
        if row.role not in _ROLES:
            graphs.stats.misses["not a decode step"] += 1
            return False
        missing = running.num_tokens - len(running.known) - len(running.draft)
        segment = Segment(
            row.slot,
            running.start,
            running.num_tokens,
            row.window_start,
            row.pool_start,
            row.full_start,
        )
        if missing not in (0, 1) or (missing and running.known):
            graphs.stats.misses["ids unknown"] += 1
            return False
        ids = (*running.known, *(0,) * missing, *running.draft)
        rows.append(GraphRow(segment, ids, from_future=bool(missing)))
    run = graphs.try_run(rows, copy_features=with_features)
    if run is None:
        return False
    wanted: list[int] = []
    for running, offset in zip(step.rows, run.offsets, strict=True):
        running.offset = offset
        end = offset + running.num_tokens
        wanted.extend(range(end - running.num_logits, end))
    step.features = run.features if with_features else None
    if wanted == list(range(len(wanted))):
        step.logits = run.logits[: len(wanted)]
    else:
        places = torch.tensor(wanted).to(run.logits.device, non_blocking=True)
        step.logits = run.logits[places]
    return True
