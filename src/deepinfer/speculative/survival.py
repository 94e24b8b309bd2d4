"""How likely drafts survive, and the one order in which they are worth verifying."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer.core.errors import ShapeError
from deepinfer.speculative._arrays import matrix, shape_error

__all__ = ["SlotOrder", "best_lengths", "prefix_survival", "slot_order"]

_POSITION_BITS = 8
_REQUEST_BITS = 24
_MOST_REQUESTS, _MOST_DRAFTS = 1 << _REQUEST_BITS, 1 << _POSITION_BITS
_FEW_ROWS = 128
_NEVER, _ALWAYS = np.float32(0), np.float32(1)


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
    if len(values) < _FEW_ROWS:
        survival: npt.NDArray[np.float32] = np.fmax(values, _NEVER)
        np.fmin(survival, _ALWAYS, survival)
        return np.multiply.accumulate(survival, 1, out=survival)
    by_position = values.T.copy()  # a block is short: faster position by position
    np.fmax(by_position, _NEVER, by_position)
    np.fmin(by_position, _ALWAYS, by_position)
    for before, at in itertools.pairwise(by_position):
        at *= before
    return by_position.T


def in_range(survival: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Survivals of what may be none.

    Args:
        survival: Any numbers, shape [...].

    Returns:
        The same from 0 to 1, shape [...]; a NaN is 0.
    """
    return np.fmin(np.fmax(survival, _NEVER), _ALWAYS)


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


def falling_survival(
    survival: npt.NDArray[np.float32], min_survival: float
) -> npt.NDArray[np.float32]:
    """`slot_order(...).survival` without whose slots they are.

    Args:
        survival: What `prefix_survival` gave, shape [requests, drafts].
        min_survival: Slots that survive with this probability or less are left out.

    Returns:
        Survival of the slots, best first, shape [slots], float32. A NaN comes before all others.
    """
    rising = survival.flatten("K")
    rising.sort()
    if rising.size and rising[0] <= min_survival:
        rising = rising[rising.searchsorted(np.float32(min_survival), "right") :]
    return rising[::-1]


def best_slots(
    survival: npt.NDArray[np.float32], k: int, min_survival: float = 0.0, last: Any = None
) -> tuple[npt.NDArray[np.int64], int]:
    """The first slots of `slot_order` without an order.

    Args:
        survival: What `prefix_survival` gave, shape [requests, drafts].
        k: How many slots.
        min_survival: Slots that survive with this probability or less are left out.
        last: Survival of the last of the K slots, above `min_survival`, if it is known.

    Returns:
        Drafts to verify, shape [requests], int64, and their sum.

    Raises:
        ShapeError: There are too many rows or columns.
    """
    requests, drafts = survival.shape
    if requests > _MOST_REQUESTS or drafts > _MOST_DRAFTS:
        raise _slots_error(survival.shape)
    k = min(k, requests * drafts)
    if k <= 0:
        return np.zeros(requests, np.int64), 0
    values: npt.NDArray[Any] = survival
    if last is None:
        # The bits of a float from 0 on rise with it, and a NaN is just the greatest.
        values = survival.view(np.int32)
        rising = values.flatten("K")
        rising.partition(-k)
        last = max(rising[-k], _next_bits(min_survival))
    taken = values >= last
    count = int(np.count_nonzero(taken))
    if count > k:  # of those that tie with the last, the first by position, then request, are taken
        tied = np.flatnonzero((values == last).T)
        taken.T.flat[tied[k - count :]] = False
        count = k
    # A product with ones is the quickest sum of few columns.
    return taken.dot(_ones(drafts)).astype(np.int64), count


def best_lengths(survival: Any, k: int, *, min_survival: float = 0.0) -> npt.NDArray[np.int64]:
    """`slot_order(...).lengths(k)` without putting slots in order.

    Args:
        survival: What `prefix_survival` gave, shape [requests, drafts].
        k: How many slots.
        min_survival: Slots that survive with this probability or less are left out.

    Returns:
        Drafts to verify, shape [requests], int64.

    Raises:
        ShapeError: There are not two axes, or too many rows or columns.
    """
    return best_slots(_slots(survival), k, min_survival)[0]


def _keys_of(survival: Any, min_survival: float) -> tuple[npt.NDArray[np.uint64], int]:
    """One unique integer a slot, unsorted, that rises with all three criteria; and how many slots count."""
    values = np.fmax(np.ascontiguousarray(_slots(survival)), _NEVER) + _NEVER
    # The bits of a float from 0 on rise with it, so their complement above the rest puts the best slot first.
    keys = values.view(np.uint32).ravel().astype(np.uint64)
    keys <<= np.uint64(32)
    np.subtract(_last_keys(*values.shape), keys, out=keys)
    return keys, int(np.count_nonzero(values > min_survival))


def _slots(survival: Any) -> npt.NDArray[np.float32]:
    values = matrix("survival", survival, "[requests, drafts]", np.float32)
    if values.shape[0] > _MOST_REQUESTS or values.shape[1] > _MOST_DRAFTS:
        raise _slots_error(values.shape)
    return values


def _slots_error(shape: tuple[int, ...]) -> ShapeError:
    return shape_error("survival", shape, "[requests, drafts], at most 2**24 x 256")


@functools.lru_cache(maxsize=16)
def _ones(drafts: int) -> npt.NDArray[np.float32]:
    return np.ones(drafts, np.float32)


@functools.lru_cache(maxsize=16)
def _next_bits(survival: float) -> np.int32:
    """Bits of the next greater number."""
    bits: np.int32 = np.float32(survival).view(np.int32) + np.int32(1)
    return bits


@functools.lru_cache(maxsize=16)
def _last_keys(requests: int, drafts: int) -> npt.NDArray[np.uint64]:
    """Keys of slots that never survive."""
    keys = np.arange(drafts, dtype=np.uint64) << np.uint64(_REQUEST_BITS)
    keys = keys | np.arange(requests, dtype=np.uint64)[:, None]
    return (keys | np.uint64(0xFFFFFFFF << 32)).ravel()


def _requests(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    return keys.view(np.int64) & ((1 << _REQUEST_BITS) - 1)
