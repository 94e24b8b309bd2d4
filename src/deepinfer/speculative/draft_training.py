"""Training rows of a draft: blocks at random anchors of texts whose hidden states were kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError
from deepinfer.speculative._arrays import shape_error
from deepinfer.speculative.draft_module import DraftModule, TargetEnds
from deepinfer.speculative.loss import LossTerms, dspark_loss

__all__ = ["DraftBlocks", "draft_training_loss", "draw_blocks"]


@dataclass(frozen=True, slots=True)
class DraftBlocks:
    """Blocks to train on.

    Attributes:
        anchors: Position of each block's anchor, shape [rows, blocks], int64.
        inputs: True tokens before each draft, the anchor first, shape [rows, blocks, drafts], int64.
        labels: Tokens that came, shape [rows, blocks, drafts], int64.
        mask: Whether each draft counts: a beginning of every block, shape [rows, blocks, drafts], bool.
    """

    anchors: Tensor
    inputs: Tensor
    labels: Tensor
    mask: Tensor


def draw_blocks(
    input_ids: Tensor,
    num_blocks: int,
    block_size: int,
    *,
    supervised: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> DraftBlocks:
    """Draws anchors; a block ends at the first token that is not supervised, or with the text.

    Args:
        input_ids: Texts, shape [rows, tokens], int64.
        num_blocks: Blocks a text; fewer, of each, where one of the texts has fewer possible anchors, but some.
        block_size: Drafts of a block.
        supervised: Tokens that the target would generate, shape [rows, tokens], bool; an anchor and the token behind
            it must be. None says all.
        generator: Source of the anchors, on the CPU.

    Returns:
        The blocks. A row without any possible anchor has blocks that count nothing.

    Raises:
        ShapeError: `supervised` has another shape, or texts have fewer than 3 tokens or not two axes.
    """
    checks.check_int("num_blocks", num_blocks, 1, 2**20, ConfigError)
    checks.check_int("block_size", block_size, 1, 256, ConfigError)
    if input_ids.ndim != 2 or input_ids.shape[1] < 3:
        wanted = "[rows, tokens], with 3 tokens or more"
        raise shape_error("input_ids", tuple(input_ids.shape), wanted)
    rows, tokens = input_ids.shape
    if supervised is None:
        supervised = torch.ones_like(input_ids, dtype=torch.bool)
    elif supervised.shape != input_ids.shape:
        raise shape_error("supervised", tuple(supervised.shape), f"{(rows, tokens)}")
    # The first position has no context, and the last nothing behind it.
    possible = (supervised[:, :-1] & supervised[:, 1:]).float().cpu()
    possible[:, 0] = 0.0
    usable = possible.sum(1) > 0
    possible[~usable, 1:] = 1.0  # they count nothing, so they need not hold the others back
    count = min(num_blocks, int((possible > 0).sum(1).min()))
    anchors = torch.multinomial(possible, count, generator=generator).to(input_ids.device)
    at = anchors[..., None] + torch.arange(block_size, device=input_ids.device)
    inside = at + 1 < tokens
    index = torch.arange(rows, device=input_ids.device)[:, None, None]
    behind = (at + 1).clamp(max=tokens - 1)
    counted = inside & supervised[index, behind] & usable.to(input_ids.device)[:, None, None]
    return DraftBlocks(
        anchors,
        input_ids[index, at.clamp(max=tokens - 1)],
        input_ids[index, behind],
        counted.long().cumprod(-1).bool(),
    )


def draft_training_loss(
    module: DraftModule,
    features: Tensor,
    final_hidden: Tensor,
    blocks: DraftBlocks,
    ends: TargetEnds,
    *,
    decay: float = 4.0,
    ce: float = 0.1,
    l1: float = 0.9,
    conf: float = 1.0,
) -> LossTerms:
    """The DSpark loss of blocks, with true tokens before every draft.

    Args:
        module: The draft.
        features: Tapped hidden states of the target, shape [rows, tokens, taps * hidden].
        final_hidden: What the target's head reads, shape [rows, tokens, hidden]; its logits are computed again from it,
            for the drafts that count, because they would be too wide to keep.
        blocks: What `draw_blocks` drew from the same texts.
        ends: Embedding and head of the target; not trained.
        decay: See `dspark_loss`.
        ce: See `dspark_loss`.
        l1: See `dspark_loss`.
        conf: See `dspark_loss`.

    Returns:
        The terms.

    Raises:
        ShapeError: Shapes do not fit each other or the draft.
    """
    size = module.config.block_size
    if not isinstance(features, Tensor) or features.ndim != 3:
        found = tuple(getattr(features, "shape", ())) or type(features).__name__
        raise shape_error("features", found, "[rows, tokens, taps * hidden]")
    rows, tokens = features.shape[:2]
    if final_hidden.shape[:2] != (rows, tokens):
        wanted = f"[rows={rows}, tokens={tokens}, hidden]"
        raise shape_error("final_hidden", tuple(final_hidden.shape), wanted)
    if blocks.inputs.shape[0] != rows or blocks.inputs.shape[-1] != size:
        wanted = f"[rows={rows}, blocks, drafts={size}]"
        raise shape_error("blocks.inputs", tuple(blocks.inputs.shape), wanted)
    positions = torch.arange(tokens, device=features.device).expand(rows, -1)
    context = module.context_rows(features, positions)
    first = torch.zeros(rows, dtype=torch.int64, device=features.device)
    hidden = module.block_hidden(
        blocks.inputs[..., 0], blocks.anchors, context, ends, first_positions=first
    ).flatten(0, 1)
    inputs = blocks.inputs.flatten(0, 1)
    drafted = module.head.block(ends.lm_head(hidden), inputs, hidden)
    at = (blocks.anchors[..., None] + torch.arange(size, device=features.device)).clamp(
        max=tokens - 1
    )
    index = torch.arange(rows, device=features.device)[:, None, None]
    with torch.no_grad():
        wanted = ends.lm_head(final_hidden[index, at].flatten(0, 1))
    return dspark_loss(
        drafted,
        wanted,
        blocks.labels.flatten(0, 1),
        blocks.mask.flatten(0, 1),
        module.confidence_logits(hidden, inputs),
        decay=decay,
        ce=ce,
        l1=l1,
        conf=conf,
    )
