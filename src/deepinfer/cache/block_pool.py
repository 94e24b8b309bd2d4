"""Which blocks are free, idle, held, or waiting for a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError, InvariantBroken

__all__ = ["BlockPool"]


class BlockPool:
    """Reference counts and free lists over blocks numbered from 0.

    A block is in exactly one state: *blank* (free, without content), *idle* (free, with content that a prefix index
    still points to), *held* (in at least one block table), or *quarantined* (in no table, but a step in flight may
    still touch it). Blank blocks are given out first, those freed earliest first; then idle ones, least recently
    used first. The blocks of one table are given back from its end, so that of a prefix the tail goes first and the
    head, which more requests share, stays longest.

    Every operation on a block takes constant time: both free lists are doubly linked through arrays that are as long
    as the pool. There is no null block: what a window leaves behind lives in slots, so tables have no holes, and
    nothing reads a table behind its last entry.

    Args:
        num_blocks: Number of blocks, from 1.

    Raises:
        ConfigError: The number is out of range.

    Examples:
        >>> pool = BlockPool(3)
        >>> table = [pool.take()[0], pool.take()[0]]
        >>> table, pool.num_free
        ([0, 1], 1)
        >>> pool.give_back(table, after_step=4)
        >>> pool.num_free, pool.num_quarantined, pool.step_done(4), pool.num_free
        (1, 2, 2, 3)
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = checks.check_int("num_blocks", num_blocks, 1, 2**31 - 3, ConfigError)
        self._last_done = -1
        self._build()

    def _build(self) -> None:
        count = self.num_blocks
        self._blank, self._idle = count, count + 1  # the heads of the two lists
        self._next = [*range(1, count), count, 0, count + 1]
        self._previous = [count, *range(count - 1), count - 1, count + 1]
        self._references = [0] * count  # tables
        self._leaving = [0] * count  # tables in quarantine
        self._cached = bytearray(count)
        self._num_blank, self._num_idle, self._num_quarantined = count, 0, 0
        self._quarantine: dict[int, list[Sequence[int]]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `take` may return: blank and idle ones."""
        return self._num_blank + self._num_idle

    @property
    def num_blank(self) -> int:
        """Free blocks without content."""
        return self._num_blank

    @property
    def num_idle(self) -> int:
        """Free blocks with content that can still be found."""
        return self._num_idle

    @property
    def num_quarantined(self) -> int:
        """Blocks that no table holds and that a step in flight may touch."""
        return self._num_quarantined

    @property
    def num_held(self) -> int:
        """Blocks that at least one table holds."""
        return self.num_blocks - self._num_blank - self._num_idle - self._num_quarantined

    def references(self, block: int) -> int:
        """Number of tables that hold a block.

        Args:
            block: The block.

        Returns:
            The number; tables in quarantine do not count.
        """
        return self._references[block]

    def is_free(self, block: int) -> bool:
        """Whether a block is blank or idle.

        Args:
            block: The block.

        Returns:
            Whether `take` may return it.
        """
        return not self._references[block] and not self._leaving[block]

    def is_cached(self, block: int) -> bool:
        """Whether the content of a block can be found.

        Args:
            block: The block.

        Returns:
            What `mark` and `forget` said last.
        """
        return bool(self._cached[block])

    def take(self) -> tuple[int, bool]:
        """Gives out a free block for one table.

        Returns:
            The block, and whether content was given up for it: it was idle, and whoever finds it there must forget it.

        Raises:
            InvariantBroken: No block is free.
        """
        had_content = not self._num_blank
        block = self._next[self._idle if had_content else self._blank]
        if block >= self.num_blocks:
            raise InvariantBroken(
                f"none of the {self.num_blocks} blocks is free; ask num_free first."
            )
        self._unlink(block)
        self._cached[block] = 0
        self._references[block] = 1
        return block, had_content

    def share(self, block: int) -> None:
        """Adds a table that holds a block with content.

        Args:
            block: The block, idle or held.
        """
        if not self._references[block]:
            if self._leaving[block]:
                self._num_quarantined -= 1
            else:
                self._unlink(block)
        self._references[block] += 1

    def give_back(self, table: Sequence[int], after_step: int) -> None:
        """Takes the blocks of one table back, the last one first.

        Args:
            table: The blocks, in order; the caller does not change it afterwards.
            after_step: The last step that may touch them; those that no other table holds stay in quarantine until
                it was collected.
        """
        references = self._references
        for block in table:
            if references[block] < 1:
                raise InvariantBroken(f"block {block} is given back, and no table holds it.")
        if after_step <= self._last_done:
            for block in reversed(table):
                references[block] -= 1
                if not references[block] and self._leaving[block]:
                    self._num_quarantined += 1
                self._settle(block)
            return
        for block in table:
            references[block] -= 1
            self._leaving[block] += 1
            if not references[block]:
                self._num_quarantined += 1
        self._quarantine.setdefault(after_step, []).append(table)

    def step_done(self, step: int) -> int:
        """Notes that a step, and so every earlier one, was collected.

        Args:
            step: Its id.

        Returns:
            How many blocks became free.
        """
        self._last_done = max(self._last_done, step)
        before = self.num_free
        for due in sorted(key for key in self._quarantine if key <= step):
            for table in self._quarantine.pop(due):
                for block in reversed(table):
                    self._leaving[block] -= 1
                    if not self._references[block] and not self._leaving[block]:
                        self._num_quarantined -= 1
                        self._settle(block)
        return self.num_free - before

    def mark(self, block: int) -> None:
        """Notes that the content of a block can be found from now on.

        Args:
            block: The block, held by a table.
        """
        self._cached[block] = 1

    def forget(self, block: int) -> None:
        """Notes that the content of a block cannot be found any more.

        Args:
            block: The block; an idle one becomes blank.
        """
        if self._cached[block]:
            if self.is_free(block):
                self._unlink(block)
                self._cached[block] = 0
                self._settle(block)
            self._cached[block] = 0

    def reset(self) -> None:
        """Takes every block back without content, in whatever state the books are."""
        self._build()

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Walks both free lists, the quarantine, and every table.

        Args:
            tables: The tables that hold blocks now.

        Raises:
            InvariantBroken: A block is in no state or in two, or a count is wrong.
        """
        count = self.num_blocks
        blank, idle = self._walk(self._blank), self._walk(self._idle)
        references = [0] * count
        for table in tables:
            for block in table:
                if not 0 <= block < count:
                    raise InvariantBroken(f"a table holds block {block} of {count}.")
                references[block] += 1
        leaving = [0] * count
        for step, left in self._quarantine.items():
            if step <= self._last_done:
                raise InvariantBroken(f"blocks wait for step {step}, which is done.")
            for table in left:
                for block in table:
                    leaving[block] += 1
        for block in range(count):
            if references[block] != self._references[block]:
                raise InvariantBroken(
                    f"block {block} counts {self._references[block]} tables, and {references[block]} hold it."
                )
            if leaving[block] != self._leaving[block]:
                raise InvariantBroken(f"block {block} counts wrong in quarantine.")
        free = set(blank) | set(idle)
        used = {b for b in range(count) if references[b] or leaving[b]}
        if free & used or free | used != set(range(count)) or len(blank) + len(idle) != len(free):
            raise InvariantBroken(
                f"blocks {sorted(free & used)} are free and in use, or blocks "
                f"{sorted(set(range(count)) - free - used)} are lost."
            )
        if any(self._cached[b] for b in blank) or not all(self._cached[b] for b in idle):
            raise InvariantBroken("a blank block has content, or an idle one has none.")
        waiting = sum(1 for b in range(count) if leaving[b] and not references[b])
        counts = (self._num_blank, self._num_idle, self._num_quarantined)
        if counts != (len(blank), len(idle), waiting):
            raise InvariantBroken(
                f"(blank, idle, quarantined) is counted as {counts} and is "
                f"{(len(blank), len(idle), waiting)}."
            )

    def _walk(self, head: int) -> list[int]:
        found, block = [], self._next[head]
        while block != head:
            found.append(block)
            following = self._next[block]
            if len(found) > self.num_blocks or self._previous[following] != block:
                raise InvariantBroken(f"a free list is broken at block {block}.")
            block = following
        return found

    def _settle(self, block: int) -> None:
        if self._references[block] or self._leaving[block]:
            return
        if self._cached[block]:
            head = self._idle
            self._num_idle += 1
        else:
            head = self._blank
            self._num_blank += 1
        last = self._previous[head]
        self._next[last] = self._previous[head] = block
        self._previous[block], self._next[block] = last, head

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        if self._cached[block]:
            self._num_idle -= 1
        else:
            self._num_blank -= 1

    def __repr__(self) -> str:
        return (
            f"BlockPool({self.num_blocks} blocks: {self._num_blank} blank, {self._num_idle} idle, "
            f"{self.num_held} held, {self._num_quarantined} quarantined)"
        )
