"""Where the time of an engine goes, as a file for a trace viewer."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError
from deepinfer.engine.pipeline import Flight
from deepinfer.scheduling import Progress

__all__ = ["Trace"]

_STEPS = ""
_STEP_PARTS = ("plan", "forward", "collect", "apply", "mask", "sample")


class Trace:
    """A record of steps and requests while its `with` block runs; made by `Engine.trace`.

    It is written in the Chrome trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing show: one track
    with the parts of every step on the host, and one track a request with its wait, and its rows from the launch of
    their step to the arrival of their tokens.

    Args:
        capacity: Most spans kept; older ones are dropped first.
        attach: Called with the trace when the block is entered.
        detach: Called with it when the block is left.

    Raises:
        ConfigError: The capacity is out of range.

    Attributes:
        num_spans: Spans recorded, dropped ones included.
    """

    def __init__(
        self,
        capacity: int = 200_000,
        *,
        attach: Callable[[Trace], None],
        detach: Callable[[Trace], None],
    ) -> None:
        capacity = checks.check_int("capacity", capacity, 1, 100_000_000, ConfigError)
        self._spans: deque[tuple[str, str, float, float, dict[str, Any]]] = deque(maxlen=capacity)
        self._attach, self._detach = attach, detach
        self._begins: dict[str, float] = {}
        self._ended: tuple[set[str], set[str]] = (set(), set())  # in this step, in the one before
        self._start_s = time.perf_counter()
        self.num_spans = 0

    @property
    def num_dropped(self) -> int:
        """Spans that did not fit any more."""
        return self.num_spans - len(self._spans)

    def added(self, rid: str) -> None:
        """Notes that a request waits.

        Args:
            rid: Its id.
        """
        self._begins[rid] = time.perf_counter()
        for ended in self._ended:
            ended.discard(rid)

    def preempted(self, rid: str) -> None:
        """Notes that a request lost its slot.

        Args:
            rid: Its id.
        """
        now = time.perf_counter()
        self._add("preempted", rid, now, now, {})

    def finished(self, rid: str, reason: str) -> None:
        """Notes that a request ended.

        Args:
            rid: Its id.
            reason: Why.
        """
        now = time.perf_counter()
        self._ended[0].add(rid)  # a void row may follow
        self._add(reason, rid, now, now, {})

    def step(self, flight: Flight, progress: Iterable[Progress]) -> None:
        """Notes a step that was applied, before it notes the ends of its requests.

        Args:
            flight: The step.
            progress: What it changed.
        """
        plan, spans = flight.plan, flight.spans
        result = flight.result
        about = {
            "step": plan.step,
            "rows": len(plan.rows),
            "tokens": plan.num_tokens,
            "predicted_s": plan.predicted_s,
            "duration_s": result.duration_s if result is not None else None,
            "error": None if flight.error is None else str(flight.error),
        }
        for part in _STEP_PARTS:
            if part in spans:
                self._add(part, _STEPS, *spans[part], about)
        launched = spans["forward"][0] if "forward" in spans else spans["collect"][0]
        arrived = spans["collect"][1]
        generated = {entry.request.rid: len(entry.token_ids) for entry in progress}
        for row in plan.rows:
            begin = self._begins.get(row.rid, launched)
            if row.rid in self._begins and begin < launched:
                self._add("waiting", row.rid, begin, launched, {})
            about = {
                "step": plan.step,
                "first_position": row.first_position,
                "tokens": row.num_tokens,
                "drafts": row.num_drafts,
                "generated": generated.get(row.rid, 0),
                "void": row.rid not in generated,
            }
            self._add(str(row.role), row.rid, max(begin, launched), arrived, about)
            if row.rid in generated:
                self._begins[row.rid] = arrived
        now, before = self._ended
        for rid in before:
            self._begins.pop(rid, None)
        self._ended = (set(), now)

    def to_dict(self) -> dict[str, Any]:
        """The trace as plain values, in the Chrome trace format; times in microseconds since the trace was made."""
        tracks: dict[str, int] = {_STEPS: 0}
        events: list[dict[str, Any]] = []
        for name, track, begin, end, about in tuple(self._spans):
            number = tracks.setdefault(track, len(tracks))
            event = {
                "name": name,
                "cat": "request" if track else "step",
                "ph": "X" if end > begin else "i",
                "ts": round((begin - self._start_s) * 1e6, 3),
                "pid": 2 if track else 1,
                "tid": number,
                "args": {key: value for key, value in about.items() if value is not None},
            }
            event |= {"dur": round((end - begin) * 1e6, 3)} if end > begin else {"s": "t"}
            events.append(event)
        names = [(1, "process_name", 0, "steps"), (2, "process_name", 0, "requests")]
        names += [
            (2 if track else 1, "thread_name", number, track or "host")
            for track, number in tracks.items()
        ]
        meta = [
            {"name": kind, "ph": "M", "pid": pid, "tid": number, "args": {"name": name}}
            for pid, kind, number, name in names
        ]
        return {"traceEvents": meta + events, "displayTimeUnit": "ms"}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the trace as JSON.

        Args:
            path: The file; it is overwritten.

        Returns:
            The path.
        """
        file = Path(path)
        file.write_text(json.dumps(self.to_dict()), encoding="utf-8")
        return file

    def _add(self, name: str, track: str, begin: float, end: float, about: dict[str, Any]) -> None:
        self._spans.append((name, track, begin, end, about))
        self.num_spans += 1

    def __enter__(self) -> Trace:
        self._attach(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._detach(self)

    def __len__(self) -> int:
        return len(self._spans)

    def __repr__(self) -> str:
        return f"Trace({len(self)} spans, {self.num_dropped} dropped)"
