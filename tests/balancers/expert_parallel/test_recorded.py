"""Loads recorded from the router of the embedded checkpoint: plans of one half of the steps, judged by the other half."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deepinfer.balancers.expert_parallel import (
    Placement,
    TokenSplitter,
    place_experts,
    realised_imbalance,
    slot_imbalance,
)

RECORDED = Path(__file__).resolve().parents[2] / "data" / "expert_loads" / "nano.npz"


def steps_of(name: str, ranks: int) -> np.ndarray:
    """Counts, shape [steps, layers, experts]; in prefill each rank runs 512 tokens of a sequence of its own."""
    counts = np.load(RECORDED)[name].astype(np.int64)
    if name == "decode":
        return counts
    return counts.reshape(-1, ranks, *counts.shape[1:]).sum(1).reshape(-1, *counts.shape[2:])


def test_the_file_holds_what_its_readme_says() -> None:
    counts = np.load(RECORDED)
    assert counts["prefill"].shape == (48, 4, 12, 16)
    assert counts["decode"].shape == (68, 12, 16)
    assert (counts["prefill"].sum(-1) == 4 * 512).all()
    assert (counts["decode"].sum(-1) == 4 * 30 * 48).all()


@pytest.mark.parametrize(
    ("name", "gpus", "published"),
    [("prefill", 4, 1.074), ("prefill", 2, 1.045), ("decode", 8, 1.090)],
)
def test_realised_balance_on_real_text(name: str, gpus: int, published: float) -> None:
    """Below what was published for deployments of the large model, with one further slot a GPU."""
    steps = steps_of(name, gpus)
    window, after = steps[: len(steps) // 2].sum(0), steps[len(steps) // 2 :]
    in_order = Placement.in_order(12, 16, gpus)
    phy2log = place_experts(window, 16 + gpus, gpus, for_splitter=True)
    splitter = TokenSplitter(Placement(phy2log, 16, gpus))
    split = np.mean([slot_imbalance(splitter.split(counts), gpus) for counts in after])
    equal = realised_imbalance(after, phy2log, gpus).mean()
    nothing = realised_imbalance(after, in_order.phy2log, gpus).mean()
    assert split <= min(published, equal) - 0.01
    assert equal < nothing
