"""Host memory for cache blocks and window rows that the device had to give up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from deepinfer.core.plan import CacheCopy, CopyKind

__all__ = ["HostTier"]

_LOG = logging.getLogger("deepinfer.engine")
_SAVES = (CopyKind.SAVE_BLOCK, CopyKind.SAVE_WINDOWS)
_BLOCKS = (CopyKind.SAVE_BLOCK, CopyKind.LOAD_BLOCK)


class HostTier:
    """Makes the copies of plans between a device cache and host memory.

    On CUDA the memory is pinned, and copies run on a stream of their own: the model's stream waits for loads, and for
    saves only as long as it takes to gather the bytes on the device. A save that fails makes the loads from its place
    fail until another save succeeds; a load that fails costs its request nothing but the prefix.

    Args:
        num_blocks: Blocks that host memory holds.
        block_bytes: Bytes of one.
        num_window_slots: Windows that host memory holds.
        window_bytes: Bytes of one.
        device: Where the cache is.
        hook: Called with each copy before it is made; what it raises is a failure of the copy. For tests.

    Attributes:
        hook: The same.
        num_copies: Copies made.
        num_failed: Copies that failed.
    """

    def __init__(
        self,
        num_blocks: int,
        block_bytes: int,
        num_window_slots: int = 0,
        window_bytes: int = 0,
        *,
        device: torch.device | str = "cpu",
        hook: Callable[[CacheCopy], None] | None = None,
    ) -> None:
        self.hook = hook
        self.num_copies = self.num_failed = 0
        self._device = torch.device(device)
        self._is_cuda = self._device.type == "cuda"
        self._blocks = self._memory(num_blocks, block_bytes)
        self._windows = self._memory(num_window_slots, window_bytes)
        self._unusable: set[tuple[bool, int]] = set()
        self._stream = torch.cuda.Stream(self._device) if self._is_cuda else None

    @property
    def num_blocks(self) -> int:
        """Blocks that host memory holds."""
        return len(self._blocks)

    @property
    def size_bytes(self) -> int:
        """Bytes of host memory."""
        return self._blocks.numel() + self._windows.numel()

    def run(
        self,
        copies: Sequence[CacheCopy],
        cache: Any,
        before_load: Callable[[CacheCopy], None] | None = None,
    ) -> tuple[str, ...]:
        """Makes copies, in order.

        Args:
            copies: What to copy.
            cache: Has `save_block(block)` and `save_windows(slot, end)`, which return bytes on the device, shape
                [bytes], uint8, and `load_block(block, data)` and `load_windows(slot, end, data)`.
            before_load: Called before window rows are loaded into a slot, to get it ready.

        Returns:
            Ids of the requests whose loads failed, each once.
        """
        failed: dict[str, None] = {}
        for copy in copies:
            place = (copy.kind in _BLOCKS, copy.host)
            is_save = copy.kind in _SAVES
            if copy.kind is CopyKind.LOAD_WINDOWS and before_load is not None:
                before_load(copy)
            try:
                if self.hook is not None:
                    self.hook(copy)
                if is_save:
                    self._save(copy, cache)
                    self._unusable.discard(place)
                else:
                    if place in self._unusable:
                        raise OSError("the save to this place had failed")
                    self._load(copy, cache)
                self.num_copies += 1
            except Exception as error:
                self.num_failed += 1
                _LOG.warning("the copy %r failed: %s", copy, error)
                if is_save:
                    self._unusable.add(place)
                else:
                    failed[copy.rid] = None
        return tuple(failed)

    def forget_saves(self, copies: Sequence[CacheCopy]) -> None:
        """Makes loads from the places of saves fail until another save succeeds, because these may not have been made.

        Args:
            copies: The copies of a step that did not run.
        """
        saves = (copy for copy in copies if copy.kind in _SAVES)
        self._unusable.update((copy.kind in _BLOCKS, copy.host) for copy in saves)

    def close(self) -> None:
        """Gives the memory back, once no copy uses it; calling it twice is harmless."""
        if self._stream is not None:
            self._stream.synchronize()
        self._blocks = self._windows = torch.empty(0, dtype=torch.uint8)

    def _save(self, copy: CacheCopy, cache: Any) -> None:
        if copy.kind is CopyKind.SAVE_BLOCK:
            data, host = cache.save_block(copy.device), self._blocks[copy.host]
        else:
            data = cache.save_windows(copy.device, copy.end_position)
            host = self._windows[copy.host]
        host = host[: data.numel()]
        if self._stream is None:
            host.copy_(data)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(data, non_blocking=True)
        data.record_stream(self._stream)

    def _load(self, copy: CacheCopy, cache: Any) -> None:
        is_block = copy.kind is CopyKind.LOAD_BLOCK
        host = (self._blocks if is_block else self._windows)[copy.host]
        data = self._fetch(host)
        if is_block:
            cache.load_block(copy.device, data)
        else:
            cache.load_windows(copy.device, copy.end_position, data)

    def _fetch(self, host: Tensor) -> Tensor:
        if self._stream is None:
            return host
        main = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            data = host.to(self._device, non_blocking=True)
        main.wait_stream(self._stream)
        data.record_stream(main)
        return data

    def _memory(self, count: int, size: int) -> Tensor:
        return torch.empty((count, size), dtype=torch.uint8, pin_memory=self._is_cuda)

    def __repr__(self) -> str:
        return (
            f"HostTier({len(self._blocks)} blocks, {len(self._windows)} windows, "
            f"{self.size_bytes} bytes)"
        )
