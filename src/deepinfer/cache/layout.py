"""What the cache of one model holds, group by group, in bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError

__all__ = ["GROUP_KINDS", "CacheGroupSpec", "CacheLayout"]

GROUP_KINDS = ("cacheable", "replay")
"""Content addressed by tokens and shared between requests, or private to a slot and rebuilt after a hit."""

_INT_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroupSpec:
    """Rows of one kind that live and move together.

    `kind` has no default: whether rows may be shared between requests is a statement about the model's mathematics.

    Attributes:
        name: Name of the group.
        kind: "cacheable": rows depend on the tokens alone, are stored in blocks, and decide prefix hits. "replay":
            rows belong to a slot, and tokens are run again to rebuild them after a hit.
        row_bytes: Bytes of one row of one layer.
        layers: Layers that own such rows.
        ratio: Tokens that one row stands for, for a cacheable group.
        rows: Rows of one slot and layer, for a replay group.
        saved_rows: How many of them, the latest, are kept in a window slot of host memory; 0 when they never are.

    Raises:
        ConfigError: A value is out of range, or does not belong to the kind.
    """

    name: str
    kind: str
    row_bytes: int
    layers: int = 1
    ratio: int = 1
    rows: int = 0
    saved_rows: int = 0

    def __post_init__(self) -> None:
        """Checks every field."""
        checks.check_text("name", self.name, ConfigError)
        checks.check_choice("kind", self.kind, GROUP_KINDS, ConfigError)
        checks.check_int("row_bytes", self.row_bytes, 1, _INT_MAX, ConfigError)
        checks.check_int("layers", self.layers, 1, 100_000, ConfigError)
        checks.check_int("ratio", self.ratio, 1, 65_536, ConfigError)
        checks.check_int("rows", self.rows, 0, _INT_MAX, ConfigError)
        checks.check_int("saved_rows", self.saved_rows, 0, _INT_MAX, ConfigError)
        if self.kind == "cacheable" and self.rows:
            checks.fail("rows", self.rows, f"0 for the cacheable group {self.name!r}", ConfigError)
        if self.kind == "replay" and (self.ratio != 1 or not self.rows):
            raise ConfigError(
                f"the replay group {self.name!r} has {self.rows} rows and ratio {self.ratio}; it must have a "
                f"fixed number of rows, from 1, and ratio 1.",
                field="rows",
                value=self.rows,
            )
        if self.saved_rows > self.rows:
            checks.fail(
                "saved_rows",
                self.saved_rows,
                f"at most rows ({self.rows}) in group {self.name!r}",
                ConfigError,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """All groups of one model's cache and the size of a block.

    One block holds `block_size` tokens of every cacheable group together, so that they are found, evicted and moved
    as one. `block_size` is a multiple of every ratio: no row spans two blocks, and no half-built row survives a
    block border.

    Attributes:
        groups: The groups.
        block_size: Tokens in one block.
        format: Everything else that the bytes of a cacheable row depend on, as text: number formats, scales,
            rotary settings. Part of the fingerprint.

    Raises:
        ConfigError: There is no cacheable group, two share a name, or `block_size` does not fit a ratio.

    Examples:
        >>> layout = CacheLayout.from_sources(
        ...     source_ratios=(2, 2, 2, 1), pool_row_bytes=288, key_row_bytes=68, window_row_bytes=528,
        ...     window=128, window_spare=6, stored_window_layers=20, other_window_layers=23)
        >>> layout.bytes_per_token, layout.block_bytes, layout.window_slot_bytes
        (890.0, 113920, 1415040)
    """

    groups: tuple[CacheGroupSpec, ...]
    block_size: int = 128
    format: str = ""

    def __post_init__(self) -> None:
        """Checks the groups against each other and against the block size."""
        object.__setattr__(self, "groups", tuple(self.groups))
        checks.check_int("block_size", self.block_size, 1, 65_536, ConfigError)
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names):
            checks.fail("groups", names, "groups with different names", ConfigError)
        if not self.cacheable:
            checks.fail("groups", names, "at least one cacheable group", ConfigError)
        for group in self.cacheable:
            if self.block_size % group.ratio:
                checks.fail(
                    "block_size",
                    self.block_size,
                    f"a multiple of {group.ratio}, the ratio of group {group.name!r}",
                    ConfigError,
                )

    @classmethod
    def from_sources(
        cls,
        *,
        source_ratios: Sequence[int],
        pool_row_bytes: int,
        key_row_bytes: int,
        window_row_bytes: int,
        window: int,
        window_spare: int,
        stored_window_layers: int,
        other_window_layers: int = 0,
        ring_rows: int | None = None,
        tail_row_bytes: int = 0,
        block_size: int = 128,
        format: str = "",
    ) -> CacheLayout:
        """The layout of a model with compressed pools, index keys, and sliding windows.

        Args:
            source_ratios: Tokens per pool row, one entry a layer that owns a pool.
            pool_row_bytes: Bytes of a pool row.
            key_row_bytes: Bytes of an index key; there is one a pool row.
            window_row_bytes: Bytes of a window row.
            window: Width of the window in tokens.
            window_spare: Further rows that are kept so that a verification step can be taken back: 1 plus the
                number of drafts.
            stored_window_layers: Layers whose windows may be kept in host memory: those that run for every token.
            other_window_layers: Layers whose windows are rebuilt on every prefill, a drafter's included.
            ring_rows: Rows of a window ring, or None for `window + window_spare`.
            tail_row_bytes: Bytes of the half-built row of a layer with a ratio above 1; 0 for none.
            block_size: Tokens in one block.
            format: See `CacheLayout.format`.

        Returns:
            The layout.
        """
        groups = []
        for ratio in sorted(set(source_ratios), reverse=True):
            layers = sum(1 for other in source_ratios if other == ratio)
            for name, row_bytes in (("pool", pool_row_bytes), ("keys", key_row_bytes)):
                groups.append(
                    CacheGroupSpec(
                        name=f"{name}_{ratio}",
                        kind="cacheable",
                        row_bytes=row_bytes,
                        layers=layers,
                        ratio=ratio,
                    )
                )
        rows = ring_rows or window + window_spare
        for name, layers, saved in (
            ("stored_windows", stored_window_layers, window + window_spare),
            ("other_windows", other_window_layers, 0),
        ):
            if layers:
                groups.append(
                    CacheGroupSpec(
                        name=name,
                        kind="replay",
                        row_bytes=window_row_bytes,
                        layers=layers,
                        rows=rows,
                        saved_rows=saved,
                    )
                )
        tails = sum(1 for ratio in source_ratios if ratio > 1)
        if tail_row_bytes and tails:
            groups.append(
                CacheGroupSpec(
                    name="tails", kind="replay", row_bytes=tail_row_bytes, layers=tails, rows=1
                )
            )
        return cls(groups=tuple(groups), block_size=block_size, format=format)

    @property
    def cacheable(self) -> tuple[CacheGroupSpec, ...]:
        """The groups that blocks hold."""
        return tuple(group for group in self.groups if group.kind == "cacheable")

    @property
    def replayed(self) -> tuple[CacheGroupSpec, ...]:
        """The groups that slots hold."""
        return tuple(group for group in self.groups if group.kind == "replay")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return sum(
            group.layers * (self.block_size // group.ratio) * group.row_bytes
            for group in self.cacheable
        )

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one more token adds to the blocks, on average."""
        return self.block_bytes / self.block_size

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return sum(group.layers * group.rows * group.row_bytes for group in self.replayed)

    @property
    def window_slot_bytes(self) -> int:
        """Bytes of one window slot in host memory."""
        return sum(group.layers * group.saved_rows * group.row_bytes for group in self.replayed)

    @property
    def window_rows(self) -> int:
        """Positions that a window slot covers, the latest ones; 0 when nothing is ever saved."""
        return max((group.saved_rows for group in self.replayed), default=0)

    def fingerprint(self) -> bytes:
        """Identity of the bytes in a block: 32 bytes.

        Replay groups do not enter: how a slot keeps its windows does not change what a block holds.

        Returns:
            A SHA-256 digest, the same on every machine.
        """
        fields = [
            [group.name, group.row_bytes, group.layers, group.ratio] for group in self.cacheable
        ]
        text = json.dumps([self.block_size, self.format, fields])
        return hashlib.sha256(text.encode()).digest()
