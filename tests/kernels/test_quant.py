"""Rounding functions against an independent numpy formulation, and their edge rules."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from deepinfer.core.errors import ShapeError
from deepinfer.kernels import ceil_to_ue8m0, round_fp8, round_mxfp4, round_nvfp4

FP4_GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def e4m3_values() -> np.ndarray:
    """All non-negative finite e4m3 values from the definition of the format, ascending; index = code."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(
        exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0)
    )


def nearest(values: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Nearest grid point in float64, ties to the even code, saturating; sign kept."""
    magnitude = np.abs(values)[..., None]
    distance = np.abs(magnitude - grid)
    best = distance.min(-1, keepdims=True)
    tied = distance == best
    even = tied & (np.arange(len(grid)) % 2 == 0)
    code = np.where(even.any(-1), even.argmax(-1), tied.argmax(-1))
    return np.copysign(grid[code], values)


def pow2_ceil(a: np.ndarray) -> np.ndarray:
    mantissa, exponent = np.frexp(a)
    return np.ldexp(1.0, exponent - (mantissa == 0.5))


def oracle(x: np.ndarray, kind: str) -> np.ndarray:
    group = 16 if kind == "nvfp4" else 32
    g = x.astype(np.float64).reshape(*x.shape[:-1], -1, group)
    a = np.abs(g).max(-1, keepdims=True)
    if kind == "fp8":
        scale, grid = pow2_ceil(np.maximum(a, np.float32(1e-4)) / 448), e4m3_values()
    elif kind == "mxfp4":
        scale, grid = pow2_ceil(np.maximum(a, 6 * 2.0**-126) / 6), FP4_GRID
    else:
        sixth = (np.maximum(a, 6 * 2.0**-9).astype(np.float32) / np.float32(6)).astype(np.float64)
        scale, grid = nearest(sixth, e4m3_values()), FP4_GRID
    return (nearest(g / scale, grid) * scale).reshape(x.shape)


FUNCTIONS = {"fp8": round_fp8, "mxfp4": round_mxfp4, "nvfp4": round_nvfp4}


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_agrees_with_the_definition_over_many_magnitudes(kind: str) -> None:
    rng = np.random.default_rng(0)
    low, high = (-12, 13) if kind == "nvfp4" else (-30, 30)
    spread = 2.0 ** rng.integers(low, high, size=(200, 1))
    x = (rng.standard_normal((200, 64)) * spread).astype(np.float32)
    got = FUNCTIONS[kind](torch.from_numpy(x)).numpy()
    np.testing.assert_array_equal(got, oracle(x, kind))


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_every_tie_goes_to_the_even_code(kind: str) -> None:
    grid = e4m3_values() if kind == "fp8" else FP4_GRID
    ties = (grid[:-1] + grid[1:]) / 2
    top = grid[-1]
    for sign in (1.0, -1.0):
        for chunk in np.array_split(ties * sign, math.ceil(len(ties) / 15)):
            x = np.zeros(32 if kind != "nvfp4" else 16, dtype=np.float32)
            x[: len(chunk)] = chunk
            x[-1] = top  # makes the scale 1
            got = FUNCTIONS[kind](torch.from_numpy(x)).numpy()
            np.testing.assert_array_equal(got[: len(chunk)], nearest(chunk, grid))


@pytest.mark.parametrize(("limit", "function"), [(448.0, round_fp8), (6.0, round_mxfp4)])
@pytest.mark.parametrize("exponent", [-12, -3, 0, 1, 7, 20])
def test_scale_next_to_a_power_of_two(limit: float, function, exponent: int) -> None:
    edge = np.float32(limit * 2.0**exponent)
    for amax in (np.nextafter(edge, np.float32(0)), edge, np.nextafter(edge, np.float32(np.inf))):
        x = np.full(32, amax, dtype=np.float32)
        kind = "fp8" if function is round_fp8 else "mxfp4"
        np.testing.assert_array_equal(function(torch.from_numpy(x)).numpy(), oracle(x, kind))


def test_ceil_to_ue8m0_at_and_around_every_power_of_two() -> None:
    powers = np.ldexp(np.float32(1), np.arange(-126, 127)).astype(np.float32)
    above = np.nextafter(powers, np.float32(np.inf))
    assert np.array_equal(ceil_to_ue8m0(torch.from_numpy(powers)).numpy(), powers)
    assert np.array_equal(ceil_to_ue8m0(torch.from_numpy(above)).numpy(), powers * 2)
    assert ceil_to_ue8m0(torch.tensor(math.inf)).item() == math.inf


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_group_that_is_not_finite_becomes_nan_and_others_do_not(kind: str, bad: float) -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    x[1, 40] = bad
    group = 16 if kind == "nvfp4" else 32
    start = 40 // group * group
    got = FUNCTIONS[kind](x)
    assert got[1, start : start + group].isnan().all()
    assert int(got.isnan().sum()) == group


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_zero_rows_stay_zero_and_keep_their_sign(kind: str) -> None:
    got = FUNCTIONS[kind](torch.tensor([0.0, -0.0] * 32))
    assert torch.equal(got, torch.zeros(64))
    assert torch.equal(torch.signbit(got), torch.tensor([False, True] * 32))


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 32), (0,), (3, 0)])
def test_empty_inputs_keep_their_shape(kind: str, shape: tuple[int, ...]) -> None:
    assert FUNCTIONS[kind](torch.zeros(shape)).shape == shape


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_is_kept_and_rounded_values_are_exact_in_it(kind: str, dtype: torch.dtype) -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = FUNCTIONS[kind](x)
    assert got.dtype == dtype
    assert torch.equal(got.float(), FUNCTIONS[kind](x.float()))


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_rounding_twice_changes_nothing_and_input_is_left_alone(kind: str) -> None:
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(2))
    before = x.clone()
    once = FUNCTIONS[kind](x)
    assert torch.equal(x, before)
    if kind != "nvfp4":  # an e4m3 scale of a rounded group is not always the same scale
        assert torch.equal(FUNCTIONS[kind](once), once)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_strided_rows_give_the_same_values(kind: str) -> None:
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(3))
    assert torch.equal(FUNCTIONS[kind](x.T), FUNCTIONS[kind](x.T.contiguous()))
    wide = torch.randn(4, 128, generator=torch.Generator().manual_seed(4))
    assert torch.equal(FUNCTIONS[kind](wide[:, ::2]), FUNCTIONS[kind](wide[:, ::2].contiguous()))


def test_nvfp4_scale_saturates_instead_of_turning_into_nan() -> None:
    x = torch.full((16,), 1e6)
    assert torch.equal(round_nvfp4(x), torch.full((16,), 448.0 * 6))
    assert torch.equal(round_nvfp4(torch.full((16,), -3000.0)), torch.full((16,), -2688.0))


def test_tiny_activations_use_the_floor_of_the_scale() -> None:
    x = torch.full((32,), 1e-9)
    quantum = 2.0**-22 * 2.0**-9
    assert torch.equal(round_fp8(x), torch.full((32,), round(1e-9 / quantum) * quantum))


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_fp32_extremes_do_not_overflow_in_the_arithmetic(kind: str) -> None:
    x = torch.full((32,), 1e38)
    got = FUNCTIONS[kind](x)
    assert got.isfinite().all()
    if kind != "nvfp4":
        assert ((got / 1e38 - 1).abs() < 0.2).all()


def test_channels_must_fill_the_groups() -> None:
    with pytest.raises(ShapeError, match="48 channels; groups of 32") as caught:
        round_fp8(torch.zeros(2, 48))
    assert caught.value.argument == "x"
    with pytest.raises(ShapeError):
        round_mxfp4(torch.zeros(2, 16))
    with pytest.raises(ShapeError):
        round_nvfp4(torch.zeros(2, 8))
