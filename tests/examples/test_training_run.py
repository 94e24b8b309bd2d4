"""The command: budget and schedule, saving, stopping, resuming, compiled parts against eager ones."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from nano import storage
from nano.batches import Batches
from nano.compiling import EAGER, CompiledPart, compile_parts
from nano.draft import DraftParts
from nano.draft_training import DraftTrainer, FeatureStore, draw_anchors
from nano.report import StopRequest
from nano.schedule import Budget, Schedule
from nano.storage import load_state, replace_file, replace_folder, save_state, saved_states
from nano.trunk import Trunk
from nano.trunk_training import batch_losses
from tiny_training import (
    TINY_RUN,
    VOCAB,
    options,
    random_trunk,
    shrink_constants,
    text_rows,
    training_command,
)
from torch import Tensor


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# ---- budget and schedule ----


@pytest.mark.parametrize(("seconds_a_step", "ended"), [(0.5, "steps"), (2.0, "seconds")])
def test_the_nearer_limit_ends_a_phase_with_a_finished_decay(
    seconds_a_step: float, ended: str
) -> None:
    clock, schedule = FakeClock(), Schedule()
    budget = Budget(steps=600, max_seconds=620, clock=clock)
    clock.now += 5  # before the start nothing counts
    budget.start(already_spent=20)
    shares, factors, i = [], [], 0
    while not (by := budget.ended_by(i)):
        shares.append(budget.share(i))
        factors.append(schedule.learning_rate(i, shares[-1]))
        clock.now += seconds_a_step
        i += 1
    assert by == ended
    assert i == (600 if ended == "steps" else 300)
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert budget.share(i) == 1
    assert factors[0] == pytest.approx(0.01)
    assert max(factors) == 1
    assert factors[-1] < 0.03


def test_a_continued_schedule_goes_on_where_it_was() -> None:
    clock = FakeClock()
    budget = Budget(steps=10, first_share=0.6, clock=clock)
    budget.start()
    assert [budget.share(i) for i in (0, 5, 10)] == pytest.approx([0.6, 0.8, 1.0])
    assert budget.ended_by(9) is None
    assert budget.ended_by(10) == "steps"


def test_nothing_is_left_when_compiling_took_it_all() -> None:
    budget = Budget(steps=10, max_seconds=30, clock=FakeClock())
    budget.start(already_spent=31)
    assert budget.ended_by(0) == "seconds"
    assert Budget(steps=0).ended_by(0) == "steps"


def test_blend_and_learning_rate_stay_in_bounds() -> None:
    schedule = Schedule()
    shares = np.linspace(0, 1, 50)
    blends = [schedule.blend(share) for share in shares]
    assert blends == sorted(blends)
    assert (blends[0], blends[-1]) == (0, 1)
    assert all(0 <= schedule.learning_rate(500, share) <= 1 for share in shares)
    assert schedule.learning_rate(500, 1.0) == 0


# ---- storage ----


def test_states_are_split_and_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "MAX_PART_BYTES", 3000)
    state = {
        "matrix": torch.randn(40, 30),
        "vector": torch.randn(500),
        "scalar": torch.tensor(0.25),
        "large": torch.randn(60, 60),
        "count": torch.arange(3),
    }
    save_state(tmp_path, "trunk", 5, state, {"share": "0.5"})
    folder = save_state(tmp_path, "trunk", 12, state, {"share": "0.75"})
    assert saved_states(tmp_path, "trunk") == [folder]
    parts = sorted(folder.iterdir())
    assert len(parts) >= 3
    for path in (tmp_path, folder):
        loaded, meta = load_state(path, "trunk")
        assert meta["share"] == "0.75"
        assert set(loaded) == set(state)
        for name, tensor in state.items():
            expected = tensor.half().float() if tensor.dim() > 1 else tensor
            assert torch.equal(loaded[name], expected)
    with pytest.raises(FileNotFoundError, match="no saved draft"):
        load_state(tmp_path, "draft")


def test_a_failed_write_leaves_the_old_one(tmp_path: Path) -> None:
    def fill(text: str, path: Path) -> None:
        (path / "a").write_text(text)

    def fail(path: Path) -> None:
        (path / "a").write_text("half") if path.is_dir() else path.write_text("half")
        raise KeyboardInterrupt

    folder, file = tmp_path / "folder", tmp_path / "file"
    replace_folder(folder, lambda path: fill("old", path))
    replace_file(file, lambda path: path.write_text("old"))
    for target, replace in ((folder, replace_folder), (file, replace_file)):
        with pytest.raises(KeyboardInterrupt):
            replace(target, fail)
    assert (folder / "a").read_text() == "old"
    assert file.read_text() == "old"
    replace_folder(folder, lambda path: fill("new", path))
    assert (folder / "a").read_text() == "new"
    assert {p.name for p in tmp_path.iterdir()} == {"folder", "file", ".file"}


# ---- the command ----


def test_a_whole_run(trained: Path) -> None:
    report = json.loads((trained / "report.json").read_text())
    assert report["phases"]["trunk"]["ended_by"] == "steps"
    assert report["phases"]["trunk"]["steps"] == 20
    assert report["phases"]["draft"]["steps"] == 10
    assert set(report["versions"]) >= {"python", "torch", "device"}
    steps = [line for line in report["log"] if "step" in line]
    assert [line["step"] for line in steps] == [5, 10, 15, 20]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert report["log"][-1]["event"] == "done"
    assert 0 < report["trunk"]["bpb_code"] < 3
    assert 1 <= report["draft"]["own"]["tokens_per_step"] <= 4
    names = {p.name for p in trained.iterdir()}
    assert {"trunk-000020", "draft-000010", "own.npy", "checkpoint", "report.json"} <= names
    assert load_state(trained, "trunk")[1] == {"share": "1.000000"}
    assert all(p.stat().st_size <= 15e6 for p in trained.rglob("*") if p.is_file())


def run(data_folder: Path, out: Path, *arguments: str | Path) -> dict[str, object]:
    handler = signal.getsignal(signal.SIGTERM)
    try:
        training_command.train(
            options("train", "--data", data_folder, "--out", out, *TINY_RUN, *arguments)
        )
    finally:
        signal.signal(signal.SIGTERM, handler)
    return json.loads((out / "report.json").read_text())


def test_a_trunk_is_reused_with_its_continuations(
    trained: Path, data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink_constants(monkeypatch)
    report = run(data_folder, tmp_path, "--resume-trunk", trained, "--draft-steps", "4")
    assert "trunk" not in report["phases"]
    assert report["phases"]["draft"]["steps"] == 4
    assert any(line.get("event") == "own continuations reused" for line in report["log"])
    assert not (tmp_path / "own.npy").exists()


def test_a_termination_saves_and_the_run_goes_on_later(
    data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink_constants(monkeypatch)
    original = StopRequest.__call__

    def stop(self: StopRequest) -> bool:
        if not saved_states(tmp_path, "trunk"):
            return original(self)  # asked after every step
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        return original(self)

    monkeypatch.setattr(StopRequest, "__call__", stop)
    report = run(data_folder, tmp_path, "--steps", "40", "--draft-steps", "2")
    assert report["log"][-1] == {
        "at_s": report["log"][-1]["at_s"], "event": "stopped", "reason": "SIGTERM",
    }  # fmt: skip
    assert report["phases"]["trunk"] == {
        "steps": 9, "ended_by": "stop request", "seconds": report["phases"]["trunk"]["seconds"],
    }  # fmt: skip
    share = float(load_state(tmp_path, "trunk")[1]["share"])
    assert share == pytest.approx(8 / 40)

    monkeypatch.setattr(StopRequest, "__call__", original)
    resumed = ("--resume-trunk", tmp_path, "--continue-trunk", "--steps", "5", "--draft-steps", "2")
    report = run(data_folder, tmp_path / "second", *resumed)
    first = next(line for line in report["log"] if "step" in line)
    assert first["share"] == pytest.approx(share + (1 - share) * 4 / 5, abs=1e-3)
    assert report["log"][-1]["event"] == "done"


def test_seconds_end_the_phases(
    data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink_constants(monkeypatch)
    limits = ("--max-seconds", "0.7", "--draft-max-seconds", "1.0", "--own-max-seconds", "0")
    report = run(data_folder, tmp_path, *limits)
    for name in ("trunk", "draft"):
        assert report["phases"][name]["ended_by"] == "seconds"
        assert report["phases"][name]["steps"] < 500
    assert any("too short" in line.get("event", "") for line in report["log"])
    assert "own" not in report["draft"]


# ---- parts of the draft's training ----


def test_feature_store_is_a_ring(trunk: Trunk) -> None:
    out = trunk.frozen(text_rows(2, 128), features=True)
    store = FeatureStore(6, 32, out)
    first, second = text_rows(4, 128).split(2)
    store.add(first, out)
    assert store.filled == 6
    expected = first.view(8, 32)
    assert torch.equal(store.ids, torch.cat([expected[6:], expected[2:6]]))
    store.add(second[:1], trunk.frozen(second[:1], features=True))
    assert torch.equal(store.ids[2:6], second[0].view(4, 32))
    ids, features, hidden = store.draw(50, torch.Generator().manual_seed(0))
    assert features.shape == (50, 32, 2 * trunk.c.hidden_size)
    for row, h in zip(ids, hidden, strict=True):
        place = (store.ids == row).all(1).nonzero()[0, 0]
        assert torch.equal(store.hidden[place], h)


def test_anchors_lie_in_their_windows() -> None:
    ids = torch.arange(5 * 64).view(5, 64)
    generator = torch.Generator().manual_seed(0)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    seen = set()
    for _ in range(100):
        anchors = draw_anchors(ids, 16, 3, uniform)
        window = anchors.at // 16
        assert torch.equal(window, torch.arange(1, 4)[None, :, None].expand_as(window))
        assert torch.equal(anchors.ids, ids.gather(1, anchors.at.flatten(1)).view_as(anchors.at))
        assert anchors.reach.min() >= 1
        assert anchors.reach.max() == 16
        seen |= set(anchors.at.flatten().tolist())
    assert seen == set(range(16, 62))


# ---- compiled parts ----

COMPILED = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
"""The compiler looks at `.grad` of inputs that are results of other graphs."""


def trunk_gradients(trunk: Trunk, x: Tensor, chunk: int) -> tuple[list[float], dict[str, Tensor]]:
    trunk.zero_grad(set_to_none=True)
    loss, index_loss, _ = batch_losses(trunk, x, torch.ones(len(x), x.shape[1] - 1), chunk)
    (loss + index_loss).backward()
    gradients = {n: p.grad.clone() for n, p in trunk.named_parameters() if p.grad is not None}
    return [loss.item(), index_loss.item()], gradients


def close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    assert set(ours) == set(theirs)
    return all((ours[n] - g).norm() <= 1e-4 * g.norm() + 1e-9 for n, g in theirs.items())


@COMPILED
def test_compiled_parts_give_the_same_losses_and_gradients() -> None:
    trunk = random_trunk()
    trunk.sparse, trunk.dropout = True, 0.1
    trunk.blend.fill_(0.5)
    trunk.eval()
    x = torch.cat([text_rows(2, 96), text_rows(2, 96)[:, :1]], 1)
    expected = [trunk_gradients(trunk, x, chunk) for chunk in (0, 1)]
    assert expected[0][0][1] != expected[1][0][1]
    frozen = trunk.frozen(x[:, :-1], features=True)
    problems: list[object] = []
    torch._dynamo.utils.counters.clear()
    parts = compile_parts(EAGER, "aot_eager", lambda **line: problems.append(line))
    trunk.use_parts(parts, (2, 96), need_grad=True)
    for chunk, (losses, gradients) in enumerate(expected):
        found, ours = trunk_gradients(trunk, x, chunk)
        assert found == pytest.approx(losses, rel=1e-5)
        assert close(ours, gradients)
        if chunk == 0:
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    # another quarter of the chunks and a forward without gradient need no new graph
    again = trunk.frozen(x[:, :-1], features=True)
    torch.testing.assert_close(again.hidden, frozen.hidden, atol=1e-4, rtol=0)
    torch.testing.assert_close(again.features, frozen.features, atol=1e-4, rtol=0)
    assert not again.hidden.requires_grad
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert problems == []


@COMPILED
def test_compiled_draft_gives_the_same_loss_and_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shrink_constants(monkeypatch)
    trunk = random_trunk()
    streams = {name: text_rows(1, 2000)[0].int() for name in ("code", "docs", "tasks")}
    batches = Batches(streams, 128, 12, VOCAB, 0)
    chosen = options("train", "--data", ".", "--out", ".", "--batch", "1", "--context", "128")
    trainer = DraftTrainer(trunk, batches, None, chosen)
    drawn = trainer.draw(trainer.text)
    problems: list[object] = []

    def note(**line: object) -> None:
        problems.append(line)

    results = []
    for parts in (DraftParts(), compile_parts(DraftParts(), "aot_eager", note)):
        trainer.draft.parts = parts
        trainer.draft.zero_grad(set_to_none=True)
        loss, _ = trainer.loss(*drawn)
        loss.total.backward()
        gradients = {n: p.grad for n, p in trainer.draft.named_parameters()}
        results.append((loss, gradients))
    (eager, expected), (compiled, found) = results
    for ours, theirs in zip(compiled, eager, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert close(found, expected)
    assert all(p.grad is None for p in trunk.parameters())
    assert problems == []


def test_a_part_that_does_not_compile_runs_eagerly() -> None:
    def broken(graph: object, inputs: object) -> None:
        raise RuntimeError("no compiler here")

    problems: list[dict[str, object]] = []
    part = CompiledPart(torch.add, broken, lambda **line: problems.append(line))
    for _ in range(2):
        assert part(torch.ones(2), torch.ones(2)).tolist() == [2, 2]
    assert len(problems) == 1
    assert "no compiler here" in str(problems[0]["error"])
    with pytest.raises(RuntimeError, match="size"):
        part(torch.ones(2), torch.ones(3))
