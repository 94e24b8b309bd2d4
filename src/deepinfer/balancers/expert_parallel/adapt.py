"""A placement adapted to new loads by few moves: copies handed over and experts swapped, only where it is needed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from deepinfer.balancers.expert_parallel._arrays import FloatArray, IntArray
from deepinfer.balancers.expert_parallel.maps import count_copies
from deepinfer.balancers.expert_parallel.packing import swap_down
from deepinfer.balancers.expert_parallel.placement import Placement

__all__ = ["adapt"]

_TURNS = 16
_ROUNDS = 12
_HANDED = 4
_TAKERS = 12
# A hand-over must take this part of the squared excess away.
_WORTHWHILE = 0.02


def adapt(
    old: Placement,
    weight: FloatArray,
    target: float,
    *,
    num_nodes: int = 1,
    for_splitter: bool = False,
) -> Placement:
    """Changes a placement until no GPU has more than a target, or no change helps.

    GPUs below the target keep what they have, except for what they exchange with those above it. In turns: experts that
    weigh on their GPUs get copies in the slots of experts that can spare one, and heavy and light GPUs swap one expert
    each.

    Args:
        old: The placement to change.
        weight: Load of each expert, shape [layers, experts], float64.
        target: Load of a GPU over the mean that is good enough, such as 1.01.
        num_nodes: Nodes; experts stay on their node.
        for_splitter: Swap experts with copies for such experts only, so that every GPU keeps its part of them.

    Returns:
        The placement; layers without load stay as they are.
    """
    layers, gpus = old.num_layers, old.num_gpus
    expert = old.phy2log.reshape(layers * num_nodes, gpus // num_nodes, -1).copy()
    total = old.loads(weight).reshape(layers, num_nodes, -1).sum(2)
    # A node cannot give load away: even is what its own experts bring.
    level = target * total.ravel() / (gpus // num_nodes)
    weight = np.repeat(weight, num_nodes, axis=0)
    best = expert.copy()
    reached = np.full(len(expert), np.inf)
    open_rows = np.flatnonzero(level > 0)
    for turn in range(_TURNS):
        part, loads = expert[open_rows], weight[open_rows]
        worst = _sizes(part, loads).sum(2).max(1)
        for row in np.flatnonzero(worst > level[open_rows]):
            _hand_over(part[row], loads[row], _HANDED if turn else 4 * _HANDED)
        size = _sizes(part, loads)
        kind = _copied(part, loads.shape[1]) if for_splitter else None
        swap_down(part, size, level[open_rows], _ROUNDS, kind)
        expert[open_rows] = part
        worst = size.sum(2).max(1)
        better = worst < reached[open_rows] * (1 - 1e-6)
        best[open_rows[better]] = part[better]
        reached[open_rows[better]] = worst[better]
        open_rows = open_rows[worst > level[open_rows]]
        if not open_rows.size:
            break
    return Placement(best.reshape(old.phy2log.shape), old.num_experts, gpus)


def _sizes(expert: IntArray, weight: FloatArray) -> FloatArray:
    """Load in each slot, shape [rows, gpus, slots]."""
    flat = expert.reshape(len(expert), -1)
    counts = np.maximum(count_copies(flat, weight.shape[1]), 1)
    return np.take_along_axis(weight / counts, flat, 1).reshape(expert.shape)


def _copied(expert: IntArray, experts: int) -> npt.NDArray[np.bool_]:
    """Which slots hold experts that have several copies, shape [rows, gpus, slots]."""
    flat = expert.reshape(len(expert), -1)
    counts = count_copies(flat, experts)
    return np.take_along_axis(counts > 1, flat, 1).reshape(expert.shape)


def _hand_over(expert: IntArray, weight: FloatArray, most: int) -> None:
    """Hands copies from one expert to another in one layer, shape [gpus, slots], while that evens loads out.

    A hot expert that grew weighs on all of its GPUs at once, and one more copy relieves all of them: one move does what
    swaps would need many for. The measure is the sum of squares of loads.
    """
    gpus, experts = len(expert), len(weight)
    holds = np.zeros((gpus, experts))
    np.add.at(holds, (np.arange(gpus)[:, None], expert), 1.0)
    counts = holds.sum(0)
    weight = np.where(counts > 0, weight, 0.0)  # experts of other nodes do not count
    counts = np.maximum(counts, 1.0)
    mean = weight.sum() / gpus
    for _ in range(most):
        share = weight / counts
        excess = share[expert].sum(1) - mean
        around = excess @ holds  # of all GPUs that hold an expert
        relief = weight / (counts * (counts + 1))  # of each of them, by one more copy
        gain = 2 * relief * around - counts * relief**2
        takers = np.argsort(np.where(counts < gpus, -gain, np.inf), kind="stable")[:_TAKERS]
        takers = takers[(counts[takers] < gpus) & (gain[takers] > 0)]
        gpu, slot = np.nonzero(counts[expert] > 1)
        if not takers.size or not gpu.size:
            return
        donor = expert[gpu, slot]
        growth = weight[donor] / (counts[donor] * (counts[donor] - 1))
        cost = 2 * growth * (around[donor] - excess[gpu]) + (counts[donor] - 1) * growth**2
        change = (weight[takers] / (counts[takers] + 1))[:, None] - share[donor]
        common = holds[:, takers].T @ holds[:, donor]
        total = (
            2 * change * excess[gpu]
            + change**2
            + cost
            - gain[takers, None]
            - 2 * relief[takers, None] * growth * common
        )
        total[(holds[gpu][:, takers] > 0).T] = np.inf
        best = int(total.argmin())
        if not total.flat[best] < -_WORTHWHILE * (excess**2).sum():
            return
        taker, place = divmod(best, len(gpu))
        at, new, old = gpu[place], takers[taker], donor[place]
        expert[at, slot[place]] = new
        holds[at, new], holds[at, old] = 1.0, 0.0
        counts[new] += 1
        counts[old] -= 1
