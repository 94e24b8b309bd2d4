"""Matrix products by name: the references against float64, the portable kernel under the interpreter, the contract."""

from __future__ import annotations

import os

import pytest
import torch

from deepinfer.core.errors import ConfigError, ShapeError, UnsupportedHardware
from deepinfer.kernels import gemm
from deepinfer.kernels.explaining import explain
from deepinfer.kernels.reference.cast import (
    cast_back,
    per_block_cast_to_fp8,
    per_token_cast_to_fp4,
    per_token_cast_to_fp8,
)
from deepinfer.kernels.registry import use_backend

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ["torch", "triton"] if INTERPRETED else ["torch"]
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tokens(*shape: int, group: int = 128, e8m0: bool = False, seed: int = 0):
    q, s = per_token_cast_to_fp8(randn(*shape, seed=seed), group)
    return q, s if e8m0 else s.float()


def weights(kind: str, *shape: int, seed: int = 1):
    w = randn(*shape, seed=seed)
    if kind == "fp4":
        return per_token_cast_to_fp4(w)
    q, s = per_block_cast_to_fp8(w, 128 if kind == "fp8" else 32)
    return q, s.float() if kind == "fp8" else s


def values(pair, height: int, width: int) -> torch.Tensor:
    return cast_back(*pair, block=(height, width)).double()


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["fp8", "fp4", "fp8_32"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 40, 128), (17, 136, 320), (70, 33, 256)])
def test_dense_products_equal_those_of_float64(backend, kind, m, n, k) -> None:
    group = 32 if kind == "fp8_32" else 128
    a, b = tokens(m, k, group=group, e8m0=kind == "fp8_32"), weights(kind, n, k)
    d = torch.full((m, n), 777.0)
    function = gemm.fp8_fp4_gemm_nt if kind == "fp4" else gemm.fp8_gemm_nt
    assert function(a, b, d, backend=backend) is d
    block = {"fp8": (128, 128), "fp4": (1, 32), "fp8_32": (32, 32)}[kind]
    wanted = values(a, 1, group) @ values(b, *block).T
    assert relative(d, wanted) < 2e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_masked_products_touch_the_rows_of_each_group_only(backend, kind) -> None:
    a, b = tokens(4, 20, 256), weights(kind, 4, 48, 256)
    counts = torch.tensor([20, 0, 3, 1], dtype=torch.int32)
    for g, count in enumerate(counts.tolist()):
        a[0].view(torch.uint8)[g, count:] = 0x7F  # NaN
        a[1][g, count:] = torch.nan
    d = torch.full((4, 20, 48), 777.0)
    function = gemm.m_grouped_fp8_fp4_gemm_nt_masked if kind == "fp4" else gemm.m_grouped_fp8_gemm_nt_masked  # fmt: skip
    function(a, b, d, counts, 4, backend=backend)
    block = (1, 32) if kind == "fp4" else (128, 128)
    for g, count in enumerate(counts.tolist()):
        assert (d[g, count:] == 777).all()
        if count:
            x = cast_back(a[0][g, :count], a[1][g, :count], block=(1, 128)).double()
            w = cast_back(b[0][g], b[1][g], block=block).double()
            assert relative(d[g, :count], x @ w.T) < 2e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_contiguous_products_leave_padding_alone(backend, kind) -> None:
    a, b = tokens(400, 128), weights(kind, 3, 40, 128)
    layout = torch.full((400,), -1, dtype=torch.int32)
    layout[:100], layout[128:201] = 2, 0
    layout[256:300], layout[384:] = 3, 2**31 - 1  # there are no such groups
    none = (layout < 0) | (layout > 2)
    a[0].view(torch.uint8)[none] = 0x7F
    d = torch.full((400, 40), 777.0)
    function = gemm.m_grouped_fp8_fp4_gemm_nt_contiguous if kind == "fp4" else gemm.m_grouped_fp8_gemm_nt_contiguous  # fmt: skip
    function(a, b, d, layout, backend=backend)
    assert (d[none] == 777).all()
    block = (1, 32) if kind == "fp4" else (128, 128)
    for g in (0, 2):
        rows = layout == g
        x = cast_back(a[0][rows], a[1][rows], block=(1, 128)).double()
        assert relative(d[rows], x @ cast_back(b[0][g], b[1][g], block=block).double().T) < 2e-6


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("num_rows", [0, 1152, 5120, 70_016])
def test_tiles_that_have_work_are_listed(rows, num_rows) -> None:
    from deepinfer.kernels.triton.grouped_list import used_tiles_kernel

    layout = torch.full((num_rows,), -1, dtype=torch.int32)
    layout[896:1024] = 4  # a group that is not there
    wanted = []
    if num_rows:  # groups of one, three, two and two blocks of 128 rows
        layout[:70], layout[128:500], layout[512:750], layout[num_rows - 256 :] = 3, 1, 0, 2
        for first, end in ((0, 70), (128, 500), (512, 750), (num_rows - 256, num_rows)):
            wanted += range(first, end, rows)
    tiles = torch.full((-(-num_rows // rows) + 1,), 777, dtype=torch.int32)
    used_tiles_kernel[(1,)](layout, tiles, num_rows, 4, ROWS=rows, BLOCK=16)
    assert tiles[0] == len(wanted)
    assert tiles[1 : 1 + len(wanted)].tolist() == wanted
    assert (tiles[1 + len(wanted) :] == 777).all()


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("n", [40, 256, 4608])
def test_powers_are_written_as_values(groups, n) -> None:
    from deepinfer.kernels.triton.gemm_powers import spread_powers_kernel

    generator = torch.Generator().manual_seed(n)
    m, steps, blocks = 70, 11, groups * -(-n // 128)

    def bytes_of(*shape: int) -> torch.Tensor:
        return torch.randint(0, 255, shape, generator=generator).to(torch.uint8)

    x = bytes_of(m, 4 * steps + 12)[:, : 4 * steps]
    w = bytes_of(groups, -(-n // 32), 4 * steps)
    x_powers = torch.full((steps, m, 4), 777.0)
    w_powers = torch.full((steps, blocks, 4, 4), 777.0)
    programs = -(-m // 64)
    spread_powers_kernel[(programs + -(-blocks // 16), -(-steps // 8))](
        x, w, x_powers, w_powers, m, n, steps, programs, blocks, x.stride(0), w.stride(0), w.stride(1), BLOCK=64
    )  # fmt: skip
    values = torch.where(x == 0, 0.0, torch.exp2(x.double() - 127)).float()
    assert torch.equal(x_powers, values.view(m, steps, 4).transpose(0, 1))
    rows = (torch.arange(-(-n // 128) * 4)).clamp(max=-(-n // 32) - 1)
    values = torch.where(w == 0, 0.0, torch.exp2(w.double() - 127)).float()[:, rows]
    wanted = values.view(groups, -1, 4, steps, 4).permute(3, 0, 1, 4, 2)
    assert torch.equal(w_powers, wanted.reshape(steps, blocks, 4, 4))


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("block", [4, 64])
def test_tiles_are_as_wide_as_groups(block) -> None:
    from deepinfer.kernels.triton.grouped_list import ragged_tiles_kernel

    counts = [1, 64, 65, 80, 81, 96, 97, 128, 129, 144, 145, 160, 161, 256, 288, 300, 0, 5, 128, 16]
    layout = []
    wanted = []
    for group, count in enumerate(counts):
        first = len(layout)
        layout += [group] * count + [-1] * (-count % 128)
        whole, rest = divmod(count, 128)
        rows = [128] * whole
        if whole and 0 < rest <= 32:
            rows[-1] += rest
        elif rest:
            rows.append(rest)
        wanted += [(first // 128 + i, own) for i, own in enumerate(rows)]
    for none in (-1, len(counts), 1_000_000, -5):  # groups that are not there
        layout += [none] * 128
    layout[65:128] = [len(counts)] * 63
    found = torch.full((len(layout) // 128 + 1,), -7, dtype=torch.int32)
    ragged_tiles_kernel[(1,)](
        torch.tensor(layout, dtype=torch.int32), found, len(layout), len(counts), BLOCK=block
    )
    assert int(found[0]) == len(wanted)
    assert [divmod(v, 256) for v in found[1 : len(wanted) + 1].tolist()] == wanted
    assert (found[len(wanted) + 1 :] == -7).all()


@pytest.mark.skipif(INTERPRETED, reason="the interpreter multiplies the bits of bf16")
def test_bf16_products() -> None:
    a, b = randn(5, 64).bfloat16(), randn(7, 64, seed=1).bfloat16()
    wanted = a.double() @ b.double().T
    assert relative(gemm.bf16_gemm_nt(a, b), wanted) < 4e-3
    d = gemm.bf16_gemm_nt(a, b, torch.empty(5, 7))
    assert relative(d, wanted) < 1e-6
    layout = torch.tensor([1, 1, 1, 1, -1], dtype=torch.int32)
    d = gemm.m_grouped_bf16_gemm_nt_contiguous(
        a, b[None].repeat(2, 1, 1), torch.full((5, 7), 9.0), layout
    )
    assert (d[4] == 9).all()
    assert relative(d[:4], wanted[:4]) < 1e-6
    counts = torch.tensor([3], dtype=torch.int32)
    d = gemm.m_grouped_bf16_gemm_nt_masked(a[None], b[None], torch.full((1, 5, 7), 9.0), counts)
    assert (d[0, 3:] == 9).all()


def test_no_rows_and_strided_outputs() -> None:
    a, b = tokens(0, 128), weights("fp8", 40, 128)
    assert gemm.fp8_gemm_nt(a, b).shape == (0, 40)
    a = tokens(4, 128)
    wide = torch.full((4, 64), 777.0)
    gemm.fp8_gemm_nt(a, b, wide[:, 3:43])
    assert (wide[:, :3] == 777).all()
    assert (wide[:, 43:] == 777).all()
    assert torch.equal(wide[:, 3:43], gemm.fp8_gemm_nt(a, b, torch.empty(4, 40)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_do_not_depend_on_their_neighbours(backend) -> None:
    a, b = tokens(65, 256), weights("fp4", 24, 256)
    whole = (
        gemm.fp8_fp4_gemm_nt(a, b, torch.empty(65, 24), backend="triton")
        if backend == "triton"
        else None
    )
    if whole is None:
        pytest.skip("torch chooses other sums for other numbers of rows")
    for rows in (slice(0, 33), slice(40, 65)):
        part = gemm.fp8_fp4_gemm_nt(
            (a[0][rows], a[1][rows]), b, torch.empty(whole[rows].shape), backend=backend
        )
        assert torch.equal(part, whole[rows])


def test_wrong_arguments_are_refused_with_a_reason() -> None:
    a, b = tokens(4, 128), weights("fp8", 40, 128)
    with pytest.raises(ShapeError, match="128 channels and b has 256"):
        gemm.fp8_gemm_nt(a, weights("fp8", 40, 256))
    with pytest.raises(ShapeError, match="a has dtype float32"):
        gemm.fp8_gemm_nt((a[0].float(), a[1]), b)
    with pytest.raises(ShapeError, match="last axis"):
        gemm.fp8_gemm_nt(a, b, torch.empty(40, 4).T)
    with pytest.raises(ShapeError, match="scales of a"):
        gemm.fp8_gemm_nt((a[0], a[1][:2]), b, backend="torch")
    with pytest.raises(ShapeError, match="masked_m"):
        gemm.m_grouped_fp8_gemm_nt_masked(
            tokens(2, 4, 128),
            weights("fp8", 2, 40, 128),
            torch.empty(2, 4, 40),
            torch.ones(3, dtype=torch.int32),
        )


def test_a_backend_that_cannot_serve_the_call_raises() -> None:
    a, b = tokens(4, 128), weights("fp8", 40, 128)
    with pytest.raises(UnsupportedHardware, match="'hopper' of gemm_nt cannot serve"):
        gemm.fp8_gemm_nt(a, b, backend="hopper")
    with (
        pytest.raises(ConfigError, match="no kernel has a backend 'cutlass'"),
        use_backend("cutlass"),
    ):
        gemm.fp8_gemm_nt(a, b)
    with use_backend("torch"):
        choice = explain("gemm_nt", *a, *b, torch.empty(4, 40))
    assert choice.backend == "torch"
    assert "hopper" in choice.refusals
    assert "torch serves" in str(choice)
    assert choice.wish == "torch"
    with pytest.raises(ConfigError, match="no kernel"):
        explain("gemm")
