"""Grammar masks: which tokens each constrained row may choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepinfer.core.plan import StepPlan
from deepinfer.core.protocols import GrammarState
from deepinfer.core.types import Request

__all__ = ["GrammarMasks"]


class GrammarMasks:
    """The grammar states of running requests.

    A state moves over each token of the output except the one that ends it, so a grammar allows an
    end-of-sequence token where the output may end and never has to accept one.

    A request that ignores end-of-sequence tokens goes on as long as its grammar lets it: these tokens are kept from it
    while any other is allowed. Where none is, the output ends with one.

    Args:
        vocab_size: Columns of the logits.
        eos_token_ids: The end-of-sequence tokens.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> None:
        self._num_words = -(-vocab_size // 32)
        self._states: dict[str, GrammarState] = {}
        self._num_accepted: dict[str, int] = {}
        self._eos = frozenset(token for token in eos_token_ids if 0 <= token < vocab_size)
        self._going_on: set[str] = set()  # requests that ignore end-of-sequence tokens
        keeps = torch.zeros(self._num_words * 32, dtype=torch.int64)
        keeps[:vocab_size] = 1
        keeps[list(self._eos)] = 0
        words = (keeps.view(-1, 32) << torch.arange(32)).sum(1)
        self._not_end = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)

    def add(self, request: Request) -> None:
        """Starts a request's grammar, if it has one.

        Args:
            request: The request.
        """
        if request.grammar is not None:
            self._states[request.rid] = request.grammar.start()
            self._num_accepted[request.rid] = 0
            if request.params.ignore_eos and self._eos:
                self._going_on.add(request.rid)

    def remove(self, rid: str) -> None:
        """Forgets a request.

        Args:
            rid: Its id.
        """
        self._states.pop(rid, None)
        self._num_accepted.pop(rid, None)
        self._going_on.discard(rid)

    def clear(self) -> None:
        """Forgets every request."""
        self._states.clear()
        self._num_accepted.clear()
        self._going_on.clear()

    def masks(
        self,
        plan: StepPlan,
        requests: Mapping[str, Request],
        drafts: Mapping[int, Sequence[int]] | None = None,
    ) -> tuple[Tensor | None, dict[str, Exception]]:
        """Masks of a step.

        A row of logits behind drafts gets the mask behind these drafts. Behind one that the grammar refuses, or that
        completes it, rows are left free: nothing that is chosen there becomes output.

        Args:
            plan: The plan.
            requests: The requests of its rows by id.
            drafts: Drafts that are run, by row of the plan; rows without an entry have none.

        Returns:
            Allowed tokens, shape [logits rows, words], int32, or None when no row is constrained; and, by id,
            what kept a mask from being made: such a row must not be sampled freely.
        """
        errors: dict[str, Exception] = {}
        if not self._states or not any(row.rid in self._states for row in plan.rows):
            return None, errors
        out = torch.full((plan.num_logits, self._num_words), -1, dtype=torch.int32)
        at = 0
        for index, row in enumerate(plan.rows):
            state = self._states.get(row.rid)
            if state is not None and row.num_logits:
                draft = drafts.get(index, ()) if drafts else ()
                rows = out[at : at + row.num_logits]
                try:
                    self._fill(state, rows, draft, goes_on=row.rid in self._going_on)
                except Exception as error:
                    errors[row.rid] = error
                    rows.fill_(-1)
            at += row.num_logits
        return out, errors

    def _fill(
        self, state: GrammarState, rows: Tensor, draft: Sequence[int], *, goes_on: bool
    ) -> None:
        moved = 0
        try:
            for at in range(len(draft) + 1):
                state.fill_mask(rows[at])
                if goes_on:
                    without = rows[at] & self._not_end
                    if without.any():
                        rows[at] = without
                if at == len(draft) or not state.accept(draft[at : at + 1]):
                    return
                moved += 1
                if state.is_done:
                    return
        finally:
            if moved:
                state.rollback(moved)

    def num_legal(self, rid: str, output_ids: Sequence[int], draft: Sequence[int]) -> int:
        """How many drafts a grammar lets through; the others need not be run, since they cannot be chosen.

        Args:
            rid: Id of the request; one without a grammar takes all.
            output_ids: Its output as far as it is known, which may be ahead of what was accepted.
            draft: Drafts behind it.

        Returns:
            Drafts up to the first that the grammar refuses, or to the one that completes it. None when it raises: its
            mask will, too, and that ends the request.
        """
        state = self._states.get(rid)
        if state is None:
            return len(draft)
        ahead = output_ids[self._num_accepted[rid] :]
        moved = 0
        try:
            for token in (*ahead, *draft):
                if state.is_done or not state.accept((token,)):
                    break
                moved += 1
            count = max(0, moved - len(ahead))
        except Exception:
            count = 0
        if moved:
            state.rollback(moved)
        return count

    def end_of(self, rid: str, token_ids: Sequence[int]) -> int | None:
        """Where an output ends that its grammar let not go on, although its request ignores end-of-sequence tokens.

        Args:
            rid: Id of the request.
            token_ids: New tokens.

        Returns:
            Place of the end-of-sequence token among them, or None for a request of another kind, and without one.
        """
        if rid not in self._going_on:
            return None
        return next((at for at, token in enumerate(token_ids) if token in self._eos), None)

    def accept(self, rid: str, token_ids: tuple[int, ...]) -> int | None:
        """Moves a request's state over new tokens, up to the one behind which nothing but the end can follow.

        Args:
            rid: Its id; one without a grammar accepts everything.
            token_ids: New tokens, without the one that ended the output.

        Returns:
            How many of them the output has when it is complete; None while it can go on.

        Raises:
            ValueError: The grammar refuses a token, which its mask should have kept out.
        """
        state = self._states.get(rid)
        if state is None:
            return None
        for count, token in enumerate(token_ids, 1):
            if not state.accept((token,)):
                raise ValueError(
                    f"the grammar refuses the token {token}, which its mask let through"
                )
            self._num_accepted[rid] += 1
            if state.is_done:
                return count
        return None

    def __len__(self) -> int:
        return len(self._states)

    def __repr__(self) -> str:
        return f"GrammarMasks({len(self._states)} running)"


GrammarCompiler = Any
"""Called with the `SamplingParams` of a request; returns a `Grammar`."""
