"""Traces: what a viewer is given, and that nothing is recorded without one."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from deepinfer import SamplingParams
from deepinfer.core.errors import ConfigError

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize("depth", [0, 1])
def test_tracks(make_engine, tmp_path: Path, depth: int) -> None:
    engine = make_engine(config={"async_depth": depth})
    with engine.trace() as trace:
        engine.generate(["abc", "a prompt in chunks", "x", "y"], GREEDY)
    events = json.loads(trace.save(tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {"steps", "requests", "host", *(f"request-{i}" for i in range(1, 5))}
    steps = [e for e in events if e.get("cat") == "step"]
    assert {e["name"] for e in steps} == {"plan", "forward", "mask", "sample", "collect", "apply"}
    count = engine.stats().steps
    assert len([e for e in steps if e["name"] == "forward"]) == count
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in steps if e["ph"] == "X")
    for (_, end), (begin, _) in itertools.pairwise(spans):
        assert end <= begin + 0.01  # one host thread: its spans do not overlap
    requests = [e for e in events if e.get("cat") == "request"]
    generated = sum(e["args"].get("generated", 0) for e in requests)
    assert generated == engine.stats().generated_tokens == 32
    for number in range(1, 5):
        track = [e for e in requests if e["tid"] == number and e["ph"] == "X"]
        assert track[0]["name"] == "waiting"
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in track)
        for (_, end), (begin, _) in itertools.pairwise(spans):
            assert end <= begin + 0.01
    assert [e["name"] for e in requests if e["ph"] == "i"] == ["length"] * 4


def test_off_by_default_and_after_the_block(make_engine) -> None:
    engine = make_engine()
    trace = engine.trace()
    engine.generate("abc", GREEDY)
    assert len(trace) == 0
    with trace:
        engine.generate("abc", GREEDY)
    recorded = len(trace)
    assert recorded > 8
    engine.generate("abc", GREEDY)
    assert len(trace) == recorded


def test_memory_is_bounded(make_engine) -> None:
    engine = make_engine()
    with engine.trace(capacity=10) as trace:
        engine.generate(["abc"] * 5, GREEDY)
    assert len(trace) == 10
    assert trace.num_dropped == trace.num_spans - 10 > 0
    assert len([e for e in trace.to_dict()["traceEvents"] if e["ph"] != "M"]) == 10
    with pytest.raises(ConfigError, match="capacity"):
        engine.trace(capacity=0)


def test_failed_steps_are_in_it(make_engine) -> None:
    engine = make_engine()

    def fault(batch: object) -> None:
        raise RuntimeError("planted")

    engine.model.fault = fault
    with engine.trace() as trace:
        engine.generate("abc", GREEDY, on_error="return")
    (forward,) = [e for e in trace.to_dict()["traceEvents"] if e["name"] == "forward"]
    assert forward["args"]["error"] == "planted"
