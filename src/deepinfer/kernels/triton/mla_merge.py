"""Merge of attention over parts of the keys, from first to last."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["merge_states", "merge_states_kernel"]


@triton.jit
def _weights(sp, at, parts):
    """Logarithms of parts, and which have keys."""
    x = tl.load(sp, mask=at < parts, other=-float("inf"))
    live = (x != float("inf")) & (x != -float("inf"))
    return tl.where(live, x, -float("inf")), live


@triton.jit(do_not_specialize=["parts", "entries"])
def merge_states_kernel(
    v, s, sink, phases, phase_index, out, lse, parts, entries,
    stride_vt, stride_vp, stride_vh, stride_st, stride_sp, stride_sh, stride_ot, stride_oh, stride_lt, stride_lh,
    DIM: tl.constexpr, ROTATED: tl.constexpr, SINK: tl.constexpr, ROTATE: tl.constexpr, INDEXED: tl.constexpr,
    PARTS: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """`out = sum of exp(s - m) v / sum of exp(s - m)` of one head; parts whose `s` is infinite have no keys.

    `PARTS` are read at a time; with `ONCE` there are no more. A row of an entry that `phases` does not have is not turned.
    """
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    d = tl.arange(0, DIM)
    part = tl.arange(0, PARTS)
    sp = s + row * stride_st + h * stride_sh + part * stride_sp
    vp = v + row * stride_vt + h * stride_vh + (part * stride_vp)[:, None] + d[None, :]
    if ONCE:
        # One wait for memory: values are read before it is known which of them count.
        value = tl.load(vp, mask=(part < parts)[:, None], other=0.0).to(tl.float32)
        x, live = _weights(sp, part, parts)
        top = tl.max(x, axis=0)
        top = tl.where(top == -float("inf"), 0.0, top)
        weight = tl.exp(x - top)
        total = tl.sum(weight, axis=0)
        acc = tl.sum(weight[:, None] * tl.where(live[:, None], value, 0.0), axis=0)
    else:
        top = -float("inf")
        for start in range(0, parts, PARTS):
            x, live = _weights(sp + start * stride_sp, start + part, parts)
            top = tl.maximum(top, tl.max(x, axis=0))
        top = tl.where(top == -float("inf"), 0.0, top)
        total = 0.0
        acc = tl.zeros([DIM], tl.float32)
        for start in range(0, parts, PARTS):
            x, live = _weights(sp + start * stride_sp, start + part, parts)
            weight = tl.exp(x - top)
            total += tl.sum(weight, axis=0)
            value = tl.load(vp + start * stride_vp, mask=live[:, None], other=0.0).to(tl.float32)
            acc += tl.sum(weight[:, None] * value, axis=0)
    bare = total == 0.0  # of a part with NaN it is NaN
    log = top + tl.log(tl.where(bare, 1.0, total))
    weight = tl.where(bare, 0.0, 1.0 / tl.where(bare, 1.0, total))
    if SINK:
        weight = weight / (1.0 + tl.exp(tl.load(sink + h) - log))
    acc = acc * weight
    if ROTATE:
        entry = row
        if INDEXED:
            entry = tl.load(phase_index + row).to(tl.int64)
        pair = tl.arange(0, DIM // 2) - (DIM - ROTATED) // 2
        turned = (pair >= 0) & (entry >= 0) & (entry < entries)
        at = phases + entry * ROTATED + 2 * pair
        cos = tl.load(at, mask=turned, other=1.0)
        sin = tl.load(at + 1, mask=turned, other=0.0)
        even, odd = tl.split(tl.reshape(acc, [DIM // 2, 2]))
        acc = tl.reshape(tl.join(even * cos + odd * sin, odd * cos - even * sin), [DIM])
    tl.store(out + row * stride_ot + h * stride_oh + d, acc.to(out.dtype.element_ty))
    tl.store(lse + row * stride_lt + h * stride_lh, tl.where(bare, float("inf"), log))


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
    if not parts:
        out.zero_()
        lse.fill_(float("inf"))
        return
    block = min(triton.next_power_of_2(parts), 16)
    merge_states_kernel[(rows, heads)](
        v, s, s if sink is None else sink.contiguous(), s if phases is None else phases.contiguous(),
        s.view(torch.int32) if phase_index is None else phase_index.contiguous(), out, lse, parts,
        0 if phases is None else len(phases),
        *v.stride()[:3], *s.stride(), *out.stride()[:2], *lse.stride(),
        DIM=channels, ROTATED=0 if phases is None else 2 * phases.shape[1],
        SINK=sink is not None, ROTATE=phases is not None, INDEXED=phase_index is not None,
        PARTS=block, ONCE=parts <= block, num_warps=2 if channels * block <= 2048 else 4,
    )  # fmt: skip
