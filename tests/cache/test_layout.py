from __future__ import annotations

from typing import Any

import pytest

from deepinfer.cache import CacheGroupSpec, CacheLayout
from deepinfer.core.errors import ConfigError

V41: dict[str, Any] = {
    "source_ratios": (2, 2, 2, 1),
    "pool_row_bytes": 288,
    "key_row_bytes": 68,
    "window_row_bytes": 528,
    "window": 128,
    "window_spare": 6,
    "stored_window_layers": 20,
    "other_window_layers": 23,
    "tail_row_bytes": 4096,
}


def test_sizes_of_v41_flash() -> None:
    layout = CacheLayout.from_sources(**V41)
    assert layout.bytes_per_token == 890
    assert layout.block_bytes == 128 * 890
    assert layout.window_slot_bytes == 20 * 134 * 528 == 1_415_040
    assert layout.window_rows == 134 == 128 + 1 + 5
    assert 528 == 512 + 512 // 32  # fp8 values and one scale for 32 of them
    assert layout.slot_bytes == 43 * 134 * 528 + 3 * 4096
    assert CacheLayout.from_sources(**V41, ring_rows=640).slot_bytes == 43 * 640 * 528 + 3 * 4096


def test_the_kind_of_a_group_has_no_default() -> None:
    with pytest.raises(TypeError, match="kind"):
        CacheGroupSpec(name="pool", row_bytes=4)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"kind": "cached"}, "cacheable"),
        ({"kind": "cacheable", "rows": 3}, "rows is 3"),
        ({"kind": "replay"}, "fixed number of rows"),
        ({"kind": "replay", "rows": 3, "ratio": 2}, "ratio 1"),
        ({"kind": "replay", "rows": 3, "saved_rows": 4}, "saved_rows is 4"),
    ],
)
def test_groups_are_checked(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        CacheGroupSpec(name="pool", row_bytes=4, **fields)


def test_block_size_is_a_multiple_of_every_ratio() -> None:
    with pytest.raises(ConfigError, match="a multiple of 2, the ratio of group 'pool_2'"):
        CacheLayout.from_sources(**V41, block_size=127)
    pool = CacheGroupSpec(name="pool", kind="cacheable", row_bytes=4)
    ring = CacheGroupSpec(name="ring", kind="replay", row_bytes=4, rows=2)
    with pytest.raises(ConfigError, match="different names"):
        CacheLayout(groups=(pool, pool))
    with pytest.raises(ConfigError, match="at least one cacheable"):
        CacheLayout(groups=(ring,))


def test_fingerprint_names_what_a_block_holds_and_nothing_else() -> None:
    base = CacheLayout.from_sources(**V41)
    same = CacheLayout.from_sources(**{**V41, "ring_rows": 999, "other_window_layers": 0})
    assert base.fingerprint() == same.fingerprint()
    others = [
        CacheLayout.from_sources(**V41, block_size=64),
        CacheLayout.from_sources(**V41, format="bf16"),
        CacheLayout.from_sources(**{**V41, "pool_row_bytes": 1024}),
        CacheLayout.from_sources(**{**V41, "source_ratios": (2, 2, 1, 1)}),
    ]
    assert len({layout.fingerprint() for layout in [base, *others]}) == 5
