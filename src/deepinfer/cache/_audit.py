"""Walks every book of a block cache manager."""

from __future__ import annotations

from deepinfer.cache._books import Books
from deepinfer.cache._holding import Chain, Holding
from deepinfer.cache.prefix_index import PrefixIndex
from deepinfer.core.errors import InvariantBroken


def audit(books: Books) -> None:
    """Checks the books against each other.

    Args:
        books: All of them.

    Raises:
        InvariantBroken: They do not add up.
    """
    pool, index, held, block_size = books.pool, books.index, books.held, books.block_size
    books.slots.check((rid, h.slot, h.slot_generation) for rid, h in held.items())
    pool.check([holding.table for holding in held.values()])
    index.check(pool.is_cached)
    pins: dict[int, int] = {}
    for rid, holding in held.items():
        chain = books.chains.get(rid)
        if chain is None or chain.request is not holding.request:
            raise InvariantBroken(f"request {rid!r} holds blocks and has no keys.")
        if not 0 <= holding.settled <= len(holding.table) * block_size:
            raise InvariantBroken(
                f"request {rid!r} has {holding.settled} settled tokens in {len(holding.table)} blocks "
                f"of {block_size}."
            )
        if len(set(holding.table)) != len(holding.table):
            raise InvariantBroken(f"a block is twice in the table of {rid!r}: {holding.table}.")
        _check_entries(rid, holding, chain, index, block_size)
        for entry, place in holding.pinned.values():
            pins[place] = pins.get(place, 0) + 1
            if index.host is None or index.host.get(place) not in (entry, None):
                raise InvariantBroken(
                    f"request {rid!r} waits for host block {place}, now another's."
                )
    pinned = index.host.pins() if index.host is not None else {}
    if pinned != pins:
        raise InvariantBroken(f"host blocks are pinned as {pinned}, and requests wait for {pins}.")


def _check_entries(
    rid: str, holding: Holding, chain: Chain, index: PrefixIndex, block_size: int
) -> None:
    final = max(holding.settled, holding.hit.num_tokens)
    for number, block in enumerate(holding.table):
        entry = index.of_block(block)
        if entry is None:
            continue
        if (number + 1) * block_size > final:
            raise InvariantBroken(
                f"block {block} of {rid!r} can be found, and only {final} of its tokens are final."
            )
        if number >= len(chain.hasher.ids) or entry.ids != chain.hasher.ids[number]:
            raise InvariantBroken(
                f"block {number} of {rid!r} can be found under other ids than it holds: {entry!r}."
            )
