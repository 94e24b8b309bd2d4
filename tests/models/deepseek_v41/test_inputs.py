"""Bad input gets typed errors, and the model stays usable."""

from __future__ import annotations

import pytest
import torch

from deepinfer.core.errors import (
    ConfigError,
    InvalidRequest,
    InvariantBroken,
    RequestTooLong,
    ShapeError,
)
from deepinfer.models.deepseek_v41 import DeepseekV41, ForwardBatch, Segment


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([], InvalidRequest, "empty"),
        (torch.zeros(0, dtype=torch.int32), InvalidRequest, "empty"),
        ([5, 160], InvalidRequest, "160.*from 0 to 159"),
        ([-1, 5], InvalidRequest, "-1"),
        ([1.5, 2.0], ShapeError, "float"),
        (torch.ones(3, dtype=torch.bool), ShapeError, "bool"),
        ([[1, 2]], ShapeError, r"\(1, 2\)"),
        (torch.tensor(3), ShapeError, r"\(\)"),
        (["a"], ShapeError, "flat sequence"),
        ([[1], [2, 3]], ShapeError, "flat sequence"),
        (None, ShapeError, "flat sequence"),
        ([1] * 513, RequestTooLong, "513 tokens.*at most 512"),
    ],
)
def test_logits(ids, error, message, small_model) -> None:
    with pytest.raises(error, match=message):
        small_model.logits(ids)


def test_logits_take_any_integer_dtype(small_model) -> None:
    wanted = small_model.logits([3, 4, 5])
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        assert torch.equal(small_model.logits(torch.tensor([3, 4, 5], dtype=dtype)), wanted)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([], "no segment"),
        ([(0, 0, [])], "at least one integer"),
        ([(0, 0, [1.0])], "float64"),
        ([(0, 0, [[1]])], r"\(1, 1\)"),
    ],
)
def test_from_segments(segments, message) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ForwardBatch.from_segments(segments)


@pytest.mark.parametrize(
    ("segments", "error", "message"),
    [
        ([(0, 0, [160])], InvalidRequest, "160"),
        ([(0, 0, [3, -2])], InvalidRequest, "-2"),
        ([(2, 0, [3])], InvariantBroken, "no slot 2"),
        ([(-1, 0, [3])], InvariantBroken, "no slot -1"),
        ([(0, 1, [3])], InvariantBroken, "holds 0 tokens"),
        ([(1, 3, [3])], InvariantBroken, "holds 4 tokens"),
        ([(1, 5, [3])], InvariantBroken, "holds 4 tokens"),
        ([(0, 0, [3]), (0, 0, [3])], InvariantBroken, "holds 1 tokens"),
        ([(0, 0, [3] * 17)], InvariantBroken, "at most 16"),
        ([(0, 0, [3] * 9), (0, 9, [3] * 8)], InvariantBroken, "runs 17 tokens"),
        ([(1, 4, [3] * 16), (1, 20, [3])], InvariantBroken, "runs 17 tokens"),
    ],
)
def test_forward(segments, error, message, small_model) -> None:
    cache = small_model.new_cache(2, 24, 16)
    small_model(ForwardBatch.from_segments([(1, 0, [3, 4, 5, 6])]), cache)
    with pytest.raises(error, match=message):
        small_model(ForwardBatch.from_segments(segments), cache)
    assert cache.lengths == [0, 4]
    out = small_model(ForwardBatch.from_segments([(1, 4, [7])]), cache)
    wanted = small_model.logits([3, 4, 5, 6, 7])[-1]
    assert torch.allclose(small_model.compute_logits(out.hidden)[0], wanted, atol=5e-5)


def test_a_slot_that_is_full(small_model) -> None:
    cache = small_model.new_cache(1, 6, 16)
    small_model(ForwardBatch.from_segments([(0, 0, [3] * 6)]), cache)
    with pytest.raises(RequestTooLong, match="would hold 7 tokens; it has room for 6") as caught:
        small_model(ForwardBatch.from_segments([(0, 6, [3])]), cache)
    assert caught.value.limit_tokens == 6


def test_truncate_and_adopt(small_model) -> None:
    cache = small_model.new_cache(1, 64, 32, max_rollback=4)
    small_model(ForwardBatch.from_segments([(0, 0, list(range(10)))]), cache)
    for length in (5, 11, -1):
        with pytest.raises(InvariantBroken, match=f"cut to {length}"):
            cache.truncate(0, length)
    with pytest.raises(InvariantBroken, match="reset it"):
        cache.adopt_prefix(0, torch.arange(3))
    cache.reset(0)
    with pytest.raises(RequestTooLong, match="65 tokens"):
        cache.adopt_prefix(0, torch.zeros(65, dtype=torch.int64))
    cache.adopt_prefix(0, torch.arange(20))
    wrong = Segment(0, 12, 8, window_start=12, pool_start=19)
    with pytest.raises(InvariantBroken, match="holds 20 tokens"):
        small_model(ForwardBatch(torch.arange(8), (wrong,)), cache)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8), "num_slots is 0"),
        ((1, 0), "max_tokens is 0"),
        ((1, 513), "max_tokens is 513; it must be from 1 to 512"),
        ((1, 8, 0), "max_step_tokens is 0"),
    ],
)
def test_new_cache(arguments, message, small_model) -> None:
    with pytest.raises(ConfigError, match=message):
        small_model.new_cache(*arguments)


def test_rounding_levels(small_config) -> None:
    with pytest.raises(ConfigError, match="'none', 'cache' or 'full'"):
        DeepseekV41(small_config(), rounding="half")


def test_size_bytes(small_model) -> None:
    small, large = small_model.new_cache(1, 64, 16), small_model.new_cache(2, 64, 16)
    config = small_model.config
    rows = 9 * (config.sliding_window + 16) + 32 + 32 + 64
    keys, tails = 32 + 32 + 64, 2 * 18 * 2
    slot, null_row = 4 * 32 * (rows + keys + tails) + 8 * 64, 4 * 32
    assert small.size_bytes == slot + null_row
    assert large.size_bytes == 2 * slot + null_row
