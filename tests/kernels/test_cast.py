"""Byte layouts: exhaustive decoding, the published test vector, and agreement with the rounding functions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from deepinfer.core.errors import ShapeError
from deepinfer.kernels import (
    cast_back,
    decode_ue8m0,
    encode_ue8m0,
    per_block_cast_to_fp8,
    per_token_cast_to_fp4,
    per_token_cast_to_fp8,
    round_fp8,
    round_mxfp4,
    round_nvfp4,
)


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, but for the payload of NaN."""
    bits = (
        torch.where(a.isnan(), 0, a.view(torch.int32)),
        torch.where(b.isnan(), 0, b.view(torch.int32)),
    )
    return torch.equal(*bits) and torch.equal(a.isnan(), b.isnan())


def test_all_256_fp8_bytes() -> None:
    """The definition of e4m3fn: no infinities, 0x7F and 0xFF are NaN."""
    byte = np.arange(256)
    sign = np.where(byte & 0x80, -1.0, 1.0)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    value = sign * np.where(
        exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0)
    )
    value[[0x7F, 0xFF]] = np.nan
    q = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    got = cast_back(q, torch.full((8,), 127, dtype=torch.uint8))
    np.testing.assert_array_equal(got.numpy(), value.astype(np.float32))
    assert np.signbit(got.numpy()[0x80])


def test_all_256_e8m0_bytes() -> None:
    byte = torch.arange(256, dtype=torch.uint8)
    value = np.ldexp(np.float64(1), np.arange(256) - 127)
    got = decode_ue8m0(byte).numpy()
    np.testing.assert_array_equal(got[:255], value[:255].astype(np.float32))
    assert math.isnan(got[255])
    assert np.array_equal(
        got, decode_ue8m0(byte.view(torch.float8_e8m0fnu)).numpy(), equal_nan=True
    )
    normal = decode_ue8m0(byte[1:255])
    assert torch.equal(encode_ue8m0(normal).view(torch.uint8), byte[1:255])
    special = encode_ue8m0(torch.tensor([math.nan, math.inf]))
    assert special.view(torch.uint8).tolist() == [255, 255]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_all_fp4_codes_in_both_halves_of_a_byte(dtype: torch.dtype) -> None:
    grid = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    value = np.array(grid + [-v for v in grid], dtype=np.float32)
    byte = np.arange(256, dtype=np.uint8)
    expected = np.stack([value[byte & 15], value[byte >> 4]], axis=1).reshape(-1)
    q = torch.from_numpy(byte).view(dtype)
    got = cast_back(q, torch.full((16,), 127, dtype=torch.uint8)).numpy()
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(
        np.signbit(got), np.stack([byte & 8, byte & 128], 1).reshape(-1) > 0
    )


def test_every_fp4_byte_is_made_again_by_the_cast() -> None:
    """256 bytes as 8 rows of 64 values; each row holds a 6 or gets one, so the scale is 1."""
    byte = torch.arange(256, dtype=torch.uint8).view(8, 32)
    byte[:, 0] = 0x77
    byte[:, 16] = 0x77
    values = cast_back(byte, torch.full((8, 2), 127, dtype=torch.uint8))
    packed, scale = per_token_cast_to_fp4(values)
    assert torch.equal(packed, byte)
    assert scale.dtype == torch.float8_e8m0fnu
    assert (scale.view(torch.uint8) == 127).all()


def test_published_vector() -> None:
    """First bytes of layers.0.attn.wkv row 0, block 0 of the published checkpoint."""
    q = torch.zeros(32, 32, dtype=torch.uint8)
    q[0, :8] = torch.tensor([0xD8, 0x71, 0xF2, 0x79, 0x70, 0x69, 0xF0, 0xE5])
    scale = torch.tensor([[0x73]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    got = cast_back(q.view(torch.float8_e4m3fn), scale, block=(32, 32))
    assert got[0, :8].tolist() == [
        -0.00390625, 0.03515625, -0.0390625, 0.0703125, 0.03125, 0.017578125, -0.03125, -0.0126953125,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("cast", "rounded", "block"),
    [
        (lambda x: per_token_cast_to_fp8(x), round_fp8, (1, 32)),
        (lambda x: per_token_cast_to_fp4(x), round_mxfp4, (1, 32)),
        (lambda x: per_token_cast_to_fp4(x, 16), round_nvfp4, (1, 16)),
    ],
    ids=["fp8", "mxfp4", "nvfp4"],
)
def test_cast_back_of_a_cast_equals_rounding_bit_for_bit(cast, rounded, block) -> None:
    x = rand(40, 96) * 2.0 ** torch.arange(-20, 20).view(40, 1)
    x[3, 5], x[4, 50], x[5, 90] = math.nan, math.inf, -math.inf
    x[6] = 0
    x[7, 1] = -1e-30
    x[8, 2] = 1e38
    q, scale = cast(x)
    assert q.is_contiguous()
    assert scale.is_contiguous()
    assert same(cast_back(q, scale, block=block), rounded(x))


def test_cast_to_fp4_of_a_bf16_batch_and_of_nothing() -> None:
    x = rand(2, 3, 64).bfloat16()
    packed, scale = per_token_cast_to_fp4(x)
    assert packed.shape == (2, 3, 32)
    assert scale.shape == (2, 3, 2)
    back = cast_back(packed, scale, dtype=torch.bfloat16)
    assert back.dtype == torch.bfloat16
    assert torch.equal(back, round_mxfp4(x))
    packed, scale = per_token_cast_to_fp4(torch.zeros(0, 64))
    assert cast_back(packed, scale).shape == (0, 64)


def test_block_scales_are_per_32x32_block() -> None:
    w = rand(64, 96)
    w[:32, 32:64] *= 2.0**10
    q, scale = per_block_cast_to_fp8(w)
    assert q.shape == (64, 96)
    assert scale.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            block = w[32 * i : 32 * i + 32, 32 * j : 32 * j + 32]
            exponent = math.ceil(math.log2(float(block.abs().max()) / 448))
            assert int(scale.view(torch.uint8)[i, j]) == exponent + 127
            one_group = round_fp8(block.reshape(-1), group=1024).view(32, 32)
            assert torch.equal(
                cast_back(q, scale, block=(32, 32))[32 * i : 32 * i + 32, 32 * j : 32 * j + 32],
                one_group,
            )


@pytest.mark.parametrize(
    "shape", [(1, 5), (33, 64), (40, 70), (32, 31), (3, 40, 70), (0, 64), (64, 0)]
)
def test_short_last_blocks(shape: tuple[int, ...]) -> None:
    w = rand(*shape)
    q, scale = per_block_cast_to_fp8(w)
    n, k = shape[-2:]
    assert scale.shape == (*shape[:-2], -(-n // 32), -(-k // 32))
    back = cast_back(q, scale, block=(32, 32))
    assert back.shape == w.shape
    if w.numel():
        assert float((back - w).abs().max() / w.abs().max()) < 2**-4
    full = torch.zeros(*shape[:-2], -(-n // 32) * 32, -(-k // 32) * 32)
    full[..., :n, :k] = w
    q_full, scale_full = per_block_cast_to_fp8(full)
    assert torch.equal(scale.view(torch.uint8), scale_full.view(torch.uint8))
    assert torch.equal(q.view(torch.uint8), q_full.view(torch.uint8)[..., :n, :k])


def test_short_last_group_of_a_token_cast() -> None:
    x = rand(3, 40)
    q, scale = per_token_cast_to_fp8(x)
    assert scale.shape == (3, 2)
    padded = round_fp8(torch.nn.functional.pad(x, (0, 24)))[:, :40]
    assert torch.equal(cast_back(q, scale), padded)


def test_other_block_sizes_and_fp32_scales() -> None:
    """128x128 blocks with fp32 scales, as other checkpoints of the family have them."""
    w = rand(256, 128)
    q, scale = per_block_cast_to_fp8(w, block=128)
    assert scale.shape == (2, 1)
    as_float = decode_ue8m0(scale)
    assert torch.equal(
        cast_back(q, as_float, block=(128, 128)), cast_back(q, scale, block=(128, 128))
    )
    q, scale = per_block_cast_to_fp8(w, block=(1, 64))
    assert torch.equal(cast_back(q, scale, block=(1, 64)), round_fp8(w, group=64))


def test_quantising_dequantised_weights_keeps_every_value() -> None:
    w = rand(256, 256, seed=5)
    for cast, block in ((per_block_cast_to_fp8, (32, 32)), (per_token_cast_to_fp4, (1, 32))):
        once = cast_back(*cast(w), block=block)
        assert torch.equal(cast_back(*cast(once), block=block), once)


def test_nan_scale_poisons_its_block_only() -> None:
    q, scale = per_block_cast_to_fp8(rand(64, 64))
    scale.view(torch.uint8)[1, 0] = 255
    back = cast_back(q, scale, block=(32, 32))
    assert back[32:, :32].isnan().all()
    assert int(back.isnan().sum()) == 32 * 32


def test_wrong_shapes_and_dtypes_are_refused() -> None:
    q, scale = per_block_cast_to_fp8(rand(64, 64))
    with pytest.raises(ShapeError, match=r"need \(64, 2\)"):
        cast_back(q, scale)
    with pytest.raises(ShapeError, match=r"need \(2, 2\)"):
        cast_back(q, scale[:1], block=(32, 32))
    with pytest.raises(ShapeError, match="float32"):
        cast_back(rand(64, 64), scale, block=(32, 32))
    with pytest.raises(ShapeError, match="shape"):
        per_block_cast_to_fp8(rand(64))
    with pytest.raises(ShapeError, match="24"):
        per_token_cast_to_fp4(rand(4, 48), 24)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="48 channels"):
        per_token_cast_to_fp4(rand(4, 48))
