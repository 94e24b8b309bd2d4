"""Matrix products in plain Triton, for every GPU that Triton has: dense, by groups, with scales, with packed e2m1.

Weights are the tall operand of every tile and tokens the wide one. Where the chip has no fp8 products, e4m3 is widened
to fp16, which holds its values exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["decode_e2m1", "gemm_portable_kernel"]


@triton.jit
def _scale(pointers, inside, E8M0: tl.constexpr):
    """Scales as fp32."""
    if E8M0:
        code = tl.load(pointers, mask=inside, other=127).to(tl.int32)
        bits = tl.where(code == 255, 0x7FC00000, tl.maximum(code << 23, 0x00400000))
        return bits.to(tl.float32, bitcast=True)
    else:
        return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _values(pointers, inside, WIDEN: tl.constexpr):
    """Operands of a product, 0 outside; bytes of e4m3 become fp16, which holds all their values."""
    if WIDEN:
        code = tl.load(pointers, mask=inside, other=0).to(tl.int16)
        bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        value = bits.to(tl.float16, bitcast=True) * 256.0
        return tl.where((code & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)
    else:
        return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def decode_e2m1(code):
    """Values of e2m1 codes, fp16."""
    magnitude = (code & 7).to(tl.int32)
    value = tl.where(magnitude < 5, magnitude.to(tl.float32) * 0.5, magnitude.to(tl.float32) - 2.0)
    value = tl.where(magnitude == 7, 6.0, value)
    return tl.where(code > 7, -value, value).to(tl.float16)


@triton.jit(do_not_specialize=["M", "num_groups"])
def gemm_portable_kernel(
    x,
    x_scale,
    weight,
    w_scale,
    out,
    rows_of,
    M,
    N,
    K,
    num_groups,
    stride_xg,
    stride_xm,
    stride_wg,
    stride_wn,
    stride_og,
    stride_om,
    stride_sg,
    stride_sm,
    stride_sk,
    stride_fg,
    stride_fn,
    MODE: tl.constexpr,
    SCALED: tl.constexpr,
    X_GROUP: tl.constexpr,
    W_ROWS: tl.constexpr,
    W_GROUP: tl.constexpr,
    X_E8M0: tl.constexpr,
    W_E8M0: tl.constexpr,
    PACKED: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """`out[g, m, n] = sum over k of x[g, m, k] * weight[g, n, k]`; MODE 0 dense, 1 a group for each row, 2 counts."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    place = tl.program_id(2).to(tl.int64)
    group = place
    used = m < M
    if MODE == 1:
        ids = tl.load(rows_of + m, mask=used, other=-1)
        used = (ids >= 0) & (ids < num_groups)
        group = tl.max(tl.where(used, ids, 0), 0).to(tl.int64)
    if MODE == 2:
        used = m < tl.minimum(tl.load(rows_of + place), M)
    if tl.max(used.to(tl.int32), 0) > 0:
        k = tl.arange(0, BLOCK_K)
        inside_n = n < N
        xp = x + place * stride_xg + m.to(tl.int64)[None, :] * stride_xm
        wp = weight + group * stride_wg + n.to(tl.int64)[:, None] * stride_wn
        sp = x_scale + place * stride_sg + m.to(tl.int64) * stride_sm
        fp = w_scale + group * stride_fg + (n // W_ROWS).to(tl.int64) * stride_fn
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
            inside_k = start + k < K
            a = _values(xp + (start + k)[:, None], used[None, :] & inside_k[:, None], WIDEN)
            if PACKED:
                half = start // 2 + tl.arange(0, BLOCK_K // 2)
                mask = inside_n[:, None] & (half < K // 2)[None, :]
                byte = tl.load(wp + half[None, :], mask=mask, other=0)
                w = tl.join(decode_e2m1(byte & 15), decode_e2m1(byte >> 4)).reshape(
                    BLOCK_N, BLOCK_K
                )
                a = a.to(tl.float16)
            else:
                mask = inside_n[:, None] & inside_k[None, :]
                w = _values(wp + (start + k)[None, :], mask, WIDEN)
            if SCALED:
                part = tl.dot(w, a)
                s = _scale(sp + (start // X_GROUP) * stride_sk, used, X_E8M0)
                f = _scale(fp + start // W_GROUP, inside_n, W_E8M0)
                acc += part * f[:, None] * s[None, :]
            else:
                acc = tl.dot(w, a, acc, input_precision="ieee")
        to = out + place * stride_og + m.to(tl.int64)[:, None] * stride_om + n[None, :]
        tl.store(to, tl.trans(acc).to(out.dtype.element_ty), mask=used[:, None] & inside_n[None, :])
