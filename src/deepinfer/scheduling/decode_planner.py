"""Plans the rows that decode or verify, all of them in a few array operations."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.core.errors import ConfigError
from deepinfer.core.protocols import VerifyLengthPolicy
from deepinfer.scheduling.books import DECODE, VERIFY, Books
from deepinfer.scheduling.ledger import Sequence
from deepinfer.scheduling.plan_draft import PlanDraft
from deepinfer.scheduling.step_work import StepWork

__all__ = ["DecodePlanner"]

Ints = NDArray[np.int64]


class DecodePlanner:
    """Adds the decoding rows to a plan.

    Args:
        books: The requests.
        verify_lengths: How many drafts of each row are verified, or None for as many as there are.
        counts_work: Whether the work of the rows is added up.
    """

    def __init__(
        self, books: Books, verify_lengths: VerifyLengthPolicy | None, counts_work: bool
    ) -> None:
        self.books = books
        self.verify_lengths = verify_lengths
        self.counts_work = counts_work

    @property
    def verify_lengths(self) -> VerifyLengthPolicy | None:
        """How many drafts of each row are verified, or None for as many as there are."""
        return self._verify_lengths

    @verify_lengths.setter
    def verify_lengths(self, policy: VerifyLengthPolicy | None) -> None:
        """Asks another policy from now on."""
        self._verify_lengths = policy
        self._asks = getattr(policy, "drafts", None)
        self.books.notes_confidences = policy is not None and self._asks is None

    def add(self, draft: PlanDraft) -> list[tuple[int, int]]:
        """Adds the rows that decode.

        Args:
            draft: The plan in the making.

        Returns:
            Place among the running requests and next position of the others, whose prompts run.
        """
        books = self.books
        table, active = books.table, books.active
        slots = active.slots
        first, known = table.settled[slots], table.known[slots]
        flying = books.flying()
        if flying is None:
            decodes = (known - first == 1) & (first >= active.prompt)
            takes = decodes
        else:
            first = first + flying.tokens
            decodes = flying.samples | ((known - first == 1) & (first >= active.prompt))
            takes = decodes & ~(flying.samples & (known + 1 >= active.limit))
        prompts = []
        if np.count_nonzero(decodes) < len(slots):
            places = np.flatnonzero(~decodes)
            prompts = list(zip(places.tolist(), first[places].tolist(), strict=True))
        if draft.supply.preempted:
            gone = {sequence.rid for sequence in draft.supply.preempted}
            takes = takes & np.array([rid not in gone for rid in active.rids])
        count = int(np.count_nonzero(takes))
        chosen = None if count == len(slots) else np.flatnonzero(takes)
        if not count:
            return prompts
        if count > draft.budget:  # they take turns
            chosen = np.arange(count) if chosen is None else chosen
            turn = (books.next_step * draft.budget) % count
            chosen = np.sort(np.roll(chosen, -turn)[: draft.budget])
        num_drafts = self._draft_lengths(draft, chosen, first, known, flying)
        chosen, num_drafts = self._grant(draft, chosen, first, num_drafts)
        count = len(slots) if chosen is None else len(chosen)
        if not count:
            return prompts
        total = count if num_drafts is None else count + int(num_drafts.sum())
        draft.budget -= total
        open_drafts = None if flying is None else flying.drafts
        samples = None if flying is None else flying.samples
        if chosen is None:
            columns = dict(active.columns)
            draft.rids = active.rids
        else:
            columns = {name: array[chosen] for name, array in active.columns.items()}
            draft.rids = tuple([active.rids[place] for place in chosen.tolist()])
            first, slots = first[chosen], slots[chosen]
            open_drafts = None if open_drafts is None else open_drafts[chosen]
            samples = None if samples is None else samples[chosen]
        columns["first_positions"] = first
        if num_drafts is not None:
            columns["num_drafts"] = num_drafts
            columns["num_tokens"] = num_drafts + 1
            columns["roles"] = np.where(num_drafts > 0, VERIFY, DECODE).astype(np.uint8)
        if samples is None or open_drafts is None or not np.count_nonzero(samples):
            columns["token_ids"] = table.last_token[slots]
        else:
            columns["num_known"] = (~samples).astype(np.int64)
            columns["token_ids"] = table.last_token[slots[~samples]]
            if np.count_nonzero(open_drafts):
                columns["num_open"] = np.where(samples, open_drafts, 0)
            if active.is_host_bound is not None:
                columns["is_late"] = table.is_host_bound[slots] & samples
        draft.decode = columns
        if self.counts_work:
            draft.work = StepWork(
                tokens=total - count, decode_rows=count, decode_context=int(first.sum())
            )
        return prompts

    def _draft_lengths(
        self, draft: PlanDraft, chosen: Ints | None, first: Ints, known: Ints, flying: Any
    ) -> Ints | None:
        """Drafts of each decoding row, or None when no row gets any."""
        books = self.books
        active = books.active
        if active.may_draft is None:
            return None
        count = len(first) if chosen is None else len(chosen)
        if self._asks is not None and not self._asks(count):
            return None
        room = active.limit - known - 1
        if flying is not None:
            room = room - np.where(flying.samples, flying.drafts + 1, 0)
        want = np.clip(room, 0, books.limits.draft_length) * active.may_draft
        if chosen is not None:
            want = want[chosen]
        if self._verify_lengths is not None and self._asks is None:
            want = np.minimum(want, self._asked(chosen, want))
        left = draft.budget - len(want)
        before = np.cumsum(want) - want
        want = np.minimum(want, np.maximum(left - before, 0))
        return want if np.count_nonzero(want) else None

    def _asked(self, chosen: Ints | None, want: Ints) -> Ints:
        """What the policy of verify lengths says about each row whose drafts have confidences.

        One that decides when the drafts are there is only asked whether there are to be any.
        """
        assert self.verify_lengths is not None  # noqa: S101 - the caller looked
        active = self.books.active
        slots = active.slots if chosen is None else active.slots[chosen]
        known = self.books.table.confidences
        places = [at for at, slot in enumerate(slots.tolist()) if slot in known and want[at]]
        if places:
            given = [known[int(slots[at])][: int(want[at])] for at in places]
            want = want.copy()
            want[places] = _checked(
                self.verify_lengths, self.verify_lengths.choose(given, len(active.rids)), len(given)
            )
        return np.maximum(want, 0)

    def _grant(
        self, draft: PlanDraft, chosen: Ints | None, first: Ints, num_drafts: Ints | None
    ) -> tuple[Ints | None, Ints | None]:
        """Finds blocks for the decoding rows; returns the rows that stay, and their drafts."""
        books = self.books
        if not books.grows:
            return chosen, num_drafts
        active, cache = books.active, books.cache
        slots, starts = active.slots, first
        if chosen is not None:
            slots, starts = slots[chosen], starts[chosen]
        room = books.table.room[slots]
        ends = starts + 1 if num_drafts is None else starts + 1 + num_drafts
        growing = ends > room
        if not np.count_nonzero(growing):
            return chosen, num_drafts

        def needs(stride: int) -> list[tuple[Sequence, int, int]]:
            out = []
            for at in np.flatnonzero(growing).tolist():
                place = at if chosen is None else int(chosen[at])
                sequence = active.sequences[place]
                upto = min(-(-int(ends[at]) // stride) * stride, sequence.limit)
                out.append((sequence, cache.blocks_for(sequence.request, None, upto), upto))
            return out

        supply = draft.supply
        wanted = needs(books.stride)
        if (
            books.stride > books.block_size
            and sum(need for _, need, _ in wanted) > supply.free // 2
        ):
            wanted = needs(1)  # no more than must be
        if num_drafts is not None and sum(need for _, need, _ in wanted) > supply.free:
            num_drafts = np.minimum(num_drafts, np.maximum(room - starts - 1, 0))
            ends = starts + 1 + num_drafts
            growing = ends > room
            wanted = needs(1)
        supply.grant((sequence, need) for sequence, need, _ in wanted)
        if not supply.is_short:
            draft.growth += [(sequence, upto) for sequence, _, upto in wanted]
            return chosen, num_drafts
        lost = {sequence.rid for sequence in (*supply.preempted, *supply.starved)}
        draft.growth += [(seq, upto) for seq, _, upto in wanted if seq.rid not in lost]
        places = range(len(active.rids)) if chosen is None else chosen.tolist()
        stay = np.array([active.rids[place] not in lost for place in places], np.bool_)
        chosen = np.flatnonzero(stay) if chosen is None else chosen[stay]
        return chosen, None if num_drafts is None else num_drafts[stay]


def _checked(policy: VerifyLengthPolicy, chosen: Any, rows: int) -> Ints:
    """What a policy chose, or an error that names it."""
    try:
        lengths = np.asarray(chosen, float)
    except (TypeError, ValueError):
        lengths = np.full(0, np.nan)
    if lengths.shape != (rows,) or np.isnan(lengths).any():
        raise ConfigError(
            f"choose of {type(policy).__name__} gave {chosen!r} for {rows} rows; it must give one whole number a row.",
            field="verify_lengths",
            value=chosen,
            limit=f"{rows} whole numbers",
        )
    found: Ints = np.clip(lengths, 0, 2**31).astype(np.int64)
    return found
