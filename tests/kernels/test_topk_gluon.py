"""Selections whose registers are set by hand, on the CPU: every path of both kernels, rows that are hard."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.kernels.gluon_numpy import PROGRAM, Pointer, gluon_on_numpy

from deepinfer.kernels.configs import topk as configs
from deepinfer.kernels.reference.topk import topk_indices

ROWS = 15


def hard_rows(n: int, k: int, group: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(n + k)
    x = torch.randn((ROWS, n), generator=g)
    x[1], x[2], x[3, ::2] = 1.5, x[2].round(), torch.nan
    x[4], x[5, : n // 2] = torch.arange(n), -torch.inf
    x[6], x[7], x[8] = 0.0, (x[7] - 2.5).relu(), torch.nan
    x[6, ::3] = -0.0
    x[9, n // 3 : n // 3 + 2 * k] += 40
    x[10] = -torch.inf
    x[10, : k // 2] = 1
    x[11] = torch.nan
    x[11, -(k // 2) :] = 2.0
    x[12] = torch.arange(n) % 256
    x[13, 5], x[13, 7] = torch.inf, 3e38
    x[14], x[14, ::group] = -1.0, 1.0  # equals, one a group
    lengths = torch.randint(1, n + 1, (ROWS,), generator=g, dtype=torch.int32)
    lengths[1:] = n
    lengths[5] = n - 3
    return x, lengths


def raw(x: torch.Tensor) -> np.ndarray:
    """Bits of rows, and room behind the last one, which is read by 16 bytes."""
    bits = x.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32).reshape(-1)
    return np.concatenate([bits.numpy(), np.full(32, -1, bits.numpy().dtype)])


def check(out: np.ndarray, x: torch.Tensor, k: int, lengths: torch.Tensor) -> None:
    wanted = torch.empty((ROWS, k), dtype=torch.int32)
    topk_indices(x, k, lengths, wanted, -1)
    found = torch.from_numpy(out.reshape(ROWS, k + 8))
    assert torch.equal(found[:, :k], wanted)
    assert bool((found[:, k:] == -7).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("n", "k", "sizes"),
    [
        (256, 64, configs.lookup_wide(256, 256, 64)),
        (4096, 512, configs.lookup_wide(64, 4096, 512)),
        (3008, 64, (256, 256, 1, 0)),
        (8192, 512, configs.lookup_wide(4096, 8192, 512)),
    ],
)
def test_a_program_a_row(dtype, n, k, sizes) -> None:
    groups, capacity, warps, _ = sizes
    x, lengths = hard_rows(n, k)
    x = x.to(dtype)
    out, found = np.full(ROWS * (k + 8), -7, np.int32), np.full(ROWS * capacity, -99, np.int64)
    with gluon_on_numpy("topk_wide") as (wide,), np.errstate(all="ignore"):
        PROGRAM["warps"] = warps
        for row in range(ROWS):
            PROGRAM["id"] = row
            wide.topk_wide_kernel(
                Pointer(raw(x)), Pointer(lengths.numpy()), Pointer(out), Pointer(found), n, k, -1, n, k + 8,
                HAS_LENGTHS=True, BITS=8 * x.itemsize, GROUPS=groups, CAPACITY=capacity, SHORT=n <= capacity,
            )  # fmt: skip
    check(out, x, k, lengths)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("n", "k", "group", "coarse", "capacity", "tiles", "warps"),
    [(32768, 128, 16, 1024, 256, 2, 4), (30000, 100, 64, 512, 256, 1, 2), (16000, 300, 4, 2048, 1024, 4, 4)],
)  # fmt: skip
def test_selection_by_groups(dtype, n, k, group, coarse, capacity, tiles, warps) -> None:
    x, lengths = hard_rows(n, k, group)
    x = x.to(dtype)
    everything = max(1 << (-(-n // group) - 1).bit_length(), coarse)
    filled = torch.full((ROWS, everything * group), torch.nan)
    for row, length in enumerate(lengths.tolist()):
        filled[row, :length] = x[row, :length].float()
    values = filled.view(ROWS, everything, group)
    maxima = values.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(2)
    maxima[values.isnan().all(2)] = torch.nan
    out, found = np.full(ROWS * (k + 8), -7, np.int32), np.full(ROWS * capacity, -99, np.int64)
    listed = np.full(ROWS * everything, 1 << 30, np.int32)
    with gluon_on_numpy("topk_grouped") as (grouped,), np.errstate(all="ignore"):
        PROGRAM["warps"] = warps
        for row in range(ROWS):
            PROGRAM["id"] = row
            grouped.topk_by_groups_kernel(
                Pointer(raw(x)), Pointer(lengths.numpy()), Pointer(out), Pointer(raw(maxima.to(dtype))),
                Pointer(listed), Pointer(found), n, k, -1, 2 * k * group, n, k + 8, everything, HAS_LENGTHS=True,
                BITS=8 * x.itemsize, GROUPS=min(256 * warps, capacity), CAPACITY=capacity, GROUP=group,
                ALL=everything, COARSE=coarse, TILES=tiles, EARLY=False,
            )  # fmt: skip
    check(out, x, k, lengths)
