from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from deepinfer.core.errors import InvariantBroken
from deepinfer.testing import Machine, MachineConfig, load_calls, play_calls, save_calls
from deepinfer.testing.trace_player import RecordedCall


def recorded(config: MachineConfig, seed: int = 1, count: int = 60) -> list[RecordedCall]:
    stream = random.Random(seed)
    machine = Machine(config, record=True)
    for _ in range(count):
        machine.do(config.draw(stream))
    machine.finish()
    assert machine.recorder is not None
    return machine.recorder.calls


CONFIG = MachineConfig(
    depth=1, drafts=4, num_seqs=3, num_host=3, spare_blocks=2, target_step_s=1.5e-3, faults=False
)


@pytest.mark.parametrize("launch_recorded", [False, True])
def test_schedule_replays_bit_for_bit_through_a_file(tmp_path: Path, launch_recorded: bool) -> None:
    calls = recorded(CONFIG)
    save_calls(tmp_path / "calls.jsonl", calls)
    read = load_calls(tmp_path / "calls.jsonl")
    assert read == json.loads(json.dumps(calls))
    other = Machine(CONFIG)
    compared = play_calls(
        read, other.scheduler.inner, clock=other.clock, launch_recorded=launch_recorded
    )
    names = [call["call"] for call in calls]
    assert compared == sum(names.count(name) for name in ("plan", "launch", "apply"))
    assert {"add", "abort", "preempt", "plan", "launch", "apply"} <= set(names)


def test_another_scheduler_does_not_pass() -> None:
    calls = recorded(CONFIG)
    other = Machine(MachineConfig(depth=1, drafts=4, num_seqs=2))
    with pytest.raises(InvariantBroken, match=r"call \d+, (plan|launch)"):
        play_calls(calls, other.scheduler.inner, clock=other.clock)


def test_one_changed_token_is_seen() -> None:
    calls = json.loads(json.dumps(recorded(CONFIG)))
    applied = [c for c in calls if c["call"] == "apply" and any(p[1] for p in c["progress"])]
    entry = next(p for p in applied[len(applied) // 2]["progress"] if p[1])
    entry[1][0] += 1
    other = Machine(CONFIG)
    with pytest.raises(InvariantBroken, match="apply"):
        play_calls(calls, other.scheduler.inner, clock=other.clock)
