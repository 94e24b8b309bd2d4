"""Plans from a running count of what the router chose, at intervals, with few moves."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from deepinfer.balancers.expert_parallel._arrays import FloatArray, IntArray, loads
from deepinfer.balancers.expert_parallel.adapt import adapt
from deepinfer.balancers.expert_parallel.placement import Placement
from deepinfer.balancers.expert_parallel.plan_diff import count_moves, relabel
from deepinfer.balancers.expert_parallel.rebalance import place_experts
from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError, ShapeError

__all__ = ["ExpertPlan", "ExpertPlanner", "LayerChoice"]

_BUCKETS = 20
_INT_MAX = 2**31 - 1

LayerChoice = Literal["kept", "adapted", "anew"]
"""What a plan does with a layer: nothing, a few moves, or all anew."""


@dataclass(frozen=True, eq=False)
class ExpertPlan:
    """What a planner proposes.

    Attributes:
        placement: Where to put the experts.
        choices: What is done with each layer.
        moves: Slots of each layer that change, shape [layers], int64; all slots when there was no placement before.
        before: Load of the slowest GPU over the mean with the old placement, shape [layers]; NaN without one.
        after: The same with the new placement, shape [layers].
        num_steps: Steps that the statistics hold.
    """

    placement: Placement
    choices: tuple[LayerChoice, ...]
    moves: IntArray
    before: FloatArray
    after: FloatArray
    num_steps: int

    @property
    def num_moves(self) -> int:
        """Slots that change in all layers."""
        return int(self.moves.sum())


class ExpertPlanner:
    """Counts what experts get, and plans when it is time.

    The published deployment runs prefill with 4 redundant experts a GPU, statistics over 100 steps and a plan every 1,000
    steps, and decode with 1, 1,000 and 10,000: `prefill` and `decode` make these.

    A plan keeps a layer that is balanced well enough. Another one is adapted by a few moves, and planned anew, with the
    GPUs renumbered so that as much as possible stays, only when that is better by more than `slack`.

    Args:
        num_gpus: GPUs over which the experts of a layer are spread.
        redundant: Further slots a GPU.
        window: Steps whose counts a plan looks at, at most. They are kept in 20 parts, so the oldest part leaves as one.
        interval: Steps between plans.
        target: Slowest GPU over the mean that is good enough; None: 1.01, or more with fewer than ten slots a GPU.
        slack: How much worse an adapted layer may be than one planned anew.
        for_splitter: Whether a `TokenSplitter` divides the tokens of each step.
        num_groups: Groups of consecutive experts of a router that picks groups first.
        num_nodes: Nodes; of use with groups only.

    Attributes:
        step: Steps observed in all.

    Raises:
        ConfigError: A number is out of range.

    Examples:
        >>> planner = ExpertPlanner(num_gpus=2, redundant=1, window=4, interval=2)
        >>> for _ in range(2):
        ...     planner.observe([[30, 10, 10, 10]])
        >>> planner.is_due
        True
        >>> plan = planner.plan()
        >>> plan.placement.logcnt.tolist(), plan.after.tolist()
        ([[2, 2, 1, 1]], [1.0])
    """

    def __init__(
        self,
        num_gpus: int,
        redundant: int,
        window: int,
        interval: int,
        *,
        target: float | None = None,
        slack: float = 0.02,
        for_splitter: bool = False,
        num_groups: int = 1,
        num_nodes: int = 1,
    ) -> None:
        self.num_gpus = checks.check_int("num_gpus", num_gpus, 1, _INT_MAX, ConfigError)
        self.redundant = checks.check_int("redundant", redundant, 0, _INT_MAX, ConfigError)
        self.window = checks.check_int("window", window, 1, _INT_MAX, ConfigError)
        self.interval = checks.check_int("interval", interval, 1, _INT_MAX, ConfigError)
        self.num_groups = checks.check_int("num_groups", num_groups, 1, _INT_MAX, ConfigError)
        self.num_nodes = checks.check_int("num_nodes", num_nodes, 1, _INT_MAX, ConfigError)
        self.slack = checks.check_float("slack", slack, 0.0, 100.0, ConfigError)
        self.target = target
        if target is not None:
            checks.check_float("target", target, 1.0, 100.0, ConfigError)
        self.for_splitter = checks.check_bool("for_splitter", for_splitter, ConfigError)
        self.step = 0
        self._planned_at = 0
        self._grain = -(-window // _BUCKETS)
        self._sums: deque[tuple[int, FloatArray]] = deque()

    @classmethod
    def prefill(cls, num_gpus: int, **options: Any) -> ExpertPlanner:
        """A planner as published for prefill: 4 redundant experts a GPU, 100 steps, every 1,000.

        Args:
            num_gpus: GPUs.
            options: Further options of the constructor.

        Returns:
            The planner.
        """
        return cls(num_gpus, **{"redundant": 4, "window": 100, "interval": 1_000, **options})

    @classmethod
    def decode(cls, num_gpus: int, **options: Any) -> ExpertPlanner:
        """A planner as published for decode: 1 redundant expert a GPU, 1,000 steps, every 10,000.

        Args:
            num_gpus: GPUs.
            options: Further options of the constructor.

        Returns:
            The planner.
        """
        return cls(num_gpus, **{"redundant": 1, "window": 1_000, "interval": 10_000, **options})

    def observe(self, counts: Any) -> None:
        """Takes the counts of one step.

        Args:
            counts: Tokens of each expert, shape [layers, experts], of all ranks together; or of each rank, shape [ranks,
                layers, experts], which are summed. Ranks that run the same tokens must be counted once. Counts of slots
                become counts of experts by `Placement.logical_counts`.

        Raises:
            ShapeError: The shape differs from that of earlier steps, or a count is negative or not finite.
        """
        array = (
            loads("counts", counts, 3).sum(0) if np.ndim(counts) == 3 else loads("counts", counts)
        )
        if self._sums and self._sums[-1][1].shape != array.shape:
            raise ShapeError(
                f"counts has shape {array.shape}, and had {self._sums[-1][1].shape} before; "
                "make a new planner for another model."
            )
        if not self._sums or self._sums[-1][0] >= self._grain:
            self._sums.append((0, np.zeros(array.shape)))
        steps, total = self._sums[-1]
        total += array
        self._sums[-1] = (steps + 1, total)
        while self.num_steps > self.window and len(self._sums) > 1:
            self._sums.popleft()
        self.step += 1

    @property
    def num_steps(self) -> int:
        """Steps that the statistics hold now."""
        return sum(steps for steps, _ in self._sums)

    @property
    def is_due(self) -> bool:
        """Whether `interval` steps passed since the last plan, or since the start."""
        return self.step - self._planned_at >= self.interval

    def weight(self) -> FloatArray:
        """Loads of the window.

        Returns:
            Tokens of each expert, shape [layers, experts].

        Raises:
            ConfigError: Nothing was observed yet.
        """
        if not self._sums:
            raise ConfigError(
                "no step was observed yet; call observe with the counts of at least one step."
            )
        total: FloatArray = np.sum([part for _, part in self._sums], axis=0)
        return total

    def plan(self, old: Placement | None = None) -> ExpertPlan:
        """Plans for the loads of the window.

        Args:
            old: Where the experts are now, or None to plan without regard to it.

        Returns:
            The plan; the same statistics and placement give the same one. Layers without any load stay as they are.

        Raises:
            ConfigError: Nothing was observed yet, or the numbers do not divide each other.
            ShapeError: `old` is for another model or another number of GPUs.
        """
        weight = self.weight()
        layers, experts = weight.shape
        slots = (-(-experts // self.num_gpus) + self.redundant) * self.num_gpus
        self._planned_at = self.step
        if old is None:
            fresh = self._anew(weight, slots)
            return ExpertPlan(
                fresh,
                ("anew",) * layers,
                np.full(layers, slots),
                np.full(layers, np.nan),
                fresh.imbalance(weight),
                self.num_steps,
            )
        if (old.num_layers, old.num_experts, old.num_gpus) != (layers, experts, self.num_gpus):
            raise ShapeError(
                f"the placement is {old}; the planner has {layers} layers of {experts} experts on "
                f"{self.num_gpus} GPUs."
            )
        return self._improve(old, weight)

    def _improve(self, old: Placement, weight: FloatArray) -> ExpertPlan:
        per_gpu = old.num_slots // old.num_gpus
        target = self.target or 1.0 + max(0.01, 0.1 / per_gpu)
        before = old.imbalance(weight)
        phy2log = old.phy2log.copy()
        choices: list[LayerChoice] = ["kept"] * len(weight)
        rows = np.flatnonzero(before > target)
        if rows.size:
            nodes = self.num_nodes if self._is_nested else 1
            part = Placement(old.phy2log[rows], old.num_experts, old.num_gpus)
            adapted = adapt(
                part, weight[rows], target, num_nodes=nodes, for_splitter=self.for_splitter
            )
            adapted = relabel(part, adapted, num_nodes=nodes)
            reached = adapted.imbalance(weight[rows])
            phy2log[rows] = adapted.phy2log
            for row in rows:
                choices[row] = "adapted"
            poor = np.flatnonzero(reached > target)
            if poor.size:
                again = rows[poor]
                fresh = self._anew(weight[again], old.num_slots)
                better = fresh.imbalance(weight[again]) < reached[poor] - self.slack
                fresh = relabel(
                    Placement(old.phy2log[again], old.num_experts, old.num_gpus),
                    fresh,
                    num_nodes=nodes,
                )
                phy2log[again[better]] = fresh.phy2log[better]
                for row in again[better]:
                    choices[row] = "anew"
        new = Placement(phy2log, old.num_experts, old.num_gpus)
        return ExpertPlan(
            new,
            tuple(choices),
            count_moves(old, new),
            before,
            new.imbalance(weight),
            self.num_steps,
        )

    @property
    def _is_nested(self) -> bool:
        return self.num_groups > 1 and self.num_nodes > 1 and not self.num_groups % self.num_nodes

    def _anew(self, weight: FloatArray, slots: int) -> Placement:
        phy2log = place_experts(
            weight,
            slots,
            self.num_gpus,
            num_groups=self.num_groups,
            num_nodes=self.num_nodes,
            for_splitter=self.for_splitter,
        )
        return Placement(phy2log, weight.shape[1], self.num_gpus)
