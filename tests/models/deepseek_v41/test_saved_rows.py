"""Rows as published bytes: packed storage, saved blocks and windows, and their sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepinfer.core.errors import ConfigError, InvariantBroken, ShapeError
from deepinfer.core.plan import BlockUpdate
from deepinfer.kernels import round_fp8, round_mxfp4, round_nvfp4
from deepinfer.models.deepseek_v41 import (
    DeepseekV41,
    DeepseekV41Config,
    ForwardBatch,
    Segment,
    SlotCache,
)
from deepinfer.models.deepseek_v41.row_formats import (
    block_bytes,
    key_format,
    pool_format,
    raw_format,
    saved_windows_bytes,
    token_bytes,
    window_format,
)

BLOCK = 8


@pytest.fixture(scope="module")
def flash(repo_root) -> DeepseekV41Config:
    return DeepseekV41Config.from_pretrained(repo_root / "tests" / "data" / "deepseek_v41_flash")


@pytest.fixture(scope="module")
def model(random_model, small_config) -> DeepseekV41:
    return random_model(small_config(), "full")


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return torch.randint(0, 159, (80,), generator=torch.Generator().manual_seed(3)).tolist()


def test_published_sizes(flash) -> None:
    assert window_format(flash.head_dim).row_bytes == 528
    assert pool_format(flash.head_dim).row_bytes == 288
    assert key_format(flash.index_head_dim).row_bytes == 68
    assert token_bytes(flash) == 890
    assert block_bytes(flash, 128) == 128 * 890
    assert saved_windows_bytes(flash) == 20 * 134 * 528 == 1_415_040
    assert saved_windows_bytes(flash, 40) == 2_830_080


FORMATS = {
    "window": (window_format, round_fp8, 512),
    "pool": (pool_format, round_nvfp4, 512),
    "key": (key_format, round_mxfp4, 128),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", FORMATS)
def test_rounded_rows_are_packed_without_loss(kind, dtype) -> None:
    """Every size of values, those below the smallest scales included, and signed zeros."""
    make, rounded, channels = FORMATS[kind]
    form, generator = make(channels), torch.Generator().manual_seed(0)
    sizes = torch.logspace(-9, 3, 600, base=10).unsqueeze(-1)
    values = torch.randn(600, channels, generator=generator) * sizes
    values[:50, ::3] = 0.0
    values[50:90, ::5] = -0.0
    rows = rounded(values.to(dtype))
    data = form.pack(rows)
    assert data.dtype == torch.uint8
    assert data.shape == (600, form.row_bytes)
    back = form.unpack(data, dtype)
    assert back.dtype == dtype
    ints = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(back.view(ints), rows.view(ints))


def test_pool_rows_between_the_two_smallest_scales() -> None:
    """Their largest value is 4 of the second smallest scale, which a cast of the rounded values would not choose."""
    values = torch.zeros(1, 16)
    values[0, :4] = torch.tensor([9.3, -4.1, 2.2, 1.0]) * 2.0**-9
    rows = round_nvfp4(values)
    assert rows.abs().max() == 8 * 2.0**-9
    assert not torch.equal(round_nvfp4(rows), rows)
    form = pool_format(16)
    assert torch.equal(form.unpack(form.pack(rows), torch.float32), rows)


def test_raw_rows() -> None:
    rows = torch.randn(5, 7, 32)
    form = raw_format(32, torch.float32)
    assert form.pack(rows).shape == (5, 7, 128)
    assert torch.equal(form.unpack(form.pack(rows), torch.float32), rows)


def give_blocks(cache: SlotCache, slot: int, tokens: int, first: int) -> None:
    blocks = tuple(range(first, first + -(-tokens // cache.block_size)))
    cache.apply_updates([BlockUpdate(slot=slot, first=0, blocks=blocks[::-1])])


@pytest.mark.parametrize("rounding", ["cache", "full"])
@pytest.mark.parametrize("options", [{}, {"num_blocks": 30, "block_size": BLOCK}])
def test_packed_equals_plain(options, rounding, random_model, small_config, ids) -> None:
    model = random_model(small_config(), rounding)
    plain, packed = (
        model.new_cache(2, 96, 40, storage=storage, **options) for storage in ("plain", "packed")
    )
    for cache in (plain, packed):
        if options:
            give_blocks(cache, 0, 80, 3)
            give_blocks(cache, 1, 40, 20)
    steps = [[(0, 0, ids[:40]), (1, 0, ids[9:12])], [(1, 3, ids[12:30]), (0, 40, ids[40:41])]]
    steps += [[(0, 41, ids[41:45])], [(0, 45, ids[45:80])]]
    for step in steps:
        batch = ForwardBatch.from_segments(step)
        wanted, found = model(batch, plain), model(batch, packed)
        assert torch.equal(found.hidden, wanted.hidden)
        ends = {slot: start + len(part) for slot, start, part in step}
        slots = [slot for slot, _, part in step for _ in part]
        for cache, out in ((plain, wanted), (packed, found)):
            at = batch.host_positions().tolist()
            model.draft.extend_context(out.features, at, slots, cache)
        tokens = [
            model.draft.draft_greedy([5] * len(ends), list(ends.values()), list(ends), cache)
            for cache in (plain, packed)
        ]
        assert torch.equal(tokens[0][0], tokens[1][0])
        assert torch.equal(tokens[0][1], tokens[1][1])
    if options:
        for block in range(3, 13):
            assert torch.equal(plain.save_block(block), packed.save_block(block))
    assert torch.equal(plain.save_windows(0, 80), packed.save_windows(0, 80))
    packed.reset(0)
    assert packed.rows.window_data[:, : packed.ring_size].sum() == 0


def test_packed_sizes(model) -> None:
    config = model.config
    cache = model.new_cache(2, 64, 16, num_blocks=10, block_size=BLOCK, storage="packed")
    rings = 9 * 2 * (config.sliding_window + 16) * 33
    assert cache.block_bytes == block_bytes(config, BLOCK) == (4 + 4 + 8) * (18 + 17)
    tails, tokens, null_row = 2 * 2 * 18 * 2 * 32 * 4, 2 * 64 * 8, 18
    assert cache.size_bytes == rings + 10 * cache.block_bytes + tails + tokens + null_row


@pytest.mark.parametrize("storage", ["zip", None])
def test_unknown_storage(storage, model) -> None:
    with pytest.raises(ConfigError, match="storage"):
        model.new_cache(1, 32, storage=storage)


def test_rows_without_rounding_have_no_packed_form(small_model) -> None:
    with pytest.raises(ConfigError, match="rounding 'none'"):
        small_model.new_cache(1, 32, storage="packed")


@pytest.mark.parametrize("rounding", ["none", "full"])
@pytest.mark.parametrize("storage", ["plain", "packed"])
def test_blocks_survive_a_trip(storage, rounding, random_model, small_config, ids) -> None:
    if storage == "packed" and rounding == "none":
        return
    model = random_model(small_config(), rounding)
    options = {"num_blocks": 12, "block_size": BLOCK, "storage": storage}
    one, other = (model.new_cache(1, 96, 40, **options) for _ in range(2))
    for cache in (one, other):
        cache.apply_updates([BlockUpdate(slot=0, first=0, blocks=(4, 2, 9, 0, 7))])
    model(ForwardBatch.from_segments([(0, 0, ids[:40])]), one)
    for block in (4, 2, 9, 0, 7):
        data = one.save_block(block)
        assert data.shape == (one.block_bytes,)
        other.load_block(block, data)
        data.zero_()
    for source, pool in one.pools.items():
        assert torch.equal(other.pools[source], pool)
        assert torch.equal(other.index_keys[source], one.index_keys[source])
        assert pool.float().abs().sum() > 0


def adopted(
    model: DeepseekV41, cache: SlotCache, ids: list[int], hit: int, others: tuple[int, ...]
) -> None:
    """A slot that shares the first blocks of slot 0."""
    shared = tuple(cache.table.host[0, : hit // cache.block_size].tolist())
    cache.apply_updates([BlockUpdate(slot=1, first=0, blocks=shared + others)])
    cache.adopt_prefix(1, ids[:hit])


@pytest.mark.parametrize("storage", ["plain", "packed"])
@pytest.mark.parametrize("hit", [8, 16, 48, 64])
def test_restored_windows_equal_cold(hit, storage, model, ids) -> None:
    """All layers behind the last KV source run for the last window only, which lies behind the hit."""
    window, length = model.config.sliding_window, 80
    full_start = length - window
    cache = model.new_cache(2, 96, 80, num_blocks=30, block_size=BLOCK, storage=storage)
    cache.apply_updates([BlockUpdate(slot=0, first=0, blocks=tuple(range(10, 20)))])
    first = Segment(0, 0, hit, full_start=full_start)
    model(ForwardBatch(torch.tensor(ids[:hit]), (first,), None, None), cache)
    data = cache.save_windows(0, hit)
    assert data.shape == (cache.windows_bytes,)
    part = torch.tensor(ids[hit:length])
    rest = Segment(0, hit, length - hit, full_start=full_start)
    cold = model(ForwardBatch(part, (rest,), None, None), cache)
    cache.rows.clear_windows(1, cache.ring_size)
    adopted(model, cache, ids, hit, tuple(range(20, 30 - hit // BLOCK)))
    cache.load_windows(1, hit, data)
    start = max(0, hit - window)
    warm_rest = Segment(1, hit, length - hit, start, hit, full_start)
    warm = model(ForwardBatch(part, (warm_rest,), None, None), cache)
    assert torch.equal(warm.hidden, cold.hidden)
    assert torch.equal(warm.features, cold.features)
    at = [(0, length), (1, length)]
    saved = [cache.save_windows(slot, end) for slot, end in at]
    assert torch.equal(*saved)


def test_all_layers_can_be_saved(model, ids) -> None:
    """Without rows that drop out, a restored prefix needs the windows of every layer, and is exact at once."""
    cache = model.new_cache(2, 96, 80, num_blocks=30, block_size=BLOCK, window_layers=8)
    cache.apply_updates([BlockUpdate(slot=0, first=0, blocks=tuple(range(10, 20)))])
    model(ForwardBatch.from_segments([(0, 0, ids[:48])]), cache)
    data = cache.save_windows(0, 48)
    assert len(data) == cache.windows_bytes == 8 * (8 + 5) * 33
    cold = model(ForwardBatch.from_segments([(0, 48, ids[48:52])]), cache)
    adopted(model, cache, ids, 48, (20,))
    cache.load_windows(1, 48, data)
    part, segment = torch.tensor(ids[48:52]), Segment(1, 48, 4, 40, 48)
    warm = model(ForwardBatch(part, (segment,), None, None), cache)
    assert torch.equal(warm.hidden, cold.hidden)


def test_layers_that_were_not_saved_are_not_read(model, ids) -> None:
    """A suffix shorter than the window: stale rows above the cut are masked, not used."""
    outs = []
    for stale in (0.0, 7.0):
        cache = model.new_cache(2, 96, 80, num_blocks=30, block_size=BLOCK)
        cache.apply_updates([BlockUpdate(slot=0, first=0, blocks=tuple(range(10, 20)))])
        model(ForwardBatch.from_segments([(0, 0, ids[:48])]), cache)
        data = cache.save_windows(0, 48)
        cache.windows[:, 1] = stale
        adopted(model, cache, ids, 48, (20,))
        cache.load_windows(1, 48, data)
        for start, end in ((48, 50), (50, 51), (51, 52)):
            segment = Segment(1, start, end - start, 40, 48, full_start=44)
            out = model(ForwardBatch(torch.tensor(ids[start:end]), (segment,), None, None), cache)
            outs.append(out.hidden)
    for one, other in zip(outs[:3], outs[3:], strict=True):
        assert torch.equal(one, other)


def test_what_cannot_be_saved(model, ids) -> None:
    cache = model.new_cache(2, 96, 16, num_blocks=30, block_size=BLOCK)
    cache.apply_updates([BlockUpdate(slot=0, first=0, blocks=tuple(range(10)))])
    for at in (0, 16, 32):
        model(ForwardBatch.from_segments([(0, at, ids[at : at + 16])]), cache)
    with pytest.raises(InvariantBroken, match=r"position 49 .* holds 48 tokens"):
        cache.save_windows(0, 49)
    # The ring has room for 24 rows: the window before 31 begins at 24.
    assert cache.save_windows(0, 31).any()
    with pytest.raises(InvariantBroken, match="window rows from position 24 on"):
        cache.save_windows(0, 30)
    adopted(model, cache, ids, 40, (20,))
    with pytest.raises(InvariantBroken, match="window rows from position 40 on"):
        cache.save_windows(1, 40)
    with pytest.raises(InvariantBroken, match="adopt the prefix first"):
        cache.load_windows(1, 32, cache.save_windows(0, 32))
    data = cache.save_windows(0, 40)
    with pytest.raises(ShapeError, match="data has shape"):
        cache.load_windows(1, 40, data[:-1])
    with pytest.raises(ShapeError, match="float32"):
        cache.load_windows(1, 40, data.float())
    with pytest.raises(InvariantBroken, match="no block 30"):
        cache.save_block(30)
    with pytest.raises(ShapeError, match="data has shape"):
        cache.load_block(3, data)


def test_short_windows_are_padded_with_zeros(model, ids) -> None:
    cache = model.new_cache(1, 96, 16)
    model(ForwardBatch.from_segments([(0, 0, ids[:3])]), cache)
    rows = cache.save_windows(0, 3).view(4, 13, 33).numpy()
    assert not rows[:, :10].any()
    assert rows[:, 10:].any(-1).all()
    assert not np.asarray(cache.save_windows(0, 0)).any()
