"""Verification: coupled verdicts are plain sampling, standard ones have the target's law; drafts from texts."""

from __future__ import annotations

import itertools
import math
import os

import pytest
import torch

from deepinfer.core.errors import ShapeError
from deepinfer.kernels import sampling, spec
from deepinfer.sampling import CoupledDraw
from deepinfer.speculative.ngram import lookup

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ["torch", "triton"] if INTERPRETED else ["torch"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
]
LENGTHS = torch.tensor([3, 0, 2, 1])
FIRST = (LENGTHS + 1).cumsum(0) - (LENGTHS + 1)
POSITIONS = torch.tensor([5, 6, 7, 100])
SEEDS = torch.tensor([1, 2**50, -3, 4])
WARM = torch.tensor([1.0, 0.5, 0.0, 2.0], dtype=torch.float64)


def near_laws(vocab: int, spread: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of targets, flat, and of drafts near them."""
    g = torch.Generator().manual_seed(seed)
    target = torch.randn(int((LENGTHS + 1).sum()) + 2, vocab, generator=g) * 3
    draft = torch.randn(4, 3, vocab, generator=g) * 3
    for r, n in enumerate(LENGTHS.tolist()):
        noise = torch.randn(n, vocab, generator=g) * spread
        draft[r, :n] = target[FIRST[r] : FIRST[r] + n] + noise
    return target, draft


def drawn(draft: torch.Tensor, stream: int, warm: torch.Tensor | None) -> torch.Tensor:
    return torch.stack([sampling.gumbel_sample(draft[:, j], SEEDS, POSITIONS + j, temperature=warm, stream=stream, backend="torch") for j in range(draft.shape[1])], 1)  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("warm", [None, WARM])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_coupled_verdicts_are_what_plain_sampling_emits(backend, warm, spread) -> None:
    target, draft = near_laws(200, spread)
    drafts = drawn(draft, 0, warm)
    out, accepted = spec.speculative_verify(
        target, drafts, LENGTHS, POSITIONS, SEEDS, temperature=warm, backend=backend
    )
    draw = CoupledDraw.of([1.0] * 4 if warm is None else warm.tolist(), [s % 2**64 for s in SEEDS.tolist()])  # fmt: skip
    for r, n in enumerate(LENGTHS.tolist()):
        own = []
        for j in range(n + 1):
            rows = target[FIRST[r] + j].expand(4, -1)
            own.append(int(draw(rows, POSITIONS + j)[r]))
        kept = 0
        while kept < n and own[kept] == int(drafts[r, kept]):
            kept += 1
        assert int(accepted[r]) == kept
        assert out[r].tolist() == own[: kept + 1] + [-1] * (3 - kept)


@pytest.mark.skipif(not INTERPRETED, reason="a comparison of both backends")
@pytest.mark.parametrize("warm", [None, WARM])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_standard_verdicts_of_the_kernels_are_those_of_the_reference(warm, known, spread) -> None:
    target, draft = near_laws(200, spread)
    drafts = drawn(draft, 1, warm)
    drafts[0, 2] = -1
    keys = {"rule": "standard", "temperature": warm, "draft_logits": draft if known else None}
    wanted = spec.speculative_verify(
        target, drafts, LENGTHS, POSITIONS, SEEDS, backend="torch", **keys
    )
    found = spec.speculative_verify(
        target, drafts, LENGTHS, POSITIONS, SEEDS, backend="triton", **keys
    )
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("known", [True, False])
def test_standard_verdicts_have_the_law_of_the_target(known) -> None:
    # Three tokens, two drafts, many requests with the same laws: what comes out first and second is compared.
    n = 30_000
    target = torch.tensor([[0.2, 1.0, -1.0], [1.0, 0.0, 0.5], [0.3, -0.4, 0.1]])
    draft = torch.tensor([[1.0, 0.2, -0.5], [0.1, 0.9, 0.0]])
    seeds, positions = torch.arange(n), torch.full((n,), 9)
    drafts = torch.full((n, 2), 1)
    laws = None
    if known:
        laws = draft.expand(n, 2, 3).contiguous()
        drafts = torch.stack([sampling.gumbel_sample(laws[:, j], seeds, positions + j, stream=1, backend="torch") for j in range(2)], 1)  # fmt: skip
    out, accepted = spec.speculative_verify(
        target.repeat(n, 1),
        drafts,
        torch.full((n,), 2),
        positions,
        seeds,
        rule="standard",
        draft_logits=laws,
        backend="torch",
    )
    p = target.double().softmax(-1)
    first = torch.bincount(out[:, 0], minlength=3).double() / n
    assert torch.allclose(first, p[0], atol=0.012)
    longer = out[accepted >= 1]
    second = torch.bincount(longer[:, 1], minlength=3).double() / len(longer)
    assert torch.allclose(second, p[1], atol=0.02)
    longest = out[accepted == 2]
    third = torch.bincount(longest[:, 2], minlength=3).double() / len(longest)
    assert torch.allclose(third, p[2], atol=0.03)
    if known:
        q = draft.double().softmax(-1)
        share = float((accepted >= 1).double().mean())
        assert share == pytest.approx(float(torch.minimum(p[0], q[0]).sum()), abs=0.012)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", ["coupled", "standard"])
def test_bad_rows_accept_nothing_and_padding_is_not_looked_at(backend, rule) -> None:
    target, draft = near_laws(200, 0.3)
    drafts = drawn(draft, 0, None)
    whole = spec.speculative_verify(
        target, drafts, LENGTHS, POSITIONS, SEEDS, rule=rule, backend=backend
    )
    target[1], target[int(FIRST[2])] = math.nan, -math.inf
    target[-2:] = math.nan
    out, accepted = spec.speculative_verify(
        target, drafts, LENGTHS, POSITIONS, SEEDS, rule=rule, backend=backend
    )
    kept = int(accepted[0])
    assert kept <= 1
    if int(whole[1][0]) >= 1:
        assert out[0].tolist() == [int(drafts[0, 0]), -1, -1, -1]
    assert out[2].tolist() == [-1] * 4
    assert int(accepted[2]) == 0
    for r in (1, 3):
        assert torch.equal(out[r], whole[0][r])


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_the_target_forbids_is_not_emitted(backend) -> None:
    """Also where the drafter's law is else the target's own and gives the forbidden token hardly any share."""
    target = torch.zeros(12, 6)
    target[:, 2] = -math.inf
    law = torch.zeros(6, 1, 6)
    law[:, 0, 2] = torch.tensor([-13.8, -40.0, -5.0, 5.0, -math.inf, math.nan])
    ones = torch.ones(6, dtype=torch.int64)
    tokens, accepted = spec.speculative_verify(
        target, 2 * ones[:, None], ones, 0 * ones, torch.arange(6), rule="standard", draft_logits=law,
        backend=backend,
    )  # fmt: skip
    assert (accepted == 0).all()
    assert ((tokens[:, 0] >= 0) & (tokens[:, 0] != 2)).all()
    assert (tokens[:, 1] == -1).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
def test_a_draft_without_a_law_counts_as_chosen(backend, bad) -> None:
    g = torch.Generator().manual_seed(3)
    target = torch.randn(80, 9, generator=g)
    drafts, ones = torch.randint(0, 9, (40, 1), generator=g), torch.ones(40, dtype=torch.int64)
    law = torch.full((40, 1, 9), bad)
    calls = [
        spec.speculative_verify(
            target, drafts, ones, ones, torch.arange(40), rule="standard", draft_logits=given, backend=backend
        )
        for given in (law, None)
    ]  # fmt: skip
    assert all(torch.equal(one, other) for one, other in zip(*calls, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_drawn", [True, False])
def test_ids_outside_of_the_vocabulary_drop_nothing(backend, is_drawn) -> None:
    target = torch.full((2 * 30, 9), -30.0)
    target[:, 8] = 30.0
    law = torch.zeros(30, 1, 9) if is_drawn else None
    drafts = torch.tensor([9, 100, 2**40]).repeat(10)[:, None]
    ones = torch.ones(30, dtype=torch.int64)
    tokens, accepted = spec.speculative_verify(
        target, drafts, ones, ones, torch.arange(30), rule="standard", draft_logits=law, backend=backend
    )  # fmt: skip
    assert (accepted == 0).all()
    assert (tokens[:, 0] == 8).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("warm", [1e-20, 1e-39, 1e-300])
def test_next_to_no_temperature_the_highest_is_emitted(backend, warm) -> None:
    """Its reciprocal is no number of fp32; the refused draft must not come out all the same."""
    target = torch.zeros(4, 10)
    target[:, 1] = 3.0
    draft = torch.full((2, 1, 10), -1.0)
    draft[:, :, 0], draft[:, :, 2] = 5.0, 4.0
    one = torch.ones(2, dtype=torch.int64)
    out, accepted = spec.speculative_verify(
        target, torch.tensor([[0], [1]]), one.int(), one, one, rule="standard", draft_logits=draft,
        temperature=torch.full((2,), warm, dtype=torch.float64), backend=backend,
    )  # fmt: skip
    assert out.tolist() == [[1, -1], [1, 1]]
    assert accepted.tolist() == [0, 1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_temperature_that_is_nan_ends_the_request(backend) -> None:
    ones = torch.ones(3, dtype=torch.int64)
    tokens, accepted = spec.speculative_verify(
        torch.randn(6, 9), ones[:, None], ones, ones, ones, rule="standard",
        temperature=torch.tensor([math.nan, 1.0, math.nan]), backend=backend,
    )  # fmt: skip
    assert tokens[:, 0].tolist()[::2] == [-1, -1]
    assert accepted.tolist()[::2] == [0, 0]
    assert tokens[1, 0] >= 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", ["coupled", "standard"])
def test_a_request_does_not_hang_on_the_others(backend, rule) -> None:
    target, draft = near_laws(200, 0.5, seed=3)
    drafts = drawn(draft, 0, None)
    out, accepted = spec.speculative_verify(
        target, drafts, LENGTHS, POSITIONS, SEEDS, rule=rule, backend=backend
    )
    rows = target[FIRST[2] : FIRST[2] + 3]
    alone = spec.speculative_verify(
        rows, drafts[2:3], LENGTHS[2:3], POSITIONS[2:3], SEEDS[2:3], rule=rule, backend=backend
    )
    assert torch.equal(alone[0], out[2:3])
    assert torch.equal(alone[1], accepted[2:3])


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_requests_and_no_drafts(backend) -> None:
    target, _ = near_laws(50, 1.0)
    none = torch.empty(0, dtype=torch.int64)
    out, accepted = spec.speculative_verify(
        target[:0], none.view(0, 3), none, none, none, backend=backend
    )
    assert out.shape == (0, 4)
    assert accepted.shape == (0,)
    zero = torch.zeros(4, dtype=torch.int64)
    for rule in ("coupled", "standard"):
        out, accepted = spec.speculative_verify(
            target[:4], none.view(4, 0), zero, POSITIONS, SEEDS, rule=rule, backend=backend
        )
        stream = 0 if rule == "coupled" else 4
        wanted = sampling.gumbel_sample(target[:4], SEEDS, POSITIONS, stream=stream)
        assert torch.equal(out[:, 0], wanted)
        assert accepted.tolist() == [0] * 4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("min_n", "max_n", "window"), [(2, 4, 8192), (1, 3, 20), (3, 5, 30)])
def test_drafts_from_texts_are_those_of_the_drafter(backend, min_n, max_n, window) -> None:
    g = torch.Generator().manual_seed(5)
    tokens = torch.randint(-1, 3, (12, 60), generator=g)
    lengths = torch.randint(0, 61, (12,), generator=g)
    lengths[:4] = torch.tensor([0, 2, 3, 60])
    out, matched = spec.ngram_propose(
        tokens, lengths, 5, min_n=min_n, max_n=max_n, window=window, backend=backend
    )
    for row, length in itertools.zip_longest(range(12), lengths.tolist()):
        text = tokens[row, :length].tolist()
        found, n = lookup(text, 5, min_n=min_n, max_n=max_n, window=window)
        assert out[row].tolist() == (list(found) or [-1] * 5)
        assert int(matched[row]) == n


def test_wrong_arguments_are_refused() -> None:
    target, draft = near_laws(50, 1.0)
    drafts = torch.zeros((4, 3), dtype=torch.int64)
    with pytest.raises(ShapeError, match="rule is 'block'"):
        spec.speculative_verify(target, drafts, LENGTHS, POSITIONS, SEEDS, rule="block")
    with pytest.raises(ShapeError, match="'coupled' with draft_logits"):
        spec.speculative_verify(target, drafts, LENGTHS, POSITIONS, SEEDS, draft_logits=draft)
    with pytest.raises(ShapeError, match="draft_logits has shape"):
        spec.speculative_verify(target, drafts, LENGTHS, POSITIONS, SEEDS, rule="standard", draft_logits=draft[:, :2])  # fmt: skip
    with pytest.raises(ShapeError, match="at least a row each"):
        spec.speculative_verify(target[:3], drafts, LENGTHS, POSITIONS, SEEDS)
    with pytest.raises(ShapeError, match="9 rows; lengths ask for 10"):
        spec.speculative_verify(target[:9], drafts, LENGTHS, POSITIONS, SEEDS)
    for wrong in (4, -1, -(2**63)):
        lengths = LENGTHS.clone()
        lengths[1] = wrong
        for rule in ("coupled", "standard"):
            with pytest.raises(ShapeError, match="must lie in \\[0, 3"):
                spec.speculative_verify(target, drafts, lengths, POSITIONS, SEEDS, rule=rule)
        with pytest.raises(ShapeError, match="must lie in \\[0, 3"):
            spec.ngram_propose(drafts, lengths, 3)
    with pytest.raises(ShapeError, match="lengths has shape"):
        spec.speculative_verify(target, drafts, LENGTHS[:3], POSITIONS, SEEDS)
    with pytest.raises(ShapeError, match="min_n 3, max_n 2"):
        spec.ngram_propose(drafts, LENGTHS, 3, min_n=3, max_n=2)


@pytest.mark.skipif(INTERPRETED, reason="the compiler of torch is not for the interpreter")
def test_operations_of_torch() -> None:
    ops = torch.ops.deepinfer
    target, draft = near_laws(30, 1.0)
    drafts = drawn(draft, 0, None)
    out, accepted = torch.empty((4, 4), dtype=torch.int64), torch.empty(4, dtype=torch.int64)
    given = (None, target, drafts, LENGTHS, POSITIONS, SEEDS, None)
    torch.library.opcheck(ops.speculative_verify_coupled, (*given, out, accepted))
    torch.library.opcheck(ops.speculative_verify_standard, (*given, draft, out, accepted))
    matched = torch.empty(4, dtype=torch.int32)
    # The reference looks at lengths, so the shapes alone are not enough to run it.
    torch.library.opcheck(
        ops.ngram_propose, (None, drafts, LENGTHS, 1, 2, 10, out, matched), test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip

    def step(target: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
        return spec.speculative_verify(target, drafts, LENGTHS, POSITIONS, SEEDS)[0]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(target, drafts), step(target, drafts))


@pytest.mark.skipif(INTERPRETED, reason="the compiler of torch is not for the interpreter")
def test_one_graph_holds_drafts_from_texts_and_standard_verdicts() -> None:
    target, draft = near_laws(30, 0.5)

    def step(
        target: torch.Tensor, draft: torch.Tensor, texts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        found, matched = spec.ngram_propose(texts, LENGTHS + 3, 3, min_n=1)
        keys = {"rule": "standard", "temperature": WARM}
        chosen = spec.speculative_verify(target, found, LENGTHS, POSITIONS, SEEDS, **keys)
        drafts = found.clamp_min(1)
        own = spec.speculative_verify(
            target, drafts, LENGTHS, POSITIONS, SEEDS, draft_logits=draft, **keys
        )
        return found, matched, *chosen, *own

    texts = torch.tensor(
        [[1, 2, 1, 2, 3, 1], [4, 5, 4, 0, 0, 0], [7, 7, 7, 7, 7, 0], [1, 2, 3, 4, 0, 0]]
    )
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for own, wanted in zip(compiled(target, draft, texts), step(target, draft, texts), strict=True):
        assert torch.equal(own, wanted)


@pytest.mark.skipif(not INTERPRETED, reason="a comparison of both backends")
@pytest.mark.parametrize("rule", ["coupled", "standard"])
def test_lengths_out_of_range_and_missing_rows_count_alike(rule) -> None:
    from deepinfer.kernels.reference import spec as reference
    from deepinfer.kernels.triton import spec_launch as launch

    target, draft = near_laws(60, 0.3)
    drafts = drawn(draft, 0 if rule == "coupled" else 1, None)
    lengths = torch.tensor([4, -(2**63), 2, 2**62])
    out, accepted = (
        torch.empty((2, 4, 4), dtype=torch.int64),
        torch.empty((2, 4), dtype=torch.int64),
    )
    for i, module in enumerate((reference, launch)):
        given = (target[:9], drafts, lengths, POSITIONS, SEEDS, None)
        if rule == "coupled":
            module.verify_coupled(*given, out[i], accepted[i])
        else:
            module.verify_standard(*given, draft, out[i], accepted[i])
    assert torch.equal(out[0], out[1])
    assert torch.equal(accepted[0], accepted[1])
    found, matched = (
        torch.empty((2, 4, 3), dtype=torch.int64),
        torch.empty((2, 4), dtype=torch.int32),
    )
    texts = torch.tensor([[1, 2, 1, 2]]).repeat(4, 1)
    for i, propose in enumerate((reference.ngram_propose, launch.ngram)):
        propose(texts, lengths, 2, 4, 9, found[i], matched[i])
    assert torch.equal(found[0], found[1])
    assert torch.equal(matched[0], matched[1])
