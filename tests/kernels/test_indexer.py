"""Index scores: the references against float64, MXFP4 keys, recast keys under the interpreter, the contract."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

from deepinfer.core.errors import ShapeError, UnsupportedHardware
from deepinfer.kernels import indexer_paged
from deepinfer.kernels.cache import gather_and_dequantize_k_cache, quantize_and_insert_k_cache
from deepinfer.kernels.configs import indexer as configs
from deepinfer.kernels.formats import KVCacheFormat
from deepinfer.kernels.indexer import fp8_fp4_mqa_logits, fp8_mqa_logits
from deepinfer.kernels.reference import indexer as reference
from deepinfer.kernels.reference.cast import cast_back, per_token_cast_to_fp4

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


def parts(t: int, s: int, heads: int = 8, dim: int = 64):
    g = torch.Generator().manual_seed(5)
    q = torch.randn((t, heads, dim), generator=g).to(torch.float8_e4m3fn)
    keys = torch.randn((s, dim), generator=g)
    weights = torch.randn((t, heads), generator=g)
    starts = torch.randint(0, s // 2, (t,), generator=g, dtype=torch.int32)
    ends = torch.randint(s // 2, s + 1, (t,), generator=g, dtype=torch.int32)
    return q, keys, weights, starts, ends


def wanted(q, keys, weights, starts, ends) -> torch.Tensor:
    scores = torch.einsum("thd,sd->ths", q.double(), keys.double()).relu()
    y = torch.einsum("ths,th->ts", scores, weights.double())
    at = torch.arange(keys.shape[0])
    return y.masked_fill((at < starts[:, None]) | (at >= ends[:, None]), -torch.inf)


def test_fp8_keys() -> None:
    q, keys, weights, starts, ends = parts(300, 90)
    codes, scale = keys.to(torch.float8_e4m3fn), torch.rand(90) + 0.5
    ends[4] = starts[4]
    out = fp8_mqa_logits(q, (codes, scale), weights, starts, ends)
    right = wanted(q, codes.float() * scale[:, None], weights, starts, ends)
    seen = right.isfinite()
    assert torch.equal(out == -torch.inf, ~seen)
    assert float((out[seen] - right[seen]).norm() / right[seen].norm()) < 1e-6


def test_mxfp4_keys() -> None:
    q, keys, weights, starts, ends = parts(7, 40)
    packed, scale = per_token_cast_to_fp4(keys)
    out = torch.empty(7, 60, dtype=torch.bfloat16)[:, 10:50]
    assert fp8_fp4_mqa_logits(q, (packed, scale), weights, starts, ends, out=out) is out
    right = wanted(q, cast_back(packed, scale), weights, starts, ends)
    seen = right.isfinite()
    assert torch.equal(out == -torch.inf, ~seen)
    assert float((out[seen].double() - right[seen]).norm() / right[seen].norm()) < 4e-3


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_recast_keys_are_the_same_values() -> None:
    from deepinfer.kernels.triton.indexer_launch import recast_keys

    packed = torch.randint(0, 256, (70, 64), dtype=torch.uint8)
    codes = torch.randint(100, 114, (70, 4), dtype=torch.uint8)  # within 2^14
    codes[3], codes[4, 0], codes[5] = 255, 255, torch.tensor([0, 3, 2, 1])
    wide, scale = recast_keys(packed, codes)
    found = wide.float() * scale[:, None]
    right = cast_back(packed, codes)
    assert found[3:5].isnan().all()
    good = torch.ones(70, dtype=torch.bool)
    good[3:5] = False
    assert torch.equal(found[good], right[good])


def test_wrong_arguments_are_refused() -> None:
    q, keys, weights, starts, ends = parts(3, 20)
    kv = (keys.to(torch.float8_e4m3fn), torch.ones(20))
    assert fp8_mqa_logits(q[:0], kv, weights[:0], starts[:0], ends[:0]).shape == (0, 20)
    with pytest.raises(ShapeError, match=r"kv\[0\] has dtype float32"):
        fp8_mqa_logits(q, (keys, torch.ones(20)), weights, starts, ends)
    with pytest.raises(ShapeError, match="weights has shape"):
        fp8_mqa_logits(q, kv, weights[:2], starts, ends)
    with pytest.raises(ShapeError, match="cu_seq_len_k_end has dtype"):
        fp8_mqa_logits(q, kv, weights, starts, ends.long())
    with pytest.raises(UnsupportedHardware, match="triton"):
        fp8_mqa_logits(q, kv, weights, starts, ends, backend="triton")


PAGED = {
    KVCacheFormat.INDEXER_FP8: indexer_paged.fp8_paged_mqa_logits,
    KVCacheFormat.INDEXER_MXFP4: indexer_paged.fp8_fp4_paged_mqa_logits,
}


def pages(form: KVCacheFormat, lengths: list[int], page_size: int, most: int):
    """Keys of some requests in scattered pages of a cache full of NaN, and the keys as they read."""
    g = torch.Generator().manual_seed(6)
    count = sum(-(-n // page_size) for n in lengths)
    data = torch.full((count + 2, form.page_bytes(page_size) + 16), 0xFF, dtype=torch.uint8)
    order = torch.randperm(count + 2, generator=g).int()
    table = torch.full((len(lengths), most), -1, dtype=torch.int32)
    keys, at = [], 0
    for b, n in enumerate(lengths):
        used = -(-n // page_size)
        table[b, :used] = order[at : at + used]
        at += used
        i = torch.arange(n)
        slots = table[b, i // page_size].long() * page_size + i % page_size
        quantize_and_insert_k_cache(
            torch.randn((n, 128), generator=g), data, slots, form, page_size, backend="torch"
        )
        keys.append(
            gather_and_dequantize_k_cache(
                data, slots, form, page_size, dtype=torch.float32, backend="torch"
            )
        )
    return data, table, keys


@pytest.mark.parametrize("backend", ["torch", "triton"] if INTERPRETED else ["torch"])
@pytest.mark.parametrize(("next_n", "heads"), [(1, 8), (3, 16)])
@pytest.mark.parametrize("form", list(PAGED), ids=lambda f: f.name)
def test_paged_keys(form, next_n, heads, backend) -> None:
    lengths = [300, 0, 37, 65]
    data, table, keys = pages(form, lengths, 16, 20)
    g = torch.Generator().manual_seed(8)
    q = torch.randn((4, next_n, heads, 128), generator=g).to(torch.float8_e4m3fn)
    weights = torch.randn((4 * next_n, heads), generator=g)
    lens = torch.tensor(lengths, dtype=torch.int32)
    out = PAGED[form](q, data, weights, lens, table, None, 310, page_size=16, backend=backend)
    for b, n in enumerate(lengths):
        for j in range(next_n):
            row, sees = b * next_n + j, max(n - next_n + 1 + j, 0)
            dots = torch.einsum("hd,sd->hs", q[b, j].double(), keys[b][:sees].double()).relu()
            right = (weights[row].double()[:, None] * dots).sum(0)
            assert bool((out[row, sees:] == -torch.inf).all())
            assert torch.allclose(out[row, :sees].double(), right, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("backend", ["torch", "triton"] if INTERPRETED else ["torch"])
def test_lengths_of_each_query_and_what_is_behind_them(backend) -> None:
    form = KVCacheFormat.INDEXER_MXFP4
    data, table, _ = pages(form, [40, 20], 16, 3)
    table[0, 1] = -1
    q = torch.randn(2, 2, 8, 128).to(torch.float8_e4m3fn)
    weights = torch.ones(4, 8)
    lens = torch.tensor([[40, 5], [0, 20]], dtype=torch.int32)
    out = torch.full((4, 64), 777.0)[:, 8:56]
    found = PAGED[form](
        q,
        data,
        weights,
        lens,
        table,
        None,
        48,
        page_size=16,
        clean_logits=False,
        out=out,
        backend=backend,
    )
    assert found is out
    assert bool((out[0, 16:32] == -torch.inf).all())
    assert bool(out[0, :16].isfinite().all() and out[0, 32:40].isfinite().all())
    for row, (sees, most) in enumerate([(40, 40), (5, 40), (0, 20), (20, 20)]):
        assert bool((out[row, most:] == 777).all())
        assert bool((out[row, sees:most] == -torch.inf).all())


@pytest.mark.parametrize("backend", ["torch", "triton"] if INTERPRETED else ["torch"])
def test_lengths_beyond_the_columns_and_pages_touch_neither(backend) -> None:
    form = KVCacheFormat.INDEXER_FP8
    data, table, _ = pages(form, [40, 20], 16, 3)
    q, weights = torch.randn(2, 1, 8, 128).to(torch.float8_e4m3fn), torch.ones(2, 8)
    wide = torch.full((2, 80), 777.0)
    lens = torch.tensor([40, 5000], dtype=torch.int32)
    table[1] = table[0]
    found = PAGED[form](
        q, data, weights, lens, table, None, 30, page_size=16, out=wide[:, 20:50], backend=backend
    )
    assert bool(found.isfinite().all())
    assert bool((wide[:, :20] == 777).all() and (wide[:, 50:] == 777).all())


@pytest.mark.parametrize("lengths", [[1000, 0, 300, 1], [0, 0], [256], [[5, 700], [2, 3]]])
def test_work_is_shared_equally_and_without_gaps(lengths) -> None:
    lens = torch.tensor(lengths, dtype=torch.int32)
    meta = indexer_paged.get_paged_mqa_logits_metadata(lens, 64, 3)
    most = lens if lens.dim() == 1 else lens.amax(1)
    splits = [(b, s) for b, n in enumerate(most.tolist()) for s in range(-(-n // configs.SPLIT))]
    assert meta.shape == (configs.PROGRAMS * 3 + 1, 2)
    places = [tuple(p) for p in meta.tolist()]
    seen = []
    for first, last in itertools.pairwise(places):
        seen.append([p for p in splits if first <= p < last])
    assert [p for part in seen for p in part] == splits
    sizes = [len(part) for part in seen]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("requests", [1, 2, 300, 513])
def test_shares_are_those_of_the_reference(requests) -> None:
    g = torch.Generator().manual_seed(requests)
    lens = torch.randint(-300, 3000, (requests, 3), generator=g, dtype=torch.int32)
    lens[-1] = 0
    lens[0, 1] = 2**31 - 1 if requests == 2 else 600
    for lengths in (lens, lens[:, 1], lens[:, ::2]):
        found = indexer_paged.get_paged_mqa_logits_metadata(lengths, 64, 17)
        wanted = reference.share_splits(lengths.long(), configs.PROGRAMS * 17, configs.SPLIT)
        assert torch.equal(found, wanted)


def test_wrong_paged_arguments_are_refused() -> None:
    form = KVCacheFormat.INDEXER_FP8
    data, table, _ = pages(form, [20], 16, 3)
    q, weights = torch.zeros(1, 1, 8, 128).to(torch.float8_e4m3fn), torch.ones(1, 8)
    lens = torch.tensor([20], dtype=torch.int32)
    call = PAGED[form]
    with pytest.raises(ShapeError, match="pages of 100 bytes"):
        call(q, data[:, :100], weights, lens, table, None, 32, page_size=16)
    with pytest.raises(ShapeError, match="3 heads"):
        call(q[:, :, :3], data, weights[:, :3], lens, table, None, 32, page_size=16)
    with pytest.raises(ShapeError, match="context_lens has dtype int64"):
        call(q, data, weights, lens.long(), table, None, 32, page_size=16)
    with pytest.raises(ShapeError, match="0 processors"):
        indexer_paged.get_paged_mqa_logits_metadata(lens, 64, 0)
    assert call(q[:0], data, weights[:0], lens[:0], table[:0], None, 32, page_size=16).shape == (
        0,
        32,
    )


@pytest.mark.skipif(INTERPRETED, reason="the compiler of torch needs no interpreter")
def test_paged_scores_in_a_whole_graph() -> None:
    form = KVCacheFormat.INDEXER_MXFP4
    data, table, _ = pages(form, [40, 20], 16, 3)
    q, weights = torch.randn(2, 1, 8, 128).to(torch.float8_e4m3fn), torch.ones(2, 8)
    lens = torch.tensor([40, 20], dtype=torch.int32)

    def step(q, data, weights, lens, table):
        return PAGED[form](q, data, weights, lens, table, None, 48, page_size=16)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    wanted = step(q, data, weights, lens, table)
    assert torch.equal(compiled(q, data, weights, lens, table), wanted)
