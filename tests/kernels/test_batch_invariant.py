"""Batch-invariant kernels on the CPU: values, equal rows in every batch, and a control that fails."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from deepinfer.core.errors import ConfigError, ShapeError, UnsupportedHardware
from deepinfer.kernels import batch_invariant as bi
from deepinfer.kernels.batch_invariant.row_tiles import tile_sizes
from deepinfer.kernels.reference.experts import expert_order
from deepinfer.testing.determinism import unique_rows

DTYPES = [torch.float32, torch.bfloat16]
# (out, in): nano's, then the widths of V4.1-Flash cut to what a CPU does in a second.
SHAPES = [
    (128, 320), (1024, 128), (320, 192), (96, 512), (24, 1280), (16, 320), (4, 320), (1, 368), (2560, 320),
    (1280, 5120), (384, 5120), (24, 20480),
]  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_rows_are_free_of_the_batch(shape, dtype) -> None:
    weight = random(*shape, dtype=dtype) * shape[1] ** -0.5
    wide = shape[0] * shape[1] > 2**20
    x = random(65 if wide else 512, shape[1], dtype=dtype, seed=1)
    found = unique_rows(lambda rows: bi.linear(rows, weight), x)
    assert found.count == 1, found
    expected = x[:64].double() @ weight.double().T
    error = (bi.linear(x[:64], weight).double() - expected).norm() / expected.norm()
    assert error < (1e-6 if dtype is torch.float32 else 4e-3)


def test_plain_product_is_a_failing_control() -> None:
    weight = random(1280, 1024)
    x = random(512, 1024, seed=1)
    assert unique_rows(lambda rows: rows @ weight.T, x).count > 1


def test_vectorised_sigmoid_is_a_failing_control() -> None:
    x = random(4096) * 2

    def alone_as_together(fn) -> bool:
        together = fn(x)
        return all(torch.equal(fn(x[i : i + 5].clone()), together[i : i + 5]) for i in range(300))

    assert not alone_as_together(torch.sigmoid)
    assert all(alone_as_together(fn) for fn in (bi.sigmoid, bi.silu, bi.softplus))


def test_pointwise_functions_have_the_values_of_torch() -> None:
    x = torch.cat((random(1000) * 4, torch.tensor([-200.0, -90.0, 0.0, 90.0, 200.0])))
    assert torch.allclose(bi.sigmoid(x), torch.sigmoid(x), rtol=1e-6, atol=1e-30)
    assert torch.allclose(bi.silu(x), F.silu(x), rtol=1e-6, atol=1e-30)
    assert torch.allclose(bi.softplus(x), F.softplus(x), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("width", [32, 320, 5120, 20480])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_across_256_rows(width, dtype) -> None:
    gains = random(width, dtype=dtype, seed=2)
    x = random(2048 if width <= 320 else 257, width, dtype=dtype)
    sizes = (1, 2, 255, 256, 257, 2048)
    assert unique_rows(lambda r: bi.rms_norm(r, gains, 1e-6), x, sizes, places=2).count == 1
    assert unique_rows(bi.mean_square, x, sizes, places=2).count == 1
    assert unique_rows(bi.row_sum, x, sizes, places=2).count == 1
    expected = x.double() / (x.double().square().mean(-1, True) + 1e-6).sqrt() * gains.double()
    error = (bi.rms_norm(x, gains, 1e-6).double() - expected).norm() / expected.norm()
    assert error < (1e-6 if dtype is torch.float32 else 4e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_linear(dtype) -> None:
    weight = random(2, 96, 512, dtype=dtype) * 512**-0.5
    x = random(65, 2, 512, dtype=dtype)
    assert unique_rows(lambda rows: bi.grouped_linear(rows, weight), x).count == 1
    expected = torch.einsum("tgk,gnk->tgn", x.double(), weight.double())
    error = (bi.grouped_linear(x, weight).double() - expected).norm() / expected.norm()
    assert error < (1e-6 if dtype is torch.float32 else 4e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_expert_rows_are_free_of_other_rows_of_the_expert(dtype) -> None:
    weight = random(4, 40, 64, dtype=dtype)
    x = random(100, 64, dtype=dtype)
    alone = {}
    for counts in ([1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]):
        alone[counts.index(1)] = bi.expert_linear(x[:1], weight, counts)
    for counts in ([100, 0, 0, 0], [1, 98, 0, 1], [30, 30, 0, 40], [0, 17, 33, 50]):
        first = 0
        for expert, count in enumerate(counts):
            if count:
                for at in {first, first + count // 2, first + count - 1}:
                    batch = x.clone()
                    batch[at] = x[0]
                    out = bi.expert_linear(batch, weight, counts)
                    assert torch.equal(out[at], alone[expert][0]), (counts, expert, at)
            first += count
    assert bi.expert_linear(x[:0], weight, [0] * 4).shape == (0, 40)


def test_pairs_are_free_of_each_other() -> None:
    weight, x = random(4, 40, 64), random(30, 64)
    experts = torch.randint(4, (30, 2), generator=torch.Generator().manual_seed(1))
    whole = bi.pair_linear(x, weight, expert_order(experts, 4), 2)
    wanted = torch.einsum("tk,tenk->ten", x.double(), weight[experts].double())
    assert (whole - wanted.flatten(0, 1)).norm() < 1e-6 * wanted.norm()
    for first, end in ((0, 1), (7, 9), (3, 30)):
        order = expert_order(experts[first:end], 4)
        part = bi.pair_linear(x[first:end], weight, order, 2)
        assert torch.equal(part, whole[2 * first : 2 * end])
    with pytest.raises(ShapeError):
        bi.pair_linear(x, weight, expert_order(experts, 4), 1)


def test_attention_of_a_token_is_free_of_the_batch() -> None:
    heads, dim, rows = 8, 128, 128
    kv, sink = random(300, dim), random(heads)
    generator = torch.Generator().manual_seed(3)
    index = torch.randint(300, (64, rows), generator=generator)
    valid = torch.rand(64, rows, generator=generator) > 0.4
    queries = random(64, heads, dim)

    def attend(rows: torch.Tensor) -> torch.Tensor:
        # A row is a token: its query, its list and its mask side by side.
        query, at, keep = rows.split([heads * dim, rows.shape[1] - heads * dim - 128, 128], 1)
        query = query.view(-1, heads, dim).float()
        return bi.sparse_attention(query, kv, at.long(), keep > 0, sink, dim**-0.5)

    x = torch.cat((queries.flatten(1).double(), index.double(), valid.double()), 1)
    assert unique_rows(attend, x, (1, 2, 3, 8, 17, 64)).count == 1
    assert unique_rows(attend, x, (1, 2, 3, 64), places=2).count == 1


def test_masked_rows_add_nothing() -> None:
    kv, sink, queries = random(20, 16), random(2), random(3, 2, 16)
    index = torch.arange(8).repeat(3, 1)
    valid = torch.arange(8).expand(3, 8) < 5
    wide = bi.sparse_attention(queries, kv, index, valid, sink, 0.25)
    moved = bi.sparse_attention(queries, kv, index.where(valid, 19), valid, sink, 0.25)
    assert torch.equal(wide, moved)
    nothing = bi.sparse_attention(queries, kv, index, valid & False, sink, 0.25)
    assert torch.equal(nothing, torch.zeros_like(nothing))


def test_scores_are_free_of_other_queries_and_keys() -> None:
    queries, weights, keys = random(1, 70, 4, 64), random(1, 70, 4), random(1, 400, 64)
    whole = bi.index_scores(queries, weights, keys)
    for rows, tokens in ((1, 1), (64, 3), (127, 70), (128, 1), (129, 16), (399, 17)):
        part = bi.index_scores(
            queries[:, 5 : 5 + tokens], weights[:, 5 : 5 + tokens], keys[:, :rows]
        )
        assert torch.equal(part, whole[:, 5 : 5 + tokens, :rows])
    dots = torch.einsum("gthd,grd->gthr", queries.double(), keys.double()).relu()
    expected = (dots * weights.double().unsqueeze(-1)).sum(2)
    assert (whole.double() - expected).norm() < 1e-6 * expected.norm()
    assert bi.index_scores(queries, weights, keys[:, :0]).shape == (1, 70, 0)


@pytest.mark.parametrize("n", [1, 3, 4])
def test_sinkhorn(n) -> None:
    x = random(257, n, n)
    assert unique_rows(lambda rows: bi.sinkhorn(rows, 20, 1e-6), x).count == 1
    k = torch.softmax(x.double(), -1) + 1e-6
    k = k / (k.sum(-2, True) + 1e-6)
    for _ in range(19):
        k = k / (k.sum(-1, True) + 1e-6)
        k = k / (k.sum(-2, True) + 1e-6)
    assert (bi.sinkhorn(x, 20, 1e-6) - k).abs().max() < 1e-6


def test_streams() -> None:
    streams, output, post, mix = (
        random(65, 4, 320),
        random(65, 320),
        random(65, 4),
        random(65, 4, 4),
    )
    summed = (streams.double() * post.double().unsqueeze(-1)).sum(1)
    assert (bi.sum_streams(streams, post) - summed).abs().max() < 1e-5
    moved = torch.einsum("tij,tic->tjc", mix.double(), streams.double())
    moved += post.double().unsqueeze(-1) * output.double().unsqueeze(1)
    whole = bi.mix_streams(streams, output, post, mix)
    assert (whole - moved).abs().max() < 1e-5
    for at in (0, 7, 64):
        one = slice(at, at + 1)
        assert torch.equal(
            bi.mix_streams(streams[one], output[one], post[one], mix[one]), whole[one]
        )


@pytest.mark.parametrize("channels", [2560, 129280])
def test_log_softmax(channels) -> None:
    x = random(17, channels) * 3
    assert unique_rows(bi.log_softmax, x).count == 1
    assert (bi.log_softmax(x).double() - x.double().log_softmax(-1)).abs().max() < 1e-5


def test_no_rows() -> None:
    assert bi.linear(random(0, 32), random(8, 32)).shape == (0, 8)
    assert bi.sparse_attention(
        random(0, 2, 16), random(4, 16), torch.zeros(0, 3).long(), torch.zeros(0, 3).bool(), random(2), 1.0
    ).shape == (0, 2, 16)  # fmt: skip
    assert bi.mix_streams(random(0, 4, 8), random(0, 8), random(0, 4), random(0, 4, 4)).shape == (
        0,
        4,
        8,
    )


def test_tile_sizes_are_gapless_powers_with_16() -> None:
    sizes = tile_sizes(128, 320, torch.float32, torch.get_num_threads())
    assert 16 in sizes
    assert list(sizes) == [sizes[0] << i for i in range(len(sizes))]


def test_rows_that_hang_on_their_place_are_refused(monkeypatch) -> None:
    right = F.linear

    def wrong(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = right(x, weight)
        out[-1] *= 1 + 2**-20
        return out

    monkeypatch.setattr(F, "linear", wrong)
    with pytest.raises(UnsupportedHardware, match="change places"):
        tile_sizes.__wrapped__(48, 40, torch.float32, 1)


def test_refusals() -> None:
    x, weight = random(2, 32), random(8, 32)
    with pytest.raises(ShapeError, match="inner axes"):
        bi.linear(x, random(8, 31))
    with pytest.raises(ShapeError, match="both bf16"):
        bi.linear(x, weight.bfloat16())
    with pytest.raises(ShapeError, match="head_dim"):
        bi.sparse_attention(x, x, x.long(), x > 0, x[0], 1.0)
    with pytest.raises(ConfigError, match="'torch', 'triton' or None"):
        bi.linear(x, weight, backend="cublas")
    with pytest.raises(UnsupportedHardware, match="cuda tensors"):
        bi.linear(x, weight, backend="triton")
    with pytest.raises(UnsupportedHardware, match="cpu and cuda"):
        bi.linear(x.to("meta"), weight.to("meta"))


def test_two_processes_give_equal_bytes() -> None:
    code = (
        "import torch; torch.set_num_threads(1)\n"
        "from deepinfer.kernels import batch_invariant as bi\n"
        "from deepinfer.testing.determinism import digest\n"
        "g = torch.Generator().manual_seed(0)\n"
        "x, w = torch.randn(37, 320, generator=g), torch.randn(128, 320, generator=g)\n"
        "print(digest(bi.linear(x, w), bi.sigmoid(x), bi.rms_norm(x, w[0, :1].expand(320), 1e-6)))"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert len(runs[0].strip()) == 64
