"""Steps that verify, as columns: what is done for all rows at once is what was done for each of them."""

from __future__ import annotations

import dataclasses
import importlib
import pickle
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deepinfer import Engine, SamplingParams
from deepinfer.core.params import SamplingParams as Params
from deepinfer.engine import draft_graphs as drafts_module
from deepinfer.engine import graph_inputs, verify_steps
from deepinfer.engine import graphs as graphs_module
from deepinfer.engine.layout import Layout
from deepinfer.engine.runner import ModelRunner
from deepinfer.engine.verify_lane import BlockConfidences, VerifyLanes
from deepinfer.models import load_model
from deepinfer.models.deepseek_v41 import DeepseekV41
from deepinfer.speculative import StepCostModel

PROMPTS = [[0, *range(30, 75)], [0, 11, 12, 13], [0, 99, 98, 97, 96], [0, 5, 6, 7, 5, 6, 7]]
GREEDY = Params(temperature=0, max_tokens=14, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> DeepseekV41:
    return load_model("nano", device="cpu", dtype=torch.float32, rounding="none")


class Dice:
    """Verifies beginnings of random lengths."""

    def __init__(self) -> None:
        self._random = random.Random(3)

    def choose(self, confidences: Sequence[Sequence[float]], num_running: int) -> list[int]:
        return [len(row) for row in confidences]

    def trim(self, confidences, counts, other_rows=0, *, margins=()):
        assert all(isinstance(row, tuple) for row in confidences)
        return [self._random.randint(0, count) for count in counts]


def make(
    model: DeepseekV41, *, recorded: bool, depth: int = 1, deterministic: bool = False, **parts
) -> Engine:
    config = {
        "max_num_seqs": 3, "max_model_len": 128, "async_depth": depth, "cuda_graphs": recorded,
        "deterministic": deterministic,
    }  # fmt: skip
    engine = Engine(model=model, config=config, drafter="dspark", **parts)
    if recorded:
        engine._parts.drafter.record()
        engine._parts.runner.make_graphs(on_demand=True)
    return engine


def count_lanes(monkeypatch) -> list[int]:
    """Rows of each step that is run as columns from now on."""
    seen: list[int] = []
    run = verify_steps.judge_lane

    def judge(step, lane):
        seen.append(len(lane.starts))
        run(step, lane)

    monkeypatch.setattr("deepinfer.engine.runner_lanes.judge_lane", judge)
    return seen


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("kind", ["greedy", "drawn", "some"])
def test_the_same_comes_out(model, monkeypatch, depth, kind) -> None:
    drawn = GREEDY.replace(temperature=0.8, seed=5)
    params = {
        "greedy": [GREEDY] * 4,
        "drawn": [drawn, GREEDY, drawn.replace(seed=2**63 + 9), drawn.replace(max_tokens=9)],
        "some": [
            GREEDY.replace(logprobs=1),
            GREEDY.replace(max_tokens=3),
            GREEDY.replace(presence_penalty=0.5, max_tokens=8),
            GREEDY.replace(stop_token_ids=(64, 61)),
        ],
    }[kind]
    lanes = count_lanes(monkeypatch)
    found = []
    for has_lanes in (False, True):
        with monkeypatch.context() as patch, make(model, recorded=True, depth=depth) as engine:
            if not has_lanes:
                patch.setattr(ModelRunner, "_has_verify_lanes", False)
            outputs = engine.generate(PROMPTS, params)
            stats = engine.stats()
            found.append([
                [(o.token_ids, o.finish_reason, o.usage) for o in outputs],
                [[e.token_id for e in o.logprobs or ()] for o in outputs],
                stats.generated_tokens, stats.draft_tokens_accepted, stats.drafts_by_position,
                stats.inter_token.count, stats.decode_tokens, stats.graph_steps,
            ])  # fmt: skip
            engine.check()
        assert bool(lanes) is has_lanes
    assert found[0] == found[1]
    assert (
        kind == "some" or max(lanes) == 3
    )  # a row with penalties sends its neighbours another way
    if depth:
        with make(model, recorded=False, depth=depth) as engine:
            assert [o.token_ids for o in engine.generate(PROMPTS, params)] == [
                token_ids for token_ids, *_ in found[0][0]
            ]


@pytest.mark.parametrize("verify", ["dice", "cost", "off"])
def test_lengths_change_nothing(model, monkeypatch, verify) -> None:
    policy = {
        "dice": Dice(),
        "cost": StepCostModel.additive(1e-3, 2e-4),
        "off": StepCostModel.additive(1e-4, 1e-1, request_s=1e-2),
    }[verify]
    lanes = count_lanes(monkeypatch)
    params = [GREEDY, GREEDY.replace(temperature=0.7, seed=4, max_tokens=24), GREEDY, GREEDY]
    with make(model, recorded=False, deterministic=verify == "dice") as engine:
        expected = [o.token_ids for o in engine.generate(PROMPTS, params)]
    with make(model, recorded=True, verify=policy, deterministic=verify == "dice") as engine:
        outputs = engine.generate(PROMPTS, params)
        assert [o.token_ids for o in outputs] == expected
        engine.check()
    assert lanes


def test_aborted_and_preempted_rows_leave_nothing(model, monkeypatch) -> None:
    lanes = count_lanes(monkeypatch)
    with make(model, recorded=False) as engine:
        expected = [o.token_ids for o in engine.generate(PROMPTS, GREEDY)]
    with make(model, recorded=True) as engine:
        rids = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
        made: dict[str, list[int]] = {rid: [] for rid in rids}
        step = 0
        while engine.has_unfinished:
            for delta in engine.step():
                made[delta.rid] += delta.token_ids
            step += 1
            if step == 4:
                engine.abort(rids[1])
            if step == 6:
                engine._parts.scheduler.preempt(rids[0])
        assert [tuple(made[rid]) for rid in rids if rid != rids[1]] == [
            expected[0], expected[2], expected[3]
        ]  # fmt: skip
        engine.check()
    assert lanes


def test_what_no_recording_fits_is_run_row_by_row(model, monkeypatch) -> None:
    with make(model, recorded=True) as engine:
        expected = [o.token_ids for o in engine.generate(PROMPTS, GREEDY)]
    names = {"runner.run_verify_lane": None, "runner_lanes.propose_for_lane": False}
    for name, found in names.items():
        with monkeypatch.context() as patch:
            patch.setattr(f"deepinfer.engine.{name}", lambda *a, found=found: found)
            with make(model, recorded=True) as engine:
                assert [o.token_ids for o in engine.generate(PROMPTS, GREEDY)] == expected


def test_drafts_of_ids_that_are_never_chosen_are_cut(model) -> None:
    with make(model, recorded=True) as engine:
        usual = engine.generate(PROMPTS, GREEDY)
    never = {token for output in usual for token in output.token_ids[4:8]} - {
        token for output in usual for token in output.token_ids[:4]
    }
    found = []
    for recorded in (False, True):
        with make(model, recorded=recorded) as engine:
            engine._parts.runner._never = frozenset(never)
            outputs = engine.generate(PROMPTS, GREEDY)
            assert [o.token_ids for o in outputs] == [o.token_ids for o in usual]
            stats = engine.stats()
            found.append([(o.usage.accepted, o.usage.verified) for o in outputs])
            cut = sum(counts.verified for counts in stats.drafts_by_position)
    assert [a for a, _ in found[0]] == [a for a, _ in found[1]]
    assert cut < sum(o.usage.verified for o in usual)


class Event:
    """Stands for an event of a GPU on which everything is done at once."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Replay:
    """A recording as on a GPU: each replay overwrites what the one before gave."""

    def __init__(self, call, output) -> None:
        self._call, self._output = call, output

    def pool(self) -> str:
        return "pool"

    def replay(self) -> None:
        new = self._call()
        pairs = zip(_tensors(self._output), _tensors(new), strict=True)
        for old, value in pairs:
            old.copy_(value)


def _tensors(output) -> list[torch.Tensor]:
    if not isinstance(output, tuple):
        output = [getattr(output, field.name) for field in dataclasses.fields(output)]
    return [value for value in output if value is not None]


def as_on_a_gpu(engine: Engine, monkeypatch) -> None:
    """Lets recordings of an engine on a CPU go the way of those on a GPU."""

    def record(call, device, pool=None):
        output = call()
        return Replay(call, output), output

    def make(count, tokens, device="cpu", *, pinned=False):
        return graph_inputs.make_inputs(count, tokens)

    def without_pins(function):
        return lambda *args, pin_memory=False, device=None, **options: function(*args, **options)

    gpu = SimpleNamespace(type="cuda")
    parts = engine._parts
    monkeypatch.setattr(graphs_module, "record_call", record)
    monkeypatch.setattr(graphs_module, "make_inputs", make)
    monkeypatch.setattr(graphs_module, "reserved_bytes", lambda device: 0)
    monkeypatch.setattr(drafts_module, "record_call", record)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    names = {name: getattr(torch, name) for name in ("stack", "int64", "float64", "cuda")}
    made = {name: without_pins(getattr(torch, name)) for name in ("zeros", "empty")}
    monkeypatch.setattr(drafts_module, "torch", SimpleNamespace(**names, **made))
    parts.runner._graphs._device = gpu
    drafts, cache = parts.drafter._graphs, parts.runner.cache
    drafts._cache = SimpleNamespace(
        device=gpu, num_slots=cache.num_slots, draft_spans=cache.draft_spans
    )


@pytest.mark.parametrize("verify", [None, "dice"])
def test_what_recordings_give_is_overwritten_by_the_next(model, monkeypatch, verify) -> None:
    lanes = count_lanes(monkeypatch)
    params = [GREEDY, GREEDY.replace(temperature=0.7, seed=4), GREEDY, GREEDY]
    found = []
    for is_gpu in (False, True):
        with make(model, recorded=True, verify=Dice() if verify else None) as engine:
            if is_gpu:
                as_on_a_gpu(engine, monkeypatch)
            outputs = engine.generate(PROMPTS, params)
            assert bool(engine._parts.runner._graphs._staging) is is_gpu
            found.append([(o.token_ids, o.usage) for o in outputs])
            found[-1].append(engine.stats().drafts_by_position)
    assert found[0] == found[1]
    assert lanes


def test_layout() -> None:
    layout = Layout.of(np.array([2, 1, 3]))
    assert layout.owner.tolist() == [0, 0, 1, 2, 2, 2]
    assert layout.step.tolist() == [0, 1, 0, 0, 1, 2]
    assert layout.offsets.tolist() == [0, 2, 3]
    assert (layout.total, layout.is_even) == (6, False)
    assert Layout.of(np.array([4, 4])).is_even


def test_confidences_are_a_mapping() -> None:
    values = np.array([[0.5, 0.25], [0.75, 0.5], [1.0, 1.0]])
    found = BlockConfidences(values, np.array([2, 0, 1]))
    assert dict(found) == {0: (0.5, 0.25), 2: (1.0,)} == pickle.loads(pickle.dumps(found))
    assert len(found) == 2
    assert found == {0: (0.5, 0.25), 2: (1.0,)}
    assert found.get(1, ()) == ()


def test_rows_that_do_not_fit_are_left_to_others(model) -> None:
    with make(model, recorded=True, depth=0) as engine:
        runner = engine._parts.runner
        plans = []
        forward = runner.forward
        runner.forward = lambda plan, requests: (
            plans.append((plan, requests)) or forward(plan, requests)
        )
        engine.generate(PROMPTS[:2], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        assert VerifyLanes(runner._lanes, lambda params: True).enter(plans[0][0].rows, {}) is None


def test_lanes_know_no_model() -> None:
    """Columns of a step are for any model whose recordings take them."""
    for name in ("verify_lane", "verify_steps"):
        text = Path(importlib.import_module(f"deepinfer.engine.{name}").__file__ or "").read_text()
        assert "deepinfer.models" not in text, name
