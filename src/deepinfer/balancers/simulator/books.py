"""What a simulation writes down of each request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from deepinfer.balancers.simulator.prefill_engine import PrefillJob
from deepinfer.balancers.simulator.report import FleetReport
from deepinfer.balancers.traffic.records import TraceRecord

__all__ = ["Books"]


class Books:
    """Times and hits by place in the trace.

    Args:
        records: The trace.
        block_tokens: Tokens of a block.
    """

    def __init__(self, records: Sequence[TraceRecord], block_tokens: int) -> None:
        count = len(records)
        self.records = records
        self.block_tokens = block_tokens
        self.arrival_s = np.array([record.arrival_s for record in records])
        self.first_s = np.full(count, np.nan)
        self.finish_s = np.full(count, np.nan)
        self.hit_tokens = np.zeros(count, np.int64)
        self.hit_blocks = np.zeros(count, np.int64)
        self.engine = np.full(count, -1, np.int64)
        self.retries = np.zeros(count, np.int64)
        self.made = [0] * count  # tokens made before the latest failure, beside the first
        self.num_decisions = 0
        self.end_s = 0.0  # of the last arrival or step

    def first_token(self, job: PrefillJob, now_s: float) -> None:
        """A prompt is done; after a failure the first time counts.

        Args:
            job: The prompt.
            now_s: The time.
        """
        if np.isnan(self.first_s[job.index]):
            self.first_s[job.index] = now_s
        self.hit_tokens[job.index] = job.hit_tokens
        whole = len(job.keys)
        self.hit_blocks[job.index] = min(whole, -(-job.hit_tokens // self.block_tokens))

    def finish(self, index: int, now_s: float) -> None:
        """A request has its last token.

        Args:
            index: Its place in the trace.
            now_s: The time.
        """
        self.finish_s[index] = self.end_s = now_s

    def report(self, *, has_decode: bool, **totals: Any) -> FleetReport:
        """The report.

        Args:
            has_decode: Whether tokens behind the first were made.
            totals: What is not of single requests.

        Returns:
            The report.
        """
        outputs = np.array([record.output_tokens for record in self.records], float)
        with np.errstate(divide="ignore", invalid="ignore"):
            tpot = np.where(outputs > 1, (self.finish_s - self.first_s) / (outputs - 1.0), np.nan)
        if not has_decode:
            tpot[:] = np.nan
        prompts = np.array([record.input_tokens for record in self.records], np.int64)
        has_ids = np.array([bool(record.block_ids) for record in self.records], np.int64)
        return FleetReport(
            arrival_s=self.arrival_s,
            ttft_s=self.first_s - self.arrival_s,
            tpot_s=tpot,
            finish_s=self.finish_s,
            prompt_tokens=prompts,
            hit_tokens=self.hit_tokens,
            blocks=prompts // self.block_tokens * has_ids,
            hit_blocks=self.hit_blocks,
            engine=self.engine,
            retries=self.retries,
            num_decisions=self.num_decisions,
            **totals,
        )
