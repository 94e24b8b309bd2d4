"""One block of one prefix, wherever it is."""

from __future__ import annotations

__all__ = ["NOWHERE", "IndexEntry"]

NOWHERE = -1
"""The place of an entry in a tier that does not hold it."""


class IndexEntry:
    """One block of one prefix, in whichever tiers hold it.

    Attributes:
        key: Key of the block.
        parent: Entry of the block before it, or of the root; None for a root and once the entry is dead.
        ids: Token ids as little-endian int32 bytes.
        extras: What media adds to the key.
        device: Device block, or -1.
        host: Host block, or -1.
        window: Window slot with the rows before the end of the block, or -1.
        approximate: Whether the content depends on window rows that a bounded replay rebuilt.
        alive: Whether any tier holds it. What follows a dead entry cannot be reached any more.
    """

    __slots__ = (
        "__weakref__",
        "alive",
        "approximate",
        "device",
        "extras",
        "host",
        "ids",
        "key",
        "parent",
        "window",
    )

    def __init__(
        self,
        key: bytes,
        parent: IndexEntry | None = None,
        ids: bytes = b"",
        extras: bytes = b"",
        approximate: bool = False,
    ) -> None:
        self.key = key
        self.parent = parent
        self.ids = ids
        self.extras = extras
        self.device = self.host = self.window = NOWHERE
        self.approximate = approximate
        self.alive = True

    def __repr__(self) -> str:
        places = f"device={self.device}, host={self.host}, window={self.window}"
        return f"IndexEntry({self.key.hex()[:12]}, {places}{'' if self.alive else ', dead'})"
