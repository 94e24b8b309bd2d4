"""A schedule as a list of calls: recorded from a run, replayed on other objects, and compared bit for bit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepinfer.core.clock import Clock, FakeClock
from deepinfer.core.errors import InvariantBroken, RequestError
from deepinfer.core.params import SamplingParams
from deepinfer.core.plan import RowResult, RowResults, StepPlan, StepResult
from deepinfer.core.types import Request

__all__ = ["RecordedCall", "ScheduleRecorder", "load_calls", "play_calls", "save_calls"]

RecordedCall = dict[str, Any]
"""Plain values: `call` is the name of a method, `time_s` the clock, the rest its argument and what it returned."""


class ScheduleRecorder:
    """Records every call of an `ObservedScheduler` as plain values.

    Grammars and images stay behind, since a scheduler does not look at them.

    Args:
        clock: Gives the time of each call; that of the scheduler and the cache. None for a clock that stands still.

    Attributes:
        calls: What was recorded, oldest first.

    Examples:
        >>> from deepinfer.cache import SlotCacheManager
        >>> from deepinfer.scheduling import Scheduler, SchedulerLimits
        >>> from deepinfer.testing import ObservedScheduler
        >>> def make():
        ...     return Scheduler(SchedulerLimits(max_model_len=8), SlotCacheManager(1, 8))
        >>> recorder = ScheduleRecorder()
        >>> scheduler = ObservedScheduler(make(), recorder)
        >>> scheduler.add(Request(rid="a", prompt_token_ids=(5, 6)))
        >>> _ = scheduler.launch(scheduler.plan(now=0.0))
        >>> play_calls(recorder.calls, make())
        2
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.calls: list[RecordedCall] = []
        self._clock = clock or FakeClock()

    def on_call(self, name: str, argument: Any, result: Any) -> None:
        """Records one call.

        Args:
            name: Name of the method.
            argument: Its argument.
            result: What it returned.
        """
        call: RecordedCall = {"call": name, "time_s": self._clock.now()}
        if name == "add":
            call["request"] = _request_to_dict(argument)
        elif name == "plan":
            call["now"] = argument
            call["plan"] = None if result is None else result.to_dict()
        elif name == "launch":
            call["given"], call["plan"] = argument.to_dict(), result.to_dict()
        elif name == "apply":
            call["result"] = _result_to_dict(argument)
            call["progress"] = _progress(result)
        elif argument is not None:
            call["argument"] = argument
        self.calls.append(call)

    def __repr__(self) -> str:
        return f"ScheduleRecorder({len(self.calls)} calls)"


def play_calls(
    calls: Iterable[Mapping[str, Any]],
    scheduler: Any,
    *,
    clock: FakeClock | None = None,
    launch_recorded: bool = False,
) -> int:
    """Makes the same calls to another scheduler and compares what it returns.

    Args:
        calls: What a `ScheduleRecorder` recorded, as it is or after a passage through JSON.
        scheduler: A fresh scheduler with a fresh cache, made like the one that was recorded.
        clock: The clock of both, set to the recorded times, or None.
        launch_recorded: Launch the recorded plans rather than those that the scheduler made just now.

    Returns:
        Plans and results that were compared.

    Raises:
        InvariantBroken: Something differs; the message names the first call that does.
    """
    compared = 0
    made: dict[int, StepPlan] = {}
    for number, call in enumerate(calls):
        name = call["call"]
        if clock is not None:
            clock.advance(max(0.0, call["time_s"] - clock.now()))
        found: Any = None
        wanted: Any = None
        if name == "add":
            scheduler.add(_request_from_dict(call["request"]))
        elif name == "plan":
            plan = scheduler.plan(call["now"])
            if plan is not None:
                made[plan.step] = plan
            found, wanted = plan, _plan(call["plan"])
            compared += 1
        elif name == "launch":
            given = StepPlan.from_dict(call["given"])
            plan = given if launch_recorded else made.get(given.step, given)
            found, wanted = scheduler.launch(plan), _plan(call["plan"])
            made.clear()
            compared += 1
        elif name == "apply":
            progress = scheduler.apply(_result_from_dict(call["result"]))
            found, wanted = _progress(progress), [_as_tuples(p) for p in call["progress"]]
            compared += 1
        elif "argument" in call:
            getattr(scheduler, name)(call["argument"])
        else:
            getattr(scheduler, name)()
        if found != wanted:
            parts: tuple[tuple[Any, Any], ...] = ((found, wanted),)
            if found is not None and wanted is not None and name != "apply":
                names = [item.name for item in dataclasses.fields(StepPlan)]
                parts = tuple((getattr(found, n), getattr(wanted, n)) for n in names)
            different = [pair for pair in parts if pair[0] != pair[1]]
            raise InvariantBroken(f"call {number}, {name}: (now, then) is {different}.")
    return compared


def save_calls(path: str | Path, calls: Sequence[Mapping[str, Any]]) -> None:
    """Writes recorded calls as JSON, one a line.

    Args:
        path: The file.
        calls: The calls.
    """
    lines = (json.dumps(call, separators=(",", ":")) for call in calls)
    Path(path).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def load_calls(path: str | Path) -> list[RecordedCall]:
    """Reads what `save_calls` wrote.

    Args:
        path: The file.

    Returns:
        The calls.
    """
    with Path(path).open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _plan(values: Mapping[str, Any] | None) -> StepPlan | None:
    return None if values is None else StepPlan.from_dict(values)


def _request_to_dict(request: Request) -> dict[str, Any]:
    return {
        "rid": request.rid,
        "prompt_token_ids": list(request.prompt_token_ids),
        "params": request.params.to_dict(),
        "priority": request.priority,
        "arrival_s": request.arrival_s,
        "sample_index": request.sample_index,
        "cache_salt": request.cache_salt,
    }


def _request_from_dict(values: Mapping[str, Any]) -> Request:
    prompt = tuple(values["prompt_token_ids"])
    params = SamplingParams.from_dict(values["params"])
    return Request(**{**values, "prompt_token_ids": prompt, "params": params})


def _result_to_dict(result: StepResult) -> dict[str, Any]:
    rows = []
    for row in result.rows:
        values = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
        values |= {"logprobs": (), "prompt_logprobs": ()}  # no part of a schedule
        values["error"] = None if row.error is None else str(row.error)
        rows.append(values)
    return {
        "step": result.step,
        "rows": rows,
        "duration_s": result.duration_s,
        "failed_loads": list(result.failed_loads),
    }


def _result_from_dict(values: Mapping[str, Any]) -> StepResult:
    rows = []
    for row in values["rows"]:
        row = _as_lists_to_tuples(row)
        row["error"] = None if row["error"] is None else RequestError(row["error"])
        rows.append(RowResult(**row))
    return StepResult(
        step=values["step"],
        rows=RowResults.of(rows),
        duration_s=values["duration_s"],
        failed_loads=tuple(values["failed_loads"]),
    )


def _as_lists_to_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}


def _progress(progress: Sequence[Any]) -> list[tuple[Any, ...]]:
    """What changed: id, tokens, reason, stop token."""
    return [
        (
            entry.request.rid,
            tuple(map(int, entry.token_ids)),
            None if entry.finish_reason is None else str(entry.finish_reason),
            entry.stop_token_id,
        )
        for entry in progress
    ]


def _as_tuples(entry: Sequence[Any]) -> tuple[Any, ...]:
    rid, tokens, reason, stop = entry
    return (rid, tuple(tokens), reason, stop)
