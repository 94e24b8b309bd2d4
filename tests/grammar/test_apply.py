"""Masks on logits."""

from __future__ import annotations

import math

import numpy as np
import pytest

from deepinfer.core.errors import ShapeError
from deepinfer.grammar.apply import apply_bitmask_

torch = pytest.importorskip("torch")


def mask_of(rows: list[set[int]], vocab: int) -> torch.Tensor:
    bits = np.zeros((len(rows), -(-vocab // 32) * 32), dtype=np.uint8)
    for row, ids in enumerate(rows):
        bits[row, sorted(ids)] = 1
    return torch.from_numpy(np.packbits(bits, axis=-1, bitorder="little").view(np.int32).copy())


def kept(logits: torch.Tensor) -> list[set[int]]:
    return [set(torch.nonzero(row != -math.inf).flatten().tolist()) for row in logits]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_only_allowed_logits_stay(dtype):
    logits = torch.arange(200, dtype=dtype).reshape(2, 100)
    out = apply_bitmask_(logits, mask_of([{0, 31, 32, 99}, {5}], 100))
    assert out is logits
    assert kept(logits) == [{0, 31, 32, 99}, {5}]
    assert logits[0, 99] == 99


def test_padding_is_never_allowed():
    # Logits wider than the bits, wider than the vocabulary inside the bits, and both.
    for width, vocab in [(130, None), (100, 70), (140, 70)]:
        mask = torch.full((1, 3), -1, dtype=torch.int32)
        logits = torch.zeros(1, width)
        apply_bitmask_(logits, mask, vocab_size=vocab)
        assert kept(logits) == [set(range(vocab or 96))]


def test_strides_of_mask_and_logits():
    whole = mask_of([{1}, {2}, {3}, {4}, {5}, {6}], 64)
    logits = torch.zeros(6, 64)
    apply_bitmask_(logits[::2], whole[::2])
    assert kept(logits[::2]) == [{1}, {3}, {5}]
    assert (logits[1::2] == 0).all()
    wide = torch.zeros(3, 200)[:, 10:74]
    apply_bitmask_(wide, whole[1::2])
    assert kept(wide) == [{2}, {4}, {6}]
    across = torch.zeros(64, 2).t()
    apply_bitmask_(across, whole[:2])
    assert kept(across) == [{1}, {2}]


def test_chosen_rows():
    logits = torch.zeros(4, 64)
    apply_bitmask_(logits, mask_of([{1}, {2}], 64), rows=[3, 1])
    assert kept(logits)[3] == {1}
    assert kept(logits)[1] == {2}
    assert (logits[[0, 2]] == 0).all()
    single = torch.zeros(64)
    apply_bitmask_(single, mask_of([{7}], 64)[0])
    assert kept(single[None]) == [{7}]


@pytest.mark.parametrize(
    ("logits", "mask", "options"),
    [
        (torch.zeros(2, 64), torch.zeros(1, 2, dtype=torch.int32), {"rows": [2]}),
        (torch.zeros(2, 64), torch.zeros(2, 2, dtype=torch.int32), {"rows": [0, 0]}),
        (torch.zeros(2, 64), torch.zeros(2, 2, dtype=torch.int32), {"rows": [0]}),
        (torch.zeros(1, 64), torch.zeros(2, 2, dtype=torch.int32), {}),
        (torch.zeros(1, 64), torch.zeros(1, 2, dtype=torch.int64), {}),
        (torch.zeros(1, 64, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32), {}),
        (torch.zeros(1, 64), torch.zeros(1, 2, dtype=torch.int32), {"vocab_size": 65}),
        (torch.zeros(1, 1, 64), torch.zeros(1, 2, dtype=torch.int32), {}),
    ],
)
def test_what_does_not_fit(logits, mask, options):
    with pytest.raises(ShapeError):
        apply_bitmask_(logits, mask, **options)
