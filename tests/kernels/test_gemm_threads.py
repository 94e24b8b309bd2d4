"""FP8 products on Hopper, with their roles as threads on the CPU: values, places, and when a slot is given back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.kernels.gluon_numpy import PROGRAM, Pointer, Tensor
from tests.kernels.gluon_threads import Descriptor, gluon_on_threads

from deepinfer.kernels.reference.gemm import dequantise

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")
FP8 = torch.float8_e4m3fn


def integer(x: int) -> Tensor:
    return Tensor(np.int32(x))


def pointer(x: torch.Tensor) -> Pointer:
    return Pointer(x.contiguous().view(-1).numpy())


def operands(m: int, n: int, k: int, groups: int, small: bool):
    """Codes and scales of tokens [m, k] and weights [groups, n, k]."""
    g = torch.Generator().manual_seed(m + n + k)
    x = (torch.randn(m, k, generator=g) * 100).clamp(-448, 448).to(FP8)
    w = (torch.randn(groups, n, k, generator=g) * 100).clamp(-448, 448).to(FP8)
    if small:
        xs = torch.randint(120, 130, (m, k // 32), generator=g).to(torch.uint8)
        ws = torch.randint(120, 130, (groups, -(-n // 32), k // 32), generator=g).to(torch.uint8)
    else:
        xs = torch.rand(m, k // 128, generator=g) + 0.5
        ws = torch.rand(groups, -(-n // 128), k // 128, generator=g) + 0.5
    return x, xs, w, ws


def right(x, xs, w, ws, layout) -> torch.Tensor:
    """The products in fp64, 777 for rows without a group."""
    found = torch.full((len(x), w.shape[1]), 777.0, dtype=torch.float64)
    a = dequantise("x", x, xs).double()
    for g in range(len(w)):
        rows = layout == g
        found[rows] = a[rows] @ dequantise("w", w[g], ws[g]).double().T
    return found


def spread(xs: torch.Tensor, ws: torch.Tensor, n: int):
    """What `spread_powers` makes, by other means."""
    power = lambda s: torch.exp2(s.float() - 127)  # noqa: E731
    rows = torch.arange(-(-n // 128) * 4).clamp(max=ws.shape[1] - 1)
    groups, steps = len(ws), ws.shape[2] // 4
    x = power(xs).view(len(xs), steps, 4).transpose(0, 1).contiguous()
    w = power(ws[:, rows]).view(groups, -1, 4, steps, 4).permute(3, 0, 1, 4, 2).contiguous()
    return x, w.view(steps, -1, 4, 4)


def tall(case, layout, sizes, programs: int = 3, **waits: float) -> torch.Tensor:
    """What the kernel of many tokens writes; sizes as in `TallTuning`."""
    parts, columns, depth, band, split, values, rooms = (*sizes, *(1, 0, 0)[len(sizes) - 4 :])
    x, xs, w, ws = case
    (m, k), (groups, n, _) = x.shape, w.shape
    small = xs.dtype == torch.uint8
    x_desc = Descriptor(x.view(torch.uint8).numpy(), [64, 128])
    w_desc = Descriptor(w.view(groups * n, k).view(torch.uint8).numpy(), [columns, 128])
    out = torch.full((m, n), 777.0)
    if values:
        x_powers, w_powers = spread(xs, ws, n)
        x_scale = Descriptor(x_powers.reshape(-1).numpy(), [256])
        w_scale = Descriptor(w_powers.reshape(-1).numpy(), [32])
        strides = (0, 0, -(-n // 128) * 16, w_powers.stride(0))
    else:
        xs, ws = (s.view(torch.int32) if small else s for s in (xs, ws))
        x_scale, w_scale = pointer(xs), pointer(ws)
        strides = (xs.stride(0), xs.stride(1), ws.stride(0), ws.stride(1))
    with gluon_on_threads("gemm_tall", **waits) as (kernels,):
        for i in range(programs):
            PROGRAM["id"], PROGRAM["count"] = i, programs
            kernels.gemm_tall_kernel(
                x_desc, w_desc, pointer_to(out), x_scale, w_scale, pointer(layout), pointer_to(out),
                integer(m), integer(n), integer(-(-k // 128)), integer(groups), integer(1), n, *strides,
                Descriptor(out.numpy(), [64, 64]), SCALED=True, GROUPED=bool((layout != 0).any()), PARTS=parts, BLOCK_N=columns, BAND=band, SPLIT=split,
                GROUP=32 if small else 128, CUT=False, DEPTH=depth, SPREAD=bool(values), ROOMS=rooms,
            )  # fmt: skip
    return out


def pointer_to(x: torch.Tensor) -> Pointer:
    return Pointer(x.view(-1).numpy())


def swapped(case, sizes, programs: int = 3, **waits: float) -> torch.Tensor:
    """What the kernel of few tokens writes; sizes: tokens, warpgroups, depth, ahead."""
    block_m, parts, depth, ahead = sizes
    x, xs, w, ws = case
    (m, k), (_, n, _) = x.shape, w.shape
    small = xs.dtype == torch.uint8
    xs, ws = (s.view(torch.int32) if small else s for s in (xs, ws))
    out = torch.full((m, n), 777.0)
    with gluon_on_threads("grouped_swapped", **waits) as (kernels,):
        for i in range(programs):
            PROGRAM["id"], PROGRAM["count"] = i, programs
            kernels.grouped_swapped_kernel(
                Descriptor(w.view(n, k).view(torch.uint8).numpy(), [64 * parts, 128]),
                Descriptor(x.view(torch.uint8).numpy(), [block_m, 128]),
                pointer_to(out), pointer(ws), pointer(xs), pointer_to(out), pointer_to(out),
                integer(1), integer(n), integer(m), integer(-(-k // 128)), 0, n,
                ws.stride(0), ws.stride(1), 0, xs.stride(0), xs.stride(1),
                COUNTED=0, GROUP=32 if small else 128, PARTS=parts, BLOCK_M=block_m, SPLIT=1, DEPTH=depth,
                REGISTERS=0, AHEAD=bool(ahead),
            )  # fmt: skip
    return out


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert torch.equal(found == 777, wanted == 777)
    assert torch.allclose(found.double(), wanted, rtol=2e-6, atol=2e-6 * float(wanted.abs().max()))


TALL = [(2, 128, 3, 8), (2, 256, 2, 8), (2, 256, 2, 2, 1, 0, 2), (2, 256, 3, 2, 1, 0, 1)]
TALL_32 = [(2, 128, 2, 8), (2, 128, 4, 8, 1, 1), (1, 64, 3, 8)]
FEW = [(16, 1, 3, 0), (16, 2, 2, 1), (64, 1, 3, 1)]
FEW_32 = [(16, 1, 3, 0), (64, 2, 2, 0)]


@pytest.mark.parametrize("k", [128, 256, 640])
@pytest.mark.parametrize("small", [False, True])
def test_all_tilings_multiply_alike(small, k) -> None:
    case = operands(140, 328, k, 1, small)
    layout = torch.zeros(140, dtype=torch.int32)
    wanted = right(*case, layout)
    first = None
    for sizes in TALL_32 if small else TALL:
        found = tall(case, layout, sizes)
        assert_near(found, wanted)
        first = found if first is None else first
        assert torch.equal(found, first), sizes
    for sizes in FEW_32 if small else FEW:
        found = swapped(case, sizes)
        assert torch.equal(found, first), sizes


@pytest.mark.parametrize("sizes", [*TALL[1:], *TALL_32])
def test_groups(sizes) -> None:
    small = sizes in TALL_32
    case = operands(640, 264, 256, 3, small)
    layout = torch.full((640,), -1, dtype=torch.int32)
    layout[:100], layout[128:256], layout[256:300], layout[512:] = 2, 0, 1, 3
    case[0].view(torch.uint8)[(layout < 0) | (layout > 2)] = 0x7F
    assert_near(tall(case, layout, sizes), right(*case, layout))


@pytest.mark.parametrize("sizes", [*TALL, *TALL_32])
def test_slots_of_many_tokens_are_given_back_when_they_were_read(sizes) -> None:
    case = operands(128, 256, 640, 1, sizes in TALL_32)
    layout = torch.zeros(128, dtype=torch.int32)
    sizes = (*sizes[:2], 2, *sizes[3:])
    for waits in ({"late_s": 0.002}, {"rest_s": 0.001}):
        assert_near(tall(case, layout, sizes, 1, **waits), right(*case, layout))


@pytest.mark.parametrize("small", [False, True])
def test_slots_of_few_tokens_are_given_back_when_they_were_read(small) -> None:
    case = operands(24, 192, 640, 1, small)
    layout = torch.zeros(24, dtype=torch.int32)
    for block_m, parts, _, ahead in FEW_32 if small else FEW:
        for waits in ({"late_s": 0.002}, {"rest_s": 0.001}):
            found = swapped(case, (block_m, parts, 2, ahead), 1, **waits)
            assert_near(found, right(*case, layout))


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("counts", [(30, 0, 17), (40, 1_000_000, -1_000_000), (-1_000_000, 40, 5)])
def test_counts_end_with_the_rows_that_there_are(small, counts) -> None:
    groups, m, n, k = 3, 40, 136, 256
    x, xs, w, ws = operands(groups * m, n, k, groups, small)
    words = [s.view(torch.int32) if small else s for s in (xs, ws)]
    out = torch.full((groups * m, n), 777.0)
    with gluon_on_threads("grouped_swapped") as (kernels,):
        for i in range(3):
            PROGRAM["id"], PROGRAM["count"] = i, 3
            kernels.grouped_swapped_kernel(
                Descriptor(w.view(-1, k).view(torch.uint8).numpy(), [128, 128]),
                Descriptor(x.view(torch.uint8).numpy(), [32, 128]),
                pointer_to(out), pointer(words[1]), pointer(words[0]), pointer(torch.tensor(counts, dtype=torch.int32)),
                pointer_to(out), integer(groups), integer(n), integer(m), integer(k // 128), m * n, n,
                *words[1].stride()[:2], m * words[0].stride(0), *words[0].stride(),
                COUNTED=1, GROUP=32 if small else 128, PARTS=2, BLOCK_M=32, SPLIT=1, DEPTH=3, REGISTERS=0, AHEAD=False,
            )  # fmt: skip
    row = torch.arange(groups * m)
    layout = torch.where(row % m < torch.tensor(counts)[row // m], row // m, -1)
    assert_near(out, right(x, xs, w, ws, layout))
