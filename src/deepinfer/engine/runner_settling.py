"""What a runner does once it is known how the drafts of a step fared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from deepinfer.core.params import SamplingParams
from deepinfer.core.protocols import ModelInfo
from deepinfer.engine.draft_feeding import feed_drafter, teach_lengths
from deepinfer.engine.future_tokens import FutureTokens
from deepinfer.engine.step_batch import num_accepted
from deepinfer.engine.step_state import RunningRow, RunningStep, SlotStates
from deepinfer.engine.verify_lane import VerifyLane
from deepinfer.models.deepseek_v41.batch import to_device

__all__ = ["SettlesSteps"]


class SettlesSteps:
    """Verdicts, books and the drafter's context, of whatever kind the rows are."""

    info: ModelInfo
    cache: Any
    length_policy: Any
    _drafter: Any
    _device: torch.device
    _future: FutureTokens
    _states: SlotStates
    _may_draft: Callable[[SamplingParams], bool]

    def _settle_lane(self, step: RunningStep, lane: VerifyLane) -> None:
        raise NotImplementedError

    def _settle(self, step: RunningStep) -> None:
        """Compares drafts with choices, takes the cache rows of rejected ones back, feeds the drafter; once."""
        if step.error is not None:
            raise step.error
        if step.is_settled or (step.sampled is None and step.has_logits):
            return
        try:
            if step.verify is not None:
                self._settle_lane(step, step.verify)
                return
            chosen = step.wait()
            at = step.lane_count
            if step.lane is not None:
                step.lane.keep(chosen[:at], self._states)
            last: dict[int, int] = {}
            for running in step.rows:
                count = running.num_logits
                tokens = chosen[at : at + count]
                at += count
                if count:
                    tokens = tokens[: num_accepted(running.draft, tokens) + 1]
                    if self._keep(running, tokens) and running.draft:
                        last[running.row.slot] = tokens[-1]
                step.tokens.append(tokens)
            if step.rows:
                teach_lengths(step, self.length_policy)
                if last:
                    self._future.put([*last], to_device(np.array([*last.values()]), self._device))
                self._observe(step)
            step.is_settled = True
        except Exception as error:
            step.error = error
            raise

    def _keep(self, running: RunningRow, tokens: list[int]) -> bool:
        """Notes the tokens of a row; tells whether its slot goes on behind them."""
        state = running.state
        if not self._states.is_latest(state):  # its request began again without these tokens
            return False
        del state.token_ids[running.end :]
        state.token_ids += [max(token, 0) for token in tokens]  # a failed row's is negative
        if not self._states.holds(state):
            return False
        if running.draft:
            self.cache.truncate(state.slot, running.end + len(tokens) - 1)
        return True

    def _observe(self, step: RunningStep) -> None:
        """Gives the drafter the features of rows that stay."""
        if not hasattr(self._drafter, "observe"):
            return
        rows = [
            (running, tokens)
            for running, tokens in zip(step.rows, step.tokens, strict=True)
            if self._may_draft(step.requests[running.row.rid].params)
            and self._states.holds(running.state)
        ]
        feed_drafter(step, self._drafter, rows, self.info.window or self.info.max_model_len)
