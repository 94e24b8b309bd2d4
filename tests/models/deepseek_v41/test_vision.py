"""The vision tower and aligner against numbers of another implementation, and the image spans."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from deepinfer.core.errors import ShapeError
from deepinfer.models.deepseek_v41.config import VisionConfig
from deepinfer.models.deepseek_v41.image import ImageInput, ResizePlan, span_layout
from deepinfer.models.deepseek_v41.vision import ImageEncoder, apply_rope_2d, rope_2d

DATA = Path(__file__).parents[2] / "data" / "oracle_v41_vision"
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load_file(DATA / "vision_golden.safetensors")


@pytest.fixture(scope="module")
def encoder() -> ImageEncoder:
    data = json.loads((DATA / "vision_config.json").read_text())
    config = VisionConfig.from_dict(data["vision_config"])
    encoder = ImageEncoder(config, data["text_hidden_size"])
    weights = load_file(DATA / "vision_model.safetensors")
    for number, name in enumerate(("image_start", "image_newline", "image_end"), 1):
        weights[name] = torch.full((data["text_hidden_size"],), 100.0 * number)
    encoder.load_state_dict(weights, strict=True)
    return encoder


def image(golden: dict[str, torch.Tensor], number: int) -> ImageInput:
    rows, columns = golden[f"grid.{number}"].tolist()
    tokens = (math.ceil(rows / 3), math.ceil(columns / 3))
    plan = ResizePlan(rows * 14, columns * 14, (rows, columns), tokens)
    return ImageInput(golden[f"patches.{number}"].numpy(), plan)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_tower_and_aligner_agree_with_the_golden_numbers(
    encoder: ImageEncoder, golden: dict[str, torch.Tensor], number: int
) -> None:
    given = image(golden, number)
    features = encoder.vision(torch.from_numpy(given.patches), given.plan.grid)
    assert float((features - golden[f"vit.{number}"]).abs().max()) < TOLERANCE
    aligned = encoder.aligner(features, given.plan.grid)
    assert float((aligned - golden[f"aligned.{number}"]).abs().max()) < TOLERANCE


def test_spans_put_learned_vectors_around_the_aligned_tokens(
    encoder: ImageEncoder, golden: dict[str, torch.Tensor]
) -> None:
    images = [image(golden, number) for number in (0, 1, 2)]
    spans = encoder(images)
    assert spans.shape == (sum(i.plan.num_tokens for i in images), 64)
    at = 0
    for number, given in enumerate(images):
        span = spans[at : at + given.plan.num_tokens]
        kinds = torch.from_numpy(span_layout(given.plan.token_grid))
        assert (span[kinds == 0] == 100).all()
        assert (span[kinds == 2] == 200).all()
        assert (span[kinds == 3] == 300).all()
        assert float((span[kinds == 1] - golden[f"aligned.{number}"]).abs().max()) < TOLERANCE
        at += given.plan.num_tokens
    assert at == len(spans)


def test_an_image_does_not_depend_on_its_neighbours(
    encoder: ImageEncoder, golden: dict[str, torch.Tensor]
) -> None:
    first, second = image(golden, 0), image(golden, 2)
    assert torch.equal(encoder([second, first])[-first.plan.num_tokens :], encoder([first]))


def test_a_short_grid_is_filled_with_zeros_at_the_lower_right(encoder: ImageEncoder) -> None:
    features = torch.randn(4 * 5, 64, generator=torch.Generator().manual_seed(0))
    padded = torch.zeros(6, 6, 64)
    padded[:4, :5] = features.view(4, 5, 64)
    got = encoder.aligner(features, (4, 5))
    assert got.shape == (4, 64)
    assert torch.equal(got, encoder.aligner(padded.view(36, 64), (6, 6)))


def test_joined_patches_are_channel_major(encoder: ImageEncoder) -> None:
    """As torch's unfold orders them: the nine neighbours of channel 0, then those of channel 1, ..."""
    features = torch.randn(36, 64, generator=torch.Generator().manual_seed(1))
    unfolded = torch.nn.functional.unfold(
        features.view(1, 6, 6, 64).permute(0, 3, 1, 2), 3, stride=3
    )
    w1, w2 = encoder.aligner.w1, encoder.aligner.w2
    assert torch.allclose(
        encoder.aligner(features, (6, 6)),
        w2(torch.nn.functional.gelu(w1(unfolded[0].T))),
        atol=1e-6,
    )


def test_rotary_angles_are_rows_then_columns() -> None:
    angles = rope_2d((2, 3), 8, 10000.0, torch.device("cpu"))
    assert angles.shape == (6, 4)
    expected = [[r, r * 0.01, c, c * 0.01] for r in range(2) for c in range(3)]
    assert torch.allclose(angles, torch.tensor(expected))
    x = torch.randn(6, 2, 8)
    turned = apply_rope_2d(x, angles)
    assert torch.allclose(turned[5, 1, 0], x[5, 1, 0] * math.cos(1) - x[5, 1, 4] * math.sin(1))
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), atol=1e-5)


def test_patches_must_fill_the_grid(encoder: ImageEncoder) -> None:
    with pytest.raises(ShapeError, match="grid of 2x2 needs"):
        encoder.vision(torch.zeros(5, 3, 14, 14), (2, 2))
    with pytest.raises(ShapeError, match="588 values a patch"):
        encoder.vision(torch.zeros(4, 3, 7, 7), (2, 2))


def test_bf16_tower_keeps_its_dtype(encoder: ImageEncoder, golden: dict[str, torch.Tensor]) -> None:
    half = ImageEncoder(encoder.config, 64, dtype=torch.bfloat16)
    half.load_state_dict(encoder.state_dict())
    spans = half([image(golden, 0)])
    assert spans.dtype == torch.bfloat16
    assert float((spans.float() - encoder([image(golden, 0)])).abs().median()) < 0.05


def test_config_block_round_trip() -> None:
    block = json.loads(
        (Path(__file__).parents[2] / "data" / "deepseek_v41_flash" / "config.json").read_text()
    )["vision_config"]
    config = VisionConfig.from_dict(block)
    assert config.to_dict() == block
    assert np.isclose(config.min_pixels, 544 * 544)
