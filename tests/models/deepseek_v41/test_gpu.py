"""The golden comparison on a GPU: the same code, other kernels."""

from __future__ import annotations

import pytest
import torch

from deepinfer.models.deepseek_v41 import ForwardBatch

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="module")
def model(load_golden, exact_products):
    return load_golden("plain").to("cuda")


def test_full_sequence(model, golden, golden_ids) -> None:
    logits = model.logits(golden_ids).cpu()
    assert (logits - golden["plain.logits.0"]).abs().max() < 2e-4


@pytest.mark.parametrize("size", [1, 2, 7, 33])
def test_chunks(size, model, golden, golden_ids, run_chunks) -> None:
    logits, cache = run_chunks(model, golden_ids, [size])
    assert cache.kv.is_cuda
    assert (logits.cpu() - golden["plain.logits.0"]).abs().max() < 2e-4


def test_a_ragged_batch(model, golden, golden_ids) -> None:
    cache = model.new_cache(3, 64, 33)
    ids = golden_ids.tolist()
    model(ForwardBatch.from_segments([(0, 0, ids[:20]), (2, 0, ids[:3])]), cache)
    batch = ForwardBatch.from_segments([(2, 3, ids[3:9]), (1, 0, ids[:1]), (0, 20, ids[20:21])])
    logits = model.compute_logits(model(batch, cache).hidden).cpu()
    wanted = golden["plain.logits.0"]
    rows = torch.cat((wanted[3:9], wanted[:1], wanted[20:21]))
    assert (logits - rows).abs().max() < 2e-4


def test_the_draft(model, golden, golden_ids) -> None:
    anchor = int(golden["dspark.anchor_position"])
    cache = model.new_cache(1, 64, 33)
    out = model(ForwardBatch.from_segments([(0, 0, golden_ids[:anchor].tolist())]), cache)
    model.draft.extend_context(out.features, range(anchor), [0] * anchor, cache)
    tokens, _ = model.draft.draft_greedy([int(golden_ids[anchor])], [anchor], [0], cache)
    assert tokens[0].tolist() == golden["plain.dspark.draft_tokens"].tolist()
