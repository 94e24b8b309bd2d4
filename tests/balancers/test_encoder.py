"""Vision encoders: by patches, one encoding an image, batches within their caps, leases, nothing lost with a worker."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.balancers import EncoderBalancer, EncoderCost, EncoderFleet, ImageTask
from deepinfer.core.errors import ConfigError, InvalidRequest, InvariantBroken

COST = EncoderCost(patch_s=1e-3, batch_s=0.01)
BALANCER = EncoderBalancer(COST)


def send(fleet: EncoderFleet, image: ImageTask, now_s: float = 0.0) -> int | None:
    target = BALANCER.decide(image, fleet, now_s).target
    if target is not None:
        fleet.send(target, image, now_s)
    return target


def test_work_is_counted_in_patches() -> None:
    fleet = EncoderFleet(["a", "b"])
    assert send(fleet, ImageTask("r0", "large", 5_000)) == 0
    small = [send(fleet, ImageTask(f"r{n}", f"small{n}", 100)) for n in range(1, 5)]
    assert small == [1, 1, 1, 1]


def test_a_running_batch_counts_with_what_is_left_of_it() -> None:
    fleet = EncoderFleet(["a", "b"])
    send(fleet, ImageTask("r0", "x", 1_000))
    fleet.begin_batch(0, 0.0, COST)
    assert fleet.busy_s(0, 0.5) == pytest.approx(0.51)
    send(fleet, ImageTask("r1", "y", 700), 0.0)  # to b, 0.71 s
    assert BALANCER.decide(ImageTask("r2", "z", 10), fleet, 0.0).target == 1
    assert BALANCER.decide(ImageTask("r2", "z", 10), fleet, 0.5).target == 0


def test_same_image_is_encoded_once() -> None:
    fleet = EncoderFleet(["a", "b"])
    image = ImageTask("r0", "cat", 500, tokens=50)
    assert send(fleet, image) == 0
    again = BALANCER.decide(ImageTask("r1", "cat", 500, tokens=50), fleet, 0.0)
    assert (again.target, again.reason) == (0, "same_image")
    fleet.send(0, ImageTask("r1", "cat", 500, tokens=50), 0.0)
    assert fleet.waiting(0) == (1, 500)
    assert fleet.begin_batch(0, 0.0, COST) == ("cat",)
    running = BALANCER.decide(ImageTask("r2", "cat", 500, tokens=50), fleet, 0.25)
    assert (running.target, running.predicted) == (0, pytest.approx(0.26))
    assert fleet.end_batch(0) == [("r0", "cat"), ("r1", "cat")]
    ready = BALANCER.decide(ImageTask("r3", "cat", 500, tokens=50), fleet, 0.6)
    assert (ready.target, ready.reason, ready.predicted) == (0, "ready", 0.0)


def test_affinity_ends_where_another_worker_is_faster() -> None:
    fleet = EncoderFleet(["a", "b"])
    for number in range(10):
        fleet.send(0, ImageTask(f"r{number}", f"queue{number}", 1_000), 0.0)
    fleet.send(0, ImageTask("r10", "cat", 500), 0.0)
    decision = BALANCER.decide(ImageTask("r11", "cat", 500), fleet, 0.0)
    assert (decision.target, decision.reason) == (1, "least_work")
    # An image that is nearly first in the queue is waited for.
    first = BALANCER.decide(ImageTask("r11", "queue0", 1_000), fleet, 0.0)
    assert (first.target, first.reason) == (0, "same_image")


def test_batches_keep_within_their_caps() -> None:
    fleet = EncoderFleet(["a"], batch_images=3, batch_patches=250)
    for number, patches in enumerate((100, 100, 100, 900, 10, 10, 10, 10)):
        fleet.send(0, ImageTask(f"r{number}", str(number), patches), 0.0)
    batches = []
    while batch := fleet.begin_batch(0, 0.0, COST):
        assert fleet.begin_batch(0, 0.0, COST) == ()  # one at a time
        batches.append(batch)
        fleet.end_batch(0)
    assert batches == [("0", "1"), ("2",), ("3",), ("4", "5", "6"), ("7",)]


def test_leases_keep_embeddings_until_they_are_taken() -> None:
    fleet = EncoderFleet(["a"], capacity_tokens=100, lease_s=10.0)
    for rid, media in (("r0", "x"), ("r1", "x"), ("r2", "y")):
        assert send(fleet, ImageTask(rid, media, 10, tokens=50)) == 0
    fleet.begin_batch(0, 0.0, COST)
    fleet.end_batch(0)
    other = ImageTask("r3", "z", 10, tokens=50)
    assert BALANCER.decide(other, fleet, 1.0).reason == "no_room"
    assert fleet.consume(0, "r0", "x")
    assert not fleet.consume(0, "r0", "x")
    assert BALANCER.decide(other, fleet, 1.0).reason == "no_room"  # r1 still wants x
    assert fleet.consume(0, "r1", "x")
    assert fleet.find(0, "x") == "ready"  # kept while there is room
    assert send(fleet, other, 1.0) == 0
    assert fleet.find(0, "x") is None
    assert fleet.find(0, "y") == "ready"
    assert fleet.expire(9.0) == []
    assert fleet.expire(10.5) == [("r2", "y")]
    assert fleet.num_leases(0) == 1


def test_images_that_nobody_wants_any_more_are_not_encoded() -> None:
    fleet = EncoderFleet(["a"])
    send(fleet, ImageTask("r0", "x", 10))
    send(fleet, ImageTask("r1", "y", 10))
    fleet.consume(0, "r0", "x")  # aborted while it waited
    assert fleet.begin_batch(0, 0.0, COST) == ("y",)
    assert fleet.find(0, "x") is None


def test_dead_and_draining_workers_get_nothing_and_nothing_is_lost() -> None:
    fleet = EncoderFleet(["a", "b"])
    image = ImageTask("r0", "cat", 100, tokens=7)
    send(fleet, image)
    fleet.drain(0)
    assert BALANCER.decide(ImageTask("r1", "cat", 100), fleet, 0.0).target == 1
    with pytest.raises(InvariantBroken, match="a is draining"):
        fleet.send(0, image, 0.0)
    assert fleet.begin_batch(0, 0.0, COST) == ("cat",)  # it finishes what it has
    assert fleet.drop(0) == [image]
    assert fleet.drop(0) == []
    assert send(fleet, image) == 1
    fleet.drain(1)
    assert BALANCER.decide(image, fleet, 0.0).reason == "no_worker_ready"
    fleet.revive(0)
    assert send(fleet, ImageTask("r2", "dog", 1)) == 0


def test_by_patches_beats_by_images() -> None:
    """Screens among thumbnails: the last embedding is there earlier than when images are counted."""
    rng = np.random.default_rng(0)
    sizes = np.where(rng.random(400) < 0.1, 8_000, 200)
    fleet = EncoderFleet([str(n) for n in range(8)], capacity_tokens=10**6)
    counted = np.zeros(8)
    for number, patches in enumerate(sizes.tolist()):
        send(fleet, ImageTask(f"r{number}", str(number), patches))
        counted[number % 8] += patches
    work = np.array([fleet.waiting(worker)[1] for worker in range(8)])
    assert work.sum() == counted.sum()
    assert work.max() / work.mean() < 1.1 < counted.max() / counted.mean()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_image_is_accounted_for(data: st.DataObject) -> None:
    """Whatever happens in whatever order, a lease is delivered, given back, ended, or handed back to be sent again."""
    fleet = EncoderFleet(tuple("abc"), capacity_tokens=40, batch_images=2, lease_s=20.0)
    pending: dict[tuple[str, str], int] = {}
    ready: set[tuple[str, str]] = set()
    for step in range(data.draw(st.integers(1, 40))):
        now_s = float(step)
        action = data.draw(
            st.sampled_from(
                ("send", "send", "begin", "end", "take", "drop", "drain", "revive", "expire")
            )
        )
        worker = data.draw(st.integers(0, 2))
        if action == "send":
            media = data.draw(st.sampled_from("uvwxyz"))
            image = ImageTask(f"r{step}", media, 1 + ord(media) % 7, tokens=10)
            decision = BALANCER.decide(image, fleet, now_s)
            assert decision == BALANCER.decide(image, fleet, now_s)
            if decision.target is not None:
                assert fleet.is_ready(decision.target)
                fleet.send(decision.target, image, now_s)
                pending[image.rid, media] = decision.target
        elif action == "begin":
            assert len(fleet.begin_batch(worker, now_s, COST)) <= 2
        elif action == "end":
            delivered = fleet.end_batch(worker)
            assert all(pending[key] == worker for key in delivered)  # type: ignore[index]
            ready |= set(delivered)  # type: ignore[arg-type]
        elif action == "take" and ready:
            key = sorted(ready)[0]
            if key in pending:
                assert fleet.consume(pending.pop(key), *key)
            ready.discard(key)
        elif action == "drop":
            lost = {(image.rid, str(image.media_hash)) for image in fleet.drop(worker)}
            assert lost == {key for key, where in pending.items() if where == worker}
            for key in lost:
                del pending[key]
        elif action == "expire":
            for key in fleet.expire(now_s):
                del pending[key]  # type: ignore[arg-type]
        elif action in ("drain", "revive"):
            getattr(fleet, action)(worker)
        assert all(fleet.held_tokens(index) <= 40 for index in range(3))
        assert sum(fleet.num_leases(index) for index in range(3)) == len(pending)


def test_bad_input_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="patches is 0"):
        ImageTask("r", "x", 0)
    with pytest.raises(InvalidRequest, match="media_hash"):
        ImageTask("r", "", 1)
    with pytest.raises(ConfigError, match="names that differ"):
        EncoderFleet(["a", "a"])
    with pytest.raises(ConfigError, match="patch_s is 0"):
        EncoderCost(0.0)
    fleet = EncoderFleet(["a"], capacity_tokens=5)
    with pytest.raises(InvariantBroken, match="cannot take"):
        fleet.send(0, ImageTask("r", "x", 1, tokens=6), 0.0)


def test_news_of_a_batch_of_an_earlier_life_change_nothing() -> None:
    cost = EncoderCost(patch_s=1.0)
    fleet = EncoderFleet(["a"])
    fleet.send(0, ImageTask("r1", "cat", 1), 0.0)
    lost = fleet.begin_batch(0, 0.0, cost)
    fleet.drop(0)
    fleet.revive(0)
    fleet.send(0, ImageTask("r2", "cat", 1), 0.0)
    again = fleet.begin_batch(0, 0.5, cost)
    assert fleet.end_batch(0, lost) == []
    assert fleet.find(0, "cat") == "running"
    assert fleet.end_batch(0, again) == [("r2", "cat")]


@pytest.mark.parametrize("worker", [-1, 1])
def test_workers_that_do_not_exist_are_named(worker: int) -> None:
    with pytest.raises(ConfigError, match="worker"):
        EncoderFleet(["a"]).send(worker, ImageTask("r", "x", 1), 0.0)


def test_times_and_names_are_checked() -> None:
    with pytest.raises(ConfigError, match="now_s"):
        EncoderFleet(["a"]).send(0, ImageTask("r", "x", 1), float("nan"))
    for names in ("abc", ["a", ""], [1]):
        with pytest.raises(ConfigError, match="workers"):
            EncoderFleet(names)  # type: ignore[arg-type]
