"""Resize plans, resampling, patches and token spans."""

from __future__ import annotations

import importlib
import io

import numpy as np
import pytest

from deepinfer.core.errors import ConfigError, InvalidRequest, MissingDependency
from deepinfer.models.deepseek_v41.config import VisionConfig
from deepinfer.models.deepseek_v41.image import (
    SPAN_END,
    SPAN_IMAGE,
    SPAN_NEWLINE,
    SPAN_START,
    expand_image_tokens,
    plan_resize,
    prepare_image,
    resize_bicubic,
    span_layout,
)


def config(**changes: object) -> VisionConfig:
    base = {
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 96,
    }
    return VisionConfig(**{**base, **changes})  # type: ignore[arg-type]


# What the published image processor gives with the published vision_config: (width, height), (rows, columns).
PUBLISHED_GRIDS = [
    ((1, 1), (13, 13)), ((2, 3), (16, 11)), ((13, 14), (14, 13)), ((28, 14), (10, 19)),
    ((543, 544), (13, 13)), ((545, 545), (13, 13)), ((240, 180), (12, 15)), ((180, 240), (15, 12)),
    ((512, 384), (12, 15)), ((640, 480), (12, 16)), ((800, 600), (15, 20)), ((1024, 768), (19, 25)),
    ((1280, 960), (23, 31)), ((1600, 1200), (27, 36)), ((4096, 4096), (31, 31)), ((4, 400), (130, 2)),
    ((400, 4), (2, 130)), ((1152, 128), (5, 39)), ((10000, 10), (1, 410)), ((10, 10000), (410, 1)),
    ((2653, 1236), (21, 45)), ((594, 4390), (81, 11)), ((3553, 3426), (30, 31)), ((1444, 1240), (29, 34)),
    ((99, 3973), (95, 3)), ((839, 2), (1, 266)), ((4922, 431), (9, 103)), ((34, 1194), (77, 3)),
]  # fmt: skip


@pytest.mark.parametrize(("size", "grid"), PUBLISHED_GRIDS)
def test_published_sizes(size: tuple[int, int], grid: tuple[int, int]) -> None:
    plan = plan_resize(*size, config())
    assert plan.token_grid == grid
    assert plan.num_tokens == grid[0] * (grid[1] + 1) + 2
    assert plan.num_tokens == len(span_layout(grid))


def test_every_plan_fits_and_is_whole_patches() -> None:
    rng = np.random.default_rng(0)
    for limit in (4, 5, 7, 16, 64, 1024):
        for _ in range(300):
            width, height = (int(2 ** rng.uniform(0, 16)) for _ in range(2))
            plan = plan_resize(width, height, config(max_image_tokens=limit))
            assert 4 <= plan.num_tokens <= limit
            assert (plan.height, plan.width) == (plan.grid[0] * 14, plan.grid[1] * 14)
            assert min(plan.grid) >= 1


def test_extreme_shapes_become_a_single_row_or_column() -> None:
    assert plan_resize(10**6, 1, config()).token_grid == (1, 1021)
    assert plan_resize(1, 10**6, config()).token_grid == (511, 1)


def test_wide_images_are_stretched_under_a_ratio_limit() -> None:
    limited = config(max_wh_ratio=4.0)
    assert plan_resize(4000, 100, limited).stretch
    assert not plan_resize(100, 4000, limited).stretch
    wide, at_limit = plan_resize(8000, 1000, limited), plan_resize(4000, 1000, limited)
    assert wide.token_grid == at_limit.token_grid


def test_unusable_sizes_and_limits_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="0x5 pixels"):
        plan_resize(0, 5, config())
    with pytest.raises(ConfigError, match="smallest image takes 4"):
        plan_resize(5, 5, config(max_image_tokens=3))


def test_span_layout_of_two_by_three() -> None:
    row = [SPAN_IMAGE] * 3 + [SPAN_NEWLINE]
    assert span_layout((2, 3)).tolist() == [SPAN_START, *row, *row, SPAN_END]


def test_expanding_placeholders() -> None:
    plans = [plan_resize(640, 480, config()), plan_resize(1, 1, config())]
    ids = expand_image_tokens([5, 9, 6, 9, 9 - 1], plans, 9)
    assert ids == [5] + [9] * 206 + [6] + [9] * 184 + [8]
    with pytest.raises(InvalidRequest, match="1 image placeholders and 2 images"):
        expand_image_tokens([5, 9], plans, 9)
    assert expand_image_tokens([5, 6], [], 9) == [5, 6]


def test_patches_are_channel_first_in_reading_order() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (560, 560, 3), dtype=np.uint8)
    prepared = prepare_image(pixels, config())
    assert prepared.plan.grid == (40, 40)
    assert prepared.patches.shape == (1600, 3, 14, 14)
    assert prepared.patches.dtype == np.float32
    patch = prepared.patches[40 * 2 + 3]  # row 2, column 3
    expected = pixels[28:42, 42:56].transpose(2, 0, 1) / 127.5 - 1
    np.testing.assert_allclose(patch, expected, atol=1e-6)


def test_other_aspect_ratios_are_padded_with_gray_in_the_middle() -> None:
    pixels = np.full((545, 1000, 3), 255, dtype=np.uint8)
    prepared = prepare_image(pixels, config())
    rows, columns = prepared.plan.grid
    assert (prepared.plan.height, prepared.plan.width) == (546, 1008)
    canvas = (
        prepared.patches.reshape(rows, columns, 3, 14, 14)
        .transpose(0, 3, 1, 4, 2)
        .reshape(546, 1008, 3)
    )
    gray = np.isclose(canvas, 127 / 127.5 - 1, atol=1e-6).all((0, 2))
    assert np.flatnonzero(gray).tolist() == [0, 1, 2, 1005, 1006, 1007]


@pytest.mark.parametrize("shape", [(560, 560), (560, 560, 1)])
def test_gray_pixels_become_three_channels(shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    patches = prepare_image(pixels, config()).patches
    assert (patches == patches[:, :1]).all()


def test_alpha_is_dropped() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (560, 560, 4), dtype=np.uint8)
    with_alpha, without = prepare_image(pixels, config()), prepare_image(pixels[..., :3], config())
    np.testing.assert_array_equal(with_alpha.patches, without.patches)


@pytest.mark.parametrize(
    "bad",
    [
        np.zeros((3, 4, 3), dtype=np.float32),
        np.zeros((4, 4, 2), dtype=np.uint8),
        np.zeros((3, 4, 4), dtype=np.uint8).transpose(0, 2, 1)[..., :2],
        np.zeros((2, 4, 4, 3), dtype=np.uint8),
        np.zeros((0, 4, 3), dtype=np.uint8),
        np.zeros(4, dtype=np.uint8),
        [[1, 2], [3, 4]],
        None,
    ],
)
def test_what_is_no_image_is_refused(bad: object) -> None:
    with pytest.raises(InvalidRequest, match="an image"):
        prepare_image(bad, config())


def test_files_need_pillow_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}", name="PIL")

    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(MissingDependency, match="pip install pillow"):
        prepare_image(b"\x89PNG", config())
    prepare_image(np.zeros((30, 30, 3), dtype=np.uint8), config())


class TestWithPillow:
    @pytest.fixture(autouse=True)
    def _pillow(self) -> None:
        pytest.importorskip("PIL")

    @pytest.mark.parametrize(
        ("size", "new"),
        [
            ((197, 40), (167, 40)),
            ((40, 197), (40, 60)),
            ((33, 50), (33, 120)),
            ((9, 9), (64, 9)),
            ((1, 7), (1, 3)),
        ],
    )
    def test_one_axis_at_a_time_equals_pillow(
        self, size: tuple[int, int], new: tuple[int, int]
    ) -> None:
        """Both axes at once are not compared: the order of the axes differs between Pillow versions."""
        from PIL import Image

        pixels = np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        expected = np.asarray(Image.fromarray(pixels).resize(new, Image.Resampling.BICUBIC))
        np.testing.assert_array_equal(resize_bicubic(pixels, *new), expected)

    def test_both_axes_are_horizontal_then_vertical(self) -> None:
        from PIL import Image

        pixels = np.random.default_rng(2).integers(0, 256, (70, 90, 3), dtype=np.uint8)
        bicubic = Image.Resampling.BICUBIC
        expected = Image.fromarray(pixels).resize((50, 70), bicubic).resize((50, 110), bicubic)
        np.testing.assert_array_equal(resize_bicubic(pixels, 50, 110), np.asarray(expected))

    def test_files_bytes_and_pillow_images_are_the_same_image(self, tmp_path) -> None:
        from PIL import Image

        pixels = np.random.default_rng(3).integers(0, 256, (600, 500, 3), dtype=np.uint8)
        picture = Image.fromarray(pixels)
        path = tmp_path / "picture.png"
        picture.save(path)
        expected = prepare_image(pixels, config()).patches
        for given in (picture, path, str(path), path.read_bytes()):
            np.testing.assert_array_equal(prepare_image(given, config()).patches, expected)

    def test_palette_and_gray_alpha_pictures(self) -> None:
        from PIL import Image

        for mode in ("P", "LA", "1", "CMYK", "I;16"):
            picture = Image.new(mode, (20, 20))
            assert prepare_image(picture, config()).patches.shape[1:] == (3, 14, 14)

    def test_damaged_files_are_refused(self, tmp_path) -> None:
        from PIL import Image

        buffer = io.BytesIO()
        noise = np.random.default_rng(4).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(noise).save(buffer, "PNG")
        whole = buffer.getvalue()
        text = tmp_path / "text.png"
        text.write_text("not a picture")
        for bad in (
            b"",
            b"GIF89a",
            whole[: len(whole) // 2],
            text,
            tmp_path / "absent.png",
            tmp_path,
        ):
            with pytest.raises(InvalidRequest, match="cannot be read"):
                prepare_image(bad, config())
