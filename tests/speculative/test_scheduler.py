"""The verification scheduler against plain Python, and the combinations that it must refuse."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.core.errors import AnticipationError, ConfigError, ShapeError
from deepinfer.speculative import StepCostModel, VerificationScheduler, prefix_survival

STAIRS = StepCostModel([8, 16, 24, 40], [1.0, 1.0, 1.6, 2.9], graph_sizes=[8, 16, 24, 40])
LINE = StepCostModel.additive(1.0, 0.1)
SEARCHES = ("global", "early_stop", "uniform", "static", "all")
SURVIVALS = st.lists(
    st.lists(st.sampled_from([0.05, 0.3, 0.6, 0.8, 0.95, 1.0]), min_size=3, max_size=3),
    min_size=1,
    max_size=4,
)


def algorithm_1(survival: np.ndarray, cost: StepCostModel) -> list[int]:  # type: ignore[type-arg]
    """The published greedy search, written down slot by slot."""
    requests = survival.shape[0]
    slots = sorted(
        (-float(a), j, r) for r, row in enumerate(survival) for j, a in enumerate(row) if a > 0
    )
    lengths = [0] * requests
    rows, tokens = requests, float(requests)
    best = tokens / float(cost.seconds(requests, rows))
    for negated, _, request in slots:
        rows += 1
        tokens -= negated
        theta = tokens / float(cost.seconds(requests, rows))
        if theta <= best:
            break
        best = theta
        lengths[request] += 1
    return lengths


def best_of_all(survival: np.ndarray, cost: StepCostModel) -> float:  # type: ignore[type-arg]
    """Tokens a second of the best lengths of all, by trying every one."""
    requests, drafts = survival.shape
    best = 0.0
    for lengths in itertools.product(range(drafts + 1), repeat=requests):
        tokens = requests + sum(float(survival[r, :n].sum()) for r, n in enumerate(lengths))
        best = max(best, tokens / float(cost.seconds(requests, requests + sum(lengths))))
    return best


def in_order(survival: np.ndarray, least: float) -> list[tuple[float, int, int]]:  # type: ignore[type-arg]
    """Slots as sorted triples: the survival, negated; position; request."""
    slots = [(-float(a), j, r) for r, row in enumerate(survival) for j, a in enumerate(row)]
    return sorted(slot for slot in slots if -slot[0] > float(np.float32(least)))


def global_search(
    live: np.ndarray,  # type: ignore[type-arg]
    known: np.ndarray,  # type: ignore[type-arg]
    cost: StepCostModel,
    least: float,
    gain: float,
    capacity: int | None,
) -> tuple[list[int], float]:
    """Lengths and tokens a second, number by number and slot by slot."""
    requests = len(live)
    table = cost.table(requests + known.size + 1)
    tokens, rates = float(requests), [requests / float(table[requests])]
    for k, (negated, _, _) in enumerate(in_order(known, least), 1):
        tokens -= negated
        rates.append(tokens / float(table[requests + k]))
    if capacity is not None:
        rates = rates[: max(0, capacity - requests) + 1]
    k = rates.index(max(rates))
    if rates[k] < rates[-1] * (1.0 + gain):
        k = len(rates) - 1
    lengths = [0] * requests
    for _, _, request in in_order(live, least)[:k]:
        lengths[request] += 1
    return lengths, rates[k]


@pytest.mark.parametrize("requests", [1, 5, 40, 150])
def test_plans_equal_those_in_plain_python(requests: int) -> None:
    """To the last bit, with ties, zeros, a limit, in either memory order."""
    generator = np.random.default_rng(requests)
    grids = ([0.0, 0.25, 0.5, 1.0], [0.999, 1.0], [0.0, 1e-4, 0.3], np.linspace(0.01, 1, 997))
    for turn in range(240 // requests + 4):
        shape = requests, int(generator.integers(1, 7))
        grid = grids[turn % 4]
        live, known = (prefix_survival(generator.choice(grid, shape)) for _ in range(2))
        seen: dict[str, object] = {"lagged": known}
        if turn % 3 == 0:
            known, seen = live, {"invariant": True}
        live = np.asarray(live, order="CF"[turn % 2])  # type: ignore[call-overload]
        least, gain = float(generator.choice([0.0, 1e-6, 0.25])), float(turn % 5 == 0) * 0.05
        limit = int(generator.integers(requests, 7 * requests)) if turn % 2 else None
        cost = (STAIRS, LINE, StepCostModel.additive(9.9e-3, 12e-6))[turn % 3]
        made = VerificationScheduler(cost, min_gain=gain, min_survival=least)
        plan = made.plan(live, capacity=limit, **seen)
        lengths, rate = global_search(live, known, cost, least, gain, limit)
        assert plan.lengths.tolist() == lengths
        assert plan.theta == rate
        assert (plan.k, plan.rows) == (sum(lengths), requests + sum(lengths))
        assert plan.seconds == float(cost.table(plan.rows + 1)[plan.rows])


@settings(max_examples=60)
@given(SURVIVALS, st.sampled_from([STAIRS, LINE]))
def test_global_search_is_the_best_of_all(rows: list[list[float]], cost: StepCostModel) -> None:
    survival = prefix_survival(rows)
    plan = VerificationScheduler(cost).plan(survival, invariant=True)
    assert plan.theta == pytest.approx(best_of_all(survival, cost), rel=1e-5)
    assert plan.rows == len(rows) + plan.k == plan.cu_rows[-1]
    assert np.diff(plan.cu_rows).tolist() == (plan.lengths + 1).tolist()
    assert plan.seconds == pytest.approx(float(cost.seconds(len(rows), plan.rows)))


@settings(max_examples=100)
@given(SURVIVALS, st.sampled_from([STAIRS, LINE]))
def test_early_stop_is_algorithm_1(rows: list[list[float]], cost: StepCostModel) -> None:
    survival = prefix_survival(rows)
    plan = VerificationScheduler(cost, search="early_stop").plan(survival)
    assert plan.lengths.tolist() == algorithm_1(survival, cost)


def test_the_papers_example_stops_before_it_sees_the_second_confidence() -> None:
    """Appendix A: looking back, the second confidence would decide about the first draft."""
    cost = StepCostModel([1, 2, 3], [1.0, 2.0, 1 / 0.45])
    for second in (0.0, 0.9):
        survival = prefix_survival([[0.8, second]])
        early = VerificationScheduler(cost, search="early_stop").plan(survival)
        assert early.lengths.tolist() == [0]
        retrospective = VerificationScheduler(cost).plan(survival, invariant=[True])
        assert retrospective.lengths.tolist() == [2 if second else 0]


def test_global_search_refuses_to_anticipate() -> None:
    live = prefix_survival([[0.9, 0.5], [0.9, 0.5]])
    scheduler = VerificationScheduler(LINE)
    for invariant, lagged in itertools.product((None, [True, False]), (None, live)):
        with pytest.raises(AnticipationError, match="lagged"):
            scheduler.plan(live, lagged=lagged, invariant=invariant)
    with pytest.raises(AnticipationError):
        VerificationScheduler(LINE, search="uniform").plan(live)
    known = [scheduler.plan(live, invariant=free) for free in ([True, True], True)]
    assert known[0].lengths.tolist() == known[1].lengths.tolist()
    assert VerificationScheduler(LINE, search="static").plan(live).lengths.tolist() == [2, 2]


def test_the_budget_never_depends_on_live_values() -> None:
    generator = np.random.default_rng(0)
    lagged = prefix_survival(generator.random((6, 5)))
    sums = {
        VerificationScheduler(STAIRS)
        .plan(prefix_survival(generator.uniform(0.01, 1, (6, 5))), lagged=lagged)
        .k
        for _ in range(30)
    }
    assert len(sums) == 1


@settings(max_examples=40)
@given(st.integers(0, 10**6))
def test_whether_a_draft_is_verified_never_depends_on_itself(seed: int) -> None:
    """Confidences behind a draft come from its token: changing them must not change whether it is verified."""
    generator = np.random.default_rng(seed)
    lagged = prefix_survival(generator.random((4, 3)))
    confidence = generator.choice([0.05, 0.1, 0.2, 0.3, 0.5, 0.6, 0.9, 1.0], (4, 3))
    request, position = int(generator.integers(4)), int(generator.integers(3))
    made = [prefix_survival(confidence)]
    for later in (0.0, 0.3, 1.0):
        confidence[request, position + 1 :] = later
        made.append(prefix_survival(confidence))
    free = np.arange(4) == (request + 1) % 4
    for search, floor in itertools.product(SEARCHES, (0, 1)):
        scheduler = VerificationScheduler(STAIRS, search=search, min_drafts=floor)
        for capacity, invariant in itertools.product((None, 6, 9), (None, free)):
            limits = {"capacity": capacity, "invariant": invariant}
            plans = [scheduler.plan(live, lagged=lagged, **limits) for live in made]
            assert len({bool(plan.lengths[request] > position) for plan in plans}) == 1


def test_what_is_not_to_be_verified_does_not_compete_for_room() -> None:
    """The third confidence of the first request reads its second draft, so it must not decide about that one."""
    scheduler = VerificationScheduler(LINE, search="static", threshold=0.5)
    for third in (0.0, 0.9):
        live = prefix_survival([[0.6, 0.6, third], [0.45, 0.1, 0.1]])
        assert scheduler.plan(live, capacity=4).lengths.tolist() == [2, 0]


def test_lagged_survivals_of_longer_or_shorter_blocks() -> None:
    live = np.full((2, 3), 0.9)
    free = VerificationScheduler(StepCostModel.additive(1.0, 1e-3), search="uniform")
    assert free.plan(live, lagged=np.full((2, 5), 0.9)).lengths.tolist() == [3, 3]
    assert free.plan(live, lagged=np.full((2, 2), 0.9)).lengths.tolist() == [2, 2]
    with pytest.raises(ShapeError, match="lagged"):
        free.plan(live, lagged=np.full((2, 5), 0.9), invariant=[True, False])


@pytest.mark.parametrize("search", SEARCHES)
def test_numbers_out_of_range_are_no_survivals(search: str) -> None:
    scheduler = VerificationScheduler(LINE, search=search)
    low = [[-0.1, -0.1], [-0.0, -0.0], [0.9, 0.8]]
    high = [[1.5, 1.5], [0.05, 0.01]]
    for wrong in (low, high):
        right = np.clip(wrong, 0.0, 1.0)
        found, expected = (scheduler.plan(rows, lagged=np.array(rows)) for rows in (wrong, right))
        assert found.lengths.tolist() == expected.lengths.tolist()
        assert found.theta == expected.theta


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"capacity": 1.5}, ConfigError),
        ({"capacity": "3"}, ConfigError),
        ({"capacity": -1}, ConfigError),
        ({"sampling_requests": 5}, ConfigError),
        ({"live": [[0.5], [0.5, 0.1]]}, ShapeError),
        ({"live": [["x", "y"]]}, ShapeError),
        ({"lagged": 3}, ShapeError),
    ],
)
def test_what_is_no_number(arguments: dict[str, object], error: type[Exception]) -> None:
    given: dict[str, object] = {"live": [[0.5, 0.2]], "lagged": [[0.5, 0.2]], **arguments}
    with pytest.raises(error, match=next(iter(arguments)) if error is ConfigError else "must be"):
        VerificationScheduler(LINE).plan(given.pop("live"), **given)


def test_survivals_of_a_head_as_they_are() -> None:
    torch = pytest.importorskip("torch")
    rows = torch.tensor([[0.9, 0.5]], requires_grad=True)
    survival = prefix_survival(rows.to(torch.bfloat16))
    assert survival[0].tolist() == pytest.approx([0.9, 0.45], rel=0.01)
    scheduler = VerificationScheduler(LINE)
    assert scheduler.plan(rows.bfloat16(), lagged=rows).k == 2
    for wrong in (None, lambda rows: 1.0):
        with pytest.raises(ConfigError, match="cost"):
            VerificationScheduler(wrong)


def test_mixed_batches_use_live_values_of_free_requests() -> None:
    live = prefix_survival([[1.0, 1.0], [0.01, 0.01]])
    lagged = prefix_survival([[0.01, 0.01], [0.01, 0.01]])
    scheduler = VerificationScheduler(LINE)
    assert scheduler.plan(live, lagged=lagged).k == 0
    assert scheduler.plan(live, lagged=lagged, invariant=[True, False]).lengths.tolist() == [2, 0]


def test_floor_ceiling_and_capacity() -> None:
    live = prefix_survival([[0.99, 0.98, 0.97], [0.01, 0.01, 0.01]])
    dear = StepCostModel.additive(0.001, 1.0)
    free = [True, True]
    assert VerificationScheduler(dear, min_drafts=1).plan(
        live, invariant=free
    ).lengths.tolist() == [1, 1]
    assert VerificationScheduler(LINE, max_drafts=2).plan(
        live, invariant=free
    ).lengths.tolist() == [2, 0]
    every = VerificationScheduler(LINE, search="all")
    assert every.plan(live).lengths.tolist() == [3, 3]
    assert every.plan(live, capacity=5).lengths.tolist() == [3, 0]
    assert every.plan(live, capacity=1).lengths.tolist() == [0, 0]
    floor = VerificationScheduler(LINE, search="all", min_drafts=1)
    assert floor.plan(live, capacity=5).lengths.tolist() == [2, 1]


def test_trimming_must_pay() -> None:
    live = prefix_survival([[0.5, 0.06]])
    assert VerificationScheduler(LINE).plan(live, invariant=[True]).lengths.tolist() == [1]
    assert VerificationScheduler(LINE, min_gain=0.1).plan(
        live, invariant=[True]
    ).lengths.tolist() == [2]


def test_static_stops_at_the_first_low_confidence() -> None:
    scheduler = VerificationScheduler(LINE, search="static", threshold=0.5)
    confidence = [[0.9, 0.4, 0.9], [0.5, 0.6, 0.7], [0.0, 1.0, 1.0]]
    assert scheduler.plan(prefix_survival(confidence)).lengths.tolist() == [1, 3, 0]


def test_uniform_is_the_best_shared_length() -> None:
    survival = prefix_survival([[0.9, 0.2, 0.1], [0.7, 0.2, 0.1]])
    plan = VerificationScheduler(LINE, search="uniform").plan(survival, invariant=True)
    thetas = [
        (2 + float(survival[:, :n].sum())) / float(LINE.seconds(2, 2 + 2 * n)) for n in range(4)
    ]
    assert plan.lengths.tolist() == [int(np.argmax(thetas))] * 2


def test_prefill_rows_cost_and_give_nothing() -> None:
    survival = prefix_survival([[0.5]] * 4)
    assert VerificationScheduler(LINE).budget(survival, sampling_requests=0).off_theta == 0.0


def test_graph_stairs_are_filled() -> None:
    """On stairs the best K ends at a captured size, or takes everything."""
    generator = np.random.default_rng(3)
    for _ in range(40):
        requests = int(generator.integers(2, 8))
        survival = prefix_survival(generator.uniform(0.3, 0.99, (requests, 5)))
        plan = VerificationScheduler(STAIRS).plan(survival, invariant=True)
        assert plan.rows in STAIRS.graph_sizes or plan.k == requests * 5 or plan.rows > 40


def test_flat_costs_warn_and_verify_everything() -> None:
    flat = StepCostModel([1, 64], [1.0, 1.0])
    with pytest.warns(UserWarning, match="flat"):
        scheduler = VerificationScheduler(flat)
    survival = prefix_survival([[0.5, 0.01]] * 3)
    assert scheduler.plan(survival, invariant=True).lengths.tolist() == [2, 2, 2]


def test_the_published_load() -> None:
    """60 requests at 9.9 ms and 12 us a row: trimming gives about 5 % over verifying five drafts."""
    generator = np.random.default_rng(5)
    cost = StepCostModel.additive(9.9e-3, 12e-6)
    gains, saved = [], []
    for _ in range(50):
        # A mix of easy and hard requests with an accepted length of about 3.3 in all.
        skill = generator.beta(2.2, 1.0, (60, 1))
        survival = prefix_survival(np.clip(skill + generator.normal(0, 0.05, (60, 5)), 0.01, 0.99))
        plan = VerificationScheduler(cost).plan(survival, invariant=True)
        whole = (60 + float(survival.sum())) / float(cost.seconds(60, 360))
        gains.append(plan.theta / whole - 1)
        saved.append(1 - plan.rows / 360)
    assert np.mean(gains) > 0.04
    assert np.mean(saved) > 0.2


def test_empty_batches_and_bad_shapes() -> None:
    scheduler = VerificationScheduler(LINE)
    plan = scheduler.plan(np.zeros((0, 5)), lagged=np.zeros((0, 5)))
    assert (plan.k, plan.rows, plan.cu_rows.tolist()) == (0, 0, [0])
    with pytest.raises(ShapeError):
        scheduler.plan([0.5], lagged=[[0.5]])
    with pytest.raises(ShapeError, match="invariant"):
        scheduler.plan([[0.5]], invariant=[True, False])
    with pytest.raises(ConfigError, match="search"):
        VerificationScheduler(LINE, search="best")
    with pytest.raises(ConfigError, match="max_drafts"):
        VerificationScheduler(LINE, min_drafts=3, max_drafts=2)
    assert math.isfinite(plan.theta)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("capacity", [None, 0, 1, 3, 10**9])
def test_survivals_that_are_none(search: str, capacity: int | None) -> None:
    made = VerificationScheduler(StepCostModel.additive(1e-3, 1e-4), search=search)
    for rows in (
        [[np.nan, 0.5], [0.9, np.nan]], [[-1.0, 0.5], [0.9, -np.inf]], [[np.inf, 2.0], [1.0, 1.0]],
        np.zeros((0, 3)), np.zeros((3, 0)), np.full((2, 3), np.nan), [[1e-40, 1e-45]],
    ):  # fmt: skip
        plan = made.plan(rows, lagged=np.array(rows), capacity=capacity)
        requests, drafts = np.shape(rows)
        assert plan.lengths.shape == (requests,)
        assert ((plan.lengths >= 0) & (plan.lengths <= drafts)).all()
        assert plan.rows == requests + int(plan.lengths.sum()) == plan.cu_rows[-1]
        assert capacity is None or plan.rows <= max(capacity, requests)
        assert np.isfinite(plan.theta)
        assert np.isfinite(made.budget(rows, capacity=capacity).theta)
