"""The golden comparison on a GPU: the same code, other kernels."""

from __future__ import annotations

import pytest
import torch

from deepinfer.core.plan import BlockUpdate
from deepinfer.models.deepseek_v41 import ForwardBatch, Segment

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


@pytest.mark.parametrize("storage", ["plain", "packed"])
def test_a_hit_with_blocks(storage, load_golden, golden_ids, exact_products) -> None:
    """Block tables, packed rows, saved windows and rows that stop early, on the device."""
    model, ids = load_golden("qat").to("cuda"), golden_ids.tolist()
    options = {"num_blocks": 12, "block_size": 8, "storage": storage}
    cache = model.new_cache(2, 40, 33, **options)
    tables = [(0, (7, 2, 11, 4, 0)), (1, (7, 2, 9, 5, 1))]
    cache.apply_updates(BlockUpdate(slot=s, first=0, blocks=b) for s, b in tables)

    def run(*segments: Segment) -> torch.Tensor:
        part = torch.tensor([i for s in segments for i in ids[s.start : s.end]])
        return model(ForwardBatch(part, segments, None, part.numpy()), cache).hidden

    run(Segment(0, 0, 16, full_start=25))
    block, windows = cache.save_block(7), cache.save_windows(0, 16)
    wanted = run(Segment(0, 16, 17, full_start=25))
    cache.load_block(7, block)
    cache.adopt_prefix(1, ids[:16])
    cache.load_windows(1, 16, windows.cpu())
    found = run(Segment(1, 16, 17, 8, 16, 25))
    assert torch.equal(found, wanted)
    assert cache.save_block(7).is_cuda
    assert torch.equal(cache.save_block(7), block)
