"""What a loop does about steps that fail and about interrupts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from deepinfer.core.errors import InvariantBroken, RequestError
from deepinfer.core.plan import RowResults, StepPlan, StepResult
from deepinfer.engine.parts import EngineScheduler

__all__ = ["InterruptGuard", "check_books", "failed_result", "with_row_errors"]


class InterruptGuard:
    """Notes that a `with` block was left by Ctrl-C or the like, which can strike between any two instructions.

    Attributes:
        is_suspect: Whether that happened; whoever repairs the damage sets it back.
    """

    def __init__(self) -> None:
        self.is_suspect = False

    def __enter__(self) -> InterruptGuard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None and not issubclass(kind, Exception):
            self.is_suspect = True


def failed_result(plan: StepPlan, error: Exception | None) -> StepResult:
    """The result of a step that failed.

    Args:
        plan: What should have run.
        error: Why it did not.

    Returns:
        The error, once a row.
    """
    count = len(plan.rows)
    errors = dict.fromkeys(range(count), error or RequestError("the step was never run"))
    rows = RowResults(plan.rows, [], num_token_ids=[0] * count, errors=errors)
    return StepResult(step=plan.step, rows=rows)


def with_row_errors(result: StepResult, errors: Mapping[str, Exception]) -> StepResult:
    """A result in which some requests failed.

    Args:
        result: What the runner brought.
        errors: Why, by request id.

    Returns:
        The result with these errors.
    """
    found = {index: errors[rid] for index, rid in enumerate(result.rows.rids) if rid in errors}
    return dataclasses.replace(result, rows=result.rows.with_errors(found))


def check_books(
    scheduler: EngineScheduler,
    live: Mapping[str, Any],
    requests: Mapping[str, Any],
    samples: Mapping[str, list[str]],
    *,
    num_masks: int,
) -> None:
    """Compares a loop's books with each other and with the scheduler's.

    Args:
        scheduler: The scheduler, whose own books are walked as well.
        live: Unfinished samples by id.
        requests: Their requests by id.
        samples: Ids of the unfinished samples by the id that the caller knows.
        num_masks: Grammar states.

    Raises:
        InvariantBroken: They do not add up.
    """
    scheduler.check()
    ids = [sample for group in samples.values() for sample in group]
    if sorted(ids) != sorted(live) or live.keys() != requests.keys():
        raise InvariantBroken("the requests that run are not those that callers wait for.")
    load = scheduler.snapshot()
    if load.num_running + load.num_waiting != len(live):
        raise InvariantBroken(
            f"the scheduler knows {load.num_running + load.num_waiting} requests, and {len(live)} are "
            "unfinished."
        )
    if num_masks > len(live):
        raise InvariantBroken("a grammar state outlived its request.")
