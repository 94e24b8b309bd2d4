"""Rows that decode one token each, as columns: what a step costs then hardly depends on how many there are."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.core.errors import InvariantBroken
from deepinfer.core.plan import ROLES, PlanRows, RowRole
from deepinfer.core.types import Request
from deepinfer.engine.step_state import SlotState, SlotStates

__all__ = ["Company", "DecodeLane", "DecodeLanes"]

Ints = NDArray[np.int64]
_DECODE = ROLES.index(RowRole.DECODE)
_constant_columns = operator.attrgetter(
    "slots", "slot_generations", "epochs", "roles", "num_tokens", "num_open"
)


@dataclass(frozen=True, slots=True)
class Company:
    """What does not change while the same requests decode together, one entry a row.

    Attributes:
        rids: Request ids.
        slots: Slots.
        columns: Slots, slot generations and epochs, shape [rows] each.
        requests: The requests.
        seeds: Their seeds.
        states: States of the slots.
        token_ids: Known tokens of each request; these lists grow.
        no_outputs: An empty output a row.
        with_outputs: Rows whose request has penalties.
        device_slots: The slots on the device, shape [rows], int64.
        host_slots: The slots, shape [rows], int64.
        no_ids: 0 a row, shape [rows], int64.
        all_true: True a row, shape [rows], bool.
        version: Version of the slots' states that this was read from.
    """

    rids: tuple[str, ...]
    slots: list[int]
    columns: tuple[Ints, Ints, Ints]
    requests: tuple[Request, ...]
    seeds: tuple[int, ...]
    states: tuple[SlotState, ...]
    token_ids: tuple[list[int], ...]
    no_outputs: tuple[tuple[()], ...]
    with_outputs: tuple[int, ...]
    device_slots: Tensor
    host_slots: Ints
    no_ids: Ints
    all_true: NDArray[np.bool_]
    version: int


@dataclass(slots=True)
class DecodeLane:
    """The leading rows of a step, each of which runs the token generated last of one request.

    Attributes:
        company: What these rows share with those of other steps.
        rows: The rows of the plan, of which the first `count` are meant.
        count: Rows.
        starts: Their positions, shape [rows], int64.
        ids: Their input ids, 0 where the device knows them only, shape [rows], int64.
        is_future: Whether the device knows them only, shape [rows], bool; None when the host knows all.
        offsets: Place of each in what the model gives.
        tokens: Tokens chosen, once they are known.
    """

    company: Company
    rows: PlanRows
    count: int
    starts: Ints
    ids: Ints
    is_future: NDArray[np.bool_] | None
    offsets: Sequence[int] = ()
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Puts the rows first and together."""
        self.offsets = range(self.count)

    @property
    def window_starts(self) -> Ints:
        """As in `PlanRows`, of these rows."""
        return self.rows.window_starts[: self.count]

    @property
    def pool_starts(self) -> Ints:
        """As in `PlanRows`, of these rows."""
        return self.rows.pool_starts[: self.count]

    @property
    def full_starts(self) -> Ints:
        """As in `PlanRows`, of these rows."""
        return self.rows.full_starts[: self.count]

    def output_token_ids(self, *, of_all: bool) -> tuple[Any, ...]:
        """Output so far of each row.

        Args:
            of_all: Of every row, not only of those with penalties.
        """
        company = self.company
        if not (of_all or company.with_outputs):
            return company.no_outputs
        wanted = range(self.count) if of_all else company.with_outputs
        outputs: list[tuple[int, ...]] = list(company.no_outputs)
        for at in wanted:
            first = company.requests[at].num_prompt_tokens
            outputs[at] = tuple(company.token_ids[at][first:])
        return tuple(outputs)

    def keep(self, tokens: list[int], states: SlotStates) -> None:
        """Notes the tokens chosen, but for requests that began again meanwhile without them.

        Args:
            tokens: One a row; a negative one, of a row that failed, counts as 0.
            states: States of the slots.
        """
        self.tokens = tokens
        if min(tokens) < 0:
            tokens = [max(token, 0) for token in tokens]
        ends = (self.starts + 1).tolist()
        company = self.company
        is_same = company.version == states.version
        for at, (ids, end, token) in enumerate(zip(company.token_ids, ends, tokens, strict=True)):
            if not (is_same or states.is_latest(company.states[at])):
                continue
            if len(ids) > end:
                del ids[end:]
            ids.append(token)


class DecodeLanes:
    """Finds the rows of plans that decode one token each, and remembers what they have in common from step to step.

    Args:
        states: States of the slots.
        device: Where the model runs.
    """

    def __init__(self, states: SlotStates, device: torch.device) -> None:
        self._states = states
        self._device = device
        self._company: Company | None = None
        self._constant: tuple[Any, ...] = ()  # columns of the plan that was seen last

    def enter(self, rows: PlanRows, requests: Mapping[str, Request]) -> DecodeLane | None:
        """Takes the leading rows that decode one token each.

        Args:
            rows: Rows of a plan.
            requests: Their requests by id.

        Returns:
            These rows, their known ids noted; None when there are none, or when one of them does not continue what its
            slot holds, which is for others to find out about.

        Raises:
            InvariantBroken: A row starts behind the known tokens of its request.
        """
        company = self._company
        constant = _constant_columns(rows)
        if (
            company is None
            or company.version != self._states.version
            or len(constant) != len(self._constant)
            or not all(map(operator.is_, constant, self._constant))
        ):
            self._company = company = self._find(rows, requests)
            self._constant = constant
            if company is None:
                return None
        count = len(company.slots)
        starts = rows.first_positions[:count]
        known = rows.num_known[:count]
        num_known = int(np.count_nonzero(known))
        if not num_known:
            return DecodeLane(company, rows, count, starts, company.no_ids, company.all_true)
        given = rows.token_ids[:num_known]
        is_future, ids = None, given
        places: Any = range(count)
        if num_known < count:
            is_known = known > 0
            is_future, ids = ~is_known, np.zeros(count, np.int64)
            ids[is_known] = given
            places = np.flatnonzero(is_known).tolist()
        firsts = starts.tolist()
        for at, token in zip(places, given.tolist(), strict=True):
            mine, first = company.token_ids[at], firsts[at]
            if len(mine) == first + 1 and mine[-1] == token:
                continue
            if first > len(mine):
                raise InvariantBroken(
                    f"slot {company.slots[at]} was given {len(mine)} tokens of {company.rids[at]!r}, and a row starts "
                    f"at {first}."
                )
            mine[first:] = [token]
        return DecodeLane(company, rows, count, starts, ids, is_future)

    def clear(self) -> None:
        """Forgets what was seen."""
        self._company, self._constant = None, ()

    def _find(self, rows: PlanRows, requests: Mapping[str, Request]) -> Company | None:
        plain = (rows.roles == _DECODE) & (rows.num_tokens == 1) & (rows.num_open == 0)
        plain &= rows.num_known <= 1
        count = len(rows) if plain.all() else int(plain.argmin())
        return self._company_of(rows, count, requests)

    def company(self, rows: PlanRows, requests: Mapping[str, Request]) -> Company | None:
        """What the requests of all rows have in common, whatever the rows run.

        Args:
            rows: Rows of a plan.
            requests: Their requests by id.

        Returns:
            The company; None when there are no rows, a slot has two of them, or one does not continue what its slot holds.
        """
        found = self._company_of(rows, len(rows), requests)
        if found is not self._company:
            self._company, self._constant = found, ()
        return found

    def _company_of(
        self, rows: PlanRows, count: int, requests: Mapping[str, Request]
    ) -> Company | None:
        if not count:
            return None
        states, version = self._states, self._states.version
        columns = tuple(
            [column[:count] for column in (rows.slots, rows.slot_generations, rows.epochs)]
        )
        old, rids = self._company, rows.rids[:count]
        if (
            old is not None
            and old.version == version
            and old.rids == rids
            and all(map(np.array_equal, old.columns, columns))
        ):
            return old
        slots, generations, epochs = [column.tolist() for column in columns]
        if len(set(slots)) < count:
            return None
        held: list[SlotState] = []
        for slot, rid, generation, epoch in zip(slots, rids, generations, epochs, strict=True):
            state = states[slot]
            if (
                state is None
                or state.is_void
                or state.rid != rid
                or state.slot_generation != generation
                or state.epoch != epoch
            ):
                return None
            held.append(state)
        mine = tuple([requests[rid] for rid in rids])
        return Company(
            rids=rids,
            slots=slots,
            columns=columns,  # type: ignore[arg-type]
            requests=mine,
            seeds=tuple([request.params.seed or 0 for request in mine]),
            states=tuple(held),
            token_ids=tuple([state.token_ids for state in held]),
            no_outputs=((),) * count,
            with_outputs=tuple([i for i, one in enumerate(mine) if one.params.has_penalties]),
            device_slots=torch.tensor(slots).to(self._device, non_blocking=True),
            host_slots=columns[0],
            no_ids=np.zeros(count, np.int64),
            all_true=np.ones(count, np.bool_),
            version=version,
        )
