"""Finding the hit that leaves the fewest tokens to run."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.cache._holding import Chain
from deepinfer.cache.index_entry import NOWHERE, IndexEntry
from deepinfer.cache.prefix_index import PrefixIndex
from deepinfer.cache.replay import ReplayPolicy
from deepinfer.core.protocols import Hit


def walk(
    index: PrefixIndex, chain: Chain, token_ids: Sequence[int], most: int
) -> tuple[list[IndexEntry], int]:
    """Follows a prefix block by block: device blocks, then host blocks.

    Args:
        index: Where to look.
        chain: Keys of the sequence; extended as far as the search goes, so a miss at once costs one block.
        token_ids: The sequence.
        most: Most blocks to find.

    Returns:
        The entries, and how many leading ones are taken from the device.
    """
    hasher = chain.hasher
    prompt = chain.request.prompt_token_ids
    size = hasher.block_size
    in_prompt = len(prompt) // size
    keys, all_ids, all_extras = hasher.keys, hasher.ids, hasher.extras
    if len(keys) > in_prompt and not hasher.matches(token_ids, in_prompt, most):
        hasher.truncate(in_prompt)
    entries: list[IndexEntry] = []
    parent, num_device = chain.root, 0
    for number in range(most):
        if number >= len(keys):
            hasher.extend(prompt if number < in_prompt else token_ids, number + 1)
        entry = index.find(parent, keys[number], all_ids[number], all_extras[number])
        if entry is None:
            break
        if num_device == number and entry.device != NOWHERE:
            num_device += 1
        elif entry.host == NOWHERE:
            break
        entries.append(entry)
        parent = entry
    return entries, num_device


def choose(
    index: PrefixIndex,
    policy: ReplayPolicy,
    entries: Sequence[IndexEntry],
    num_device: int,
    block_size: int,
    prompt_tokens: int,
    now: float,
) -> Hit:
    """The best use of a chain of entries: the fewest tokens left to run; of equal ones the exact one.

    Args:
        index: For its window slots.
        policy: What has to be run again.
        entries: The chain that was found.
        num_device: How many of its leading entries are on the device.
        block_size: Tokens in one block.
        prompt_tokens: Tokens of the prompt.
        now: Time in seconds.

    Returns:
        The hit, empty when nothing is worth taking.
    """
    best: tuple[int, bool, int, int, int | None] | None = None
    count = len(entries)
    replay = policy.start(count * block_size, prompt_tokens) if count else None
    if replay is not None:
        best = (replay[0], not replay[1], count, replay[0], None)
    windows = index.windows
    if windows is not None and len(windows):
        for number in range(count, 0, -1):
            slot, end = entries[number - 1].window, number * block_size
            if best is not None and end < best[0]:
                break
            if slot == NOWHERE or not windows.is_fresh(slot, now):
                continue
            approximate = policy.restored(end, prompt_tokens)
            if approximate is not None:
                best = max(
                    best or (-1, False, 0, 0, None),
                    (end, not approximate, number, end, slot),
                    key=_rank,
                )
                break
    if best is None:
        return Hit()
    _, exact, number, start, window_slot = best
    taken = entries[:number]
    return Hit(
        num_tokens=number * block_size,
        blocks=tuple(entry.device for entry in taken[:num_device]),
        host_blocks=tuple(entry.host for entry in taken[num_device:]),
        window_slot=window_slot,
        replay_start=start,
        approximate=not exact or any(entry.approximate for entry in taken),
    )


def _rank(candidate: tuple[int, bool, int, int, int | None]) -> tuple[int, bool]:
    return candidate[0], candidate[1]
