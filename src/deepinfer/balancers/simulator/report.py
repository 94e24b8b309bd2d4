"""What came of a simulated run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer.balancers.simulator.config import Slo

__all__ = ["FleetReport"]

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetReport:
    """Times of every request and loads of every engine.

    Arrays over requests are in the order of the trace, NaN or -1 where a request did not get so far.

    Attributes:
        arrival_s: When each came, shape [requests].
        ttft_s: Seconds to the first token, shape [requests].
        tpot_s: Mean seconds between tokens, shape [requests]; NaN with one token or without a decode pool.
        finish_s: When the last token was made, shape [requests].
        prompt_tokens: Tokens of each prompt, shape [requests].
        hit_tokens: Tokens of it found in a cache at its last prefill, shape [requests].
        blocks: Whole blocks of each prompt, shape [requests].
        hit_blocks: Those found, shape [requests].
        engine: Prefill engine that ran each, shape [requests].
        retries: How often each was routed again after a failure, shape [requests].
        prefill_busy_s: Seconds in steps of each prefill engine, shape [engines].
        prefill_efficiency: Mean over max of the ranks' seconds of all prefill steps, step overhead included.
        decode_efficiency: The same of the decode steps, NaN without a decode pool.
        decode_busy_s: Seconds in steps of each decode engine.
        decode_max_requests: Mean over the steps of the fullest rank's requests over the mean rank's.
        decode_max_kv: The same of cached tokens.
        num_decisions: Decisions of the prefill router.
        end_s: When the last request came or the last step ended; changes, reports and rounds behind that do not count.
        tier_bounds: Upper ends of the context tiers but the last.
    """

    arrival_s: _Floats
    ttft_s: _Floats
    tpot_s: _Floats
    finish_s: _Floats
    prompt_tokens: _Ints
    hit_tokens: _Ints
    blocks: _Ints
    hit_blocks: _Ints
    engine: _Ints
    retries: _Ints
    prefill_busy_s: _Floats
    prefill_efficiency: float
    decode_efficiency: float
    decode_busy_s: _Floats
    decode_max_requests: float
    decode_max_kv: float
    num_decisions: int
    end_s: float
    tier_bounds: tuple[int, ...]

    @property
    def num_unserved(self) -> int:
        """Requests without a first token."""
        return int(np.isnan(self.ttft_s).sum())

    @property
    def num_unfinished(self) -> int:
        """Requests without a last token: those without a first one, and those that no decode rank took or finished."""
        return int(np.isnan(self.finish_s).sum())

    @property
    def block_hit_rate(self) -> float:
        """Found share of all whole blocks."""
        return float(self.hit_blocks.sum() / max(1, self.blocks.sum()))

    @property
    def busy_max_over_mean(self) -> float:
        """Busy seconds of the busiest prefill engine over the mean."""
        mean = float(self.prefill_busy_s.mean())
        return float(self.prefill_busy_s.max()) / mean if mean else 1.0

    @property
    def busy_share(self) -> float:
        """Mean share of the run that prefill engines were busy."""
        return float(self.prefill_busy_s.mean()) / self.end_s if self.end_s else 0.0

    @property
    def tiers(self) -> _Ints:
        """Tier of each request by its prompt, shape [requests]."""
        return np.searchsorted(self.tier_bounds, self.prompt_tokens, side="right")

    def ttft_percentile(self, q: float, tier: int | None = None) -> float:
        """A percentile of the times to the first token.

        Args:
            q: From 0 to 100.
            tier: Only requests of this tier; None takes all.

        Returns:
            Seconds, NaN without requests.
        """
        return _percentile(self._of_tier(self.ttft_s, tier), q)

    def tpot_percentile(self, q: float, tier: int | None = None) -> float:
        """A percentile of the mean times between tokens.

        Args:
            q: From 0 to 100.
            tier: Only requests of this tier; None takes all.

        Returns:
            Seconds, NaN without requests.
        """
        return _percentile(self._of_tier(self.tpot_s, tier), q)

    def goodput(self, slo: Slo) -> float:
        """Requests a second that were finished and kept both promises.

        Args:
            slo: The promises.

        Returns:
            Requests a second of the run.
        """
        kept = (self.ttft_s <= slo.ttft_s) & ~(self.tpot_s > slo.tpot_s)
        kept &= ~np.isnan(self.finish_s)
        return float(kept.sum()) / self.end_s if self.end_s else 0.0

    def summary(self) -> dict[str, Any]:
        """The main figures as plain numbers."""
        return {
            "requests": int(self.arrival_s.size),
            "unserved": self.num_unserved,
            "unfinished": self.num_unfinished,
            "retries": int(self.retries.sum()),
            "block_hit_rate": self.block_hit_rate,
            "ttft_mean_s": float(np.nanmean(self.ttft_s))
            if self.num_unserved < self.ttft_s.size
            else float("nan"),
            "ttft_p50_s": self.ttft_percentile(50),
            "ttft_p99_s": self.ttft_percentile(99),
            "tpot_p50_s": self.tpot_percentile(50),
            "tpot_p99_s": self.tpot_percentile(99),
            "busy_share": self.busy_share,
            "busy_max_over_mean": self.busy_max_over_mean,
            "prefill_efficiency": self.prefill_efficiency,
            "decode_efficiency": self.decode_efficiency,
            "end_s": self.end_s,
        }

    def _of_tier(self, values: _Floats, tier: int | None) -> _Floats:
        return values if tier is None else values[self.tiers == tier]


def _percentile(values: _Floats, q: float) -> float:
    values = values[~np.isnan(values)]
    return float(np.percentile(values, q)) if values.size else float("nan")
