"""Packing of copies into GPUs: rounds by size, swaps between heavy and light GPUs, copies of an expert apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer.balancers.expert_parallel._arrays import FloatArray, IntArray

__all__ = ["double_swap", "pack_rounds", "part_twins", "swap_down", "twins"]

_FAR = 1e30
_PATIENCE = 6


def pack_rounds(expert: IntArray, size: FloatArray, num_gpus: int) -> tuple[IntArray, FloatArray]:
    """Packs items in rounds: in each, every GPU gets one item, the lightest GPU the largest.

    Args:
        expert: Expert of each item, shape [rows, items].
        size: Load of each item, shape [rows, items].
        num_gpus: GPUs.

    Returns:
        Expert and load in each slot, both of shape [rows, gpus, slots a GPU]. Equal sizes go by index.
    """
    rows, items = size.shape
    slots = items // num_gpus
    order = np.argsort(-size, axis=1, kind="stable")
    expert = np.take_along_axis(expert, order, 1).reshape(rows, slots, num_gpus)
    size = np.take_along_axis(size, order, 1).reshape(rows, slots, num_gpus)
    out_expert, out_size = np.empty_like(expert), np.empty_like(size)
    load = np.zeros((rows, num_gpus))
    for turn in range(slots):
        lightest_first = np.argsort(load, axis=1, kind="stable")
        np.put_along_axis(out_expert[:, turn], lightest_first, expert[:, turn], 1)
        np.put_along_axis(out_size[:, turn], lightest_first, size[:, turn], 1)
        load += out_size[:, turn]
    return (
        np.ascontiguousarray(out_expert.transpose(0, 2, 1)),
        np.ascontiguousarray(out_size.transpose(0, 2, 1)),
    )


def swap_down(
    expert: IntArray,
    size: FloatArray,
    level: FloatArray,
    rounds: int,
    kind: npt.NDArray[np.bool_] | None = None,
) -> None:
    """Swaps items between heavy and light GPUs, in place, until no GPU is above a level.

    In a round each GPU above the level is paired with a lighter one, another in every round, and the pair makes the one
    swap that lowers the heavier of the two most. No swap brings two copies of an expert to one GPU.

    Args:
        expert: Expert in each slot, shape [rows, gpus, slots]; changed.
        size: Load in each slot, shape [rows, gpus, slots]; changed.
        level: Load a GPU that is good enough, shape [rows].
        rounds: Most rounds.
        kind: Kind in each slot, shape [rows, gpus, slots], changed; only items of one kind are swapped. None: all are
            of one kind.
    """
    _, gpus, slots = size.shape
    half = gpus // 2
    if not half:
        return
    load = size.sum(2)
    idle = 0
    for turn in range(rounds):
        rows = np.flatnonzero(load.max(1) > level)
        if not rows.size or idle >= _PATIENCE:
            return
        some = load[rows]
        order = np.argsort(-some, axis=1, kind="stable")
        heavy = min(half, int((some > level[rows, None]).sum(1).max()))
        turned = (np.arange(heavy) + turn * (1 + half // 5)) % half
        first, second = order[:, :heavy], order[:, gpus - 1 - turned]
        at = rows[:, None]
        gap = (np.take_along_axis(some, first, 1) - np.take_along_axis(some, second, 1)) / 2
        sides: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = [
            (array[at, first], array[at, second]) for array in (expert, size)
        ]
        if kind is not None:
            sides.append((kind[at, first], kind[at, second]))
        best, found = _best_swaps(gap, *sides)
        # The better of the pair's new loads must be below the old one by more than rounding.
        row, pair = np.nonzero((found < gap * (1 - 1e-9)) & (first != second))
        if not row.size:
            idle += 1
            continue
        idle = 0
        real, a, b = rows[row], first[row, pair], second[row, pair]
        slot_a, slot_b = np.divmod(best[row, pair], slots)
        for array in (expert, size) if kind is None else (expert, size, kind):
            moved = array[real, a, slot_a]
            array[real, a, slot_a] = array[real, b, slot_b]
            array[real, b, slot_b] = moved
        load[real, a] = size[real, a].sum(1)
        load[real, b] = size[real, b].sum(1)


def _best_swaps(
    gap: FloatArray, *sides: tuple[npt.NDArray[Any], npt.NDArray[Any]]
) -> tuple[IntArray, FloatArray]:
    """For pairs of GPUs the swap whose change is nearest to half the gap of their loads.

    Args:
        gap: Half of the differences, shape [rows, pairs].
        sides: Experts, sizes, and possibly kinds in the slots of both GPUs, each of shape [rows, pairs, slots].

    Returns:
        Slot of the first times slots plus slot of the second, and how far off the best swap is, both [rows, pairs].
    """
    # Slots come first: short last axes are slow to reduce.
    (expert_a, expert_b), (size_a, size_b), *kinds = (
        tuple(np.ascontiguousarray(side.transpose(2, 0, 1)) for side in pair) for pair in sides
    )
    slots = len(expert_a)
    same = expert_a[:, None] == expert_b[None]
    # An expert that the other GPU has too may not go there.
    size_a = size_a - gap + _FAR * same.any(1)
    size_b = size_b - _FAR * same.any(0)
    off = size_a[:, None] - size_b[None]
    for kind_a, kind_b in kinds:
        off += _FAR * (kind_a[:, None] != kind_b[None])
    off = np.abs(off, out=off).reshape(slots * slots, *gap.shape)
    # The index goes into the lowest bits, so that one minimum finds it too; positive floats sort as integers do.
    bits = np.int64((1 << int(slots * slots - 1).bit_length()) - 1)
    keyed = off.view(np.int64)
    keyed &= ~bits
    keyed |= np.arange(slots * slots)[:, None, None]
    least = np.ascontiguousarray(off.min(0)).view(np.int64)
    return least & bits, (least & ~bits).view(np.float64)


def double_swap(expert: IntArray, size: FloatArray) -> bool:
    """Makes the two swaps at once that bring the heaviest GPU and the lightest one closest together, in place.

    For few GPUs with many slots, whose loads single swaps cannot bring any closer.

    Args:
        expert: Expert in each slot of one layer, shape [gpus, slots]; changed.
        size: Load in each slot, shape [gpus, slots]; changed.

    Returns:
        Whether there were two swaps that brought them closer.
    """
    load = size.sum(1)
    heavy, light = int(load.argmax()), int(load.argmin())
    gap = (load[heavy] - load[light]) / 2
    from_heavy = np.flatnonzero(~np.isin(expert[heavy], expert[light]))
    from_light = np.flatnonzero(~np.isin(expert[light], expert[heavy]))
    if min(len(from_heavy), len(from_light)) < 2 or heavy == light:
        return False
    shift = (size[heavy, from_heavy][:, None] - size[light, from_light]).ravel()
    order = np.argsort(shift, kind="stable")
    ordered = shift[order]
    partner = np.minimum(np.searchsorted(ordered, gap - ordered), len(ordered) - 1)
    one, other = np.divmod(order, len(from_light)), np.divmod(order[partner], len(from_light))
    off = np.abs(ordered + ordered[partner] - gap)
    off[(one[0] == other[0]) | (one[1] == other[1])] = np.inf
    best = int(off.argmin())
    if not off[best] < gap * (1 - 1e-9):
        return False
    for pair in (one, other):
        a, b = from_heavy[pair[0][best]], from_light[pair[1][best]]
        for array in (expert, size):
            array[heavy, a], array[light, b] = array[light, b], array[heavy, a]
    return True


def twins(expert: IntArray) -> IntArray:
    """Finds copies of an expert that share a GPU with an earlier one.

    Args:
        expert: Expert in each slot, shape [rows, gpus, slots].

    Returns:
        Row, GPU and slot of each, ascending, shape [found, 3].
    """
    order = np.argsort(expert, axis=2, kind="stable")
    ordered = np.take_along_axis(expert, order, 2)
    row, gpu, place = np.nonzero(ordered[:, :, 1:] == ordered[:, :, :-1])
    found = np.stack((row, gpu, order[row, gpu, place + 1]), 1)
    return found[np.lexsort(found.T[::-1])]


def part_twins(expert: IntArray, size: FloatArray) -> None:
    """Moves copies of an expert apart that are on one GPU, in place, by the swaps that change loads least.

    Args:
        expert: Expert in each slot, shape [rows, gpus, slots]; changed. No expert has more copies than there are GPUs.
        size: Load in each slot, shape [rows, gpus, slots]; changed.
    """
    failed = set()
    for row, gpu, slot in twins(expert).tolist():
        if row not in failed and not _part(expert[row], size[row], gpu, slot):
            failed.add(row)
            _deal_row(expert[row], size[row])


def _part(expert: IntArray, size: FloatArray, gpu: int, slot: int) -> bool:
    """Sends the twin in a slot of one row, shape [gpus, slots], to another GPU; False when there is no place."""
    own = expert[gpu, slot]
    load = size.sum(1)
    held = np.zeros(max(int(expert.max()) + 1, 1), bool)
    held[expert[gpu]] = True
    # The other GPU lacks this expert, and this one what comes back.
    fits = ~(held[expert] | (expert == own).any(1)[:, None])
    shift = size[gpu, slot] - size
    worse = np.maximum(load[:, None] + shift, load[gpu] - shift)
    worse[~fits] = np.inf
    other, place = divmod(int(worse.argmin()), expert.shape[1])
    if not fits[other, place]:
        return False
    for array in (expert, size):
        moved = array[gpu, slot].copy()
        array[gpu, slot] = array[other, place]
        array[other, place] = moved
    return True


def _deal_row(expert: IntArray, size: FloatArray) -> None:
    """Deals the items of one row out anew, copies of an expert one after the other, so that none meet."""
    gpus, slots = expert.shape
    flat, sizes = expert.ravel().copy(), size.ravel().copy()
    order = np.lexsort((flat, -sizes))
    expert[:] = flat[order].reshape(slots, gpus).T
    size[:] = sizes[order].reshape(slots, gpus).T
