"""How full a cache is, and what it saved."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CacheStats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """How full a cache is, and what it saved since the start.

    What a preempted request finds again is counted in `reread_tokens` and nowhere else, so that thrashing does not
    look like a good hit rate.

    Attributes:
        num_slots: Slots in all.
        free_slots: Slots that may be given out now.
        held_slots: Slots that requests hold.
        quarantined_slots: Slots given back whose last step was not collected yet.
        num_blocks: Blocks in all.
        block_size: Tokens in one block.
        free_blocks: Blocks without content.
        idle_blocks: Blocks with the entries of a prefix that nobody uses now; given out when `free_blocks` is 0.
        held_blocks: Blocks that requests hold, shared ones counted once.
        quarantined_blocks: Blocks that only steps in flight may touch.
        settled_tokens: Final tokens of the requests that hold slots.
        allocated_total: Requests that got a slot.
        refused_total: Requests for room that found none.
        queried_tokens_total: Tokens of the requests that got a slot for the first time, which is what the hits
            below are a share of.
        hit_tokens_total: Of these, tokens found in device blocks.
        host_hit_tokens_total: Of these, tokens found in host blocks.
        replayed_tokens_total: Tokens of hits that are run again for their window rows.
        window_hits_total: Hits whose window rows came from host memory.
        reread_tokens_total: Tokens found by requests that had lost their slot.
        stored_blocks_total: Blocks whose entries became findable.
        duplicate_blocks_total: Blocks that stayed private because the same entries were there already.
        evicted_blocks_total: Idle blocks given up for new content.
        num_host_blocks: Host blocks in all.
        used_host_blocks: Host blocks with content.
        saved_blocks_total: Blocks copied to the host.
        loaded_blocks_total: Blocks copied from the host.
        failed_loads_total: Requests whose copies from the host failed.
        num_window_slots: Host places for window rows in all.
        used_window_slots: Those with content.
        saved_windows_total: Window rows copied to the host.
    """

    num_slots: int
    free_slots: int
    held_slots: int
    quarantined_slots: int
    num_blocks: int
    block_size: int
    free_blocks: int
    idle_blocks: int = 0
    held_blocks: int = 0
    quarantined_blocks: int = 0
    settled_tokens: int = 0
    allocated_total: int = 0
    refused_total: int = 0
    queried_tokens_total: int = 0
    hit_tokens_total: int = 0
    host_hit_tokens_total: int = 0
    replayed_tokens_total: int = 0
    window_hits_total: int = 0
    reread_tokens_total: int = 0
    stored_blocks_total: int = 0
    duplicate_blocks_total: int = 0
    evicted_blocks_total: int = 0
    num_host_blocks: int = 0
    used_host_blocks: int = 0
    saved_blocks_total: int = 0
    loaded_blocks_total: int = 0
    failed_loads_total: int = 0
    num_window_slots: int = 0
    used_window_slots: int = 0
    saved_windows_total: int = 0

    @property
    def used_ratio(self) -> float:
        """Share of the blocks that cannot be given out now, from 0 to 1."""
        return (self.held_blocks + self.quarantined_blocks) / self.num_blocks

    @property
    def hit_ratio(self) -> float:
        """Share of the queried tokens that were found, from 0 to 1; 0 before the first query."""
        found = self.hit_tokens_total + self.host_hit_tokens_total
        return found / self.queried_tokens_total if self.queried_tokens_total else 0.0
