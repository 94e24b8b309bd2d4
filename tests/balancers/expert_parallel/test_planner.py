"""Plans at intervals: windows, few moves, renumbered GPUs, stages that keep every expert served."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.balancers.expert_parallel import (
    DriftingLoad,
    ExpertPlanner,
    MoveQueue,
    Placement,
    Stage,
    count_moves,
    place_experts,
    relabel,
    stage_moves,
)
from deepinfer.core.errors import ConfigError, InvariantBroken, ShapeError


def random_placement(rng: np.random.Generator, experts: int, gpus: int, further: int) -> Placement:
    """Two layers with random loads."""
    slots = (-(-experts // gpus) + further) * gpus
    return Placement(place_experts(rng.gamma(0.5, 1.0, (2, experts)), slots, gpus), experts, gpus)


def test_presets_are_the_published_numbers() -> None:
    prefill, decode = ExpertPlanner.prefill(4), ExpertPlanner.decode(64)
    assert (prefill.redundant, prefill.window, prefill.interval) == (4, 100, 1_000)
    assert (decode.redundant, decode.window, decode.interval) == (1, 1_000, 10_000)
    assert ExpertPlanner.decode(64, interval=500).interval == 500


def test_the_window_forgets() -> None:
    planner = ExpertPlanner(2, 0, window=10, interval=5)
    for _ in range(30):
        planner.observe([[9.0, 0.0, 0.0, 0.0]])
    for _ in range(10):
        planner.observe([[0.0, 0.0, 0.0, 1.0]])
    assert planner.num_steps == 10
    assert planner.weight().tolist() == [[0.0, 0.0, 0.0, 10.0]]
    long = ExpertPlanner(2, 0, window=1_000, interval=5)
    for _ in range(3_000):
        long.observe([[1.0, 2.0]])
    assert 950 <= long.num_steps <= 1_000


def test_it_is_due_once_an_interval() -> None:
    planner = ExpertPlanner(2, 1, window=4, interval=3)
    due = []
    for _ in range(7):
        planner.observe([[3, 1, 1, 1]])
        due.append(planner.is_due)
        if planner.is_due:
            planner.plan()
    assert due == [False, False, True, False, False, True, False]


def test_balanced_layers_are_left_alone() -> None:
    load = DriftingLoad(4, 64, 100_000, seed=1)
    planner = ExpertPlanner(8, 2, window=20, interval=20)
    for counts in load.steps(20):
        planner.observe(counts)
    first = planner.plan()
    assert first.choices == ("anew",) * 4
    again = planner.plan(first.placement)
    assert again.choices == ("kept",) * 4
    assert again.num_moves == 0
    disturbed = first.placement.phy2log.copy()
    disturbed[2] = Placement.in_order(1, 64, 8, 2).phy2log[0]
    third = planner.plan(Placement(disturbed, 64, 8))
    assert [choice == "kept" for choice in third.choices] == [True, True, False, True]
    assert third.before[2] > third.after[2]


@pytest.mark.parametrize("for_splitter", [False, True])
def test_few_moves_on_drifting_load(for_splitter: bool) -> None:
    """At most half of the moves of plans from scratch, even with the GPUs of those renumbered; nearly as even."""
    load = DriftingLoad(3, 384, 64 * 1_440, walk=0.01, burst=6_000, seed=2)
    planner = ExpertPlanner(64, 1, window=50, interval=50, for_splitter=for_splitter)
    placement, moves, scratch = None, 0, 0
    for _ in range(4):
        for counts in load.steps(50):
            planner.observe(counts)
        plan = planner.plan(placement)
        if placement is not None:
            fresh = place_experts(planner.weight(), 448, 64, for_splitter=for_splitter)
            scratch += int(
                count_moves(placement, relabel(placement, Placement(fresh, 384, 64))).sum()
            )
            moves += plan.num_moves
            assert plan.after.max() < 1.02 < plan.before.min()
            assert len(plan.placement.twins()) == 0
        placement = plan.placement
    assert 0 < moves <= scratch / 2


def test_groups_stay_on_their_nodes_when_adapted() -> None:
    load = DriftingLoad(2, 64, 50_000, walk=0.05, seed=3)
    planner = ExpertPlanner(16, 1, window=10, interval=10, num_groups=8, num_nodes=4, target=1.0)
    placement = None
    for _ in range(3):
        for counts in load.steps(10):
            planner.observe(counts)
        placement = planner.plan(placement).placement
        groups = placement.phy2log.reshape(2, 4, -1) // 8
        for layer, node in itertools.product(range(2), range(4)):
            inside, outside = groups[layer, node], np.delete(groups[layer], node, 0)
            assert not set(inside) & set(outside.ravel())


def test_the_same_statistics_give_the_same_plan() -> None:
    plans = []
    for _ in range(2):
        load = DriftingLoad(2, 32, 10_000, walk=0.05, seed=5)
        planner = ExpertPlanner(8, 1, window=10, interval=10)
        placement = Placement.in_order(2, 32, 8, 1)
        for counts in load.steps(10):
            planner.observe(counts)
        plans.append(planner.plan(placement).placement.phy2log)
    assert (plans[0] == plans[1]).all()


def test_bad_input_is_refused() -> None:
    planner = ExpertPlanner(2, 1, window=4, interval=2)
    with pytest.raises(ConfigError, match="no step was observed"):
        planner.plan()
    planner.observe([[1, 2, 3]])
    with pytest.raises(ShapeError, match="counts has shape"):
        planner.observe([[1, 2]])
    with pytest.raises(ShapeError, match="counts holds -1"):
        planner.observe([[1, -1, 2]])
    with pytest.raises(ShapeError, match="the planner has 1 layers of 3 experts on 2 GPUs"):
        planner.plan(Placement.in_order(1, 4, 2))
    with pytest.raises(ConfigError, match="window is 0"):
        ExpertPlanner(2, 1, window=0, interval=1)
    with pytest.raises(ShapeError, match="no slot with expert 2"):
        Placement(np.array([[0, 1, 1, 0]]), 3, 2)
    with pytest.raises(ShapeError, match="must have equal"):
        count_moves(Placement.in_order(1, 4, 2), Placement.in_order(1, 4, 4))
    with pytest.raises(ConfigError, match="make no placement"):
        Placement.in_order(1, 0, 2)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(0, 2))
def test_renumbering_needs_the_fewest_moves(seed: int, gpus: int, further: int) -> None:
    rng = np.random.default_rng(seed)
    old, new = (random_placement(rng, 12, gpus, further) for _ in range(2))
    best = relabel(old, new)
    shape = (2, gpus, -1)
    have, want, got = (p.phy2log.reshape(shape) for p in (old, new, best))
    for layer in range(2):
        contents = sorted(sorted(row.tolist()) for row in want[layer])
        assert sorted(sorted(row.tolist()) for row in got[layer]) == contents
        fewest = min(
            sum(
                len(have[layer, gpu]) - len(set(have[layer, gpu]) & set(want[layer, source]))
                for gpu, source in enumerate(order)
            )
            for order in itertools.permutations(range(gpus))
        )
        assert count_moves(old, best)[layer] == fewest


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_expert_is_served_after_every_stage(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    gpus = data.draw(st.sampled_from((2, 3, 4, 8)))
    further = data.draw(st.integers(1, 2))
    old = random_placement(rng, 16, gpus, further)
    new = random_placement(rng, 16, gpus, further)
    most = data.draw(st.integers(2, 6))
    stages = stage_moves(old, new, moves_per_stage=most)
    queue = MoveQueue(old, stages)
    per_gpu = old.num_slots // gpus
    while not queue.is_done:
        stage = queue.begin(now_s=0.0)
        assert stage is not None
        assert 1 <= len(stage.moves) <= most
        filled = [(move.layer, move.slot // per_gpu) for move in stage.moves]
        assert len(set(filled)) == len(filled)  # one incoming expert a GPU
        for move in stage.moves:
            assert queue.live[move.layer, move.source] == move.expert
        queue.finish(stage.number)
        assert len(queue.placement.phy2log) == 2  # a placement refuses experts without a slot
    assert (queue.live == new.phy2log).all()
    assert sum(len(stage.moves) for stage in stages) <= 2 * count_moves(old, new).sum()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_plan_never_makes_a_layer_worse(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    gpus = data.draw(st.sampled_from((1, 2, 3, 4, 8, 16)))
    experts = data.draw(st.integers(gpus, 40))
    further = data.draw(st.integers(0, 2))
    old = random_placement(rng, experts, gpus, further)
    planner = ExpertPlanner(
        gpus, further, window=5, interval=1, target=1.0, for_splitter=data.draw(st.booleans())
    )
    weight = rng.gamma(data.draw(st.sampled_from((0.05, 0.5, 5.0))), 1.0, (2, experts))
    planner.observe(weight)
    plan = planner.plan(old)
    assert (plan.after <= plan.before * (1 + 1e-9)).all()
    assert (plan.moves == count_moves(old, plan.placement)).all()
    assert [choice == "kept" for choice in plan.choices] == (plan.before <= 1.0).tolist()
    if old.num_slots // gpus <= experts:
        assert len(plan.placement.twins()) == 0


def test_circles_without_copies() -> None:
    old = Placement(np.array([[0, 1, 2, 3]]), 4, 4)
    new = Placement(np.array([[1, 2, 3, 0]]), 4, 4)
    (stage,) = stage_moves(old, new, moves_per_stage=4)
    assert len(stage.moves) == 4
    with pytest.raises(ConfigError, match="change places"):
        stage_moves(old, new, moves_per_stage=3)
    # With one copy somewhere the circle opens there, whatever the order of the slots.
    for rows in ([[3, 3, 0, 1, 2]], [[0, 1, 2, 3, 3]]):
        start = Placement(np.array(rows), 4, 5)
        turned = np.array(rows)
        ring = [int(np.flatnonzero(turned[0] == expert)[0]) for expert in range(3)]
        turned[0, ring] = [1, 2, 0]
        stages = stage_moves(start, Placement(turned, 4, 5), moves_per_stage=2)
        assert sum(len(stage.moves) for stage in stages) == 5


class TestReportedFaults:
    """Faults that were reported against other load balancers."""

    @pytest.fixture
    def queue(self) -> MoveQueue:
        old = Placement(np.array([[0, 1, 2, 0]]), 3, 2)
        new = Placement(np.array([[2, 1, 0, 1]]), 3, 2)
        return MoveQueue(old, stage_moves(old, new, moves_per_stage=2), timeout_s=10.0)

    def test_vllm_32881_a_buffer_is_not_used_before_its_copy_is_done(
        self, queue: MoveQueue
    ) -> None:
        stage = queue.begin(now_s=1.0)
        assert stage is not None
        with pytest.raises(InvariantBroken, match="buffers are in use"):
            queue.begin(now_s=2.0)
        before = queue.live.copy()
        assert (queue.live == before).all()  # nothing is in force before the copies arrived
        queue.finish(stage.number)
        assert (queue.live != before).any()

    def test_vllm_57883_a_stuck_worker_is_noticed(self, queue: MoveQueue) -> None:
        """The worker hung, its counter went below zero for ever, and nobody was told."""
        assert not queue.is_overdue(1e9)
        stage = queue.begin(now_s=100.0)
        assert stage is not None
        assert not queue.is_overdue(109.0)
        assert queue.is_overdue(111.0)
        queue.abandon(stage.number)
        assert not queue.is_overdue(1e9)
        assert queue.begin(now_s=120.0) == stage  # and tried again
        with pytest.raises(InvariantBroken, match="not under way"):
            queue.finish(stage.number + 1)
        queue.finish(stage.number)
        with pytest.raises(InvariantBroken, match="not under way"):
            queue.finish(stage.number)  # a late second message

    def test_stages_for_another_placement_are_refused(self, queue: MoveQueue) -> None:
        other = MoveQueue(Placement(np.array([[2, 2, 1, 0]]), 3, 2), queue._stages)
        stage = other.begin(now_s=0.0)
        assert isinstance(stage, Stage)
        with pytest.raises(InvariantBroken, match="for another placement"):
            other.finish(stage.number)

    def test_vllm_22167_sglang_5524_ranks_are_counted_once(self) -> None:
        """Loads were those of one rank, or multiplied by the number of ranks."""
        per_rank = np.array([[[4, 0]], [[0, 6]], [[1, 1]]])  # ranks, layers, experts
        planner = ExpertPlanner(2, 0, window=2, interval=1)
        planner.observe(per_rank)
        assert planner.weight().tolist() == [[5.0, 7.0]]
        assert planner.step == 1

    def test_counts_of_slots_become_counts_of_experts(self) -> None:
        placement = Placement(np.array([[0, 1, 1, 0], [0, 0, 1, 1]]), 2, 2)
        assert placement.logical_counts([[1, 2, 3, 4], [5, 6, 7, 8]]).tolist() == [[5, 5], [11, 15]]
        with pytest.raises(ShapeError, match="tokens has shape"):
            placement.logical_counts([[1, 2], [3, 4]])

    def test_a_window_without_load_moves_nothing(self) -> None:
        planner = ExpertPlanner(2, 1, window=4, interval=1)
        planner.observe(np.zeros((1, 4)))
        old = Placement(np.array([[3, 1, 0, 2, 1, 3]]), 4, 2)
        plan = planner.plan(old)
        assert plan.num_moves == 0
        assert plan.choices == ("kept",)
        assert plan.after.tolist() == [1.0]
