"""Recasts MXFP4 keys as e4m3 with one scale each."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.gemm_portable import decode_e2m1

__all__ = ["recast_keys_kernel"]


@triton.jit(do_not_specialize=["num_keys"])
def recast_keys_kernel(
    packed, codes, wide, scale, num_keys, DIM: tl.constexpr, BLOCK: tl.constexpr
):
    """`wide[s] * scale[s]` is the key s; its largest scale is taken out, times 2^-6 so that 6 becomes 384."""
    GROUPS: tl.constexpr = DIM // 32
    s = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = s < num_keys
    g = tl.arange(0, GROUPS)
    code = tl.load(codes + s[:, None] * GROUPS + g[None, :], mask=inside[:, None], other=0).to(
        tl.int32
    )
    most = tl.max(code, 1)
    shift = tl.maximum(
        code - most[:, None] + 133, 0
    )  # 2^(its scale - the largest + 6), 0 where that is 2^-127
    factor = (shift << 23).to(tl.float32, bitcast=True)
    byte = tl.load(
        packed + s[:, None] * (DIM // 2) + tl.arange(0, DIM // 2)[None, :],
        mask=inside[:, None],
        other=0,
    )
    value = tl.join(decode_e2m1(byte & 15), decode_e2m1(byte >> 4)).reshape(BLOCK, GROUPS, 32)
    value = value.to(tl.float32) * factor[:, :, None]
    at = s[:, None] * DIM + tl.arange(0, DIM)[None, :]
    tl.store(wide + at, value.reshape(BLOCK, DIM).to(wide.dtype.element_ty), mask=inside[:, None])
    exponent = most - 6
    bits = tl.where(exponent > 0, exponent << 23, 0x00400000 >> tl.minimum(-exponent, 22))
    bits = tl.where(most == 255, 0x7FC00000, bits)
    tl.store(scale + s, bits.to(tl.float32, bitcast=True), mask=inside)
