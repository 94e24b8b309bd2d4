"""The benchmark of replays on a checkpoint of random weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import replay
import torch

from deepinfer.models import load_model

HIT, BEHIND = 256, 40


@pytest.fixture(scope="module")
def bench(checkpoint: Path) -> replay.Bench:
    torch.set_num_threads(1)
    return replay.Bench(load_model(checkpoint, progress=False).set_deterministic(), HIT, BEHIND)


@pytest.fixture(scope="module")
def ids(bench: replay.Bench) -> list[int]:
    vocab = bench.model.config.vocab_size
    generator = torch.Generator().manual_seed(1)
    return torch.randint(5, vocab, (HIT + BEHIND + 1,), generator=generator).tolist()


@torch.inference_mode()
def test_every_case(bench: replay.Bench, ids: list[int]) -> None:
    """Exact cases give the numbers of a full run, and narrowed ones those of each other."""
    cold = bench.cold(ids)
    assert cold.shape == (BEHIND,)
    wanted = torch.nn.functional.cross_entropy(
        bench.model.logits(ids[:-1])[HIT:], torch.tensor(ids[HIT + 1 :]), reduction="none"
    )
    # A value at a rounding edge may land in the next bin in the plain forward.
    assert np.median(np.abs(cold - wanted.numpy())) < 1e-3
    plan = replay.cases(bench.model, HIT, [4, 20])
    assert len({(case.name, case.prompt_behind) for case in plan}) == len(plan) == 11
    nats = {(case.name, case.prompt_behind): bench.warm(ids, case) for case in plan}
    assert np.array_equal(nats["replay, exact", None], cold)
    assert np.abs(nats["replay, one window", None] - cold).max() > 1e-3
    narrow = nats["narrowed, replay, exact", 20]
    assert np.isnan(narrow[: 20 - 16]).all()
    assert np.isfinite(narrow[20 - 16 :]).all()
    restored = nats["narrowed, restored windows", 20]
    assert np.array_equal(narrow, restored, equal_nan=True)
    assert np.nanmax(np.abs(narrow - cold)) > 1e-3
    for case in plan:
        found = replay.lines(
            case, HIT, nats[case.name, case.prompt_behind][None], cold[None], np.ones((1, BEHIND))
        )
        assert found[-1]["distance_from"] == 0
        assert found[-1]["tokens"] == sum(line["tokens"] for line in found[:-1])
    assert all(0 <= kept <= 5 for kept in bench.accepted(ids, plan[0], 6))


def test_lines() -> None:
    case = replay.Case(name="x", replay=4, prompt_behind=3)
    base = np.full((2, 10), 1.0)
    nats = base + np.arange(10) * np.log(2)
    nats[:, :1] = np.nan
    first, *_, whole = replay.lines(case, 8, nats, base, np.full((2, 10), 2.0))
    # Distances begin at the last prompt token, 2 behind the hit; a token is 2 bytes.
    assert (first["distance_from"], first["distance_to"], first["tokens"]) == (0, 4, 8)
    assert first["added"] == pytest.approx((2 + 3 + 4 + 5) / 4 / 2)
    assert whole["tokens"] == 16
