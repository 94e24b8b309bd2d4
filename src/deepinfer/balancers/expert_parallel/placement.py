"""A placement of experts: which slot of which GPU holds which expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer.balancers.expert_parallel._arrays import FloatArray, IntArray, indices, loads
from deepinfer.balancers.expert_parallel.imbalance import gpu_loads, planned_imbalance
from deepinfer.balancers.expert_parallel.maps import copies_of, count_copies, slots_of
from deepinfer.core.errors import ConfigError, ShapeError

__all__ = ["Placement"]


@dataclass(frozen=True, eq=False)
class Placement:
    """Which expert each slot holds; consecutive slots belong to one GPU.

    Attributes:
        phy2log: Expert in each slot, shape [layers, slots], int64, not writable.
        num_experts: Experts of a layer; each has at least one slot.
        num_gpus: GPUs.

    Raises:
        ShapeError: The map has the wrong form, or an expert is missing from a layer.
    """

    phy2log: IntArray
    num_experts: int
    num_gpus: int

    def __post_init__(self) -> None:
        """Checks the map and takes a copy that cannot be written to."""
        phy2log = indices("phy2log", self.phy2log, (-1, -1), self.num_experts)
        if self.num_gpus < 1 or phy2log.shape[1] % self.num_gpus:
            raise ShapeError(
                f"{phy2log.shape[1]} slots cannot be divided among {self.num_gpus} GPUs; use a "
                "multiple of the GPUs."
            )
        missing = np.argwhere(count_copies(phy2log, self.num_experts) == 0)
        if len(missing):
            layer, expert = missing[0].tolist()
            raise ShapeError(
                f"layer {layer} has no slot with expert {expert}; each of the {self.num_experts} experts "
                "must be in a slot."
            )
        phy2log.flags.writeable = False
        object.__setattr__(self, "phy2log", phy2log)

    @classmethod
    def in_order(cls, layers: int, experts: int, gpus: int, redundant: int = 0) -> Placement:
        """The placement before anything is known: experts in order, then further copies of the first ones.

        Args:
            layers: Layers.
            experts: Experts of a layer.
            gpus: GPUs.
            redundant: Further slots a GPU.

        Returns:
            The placement; the slots of a GPU are rounded up where the experts do not divide among the GPUs.
        """
        from deepinfer.balancers.expert_parallel.refine import in_order

        if min(layers, experts, gpus) < 1 or redundant < 0:
            raise ConfigError(
                f"{layers} layers, {experts} experts, {gpus} GPUs and {redundant} further slots make no "
                "placement; use at least one of each, and further slots from 0.",
                field="redundant",
                value=redundant,
            )
        slots = -(-experts // gpus) + redundant
        return cls(in_order(layers, experts, gpus, slots).reshape(layers, -1), experts, gpus)

    @property
    def num_layers(self) -> int:
        """Layers."""
        return len(self.phy2log)

    @property
    def num_slots(self) -> int:
        """Slots of a layer on all GPUs."""
        return int(self.phy2log.shape[1])

    @property
    def logcnt(self) -> IntArray:
        """Copies of each expert, shape [layers, experts], int64."""
        return count_copies(self.phy2log, self.num_experts)

    @property
    def log2phy(self) -> IntArray:
        """Slots of each expert, ascending, shape [layers, experts, most copies], int64, -1 behind the last one."""
        return slots_of(self.phy2log, copies_of(self.phy2log), self.logcnt)

    def loads(self, weight: Any) -> FloatArray:
        """Load of each GPU when an expert's load is split equally over its copies.

        Args:
            weight: Load of each expert, shape [layers, experts].

        Returns:
            Shape [layers, gpus], float64.
        """
        return gpu_loads(self._of_experts(weight), self.phy2log, self.num_gpus)

    def imbalance(self, weight: Any) -> FloatArray:
        """Load of the slowest GPU over the mean.

        Args:
            weight: Load of each expert, shape [layers, experts].

        Returns:
            Shape [layers], float64, from 1.
        """
        return planned_imbalance(self._of_experts(weight), self.phy2log, self.num_gpus)

    def logical_counts(self, tokens: Any) -> FloatArray:
        """Counts of experts from counts of slots, which is what kernels count.

        Args:
            tokens: Tokens of each slot, shape [layers, slots], summed over all ranks.

        Returns:
            Shape [layers, experts], float64.

        Raises:
            ShapeError: There is not one count for each slot.
        """
        array = loads("tokens", tokens)
        if array.shape != self.phy2log.shape:
            raise ShapeError(
                f"tokens has shape {array.shape}; the placement has slots {self.phy2log.shape}."
            )
        result = np.zeros((self.num_layers, self.num_experts))
        np.add.at(result, (np.arange(self.num_layers)[:, None], self.phy2log), array)
        return result

    def twins(self) -> IntArray:
        """Layer, GPU and slot within it of copies that share a GPU with another of their expert, shape [found, 3]."""
        from deepinfer.balancers.expert_parallel.packing import twins

        return twins(self.phy2log.reshape(self.num_layers, self.num_gpus, -1))

    def _of_experts(self, weight: Any) -> FloatArray:
        array = loads("weight", weight)
        if array.shape != (self.num_layers, self.num_experts):
            raise ShapeError(
                f"weight has shape {array.shape}; this placement has "
                f"{self.num_layers} layers of {self.num_experts} experts."
            )
        return array

    def __repr__(self) -> str:
        return (
            f"Placement({self.num_layers} layers, {self.num_experts} experts in {self.num_slots} slots "
            f"on {self.num_gpus} GPUs)"
        )
