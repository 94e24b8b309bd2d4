"""Tokens that the device knows before the host does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.core.errors import InvariantBroken
from deepinfer.models.deepseek_v41.batch import to_device

__all__ = ["FutureTokens"]

_CONSUMED = -1


class FutureTokens:
    """The token sampled last for each slot, on the device.

    A step that is launched before the results of the one before it are known takes its input ids from here, in
    stream order and without waiting.

    Args:
        num_slots: Slots.
        vocab_size: Ids are below it.
        device: Where the tokens are.
        check: Overwrite what was taken, and refuse to give it out twice or to give out no id at all. It makes the
            host wait for the device.

    Examples:
        >>> tokens = FutureTokens(2, vocab_size=64, check=True)
        >>> tokens.put([1], torch.tensor([7]))
        >>> tokens.take([1])
        tensor([7])
        >>> tokens.take([1])
        Traceback (most recent call last):
            ...
        deepinfer.core.errors.InvariantBroken: slots [1] have no sampled token to run: found [-1].
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        *,
        device: torch.device | str = "cpu",
        check: bool = False,
    ) -> None:
        self._vocab_size = vocab_size
        self._check = check
        self._tokens = torch.full((num_slots,), _CONSUMED, dtype=torch.int64, device=device)
        self._late = np.full(num_slots, _CONSUMED, np.int64)
        self._has_late = False

    @property
    def tokens(self) -> Tensor:
        """The token of each slot, shape [slots], int64; the tensor stays where it is."""
        return self._tokens

    def put(self, slots: Sequence[int] | Tensor, token_ids: Tensor) -> None:
        """Notes the token sampled last for some slots.

        Args:
            slots: The slots, each once; a tensor of int64 on the device saves sending them.
            token_ids: Shape [slots], int64. A negative one, of a row from which nothing could be chosen, counts as
                0: its request ends, and what runs behind it is void.
        """
        self._tokens[self._index(slots)] = token_ids.clamp(min=0)

    def put_late(self, slots: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Notes tokens that the host knows; the device gets them with `flush`, once somebody needs them there.

        Args:
            slots: The slots, each once, shape [slots], int64.
            token_ids: Their ids, shape [slots], int64.
        """
        self._late[slots] = token_ids
        self._has_late = True

    def flush(self) -> None:
        """Sends what `put_late` noted."""
        if self._has_late:
            slots = np.flatnonzero(self._late != _CONSUMED)
            self._has_late = False
            self.put(slots.tolist(), to_device(self._late[slots], self._tokens.device))
            self._late[slots] = _CONSUMED

    def take(self, slots: Sequence[int]) -> Tensor:
        """The tokens sampled last for some slots.

        Args:
            slots: The slots.

        Returns:
            Shape [slots], int64.

        Raises:
            InvariantBroken: When checking: there is none, or it was taken before, or it is no id.
        """
        index = self._index(slots)
        found = self._tokens[index]
        if self._check:
            self._tokens[index] = _CONSUMED
            if not bool(((found >= 0) & (found < self._vocab_size)).all()):
                raise InvariantBroken(
                    f"slots {list(slots)} have no sampled token to run: found {found.tolist()}."
                )
        return found

    def _index(self, slots: Sequence[int] | Tensor) -> Tensor:
        if isinstance(slots, Tensor):
            return slots
        return to_device(np.array(slots, dtype=np.int64), self._tokens.device)
