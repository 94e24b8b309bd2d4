"""The published greedy algorithm: copies for the largest share, then the largest share to the lightest GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer.balancers.expert_parallel._arrays import FloatArray, IntArray
from deepinfer.balancers.expert_parallel.maps import copies_of

__all__ = ["greedy_counts", "greedy_packing", "greedy_placement", "two_kind_packing"]


def greedy_counts(
    weight: npt.NDArray[Any], num_slots: int, *, limit: int | None = None
) -> tuple[IntArray, IntArray]:
    """Gives every expert a slot, then each further slot to the expert with the largest share a copy.

    Args:
        weight: Load of each expert, shape [layers, experts], any float dtype, which decides about ties as well.
        num_slots: Slots in all, from the number of experts.
        limit: Most copies of one expert, or None.

    Returns:
        Copies of each expert, shape [layers, experts], and the experts that got the further slots, in order, shape
        [layers, num_slots - experts]. Equal shares: the lower expert wins.
    """
    layers, experts = weight.shape
    counts = np.ones((layers, experts), np.int64)
    order = np.empty((layers, num_slots - experts), np.int64)
    share = weight.copy()
    flat_share, flat_counts, flat_weight = share.ravel(), counts.ravel(), weight.ravel()
    base = np.arange(layers) * experts
    for step in range(num_slots - experts):
        best = share.argmax(1)
        order[:, step] = best
        at = base + best
        copies = flat_counts[at] + 1
        flat_counts[at] = copies
        flat_share[at] = flat_weight[at] / copies.astype(weight.dtype)
        if limit is not None and step >= limit - 2:
            flat_share[at[copies >= limit]] = -1.0
    return counts, order


def greedy_packing(size: npt.NDArray[Any], num_packs: int) -> tuple[IntArray, IntArray]:
    """Packs items into packs of equal numbers: each item, largest first, into the lightest pack with room.

    Args:
        size: Size of each item, shape [layers, items], any float dtype; items is a multiple of `num_packs`.
        num_packs: Packs.

    Returns:
        Pack of each item and its place in there, both of shape [layers, items]. Equal sizes keep their order and equal
        packs go by index.
    """
    layers, items = size.shape
    room = items // num_packs
    if room == 1:
        packs = np.broadcast_to(np.arange(items, dtype=np.int64), size.shape).copy()
        return packs, np.zeros_like(packs)
    order = np.argsort(-size, axis=1, kind="stable")
    sizes = np.take_along_axis(size, order, 1).T.copy()
    load = np.zeros((layers, num_packs), size.dtype)
    flat_load = load.ravel()
    taken = np.zeros(layers * num_packs, np.int64)
    base = np.arange(layers) * num_packs
    chosen = np.empty((items, layers), np.int64)
    places = np.empty((items, layers), np.int64)
    for step in range(items):
        at = base + load.argmin(1)
        place = taken[at]
        chosen[step], places[step] = at, place
        taken[at] = place + 1
        flat_load[at] += sizes[step]
        if step >= room - 1:
            full = place == room - 1
            if full.any():
                flat_load[at[full]] = np.inf
    packs = np.empty((layers, items), np.int64)
    ranks = np.empty((layers, items), np.int64)
    np.put_along_axis(packs, order, chosen.T - base[:, None], 1)
    np.put_along_axis(ranks, order, places.T, 1)
    return packs, ranks


def two_kind_packing(size: FloatArray, copied: npt.NDArray[np.bool_], num_packs: int) -> IntArray:
    """As `greedy_packing`, with all items of one kind first, and as equal numbers of them a pack as can be.

    Args:
        size: Size of each item, shape [layers, items].
        copied: Items of the first kind, shape [layers, items].
        num_packs: Packs.

    Returns:
        Slot of each item, shape [layers, items]: pack * room + place.
    """
    layers, items = size.shape
    room = items // num_packs
    number = copied.sum(1)
    first_room = -(-number // num_packs)
    order = np.lexsort((-size, ~copied), axis=1)
    sizes = np.take_along_axis(size, order, 1)
    load = np.zeros((layers, num_packs))
    taken = np.zeros((layers, num_packs), np.int64)
    key = np.zeros((layers, num_packs))
    chosen = np.empty((layers, items), np.int64)
    rows = np.arange(layers)
    for step in range(items):
        limit = np.where(step < number, first_room, room)
        turning = rows[step == number]
        if turning.size:
            full = taken[turning] == room
            key[turning] = np.where(full, np.inf, load[turning])
        pack = key.argmin(1)
        place = taken[rows, pack]
        chosen[:, step] = pack * room + place
        taken[rows, pack] = place + 1
        load[rows, pack] += sizes[:, step]
        key[rows, pack] = np.where(place + 1 >= limit, np.inf, load[rows, pack])
    at = np.empty_like(chosen)
    np.put_along_axis(at, order, chosen, 1)
    return at


def greedy_placement(
    weight: npt.NDArray[Any], num_slots: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[IntArray, IntArray]:
    """Packs groups of experts to nodes, copies experts within nodes, and packs the copies to GPUs.

    With one group and one node it is the flat form.

    Args:
        weight: Load of each expert, shape [layers, experts], float32 as published.
        num_slots: Slots in all.
        num_groups: Groups of consecutive experts.
        num_nodes: Nodes.
        num_gpus: GPUs in all.

    Returns:
        Expert in each slot, and which of its copies that is in the order of their making, both [layers, num_slots].
    """
    layers, experts = weight.shape
    group, inner = experts // num_groups, experts // num_nodes
    per_group = weight.reshape(layers, num_groups, group).sum(-1)
    node, rank = greedy_packing(per_group, num_nodes)
    first = (node * (num_groups // num_nodes) + rank) * group
    renamed = (first[:, :, None] + np.arange(group)).reshape(layers, experts)
    original = np.empty_like(renamed)
    np.put_along_axis(original, renamed, np.broadcast_to(np.arange(experts), weight.shape), 1)

    node_weight = np.take_along_axis(weight, original, 1).reshape(-1, inner)
    counts, order = greedy_counts(node_weight, num_slots // num_nodes)
    originals = np.broadcast_to(np.arange(inner), node_weight.shape)
    item_expert = np.concatenate((originals, order), 1)
    item_copy = copies_of(item_expert)
    share = node_weight / counts.astype(weight.dtype)
    pack, place = greedy_packing(np.take_along_axis(share, item_expert, 1), num_gpus // num_nodes)
    slot = pack * (num_slots // num_gpus) + place
    expert_at, copy_at = np.empty_like(item_expert), np.empty_like(item_expert)
    np.put_along_axis(expert_at, slot, item_expert, 1)
    np.put_along_axis(copy_at, slot, item_copy, 1)
    offset = np.arange(num_nodes)[:, None] * inner
    expert_at = (expert_at.reshape(layers, num_nodes, -1) + offset).reshape(layers, -1)
    return np.take_along_axis(original, expert_at, 1), copy_at.reshape(layers, -1)
