"""A decode step of a layer of your own, with single kernels of `deepinfer.kernels` in it, beside the same in plain torch.

No engine, no model and no configuration: a hidden state goes through sparse attention over a paged cache of quantised keys, of
which an index picks a few, and through a mixture of experts. On a CPU the references run, on a GPU the kernels.

Run: python examples/one_kernel.py [--device cuda]
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from deepinfer.kernels import (
    KVCacheFormat,
    apply_rope,
    explain,
    flash_mla_with_kvcache,
    fp8_fp4_paged_mqa_logits,
    fused_experts,
    quantize_and_insert_k_cache,
    rope_quant_insert,
    topk,
    topk_gate,
    topk_to_physical_indices,
)

HIDDEN, HEADS, DIM = 256, 8, 512  # a cached row of 512 channels is key and value of all heads
INDEX_HEADS, INDEX_DIM, PICKED = 8, 128, 8  # an index picks 8 rows of all that there are
EXPERTS, CHOSEN, WIDE = 8, 2, 128
ROWS, KEYS, PAGE = KVCacheFormat.V41_MXFP8, KVCacheFormat.INDEXER_MXFP4, 16


class Layer:
    """Random weights in bf16."""

    def __init__(self, device: str) -> None:
        """Draws them."""
        g = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=g) * shape[-1] ** -0.5).to(device, torch.bfloat16)

        self.q, self.kv, self.o = weight(HEADS * DIM, HIDDEN), weight(DIM, HIDDEN), weight(HIDDEN, HEADS * DIM)  # fmt: skip
        self.index_q, self.index_k = weight(INDEX_HEADS * INDEX_DIM, HIDDEN), weight(INDEX_DIM, HIDDEN)  # fmt: skip
        self.index_weights, self.gate = weight(INDEX_HEADS, HIDDEN), weight(EXPERTS, HIDDEN)
        self.up, self.down = weight(EXPERTS, 2 * WIDE, HIDDEN), weight(EXPERTS, HIDDEN, WIDE)
        self.sink = torch.zeros(HEADS, device=device)
        angles = torch.arange(4096)[:, None] * 10_000 ** -(torch.arange(32) / 32)
        self.phases = torch.stack((angles.cos(), angles.sin()), -1).to(device)


class Cache:
    """Pages of some requests: quantised rows of 528 bytes, and their index keys of 68."""

    def __init__(self, requests: int, pages: int, device: str) -> None:
        """Gives each request its pages, here and there."""
        count = requests * pages
        self.rows = torch.zeros(count, ROWS.page_bytes(PAGE), dtype=torch.uint8, device=device)
        self.keys = torch.zeros(count, KEYS.page_bytes(PAGE), dtype=torch.uint8, device=device)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(1), dtype=torch.int32)
        self.table = order.view(requests, pages).to(device)


def step(layer: Layer, cache: Cache, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each request through the layer, by kernels.

    Args:
        layer: The weights.
        cache: Gets a row a request.
        x: Shape [requests, HIDDEN], bf16.
        positions: Of the tokens, shape [requests], int32.

    Returns:
        Shape [requests, HIDDEN]; positions that the index picked, shape [requests, PICKED], -1 for none.
    """
    requests = len(x)
    slots = topk_to_physical_indices(positions[:, None], cache.table, PAGE)[:, 0]
    rope_quant_insert(x @ layer.kv.T, layer.phases, cache.rows, slots, ROWS, PAGE, phase_index=positions)  # fmt: skip
    quantize_and_insert_k_cache(x @ layer.index_k.T, cache.keys, slots, KEYS, PAGE)

    index_q = (x @ layer.index_q.T).view(requests, 1, INDEX_HEADS, INDEX_DIM)
    weights = (x @ layer.index_weights.T).float()
    lengths, most = positions + 1, cache.table.shape[1] * PAGE
    scores = fp8_fp4_paged_mqa_logits(
        index_q.to(torch.float8_e4m3fn), cache.keys, weights, lengths, cache.table, None, most, page_size=PAGE
    )  # fmt: skip
    _, picked = topk(scores, PICKED, end=lengths, return_value=False)

    query = apply_rope((x @ layer.q.T).view(requests, HEADS, DIM), layer.phases, positions)
    out, _ = flash_mla_with_kvcache(
        query[:, None], cache.rows, topk_to_physical_indices(picked, cache.table, PAGE)[:, None], page_size=PAGE,
        format=ROWS, attn_sink=layer.sink, phases=layer.phases, phase_index=positions[:, None],
    )  # fmt: skip
    x = x + out.reshape(requests, -1) @ layer.o.T

    shares, experts = topk_gate((x @ layer.gate.T).float(), None, CHOSEN)
    return x + fused_experts(x, layer.up, layer.down, shares, experts), picked


def plain_step(
    layer: Layer, past: list[Tensor], x: Tensor, picked: Tensor
) -> tuple[Tensor, Tensor]:
    """The same in plain torch and fp32, over all tokens so far, with nothing quantised.

    Args:
        layer: The weights.
        past: The tokens before; gets `x`.
        x: Shape [requests, HIDDEN].
        picked: Positions to attend to, shape [requests, PICKED], -1 for none.

    Returns:
        Shape [requests, HIDDEN]; the positions that exact scores pick, shape [requests, PICKED at most].
    """
    past.append(x.float())
    xs = torch.stack(past, 1)  # [requests, tokens, HIDDEN]
    w = {name: value.float() for name, value in vars(layer).items()}
    cos, sin = w["phases"][: len(past)].unbind(-1)

    def turn(v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        even, odd = v[..., -64:].unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
        return torch.cat((v[..., :-64], turned), -1)

    rows, keys = turn(xs @ w["kv"].T, cos, sin), xs @ w["index_k"].T
    now = xs[:, -1]
    index_q = (now @ w["index_q"].T).view(-1, INDEX_HEADS, INDEX_DIM)
    scores = torch.einsum("rhd,rtd->rht", index_q, keys).relu()
    scores = torch.einsum("rht,rh->rt", scores, now @ w["index_weights"].T)
    best_rows = scores.topk(min(PICKED, len(past))).indices
    known = picked >= 0
    seen = rows.gather(1, picked.clamp_min(0).long()[..., None].expand(-1, -1, DIM))
    query = turn((now @ w["q"].T).view(-1, HEADS, DIM), cos[-1], sin[-1])
    logits = torch.einsum("rhd,rtd->rht", query, seen) * DIM**-0.5
    logits = logits.masked_fill(~known[:, None], -torch.inf)
    sink = w["sink"].view(1, -1, 1).expand(len(x), -1, 1)
    share = torch.cat((logits, sink), -1).softmax(-1)[..., :-1]
    out = turn(torch.einsum("rht,rtd->rhd", share, seen), cos[-1], -sin[-1])
    y = now + out.flatten(1) @ w["o"].T
    affinity = torch.nn.functional.softplus(y @ w["gate"].T).sqrt()
    best, experts = affinity.topk(CHOSEN)
    best = best / best.sum(-1, keepdim=True)
    gate, up = torch.einsum("rd,rked->rke", y, w["up"][experts]).chunk(2, -1)
    wide = torch.nn.functional.silu(gate) * up * best[..., None]
    return y + torch.einsum("rke,rkde->rd", wide, w["down"][experts]), best_rows


def compare(device: str, requests: int = 3, tokens: int = 40) -> tuple[float, float]:
    """Runs both for some tokens.

    Returns:
        Relative error of the last outputs, and the share of picked rows that both picked.
    """
    layer, cache, past = Layer(device), Cache(requests, -(-tokens // PAGE), device), []
    g = torch.Generator().manual_seed(2)
    for position in range(tokens):
        x = torch.randn(requests, HIDDEN, generator=g).to(device, torch.bfloat16)
        positions = torch.full((requests,), position, dtype=torch.int32, device=device)
        found, picked = step(layer, cache, x, positions)
        wanted, right = plain_step(layer, past, x, picked)
    error = float((found.float() - wanted).norm() / wanted.norm())
    same = (picked[:, :, None] == right[:, None, :]).any(1).float().mean()
    return error, float(same)


def main() -> None:
    """Prints how far the step is from plain torch, and what served it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    error, same = compare(device)
    print(f"relative error {error:.3f}; {same:.0%} of the rows that exact scores pick were picked")
    print(f"a cached token: {ROWS.bytes_per_token + KEYS.bytes_per_token} bytes; in bf16 {2 * (DIM + INDEX_DIM)}")  # fmt: skip
    rows = torch.zeros(2, DIM, device=device)
    cache = Cache(1, 1, device).rows
    print(explain(quantize_and_insert_k_cache, rows, cache, torch.arange(2, device=device), ROWS, PAGE))  # fmt: skip


if __name__ == "__main__":
    main()
