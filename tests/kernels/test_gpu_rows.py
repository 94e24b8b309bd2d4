"""The row kernels on a GPU in bf16: bytes of casts, sums against fp64, each row alone."""

from __future__ import annotations

import pytest
import torch

from deepinfer import kernels
from deepinfer.kernels.reference.swiglu import cast_rows

pytestmark = pytest.mark.gpu
ROWS = (1, 3, 16, 65, 257)


def every_bf16() -> torch.Tensor:
    """Each bf16 number there is, among neighbours and among strangers."""
    x = torch.arange(65536, device="cuda", dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return torch.cat((x.view(512, 128), x.view(128, 512).T.reshape(512, 128)))


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equality of bytes; all NaN codes of e4m3 are equal."""
    a, b = found.cpu().view(torch.uint8), wanted.view(torch.uint8)
    equal = a == b
    if wanted.dtype == torch.float8_e4m3fn:
        equal |= ((a & 0x7F) == 0x7F) & ((b & 0x7F) == 0x7F)
    return bool(equal.all())


@pytest.mark.parametrize(
    ("format", "group"), [("fp8", 32), ("fp8", 128), ("mxfp4", 32), ("nvfp4", 16)]
)
def test_bytes_of_casts(format, group) -> None:
    for x in (every_bf16(), torch.randn(65, 1280, device="cuda").bfloat16() * 30):
        cast = kernels.per_token_cast_to_fp8 if format == "fp8" else kernels.per_token_cast_to_fp4
        found, wanted = cast(x, group, backend="triton"), cast_rows(x.cpu(), format, group)
        assert same(found[0], wanted[0])
        assert same(found[1], wanted[1])
        back = kernels.cast_back(*found, block=(1, group), dtype=torch.bfloat16, backend="triton")
        expected = kernels.cast_back(*wanted, block=(1, group), dtype=torch.bfloat16)
        assert torch.equal(back.cpu().nan_to_num(7), expected.nan_to_num(7))
        if group != 128:
            fused = kernels.rms_norm_rope_quant(x, None, format=format, backend="triton")
            assert same(fused[0], wanted[0])
            assert same(fused[1], wanted[1])


@pytest.mark.parametrize("format", ["fp8", "mxfp4", "nvfp4"])
def test_swiglu_is_its_parts(format) -> None:
    x, w = torch.randn(257, 4608, device="cuda").bfloat16() * 4, torch.rand(257, device="cuda")
    bare = kernels.silu_and_mul(x, w, limit=10.0, backend="triton")
    gate, up = x.double().clamp(max=10).chunk(2, 1)
    exact = gate / (1 + torch.exp(-gate)) * up.clamp(min=-10) * w.double()[:, None]
    assert ((bare - exact).abs() <= 2**-8 * 1.01 * exact.abs() + 1e-6).all()
    found = kernels.silu_and_mul_quant(x, w, limit=10.0, format=format, backend="triton")
    wanted = cast_rows(bare.cpu(), format, 32)
    assert same(found[0], wanted[0])
    assert same(found[1], wanted[1])


def test_coefficients_of_bf16_streams() -> None:
    streams = torch.randn(257, 4, 5120, device="cuda").bfloat16()
    pre, base, scale = (torch.rand(s, device="cuda") for s in ((257, 4), (24,), (3,)))
    fn = torch.randn(24, 20480, device="cuda") * 0.02
    y, post, mix, following = kernels.mhc_pre(streams, pre, fn, base, scale, backend="triton")
    z = streams.double().flatten(1)
    m = z @ fn.double().T / z.square().mean(1, keepdim=True).sqrt()
    assert torch.allclose(
        post.double(), 2 * torch.sigmoid(m[:, 4:8] * scale[1] + base[4:8]), atol=5e-5
    )
    assert torch.allclose(
        following.double(), torch.sigmoid(m[:, :4] * scale[0] + base[:4]) + 1e-6, atol=5e-5
    )
    assert torch.allclose(mix.sum(1), torch.ones(257, 4, device="cuda"), atol=1e-4)
    summed = torch.einsum("ti,tic->tc", pre.double(), streams.double())
    assert ((y - summed).abs() <= 2**-8 * 1.01 * summed.abs() + 1e-5).all()
    for count in ROWS:
        part = kernels.mhc_pre(streams[:count], pre[:count], fn, base, scale, backend="triton")
        for a, b in zip(part, (y, post, mix, following), strict=True):
            assert torch.equal(a, b[:count])


def test_many_tokens_and_few_have_the_same_coefficients() -> None:
    """Many tokens take pieces of the channels in pairs; a prepared projection is what the kernel makes itself."""
    streams = torch.randn(4200, 4, 1280, device="cuda").bfloat16()
    pre, base, scale = (torch.rand(s, device="cuda") for s in ((4200, 4), (24,), (3,)))
    fn = torch.randn(24, 5120, device="cuda") * 0.02
    prepared = kernels.prepare_mhc_projection(fn)
    whole = kernels.mhc_pre(streams, pre, fn, base, scale, backend="triton")
    for _ in range(20):
        again = kernels.mhc_pre(streams, pre, prepared, base, scale, backend="triton")
        for a, b in zip(again, whole, strict=True):
            assert torch.equal(a, b)
    for count in (1, 65, 1000, 4095):
        part = kernels.mhc_pre(streams[:count], pre[:count], fn, base, scale, backend="triton")
        for a, b in zip(part, whole, strict=True):
            assert torch.equal(a, b[:count])


def test_heads_that_are_normed_turned_and_cast() -> None:
    x = torch.randn(33, 6, 544, device="cuda").bfloat16()[:, 1:5, :512]
    phases, at = torch.randn(40, 32, 2, device="cuda"), torch.randint(0, 40, (33,), device="cuda")
    weight = torch.randn(512, device="cuda").bfloat16()
    for format in ("fp8", "mxfp4", "nvfp4"):
        turned = kernels.apply_rope(x, phases, at, backend="torch")
        wanted = cast_rows(turned.cpu(), format, 32)
        given = (phases, at)
        found = kernels.rms_norm_rope_quant(x, None, 1e-6, *given, format=format, backend="triton")
        assert same(found[0], wanted[0])
        assert same(found[1], wanted[1])
        normed = kernels.rms_norm_rope_quant(
            x, weight, 1e-6, *given, format=format, backend="triton"
        )
        plain = kernels.rms_norm_rope_quant(x, weight, 1e-6, *given, format=format, backend="torch")
        differing = normed[0].view(torch.uint8) != plain[0].view(torch.uint8)
        assert differing.float().mean() < 2e-3


def test_rows_alone() -> None:
    x, r = (torch.randn(257, 5120, device="cuda").bfloat16() for _ in range(2))
    w = torch.randn(5120, device="cuda").bfloat16()
    whole = kernels.rms_norm(x, w, backend="triton")
    wide = x.double()
    exact = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-6) * w.double()
    assert ((whole - exact).abs() <= 2**-8 * 1.02 * exact.abs() + 1e-6).all()
    added = kernels.fused_add_rms_norm(x.clone(), r.clone(), w, backend="triton")
    for count in ROWS:
        assert torch.equal(kernels.rms_norm(x[:count], w, backend="triton"), whole[:count])
        part = kernels.fused_add_rms_norm(x[:count].clone(), r[:count].clone(), w, backend="triton")
        assert torch.equal(part[0], added[0][:count])
        assert torch.equal(part[1], added[1][:count])
