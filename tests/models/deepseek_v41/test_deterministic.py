"""Deterministic mode: one sequence has one set of bits, however it is run; without the mode it has several."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
import torch

from deepinfer.kernels.reference import fused
from deepinfer.models.deepseek_v41 import ForwardBatch, Segment
from deepinfer.models.deepseek_v41 import model as model_module
from deepinfer.models.deepseek_v41.step_pass import StepPass
from deepinfer.testing.determinism import (
    Situation,
    digest,
    model_logits,
    unique_model_rows,
)

SEVERAL = [
    Situation((1,)), Situation((7,), 3, 2), Situation((16,), 1, 1, first=False),
    Situation((33, 2), 7, 5), Situation((60,)), Situation((60,), 7, 7, first=False),
]  # fmt: skip
LENGTH = 60


def build(random_model, small_config, dtype=torch.float32, rounding="full", **changes):
    return random_model(small_config(**changes), rounding, dtype).set_deterministic()


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return torch.randint(159, (LENGTH,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounding", ["none", "full"])
def test_one_result_in_every_situation(random_model, small_config, ids, dtype, rounding) -> None:
    model = build(random_model, small_config, dtype, rounding)
    found = unique_model_rows(model, ids, SEVERAL)
    assert found.count == 1, found
    assert torch.equal(model.logits(ids), model_logits(model, ids, SEVERAL[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_the_mode_there_are_several(random_model, small_config, ids, dtype) -> None:
    model = build(random_model, small_config, dtype).set_deterministic(False)
    assert unique_model_rows(model, ids, SEVERAL).count > 1


def test_many_neighbours(random_model, small_config, ids) -> None:
    model = build(random_model, small_config)
    cases = [Situation((16,), 63, 40), Situation((60,), 63, 63, first=False)]
    assert unique_model_rows(model, ids, [SEVERAL[0], *cases]).count == 1


def test_wide_steps(random_model, small_config) -> None:
    model = build(random_model, small_config)
    ids = torch.randint(159, (400,), generator=torch.Generator().manual_seed(6)).tolist()
    cases = [Situation(c) for c in ((400,), (255,), (256,), (257,), (64,), (399, 1))]
    assert unique_model_rows(model, ids, cases).count == 1


@pytest.mark.parametrize("part", ["layers.2.engram.wkv", "head"])
def test_one_module_left_out_is_seen(random_model, small_config, ids, part) -> None:
    model = build(random_model, small_config)
    model.get_submodule(part).deterministic = False
    assert unique_model_rows(model, ids, [SEVERAL[0], SEVERAL[4]]).count > 1


def test_widths_that_follow_the_batch_are_seen(
    random_model, small_config, ids, monkeypatch
) -> None:
    class Loose(StepPass):
        def __init__(self, *args, deterministic, **options):
            super().__init__(*args, deterministic=False, **options)
            self._deterministic = True

    model = build(random_model, small_config, rounding="none")
    monkeypatch.setattr(model_module, "StepPass", Loose)
    assert unique_model_rows(model, ids, [SEVERAL[0], SEVERAL[4]]).count > 1


def test_verified_rows_equal_decoded_rows_after_rollback(random_model, small_config, ids) -> None:
    model = build(random_model, small_config)
    whole = model.logits(ids)
    cache = model.new_cache(2, 80, 40)
    model(ForwardBatch.from_segments([(1, 0, ids[:30])]), cache)
    for at in range(30, 56, 2):
        wrong = [(token + 7) % 150 for token in ids[at + 2 : at + 5]]
        out = model(ForwardBatch.from_segments([(1, at, ids[at : at + 2] + wrong)]), cache)
        assert torch.equal(model.compute_logits(out.hidden[:2]), whole[at : at + 2])
        cache.truncate(1, at + 2)


def test_values_agree_with_the_fast_path(random_model, small_config, ids) -> None:
    model = build(random_model, small_config, rounding="none")
    slow = model_logits(model, ids, Situation((60,)))
    fast = model_logits(model.set_deterministic(False), ids, Situation((60,)))
    assert (slow - fast).abs().max() < 2e-4


@pytest.mark.parametrize("size", [5, 40])
@pytest.mark.parametrize("mode", ["plain", "qat", "actqat"])
def test_golden_logits(load_golden, golden, golden_ids, run_chunks, mode, size) -> None:
    model = load_golden(mode).set_deterministic()
    expected = golden[f"{mode}.logits.0"]
    logits, _ = run_chunks(model, golden_ids, [size])
    assert torch.equal(logits, model.logits(golden_ids))
    if mode == "plain":
        assert (logits - expected).abs().max() < 2e-4
    # A value at the edge of two codes may round the other way; most rows stay close.
    else:
        assert (logits - expected).abs().amax(-1).median() < 2e-3


def test_draft_is_free_of_its_batch(random_model, small_config, ids) -> None:
    model = build(random_model, small_config)
    draft = model.draft
    seen = set()
    for neighbours in (0, 1, 5):
        cache = model.new_cache(neighbours + 1, 80, 40)
        for slot in range(neighbours + 1):
            tokens = ids[:21] if slot == neighbours else ids[slot : slot + 4 * slot + 4]
            out = model(ForwardBatch.from_segments([(slot, 0, tokens)]), cache)
            draft.extend_context(out.features, range(len(tokens)), [slot] * len(tokens), cache)
        at = cache.lengths
        out = draft.propose([ids[30]] * len(at), at, list(range(len(at))), cache)
        seen.add(digest(out.base_logits[-1], out.hidden[-1]))
        tokens, sure = draft.draft_greedy([ids[30]] * len(at), at, list(range(len(at))), cache)
        seen.add(digest(tokens[-1], sure[-1]))
    assert len(seen) == 2


def test_two_processes_give_equal_bytes(tmp_path) -> None:
    code = (
        "import torch; torch.set_num_threads(1)\n"
        "from deepinfer.models import load_model\n"
        "from deepinfer.testing.determinism import digest\n"
        "model = load_model('nano').set_deterministic()\n"
        "print(digest(model.logits(list(range(5, 45)))))"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    }
    assert len(runs) == 1
    assert len(runs.pop().strip()) == len(hashlib.sha256().hexdigest())


def test_the_switch_goes_both_ways(random_model, small_config, ids) -> None:
    model = random_model(small_config())
    before = model_logits(model, ids, Situation((1,)))
    assert not model.deterministic
    assert model.set_deterministic().deterministic
    assert model.draft.deterministic
    assert torch.equal(model_logits(model.set_deterministic(False), ids, Situation((1,))), before)


@pytest.mark.parametrize("rounding", ["none", "full"])
def test_the_layers_as_few_calls_in_the_general_pass(
    random_model, small_config, ids, rounding, monkeypatch
) -> None:
    """The road of a GPU, with the reference kernels: the same values, and narrowed rows drop out."""
    model = build(random_model, small_config, rounding=rounding)
    wanted = model_logits(model, ids, Situation((13,), 2, 1))
    long = Segment(0, 0, 60, full_start=45)
    row = torch.tensor(ids)
    narrow = model(ForwardBatch(row, (long,)), model.new_cache(1, 64, 64))
    monkeypatch.setattr(model, "row_kernels", lambda: fused)
    assert (model_logits(model, ids, Situation((13,), 2, 1)) - wanted).abs().amax(
        -1
    ).median() < 1e-3
    assert (model.logits(ids) - wanted).abs().amax(-1).median() < 1e-3
    found = model(ForwardBatch(row, (long,)), model.new_cache(1, 64, 64))
    assert found.hidden.shape == narrow.hidden.shape
    assert len(narrow.hidden) == 15
    assert (found.hidden - narrow.hidden).abs().amax(-1).median() < 1e-3
    assert (found.features - narrow.features).abs().amax(-1).median() < 1e-3
