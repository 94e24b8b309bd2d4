"""Worked examples of every figure that `benchmarks/nano_quality.py` computes."""

from __future__ import annotations

import math

import pytest
from quality import metrics
from quality.metrics import Block, Rate


def test_bits_per_byte() -> None:
    assert metrics.bits_per_byte(8 * math.log(2), 4) == pytest.approx(2.0)


def test_xz_is_that_of_the_command_line() -> None:
    # `printf %02000d 0 | xz -9e | wc -c` gives 84
    assert metrics.xz_bits_per_byte(["0" * 2000]) == pytest.approx(8 * 84 / 2000)
    assert metrics.xz_bits_per_byte(["0" * 500, "0" * 1500]) == metrics.xz_bits_per_byte(
        ["0" * 2000]
    )


def test_wilson_interval() -> None:
    # 8 of 10 with z = 2: centre (0.8 + 0.2) / 1.4, half sqrt(0.016 + 0.01) / 1.4
    low, high = Rate(8, 10).interval(z=2.0)
    assert low == pytest.approx((1.0 - 2 * math.sqrt(0.8 * 0.2 / 10 + 4 / 400)) / 1.4)
    assert high == pytest.approx((1.0 + 2 * math.sqrt(0.8 * 0.2 / 10 + 4 / 400)) / 1.4)
    assert Rate(0, 5).interval()[0] == 0.0
    assert Rate(5, 5).interval()[1] == 1.0
    assert Rate(10, 10).interval()[0] == pytest.approx(0.7225, abs=1e-4)


def test_accepted_drafts() -> None:
    assert metrics.accepted_drafts([1, 2, 3], [1, 2, 3, 4]) == 3
    assert metrics.accepted_drafts([1, 2, 3], [1, 9, 3]) == 1
    assert metrics.accepted_drafts([1, 2, 3], [1, 9]) == 1
    assert metrics.accepted_drafts([1, 2, 3], [1, 2]) is None
    assert metrics.accepted_drafts([1, 2, 3], []) is None


def test_acceptance_by_position() -> None:
    blocks = [Block(accepted, (0.5, 0.5, 0.5)) for accepted in (0, 1, 3, 3)]
    conditional, cumulative = metrics.acceptance(blocks)
    assert conditional == [Rate(3, 4), Rate(2, 3), Rate(2, 2)]
    assert cumulative == [Rate(3, 4), Rate(2, 4), Rate(2, 4)]
    assert metrics.acceptance([Block(0, (0.1, 0.2))])[0] == [Rate(0, 1), None]


def test_outcomes_count_only_blocks_that_got_there() -> None:
    blocks = [Block(0, (0.1, 0.9)), Block(1, (0.2, 0.8)), Block(2, (0.3, 0.7))]
    assert metrics.outcomes_at(blocks, 0) == ([0.1, 0.2, 0.3], [False, True, True])
    assert metrics.outcomes_at(blocks, 1) == ([0.8, 0.7], [False, True])


def test_calibration_error_and_brier_score() -> None:
    sure, kept = [0.95, 0.91, 0.15, 1.0], [True, False, False, True]
    # the top bin holds 0.95, 0.91 and 1.0: |2.86 - 2|; the second 0.15
    assert metrics.expected_calibration_error(sure, kept) == pytest.approx((0.86 + 0.15) / 4)
    assert metrics.brier_score(sure, kept) == pytest.approx((0.05**2 + 0.91**2 + 0.15**2) / 4)


def test_auroc() -> None:
    assert metrics.auroc([0.9, 0.8, 0.1], [True, True, False]) == 1.0
    assert metrics.auroc([0.1, 0.8, 0.9], [True, False, False]) == 0.0
    assert metrics.auroc([0.5, 0.5], [True, False]) == 0.5
    # pairs: 0.7 beats 0.2 and ties with 0.7; 0.4 beats 0.2 only
    assert metrics.auroc([0.7, 0.4, 0.7, 0.2], [True, True, False, False]) == pytest.approx(2.5 / 4)
    assert metrics.auroc([0.7], [True]) is None


def test_json_checks() -> None:
    assert metrics.parse_json('{"a": [1, null]}') == (True, {"a": [1, None]})
    assert metrics.parse_json('{"a": NaN}') == (False, None)
    assert metrics.parse_json('{"a": 1} x') == (False, None)
    assert metrics.is_object_with('{"a": 1, "b": 2}', ["b", "a"])
    assert not metrics.is_object_with('{"a": 1, "b": 2}', ["a"])
    assert not metrics.is_object_with('["a"]', ["a"])


def test_functions() -> None:
    start = 'def f(x):\n    """Does it."""'
    whole = start + "\n    return (\n        x\n    )\n"
    found = metrics.function_source(
        start, "\n    return (\n        x\n    )\n\n\ny = 1\n", ended=False
    )
    assert found == whole
    assert metrics.is_function(whole, "f")
    assert not metrics.is_function(whole, "g")
    assert metrics.function_source(start, "\n    return x", ended=False) is None
    assert metrics.function_source(start, "\n    return x", ended=True) is not None
    assert metrics.function_source(start, "\n    a = 1\n# so\n    return a\nb", ended=False) == (
        start + "\n    a = 1\n# so\n    return a\n"
    )
    assert not metrics.is_function(start + "\n", "f")
    assert not metrics.is_function(start + "\n    return (\n", "f")
    assert metrics.is_function("def f(x):\n    return x\n", "f")
