"""What a result changed, one value a request, made when somebody looks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np

from deepinfer.core.plan import ROLES, PlanRow, PlanRows, RowResult, RowResults, RowRole
from deepinfer.core.types import FinishReason, Request, TokenLogprob
from deepinfer.scheduling import ledger

__all__ = ["Progress", "ProgressBlocks", "ProgressList"]

_DECODE = ROLES.index(RowRole.DECODE)


@dataclass(slots=True, kw_only=True, eq=False)
class Progress:
    """What one result changed for one request.

    Attributes:
        request: The request.
        token_ids: New tokens, cut after the one that ended the request.
        finish_reason: Why it ended, or None while it runs.
        stop_token_id: The token that ended it, or None.
        error: Why it failed, or None.
        sequence: The scheduler's books of the request, to be read only.
        plan_rows: The rows of the plan.
        results: The results of these rows, with tokens after the end still in them.
        index: Which of the rows it was.
    """

    request: Request
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_token_id: int | None
    error: Exception | None
    sequence: ledger.Sequence
    plan_rows: PlanRows
    results: RowResults
    index: int

    @property
    def plan_row(self) -> PlanRow:
        """The row of the plan."""
        return self.plan_rows[self.index]

    @property
    def result(self) -> RowResult:
        """The row's result."""
        return self.results[self.index]

    @property
    def role(self) -> RowRole:
        """What the row did."""
        return ROLES[int(self.plan_rows.roles[self.index])]

    @property
    def num_drafts(self) -> int:
        """Drafts that were verified."""
        return int(self.results.num_drafts[self.index])

    @property
    def num_accepted(self) -> int:
        """Drafts that were accepted, those after the end included."""
        return int(self.results.num_accepted[self.index])

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """One entry a new token when asked for, else empty; those after the end included."""
        return self.results.logprobs.get(self.index, ())


class ProgressBlocks(NamedTuple):
    """What a step in which every row decoded or verified gave, one number an entry.

    Attributes:
        token_ids: New tokens of all rows behind one another.
        offsets: Where those of an entry begin.
        counts: How many an entry has; 0 for one that ends with them, or has failed.
        drafts: Drafts verified.
        accepted: Drafts accepted.
        proposed: Confidences of the block that the drafts are the beginning of.
    """

    token_ids: list[int]
    offsets: list[int]
    counts: list[int]
    drafts: list[int]
    accepted: list[int]
    proposed: list[int]


class ProgressList(Sequence[Progress]):
    """What one result changed, one `Progress` a row that still counts, in the order of the plan.

    The values are made when they are asked for, so that a step costs nothing for those that nobody looks at.

    Args:
        plan_rows: The rows of the plan.
        results: Their results.
        sequences: The request of each entry.
        rows: Row number of each entry, or None when there is one entry a row.
        ends: By entry: how many tokens count, why it ended, the stop token, and the error.
    """

    __slots__ = ("_ends", "_plan_rows", "_results", "_rows", "_sequences", "_values")

    def __init__(
        self,
        plan_rows: PlanRows,
        results: RowResults,
        sequences: Sequence[ledger.Sequence],
        rows: Sequence[int] | None,
        ends: dict[int, tuple[int, FinishReason | None, int | None, Exception | None]],
    ) -> None:
        self._plan_rows = plan_rows
        self._results = results
        self._sequences = sequences
        self._rows = rows
        self._ends = ends
        self._values: list[Progress] | None = None

    @property
    def sequences(self) -> Sequence[ledger.Sequence]:
        """The request of each entry."""
        return self._sequences

    @property
    def num_tokens(self) -> int:
        """New tokens of all entries, those after an end left out."""
        counts = self._results.num_token_ids
        total = int(counts.sum() if self._rows is None else counts[self._rows].sum())
        for entry, (count, *_) in self._ends.items():
            if count is not None:
                total += count - int(counts[entry if self._rows is None else self._rows[entry]])
        return total

    def tokens(self) -> list[int]:
        """The token of each entry that decoded one and does not end with it; -1 for every other entry."""
        results, counts = self._results, self._results.num_token_ids
        at: Any = slice(None) if self._rows is None else np.array(self._rows, np.int64)
        is_one = (counts == 1) & (self._plan_rows.roles == _DECODE)
        if is_one.all():
            found = results.token_ids
        else:
            found = np.full(len(is_one), -1, np.int64)
            found[is_one] = results.token_ids[results.token_offsets[is_one]]
        tokens: list[int] = found[at].tolist()
        for entry in self._ends:
            tokens[entry] = -1
        return tokens

    def blocks(self) -> ProgressBlocks | None:
        """The tokens of each entry, where a row verified drafts; None where none did, or a row of a prompt is among them."""
        rows, results = self._plan_rows, self._results
        roles = rows.roles
        if int(roles.max(initial=0)) <= _DECODE or int(roles.min()) < _DECODE:
            return None
        at: Any = slice(None) if self._rows is None else np.array(self._rows, np.int64)
        counts = results.num_token_ids[at].tolist()
        for entry in self._ends:
            counts[entry] = 0
        proposed = getattr(results.draft_confidences, "lengths", None)
        if proposed is None:
            known = results.draft_confidences
            proposed = np.array([len(known.get(row, ())) for row in range(len(rows))], np.int64)
        return ProgressBlocks(
            results.token_ids.tolist(), results.token_offsets[at].tolist(), counts,
            results.num_drafts[at].tolist(), results.num_accepted[at].tolist(), proposed[at].tolist(),
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self._sequences)

    @overload
    def __getitem__(self, index: int) -> Progress: ...
    @overload
    def __getitem__(self, index: slice) -> list[Progress]: ...
    def __getitem__(self, index: Any) -> Any:
        """One entry, or a list of entries for a slice."""
        if self._values is None and isinstance(index, int):
            return self._one(range(len(self))[index])
        return self._all()[index]

    def __iter__(self) -> Iterator[Progress]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, list):
            return self._all() == other
        return self is other

    __hash__ = None  # type: ignore[assignment]

    def _one(self, entry: int) -> Progress:
        row = entry if self._rows is None else self._rows[entry]
        count, reason, stop, error = self._ends.get(entry, (None, None, None, None))
        if count is None:
            count = int(self._results.num_token_ids[row])
        first = int(self._results.num_token_ids[:row].sum())
        sequence = self._sequences[entry]
        return Progress(
            request=sequence.request,
            token_ids=tuple(self._results.token_ids[first : first + count].tolist()),
            finish_reason=reason,
            stop_token_id=stop,
            error=error,
            sequence=sequence,
            plan_rows=self._plan_rows,
            results=self._results,
            index=row,
        )

    def _all(self) -> list[Progress]:
        if self._values is not None:
            return self._values
        plan_rows, results, ends = self._plan_rows, self._results, self._ends
        rows = range(len(self._sequences)) if self._rows is None else self._rows
        tokens = results.token_ids.tolist()
        counts = results.num_token_ids.tolist()
        offsets = results.token_offsets.tolist()
        nothing = (None, None, None, None)
        values = []
        for entry, (row, sequence) in enumerate(zip(rows, self._sequences, strict=True)):
            count, reason, stop, error = ends.get(entry, nothing)
            if count is None:
                count = counts[row]
            at = offsets[row]
            values.append(
                Progress(
                    request=sequence.request,
                    token_ids=tuple(tokens[at : at + count]),
                    finish_reason=reason,
                    stop_token_id=stop,
                    error=error,
                    sequence=sequence,
                    plan_rows=plan_rows,
                    results=results,
                    index=row,
                )
            )
        self._values = values
        return values

    def __repr__(self) -> str:
        return f"ProgressList({len(self)} entries)"
