from __future__ import annotations

import math
import random

import pytest
import torch

from deepinfer.sampling import filters


def apply(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Kept token ids, in order, of one row."""
    row = torch.tensor([logits], dtype=torch.float32) if isinstance(logits, list) else logits[None]
    out = filters.filter_logits(
        row,
        torch.tensor([temperature], dtype=torch.float64),
        torch.tensor([top_k]),
        torch.tensor([top_p], dtype=torch.float64),
        torch.tensor([min_p], dtype=torch.float64),
    )
    kept = out.scores[0] > -math.inf
    return out.token_ids[0][kept].tolist()


def reference(logits, temperature, top_k, top_p, min_p):
    """The same with Python floats, sorted lists and exact sums."""
    logits = [float(x) for x in logits]
    highest = max(logits)
    order = sorted(
        (i for i in range(len(logits)) if logits[i] > -math.inf), key=lambda i: (-logits[i], i)
    )
    weight = {i: math.exp((logits[i] - highest) / temperature) for i in order}
    if min_p > 0:
        order = [i for i in order if weight[i] >= min_p]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        total = math.fsum(weight[i] for i in order)
        kept, reached = [], 0.0
        for i in order:
            if reached >= top_p * total:
                break
            kept.append(i)
            reached = math.fsum([reached, weight[i]])
        order = kept
    return order


def test_random_rows_equal_the_reference():
    source = random.Random(0)
    for case in range(300):
        vocab = source.choice([1, 2, 5, 40, 300])
        # a few distinct values make many ties
        values = [source.choice([-1.5, 0.0, 0.25, 1.0, 3.0, -math.inf]) for _ in range(vocab)]
        if case % 2:
            values = [source.gauss(0, 3) for _ in range(vocab)]
        if max(values) == -math.inf:
            values[0] = 1.0
        row = torch.tensor(values, dtype=torch.float32)
        options = (
            source.choice([0.3, 1.0, 1.7]),
            source.choice([0, -1, 1, 3, 50]),
            source.choice([1.0, 0.9, 0.5, 0.013]),
            source.choice([0.0, 0.05, 0.6]),
        )
        assert apply(row, *options) == reference(row.tolist(), *options), (case, options)


def test_ties_go_to_the_lowest_id():
    assert apply([1.0, 2.0, 2.0, 2.0, 1.0], top_k=2) == [1, 2]
    assert apply([0.0, -0.0, 0.0, -0.0], top_k=3) == [0, 1, 2]
    assert apply([1.0, 1.0, 1.0, 1.0], top_p=0.5) == [0, 1]
    assert apply([1.0, 1.0, 1.0, 1.0], top_p=0.500001) == [0, 1, 2]


def test_top_p_keeps_the_token_that_reaches_it():
    logits = [math.log(p) for p in (0.5, 0.3, 0.2)]
    assert apply(logits, top_p=0.4) == [0]
    assert apply(logits, top_p=0.6) == [0, 1]
    assert apply(logits, top_p=0.81) == [0, 1, 2]
    assert apply(logits, top_p=1e-9) == [0]


def test_filters_renormalise_in_the_documented_order():
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    # after top-k 2 the shares are 4/7 and 3/7
    assert apply(logits, top_k=2, top_p=0.57) == [0]
    assert apply(logits, top_k=2, top_p=0.58) == [0, 1]
    # after min-p 0.3 (at least 0.12) the shares are 4/9, 3/9, 2/9
    assert apply(logits, min_p=0.3, top_p=0.77) == [0, 1]
    assert apply(logits, min_p=0.3, top_p=0.79) == [0, 1, 2]


def test_temperature_changes_top_p_and_min_p_but_not_top_k():
    logits = [2.0, 1.0, 0.0]
    assert apply(logits, temperature=100.0, top_p=0.5) == [0, 1]
    assert apply(logits, temperature=0.1, top_p=0.5) == [0]
    assert apply(logits, temperature=100.0, min_p=0.9) == [0, 1, 2]
    assert apply(logits, temperature=0.01, min_p=0.9) == [0]
    assert apply(logits, temperature=100.0, top_k=1) == [0]


def test_the_highest_logit_always_stays_and_masked_ones_never():
    assert apply([5.0, 5.0, -math.inf], min_p=1.0) == [0, 1]
    assert apply([-math.inf, -1e30, -math.inf], top_k=3, top_p=0.9) == [1]
    assert apply([3e38, -3e38], temperature=1e-5, top_p=0.1) == [0]


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_flat_rows_wider_than_the_first_try(top_p):
    vocab = 5000
    row = torch.zeros(vocab)
    assert apply(row, top_p=top_p) == list(range(math.ceil(top_p * vocab)))
    row[4999] = 0.001
    assert apply(row, top_p=top_p)[0] == 4999
    assert apply(row, min_p=0.5) == [4999, *range(4999)]
    assert apply(row, top_k=2000, top_p=0.5) == [4999, *range(999)]


def test_a_row_does_not_depend_on_its_batch():
    generator = torch.Generator().manual_seed(1)
    rows = (
        torch.randn(6, 3000, generator=generator) * torch.tensor([0.01, 1, 3, 0.5, 2, 5])[:, None]
    )
    temperature = torch.tensor([1.0, 0.5, 2.0, 1.0, 1.0, 0.7], dtype=torch.float64)
    top_k = torch.tensor([0, 5, 0, 1500, 2, 0])
    top_p = torch.tensor([0.9, 1.0, 0.5, 0.8, 0.9, 1.0], dtype=torch.float64)
    min_p = torch.tensor([0.0, 0.1, 0.0, 0.0, 0.0, 0.2], dtype=torch.float64)
    batch = filters.filter_logits(rows, temperature, top_k, top_p, min_p)
    for row in range(6):
        one = slice(row, row + 1)
        alone = filters.filter_logits(
            rows[one], temperature[one], top_k[one], top_p[one], min_p[one]
        )
        width = min(alone.scores.shape[1], batch.scores.shape[1])
        assert torch.equal(alone.token_ids[0, :width], batch.token_ids[row, :width])
        assert torch.equal(alone.scores[0, :width], batch.scores[row, :width])
        assert (batch.scores[row, width:] == -math.inf).all()
        assert (alone.scores[0, width:] == -math.inf).all()


def test_top_k_wider_than_the_first_try_beside_a_row_without_top_k():
    rows = torch.zeros(2, 5000)
    rows[1, 7] = 50.0
    out = filters.filter_logits(
        rows,
        torch.ones(2, dtype=torch.float64),
        torch.tensor([2000, 0]),
        torch.tensor([0.5, 0.5], dtype=torch.float64),
        torch.zeros(2, dtype=torch.float64),
    )
    assert (out.scores > -math.inf).sum(dim=-1).tolist() == [1000, 1]


def test_top_p_needs_more_than_half_of_four_equals():
    assert apply([1.0] * 4, top_p=0.5 + 2.0**-45) == [0, 1, 2]


def test_rank_keys_give_one_order_for_special_values():
    row = torch.tensor(
        [[0.0, -math.inf, math.inf, -0.0, 3e-45, -3e-45, 1.0, -1.0, 3.4e38, -3.4e38]]
    )
    ids, values = filters.top_logits(row, 10)
    assert ids[0].tolist() == [2, 8, 6, 4, 0, 3, 5, 7, 9, 1]
    assert torch.equal(values[0], row[0][ids[0]])
    few, _ = filters.top_logits(row, 4)
    assert few[0].tolist() == ids[0, :4].tolist()


@pytest.mark.parametrize("k", [1, 7, 40, 99])
def test_ties_around_the_edge_of_the_top(k):
    generator = torch.Generator().manual_seed(k)
    for distinct in (1, 2, 5, 30, 1000):
        rows = torch.randint(0, distinct, (20, 200), generator=generator).float()
        ids, values = filters.top_logits(rows, k)
        for row in range(20):
            order = sorted(range(200), key=lambda i: (-float(rows[row, i]), i))
            assert ids[row].tolist() == order[:k]
            assert torch.equal(values[row], rows[row, ids[row]])


def test_mass_is_exact_for_whole_powers():
    mass = filters.probability_mass(
        torch.tensor([0.0, -math.log(2.0), -math.inf], dtype=torch.float64)
    )
    assert mass.tolist() == [1 << 42, 1 << 41, 0]
