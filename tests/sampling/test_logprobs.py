from __future__ import annotations

import math

import pytest
import torch

from deepinfer.core.errors import ShapeError
from deepinfer.sampling import logprobs


def test_values_ranks_and_top_equal_log_softmax():
    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0)) * 4
    ids = [0, 999, 5, 17, 300]
    entries = logprobs.token_logprobs(logits, ids, [0, 1, 3, 1000, 2000])
    want = torch.log_softmax(logits.double(), dim=-1)
    for row, (entry, token) in enumerate(zip(entries, ids, strict=True)):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(want[row, token]), abs=1e-7)
        order = sorted(range(1000), key=lambda i: (-float(logits[row, i]), i))
        assert entry.rank == order.index(token) + 1
        count = [0, 1, 3, 1000, 1000][row]
        assert [t for t, _ in entry.top] == order[:count]
        for other, value in entry.top:
            assert value == pytest.approx(float(want[row, other]), abs=1e-7)


def test_ties_rank_by_id_and_masked_tokens_are_left_out():
    logits = torch.tensor([[1.0, 2.0, 2.0, -math.inf]])
    (entry,) = logprobs.token_logprobs(logits, [2], [4])
    assert entry.rank == 2
    assert [t for t, _ in entry.top] == [1, 2, 0]
    (masked,) = logprobs.token_logprobs(logits, [3], [0])
    assert masked.logprob == -math.inf
    assert masked.rank == 4


def test_a_sure_token_has_logprob_zero_and_never_above():
    (entry,) = logprobs.token_logprobs(torch.tensor([[100.0, -100.0]]), [0], [1])
    assert entry.logprob == 0.0
    assert entry.top == ((0, 0.0),)


def test_rows_do_not_depend_on_the_batch():
    logits = torch.randn(9, 40_000, generator=torch.Generator().manual_seed(1)) * 3
    whole = logprobs.log_partition(logits)
    for row in range(9):
        assert torch.equal(logprobs.log_partition(logits[row : row + 1])[0], whole[row])


def test_prompt_logprobs_in_chunks(monkeypatch):
    logits = torch.randn(10, 50, generator=torch.Generator().manual_seed(2))
    ids = list(range(10))
    whole = logprobs.prompt_logprobs(logits, ids, 2)
    monkeypatch.setitem(logprobs._CHUNK_ELEMENTS, "cpu", 120)
    assert logprobs.prompt_logprobs(logits, ids, 2) == whole
    assert len(whole) == 10
    assert logprobs.prompt_logprobs(logits[:0], [], 2) == ()


def test_row_counts_must_agree():
    with pytest.raises(ShapeError, match="one of each"):
        logprobs.token_logprobs(torch.zeros(2, 3), [1], [0, 0])
