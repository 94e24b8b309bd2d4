"""Many random machines one after another, and the smallest list of actions that still shows a failure."""

from __future__ import annotations

import dataclasses
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepinfer.testing.machine import Machine, Mutation
from deepinfer.testing.machine_config import Action, MachineConfig

__all__ = ["CampaignReport", "Violation", "replay_actions", "run_campaign", "shrink"]

_RECORDED = 8

MakeMutation = Callable[[], Mutation]


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """Something that must not be.

    Attributes:
        seed: Seed of the machine.
        config: Its sizes and options.
        actions: What was done to it, in order.
        error: What came of it.
        num_steps: Steps of the engine until then.
    """

    seed: int
    config: MachineConfig
    actions: tuple[Action, ...]
    error: Exception
    num_steps: int

    def __str__(self) -> str:
        text = f"{type(self.error).__name__}: {self.error}"
        return f"seed {self.seed}, {len(self.actions)} actions, {self.num_steps} steps: {text}"


@dataclass(slots=True, kw_only=True)
class CampaignReport:
    """What a campaign did.

    Attributes:
        num_actions: Actions done, each with all checks behind it.
        num_steps: Steps of the engines.
        num_machines: Machines.
        seconds: How long it took.
        counts: Actions by name, and what came of them.
        outcomes: Outputs that ended, by finish reason.
        violations: What must not be.
    """

    num_actions: int = 0
    num_steps: int = 0
    num_machines: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """All numbers as plain values; violations as text."""
        out = {name: getattr(self, name) for name in ("num_actions", "num_steps", "num_machines")}
        return out | {
            "seconds": round(self.seconds, 1),
            "counts": dict(self.counts),
            "outcomes": dict(self.outcomes),
            "violations": [str(violation) for violation in self.violations],
        }


def run_campaign(
    num_actions: int,
    seed: int = 0,
    *,
    actions_per_machine: int = 120,
    mutation: MakeMutation | None = None,
    changes: dict[str, Any] | None = None,
    most_violations: int | None = None,
    progress: Callable[[CampaignReport], None] | None = None,
) -> CampaignReport:
    """Does random actions to random machines; every check of `Machine` runs after each.

    Of every eighth machine the schedule is recorded and played to fresh objects at the end.

    The same arguments give the same actions. Machine number i has the seed `seed + i`.

    Args:
        num_actions: Actions to do in all, at least.
        seed: Seed of the first machine.
        actions_per_machine: Actions done to one machine before it is let run out.
        mutation: Makes what breaks each machine, or None.
        changes: Fields of `MachineConfig` that are given instead of drawn.
        most_violations: Stop after so many, or None.
        progress: Called with the report after each machine.

    Returns:
        The report.

    Examples:
        >>> run_campaign(40, actions_per_machine=20).violations
        []
    """
    report = CampaignReport()
    began = time.perf_counter()
    while report.num_actions < num_actions:
        stream = random.Random(seed + report.num_machines)
        config = MachineConfig.random(stream)
        if changes:
            config = dataclasses.replace(config, **changes)
        actions: list[Action] = []
        machine = None
        try:
            broken = mutation() if mutation is not None else None
            machine = Machine(config, broken, record=report.num_machines % _RECORDED == 0)
            for _ in range(actions_per_machine):
                actions.append(config.draw(stream))
                machine.do(actions[-1])
            machine.finish()
        except Exception as error:
            report.violations.append(
                Violation(
                    seed=seed + report.num_machines,
                    config=config,
                    actions=tuple(actions),
                    error=error,
                    num_steps=machine.num_steps if machine is not None else 0,
                )
            )
        report.num_machines += 1
        report.num_actions += len(actions)
        if machine is not None:
            report.num_steps += machine.num_steps
            report.counts += machine.counts
            report.outcomes += machine.outcomes
        report.seconds = time.perf_counter() - began
        if progress is not None:
            progress(report)
        if most_violations is not None and len(report.violations) >= most_violations:
            break
    return report


def replay_actions(
    config: MachineConfig,
    actions: Sequence[Action],
    mutation: MakeMutation | None = None,
    *,
    record: bool = False,
) -> Exception | None:
    """Does given actions to a new machine and lets it run out.

    Args:
        config: Sizes and options.
        actions: What to do.
        mutation: Makes what breaks the machine, or None.
        record: Whether to record the schedule and to play it to fresh objects at the end.

    Returns:
        What went wrong, or None.
    """
    try:
        broken = mutation() if mutation is not None else None
        machine = Machine(config, broken, record=record)
        for action in actions:
            machine.do(action)
        machine.finish()
    except Exception as error:
        return error
    return None


def shrink(violation: Violation, mutation: MakeMutation | None = None) -> Violation:
    """Looks for the fewest actions, the shortest prompts and the plainest options that fail in the same way.

    Args:
        violation: What was found.
        mutation: What the machine was broken by, or None.

    Returns:
        The smallest violation found; the kind of error and the first words of its message are the same.
    """
    kind = _kind(violation.error)
    best = violation
    record = "call" in str(violation.error)[:4]

    def fails(config: MachineConfig, actions: Sequence[Action]) -> bool:
        nonlocal best
        error = replay_actions(config, actions, mutation, record=record)
        if error is None or _kind(error) != kind:
            return False
        best = dataclasses.replace(best, config=config, actions=tuple(actions), error=error)
        return True

    if not fails(violation.config, violation.actions):
        return violation
    size = len(best.actions)
    while size:
        at = 0
        while at < len(best.actions):
            if not fails(best.config, best.actions[:at] + best.actions[at + size :]):
                at += size
        size //= 2
    plain = MachineConfig()
    for item in dataclasses.fields(MachineConfig):
        if getattr(best.config, item.name) != getattr(plain, item.name):
            change = {item.name: getattr(plain, item.name)}
            fails(dataclasses.replace(best.config, **change), best.actions)
    for at in range(len(best.actions)):
        for smaller in _smaller(best.actions[at]):
            fails(best.config, (*best.actions[:at], smaller, *best.actions[at + 1 :]))
    return best


def _kind(error: Exception) -> tuple[str, str]:
    return type(error).__name__, str(error)[:4]


def _smaller(action: Action) -> list[Action]:
    name, arguments = action
    if name != "add":
        return []
    plain = {"temperature": 0.0, "ignore_eos": True}
    out: list[Action] = []
    for key, value in arguments["params"].items():
        if key not in plain and key != "max_tokens":
            rest = {k: v for k, v in arguments["params"].items() if k != key}
            out.append((name, {**arguments, "params": rest}))
        elif key in plain and value != plain[key]:
            out.append((name, {**arguments, "params": {**arguments["params"], key: plain[key]}}))
    return out
