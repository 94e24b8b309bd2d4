"""Placements better than greedy ones: fewer copies for hot experts, more for middling ones, then swaps."""

from __future__ import annotations

import numpy as np

from deepinfer.balancers.expert_parallel._arrays import FloatArray, IntArray
from deepinfer.balancers.expert_parallel.greedy import (
    greedy_counts,
    greedy_packing,
    greedy_placement,
    two_kind_packing,
)
from deepinfer.balancers.expert_parallel.imbalance import gpu_loads
from deepinfer.balancers.expert_parallel.packing import (
    double_swap,
    pack_rounds,
    part_twins,
    swap_down,
)

__all__ = ["in_order", "refined_placement", "spread_placement"]

# Shares of the further slots that hot experts do not get, in the order in which they are tried.
_HELD_BACK = (0.3125, 0.25, 0.1875, 0.375, 0.125, 0.5)
_STEPS = (0.03, 0.015)
# Copies that are held back go to experts whose share a copy is below this part of the largest.
_MIDDLING = 0.3
# Balance that is good enough: a part over even, or more where few slots a GPU leave little choice.
_GOOD, _GOOD_SLOT = 0.001, 0.015
_NEAR = 1.01
_ROUNDS = 24
_DOUBLE_SWAPS = 4
_EXCHANGES = 3
_SMALL = 64


def refined_placement(weight: FloatArray, num_slots: int, num_gpus: int) -> IntArray:
    """Places experts on GPUs that are all alike.

    The greedy copies and their greedy packing are the first candidate. Greedy gives each further slot to the largest
    share, which leaves many shares of nearly one size that fill GPUs badly. So for layers that are not balanced within
    0.1 % by then (more with few slots a GPU), candidates follow that hold some of the slots back and spend them on
    middling experts, whose halves fill the gaps. Each is improved by swaps, and the best one is kept, the earlier of
    equals.

    Args:
        weight: Load of each expert, shape [layers, experts], float64.
        num_slots: Slots in all, a multiple of `num_gpus`.
        num_gpus: GPUs.

    Returns:
        Expert in each slot, shape [layers, num_slots]; no GPU holds an expert twice, unless a GPU has more slots than
        there are experts: then experts and copies in order, or the published placement if it is more even. Layers
        without any load get experts and copies in order.
    """
    layers, experts = weight.shape
    slots = num_slots // num_gpus
    result = in_order(layers, experts, num_gpus, slots)
    busy = np.flatnonzero(weight.any(1))
    if busy.size and slots <= experts:
        result[busy] = _Search(weight[busy], num_gpus, slots).run()
    elif busy.size:
        greedy, _ = greedy_placement(weight.astype(np.float32), num_slots, 1, 1, num_gpus)
        flat = result.reshape(layers, num_slots)
        worst = [gpu_loads(weight, found, num_gpus).max(1) for found in (flat, greedy)]
        flat[worst[1] < worst[0]] = greedy[worst[1] < worst[0]]
    return result.reshape(layers, num_slots)


def in_order(layers: int, experts: int, gpus: int, slots: int) -> IntArray:
    """Experts in order, then their copies in order, each layer alike, copies apart; shape [layers, gpus, slots]."""
    expert = (np.arange(gpus * slots) % experts).reshape(1, gpus, slots)
    if slots <= experts:
        part_twins(expert, np.zeros(expert.shape))
    return np.repeat(expert, layers, axis=0)


def spread_placement(weight: FloatArray, num_slots: int, num_gpus: int) -> IntArray:
    """Places experts for a splitter: every GPU gets as much as possible of what can run elsewhere too.

    A GPU that holds experts without copies only cannot be helped in a step in which they are popular. So the copies are
    dealt out first, evenly by load and by number, and the experts without copies then fill the GPUs up.

    Args:
        weight: Load of each expert, shape [layers, experts], float64.
        num_slots: Slots in all, a multiple of `num_gpus`.
        num_gpus: GPUs.

    Returns:
        Expert in each slot, shape [layers, num_slots].
    """
    layers, experts = weight.shape
    slots = num_slots // num_gpus
    result = in_order(layers, experts, num_gpus, slots)
    rows = np.flatnonzero(weight.any(1))
    if not rows.size or slots > experts:
        return result.reshape(layers, num_slots)
    weight = weight[rows]
    counts, _ = greedy_counts(weight, num_slots, limit=num_gpus)
    ids = np.tile(np.arange(experts), len(rows))
    expert = np.repeat(ids, counts.ravel()).reshape(len(rows), -1)
    size = np.take_along_axis(weight / counts, expert, 1)
    copied = np.take_along_axis(counts > 1, expert, 1)
    at = two_kind_packing(size, copied, num_gpus)
    packed, sizes = np.empty_like(expert), np.empty_like(size)
    np.put_along_axis(packed, at, expert, 1)
    np.put_along_axis(sizes, at, size, 1)
    shape = (len(rows), num_gpus, slots)
    packed, sizes = packed.reshape(shape), sizes.reshape(shape)
    part_twins(packed, sizes)
    kind = np.take_along_axis(counts > 1, packed.reshape(len(rows), -1), 1).reshape(shape)
    level = weight.sum(1) / num_gpus * (1 + max(_GOOD, _GOOD_SLOT / slots))
    swap_down(packed, sizes, level, _ROUNDS, kind)
    result[rows] = packed
    return result.reshape(layers, num_slots)


class _Search:
    """Candidates for the layers of one model, none of them without load."""

    def __init__(self, weight: FloatArray, gpus: int, slots: int) -> None:
        self.weight, self.gpus, self.slots = weight, gpus, slots
        layers, self.experts = weight.shape
        self.spare = gpus * slots - self.experts
        self.best = np.empty((layers, gpus, slots), np.int64)
        self.worst_load = np.full(layers, np.inf)
        # The published form computes in float32, which decides about its ties.
        self.counts, self.order = greedy_counts(weight.astype(np.float32), gpus * slots)
        self.level = self.greedy = np.zeros(layers)
        self.best_share = np.full(layers, _HELD_BACK[0])

    def run(self) -> IntArray:
        rows = np.arange(len(self.weight))
        expert, size = self._greedy(rows)
        # What greedy reaches is to be reached in any case, and else a good enough balance.
        good = (1 + max(_GOOD, _GOOD_SLOT / self.slots)) * self.weight.sum(1) / self.gpus
        self.greedy = size.sum(2).max(1)
        self.level = np.minimum(good, self.greedy)
        part_twins(expert, size)
        crowded = np.flatnonzero(self.counts.max(1) > self.gpus)
        if crowded.size:
            self._limit_counts(crowded)
            expert[crowded], size[crowded] = self._greedy(crowded)
            part_twins(expert, size)
        self._keep(rows, expert, size)
        # Swaps alone help where no single copy is too large.
        rows = self._left()
        rows = rows[self.worst_load[rows] < _NEAR * self.level[rows]]
        expert, size = expert[rows], size[rows]
        swap_down(expert, size, self.level[rows], _ROUNDS)
        self._keep(rows, expert, size)
        self._try(_HELD_BACK[:1], hopeful=True)
        self._try(_HELD_BACK[1:], hopeful=True)
        self._try(_HELD_BACK)
        # How much is best to hold back is a sharp optimum: look on both sides of the best so far.
        for step in _STEPS:
            self._try((-step, step), around_best=True)
        self._finish()
        return self.best

    def _finish(self) -> None:
        """Works on where greedy was still better, with copies of an expert on one GPU, and on small layers."""
        small = self.gpus * self.slots <= _SMALL
        rows = self._left() if small else self._behind()
        for _ in range(_DOUBLE_SWAPS):
            if not rows.size:
                return
            expert = self.best[rows]
            size = self._sizes(rows, expert)
            for row in range(len(rows)):
                double_swap(expert[row], size[row])
            swap_down(expert, size, self.level[rows], _ROUNDS)
            self._keep(rows, expert, size)
            rows = rows[self.worst_load[rows] > self.level[rows]]
        rows = self._behind(1e-5)
        if small:
            rows = np.flatnonzero(self.worst_load > _NEAR * self.level)
        for row in rows:
            self._exchange(row)

    def _exchange(self, row: int) -> None:
        """Tries to take a copy from one expert and give it to another, as long as that helps one layer."""
        weight = self.weight[row]
        for _ in range(_EXCHANGES):
            if self.worst_load[row] <= self.level[row]:
                return
            counts = np.bincount(self.best[row].ravel(), minlength=self.experts)
            # Those that can spare a copy, and those whose share is largest.
            without = np.where(counts > 1, weight / np.maximum(counts - 1, 1), np.inf)
            donors = np.argsort(without, kind="stable")[: min(6, int((counts > 1).sum()))]
            share = np.where(counts < self.gpus, weight / counts, -1.0)
            takers = np.argsort(-share, kind="stable")[: min(16, int((share >= 0).sum()))]
            donor, taker = (side.ravel() for side in np.meshgrid(donors, takers))
            donor, taker = donor[donor != taker], taker[donor != taker]
            if not donor.size:
                return
            tried = np.repeat(counts[None], len(donor), axis=0)
            at = np.arange(len(donor))
            tried[at, donor] -= 1
            tried[at, taker] += 1
            same = np.full(len(donor), row)
            expert, size = pack_rounds(*self._items(same, tried), self.gpus)
            part_twins(expert, size)
            swap_down(expert, size, self.level[same], _ROUNDS // 3)
            worst = size.sum(2).max(1)
            best = int(worst.argmin())
            if not worst[best] < self.worst_load[row]:
                return
            self.worst_load[row], self.best[row] = worst[best], expert[best]

    def _sizes(self, rows: IntArray, expert: IntArray) -> FloatArray:
        """Load in each slot of some layers, shape [rows, gpus, slots]."""
        flat = expert.reshape(len(rows), -1)
        counts = np.zeros((len(rows), self.experts), np.int64)
        np.add.at(counts, (np.arange(len(rows))[:, None], flat), 1)
        return np.take_along_axis(self.weight[rows] / counts, flat, 1).reshape(expert.shape)

    def _left(self) -> IntArray:
        """Layers for which no candidate is good enough yet."""
        return np.flatnonzero(self.worst_load > self.level)

    def _behind(self, share: float = 1e-12) -> IntArray:
        """Layers in which greedy is better by more than a share."""
        return np.flatnonzero(self.worst_load > self.greedy * (1 + share))

    def _greedy(self, rows: IntArray) -> tuple[IntArray, FloatArray]:
        """The greedy packing of some layers; shapes [rows, gpus, slots]."""
        expert, size = self._items(rows, self.counts[rows])
        order32 = self.weight[rows].astype(np.float32) / self.counts[rows].astype(np.float32)
        pack, place = greedy_packing(np.take_along_axis(order32, expert, 1), self.gpus)
        at = pack * self.slots + place
        packed, sizes = np.empty_like(expert), np.empty_like(size)
        np.put_along_axis(packed, at, expert, 1)
        np.put_along_axis(sizes, at, size, 1)
        shape = (len(rows), self.gpus, self.slots)
        return packed.reshape(shape), sizes.reshape(shape)

    def _limit_counts(self, rows: IntArray) -> None:
        """Gives no expert of some layers more copies than there are GPUs."""
        num_slots = self.gpus * self.slots
        counts, order = greedy_counts(
            self.weight[rows].astype(np.float32), num_slots, limit=self.gpus
        )
        self.counts[rows], self.order[rows] = counts, order

    def _try(
        self, shares: tuple[float, ...], *, hopeful: bool = False, around_best: bool = False
    ) -> None:
        """Holds back shares of the further slots, each of them in the layers that are not good enough yet.

        With `hopeful`, only where no single copy is too large for a good balance; with `around_best`, the shares are
        added to the best one of the layer so far.
        """
        rows = np.repeat(self._left(), len(shares))
        share = np.resize(np.array(shares), len(rows))
        if around_best:
            share = share + self.best_share[rows]
        held = np.rint(share * self.spare).astype(np.int64)
        usable = (held > 0) & (held <= self.spare)
        rows, held, share = rows[usable], held[usable], share[usable]
        if not rows.size:
            return
        items, sizes = self._items(rows, self._held_back(rows, held))
        if hopeful:
            kept = sizes.max(1) <= self.level[rows]
            rows, share, items, sizes = rows[kept], share[kept], items[kept], sizes[kept]
        expert, size = pack_rounds(items, sizes, self.gpus)
        part_twins(expert, size)
        swap_down(expert, size, self.level[rows], _ROUNDS // 2 if hopeful else _ROUNDS)
        better = self._keep(rows, expert, size)
        self.best_share[rows[better]] = share[better]

    def _keep(self, rows: IntArray, expert: IntArray, size: FloatArray) -> IntArray:
        """Keeps the best candidate of each layer if it is better than what is kept; says which candidates are.

        Args:
            rows: Layer of each candidate.
            expert: Their experts, shape [candidates, gpus, slots].
            size: Their loads, of the same shape.

        Returns:
            Indices of the candidates that are kept now.
        """
        worst = size.sum(2).max(1)
        order = np.lexsort((np.arange(len(rows)), worst, rows))
        first = order[np.flatnonzero(np.diff(rows[order], prepend=-1))]
        better: IntArray = first[worst[first] < self.worst_load[rows[first]]]
        self.worst_load[rows[better]] = worst[better]
        self.best[rows[better]] = expert[better]
        return better

    def _items(self, rows: IntArray, counts: IntArray) -> tuple[IntArray, FloatArray]:
        """Copies in the order of experts, and the load of each; shape [rows, slots in all]."""
        ids = np.tile(np.arange(self.experts), len(rows))
        expert = np.repeat(ids, counts.ravel()).reshape(len(rows), -1)
        return expert, np.take_along_axis(self.weight[rows] / counts, expert, 1)

    def _held_back(self, rows: IntArray, held: IntArray) -> IntArray:
        """Greedy counts without the last `held` slots of each row, which go to the largest middling shares."""
        counts = np.ones((len(rows), self.experts), np.int64)
        row, place = np.nonzero(np.arange(self.spare) < self.spare - held[:, None])
        np.add.at(counts, (row, self.order[rows[row], place]), 1)
        share = self.weight[rows] / counts
        limit = _MIDDLING * share.max(1, keepdims=True)
        for _ in range(self.gpus):
            left = self.gpus * self.slots - counts.sum(1)
            if not left.any():
                break
            # The largest shares below the limit get a copy; when they are too few, the next larger ones do.
            open_ = counts < self.gpus
            key = np.where(share <= limit, share, -1.0 - share)
            key[~open_] = -np.inf
            order = np.argsort(-key, axis=1, kind="stable")
            wanted = np.arange(self.experts) < np.minimum(left, open_.sum(1))[:, None]
            bonus = np.zeros_like(counts)
            np.put_along_axis(bonus, order, wanted.astype(np.int64), 1)
            counts += bonus
            share = self.weight[rows] / counts
        return counts
