"""The verdict over drafts: which of them stay, and the token behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError, ShapeError
from deepinfer.speculative._arrays import shape_error
from deepinfer.speculative._tensors import as_integers, as_tensor, check_within
from deepinfer.speculative.laws import (
    block_acceptance,
    first_argmax,
    one_hot_law,
    possible_law,
    residual_law,
    standard_acceptance,
)
from deepinfer.speculative.noise import DrawStream, NoiseSource

__all__ = ["RULES", "RejectionSampler", "VerifyResult"]

RULES = ("standard", "block", "coupled", "greedy")
"""Names of the rules."""


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What came of one verification.

    Attributes:
        tokens: Emitted tokens of each request, accepted drafts first, shape [requests, drafts + 1], int64, -1 behind.
        num_accepted: Accepted drafts, shape [requests], int64.
        next_tokens: The token behind them, shape [requests], int64.
        is_bad: Requests with a row of the target's logits without a finite entry, or a row of the draft's with a NaN or
            without a finite entry, among those that are verified, shape [requests], bool. So under every rule, also
            where the draft's are not read. They emit one token of the vocabulary and accept nothing; the caller should
            end them.
    """

    tokens: Tensor
    num_accepted: Tensor
    next_tokens: Tensor
    is_bad: Tensor

    @property
    def num_emitted(self) -> Tensor:
        """Emitted tokens, shape [requests], int64."""
        return self.num_accepted + 1


class RejectionSampler:
    """Judges drafts so that what is emitted has exactly the target's law.

    - "standard": accept x with probability min(1, p(x) / q(x)), else draw from the part of p above q.
    - "block": judge the drafts of a block together; never keeps fewer. Needs lengths that were fixed before any draft
      of the block was drawn.
    - "coupled": the target's own token under the noise that also chose the draft; a draft stays when it is that token.
      What is emitted depends on the request's seed and position alone, not on drafts, lengths or neighbours.
    - "greedy": the target's likeliest token, ties to the lowest id.

    Laws are what tokens were really drawn from, so logits come in as they are after temperature, filters, penalties
    and grammar, on both sides. A greedy request among drawn ones has logits that are 0 at its likeliest token and minus
    infinity elsewhere. A draft to which its own law gives probability 0 counts as chosen, whatever chose it.

    "standard" and "block" keep the law only if no draft had a say in whether it is verified (`VerificationScheduler`), and
    if drafts are drawn with numbers of their own (`DrawStream`).

    Args:
        rule: One of `RULES`.

    Raises:
        ConfigError: There is no such rule.
    """

    def __init__(self, rule: str = "standard") -> None:
        self.rule = checks.check_choice("rule", rule, RULES, ConfigError)

    @property
    def is_schedule_invariant(self) -> bool:
        """Whether emitted tokens cannot depend on how many drafts are verified."""
        return self.rule in ("coupled", "greedy")

    def __call__(
        self,
        target_logits: Tensor,
        draft_tokens: Tensor,
        lengths: Tensor,
        positions: Sequence[int],
        *,
        draft_logits: Tensor | None = None,
        noise: NoiseSource | None = None,
    ) -> VerifyResult:
        """Judges one block of each request.

        Args:
            target_logits: Rows of all requests, one behind the other: the anchor's first, then one behind each
                verified draft, shape [sum of (lengths + 1), vocab], any float dtype.
            draft_tokens: Drafts, shape [requests, drafts], any integer dtype; a negative one counts as the end of its
                row.
            lengths: Drafts that are verified, shape [requests], from 0 to `drafts`: a tensor, or an array such as that
                of a plan. The others are forgotten.
            positions: Position of the first token behind each anchor, in the whole sequence, from 0.
            draft_logits: Logits that the drafts were drawn from, shape [requests, drafts, vocab]; None says that they
                were chosen greedily.
            noise: The numbers; not needed by "greedy".

        Returns:
            The verdict.

        Raises:
            ConfigError: The rule needs noise and there is none, or none for a request.
            ShapeError: Shapes do not fit, or a length, a position or a token is out of range.
        """
        if not (self.rule == "greedy" or (hasattr(noise, "gumbel") and hasattr(noise, "uniform"))):
            checks.fail("noise", noise, f"a NoiseSource for the rule {self.rule!r}", ConfigError)
        target_logits = as_tensor("target_logits", target_logits)
        draft_tokens = as_integers("draft_tokens", draft_tokens)
        if draft_logits is not None:
            draft_logits = as_tensor("draft_logits", draft_logits)
        positions = [int(at) for at in positions]
        lengths = as_integers("lengths", lengths)
        lengths = self._checked(target_logits, draft_tokens, lengths, positions, draft_logits)
        requests, drafts = draft_tokens.shape
        ends = (draft_tokens < 0).cumsum(1) == 0
        verified = torch.minimum(lengths, ends.sum(1))
        rows, exists = self._rows(lengths, drafts)
        logits = target_logits.to(
            torch.float64 if target_logits.dtype == torch.float64 else torch.float32
        )
        scores = logits[
            rows
        ]  # [requests, drafts + 1, vocab]; rows that do not exist repeat the first
        bad_row = ~(torch.isfinite(scores).any(-1)) | torch.isnan(scores).all(-1)
        needed = torch.arange(drafts + 1, device=scores.device) <= verified[:, None]
        is_bad = (bad_row & exists & needed).any(1)
        scores = torch.nan_to_num(scores, nan=-torch.inf, posinf=torch.finfo(scores.dtype).max)
        scores = torch.where(bad_row[..., None], 0.0, scores)
        if draft_logits is not None and drafts:
            empty = ~torch.isfinite(draft_logits).any(-1)
            q_bad = (torch.isnan(draft_logits).any(-1) | empty) & (
                torch.arange(drafts, device=scores.device) < verified[:, None]
            )
            is_bad = is_bad | q_bad.any(1)
        verified = torch.where(is_bad, 0, verified)
        tokens = draft_tokens.clamp_min(0)
        if noise is None or self.rule in ("greedy", "coupled"):
            accepted, following = self._own_tokens(scores, tokens, verified, positions, noise)
        else:
            laws = self._laws(scores, draft_tokens, draft_logits)
            accepted, following = self._drawn(*laws, tokens, verified, positions, noise)
        steps = torch.arange(drafts + 1, device=scores.device)
        padded = torch.cat([tokens, tokens.new_zeros(requests, 1)], 1)
        out = torch.where(steps < accepted[:, None], padded, -1)
        out.scatter_(1, accepted[:, None], following[:, None])
        return VerifyResult(out, accepted, following, is_bad)

    def _own_tokens(
        self,
        scores: Tensor,
        tokens: Tensor,
        verified: Tensor,
        positions: Sequence[int],
        noise: NoiseSource | None,
    ) -> tuple[Tensor, Tensor]:
        """Greedy and coupled: the target chooses, and drafts stay as far as they agree."""
        requests, width, vocab = scores.shape
        if noise is not None and self.rule == "coupled":
            at = [(r, positions[r] + j) for r in range(requests) for j in range(width)]
            drawn = noise.gumbel([r for r, _ in at], [p for _, p in at], vocab, DrawStream.SHARED)
            drawn_t = torch.from_numpy(drawn).to(scores.device).view(requests, width, vocab)
            scores = torch.log_softmax(scores.double(), -1) + drawn_t
        own = first_argmax(scores)
        same = (own[:, :-1] == tokens) & (
            torch.arange(width - 1, device=scores.device) < verified[:, None]
        )
        accepted = same.long().cumprod(1).sum(1)
        return accepted, own.gather(1, accepted[:, None])[:, 0]

    def _laws(
        self, scores: Tensor, draft_tokens: Tensor, draft_logits: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        p = torch.softmax(scores, -1)
        if draft_logits is None:
            return p, one_hot_law(draft_tokens, scores.shape[-1], p.dtype)
        clean = torch.nan_to_num(draft_logits.to(p.dtype), nan=-torch.inf)
        empty = ~torch.isfinite(clean).any(-1)
        q = torch.softmax(torch.where(empty[..., None], 0.0, clean), -1)
        return p, possible_law(q, draft_tokens.clamp_min(0))

    def _drawn(
        self,
        p: Tensor,
        q: Tensor,
        tokens: Tensor,
        verified: Tensor,
        positions: Sequence[int],
        noise: NoiseSource,
    ) -> tuple[Tensor, Tensor]:
        """Standard and block: numbers of their own for the test, the residual and the bonus."""
        requests, width, vocab = p.shape
        drafts = width - 1
        every = list(range(requests))
        if self.rule == "block":
            # All numbers of a block have a say in it, so none may come back in the next one: they are of its anchor.
            drawn = np.exp(-np.exp(-noise.gumbel(every, positions, drafts, DrawStream.ACCEPT)))
        else:
            at = [(r, positions[r] + j) for r in every for j in range(drafts)]
            drawn = noise.uniform([r for r, _ in at], [n for _, n in at], DrawStream.ACCEPT)
        test = torch.from_numpy(drawn).to(p.device).view(requests, drafts)
        steps = torch.arange(drafts, device=p.device)
        if self.rule == "block":
            thresholds, weights = block_acceptance(p, q, tokens, verified)
            passed = test < thresholds
            accepted = torch.where(passed, steps + 1, 0).amax(1) if drafts else verified * 0
            weight = weights.gather(1, accepted[:, None])[:, 0]
        else:
            passed = (test < standard_acceptance(p[:, :drafts], q, tokens)) & (
                steps < verified[:, None]
            )
            accepted, weight = passed.long().cumprod(1).sum(1), None
        row = p[torch.arange(requests, device=p.device), accepted]
        is_bonus = accepted >= verified
        if drafts:
            behind = q[torch.arange(requests, device=p.device), accepted.clamp(max=drafts - 1)]
            row = torch.where(is_bonus[:, None], row, residual_law(row, behind, weight))
        where = [positions[r] + int(n) for r, n in enumerate(accepted.tolist())]
        residual = noise.gumbel(every, where, vocab, DrawStream.RESIDUAL)
        bonus = noise.gumbel(every, where, vocab, DrawStream.BONUS)
        added = torch.from_numpy(residual).to(p.device)
        added = torch.where(is_bonus[:, None], torch.from_numpy(bonus).to(p.device), added)
        return accepted, first_argmax(torch.log(row.double()) + added)

    @staticmethod
    def _rows(lengths: Tensor, drafts: int) -> tuple[Tensor, Tensor]:
        """Row of each request and step in the flat logits, and whether it exists."""
        first = torch.cumsum(lengths + 1, 0) - (lengths + 1)
        steps = torch.arange(drafts + 1, device=lengths.device)
        exists = steps <= lengths[:, None]
        return first[:, None] + torch.where(exists, steps, 0), exists

    @staticmethod
    def _checked(
        target_logits: Tensor,
        draft_tokens: Tensor,
        lengths: Tensor,
        positions: Sequence[int],
        draft_logits: Tensor | None,
    ) -> Tensor:
        if draft_tokens.ndim != 2:
            raise shape_error("draft_tokens", tuple(draft_tokens.shape), "[requests, drafts]")
        requests, drafts = draft_tokens.shape
        if target_logits.ndim != 2:
            raise shape_error("target_logits", tuple(target_logits.shape), "[rows, vocab]")
        vocab = target_logits.shape[1]
        if lengths.shape != (requests,) or len(positions) != requests:
            found = (tuple(lengths.shape), len(positions))
            raise shape_error("lengths and positions", found, f"[requests={requests}]")
        lengths = lengths.to(draft_tokens.device, torch.int64)
        if requests:
            check_within("lengths", lengths, 0, drafts, "the drafts of a row")
            if min(positions) < 0:
                raise ShapeError(
                    f"positions holds {min(positions)}; they count from 0.", argument="positions"
                )
        rows = int(lengths.sum()) + requests
        if target_logits.shape[0] != rows:
            raise shape_error(
                "target_logits",
                tuple(target_logits.shape),
                f"[rows={rows}, vocab]: lengths + 1 each",
            )
        if draft_logits is not None and tuple(draft_logits.shape) != (requests, drafts, vocab):
            expected = f"[requests={requests}, drafts={drafts}, vocab={vocab}]"
            raise shape_error("draft_logits", tuple(draft_logits.shape), expected)
        if draft_tokens.numel():
            most = draft_tokens.clamp_min(-1)
            check_within("draft_tokens", most, -1, vocab - 1, "the last of the vocabulary")
        return lengths
