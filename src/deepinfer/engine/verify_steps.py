"""What a runner does with a `VerifyLane`: drafts, the recorded step, the verdict, and the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.core.plan import PlanRows, RowResults
from deepinfer.engine.draft_graphs import PendingBlocks
from deepinfer.engine.graphs import DecodeGraphs, GraphRun
from deepinfer.engine.step_batch import row_errors, wrong_count
from deepinfer.engine.step_state import RunningStep, SlotStates
from deepinfer.engine.verify_lane import BlockConfidences, BlocksAhead, VerifyLane

__all__ = [
    "collect_lane",
    "judge_lane",
    "keep_tokens",
    "propose_for_lane",
    "resolve_lane",
    "run_verify_lane",
    "start_ahead",
    "teach_of_lane",
    "wants_lessons",
]


Ints = NDArray[np.int64]
TakeBack = Callable[[Sequence[int], Sequence[int]], None]


def propose_for_lane(
    lane: VerifyLane,
    drafter: Any,
    vocab_size: int,
    never: Set[int],
    lengths: Any = None,
    ahead: BlocksAhead | None = None,
) -> bool:
    """As `propose_drafts`, for all rows at once.

    Args:
        lane: The rows; they learn what is run.
        drafter: Has `start_blocks`.
        vocab_size: Ids are below it.
        never: Ids that are never chosen.
        lengths: May have `trim(confidences, counts, other_rows, margins=)`.
        ahead: Blocks that were started already, maybe of these rows.

    Returns:
        False when it has to be done row by row; nothing has changed then.
    """
    wanted = lane.rows.num_drafts
    if not wanted.any():
        return True
    at: Any = slice(None) if wanted.all() else np.flatnonzero(wanted)
    pending = None if ahead is None or not isinstance(at, slice) else ahead.of(lane)
    if pending is not None and ahead is not None:
        lane.firsts = ahead.firsts
    else:
        words = lane.shared.seed_words
        given = lane.anchors[at], lane.starts[at], lane.company.host_slots[at]
        found = drafter.start_blocks(*given, None if words is None else words[:, at])
        if found is None:
            return False
        ready, firsts, pending = found
        if pending is None:
            return True
        if ready.all():
            lane.firsts = firsts if isinstance(at, slice) else None
    count, block = len(wanted), min(pending.tokens.shape[1], drafter.draft_length)
    if lane.firsts is not None:
        if pending.tokens.shape[1] == block and int(wanted.min()) >= block:
            skips = getattr(lengths, "skips", None)
            if not hasattr(lengths, "trim") or (skips is not None and skips(count)):
                lane.pending, lane.drafts = pending, np.zeros((count, block), np.int64)
                lane.lengths = np.full(count, block)
                return True
    else:
        at = np.arange(count)[at][ready]
    tokens, confidences, margins, known = _blocks(pending, block, vocab_size, never)
    lane.known_s = time.perf_counter()
    counts = np.minimum(known, wanted[at])
    chosen = _trimmed(lengths, confidences, known, counts, count - len(tokens), margins)
    if isinstance(at, slice):
        lane.drafts, lane.confidences, lane.margins = tokens, confidences, margins
        lane.lengths, lane.known = chosen, known
        return True
    lane.drafts = np.zeros((count, block), np.int64)
    lane.confidences, lane.margins = np.zeros((2, count, block))
    lane.lengths, lane.known = np.zeros((2, count), np.int64)
    lane.drafts[at], lane.confidences[at], lane.margins[at] = tokens, confidences, margins
    lane.lengths[at], lane.known[at] = chosen, known
    return True


def start_ahead(lane: VerifyLane, rows: PlanRows, drafter: Any) -> BlocksAhead | None:
    """Starts the blocks of the next step as soon as it is known what they begin with.

    Args:
        lane: Rows of the step before; they were judged, and their books were not touched yet.
        rows: Rows of the next plan.
        drafter: Has `start_known`.

    Returns:
        The blocks; None where the next step is of other requests, or not all of them draft.
    """
    company, firsts = lane.company, lane.firsts
    if firsts is None or lane.shared.feeds is not None or not hasattr(drafter, "start_known"):
        return None
    if rows.rids != company.rids or not rows.num_drafts.all():
        return None
    starts, words = lane.starts + lane.used, lane.shared.seed_words
    pending = drafter.start_known(lane.last, starts, company.host_slots, firsts, words)
    return None if pending is None else BlocksAhead(company, starts, lane.last, firsts, pending)


def resolve_lane(lane: VerifyLane, vocab_size: int, never: Set[int]) -> None:
    """Fills in drafts that only the device knew.

    Args:
        lane: The rows.
        vocab_size: Ids are below it.
        never: Ids that are never chosen; drafts of them were run, and are refused.
    """
    if lane.pending is not None:
        block = lane.drafts.shape[1]
        found = _blocks(lane.pending, block, vocab_size, never)
        lane.drafts, lane.confidences, lane.margins, lane.known = found
        lane.pending = None


def _blocks(
    pending: PendingBlocks, block: int, vocab_size: int, never: Set[int]
) -> tuple[Any, Any, Any, Any]:
    """Tokens, confidences and margins, and how many of each block can be chosen."""
    packed = pending.wait()[:, :, :block]
    tokens = packed[:, 0].astype(np.int64)
    confidences, margins = packed[:, 1], packed[:, 2]
    bad = (tokens < 0) | (tokens >= vocab_size)
    for token in never:
        bad |= tokens == token
    known = np.full(len(tokens), block)
    if bad.any():
        known = np.where(bad.any(1), bad.argmax(1), block)
        confidences = np.where(np.arange(block) < known[:, None], confidences, 0.0)
        tokens = np.where(bad, 0, tokens)
    return tokens, confidences, margins, known


def _trimmed(
    lengths: Any, confidences: Any, known: Any, counts: Any, others: int, margins: Any
) -> Any:
    """Drafts of each row that are verified."""
    trim = getattr(lengths, "trim", None)
    if trim is None:
        return counts
    if getattr(lengths, "takes_arrays", False):
        chosen = trim(confidences, counts, others, margins=margins)
    else:
        ends = known.tolist()
        values = [tuple(row[:end]) for row, end in zip(confidences.tolist(), ends, strict=True)]
        gaps = list(map(tuple, margins.tolist()))
        chosen = trim(values, counts.tolist(), others, margins=gaps)
    if chosen is None or len(chosen) != len(counts):
        raise wrong_count(lengths, "trim", "lengths", chosen, len(counts))
    if not isinstance(chosen, np.ndarray):
        chosen = [int(length) for length in chosen]
    return np.clip(np.asarray(chosen, np.int64), 0, counts)


def run_verify_lane(lane: VerifyLane, graphs: DecodeGraphs, lengths: Any = None) -> GraphRun | None:
    """Runs the rows from a recording if they fit one.

    Args:
        lane: The rows; what they run is known.
        graphs: The recordings; they feed the drafter.
        lengths: May have `took(seconds)`, see `LiveLengths`.

    Returns:
        What was run, one row of logits a token from the first on; None when nothing has changed.
    """
    drafts = None if lane.pending is None else lane.pending.tokens
    run = graphs.try_run_tokens(lane.columns(), lane.lay_out(), lane.input_ids, drafts)
    if lane.known_s and hasattr(lengths, "took"):
        lengths.took(time.perf_counter() - lane.known_s)
    return run


def judge_lane(step: RunningStep, lane: VerifyLane) -> None:
    """Compares drafts with choices.

    Args:
        step: The step; its tokens are on the host.
        lane: Its rows, which learn what stays.
    """
    layout = lane.layout or lane.lay_out()
    count, width = lane.drafts.shape
    tokens = step.host_tokens
    chosen = np.zeros(0, np.int64) if tokens is None else tokens.numpy()
    low, high = int(chosen.min()), int(chosen.max())
    step.has_failed = low < 0 or high >= step.vocab_size
    if layout.total == count * (width + 1):
        table = chosen.reshape(count, width + 1)
    else:
        table = np.full((count, width + 1), -1, np.int64)
        table[layout.owner, layout.step] = chosen
    same = (table[:, :-1] == lane.drafts) & (np.arange(width) < lane.lengths[:, None])
    accepted = np.logical_and.accumulate(same, 1).sum(1) if width else np.zeros(count, np.int64)
    lane.used = used = accepted + 1
    lane.tokens = table[np.arange(width + 1) < used[:, None]]
    lane.last = np.maximum(table[np.arange(count), accepted], 0)  # a failed row's is negative


def keep_tokens(lane: VerifyLane, states: SlotStates, take_back: TakeBack) -> Ints | None:
    """Notes the tokens that stay, and takes the cache rows of others back.

    Args:
        lane: The rows; they were judged.
        states: States of the slots.
        take_back: Shortens slots to so many tokens: called with the slots and the numbers.

    Returns:
        Rows whose slot goes on behind their tokens, shape [rows], int64, or None for all.
    """
    company, used = lane.company, lane.used
    flat, stops = np.maximum(lane.tokens, 0).tolist(), used.cumsum().tolist()
    firsts = (lane.starts + 1).tolist()
    at = 0
    rows: Ints | None
    if company.version == states.version:
        for ids, first, stop in zip(company.token_ids, firsts, stops, strict=True):
            if len(ids) > first:
                del ids[first:]
            ids += flat[at:stop]
            at = stop
        rows = None
        take_back(company.slots, (lane.starts + used).tolist())
    else:
        staying = []
        for row, (ids, first, stop) in enumerate(
            zip(company.token_ids, firsts, stops, strict=True)
        ):
            state = company.states[row]
            if states.is_latest(state):  # else its request began again without these tokens
                del ids[first:]
                ids += flat[at:stop]
                if states.holds(state):
                    staying.append(row)
            at = stop
        rows = np.array(staying, np.int64)
        slots = [company.slots[row] for row in staying]
        take_back(slots, (lane.starts + used)[rows].tolist())
    return rows


def wants_lessons(lengths: Any) -> bool:
    """Whether a policy wants to know how the drafts fare whose lengths it chose last.

    Args:
        lengths: May have `learn(confidences, verified, accepted, margins=)`.
    """
    return hasattr(lengths, "learn") and bool(getattr(lengths, "wants_outcomes", True))


def teach_of_lane(lane: VerifyLane, lengths: Any) -> None:
    """As `teach_lengths`, for all rows at once; once, when the next step is on its way.

    Args:
        lane: The rows; they were judged.
        lengths: The policy that chose their lengths.
    """
    is_taught, lane.is_taught = lane.is_taught, False
    learn = getattr(lengths, "learn", None)
    if learn is None or not is_taught:
        return
    at: Any = np.flatnonzero((lane.lengths > 0) & (lane.known > 0))
    if not len(at):
        return
    verified, accepted = lane.lengths[at], lane.used[at] - 1
    confidences, margins, known = lane.confidences[at], lane.margins[at], lane.known[at]
    if getattr(lengths, "takes_arrays", False) and int(known.min()) == confidences.shape[1]:
        learn(confidences, verified, accepted, margins=margins)
        return
    ends = known.tolist()
    values = tuple([tuple(row[:end]) for row, end in zip(confidences.tolist(), ends, strict=True)])
    gaps = tuple(map(tuple, margins.tolist()))
    learn(values, tuple(verified.tolist()), tuple(accepted.tolist()), margins=gaps)


def collect_lane(step: RunningStep, lane: VerifyLane) -> RowResults:
    """As `collect_rows`, of rows that were judged.

    Args:
        step: The step.
        lane: Its rows.

    Returns:
        One result a row of the plan.
    """
    layout = lane.layout or lane.lay_out()
    entries: Any = step.sampled.logprobs if step.sampled is not None else ()
    failures = row_errors(step)
    logprobs: dict[int, Any] = {}
    errors: dict[int, Exception] = {}
    if entries or failures:
        used = lane.used.tolist()
        for row, first in enumerate(layout.offsets.tolist()):
            end = first + used[row]
            if entries and entries[first] is not None:
                logprobs[row] = tuple(entries[first:end])
            error = next(filter(None, failures[first:end]), None) if failures else None
            if error is not None:
                errors[row] = error
    return RowResults(
        step.plan.rows,
        lane.tokens,
        num_token_ids=lane.used,
        num_drafts=lane.lengths,
        num_accepted=lane.used - 1,
        logprobs=logprobs,
        draft_confidences=BlockConfidences(lane.confidences, lane.known),
        errors=errors,
    )
