"""Which drafts a calibration may learn from."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError
from deepinfer.speculative._arrays import matrix, shape_error

__all__ = ["block_counts", "recorded_blocks", "verified_trials"]

_Ints = npt.NDArray[np.int64]


def block_counts(name: str, values: Any, blocks: int) -> _Ints:
    """One number a block, or an error.

    Args:
        name: Name of the argument.
        values: The numbers.
        blocks: How many blocks there are.

    Returns:
        The numbers, shape [blocks], int64.

    Raises:
        ShapeError: There is not one number a block.
    """
    try:
        counts = np.asarray(values, np.int64)
    except (TypeError, ValueError):
        raise shape_error(name, "that of no integers", f"[blocks={blocks}]") from None
    if counts.shape != (blocks,):
        raise shape_error(name, counts.shape, f"[blocks={blocks}]")
    return counts


def recorded_blocks(
    logits: Any, accepted: Any, verified: Any
) -> tuple[npt.NDArray[np.float64], _Ints, _Ints]:
    """Blocks to fit to.

    Args:
        logits: Confidence logits, shape [blocks, drafts].
        accepted: Drafts of each block that were accepted, from its begin, shape [blocks].
        verified: Drafts of each block that were verified, shape [blocks]; None says all.

    Returns:
        Logits, NaN where a draft was not verified if at all; accepted and verified drafts, shape [blocks], int64.

    Raises:
        ConfigError: There is no block, or the logit of a verified draft is NaN.
        ShapeError: Shapes do not fit.
    """
    values: npt.NDArray[np.float64] = matrix("logits", logits, "[blocks, drafts]")
    blocks, drafts = values.shape
    if not blocks:
        checks.fail("logits", values.shape, "of at least one block", ConfigError)
    hits = block_counts("accepted", accepted, blocks)
    seen = np.full(blocks, drafts)
    if verified is not None:
        seen = block_counts("verified", verified, blocks)
    missing = np.argwhere(np.isnan(values) & (np.arange(drafts) < seen[:, None]))
    if len(missing):
        block, draft = missing[0].tolist()
        raise ConfigError(
            f"logits holds NaN at block {block}, draft {draft}, which counts as verified; say in verified how many drafts "
            "of each block were, or leave the block out.",
            field="logits",
        )
    return values, hits, seen


def verified_trials(
    values: npt.NDArray[np.float64], accepted: Any, verified: Any
) -> tuple[_Ints, _Ints, npt.NDArray[np.float64]]:
    """Drafts that were verified behind an accepted prefix: what was not looked at was not rejected.

    Args:
        values: What is known of each draft, shape [blocks, drafts]; a NaN is no trial.
        accepted: Drafts of each block that were accepted, from its begin, shape [blocks].
        verified: Drafts of each block that were verified, shape [blocks].

    Returns:
        Block and position of each trial, and 1 where it was accepted, else 0; shape [trials] each.

    Raises:
        ShapeError: There is not one number a block.
    """
    hits = block_counts("accepted", accepted, values.shape[0])
    seen = block_counts("verified", verified, values.shape[0])
    positions = np.arange(values.shape[1])
    is_trial = (positions < seen[:, None]) & (positions <= hits[:, None]) & ~np.isnan(values)
    blocks, columns = np.nonzero(is_trial)
    return blocks, columns, (hits[blocks] > columns).astype(float)
