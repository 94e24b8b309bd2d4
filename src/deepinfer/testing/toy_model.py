"""A model made of integer arithmetic, to test engines, schedulers and caches without weights or a GPU.

It has the interface of `deepinfer.models.deepseek_v41.DeepseekV41`. Every logit depends on every cache row of
its sequence, through exact arithmetic, so a lost, stale or foreign row changes the output, and batching or
chunking never does. The cache also refuses reads of rows that were never written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError, InvariantBroken
from deepinfer.testing.toy_cache import MODULUS, ToyCache

__all__ = ["ToyCache", "ToyConfig", "ToyDraft", "ToyModel", "ToyOutput"]

_M = MODULUS


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyConfig:
    """Sizes of a toy model.

    Attributes:
        vocab_size: Rows of the logits, at least 8.
        max_position_embeddings: Most tokens of one sequence.
        eos_token_id: Token id that ends a sequence.
        bos_token_id: Token id put before a prompt.
        dspark_block_size: Drafts that `ToyDraft` proposes; 0 for a model without a draft.
        draft_errors: One in this many drafts is wrong; 0 for a draft that is always right.
        sliding_window: Width of the attention window in tokens; 0 for a model without windows.
        narrows: Whether tokens before `Segment.full_start` give no output. The output of the others is the same.

    Raises:
        ConfigError: A number is out of range.
    """

    vocab_size: int = 64
    max_position_embeddings: int = 512
    eos_token_id: int = 1
    bos_token_id: int = 0
    dspark_block_size: int = 0
    draft_errors: int = 3
    sliding_window: int = 0
    narrows: bool = False

    def __post_init__(self) -> None:
        """Checks the sizes."""
        checks.check_int("vocab_size", self.vocab_size, 8, 2**24, ConfigError)
        checks.check_int(
            "max_position_embeddings", self.max_position_embeddings, 1, 2**20, ConfigError
        )
        checks.check_int("dspark_block_size", self.dspark_block_size, 0, 64, ConfigError)
        checks.check_int("draft_errors", self.draft_errors, 0, 2**20, ConfigError)
        checks.check_int("sliding_window", self.sliding_window, 0, 2**20, ConfigError)
        checks.check_bool("narrows", self.narrows, ConfigError)


@dataclass(frozen=True, slots=True)
class ToyOutput:
    """What a forward pass returns.

    Attributes:
        hidden: Shape [kept tokens, 1], int64.
        features: Shape [kept tokens, 1], int64, or None for a model without a draft.
        kept: Places of the kept tokens in the batch, ascending, or None for all.
    """

    hidden: Tensor
    features: Tensor | None = None
    kept: np.ndarray | None = None


class ToyModel:
    """A stand-in for a language model.

    Args:
        config: Sizes.

    Attributes:
        fault: Called with the batch before each forward pass; raise in it to simulate a failure.
        num_forwards: Forward passes so far.

    Examples:
        >>> ToyModel().logits([5, 6, 7]).shape
        torch.Size([3, 64])
    """

    def __init__(self, config: ToyConfig | None = None) -> None:
        self.config = config or ToyConfig()
        self.rounding = "none"
        self.fault: Callable[[Any], None] | None = None
        self.num_forwards = 0
        self.deterministic = True  # integers add up to the same in any order
        self.draft = ToyDraft(self) if self.config.dspark_block_size else None

    @property
    def device(self) -> torch.device:
        """Always the CPU."""
        return torch.device("cpu")

    def set_deterministic(self, enabled: bool = True) -> ToyModel:
        """Does nothing: integers are exact.

        Args:
            enabled: Ignored.

        Returns:
            The model.
        """
        return self

    def new_cache(
        self,
        num_slots: int,
        max_tokens: int,
        max_step_tokens: int = 512,
        *,
        num_blocks: int | None = None,
        block_size: int = 128,
        max_rollback: int = 16,
    ) -> ToyCache:
        """An empty cache.

        Args:
            num_slots: Number of slots.
            max_tokens: Tokens in one slot.
            max_step_tokens: Tokens that one request may run in one step.
            num_blocks: Blocks, or None for one a slot.
            block_size: Tokens in one block.
            max_rollback: Ignored.

        Returns:
            The cache.
        """
        return ToyCache(
            num_slots,
            max_tokens,
            max_step_tokens,
            num_blocks=num_blocks,
            block_size=block_size,
            window=self.config.sliding_window,
            narrows=self.config.narrows,
        )

    def forward(self, batch: Any, cache: ToyCache) -> ToyOutput:
        """Runs segments of consecutive positions.

        Args:
            batch: A `ForwardBatch`: `input_ids` and `segments` are looked at.
            cache: The cache, written.

        Returns:
            Hidden values of the tokens that give an output.

        Raises:
            InvariantBroken: A segment does not continue its slot, or an id is outside the vocabulary.
        """
        self.num_forwards += 1
        if self.fault is not None:
            self.fault(batch)
        ids = torch.as_tensor(batch.input_ids)
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.config.vocab_size:
            raise InvariantBroken(f"the batch holds an id outside the vocabulary: {ids.tolist()}.")
        hidden = [torch.empty(0, dtype=torch.int64)]
        kept = [np.empty(0, dtype=np.int64)]
        offset = 0
        for segment in batch.segments:
            start, stop = segment.start, segment.start + segment.num_tokens
            cache.write(
                segment.slot,
                start,
                ids[offset : offset + segment.num_tokens],
                window_start=segment.window_start,
                pool_start=segment.pool_start,
            )
            first = max(start, segment.full_start) if self.config.narrows else start
            if first < stop:
                hidden.append(cache.digests(segment.slot, first, stop))
                kept.append(np.arange(offset + first - start, offset + stop - start))
            offset += segment.num_tokens
        digests = torch.cat(hidden).unsqueeze(1)
        return ToyOutput(
            digests,
            digests if self.draft is not None else None,
            np.concatenate(kept) if self.config.narrows else None,
        )

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits of chosen rows.

        Args:
            hidden: Shape [rows, 1], int64.

        Returns:
            Shape [rows, vocab], fp32, from -8 to 8.
        """
        vocab = torch.arange(self.config.vocab_size)
        mixed = (hidden * (2 * vocab + 1) + vocab * 7_919) % _M
        mixed = (mixed * 16_807 + (mixed >> 13)) % _M
        return (mixed >> 7).to(torch.float32) * (16.0 / 2**24) - 8.0

    def logits(self, input_ids: Sequence[int] | Tensor) -> Tensor:
        """Logits of one whole sequence.

        Args:
            input_ids: Shape [tokens].

        Returns:
            Shape [tokens, vocab], fp32.
        """
        ids = torch.as_tensor(input_ids, dtype=torch.int64)
        cache = self.new_cache(1, len(ids), len(ids))
        cache.write(0, 0, ids)
        return self.compute_logits(cache.digests(0, 0, len(ids)).unsqueeze(1))

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The tokens that any correct engine generates at temperature 0, without stopping.

        Args:
            prompt: Token ids.
            num_tokens: How many.

        Returns:
            The tokens.
        """
        ids = list(prompt)
        for _ in range(num_tokens):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(prompt) :]


class ToyDraft:
    """Proposes what the toy model will choose, with a mistake now and then.

    It has the interface of `DSparkDraft` and checks that its context is extended by exactly the settled rows.

    Args:
        model: The model whose choices it guesses.
    """

    def __init__(self, model: ToyModel) -> None:
        self._config = model.config
        self._compute_logits = model.compute_logits

    def extend_context(
        self,
        features: Tensor,
        positions: Sequence[int],
        slots: Sequence[int],
        cache: ToyCache,
    ) -> None:
        """Adds rows to the context.

        Args:
            features: Shape [tokens, 1], int64.
            positions: One a token.
            slots: One a token.
            cache: The cache.

        Raises:
            InvariantBroken: A feature is not that of its position.
        """
        for feature, position, slot in zip(
            features.flatten().tolist(), positions, slots, strict=True
        ):
            is_readable = cache.has_windows(slot, position)  # not once the next step overwrote them
            if is_readable and feature != int(cache.digests(slot, position, position + 1)):
                raise InvariantBroken(f"slot {slot} got a foreign feature at {position}.")
            cache.draft_lengths[slot] = position + 1

    def draft_greedy(
        self,
        anchor_ids: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
        cache: ToyCache,
    ) -> tuple[Tensor, Tensor]:
        """Proposes a block for each row.

        Args:
            anchor_ids: Tokens generated last, one a row.
            positions: Their positions, one a row.
            slots: One a row.
            cache: The cache; not changed.

        Returns:
            Tokens, shape [rows, block], int64, and confidences, shape [rows, block], fp32.

        Raises:
            InvariantBroken: The context does not end right before the anchor.
        """
        block, vocab = self._config.dspark_block_size, self._config.vocab_size
        tokens = torch.zeros((len(slots), block), dtype=torch.int64)
        for row, (anchor, position, slot) in enumerate(
            zip(anchor_ids, positions, slots, strict=True)
        ):
            if cache.draft_lengths[slot] != position or cache.lengths[slot] != position:
                raise InvariantBroken(
                    f"the draft of slot {slot} knows {cache.draft_lengths[slot]} tokens and its "
                    f"anchor is at {position}."
                )
            scratch = cache.copy_of_slot(slot, block + 1)
            window_start = scratch.window_starts[0]
            token = anchor
            for index in range(block):
                ids = torch.tensor([token])
                scratch.write(0, position + index, ids, window_start=window_start)
                digest = scratch.digests(0, position + index, position + index + 1)
                token = int(self._compute_logits(digest.unsqueeze(1)).argmax())
                errors = self._config.draft_errors
                if errors and int(digest) % errors == 0:
                    token = (token + 1) % vocab
                tokens[row, index] = token
        return tokens, torch.full((len(slots), block), 0.5)
