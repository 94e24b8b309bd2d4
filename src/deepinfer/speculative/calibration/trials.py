"""Which drafts a calibration may learn from."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer.speculative._arrays import shape_error

__all__ = ["block_counts", "verified_trials"]

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
    counts = np.asarray(values, np.int64)
    if counts.shape != (blocks,):
        raise shape_error(name, counts.shape, f"[blocks={blocks}]")
    return counts


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
