"""The prefix index: what it claims, and that it is right again after messages were lost, swapped or repeated."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.balancers import Fleet, WorkerSnapshot
from deepinfer.balancers.prefill import CacheSnapshot, CacheUpdate, PrefixIndex
from deepinfer.core.errors import ConfigError


def stored(worker: str, sequence: int, *keys: str, epoch: int = 0) -> CacheUpdate:
    return CacheUpdate(worker=worker, sequence=sequence, stored=keys, epoch=epoch)


def removed(worker: str, sequence: int, *keys: str, epoch: int = 0) -> CacheUpdate:
    return CacheUpdate(worker=worker, sequence=sequence, removed=keys, epoch=epoch)


def test_leading_blocks_only() -> None:
    index = PrefixIndex()
    index.apply(stored("a", 0, "1", "2", "3"))
    index.apply(stored("b", 0, "1", "3"))  # a hole: what stands behind it is no prefix
    assert index.match(["1", "2", "3", "4"]) == {"a": 3, "b": 1}
    assert index.match(["9", "1"]) == {}
    assert index.match([]) == {}


def test_long_prompts_and_many_workers() -> None:
    index = PrefixIndex()
    keys = [str(i) for i in range(1000)]
    for number in range(70):
        index.apply(stored(f"w{number}", 0, *keys[: 10 * number]))
    fleet = Fleet(WorkerSnapshot(name=f"w{number}") for number in reversed(range(75)))
    rows = index.match_rows(keys, fleet)
    assert rows.dtype == np.int64
    assert rows.tolist() == [0] * 5 + [10 * n for n in reversed(range(70))]
    assert index.match(keys) == {f"w{n}": 10 * n for n in range(1, 70)}


def test_rows_follow_the_fleet() -> None:
    index = PrefixIndex()
    index.apply(stored("b", 0, "1"))
    fleet = Fleet([WorkerSnapshot(name="a"), WorkerSnapshot(name="b")])
    assert index.match_rows(["1"], fleet).tolist() == [0, 1]
    fleet.update(WorkerSnapshot(name="c"))
    index.apply(stored("c", 0, "1"))
    assert index.match_rows(["1"], fleet).tolist() == [0, 1, 1]
    index.drop("b")
    assert index.match_rows(["1"], fleet).tolist() == [0, 0, 1]
    assert index.match_rows(["1"], Fleet([WorkerSnapshot(name="c")])).tolist() == [1]


def test_repeated_messages_change_nothing() -> None:
    index = PrefixIndex()
    index.apply(stored("a", 0, "1"))
    index.apply(removed("a", 1, "1"))
    assert index.apply(stored("a", 0, "1"))
    assert index.match(["1"]) == {}


def test_a_gap_holds_back_what_is_stored_but_not_what_is_removed() -> None:
    index = PrefixIndex()
    index.apply(stored("a", 0, "1", "2"))
    assert not index.apply(stored("a", 2, "3"))
    assert index.stale() == ("a",)
    assert index.match(["1", "2", "3"]) == {"a": 2}
    assert not index.apply(removed("a", 3, "2"))
    assert index.match(["1", "2", "3"]) == {"a": 1}, "not to claim a block is always safe"
    assert index.apply(stored("a", 1, "4"))
    assert index.stale() == ()
    assert index.match(["1", "3"]) == {"a": 2}
    index.check()


def test_a_snapshot_ends_the_wait_and_an_old_one_is_ignored() -> None:
    index = PrefixIndex()
    index.apply(stored("a", 0, "1"))
    index.apply(stored("a", 5, "6"))
    assert index.restore(CacheSnapshot(worker="a", sequence=4, keys=["2", "3"]))
    assert index.match(["1"]) == {}
    assert index.match(["2", "3", "6"]) == {"a": 3}
    index.restore(CacheSnapshot(worker="a", sequence=3, keys=["1"]))
    assert index.match(["1"]) == {}


def test_no_claim_after_a_drop() -> None:
    """A message that was on its way when the worker died must not bring it back (dynamo 11190, 14652)."""
    index = PrefixIndex()
    index.apply(stored("a", 0, "1", epoch=3))
    index.drop("a")
    index.apply(stored("a", 1, "2", epoch=3))
    index.restore(CacheSnapshot(worker="a", sequence=9, keys=["1"], epoch=2))
    assert index.match(["1"]) == {}
    assert index.match(["2"]) == {}
    assert index.workers == ()
    index.apply(stored("a", 0, "7", epoch=4))
    assert index.match(["7"]) == {"a": 1}
    index.check()


def test_a_new_life_begins_empty() -> None:
    index = PrefixIndex()
    index.apply(stored("a", 0, "1"))
    index.apply(stored("a", 0, "2", epoch=1))
    assert index.match(["1"]) == {}
    assert index.apply(stored("a", 1, "1"))  # late, from the life before
    assert index.match(["1"]) == {}


def test_bits_of_dropped_workers_are_used_again() -> None:
    index = PrefixIndex()
    for number in range(200):
        index.apply(stored(f"w{number}", 0, "1"))
        index.drop(f"w{number}")
    index.apply(stored("last", 0, "1"))
    assert index._everyone.bit_length() == 1
    assert index.match(["1"]) == {"last": 1}


def test_assumed_blocks_are_given_up_like_those_of_a_cache() -> None:
    index = PrefixIndex()
    index.assume("a", ["1", "2", "3"], capacity=4)
    index.assume("a", ["1", "4"], capacity=4)
    assert index.match(["1", "2", "3"]) == {"a": 3}
    index.assume("a", ["5"], capacity=4)  # the oldest is the tail of the first prompt
    assert index.match(["1", "2", "3"]) == {"a": 2}
    assert index.match(["1", "4"]) == {"a": 2}
    index.assume("a", list("56789"), capacity=4)
    assert index.match(list("56789")) == {"a": 4}
    assert index.match(["1"]) == {}
    index.drop("a")
    index.assume("a", ["1"], capacity=4)
    assert index.match(["1"]) == {"a": 1}
    index.restore(CacheSnapshot(worker="a", epoch=1, sequence=-1, keys=["2"]))
    assert index.match(["1"]) == {}
    index.check()


class Truth:
    """A worker's cache and the messages that tell of it."""

    def __init__(self, name: str) -> None:
        self.name, self.epoch, self.sequence = name, 0, 0
        self.keys: set[str] = set()

    def act(self, source: random.Random) -> CacheUpdate:
        kind = source.random()
        made, gone = (), ()
        if kind < 0.05:
            self.epoch, self.sequence = self.epoch + 1, 0
            self.keys.clear()
        if kind < 0.7:
            made = tuple(str(source.randrange(12)) for _ in range(source.randrange(4)))
        elif self.keys:
            gone = tuple(source.sample(sorted(self.keys), 1))
        cleared = kind > 0.97
        if cleared:
            self.keys.clear()
        self.keys -= set(gone)
        self.keys |= set(made)
        update = CacheUpdate(
            worker=self.name,
            epoch=self.epoch,
            sequence=self.sequence,
            stored=made,
            removed=gone,
            cleared=cleared,
        )
        self.sequence += 1
        return update

    def snapshot(self) -> CacheSnapshot:
        return CacheSnapshot(
            worker=self.name, epoch=self.epoch, sequence=self.sequence - 1, keys=set(self.keys)
        )


def delivered(updates: list[CacheUpdate], source: random.Random) -> Iterator[CacheUpdate]:
    """Some messages twice, some never, some late."""
    late: list[CacheUpdate] = []
    for update in updates:
        luck = source.random()
        if luck < 0.15:
            continue
        if luck < 0.3:
            late.append(update)
            continue
        yield update
        if luck < 0.4:
            yield update
        if late and source.random() < 0.5:
            yield late.pop(source.randrange(len(late)))
    yield from late


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6))
def test_converges_to_the_truth(seed: int) -> None:
    source = random.Random(seed)
    workers = [Truth(f"w{i}") for i in range(3)]
    index = PrefixIndex(max_held_back=8)
    for _ in range(4):
        updates = [source.choice(workers).act(source) for _ in range(40)]
        for update in delivered(updates, source):
            index.apply(update)
            index.check()
        # A heartbeat tells each worker's last number; whoever is behind is asked for a snapshot.
        for worker in workers:
            index.restore(worker.snapshot())
        index.check()
        for key in map(str, range(12)):
            expected = {worker.name: 1 for worker in workers if key in worker.keys}
            assert index.match([key]) == expected
        assert index.stale() == ()


def test_a_lost_message_shows_as_stale() -> None:
    index = PrefixIndex()
    assert index.apply(stored("a", 0, "1"))
    assert not index.apply(stored("a", 2, "2"))
    with pytest.raises(AssertionError):
        assert index.stale() == ()


def test_messages_dropped_behind_a_gap_are_still_missing() -> None:
    index = PrefixIndex(max_held_back=1)
    assert not index.apply(stored("a", 1, "1"))
    assert not index.apply(removed("a", 2, "1"))  # no room to hold it back
    assert not index.restore(CacheSnapshot(worker="a", sequence=1, keys={"1"}))
    assert index.stale() == ("a",)
    assert index.restore(CacheSnapshot(worker="a", sequence=2, keys=()))
    assert index.stale() == ()


def test_a_gap_that_is_filled_in_brings_nothing_back_that_was_removed_behind_the_next() -> None:
    index = PrefixIndex()
    index.apply(removed("a", 2, "1"))
    assert not index.apply(stored("a", 0, "1"))
    assert index.match(["1"]) == {}
    other = PrefixIndex()
    other.apply(removed("a", 2, "1"))
    assert not other.restore(CacheSnapshot(worker="a", sequence=0, keys={"1"}))
    assert other.match(["1"]) == {}


def test_assumptions_give_up_nothing_that_messages_told_of() -> None:
    index = PrefixIndex()
    index.assume("a", ["1"], capacity=1)
    index.apply(stored("a", 0, "1", "2"))
    index.assume("a", ["1", "2", "3"], capacity=1)
    index.assume("a", ["4"], capacity=1)
    assert index.match(["1", "2", "3"]) == {"a": 2}
    assert index.match(["4"]) == {"a": 1}
    index.restore(CacheSnapshot(worker="a", sequence=0, keys={"4"}))
    index.assume("a", ["5"], capacity=1)
    assert index.match(["4"]) == {"a": 1}, "a snapshot told of it"
    index.check()


@pytest.mark.parametrize(
    "values",
    [
        {"sequence": -1},
        {"sequence": "0"},
        {"epoch": -1},
        {"epoch": 0.5},
        {"stored": "abc"},
        {"removed": ["1"]},
        {"worker": ""},
    ],
)
def test_messages_are_checked(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        CacheUpdate(**{"worker": "a", "sequence": 0, **values})  # type: ignore[arg-type]


def test_snapshots_and_capacities_are_checked() -> None:
    with pytest.raises(ConfigError, match="keys"):
        CacheSnapshot(worker="a", sequence=0, keys="abc")
    with pytest.raises(ConfigError, match="capacity"):
        PrefixIndex().assume("a", ["1"], capacity=-1)
