"""The state of a fleet in columns: reported loads, plus what the router itself sent since."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from deepinfer.balancers.base import WorkerSnapshot, WorkerState
from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError

__all__ = ["Fleet"]

_Sent = tuple[float, int, int, float]
_INT_MAX = 2**48


class Fleet:
    """The explicit state that routers decide from: one row a worker, in columns.

    Reports are old by the time they are read. A router that decides many times between two reports of a worker would
    send everything to the one that looked idle, so the fleet counts each dispatch at once (`sent`), and drops it when
    a report comes that was taken later (`update`). Nothing here reads a clock: times are arguments.

    Args:
        workers: Snapshots, each with a unique name. Their order is the order of the columns.

    Attributes:
        names: Name of each worker.
        ready: Whether each may get requests, shape [workers], bool.
        num_requests: Requests that run or wait, own dispatches included, shape [workers], int64.
        waiting_tokens: Prompt tokens not yet run, own dispatches included, shape [workers], int64.
        waiting_s: Predicted seconds of them, own dispatches included, shape [workers], float64; 0 when not reported.
        kv_tokens: Tokens held by running requests, own dispatches included, shape [workers], int64.
        capacity_tokens: Tokens that each cache holds, 0 when unknown, shape [workers], int64.
        max_requests: Most requests that each runs at once, 0 when unknown, shape [workers], int64.
        time_s: When each was reported, shape [workers], float64.

    Raises:
        ConfigError: A name occurs twice.

    Examples:
        >>> fleet = Fleet([WorkerSnapshot(name="a", num_running=3), WorkerSnapshot(name="b")])
        >>> fleet.sent(1, now_s=1.0, waiting_tokens=500)
        >>> fleet.num_requests.tolist(), fleet.waiting_tokens.tolist()
        ([3, 1], [0, 500])
        >>> fleet.update(WorkerSnapshot(name="b", time_s=2.0))  # taken after the dispatch
        >>> fleet.num_requests.tolist()
        [3, 0]
    """

    def __init__(self, workers: Iterable[WorkerSnapshot] = ()) -> None:
        self.names: list[str] = []
        self._index: dict[str, int] = {}
        self._sent: list[deque[_Sent]] = []
        self.ready: npt.NDArray[np.bool_] = np.zeros(0, bool)
        self.num_requests: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.waiting_tokens: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.waiting_s: npt.NDArray[np.float64] = np.zeros(0)
        self.kv_tokens: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.capacity_tokens: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.max_requests: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.time_s: npt.NDArray[np.float64] = np.zeros(0)
        workers = list(workers)
        for name in _COLUMNS:
            setattr(self, name, np.zeros(len(workers), getattr(self, name).dtype))
        for index, worker in enumerate(workers):
            _check_report(worker)
            if worker.name in self._index:
                raise ConfigError(
                    f"two workers are called {worker.name!r}; give each a name of its own.",
                    field="name",
                    value=worker.name,
                )
            self._add(worker.name, index)
            self._write(index, worker, worker.time_s)

    def __len__(self) -> int:
        return len(self.names)

    def index(self, name: str) -> int:
        """Row of a worker.

        Args:
            name: Its name.

        Returns:
            The row.

        Raises:
            ConfigError: There is no such worker.
        """
        try:
            return self._index[name]
        except KeyError:
            raise ConfigError(
                f"there is no worker {checks.show(name)} in this fleet of {len(self)}; add it with update.",
                field="name",
                value=name,
            ) from None

    def update(self, worker: WorkerSnapshot) -> None:
        """Takes a report; a worker that is not known yet gets a new row at the end.

        Args:
            worker: The report. One that is older than the last is ignored, unless it says that the worker is dead:
                reports may arrive out of order. Such a late death hides the worker until a report comes that is newer
                than all before.

        Raises:
            ConfigError: It is no report.
        """
        _check_report(worker)
        index = self._index.get(worker.name)
        if index is None:
            index = len(self)
            for name in _COLUMNS:
                column = getattr(self, name)
                setattr(self, name, np.append(column, np.zeros(1, column.dtype)))
            self._add(worker.name, index)
            self.time_s[index] = worker.time_s
        elif worker.time_s < self.time_s[index] and worker.state is not WorkerState.DEAD:
            return
        self._write(index, worker, self.time_s[index])

    def sent(
        self,
        index: int,
        *,
        now_s: float,
        waiting_tokens: int = 0,
        waiting_s: float = 0.0,
        kv_tokens: int = 0,
    ) -> None:
        """Counts a request that the router just sent to a worker.

        Args:
            index: Row of the worker.
            now_s: The time, on the clock of the reports, in seconds.
            waiting_tokens: Prompt tokens that it will have to run.
            waiting_s: Predicted seconds of them.
            kv_tokens: Tokens that the request will hold in the cache.

        Raises:
            ConfigError: There is no such row, or a number is negative or not finite.
        """
        if not 0 <= index < len(self.names):
            rows = (
                f"a row from 0 to {len(self) - 1}" if len(self) else "a row, of which there is none"
            )
            checks.fail("index", index, rows, ConfigError)
        # Written so that NaN fails.
        if not (0 <= waiting_tokens <= _INT_MAX and 0 <= kv_tokens <= _INT_MAX):
            checks.check_int("waiting_tokens", waiting_tokens, 0, _INT_MAX, ConfigError)
            checks.check_int("kv_tokens", kv_tokens, 0, _INT_MAX, ConfigError)
        if not (0.0 <= waiting_s <= 1e15 and -1e15 <= now_s <= 1e15):
            checks.check_float("waiting_s", waiting_s, 0.0, 1e15, ConfigError)
            checks.check_float("now_s", now_s, -1e15, 1e15, ConfigError)
        self._sent[index].append((now_s, waiting_tokens, kv_tokens, waiting_s))
        self.num_requests[index] += 1
        self.waiting_tokens[index] += waiting_tokens
        self.kv_tokens[index] += kv_tokens
        self.waiting_s[index] += waiting_s

    def copy(self) -> Fleet:
        """An independent copy."""
        other = Fleet()
        other.names = list(self.names)
        other._index = dict(self._index)
        other._sent = [deque(sent) for sent in self._sent]
        for name in _COLUMNS:
            setattr(other, name, getattr(self, name).copy())
        return other

    def _add(self, name: str, index: int) -> None:
        self.names.append(name)
        self._index[name] = index
        self._sent.append(deque())

    def _write(self, index: int, worker: WorkerSnapshot, before: float) -> None:
        sent = self._sent[index]
        if worker.state is WorkerState.DEAD:
            sent.clear()
        elif sent:  # several threads may have counted theirs out of order
            self._sent[index] = sent = deque(item for item in sent if item[0] > worker.time_s)
        self.ready[index] = worker.state is WorkerState.READY
        self.num_requests[index] = worker.num_requests + len(sent)
        self.waiting_tokens[index] = worker.waiting_tokens + sum(item[1] for item in sent)
        self.kv_tokens[index] = worker.cached_tokens + sum(item[2] for item in sent)
        self.waiting_s[index] = (worker.waiting_s or 0.0) + sum(item[3] for item in sent)
        self.capacity_tokens[index] = worker.capacity_tokens
        self.max_requests[index] = worker.max_requests
        self.time_s[index] = max(worker.time_s, before)


def _check_report(worker: object) -> None:
    if not isinstance(worker, WorkerSnapshot):
        checks.fail("worker", worker, "a WorkerSnapshot", ConfigError)


_COLUMNS = (
    "ready",
    "num_requests",
    "waiting_tokens",
    "waiting_s",
    "kv_tokens",
    "capacity_tokens",
    "max_requests",
    "time_s",
)
