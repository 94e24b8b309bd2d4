"""How likely drafts survive, and the one order in which they are worth verifying."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer.speculative._arrays import matrix, shape_error

__all__ = ["SlotOrder", "best_lengths", "prefix_survival", "slot_order"]

_POSITION_BITS = 8
_REQUEST_BITS = 24
_FEW_ROWS = 128


def prefix_survival(confidence: Any) -> npt.NDArray[np.float32]:
    """Probability that a draft and all before it are accepted.

    Args:
        confidence: Probability that each draft is accepted if all before it are, shape [requests, drafts], from 0 to
            1. A NaN counts as 0, so that a broken head costs speed and nothing else; a row without drafts at its end
            may be filled with 0.

    Returns:
        Running products, shape [requests, drafts], float32, never rising along a row.

    Raises:
        ShapeError: There are not two axes.
    """
    values = matrix("confidence", confidence, "[requests, drafts]", np.float32)
    survival: npt.NDArray[np.float32] = np.fmin(np.fmax(values, np.float32(0)), np.float32(1))
    if survival.shape[0] < _FEW_ROWS:
        return np.multiply.accumulate(survival, 1, out=survival)
    for column in range(1, survival.shape[1]):  # a block is short: faster along columns
        survival[:, column] *= survival[:, column - 1]
    return survival


class SlotOrder:
    """All draft slots of a batch, best first.

    The order is total: by falling survival, then rising position, then rising request. No two slots tie, so whoever
    takes the first K slots gets a prefix of each request's drafts, also when confidences are exactly 1.

    Attributes:
        num_requests: Requests of the batch.
    """

    __slots__ = ("_keys", "num_requests")

    def __init__(self, keys: npt.NDArray[np.uint64], num_requests: int) -> None:
        self._keys = keys
        self.num_requests = num_requests

    def __len__(self) -> int:
        return int(self._keys.size)

    @property
    def survival(self) -> npt.NDArray[np.float32]:
        """Survival of the slots in order, shape [slots], float32."""
        bits = ~(self._keys >> np.uint64(32)).astype(np.uint32)
        return bits.view(np.float32)

    @property
    def requests(self) -> npt.NDArray[np.int64]:
        """Request of each slot in order, shape [slots], int64."""
        return _requests(self._keys)

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """Position in its block of each slot in order, shape [slots], int64."""
        return (self._keys.view(np.int64) >> _REQUEST_BITS) & ((1 << _POSITION_BITS) - 1)

    def lengths(self, k: int) -> npt.NDArray[np.int64]:
        """Drafts of each request among the first slots.

        Args:
            k: How many slots.

        Returns:
            Drafts to verify, shape [requests], int64; they sum to `min(k, slots)`.
        """
        return np.bincount(_requests(self._keys[: max(k, 0)]), minlength=self.num_requests)


def slot_order(survival: Any, *, min_survival: float = 0.0) -> SlotOrder:
    """Sorts the slots of a batch.

    Args:
        survival: What `prefix_survival` gave, shape [requests, drafts], never rising along a row. At most 2**24
            requests and 256 drafts.
        min_survival: Slots that survive with this probability or less are left out.

    Returns:
        The order.

    Raises:
        ShapeError: There are not two axes, or too many rows or columns.
    """
    keys, count = _keys_of(survival, min_survival)
    keys.sort()
    return SlotOrder(keys[:count], int(np.shape(survival)[0]))


def best_lengths(survival: Any, k: int, *, min_survival: float = 0.0) -> npt.NDArray[np.int64]:
    """`slot_order(...).lengths(k)` without putting the rest in order.

    Args:
        survival: What `prefix_survival` gave, shape [requests, drafts].
        k: How many slots.
        min_survival: Slots that survive with this probability or less are left out.

    Returns:
        Drafts to verify, shape [requests], int64.

    Raises:
        ShapeError: There are not two axes, or too many rows or columns.
    """
    keys, count = _keys_of(survival, min_survival)
    k = min(max(k, 0), count)
    if 0 < k < keys.size:
        keys.partition(k - 1)
    return np.bincount(_requests(keys[:k]), minlength=np.shape(survival)[0])


def _keys_of(survival: Any, min_survival: float) -> tuple[npt.NDArray[np.uint64], int]:
    """One unique integer a slot, unsorted, that rises with all three criteria; and how many slots count."""
    values = np.ascontiguousarray(survival, np.float32)
    if values.ndim != 2 or values.shape[0] > 1 << _REQUEST_BITS or values.shape[1] > 256:
        raise shape_error("survival", values.shape, "[requests, drafts], at most 2**24 x 256")
    # The bits of a float from 0 on rise with it, so their complement above the rest puts the best slot first.
    keys = values.view(np.uint32).ravel().astype(np.uint64)
    keys <<= np.uint64(32)
    np.subtract(_last_keys(*values.shape), keys, out=keys)
    return keys, int(np.count_nonzero(values > min_survival))


@functools.lru_cache(maxsize=16)
def _last_keys(requests: int, drafts: int) -> npt.NDArray[np.uint64]:
    """Keys of slots that never survive."""
    keys = np.arange(drafts, dtype=np.uint64) << np.uint64(_REQUEST_BITS)
    keys = keys | np.arange(requests, dtype=np.uint64)[:, None]
    return (keys | np.uint64(0xFFFFFFFF << 32)).ravel()


def _requests(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    return keys.view(np.int64) & ((1 << _REQUEST_BITS) - 1)
