"""Heads and the loss against formulas written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from deepinfer.core.errors import ConfigError, ShapeError
from deepinfer.speculative.heads import (
    HEADS,
    ConfidenceHead,
    GatedMarkovHead,
    MarkovHead,
    RnnHead,
    make_sequential_head,
)
from deepinfer.speculative.loss import dspark_loss

R, G, V, H, K = 3, 4, 11, 6, 5


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(R, G, V), torch.randint(0, V, (R, G)), torch.randn(R, G, H)


@pytest.mark.parametrize("kind", sorted(HEADS))
def test_block_equals_steps(kind: str) -> None:
    head = make_sequential_head(kind, V, K, hidden_size=H)
    base, previous, hidden = inputs()
    whole = head.block(base, previous, hidden)
    state = head.initial_state(R)
    for position in range(G):
        logits, state = head.step(
            base[:, position], previous[:, position], hidden[:, position], state
        )
        assert torch.allclose(logits, whole[:, position], atol=1e-6)
    assert head.block(base[:, :0], previous[:, :0], hidden[:, :0]).shape == (R, 0, V)


def test_markov_by_hand() -> None:
    head = MarkovHead(V, K)
    base, previous, _ = inputs()
    wanted = base[0, 0] + head.output.weight @ head.embedding.weight[previous[0, 0]]
    assert torch.allclose(head.block(base, previous)[0, 0], wanted, atol=1e-6)


def test_gated_by_hand() -> None:
    head = GatedMarkovHead(V, K, hidden_size=H)
    base, previous, hidden = inputs()
    row = head.embedding.weight[previous[1, 2]]
    gate = torch.sigmoid(head.gate.weight @ torch.cat([hidden[1, 2], row]) + head.gate.bias)
    wanted = base[1, 2] + head.output.weight @ (gate * row)
    assert torch.allclose(head.block(base, previous, hidden)[1, 2], wanted, atol=1e-6)


def test_rnn_by_hand_reads_the_state_before() -> None:
    head = RnnHead(V, K, hidden_size=H)
    base, previous, hidden = inputs()
    state = torch.zeros(K)
    for position in range(G):
        z = torch.cat([state, head.embedding.weight[previous[0, position]], hidden[0, position]])
        gate, candidate, out = (head.cell.weight @ z + head.cell.bias).split(K)
        wanted = base[0, position] + head.output.weight @ torch.tanh(out)
        assert torch.allclose(head.block(base, previous, hidden)[0, position], wanted, atol=1e-5)
        state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
    with pytest.raises(ConfigError, match="state"):
        head.step(base[:, 0], previous[:, 0], hidden[:, 0])


@pytest.mark.parametrize("kind", sorted(HEADS))
def test_sampling_is_greedy_or_by_noise_and_its_logits_are_the_law(kind: str) -> None:
    head = make_sequential_head(kind, V, K, hidden_size=H)
    base, _, hidden = inputs()
    anchor = torch.tensor([1, 2, 3])
    greedy, law = head.sample(base, anchor, hidden)
    previous = torch.cat([anchor[:, None], greedy[:, :-1]], 1)
    assert greedy.tolist() == head.block(base, previous, hidden).argmax(-1).tolist()
    # A draft that was chosen and is judged by a soft law changes the output's.
    chosen = torch.nn.functional.one_hot(greedy, V).float()
    assert torch.equal(torch.softmax(law, -1), chosen)
    unused, same = head.sample(base, anchor, hidden, temperature=0.7)
    assert torch.equal(unused, greedy)
    assert torch.equal(same, law)
    noise = torch.randn(R, G, V) * 3
    mixed, law = head.sample(
        base, anchor, hidden, temperature=torch.tensor([0.0, 0.5, 2.0]), noise=noise.numpy()
    )
    assert mixed[0].tolist() == greedy[0].tolist()
    assert torch.equal(torch.softmax(law[0], -1), chosen[0])
    assert mixed[1:].tolist() == (law + noise).argmax(-1)[1:].tolist()
    previous = torch.cat([anchor[:, None], mixed[:, :-1]], 1)
    raw = head.block(base, previous, hidden)
    assert torch.allclose(law[2], raw[2] / 2.0, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"temperature": -1.0}, ConfigError),
        ({"temperature": float("nan")}, ConfigError),
        ({"temperature": torch.ones(R + 1)}, ShapeError),
        ({"temperature": 1.0, "noise": torch.zeros(R, G, V + 1)}, ShapeError),
    ],
)
def test_what_cannot_be_drawn_with(options: dict[str, object], error: type[Exception]) -> None:
    base, _, _ = inputs()
    with pytest.raises(error, match=list(options)[-1]):
        MarkovHead(V, K).sample(base, torch.zeros(R, dtype=torch.int64), **options)


def test_ties_go_to_the_lowest_id() -> None:
    head = MarkovHead(V, K)
    torch.nn.init.zeros_(head.output.weight)
    tokens, _ = head.sample(torch.zeros(1, 2, V), torch.tensor([4]))
    assert tokens.tolist() == [[0, 0]]


def test_reduced_draft_vocabulary() -> None:
    head = make_sequential_head("markov", V, K, draft_vocab_size=4)
    assert head.block(torch.zeros(R, G, 4), torch.full((R, G), V - 1)).shape == (R, G, 4)
    with pytest.raises(ConfigError, match="draft_vocab_size"):
        make_sequential_head("markov", V, K, draft_vocab_size=V + 1)
    with pytest.raises(ConfigError, match="hidden_size"):
        make_sequential_head("rnn", V, K)
    with pytest.raises(ConfigError, match="kind"):
        make_sequential_head("lstm", V, K)
    with pytest.raises(ConfigError, match="hidden"):
        make_sequential_head("gated", V, K, hidden_size=H).block(
            torch.zeros(R, G, V), torch.zeros(R, G, dtype=torch.int64)
        )


def test_confidence_is_fp32_and_by_hand() -> None:
    head = ConfidenceHead(H, K, bias=True).bfloat16()
    hidden, row = torch.randn(R, G, H).bfloat16(), torch.randn(R, G, K).bfloat16()
    found = head(hidden, row)
    assert found.dtype == torch.float32
    weight, bias = head.output.weight.float()[0], head.output.bias.float()
    wanted = weight @ torch.cat([hidden[0, 0], row[0, 0]]).float() + bias
    assert torch.allclose(found[0, 0], wanted, atol=1e-5)
    assert ConfidenceHead(H)(hidden).shape == (R, G)
    with pytest.raises(ConfigError, match="markov_rank"):
        head(hidden)
    with pytest.raises(ConfigError, match="markov_rank"):
        ConfidenceHead(H)(hidden, row)


def test_loss_by_hand() -> None:
    draft, target = torch.randn(2, 3, V), torch.randn(2, 3, V)
    labels, confidence = torch.randint(0, V, (2, 3)), torch.randn(2, 3)
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])  # the last one stands behind a gap
    q, p = torch.softmax(draft, -1), torch.softmax(target, -1)
    weights = [(0, 0, 1.0), (0, 1, math.exp(-1 / 4)), (1, 0, 1.0)]
    total = sum(w for _, _, w in weights)
    ce = sum(w * -math.log(q[b, k, labels[b, k]]) for b, k, w in weights) / total
    l1 = sum(w * float((q[b, k] - p[b, k]).abs().sum()) for b, k, w in weights) / total
    bce = 0.0
    for b, k, w in weights:
        wanted = 1 - 0.5 * float((q[b, k] - p[b, k]).abs().sum())
        c = float(torch.sigmoid(confidence[b, k]))
        bce += w * -(wanted * math.log(c) + (1 - wanted) * math.log(1 - c)) / total
    found = dspark_loss(draft, target, labels, mask, confidence)
    assert float(found.cross_entropy) == pytest.approx(ce, rel=1e-5)
    assert float(found.distance) == pytest.approx(l1, rel=1e-5)
    assert float(found.confidence) == pytest.approx(bce, rel=1e-5)
    assert float(found.total) == pytest.approx(0.1 * ce + 0.9 * l1 + bce, rel=1e-5)


def test_a_perfect_draft_has_no_distance_and_survives() -> None:
    logits = torch.randn(2, 3, V)
    found = dspark_loss(logits, logits, torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3))
    assert float(found.distance) == pytest.approx(0.0, abs=1e-6)
    assert float(found.accepted_length) == pytest.approx(4.0, abs=1e-4)
    assert float(found.confidence) == 0.0


def test_nothing_counts_and_nan_behind_the_mask() -> None:
    draft = torch.randn(2, 3, V, requires_grad=True)
    labels = torch.full((2, 3), -100)
    target = torch.randn(2, 3, V)
    found = dspark_loss(draft, target, labels, torch.zeros(2, 3), torch.randn(2, 3))
    assert float(found.total.detach()) == 0.0
    found.total.backward()
    assert draft.grad is not None
    assert not draft.grad.isnan().any()
    with pytest.raises(ShapeError, match="mask"):
        dspark_loss(draft, target, labels, torch.zeros(2, 2))
    with pytest.raises(ShapeError, match="draft_logits"):
        dspark_loss(draft, target[:1], labels, torch.zeros(2, 3))
    with pytest.raises(ConfigError, match="decay"):
        dspark_loss(draft, target, labels, torch.zeros(2, 3), decay=0.0)


def test_the_confidence_teaches_the_head_and_not_the_draft() -> None:
    draft = torch.randn(2, 3, V, requires_grad=True)
    confidence = torch.randn(2, 3, requires_grad=True)
    labels = torch.zeros(2, 3, dtype=torch.int64)
    found = dspark_loss(
        draft, torch.randn(2, 3, V), labels, torch.ones(2, 3), confidence, ce=0.0, l1=0.0
    )
    found.total.backward()
    assert draft.grad is None or float(draft.grad.abs().max()) == 0.0
    assert confidence.grad is not None
    assert float(confidence.grad.abs().max()) > 0
