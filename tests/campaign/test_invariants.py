"""The invariants are derived a second time, so that they hold without the books' own checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deepinfer.core.errors import InvariantBroken
from deepinfer.testing import Machine, MachineConfig, check_all, check_drained, check_pure

GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 9}


def running() -> Machine:
    machine = Machine(MachineConfig(num_seqs=2, depth=1))
    machine.do(("add", {"prompt": tuple(range(4, 16)), "params": GREEDY}))
    machine.do(("add", {"prompt": tuple(range(6, 14)), "params": GREEDY}))
    machine.do(("step", {"times": 4}))
    return machine


def pool(machine: Machine) -> Any:
    return machine.scheduler.cache._books.pool


def first_block(machine: Machine) -> int:
    return int(machine.books.tables[0][0])


def lose_reference(machine: Machine) -> None:
    pool(machine)._references[first_block(machine)] += 1


def free_used_block(machine: Machine) -> None:
    pool(machine).is_free = lambda block: True


def change_ids(machine: Machine) -> None:
    index = machine.scheduler.cache._books.index
    index.of_block(first_block(machine)).ids = b"\x05\0\0\0" * machine.config.block_size


def settle_too_far(machine: Machine) -> None:
    machine.scheduler.inner._books.table.settled[0] -= 1


def swap_tables(machine: Machine) -> None:
    machine.engine._parts.runner.cache.tables[0].reverse()


def count_wrong(machine: Machine) -> None:
    pool(machine)._num_blank += 1


def forget_request(machine: Machine) -> None:
    machine.scheduler.inner.abort("r1")


def take_over_more(machine: Machine) -> None:
    machine.books.first_hits["r0"] = (99, 0)


@pytest.mark.parametrize(
    ("name", "plant"),
    [
        ("I3", lose_reference),
        ("I3", free_used_block),
        ("I4", change_ids),
        ("I5", settle_too_far),
        ("I3", swap_tables),
        ("I1", count_wrong),
        ("I5", forget_request),
        ("I10", take_over_more),
    ],
)
def test_seen_although_no_part_checks_itself(
    name: str, plant: Callable[[Machine], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = running()
    check_all(machine.scheduler, machine.books, machine.engine)
    monkeypatch.setattr(machine.engine, "check", lambda: None)
    plant(machine)
    with pytest.raises(InvariantBroken, match=f"^{name}: "):
        check_all(machine.scheduler, machine.books, machine.engine)


def test_drained_means_that_nothing_is_held() -> None:
    machine = running()
    with pytest.raises(InvariantBroken, match="all ended, and"):
        check_drained(machine.scheduler, machine.books, machine.engine)
    machine.finish()


def test_impure_plan_is_seen() -> None:
    machine = running()
    assert check_pure(machine.scheduler, 0.0) == machine.scheduler.plan(0.0)
    plans = iter([None, machine.scheduler.plan(0.0)])
    machine.scheduler.inner.plan = lambda now: next(plans)
    with pytest.raises(InvariantBroken, match="the same state gave"):
        check_pure(machine.scheduler, 0.0)


def test_scheduler_alone_can_be_checked() -> None:
    machine = running()
    check_all(machine.scheduler.inner)
    machine.scheduler.inner._books.table.settled[0] = 10_000
    with pytest.raises(InvariantBroken):
        check_all(machine.scheduler.inner)
