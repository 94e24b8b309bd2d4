"""Casts by every backend: bits at ties, borders of scales, zeros, NaN and infinities; SwiGLU with its cast; operations."""

from __future__ import annotations

import os

import pytest
import torch

from deepinfer.core.errors import ShapeError, UnsupportedHardware
from deepinfer.kernels import quant
from deepinfer.kernels.explaining import explain
from deepinfer.kernels.reference import cast as reference
from deepinfer.kernels.reference.swiglu import cast_rows

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ["torch", "triton"] if INTERPRETED else ["torch"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
]
DTYPES = [torch.float32, torch.float16]
TIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])


def hard(channels: int = 160, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    g = torch.Generator().manual_seed(1)
    x = torch.randn((10, channels), generator=g) * torch.exp(4 * torch.randn((10, 1), generator=g))
    x[0], x[1] = 0.0, -0.0
    x[2, 3], x[2, 40], x[2, 70] = torch.nan, torch.inf, -torch.inf
    x[3] = torch.cat((TIES, -TIES)).repeat(-(-channels // 16))[:channels]
    powers = 2.0 ** (torch.arange(channels) // 32 - 2)
    x[4], x[5] = 448 * powers, 448 * powers * (1 + 2.0**-23)
    x[6], x[7] = 6 * powers * (1 + 2.0**-23), 1e-30
    x[8], x[9] = 3e38, torch.randn(channels, generator=g) * 1e-40
    return x.clamp(-7e4, 7e4).to(dtype) if dtype == torch.float16 else x


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equality of bytes; all NaN codes of e4m3 are equal."""
    a, b = found.view(torch.uint8), wanted.view(torch.uint8)
    equal = a == b
    if wanted.dtype == torch.float8_e4m3fn:
        equal |= ((a & 0x7F) == 0x7F) & ((b & 0x7F) == 0x7F)
    return found.dtype == wanted.dtype and bool(equal.all())


def apart(x: torch.Tensor) -> torch.Tensor:
    """The same rows with NaN in between."""
    wide = torch.full((x.shape[0], x.shape[1] + 9), torch.nan, dtype=x.dtype)
    wide[:, 3:-6] = x
    return wide[:, 3:-6]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("channels", "group"), [(160, 32), (256, 128), (100, 32)])
def test_fp8_bits(backend, dtype, channels, group) -> None:
    x = hard(channels, dtype)
    wanted = reference.per_token_cast_to_fp8(x, group)
    found = quant.per_token_cast_to_fp8(apart(x), group, backend=backend)
    assert same(found[0], wanted[0])
    assert same(found[1], wanted[1])
    wide = quant.per_token_cast_to_fp8(x, group, scale_dtype=torch.float32, backend=backend)[1]
    assert torch.equal(wide.nan_to_num(-1), wanted[1].float().nan_to_num(-1))
    back = quant.cast_back(*found, block=(1, group), backend=backend)
    expected = reference.cast_back(*wanted, block=(1, group))
    assert torch.equal(back.nan_to_num(7e30), expected.nan_to_num(7e30))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [16, 32])
def test_fp4_bits(backend, dtype, group) -> None:
    x = hard(160, dtype)
    wanted = reference.per_token_cast_to_fp4(x, group)
    found = quant.per_token_cast_to_fp4(apart(x), group, backend=backend)
    assert same(found[0], wanted[0])
    assert same(found[1], wanted[1])
    back = quant.cast_back(*found, block=(1, group), backend=backend)
    expected = reference.cast_back(*wanted, block=(1, group))
    assert torch.equal(back.isnan(), expected.isnan())
    assert torch.equal(
        back.nan_to_num(1).view(torch.int32), expected.nan_to_num(1).view(torch.int32)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_go_to_the_even_code(backend) -> None:
    """With a largest value of 6 the scale is 1: 0.75, 1.75 and 3.5 go up, 0.25, 1.25, 2.5 and 5 go down."""
    x = torch.cat((TIES, -TIES, torch.zeros(16)))[None]
    for group in (16, 32):
        codes, scale = quant.per_token_cast_to_fp4(x, group, backend=backend)
        assert quant.cast_back(codes, scale, block=(1, group))[0, :8].tolist() == [0, 1, 1, 2, 2, 4, 4, 6]  # fmt: skip
    assert quant.cast_back(codes, scale).signbit()[0, 8:16].all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp8_ties_go_to_the_even_code(backend) -> None:
    """With a largest value of 448 the scale is 1, the steps are 2 above 16 and 2^-9 below 2^-5."""
    small = torch.arange(1, 16, 2) * 2.0**-10
    x = torch.cat((torch.tensor([448.0]), torch.arange(17.0, 32.0, 2), -small, small[:8]))[None]
    codes, scale = quant.per_token_cast_to_fp8(x.repeat(3, 1)[:, :32], backend=backend)
    assert (scale.view(torch.uint8) == 127).all()
    values = codes.float()[0]
    assert values[1:9].tolist() == [16, 20, 20, 24, 24, 28, 28, 32]
    assert (values[9:17] * -512).tolist() == [0, 2, 2, 4, 4, 6, 6, 8]
    assert values[9].signbit()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("power", [-20, -1, 0, 3, 60])
def test_the_scale_next_to_a_power_of_two(backend, power) -> None:
    """448 * 2^n needs the scale 2^n, and the next number needs the next one: a logarithm misses that."""
    border = torch.tensor(448.0) * 2.0**power
    above = torch.nextafter(border, torch.tensor(torch.inf))
    x = torch.stack((border.expand(32), above.expand(32)))
    if power > -20:  # below, the floor of the largest value decides
        scale = quant.per_token_cast_to_fp8(x, backend=backend)[1].view(torch.uint8)
        assert scale.flatten().tolist() == [127 + power, 128 + power]
    x = x / 448 * 6
    border = x[0].clone()
    x[1] = torch.nextafter(border, torch.tensor(torch.inf))
    scale = quant.per_token_cast_to_fp4(x, backend=backend)[1].view(torch.uint8)
    assert scale.flatten().tolist() == [127 + power, 128 + power]


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_that_are_zero_or_not_finite(backend) -> None:
    x = hard()
    codes, scale = quant.per_token_cast_to_fp8(x, backend=backend)
    assert scale.view(torch.uint8)[0].tolist() == [105] * 5  # 1e-4 / 448
    assert (codes.view(torch.uint8)[0] == 0).all()
    assert (codes.view(torch.uint8)[1] == 0x80).all()
    assert scale.view(torch.uint8)[2].tolist()[:3] == [255] * 3
    values = quant.cast_back(codes, scale, backend=backend)
    assert values[2, :96].isnan().all()
    assert values[2, 96:].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block", [(32, 32), (4, 64), (1, 128)])
def test_blocks(backend, block) -> None:
    w = hard(150)
    wanted = reference.per_block_cast_to_fp8(w, block)
    found = quant.per_block_cast_to_fp8(apart(w), block, backend=backend)
    assert same(found[0], wanted[0])
    assert same(found[1], wanted[1])
    back = quant.cast_back(*found, block=block, dtype=torch.float16, backend=backend)
    expected = reference.cast_back(*wanted, block=block, dtype=torch.float16)
    assert torch.equal(back.nan_to_num(1), expected.nan_to_num(1))
    several = torch.stack((w[:7], w[3:]))
    found = quant.per_block_cast_to_fp8(several, block, backend=backend)
    wanted = reference.per_block_cast_to_fp8(several, block)
    assert same(found[1], wanted[1])
    back = quant.cast_back(*found, block=block, backend=backend)
    assert torch.equal(back.nan_to_num(1), reference.cast_back(*wanted, block=block).nan_to_num(1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_codes_and_scales_read_back(backend) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    q, scale = every.view(8, 32).view(torch.float8_e4m3fn), torch.full((8, 1), 130).to(torch.uint8)
    wanted = reference.cast_back(q, scale)
    assert torch.equal(
        quant.cast_back(q, scale, backend=backend).nan_to_num(7), wanted.nan_to_num(7)
    )
    q = torch.full((256, 32), 0x3B, dtype=torch.uint8).view(torch.float8_e4m3fn)
    found = quant.cast_back(q, every[:, None], backend=backend)
    assert torch.equal(found.nan_to_num(7), reference.cast_back(q, every[:, None]).nan_to_num(7))
    packed = every.view(16, 16)
    for scale, block in ((torch.full((16, 1), 125).to(torch.uint8), (1, 32)), (every.view(128, 2)[:16].view(torch.float8_e4m3fn), (1, 16))):  # fmt: skip
        found = quant.cast_back(packed, scale, block=block, backend=backend)
        assert torch.equal(found, reference.cast_back(packed, scale, block=block))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("format", ["fp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("limit", [None, 2.0])
def test_swiglu_and_its_cast(backend, format, limit) -> None:
    g = torch.Generator().manual_seed(0)
    x, weights = torch.randn((7, 192), generator=g) * 4, torch.rand(7, generator=g)
    gate, up = x.double().chunk(2, 1)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    exact = gate / (1 + torch.exp(-gate)) * up * weights[:, None]
    values = quant.silu_and_mul(apart(x), weights, limit=limit, backend=backend)
    assert ((values - exact).abs() < 1e-6 * exact.abs().clamp_min(1)).all()
    found = quant.silu_and_mul_quant(x, weights, limit=limit, format=format, backend=backend)
    wanted = cast_rows(values, format, 32)
    assert same(found[0], wanted[0])
    assert same(found[1], wanted[1])
    bare = quant.silu_and_mul(x, limit=limit, backend=backend)
    assert torch.allclose(bare * weights[:, None], values, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_swiglu_keeps_nan_in_its_row(backend) -> None:
    x = torch.ones(3, 128)
    x[1, 3], x[2, 70] = torch.nan, torch.inf
    values = quant.silu_and_mul(x, limit=5.0, backend=backend)
    assert values.isnan().nonzero().tolist() == [[1, 3]]
    assert values[2, 6] == values[0, 6] * 5
    scale = quant.silu_and_mul_quant(x, limit=5.0, group=64, backend=backend)[1]
    assert scale.view(torch.uint8).flatten().tolist()[1] == 255


def test_packed_scales() -> None:
    scale = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 255]], dtype=torch.uint8)
    packed = quant.pack_ue8m0(scale.view(torch.float8_e8m0fnu))
    assert packed.dtype == torch.int32
    assert packed.tolist() == [[0x04030201, 5], [0x09080706, 255]]
    with pytest.raises(ShapeError, match="scale has dtype float32"):
        quant.pack_ue8m0(scale.float())


@pytest.mark.parametrize("backend", [None, "torch"])
def test_no_rows_and_more_axes(backend) -> None:
    q, scale = quant.per_token_cast_to_fp8(torch.empty(0, 96), backend=backend)
    assert (q.shape, scale.shape) == ((0, 96), (0, 3))
    assert quant.per_token_cast_to_fp4(torch.empty(0, 96), backend=backend)[0].shape == (0, 48)
    assert quant.silu_and_mul(torch.empty(0, 96), backend=backend).shape == (0, 48)
    x = torch.randn(2, 3, 64)
    wanted = reference.per_token_cast_to_fp8(x)
    found = quant.per_token_cast_to_fp8(x, backend=backend)
    assert found[0].shape == (2, 3, 64)
    assert same(found[1], wanted[1])
    found = quant.silu_and_mul_quant(x, torch.rand(2, 3), backend=backend)
    assert (found[0].shape, found[1].shape) == ((2, 3, 32), (2, 3, 1))
    vector = quant.per_token_cast_to_fp4(x[0, 0], backend=backend)
    assert torch.equal(vector[0], quant.per_token_cast_to_fp4(x)[0][0, 0])
    assert quant.cast_back(*vector, backend=backend).shape == (64,)


def test_wrong_arguments() -> None:
    x = torch.randn(3, 50)
    with pytest.raises(ShapeError, match="groups of 32"):
        quant.per_token_cast_to_fp4(x)
    with pytest.raises(ShapeError, match="groups of 32"):
        quant.silu_and_mul_quant(x[:, :40], format="mxfp4", backend="torch")
    with pytest.raises(ShapeError, match="scale_dtype"):
        quant.per_token_cast_to_fp8(x, scale_dtype=torch.float16)
    with pytest.raises(ShapeError, match="gates and as many values"):
        quant.silu_and_mul(x[:, :49])
    with pytest.raises(ShapeError, match="weights has shape"):
        quant.silu_and_mul(x, torch.rand(4))
    with pytest.raises(ShapeError, match="format is 'fp6'"):
        quant.silu_and_mul_quant(x, format="fp6")
    q, scale = quant.per_token_cast_to_fp8(x)
    with pytest.raises(ShapeError, match="in blocks of 1x64"):
        quant.cast_back(q, scale, block=(1, 64), backend="torch")


@pytest.mark.skipif(INTERPRETED, reason="the interpreter serves tensors of the CPU")
def test_what_triton_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPINFER_ACCELERATOR", raising=False)
    x = torch.randn(3, 64)
    with pytest.raises(UnsupportedHardware):
        quant.per_token_cast_to_fp8(x, backend="triton")
    q, scale = torch.empty(3, 64, dtype=torch.uint8), torch.empty(3, 2, dtype=torch.uint8)
    choice = explain("per_token_cast_to_fp8", x.double(), 32, q, scale)
    assert choice.backend == "torch"
    assert "float64" in choice.refusals["triton"]
    assert "not a power of two" in str(explain("per_token_cast_to_fp8", x, 24, q, scale))


@pytest.mark.skipif(INTERPRETED, reason="the compiler of torch needs no interpreter")
def test_in_a_whole_graph() -> None:
    x = torch.randn(5, 128)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, scale = quant.silu_and_mul_quant(x * 2, limit=3.0)
        more, scales = quant.per_token_cast_to_fp4(x)
        blocks = quant.per_block_cast_to_fp8(x, (1, 64))
        return (
            quant.cast_back(q, scale) + 1,
            quant.cast_back(more, scales),
            quant.cast_back(*blocks, block=(1, 64)),
        )

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(compiled(x), step(x), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.skipif(INTERPRETED, reason="the compiler of torch needs no interpreter")
def test_operations_pass_the_checks_of_torch() -> None:
    x, ops = torch.randn(4, 64), torch.ops.deepinfer
    q, scale = torch.empty(4, 64, dtype=torch.uint8), torch.empty(4, 2, dtype=torch.uint8)
    torch.library.opcheck(ops.per_token_cast_to_fp8, (None, x, 32, q, scale))
    torch.library.opcheck(
        ops.per_token_cast_to_fp4, (None, x, 32, q[:, :32].contiguous(), scale.clone())
    )
    blocks = torch.empty(1, 1, 2, dtype=torch.uint8)
    torch.library.opcheck(
        ops.per_block_cast_to_fp8, (None, x[None], 32, 32, q[None].clone(), blocks)
    )
    scales = torch.full((4, 2), 120, dtype=torch.uint8)
    torch.library.opcheck(
        ops.cast_back, (None, q[None], scales, 1, 32, False, torch.empty(1, 4, 64))
    )
    half = torch.empty(4, 32, dtype=torch.uint8)
    torch.library.opcheck(
        ops.silu_and_mul_quant,
        (None, x, torch.rand(4), 3.0, 1, 32, half, torch.empty(4, 1, dtype=torch.uint8)),
    )
