"""What the sizes of a cache must satisfy."""

from __future__ import annotations

import numpy as np

from deepinfer.core.errors import ConfigError
from deepinfer.models.deepseek_v41.config import DeepseekV41Config

__all__ = ["check_sizes", "check_storage"]


def check_sizes(
    config: DeepseekV41Config,
    num_slots: int,
    max_tokens: int,
    max_step_tokens: int,
    max_rollback: int,
    num_blocks: int | None,
    block_size: int,
) -> int:
    """Refuses sizes that no cache can have; see `SlotCache` for the arguments.

    Returns:
        Tokens in one block.

    Raises:
        ConfigError: A size is out of range, or a block would split tokens that share a pool row.
    """
    limits = {
        "num_slots": (num_slots, 2**20),
        "max_tokens": (max_tokens, config.max_position_embeddings),
        "max_step_tokens": (max_step_tokens, 2**20),
        "max_rollback": (max_rollback, 2**20),
        "num_blocks": (1 if num_blocks is None else num_blocks, 2**31),
        "block_size": (block_size, 2**20),
    }
    for name, (value, high) in limits.items():
        if not 1 <= value <= high:
            raise ConfigError(
                f"{name} is {value}; it must be from 1 to {high}.",
                field=name,
                value=value,
                limit=f"1 to {high}",
            )
    unit = int(np.lcm.reduce([1, *(config.compress_ratios[s] for s in config.kv_source_layer_ids)]))
    if num_blocks is None:
        return -(-max_tokens // unit) * unit
    if block_size % unit:
        raise ConfigError(
            f"block_size is {block_size}; it must be a multiple of {unit}, so that tokens that share a pool row "
            "share a block.",
            field="block_size", value=block_size, limit=f"multiple of {unit}",
        )  # fmt: skip
    return block_size


def check_storage(storage: str, rounding: str) -> None:
    """Refuses an unknown form of the rows, and bytes for rows that are not rounded.

    Raises:
        ConfigError: As said.
    """
    if storage not in ("plain", "packed") or (storage == "packed" and rounding == "none"):
        raise ConfigError(
            f"storage is {storage!r} and rounding {rounding!r}; rows are stored 'plain', or 'packed' when they are "
            "rounded.",
            field="storage", value=storage, limit="'plain' or 'packed'",
        )  # fmt: skip
