"""Attention of many rows: the reference against float64, the portable kernel under the interpreter, the contract."""

from __future__ import annotations

import os

import pytest
import torch

from deepinfer.core.errors import ShapeError, UnsupportedHardware
from deepinfer.kernels.attention import merge_attn_states
from deepinfer.kernels.attention_prefill import (
    flash_mla_sparse_fwd,
    owned_indices,
    swa_attention,
    window_bands,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ["torch", "triton"] if INTERPRETED else ["torch"]
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
STRANGE = torch.tensor([-(2**31), -123456, -1, 114514, 2**31 - 1, 2**31 - 2], dtype=torch.int32)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def lists(rows: int, width: int, keys: int, *, missing: float = 0.2, seed: int = 0) -> torch.Tensor:
    """Random indices, some of them outside of the keys."""
    g = torch.Generator().manual_seed(seed)
    found = torch.randint(0, keys, (rows, 1, width), generator=g, dtype=torch.int32)
    wrong = STRANGE[torch.randint(0, len(STRANGE), found.shape, generator=g)]
    return torch.where(torch.rand(found.shape, generator=g) < missing, wrong, found)


def plain(q, kv, indices, scale, d_v, sink=None, length=None, more=()):
    """One row at a time in float64."""
    out = torch.zeros(*q.shape[:2], d_v, dtype=torch.float64)
    highest = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    lse = torch.full(q.shape[:2], torch.inf, dtype=torch.float64)
    for t in range(len(q)):
        ids = indices[t, 0, : None if length is None else int(length[t])].tolist()
        picked = [kv[i, 0] for i in ids if 0 <= i < len(kv)]
        if more:
            picked += [more[0][i, 0] for i in more[1][t, 0].tolist() if 0 <= i < len(more[0])]
        if not picked:
            continue
        keys = torch.stack(picked).double()
        logits = q[t].double() @ keys.T * scale
        highest[t], lse[t] = logits.amax(-1), logits.logsumexp(-1)
        whole = lse[t] if sink is None else torch.logaddexp(lse[t], sink.double())
        out[t] = (logits - whole[:, None]).exp() @ keys[:, :d_v]
    return out, highest, lse


def assert_near(found, wanted, limit: float = 3e-6) -> None:
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=limit, atol=limit)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("heads", "d", "d_v", "width"), [(3, 32, 32, 40), (16, 48, 32, 16), (20, 16, 16, 1)]
)
def test_sparse_attention_equals_float64(backend, heads, d, d_v, width) -> None:
    q, kv, sink = randn(5, heads, d), randn(50, 1, d, seed=1), randn(heads, seed=2)
    indices, length = lists(5, width, 50), torch.tensor([width, 0, 1, width // 2, width + 9])
    indices[0] = -1
    length = length.int()
    found = flash_mla_sparse_fwd(q, kv, indices, 0.3, d_v, sink, length, backend=backend)
    assert_near(found, plain(q, kv, indices, 0.3, d_v, sink, length))
    assert (found[0][:2] == 0).all()
    found = flash_mla_sparse_fwd(q, kv, indices, d_v=d_v, backend=backend)
    assert_near(found, plain(q, kv, indices, d**-0.5, d_v))


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_may_begin_after_a_tile_of_nothing(backend) -> None:
    q, kv = randn(2, 16, 16), randn(30, 1, 16, seed=1)
    indices = lists(2, 100, 30, missing=0.1)
    indices[0, 0, :70] = -1
    found = flash_mla_sparse_fwd(q, kv, indices, d_v=16, backend=backend)
    assert_near(found, plain(q, kv, indices, 0.25, 16))


@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks_of_any_size(backend) -> None:
    q, kv, indices = randn(2, 16, 16), randn(30, 1, 16, seed=1), lists(2, 20, 30)
    sink = torch.zeros(16)
    sink[:5] = torch.tensor([torch.inf, -torch.inf, 1e38, -1e38, 3.4e38])
    out, _, lse = flash_mla_sparse_fwd(q, kv, indices, d_v=16, attn_sink=sink, backend=backend)
    wanted, _, wanted_lse = plain(q, kv, indices, 0.25, 16)
    assert (out[:, [0, 2, 4]] == 0).all()
    torch.testing.assert_close(out[:, [1, 3]].double(), wanted[:, [1, 3]], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_unused_keys_and_neighbours_do_not_matter(backend) -> None:
    q, kv, indices = randn(6, 16, 16), randn(64, 1, 16, seed=1), lists(6, 40, 32)
    kv[32:] = torch.nan
    wide = torch.full((6, 2, 16, 16), 777.0)
    out = flash_mla_sparse_fwd(q, kv, indices, d_v=16, out=wide[:, 1], backend=backend)[0]
    assert out.isfinite().all()
    assert (wide[:, 0] == 777).all()
    q[3] = torch.nan
    again, *ends = flash_mla_sparse_fwd(q, kv, indices, d_v=16, backend=backend)
    assert again[3].isnan().all()
    assert all(end[3].isnan().all() for end in ends)
    others = [0, 1, 2, 4, 5]
    assert torch.equal(again[others], out[others])
    if backend == "triton":
        part = flash_mla_sparse_fwd(q[4:], kv, indices[4:], d_v=16, backend=backend)[0]
        assert torch.equal(part, out[4:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_lists_and_rotated_outputs(backend) -> None:
    q, kv, more = randn(4, 16, 32), randn(50, 1, 32, seed=1), randn(20, 1, 32, seed=2)
    first, second, angle = lists(4, 20, 50), lists(4, 40, 20, seed=3), randn(4, 4, seed=4)
    phases = torch.stack((angle.cos(), angle.sin()), -1)
    found = flash_mla_sparse_fwd(
        q, kv, first, d_v=32, extra_kv=more, extra_indices=second, phases=phases, backend=backend
    )
    wanted = plain(q, kv, first, 32**-0.5, 32, more=(more, second))
    pairs = torch.view_as_complex(wanted[0][..., -8:].unflatten(-1, (4, 2)))
    turned = torch.view_as_real(pairs * torch.polar(torch.ones(4, 1, 4), -angle[:, None]))
    wanted[0][..., -8:] = turned.flatten(-2)
    assert_near(found, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_windows_of_ragged_sequences(backend) -> None:
    queries, keys = [3, 1, 0, 20], [3, 9, 4, 40]
    cu_q = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    cu_k = torch.tensor([0, *torch.tensor(keys).cumsum(0).tolist()], dtype=torch.int32)
    rows, window = int(cu_q[-1]) + 2, 7
    q, kv = randn(rows, 16, 16), randn(int(cu_k[-1]), 1, 16, seed=1)
    bands = window_bands(cu_q, cu_k, rows, window)
    seen = torch.full((rows, 1, window), -1, dtype=torch.int32)
    t = 0
    for b, count in enumerate(queries):
        for i in range(count):
            last = keys[b] - count + i
            ids = [int(cu_k[b]) + p for p in range(max(0, last - window + 1), last + 1)]
            seen[t, 0, : len(ids)] = torch.tensor(ids)
            t += 1
    found = swa_attention(q, kv, bands, window, d_v=16, backend=backend)
    assert_near(found, plain(q, kv, seen, 0.25, 16))
    assert (found[0][-2:] == 0).all()
    more, second = randn(20, 1, 16, seed=2), lists(rows, 9, 20)
    found = swa_attention(
        q, kv, bands, window, d_v=16, extra_kv=more, extra_indices=second, backend=backend
    )
    assert_near(found, plain(q, kv, seen, 0.25, 16, more=(more, second)))


def test_no_sequences_and_no_rows() -> None:
    none = torch.zeros(1, dtype=torch.int32)
    starts, lengths = window_bands(none, none, 2)
    assert starts.tolist() == lengths.tolist() == [0, 0]
    q, kv = torch.empty(0, 4, 16), torch.empty(0, 1, 16)
    empty = torch.empty(0, 1, 5, dtype=torch.int32)
    out, highest, lse = flash_mla_sparse_fwd(q, kv, empty, d_v=8)
    assert out.shape == (0, 4, 8)
    assert highest.shape == lse.shape == (0, 4)
    out, highest, lse = flash_mla_sparse_fwd(
        randn(2, 4, 16), kv, torch.zeros(2, 1, 0, dtype=torch.int32), d_v=16
    )
    assert (out == 0).all()
    assert (lse == torch.inf).all()
    assert (highest == -torch.inf).all()


def test_owned_indices_are_local_and_complete() -> None:
    indices = lists(6, 50, 64)
    valid = (indices >= 0) & (indices < 64)
    for interleave in (1, 4):
        parts = [owned_indices(indices.where(valid, -1), r, 3, interleave) for r in range(3)]
        assert torch.equal(sum(count for _, count in parts), valid.sum((1, 2)))
        for t in range(6):
            found = []
            for r, (local, count) in enumerate(parts):
                mine = local[t, 0, : int(count[t])].tolist()
                found += [(i // interleave * 3 + r) * interleave + i % interleave for i in mine]
                assert (local[t, 0, int(count[t]) :] == -1).all()
            assert sorted(found) == sorted(indices[t][valid[t]].tolist())
    with pytest.raises(ShapeError, match="rank is 3"):
        owned_indices(indices, 3, 3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_of_the_keys_join_to_the_whole(backend) -> None:
    q, kv, indices = randn(4, 16, 16), randn(64, 1, 16, seed=1), lists(4, 50, 64)
    indices = indices.where((indices >= 0) & (indices < 64), -1)
    sink = randn(16, seed=3)
    indices[0] = torch.where(indices[0] % 3 == 1, -1, indices[0])
    whole, _, whole_lse = flash_mla_sparse_fwd(
        q, kv, indices, d_v=16, attn_sink=sink, backend=backend
    )
    outs, sums = [], []
    for rank in range(3):
        local, count = owned_indices(indices, rank, 3)
        out, _, lse = flash_mla_sparse_fwd(
            q, kv[rank::3], local, d_v=16, topk_length=count, backend=backend
        )
        outs.append(out)
        sums.append(lse)
    assert (sums[1][0] == torch.inf).all()
    joined, lse = merge_attn_states(
        torch.stack(outs, 1), torch.stack(sums, 1), attn_sink=sink, backend=backend
    )
    torch.testing.assert_close(joined, whole, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(lse, whole_lse)


def test_wrong_arguments_are_refused_with_a_reason() -> None:
    q, kv, indices = randn(2, 4, 16), randn(8, 1, 16), lists(2, 4, 8)
    with pytest.raises(ShapeError, match="d_v is 17"):
        flash_mla_sparse_fwd(q, kv, indices, d_v=17)
    with pytest.raises(ShapeError, match="kv has dtype float64"):
        flash_mla_sparse_fwd(q, kv.double(), indices, d_v=16)
    with pytest.raises(ShapeError, match="indices has shape"):
        flash_mla_sparse_fwd(q, kv, indices[:1], d_v=16)
    with pytest.raises(ShapeError, match="only one of extra_kv"):
        flash_mla_sparse_fwd(q, kv, indices, d_v=16, extra_kv=kv)
    with pytest.raises(ShapeError, match="attn_sink has shape"):
        flash_mla_sparse_fwd(q, kv, indices, d_v=16, attn_sink=torch.zeros(3))
    with pytest.raises(ShapeError, match="9 pairs"):
        flash_mla_sparse_fwd(q, kv, indices, d_v=16, phases=torch.zeros(2, 9, 2))
    with pytest.raises(ShapeError, match="window is 0"):
        swa_attention(q, kv, (torch.zeros(2).int(), torch.zeros(2).int()), 0, d_v=16)
    with pytest.raises(ShapeError, match="cu_seqlens_q"):
        window_bands(torch.zeros(2).int(), torch.zeros(3).int(), 4)
    with pytest.raises(UnsupportedHardware, match="'hopper' of flash_mla_sparse_fwd"):
        flash_mla_sparse_fwd(q, kv, indices, d_v=16, backend="hopper")


def _arguments(band: bool):
    q, kv, sink = randn(3, 4, 16), randn(8, 16), randn(4)
    outs = torch.empty(3, 4, 16), torch.empty(3, 4), torch.empty(3, 4)
    if band:
        counts = torch.zeros(3).int(), torch.tensor([1, 2, 0]).int()
        return "torch", q, kv, *counts, None, None, None, sink, None, 0.25, 4, *outs
    return "torch", q, kv, lists(3, 5, 8)[:, 0], None, None, None, None, sink, None, 0.25, *outs


@pytest.mark.parametrize("name", ["flash_mla_sparse_fwd", "swa_attention"])
def test_operations_of_torch_are_well_formed(name) -> None:
    op = getattr(torch.ops.deepinfer, name).default
    torch.library.opcheck(op, _arguments(name == "swa_attention"))


def test_compiled_in_one_graph() -> None:
    q, kv, indices = randn(3, 4, 16), randn(8, 1, 16), lists(3, 5, 8)
    cu = torch.tensor([0, 3], dtype=torch.int32)

    def call(q, kv, indices, cu):
        bands = window_bands(cu, cu, 3, 2)
        out, _, lse = swa_attention(q, kv, bands, 2, d_v=16, backend="torch")
        return out, lse, *flash_mla_sparse_fwd(q, kv, indices, d_v=16, backend="torch")

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for x, y in zip(compiled(q, kv, indices, cu), call(q, kv, indices, cu), strict=True):
        assert torch.equal(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["hopper", "portable"])
@pytest.mark.parametrize(
    ("heads", "d"), [(8, 512), (16, 512), (32, 512), (64, 512), (128, 512), (64, 576)]
)
def test_on_a_gpu(backend, heads, d) -> None:
    g = {"device": "cuda", "dtype": torch.bfloat16}
    if backend == "hopper" and d > 512:
        pytest.skip("the portable kernel serves it")
    q, kv = 10 * torch.randn(150, heads, d, **g), torch.randn(900, 1, d, **g) / 10
    more, sink = torch.randn(700, 1, d, **g) / 10, torch.randn(heads, device="cuda")
    indices, second = lists(150, 200, 900).cuda(), lists(150, 130, 700, seed=1).cuda()
    length = torch.randint(0, 210, (150,), device="cuda", dtype=torch.int32)
    angle = torch.randn(150, 32, device="cuda")
    phases = torch.stack((angle.cos(), angle.sin()), -1)
    cu = torch.tensor([0, 30, 31, 150], device="cuda", dtype=torch.int32)
    both = {"extra_kv": more, "extra_indices": second, "phases": phases, "attn_sink": sink}

    def sparse(name):
        return flash_mla_sparse_fwd(q, kv, indices, topk_length=length, **both, backend=name)

    def window(name):
        return swa_attention(q, kv, window_bands(cu, cu, 150), **both, backend=name)

    for call in (sparse, window):
        found, wanted = call(backend), call("torch")
        for x, y, limit in zip(found, wanted, (2e-3, 1e-5, 1e-5), strict=True):
            torch.testing.assert_close(x.float(), y.float(), rtol=limit, atol=limit)
        for _ in range(20):
            assert all(torch.equal(x, y) for x, y in zip(call(backend), found, strict=True))
