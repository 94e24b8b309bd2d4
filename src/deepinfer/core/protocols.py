"""The interfaces at which parts meet.

A part implements a protocol by having its methods; nothing needs to be inherited. Arrays are annotated as
`Tensor` for readers and checkers, and torch is never imported here. `PROTOCOL_VERSION` rises when a method
changes its meaning, so an adapter built for another version can refuse plainly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from deepinfer.core.clock import Clock as Clock
from deepinfer.core.events import Event
from deepinfer.core.plan import LoadSnapshot, PlanRow, StepPlan, StepResult
from deepinfer.core.types import OutputDelta, Request, TokenLogprob

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the other parts need to know of a model.

    Attributes:
        vocab_size: Rows of the logits.
        max_model_len: Most tokens of one sequence.
        eos_token_ids: Token ids that end a sequence.
        bos_token_id: Token id put before a prompt, or None.
        window: Width of the sliding attention window in tokens, or 0 without one.
        draft_length: Most draft tokens that the model's own drafter proposes, or 0 without one.
        fingerprint: Identity of weights and number formats; part of every cache key.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    window: int = 0
    draft_length: int = 0
    fingerprint: bytes = b""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """Cache entries found for the beginning of a prompt.

    Attributes:
        num_tokens: Prompt tokens covered.
        blocks: Blocks that hold them, opaque to the caller.
        tier: Where they are: "device", "host", or the name of a store.
        replay_tokens: Tokens before the end of the hit that must be run again.
        approximate: Whether that replay gives other numbers than a full run.
    """

    num_tokens: int = 0
    blocks: tuple[Any, ...] = ()
    tier: str = "device"
    replay_tokens: int = 0
    approximate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Room given to one request.

    Attributes:
        slot: State slot.
        slot_generation: How often the slot was given out before.
        num_tokens: Tokens for which there is room.
        blocks: Blocks held, in order, opaque to the caller.
    """

    slot: int
    slot_generation: int
    num_tokens: int
    blocks: tuple[Any, ...] = ()


@runtime_checkable
class CacheManager(Protocol):
    """Hands out cache room; frees and publishes only what is settled."""

    def lookup(self, request: Request, limit: int) -> Hit:
        """Finds cached entries for the first `limit` prompt tokens at most; changes nothing."""
        ...

    def allocate(
        self, request: Request, hit: Hit | None, upto: int, reserve: int = 0
    ) -> Allocation | None:
        """Gives a request room for its first `upto` tokens.

        Args:
            request: The request; asking again for the same one grows what it has.
            hit: What `lookup` found, or None.
            upto: Tokens to make room for.
            reserve: Tokens of room to leave free for others.

        Returns:
            What the request now holds, or None, with nothing changed, when there is no room.
        """
        ...

    def settle(self, request: Request, settled: int, step: int) -> None:
        """Notes that the first `settled` tokens are final as of `step`; full blocks may be shared."""
        ...

    def release(self, request: Request, after_step: int) -> None:
        """Takes the room back once step `after_step` was collected; unknown requests are ignored."""
        ...

    def step_done(self, step: int) -> int:
        """Notes that a step was collected; returns how many slots or blocks came back."""
        ...

    def check(self) -> None:
        """Raises `InvariantBroken` when the books do not add up."""
        ...


@runtime_checkable
class Scheduler(Protocol):
    """Decides what the next step runs. `plan` depends on its state and `now` only."""

    def add(self, request: Request) -> None:
        """Takes a request; raises `Unschedulable` when it could never fit."""
        ...

    def abort(self, rid: str) -> None:
        """Ends a request; unknown ids are ignored."""
        ...

    def plan(self, now: float) -> StepPlan | None:
        """Makes the next plan, or None when there is nothing to run."""
        ...

    def apply(self, result: StepResult) -> list[Any]:
        """Applies a result, in step order; returns what changed for each request."""
        ...

    def snapshot(self) -> LoadSnapshot:
        """How busy the engine is."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftView:
    """What a drafter sees: the batch after its last verified token.

    Attributes:
        rids: Request ids, one a row.
        slots: State slots, one a row.
        anchor_ids: The last token of each row.
        positions: Position of that token.
        hidden: Features of the rows from the target model, shape [rows, features], or None.
        token_ids: All tokens of each row, for drafters that look at text only, or empty.
    """

    rids: tuple[str, ...]
    slots: tuple[int, ...]
    anchor_ids: tuple[int, ...]
    positions: tuple[int, ...]
    hidden: Tensor | None = None
    token_ids: tuple[Sequence[int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBatch:
    """Proposed tokens.

    Attributes:
        token_ids: Drafts of each row, in order; may be empty.
        confidences: One probability a draft that it and all before it are accepted.
    """

    token_ids: tuple[tuple[int, ...], ...]
    confidences: tuple[tuple[float, ...], ...] = ()


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens for the model to verify."""

    def propose(self, view: DraftView, max_drafts: int) -> DraftBatch:
        """Proposes up to `max_drafts` tokens a row."""
        ...


@runtime_checkable
class VerifyLengthPolicy(Protocol):
    """Decides how many drafts of each row are verified."""

    def choose(self, confidences: Sequence[Sequence[float]], num_running: int) -> Sequence[int]:
        """Drafts to verify, one number a row, from 0 to the row's drafts."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRows:
    """The rows of logits of one step, one entry each.

    Attributes:
        requests: Request of each row.
        positions: Position of the token to be chosen, in the whole sequence.
        seeds: Seed of each row, from 0 to 2**64 - 1.
        output_token_ids: Tokens generated so far, drafts before the row included.
        plan_rows: The plan's row that each belongs to.
    """

    requests: tuple[Request, ...]
    positions: tuple[int, ...]
    seeds: tuple[int, ...]
    output_token_ids: tuple[Sequence[int], ...] = ()
    plan_rows: tuple[PlanRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Chosen tokens.

    Attributes:
        token_ids: Shape [rows], int64.
        logprobs: One entry a row, None for rows that asked for none; empty when no row did.
    """

    token_ids: Tensor
    logprobs: tuple[TokenLogprob | None, ...] = ()


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
