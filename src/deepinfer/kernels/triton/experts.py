"""Routing and the products of experts in launches whose shapes do not depend on the routing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.reference.experts import ExpertOrder
from deepinfer.kernels.triton.launches import launch

__all__ = ["expert_order", "grouped_linear", "topk_gate"]


@triton.jit
def _topk_gate(
    scores, bias, weights, experts, scaling, EXPERTS: tl.constexpr, TOPK: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    x = tl.load(scores + token * EXPERTS + e, mask=e < EXPERTS, other=0.0)
    u = tl.exp(-tl.abs(x))
    tail = tl.where(u < 1e-3, u - 0.5 * u * u, tl.log(1.0 + u))
    share = tl.sqrt(tl.maximum(x, 0.0) + tail)
    choice = share + tl.load(bias + e, mask=e < EXPERTS, other=0.0)
    choice = tl.where(e < EXPERTS, choice, -float("inf"))
    k = tl.arange(0, WIDTH)
    picked_weights = tl.zeros([WIDTH], tl.float32)
    picked = tl.zeros([WIDTH], tl.int32)
    for i in tl.static_range(TOPK):
        best = tl.max(choice, axis=0)
        # NaN equals nothing; the bound keeps the id valid then.
        expert = tl.minimum(tl.min(tl.where(choice == best, e, BLOCK), axis=0), EXPERTS - 1)
        weight = tl.sum(tl.where(e == expert, share, 0.0), axis=0)
        picked_weights = tl.where(k == i, weight, picked_weights)
        picked = tl.where(k == i, expert, picked)
        choice = tl.where(e == expert, -float("inf"), choice)
    total = tl.sum(picked_weights, axis=0) + 1e-20
    at = token * TOPK + k
    tl.store(weights + at, picked_weights * (scaling / total), mask=k < TOPK)
    tl.store(experts + at, picked.to(tl.int64), mask=k < TOPK)


def topk_gate(scores: Tensor, bias: Tensor, topk: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Chooses experts; see `deepinfer.kernels.reference.experts.topk_gate`."""
    tokens, count = scores.shape
    weights = torch.empty(tokens, topk, dtype=torch.float32, device=scores.device)
    experts = torch.empty(tokens, topk, dtype=torch.int64, device=scores.device)
    if tokens:
        launch(
            _topk_gate, tokens,
            scores, bias, weights, experts, scaling, EXPERTS=count, TOPK=topk,
            BLOCK=triton.next_power_of_2(count), WIDTH=triton.next_power_of_2(topk), num_warps=1,
        )  # fmt: skip
    return weights, experts


@triton.jit
def _order(
    experts, places, tile_experts, pairs, num_tiles, EXPERTS: tl.constexpr, BINS: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        found = tl.load(experts + at, mask=at < pairs, other=EXPERTS).to(tl.int32)
        counts += tl.histogram(found, BINS)
    tiles = tl.where(bins < EXPERTS, (counts + TILE - 1) // TILE, 0)
    first = tl.sum(tl.where(bins < expert, tiles, 0), axis=0)
    mine = tl.sum(tl.where(bins == expert, tiles, 0), axis=0)
    count = tl.sum(tl.where(bins == expert, counts, 0), axis=0)
    seen = 0
    for start in range(0, pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        found = tl.load(experts + at, mask=at < pairs, other=EXPERTS).to(tl.int32)
        chosen = (found == expert).to(tl.int32)
        place = first * TILE + seen + tl.cumsum(chosen, axis=0) - 1
        tl.store(places + place, at, mask=chosen == 1)
        seen += tl.sum(chosen, axis=0)
    rest = tl.arange(0, TILE)
    end = count + rest
    tl.store(
        places + first * TILE + end, tl.zeros([TILE], tl.int32) + pairs, mask=end < mine * TILE
    )
    for tile in range(mine):
        tl.store(tile_experts + first + tile, expert)
    if expert == EXPERTS - 1:
        for tile in range(first + mine, num_tiles):
            tl.store(tile_experts + tile, -1)


def expert_order(experts: Tensor, num_experts: int) -> ExpertOrder:
    """Orders pairs by expert, each expert's from a new tile on; see the reference of the same name."""
    pairs = experts.numel()
    each = -(-pairs // num_experts)
    tile = 16 if each <= 16 else 32 if each <= 64 else 64 if each <= 256 else 128
    tiles = min(pairs, num_experts) + pairs // tile
    places = torch.empty(tiles * tile, dtype=torch.int32, device=experts.device)
    tile_experts = torch.empty(tiles, dtype=torch.int32, device=experts.device)
    if pairs:
        launch(
            _order, num_experts,
            experts, places, tile_experts, pairs, tiles, EXPERTS=num_experts,
            BINS=triton.next_power_of_2(num_experts + 1), TILE=tile,
            BLOCK=min(1024, max(32, triton.next_power_of_2(pairs))), num_warps=4,
        )  # fmt: skip
    return ExpertOrder(experts.reshape(-1), places, tile_experts, tile)


@triton.jit
def _grouped_linear(
    x, weight, out, places, tile_experts, pairs, x_row, PER_INPUT: tl.constexpr,
    OUT: tl.constexpr, IN: tl.constexpr, TILE: tl.constexpr, BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(places + tile * TILE + tl.arange(0, TILE)).to(tl.int64)
    used = pair < pairs
    row = tl.where(used, pair // PER_INPUT, 0)
    n = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    at_weight = weight + expert * (OUT * IN) + n[None, :] * IN
    acc = tl.zeros([TILE, BLOCK_OUT], tl.float32)
    for start in range(0, IN, BLOCK_IN):
        k = start + tl.arange(0, BLOCK_IN)
        at_x = x + row[:, None] * x_row + k[None, :]
        if EVEN:  # what padding reads is written nowhere
            a = tl.load(at_x)
            b = tl.load(at_weight + k[:, None])
        else:
            in_k = k < IN
            a = tl.load(at_x, mask=used[:, None] & in_k[None, :], other=0.0)
            b = tl.load(at_weight + k[:, None], mask=(n < OUT)[None, :] & in_k[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    at = out + pair[:, None] * OUT + n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=used[:, None] & (n < OUT)[None, :])


def grouped_linear(x: Tensor, weight: Tensor, order: ExpertOrder, rows_per_input: int) -> Tensor:
    """Products by pair; see `deepinfer.kernels.reference.experts.grouped_linear`."""
    pairs = order.experts.shape[0]
    _, channels_out, channels_in = weight.shape
    out = torch.empty(pairs, channels_out, dtype=x.dtype, device=x.device)
    if pairs and order.pairs is not None and order.tile_experts is not None:
        is_large = order.tile_rows > 64
        most = 128 if is_large and x.dtype != torch.float32 else 64
        block_out = min(most, max(16, triton.next_power_of_2(channels_out)))
        block_in = min(64, max(16, triton.next_power_of_2(channels_in)))
        _grouped_linear[(len(order.tile_experts), triton.cdiv(channels_out, block_out))](
            x, weight, out, order.pairs, order.tile_experts, pairs, x.stride(0),
            PER_INPUT=rows_per_input, OUT=channels_out, IN=channels_in, TILE=order.tile_rows,
            BLOCK_OUT=block_out, BLOCK_IN=block_in, PRECISION="ieee",
            EVEN=channels_out % block_out == 0 and channels_in % block_in == 0,
            num_warps=8 if is_large else 4, num_stages=3 if is_large else 5,
        )  # fmt: skip
    return out
