"""The cache manager with blocks, shared prefixes, and a host tier."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.cache._audit import audit
from deepinfer.cache._books import Books, MediaFn
from deepinfer.cache._publish import publish_settled, save_windows
from deepinfer.cache._search import choose, walk
from deepinfer.cache.block_keys import CacheIdentity, HashFn, sha256
from deepinfer.cache.block_pool import BlockPool
from deepinfer.cache.host_tier import HostTier
from deepinfer.cache.replay import ReplayPolicy
from deepinfer.cache.slot_pool import SlotPool
from deepinfer.cache.stats import CacheStats
from deepinfer.cache.window_slots import WindowSlots
from deepinfer.core import _checks as checks
from deepinfer.core.clock import Clock, MonotonicClock
from deepinfer.core.errors import ConfigError, InvariantBroken
from deepinfer.core.plan import BlockUpdate, CacheCopy
from deepinfer.core.protocols import Allocation, Hit, StatsSink
from deepinfer.core.types import Request

__all__ = ["BlockCacheManager"]


class BlockCacheManager:
    """Hands out slots and blocks, shares the blocks of equal prefixes, and keeps books of copies to host memory.

    It keeps books only. What it decides reaches the runner through `take_updates`: new entries of block tables, and
    copies, which are to be made in order before the forward pass of the next launched plan.

    * A block becomes findable when all of its tokens are settled, never before, and never if a replay wrote it.
    * A block that a table points to is never taken from it; equal blocks are not merged.
    * Blocks and slots that a step in flight may touch wait until that step was collected.
    * Idle blocks are given up least recently used first, of one request the tail first. With a host tier they are
      saved to it on the way.
    * A block that a copy from the host fills becomes findable once tokens behind it are settled.

    Several requests may be admitted in one launch. `allocate` each with its hit and `upto=len(hit.blocks) * block_size`
    first, which needs no free block, and let them grow afterwards: then none of them can take an idle block that
    another one is about to share. As long as the sum of `blocks_for` is within `num_free_blocks`, all of it succeeds.

    Args:
        num_slots: Requests that can hold state at once.
        num_blocks: Blocks in all.
        block_size: Tokens in one block.
        max_tokens: Most tokens of one request, or None for as many as there are.
        prefix_cache: Whether anything is ever shared.
        replay: What has to be run again after a hit.
        identity: What the content of blocks depends on besides tokens.
        deterministic: Whether blocks that depend on a bounded replay stay private.
        num_host_blocks: Blocks of host memory.
        num_window_slots: Places in host memory for window rows.
        window_rows: Rows that such a place holds, `CacheLayout.window_rows`.
        ring_spare: Rows of a window ring beyond `window_rows`, less what a step in flight may write when its request
            ends: windows are saved when at most so many tokens follow the last full block.
        window_ttl_s: Seconds after its last use from which a window slot is not used any more, or None.
        media: Gives the media of a request with images; without it such requests share nothing.
        sink: Where `BlockStored`, `BlockRemoved` and `CacheCleared` go, or None.
        clock: Time of events and of window slots.
        hash_fn: Digest for keys; another one than SHA-256 is for tests.

    Raises:
        ConfigError: A number is out of range.

    Examples:
        >>> cache = BlockCacheManager(num_slots=2, num_blocks=8, block_size=4)
        >>> first = Request(rid="a", prompt_token_ids=tuple(range(9)))
        >>> cache.allocate(first, None, upto=9).blocks
        (0, 1, 2)
        >>> cache.settle(first, first.prompt_token_ids, settled=9, step=0)
        >>> second = Request(rid="b", prompt_token_ids=tuple(range(9)))
        >>> cache.lookup(second, second.prompt_token_ids, limit=8)
        Hit(num_tokens=8, blocks=(0, 1), host_blocks=(), window_slot=None, replay_start=8, approximate=False)
    """

    def __init__(
        self,
        *,
        num_slots: int,
        num_blocks: int,
        block_size: int,
        max_tokens: int | None = None,
        prefix_cache: bool = True,
        replay: ReplayPolicy | None = None,
        identity: CacheIdentity | None = None,
        deterministic: bool = False,
        num_host_blocks: int = 0,
        num_window_slots: int = 0,
        window_rows: int = 0,
        ring_spare: int = 0,
        window_ttl_s: float | None = None,
        media: MediaFn | None = None,
        sink: StatsSink | None = None,
        clock: Clock | None = None,
        hash_fn: HashFn = sha256,
    ) -> None:
        self._books = books = Books(
            SlotPool(num_slots),
            BlockPool(num_blocks),
            block_size=checks.check_int("block_size", block_size, 1, 65_536, ConfigError),
            prefix_cache=prefix_cache,
            identity=identity or CacheIdentity(),
            deterministic=deterministic,
            host=HostTier(num_host_blocks) if num_host_blocks else None,
            windows=WindowSlots(num_window_slots, window_ttl_s) if num_window_slots else None,
            media=media,
            sink=sink,
            clock=clock or MonotonicClock(),
            hash_fn=hash_fn,
        )
        self.num_slots, self.num_blocks = books.slots.num_slots, books.pool.num_blocks
        self.block_size = books.block_size
        whole = self.num_blocks * self.block_size
        most = whole if max_tokens is None else max_tokens
        self.max_tokens = min(whole, checks.check_int("max_tokens", most, 1, 2**62, ConfigError))
        self.replay = replay or ReplayPolicy()
        self.window_rows = checks.check_int("window_rows", window_rows, 0, 2**31 - 1, ConfigError)
        self.ring_spare = checks.check_int("ring_spare", ring_spare, 0, 2**31 - 1, ConfigError)

    @property
    def num_held(self) -> int:
        """Requests that hold a slot."""
        return len(self._books.held)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that may be given out now, those of idle cached prefixes included."""
        return self._books.pool.num_free

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks given back that a step in flight may still touch."""
        return self._books.pool.num_quarantined

    @property
    def capacity_tokens(self) -> int:
        """Most tokens that one request can hold in an empty cache."""
        return self.max_tokens

    def peek(self, count: int) -> tuple[tuple[int, int], ...]:
        """What the next allocations of new requests will return; changes nothing.

        Args:
            count: How many, from 0.

        Returns:
            Up to `count` pairs of slot and slot generation, in the order in which they will be given out.
        """
        return self._books.slots.peek(count)

    def holding(self, request: Request) -> Allocation | None:
        """What a request holds.

        Args:
            request: The request.

        Returns:
            Its slot and blocks, or None.
        """
        holding = self._books.held.get(request.rid)
        return None if holding is None else self._books.allocation(holding)

    def lookup(self, request: Request, token_ids: Sequence[int], limit: int) -> Hit:
        """Finds cached entries for the beginning of a sequence; changes nothing that can be seen.

        Of what was found, the hit is taken that leaves the fewest tokens to run, a replay's included; of equal ones the
        one with the numbers of a full run. At least one token is left to run.

        Args:
            request: The request. One that asks for log probabilities of its prompt finds nothing, nor does one with
                images when the manager was not told how to identify them.
            token_ids: Its tokens so far; the prompt, then what was generated before it lost its slot.
            limit: Most tokens to find.

        Returns:
            The hit, empty when there is none worth taking. Its length is a multiple of the block size.
        """
        books = self._books
        most = min(limit, len(token_ids) - 1) // self.block_size
        if most <= 0 or not books.may_share(request) or request.params.prompt_logprobs is not None:
            return Hit()
        entries, num_device = walk(books.index, books.chain(request), token_ids, most)
        return choose(
            books.index,
            self.replay,
            entries,
            num_device,
            self.block_size,
            request.num_prompt_tokens,
            books.clock.now(),
        )

    def blocks_for(self, request: Request, hit: Hit | None, upto: int) -> int:
        """How far `num_free_blocks` would fall if the request got room for `upto` tokens; changes nothing.

        Args:
            request: The request.
            hit: What `lookup` found, for a request that holds nothing yet, or None.
            upto: Tokens to make room for.

        Returns:
            New blocks, and blocks of the hit that are idle now.
        """
        wanted = -(-upto // self.block_size)
        holding = self._books.held.get(request.rid)
        if holding is not None:
            return max(0, wanted - len(holding.table))
        shared = hit.blocks if hit is not None else ()
        return max(0, wanted - len(shared)) + sum(map(self._books.pool.is_free, shared))

    def freed_by(self, request: Request) -> int:
        """How many blocks come back when a request is released: those that it alone holds; changes nothing.

        Args:
            request: The request.

        Returns:
            The blocks; 0 when it holds nothing.
        """
        holding = self._books.held.get(request.rid)
        table = holding.table if holding is not None else ()
        return sum(self._books.pool.references(block) == 1 for block in table)

    def allocate(
        self, request: Request, hit: Hit | None, upto: int, reserve: int = 0
    ) -> Allocation | None:
        """Gives a request a slot and room for its first `upto` tokens, or lets it grow.

        Args:
            request: The request; asking again for the same one grows what it has, and never shrinks it.
            hit: What `lookup` found for this very request, when it holds nothing yet, or None. Blocks that are to be
                loaded from the host may be left to a later call by a lower `upto`.
            upto: Tokens to make room for.
            reserve: Blocks to leave free for others.

        Returns:
            What the request now holds; or None, with nothing changed, when there is no room, `upto` exceeds
            `capacity_tokens`, or something that the hit names is gone.
        """
        books = self._books
        need = self.blocks_for(request, hit, upto)
        holding = books.held.get(request.rid)
        fits = upto <= self.max_tokens and (not need or need + reserve <= books.pool.num_free)
        if fits and holding is None and books.slots.num_free:
            holding = books.admit(request, hit or Hit())
        elif not fits:
            holding = None
        if holding is None:
            books.totals["refused_total"] += 1
            return None
        books.grow(holding, -(-upto // self.block_size) - len(holding.table))
        return books.allocation(holding)

    def take_updates(self) -> tuple[tuple[BlockUpdate, ...], tuple[CacheCopy, ...]]:
        """Block table entries and copies since the last call.

        Returns:
            At most one update a slot, and the copies in the order in which they must be made.
        """
        books = self._books
        updates = tuple(
            BlockUpdate(slot=slot, first=first, blocks=tuple(blocks))
            for slot, (first, blocks) in books.updates.items()
        )
        copies = tuple(books.copies)
        books.updates.clear()
        books.copies.clear()
        return updates, copies

    def settle(self, request: Request, token_ids: Sequence[int], settled: int, step: int) -> None:
        """Notes that the first `settled` tokens of a request are final, and lets others find its full blocks.

        Args:
            request: The request; one that holds nothing is ignored.
            token_ids: Its tokens; only the first `settled` are looked at.
            settled: Tokens that are final. A lower number than before changes nothing.
            step: The step that made them so.

        Raises:
            InvariantBroken: More is settled than there is room or ids for, or an id stands for an unknown token.
        """
        holding = self._books.held.get(request.rid)
        if holding is None or settled <= holding.settled:
            return
        if settled > min(len(holding.table) * self.block_size, len(token_ids)):
            raise InvariantBroken(
                f"step {step} settled {settled} tokens of {request.rid!r}, which has {len(token_ids)} "
                f"tokens and {len(holding.table)} blocks of {self.block_size}."
            )
        holding.settled, holding.num_known = settled, len(token_ids)
        if holding.may_publish:
            publish_settled(self._books, holding, token_ids)

    def release(self, request: Request, after_step: int) -> None:
        """Takes slot and blocks back once step `after_step` was collected; what was published stays findable.

        Args:
            request: The request; of one that holds nothing, the keys computed for `lookup` are forgotten.
            after_step: The last step that may touch them.
        """
        books = self._books
        books.chains.pop(request.rid, None)
        holding = books.held.pop(request.rid, None)
        if holding is None:
            return
        for _, place in holding.pinned.values():
            books.host().unpin(place)
        books.updates.pop(holding.slot, None)
        books.copies = [copy for copy in books.copies if copy.rid != request.rid]
        save_windows(
            self._books,
            holding,
            window_rows=self.window_rows,
            ring_spare=self.ring_spare,
            in_flight=after_step > books.last_done,
        )
        books.slots.give_back(holding.slot, after_step)
        books.pool.give_back(holding.table, after_step)

    def load_failed(self, request: Request) -> None:
        """Forgets the host entries that a request was to get from a copy that failed; it publishes nothing more.

        Args:
            request: The request; one that holds nothing is ignored.
        """
        books = self._books
        holding = books.held.get(request.rid)
        if holding is None:
            return
        books.totals["failed_loads_total"] += 1
        holding.may_publish = False
        for entry, place in holding.loaded:
            if entry.host == place:
                books.index.drop_host(entry)
        if holding.window is not None and holding.window[0].window == holding.window[1]:
            books.index.drop_window(holding.window[0])

    def step_done(self, step: int) -> int:
        """Notes that a step, and so every earlier one, was collected.

        Args:
            step: Its id.

        Returns:
            How many slots and blocks came back.
        """
        books = self._books
        books.last_done = max(books.last_done, step)
        return books.slots.step_done(step) + books.pool.step_done(step)

    def reset_prefix_cache(self) -> None:
        """Lets nothing that is cached now be found again; requests keep what they hold and publish nothing more."""
        books = self._books
        for block in books.index.clear():
            books.pool.forget(block)
        for holding in books.held.values():
            holding.may_publish = False
        books.report_cleared()

    def reset(self) -> None:
        """Takes everything back, in whatever state the books are; what was given out before is void."""
        self._books.reset()

    def stats(self) -> CacheStats:
        """How full the cache is, and what it saved."""
        books = self._books
        host, windows = books.index.host, books.index.windows
        return CacheStats(
            num_slots=self.num_slots,
            free_slots=books.slots.num_free,
            held_slots=len(books.held),
            quarantined_slots=books.slots.num_quarantined,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            free_blocks=books.pool.num_blank,
            idle_blocks=books.pool.num_idle,
            held_blocks=books.pool.num_held,
            quarantined_blocks=books.pool.num_quarantined,
            settled_tokens=sum(holding.settled for holding in books.held.values()),
            num_host_blocks=host.capacity if host is not None else 0,
            used_host_blocks=host.num_used if host is not None else 0,
            num_window_slots=windows.capacity if windows is not None else 0,
            used_window_slots=windows.num_used if windows is not None else 0,
            **books.totals,
        )

    def check(self) -> None:
        """Walks every book: blocks, tables, slots, entries, host blocks, window slots; costs as much as there is.

        Raises:
            InvariantBroken: They do not add up.
        """
        audit(self._books)

    def __repr__(self) -> str:
        return f"BlockCacheManager({len(self._books.held)} of {self.num_slots} slots held, {self._books.pool!r})"
