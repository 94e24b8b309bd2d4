"""Which cached block continues which prefix."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from weakref import WeakValueDictionary

from deepinfer.cache.block_keys import HashFn, sha256
from deepinfer.cache.host_tier import HostTier
from deepinfer.cache.index_entry import NOWHERE, IndexEntry
from deepinfer.cache.window_slots import WindowSlots
from deepinfer.core.errors import InvariantBroken

__all__ = ["Outcome", "PrefixIndex"]


class Outcome(enum.Enum):
    """What became of a block that was to be published."""

    STORED = "stored"
    """It can be found from now on."""
    DUPLICATE = "duplicate"
    """The same entries are there already; the first block stays, and this one remains private to its table."""
    COLLISION = "collision"
    """Another prefix has the same key; nothing was stored."""


class PrefixIndex:
    """Entries by key, over device blocks, host blocks and window slots.

    A key only finds a candidate. An entry is taken when its token ids and media are equal and its parent is the very
    entry that the search came from, so two prefixes with one key can never be mistaken for each other, whatever the
    digest is worth.

    Block tables only ever grow, so a block whose content is there already is not exchanged for the first one: it
    stays in its table and is simply never findable.

    Args:
        num_blocks: Device blocks in all.
        host: Index of the host tier, or None.
        windows: Index of window slots, or None.
        on_change: Called with (entry, tier, whether it was stored) on every change of what can be found.
        hash_fn: Digest that keys are made with, for `check`.

    Examples:
        >>> index = PrefixIndex(4)
        >>> root = index.root("", b"root")
        >>> entry, outcome, _ = index.publish(root, b"key", b"ids", b"", block=2)
        >>> outcome.value, index.find(root, b"key", b"ids", b"").device
        ('stored', 2)
        >>> index.find(root, b"key", b"other", b"") is None
        True
    """

    def __init__(
        self,
        num_blocks: int,
        host: HostTier | None = None,
        windows: WindowSlots | None = None,
        on_change: Callable[[IndexEntry, str, bool], None] | None = None,
        hash_fn: HashFn = sha256,
    ) -> None:
        self.host = host
        self.windows = windows
        self.hash_fn = hash_fn
        self._on_change = on_change
        self._entries: dict[bytes, IndexEntry] = {}
        self._by_block: list[IndexEntry | None] = [None] * num_blocks
        # Weak, so that salts that nobody uses any more do not pile up.
        self._roots: WeakValueDictionary[str, IndexEntry] = WeakValueDictionary()

    def root(self, name: str, key: bytes) -> IndexEntry:
        """The entry before the first block.

        Args:
            name: What tells roots apart exactly, such as a tenant's salt.
            key: Its key.

        Returns:
            The entry; it lasts as long as anything refers to it.
        """
        root = self._roots.get(name)
        if root is None:
            root = self._roots[name] = IndexEntry(key)
        return root

    def find(self, parent: IndexEntry, key: bytes, ids: bytes, extras: bytes) -> IndexEntry | None:
        """The entry that continues `parent` with certain tokens.

        Args:
            parent: Entry of the block before, or the root.
            key: Key of the block.
            ids: Its token ids as bytes.
            extras: What media adds to its key.

        Returns:
            The entry, or None.
        """
        entry = self._entries.get(key)
        if (
            entry is None
            or entry.ids != ids
            or entry.parent is not parent
            or entry.extras != extras
        ):
            return None
        return entry

    def of_block(self, block: int) -> IndexEntry | None:
        """The entry whose content a device block holds.

        Args:
            block: The block.

        Returns:
            The entry, or None.
        """
        return self._by_block[block]

    def publish(
        self,
        parent: IndexEntry,
        key: bytes,
        ids: bytes,
        extras: bytes,
        block: int,
        approximate: bool = False,
    ) -> tuple[IndexEntry | None, Outcome, int]:
        """Makes a device block findable.

        Args:
            parent: Entry of the block before, alive, or the root.
            key: Key of the block.
            ids: Its token ids as bytes.
            extras: What media adds to its key.
            block: The device block.
            approximate: Whether its content depends on a bounded replay.

        Returns:
            The entry that stands for the block, or None on a collision; what happened; and the device block of an
            unreachable entry that made room, or -1.
        """
        entry = self._entries.get(key)
        freed = NOWHERE
        if entry is not None and self.find(parent, key, ids, extras) is None:
            if entry.parent is not None and entry.parent.alive:
                return None, Outcome.COLLISION, NOWHERE
            freed = entry.device
            self.kill(entry)
            entry = None
        if entry is None:
            entry = self._entries[key] = IndexEntry(key, parent, ids, extras, approximate)
        elif entry.device != NOWHERE:
            return entry, Outcome.DUPLICATE, NOWHERE
        entry.device = block
        self._by_block[block] = entry
        self._report(entry, "device", True)
        return entry, Outcome.STORED, freed

    def drop_device(self, block: int) -> IndexEntry | None:
        """Notes that a device block loses its content.

        Args:
            block: The block.

        Returns:
            Its entry, dead unless the host holds it; None when it had none.
        """
        entry = self._by_block[block]
        if entry is not None:
            self._by_block[block] = None
            entry.device = NOWHERE
            self._report(entry, "device", False)
            self._bury(entry)
        return entry

    def add_host(self, entry: IndexEntry) -> int:
        """Gives an entry a host block, that of the least recently used entry when none is free.

        Args:
            entry: The entry, not on the host yet.

        Returns:
            The host block, or -1 when every one is pinned or there is no host tier.
        """
        placed = self.host.put(entry) if self.host is not None else None
        if placed is None:
            return NOWHERE
        entry.host, victim = placed
        if victim is not None:
            victim.host = NOWHERE
            self._report(victim, "host", False)
            self._bury(victim)
        self._report(entry, "host", True)
        return entry.host

    def drop_host(self, entry: IndexEntry) -> None:
        """Notes that an entry's host block is not usable.

        Args:
            entry: The entry.
        """
        if self.host is not None and entry.host != NOWHERE:
            self.host.remove(entry.host)
            entry.host = NOWHERE
            self._report(entry, "host", False)
            self._bury(entry)

    def add_window(self, entry: IndexEntry, now: float) -> int:
        """Gives an entry a window slot, that of the least recently used entry when none is free.

        Args:
            entry: The entry, without one yet.
            now: Time in seconds.

        Returns:
            The window slot, or -1 when there are none.
        """
        placed = self.windows.put(entry) if self.windows is not None else None
        if placed is None or self.windows is None:
            return NOWHERE
        entry.window, victim = placed
        if victim is not None:
            victim.window = NOWHERE
        self.windows.note_use(entry.window, now)
        return entry.window

    def drop_window(self, entry: IndexEntry) -> None:
        """Notes that an entry's window slot is not usable.

        Args:
            entry: The entry.
        """
        if self.windows is not None and entry.window != NOWHERE:
            self.windows.remove(entry.window)
            entry.window = NOWHERE

    def kill(self, entry: IndexEntry) -> None:
        """Removes an entry from every tier.

        Args:
            entry: The entry.
        """
        if entry.device != NOWHERE:
            self.drop_device(entry.device)
        self.drop_host(entry)

    def clear(self) -> list[int]:
        """Kills every entry.

        Returns:
            The device blocks that lost their content.
        """
        blocks = [entry.device for entry in self._entries.values() if entry.device != NOWHERE]
        for entry in list(self._entries.values()):
            self.kill(entry)
        return blocks

    def reset(self) -> None:
        """Forgets everything, in whatever state the books are."""
        for entry in self._entries.values():
            entry.alive, entry.parent = False, None
        self._entries.clear()
        self._by_block = [None] * len(self._by_block)
        for places in (self.host, self.windows):
            if places is not None:
                places.reset()

    def check(self, is_cached: Callable[[int], bool]) -> None:
        """Walks every entry in every tier.

        Args:
            is_cached: Whether the block pool takes a device block for findable.

        Raises:
            InvariantBroken: An entry and a tier disagree, or an entry's key is not that of its content.
        """
        for key, entry in self._entries.items():
            where = f"{entry!r} with parent {entry.parent!r}"
            if entry.key != key or not entry.alive or entry.parent is None:
                raise InvariantBroken(f"the index holds {where} under {key.hex()[:12]}.")
            if self.hash_fn(entry.parent.key + entry.ids + entry.extras) != key:
                raise InvariantBroken(f"the ids of {where} are not those of its key.")
            if entry.device == entry.host == NOWHERE:
                raise InvariantBroken(f"no tier holds {where}.")
            if entry.device != NOWHERE and self._by_block[entry.device] is not entry:
                raise InvariantBroken(
                    f"block {entry.device} belongs to another entry than {where}."
                )
            for places, place in ((self.host, entry.host), (self.windows, entry.window)):
                if place != NOWHERE and (places is None or places.get(place) is not entry):
                    raise InvariantBroken(f"place {place} of {places!r} does not hold {where}.")
        for block, of_block in enumerate(self._by_block):
            if (of_block is not None) != is_cached(block):
                raise InvariantBroken(
                    f"block {block} has the entry {of_block!r} and is not so marked."
                )
            if of_block is not None and self._entries.get(of_block.key) is not of_block:
                raise InvariantBroken(f"block {block} has {of_block!r}, which is not in the index.")
        for name, places in (("host", self.host), ("window", self.windows)):
            if places is not None:
                places.check()
                for place, item in places.items():
                    if not item.alive or getattr(item, name) != place:
                        raise InvariantBroken(f"{name} place {place} holds {item!r}.")

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[IndexEntry]:
        return iter(tuple(self._entries.values()))

    def _bury(self, entry: IndexEntry) -> None:
        if entry.device == entry.host == NOWHERE and entry.alive:
            self.drop_window(entry)
            entry.alive = False
            entry.parent = None  # else one orphan would keep a whole line of dead entries in memory
            del self._entries[entry.key]

    def _report(self, entry: IndexEntry, tier: str, stored: bool) -> None:
        if self._on_change is not None:
            self._on_change(entry, tier, stored)

    def __repr__(self) -> str:
        return f"PrefixIndex({len(self._entries)} entries, host={self.host!r}, windows={self.windows!r})"
