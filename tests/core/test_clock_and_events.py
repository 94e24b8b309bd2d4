from __future__ import annotations

import pytest

from deepinfer.core.clock import Clock, FakeClock, MonotonicClock
from deepinfer.core.errors import ConfigError
from deepinfer.core.events import MemorySink, NullSink, RequestAdded, StepFinished
from deepinfer.core.protocols import StatsSink


def test_fake_clock_moves_only_when_told() -> None:
    clock = FakeClock(1.0)
    assert clock.now() == clock.now() == 1.0
    assert clock.advance(0.5) == clock.now() == 1.5
    for step in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match="cannot move"):
            clock.advance(step)


def test_clocks_meet_the_protocol() -> None:
    assert isinstance(FakeClock(), Clock)
    assert isinstance(MonotonicClock(), Clock)
    clock = MonotonicClock()
    assert clock.now() <= clock.now()


def test_memory_sink_keeps_the_latest() -> None:
    sink = MemorySink(capacity=2)
    for number in range(3):
        sink.record(RequestAdded(time_s=0.0, rid=str(number), prompt_tokens=1))
    assert [event.rid for event in sink] == ["1", "2"]
    sink.record(StepFinished(time_s=1.0, step=0, step_seconds=0.5))
    assert len(sink.of_type(StepFinished)) == 1
    assert len(sink) == 2
    sink.clear()
    assert not sink.of_type(RequestAdded)


def test_sinks_meet_the_protocol() -> None:
    assert isinstance(MemorySink(), StatsSink)
    assert isinstance(NullSink(), StatsSink)
    NullSink().record(RequestAdded(time_s=0.0, rid="a", prompt_tokens=1))
