"""Images for DeepSeek-V4.1: resize plan, pixels to patches, and the span of tokens that an image takes.

Needs numpy only; Pillow is used to decode files and to accept its images when it is installed. Resampling is done here,
with the same bicubic filter and the same 8-bit rounding as Pillow, so that results do not depend on what is installed.

Source: the DeepSeek-V4.1-Flash release (image processor). Like it, this ignores the EXIF orientation and drops alpha.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer.core.errors import ConfigError, InvalidRequest
from deepinfer.core.lazy import optional_import
from deepinfer.models.deepseek_v41.config import VisionConfig

__all__ = [
    "SPAN_END",
    "SPAN_IMAGE",
    "SPAN_NEWLINE",
    "SPAN_START",
    "ImageInput",
    "ResizePlan",
    "expand_image_tokens",
    "plan_resize",
    "prepare_image",
    "span_layout",
]

SPAN_START, SPAN_IMAGE, SPAN_NEWLINE, SPAN_END = range(4)
_GRAY = 127
_WEIGHT_BITS = 22
_COLUMN_BLOCK = 256  # keeps the accumulators of a large photo in the processor's cache


@dataclass(frozen=True, slots=True)
class ResizePlan:
    """Size of an image after resizing, in pixels, patches and tokens.

    Attributes:
        height: Pixels, a multiple of the patch size.
        width: Pixels, a multiple of the patch size.
        grid: Patches, (rows, columns).
        token_grid: Image tokens, (rows, columns).
        stretch: True to stretch to the size; False to keep the aspect ratio and pad with gray.
    """

    height: int
    width: int
    grid: tuple[int, int]
    token_grid: tuple[int, int]
    stretch: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the span: the image tokens, a newline a row, start and end."""
        rows, columns = self.token_grid
        return rows * (columns + 1) + 2


@dataclass(frozen=True, slots=True)
class ImageInput:
    """An image as the vision tower takes it.

    Attributes:
        patches: Pixels in [-1, 1], shape [rows * columns, 3, patch, patch], fp32, in reading order.
        plan: The sizes.
    """

    patches: np.ndarray
    plan: ResizePlan


def plan_resize(width: int, height: int, config: VisionConfig) -> ResizePlan:
    """Chooses the size that an image is resized to.

    Small images grow to about `min_pixels`; sides are rounded up to whole patches; an image of too many tokens shrinks
    to the largest size of the same aspect ratio that fits `max_image_tokens`, or to a single row or column of tokens
    when it is extremely long.

    Args:
        width: Pixels of the original.
        height: Pixels of the original.
        config: The vision configuration.

    Returns:
        The plan; its span never has more than `max_image_tokens` tokens.

    Raises:
        InvalidRequest: A side is not positive.
        ConfigError: `max_image_tokens` leaves no room for any image.
    """
    if width < 1 or height < 1:
        raise InvalidRequest(
            f"an image has {width}x{height} pixels; both sides must be at least 1.",
            field="images",
            value=(width, height),
        )
    if config.max_image_tokens < 4:
        raise ConfigError(
            f"max_image_tokens is {config.max_image_tokens}; the smallest image takes 4: start, image, newline, end.",
            field="vision_config.max_image_tokens",
            value=config.max_image_tokens,
            limit="at least 4",
        )
    ratio = config.max_wh_ratio
    stretch = ratio is not None and width >= height * ratio
    w: float = width if ratio is None else min(width, height * ratio)
    h: float = height
    if w * h < config.min_pixels:
        growth = (config.min_pixels / (w * h)) ** 0.5
        w, h = int(w * growth), int(h * growth)
    patch = config.patch_size
    plan = _planned(math.ceil(h / patch), math.ceil(w / patch), config, stretch)
    if plan.num_tokens <= config.max_image_tokens:
        return plan
    rows, columns = _largest_grid(w, h, config)
    return _planned(rows, columns, config, stretch)


def _largest_grid(w: float, h: float, config: VisionConfig) -> tuple[int, int]:
    """Most patches, (rows, columns), of the aspect ratio w : h within the token limit."""
    room = config.max_image_tokens - 2
    per_token, aspect = config.downsample_ratio, h / w
    # rows * (columns + 1) = room with rows = columns * aspect
    columns = math.sqrt(room / aspect + 0.25) - 0.5
    rows = columns * aspect
    if columns < 1:
        return room // 2 * per_token, per_token
    if rows < 1:
        return per_token, (room - 1) * per_token
    cell = config.patch_size * per_token
    growth = min(math.floor(columns) * cell / w, math.floor(rows) * cell / h)
    return math.floor(h * growth / config.patch_size), math.floor(w * growth / config.patch_size)


def _planned(rows: int, columns: int, config: VisionConfig, stretch: bool) -> ResizePlan:
    ratio = config.downsample_ratio
    return ResizePlan(
        height=rows * config.patch_size,
        width=columns * config.patch_size,
        grid=(rows, columns),
        token_grid=(-(-rows // ratio), -(-columns // ratio)),
        stretch=stretch,
    )


def span_layout(token_grid: tuple[int, int]) -> np.ndarray:
    """Kinds of the tokens of an image span, in order.

    Args:
        token_grid: Image tokens, (rows, columns).

    Returns:
        SPAN_START, then each row's SPAN_IMAGE tokens and its SPAN_NEWLINE, then SPAN_END; shape [tokens], int64.
    """
    rows, columns = token_grid
    row = [SPAN_IMAGE] * columns + [SPAN_NEWLINE]
    return np.array([SPAN_START, *row * rows, SPAN_END], dtype=np.int64)


def expand_image_tokens(
    input_ids: Sequence[int], plans: Sequence[ResizePlan], image_token_id: int
) -> list[int]:
    """Replaces each image placeholder by the span of its image; all positions of a span hold the placeholder's id.

    Args:
        input_ids: Token ids with one placeholder an image.
        plans: Resize plans of the images, in order.
        image_token_id: The placeholder.

    Returns:
        The longer ids.

    Raises:
        InvalidRequest: There are more or fewer placeholders than images.
    """
    count = sum(1 for token in input_ids if token == image_token_id)
    if count != len(plans):
        raise InvalidRequest(
            f"the prompt has {count} image placeholders and {len(plans)} images were given; give one image for each.",
            field="images",
            value=len(plans),
            limit=str(count),
        )
    spans = iter(plans)
    out: list[int] = []
    for token in input_ids:
        out += [token] * (next(spans).num_tokens if token == image_token_id else 1)
    return out


def prepare_image(image: Any, config: VisionConfig) -> ImageInput:
    """Turns an image into patches.

    Args:
        image: Pixels, shape [height, width], [height, width, 1], [height, width, 3] or [height, width, 4], uint8; or,
            with Pillow installed, a Pillow image, a path, or the bytes of an image file. Gray is repeated to three
            channels; alpha is dropped.
        config: The vision configuration.

    Returns:
        Patches and sizes.

    Raises:
        InvalidRequest: The image has no pixels, another shape or dtype, or cannot be decoded.
        MissingDependency: A file was given and Pillow is not installed.
    """
    pixels = _to_rgb(image)
    height, width = pixels.shape[:2]
    plan = plan_resize(width, height, config)
    if plan.stretch:
        canvas = resize_bicubic(pixels, plan.width, plan.height)
    else:
        canvas = _fit_on_gray(pixels, plan.width, plan.height)
    values = (canvas.astype(np.float32) / 255 - np.float32(0.5)) / np.float32(0.5)
    rows, columns = plan.grid
    patch = config.patch_size
    split = values.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
    return ImageInput(np.ascontiguousarray(split.reshape(-1, 3, patch, patch)), plan)


def resize_bicubic(pixels: np.ndarray, width: int, height: int) -> np.ndarray:
    """Resamples with a bicubic filter (a = -0.5) that widens when shrinking, rounding to 8 bits after each axis.

    Args:
        pixels: Shape [height, width, channels], uint8.
        width: New width.
        height: New height.

    Returns:
        Shape [height, width, channels], uint8; the same values as Pillow's BICUBIC.
    """
    if width != pixels.shape[1]:
        pixels = _resample(pixels.transpose(1, 0, 2), width).transpose(1, 0, 2)
    return pixels if height == pixels.shape[0] else _resample(pixels, height)


def _resample(pixels: np.ndarray, size: int) -> np.ndarray:
    """Resamples the leading axis."""
    length = pixels.shape[0]
    step = length / size
    stretch = max(step, 1.0)
    support = 2.0 * stretch
    center = (np.arange(size) + 0.5) * step
    first = np.maximum((center - support + 0.5).astype(np.int64), 0)
    last = np.minimum((center + support + 0.5).astype(np.int64), length)
    taps = first[:, None] + np.arange(int((last - first).max()))
    distance = np.abs((taps - center[:, None] + 0.5) * (1.0 / stretch))
    weight = np.where(taps < last[:, None], _bicubic(distance), 0.0)
    weight *= 1.0 / weight.sum(1, keepdims=True)
    whole = np.trunc(weight * (1 << _WEIGHT_BITS) + np.copysign(0.5, weight)).astype(np.int32)
    taps = np.minimum(taps, length - 1)
    flat = pixels.reshape(length, -1)
    out = np.empty((size, flat.shape[1]), dtype=np.uint8)
    for at in range(0, flat.shape[1], _COLUMN_BLOCK):
        source = flat[:, at : at + _COLUMN_BLOCK].astype(np.int32)
        total = np.full((size, source.shape[1]), 1 << (_WEIGHT_BITS - 1), dtype=np.int32)
        term = np.empty_like(total)
        for k in range(taps.shape[1]):
            np.take(source, taps[:, k], axis=0, out=term, mode="clip")
            total += np.multiply(term, whole[:, k, None], out=term)
        total >>= _WEIGHT_BITS
        out[:, at : at + _COLUMN_BLOCK] = np.clip(total, 0, 255, out=total)
    return out.reshape(size, *pixels.shape[1:])


def _bicubic(x: np.ndarray) -> np.ndarray:
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def _fit_on_gray(pixels: np.ndarray, width: int, height: int) -> np.ndarray:
    """Resizes to fit inside width x height at the same aspect ratio, centred on gray."""
    h, w = pixels.shape[:2]
    new_width, new_height = width, height
    if w / h > width / height:
        new_height = max(round(h / w * width), 1)
    elif w / h < width / height:
        new_width = max(round(w / h * height), 1)
    resized = resize_bicubic(pixels, new_width, new_height)
    if (new_width, new_height) == (width, height):
        return resized
    canvas = np.full((height, width, 3), _GRAY, dtype=np.uint8)
    top, left = round((height - new_height) * 0.5), round((width - new_width) * 0.5)
    canvas[top : top + new_height, left : left + new_width] = resized
    return canvas


def _to_rgb(image: Any) -> np.ndarray:
    """Pixels as [height, width, 3], uint8."""
    if isinstance(image, str | bytes | os.PathLike):
        image = _decode(image)
    if not isinstance(image, np.ndarray) and hasattr(image, "convert"):
        image = np.asarray(image.convert("RGB"))
    if not isinstance(image, np.ndarray):
        raise InvalidRequest(
            f"an image is a {type(image).__name__}; give a uint8 array [height, width, 3], a Pillow image, a path, "
            f"or the bytes of an image file.",
            field="images",
        )
    channels = image.shape[2] if image.ndim == 3 else 1
    if image.dtype != np.uint8 or image.ndim not in (2, 3) or channels not in (1, 3, 4):
        raise InvalidRequest(
            f"an image has shape {list(image.shape)} and dtype {image.dtype}; it must be [height, width] or "
            f"[height, width, 1, 3 or 4] of uint8, channels last.",
            field="images",
            value=(image.shape, str(image.dtype)),
        )
    if image.size == 0:
        raise InvalidRequest(
            f"an image has shape {list(image.shape)}; it must have at least one pixel.",
            field="images",
            value=image.shape,
        )
    pixels = image.reshape(*image.shape[:2], channels)[:, :, :3]
    return np.repeat(pixels, 3, axis=2) if channels == 1 else pixels


def _decode(source: str | bytes | os.PathLike[str]) -> Any:
    pillow = optional_import("PIL.Image", package="pillow")
    what = f"{len(source)} bytes" if isinstance(source, bytes) else os.fspath(source)
    try:
        with pillow.open(io.BytesIO(source) if isinstance(source, bytes) else source) as opened:
            return opened.convert("RGB")
    except (OSError, ValueError, SyntaxError, EOFError, pillow.DecompressionBombError) as error:
        raise InvalidRequest(
            f"the image in {what} cannot be read: {error}. Give a whole file in a format that Pillow knows.",
            field="images",
        ) from error
