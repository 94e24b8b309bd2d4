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
            if request.params.ignore_eos and self._eos:
                self._going_on.add(request.rid)

    def remove(self, rid: str) -> None:
        """Forgets a request.

        Args:
            rid: Its id.
        """
        self._states.pop(rid, None)
        self._going_on.discard(rid)

    def clear(self) -> None:
        """Forgets every request."""
        self._states.clear()
        self._going_on.clear()

    def masks(
        self, plan: StepPlan, requests: Mapping[str, Request]
    ) -> tuple[Tensor | None, dict[str, Exception]]:
        """Masks of a step.

        Args:
            plan: The plan.
            requests: The requests of its rows by id.

        Returns:
            Allowed tokens, shape [logits rows, words], int32, or None when no row is constrained; and, by id,
            what kept a mask from being made: such a row must not be sampled freely.
        """
        errors: dict[str, Exception] = {}
        if not self._states or not any(row.rid in self._states for row in plan.rows):
            return None, errors
        out = torch.full((plan.num_logits, self._num_words), -1, dtype=torch.int32)
        at = 0
        for row in plan.rows:
            state = self._states.get(row.rid)
            if state is not None and row.num_logits:
                try:
                    state.fill_mask(out[at])
                    if row.rid in self._going_on:
                        without = out[at] & self._not_end
                        if without.any():
                            out[at] = without
                except Exception as error:
                    errors[row.rid] = error
                    out[at] = -1
            at += row.num_logits
        return out, errors

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

    def accept(self, rid: str, token_ids: tuple[int, ...]) -> bool:
        """Moves a request's state over new tokens.

        Args:
            rid: Its id; one without a grammar accepts everything.
            token_ids: New tokens, without the one that ended the output.

        Returns:
            Whether the grammar allows nothing but the end now.

        Raises:
            ValueError: The grammar refuses a token, which its mask should have kept out.
        """
        state = self._states.get(rid)
        if state is None or not token_ids:
            return False
        if not state.accept(token_ids):
            raise ValueError(
                f"the grammar refuses the tokens {list(token_ids)}, which its mask let through"
            )
        return bool(state.is_done)

    def __len__(self) -> int:
        return len(self._states)

    def __repr__(self) -> str:
        return f"GrammarMasks({len(self._states)} running)"


GrammarCompiler = Any
"""Called with the `SamplingParams` of a request; returns a `Grammar`."""
