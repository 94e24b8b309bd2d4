"""Prepared MXFP4 weights: the same values in another order, or none at all."""

from __future__ import annotations

import pytest
import torch

from deepinfer.core.errors import ShapeError, UnsupportedHardware
from deepinfer.kernels import fp8_fp4_gemm_nt, prepare_mxfp4_weights
from deepinfer.kernels.reference.cast import cast_back, per_token_cast_to_fp4, per_token_cast_to_fp8
from deepinfer.kernels.reference.folded import unfold_mxfp4_weights


def mxfp4(*shape: int, low: int = 118, high: int = 129, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, generator=g)
    scales = torch.randint(
        low, high + 1, (*shape[:-1], shape[-1] // 32), dtype=torch.uint8, generator=g
    )
    return values, scales


@pytest.mark.parametrize("shape", [(7, 128), (3, 64, 384), (2, 2, 5, 256)])
def test_values_are_kept(shape) -> None:
    values, scales = mxfp4(*shape)
    words, steps = prepare_mxfp4_weights(values, scales)
    assert words.shape == (*shape[:-1], shape[-1] // 8)
    assert words.numel() * 4 == values.numel()
    assert steps.shape == (*shape[:-2], shape[-1] // 128 + 1, -(-shape[-2] // 4) * 4)
    assert torch.equal(unfold_mxfp4_weights(words, steps), cast_back(values, scales, block=(1, 32)))


def test_casts_of_weights_can_be_folded() -> None:
    w = torch.randn(64, 1024, generator=torch.Generator().manual_seed(1))
    w[3] = 0
    w[5, :32] = 0
    w[7] *= 1e-30
    pair = per_token_cast_to_fp4(w)
    words, steps = prepare_mxfp4_weights(*pair)
    assert words.dtype == torch.int32
    assert torch.equal(unfold_mxfp4_weights(words, steps), cast_back(*pair, block=(1, 32)))


def test_scales_that_lie_too_far_apart_leave_the_weights_as_they_are() -> None:
    values, scales = mxfp4(4, 256, low=120, high=120)
    values[2, :16] = 0x22
    scales[2, 0] = 120 - 11
    assert prepare_mxfp4_weights(values, scales)[0].dtype == torch.int32
    scales[2, 0] = 120 - 12
    kept = prepare_mxfp4_weights(values, scales)
    assert kept[0] is values
    assert kept[1] is scales
    values[2, :16] = 0x80  # zeros of both signs: their scale is nothing
    assert prepare_mxfp4_weights(values, scales)[0].dtype == torch.int32


def test_a_scale_of_nan_makes_its_row_nan() -> None:
    values, scales = mxfp4(4, 256)
    scales[1, 3] = 255
    found = unfold_mxfp4_weights(*prepare_mxfp4_weights(values, scales))
    assert bool(found[1].isnan().all())
    assert torch.equal(found[[0, 2, 3]], cast_back(values, scales, block=(1, 32))[[0, 2, 3]])


def test_the_bytes_that_the_kernel_makes_are_the_values() -> None:
    """Each word goes through the two byte permutations of the kernel."""
    values, scales = mxfp4(5, 256, low=118, high=129)
    words, steps = prepare_mxfp4_weights(values, scales)
    wanted = cast_back(values, scales, block=(1, 32))
    factors = steps[-1, :5].view(torch.float32)
    for row in range(5):
        for block in range(2):
            for q in range(4):
                for g in range(4):
                    word = int(words[row, 16 * block + 4 * q + g]) & 0xFFFFFFFF
                    half = (int(steps[block, row]) >> (8 * g)) & 255
                    low, high = half * 0x01010100 + 0x0C080000, half * 0x01010101 + 0x1C181410
                    table = [(low >> (8 * i)) & 255 for i in range(4)]
                    table += [(high >> (8 * i)) & 255 for i in range(4)]
                    codes = [table[(word >> (4 * i)) & 7] for i in range(8)]
                    signs = [(word >> (8 * i)) & 0x80 for i in range(4)]
                    signs += [((word << 4) >> (8 * i)) & 0x80 for i in range(4)]
                    made = torch.tensor([c | s for c, s in zip(codes, signs, strict=True)], dtype=torch.uint8)  # fmt: skip
                    at = [128 * block + 32 * g + 16 * h + 4 * q + i for h in range(2) for i in range(4)]  # fmt: skip
                    found = made.view(torch.float8_e4m3fn).float() * factors[row]
                    assert torch.equal(found, wanted[row, at])


def test_products_take_prepared_weights() -> None:
    x = torch.randn(6, 256, generator=torch.Generator().manual_seed(2))
    a, a_scale = per_token_cast_to_fp8(x, 128)
    pair = mxfp4(40, 256)
    wanted = fp8_fp4_gemm_nt((a, a_scale.float()), pair, torch.empty(6, 40))
    prepared = prepare_mxfp4_weights(*pair)
    assert torch.equal(fp8_fp4_gemm_nt((a, a_scale.float()), prepared, torch.empty(6, 40)), wanted)
    with pytest.raises(UnsupportedHardware, match="cannot serve"):
        fp8_fp4_gemm_nt((a, a_scale.float()), prepared, backend="triton")


def test_wrong_shapes_are_refused() -> None:
    values, scales = mxfp4(4, 256)
    with pytest.raises(ShapeError, match="multiple of 128"):
        prepare_mxfp4_weights(values[:, :96].contiguous(), scales[:, :6])
    with pytest.raises(ShapeError, match="scale for 32 channels"):
        prepare_mxfp4_weights(values, scales[:, :4])
