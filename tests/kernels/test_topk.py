"""Selection of the k largest: the set by definition, ties, NaN, lengths; the kernel under the interpreter."""

from __future__ import annotations

import math
import os

import pytest
import torch

from deepinfer.core.errors import ShapeError
from deepinfer.kernels.configs import topk as configs
from deepinfer.kernels.topk import candidate_block_max, topk, topk_to_physical_indices

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ["torch", "triton"] if INTERPRETED else ["torch"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning"),
]


def by_definition(row: list[float], k: int) -> list[int]:
    order = sorted(range(len(row)), key=lambda i: (-math.inf if math.isnan(row[i]) else row[i], not math.isnan(row[i]), -i))  # fmt: skip
    return sorted(order[::-1][:k])


def rows(kind: str, n: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(3)
    x = torch.randn((3, n), generator=g)
    if kind == "constant":
        x[:] = 1.5
    if kind == "few values":
        x = torch.randint(-2, 3, (3, n), generator=g).float()
    if kind == "nan":
        x[x > 0.5] = torch.nan
        x[0] = torch.nan
        x[1, :50] = -torch.inf
        x[2, ::3], x[2, 1::3] = 0.0, -0.0
    if kind == "rising":
        x[:] = torch.arange(n)
    return x


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["random", "constant", "few values", "nan", "rising"])
@pytest.mark.parametrize(("n", "k"), [(700, 5), (5000, 64), (300, 300)])
def test_the_k_largest_and_ties_to_the_lowest_index(backend, dtype, kind, n, k) -> None:
    x = rows(kind, n).to(dtype)
    values, index = topk(x, k, backend=backend)
    assert index.dtype == torch.int32
    for r in range(3):
        wanted = by_definition(x[r].tolist(), k)
        assert index[r].tolist() == wanted
        assert torch.equal(values[r].nan_to_num(7), x[r, wanted].nan_to_num(7))


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("n", "k", "group"), [(3007, 5, 4)])
def test_maxima_of_small_groups_first(dtype, n, k, group) -> None:
    """Rows by every path: the groups that reach the bound, too many of them, too few elements, k and fewer."""
    from deepinfer.kernels.reference.topk import topk_indices
    from deepinfer.kernels.triton import topk_launch as launch

    x = torch.cat([rows(kind, n) for kind in ("random", "few values", "nan", "rising")]).to(dtype)
    lengths = torch.tensor(
        [n, n - 1, n // 2, n, k, k + 1, 0, n - 7, n, n, 700, 1], dtype=torch.int32
    )
    for given in (None, lengths):
        wanted = torch.empty((12, k), dtype=torch.int32)
        topk_indices(x, k, given, wanted, -1)
        out = torch.full((12, k), -7, dtype=torch.int32)
        tuning = launch.GroupedTuning(group, 1024, 4, 256, 256, 128, 8)
        launch.topk_grouped(x, k, given, out, -1, tuning)
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_and_what_is_behind_them(backend) -> None:
    x = rows("random", 6000)
    end = torch.tensor([6000, 3, 0], dtype=torch.int32)
    x[1, 3:], x[2] = torch.nan, torch.nan
    out = torch.full((3, 20), 777, dtype=torch.int64)[:, 4:12]
    _, index = topk(
        x, 8, end=end, output_idx=out, idx_oob_fill_value=99, return_value=False, backend=backend
    )
    assert index is out
    assert index[0].tolist() == by_definition(x[0].tolist(), 8)
    assert index[1].tolist() == [0, 1, 2] + [99] * 5
    assert index[2].tolist() == [99] * 8
    values, index = topk(
        x, 8, end=end, idx_oob_fill_value=-5, value_oob_fill_value=-1.0, backend=backend
    )
    assert index[1, 3:].tolist() == [-5] * 5
    assert values[2].tolist() == [-1.0] * 8


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [64, 7])
def test_positions_become_slots(backend, page_size) -> None:
    table = torch.tensor([[5, 2, -1], [40_000_000, 0, 1]], dtype=torch.int32)
    indices = torch.tensor(
        [[0, page_size, 2 * page_size, -1, -5], [1, 3 * page_size - 1, 3 * page_size, 10**9, 0]]
    )
    wide = torch.full((2, 9), 777)
    out = topk_to_physical_indices(indices, table, page_size, out=wide[:, 2:7], backend=backend)
    p = page_size
    assert out.tolist() == [
        [5 * p, 2 * p, -1, -1, -1],
        [40_000_000 * p + 1, 2 * p - 1, -1, -1, 40_000_000 * p],
    ]
    assert wide[:, [0, 1, 7, 8]].eq(777).all()
    requests = torch.tensor([1, -1, 0], dtype=torch.int32)
    few = torch.tensor([[1], [1], [1]], dtype=torch.int32)
    found = topk_to_physical_indices(
        few, table[:, 1:], page_size, requests=requests, backend=backend
    )
    assert found.tolist() == [[1], [-1], [2 * p + 1]]
    assert found.dtype == torch.int32
    assert topk_to_physical_indices(few[:0], table[:0], page_size).shape == (0, 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_best_score_of_each_block(backend) -> None:
    x = rows("random", 45)
    lengths = torch.tensor([45, 17, 0], dtype=torch.int32)
    x[0, 8:16], x[0, 17], x[1, 17:] = -torch.inf, torch.nan, torch.nan
    found = candidate_block_max(x, lengths, 8, backend=backend)
    for r, length in enumerate(lengths.tolist()):
        for b in range(6):
            part = [v for v in x[r, b * 8 : min(b * 8 + 8, length)].tolist() if not math.isnan(v)]
            best = max(part, default=-math.inf)
            if length and b == (length - 1) // 8 and best > -math.inf:
                best = math.inf
            assert found[r, b].item() == best
    assert candidate_block_max(x[:0], lengths[:0], 8).shape == (0, 6)
    with pytest.raises(ShapeError, match="block_size is 6"):
        candidate_block_max(x, lengths, 6)


def test_candidates_are_those_of_the_model() -> None:
    from deepinfer.models.deepseek_v41.indexer import candidate_mask

    scores = rows("random", 100)
    visible = torch.tensor([100, 61, 9])
    scores[torch.arange(100) >= visible[:, None]] = -torch.inf
    wanted = candidate_mask(scores, visible, 4, 8)
    best = candidate_block_max(scores, visible.int(), 8)
    _, blocks = topk(best, 4, return_value=False)
    kept = torch.zeros(3, 13, dtype=torch.bool).scatter_(1, blocks.long(), True)
    kept &= best > -torch.inf
    found = kept.repeat_interleave(8, 1)[:, :100] & (scores > -torch.inf)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("k", [1, 512, 513, 1024, 2048, 4096])
@pytest.mark.parametrize("n", [32768, 50000, 129280, 131072, 262144, 1048576])
def test_the_table_holds_what_selection_by_groups_asks_for(n, k) -> None:
    for rows_, item_bytes in ((1, 2), (64, 4), (256, 2), (2000, 4)):
        sizes = configs.lookup_by_groups(rows_, n, k, item_bytes)
        if sizes is None:
            continue
        group, block, _, coarse, capacity, tiles, warps, *_ = sizes
        everything = max(1 << (-(-n // group) - 1).bit_length(), coarse)
        assert coarse >= 2 * k
        assert capacity >= 2 * k
        assert coarse // (256 * warps) in (1, 2)
        assert min(256 * warps, capacity) // (32 * warps) in (1, 2, 4, 8)
        assert everything // coarse in (1, 2, 4, 8, 16)
        assert (
            everything // (256 * warps) <= 8
        )  # of 8 maxima a thread: more do not fit into registers
        assert capacity // (32 * warps) <= 32
        assert block % group == 0
        assert tiles <= 4
        assert 32 * warps * max(min(group, 16), 8) < 1 << 16  # four counts share an integer
    assert configs.lookup_by_groups(64, (1 << 20) + 1, k, 2) is None


@pytest.mark.parametrize("k", [1, 64, 512, 513, 2048, 4096])
@pytest.mark.parametrize("n", [5, 256, 1000, 4096, 8192, 16384, 65536, 1 << 21])
def test_the_table_holds_what_a_program_a_row_asks_for(n, k) -> None:
    for rows_ in (1, 264, 265, 4096):
        groups, capacity, warps, _ = configs.lookup_wide(rows_, n, k)
        assert capacity // (32 * warps) in (2, 4, 8, 16)
        assert warps <= 32
        if n > capacity:
            assert groups >= 2 * k
            assert capacity >= 2 * k
            assert groups // (32 * warps) in (1, 2, 4, 8)


def test_sorted_by_value() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, -torch.inf, 2.0, torch.nan]])
    values, index = topk(x, 6, sorted=True)
    assert index.tolist() == [[1, 2, 4, 0, 3, 5]]
    assert values[0, :5].tolist() == [3.0, 3.0, 2.0, 1.0, -math.inf]
    _, index = topk(x, 3, sorted=True, return_value=False, indices_type=torch.int64)
    assert index.tolist() == [[1, 2, 4]]
    assert index.dtype == torch.int64


def test_rows_that_lie_apart_and_no_rows() -> None:
    x = rows("random", 1000)
    wide = torch.zeros(3, 1500)
    wide[:, 200:1200] = x
    assert torch.equal(topk(wide[:, 200:1200], 9)[1], topk(x, 9)[1])
    values, index = topk(x[:0], 9)
    assert index.shape == values.shape == (0, 9)
    assert topk(x[:, :0], 2, return_value=False)[1].tolist() == [[-1, -1]] * 3
    assert topk(x[:, :0], 2)[0].tolist() == [[-math.inf, -math.inf]] * 3


def test_wrong_arguments_are_refused() -> None:
    x = rows("random", 10)
    with pytest.raises(ShapeError, match="topk is 0"):
        topk(x, 0)
    with pytest.raises(ShapeError, match="topk is 5000"):
        topk(x, 5000)
    with pytest.raises(ShapeError, match="last axis"):
        topk(x.T, 2)
    with pytest.raises(ShapeError, match="input has dtype float64"):
        topk(x.double(), 2)
    with pytest.raises(ShapeError, match="end has shape"):
        topk(x, 2, end=torch.ones(2, dtype=torch.int32))
    with pytest.raises(ShapeError, match="indices_type"):
        topk(x, 2, indices_type=torch.int16)
