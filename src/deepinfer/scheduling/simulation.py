"""What a simulated run gave: times of requests, steps, and their percentiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepinfer.core.plan import StepPlan

__all__ = ["RequestTiming", "SimulatedStep", "Simulation"]


class SimulatedStep(NamedTuple):
    """A step and when it ran.

    Attributes:
        plan: What it ran.
        start_s: When the device began, in virtual seconds.
        end_s: When it ended.
    """

    plan: StepPlan
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTiming:
    """What became of one request.

    Attributes:
        rid: Its id.
        arrival_s: When it arrived.
        prompt_tokens: Tokens of its prompt.
        cached_tokens: How many of them the cache had when it started.
        replayed_tokens: Tokens run again to rebuild window rows, resumptions included.
        output_tokens: Tokens generated.
        first_token_s: When the first one came, or None.
        finish_s: When it ended, or None when it did not.
        preemptions: How often it lost its slot.
    """

    rid: str
    arrival_s: float
    prompt_tokens: int
    cached_tokens: int
    replayed_tokens: int
    output_tokens: int
    first_token_s: float | None
    finish_s: float | None
    preemptions: int

    @property
    def time_to_first_token_s(self) -> float | None:
        """Seconds from arrival to the first token, or None before it."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A run of a simulator.

    Attributes:
        requests: Every request that was taken, in order of arrival.
        rejected: Ids of requests that the scheduler refused.
        steps: Every step, or none when they were not kept.
        inter_token_s: Seconds from each token but the first to the one before it, of all requests, in order of time,
            shape [tokens], float64; 0 for tokens that came together.
        num_steps: Steps run.
        start_s: Arrival of the first request.
        end_s: End of the last step.
        busy_s: Seconds in which a step ran.
        longest_step_s: Seconds of the longest step.
        prefill_tokens: Tokens run in rows of prompts, replays and prompts run again included.
        decode_tokens: Tokens run in other rows, drafts included.
    """

    requests: Sequence[RequestTiming]
    rejected: Sequence[str] = ()
    steps: Sequence[SimulatedStep] = field(default=(), repr=False)
    inter_token_s: NDArray[np.float64] = field(repr=False)
    num_steps: int = 0
    start_s: float = 0.0
    end_s: float = 0.0
    busy_s: float = 0.0
    longest_step_s: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0

    @property
    def arrivals(self) -> dict[str, float]:
        """When each request arrived, by id; what `deepinfer.viz.plot_gantt` takes."""
        return {request.rid: request.arrival_s for request in self.requests}

    @property
    def time_to_first_token_s(self) -> NDArray[np.float64]:
        """Of every request with a token, in order of arrival, shape [requests], float64."""
        times = [request.time_to_first_token_s for request in self.requests]
        return np.array([value for value in times if value is not None], np.float64)

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the end of the last step."""
        return self.end_s - self.start_s

    @property
    def preemptions(self) -> int:
        """How often a request lost its slot."""
        return sum(request.preemptions for request in self.requests)

    @property
    def hit_rate(self) -> float:
        """Share of the tokens of all prompts that the cache had when their requests started."""
        total = sum(request.prompt_tokens for request in self.requests)
        return sum(request.cached_tokens for request in self.requests) / total if total else 0.0

    def summary(self) -> dict[str, Any]:
        """The usual figures as plain values: seconds, tokens a second and shares."""
        first, gaps = self.time_to_first_token_s, self.inter_token_s
        output = sum(request.output_tokens for request in self.requests)
        prompt = sum(request.prompt_tokens for request in self.requests)
        seconds = self.duration_s or 1.0
        return {
            "requests": len(self.requests),
            "finished": sum(request.finish_s is not None for request in self.requests),
            "rejected": len(self.rejected),
            "steps": self.num_steps,
            "duration_s": self.duration_s,
            "busy_share": self.busy_s / seconds,
            "ttft_p50_s": _percentile(first, 50),
            "ttft_p99_s": _percentile(first, 99),
            "itl_p50_s": _percentile(gaps, 50),
            "itl_p99_s": _percentile(gaps, 99),
            "itl_max_s": float(gaps.max()) if gaps.size else 0.0,
            "longest_step_s": self.longest_step_s,
            "prompt_tokens_per_s": prompt / seconds,
            "output_tokens_per_s": output / seconds,
            "preemptions": self.preemptions,
            "hit_rate": self.hit_rate,
        }


def _percentile(values: NDArray[np.float64], q: float) -> float:
    return float(np.percentile(values, q)) if values.size else 0.0
