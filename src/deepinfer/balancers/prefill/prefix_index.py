"""Which worker holds which prefix, learned from the cache events of the workers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from deepinfer.balancers.fleet import Fleet
from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError, InvariantBroken

__all__ = ["CacheSnapshot", "CacheUpdate", "PrefixIndex"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUpdate:
    """What changed in one worker's cache, as one numbered message.

    Attributes:
        worker: Name of the worker.
        epoch: Which life of the worker: it grows by one with each restart, whose cache begins empty.
        sequence: Number of the message within the epoch, from 0, without gaps.
        stored: Keys that can be found from now on, parents before children.
        removed: Keys that cannot be found any more.
        cleared: Whether everything before was dropped first.

    Raises:
        ConfigError: A number is negative or no integer, or keys are not in a tuple.
    """

    worker: str
    sequence: int
    epoch: int = 0
    stored: tuple[Hashable, ...] = ()
    removed: tuple[Hashable, ...] = ()
    cleared: bool = False

    def __post_init__(self) -> None:
        """Checks the fields."""
        checks.check_text("worker", self.worker, ConfigError)
        checks.check_int("sequence", self.sequence, 0, 2**62, ConfigError)
        checks.check_int("epoch", self.epoch, 0, 2**62, ConfigError)
        for name in ("stored", "removed"):
            if not isinstance(getattr(self, name), tuple):
                checks.fail(name, getattr(self, name), "a tuple of keys", ConfigError)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSnapshot:
    """Everything in one worker's cache: the answer to a router that missed messages.

    Attributes:
        worker: Name of the worker.
        epoch: Which life of the worker.
        sequence: Number of the last message that it includes, or -1.
        keys: The keys that can be found.

    Raises:
        ConfigError: A number is out of range, or the keys are one string.
    """

    worker: str
    keys: Iterable[Hashable]
    sequence: int
    epoch: int = 0

    def __post_init__(self) -> None:
        """Checks the fields."""
        checks.check_text("worker", self.worker, ConfigError)
        checks.check_int("sequence", self.sequence, -1, 2**62, ConfigError)
        checks.check_int("epoch", self.epoch, 0, 2**62, ConfigError)
        if isinstance(self.keys, str | bytes):
            checks.fail("keys", self.keys, "a set or a sequence of keys", ConfigError)


@dataclass(slots=True)
class _Worker:
    bit: int
    epoch: int = -1
    sequence: int = -1  # last message applied
    newest: int = -1  # last message heard of
    keys: set[Hashable] = field(default_factory=set)
    held_back: dict[int, CacheUpdate] = field(default_factory=dict)  # messages behind a gap
    assumed: OrderedDict[Hashable, None] = field(default_factory=OrderedDict)  # oldest first


class PrefixIndex:
    """Prefixes of many workers, right again after messages were lost, swapped or repeated.

    Messages carry an epoch and a number. One that was applied already changes nothing. Behind a gap the removals of a
    message count at once, because not to claim a block is always safe, and the rest waits for the missing message or
    for a snapshot (`stale` says who owes one). A message from an earlier life of a worker, or for a worker that was
    dropped and did not begin a new epoch, is ignored.

    A key must stand for its whole prefix, as chained block keys do. `match` costs one dictionary look-up a block,
    however many workers there are.

    Args:
        max_held_back: Messages of one worker kept behind a gap; with more the worker counts as stale and they are
            dropped until a snapshot comes.

    Raises:
        ConfigError: The number is out of range.

    Examples:
        >>> index = PrefixIndex()
        >>> index.apply(CacheUpdate(worker="a", sequence=0, stored=("system", "hello")))
        True
        >>> index.apply(CacheUpdate(worker="b", sequence=0, stored=("system",)))
        True
        >>> index.match(("system", "hello", "world"))
        {'a': 2, 'b': 1}
    """

    def __init__(self, *, max_held_back: int = 1024) -> None:
        self.max_held_back = checks.check_int("max_held_back", max_held_back, 1, 2**31, ConfigError)
        self._workers: dict[str, _Worker] = {}
        self._free_bits: list[int] = []
        self._holders: dict[Hashable, int] = {}  # key -> bit set of workers
        self._everyone = 0
        self._rows: tuple[list[str], tuple[int, int], npt.NDArray[np.int64]] | None = None
        self._spread: tuple[int, npt.NDArray[np.int64]] = (0, np.zeros(0, np.int64))
        self._version = 0
        self._dropped: dict[str, int] = {}  # last epoch of workers that left

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of the known workers, in the order in which they came."""
        return tuple(self._workers)

    def apply(self, update: CacheUpdate) -> bool:
        """Takes a message.

        Args:
            update: The message.

        Returns:
            Whether the worker's state is complete up to this message; False asks for the missing ones or a snapshot.
        """
        worker = self._enter(update.worker, update.epoch)
        if worker is None:
            return True  # from a life that is over
        worker.newest = max(worker.newest, update.sequence)
        if update.sequence <= worker.sequence:
            return worker.sequence == worker.newest
        if update.sequence > worker.sequence + 1:
            self._remove(worker, update.removed)
            if update.cleared:
                self._remove(worker, tuple(worker.keys))
            if len(worker.held_back) < self.max_held_back:
                worker.held_back[update.sequence] = update
            return False
        self._take(worker, update)
        return self._catch_up(worker)

    def restore(self, snapshot: CacheSnapshot) -> bool:
        """Takes the whole state of a worker.

        Args:
            snapshot: The state. One that is older than what is known already is ignored.

        Returns:
            Whether the worker's state is complete now.
        """
        worker = self._enter(snapshot.worker, snapshot.epoch)
        if worker is None:
            return True
        if snapshot.sequence >= worker.sequence:
            wanted = set(snapshot.keys)
            self._remove(worker, tuple(worker.keys - wanted))
            self._store(worker, wanted - worker.keys)
            worker.assumed.clear()  # what is left of them is known now
            worker.sequence = snapshot.sequence
            worker.newest = max(worker.newest, snapshot.sequence)
            for number in [n for n in worker.held_back if n <= snapshot.sequence]:
                del worker.held_back[number]
        return self._catch_up(worker)

    def assume(self, name: str, keys: Sequence[Hashable], *, capacity: int) -> None:
        """Claims what a worker will hold once it has run a prompt, for workers that report nothing.

        Args:
            name: The worker.
            keys: Keys of the prompt's blocks, in order.
            capacity: Blocks that the worker's cache holds. Of more the oldest are given up, tails before heads, as
                its own cache would. Blocks that messages told of are left to messages.

        Raises:
            ConfigError: The capacity is negative or no integer.
        """
        checks.check_int("capacity", capacity, 0, 2**62, ConfigError)
        worker = self._workers.get(name) or self._enter(name, self._dropped.get(name, -1) + 1)
        if worker is None:
            return
        keys = keys[:capacity]
        keys = [key for key in keys if key in worker.assumed or key not in worker.keys]
        for key in reversed(keys):
            worker.assumed[key] = None
            worker.assumed.move_to_end(key)
        self._store(worker, keys)
        while len(worker.assumed) > capacity:
            self._remove(worker, (worker.assumed.popitem(last=False)[0],))

    def stale(self) -> tuple[str, ...]:
        """Names of the workers of whom a message is missing; ask them for a snapshot."""
        return tuple(n for n, worker in self._workers.items() if worker.sequence < worker.newest)

    def drop(self, name: str) -> None:
        """Forgets a worker that died or left; messages of its present epoch are ignored from now on.

        Args:
            name: The worker; one that is not known changes nothing.
        """
        worker = self._workers.pop(name, None)
        if worker is None:
            return
        self._remove(worker, tuple(worker.keys))
        self._dropped[name] = worker.epoch
        self._everyone &= ~(1 << worker.bit)
        self._free_bits.append(worker.bit)
        self._version += 1

    def match(self, keys: Sequence[Hashable]) -> dict[str, int]:
        """How many leading blocks of a prompt each worker holds.

        Args:
            keys: Keys of the prompt's blocks, in order.

        Returns:
            Blocks by name, for the workers that hold at least the first.
        """
        counts = self._count(keys)
        return {
            name: int(counts[worker.bit])
            for name, worker in self._workers.items()
            if worker.bit < len(counts) and counts[worker.bit]
        }

    def match_rows(self, keys: Sequence[Hashable], fleet: Fleet) -> npt.NDArray[np.int64]:
        """As `match`, in the order of a fleet's columns.

        Args:
            keys: Keys of the prompt's blocks, in order.
            fleet: The fleet; workers that the index does not know hold nothing.

        Returns:
            Leading blocks held, shape [workers], int64.
        """
        bits = self._bits(fleet)
        if not keys or not bits.size:
            return np.zeros(len(fleet), np.int64)
        counts = self._count(keys)
        return counts[bits]

    def check(self) -> None:
        """Walks every invariant.

        Raises:
            InvariantBroken: The two directions of the index differ, or a bit is used twice.
        """
        bits = [worker.bit for worker in self._workers.values()]
        if len(set(bits)) != len(bits) or sum(1 << bit for bit in bits) != self._everyone:
            raise InvariantBroken(f"workers share bits: {bits} for {self._everyone:b}.")
        wanted: dict[Hashable, int] = {}
        for worker in self._workers.values():
            for key in worker.keys:
                wanted[key] = wanted.get(key, 0) | 1 << worker.bit
        if wanted != self._holders:
            raise InvariantBroken(
                f"{len(wanted)} keys by worker, {len(self._holders)} by key, or their holders differ."
            )

    def _count(self, keys: Sequence[Hashable]) -> npt.NDArray[np.int64]:
        """Leading blocks held, by bit; the last entry belongs to nobody and is 0."""
        alive = self._everyone
        counts = np.zeros(alive.bit_length() + 1, np.int64)
        begin, holders = 0, self._holders
        for at, key in enumerate(keys):
            still = holders.get(key, 0) & alive
            if still != alive:
                if at > begin:
                    self._add(counts, alive, at - begin)
                if not still:
                    return counts
                alive, begin = still, at
        if alive:
            self._add(counts, alive, len(keys) - begin)
        return counts

    def _add(self, counts: npt.NDArray[np.int64], workers: int, blocks: int) -> None:
        """Adds blocks to the entries of a bit set; few bits one by one, many at once."""
        if workers.bit_count() > 4:
            if (
                self._spread[0] != workers or self._spread[1].size != counts.size
            ):  # a first block that everyone holds comes again and again
                num_bytes = counts.size // 8 + 1
                raw = np.frombuffer(workers.to_bytes(num_bytes, "little"), np.uint8)
                bits = np.unpackbits(raw, bitorder="little")[: counts.size]
                self._spread = (workers, bits.astype(np.int64))
            counts += self._spread[1] * blocks
            return
        while workers:
            bit = workers.bit_length() - 1
            counts[bit] += blocks
            workers ^= 1 << bit

    def _bits(self, fleet: Fleet) -> npt.NDArray[np.int64]:
        """Bit of each row of a fleet; kept as long as neither side gains or loses workers."""
        kept, names = self._rows, fleet.names
        if kept is None or kept[0] is not names or kept[1] != (self._version, len(names)):
            nobody = self._everyone.bit_length()  # the spare last entry of every count
            bits = [worker.bit if (worker := self._workers.get(name)) else nobody for name in names]
            self._rows = kept = (names, (self._version, len(names)), np.array(bits, np.int64))
        return kept[2]

    def _enter(self, name: str, epoch: int) -> _Worker | None:
        """The worker in the given epoch, or None when that epoch is over."""
        worker = self._workers.get(name)
        if worker is None:
            if epoch <= self._dropped.get(name, -1):
                return None
            worker = _Worker(self._free_bits.pop() if self._free_bits else len(self._workers))
            self._workers[name] = worker
            self._everyone |= 1 << worker.bit
            self._version += 1
        if epoch < worker.epoch:
            return None
        if epoch > worker.epoch:
            self._remove(worker, tuple(worker.keys))
            worker.epoch, worker.sequence, worker.newest = epoch, -1, -1
            worker.held_back.clear()
        return worker

    def _catch_up(self, worker: _Worker) -> bool:
        """Applies what waited for the last message; whether nothing is missing any more."""
        while (following := worker.held_back.pop(worker.sequence + 1, None)) is not None:
            self._take(worker, following)
        for (
            held
        ) in worker.held_back.values():  # what was filled in may be gone again behind the next gap
            self._remove(worker, tuple(worker.keys) if held.cleared else held.removed)
        return worker.sequence == worker.newest

    def _take(self, worker: _Worker, update: CacheUpdate) -> None:
        if update.cleared:
            self._remove(worker, tuple(worker.keys))
        self._remove(worker, update.removed)
        self._store(worker, update.stored)
        for key in update.stored if worker.assumed else ():
            worker.assumed.pop(key, None)  # it is known now
        worker.sequence = update.sequence

    def _store(self, worker: _Worker, keys: Iterable[Hashable]) -> None:
        bit, holders = 1 << worker.bit, self._holders
        for key in keys:
            worker.keys.add(key)
            holders[key] = holders.get(key, 0) | bit

    def _remove(self, worker: _Worker, keys: Iterable[Hashable]) -> None:
        bit, holders = 1 << worker.bit, self._holders
        for key in keys:
            if key in worker.keys:
                worker.keys.discard(key)
                worker.assumed.pop(key, None)
                left = holders[key] & ~bit
                if left:
                    holders[key] = left
                else:
                    del holders[key]

    def __repr__(self) -> str:
        return f"PrefixIndex(workers={len(self._workers)}, keys={len(self)}, stale={self.stale()})"
