"""The matrix products on a GPU: against the references, repeated, each row alone, poisoned where nothing may be read."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
import torch

from deepinfer.core.errors import ShapeError
from deepinfer.kernels import gemm, prepare_mxfp4_weights
from deepinfer.kernels.reference.cast import (
    per_block_cast_to_fp8,
    per_token_cast_to_fp4,
    per_token_cast_to_fp8,
)

pytestmark = pytest.mark.gpu
ROWS = (1, 2, 3, 15, 16, 17, 63, 64, 65, 128, 257, 1000)
# fp4: prepared MXFP4 weights; 32: tokens, and weights of fp8, with e8m0 scales for 32 channels
KINDS = ("bf16", "fp8", "fp8_32", "fp4", "fp4_32")
GROUPED = KINDS[1:]
SHAPES = [(640, 1024), (1280, 5120), (5120, 8192)]
# Rows and channels of weights whose channels are added up in 2, 6 and 3 parts, and in one
LINEAR = [(4096, 1024), (1280, 2048), (2624, 1040), (8448, 528)]
NAN = 0x7F


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    x, y = x.double(), y.double()
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


def tokens(kind: str, *shape: int):
    x = torch.randn(shape, device="cuda")
    if kind == "bf16":
        return x.bfloat16()
    if kind.endswith("32"):
        q, s = per_token_cast_to_fp8(x, 32)
        return q, s.view(torch.uint8)
    q, s = per_token_cast_to_fp8(x, 128)
    return q, s.float()


def weights(kind: str, *shape: int):
    w = torch.randn(shape, device="cuda")
    if kind == "bf16":
        return w.bfloat16()
    if kind.startswith("fp4"):
        words, steps = prepare_mxfp4_weights(*per_token_cast_to_fp4(w))
        assert words.dtype == torch.int32
        return words, steps
    q, s = per_block_cast_to_fp8(w, 32 if kind == "fp8_32" else 128)
    return q, s.view(torch.uint8) if kind == "fp8_32" else s.float()


def rows_of(a, rows):
    return a[rows] if isinstance(a, torch.Tensor) else (a[0][rows], a[1][rows])


def dense(kind: str):
    return {"bf16": gemm.bf16_gemm_nt, "fp8": gemm.fp8_gemm_nt}.get(
        kind[:4].strip("_"), gemm.fp8_fp4_gemm_nt
    )


def masked(kind: str):
    return gemm.m_grouped_fp8_gemm_nt_masked if kind.startswith("fp8") else gemm.m_grouped_fp8_fp4_gemm_nt_masked  # fmt: skip


def contiguous(kind: str):
    return {"bf16": gemm.m_grouped_bf16_gemm_nt_contiguous, "fp8": gemm.m_grouped_fp8_gemm_nt_contiguous}.get(
        kind[:4].strip("_"), gemm.m_grouped_fp8_fp4_gemm_nt_contiguous
    )  # fmt: skip


def poison(a, dead) -> None:
    """NaN values and scales in some rows."""
    if isinstance(a, torch.Tensor):
        a[dead] = torch.nan
    else:
        a[0].view(torch.uint8)[dead] = NAN
        a[1].view(torch.uint8).unflatten(-1, (-1, a[1].itemsize))[dead] = (
            255  # NaN in fp32 and in e8m0
        )


@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize("expected", [16, 32, 64])
def test_masked_products(kind, expected) -> None:
    a, b = tokens(kind, 5, 64, 1024), weights(kind, 5, 640, 1024)
    counts = torch.tensor([64, 0, 1, 17, 33], device="cuda", dtype=torch.int32)
    poison(a, torch.arange(64, device="cuda") >= counts[:, None])
    found, wanted = (
        torch.full((5, 64, 640), 777.0, device="cuda", dtype=torch.bfloat16) for _ in "ab"
    )
    masked(kind)(a, b, found, counts, expected, backend="hopper")
    masked(kind)(a, b, wanted, counts, expected, backend="torch")
    assert torch.equal(found == 777, wanted == 777)
    assert calc_diff(found, wanted) < 5e-6
    for _ in range(100):
        again = torch.full_like(found, 777.0)
        masked(kind)(a, b, again, counts, expected, backend="hopper")
        assert torch.equal(again, found)


@pytest.mark.parametrize("kind", KINDS)
def test_contiguous_products(kind) -> None:
    a, b = tokens(kind, 512, 1024), weights(kind, 3, 640, 1024)
    layout = torch.full((512,), -1, device="cuda", dtype=torch.int32)
    layout[:100], layout[128:301] = 2, 0
    layout[384:450], layout[450:] = 3, 1_000_000  # groups that are not there
    none = (layout < 0) | (layout > 2)
    poison(a, none)
    wanted = torch.full((512, 640), 777.0, device="cuda", dtype=torch.bfloat16)
    contiguous(kind)(a, b, wanted, layout, backend="torch")
    first = None
    for expected in (None, 1, 9, 20, 40, 400):
        found = torch.full_like(wanted, 777.0)
        contiguous(kind)(a, b, found, layout, expected, backend="hopper")
        assert torch.equal(found == 777, wanted == 777)
        assert calc_diff(found[~none], wanted[~none]) < 5e-6
        first = found if first is None else first
        assert torch.equal(found, first), expected
    untouched = torch.full_like(wanted, 777.0)
    contiguous(kind)(a, b, untouched, torch.full_like(layout, -1), 9, backend="hopper")
    assert bool((untouched == 777).all())


def test_tiles_of_every_width() -> None:
    counts = (100, 300, 0, 256, 70, 280, 161, 5, 129, 96)
    layout = torch.full(
        (128 * sum(-(-c // 128) for c in counts) + 128,), -1, device="cuda", dtype=torch.int32
    )
    first = 0
    for group, count in enumerate(counts):
        layout[first : first + count] = group
        first += -(-count // 128) * 128
    a, b = tokens("fp4", len(layout), 640), weights("fp4", len(counts), 200, 640)
    poison(a, layout < 0)
    f = gemm.m_grouped_fp8_fp4_gemm_nt_contiguous
    found = {}
    for expected, backend in ((16, "hopper"), (150, "hopper"), (150, "torch")):
        d = torch.full((len(layout), 200), 777.0, device="cuda", dtype=torch.bfloat16)
        found[expected, backend] = f(a, b, d, layout, expected, backend=backend)
    few, many, wanted = found.values()
    assert torch.equal(many, few)
    assert torch.equal(many == 777, wanted == 777)
    assert calc_diff(many[layout >= 0], wanted[layout >= 0]) < 5e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_row_does_not_depend_on_the_others(kind, n, k) -> None:
    a, b = tokens(kind, 1000, k), weights(kind, n, k)
    f = dense(kind)
    whole = f(a, b, backend="hopper")
    assert calc_diff(whole, f(a, b, backend="torch")) < 5e-6
    for rows in ROWS:
        part = f(rows_of(a, slice(1000 - rows, 1000)), b, backend="hopper")
        assert torch.equal(part, whole[-rows:]), rows
    order = torch.randperm(1000, device="cuda")
    assert torch.equal(f(rows_of(a, order), b, backend="hopper"), whole[order])
    dead = torch.rand(1000, device="cuda") < 0.5
    poison(a, dead)
    for rows in (17, 64, 1000):
        kept = ~dead[:rows]
        found = f(rows_of(a, slice(0, rows)), b, backend="hopper")
        assert torch.equal(found[kept], whole[:rows][kept]), rows
        assert bool(found[~kept].isnan().all()), rows


@pytest.mark.parametrize("kind", GROUPED)
def test_a_row_of_a_group_does_not_depend_on_the_counts(kind) -> None:
    a, b = tokens(kind, 4, 64, 1024), weights(kind, 4, 640, 1024)

    def product(counts: list[int], expected: int) -> torch.Tensor:
        d = torch.full((4, 64, 640), 777.0, device="cuda", dtype=torch.bfloat16)
        rows = torch.tensor(counts, device="cuda", dtype=torch.int32)
        return masked(kind)(a, b, d, rows, expected, backend="hopper")

    whole = product([64] * 4, 64)
    for counts, expected in (([1, 64, 0, 17], 16), ([16, 15, 33, 2], 32), ([63, 1, 1, 64], 64)):
        found = product(counts, expected)
        for g, count in enumerate(counts):
            assert torch.equal(found[g, :count], whole[g, :count])
            assert bool((found[g, count:] == 777).all())
    for g in range(4):
        x, w = rows_of(a, g), rows_of(b, g)
        assert torch.equal(dense(kind)(x, w, backend="hopper"), whole[g])


def digest(kind: str) -> str:
    """Hash of the bytes of some products on data of a fixed seed."""
    torch.manual_seed(3)
    a, b = tokens(kind, 257, 1024), weights(kind, 640, 1024)
    found = hashlib.sha256()
    for rows in (1, 64, 257):
        d = dense(kind)(rows_of(a, slice(0, rows)), b, backend="hopper")
        found.update(d.view(torch.int16).cpu().numpy().tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("kind", KINDS)
def test_another_process_gets_the_same_bytes(kind) -> None:
    done = subprocess.run(
        [sys.executable, __file__, kind], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().splitlines()[-1] == digest(kind)


@pytest.mark.parametrize("kind", GROUPED)
def test_groups_without_tokens_leave_the_output_alone(kind) -> None:
    a, b = tokens(kind, 3, 16, 256), weights(kind, 3, 128, 256)
    d = torch.full((3, 16, 128), 777.0, device="cuda", dtype=torch.bfloat16)
    masked(kind)(a, b, d, torch.zeros(3, device="cuda", dtype=torch.int32), backend="hopper")
    assert bool((d == 777).all())


@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize("expected", [16, 64])
def test_counts_end_with_the_rows_that_there_are(kind, expected) -> None:
    a, b = tokens(kind, 4, 24, 256), weights(kind, 4, 136, 256)
    found = []
    for counts in ((-1_000_000, 24, 0, 24), (-1_000_000, 25, -1, 1_000_000)):
        rows = torch.tensor(counts, device="cuda", dtype=torch.int32)
        whole = torch.full((6, 24, 136), 777.0, device="cuda", dtype=torch.bfloat16)
        masked(kind)(a, b, whole[1:5], rows, expected, backend="hopper")
        found.append(whole)
    assert torch.equal(*found)
    assert bool((found[0][[0, 1, 3, 5]] == 777).all())
    assert not bool((found[0][[2, 4]] == 777).any())


@pytest.mark.parametrize("kind", GROUPED)
def test_outputs_with_gaps(kind) -> None:
    a, b = tokens(kind, 3, 16, 256), weights(kind, 3, 128, 256)
    counts = torch.tensor([16, 5, 0], device="cuda", dtype=torch.int32)
    wide = torch.full((3, 20, 144), 777.0, device="cuda", dtype=torch.bfloat16)
    view = wide[:, 2:18, 8:136]
    masked(kind)(a, b, view, counts, backend="hopper")
    plain = torch.full((3, 16, 128), 777.0, device="cuda", dtype=torch.bfloat16)
    masked(kind)(a, b, plain, counts, backend="hopper")
    assert torch.equal(view, plain)
    view.fill_(777)
    assert bool((wide == 777).all())


@pytest.mark.parametrize(("kind", "k"), [("bf16", 520), ("fp8", 1040), ("fp8", 2304), ("bf16", 2312)])  # fmt: skip
@pytest.mark.parametrize("m", [5, 300])
def test_the_last_block_of_channels_may_be_short(kind, k, m) -> None:
    a, b = tokens(kind, m, k), weights(kind, 136, k)
    f = dense(kind)
    assert calc_diff(f(a, b, backend="hopper"), f(a, b, backend="torch")) < 5e-6


def test_weights_that_were_not_prepared_are_served_by_another_kernel() -> None:
    a = tokens("fp8", 33, 512)
    b = per_token_cast_to_fp4(torch.randn(136, 512, device="cuda"))
    found, wanted = gemm.fp8_fp4_gemm_nt(a, b), gemm.fp8_fp4_gemm_nt(a, b, backend="torch")
    assert calc_diff(found, wanted) < 5e-6


def test_odd_numbers_of_channels_are_served_by_another_kernel() -> None:
    a, b = tokens("bf16", 5, 511), weights("bf16", 40, 511)
    assert calc_diff(gemm.bf16_gemm_nt(a, b), gemm.bf16_gemm_nt(a, b, backend="torch")) < 5e-6


def test_channels_that_lie_apart_are_refused() -> None:
    q, s = tokens("fp8", 4, 512)
    with pytest.raises(ShapeError, match="last axis"):
        gemm.fp8_gemm_nt((q[:, ::2], s[:, :2]), weights("fp8", 128, 256))


if __name__ == "__main__":
    sys.stdout.write(digest(sys.argv[1]) + "\n")


@pytest.mark.parametrize(("n", "k"), LINEAR)
def test_two_kernels_of_the_linear_layer_have_one_order(n, k) -> None:
    from deepinfer.kernels.batch_invariant import hopper, linear

    x, w = torch.randn(1300, k, device="cuda").bfloat16(), weights("bf16", n, k)
    assert hopper.serves(x, w)
    assert not hopper.serves(x[:512], w)
    whole = linear(x, w)
    assert calc_diff(whole, x.float() @ w.float().T) < 5e-6
    for rows in (*ROWS, 512, 513, 1024):
        part = x[1300 - rows :]
        apart = torch.full((rows, k + 8), torch.nan, device="cuda", dtype=torch.bfloat16)[:, :k]
        odd = torch.full((rows, k + 1), torch.nan, device="cuda", dtype=torch.bfloat16)[:, 1:]
        for its in (part, apart.copy_(part), odd.copy_(part)):
            assert torch.equal(linear(its, w), whole[1300 - rows :]), (rows, its.stride())
    beside = x.clone()
    beside[::2] = torch.nan
    assert torch.equal(linear(beside, w)[1::2], whole[1::2])
