"""Chooses one token for each row of logits."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError, InvalidLogits, RequestError, ShapeError
from deepinfer.core.protocols import LogitsProcessor, SampleRows
from deepinfer.core.protocols import Sampled as BaseSampled
from deepinfer.core.types import Request, TokenLogprob
from deepinfer.sampling.batch_options import BatchOptions, DrawGroup
from deepinfer.sampling.filters import filter_logits
from deepinfer.sampling.logprobs import token_logprobs
from deepinfer.sampling.penalties import (
    apply_logit_bias,
    apply_penalties,
    apply_token_bitmask,
    unique_ids,
)
from deepinfer.sampling.processors import apply_processors
from deepinfer.sampling.rng import gumbel_noise

__all__ = ["FAILED_TOKEN", "InvalidLogits", "Sampled", "Sampler"]

FAILED_TOKEN = -1
"""Token id of a row from which nothing could be chosen."""

_PROMPT_CACHE_SIZE = 256
_DENSE_SHARE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled(BaseSampled):
    """Chosen tokens, with what went wrong in single rows.

    Attributes:
        token_ids: Shape [rows], int64; `FAILED_TOKEN` in rows that failed.
        logprobs: One entry a row, None for rows that asked for none; empty when no row did.
        highest: Highest logit of each row after all changes, shape [rows], fp32.
        rids: Request id of each row.
        row_errors: Errors known before any logit was looked at, by row.
    """

    highest: Tensor
    rids: tuple[str, ...] = ()
    row_errors: tuple[tuple[int, RequestError], ...] = ()

    @property
    def errors(self) -> tuple[RequestError | None, ...]:
        """One entry a row, None for good ones; empty when all are good. Waits for the device."""
        if not self.row_errors and bool(self.highest.isfinite().all()):
            return ()
        known = dict(self.row_errors)
        return tuple(
            known.get(index) or _logits_error(value, self.rids[index])
            for index, value in enumerate(self.highest.tolist())
        )


def _logits_error(highest: float, rid: str) -> InvalidLogits | None:
    if math.isfinite(highest):
        return None
    if math.isnan(highest):
        kind, found = "nan", "hold NaN"
        hint = "The model's numbers broke down; check its weights and inputs."
    elif highest < 0:
        kind, found = "all_masked", "are all -inf"
        hint = "Masks, bias and processors left no token; let at least one through."
    else:
        kind, found = "infinite", "hold +inf"
        hint = "Set the other logits to -inf to force a token."
    return InvalidLogits(
        f"the logits of request {rid!r} {found}; at least one must be finite and none NaN or +inf. {hint}",
        rid=rid,
        kind=kind,
    )


class Sampler:
    """Chooses tokens; a row depends on its own logits, options, seed, position and output only.

    Steps, in order: penalties and bias, processors, mask, log probabilities, temperature, min-p, top-k, top-p,
    choice. At temperature 0 the choice is the highest logit, ties to the lowest id. Above it the choice is the
    highest sum of log probability and Gumbel noise (a draw from the filtered law), the noise a pure function of
    (seed, position, token id), so no batch mate, preemption or restart can change it.

    Args:
        processors: Run in order on the logits of all rows.
        raw_logprobs: Report log probabilities of the model's own logits instead of those after penalties, bias,
            processors and mask.

    Raises:
        ConfigError: A processor cannot be called.
    """

    def __init__(
        self, *, processors: Sequence[LogitsProcessor] = (), raw_logprobs: bool = False
    ) -> None:
        if not isinstance(processors, Iterable) or not all(map(callable, given := [*processors])):
            checks.fail(
                "processors", processors, "a sequence of functions of (logits, rows)", ConfigError
            )
        self.processors = tuple(given)
        self.raw_logprobs = checks.check_bool("raw_logprobs", raw_logprobs, ConfigError)
        self._options: BatchOptions | None = None
        self._prompt_ids: OrderedDict[str, tuple[Request, Tensor]] = OrderedDict()

    def __call__(self, logits: Tensor, rows: SampleRows, masks: Tensor | None = None) -> Sampled:
        """Chooses one token a row.

        Args:
            logits: Shape [rows, vocab], fp32. Not changed.
            rows: The rows' requests, positions, seeds and outputs so far.
            masks: Allowed tokens, shape [rows, ceil(vocab / 32)], int32, or None; see `apply_token_bitmask`.

        Returns:
            The tokens; a row of NaN, all -inf or +inf gets `FAILED_TOKEN` and an entry in `errors`.

        Raises:
            ShapeError: Logits or masks have the wrong shape or dtype, or the numbers of rows differ.
            ConfigError: A processor does not work in place.
        """
        self._check(logits, rows)
        raw = logits
        options = self._options_of(rows, logits)
        logits, failed = self._adjust(logits, rows, options, masks)
        highest, token_ids = logits.max(dim=-1)
        for index in failed:
            highest[index] = math.nan
        if options.groups:
            positions = torch.tensor(rows.positions, dtype=torch.int64)
            positions = positions.to(logits.device, non_blocking=True)
            for group in options.groups:
                _draw(logits, token_ids, positions, group)
        token_ids = token_ids.masked_fill_(~highest.isfinite(), FAILED_TOKEN)
        return Sampled(
            token_ids=token_ids,
            logprobs=self._logprobs(raw if self.raw_logprobs else logits, token_ids, options),
            highest=highest,
            rids=options.rids,
            row_errors=tuple(failed.items()),
        )

    def _options_of(self, rows: SampleRows, logits: Tensor) -> BatchOptions:
        """The options of the rows: those of the last call while the same requests are sampled."""
        vocab, device = logits.shape[-1], logits.device
        options = self._options
        if options is None or not options.fits(rows, vocab, device):
            self._options = options = BatchOptions(rows, vocab, device)
        return options

    def _check(self, logits: Tensor, rows: SampleRows) -> None:
        count = len(rows.requests)
        if logits.dtype != torch.float32 or logits.dim() != 2 or logits.shape[0] != count:
            raise ShapeError(
                f"logits are {logits.dtype} of shape {tuple(logits.shape)}; {count} rows need float32 of shape "
                f"[{count}, vocab].",
                argument="logits",
                expected=(count, "vocab"),
                found=tuple(logits.shape),
            )
        if logits.shape[1] == 0:
            raise ShapeError(
                "logits have no vocabulary axis entries; give at least one token.",
                argument="logits",
                expected=(count, "vocab"),
                found=tuple(logits.shape),
            )
        if len(rows.positions) != count or len(rows.seeds) != count:
            raise ShapeError(
                f"rows hold {count} requests, {len(rows.positions)} positions and {len(rows.seeds)} seeds; give one of "
                "each for every row.",
                argument="rows",
                expected=count,
                found=(len(rows.positions), len(rows.seeds)),
            )
        if rows.output_token_ids and len(rows.output_token_ids) != count:
            raise ShapeError(
                f"rows hold {count} requests and {len(rows.output_token_ids)} outputs; give one a row, or none at all.",
                argument="rows.output_token_ids",
                expected=count,
                found=len(rows.output_token_ids),
            )

    def _adjust(
        self, logits: Tensor, rows: SampleRows, options: BatchOptions, masks: Tensor | None
    ) -> tuple[Tensor, dict[int, RequestError]]:
        """Penalties, bias, processors, mask; a copy of the logits only when something changes."""
        failed: dict[int, RequestError] = {}
        changed = options.with_history
        if not changed and not self.processors and masks is None:
            return logits, failed
        logits = logits.clone()
        for index in changed:
            try:
                self._adjust_row(logits[index], rows, index)
            except RequestError as error:
                error.rid = rows.requests[index].rid
                failed[index] = error
        apply_processors(logits, rows, self.processors)
        if masks is not None:
            apply_token_bitmask(logits, masks)
        return logits, failed

    def _adjust_row(self, row: Tensor, rows: SampleRows, index: int) -> None:
        request = rows.requests[index]
        params = request.params
        if params.has_penalties:
            if not rows.output_token_ids:
                raise ConfigError(
                    "rows.output_token_ids is empty and a request has penalties; give the tokens generated so far, "
                    "one sequence a row.",
                    field="output_token_ids",
                )
            repeats = params.repetition_penalty != 1.0
            apply_penalties(
                row,
                rows.output_token_ids[index],
                prompt_ids=self._prompt_set(request, row) if repeats else None,
                presence_penalty=params.presence_penalty,
                frequency_penalty=params.frequency_penalty,
                repetition_penalty=params.repetition_penalty,
            )
        if params.logit_bias:
            apply_logit_bias(row, params.logit_bias)

    def _prompt_set(self, request: Request, row: Tensor) -> Tensor:
        """Different tokens of a prompt, kept from step to step because prompts are long and do not change."""
        entry = self._prompt_ids.get(request.rid)
        if entry is None or entry[0].prompt_token_ids is not request.prompt_token_ids:
            ids = unique_ids(request.prompt_token_ids, row.shape[-1], row.device)
            entry = (request, ids)
            self._prompt_ids[request.rid] = entry
            if len(self._prompt_ids) > _PROMPT_CACHE_SIZE:
                self._prompt_ids.popitem(last=False)
        self._prompt_ids.move_to_end(request.rid)
        return entry[1]

    def _logprobs(
        self, logits: Tensor, token_ids: Tensor, options: BatchOptions
    ) -> tuple[TokenLogprob | None, ...]:
        if not options.with_logprobs:
            return ()
        chosen = token_ids.tolist()
        asked = [index for index in options.with_logprobs if chosen[index] != FAILED_TOKEN]
        out: list[TokenLogprob | None] = [None] * len(chosen)
        if asked:
            at = torch.tensor(asked, dtype=torch.int64, device=logits.device)
            requests = options.requests
            entries = token_logprobs(
                logits[at], token_ids[at], [requests[index].params.logprobs or 0 for index in asked]
            )
            for index, entry in zip(asked, entries, strict=True):
                out[index] = entry
        return tuple(out)


def _draw(logits: Tensor, token_ids: Tensor, positions: Tensor, group: DrawGroup) -> None:
    """Draws a token for each row of a group, among what its filters keep."""
    vocab, device = logits.shape[-1], logits.device
    mine, where = group.of(logits), group.of(positions)
    if not group.is_filtered:
        scores = mine.to(torch.float64)
        scores.sub_(scores.amax(dim=-1, keepdim=True))
        scores.div_(group.temperature.unsqueeze(-1))
        noise = gumbel_noise(group.seeds, where, vocab_size=vocab, device=device)
        group.put(token_ids, scores.add_(noise).max(dim=-1).indices)
        return
    kept = filter_logits(
        mine, group.temperature, group.top_k, group.top_p, group.min_p, widest=group.widest
    )
    if kept.token_ids.shape[-1] * _DENSE_SHARE < vocab:
        noise = gumbel_noise(group.seeds, where, token_ids=kept.token_ids)
    else:  # four tokens share a block of noise, so for many it is cheaper to make all
        noise = gumbel_noise(group.seeds, where, vocab_size=vocab, device=device)
        noise = noise.gather(-1, kept.token_ids)
    scores = kept.scores + noise
    best = scores == scores.amax(dim=-1, keepdim=True)
    group.put(token_ids, kept.token_ids.masked_fill(~best, vocab).amin(dim=-1))
