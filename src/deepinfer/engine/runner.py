"""Runs plans on a model: rows to a ragged batch, logits to the sampler, tokens to a result."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepinfer.core.errors import InvariantBroken
from deepinfer.core.params import SamplingParams
from deepinfer.core.plan import PlanRow, RowResult, RowRole, StepPlan, StepResult
from deepinfer.core.protocols import DraftView, ModelInfo, Sampled, Sampler, SampleRows
from deepinfer.core.types import Request, TokenLogprob
from deepinfer.engine.parts import EngineDrafter
from deepinfer.models.deepseek_v41.batch import ForwardBatch
from deepinfer.sampling import prompt_logprobs as compute_prompt_logprobs

__all__ = ["ModelRunner"]

_PROMPT_LOGITS_ROWS = 512


@dataclass(slots=True)
class _SlotState:
    """Whose state a slot holds, and every token that it was given."""

    rid: str
    slot_generation: int
    epoch: int
    token_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Step:
    """A step between `forward` and `collect`."""

    step: int
    plan: StepPlan
    requests: Mapping[str, Request]
    drafts: list[tuple[int, ...]]
    batch: ForwardBatch
    features: Tensor | None
    logits: Tensor | None
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...]]
    started_s: float
    sampled: Sampled | None = None


class ModelRunner:
    """Runs plans on one device, one step at a time.

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

    Attributes:
        cache: The model's cache.
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
    ) -> None:
        self.info = info
        self.cache = model.new_cache(num_slots, max_model_len, max_step_tokens)
        self._model = model
        self._sampler = sampler
        self._drafter = drafter
        self._may_draft = may_draft or (lambda params: True)
        self._device = torch.device(device)
        ids = torch.tensor(list(ungenerated_ids), dtype=torch.int64, device=self._device)
        self._ungenerated_ids = ids if len(ids) else None
        self._never = frozenset(ungenerated_ids)
        self._slots: list[_SlotState | None] = [None] * num_slots
        if drafter is not None and hasattr(drafter, "bind"):
            drafter.bind(self.cache)

    @torch.inference_mode()
    def forward(self, plan: StepPlan, requests: Mapping[str, Request]) -> _Step:
        """Runs the model on a plan, drafts first where the plan wants them.

        Args:
            plan: What to run.
            requests: The requests of its rows by id.

        Returns:
            The step, for `sample`.

        Raises:
            InvariantBroken: A row does not continue what its slot holds.
            Exception: Whatever the model or the drafter raises.
        """
        started_s = time.perf_counter()
        states = [self._state(row) for row in plan.rows]
        drafts = self._propose(plan, states)
        segments = [
            (row.slot, row.first_position, (*row.token_ids, *draft) if draft else row.token_ids)
            for row, draft in zip(plan.rows, drafts, strict=True)
        ]
        device = None if self._device.type == "cpu" else self._device
        batch = ForwardBatch.from_segments(segments, device=device)
        output = self._model.forward(batch, self.cache)
        logits = self._logits(plan, batch, output.hidden)
        prompt_entries = self._prompt_logprobs(plan, requests, batch, output.hidden)
        return _Step(
            step=plan.step,
            plan=plan,
            requests=requests,
            drafts=drafts,
            batch=batch,
            features=output.features if self._drafter is not None else None,
            logits=logits,
            prompt_logprobs=prompt_entries,
            started_s=started_s,
        )

    @torch.inference_mode()
    def sample(self, handle: _Step, masks: Tensor | None = None) -> _Step:
        """Chooses tokens for the rows of a step.

        Args:
            handle: What `forward` returned.
            masks: Allowed tokens, shape [logits rows, ceil(vocab / 32)], int32, or None.

        Returns:
            The step, for `collect`.
        """
        if handle.logits is None:
            return handle
        rows = self._sample_rows(handle)
        if masks is None:
            handle.sampled = self._sampler(handle.logits, rows)
        else:
            masks = masks.to(handle.logits.device, non_blocking=True)
            handle.sampled = self._sampler(handle.logits, rows, masks)  # type: ignore[call-arg]
        handle.logits = None
        return handle

    @torch.inference_mode()
    def collect(self, handle: _Step) -> StepResult:
        """Waits for the tokens, takes rejected drafts back and feeds the drafter.

        Args:
            handle: What `sample` returned.

        Returns:
            The result, one entry a row of the plan.
        """
        sampled = handle.sampled
        chosen = sampled.token_ids.tolist() if sampled is not None else []
        logprobs = sampled.logprobs if sampled is not None else ()
        errors = getattr(sampled, "errors", ())
        results, kept, at = [], [], 0
        for index, row in enumerate(handle.plan.rows):
            draft = handle.drafts[index]
            count = len(draft) + 1 if row.num_logits else 0
            tokens = chosen[at : at + count]
            num_accepted = _num_accepted(draft, tokens)
            used = num_accepted + 1 if count else 0
            settled = row.end_position - row.num_drafts + num_accepted
            if draft:
                self._keep(row, draft[:num_accepted], settled)
            kept.append(settled - row.first_position)
            row_logprobs: tuple[TokenLogprob, ...] = ()
            if logprobs and used and logprobs[at] is not None:
                row_logprobs = tuple(logprobs[at : at + used])  # type: ignore[arg-type]
            results.append(
                RowResult(
                    rid=row.rid,
                    slot=row.slot,
                    slot_generation=row.slot_generation,
                    epoch=row.epoch,
                    token_ids=tuple(tokens[:used]),
                    num_drafts=len(draft),
                    num_accepted=num_accepted,
                    logprobs=row_logprobs,
                    prompt_logprobs=handle.prompt_logprobs.get(index, ()),
                    error=next(filter(None, errors[at : at + used]), None) if errors else None,
                )
            )
            at += count
        self._observe(handle, kept)
        return StepResult(
            step=handle.step,
            rows=tuple(results),
            duration_s=time.perf_counter() - handle.started_s,
        )

    def release_slot(self, slot: int) -> None:
        """Forgets the state of a slot.

        Args:
            slot: Its number.
        """
        self._slots[slot] = None

    def close(self) -> None:
        """Drops model and cache; calling it twice is harmless."""
        if self._drafter is not None and hasattr(self._drafter, "unbind"):
            self._drafter.unbind(self.cache)
        self._model = self._sampler = self._drafter = self.cache = None  # type: ignore[assignment]
        self._slots = []

    def _state(self, row: PlanRow) -> _SlotState:
        state = self._slots[row.slot]
        if state is None or (state.rid, state.slot_generation, state.epoch) != (
            row.rid,
            row.slot_generation,
            row.epoch,
        ):
            self.cache.reset(row.slot)
            state = _SlotState(row.rid, row.slot_generation, row.epoch)
            self._slots[row.slot] = state
        ids = state.token_ids
        if row.first_position > len(ids):
            raise InvariantBroken(
                f"slot {row.slot} was given {len(ids)} tokens of {row.rid!r}, and a row starts at "
                f"{row.first_position}."
            )
        ids[row.first_position :] = row.token_ids
        return state

    def _keep(self, row: PlanRow, accepted: tuple[int, ...], settled: int) -> None:
        """Notes the drafts that stay and takes the cache rows of the others back."""
        state = self._slots[row.slot]
        if state is not None:
            state.token_ids += accepted
        self.cache.truncate(row.slot, settled)

    def _propose(self, plan: StepPlan, states: list[_SlotState]) -> list[tuple[int, ...]]:
        drafts: list[tuple[int, ...]] = [()] * len(plan.rows)
        wanted = [i for i, row in enumerate(plan.rows) if row.role is RowRole.VERIFY]
        if not wanted or self._drafter is None:
            return drafts
        rows = [plan.rows[i] for i in wanted]
        view = DraftView(
            rids=tuple(row.rid for row in rows),
            slots=tuple(row.slot for row in rows),
            anchor_ids=tuple(row.token_ids[-1] for row in rows),
            positions=tuple(row.first_position for row in rows),
            token_ids=tuple(states[i].token_ids for i in wanted),
        )
        proposed = self._drafter.propose(view, max(row.num_drafts for row in rows))
        for i, row, tokens in zip(wanted, rows, proposed.token_ids, strict=True):
            cut = tuple(tokens[: row.num_drafts])
            drafts[i] = cut[
                : next((k for k, t in enumerate(cut) if not self._can_be_chosen(t)), None)
            ]
        return drafts

    def _can_be_chosen(self, token: int) -> bool:
        return 0 <= token < self.info.vocab_size and token not in self._never

    def _logits(self, plan: StepPlan, batch: ForwardBatch, hidden: Tensor) -> Tensor | None:
        wanted: list[int] = []
        end = 0
        for row, segment in zip(plan.rows, batch.segments, strict=True):
            end += segment.num_tokens
            if row.num_logits:
                num_logits = segment.num_tokens - len(row.token_ids) + 1
                wanted.extend(range(end - num_logits, end))
        if not wanted:
            return None
        if len(wanted) < hidden.shape[0]:
            hidden = hidden[torch.tensor(wanted, device=hidden.device)]
        logits: Tensor = self._model.compute_logits(hidden)
        if self._ungenerated_ids is not None:
            logits.index_fill_(1, self._ungenerated_ids, -torch.inf)
        return logits

    def _prompt_logprobs(
        self,
        plan: StepPlan,
        requests: Mapping[str, Request],
        batch: ForwardBatch,
        hidden: Tensor,
    ) -> dict[int, tuple[TokenLogprob, ...]]:
        """Entries of the prompt tokens after each token of a row, by row of the plan."""
        out: dict[int, tuple[TokenLogprob, ...]] = {}
        end = 0
        for index, (row, segment) in enumerate(zip(plan.rows, batch.segments, strict=True)):
            begin, end = end, end + segment.num_tokens
            request = requests[row.rid]
            num_top = request.params.prompt_logprobs
            last = min(row.end_position, request.num_prompt_tokens - 1)
            if num_top is None or row.first_position >= last:
                continue
            entries: list[TokenLogprob] = []
            for start in range(row.first_position, last, _PROMPT_LOGITS_ROWS):
                stop = min(start + _PROMPT_LOGITS_ROWS, last)
                offset = begin - row.first_position
                logits = self._model.compute_logits(hidden[offset + start : offset + stop])
                following = request.prompt_token_ids[start + 1 : stop + 1]
                entries += compute_prompt_logprobs(logits, following, num_top)
            out[index] = tuple(entries)
        return out

    def _sample_rows(self, step: _Step) -> SampleRows:
        requests: list[Request] = []
        positions: list[int] = []
        plan_rows: list[PlanRow] = []
        outputs: list[Sequence[int]] = []
        has_processors = bool(getattr(self._sampler, "processors", True))
        for row, draft in zip(step.plan.rows, step.drafts, strict=True):
            if not row.num_logits:
                continue
            request = step.requests[row.rid]
            count = len(draft) + 1
            first = row.end_position - row.num_drafts
            requests += [request] * count
            positions += range(first, first + count)
            plan_rows += [row] * count
            if has_processors or request.params.has_penalties:
                state = self._slots[row.slot]
                output = state.token_ids[request.num_prompt_tokens :] if state is not None else []
                outputs += [(*output, *draft[:index]) for index in range(count)]
            else:
                outputs += [()] * count
        return SampleRows(
            requests=tuple(requests),
            positions=tuple(positions),
            seeds=tuple(request.params.seed or 0 for request in requests),
            output_token_ids=tuple(outputs),
            plan_rows=tuple(plan_rows),
        )

    def _observe(self, step: _Step, kept: list[int]) -> None:
        """Gives the drafter the features of rows that stay."""
        drafter = self._drafter
        if drafter is None or step.features is None or not hasattr(drafter, "observe"):
            return
        rows: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        begin = 0
        window = self.info.window or self.info.max_model_len
        for row, segment, count in zip(step.plan.rows, step.batch.segments, kept, strict=True):
            if self._may_draft(step.requests[row.rid].params):
                skip = max(0, count - window)
                rows += range(begin + skip, begin + count)
                positions += range(row.first_position + skip, row.first_position + count)
                slots += [row.slot] * (count - skip)
            begin += segment.num_tokens
        if not rows:
            return
        features = step.features
        if len(rows) < features.shape[0]:
            features = features[torch.tensor(rows, device=features.device)]
        drafter.observe(features, positions, slots)


def _num_accepted(draft: tuple[int, ...], tokens: Sequence[int]) -> int:
    """Length of the longest beginning of `draft` that the choices confirm."""
    count = 0
    for proposed, chosen in zip(draft, tokens, strict=False):
        if proposed != chosen:
            break
        count += 1
    return count
