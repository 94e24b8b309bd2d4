"""A running step to the model's batch, and back to results."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer.core.errors import InvariantBroken, RequestError, ShapeError
from deepinfer.core.plan import RowResults, RowRole
from deepinfer.core.protocols import DraftView
from deepinfer.core.types import TokenLogprob
from deepinfer.engine.decode_lane import DecodeLane
from deepinfer.engine.future_tokens import FutureTokens
from deepinfer.engine.parts import EngineDrafter
from deepinfer.engine.step_state import RunningStep
from deepinfer.models.deepseek_v41.batch import ForwardBatch, Segment, to_device
from deepinfer.sampling import Sampled as CheckedSampled
from deepinfer.sampling import prompt_logprobs

__all__ = [
    "NumLegal",
    "build_batch",
    "check_ids",
    "collect_rows",
    "kept_places",
    "lane_segments",
    "num_accepted",
    "prompt_entries",
    "propose_drafts",
    "put_future",
    "row_errors",
    "wrong_count",
]

_NO_OPINION = 0.5  # a logit of 0
_PROMPT_LOGITS_ROWS = 512

NumLegal = Callable[[str, Sequence[int], Sequence[int]], int]
"""Called with the id of a request, its output and its drafts; returns how many of these its grammar lets through."""


def build_batch(step: RunningStep, future: FutureTokens, device: torch.device) -> ForwardBatch:
    """What the model runs; ids that the host does not know are filled in on the device.

    Args:
        step: The step; the offsets of its rows are set.
        future: Tokens sampled by the step before.
        device: Where the ids are sent.

    Returns:
        The batch.

    Raises:
        InvariantBroken: A row brings too few or too many ids, or a token is missing.
    """
    ids: list[int] = []
    segments: list[Segment] = []
    places: list[int] = []
    slots: list[int] = []
    lane = step.lane
    if lane is not None:
        ids += lane.ids.tolist()
        segments += lane_segments(lane)
        if lane.is_future is not None:
            places = np.flatnonzero(lane.is_future).tolist()
            slots = [lane.company.slots[at] for at in places]
    for running in step.rows:
        row = running.row
        running.offset = len(ids)
        ids += running.known
        if len(running.known) + len(running.draft) < running.num_tokens:
            places.append(len(ids))
            slots.append(row.slot)
            ids.append(0)
        ids += running.draft
        segments.append(
            Segment(
                row.slot,
                running.start,
                running.num_tokens,
                row.window_start,
                row.pool_start,
                row.full_start,
            )
        )
        if len(ids) != running.offset + running.num_tokens:
            raise InvariantBroken(
                f"{row} brings {len(running.known)} ids for {running.num_tokens} tokens."
            )
    host_ids = np.array(ids, dtype=np.int64)
    tensor = to_device(host_ids, device)
    if places:
        tokens = future.take(slots)
        tensor[to_device(np.array(places), device)] = (
            tokens  # on a CPU this fills in `host_ids` too
        )
    is_known = device.type == "cpu" or not places
    return ForwardBatch(tensor, tuple(segments), None, host_ids if is_known else None)


def lane_segments(lane: DecodeLane) -> list[Segment]:
    """The rows of a lane as the model takes them.

    Args:
        lane: The lane.
    """
    starts = (lane.window_starts, lane.pool_starts, lane.full_starts)
    columns = [column.tolist() for column in (lane.starts, *starts)]
    rows = zip(lane.company.slots, *columns, strict=True)
    return [Segment(slot, at, 1, window, pool, full) for slot, at, window, pool, full in rows]


def propose_drafts(
    step: RunningStep,
    drafter: EngineDrafter,
    vocab_size: int,
    never: Set[int],
    num_legal: NumLegal | None = None,
    lengths: Any = None,
) -> None:
    """Asks for drafts of the rows that are to be verified.

    Args:
        step: The step; its rows get as many drafts as the plan wants, up to the first that could not be chosen, and the
            confidences of the whole block. Where there is a policy and the drafter gives none they are 0.5, from which a
            policy that learns finds the share that is accepted at each place.
        drafter: Proposes.
        vocab_size: Ids are below it.
        never: Ids that are never chosen.
        num_legal: Called with the id of a request, its output and its drafts; tells how many of these can be chosen.
        lengths: May have `trim(confidences, counts, other_rows, margins=)`, which tells how many drafts of each row are
            verified.
    """
    wanted = [r for r in step.rows if r.row.role is RowRole.VERIFY and r.row.num_drafts]
    is_ready = getattr(drafter, "is_ready", None)
    if is_ready is not None:
        wanted = [r for r in wanted if is_ready(r.row.slot, r.start)]
    if not wanted:
        return
    params = [step.requests[r.row.rid].params for r in wanted]
    drawn = any(not p.is_greedy for p in params)
    view = DraftView(
        rids=tuple(r.row.rid for r in wanted),
        slots=tuple(r.row.slot for r in wanted),
        anchor_ids=tuple(r.state.token_ids[-1] for r in wanted),
        positions=tuple(r.start for r in wanted),
        token_ids=tuple(r.state.token_ids for r in wanted),
        temperatures=tuple(p.temperature for p in params) if drawn else (),
        seeds=tuple(p.seed or 0 for p in params) if drawn else (),
    )
    proposed = drafter.propose(view, drafter.draft_length)
    blocks = getattr(proposed, "token_ids", None)
    if blocks is None or len(blocks) != len(wanted):
        raise wrong_count(drafter, "propose", "blocks", blocks, len(wanted))
    confidences = proposed.confidences
    if not len(confidences):
        most = 0 if lengths is None else drafter.draft_length
        confidences = tuple([(_NO_OPINION,) * min(most, len(tokens)) for tokens in blocks])
    if len(confidences) != len(wanted):
        raise wrong_count(drafter, "propose", "rows of confidences", confidences, len(wanted))
    for running, gaps in zip(wanted, getattr(proposed, "margins", ()), strict=False):
        running.margins = gaps
    for running, tokens, known in zip(wanted, blocks, confidences, strict=True):
        bad = (k for k, t in enumerate(tokens) if not 0 <= t < vocab_size or t in never)
        end = next(bad, len(tokens))
        draft = tuple(map(int, tokens[: min(end, running.row.num_drafts)]))
        request = step.requests[running.row.rid]
        if draft and num_legal is not None and request.grammar is not None:
            output = running.state.token_ids[request.num_prompt_tokens :]
            draft = draft[: num_legal(request.rid, output, draft)]
        running.draft = draft
        running.confidences = tuple(map(float, known[:end]))
    if hasattr(lengths, "trim"):
        decoding = sum(r.row.role in (RowRole.DECODE, RowRole.VERIFY) for r in step.rows)
        chosen = lengths.trim(
            [r.confidences for r in wanted],
            [len(r.draft) for r in wanted],
            decoding - len(wanted),
            margins=[r.margins for r in wanted],
        )
        if chosen is None or len(chosen) != len(wanted):
            raise wrong_count(lengths, "trim", "lengths", chosen, len(wanted))
        for running, length in zip(wanted, chosen, strict=True):
            running.draft = running.draft[: max(0, int(length))]
    for running in wanted:
        running.num_tokens += len(running.draft)


def wrong_count(part: Any, method: str, what: str, found: Any, rows: int) -> ShapeError:
    """The error of a part that gave something for another number of rows.

    Args:
        part: The part.
        method: Its method.
        what: What it gave.
        found: The values, or None.
        rows: How many it should have given.
    """
    count = "none" if found is None else str(len(found))
    return ShapeError(
        f"{method} of {type(part).__name__} gave {count} {what} for {rows} rows; it must give one a row.",
        argument=what,
        expected=(rows,),
    )


def put_future(step: RunningStep, future: FutureTokens, token_ids: Tensor) -> None:
    """Leaves sampled tokens on the device for the next step.

    Args:
        step: The step that they were sampled in.
        future: Takes them.
        token_ids: One a row of logits, shape [logits rows], int64.
    """
    if step.lane is not None and not step.rows:
        future.put(step.lane.company.device_slots, token_ids)
        return
    slots = [] if step.lane is None else list(step.lane.company.slots)
    places = list(range(len(slots)))
    at = len(slots)
    for running in step.rows:
        count = running.num_logits
        if count == 1:  # the last token of a row with drafts is known once they were compared
            slots.append(running.row.slot)
            places.append(at)
        at += count
    if slots:
        if len(places) < len(token_ids):
            token_ids = token_ids[to_device(np.array(places), token_ids.device)]
        future.put(slots, token_ids)


def check_ids(batch: ForwardBatch, vocab_size: int, step: int) -> None:
    """Refuses ids outside the vocabulary, such as a placeholder that was never filled in.

    Args:
        batch: The batch.
        vocab_size: Ids are below it.
        step: Id of the step, for the message.

    Raises:
        InvariantBroken: There is such an id.
    """
    ids = batch.input_ids if batch.host_ids is None else batch.host_ids
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise InvariantBroken(
            f"step {step} would run the ids {low} to {high}; the vocabulary has {vocab_size}."
        )


def kept_places(step: RunningStep, places: list[int]) -> list[int]:
    """Where tokens of the batch are in what the model returned.

    Args:
        step: The step.
        places: Places in the batch, ascending.

    Returns:
        Places in the output.

    Raises:
        InvariantBroken: One of the tokens did not run every layer.
    """
    if step.kept is None or not places:
        return places
    at = np.searchsorted(step.kept, places)
    if int(at[-1]) >= len(step.kept) or not np.array_equal(step.kept[at], places):
        raise InvariantBroken(f"step {step.step} needs tokens that did not run every layer.")
    return list(at.tolist())


def prompt_entries(
    step: RunningStep, hidden: Tensor, compute_logits: Callable[[Tensor], Tensor]
) -> dict[int, tuple[TokenLogprob, ...]]:
    """Entries of the prompt tokens behind each token of the rows that are asked for them.

    Args:
        step: The step.
        hidden: What the model returned, shape [kept tokens, hidden].
        compute_logits: Makes logits of rows of it.

    Returns:
        The entries by row of the plan.
    """
    out: dict[int, tuple[TokenLogprob, ...]] = {}
    for running in step.rows:
        request = step.requests[running.row.rid]
        num_top = request.params.prompt_logprobs
        last = min(running.end, request.num_prompt_tokens - 1)
        if num_top is None or running.start >= last or running.row.role is RowRole.REPLAY:
            continue
        entries: list[TokenLogprob] = []
        for start in range(running.start, last, _PROMPT_LOGITS_ROWS):
            stop = min(start + _PROMPT_LOGITS_ROWS, last)
            first = running.offset + start - running.start
            places = kept_places(step, list(range(first, first + stop - start)))
            logits = compute_logits(hidden[places[0] : places[-1] + 1])
            following = request.prompt_token_ids[start + 1 : stop + 1]
            entries += prompt_logprobs(logits, following, num_top)
        out[running.index] = tuple(entries)
    return out


def collect_rows(step: RunningStep) -> RowResults:
    """The results of a step whose tokens are on the host and were compared with the drafts.

    Args:
        step: The step.

    Returns:
        One result a row of the plan; a row that was not run has no tokens.
    """
    plan_rows, lane, in_lane = step.plan.rows, step.lane, step.lane_count
    count = len(plan_rows)
    entries = step.sampled.logprobs if step.sampled is not None else ()
    logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
    errors: dict[int, Exception] = {}
    tokens = [] if lane is None else list(lane.tokens)
    failures = row_errors(step)
    for at in range(in_lane) if entries or failures else ():
        if entries and (entry := entries[at]) is not None:
            logprobs[at] = (entry,)
        if failures and (error := failures[at]) is not None:
            errors[at] = error
    if in_lane == count:
        return RowResults.of_decoded(plan_rows, np.array(tokens), logprobs, errors)
    num_tokens = [1] * in_lane + [0] * (count - in_lane)
    num_drafts, num_accepted = [0] * count, [0] * count
    confidences: dict[int, tuple[float, ...]] = {}
    at = in_lane
    for running, chosen in zip(step.rows, step.tokens, strict=True):
        used, index = len(chosen), running.index
        tokens += chosen
        num_tokens[index] = used
        if running.draft:
            num_drafts[index], num_accepted[index] = len(running.draft), used - 1
        if running.confidences:
            confidences[index] = running.confidences
        if entries and used and entries[at] is not None:
            logprobs[index] = tuple(entries[at : at + used])  # type: ignore[arg-type]
        if failures:
            error = next(filter(None, failures[at : at + used]), None)
            if error is not None:
                errors[index] = error
        at += running.num_logits
    return RowResults(
        plan_rows,
        tokens,
        num_token_ids=num_tokens,
        num_drafts=num_drafts,
        num_accepted=num_accepted,
        logprobs=logprobs,
        prompt_logprobs=step.prompt_logprobs,
        draft_confidences=confidences,
        errors=errors,
    )


def row_errors(step: RunningStep) -> Sequence[Exception | None]:
    """One entry a row of logits, or none when all are good, which must not wait for the device."""
    sampled = step.sampled
    if isinstance(sampled, CheckedSampled) and not sampled.row_errors and not step.has_failed:
        return ()
    errors: Sequence[Exception | None] = getattr(sampled, "errors", ())
    if not step.has_failed or step.host_tokens is None:
        return errors
    chosen = step.host_tokens.tolist()
    known = list(errors) or [None] * len(chosen)
    for at, token in enumerate(chosen):
        if known[at] is None and not 0 <= token < step.vocab_size:
            known[at] = RequestError(
                f"the sampler chose the id {token} and reported no error; ids go from 0 to {step.vocab_size - 1}."
            )
    return known


def num_accepted(draft: Sequence[int], tokens: Sequence[int]) -> int:
    """How many drafts are kept.

    Args:
        draft: Drafts, in order.
        tokens: The choice before each of them, and the one behind the last.

    Returns:
        Length of the longest beginning of `draft` that the choices confirm.
    """
    count = 0
    for proposed, chosen in zip(draft, tokens, strict=False):
        if proposed != chosen:
            break
        count += 1
    return count
