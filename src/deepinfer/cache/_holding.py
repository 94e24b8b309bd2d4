"""The books of one request that holds a slot, and of what it is about to find."""

from __future__ import annotations

from dataclasses import dataclass, field

from deepinfer.cache.block_keys import BlockHasher
from deepinfer.cache.index_entry import IndexEntry
from deepinfer.core.protocols import Hit
from deepinfer.core.types import Request


@dataclass(slots=True)
class Chain:
    """Keys of one request's tokens, kept from its first lookup to its release.

    Attributes:
        request: The request; its prompt never changes, so the keys of the prompt are computed once.
        root: Entry before the first block.
        hasher: Keys and ids of the blocks.
    """

    request: Request
    root: IndexEntry
    hasher: BlockHasher


@dataclass(slots=True)
class Holding:
    """What one request holds.

    Attributes:
        request: The request.
        slot: Its slot.
        slot_generation: Generation of the slot.
        table: Its blocks, in order; only ever grows.
        hit: What it adopted.
        entries: The entry that stands for each leading block that was published or adopted.
        settled: Tokens that are final.
        num_known: Tokens that there were when it was settled last.
        may_publish: Whether its blocks may become findable.
        approximate: Whether its blocks depend on a bounded replay.
        pinned: Host blocks of the hit that are still to be loaded, by index in the table.
        loaded: Entries and host blocks whose copies are not known to have worked.
        window: Entry and window slot that were loaded, or None.
    """

    request: Request
    slot: int
    slot_generation: int
    table: list[int]
    hit: Hit
    entries: list[IndexEntry]
    settled: int = 0
    num_known: int = 0
    may_publish: bool = True
    approximate: bool = False
    pinned: dict[int, tuple[IndexEntry, int]] = field(default_factory=dict)
    loaded: list[tuple[IndexEntry, int]] = field(default_factory=list)
    window: tuple[IndexEntry, int] | None = None
