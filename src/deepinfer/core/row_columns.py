"""The rows of a step as columns: one array a field, so that a step of a thousand rows costs a few array operations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepinfer.core.errors import ShapeError
from deepinfer.core.rows import PlanRow, RowRole

__all__ = ["ROLES", "PlanRows"]

Ints = NDArray[np.int64]

ROLES = tuple(RowRole)
"""Roles by their code in `PlanRows.roles`, from 0: REPLAY, PREFILL, LAST_PREFILL, DECODE, VERIFY."""

_CODES = {role: code for code, role in enumerate(ROLES)}
FIRST_SAMPLING = _CODES[RowRole.LAST_PREFILL]
"""Rows of this role code and of higher ones sample."""

_PLAN_INTS = (
    "slots",
    "slot_generations",
    "epochs",
    "first_positions",
    "num_tokens",
    "num_drafts",
    "num_open",
    "window_starts",
    "pool_starts",
    "full_starts",
)


def as_column(values: ArrayLike, dtype: Any = np.int64) -> NDArray[Any]:
    """A read-only array of its own, or the given one where that is read-only already.

    Args:
        values: The numbers.
        dtype: What the column holds.

    Returns:
        The column.
    """
    array = np.ascontiguousarray(values, dtype=dtype)
    if array.flags.writeable:
        if array is values:
            array = array.copy()
        array.flags.writeable = False
    return array


class FrozenRows:
    """What both kinds of rows share: lazy row values, and equality with tuples of them."""

    __slots__ = ("_values", "rids")
    rids: tuple[str, ...]
    _values: tuple[Any, ...] | None

    def _make(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def _state(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def _all(self) -> tuple[Any, ...]:
        if self._values is None:
            object.__setattr__(self, "_values", self._make())
        return self._values  # type: ignore[return-value]

    def __len__(self) -> int:
        return len(self.rids)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._all())

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def __contains__(self, value: object) -> bool:
        return value in self._all()

    def index(self, value: object, *bounds: int) -> int:
        """Place of the first row that equals `value`; ValueError when there is none."""
        return self._all().index(value, *bounds)

    def count(self, value: object) -> int:
        """How many rows equal `value`."""
        return self._all().count(value)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, type(self)):
            return all(map(_same, self._state(), other._state()))
        if isinstance(other, tuple | list):
            return self._all() == tuple(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self._all())

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen; {name} cannot be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen; {name} cannot be deleted")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self._all()))})"


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    return bool(one == other)


class PlanRows(FrozenRows, Sequence[PlanRow]):
    """The rows of a plan, a sequence of `PlanRow` that is stored as one array a field.

    Runners read the columns, since they are what a batch is made of; everyone else may index and iterate and gets
    `PlanRow` values, which are made when first asked for. The object is frozen and its arrays are read-only:
    `torch.tensor(rows.slots)` copies one to a tensor. It compares equal to a tuple of the same rows, and pickles.

    Args:
        rids: Request ids.
        slots: Slots.
        first_positions: Positions of the rows' first tokens.
        num_tokens: Tokens of the rows, drafts included, at least 1 each.
        roles: Roles, or their codes.
        columns: The other columns, by name; left out, they are 0. `num_known` is the number of leading input ids of
            each row that `token_ids` holds.

    Attributes:
        rids: Request ids, one a row.
        slots: Slots, shape [rows], int64.
        slot_generations: How often the slots were given out before, shape [rows], int64.
        epochs: How often the requests were preempted or reset, shape [rows], int64.
        first_positions: Position of the first token, shape [rows], int64; an upper bound where `num_open` is not 0.
        num_tokens: Tokens, drafts included, shape [rows], int64.
        num_drafts: Drafts at the end of the row, shape [rows], int64.
        roles: Index into `ROLES`, shape [rows], uint8.
        is_late: Whether sampling waits for the host, shape [rows], bool.
        num_open: Drafts still in flight, shape [rows], int64.
        window_starts: Lowest position of readable window rows, shape [rows], int64.
        pool_starts: Lowest position whose pool rows are written, shape [rows], int64.
        full_starts: Lowest position that runs every layer, shape [rows], int64.
        num_known: Leading input ids that the host knows, shape [rows], int64; the others (the token sampled last, and
            drafts) are on the device.
        token_ids: The known input ids of all rows behind one another, shape [sum of num_known], int64.

    Raises:
        ShapeError: The columns differ in length, or `token_ids` does not hold `num_known` ids.

    Examples:
        >>> rows = PlanRows(("a", "b"), [0, 3], [8, 2], [1, 1], [RowRole.DECODE] * 2, num_known=[1, 0], token_ids=[5])
        >>> rows.slots.tolist(), rows[0].token_ids, rows[1].token_ids
        ([0, 3], (5,), ())
        >>> rows == tuple(rows)
        True
    """

    __slots__ = (*_PLAN_INTS, "is_late", "num_known", "roles", "token_ids")
    slots: Ints
    slot_generations: Ints
    epochs: Ints
    first_positions: Ints
    num_tokens: Ints
    num_drafts: Ints
    num_open: Ints
    window_starts: Ints
    pool_starts: Ints
    full_starts: Ints
    roles: NDArray[np.uint8]
    is_late: NDArray[np.bool_]
    num_known: Ints
    token_ids: Ints

    def __init__(
        self,
        rids: Iterable[str],
        slots: ArrayLike,
        first_positions: ArrayLike,
        num_tokens: ArrayLike,
        roles: Iterable[RowRole | int] | NDArray[np.uint8],
        **columns: ArrayLike,
    ) -> None:
        rids = tuple(rids)
        zeros = np.zeros(len(rids), np.int64)
        given: dict[str, Any] = {
            "slots": slots,
            "first_positions": first_positions,
            "num_tokens": num_tokens,
            "is_late": columns.pop("is_late", zeros),
            "token_ids": columns.pop("token_ids", ()),
            "num_known": columns.pop("num_known", zeros),
        }
        for name in _PLAN_INTS:
            if name not in given:
                given[name] = columns.pop(name, zeros)
        if columns:
            raise TypeError(f"PlanRows has no column {min(columns)!r}")
        if not isinstance(roles, np.ndarray):
            roles = np.array([role_code(role) for role in roles], np.uint8)
        given["roles"] = roles
        dtypes = {"is_late": np.bool_, "roles": np.uint8}
        made = {name: as_column(value, dtypes.get(name, np.int64)) for name, value in given.items()}
        for name, array in made.items():
            if name != "token_ids" and array.shape != (len(rids),):
                raise ShapeError(
                    f"the column {name} has shape {list(array.shape)}, and there are {len(rids)} rows."
                )
        if made["token_ids"].shape != (int(made["num_known"].sum()),):
            raise ShapeError(
                f"token_ids has shape {list(made['token_ids'].shape)}, and num_known adds up to "
                f"{int(made['num_known'].sum())}."
            )
        self._fill(rids, made)

    def _fill(self, rids: tuple[str, ...], columns: Mapping[str, Any]) -> None:
        put = object.__setattr__
        put(self, "rids", rids)
        put(self, "_values", None)
        for name, array in columns.items():
            put(self, name, array)

    @classmethod
    def of(cls, rows: Iterable[PlanRow]) -> PlanRows:
        """Takes rows apart.

        Args:
            rows: The rows, in batch order.

        Returns:
            The same rows as columns.
        """
        rows = tuple(rows)
        out = cls(
            [row.rid for row in rows],
            [row.slot for row in rows],
            [row.first_position for row in rows],
            [row.num_tokens for row in rows],
            [row.role for row in rows],
            slot_generations=[row.slot_generation for row in rows],
            epochs=[row.epoch for row in rows],
            num_drafts=[row.num_drafts for row in rows],
            is_late=[row.is_late for row in rows],
            num_open=[row.num_open for row in rows],
            window_starts=[row.window_start for row in rows],
            pool_starts=[row.pool_start for row in rows],
            full_starts=[row.full_start for row in rows],
            num_known=[len(row.token_ids) for row in rows],
            token_ids=[token for row in rows for token in row.token_ids],
        )
        object.__setattr__(out, "_values", rows)
        return out

    @classmethod
    def trusted(cls, rids: tuple[str, ...], columns: Mapping[str, NDArray[Any]]) -> PlanRows:
        """Takes finished columns as they are, unchecked, and makes them read-only.

        Args:
            rids: Request ids.
            columns: Every column by name, in the dtypes of the attributes; nobody may change them afterwards.

        Returns:
            The rows.
        """
        out = object.__new__(cls)
        put = object.__setattr__
        put(out, "rids", rids)
        put(out, "_values", None)
        for name, array in columns.items():
            array.setflags(write=False)
            put(out, name, array)
        return out

    @property
    def end_positions(self) -> Ints:
        """Position after each row's last token, shape [rows], int64."""
        return self.first_positions + self.num_tokens

    @property
    def num_logits(self) -> Ints:
        """Rows of logits that sampling needs for each row, shape [rows], int64."""
        return np.where(self.roles >= FIRST_SAMPLING, self.num_drafts + 1, 0)

    @property
    def token_offsets(self) -> Ints:
        """Where the known ids of each row begin in `token_ids`, shape [rows], int64."""
        return np.cumsum(self.num_known) - self.num_known

    def tail(self, first: int) -> tuple[PlanRow, ...]:
        """The rows from number `first` on, without making those before."""
        return self._make(first) if self._values is None else self._values[first:]

    def _make(self, first: int = 0) -> tuple[PlanRow, ...]:
        columns = [getattr(self, name)[first:].tolist() for name in _PLAN_INTS]
        roles = [ROLES[code] for code in self.roles[first:].tolist()]
        tokens = self.token_ids[int(self.num_known[:first].sum()) :].tolist()
        late, num_known = self.is_late[first:].tolist(), self.num_known[first:].tolist()
        rows = []
        at = 0
        for rid, role, is_late, known, *ints in zip(
            self.rids[first:], roles, late, num_known, *columns, strict=True
        ):
            slot, generation, epoch, position, count, drafts, num_open, window, pool, full = ints
            rows.append(
                PlanRow(
                    rid=rid,
                    slot=slot,
                    slot_generation=generation,
                    epoch=epoch,
                    first_position=position,
                    num_tokens=count,
                    num_drafts=drafts,
                    role=role,
                    token_ids=tuple(tokens[at : at + known]),
                    is_late=is_late,
                    num_open=num_open,
                    window_start=window,
                    pool_start=pool,
                    full_start=full,
                )
            )
            at += known
        return tuple(rows)

    def _state(self) -> tuple[Any, ...]:
        names = (*_PLAN_INTS, "roles", "is_late", "num_known", "token_ids")
        return (self.rids, *(getattr(self, name) for name in names))

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_plan_rows, (self._state(),)

    @overload
    def __getitem__(self, index: int) -> PlanRow: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[PlanRow, ...]: ...
    def __getitem__(self, index: Any) -> Any:
        """One row, or a tuple of rows for a slice."""
        return self._all()[index]


def role_code(role: RowRole | int) -> int:
    """The code of a role in `PlanRows.roles`.

    Args:
        role: The role, its name, or its code.

    Returns:
        Its index in `ROLES`.
    """
    return _CODES[RowRole(role)] if isinstance(role, str) else int(role)


def _restore_plan_rows(state: tuple[Any, ...]) -> PlanRows:
    names = (*_PLAN_INTS, "roles", "is_late", "num_known", "token_ids")
    return PlanRows.trusted(state[0], dict(zip(names, state[1:], strict=True)))
