from __future__ import annotations

import pytest

from deepinfer.cache import ReplayPolicy
from deepinfer.core.errors import ConfigError


def test_bounded_replays_one_window_and_takes_nothing_shorter() -> None:
    policy = ReplayPolicy(mode="bounded", window=128, layers=20)
    assert policy.start(128, 4096) is None
    assert policy.start(256, 4096) == (128, True)
    assert policy.start(4096, 4097) == (3968, True)


def test_exact_reaches_one_window_less_one_back_per_layer() -> None:
    policy = ReplayPolicy(mode="exact", window=128, layers=20)
    assert policy.exact_tokens == 2541
    assert policy.start(8192, 100_000) == (8192 - 2541, False)
    # The layers that run for the last window of the prompt only need exact input from N - W on.
    assert policy.start(8192, 8200) == (8200 - 128 - 2541, False)
    wide = ReplayPolicy(mode="exact", window=128, layers=40, narrowed=False)
    assert wide.start(16_384, 16_385) == (16_384 - 40 * 127 - 1, False)


def test_exact_is_taken_only_from_twice_its_cost() -> None:
    policy = ReplayPolicy(mode="exact", window=4, layers=2, narrowed=False)
    assert policy.exact_tokens == 7
    assert policy.start(13, 100) is None
    assert policy.start(14, 100) == (7, False)
    assert ReplayPolicy(mode="exact", window=4, layers=2).start(14, 14) is None


def test_off_and_no_window() -> None:
    assert ReplayPolicy(mode="off", window=4).start(100, 200) is None
    for mode in ("bounded", "exact", "off"):
        assert ReplayPolicy(mode=mode).start(4, 5) == (4, False)
        assert ReplayPolicy(mode=mode).restored(4, 5) is False


@pytest.mark.parametrize(
    ("mode", "hit", "expected"),
    [
        ("exact", 872, False),
        ("exact", 873, None),
        ("off", 873, None),
        ("bounded", 872, False),
        ("bounded", 873, None),
    ],
)
def test_stored_rows_are_exact_until_the_last_window(
    mode: str, hit: int, expected: bool | None
) -> None:
    policy = ReplayPolicy(mode=mode, window=128, layers=20)
    assert policy.restored(hit, 1000) is expected
    assert ReplayPolicy(mode=mode, window=128, narrowed=False).restored(hit, 1000) is False


def test_stored_rows_of_some_layers_restore_nothing_where_all_are_needed() -> None:
    for stored, expected in ((20, None), (40, False), (None, False)):
        policy = ReplayPolicy(window=128, layers=40, narrowed=False, stored_layers=stored)
        assert policy.restored(512, 4096) is expected


def test_fields_are_checked() -> None:
    with pytest.raises(ConfigError, match="bounded"):
        ReplayPolicy(mode="bound")
    with pytest.raises(ConfigError, match="layers"):
        ReplayPolicy(layers=0)
    with pytest.raises(ConfigError, match="stored_layers"):
        ReplayPolicy(layers=2, stored_layers=3)
