"""How uneven the load of GPUs is: the slowest over the mean, as planned and as it turned out."""

from __future__ import annotations

from typing import Any

import numpy as np

from deepinfer.balancers.expert_parallel._arrays import FloatArray, IntArray, indices, loads
from deepinfer.balancers.expert_parallel.maps import count_copies
from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError, ShapeError

__all__ = ["gpu_loads", "planned_imbalance", "realised_imbalance", "slot_imbalance"]


def gpu_loads(weight: FloatArray, phy2log: IntArray, num_gpus: int) -> FloatArray:
    """Load of each GPU when the load of an expert is split equally over its copies.

    Args:
        weight: Load of each expert, shape [layers, experts].
        phy2log: Expert in each slot, shape [layers, slots].
        num_gpus: GPUs, consecutive slots each.

    Returns:
        Shape [layers, gpus], float64.
    """
    share = weight / np.maximum(count_copies(phy2log, weight.shape[1]), 1)
    per_slot = np.take_along_axis(share, phy2log, 1)
    load: FloatArray = per_slot.reshape(len(phy2log), num_gpus, -1).sum(2)
    return load


def planned_imbalance(weight: Any, phy2log: Any, num_gpus: int) -> FloatArray:
    """Load of the slowest GPU over the mean, for the loads that a placement was made for.

    Args:
        weight: Load of each expert, shape [layers, experts].
        phy2log: Expert in each slot, shape [layers, slots].
        num_gpus: GPUs.

    Returns:
        Shape [layers], float64, from 1; 1 for a layer without load.

    Raises:
        ConfigError: `num_gpus` is no integer from 1.
        ShapeError: The arrays do not fit each other.
    """
    weight = loads("weight", weight)
    phy2log = indices("phy2log", phy2log, (len(weight), -1), weight.shape[1])
    _check_divides(phy2log.shape[1], num_gpus)
    return _slowest_over_mean(gpu_loads(weight, phy2log, num_gpus))


def realised_imbalance(counts: Any, phy2log: Any, num_gpus: int) -> FloatArray:
    """The same for each of several steps, with an equal split of every step's tokens.

    Args:
        counts: Tokens of each expert in each step, shape [steps, layers, experts].
        phy2log: Expert in each slot, shape [layers, slots].
        num_gpus: GPUs.

    Returns:
        Shape [steps, layers], float64. Its mean is the factor by which the expert layers take longer than balanced
        ones, since in a step each layer waits for its slowest GPU.

    Raises:
        ConfigError: `num_gpus` is no integer from 1.
        ShapeError: The arrays do not fit each other.
    """
    counts = loads("counts", counts, 3)
    steps, layers, experts = counts.shape
    phy2log = indices("phy2log", phy2log, (layers, -1), experts)
    _check_divides(phy2log.shape[1], num_gpus)
    shares = counts / np.maximum(count_copies(phy2log, experts), 1)
    per_slot = np.take_along_axis(shares, np.broadcast_to(phy2log, (steps, *phy2log.shape)), 2)
    return _slowest_over_mean(per_slot.reshape(steps, layers, num_gpus, -1).sum(3))


def slot_imbalance(tokens: Any, num_gpus: int) -> FloatArray:
    """Load of the slowest GPU over the mean, for tokens that were sent to slots.

    Args:
        tokens: Tokens of each slot, shape [..., slots], such as a splitter's result.
        num_gpus: GPUs.

    Returns:
        Shape [...], float64, from 1.

    Raises:
        ConfigError: `num_gpus` is no integer from 1.
        ShapeError: The slots cannot be divided among the GPUs, or there is something else than numbers from 0.
    """
    array = loads("tokens", tokens, max(1, np.ndim(tokens)))
    _check_divides(array.shape[-1], num_gpus)
    return _slowest_over_mean(array.reshape(*array.shape[:-1], num_gpus, -1).sum(-1))


def _slowest_over_mean(load: FloatArray) -> FloatArray:
    mean = load.mean(-1)
    return np.where(mean > 0, load.max(-1) / np.where(mean > 0, mean, 1.0), 1.0)


def _check_divides(slots: int, num_gpus: int) -> None:
    checks.check_int("num_gpus", num_gpus, 1, 2**31 - 1, ConfigError)
    if slots % num_gpus:
        raise ShapeError(
            f"{slots} slots cannot be divided among {num_gpus} GPUs; use a multiple of the GPUs."
        )
