"""The vision encoder of DeepSeek-V4.1: a ViT with 2-D rotary positions, the aligner, and image spans.

Source: the DeepSeek-V4.1-Flash release; GELU is the exact one, norms use 1e-6.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepinfer.core.errors import ShapeError
from deepinfer.models.deepseek_v41.config import VisionConfig
from deepinfer.models.deepseek_v41.image import ImageInput
from deepinfer.models.deepseek_v41.norm import RMSNorm

__all__ = ["Aligner", "ImageEncoder", "VisionTower", "apply_rope_2d", "rope_2d"]

NORM_EPS = 1e-6


def rope_2d(grid: tuple[int, int], head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Rotary angles of a grid of patches.

    Args:
        grid: Patches, (rows, columns).
        head_dim: Channels of a head, a multiple of 4.
        theta: Base of the frequencies theta^(-2i / (head_dim / 2)), i < head_dim / 4.
        device: Where to put them.

    Returns:
        Radians, shape [rows * columns, head_dim / 2], fp32: the row's angles, then the column's.
    """
    quarter = head_dim // 4
    frequencies = theta ** (-torch.arange(quarter, device=device, dtype=torch.float32) / quarter)
    rows = torch.arange(grid[0], device=device).repeat_interleave(grid[1])
    columns = torch.arange(grid[1], device=device).repeat(grid[0])
    return (torch.stack((rows, columns), 1).unsqueeze(-1) * frequencies).flatten(1)


def apply_rope_2d(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates channel i against channel i + head_dim / 2.

    Args:
        x: Shape [patches, heads, head_dim].
        angles: Radians, shape [patches, head_dim / 2], fp32.

    Returns:
        Same shape and dtype as `x`; computed in fp32.
    """
    first, second = x.float().chunk(2, -1)
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class VisionTower(nn.Module):
    """The ViT.

    Attributes:
        patch_embed: Holds `proj`, from the pixels of a patch to a vector.
        blocks: Transformer blocks.
        norm: Norm behind the last block.
    """

    def __init__(
        self,
        config: VisionConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.rope_theta = config.rope_theta
        self.pixels = 3 * config.patch_size**2
        factory = {"device": device, "dtype": dtype}
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Linear(self.pixels, config.hidden_size, **factory)
        self.blocks = nn.ModuleList(
            Block(config, **factory) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, NORM_EPS, **factory)

    def forward(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """Encodes one image.

        Args:
            patches: Pixels in [-1, 1], shape [rows * columns, 3, patch, patch], any float dtype.
            grid: Patches, (rows, columns).

        Returns:
            Features, shape [rows * columns, hidden], in the dtype of the weights.

        Raises:
            ShapeError: The patches do not fill the grid, or have another size.
        """
        flat = patches.flatten(1)
        if flat.shape != (grid[0] * grid[1], self.pixels):
            raise ShapeError(
                f"patches has shape {tuple(patches.shape)}; a grid of {grid[0]}x{grid[1]} needs "
                f"[{grid[0] * grid[1]}, 3, patch, patch] with {self.pixels} values a patch.",
                argument="patches",
                expected=(grid[0] * grid[1], self.pixels),
                found=tuple(patches.shape),
            )
        projection = self.patch_embed.proj
        x = projection(flat.to(projection.weight.dtype))
        angles = rope_2d(grid, self.head_dim, self.rope_theta, x.device)
        for block in self.blocks:
            x = block(x, angles)
        return self.norm(x)


class Block(nn.Module):
    """One block of the ViT: attention over all patches of the image, then a gated MLP."""

    def __init__(
        self,
        config: VisionConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        hidden, inter = config.hidden_size, config.intermediate_size
        self.num_heads = config.num_attention_heads
        self.norm1 = RMSNorm(hidden, NORM_EPS, **factory)
        self.attn = nn.Module()
        self.attn.wqkv = nn.Linear(hidden, 3 * hidden, **factory)
        self.attn.wo = nn.Linear(hidden, hidden, **factory)
        self.norm2 = RMSNorm(hidden, NORM_EPS, **factory)
        self.mlp = nn.Module()
        self.mlp.w1 = nn.Linear(hidden, 2 * inter, bias=False, **factory)
        self.mlp.w2 = nn.Linear(inter, hidden, bias=False, **factory)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Runs the block on one image, shape [patches, hidden]; `angles` as from `rope_2d`."""
        qkv = self.attn.wqkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1))
        queries, keys = apply_rope_2d(qkv[:, 0], angles), apply_rope_2d(qkv[:, 1], angles)
        heads = (queries, keys, qkv[:, 2])
        mixed = F.scaled_dot_product_attention(*(t.transpose(0, 1).unsqueeze(0) for t in heads))
        x = x + self.attn.wo(mixed.squeeze(0).transpose(0, 1).flatten(1))
        gate, up = self.mlp.w1(self.norm2(x)).chunk(2, -1)
        return x + self.mlp.w2(F.silu(gate) * up)


class Aligner(nn.Module):
    """Joins squares of patches into image tokens of the language model's width.

    Attributes:
        w1: From the joined features, weight [text_hidden, hidden * ratio^2].
        w2: Weight [text_hidden, text_hidden].
    """

    def __init__(
        self,
        config: VisionConfig,
        text_hidden: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.ratio = config.downsample_ratio
        self.w1 = nn.Linear(config.hidden_size * self.ratio**2, text_hidden, **factory)
        self.w2 = nn.Linear(text_hidden, text_hidden, **factory)

    def forward(self, features: Tensor, grid: tuple[int, int]) -> Tensor:
        """Makes the image tokens.

        Args:
            features: Output of the ViT, shape [rows * columns, hidden].
            grid: Patches, (rows, columns); short squares at the lower and right edge are filled with zeros.

        Returns:
            Shape [ceil(rows / ratio) * ceil(columns / ratio), text_hidden], in reading order.
        """
        r = self.ratio
        rows, columns = -(-grid[0] // r), -(-grid[1] // r)
        image = features.unflatten(0, grid)
        image = F.pad(image, (0, 0, 0, columns * r - grid[1], 0, rows * r - grid[0]))
        squares = image.view(rows, r, columns, r, -1).permute(0, 2, 4, 1, 3)
        return self.w2(F.gelu(self.w1(squares.reshape(rows * columns, -1))))


class ImageEncoder(nn.Module):
    """Everything between pixels and the embeddings of image positions; works without the language model.

    Parameter names are the published tensor names.

    Attributes:
        vision: The ViT.
        aligner: The aligner.
        image_start, image_newline, image_end: Embeddings of the span's other positions, shape [text_hidden].
    """

    def __init__(
        self,
        config: VisionConfig,
        text_hidden: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.config = config
        self.vision = VisionTower(config, **factory)
        self.aligner = Aligner(config, text_hidden, **factory)
        for name in ("image_start", "image_newline", "image_end"):
            self.register_parameter(name, nn.Parameter(torch.empty(text_hidden, **factory)))
        self.requires_grad_(False)

    def forward(self, images: Sequence[ImageInput]) -> Tensor:
        """Embeds image spans.

        Args:
            images: Prepared images, in the order of their spans in the prompt. Each is encoded by itself, so the result
                does not depend on its neighbours.

        Returns:
            Embeddings of all span positions, shape [tokens of all spans, text_hidden].
        """
        return torch.cat([self._span(image) for image in images])

    def _span(self, image: ImageInput) -> Tensor:
        device = self.image_start.device
        grid = image.plan.grid
        tokens = self.aligner(self.vision(torch.from_numpy(image.patches).to(device), grid), grid)
        columns = image.plan.token_grid[1]
        newline = self.image_newline.expand(image.plan.token_grid[0], 1, -1)
        lines = torch.cat((tokens.unflatten(0, (-1, columns)), newline), 1).flatten(0, 1)
        return torch.cat((self.image_start.unsqueeze(0), lines, self.image_end.unsqueeze(0)))
