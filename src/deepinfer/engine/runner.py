"""Runs plans on a model: rows to a ragged batch, logits to the sampler, tokens to a result."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer.core.errors import InvariantBroken
from deepinfer.core.params import SamplingParams
from deepinfer.core.plan import CacheCopy, StepPlan, StepResult
from deepinfer.core.protocols import ModelInfo, Sampler
from deepinfer.core.types import Request
from deepinfer.engine.cache_setup import CacheShape
from deepinfer.engine.decode_lane import DecodeLanes
from deepinfer.engine.future_tokens import FutureTokens
from deepinfer.engine.graph_runs import run_recorded
from deepinfer.engine.host_tier import HostTier
from deepinfer.engine.parts import EngineDrafter
from deepinfer.engine.runner_graphs import RecordsSteps
from deepinfer.engine.runner_lanes import RunsVerifyLanes
from deepinfer.engine.runner_settling import SettlesSteps
from deepinfer.engine.sample_batch import mask_rows, sample_rows
from deepinfer.engine.step_batch import (
    NumLegal,
    build_batch,
    check_ids,
    collect_rows,
    kept_places,
    prompt_entries,
    put_future,
)
from deepinfer.engine.step_state import RunningRow, RunningStep, SlotStates
from deepinfer.engine.verify_lane import VerifyLanes
from deepinfer.engine.verify_steps import collect_lane, run_verify_lane, teach_of_lane
from deepinfer.models.deepseek_v41.batch import to_device
from deepinfer.models.deepseek_v41.model import DeepseekV41

__all__ = ["ModelRunner"]


class ModelRunner(RunsVerifyLanes, SettlesSteps, RecordsSteps):
    """Runs plans on one device, in order.

    `forward` of a step may be called before `collect` of the step before it, but after its `sample`: the token that
    was sampled last for each slot waits on the device. What depends on how many drafts were accepted (the true
    position of a row, the drafter's context) is settled when the next step needs it, or in `collect`.

    A row with drafts is verified in the same forward pass as everything else: the model sees the last token
    and the drafts, the sampler chooses a token after each of them, and drafts are kept up to the first that
    differs from the choice before it. Since a choice is a function of its logits, seed and position alone,
    the tokens are those of decoding without drafts. Cache rows of rejected drafts are taken back.

    Args:
        model: Has `forward(batch, cache)`, `compute_logits(hidden)` and `new_cache(slots, tokens, step_tokens)`.
        sampler: Chooses tokens.
        info: Facts of the model.
        num_slots: Requests that can hold state at once.
        max_model_len: Most tokens of one sequence.
        max_step_tokens: Most tokens of one request in one step.
        drafter: Proposes drafts for rows that the plan wants verified, or None.
        may_draft: Which requests can get drafts; only these feed the drafter.
        ungenerated_ids: Token ids that are never chosen, such as the image placeholder, which has no embedding.
        device: Where token ids are sent.
        cache: The model's cache; None makes one of contiguous slots.
        cache_shape: Measures of that cache, for engines that are given the runner.
        host_tier: Host memory for cache content, or None.
        deterministic: Switch the model to arithmetic whose rows do not depend on the batch, until `close`.
        check_ids: Check every id before it is run, and that no sampled token is run twice; None does so on a CPU,
            where nothing waits for it.
        record: Record decode and verify steps as CUDA graphs when they first come; None does so on a CUDA device, for
            models that have steps of fixed shape. Other steps, and models, run as they are.

    Attributes:
        cache: The model's cache.
        cache_shape: Its measures, or None when they were not given.
        host_tier: Host memory for cache content, or None.
        num_legal: Tells how many drafts of a constrained request can be chosen at all; None runs them all.
        length_policy: Has `trim` and `learn`, see `deepinfer.speculative.LiveLengths`; None verifies what was planned.
    """

    def __init__(
        self,
        model: Any,
        sampler: Sampler,
        *,
        info: ModelInfo,
        num_slots: int,
        max_model_len: int,
        max_step_tokens: int = 512,
        drafter: EngineDrafter | None = None,
        may_draft: Callable[[SamplingParams], bool] | None = None,
        ungenerated_ids: Sequence[int] = (),
        device: torch.device | str = "cpu",
        cache: Any = None,
        cache_shape: CacheShape | None = None,
        host_tier: HostTier | None = None,
        deterministic: bool = False,
        check_ids: bool | None = None,
        record: bool | None = None,
    ) -> None:
        self.info = info
        if cache is None:
            cache = model.new_cache(num_slots, max_model_len, max_step_tokens)
        self.cache = cache
        self.cache_shape = cache_shape
        self.host_tier = host_tier
        self._model = model
        self._sampler = sampler
        self._drafter = drafter
        self._may_draft = may_draft or (lambda params: True)
        self._device = torch.device(device)
        self._check_ids = self._device.type == "cpu" if check_ids is None else check_ids
        ids = torch.tensor(list(ungenerated_ids), dtype=torch.int64, device=self._device)
        self._ungenerated_ids = ids if len(ids) else None
        self._never = frozenset(ungenerated_ids)
        self._states = SlotStates(num_slots, cache)
        self._lanes = DecodeLanes(self._states, self._device)
        self._verify_lanes = VerifyLanes(self._lanes, self._may_draft)
        self._future = FutureTokens(
            num_slots, info.vocab_size, device=self._device, check=self._check_ids
        )
        self._last: RunningStep | None = None
        self._switched_on = False
        self.num_legal: NumLegal | None = None
        self.length_policy: Any = None
        self._deterministic = deterministic
        if drafter is not None and hasattr(drafter, "bind"):
            drafter.bind(self.cache)
        if record is None:
            record = self._device.type == "cuda"
        if record and isinstance(model, DeepseekV41):
            self.make_graphs(on_demand=True)
        if not record and drafter is not None and hasattr(drafter, "drop_graphs"):
            drafter.drop_graphs()

    @torch.inference_mode()
    def forward(self, plan: StepPlan, requests: Mapping[str, Request]) -> RunningStep:
        """Runs the model on a plan, cache copies first and drafts where the plan wants them.

        Args:
            plan: What to run.
            requests: The requests of its rows by id.

        Returns:
            The step, for `sample`.

        Raises:
            InvariantBroken: A row does not continue what its slot holds.
            Exception: Whatever the model or the drafter raises.
        """
        began = time.perf_counter()
        step = RunningStep(plan.step, plan, requests, [])
        if self._device.type == "cuda":
            step.started = torch.cuda.Event(enable_timing=True)
            step.started.record()
        if self._deterministic and not getattr(self._model, "deterministic", True):
            self._model.set_deterministic(True)  # another engine may have switched it off since
            self._switched_on = True
        before, self._last = self._last, step
        self._ahead = None
        if before is not None and (before.verify is not None or self._needs_settled(plan)):
            self._next = plan
            try:
                self._settle(before)
            finally:
                self._next = None
        self._prepare_cache(step)
        self._enter_rows(step)
        if self._drafter is not None and (step.verify is not None or step.rows):
            drafting = time.perf_counter()
            self._propose(step)
            step.draft_s = time.perf_counter() - drafting
        if step.lane is not None or step.verify is not None or step.rows:
            self._run_model(step)
        step.busy_s += time.perf_counter() - began
        return step

    @torch.inference_mode()
    def sample(self, handle: RunningStep, masks: Tensor | None = None) -> RunningStep:
        """Chooses tokens for the rows of a step.

        Args:
            handle: What `forward` returned.
            masks: Allowed tokens, shape [logits rows of the plan, ceil(vocab / 32)], int32, or None.

        Returns:
            The step, for `collect`.
        """
        if handle.logits is None:
            return handle
        began = time.perf_counter()
        rows = sample_rows(handle, with_outputs=self._wants_outputs)
        if masks is None:
            sampled = self._sampler(handle.logits, rows)
        else:
            masks = mask_rows(handle, masks).to(handle.logits.device, non_blocking=True)
            sampled = self._sampler(handle.logits, rows, masks)
        handle.logits = None
        handle.copy_to_host(sampled)
        if handle.verify is None:
            put_future(handle, self._future, sampled.token_ids)
        handle.busy_s += time.perf_counter() - began
        return handle

    @torch.inference_mode()
    def collect(self, handle: RunningStep) -> StepResult:
        """Waits for the tokens, takes rejected drafts back and feeds the drafter.

        Args:
            handle: What `sample` returned.

        Returns:
            The result, one entry a row of the plan.
        """
        began = time.perf_counter()
        self._settle(handle)
        lane = handle.verify
        rows = collect_rows(handle) if lane is None else collect_lane(handle, lane)
        if lane is not None:
            teach_of_lane(lane, self.length_policy)
        if self._last is handle:
            self._last = None
        handle.busy_s += time.perf_counter() - began
        return StepResult(
            step=handle.step,
            rows=rows,
            duration_s=handle.duration_s,
            failed_loads=handle.failed_loads,
        )

    def release_slot(self, slot: int) -> None:
        """Forgets the state of a slot.

        Args:
            slot: Its number.
        """
        self._states.clear_slot(slot)

    def forget(self, rid: str) -> None:
        """Forgets the tokens of a request, which has ended, and what the drafter keeps of it.

        Args:
            rid: Its id.
        """
        slot = self._states.forget(rid)
        if slot is not None and hasattr(self._drafter, "release"):
            self._drafter.release(slot)

    def close(self) -> None:
        """Drops model and cache; calling it twice is harmless."""
        if hasattr(self._drafter, "unbind"):
            self._drafter.unbind(self.cache)
        if self.host_tier is not None:
            self.host_tier.close()
        if self._switched_on:
            self._model.set_deterministic(False)
            self._switched_on = False
        self.drop_graphs()
        self._states.clear()
        self._states._cache = None
        self._lanes.clear()
        self._verify_lanes.clear()
        self._model = self._sampler = self._drafter = self.cache = None
        self._future = self._last = self.host_tier = self.num_legal = None  # type: ignore[assignment]

    def _needs_settled(self, plan: StepPlan) -> bool:
        """Whether a plan cannot run before the host knows how the drafts of the step before it fared."""
        return self._is_open(plan)

    def _prepare_cache(self, step: RunningStep) -> None:
        """New block table entries, then copies, in the order of the plan."""
        plan = step.plan
        if plan.block_updates:
            self.cache.apply_updates(plan.block_updates)
        if not plan.copies:
            return
        if self.host_tier is None:
            raise InvariantBroken(
                f"step {plan.step} copies cache content, and this runner has no host memory for it."
            )

        def before_load(copy: CacheCopy) -> None:  # what a slot holds is saved before this
            row = next(row for row in plan.rows if row.slot == copy.device)
            self._states.enter(row, step.requests[row.rid])

        step.failed_loads = self.host_tier.run(plan.copies, self.cache, before_load)

    def _enter_rows(self, step: RunningStep) -> None:
        rows = step.plan.rows
        if not step.failed_loads:
            if not self._feeds_drafter(step.plan):
                step.lane = self._lanes.enter(rows, step.requests)
            elif self._has_verify_lanes:
                step.verify = self._verify_lanes.enter(rows, step.requests)
        if step.verify is not None:
            return
        self._future.flush()
        first = step.lane_count
        for index, row in enumerate(rows.tail(first), first) if first < len(rows) else ():
            state = self._states.enter(row, step.requests[row.rid])
            if row.rid in step.failed_loads:
                self._states.make_void(state)
            if state.is_void:  # until the scheduler hears of it, rows keep coming
                continue
            start = row.first_position
            if row.num_open:
                start = len(state.token_ids) - 1
                if not row.first_position - row.num_open <= start <= row.first_position:
                    raise InvariantBroken(
                        f"{row.rid!r} continues at {start}, and its row says {row.first_position} with "
                        f"{row.num_open} drafts open."
                    )
            num_tokens = row.num_tokens - row.num_drafts
            step.rows.append(
                RunningRow(index, row, state, start, row.token_ids, num_tokens=num_tokens)
            )

    def _run_model(self, step: RunningStep) -> None:
        if step.verify is not None and self._graphs is not None:
            run = run_verify_lane(step.verify, self._graphs, self.length_policy)
            if run is not None:
                step.logits = self._without_ungenerated(run.logits[: step.verify.num_logits])
                return
            self._take_apart(step)
        recorded, part = None, step
        if self._graphs is not None:
            recorded = run_recorded(step, self._graphs, feeds=self._feeds_drafter(step.plan))
        if recorded is not None:
            if not recorded.rest:
                step.features = recorded.run.features
                step.logits = self._without_ungenerated(recorded.logits(step))
                return
            part = RunningStep(step.step, step.plan, step.requests, recorded.rest)
        step.batch = batch = build_batch(part, self._future, self._device)
        if self._check_ids:
            check_ids(batch, self.info.vocab_size, step.step)
        output = self._model.forward(batch, self.cache)
        if recorded is not None:
            output = recorded.join(output)
            if recorded.run.features is None:
                step.features_from = len(recorded.run.hidden)
        kept = getattr(output, "kept", None)
        if kept is not None:
            step.kept = np.asarray(kept.cpu() if isinstance(kept, Tensor) else kept)
        step.features = output.features if self._drafter is not None else None
        step.logits = self._logits(step, output.hidden)
        step.prompt_logprobs = prompt_entries(step, output.hidden, self._model.compute_logits)

    def _logits(self, step: RunningStep, hidden: Tensor) -> Tensor | None:
        wanted = [] if step.lane is None else list(step.lane.offsets)
        for running in step.rows:
            end = running.offset + running.num_tokens
            wanted.extend(range(end - running.num_logits, end))
        if not wanted:
            return None
        wanted = kept_places(step, wanted)
        if len(wanted) < hidden.shape[0]:
            hidden = hidden[to_device(np.array(wanted), hidden.device)]
        return self._without_ungenerated(self._model.compute_logits(hidden))

    def _without_ungenerated(self, logits: Tensor) -> Tensor:
        if self._ungenerated_ids is not None:
            logits.index_fill_(1, self._ungenerated_ids, -torch.inf)
        return logits
