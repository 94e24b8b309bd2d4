"""What every router shares: requests and workers as routers see them, and the protocol of a router."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from deepinfer.balancers.decision import Decision
from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError, InvalidRequest
from deepinfer.core.plan import LoadSnapshot
from deepinfer.core.types import Request

if TYPE_CHECKING:
    from deepinfer.balancers.fleet import Fleet

__all__ = ["RouteRequest", "Router", "WorkerSnapshot", "WorkerState"]

# Sums over as many dispatches as a router has open stay within 64 bits.
_INT_MAX = 2**48


class WorkerState(IntEnum):
    """Whether a worker may get requests."""

    READY = 0
    """It takes requests."""
    DRAINING = 1
    """It finishes what it has and takes nothing new."""
    DEAD = 2
    """It does not answer; what it had must be routed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """As much of a request as a router needs; no token ids.

    Attributes:
        rid: Unique id of the request.
        prompt_tokens: Tokens of the prompt, from 1.
        output_tokens: Tokens that the answer is expected to have, or None when nothing is known.
        block_keys: Keys of the prompt's whole cache blocks, in order, or empty. Any hashable keys that chain: equal
            keys mean equal prefixes.
        session: Conversation that the request belongs to, or None.

    Raises:
        InvalidRequest: A number is out of range, or the keys are not in a tuple.
    """

    rid: str
    prompt_tokens: int
    output_tokens: float | None = None
    block_keys: tuple[int | str | bytes, ...] = ()
    session: str | None = None

    def __post_init__(self) -> None:
        """Checks the numbers."""
        checks.check_text("rid", self.rid, InvalidRequest)
        checks.check_int("prompt_tokens", self.prompt_tokens, 1, _INT_MAX, InvalidRequest)
        if self.output_tokens is not None:
            checks.check_float("output_tokens", self.output_tokens, 0.0, 1e15, InvalidRequest)
        if not isinstance(self.block_keys, tuple):
            checks.fail("block_keys", self.block_keys, "a tuple of keys", InvalidRequest)

    @classmethod
    def of(
        cls,
        request: Request,
        *,
        output_tokens: float | None = None,
        block_keys: tuple[int | str | bytes, ...] = (),
        session: str | None = None,
    ) -> RouteRequest:
        """The router's view of an engine's request.

        Args:
            request: The request.
            output_tokens: Tokens that the answer is expected to have, or None.
            block_keys: Keys of its whole cache blocks.
            session: Conversation that it belongs to.

        Returns:
            The view.
        """
        return cls(
            rid=request.rid,
            prompt_tokens=len(request.prompt_token_ids),
            output_tokens=output_tokens,
            block_keys=block_keys,
            session=session,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSnapshot:
    """What one worker (an engine, or one rank of an engine) reported at one time.

    Attributes:
        name: Unique name of the worker.
        state: Whether it may get requests.
        time_s: When the snapshot was taken, on the router's clock, in seconds.
        num_running: Requests that hold a slot.
        num_waiting: Requests that wait for one.
        waiting_tokens: Prompt tokens not yet run.
        cached_tokens: Tokens whose cache entries are held by running requests.
        capacity_tokens: Tokens that its cache can hold, or 0 when unknown.
        max_requests: Most requests that it can run at once, or 0 when unknown.
        waiting_s: Predicted seconds to run the waiting tokens, or None.

    Raises:
        ConfigError: A number is out of range, or the state is no `WorkerState`.
    """

    name: str
    state: WorkerState = WorkerState.READY
    time_s: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0
    cached_tokens: int = 0
    capacity_tokens: int = 0
    max_requests: int = 0
    waiting_s: float | None = None

    def __post_init__(self) -> None:
        """Checks the numbers."""
        checks.check_text("name", self.name, ConfigError)
        if not isinstance(self.state, WorkerState):
            checks.fail(
                "state", self.state, "a WorkerState, such as WorkerState.READY", ConfigError
            )
        checks.check_float("time_s", self.time_s, -1e15, 1e15, ConfigError)
        for name in (
            "num_running",
            "num_waiting",
            "waiting_tokens",
            "cached_tokens",
            "capacity_tokens",
            "max_requests",
        ):
            checks.check_int(name, getattr(self, name), 0, _INT_MAX, ConfigError)
        if self.waiting_s is not None:
            checks.check_float("waiting_s", self.waiting_s, 0.0, 1e15, ConfigError)

    @classmethod
    def of(
        cls,
        name: str,
        load: LoadSnapshot,
        *,
        state: WorkerState = WorkerState.READY,
        max_requests: int = 0,
    ) -> WorkerSnapshot:
        """A snapshot from what an engine says about itself.

        Args:
            name: Unique name of the worker.
            load: What `Engine` or `Scheduler.snapshot` gave.
            state: Whether it may get requests.
            max_requests: Most requests that it can run at once, or 0 when unknown.

        Returns:
            The snapshot.
        """
        return cls(
            name=name,
            state=state,
            time_s=load.time_s,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            waiting_tokens=load.waiting_tokens,
            cached_tokens=load.cached_tokens,
            capacity_tokens=load.capacity_tokens,
            max_requests=max_requests,
            waiting_s=load.predicted_s,
        )

    @property
    def num_requests(self) -> int:
        """Requests that run or wait."""
        return self.num_running + self.num_waiting


@runtime_checkable
class Router(Protocol):
    """Chooses a worker: a function of the request and of the state of the fleet, which it leaves as it is.

    An implementation keeps no clock and no thread; one that chooses at random takes a seed. Workers that are not
    `READY` are never chosen, and ties go to the lowest index.
    """

    def decide(self, request: RouteRequest, fleet: Fleet) -> Decision:
        """Chooses a worker.

        Args:
            request: What is to be placed.
            fleet: Every worker, dead and draining ones included. The caller tells it of the dispatch (`Fleet.sent`).

        Returns:
            The choice; its target is a row of the fleet, or None when nobody can take the request.
        """
        ...
