"""Numbered places that hold one item each and give up the least recently used one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

from deepinfer.core.errors import InvariantBroken

Item = TypeVar("Item")


class LruSlots(Generic[Item]):
    """Base of the host side's indices: items by place, least recently used first, some of them pinned."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._order: OrderedDict[int, Item] = OrderedDict()
        self._pinned: dict[int, tuple[Item | None, int]] = {}

    @property
    def num_used(self) -> int:
        """Places that are not free."""
        return self.capacity - len(self._free)

    def get(self, place: int) -> Item | None:
        """The item in a place.

        Args:
            place: Number of the place.

        Returns:
            The item, or None for a free place.
        """
        pinned = self._pinned.get(place)
        return self._order.get(place) if pinned is None else pinned[0]

    def put(self, item: Item) -> tuple[int, Item | None] | None:
        """Stores an item in a free place, or in that of the least recently used item that is not pinned.

        Args:
            item: The item.

        Returns:
            The place, and the item that was given up for it or None; or None when every place is pinned.
        """
        victim = None
        if self._free:
            place = self._free.pop()
        elif self._order:
            place, victim = self._order.popitem(last=False)
        else:
            return None
        self._order[place] = item
        return place, victim

    def touch(self, place: int) -> None:
        """Makes an item the most recently used one.

        Args:
            place: Its place.
        """
        if place in self._order:
            self._order.move_to_end(place)

    def pin(self, place: int) -> None:
        """Keeps an item from being given up until `unpin`; pins add up.

        Args:
            place: Its place.
        """
        item, count = self._pinned.get(place, (None, 0))
        if not count:
            item = self._order.pop(place)
        self._pinned[place] = (item, count + 1)

    def unpin(self, place: int) -> None:
        """Takes a pin back; the last one makes the item the most recently used.

        Args:
            place: Its place.
        """
        item, count = self._pinned.pop(place)
        if count > 1:
            self._pinned[place] = (item, count - 1)
        elif item is None:
            self._free.append(place)
        else:
            self._order[place] = item

    def remove(self, place: int) -> None:
        """Forgets an item; a pinned place becomes free with its last pin.

        Args:
            place: Its place.
        """
        if place in self._pinned:
            self._pinned[place] = (None, self._pinned[place][1])
        else:
            del self._order[place]
            self._free.append(place)

    def items(self) -> Iterator[tuple[int, Item]]:
        """Places with their items, pinned ones last."""
        yield from self._order.items()
        for place, (item, _) in self._pinned.items():
            if item is not None:
                yield place, item

    def pins(self) -> dict[int, int]:
        """How often each pinned place is pinned."""
        return {place: count for place, (_, count) in self._pinned.items()}

    def check(self) -> None:
        """Walks the books.

        Raises:
            InvariantBroken: A place is lost or used twice.
        """
        places = sorted([*self._free, *self._order, *self._pinned])
        if places != list(range(self.capacity)):
            raise InvariantBroken(
                f"{type(self).__name__} has places {places} of {self.capacity} in its books."
            )

    def reset(self) -> None:
        """Forgets every item and every pin."""
        self._free = list(range(self.capacity - 1, -1, -1))
        self._order.clear()
        self._pinned.clear()

    def __len__(self) -> int:
        return len(self._order) + sum(1 for item, _ in self._pinned.values() if item is not None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} of {self.capacity} used)"
