from __future__ import annotations

import random

import pytest

from deepinfer.cache import BlockPool
from deepinfer.core.errors import ConfigError, InvariantBroken


def take(pool: BlockPool, count: int, cached: bool = False) -> list[int]:
    table = [pool.take()[0] for _ in range(count)]
    if cached:
        for block in table:
            pool.mark(block)
    return table


def test_blank_blocks_go_first_then_idle_ones_tail_before_head() -> None:
    pool = BlockPool(6)
    old, new = take(pool, 2, cached=True), take(pool, 2, cached=True)
    pool.give_back(old, -1)
    pool.give_back(new, -1)
    assert (pool.num_blank, pool.num_idle) == (2, 4)
    order = [pool.take() for _ in range(6)]
    assert order == [(4, False), (5, False), (1, True), (0, True), (3, True), (2, True)]
    with pytest.raises(InvariantBroken, match="none of the 6 blocks is free"):
        pool.take()


def test_blocks_leave_quarantine_tail_first_too() -> None:
    pool = BlockPool(3)
    pool.give_back(take(pool, 3, cached=True), after_step=2)
    assert pool.step_done(5) == 3
    assert [pool.take() for _ in range(3)] == [(2, True), (1, True), (0, True)]


def test_sharing_takes_a_block_out_of_the_middle_and_makes_it_the_latest() -> None:
    pool = BlockPool(3)
    table = take(pool, 3, cached=True)
    pool.give_back(table, -1)
    pool.share(1)
    assert pool.num_free == 2
    pool.check([[1]])
    pool.give_back([1], -1)
    assert [pool.take()[0] for _ in range(3)] == [2, 0, 1]


def test_a_shared_block_is_free_only_when_the_last_table_and_step_let_go() -> None:
    pool = BlockPool(2)
    table = take(pool, 1, cached=True)
    pool.share(table[0])
    pool.give_back(table, after_step=7)  # a step in flight may read it still
    pool.give_back(list(table), after_step=-1)
    assert (pool.num_free, pool.num_quarantined, pool.num_held) == (1, 1, 0)
    pool.check([])
    assert pool.step_done(6) == 0
    assert pool.step_done(7) == 1
    assert pool.num_idle == 1
    pool.check([])


def test_a_block_can_be_shared_out_of_quarantine() -> None:
    pool = BlockPool(1)
    table = take(pool, 1, cached=True)
    pool.give_back(table, after_step=3)
    pool.share(0)
    assert (pool.num_quarantined, pool.num_held) == (0, 1)
    assert pool.step_done(3) == 0
    pool.check([[0]])
    pool.give_back([0], 3)
    assert pool.num_idle == 1


def test_forgetting_makes_an_idle_block_blank() -> None:
    pool = BlockPool(2)
    table = take(pool, 2, cached=True)
    pool.give_back([table[0]], -1)
    pool.forget(0)
    pool.forget(0)
    pool.forget(1)
    assert (pool.num_blank, pool.num_idle) == (1, 0)
    pool.check([[1]])


def test_giving_back_twice_is_found() -> None:
    pool = BlockPool(2)
    table = take(pool, 2)
    pool.give_back(table, -1)
    with pytest.raises(InvariantBroken, match="block 0 is given back, and no table holds it"):
        pool.give_back(table, -1)


def test_random_work_keeps_the_books() -> None:
    rng = random.Random(0)
    for _ in range(20):
        pool = BlockPool(rng.randint(1, 12))
        tables: list[list[int]] = []
        step = 0
        for _ in range(120):
            kind = rng.randrange(6)
            if kind == 0 and pool.num_free:
                tables.append(take(pool, rng.randint(1, pool.num_free), rng.random() < 0.5))
            elif kind == 1 and tables:
                pool.give_back(tables.pop(rng.randrange(len(tables))), rng.randint(-1, step + 2))
            elif kind == 2 and tables:
                known = [b for b in rng.choice(tables) if pool.is_cached(b)]
                for block in known:
                    pool.share(block)
                tables.append(known)
            elif kind == 3:
                pool.step_done(step)
                step += 1
            elif kind == 4 and tables:
                for block in rng.choice(tables):
                    pool.mark(block)
            else:
                pool.forget(rng.randrange(pool.num_blocks))
            pool.check(tables)
        for table in tables:
            pool.give_back(table, step)
        pool.step_done(step + 5)
        assert pool.num_free == pool.num_blocks


@pytest.mark.parametrize(
    "plant",
    [
        lambda p: p._references.__setitem__(0, 2),
        lambda p: p._leaving.__setitem__(0, 1),
        lambda p: p._next.__setitem__(p._blank, 3),
        lambda p: p._previous.__setitem__(3, 0),
        lambda p: p._cached.__setitem__(3, 1),
        lambda p: setattr(p, "_num_blank", 7),
        lambda p: p._quarantine.__setitem__(-1, [[0]]),
    ],
)
def test_check_walks_and_finds_planted_faults(plant) -> None:
    pool = BlockPool(5)
    table = take(pool, 2)
    pool.check([table])
    plant(pool)
    with pytest.raises(InvariantBroken):
        pool.check([table])


def test_check_compares_with_the_tables() -> None:
    pool = BlockPool(5)
    take(pool, 2)
    with pytest.raises(InvariantBroken, match="block 1 counts 1 tables, and 0 hold it"):
        pool.check([[0]])
    with pytest.raises(InvariantBroken, match="holds block 9 of 5"):
        pool.check([[0, 1, 9]])
    with pytest.raises(ConfigError, match="num_blocks"):
        BlockPool(0)
    assert "3 blank" in repr(pool)
