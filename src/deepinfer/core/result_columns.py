"""The results of a step's rows as columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepinfer.core.errors import ShapeError
from deepinfer.core.row_columns import FIRST_SAMPLING, FrozenRows, PlanRows, as_column
from deepinfer.core.rows import RowResult
from deepinfer.core.types import TokenLogprob

__all__ = ["RowResults"]

Ints = NDArray[np.int64]

_RESULT_INTS = (
    "slots",
    "slot_generations",
    "epochs",
    "num_token_ids",
    "num_drafts",
    "num_accepted",
)
_RESULT_MAPS = (
    "logprobs",
    "prompt_logprobs",
    "draft_token_ids",
    "draft_confidences",
    "errors",
)


class RowResults(FrozenRows, Sequence[RowResult]):
    """The results of a step's rows, a sequence of `RowResult` that is stored as one array a field.

    What few rows have is kept by row number: a row that a mapping lacks has none. It is frozen, compares equal to a
    tuple of the same results, and pickles.

    Args:
        plan_rows: The rows of the plan, whose identities the results take over.
        token_ids: New tokens of all rows behind one another.
        num_token_ids: New tokens of each row; None for one a row that samples and none for others.
        num_drafts: Drafts verified, one number a row; None for those of the plan.
        num_accepted: Drafts accepted, one number a row; None for none.
        logprobs: Entries of the new tokens, by row number.
        prompt_logprobs: Entries of prompt tokens, by row number.
        draft_token_ids: Drafts for the next step, by row number.
        draft_confidences: Their confidences, by row number.
        errors: Why rows failed, by row number.

    Attributes:
        rids: Request ids, one a row.
        slots: Slots, shape [rows], int64.
        slot_generations: Slot generations, shape [rows], int64.
        epochs: Epochs, shape [rows], int64.
        num_token_ids: New tokens of each row, shape [rows], int64.
        token_ids: New tokens, accepted drafts first, of all rows behind one another, shape [sum], int64.
        num_drafts: Drafts verified, shape [rows], int64.
        num_accepted: Drafts accepted, shape [rows], int64.
        logprobs: As given.
        prompt_logprobs: As given.
        draft_token_ids: As given.
        draft_confidences: As given.
        errors: As given.

    Raises:
        ShapeError: The columns differ in length, or `token_ids` does not hold `num_token_ids` ids.

    Examples:
        >>> from deepinfer.core.rows import RowRole
        >>> rows = PlanRows(("a", "b"), [0, 1], [8, 0], [1, 4], [RowRole.DECODE, RowRole.PREFILL])
        >>> results = RowResults(rows, [7])
        >>> results[0].token_ids, results[1].token_ids
        ((7,), ())
    """

    __slots__ = (*_RESULT_INTS, *_RESULT_MAPS, "token_ids")
    slots: Ints
    slot_generations: Ints
    epochs: Ints
    num_token_ids: Ints
    token_ids: Ints
    num_drafts: Ints
    num_accepted: Ints
    logprobs: Mapping[int, tuple[TokenLogprob, ...]]
    prompt_logprobs: Mapping[int, tuple[TokenLogprob, ...]]
    draft_token_ids: Mapping[int, tuple[int, ...]]
    draft_confidences: Mapping[int, tuple[float, ...]]
    errors: Mapping[int, Exception]

    def __init__(
        self,
        plan_rows: PlanRows,
        token_ids: ArrayLike,
        *,
        num_token_ids: ArrayLike | None = None,
        num_drafts: ArrayLike | None = None,
        num_accepted: ArrayLike | None = None,
        logprobs: Mapping[int, tuple[TokenLogprob, ...]] | None = None,
        prompt_logprobs: Mapping[int, tuple[TokenLogprob, ...]] | None = None,
        draft_token_ids: Mapping[int, tuple[int, ...]] | None = None,
        draft_confidences: Mapping[int, tuple[float, ...]] | None = None,
        errors: Mapping[int, Exception] | None = None,
    ) -> None:
        count = len(plan_rows)
        if num_token_ids is None:
            num_token_ids = (plan_rows.roles >= FIRST_SAMPLING).astype(np.int64)
        if num_accepted is None:
            num_accepted = np.zeros(count, np.int64)
        columns = {
            "num_token_ids": as_column(num_token_ids),
            "num_drafts": plan_rows.num_drafts if num_drafts is None else as_column(num_drafts),
            "num_accepted": as_column(num_accepted),
        }
        for name, array in columns.items():
            if array.shape != (count,):
                raise ShapeError(
                    f"the column {name} has shape {list(array.shape)}, and there are {count} rows."
                )
        tokens = as_column(token_ids)
        total = int(columns["num_token_ids"].sum())
        if tokens.shape != (total,):
            raise ShapeError(
                f"token_ids has shape {list(tokens.shape)}, and num_token_ids adds up to {total}."
            )
        put = object.__setattr__
        put(self, "rids", plan_rows.rids)
        put(self, "_values", None)
        for name in ("slots", "slot_generations", "epochs"):
            put(self, name, getattr(plan_rows, name))
        for name, array in columns.items():
            put(self, name, array)
        put(self, "token_ids", tokens)
        put(self, "logprobs", logprobs or {})
        put(self, "prompt_logprobs", prompt_logprobs or {})
        put(self, "draft_token_ids", draft_token_ids or {})
        put(self, "draft_confidences", draft_confidences or {})
        put(self, "errors", errors or {})

    @classmethod
    def of(cls, results: Iterable[RowResult]) -> RowResults:
        """Takes results apart.

        Args:
            results: One a row of the plan, in the same order.

        Returns:
            The same results as columns.
        """
        results = tuple(results)
        ints = {
            "slots": [result.slot for result in results],
            "slot_generations": [result.slot_generation for result in results],
            "epochs": [result.epoch for result in results],
            "num_token_ids": [len(result.token_ids) for result in results],
            "num_drafts": [result.num_drafts for result in results],
            "num_accepted": [result.num_accepted for result in results],
            "token_ids": [token for result in results for token in result.token_ids],
        }
        maps = {
            name: {
                index: value
                for index, result in enumerate(results)
                if (value := getattr(result, name if name != "errors" else "error"))
                not in ((), None)
            }
            for name in _RESULT_MAPS
        }
        out = object.__new__(cls)
        put = object.__setattr__
        put(out, "rids", tuple(result.rid for result in results))
        put(out, "_values", results)
        for name, values in ints.items():
            put(out, name, as_column(values))
        for name, entries in maps.items():
            put(out, name, entries)
        return out

    @classmethod
    def of_decoded(
        cls,
        plan_rows: PlanRows,
        token_ids: Ints,
        logprobs: Mapping[int, tuple[TokenLogprob, ...]],
        errors: Mapping[int, Exception],
    ) -> RowResults:
        """The results of rows without drafts that got one token each, unchecked and without any copy.

        Args:
            plan_rows: The rows of the plan, each of one token.
            token_ids: Their new tokens, shape [rows], int64; nobody may change them afterwards.
            logprobs: As for the class.
            errors: As for the class.

        Returns:
            The results.
        """
        out = object.__new__(cls)
        put = object.__setattr__
        token_ids.setflags(write=False)
        nothing: Mapping[int, Any] = {}
        put(out, "rids", plan_rows.rids)
        put(out, "_values", None)
        put(out, "slots", plan_rows.slots)
        put(out, "slot_generations", plan_rows.slot_generations)
        put(out, "epochs", plan_rows.epochs)
        put(out, "num_token_ids", plan_rows.num_tokens)
        put(out, "num_drafts", plan_rows.num_drafts)
        put(out, "num_accepted", plan_rows.num_drafts)
        put(out, "token_ids", token_ids)
        put(out, "logprobs", logprobs)
        put(out, "errors", errors)
        for name in ("prompt_logprobs", "draft_token_ids", "draft_confidences"):
            put(out, name, nothing)
        return out

    def with_errors(self, errors: Mapping[int, Exception]) -> RowResults:
        """The same results with some rows failed.

        Args:
            errors: Why, by row number; they take the place of errors that the rows had.

        Returns:
            The new results.
        """
        out = _restore_row_results(self._state())
        object.__setattr__(out, "errors", {**self.errors, **errors})
        return out

    @property
    def token_offsets(self) -> Ints:
        """Where the new tokens of each row begin in `token_ids`, shape [rows], int64."""
        return np.cumsum(self.num_token_ids) - self.num_token_ids

    def _make(self) -> tuple[RowResult, ...]:
        columns = [getattr(self, name).tolist() for name in _RESULT_INTS]
        tokens = self.token_ids.tolist()
        results = []
        at = 0
        for index, (rid, slot, generation, epoch, count, drafts, accepted) in enumerate(
            zip(self.rids, *columns, strict=True)
        ):
            results.append(
                RowResult(
                    rid=rid,
                    slot=slot,
                    slot_generation=generation,
                    epoch=epoch,
                    token_ids=tuple(tokens[at : at + count]),
                    num_drafts=drafts,
                    num_accepted=accepted,
                    logprobs=self.logprobs.get(index, ()),
                    prompt_logprobs=self.prompt_logprobs.get(index, ()),
                    draft_token_ids=self.draft_token_ids.get(index, ()),
                    draft_confidences=self.draft_confidences.get(index, ()),
                    error=self.errors.get(index),
                )
            )
            at += count
        return tuple(results)

    def _state(self) -> tuple[Any, ...]:
        names = (*_RESULT_INTS, "token_ids", *_RESULT_MAPS)
        return (self.rids, *(getattr(self, name) for name in names))

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_row_results, (self._state(),)

    @overload
    def __getitem__(self, index: int) -> RowResult: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[RowResult, ...]: ...
    def __getitem__(self, index: Any) -> Any:
        """One result, or a tuple of results for a slice."""
        return self._all()[index]


def _restore_row_results(state: tuple[Any, ...]) -> RowResults:
    out = object.__new__(RowResults)
    put = object.__setattr__
    put(out, "rids", state[0])
    put(out, "_values", None)
    for name, value in zip((*_RESULT_INTS, "token_ids", *_RESULT_MAPS), state[1:], strict=True):
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
        put(out, name, value)
    return out
