"""Sparse decode attention: the reference against float64, the interpreter, sinks, wild slots, addresses, the contract."""

from __future__ import annotations

import math
import os

import pytest
import torch

from deepinfer.core.errors import ConfigError, ShapeError, UnsupportedHardware
from deepinfer.kernels import attention
from deepinfer.kernels.attention import (
    MLASchedMeta,
    flash_mla_with_kvcache,
    get_mla_metadata,
    merge_attn_states,
)
from deepinfer.kernels.configs import attention as configs
from deepinfer.kernels.formats import KVCacheFormat
from deepinfer.kernels.reference.cache import gather_rows, insert_rows

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ["torch", "triton"] if INTERPRETED else ["torch"]
each_backend = pytest.mark.parametrize("backend", BACKENDS)
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning"),
]
FP8, FP4, V4 = KVCacheFormat.V41_MXFP8, KVCacheFormat.V41_NVFP4, KVCacheFormat.V4_FP8


def cache_of(form: KVCacheFormat, rows: int, page: int, seed: int = 0, gap: int = 0):
    """Random rows in the even slots, NaN scales in the odd ones; and the rows as they are read."""
    pages = -(-rows // page)
    data = torch.full((pages, form.page_bytes(page) + gap), 255, dtype=torch.uint8)
    x = torch.randn((rows // 2, 512), generator=torch.Generator().manual_seed(seed))
    insert_rows(x, data, 2 * torch.arange(rows // 2), form, page)
    found = torch.zeros(rows, 512)
    gather_rows(data, 2 * torch.arange(rows // 2), found[::2], form, page)
    return data, found


def slots(*shape: int, rows: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return 2 * torch.randint(0, rows // 2, shape, generator=g, dtype=torch.int32)


def phases_of(count: int) -> torch.Tensor:
    angle = torch.arange(count * 32, dtype=torch.float32).view(count, 32)
    return torch.stack((angle.cos(), angle.sin()), -1)


def by_hand(q, keys, sink, phases):
    """One row of all heads in float64; `keys` is the list of its keys."""
    q, keys = q.double(), keys.double()
    out, lse = torch.zeros_like(q), torch.full((len(q),), math.inf, dtype=torch.float64)
    for h in range(len(q)):
        if not len(keys):
            continue
        logits = keys @ q[h] * 512**-0.5
        lse[h] = logits.logsumexp(0)
        share = 1 / (1 + torch.exp(sink[h].double() - lse[h]))
        out[h] = share * (torch.softmax(logits, 0) @ keys)
        pairs = torch.view_as_complex(out[h, 448:].view(32, 2).clone())
        turned = pairs * torch.polar(torch.ones(32).double(), -phases.double())
        out[h, 448:] = torch.view_as_real(turned).flatten()
    return out, lse


@each_backend
@pytest.mark.parametrize("split", [0, 64, 128])
@pytest.mark.parametrize(("form", "more"), [(FP8, FP4), (FP8, FP8), (V4, FP8)])
def test_rows_equal_float64_whatever_their_lists_hold(backend, form, more, split) -> None:
    page, more_page, batch, s_q, heads = 5, 7, 4, 2, 3
    data, keys = cache_of(form, 60, page)
    more_data, more_keys = cache_of(more, 98, more_page, 1)
    q = torch.randn((batch, s_q, heads, 512), generator=torch.Generator().manual_seed(2))
    first = slots(batch, s_q, 70, rows=60)
    second = slots(batch, s_q, 66, rows=98, seed=3)
    for i, wild in enumerate((-(2**31), -123456, -1, 60, 114514, 2**31 - 1)):
        first[:, :, 3 * i + 1] = wild
        second[:, :, 3 * i + 2] = 98 if wild == 60 else wild
    first[0, 0], second[0, 0] = -1, -1
    first[0, 1, :64] = -1  # the first tile has no key
    first[1, 0, :] = first[1, 0, 0]  # one slot many times counts many times
    lengths = torch.tensor([[70, 70], [40, 0], [-3, 1 << 30], [65, 64]], dtype=torch.int32)
    more_lengths = torch.tensor([66, 5, 0, 65], dtype=torch.int32)
    sink = torch.tensor([math.inf, -math.inf, 0.3])
    entries = torch.tensor([[8, 1], [2, 3], [4, 5], [6, 0]], dtype=torch.int32)
    out, lse = flash_mla_with_kvcache(
        q, data, first, page_size=page, format=form, attn_sink=sink, topk_length=lengths,
        extra_k_cache=more_data, extra_indices_in_kvcache=second, extra_topk_length=more_lengths,
        extra_page_size=more_page, extra_format=more, phases=phases_of(9), phase_index=entries,
        sched_meta=MLASchedMeta(split), backend=backend,
    )  # fmt: skip
    assert lse.shape == (batch, heads, s_q)
    angle = torch.arange(9 * 32, dtype=torch.float32).view(9, 32)
    for b in range(batch):
        for s in range(s_q):
            known = [i for i in first[b, s, : max(int(lengths[b, s]), 0)].tolist() if 0 <= i < 60]
            others = [i for i in second[b, s, : int(more_lengths[b])].tolist() if 0 <= i < 98]
            picked = torch.cat((keys[known], more_keys[others]))
            right, right_lse = by_hand(q[b, s], picked, sink, angle[entries[b, s]])
            torch.testing.assert_close(out[b, s].double(), right, atol=2e-6, rtol=2e-5)
            torch.testing.assert_close(lse[b, :, s].double(), right_lse, atol=2e-6, rtol=2e-6)
    assert (out[0, 0] == 0).all()
    assert (lse[0, :, 0] == math.inf).all()
    assert (out[:, :, 0] == 0).all()


@each_backend
@pytest.mark.parametrize("value", [1e38, -1e38, 3.4e38, -3.4e38, math.inf, -math.inf])
def test_no_sink_makes_nan(backend, value) -> None:
    data, _ = cache_of(FP8, 40, 4)
    q = torch.randn(1, 1, 2, 512)
    indices = slots(1, 1, 20, rows=40)
    sink = torch.tensor([value, 0.0])
    plain, lse = flash_mla_with_kvcache(q, data, indices, page_size=4, backend=backend)
    out, other = flash_mla_with_kvcache(
        q, data, indices, page_size=4, attn_sink=sink, backend=backend
    )
    assert torch.equal(lse, other)
    torch.testing.assert_close(out[0, 0, 0], plain[0, 0, 0] if value < 0 else torch.zeros(512))


@each_backend
def test_pages_may_lie_apart_and_outputs_too(backend) -> None:
    data, _ = cache_of(FP8, 60, 5, gap=37)
    q = torch.randn(2, 1, 3, 512)
    indices = slots(2, 1, 9, rows=60)
    wide = torch.full((2, 1, 5, 520), 777.0)
    out, _ = flash_mla_with_kvcache(
        q, data, indices, page_size=5, out=wide[:, :, 1:4, 4:516], backend=backend
    )
    tight, _ = flash_mla_with_kvcache(q, cache_of(FP8, 60, 5)[0], indices, page_size=5, backend=backend)  # fmt: skip
    assert torch.equal(out, tight)
    assert (wide[:, :, 0] == 777).all()
    assert (wide[:, :, 4] == 777).all()
    assert (wide[..., :4] == 777).all()
    assert (wide[..., 516:] == 777).all()


@each_backend
def test_addresses_behind_two_to_the_31(backend) -> None:
    """A view whose pages lie 2^30 bytes apart; the memory of all but two pages is never touched."""
    page = 2
    try:
        data = torch.empty((4, 1 << 30), dtype=torch.uint8)[:, : FP8.page_bytes(page)]
    except RuntimeError:
        pytest.skip("there is no room for an address space of 4 GB")
    x = torch.randn(2, 512)
    insert_rows(x, data, torch.tensor([1, 6]), FP8, page)
    found = torch.zeros(2, 512)
    gather_rows(data, torch.tensor([1, 6]), found, FP8, page)
    q = torch.randn(1, 1, 2, 512)
    indices = torch.tensor([[[6, 1, -1]]], dtype=torch.int32)
    out, _ = flash_mla_with_kvcache(q, data, indices, page_size=page, backend=backend)
    right, _ = by_hand(q[0, 0], found, torch.full((2,), -math.inf), torch.zeros(32))
    torch.testing.assert_close(out[0, 0].double(), right, atol=2e-6, rtol=2e-5)


@each_backend
def test_merge_of_parts_equals_the_whole(backend) -> None:
    data, _ = cache_of(FP8, 60, 5)
    q = torch.randn(6, 1, 4, 512)
    indices = slots(6, 1, 30, rows=60)
    indices[2, :, :10] = -1
    indices[3] = -1
    indices[4, :, 20:] = -1
    sink, phases = torch.randn(4), phases_of(6)
    whole, lse = flash_mla_with_kvcache(
        q, data, indices, page_size=5, attn_sink=sink, phases=phases, backend="torch"
    )
    parts = [
        flash_mla_with_kvcache(
            q, data, indices[..., low : low + 10], page_size=5, backend="torch"
        )
        for low in (0, 10, 20)
    ]  # fmt: skip
    v = torch.stack([out[:, 0] for out, _ in parts], 1)
    s = torch.stack([x[:, :, 0] for _, x in parts], 1)
    v[s.isinf()] = torch.nan  # not read
    s[4, 2] = -math.inf  # the other sign of no keys
    merged, total = merge_attn_states(v, s, attn_sink=sink, phases=phases, backend=backend)
    torch.testing.assert_close(merged, whole[:, 0], atol=2e-6, rtol=2e-5)
    torch.testing.assert_close(total, lse[:, :, 0], atol=2e-6, rtol=2e-6)
    assert (merged[3] == 0).all()
    assert (total[3] == math.inf).all()
    index = torch.arange(5, -1, -1, dtype=torch.int32)
    other, _ = merge_attn_states(
        v, s, attn_sink=sink, phases=phases.flip(0), phase_index=index, backend=backend
    )
    assert torch.equal(other, merged)
    many = v[:, [0, 1, 2] * 11], s[:, [0, 1, 2] * 11]
    found, _ = merge_attn_states(*many, backend=backend)
    once, _ = merge_attn_states(v, s, backend=backend)
    torch.testing.assert_close(found, once, atol=2e-6, rtol=2e-5)


@each_backend
@pytest.mark.parametrize("split", [0, 64])
def test_nan_stays_nan(backend, split) -> None:
    """In a row without parts and in one whose parts are merged; from a query, and from a key."""
    data, _ = cache_of(FP8, 140, 5)
    q = torch.randn(3, 1, 4, 512) / 8
    q[0, 0, 2] = torch.nan
    indices = slots(3, 1, 130, rows=140)
    indices[1, 0, 100] = 1  # a row with NaN scales
    out, lse = flash_mla_with_kvcache(
        q, data, indices, page_size=5, sched_meta=MLASchedMeta(split), backend=backend
    )
    nan = torch.zeros(3, 4, dtype=torch.bool)
    nan[0, 2] = nan[1] = True
    assert torch.equal(out[:, 0].isnan().any(-1), nan)
    assert torch.equal(lse[:, :, 0].isnan(), nan)


@each_backend
def test_a_part_with_nan_is_no_part_without_keys(backend) -> None:
    v, s = torch.randn(3, 3, 2, 64), torch.randn(3, 3, 2)
    v[0, 1], s[0, 1] = torch.nan, torch.nan
    s[1] = torch.tensor([-math.inf, math.nan, math.inf])[:, None]
    out, lse = merge_attn_states(v, s, backend=backend)
    assert out[:2].isnan().all()
    assert lse[:2].isnan().all()
    assert out[2].isfinite().all()


@each_backend
def test_nothing_to_do(backend) -> None:
    data, _ = cache_of(FP8, 40, 4)
    q = torch.randn(2, 3, 2, 512)
    none = torch.empty((0, 3, 7), dtype=torch.int32)
    out, lse = flash_mla_with_kvcache(q[:0], data, none, page_size=4, backend=backend)
    assert out.shape == (0, 3, 2, 512)
    assert lse.shape == (0, 2, 3)
    out, lse = flash_mla_with_kvcache(
        q, data, torch.empty((2, 3, 0), dtype=torch.int32), page_size=4, backend=backend
    )
    assert (out == 0).all()
    assert (lse == math.inf).all()
    out, lse = merge_attn_states(torch.empty(3, 0, 2, 64), torch.empty(3, 0, 2), backend=backend)
    assert (out == 0).all()
    assert (lse == math.inf).all()


@pytest.mark.skipif(not INTERPRETED, reason="torch chooses other sums for other numbers of rows")
def test_rows_do_not_depend_on_their_neighbours() -> None:
    data, _ = cache_of(FP8, 60, 5)
    q = torch.randn(5, 1, 3, 512)
    indices = slots(5, 1, 130, rows=60)
    meta, nothing = get_mla_metadata(5, 3, 130, batch_invariant=True)
    assert nothing is None
    assert meta == get_mla_metadata(1, 3, 130, batch_invariant=True)[0]

    def call(rows: torch.Tensor):
        return flash_mla_with_kvcache(
            q[rows], data, indices[rows], page_size=5, sched_meta=meta, backend="triton"
        )

    whole, lse = call(torch.arange(5))
    for rows in (torch.tensor([3]), torch.tensor([4, 0, 2])):
        out, other = call(rows)
        assert torch.equal(out, whole[rows])
        assert torch.equal(other, lse[rows])
    q[::2] = torch.nan
    assert torch.equal(call(torch.arange(5))[0][1::2], whole[1::2])


def test_parts_fill_the_device() -> None:
    assert configs.split_keys(256, 64, 640, 132) == 0
    assert configs.split_keys(64, 64, 640, 132) == 320
    assert configs.split_keys(1, 16, 640, 132) == 64
    assert get_mla_metadata(64, 64, 640)[0] == MLASchedMeta(320)
    assert get_mla_metadata(64, 64, 100, batch_invariant=True)[0] == MLASchedMeta(0)


def test_wrong_arguments_are_refused() -> None:
    data, _ = cache_of(FP8, 40, 4)
    q, indices = torch.randn(2, 1, 3, 512), slots(2, 1, 8, rows=40)
    with pytest.raises(ShapeError, match="q has shape"):
        flash_mla_with_kvcache(q[..., :64], data, indices, page_size=4)
    with pytest.raises(ShapeError, match="pages of 2112 bytes; 5 rows of V41_MXFP8 need 2640"):
        flash_mla_with_kvcache(q, data, indices, page_size=5)
    with pytest.raises(ShapeError, match="indices has dtype int64"):
        flash_mla_with_kvcache(q, data, indices.long(), page_size=4)
    with pytest.raises(ShapeError, match="topk_length has shape"):
        flash_mla_with_kvcache(
            q, data, indices, page_size=4, topk_length=torch.ones(3, dtype=torch.int32)
        )
    with pytest.raises(ConfigError, match="format is V32_FP8"):
        flash_mla_with_kvcache(q, data, indices, page_size=4, format=KVCacheFormat.V32_FP8)
    with pytest.raises(ShapeError, match="given together"):
        flash_mla_with_kvcache(q, data, indices, page_size=4, extra_k_cache=data)
    with pytest.raises(ShapeError, match="attn_sink has shape"):
        flash_mla_with_kvcache(q, data, indices, page_size=4, attn_sink=torch.ones(2))
    with pytest.raises(ShapeError, match="phases has 1 entries for 2 rows"):
        flash_mla_with_kvcache(q, data, indices, page_size=4, phases=phases_of(1))
    with pytest.raises(ConfigError, match="split_keys is 100"):
        flash_mla_with_kvcache(q, data, indices, page_size=4, sched_meta=MLASchedMeta(100))
    out, twice = torch.empty(2, 3, 3, 512)[:, :2], indices.expand(2, 2, 8)
    with pytest.raises(ShapeError, match="out has stride"):
        flash_mla_with_kvcache(q.expand(2, 2, 3, 512), data, twice, page_size=4, out=out)
    if not INTERPRETED:
        with pytest.raises(UnsupportedHardware, match="triton"):
            flash_mla_with_kvcache(q, data, indices, page_size=4, backend="triton")


@pytest.mark.skipif(INTERPRETED, reason="the compiler of torch needs no interpreter")
def test_operations_of_torch_and_a_whole_graph() -> None:
    data, _ = cache_of(FP8, 40, 4)
    q, indices = torch.randn(2, 1, 3, 512), slots(2, 1, 8, rows=40)
    torch.library.opcheck(
        torch.ops.deepinfer.flash_mla_with_kvcache,
        (None, q[:, 0], data, indices[:, 0], None, "V41_MXFP8", 4, None, None, None, "V41_MXFP8", 4, None, None, None,
         0.04, attention.CHOOSE, torch.empty(2, 3, 512), torch.empty(2, 3)),
    )  # fmt: skip
    v, s = torch.randn(3, 2, 4, 64), torch.randn(3, 2, 4)
    torch.library.opcheck(
        torch.ops.deepinfer.merge_attn_states,
        (None, v, s, None, None, None, torch.empty(3, 4, 64), torch.empty(3, 4)),
    )

    def step(q, data, indices, v, s):
        return *flash_mla_with_kvcache(q, data, indices, page_size=4), *merge_attn_states(v, s)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    arguments = q, data, indices, v, s
    for found, right in zip(compiled(*arguments), step(*arguments), strict=True):
        assert torch.equal(found, right)
