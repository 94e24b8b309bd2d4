"""How rows of the sparse decode attention are cut into parts."""

from __future__ import annotations

__all__ = ["FEW", "INVARIANT_KEYS", "WIDE", "portable", "split_keys"]

INVARIANT_KEYS = 320
"""Keys of a part where a row's bits must not hang on the number of rows."""


WIDE: tuple[int, int] = (216, 168)
"""Registers of the two warpgroups that multiply: `WideTuning`."""
FEW: dict[int, tuple[int, int, int, int]] = {
    8: (8, 32, 104, 120),
    16: (8, 32, 104, 136),
    32: (8, 32, 112, 192),
}
"""By heads: warps that decode, keys at once, registers of the two warpgroups that multiply: `FewTuning`."""


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


def portable(is_wide: bool, heads: int) -> tuple[int, int, int]:
    """Sizes of the portable kernel.

    Args:
        is_wide: Whether queries are fp32.
        heads: Heads of a row.

    Returns:
        Heads of a program, keys of a tile, warps.
    """
    if is_wide:
        return 16, 16, 8
    return (32, 32, 8) if heads >= 32 else (16, 32, 8)
