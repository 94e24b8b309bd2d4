"""What a block cache manager keeps, and the changes that its calls are made of."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from deepinfer.cache._holding import Chain, Holding
from deepinfer.cache.block_keys import BlockHasher, CacheIdentity, HashFn, MediaSpan
from deepinfer.cache.block_pool import BlockPool
from deepinfer.cache.events import BlockRemoved, BlockStored, CacheCleared
from deepinfer.cache.host_tier import HostTier
from deepinfer.cache.index_entry import NOWHERE, IndexEntry
from deepinfer.cache.prefix_index import PrefixIndex
from deepinfer.cache.slot_pool import SlotPool
from deepinfer.cache.window_slots import WindowSlots
from deepinfer.core.clock import Clock
from deepinfer.core.errors import InvariantBroken
from deepinfer.core.plan import CacheCopy, CopyKind
from deepinfer.core.protocols import Allocation, Hit, StatsSink
from deepinfer.core.types import Request

MediaFn = Callable[[Request], Sequence[MediaSpan]]


class Books:
    """Slots, blocks, entries, and who holds them."""

    def __init__(
        self,
        slots: SlotPool,
        pool: BlockPool,
        *,
        block_size: int,
        prefix_cache: bool,
        identity: CacheIdentity,
        deterministic: bool,
        host: HostTier | None,
        windows: WindowSlots | None,
        media: MediaFn | None,
        sink: StatsSink | None,
        clock: Clock,
        hash_fn: HashFn,
    ) -> None:
        self.slots, self.pool = slots, pool
        self.block_size = block_size
        self.prefix_cache, self.deterministic = prefix_cache, deterministic
        self.identity, self.media, self.hash_fn = identity, media, hash_fn
        self.sink, self.clock = sink, clock
        self.index = PrefixIndex(
            pool.num_blocks, host, windows, self.report if sink is not None else None, hash_fn
        )
        self.held: dict[str, Holding] = {}
        self.chains: dict[str, Chain] = {}
        self.updates: dict[int, tuple[int, list[int]]] = {}
        self.copies: list[CacheCopy] = []
        self.admitted: OrderedDict[tuple[str, float], None] = OrderedDict()
        self.totals: Counter[str] = Counter()
        self.last_done = -1

    def admit(self, request: Request, hit: Hit) -> Holding | None:
        chain = self.chain(request)
        entries = self._still_there(chain, hit)
        if entries is None:
            return None
        in_prompt = request.num_prompt_tokens // self.block_size
        chain.hasher.truncate(max(len(entries), in_prompt))
        slot, generation = self.slots.take()
        holding = Holding(request, slot, generation, list(hit.blocks), hit, entries)
        holding.approximate = hit.approximate
        holding.may_publish = self.may_share(request) and not (
            hit.approximate and self.deterministic
        )
        for block in hit.blocks:
            self.pool.share(block)
        for number, place in enumerate(hit.host_blocks, start=len(hit.blocks)):
            self.host().pin(place)
            holding.pinned[number] = (entries[number], place)
        for entry in reversed(entries):  # the head stays longest
            if entry.host != NOWHERE:
                self.host().touch(entry.host)
        if hit.window_slot is not None and self.index.windows is not None:
            self.index.windows.note_use(hit.window_slot, self.clock.now())
            holding.window = (entries[-1], hit.window_slot)
            self.copies.append(
                CacheCopy(
                    kind=CopyKind.LOAD_WINDOWS,
                    device=slot,
                    host=hit.window_slot,
                    end_position=hit.num_tokens,
                    rid=request.rid,
                )
            )
        self.held[request.rid] = holding
        self.updates.pop(slot, None)
        self.updates[slot] = (0, list(hit.blocks))
        self._count_admission(request, hit)
        return holding

    def _still_there(self, chain: Chain, hit: Hit) -> list[IndexEntry] | None:
        """The entries of a hit, or None when one of its blocks is gone by now."""
        hasher, parent = chain.hasher, chain.root
        entries: list[IndexEntry] = []
        count = len(hit.blocks) + len(hit.host_blocks)
        if len(hasher.keys) < count:
            return None
        for number in range(count):
            entry = self.index.find(
                parent, hasher.keys[number], hasher.ids[number], hasher.extras[number]
            )
            if entry is None:
                return None
            on_device = number < len(hit.blocks)
            place = hit.blocks[number] if on_device else hit.host_blocks[number - len(hit.blocks)]
            if place != (entry.device if on_device else entry.host):
                return None
            entries.append(entry)
            parent = entry
        if hit.window_slot is not None and (not entries or parent.window != hit.window_slot):
            return None
        return entries

    def grow(self, holding: Holding, count: int) -> None:
        if count <= 0:
            return
        first = len(holding.table)
        for number in range(first, first + count):
            block, had_content = self.pool.take()
            if had_content:
                self._evict(block)
            holding.table.append(block)
            pinned = holding.pinned.pop(number, None)
            if pinned is not None:
                place = pinned[1]
                self.copies.append(
                    CacheCopy(
                        kind=CopyKind.LOAD_BLOCK, device=block, host=place, rid=holding.request.rid
                    )
                )
                self.host().unpin(place)
                holding.loaded.append(pinned)
                self.totals["loaded_blocks_total"] += 1
        pending = self.updates.get(holding.slot)
        if pending is None:
            self.updates[holding.slot] = (first, holding.table[first:])
        else:
            pending[1].extend(holding.table[first:])

    def _evict(self, block: int) -> None:
        entry = self.index.of_block(block)
        if entry is not None and entry.host == NOWHERE:
            place = self.index.add_host(entry)
            if place != NOWHERE:
                self.copies.append(CacheCopy(kind=CopyKind.SAVE_BLOCK, device=block, host=place))
                self.totals["saved_blocks_total"] += 1
        self.index.drop_device(block)
        self.totals["evicted_blocks_total"] += 1

    def _count_admission(self, request: Request, hit: Hit) -> None:
        totals, size = self.totals, self.block_size
        totals["allocated_total"] += 1
        key = (request.rid, request.arrival_s)
        if key in self.admitted:
            totals["reread_tokens_total"] += hit.num_tokens
            return
        self.admitted[key] = None
        if len(self.admitted) > max(1024, 4 * self.slots.num_slots):
            self.admitted.popitem(last=False)
        totals["queried_tokens_total"] += request.num_prompt_tokens
        totals["hit_tokens_total"] += len(hit.blocks) * size
        totals["host_hit_tokens_total"] += len(hit.host_blocks) * size
        totals["replayed_tokens_total"] += hit.replay_tokens
        totals["window_hits_total"] += hit.window_slot is not None

    def chain(self, request: Request) -> Chain:
        chain = self.chains.get(request.rid)
        if chain is None or chain.request is not request:
            salt = request.cache_salt
            key = self.identity.root_key(salt, self.hash_fn)
            media = self.media(request) if self.media is not None and request.images else ()
            chain = self.chains[request.rid] = Chain(
                request,
                self.index.root("" if salt is None else f"salt:{salt}", key),
                BlockHasher(key, self.block_size, media=media, hash_fn=self.hash_fn),
            )
        return chain

    def may_share(self, request: Request) -> bool:
        return self.prefix_cache and (self.media is not None or not request.images)

    def host(self) -> HostTier:
        host = self.index.host
        if host is None:
            raise InvariantBroken("there is no host tier, and a hit names host blocks.")
        return host

    def allocation(self, holding: Holding) -> Allocation:
        return Allocation(
            slot=holding.slot,
            slot_generation=holding.slot_generation,
            num_tokens=len(holding.table) * self.block_size,
            blocks=tuple(holding.table),
        )

    def report(self, entry: IndexEntry, tier: str, stored: bool) -> None:
        if self.sink is None:
            return
        now = self.clock.now()
        if stored:
            parent = entry.parent.key if entry.parent is not None else b""
            self.sink.record(
                BlockStored(
                    time_s=now, key=entry.key, parent=parent, token_ids=entry.ids, tier=tier
                )
            )
        else:
            self.sink.record(BlockRemoved(time_s=now, key=entry.key, tier=tier))

    def reset(self) -> None:
        """Takes everything back, in whatever state the books are."""
        self.slots.reset()
        self.pool.reset()
        self.index.reset()
        self.held.clear()
        self.chains.clear()
        self.updates.clear()
        self.copies.clear()
        self.report_cleared()

    def report_cleared(self) -> None:
        if self.sink is not None:
            self.sink.record(CacheCleared(time_s=self.clock.now()))
