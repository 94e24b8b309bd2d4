"""The rejection sampler: golden values, laws by counting, broken rows, and independence of the batch."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer.core.errors import ConfigError, ShapeError
from deepinfer.speculative.laws import one_hot_law, residual_law, standard_acceptance
from deepinfer.speculative.noise import CounterNoise, DrawStream
from deepinfer.speculative.rejection import RULES, RejectionSampler

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "deepspec" / "golden.json").read_text())


@pytest.mark.parametrize("case", range(len(GOLDEN["rejection"])))
def test_golden(case: int) -> None:
    values = GOLDEN["rejection"][case]
    temperature = values["temperature"]
    target, draft = (
        torch.tensor(values[f"{n}_logits"], dtype=torch.float64) for n in ("target", "draft")
    )
    tokens = torch.tensor(values["draft_tokens"])
    if temperature == 0:
        p = one_hot_law(target.argmax(-1), target.shape[-1], torch.float64)
        q = one_hot_law(draft.argmax(-1), target.shape[-1], torch.float64)
    else:
        p, q = torch.softmax(target / temperature, -1), torch.softmax(draft / temperature, -1)
    wanted = torch.tensor(values["accept_prob"], dtype=torch.float64)
    assert torch.allclose(standard_acceptance(p, q, tokens), wanted, atol=1e-6)
    residual = torch.tensor(values["residual"], dtype=torch.float64)
    possible = residual.sum(-1) > 0.5
    assert torch.allclose(residual_law(p, q)[possible], residual[possible], atol=1e-6)


def logits(*weights: float) -> Tensor:
    return torch.log(torch.tensor(weights, dtype=torch.float64))


def counts(
    rule: str, p: Tensor, q: Tensor, *, greedy: bool = False, trials: int = 20_000
) -> Tensor:
    """Shares of the first emitted token over many seeds, drafts drawn under the rule."""
    noise = CounterNoise(range(trials))
    rows, where = list(range(trials)), [5] * trials
    stream = DrawStream.SHARED if rule == "coupled" else DrawStream.DRAFT
    drawn = torch.from_numpy(noise.gumbel(rows, where, p.numel(), stream))
    tokens = (torch.log_softmax(q, -1) + drawn).argmax(-1)[:, None]
    if greedy:
        tokens = torch.full_like(tokens, int(q.argmax()))
    found = RejectionSampler(rule)(
        p.repeat(2 * trials, 1),
        tokens,
        torch.ones(trials, dtype=torch.int64),
        where,
        draft_logits=None if greedy else q.expand(trials, 1, -1),
        noise=noise,
    )
    return torch.bincount(found.tokens[:, 0], minlength=p.numel()) / trials


@pytest.mark.parametrize("rule", ["standard", "block", "coupled"])
@pytest.mark.parametrize("greedy", [False, True])
def test_first_token_has_the_targets_law(rule: str, greedy: bool) -> None:
    """Draft noise shared with the residual gives (.050, .366, .271, .215, .100) here."""
    p, q = logits(0.05, 0.35, 0.3, 0.2, 0.1), logits(0.3, 0.1, 0.15, 0.05, 0.4)
    found = counts(rule, p, q, greedy=greedy)
    assert torch.allclose(found.double(), p.exp(), atol=4 * 0.5 / math.sqrt(20_000))


def fixed_rounds(rule: str, sizes: list[int], trials: int) -> Tensor:
    """First three tokens over many seeds, of blocks of these sizes; drafts are drawn anew in each round."""
    p, q = logits(0.8, 0.2), logits(0.5, 0.5)
    sampler, noise = RejectionSampler(rule), CounterNoise(range(trials))
    generator = torch.Generator().manual_seed(0)
    out = torch.full((trials, 12), -1)
    done = torch.zeros(trials, dtype=torch.int64)
    for size in sizes:
        found = sampler(
            p.expand(trials * (size + 1), 2),
            torch.randint(0, 2, (trials, size), generator=generator),
            torch.full((trials,), size),
            done.tolist(),
            draft_logits=q.expand(trials, size, 2),
            noise=noise,
        )
        at = done[:, None] + torch.arange(size + 1)
        out.scatter_(1, at, found.tokens)
        done += found.num_emitted
    return out[:, :3]


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_law_over_several_rounds(rule: str) -> None:
    """Numbers that had a say in one block must not come back in the next: with them the second token is 0.827 here."""
    trials = 10_000
    tokens = fixed_rounds(rule, [2, 1, 1], trials)
    assert torch.allclose((tokens == 0).double().mean(0), torch.tensor(0.8).double(), atol=0.016)


@pytest.mark.parametrize("rule", ["standard", "block"])
@pytest.mark.parametrize("chosen", [0, 2])
def test_a_draft_that_its_law_cannot_give_counts_as_chosen(rule: str, chosen: int) -> None:
    """Accepted with p(x), not surely: otherwise a drafter that leaves its law changes the output's."""
    p, q = logits(0.5, 0.3, 0.2), torch.tensor([0.0, 0.0, 0.0], dtype=torch.float64)
    q[chosen] = -torch.inf
    trials = 4_000
    found = RejectionSampler(rule)(
        p.repeat(3 * trials, 1),
        torch.full((trials, 2), chosen),
        torch.full((trials,), 2),
        [0] * trials,
        draft_logits=q.expand(trials, 2, 3),
        noise=CounterNoise(range(trials)),
    )
    law = torch.bincount(found.tokens[:, 0], minlength=3) / trials
    assert torch.allclose(law.double(), p.exp(), atol=4 * 0.5 / math.sqrt(trials))


def test_streams_are_disjoint() -> None:
    noise = CounterNoise([1, 2])
    seen = Counter(
        float(v)
        for stream in DrawStream
        for row in (0, 1)
        for position in (0, 1, 2**31)
        for v in noise.gumbel([row], [position], 50, stream)[0]
    )
    assert max(seen.values()) == 1
    assert noise.uniform([0], [3], DrawStream.ACCEPT) != noise.uniform([0], [3], DrawStream.DRAFT)
    again = CounterNoise([1, 2]).gumbel([1, 0], [7, 9], 4, DrawStream.BONUS)
    assert np.array_equal(again[0], noise.gumbel([1], [7], 4, DrawStream.BONUS)[0])


def block(requests: int, drafts: int, vocab: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(requests, drafts + 1, vocab, generator=generator)
    draft = target[:, :drafts] + 0.7 * torch.randn(requests, drafts, vocab, generator=generator)
    return target, draft, draft.argmax(-1)


def flat(target: Tensor, lengths: Tensor) -> Tensor:
    return torch.cat([target[r, : n + 1] for r, n in enumerate(lengths.tolist())])


def test_greedy_by_hand() -> None:
    target = torch.zeros(6, 4)
    for row, token in enumerate((1, 2, 3, 0, 1, 2)):
        target[row, token] = 1.0
    drafts = torch.tensor([[1, 2, 9 % 4], [0, 3, 3]])
    found = RejectionSampler("greedy")(target, drafts, torch.tensor([2, 2]), [0, 0])
    assert found.tokens.tolist() == [[1, 2, 3, -1], [0, 1, -1, -1]]
    assert found.num_accepted.tolist() == [2, 1]
    assert found.num_emitted.tolist() == [3, 2]
    assert found.next_tokens.tolist() == [3, 1]


def test_greedy_ties_go_to_the_lowest_id() -> None:
    found = RejectionSampler("greedy")(
        torch.ones(2, 5), torch.tensor([[0]]), torch.tensor([1]), [0]
    )
    assert found.tokens.tolist() == [[0, 0]]


def test_each_row_judges_the_draft_behind_it() -> None:
    """Rows of other requests, or shifted by one, would accept nothing here."""
    target, _, _ = block(5, 3, 11, 1)
    drafts = target[:, :3].argmax(-1)
    lengths = torch.tensor([3, 0, 2, 1, 3])
    found = RejectionSampler("greedy")(flat(target, lengths), drafts, lengths, [0] * 5)
    assert found.num_accepted.tolist() == lengths.tolist()
    behind = target.argmax(-1)
    assert found.next_tokens.tolist() == [int(behind[r, n]) for r, n in enumerate(lengths.tolist())]


@pytest.mark.parametrize("rule", RULES)
def test_results_do_not_depend_on_neighbours(rule: str) -> None:
    target, draft, tokens = block(8, 4, 13, 2)
    lengths = torch.tensor([4, 3, 0, 1, 2, 4, 4, 3])
    seeds, positions = list(range(50, 58)), list(range(10, 18))
    sampler = RejectionSampler(rule)
    together = sampler(
        flat(target, lengths),
        tokens,
        lengths,
        positions,
        draft_logits=draft,
        noise=CounterNoise(seeds),
    )
    for r in range(8):
        alone = sampler(
            flat(target[r : r + 1], lengths[r : r + 1]),
            tokens[r : r + 1],
            lengths[r : r + 1],
            positions[r : r + 1],
            draft_logits=draft[r : r + 1],
            noise=CounterNoise(seeds[r : r + 1]),
        )
        assert alone.tokens.tolist() == together.tokens[r : r + 1].tolist()


@pytest.mark.parametrize("rule", ["coupled", "greedy"])
def test_the_schedule_changes_no_token(rule: str) -> None:
    """Lengths decide how many tokens come at once, never which: a whole sequence under different lengths."""
    sampler = RejectionSampler(rule)
    assert sampler.is_schedule_invariant
    table = torch.randn(7, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    noisy = table + 0.5 * torch.randn(
        7, 7, generator=torch.Generator().manual_seed(4), dtype=torch.float64
    )

    def run(seed: int, source: np.random.Generator | None) -> list[int]:
        noise, out = CounterNoise([seed]), [0]
        while len(out) < 40:
            drafts, at = [], out[-1]
            for j in range(4):
                scores = torch.log_softmax(noisy[at], -1)
                if rule == "coupled":
                    drawn = noise.gumbel([0], [len(out) + j], 7, DrawStream.SHARED)[0]
                    scores = scores + torch.from_numpy(drawn)
                at = int(scores.argmax())
                drafts.append(at)
            length = 0 if source is None else int(source.integers(0, 5))
            rows = torch.stack([table[t] for t in [out[-1], *drafts[:length]]])
            found = sampler(
                rows, torch.tensor([drafts]), torch.tensor([length]), [len(out)], noise=noise
            )
            out += [t for t in found.tokens[0].tolist() if t >= 0]
        return out[:40]

    for seed in range(8):
        plain = run(seed, None)
        assert all(run(seed, np.random.default_rng(k)) == plain for k in range(5))
    assert not RejectionSampler("standard").is_schedule_invariant


@pytest.mark.parametrize("rule", RULES)
def test_missing_drafts_are_never_emitted(rule: str) -> None:
    target, draft, _ = block(1, 3, 9, 5)
    draft[0, 1:] = torch.nan
    tokens = torch.tensor([[5, -1, -1]])
    for length in (1, 3):
        lengths = torch.tensor([length])
        found = RejectionSampler(rule)(
            flat(target, lengths), tokens, lengths, [0], draft_logits=draft, noise=CounterNoise([0])
        )
        emitted = [t for t in found.tokens[0].tolist() if t != -1]
        assert all(0 <= t < 9 for t in emitted)
        assert found.num_accepted[0] <= 1
        assert not found.is_bad[0]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("which", ["target", "draft", "draft all -inf", "all -inf"])
def test_broken_rows_are_told_and_emit_a_token_of_the_vocabulary(rule: str, which: str) -> None:
    vocab = 8192 + 640
    target, draft, tokens = block(2, 2, vocab, 6)
    if which == "target":
        target[0, 1] = torch.nan
        tokens[0, 0] = target[0, 0].argmax()
    elif which == "draft":
        draft[0, 0] = torch.nan
    elif which == "draft all -inf":
        draft[0, 0] = -torch.inf
    else:
        target[0, 0] = -torch.inf
    lengths = torch.tensor([2, 2])
    found = RejectionSampler(rule)(
        flat(target, lengths),
        tokens,
        lengths,
        [0, 0],
        draft_logits=draft,
        noise=CounterNoise([1, 2]),
    )
    assert found.is_bad.tolist() == [True, False]
    assert found.num_accepted[0] == 0
    assert 0 <= int(found.next_tokens[0]) < vocab


def test_a_full_accept_draws_the_bonus_from_the_last_row() -> None:
    target = torch.full((3, 4), -30.0)
    target[0, 1] = target[1, 2] = target[2, 3] = 30.0
    tokens = torch.tensor([[1, 2]])
    for rule in RULES:
        found = RejectionSampler(rule)(
            target, tokens, torch.tensor([2]), [0], noise=CounterNoise([4])
        )
        assert found.tokens.tolist() == [[1, 2, 3]]


def test_empty_batches_and_blocks() -> None:
    for rule in RULES:
        sampler = RejectionSampler(rule)
        found = sampler(
            torch.zeros(0, 5),
            torch.zeros(0, 3, dtype=torch.int64),
            torch.zeros(0),
            [],
            noise=CounterNoise([]),
        )
        assert found.tokens.shape == (0, 4)
        found = sampler(
            torch.zeros(2, 5),
            torch.zeros(2, 0, dtype=torch.int64),
            torch.zeros(2),
            [0, 0],
            noise=CounterNoise([0, 1]),
        )
        assert found.tokens.shape == (2, 1)


def test_bad_input() -> None:
    sampler = RejectionSampler("standard")
    tokens, noise = torch.zeros(1, 2, dtype=torch.int64), CounterNoise([0])
    with pytest.raises(ConfigError, match="noise"):
        sampler(torch.zeros(3, 5), tokens, torch.tensor([2]), [0])
    with pytest.raises(ShapeError, match="rows=3"):
        sampler(torch.zeros(2, 5), tokens, torch.tensor([2]), [0], noise=noise)
    with pytest.raises(ShapeError, match="from 0 to 2"):
        sampler(torch.zeros(4, 5), tokens, torch.tensor([3]), [0], noise=noise)
    with pytest.raises(ShapeError, match="vocabulary"):
        sampler(torch.zeros(3, 5), tokens + 5, torch.tensor([2]), [0], noise=noise)
    with pytest.raises(ShapeError, match="draft_logits"):
        sampler(
            torch.zeros(3, 5),
            tokens,
            torch.tensor([2]),
            [0],
            noise=noise,
            draft_logits=torch.zeros(1, 2, 4),
        )
    with pytest.raises(ConfigError, match="rule"):
        RejectionSampler("best")


@pytest.mark.parametrize("rule", RULES)
def test_arrays_lists_and_other_integers(rule: str) -> None:
    target, draft, tokens = block(2, 2, 5, 9)
    lengths, noise = torch.tensor([2, 1]), CounterNoise([3, 4])
    rows = flat(target, lengths)
    wanted = RejectionSampler(rule)(rows, tokens, lengths, [1, 2], draft_logits=draft, noise=noise)
    for drafts, counts_, at in (
        (tokens.int(), lengths.int(), torch.tensor([1, 2])),
        (tokens.tolist(), [2, 1], (1, 2)),
        (tokens.numpy(), lengths.numpy(), np.array([1, 2])),
    ):
        found = RejectionSampler(rule)(rows, drafts, counts_, at, draft_logits=draft, noise=noise)
        assert found.tokens.dtype == torch.int64
        assert found.tokens.tolist() == wanted.tokens.tolist()


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"draft_tokens": [[0.5, 1.0]]}, ShapeError, "draft_tokens holds fractions"),
        ({"lengths": [1.9]}, ShapeError, "lengths holds fractions"),
        ({"lengths": [-1]}, ShapeError, "lengths holds -1"),
        ({"draft_tokens": [[8, 0]]}, ShapeError, "draft_tokens holds 8"),
        ({"draft_tokens": "ab"}, ShapeError, "draft_tokens is 'ab'"),
        ({"positions": [-1]}, ShapeError, "positions"),
        ({"noise": 3}, ConfigError, "noise"),
        ({"noise": CounterNoise([])}, ConfigError, "seeds"),
    ],
)
def test_what_is_out_of_range_is_named(
    change: dict[str, object], error: type[Exception], match: str
) -> None:
    given: dict[str, object] = {
        "target_logits": torch.zeros(3, 5),
        "draft_tokens": [[0, 1]],
        "lengths": [2],
        "positions": [0],
        "noise": CounterNoise([1]),
        **change,
    }
    with pytest.raises(error, match=match):
        RejectionSampler("standard")(**given)


@pytest.mark.parametrize("seeds", [[-1], [2**64], [1.7], 1, [None], "ab"])
def test_seeds_out_of_range(seeds: object) -> None:
    with pytest.raises(ConfigError, match="seeds"):
        CounterNoise(seeds)
