"""The benchmark of drafts behind a replay, on a checkpoint of random weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import replay_drafts
import torch

from deepinfer.models import load_model

HIT, TOKENS = 256, 12


def test_an_exact_replay_drafts_like_a_cold_run(checkpoint: Path) -> None:
    torch.set_num_threads(1)
    model = load_model(checkpoint, progress=False)
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(5, model.config.vocab_size, (3000,), generator=generator).tolist()
    prompts = replay_drafts.pieces([[0, *text]], HIT, 4)
    assert [len(prompt) - HIT for prompt in prompts] == list(replay_drafts.BEHIND)
    assert len({tuple(prompt[1:9]) for prompt in prompts}) == 4
    cases = replay_drafts.measure(model, prompts, HIT, TOKENS, batch=2)
    for found in cases.values():
        assert all(len(one.token_ids) == TOKENS for one in found)
        assert all(one.starts and len(one.kept) == len(one.starts) for one in found)
        for one in found:  # each block brings its accepted drafts and one token more
            assert one.starts[0] == 1
            grown = np.diff(one.starts).tolist()
            assert grown == [kept + 1 for kept in one.kept[:-1]]
    assert {one.replayed for one in cases["bounded"]} == {model.config.sliding_window}
    assert all(one.replayed > model.config.sliding_window for one in cases["exact"])
    cold, exact = cases["cold"], cases["exact"]
    assert [one.token_ids for one in exact] == [one.token_ids for one in cold]
    assert [one.kept for one in exact] == [one.kept for one in cold]
    lost = [line for line in replay_drafts.lines("exact", cold, exact) if "low" in line]
    assert [(line["low"], line["value"], line["high"]) for line in lost] == [(0, 0, 0)] * 2


def test_a_loss_is_a_share_with_an_interval() -> None:
    cold = np.array([[10, 20], [10, 10], [20, 30]] * 10)
    warm = cold * [1, 1] - [0, 1]
    found = replay_drafts.loss(cold, warm)
    assert found["value"] == pytest.approx(1 - 570 / 600, abs=1e-5)
    assert 0 < found["low"] < found["value"] < found["high"]


def test_the_same_text_ends_at_the_first_difference() -> None:
    assert replay_drafts.common_length([1, 2, 3], [1, 2, 4]) == 2
    assert replay_drafts.common_length([1, 2], [1, 2, 3]) == 2
    one = replay_drafts.Continuation(10, starts=[1, 4, 9], kept=[2, 4, 0])
    assert one.blocks(4) == (1, 2)
    assert one.blocks(100, 14, 20) == (2, 4)
