"""Scores over pages on Hopper, with their roles as threads on the CPU: values, masks, places, phases of the barriers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.kernels.gluon_numpy import PROGRAM, Pointer, Tensor
from tests.kernels.gluon_threads import Descriptor, gluon_on_threads

from deepinfer.kernels.configs import indexer as configs
from deepinfer.kernels.formats import KVCacheFormat
from deepinfer.kernels.reference import cache as rows
from deepinfer.kernels.reference import indexer as reference

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")
FORMS = (KVCacheFormat.INDEXER_FP8, KVCacheFormat.INDEXER_MXFP4)


def made(form: KVCacheFormat, lengths: list[int], next_n: int, heads: int, page_size: int = 64):
    """Requests over scattered pages of a cache full of NaN, with pages that are none."""
    g = torch.Generator().manual_seed(len(lengths) + next_n)
    size, most = form.page_bytes(page_size), max(lengths) + 5
    each = -(-most // page_size)
    count = each * len(lengths)
    cache = torch.full((count + 2, size + 32), 0xFF, dtype=torch.uint8)[:, :size]
    table = torch.randperm(count, generator=g).view(len(lengths), each).int()
    for b, n in enumerate(lengths):
        i = torch.arange(n)
        slots = table[b, i // page_size].long() * page_size + i % page_size
        keys = torch.randn((n, 128), generator=g) * torch.rand((n, 1), generator=g) * 4
        rows.insert_rows(keys, cache, slots, form, page_size)
    longest = lengths.index(max(lengths))
    table[longest, 0], table[longest, -1] = -1, len(cache)
    q = torch.randn((len(lengths), next_n, heads, 128), generator=g).to(torch.float8_e4m3fn)
    weights = torch.randn((len(lengths) * next_n, heads + 3), generator=g)[:, :heads]
    ends = torch.tensor(lengths, dtype=torch.int32)[:, None] - torch.arange(next_n - 1, -1, -1)
    return cache, table, q, weights, ends.int(), most


def scores(case, form, page_size, programs, sizes, *, meta=None, late_s=0.0, folded=False):
    """What the kernel writes, in a tensor with room around it."""
    cache, table, q, weights, ends, most = case
    packed = form is KVCacheFormat.INDEXER_MXFP4
    queries, depth, parts, together = sizes
    requests, next_n, heads, _ = q.shape
    wide = np.full((len(weights), most + 8), 777.0, np.float32)
    if meta is None:
        meta = reference.share_splits(ends, programs, configs.SPLIT)
    plain = cache.numpy()
    stride, width = cache.stride(0), 64 if packed else 128
    raw = np.lib.stride_tricks.as_strided(plain, (len(plain), page_size, width), (stride, width, 1))
    words = np.ascontiguousarray(plain).view(np.int32)
    s_desc = Descriptor(words, [1, 64])
    k_desc = Descriptor(np.ascontiguousarray(raw), [1, 64, width])
    if packed:
        k_desc = Descriptor(k_desc.array.view(np.int32), [1, 64, 16])

    def pointer(x: torch.Tensor, dtype=None) -> Pointer:
        x = x.contiguous().view(-1)
        return Pointer((x.view(torch.uint8) if dtype else x).numpy())

    integer = lambda x: Tensor(np.int32(x))  # noqa: E731
    shares = meta.shape[0] - 1
    each = 2 if shares > 2 else 1
    with gluon_on_threads("indexer_pages", late_s=late_s) as (kernels,):
        grid = -(-shares // each)
        for i in range(grid):
            PROGRAM["id"], PROGRAM["count"] = i, grid
            kernels.page_scores_kernel(
                k_desc, s_desc, pointer(q, 1), pointer(weights), pointer(ends), pointer(table), pointer(meta),
                Pointer(wide.reshape(-1), 4), integer(next_n), integer(min(most, table.shape[1] * page_size)),
                integer(len(plain)), integer(each), integer(shares), integer(requests),
                heads, table.stride(0), most + 8,
                HEADS=heads, QUERIES=queries, CHUNKS=-(-next_n // queries), PAGE=page_size, FP4=int(packed) + int(packed and folded),
                SPLIT=configs.SPLIT, DEPTH=depth, PARTS=parts, TOGETHER=together,
            )  # fmt: skip
    assert (wide[:, :4] == 777).all()
    assert (wide[:, 4 + most :] == 777).all()
    return torch.from_numpy(wide[:, 4 : 4 + most].copy())


def right(case, form, page_size) -> torch.Tensor:
    cache, table, q, weights, ends, most = case
    out = torch.full((len(weights), most), 777.0)
    reference.paged_mqa_logits(q, cache, weights, ends, table, out, form, page_size)
    return out


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
@pytest.mark.parametrize(
    ("next_n", "heads", "page_size"),
    [
        (1, 32, 64),
        (2, 32, 64),
        (3, 8, 128),
        (6, 32, 64),
        (1, 64, 64),
        (2, 64, 64),
        (1, 8, 64),
        (1, 16, 912),
    ],
)
def test_scores(form, next_n, heads, page_size) -> None:
    lengths = [300, 0, 1, 63, 64, 65, 900, 128, 129]
    case = made(form, lengths, next_n, heads, page_size)
    sizes = configs.lookup_pages(next_n, heads, form is KVCacheFormat.INDEXER_MXFP4)
    wanted = right(case, form, page_size)
    seen = wanted.isfinite()
    for folded in (False, True)[: 1 + (form is KVCacheFormat.INDEXER_MXFP4)]:
        found = scores(
            case, form, page_size, 5, (sizes[0], 2 * sizes[2], sizes[2], sizes[3]), folded=folded
        )
        assert torch.equal(found.isinf(), wanted.isinf())
        assert torch.equal(found == 777, wanted == 777)
        assert torch.allclose(found[seen], wanted[seen], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_slots_are_given_back_when_they_were_read(form, parts) -> None:
    case = made(form, [1500, 40, 700], 1, 8)
    found = [
        scores(case, form, 64, programs, (1, depth * parts, parts, together), late_s=late_s)
        for programs, depth, together, late_s in ((1, 1, True, 0.002), (3, 1, False, 0.0), (2, 2, True, 0.0))
    ]  # fmt: skip
    wanted = right(case, form, 64)
    seen = wanted.isfinite()
    assert torch.allclose(found[0][seen], wanted[seen], rtol=1e-4, atol=1e-3)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_requests_that_are_none_are_left_out() -> None:
    form = KVCacheFormat.INDEXER_FP8
    case = made(form, [300, 200], 1, 8)
    meta = torch.tensor([[-3, 5], [1, 0], [7, 4], [9, 0]], dtype=torch.int32)
    found = scores(case, form, 64, 3, (1, 2, 2, True), meta=meta)
    wanted = right(case, form, 64)
    seen = wanted.isfinite()
    assert torch.allclose(found[seen], wanted[seen], rtol=1e-4, atol=1e-3)
    assert torch.equal(found.isinf(), wanted.isinf())


def test_scales_at_the_ends_of_their_range() -> None:
    form = KVCacheFormat.INDEXER_MXFP4
    case = made(form, [192], 1, 8)
    cache, table = case[0], case[1]
    table[0, 0] = table[0, 1]
    page = cache[int(table[0, 1])]
    scale = page[64 * 64 : 64 * 68].view(64, 4)
    scale[:] = torch.randint(0, 200, (64, 4), dtype=torch.uint8)
    scale[3, 1], scale[4], scale[5] = 255, 0, torch.tensor([0, 127, 0, 140])
    page[3 * 64 : 4 * 64] = 0
    found, wanted = scores(case, form, 64, 1, (1, 2, 2, True)), right(case, form, 64)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert bool(found[:, 3].isnan().all())
    assert not bool(found[:, 4:6].isnan().any())
    seen = wanted.isfinite()
    assert torch.allclose(found[seen], wanted[seen], rtol=1e-4, atol=1e-33)


def test_folded_scales() -> None:
    form = KVCacheFormat.INDEXER_MXFP4
    case = made(form, [192], 1, 8)
    cache, table = case[0], case[1]
    page = cache[int(table[0, 1])]
    scale = page[64 * 64 : 64 * 68].view(64, 4)
    g = torch.Generator().manual_seed(0)  # sums of both signs cancel for some scales
    scale[:] = torch.randint(0, 12, (64, 4), dtype=torch.uint8, generator=g)
    scale += torch.arange(0, 128, 2, dtype=torch.uint8)[:, None]
    scale[3, 1], scale[4], scale[5] = 255, 0, torch.tensor([140, 129, 128, 140])
    page[3 * 64 : 4 * 64] = 0
    found = scores(case, form, 64, 1, (1, 2, 2, True), folded=True)
    scale[5, 2] = 0  # 2^-12 of the largest: none
    wanted = right(case, form, 64)
    assert torch.equal(found.isnan(), wanted.isnan())
    seen = wanted.isfinite()
    assert torch.allclose(found[seen], wanted[seen], rtol=1e-4, atol=1e-33)


@pytest.mark.parametrize("relu", [0, 1, 2])
@pytest.mark.parametrize(
    ("queries", "heads"), [(2, 64), (4, 32), (8, 32), (8, 8), (16, 8), (16, 16)]
)
def test_sums_over_heads_are_where_the_index_says(queries, heads, relu) -> None:
    rng = np.random.default_rng(queries)
    acc = rng.standard_normal((64, queries * heads), np.float32)
    w = rng.standard_normal(queries * heads, np.float32)
    wanted = (np.maximum(acc, 0) * w).reshape(64, queries, heads).sum(2)
    found = np.full((64, queries), np.nan, np.float32)
    with gluon_on_threads("indexer_quads") as (quads,):
        given = Tensor(w * np.float32(0.5) if relu == 1 else w)
        for i, part in enumerate(quads.head_sums(Tensor(acc), given, queries, heads, relu)):
            key, query = quads.output_index(i, queries, None)
            found[key.data, query.data] = part.data
    assert np.allclose(found, wanted, rtol=1e-4, atol=1e-4)
