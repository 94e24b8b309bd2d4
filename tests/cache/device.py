"""A device and a host memory that remember which sequence every row was made of."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.core.plan import BlockUpdate, CacheCopy, CopyKind

Row = tuple[int, int] | None
GARBAGE = -1


def signatures(token_ids: Sequence[int], salt: str | None = None) -> list[int]:
    """One number a position that depends on every token up to it."""
    state, out = hash(salt), []
    for token in token_ids:
        state = hash((state, token))
        out.append(state)
    return out


class Device:
    """Blocks, block tables and window rings, and the host copies of blocks and windows."""

    def __init__(self, num_slots: int, num_blocks: int, block_size: int, ring: int, rows: int):
        self.block_size, self.ring_size, self.window_rows = block_size, ring, rows
        self.blocks = [[GARBAGE] * block_size for _ in range(num_blocks)]
        self.tables: list[list[int]] = [[] for _ in range(num_slots)]
        self.rings: list[dict[int, tuple[int, int]]] = [{} for _ in range(num_slots)]
        self.host_blocks: dict[int, list[int]] = {}
        self.host_windows: dict[int, list[tuple[int, int]]] = {}

    def carry_out(
        self,
        updates: Sequence[BlockUpdate],
        copies: Sequence[CacheCopy],
        failing: str | None = None,
    ) -> set[str]:
        """Applies what a plan carries; returns the requests whose loads failed."""
        failed = set()
        for update in updates:
            table = self.tables[update.slot]
            assert update.first == 0 or update.first == len(table), (update, table)
            table[update.first :] = update.blocks
        for copy in copies:
            if copy.kind is CopyKind.SAVE_BLOCK:
                self.host_blocks[copy.host] = list(self.blocks[copy.device])
            elif copy.kind is CopyKind.SAVE_WINDOWS:
                ring = self.rings[copy.device]
                first = max(0, copy.end_position - self.window_rows)
                self.host_windows[copy.host] = [
                    (p, ring[p % self.ring_size][1] if self.holds(copy.device, p) else GARBAGE)
                    for p in range(first, copy.end_position)
                ]
            elif copy.rid == failing:
                failed.add(copy.rid)
                if copy.kind is CopyKind.LOAD_BLOCK:
                    self.blocks[copy.device] = [GARBAGE] * self.block_size
            elif copy.kind is CopyKind.LOAD_BLOCK:
                self.blocks[copy.device] = list(self.host_blocks[copy.host])
            else:
                ring = self.rings[copy.device]
                ring.clear()
                for position, value in self.host_windows[copy.host]:
                    ring[position % self.ring_size] = (position, value)
        return failed

    def holds(self, slot: int, position: int) -> bool:
        found = self.rings[slot].get(position % self.ring_size)
        return found is not None and found[0] == position

    def write(self, slot: int, first: int, values: Sequence[int]) -> None:
        """Writes block rows and window rows."""
        for position, value in enumerate(values, start=first):
            block = self.tables[slot][position // self.block_size]
            self.blocks[block][position % self.block_size] = value
        self.write_ring(slot, first, values)

    def write_ring(self, slot: int, first: int, values: Sequence[int]) -> None:
        for position, value in enumerate(values, start=first):
            self.rings[slot][position % self.ring_size] = (position, value)

    def read(self, slot: int, count: int) -> list[int]:
        table = self.tables[slot]
        return [self.blocks[table[p // self.block_size]][p % self.block_size] for p in range(count)]
