"""From one placement to another with few moves: the same GPUs under other numbers, and what stays in its slot."""

from __future__ import annotations

import numpy as np

from deepinfer.balancers.expert_parallel._arrays import IntArray
from deepinfer.balancers.expert_parallel.assignment import best_assignment
from deepinfer.balancers.expert_parallel.placement import Placement
from deepinfer.core.errors import ShapeError

__all__ = ["count_moves", "relabel"]


def count_moves(old: Placement, new: Placement) -> IntArray:
    """Slots that hold another expert.

    Args:
        old: The placement before.
        new: The placement after.

    Returns:
        Shape [layers], int64.

    Raises:
        ShapeError: The placements differ in layers, slots, experts or GPUs.
    """
    check_alike(old, new)
    moves: IntArray = (old.phy2log != new.phy2log).sum(1)
    return moves


def relabel(old: Placement, new: Placement, *, num_nodes: int = 1) -> Placement:
    """The same balance with the fewest moves.

    GPUs are alike, so the contents planned for one may go to another, and the slots of a GPU are alike too. The contents
    are assigned to the GPUs on which most of them lie already, exactly (an assignment problem a layer), and experts that
    stay on a GPU stay in their slot.

    Args:
        old: The placement before.
        new: The placement to reach.
        num_nodes: Nodes; contents stay on the node for which they were planned.

    Returns:
        A placement with the loads of `new`, its GPUs in another order. Ties go to the lower GPU and slot.

    Raises:
        ShapeError: The placements differ in layers, slots, experts or GPUs, or the GPUs do not divide among the nodes.
    """
    check_alike(old, new)
    gpus = old.num_gpus
    if num_nodes < 1 or gpus % num_nodes:
        raise ShapeError(f"{gpus} GPUs cannot be divided among {num_nodes} nodes.")
    shape = (old.num_layers, gpus, -1)
    have, want = old.phy2log.reshape(shape), new.phy2log.reshape(shape)
    result = np.empty_like(want)
    width = gpus // num_nodes
    for layer in range(old.num_layers):
        shared = _overlap(have[layer], want[layer], old.num_experts)
        for node in range(num_nodes):
            inside = slice(node * width, (node + 1) * width)
            chosen = best_assignment(shared[inside, inside]) + node * width
            result[layer, inside] = want[layer, chosen]
    return Placement(_keep_slots(have, result).reshape(old.phy2log.shape), old.num_experts, gpus)


def check_alike(old: Placement, new: Placement) -> None:
    """Refuses placements that differ in more than what is where."""
    sizes = [(p.phy2log.shape, p.num_experts, p.num_gpus) for p in (old, new)]
    if sizes[0] != sizes[1]:
        raise ShapeError(
            f"the placements are {old} and {new}; they must have equal layers, slots, experts and GPUs."
        )


def _overlap(have: IntArray, want: IntArray, experts: int) -> IntArray:
    """Experts that each pair of GPUs has in common, shape [gpus, gpus]."""
    first = np.zeros((len(have), experts), np.float32)
    second = np.zeros_like(first)
    at = np.arange(len(have))[:, None]
    first[at, have] = 1.0
    second[at, want] = 1.0
    shared: IntArray = np.rint(first @ second.T).astype(np.int64)
    return shared


def _keep_slots(have: IntArray, want: IntArray) -> IntArray:
    """Orders the slots of each GPU, shape [layers, gpus, slots], so that what stays keeps its slot."""
    result = np.full_like(want, -1)
    left = want.copy()  # experts without a slot yet; -1 where done
    for slot in range(have.shape[2]):
        same = left == have[:, :, slot, None]
        found = same.any(2)
        first = same.argmax(2)
        layer, gpu = np.nonzero(found)
        result[layer, gpu, slot] = have[layer, gpu, slot]
        left[layer, gpu, first[layer, gpu]] = -1
    # The others fill the free slots in order.
    free = np.argsort(result >= 0, axis=2, kind="stable")
    rest = np.argsort(left < 0, axis=2, kind="stable")
    values = np.take_along_axis(left, rest, 2)
    current = np.take_along_axis(result, free, 2)
    np.put_along_axis(result, free, np.where(current < 0, values, current), 2)
    return result
