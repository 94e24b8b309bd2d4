"""Drafts drawn with the sampler's noise."""

from __future__ import annotations

import pytest
import torch

from deepinfer.core import Request, SamplingParams
from deepinfer.core.errors import ShapeError
from deepinfer.core.protocols import SampleRows
from deepinfer.sampling import CoupledDraw, Sampler


def sampled(
    logits: torch.Tensor, temperatures: list[float], seeds: list[int], positions: list[int]
):
    requests = tuple(
        Request(rid=str(i), prompt_token_ids=(1,), params=SamplingParams(temperature=t, seed=s))
        for i, (t, s) in enumerate(zip(temperatures, seeds, strict=True))
    )
    rows = SampleRows(requests=requests, positions=tuple(positions), seeds=tuple(seeds))
    return Sampler()(logits, rows).token_ids


def test_same_law_gives_the_sampler_s_token() -> None:
    logits = torch.randn(60, 50, generator=torch.Generator().manual_seed(0)) * 2
    temperatures = [0.0, 0.5, 1.0, 1.7] * 15
    seeds = [i * 2**60 % 2**64 + i for i in range(60)]
    positions = [3 * i for i in range(60)]
    draw = CoupledDraw.of(temperatures, seeds)
    drawn = draw(logits, torch.tensor(positions))
    assert torch.equal(drawn, sampled(logits, temperatures, seeds, positions))
    assert not torch.equal(drawn, draw(logits, torch.tensor(positions) + 1))


def test_agreement_is_that_of_coupling() -> None:
    """At least (1 - d) / (1 + d), and well above that of independent draws."""
    generator = torch.Generator().manual_seed(1)
    p = torch.randn(1, 30, generator=generator)
    q = p + 0.5 * torch.randn(1, 30, generator=generator)
    count = 4000
    positions = list(range(count))
    target = sampled(p.expand(count, -1), [1.0] * count, [7] * count, positions)
    draft = CoupledDraw.of([1.0] * count, [7] * count)(q.expand(count, -1), torch.tensor(positions))
    laws = torch.softmax(p[0], 0), torch.softmax(q[0], 0)
    distance = float((laws[0] - laws[1]).abs().sum() / 2)
    agreed = float((target == draft).double().mean())
    assert (1 - distance) / (1 + distance) - 0.02 < agreed < 1 - distance + 0.02
    assert agreed > float((laws[0] * laws[1]).sum()) + 0.3
    counts = torch.bincount(draft, minlength=30) / count
    assert float((counts - laws[1]).abs().max()) < 0.03  # each alone follows its own law


def test_a_seed_a_temperature() -> None:
    with pytest.raises(ShapeError, match="one of each a row"):
        CoupledDraw.of([1.0, 1.0], [3])
