"""Image positions: embeddings from outside, their own router bias, no n-grams, no Engram."""

from __future__ import annotations

import pytest
import torch

from deepinfer.core.errors import InvalidRequest, ShapeError
from deepinfer.models.deepseek_v41 import ForwardBatch

IMAGE = 159
IDS = [5, 6, 7, *[IMAGE] * 6, 8, 9, 10, 11, *[IMAGE] * 2, 12, 13]


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(5)) * 0.5


def test_rows_land_in_order(small_model, images) -> None:
    logits = small_model.logits(IDS, images)
    swapped = images.clone()
    swapped[[0, 7]] = swapped[[7, 0]]
    other = small_model.logits(IDS, swapped)
    assert torch.allclose(logits[:3], other[:3], atol=1e-5)
    assert (logits[3] - other[3]).abs().max() > 1e-3


@pytest.mark.parametrize("size", [1, 2, 5, 17])
def test_chunks_equal_one_shot(size, small_model, images) -> None:
    wanted = small_model.logits(IDS, images)
    cache, used, rows = small_model.new_cache(2, 32, 17), 0, []
    for at in range(0, len(IDS), size):
        part = IDS[at : at + size]
        count = part.count(IMAGE)
        batch = ForwardBatch.from_segments(
            [(1, at, part)], images=images[used : used + count] if count else None
        )
        rows.append(small_model.compute_logits(small_model(batch, cache).hidden))
        used += count
    assert torch.allclose(torch.cat(rows), wanted, atol=5e-5)


def test_image_tokens_use_their_own_bias(random_model, small_config, images) -> None:
    model = random_model(small_config())
    before = model.logits(IDS, images)
    for layer in model.layers:
        layer.ffn.gate.bias_vl.add_(torch.linspace(-3, 3, 8))
    after = model.logits(IDS, images)
    assert torch.allclose(before[:3], after[:3], atol=1e-5)
    assert (before[3] - after[3]).abs().max() > 1e-3


def test_ngrams_end_at_an_image(small_model, images) -> None:
    """Text behind an image hashes as text at the start; images hash as nothing."""
    engram = small_model.engram_hash
    ids = torch.tensor(IDS)
    behind = small_model._sequence_engram_rows(ids, ids == IMAGE)
    start = small_model._sequence_engram_rows(torch.tensor([8, 9, 10, 11]), None)
    for layer in engram.layer_ids:
        assert torch.equal(behind[layer][9:13], start[layer])
        assert torch.equal(behind[layer][3], behind[layer][8])


def test_images_get_no_engram(random_model, small_config, images) -> None:
    model = random_model(small_config(engram_layer_ids=[0], engram_num_embeddings=[5190]))
    seen = []
    model.layers[0].engram.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
    model.logits(IDS, images)
    before, after = seen[0]
    is_image = torch.tensor(IDS) == IMAGE
    assert torch.equal(before[is_image], after[is_image])
    assert (before[~is_image] != after[~is_image]).any(-1).all()


def test_wrong_images(small_model, images) -> None:
    with pytest.raises(InvalidRequest, match="8 positions hold the image token, but 0"):
        small_model.logits(IDS)
    with pytest.raises(InvalidRequest, match="8 positions hold the image token, but 7"):
        small_model.logits(IDS, images[:7])
    with pytest.raises(InvalidRequest, match="0 positions"):
        small_model.logits([5, 6], images)
    with pytest.raises(ShapeError, match=r"\[8, 64\]"):
        small_model.logits(IDS, images[:, :32])
    cache = small_model.new_cache(1, 32)
    with pytest.raises(InvalidRequest, match="1 positions"):
        small_model(ForwardBatch.from_segments([(0, 0, [5, IMAGE])]), cache)
    assert cache.lengths == [0]
