"""A running step to the rows of logits that a sampler sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from deepinfer.core.plan import PlanRow, PlanRows
from deepinfer.core.protocols import SampleRows
from deepinfer.core.types import Request
from deepinfer.engine.step_state import RunningStep

__all__ = ["RowsOfLogits", "mask_rows", "sample_rows"]


class RowsOfLogits(Sequence[PlanRow]):
    """The plan's row of each row of logits, made when somebody looks.

    Args:
        plan_rows: Rows of the plan.
        indices: Which of them, one number a row of logits.
    """

    __slots__ = ("_indices", "_plan_rows")

    def __init__(self, plan_rows: PlanRows, indices: Sequence[int]) -> None:
        self._plan_rows, self._indices = plan_rows, indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> PlanRow: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[PlanRow, ...]: ...
    def __getitem__(self, index: Any) -> Any:
        """One row, or a tuple of rows for a slice."""
        if isinstance(index, slice):
            return tuple(self._plan_rows[at] for at in self._indices[index])
        return self._plan_rows[self._indices[index]]


def sample_rows(step: RunningStep, *, with_outputs: bool) -> SampleRows:
    """What the sampler needs to know of the rows of logits.

    Args:
        step: The step, which learns how many columns its logits have; the tokens of the step before it are known by now.
        with_outputs: Give every row its output so far, not only rows with penalties.

    Returns:
        The rows.
    """
    lane = step.lane
    if step.logits is not None:
        step.vocab_size = step.logits.shape[-1]
    if step.verify is not None:
        return step.verify.sample_rows()
    requests: list[Request] = []
    positions: list[int] = []
    indices: list[int] = []
    outputs: list[Sequence[int]] = []
    for running in step.rows:
        count = running.num_logits
        if not count:
            continue
        request = step.requests[running.row.rid]
        requests += [request] * count
        positions += range(running.end, running.end + count)
        indices += [running.index] * count
        if with_outputs or request.params.has_penalties:
            output = running.state.token_ids[request.num_prompt_tokens :]
            outputs += [(*output, *running.draft[:index]) for index in range(count)]
        else:
            outputs += [()] * count
    seeds = [request.params.seed or 0 for request in requests]
    plan_rows = step.plan.rows
    if lane is None:
        return SampleRows(
            requests=tuple(requests),
            positions=tuple(positions),
            seeds=tuple(seeds),
            output_token_ids=tuple(outputs),
            plan_rows=RowsOfLogits(plan_rows, indices),
        )
    company = lane.company
    known = lane.output_token_ids(of_all=with_outputs)
    before = (lane.starts + 1).tolist()
    if not requests:  # the same objects as long as the same requests decode
        return SampleRows(
            requests=company.requests,
            positions=tuple(before),
            seeds=company.seeds,
            output_token_ids=known,
            plan_rows=RowsOfLogits(plan_rows, range(lane.count)),
        )
    return SampleRows(
        requests=(*company.requests, *requests),
        positions=(*before, *positions),
        seeds=(*company.seeds, *seeds),
        output_token_ids=(*known, *outputs),
        plan_rows=RowsOfLogits(plan_rows, [*range(lane.count), *indices]),
    )


def mask_rows(step: RunningStep, masks: Tensor) -> Tensor:
    """The mask rows of the logits that are there; a plan may have asked for more drafts than came.

    Args:
        step: The step.
        masks: Shape [logits rows of the plan, words], int32.

    Returns:
        Shape [logits rows of the step, words], int32.
    """
    counts = step.plan.rows.num_logits
    offsets = (np.cumsum(counts) - counts).tolist()
    wanted = list(range(step.lane_count))
    for running in step.rows:
        first = offsets[running.index]
        wanted += range(first, first + running.num_logits)
    return masks if len(wanted) == len(masks) else masks[torch.tensor(wanted)]
