"""Merge of attention over parts of the keys, from first to last."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["merge_states", "merge_states_kernel"]


@triton.jit(do_not_specialize=["parts"])
def merge_states_kernel(
    v, s, sink, phases, phase_index, out, lse, parts, heads,
    stride_vt, stride_vp, stride_vh, stride_st, stride_sp, stride_sh, stride_ot, stride_oh, stride_lt, stride_lh,
    DIM: tl.constexpr, ROTATED: tl.constexpr, SINK: tl.constexpr, ROTATE: tl.constexpr, INDEXED: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """`out = sum of exp(s - m) v / sum of exp(s - m)`; parts whose `s` is infinite have no keys and are not read."""
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, DIM)
    inside = h < heads
    infinite = float("inf")
    sp = s + row * stride_st + h * stride_sh
    top = tl.full([HEADS], -infinite, tl.float32)
    for part in range(parts):
        x = tl.load(sp + part * stride_sp, mask=inside, other=-infinite)
        top = tl.maximum(top, tl.where(x == infinite, -infinite, x))
    bare = top == -infinite
    top = tl.where(bare, 0.0, top)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, DIM], tl.float32)
    vp = v + row * stride_vt + (h * stride_vh)[:, None] + d[None, :]
    for part in range(parts):
        x = tl.load(sp + part * stride_sp, mask=inside, other=-infinite)
        live = (x != infinite) & (x != -infinite)
        weight = tl.where(live, tl.exp(x - top), 0.0)
        total += weight
        value = tl.load(vp + part * stride_vp, mask=live[:, None], other=0.0).to(tl.float32)
        acc += weight[:, None] * value
    log = top + tl.log(tl.where(bare, 1.0, total))
    weight = tl.where(bare, 0.0, 1.0 / tl.where(bare, 1.0, total))
    if SINK:
        x = tl.load(sink + h, mask=inside, other=0.0)
        weight = weight / (1.0 + tl.exp(x - log))
    acc = acc * weight[:, None]
    if ROTATE:
        entry = row
        if INDEXED:
            entry = tl.load(phase_index + row).to(tl.int64)
        pair = tl.arange(0, DIM // 2) - (DIM - ROTATED) // 2
        at = phases + entry * ROTATED + 2 * pair
        cos = tl.load(at, mask=pair >= 0, other=1.0)[None, :]
        sin = tl.load(at + 1, mask=pair >= 0, other=0.0)[None, :]
        even, odd = tl.split(tl.reshape(acc, [HEADS, DIM // 2, 2]))
        acc = tl.reshape(tl.join(even * cos + odd * sin, odd * cos - even * sin), [HEADS, DIM])
    to = out + row * stride_ot + (h * stride_oh)[:, None] + d[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=inside[:, None])
    tl.store(lse + row * stride_lt + h * stride_lh, tl.where(bare, infinite, log), mask=inside)


def merge_states(
    v: Tensor,
    s: Tensor,
    sink: Tensor | None,
    phases: Tensor | None,
    phase_index: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Merges parts; see `deepinfer.kernels.merge_attn_states`.

    Args:
        v: Shape [rows, parts, heads, channels], last stride 1.
        s: Shape [rows, parts, heads], fp32.
        sink: Shape [heads], fp32, or None.
        phases: Shape [entries, rotated / 2, 2], fp32, or None.
        phase_index: Shape [rows], int32, or None.
        out: Shape [rows, heads, channels], last stride 1.
        lse: Shape [rows, heads], fp32.
    """
    rows, parts, heads, channels = v.shape
    block = 4 if channels >= 256 else 8
    merge_states_kernel[(rows, triton.cdiv(heads, block))](
        v, s, s if sink is None else sink.contiguous(), s if phases is None else phases.contiguous(),
        s.view(torch.int32) if phase_index is None else phase_index.contiguous(), out, lse, parts, heads,
        *v.stride()[:3], *s.stride(), *out.stride()[:2], *lse.stride(),
        DIM=channels, ROTATED=0 if phases is None else 2 * phases.shape[1],
        SINK=sink is not None, ROTATE=phases is not None, INDEXED=phase_index is not None, HEADS=block, num_warps=4,
    )  # fmt: skip
