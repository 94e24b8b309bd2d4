"""The maps between experts and slots."""

from __future__ import annotations

import numpy as np

from deepinfer.balancers.expert_parallel._arrays import IntArray

__all__ = ["copies_of", "count_copies", "slots_of"]


def count_copies(phy2log: IntArray, num_experts: int) -> IntArray:
    """Copies of each expert.

    Args:
        phy2log: Expert in each slot, shape [layers, slots].
        num_experts: Experts.

    Returns:
        Shape [layers, experts], int64; 0 for an expert that no slot holds.
    """
    layers = len(phy2log)
    flat = phy2log + np.arange(layers)[:, None] * num_experts
    counts = np.bincount(flat.ravel(), minlength=layers * num_experts)
    return counts.reshape(layers, num_experts)


def copies_of(phy2log: IntArray) -> IntArray:
    """Which copy of its expert each slot holds, in the order of slots.

    Args:
        phy2log: Expert in each slot, shape [layers, slots].

    Returns:
        Shape [layers, slots], int64, from 0.
    """
    order = np.argsort(phy2log, axis=1, kind="stable")
    ordered = np.take_along_axis(phy2log, order, 1)
    starts = np.ones(phy2log.shape, bool)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    place = np.arange(phy2log.shape[1])
    first = np.maximum.accumulate(np.where(starts, place, 0), 1)
    copies = np.empty_like(phy2log)
    np.put_along_axis(copies, order, place - first, 1)
    return copies


def slots_of(phy2log: IntArray, copy: IntArray, counts: IntArray) -> IntArray:
    """Slots of each expert.

    Args:
        phy2log: Expert in each slot, shape [layers, slots].
        copy: Which copy of its expert each slot holds, shape [layers, slots].
        counts: Copies of each expert, shape [layers, experts].

    Returns:
        Shape [layers, experts, most copies], int64, in the order of copies, -1 behind the last one.
    """
    layers, slots = phy2log.shape
    most = int(counts.max())
    result = np.full((layers, counts.shape[1], most), -1, np.int64)
    ids = np.broadcast_to(np.arange(slots), phy2log.shape)
    np.put_along_axis(result.reshape(layers, -1), phy2log * most + copy, ids, 1)
    return result
