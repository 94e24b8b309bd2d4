from __future__ import annotations

import math

import pytest
import torch

from deepinfer.core.errors import InvalidRequest, ShapeError
from deepinfer.sampling import penalties


def test_presence_and_frequency_look_at_the_output_only():
    row = torch.zeros(5)
    penalties.apply_penalties(
        row, [1, 3, 3], prompt_ids=torch.tensor([0]), presence_penalty=0.5, frequency_penalty=0.25
    )
    assert row.tolist() == [0.0, -0.75, 0.0, -1.0, 0.0]


def test_repetition_divides_positive_and_multiplies_negative_logits_once():
    row = torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0])
    penalties.apply_penalties(
        row, [2, 2, 0], prompt_ids=torch.tensor([0, 1]), repetition_penalty=2.0
    )
    assert row.tolist() == [1.0, -4.0, 1.0, -2.0, 2.0]


def test_repetition_comes_before_the_other_two():
    row = torch.tensor([2.0])
    penalties.apply_penalties(row, [0], repetition_penalty=2.0, presence_penalty=0.5)
    assert row.tolist() == [0.5]


def test_no_history_changes_nothing():
    row = torch.tensor([1.0, -1.0])
    penalties.apply_penalties(row, [], presence_penalty=1.0, repetition_penalty=3.0)
    assert row.tolist() == [1.0, -1.0]


def test_ids_past_the_vocabulary_are_left_out():
    row = torch.tensor([1.0, 1.0])
    penalties.apply_penalties(row, [1, 99, -1], presence_penalty=1.0)
    assert row.tolist() == [1.0, 0.0]
    assert penalties.unique_ids([3, 1, 3, 99, -1], 10, "cpu").tolist() == [1, 3]


def test_masked_tokens_stay_masked():
    row = torch.tensor([-math.inf, 1.0])
    penalties.apply_penalties(row, [0], repetition_penalty=1.5, frequency_penalty=-2.0)
    assert row.tolist() == [-math.inf, 1.0]


def test_logit_bias():
    row = torch.zeros(4)
    penalties.apply_logit_bias(row, {2: 1.5, 0: -100.0})
    assert row.tolist() == [-100.0, 0.0, 1.5, 0.0]
    penalties.apply_logit_bias(row, {})
    with pytest.raises(InvalidRequest, match="token id 4; the model's ids go from 0 to 3"):
        penalties.apply_logit_bias(row, {1: 1.0, 4: 1.0})


def test_allowed_ids():
    rows = torch.zeros(2, 4)
    penalties.apply_allowed_ids(rows, [1, 3, 9])
    assert rows.tolist() == [[-math.inf, 0.0, -math.inf, 0.0]] * 2


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 70])
def test_token_bitmask(vocab):
    generator = torch.Generator().manual_seed(vocab)
    allowed = torch.rand(3, vocab, generator=generator) < 0.5
    words = (vocab + 31) // 32
    mask = torch.zeros(3, words, dtype=torch.int64)
    for row in range(3):
        for token in range(vocab):
            if allowed[row, token]:
                mask[row, token >> 5] |= 1 << (token & 31)
    mask = torch.where(mask >= 2**31, mask - 2**32, mask).to(torch.int32)
    logits = torch.randn(3, vocab, generator=generator)
    want = logits.masked_fill(~allowed, -math.inf)
    penalties.apply_token_bitmask(logits, mask)
    assert torch.equal(logits, want)


def test_bitmask_of_the_wrong_shape_is_refused():
    logits = torch.zeros(2, 40)
    with pytest.raises(ShapeError, match="one bit a token"):
        penalties.apply_token_bitmask(logits, torch.zeros(2, 1, dtype=torch.int32))
    with pytest.raises(ShapeError, match="int64"):
        penalties.apply_token_bitmask(logits, torch.zeros(2, 2, dtype=torch.int64))
