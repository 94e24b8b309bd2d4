"""The way from one placement to another in small stages, each of which leaves every expert served."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from deepinfer.balancers.expert_parallel._arrays import IntArray
from deepinfer.balancers.expert_parallel.placement import Placement
from deepinfer.balancers.expert_parallel.plan_diff import check_alike
from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError, InvariantBroken

__all__ = ["Move", "MoveQueue", "Stage", "stage_moves"]

_INT_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Move:
    """One slot that gets another expert.

    Attributes:
        layer: Layer.
        slot: Slot to fill.
        expert: Expert whose weights go there.
        source: Slot that holds these weights until the stage is over.
        replaced: Expert that the slot held.
    """

    layer: int
    slot: int
    expert: int
    source: int
    replaced: int


@dataclass(frozen=True, slots=True)
class Stage:
    """Moves that are copied side by side and take effect together, between two steps of the model.

    Attributes:
        number: Place in the sequence, from 0.
        moves: The moves. Copies go to spare room of the target GPU first; only when all are there do the slots change.
    """

    number: int
    moves: tuple[Move, ...]


def stage_moves(
    old: Placement, new: Placement, *, moves_per_stage: int = 8, moves_per_gpu: int = 1
) -> list[Stage]:
    """Orders the moves so that after each stage every expert of every layer has a slot.

    Slots whose expert lives elsewhere too are filled first, which frees others. Where experts without a copy change
    places in a circle, the circle moves as one stage when it is short enough; else one of them stays in a slot of an
    expert with copies meanwhile, which costs two more moves.

    Args:
        old: The placement now.
        new: The placement to reach.
        moves_per_stage: Most moves in one stage, from 2.
        moves_per_gpu: Most slots of one GPU in one stage: the room that it has for incoming weights.

    Returns:
        The stages, layer by layer. Deterministic, lower slots first.

    Raises:
        ShapeError: The placements differ in layers, slots, experts or GPUs.
        ConfigError: A number is out of range, or experts change places in a circle that is too large for a stage and
            there is no expert with copies through whose slot it could be opened.
    """
    check_alike(old, new)
    checks.check_int("moves_per_stage", moves_per_stage, 2, _INT_MAX, ConfigError)
    checks.check_int("moves_per_gpu", moves_per_gpu, 1, _INT_MAX, ConfigError)
    stages: list[Stage] = []
    per_gpu = old.num_slots // old.num_gpus
    for layer in np.flatnonzero((old.phy2log != new.phy2log).any(1)).tolist():
        order = _Order(old.phy2log[layer], new.phy2log[layer], old.num_experts, per_gpu)
        for fills in order.stages(moves_per_stage, moves_per_gpu):
            moves = tuple(Move(layer, *fill) for fill in fills)
            stages.append(Stage(len(stages), moves))
    return stages


_Fill = tuple[int, int, int, int]  # slot, expert, source, replaced


class _Order:
    """The moves of one layer in order; `live` is what the slots hold after the stages so far."""

    def __init__(self, old: IntArray, new: IntArray, experts: int, per_gpu: int) -> None:
        self.live, self.new, self.per_gpu = old.copy(), new, per_gpu
        self.copies = np.bincount(old, minlength=experts)
        self.parked: int | None = None  # the slot in which an expert of a circle is kept meanwhile

    def stages(self, most: int, most_gpu: int) -> Iterator[list[_Fill]]:
        while True:
            left = np.flatnonzero(self.live != self.new).tolist()
            if not left:
                return
            ready = self._ready([slot for slot in left if slot != self.parked], most, most_gpu)
            if not ready and self.parked is not None:
                ready, self.parked = [self.parked], None
            if ready:
                yield self._fill([(slot, int(self.new[slot])) for slot in ready])
                continue
            circle = self._circle(left[0])
            gpus = [slot // self.per_gpu for slot in circle]
            fits = all(gpus.count(gpu) <= most_gpu for gpu in gpus)
            if len(circle) <= most and fits:
                yield self._fill([(slot, int(self.new[slot])) for slot in circle])
            else:
                self.parked = self._spare(circle)
                yield self._fill([(self.parked, int(self.live[circle[0]]))])

    def _ready(self, left: list[int], most: int, most_gpu: int) -> list[int]:
        """Slots that can be filled now because their expert is somewhere else too."""
        copies = self.copies.copy()
        ready: list[int] = []
        used: dict[int, int] = {}
        for slot in left:
            gpu = slot // self.per_gpu
            if len(ready) < most and copies[self.live[slot]] > 1 and used.get(gpu, 0) < most_gpu:
                # Copies that arrive in this stage count only after it, so sources stay what they are.
                copies[self.live[slot]] -= 1
                used[gpu] = used.get(gpu, 0) + 1
                ready.append(slot)
        return ready

    def _circle(self, start: int) -> list[int]:
        """Slots around which experts without copies move, each getting what the next one holds."""
        circle = [start]
        while True:
            source = int(np.flatnonzero(self.live == self.new[circle[-1]])[0])
            if source in circle:
                return circle[circle.index(source) :]
            circle.append(source)

    def _spare(self, circle: list[int]) -> int:
        """A slot whose expert has another one, to keep an expert of a circle in for a while."""
        several = np.flatnonzero(self.copies[self.live] > 1).tolist()
        if not several:
            raise ConfigError(
                f"{len(circle)} experts without copies change places, which is too much for one stage, and no "
                "expert has a copy whose slot could be used meanwhile. Raise moves_per_stage or moves_per_gpu.",
                field="moves_per_stage",
                limit=f"at least {len(circle)}",
            )
        gpu = circle[0] // self.per_gpu
        return next((slot for slot in several if slot // self.per_gpu != gpu), several[0])

    def _fill(self, targets: list[tuple[int, int]]) -> list[_Fill]:
        fills = []
        for slot, expert in targets:
            source = int(np.flatnonzero(self.live == expert)[0])
            fills.append((slot, expert, source, int(self.live[slot])))
        for slot, expert, _, replaced in fills:
            self.live[slot] = expert
            self.copies[expert] += 1
            self.copies[replaced] -= 1
        return fills


class MoveQueue:
    """Hands stages out one at a time, and keeps the map that is in force.

    A stage begins only when the one before it is known to be done, so no buffer is used while a copy still reads it, and
    a copy that never ends is noticed. The caller copies the weights and tells the time.

    Args:
        placement: The placement in force.
        stages: What `stage_moves` gave for it.
        timeout_s: Seconds after which a stage that began is overdue.

    Attributes:
        live: The map in force: expert in each slot, shape [layers, slots].

    Raises:
        ConfigError: The timeout is out of range.
    """

    def __init__(
        self, placement: Placement, stages: list[Stage], *, timeout_s: float = 60.0
    ) -> None:
        self._timeout_s = checks.check_float(
            "timeout_s", timeout_s, 0.0, 1e9, ConfigError, open_low=True
        )
        self._num_experts = placement.num_experts
        self._num_gpus = placement.num_gpus
        self.live: IntArray = placement.phy2log.copy()
        self._stages = stages
        self._next = 0
        self._began_s: float | None = None

    @property
    def is_done(self) -> bool:
        """Whether no stage is left."""
        return self._next == len(self._stages)

    @property
    def placement(self) -> Placement:
        """The placement in force."""
        return Placement(self.live, self._num_experts, self._num_gpus)

    def begin(self, now_s: float) -> Stage | None:
        """The next stage to copy.

        Args:
            now_s: The time in seconds.

        Returns:
            The stage, or None when all are done.

        Raises:
            InvariantBroken: The stage before was neither finished nor abandoned.
        """
        if self._began_s is not None:
            raise InvariantBroken(
                f"stage {self._next} began at {self._began_s:g} s and is not finished; its buffers are in use. "
                "Call finish or abandon first."
            )
        if self.is_done:
            return None
        self._began_s = now_s
        return self._stages[self._next]

    def finish(self, number: int) -> None:
        """Puts a stage into force, between two steps of the model, when all of its copies arrived.

        Args:
            number: Number of the stage that began.

        Raises:
            InvariantBroken: Another stage is under way, or none; a message came late or twice.
        """
        self._check(number)
        for move in self._stages[number].moves:
            if self.live[move.layer, move.slot] != move.replaced:
                raise InvariantBroken(
                    f"slot {move.slot} of layer {move.layer} holds expert {self.live[move.layer, move.slot]}, "
                    f"not {move.replaced}; the stages are for another placement."
                )
        for move in self._stages[number].moves:
            self.live[move.layer, move.slot] = move.expert
        self._next += 1
        self._began_s = None

    def abandon(self, number: int) -> None:
        """Gives a stage up whose copies failed; nothing changes, and `begin` gives it again.

        Args:
            number: Number of the stage that began.

        Raises:
            InvariantBroken: Another stage is under way, or none.
        """
        self._check(number)
        self._began_s = None

    def is_overdue(self, now_s: float) -> bool:
        """Whether the stage under way takes longer than the timeout.

        Args:
            now_s: The time in seconds.

        Returns:
            True when something should be raised about it.
        """
        return self._began_s is not None and now_s - self._began_s > self._timeout_s

    def _check(self, number: int) -> None:
        if self._began_s is None or number != self._next:
            state = "none is" if self._began_s is None else f"stage {self._next} is"
            raise InvariantBroken(
                f"stage {number} is not under way ({state}); each stage is finished once, in order."
            )
