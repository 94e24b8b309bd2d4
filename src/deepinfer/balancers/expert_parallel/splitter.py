"""The tokens of one step over the copies of their experts, so that the slowest GPU has as few as possible."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer.balancers.expert_parallel._arrays import FloatArray, IntArray, loads
from deepinfer.balancers.expert_parallel.placement import Placement
from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError, ShapeError

__all__ = ["TokenSplitter", "split_tokens"]

_FULL = 1e18


class TokenSplitter:
    """Splits the tokens of a step by what the router actually chose.

    A plan is made for the mean of many steps, and a single step differs from it. Where the copies are cannot change from
    step to step, but how many tokens each copy gets can. The best split is a linear program (the smallest possible load
    of the slowest GPU). It is solved by water-filling: each expert with copies levels the GPUs that hold it, given what
    the others do, in turns, from the heaviest expert on. This lowers the sum of squares of the loads, whose minimum has
    the smallest maximum too, and ends when a bound says that the maximum cannot fall by more than the tolerance.

    Args:
        placement: Where the copies are.
        sweeps: Most turns over all experts.
        tolerance: Share by which the slowest GPU may be above the optimum before rounding.

    Attributes:
        placement: As given.

    Raises:
        ConfigError: A number is out of range.

    Examples:
        >>> placement = Placement(np.array([[0, 1, 0, 2]]), num_experts=3, num_gpus=2)
        >>> TokenSplitter(placement).split([[60, 40, 10]]).tolist()  # 55 tokens on each GPU
        [[15, 40, 45, 10]]
    """

    def __init__(self, placement: Placement, *, sweeps: int = 16, tolerance: float = 1e-3) -> None:
        self.placement = placement
        self.sweeps = checks.check_int("sweeps", sweeps, 1, 10_000, ConfigError)
        self.tolerance = checks.check_float("tolerance", tolerance, 0.0, 1.0, ConfigError)
        phy2log = placement.phy2log
        layers = placement.num_layers
        # Of an expert's copies on one GPU the first one works: there is nothing to split between them.
        useful = np.ones(phy2log.shape, bool)
        layer, gpu, place = placement.twins().T
        useful[layer, gpu * (placement.num_slots // placement.num_gpus) + place] = False
        self._counts = count_gpus(phy2log, useful, placement.num_experts)
        slots = useful_slots(phy2log, useful, self._counts)
        # Experts with copies, those with most copies first, padded to the same number in every layer.
        order = np.argsort(-self._counts, axis=1, kind="stable")
        width = int((self._counts > 1).sum(1).max())
        self._experts = order[:, :width]
        at = np.arange(layers)[:, None]
        self._copies = self._counts[at, self._experts]
        # [layers, width, most copies], -1 behind the last, and for experts that cannot be split.
        self._slots = np.where(self._copies[:, :, None] > 1, slots[at, self._experts], -1)
        per_gpu = placement.num_slots // placement.num_gpus
        # The GPU behind the last one is full: padding goes there.
        self._gpus = np.where(self._slots >= 0, self._slots // per_gpu, placement.num_gpus)
        self._single = useful & (self._counts[at, phy2log] == 1)

    def split(self, counts: Any) -> IntArray:
        """Splits the tokens of one step.

        Args:
            counts: Tokens of each expert, shape [layers, experts], integers from 0.

        Returns:
            Tokens of each slot, shape [layers, slots], int64; those of an expert's slots sum to its tokens. Ties go to
            the lower slot.

        Raises:
            ShapeError: The counts do not fit the placement, or are no whole numbers.
        """
        array = loads("counts", counts)
        layers, experts = self._counts.shape
        if array.shape != (layers, experts) or (array != np.rint(array)).any():
            raise ShapeError(
                f"counts has shape {array.shape}{'' if (array == np.rint(array)).all() else ' and fractions'}; it must "
                f"be whole numbers of shape [{layers}, {experts}]."
            )
        at = np.arange(layers)[:, None]
        tokens = np.where(self._single, array[at, self.placement.phy2log], 0.0)
        fixed = tokens.reshape(layers, self.placement.num_gpus, -1).sum(2)
        load = np.concatenate((fixed, np.full((layers, 1), _FULL)), axis=1)
        amounts = np.where(self._copies > 1, array[at, self._experts], 0.0)
        parts = self._level(array, amounts, load)
        whole = self._round(amounts, parts, fixed)
        result = np.concatenate((tokens.astype(np.int64), np.zeros((layers, 1), np.int64)), 1)
        flat = self._slots.reshape(layers, -1)  # padding is slot -1, the further column
        np.put_along_axis(result, np.where(flat < 0, tokens.shape[1], flat), 0, 1)
        real = self._slots >= 0
        layer = np.broadcast_to(at[:, :, None], self._slots.shape)[real]
        result[layer, self._slots[real]] = whole[real]
        return result[:, :-1]

    def _level(self, counts: FloatArray, amounts: FloatArray, load: FloatArray) -> FloatArray:
        """Fractional parts, shape [layers, width, most copies]; `load` is of what cannot be split, and is changed."""
        layers, width, most = self._slots.shape
        rows = np.arange(layers)
        real = self._slots >= 0
        parts = np.where(real, amounts[:, :, None] / self._copies[:, :, None], 0.0)
        at = np.broadcast_to(rows[:, None, None], self._gpus.shape)
        np.add.at(load, (at, self._gpus), parts)
        columns = np.arange(1, most + 1)
        for _ in range(self.sweeps):
            left = rows[self._gap(load[rows], counts[rows], rows) > self.tolerance]
            rows = left
            if not rows.size:
                break
            for index in range(width):
                gpus = self._gpus[rows, index]
                copies = int(self._copies[rows, index].max())
                if copies < 2:
                    break
                gpus = gpus[:, :copies]
                others = load[rows[:, None], gpus] - parts[rows, index, :copies]
                order = np.argsort(others, axis=1, kind="stable")
                ascending = np.take_along_axis(others, order, 1)
                level = amounts[rows, index, None] + np.cumsum(ascending, 1)
                level /= columns[:copies]
                # The water stands over the first GPUs, as many as are below the level that they make.
                deep = (level > ascending).sum(1) - 1
                surface = level[np.arange(len(rows)), np.maximum(deep, 0)]
                filled = np.maximum(surface[:, None] - others, 0.0)
                parts[rows, index, :copies] = filled
                load[rows[:, None], gpus] = others + filled
            load[:, -1] = _FULL
        return parts

    def _gap(self, load: FloatArray, counts: FloatArray, rows: IntArray) -> FloatArray:
        """By which share the slowest GPU may be above the optimum, at most, for some layers; shape [rows].

        For any set of GPUs, what can run nowhere else, over their number, is a lower bound. Tried: all GPUs, the slowest
        one, and those within a few shares of the slowest.
        """
        load = load[:, :-1]
        slowest = load.max(1)
        bound = load.mean(1)
        per_gpu = self.placement.num_slots // self.placement.num_gpus
        gpu_of = np.arange(self.placement.num_slots) // per_gpu
        phy2log = self.placement.phy2log[rows]
        for share in (1e-9, 1e-3, 1e-2):
            inside = load >= slowest[:, None] * (1 - share)
            outside = np.zeros(counts.shape, bool)
            row, slot = np.nonzero(~inside[:, gpu_of])
            outside[row, phy2log[row, slot]] = True
            bound = np.maximum(bound, np.where(outside, 0.0, counts).sum(1) / inside.sum(1))
        return np.where(slowest > 0, slowest / np.maximum(bound, 1e-300) - 1.0, 0.0)

    def _round(self, amounts: FloatArray, parts: FloatArray, fixed: FloatArray) -> IntArray:
        """Whole parts with the same sums: what is left over of an expert goes to its GPUs with the lowest loads."""
        layers, width, _ = parts.shape
        whole = np.floor(parts + 1e-9).astype(np.int64)
        left = np.rint(amounts).astype(np.int64) - whole.sum(2)
        load = np.concatenate((fixed, np.full((layers, 1), _FULL)), axis=1)
        rows = np.arange(layers)[:, None]
        at = np.broadcast_to(rows[:, :, None], self._gpus.shape)
        np.add.at(load, (at, self._gpus), whole)
        load[:, -1] = _FULL
        for index in range(width):
            copies = int(self._copies[:, index].max())
            gpus = self._gpus[:, index, :copies]
            order = np.argsort(load[rows, gpus], axis=1, kind="stable")
            extra = np.empty(order.shape, np.int64)
            np.put_along_axis(
                extra, order, (np.arange(copies) < left[:, index, None]).astype(int), 1
            )
            whole[:, index, :copies] += extra
            load[rows, gpus] += extra
        return whole


def count_gpus(phy2log: IntArray, useful: npt.NDArray[np.bool_], num_experts: int) -> IntArray:
    """Useful copies of each expert, shape [layers, experts]."""
    counts = np.zeros((len(phy2log), num_experts), np.int64)
    layer, slot = np.nonzero(useful)
    np.add.at(counts, (layer, phy2log[layer, slot]), 1)
    return counts


def useful_slots(phy2log: IntArray, useful: npt.NDArray[np.bool_], counts: IntArray) -> IntArray:
    """Useful slots of each expert, ascending, -1 behind the last one, shape [layers, experts, most copies]."""
    layers, slots = phy2log.shape
    result = np.full((layers, counts.shape[1], int(counts.max())), -1, np.int64)
    seen = np.zeros(counts.shape, np.int64)
    rows = np.arange(layers)
    for slot in range(slots):
        layer = rows[useful[:, slot]]
        expert = phy2log[layer, slot]
        result[layer, expert, seen[layer, expert]] = slot
        seen[layer, expert] += 1
    return result


def split_tokens(counts: Any, placement: Placement, *, tolerance: float = 1e-3) -> IntArray:
    """Splits the tokens of one step; `TokenSplitter` keeps its tables for many steps.

    Args:
        counts: Tokens of each expert, shape [layers, experts], integers from 0.
        placement: Where the copies are.
        tolerance: Share by which the slowest GPU may be above the optimum before rounding.

    Returns:
        Tokens of each slot, shape [layers, slots], int64.

    Raises:
        ShapeError: The counts do not fit the placement, or are no whole numbers.
    """
    return TokenSplitter(placement, tolerance=tolerance).split(counts)
