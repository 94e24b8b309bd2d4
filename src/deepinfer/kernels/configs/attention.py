"""How rows of the sparse decode attention are cut into parts."""

from __future__ import annotations

__all__ = ["INVARIANT_KEYS", "split_keys"]

INVARIANT_KEYS = 320
"""Keys of a part where a row's bits must not hang on the number of rows."""


def split_keys(rows: int, heads: int, keys: int, num_sms: int) -> int:
    """Keys of a part, so that all parts run at once.

    Args:
        rows: Query rows.
        heads: Heads of a row.
        keys: Keys of a row.
        num_sms: Multiprocessors of the device.

    Returns:
        A multiple of 64, or 0 for whole rows.
    """
    units = rows * (-(-heads // 64) if heads > 32 else 1)
    tiles = -(-keys // 64)
    splits = min(num_sms // max(units, 1), tiles)
    return 64 * -(-tiles // splits) if splits > 1 else 0
