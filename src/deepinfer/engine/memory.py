"""How much memory there is for a cache, and what is said when it is not enough."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from deepinfer.core.errors import ConfigError

__all__ = ["allocating", "free_bytes"]

_UNKNOWN_BYTES = 4 << 30
_MEMINFO = Path("/proc/meminfo")


def free_bytes(device: torch.device) -> int:
    """Memory that can be had on a device.

    Args:
        device: The device.

    Returns:
        Bytes. Memory that holds copies of files, such as a checkpoint just read, counts as free on a CPU.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB", _MEMINFO.read_text("ascii"), re.MULTILINE)
        if found:
            return int(found.group(1)) << 10
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return _UNKNOWN_BYTES


@contextmanager
def allocating(num_seqs: int, num_tokens: int) -> Iterator[None]:
    """Says which options to lower when a cache cannot be allocated.

    Args:
        num_seqs: Requests that it holds.
        num_tokens: Tokens of one.

    Raises:
        ConfigError: The memory was refused.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not is_memory and "allocate memory" not in str(error):
            raise
        raise ConfigError(
            f"the cache of {num_seqs} requests of {num_tokens} tokens cannot be "
            f"allocated: {error} Lower max_num_seqs or max_model_len.",
            field="max_num_seqs",
            value=num_seqs,
        ) from error
