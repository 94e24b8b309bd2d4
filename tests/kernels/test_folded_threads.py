"""Products with prepared MXFP4 weights on Hopper, with their roles as threads on the CPU: values, and groups that are none."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.gluon_numpy import PROGRAM, Pointer
from tests.kernels.gluon_threads import Descriptor, gluon_on_threads
from tests.kernels.test_gemm_threads import FP8, assert_near, integer, pointer, pointer_to

from deepinfer.kernels.reference.folded import prepare_mxfp4_weights, unfold_mxfp4_weights

N, K, GROUPS = 136, 256, 3
HUGE = 1_000_000
# First row of a block of 128, its rows and their group; what is not named has none
BLOCKS = [(0, 100, 2), (128, 128, 1), (256, 20, 1), (384, 90, GROUPS), (512, 5, HUGE), (640, 30, -7), (768, 1, 0)]  # fmt: skip


class Case:
    """Tokens, prepared weights, and their products in fp64."""

    def __init__(self, *rows: int, small: bool = False, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.x = (torch.randn(*rows, K, generator=g) * 100).clamp(-448, 448).to(FP8)
        values = torch.randint(0, 256, (GROUPS, N, K // 2), dtype=torch.uint8, generator=g)
        codes = torch.randint(118, 129, (GROUPS, N, K // 32), dtype=torch.uint8, generator=g)
        self.words, self.steps = prepare_mxfp4_weights(values, codes)
        self.weights = unfold_mxfp4_weights(self.words, self.steps).double()
        if small:
            self.xs = torch.randint(120, 130, (*rows, K // 32), generator=g).to(torch.uint8)
            scale = torch.exp2(self.xs.double() - 127).repeat_interleave(32, -1)
        else:
            self.xs = torch.rand(*rows, K // 128, generator=g) + 0.5
            scale = self.xs.double().repeat_interleave(128, -1)
        self.values = self.x.double() * scale

    def poison(self, dead: torch.Tensor) -> None:
        self.x.view(torch.uint8)[dead] = 0x7F

    def wanted(self, layout: torch.Tensor) -> torch.Tensor:
        found = torch.full((len(layout), N), 777.0, dtype=torch.float64)
        for g in range(GROUPS):
            found[layout == g] = self.values[layout == g] @ self.weights[g].T
        return found

    def descriptors(self, *rows: int, span: int = 1) -> list[Descriptor]:
        """Of words of weights, of tokens by boxes of `rows`, and of powers."""
        x = self.x.view(-1, K).view(torch.uint8).numpy()
        return [
            Descriptor(self.words.view(-1, K // 8).numpy(), [64, 16 * span]),
            *(Descriptor(x, [n, 128]) for n in rows),
            Descriptor(self.steps.view(-1).numpy(), [64]),
        ]

    @property
    def factors(self) -> Pointer:
        return pointer(self.steps.view(torch.float32)) + (K // 128) * self.steps.shape[2]

    @property
    def scales(self) -> Pointer:
        return pointer(self.xs.view(torch.int32) if self.xs.dtype == torch.uint8 else self.xs)


def layout_of_blocks() -> torch.Tensor:
    layout = torch.full((896,), -1, dtype=torch.int32)
    for first, rows, group in BLOCKS:
        layout[first : first + rows] = group
    return layout


def list_of_tiles(layout: torch.Tensor, rows: int) -> torch.Tensor:
    """First rows of the tiles that have a group, behind their number."""
    first = [i for i in range(0, len(layout), rows) if 0 <= layout[i] < GROUPS]
    return torch.tensor([len(first), *first], dtype=torch.int32)


def play(name: str, arguments: tuple, programs: int = 3, **constants: int) -> None:
    with gluon_on_threads(name) as (kernels,):
        for i in range(programs):
            PROGRAM["id"], PROGRAM["count"] = i, programs
            getattr(kernels, f"{name}_kernel")(*arguments, **constants)


def sizes_of(case: Case, out: torch.Tensor) -> tuple:
    """Strides of the output, of factors, of powers and of the tokens' scales."""
    steps, counted = case.steps, out.dim() == 3
    xs = case.xs.shape[-1] * case.xs.itemsize // 4
    of = steps.stride(0)
    strides = (out.stride(0) if counted else 0, N, of, of, steps.stride(1), out.shape[-2] * xs if counted else 0, xs, 1)  # fmt: skip
    return tuple(map(integer, strides))


def folded(case: Case, rows_of: torch.Tensor, out: torch.Tensor, sizes: tuple[int, ...]) -> None:
    """Few tokens; sizes: tokens, warpgroups, depth, span."""
    block_m, parts, depth, span = sizes
    w, x, t = case.descriptors(block_m, span=span)
    tiles = list_of_tiles(rows_of, block_m) if out.dim() == 2 else rows_of
    places = GROUPS if out.dim() == 3 else 1
    play(
        "grouped_folded",
        (w, x, t, pointer_to(out), case.factors, case.scales, pointer(rows_of), pointer(tiles), integer(places),
         integer(N), integer(out.shape[-2]), integer(K // (128 * span)), *sizes_of(case, out)),
        MODE=out.dim() - 1, X_GROUP=128 if case.xs.itemsize == 4 else 32, SPAN=span, PARTS=parts, BLOCK_M=block_m,
        DEPTH=depth, REGISTERS=0,
    )  # fmt: skip


def decoded(case: Case, rows_of: torch.Tensor, out: torch.Tensor, sizes: tuple[int, ...]) -> None:
    """Many tokens; sizes as in `DecodedTuning`."""
    parts_m, parts_n, depth = sizes
    w, x, t = case.descriptors(64)
    play(
        "folded_decoded",
        (w, x, t, pointer_to(out), case.factors, case.scales, pointer(rows_of), integer(GROUPS), integer(N),
         integer(out.shape[-2]), integer(K // 128), *sizes_of(case, out)),
        MODE=out.dim() - 1, X_GROUP=128 if case.xs.itemsize == 4 else 32, TM=parts_m, TN=parts_n, DEPTH=depth,
    )  # fmt: skip


FOLDED = [(16, 1, 3, 2), (64, 2, 2, 1)]
DECODED = [(1, 2, 2), (2, 1, 3)]


@pytest.mark.parametrize("sizes", [*FOLDED, *DECODED])
@pytest.mark.parametrize("small", [False, True])
def test_rows_of_no_group_are_left_alone(sizes, small) -> None:
    layout = layout_of_blocks()
    case = Case(len(layout), small=small)
    case.poison((layout < 0) | (layout >= GROUPS))
    out = torch.full((len(layout), N), 777.0)
    (folded if sizes in FOLDED else decoded)(case, layout, out, sizes)
    assert_near(out, case.wanted(layout))


@pytest.mark.parametrize("sizes", [*FOLDED, *DECODED])
@pytest.mark.parametrize("counts", [(70, 0, 33), (80, HUGE, -HUGE), (-HUGE, 80, 5)])
def test_counts_end_with_the_rows_that_there_are(sizes, counts) -> None:
    case = Case(GROUPS, 80)
    out = torch.full((GROUPS, 80, N), 777.0)
    (folded if sizes in FOLDED else decoded)(case, torch.tensor(counts, dtype=torch.int32), out, sizes)  # fmt: skip
    for g, count in enumerate(counts):
        layout = torch.where(torch.arange(80) < count, g, -1)
        wanted = torch.full((80, N), 777.0, dtype=torch.float64)
        wanted[layout == g] = case.values[g][layout == g] @ case.weights[g].T
        assert_near(out[g], wanted)


def test_wide_tiles_take_listed_groups_only() -> None:
    layout = layout_of_blocks()
    case = Case(len(layout))
    case.poison((layout < 0) | (layout >= GROUPS))
    out = torch.full((len(layout), N), 777.0)
    # Blocks of 128 rows and their rows; 20 of the third block belong to the tile of the second
    tiles = torch.tensor([3, 0 * 256 + 100, 1 * 256 + 148, 6 * 256 + 1], dtype=torch.int32)
    w, x, half, more, t = case.descriptors(128, 64, 32)
    _, *strides = sizes_of(case, out)
    play(
        "folded_ragged",
        (w, x, half, more, t, pointer_to(out), case.factors, case.scales, pointer(layout), pointer(tiles),
         integer(len(layout)), integer(N), integer(K // 128), *strides[:4], *strides[5:]),
        DEPTH=3,
    )  # fmt: skip
    assert_near(out, case.wanted(layout))
