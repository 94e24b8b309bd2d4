"""What the DSpark draft proposes while an engine runs, and what becomes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from deepinfer.core.protocols import DraftBatch, DraftView
from deepinfer.core.types import Output
from deepinfer.engine.drafter import DSparkDrafter

from .metrics import Block, accepted_drafts


class RecordingDrafter:
    """The model's own draft, with a note of every block.

    Args:
        model: A model with a draft.

    Attributes:
        blocks: (position of the anchor, drafts, confidences) of every block, by request.
    """

    def __init__(self, model: Any) -> None:
        self._inner = DSparkDrafter(model)
        self.blocks: dict[str, list[tuple[int, tuple[int, ...], tuple[float, ...]]]] = {}

    @property
    def draft_length(self) -> int:
        """Drafts of one block."""
        return self._inner.draft_length

    def bind(self, cache: Any) -> None:
        """Takes the runner's cache."""
        self._inner.bind(cache)

    def observe(self, features: Tensor, positions: Sequence[int], slots: Sequence[int]) -> None:
        """Extends the draft's context."""
        self._inner.observe(features, positions, slots)

    def propose(self, view: DraftView, max_drafts: int) -> DraftBatch:
        """Proposes, and notes what and how sure."""
        batch = self._inner.propose(view, self.draft_length)
        confidences = batch.confidences or ()
        for rid, position, drafts, sure in zip(
            view.rids, view.positions, batch.token_ids, confidences, strict=True
        ):
            self.blocks.setdefault(rid, []).append((position, drafts, sure))
        return DraftBatch(
            token_ids=tuple(row[:max_drafts] for row in batch.token_ids),
            confidences=tuple(row[:max_drafts] for row in confidences),
        )


@dataclass(frozen=True)
class DraftRun:
    """Drafting over some outputs.

    Attributes:
        blocks: Blocks whose fate the outputs tell in full.
        tokens: Generated tokens but each output's first, which prefill gives.
        steps: Steps that made them, a step of one request counted as one.
    """

    blocks: list[Block]
    tokens: int
    steps: int


def draft_run(
    drafter: RecordingDrafter, prompts: Sequence[Sequence[int]], outputs: Sequence[Output]
) -> DraftRun:
    """Compares the noted blocks with what was generated.

    Args:
        drafter: The drafter of the engine.
        prompts: Token ids of the prompts.
        outputs: Their outputs.

    Returns:
        The run.
    """
    blocks: list[Block] = []
    tokens = steps = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        sequence = [*prompt, *output.token_ids]
        generated = max(0, len(output.token_ids) - 1)
        noted = drafter.blocks.get(output.rid, ())
        from_blocks = 0
        for anchor, drafts, confidences in noted:
            following = sequence[anchor + 1 : anchor + 1 + len(drafts)]
            accepted = accepted_drafts(drafts, following)
            if accepted is not None and len(following) == len(drafts):
                blocks.append(Block(accepted, confidences))
            left = len(sequence) - anchor - 1
            from_blocks += left if accepted is None else min(accepted + 1, left)
        tokens += generated
        # A token that no block gave took a step without drafts, as the last one before the limit does.
        steps += len(noted) + generated - from_blocks
    return DraftRun(blocks, tokens, steps)
