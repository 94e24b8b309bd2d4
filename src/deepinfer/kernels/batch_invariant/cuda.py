"""Launches of the Triton kernels; see `deepinfer.kernels.batch_invariant` for what each function computes.

Tiles of weights are chosen by the weight's shape, tiles of tokens by their number; no other choice depends on a
batch, and nothing is tuned at run time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from deepinfer.kernels.batch_invariant import hopper
from deepinfer.kernels.batch_invariant.triton_attention import (
    index_scores_kernel,
    sparse_attention_kernel,
)
from deepinfer.kernels.batch_invariant.triton_linear import (
    expert_linear_kernel,
    linear_kernel,
    pair_linear_kernel,
    sum_parts_kernel,
)
from deepinfer.kernels.batch_invariant.triton_rows import (
    log_softmax_kernel,
    mix_streams_kernel,
    rms_norm_kernel,
    row_sum_kernel,
    sinkhorn_kernel,
)
from deepinfer.kernels.reference.experts import ExpertOrder
from deepinfer.kernels.triton.launches import launch

__all__ = [
    "ProductTile",
    "expert_linear",
    "grouped_linear",
    "index_scores",
    "linear",
    "log_softmax",
    "mean_square",
    "mix_streams",
    "pair_linear",
    "product_tile",
    "rms_norm",
    "row_sum",
    "sinkhorn",
    "sparse_attention",
    "sum_streams",
]

_KEY_TILE = 64
_TILES_A_PROGRAM = 8
_ATTENTION_ROWS = 32
_MOST_PARTED = 256  # tokens up to which the parts of a product run side by side


@dataclass(frozen=True, slots=True)
class ProductTile:
    """Tiles of one product.

    Attributes:
        block_m: Tokens in a tile; the only field that may depend on their number, with warps and stages.
        block_n: Weight rows in a tile.
        block_k: Steps of the inner axis.
        part_k: Inner channels that one program adds up; parts are added from first to last.
        num_warps: Warps of a program.
        num_stages: Depth of the software pipeline.
    """

    block_m: int
    block_n: int
    block_k: int
    part_k: int
    num_warps: int
    num_stages: int


@functools.lru_cache(maxsize=4096)
def product_tile(
    num_tokens: int, out_channels: int, in_channels: int, dtype: torch.dtype, groups: int = 1
) -> ProductTile:
    """The tiles for a weight and a number of tokens."""
    part_k = _part_k(groups * _ceil(out_channels, 64), in_channels)
    is_cut = part_k < in_channels
    if dtype is torch.float32:
        block_m = 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64
        return ProductTile(block_m, 64, 32, part_k, 4, 4 if num_tokens <= 64 else 3)
    if num_tokens <= 64:
        block_m = 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64
        block_n = 64 if out_channels <= 64 * 264 else 128
        return ProductTile(block_m, block_n, 64, part_k, 4, 6)
    if num_tokens <= 512 or out_channels <= 1024:
        return ProductTile(
            128,
            64 if out_channels <= 64 * 132 else 128,
            64,
            part_k,
            4 if out_channels <= 64 * 132 else 8,
            4,
        )
    # Two sums at once fill the registers of the largest tile.
    return ProductTile(128 if is_cut else 256, 128, 64, part_k, 8, 4 if is_cut else 3)


def _part_k(num_tiles: int, in_channels: int) -> int:
    """Inner channels of a part, so that weights of few tiles keep the multiprocessors busy for a single token too."""
    parts = min(in_channels // 256, 128 // num_tiles, 16)
    if parts <= 1:
        return in_channels
    return _ceil(_ceil(in_channels, parts), 128) * 128


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """See `batch_invariant.linear`."""
    flat, matrix = _rows(x), _plain(weight)
    out = _launch_linear(flat.unsqueeze(1), matrix.unsqueeze(0))
    return out.view(*x.shape[:-1], weight.shape[0])


def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """See `batch_invariant.grouped_linear`."""
    return _launch_linear(x if x.stride(-1) == 1 else x.contiguous(), _plain(weight))


def _launch_linear(x: Tensor, weight: Tensor) -> Tensor:
    tokens, groups, in_channels = x.shape
    out_channels = weight.shape[1]
    out = x.new_empty(tokens, groups, out_channels)
    if not out.numel():
        return out
    tile = product_tile(tokens, out_channels, in_channels, x.dtype, groups)
    parts = _ceil(in_channels, tile.part_k)
    if groups == 1 and hopper.serves(x[:, 0], weight[0]):
        with _on(x):
            hopper.multiply(x[:, 0], weight[0], out[:, 0], tile.part_k)
        return out
    in_turn = parts if tokens > _MOST_PARTED else 1
    to, stride_part = out, 0
    if parts > in_turn:
        to = torch.empty(parts, *out.shape, dtype=torch.float32, device=x.device)
        stride_part = to.stride(0)
    tiles = _ceil(tokens, tile.block_m) * _ceil(out_channels, tile.block_n)
    even = in_channels % tile.block_k == 0 and tile.part_k % tile.block_k == 0
    with _on(x):
        launch(
            linear_kernel, (tiles, groups, parts // in_turn),
            x, weight, to, tokens, out_channels, in_channels, x.stride(0), x.stride(1), weight.stride(0),
            weight.stride(1), out.stride(0), out.stride(1), stride_part, PART_K=tile.part_k, IN_TURN=in_turn,
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, EVEN_K=even, GROUP=8,
            NUM_STAGES=tile.num_stages, num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
        if parts > in_turn:
            blocks = _ceil(out.numel(), 1024)
            sum_parts_kernel[(blocks,)](to, out, out.numel(), NUM_PARTS=parts, BLOCK=1024)
    return out


def expert_linear(x: Tensor, weight: Tensor, counts: Sequence[int] | Tensor) -> Tensor:
    """See `batch_invariant.expert_linear`."""
    x, weight = _rows(x), _plain(weight)
    experts, out_channels, in_channels = weight.shape
    out = x.new_empty(len(x), out_channels)
    if not out.numel():
        return out
    counts = torch.as_tensor(counts, device=x.device, dtype=torch.int32)
    rows = len(x)
    tile = product_tile(max(rows // experts, 1), out_channels, in_channels, x.dtype)
    most_tiles = min(rows, _ceil(rows, tile.block_m) + experts)
    with _on(x):
        expert_linear_kernel[(_ceil(out_channels, tile.block_n), most_tiles)](
            x, weight, out, counts, experts, out_channels, in_channels,
            x.stride(0), weight.stride(0), weight.stride(1), out.stride(0),
            BLOCK_E=triton.next_power_of_2(experts), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k, EVEN_K=in_channels % tile.block_k == 0, NUM_STAGES=tile.num_stages,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return out


def pair_linear(x: Tensor, weight: Tensor, order: ExpertOrder, rows_per_input: int) -> Tensor:
    """See `batch_invariant.pair_linear`; the order must be that of `deepinfer.kernels.triton.experts`."""
    x, weight = _rows(x), _plain(weight)
    _, out_channels, in_channels = weight.shape
    pairs = len(order.experts)
    out = x.new_empty(pairs, out_channels)
    if not out.numel() or order.pairs is None or order.tile_experts is None:
        return out
    is_narrow, is_large = x.dtype is torch.bfloat16, order.tile_rows > 64
    block_n = 128 if is_large and is_narrow else 64
    block_k, stages = (64, 4 if is_large else 6) if is_narrow else (32, 3 if is_large else 4)
    with _on(x):
        pair_linear_kernel[(_ceil(out_channels, block_n), len(order.tile_experts))](
            x, weight, out, order.pairs, order.tile_experts, pairs, out_channels, in_channels,
            x.stride(0), weight.stride(0), weight.stride(1), out.stride(0),
            PER_INPUT=rows_per_input, BLOCK_M=order.tile_rows, BLOCK_N=block_n, BLOCK_K=block_k,
            EVEN_K=in_channels % block_k == 0, NUM_STAGES=stages, num_warps=8 if is_large else 4,
            num_stages=stages,
        )  # fmt: skip
    return out


def sparse_attention(
    queries: Tensor, kv: Tensor, index: Tensor, valid: Tensor, sink: Tensor, scale: float
) -> Tensor:
    """See `batch_invariant.sparse_attention`."""
    tokens, heads, dim = queries.shape
    queries = queries if queries.stride(-1) == 1 else queries.contiguous()
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    kv = kv.to(queries.dtype)
    block_h = 16 if heads <= 16 else 32
    with _on(queries):
        sparse_attention_kernel[(tokens, _ceil(heads, block_h))](
            queries, kv, index.contiguous(), valid.contiguous().view(torch.uint8), sink, out,
            heads, index.shape[1], scale, queries.stride(0), queries.stride(1), kv.stride(0),
            DIM=dim, BLOCK_D=max(triton.next_power_of_2(dim), 16), BLOCK_H=block_h,
            BLOCK_R=_ATTENTION_ROWS, num_warps=4 if dim <= 128 else 8, num_stages=2,
        )  # fmt: skip
    return out


def index_scores(
    queries: Tensor, weights: Tensor, keys: Tensor, visible: Tensor | None = None
) -> Tensor:
    """See `batch_invariant.index_scores`."""
    groups, tokens, heads, dim = queries.shape
    rows = keys.shape[1]
    out = torch.empty(groups, tokens, rows, dtype=torch.float32, device=queries.device)
    keys = keys.to(queries.dtype)
    keys = keys if keys.stride(-1) == 1 else keys.contiguous()
    block_h = max(triton.next_power_of_2(heads), 16)
    with _on(queries):
        index_scores_kernel[(tokens, _ceil(rows, _KEY_TILE * _TILES_A_PROGRAM), groups)](
            queries.contiguous(), weights.contiguous(), keys,
            weights if visible is None else visible.contiguous(), out,
            tokens, rows, heads, keys.stride(0), keys.stride(1),
            DIM=dim, BLOCK_D=max(triton.next_power_of_2(dim), 16), BLOCK_H=block_h,
            BLOCK_R=_KEY_TILE, TILES=_TILES_A_PROGRAM, HAS_VISIBLE=visible is not None, num_warps=4,
        )  # fmt: skip
    return out


def mean_square(x: Tensor) -> Tensor:
    """See `batch_invariant.mean_square`."""
    return _reduce(x, 1 / x.shape[-1], squares=True)


def row_sum(x: Tensor) -> Tensor:
    """See `batch_invariant.row_sum`."""
    return _reduce(x, 1.0, squares=False)


def _reduce(x: Tensor, factor: float, *, squares: bool) -> Tensor:
    flat = _rows(x)
    out = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    if len(flat):
        with _on(x):
            row_sum_kernel[(len(flat),)](
                flat, out, x.shape[-1], flat.stride(0), factor,
                SQUARES=squares, BLOCK=_row_block(x.shape[-1]), num_warps=4,
            )  # fmt: skip
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `batch_invariant.rms_norm`."""
    flat = _rows(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(flat):
        with _on(x):
            rms_norm_kernel[(len(flat),)](
                flat, weight, out, x.shape[-1], flat.stride(0), eps,
                BLOCK=_row_block(x.shape[-1]), num_warps=4,
            )  # fmt: skip
    return out


def log_softmax(x: Tensor) -> Tensor:
    """See `batch_invariant.log_softmax`."""
    flat = _rows(x)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if len(flat):
        with _on(x):
            log_softmax_kernel[(len(flat),)](
                flat, out, x.shape[-1], flat.stride(0), BLOCK=4096, num_warps=8
            )
    return out


def sinkhorn(scores: Tensor, iterations: int, eps: float) -> Tensor:
    """See `batch_invariant.sinkhorn`."""
    tokens, n, _ = scores.shape
    scores = scores.contiguous()
    out = torch.empty_like(scores)
    if tokens:
        with _on(scores):
            sinkhorn_kernel[(_ceil(tokens, 32),)](
                scores, out, tokens, iterations, eps, n,
                BLOCK_N=triton.next_power_of_2(n), BLOCK_T=32, num_warps=4,
            )  # fmt: skip
    return out


def sum_streams(streams: Tensor, weights: Tensor) -> Tensor:
    """See `batch_invariant.sum_streams`."""
    streams, weights = streams.contiguous(), weights.contiguous()
    out = torch.empty_like(streams[:, 0])
    return _mix(streams, out, out, weights, weights, num_out=1, adds=False)


def mix_streams(streams: Tensor, output: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """See `batch_invariant.mix_streams`."""
    streams, output = streams.contiguous(), output.contiguous()
    out = torch.empty_like(streams)
    n = streams.shape[1]
    return _mix(streams, out, output, post.contiguous(), mix.contiguous(), num_out=n, adds=True)


def _mix(
    streams: Tensor,
    out: Tensor,
    output: Tensor,
    post: Tensor,
    mix: Tensor,
    *,
    num_out: int,
    adds: bool,
) -> Tensor:
    tokens, n, channels = streams.shape
    if tokens:
        with _on(streams):
            mix_streams_kernel[(tokens, _ceil(channels, 1024))](
                streams, output, post, mix, out, channels,
                NUM_IN=n, NUM_OUT=num_out, ADDS=adds, BLOCK=1024, num_warps=4,
            )  # fmt: skip
    return out


def _rows(x: Tensor) -> Tensor:
    """`x` as [rows, channels] with unit stride in the last axis."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _plain(weight: Tensor) -> Tensor:
    """A weight with memory of its own that kernels can read; packed ones are unpacked for the call."""
    weight = weight.unpack() if hasattr(weight, "unpack") else weight
    return weight if weight.stride(-1) == 1 else weight.contiguous()


def _ceil(count: int, size: int) -> int:
    """Quotient rounded up; that of Triton costs as much as a launch."""
    return -(-count // size)


def _row_block(width: int) -> int:
    return min(triton.next_power_of_2(width), 2048)


def _on(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """The device of `x` as the current one, which Triton launches on."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)
