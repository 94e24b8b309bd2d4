"""The balancers in a process of their own: no torch, and a first decision of each kind within 0.3 s of processor time."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PREAMBLE = """
import json, sys, time

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton", "matplotlib"):
            raise ModuleNotFoundError(f"{name} is blocked in this test", name=name)

sys.meta_path.insert(0, Blocked())
begin = time.process_time()
"""

DECISIONS = {
    "decode": """
from deepinfer.balancers import DecodeBalancer, Fleet, RouteRequest, WorkerSnapshot
fleet = Fleet([WorkerSnapshot(name="a", num_running=2), WorkerSnapshot(name="b")])
found = DecodeBalancer().decide(RouteRequest(rid="r", prompt_tokens=10), fleet).target
""",
    "encoder": """
from deepinfer.balancers import EncoderBalancer, EncoderCost, EncoderFleet, ImageTask
fleet = EncoderFleet(["a", "b"])
fleet.send(0, ImageTask("q", "x", 10), 0.0)
found = EncoderBalancer(EncoderCost(1e-4)).decide(ImageTask("r", "y", 10), fleet, 0.0).target
""",
    "experts": """
from deepinfer.balancers import rebalance_experts
found = rebalance_experts([[9, 1, 1, 1]], 6, 1, 1, 2)[2].max() - 1
""",
    "prompts": """
from deepinfer.balancers import EarliestCompletion, Fleet, PrefillCost, PrefixIndex
from deepinfer.balancers import RouteRequest, WorkerSnapshot
fleet = Fleet([WorkerSnapshot(name="a", waiting_s=9.0), WorkerSnapshot(name="b")])
router = EarliestCompletion(PrefillCost.of_rate(20_000), PrefixIndex(), block_tokens=512)
found = router.decide(RouteRequest(rid="r", prompt_tokens=10), fleet).target
""",
}

REPORT = """
print(json.dumps([time.process_time() - begin, int(found), "torch" in sys.modules]))
"""


@pytest.mark.parametrize("kind", DECISIONS)
def test_first_decision(kind: str) -> None:
    seconds = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", PREAMBLE + DECISIONS[kind] + REPORT],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        taken, found, has_torch = json.loads(done.stdout)
        assert found == 1
        assert not has_torch
        seconds.append(taken)
    assert min(seconds) < 0.3
