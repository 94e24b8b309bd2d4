"""One call, recorded as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["record_call", "reserved_bytes"]

T = TypeVar("T")


def record_call(call: Callable[[], T], device: torch.device, pool: Any = None) -> tuple[Any, T]:
    """Records what a call launches.

    Args:
        call: Reads and writes device tensors that stay where they are, and waits for nothing.
        device: Where it runs; nothing else may run there meanwhile.
        pool: Memory of an earlier recording that this one may use, as its `pool()` gives it.

    Returns:
        The recording, and what the call gave: tensors that each replay overwrites.

    Raises:
        RuntimeError: The call cannot be recorded.
    """
    current = torch.cuda.current_stream(device)
    graph = torch.cuda.CUDAGraph()
    # Other threads of the process may use the device meanwhile.
    recording = torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")
    # Kernels are compiled and workspaces allocated before, on the stream that torch records every graph on: the
    # library of matrix products keeps a workspace a stream for ever.
    side = recording.capture_stream
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(2 if pool is None else 1):
            call()
    current.wait_stream(side)
    torch.cuda.synchronize(device)
    with recording:
        output = call()
    return graph, output


def reserved_bytes(device: torch.device) -> int:
    """Memory that torch holds on a CUDA device, in bytes; 0 for another.

    Args:
        device: The device.
    """
    return int(torch.cuda.memory_reserved(device)) if device.type == "cuda" else 0
