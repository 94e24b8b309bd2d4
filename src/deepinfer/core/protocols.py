"""The interfaces at which parts meet.

A part implements a protocol by having its methods; nothing needs to be inherited. Arrays are annotated as
`Tensor` for readers and checkers, and torch is never imported here. `PROTOCOL_VERSION` rises when a method
changes its meaning, so an adapter built for another version can refuse plainly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from deepinfer.core.clock import Clock as Clock
from deepinfer.core.events import Event
from deepinfer.core.plan import BlockUpdate, CacheCopy, LoadSnapshot, StepPlan, StepResult
from deepinfer.core.types import OutputDelta, Request
from deepinfer.core.views import Allocation as Allocation
from deepinfer.core.views import DraftBatch as DraftBatch
from deepinfer.core.views import DraftView as DraftView
from deepinfer.core.views import Hit as Hit
from deepinfer.core.views import ModelInfo as ModelInfo
from deepinfer.core.views import Sampled as Sampled
from deepinfer.core.views import SampleRows as SampleRows

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "PROTOCOL_VERSION",
    "Allocation",
    "Balancer",
    "CacheManager",
    "Clock",
    "DraftBatch",
    "DraftView",
    "Drafter",
    "Grammar",
    "GrammarState",
    "Hit",
    "IncrementalDetokenizer",
    "LogitsProcessor",
    "ModelInfo",
    "ModelRunner",
    "OutputSink",
    "ProgressFn",
    "SampleRows",
    "Sampled",
    "Sampler",
    "Scheduler",
    "StatsSink",
    "StepHandle",
    "Tokenizer",
    "VerifyLengthPolicy",
]

PROTOCOL_VERSION = 1

ProgressFn = Callable[[int, int], None]
"""Called with (done, total) while something long runs."""


class StepHandle(Protocol):
    """A step that was launched and may still run; only its runner looks inside."""

    step: int


@runtime_checkable
class ModelRunner(Protocol):
    """Runs plans on a device. `forward` and `sample` enqueue and return; `collect` waits."""

    info: ModelInfo

    def forward(self, plan: StepPlan, requests: Mapping[str, Request]) -> StepHandle:
        """Starts the forward pass of a plan.

        Args:
            plan: What to run.
            requests: The requests of its rows by id.

        Returns:
            A handle for `sample` and `collect`.
        """
        ...

    def sample(self, handle: StepHandle, masks: Tensor | None = None) -> StepHandle:
        """Starts sampling; grammar masks are bound here, after the forward pass was launched.

        Args:
            handle: What `forward` returned.
            masks: Allowed tokens, shape [logits rows, ceil(vocab / 32)], int32, bit (id & 31) of word
                (id >> 5), or None when no row is constrained.

        Returns:
            The handle for `collect`.
        """
        ...

    def collect(self, handle: StepHandle) -> StepResult:
        """Waits for this step only and returns its result."""
        ...

    def release_slot(self, slot: int) -> None:
        """Forgets the state of a slot."""
        ...

    def close(self) -> None:
        """Gives the device memory back; calling it twice is harmless."""
        ...


@runtime_checkable
class CacheManager(Protocol):
    """Hands out slots and cache blocks; frees and publishes only what is settled.

    Questions change nothing, so that a scheduler can plan with them; `allocate`, `settle`, `release` and `step_done`
    are called when a plan is launched or its result applied, in step order.

    Attributes:
        num_slots: Requests that can hold state at once.
        block_size: Tokens in one block.
        num_blocks: Blocks in all.
    """

    num_slots: int
    block_size: int
    num_blocks: int

    @property
    def num_held(self) -> int:
        """Requests that hold a slot."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` may give out now, those of idle cached prefixes included."""
        ...

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks given back that a step in flight may still touch."""
        ...

    @property
    def capacity_tokens(self) -> int:
        """Most tokens that one request can hold in an empty cache."""
        ...

    def peek(self, count: int) -> tuple[tuple[int, int], ...]:
        """Slot and slot generation of up to `count` next allocations of new requests."""
        ...

    def holding(self, request: Request) -> Allocation | None:
        """What a request holds, or None."""
        ...

    def lookup(self, request: Request, token_ids: Sequence[int], limit: int) -> Hit:
        """Finds cached entries for the beginning of `token_ids`, at most `limit` tokens; changes nothing."""
        ...

    def blocks_for(self, request: Request, hit: Hit | None, upto: int) -> int:
        """How far `num_free_blocks` would fall if the request got room for `upto` tokens; changes nothing."""
        ...

    def freed_by(self, request: Request) -> int:
        """How many blocks come back when a request is released: those that it alone holds; changes nothing."""
        ...

    def allocate(
        self, request: Request, hit: Hit | None, upto: int, reserve: int = 0
    ) -> Allocation | None:
        """Gives a request room for its first `upto` tokens.

        Args:
            request: The request; asking again for the same one grows what it has.
            hit: What `lookup` found, for a request that holds nothing yet, or None.
            upto: Tokens to make room for.
            reserve: Blocks to leave free for others.

        Returns:
            What the request now holds, or None, with nothing changed, when there is no room.
        """
        ...

    def take_updates(self) -> tuple[tuple[BlockUpdate, ...], tuple[CacheCopy, ...]]:
        """Block table entries and copies since the last call, in order; the next launched plan carries them."""
        ...

    def settle(self, request: Request, token_ids: Sequence[int], settled: int, step: int) -> None:
        """Notes that the first `settled` of `token_ids` are final as of `step`; full blocks may be shared.

        It may be called only when `settled` passed the end of a block, so that a step costs nothing otherwise.
        """
        ...

    def release(self, request: Request, after_step: int) -> None:
        """Takes the room back once step `after_step` was collected; unknown requests are ignored."""
        ...

    def load_failed(self, request: Request) -> None:
        """Forgets the host entries that a request was to get from a copy that failed."""
        ...

    def step_done(self, step: int) -> int:
        """Notes that a step was collected; returns how many slots and blocks came back."""
        ...

    def reset(self) -> None:
        """Takes everything back, in whatever state the books are."""
        ...

    def check(self) -> None:
        """Raises `InvariantBroken` when the books do not add up."""
        ...


@runtime_checkable
class Scheduler(Protocol):
    """Decides what the next step runs. `plan` depends on its state and `now` only."""

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits, runs, or is in flight."""
        ...

    def add(self, request: Request) -> None:
        """Takes a request; raises `Unschedulable` when it could never fit."""
        ...

    def abort(self, rid: str) -> None:
        """Ends a request; unknown ids are ignored."""
        ...

    def plan(self, now: float) -> StepPlan | None:
        """Makes the next plan, or None when there is nothing to run now."""
        ...

    def launch(self, plan: StepPlan) -> StepPlan:
        """Commits to a plan: gives out its room; returns it with block updates and copies filled in."""
        ...

    def apply(self, result: StepResult) -> Sequence[Any]:
        """Applies the result of the oldest launched step; returns what changed for each request."""
        ...

    def cancel(self, step: int) -> None:
        """Takes the oldest launched step back; its requests will be run again."""
        ...

    def check(self) -> None:
        """Raises `InvariantBroken` when the books do not add up."""
        ...

    def snapshot(self) -> LoadSnapshot:
        """How busy the engine is."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens for the model to verify."""

    def propose(self, view: DraftView, max_drafts: int) -> DraftBatch:
        """Proposes up to `max_drafts` tokens a row; some of them may be left out."""
        ...


@runtime_checkable
class VerifyLengthPolicy(Protocol):
    """Decides how many drafts of each row are verified."""

    def choose(self, confidences: Sequence[Sequence[float]], num_running: int) -> Sequence[int]:
        """Drafts to verify, one number a row, from 0 to the row's drafts.

        Args:
            confidences: Of each row, those of the block that was proposed for it last, which may be some steps ago: one
                probability a draft that it is accepted if all before it are.
            num_running: Requests that run.
        """
        ...


class GrammarState(Protocol):
    """Where one output is in its grammar."""

    @property
    def is_done(self) -> bool:
        """Whether nothing but the end can follow."""
        ...

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Moves over tokens; on the first that does not fit it stays before all of them: False."""
        ...

    def fill_mask(self, row: Any) -> None:
        """Writes the allowed tokens into a row of int32 words, as in `ModelRunner.sample`."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last tokens accepted."""
        ...

    def clone(self) -> GrammarState:
        """An independent copy."""
        ...


@runtime_checkable
class Grammar(Protocol):
    """A compiled grammar; immutable, shared by any number of outputs."""

    def start(self) -> GrammarState:
        """The state before the first token."""
        ...


@runtime_checkable
class Sampler(Protocol):
    """Chooses tokens. Each row depends on its own logits, options, seed and position only."""

    def __call__(self, logits: Tensor, rows: SampleRows) -> Sampled:
        """Chooses one token a row from `logits`, shape [rows, vocab], fp32."""
        ...


@runtime_checkable
class LogitsProcessor(Protocol):
    """Changes logits in place; each row depends on itself only."""

    def __call__(self, logits: Tensor, rows: SampleRows) -> None:
        """Changes `logits`, shape [rows, vocab], fp32."""
        ...


class IncrementalDetokenizer(Protocol):
    """Turns a stream of tokens into text that is safe to show."""

    def push(self, token_id: int) -> str:
        """Takes a token; returns the text that became complete, never a part of a character."""
        ...

    def finish(self) -> str:
        """Returns what is left, with replacement characters for bytes that never became a character."""
        ...


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        ...

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids."""
        ...

    def stream(self) -> IncrementalDetokenizer:
        """A new incremental detokenizer."""
        ...


@runtime_checkable
class Balancer(Protocol):
    """Chooses the replica that gets a request."""

    def route(self, request: Request, replicas: Sequence[LoadSnapshot]) -> int:
        """Index of the chosen replica; ties go to the lowest."""
        ...


@runtime_checkable
class StatsSink(Protocol):
    """Takes events; must not raise and must not block."""

    def record(self, event: Event) -> None:
        """Takes one event."""
        ...


class OutputSink(Protocol):
    """Takes deltas as they are made."""

    def __call__(self, delta: OutputDelta) -> None:
        """Takes one delta."""
        ...
