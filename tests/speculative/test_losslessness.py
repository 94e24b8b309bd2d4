"""The exact law of what is emitted, for each rule and schedule: equal to the target's where it is legal, and caught
where it is not."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from deepinfer.speculative import (
    LiveLengths,
    StepCostModel,
    VerificationScheduler,
    prefix_survival,
)
from deepinfer.speculative.laws import residual_law
from deepinfer.speculative.reference import Law, Schedule, emitted_law, plain_law


def random_law(vocab: int, seed: int, *, zeros: bool = False) -> Law:
    """A law for every prefix, the same each time."""

    def law(prefix: tuple[int, ...]) -> Tensor:
        number = seed
        for token in prefix:
            number = number * 31 + token + 1
        generator = torch.Generator().manual_seed(number)
        weights = torch.rand(vocab, generator=generator, dtype=torch.float64) ** 2
        if zeros:
            weights[torch.rand(vocab, generator=generator) < 0.3] = 0.0
            weights[number % vocab] += 0.1
        return weights / weights.sum()

    return law


def confidence(drafts: tuple[int, ...]) -> list[float]:
    """Of draft k from those before it, as a head with a Markov feature gives it."""
    return [
        0.3 + 0.69 * ((sum((i + 2) * t for i, t in enumerate(drafts[:k])) * 7 + k + 2) % 5) / 4
        for k in range(len(drafts))
    ]


COST = StepCostModel.additive(1.0, 0.25)
LEGAL: dict[str, Schedule] = {
    "none": lambda drafts: 0,
    "all": lambda drafts: len(drafts),
    "one": lambda drafts: min(1, len(drafts)),
    "threshold on what is known before the draw": lambda drafts: _static(drafts),
    "threshold with little room": lambda drafts: _static_in_room(drafts),
    "early stop": lambda drafts: _planned(drafts, "early_stop"),
    "lagged global": lambda drafts: _planned(drafts, "global"),
    "live lengths, early stop": lambda drafts: _live(drafts, "early_stop"),
    "live lengths, threshold": lambda drafts: _live(drafts, "static"),
}


def _static(drafts: tuple[int, ...]) -> int:
    scheduler = VerificationScheduler(COST, search="static", threshold=0.6)
    return int(scheduler.plan(prefix_survival([confidence(drafts)])).lengths[0])


def _static_in_room(drafts: tuple[int, ...]) -> int:
    """What two requests want may be more than fits, depending on drafts behind the one that is decided about."""
    scheduler = VerificationScheduler(COST, search="static", threshold=0.6)
    own = confidence(drafts)
    live = prefix_survival([own, [0.55, 0.1, 0.1][: len(own)]])
    return int(scheduler.plan(live, capacity=4).lengths[0])


def _planned(drafts: tuple[int, ...], search: str) -> int:
    """Beside another request, so that drafts decide how a budget is shared out."""
    live = prefix_survival([confidence(drafts), [0.5, 0.95, 0.9][: len(drafts)]])
    lagged = prefix_survival([[0.9, 0.7, 0.5][: len(drafts)], [0.2, 0.1, 0.1][: len(drafts)]])
    return int(VerificationScheduler(COST, search=search).plan(live, lagged=lagged).lengths[0])


def _live(drafts: tuple[int, ...], search: str) -> int:
    """Rows at a price at which whole blocks look best for some drafts."""
    cost = StepCostModel.additive(1.0, 0.3)
    policy = LiveLengths(VerificationScheduler(cost, search=search, threshold=0.6))
    own, other = confidence(drafts), [0.5, 0.95, 0.9][: len(drafts)]
    return policy.trim([own, other], [len(own)] * 2)[0]


def distance(one: dict[tuple[int, ...], float], two: dict[tuple[int, ...], float]) -> float:
    return max(abs(one.get(k, 0.0) - two.get(k, 0.0)) for k in {*one, *two})


@pytest.mark.parametrize("name", sorted(LEGAL))
@pytest.mark.parametrize(("vocab", "drafts"), [(2, 3), (3, 2), (4, 2), (5, 1)])
@pytest.mark.parametrize("zeros", [False, True])
def test_standard_rule_is_lossless(name: str, vocab: int, drafts: int, zeros: bool) -> None:
    for seed in range(3):
        target, draft = (
            random_law(vocab, seed, zeros=zeros),
            random_law(vocab, 100 + seed, zeros=zeros),
        )
        found = emitted_law(target, draft, drafts, LEGAL[name])
        assert distance(found, plain_law(target, drafts + 1)) < 1e-12


@pytest.mark.parametrize("length", [0, 1, 2, 3])
@pytest.mark.parametrize("zeros", [False, True])
def test_block_rule_is_lossless_with_lengths_fixed_before(length: int, zeros: bool) -> None:
    for vocab, drafts in ((2, 3), (3, 2), (4, 2)):
        for seed in range(3):
            target, draft = (
                random_law(vocab, seed, zeros=zeros),
                random_law(vocab, 50 + seed, zeros=zeros),
            )
            found = emitted_law(target, draft, drafts, lambda d: min(length, len(d)), rule="block")
            assert distance(found, plain_law(target, drafts + 1)) < 1e-12


def test_block_keeps_more() -> None:
    """Expected accepted drafts of both rules, from the same enumeration."""
    target, draft = random_law(3, 7), random_law(3, 8)
    from deepinfer.speculative.reference import _outcomes

    means = {"standard": 0.0, "block": 0.0}
    for drafts in itertools.product(range(3), repeat=2):
        chance = float(draft(())[drafts[0]] * draft(drafts[:1])[drafts[1]])
        for rule in means:
            means[rule] += chance * sum(k * s for k, s, _ in _outcomes(target, draft, drafts, rule))
    assert means["block"] > means["standard"] + 1e-3


def fixed(*weights: float) -> Law:
    return lambda prefix: torch.tensor(weights, dtype=torch.float64)


def test_retrospective_search_is_caught() -> None:
    """Appendix A of the DSpark paper: the first token's law becomes 0.85 / 0.15 instead of 0.70 / 0.30."""
    cost = StepCostModel([1, 2, 3], [1.0, 2.0, 1 / 0.45])

    def retrospective(drafts: tuple[int, ...]) -> int:
        survival = prefix_survival([[0.8, 0.9 if drafts[0] == 0 else 0.0]])
        return int(VerificationScheduler(cost).plan(survival, invariant=[True]).lengths[0])

    found = emitted_law(fixed(0.7, 0.3), fixed(0.5, 0.5), 2, retrospective)
    first = sum(p for tokens, p in found.items() if tokens[0] == 0)
    assert first == pytest.approx(0.85, abs=1e-12)
    early = VerificationScheduler(cost, search="early_stop")
    legal = emitted_law(
        fixed(0.7, 0.3),
        fixed(0.5, 0.5),
        2,
        lambda d: int(early.plan(prefix_survival([[0.8, 0.9 if d[0] == 0 else 0.0]])).lengths[0]),
    )
    assert sum(p for tokens, p in legal.items() if tokens[0] == 0) == pytest.approx(0.7, abs=1e-12)


def test_dropping_a_draft_for_its_own_probability_is_caught() -> None:
    p, q = (0.5, 0.3, 0.2), (0.6, 0.3, 0.1)
    found = emitted_law(fixed(*p), fixed(*q), 1, lambda drafts: int(q[drafts[0]] >= 0.2))
    first = [sum(v for k, v in found.items() if k[0] == token) for token in range(3)]
    assert first == pytest.approx([0.55, 0.33, 0.12], abs=1e-12)


def test_dropping_a_draft_that_a_grammar_refuses_is_caught() -> None:
    """Right is to mask the draft before it draws, or to reject with the residual of its real law."""
    p, q = (0.6, 0.4, 0.0), (0.3, 0.3, 0.4)
    found = emitted_law(fixed(*p), fixed(*q), 1, lambda drafts: int(drafts[0] != 2))
    first = [sum(v for k, v in found.items() if k[0] == token) for token in range(3)]
    assert first == pytest.approx([0.54, 0.46, 0.0], abs=1e-12)
    kept = emitted_law(fixed(*p), fixed(*q), 1, lambda drafts: 1)
    first = [sum(v for k, v in kept.items() if k[0] == token) for token in range(3)]
    assert first == pytest.approx(list(p), abs=1e-12)


def test_a_greedy_draft_judged_by_a_soft_law_is_caught() -> None:
    p = torch.tensor([0.05, 0.35, 0.3, 0.2, 0.1], dtype=torch.float64)
    q = torch.tensor([0.3, 0.1, 0.15, 0.05, 0.4], dtype=torch.float64)
    accept = min(1.0, float(p[4] / q[4]))  # the draft is always token 4
    law = (1 - accept) * residual_law(p, q)
    law[4] += accept
    assert not torch.allclose(law, p, atol=1e-3)
    one_hot = fixed(0.0, 0.0, 0.0, 0.0, 1.0)
    found = emitted_law(fixed(*p.tolist()), one_hot, 1, lambda drafts: 1)
    first = [sum(v for k, v in found.items() if k[0] == token) for token in range(5)]
    assert first == pytest.approx(p.tolist(), abs=1e-12)
