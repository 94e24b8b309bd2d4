"""Indices that point outside of their tensor are none: nothing there is read or written, by every backend.

Each tensor lies in a larger one of poison. What is written beside it changes the poison, what is read beside it shows as
another result, and what is touched farther away ends the process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from deepinfer import kernels
from deepinfer.kernels import KVCacheFormat

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = [("torch", "cpu"), ("triton", "cpu")] if INTERPRETED else [("torch", "cpu")]
BACKENDS_AND_GPU = [*BACKENDS, pytest.param(("triton", "cuda"), marks=pytest.mark.gpu)]
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
]
FORMS = [KVCacheFormat.V41_MXFP8, KVCacheFormat.V41_NVFP4, KVCacheFormat.INDEXER_FP8]
GUARD = 4096  # elements before and behind a tensor
PAGES, PAGE = 3, 4


def hostile(size: int, dtype: torch.dtype) -> list[int]:
    """Indices outside of [0, size), the nearest and the farthest that a dtype has."""
    far = 2**31 - 1 if dtype == torch.int32 else 2**62
    more = [] if dtype == torch.int32 else [2**31, 2**32, 2**40, -(2**33)]
    return [-1, size, size + 1, -7, far, -far - 1, *more]


@pytest.fixture(params=BACKENDS_AND_GPU, ids="-".join)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """A backend, on the device where new tensors are meanwhile."""
    name, device = request.param
    with torch.device(device):
        yield name


class Guards:
    """Tensors inside of larger ones of poison."""

    def __init__(self) -> None:
        """None yet."""
        self._inside: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor amid poison: NaN, or the largest integer."""
        is_float = x.is_floating_point()
        poison = torch.nan if is_float else torch.iinfo(x.dtype).max
        whole = torch.full((x.numel() + 2 * GUARD,), poison, dtype=x.dtype)
        inner = whole[GUARD : GUARD + x.numel()].view(x.shape)
        inner.copy_(x)
        self._inside.append((whole, inner, whole.clone()))
        return inner

    def assert_intact(self) -> None:
        """No poison has changed."""
        for whole, inner, before in self._inside:
            end = GUARD + inner.numel()
            for part in (slice(0, GUARD), slice(end, None)):
                assert torch.equal(whole[part].view(torch.uint8), before[part].view(torch.uint8))


@contextmanager
def guarded() -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    guards = Guards()
    yield guards
    guards.assert_intact()


def angles(entries: int, half: int = 32) -> torch.Tensor:
    angle = 6.28 * torch.linspace(0.05, 0.95, entries * half).view(entries, half)
    return torch.stack((angle.cos(), angle.sin()), -1)


def values(rows: int, channels: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator("cpu").manual_seed(seed)
    return torch.randn((rows, channels), generator=g, device="cpu").to(torch.get_default_device())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
def test_slots_that_the_cache_does_not_have(form, dtype, backend) -> None:
    outside = hostile(PAGES * PAGE, dtype)
    slots = torch.tensor([3, *outside, PAGES * PAGE - 1], dtype=dtype)
    k = values(len(slots), form.channels)
    empty = torch.full((PAGES, form.page_bytes(PAGE)), 0xA5, dtype=torch.uint8)
    with guarded() as guard:
        cache = guard(empty)
        kernels.quantize_and_insert_k_cache(k, cache, guard(slots), form, PAGE, backend=backend)
        right = empty.clone()
        ends = [0, len(slots) - 1]
        kernels.quantize_and_insert_k_cache(
            k[ends], right, slots[ends], form, PAGE, backend="torch"
        )
        assert torch.equal(cache, right)
        kernels.rope_quant_insert(
            k, angles(len(k)), cache, guard(slots), form, PAGE, weight=torch.ones(form.channels), backend=backend
        )  # fmt: skip
        out = guard(torch.full((len(slots), form.channels), 7.0))
        kernels.gather_and_dequantize_k_cache(
            cache, guard(slots), form, PAGE, out=out, backend=backend
        )
    known = kernels.gather_and_dequantize_k_cache(
        cache, slots[ends], form, PAGE, dtype=torch.float32, backend="torch"
    )
    assert torch.equal(out[ends], known)
    assert torch.equal(out[1:-1], torch.zeros(len(outside), form.channels))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
def test_rotations_that_the_table_does_not_have(form, dtype, backend) -> None:
    """Rows are written as they are; tokens stay as they are."""
    entries = 5
    index = torch.tensor([4, *hostile(entries, dtype), 0], dtype=dtype)
    rows = len(index)
    k, table = values(rows, form.channels), angles(entries)
    known = torch.tensor([0, rows - 1])
    turned = k.clone()
    turned[known] = kernels.apply_rope(k[known], table[index[known].long()], backend="torch")
    with guarded() as guard:
        cache = guard(torch.zeros(8, form.page_bytes(PAGE), dtype=torch.uint8))
        kernels.rope_quant_insert(
            k, guard(table), cache, torch.arange(rows), form, PAGE, phase_index=guard(index), backend=backend
        )  # fmt: skip
        found = kernels.apply_rope(k, guard(table), guard(index), backend=backend)
        place = guard(k)
        kernels.apply_rope(place, guard(table), guard(index), out=place, backend=backend)
    right = torch.zeros_like(cache)
    kernels.quantize_and_insert_k_cache(
        turned, right, torch.arange(rows), form, PAGE, backend="torch"
    )
    assert torch.equal(cache, right)
    assert torch.equal(found, turned)
    assert torch.equal(place, turned)


@pytest.mark.parametrize("kind", ["last", "requests", "positions", "slots", "phase_index"])
def test_latents_of_tokens_that_are_none(kind, backend) -> None:
    """Two requests of four tokens, of which one index after the other points elsewhere; the others do not notice."""
    form, ring, tokens = KVCacheFormat.V41_NVFP4, 3, 8
    size = {"last": tokens, "requests": 2, "positions": 0, "slots": PAGES * PAGE, "phase_index": 4}
    whole = _latents(backend)
    for bad in hostile(size[kind], torch.int64):
        if kind == "positions" and bad >= 0:
            continue
        change = 7 if kind in ("requests", "positions") else 3
        latents, cache, state = _latents(backend, kind, change, bad)
        missing = kind in ("last", "requests", "positions")
        assert torch.equal(latents[:3], whole[0][:3])
        assert torch.equal(latents[3], torch.zeros(512) if missing else whole[0][3])
        # The last latent has the slot 9: row 1 of page 2.
        codes, scales = form.code_bytes, form.scale_bytes
        row = cache[2, codes : 2 * codes], cache[2, 4 * codes + scales :][:scales]
        rest = cache.clone()
        rest[2] = whole[1][2]
        assert torch.equal(rest, whole[1])
        if kind == "phase_index":
            still = torch.zeros_like(cache)
            kernels.quantize_and_insert_k_cache(
                latents[3:], still, torch.tensor([9]), form, PAGE, backend="torch"
            )
            assert torch.equal(row[0], still[2, codes : 2 * codes])
        else:
            assert all(bool((part == 0xA5).all()) for part in row)
        if kind in ("requests", "positions"):
            # The place of the token that is none holds what was there, or the third token from the end.
            kept = _state(ring)[1, 8 % ring]
            if kind == "requests":
                kept = torch.stack((values(8, 512, 1)[4], values(8, 512, 2)[4]))
            assert torch.equal(state[1, 8 % ring], kept)
            assert torch.equal(state[0], whole[2][0])
        else:
            assert torch.equal(state, whole[2])


def _state(ring: int) -> torch.Tensor:
    return values(2 * ring * 2, 512, 5).view(2, ring, 2, 512)


def _latents(backend: str, kind: str = "", at: int = 0, bad: int = 0) -> tuple[torch.Tensor, ...]:
    """Latents, cache and state of a step; one index of one kind may be replaced. The eps is 0."""
    form = KVCacheFormat.V41_NVFP4
    given = {
        "last": torch.tensor([1, 3, 5, 7]),
        "requests": torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]),
        "positions": torch.tensor([3, 4, 5, 6, 5, 6, 7, 8]),
        "slots": torch.tensor([4, 1, 6, 9]),
        "phase_index": torch.tensor([0, 3, 2, 2]),
    }
    if kind:
        given[kind][at] = bad
    with guarded() as guard:
        cache = guard(torch.full((PAGES, form.page_bytes(PAGE)), 0xA5, dtype=torch.uint8))
        state = guard(_state(3))
        latents = guard(torch.full((4, 512), 7.0))
        given = {name: guard(x) for name, x in given.items()}
        kernels.compress_norm(
            guard(values(8, 512, 1)), guard(values(8, 512, 2)), guard(torch.ones(512)), 0.0, guard(angles(4)), cache,
            given["slots"], form, PAGE, last=given["last"], state=state, requests=given["requests"],
            positions=given["positions"], phase_index=given["phase_index"], latents=latents, backend=backend,
        )  # fmt: skip
    return latents, cache, state


def test_rows_and_ids_that_an_engram_does_not_have(backend) -> None:
    size = 11
    rows = torch.tensor([[0, *hostile(size, torch.int64), 10]])
    with guarded() as guard:
        table = guard(torch.full((size, 64), 0x38, dtype=torch.uint8))  # ones
        scale = guard(torch.full((size, 2), 127, dtype=torch.uint8))
        found = kernels.engram_lookup(
            guard(rows), table, scale, dtype=torch.float32, backend=backend
        )
        found = found.view(-1, 64)
        ids = guard(torch.tensor([[5, i] for i in hostile(20, torch.int64)]))
        one = torch.ones(1, dtype=torch.int64)
        hashes = kernels.engram_hash(
            ids, guard(torch.arange(20)), guard(one.expand(2)), guard(one * 97), guard(one), 3, backend=backend
        )  # fmt: skip
    assert torch.equal(found[[0, -1]], torch.ones(2, 64))
    assert torch.equal(found[1:-1], torch.zeros(rows.numel() - 2, 64))
    assert set(hashes.flatten().tolist()) == {(5 ^ 3) % 97 + 1}


@pytest.mark.parametrize("parts", [1, 2])
def test_attention_to_slots_and_rotations_that_are_none(parts, backend) -> None:
    form = KVCacheFormat.V41_MXFP8
    slots = torch.tensor([2, *hostile(PAGES * PAGE, torch.int32), 9], dtype=torch.int32)
    entries = torch.tensor([1, *hostile(2, torch.int32)], dtype=torch.int32)
    rows = len(entries)
    lists = slots.repeat(rows, 1)
    if parts > 1:
        lists = torch.cat((lists, lists.new_full((rows, 64), -1), lists), 1)
    q = values(rows * 8, 512, 3).view(rows, 1, 8, 512) * 0.1
    with guarded() as guard:
        cache = guard(torch.zeros(PAGES, form.page_bytes(PAGE), dtype=torch.uint8))
        kernels.quantize_and_insert_k_cache(
            values(12, 512), cache, torch.arange(12), form, PAGE, backend="torch"
        )
        out, lse = kernels.flash_mla_with_kvcache(
            q, cache, guard(lists[:, None]), page_size=PAGE, phases=guard(angles(2)), phase_index=guard(entries[:, None]),
            sched_meta=kernels.MLASchedMeta(0 if parts == 1 else 64), backend=backend,
        )  # fmt: skip
    kept = torch.tensor([2, 9], dtype=torch.int32).repeat(rows, parts)[:, None]
    still, same = kernels.flash_mla_with_kvcache(q, cache, kept, page_size=PAGE, backend="torch")
    assert torch.allclose(lse, same, atol=1e-5)
    assert torch.allclose(out[1:], still[1:], atol=1e-5)
    turned = kernels.apply_rope(still[:1, 0], angles(2)[1:], inverse=True, backend="torch")
    assert torch.allclose(out[:1, 0], turned, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_and_requests_that_there_are_not(dtype, backend) -> None:
    rows = torch.tensor([1, *hostile(3, dtype), 2], dtype=dtype)
    bits = torch.full((len(rows), 2), 0x0F0F0F0F, dtype=torch.int32)
    logits = values(3, 64)
    with guarded() as guard:
        masked = guard(logits)
        kernels.apply_token_bitmask(masked, guard(bits), rows=guard(rows), backend=backend)
    right = kernels.apply_token_bitmask(
        logits.clone(), bits[[0, -1]], rows=rows[[0, -1]], backend="torch"
    )
    assert torch.equal(masked, right)
    found = torch.arange(4 * len(rows)).view(len(rows), 4).int() % 12
    table = torch.tensor([[3, 1, 2], [5, 4, 0], [7, 8, 9]], dtype=torch.int32)
    with guarded() as guard:
        slots = kernels.topk_to_physical_indices(
            guard(found), guard(table), PAGE, requests=guard(rows), backend=backend
        )
    right = kernels.topk_to_physical_indices(
        found[[0, -1]], table, PAGE, requests=rows[[0, -1]], backend="torch"
    )
    assert torch.equal(slots[[0, -1]], right)
    assert bool((slots[1:-1] == -1).all())


def test_places_that_there_are_not(backend) -> None:
    places = torch.tensor([[0, 2**31 - 1], [8, 3], [-9, 7], [1, -(2**31)]], dtype=torch.int32)
    ids = torch.tensor([[0, 1], [0, 1], [0, 1], [0, 1]])
    mapping = kernels.get_fused_mapping(ids, 2, alignment=4, backend="torch")
    places = places.where(places != 8, mapping.num_places)
    none = places.where((places >= 0) & (places < mapping.num_places), -1)
    x, weights = values(4, 40), values(4, 2, 1).abs()
    with guarded() as guard:
        hostile_one = mapping._replace(token_topk_to_pos=guard(places))
        out, _ = kernels.expand_to_fused(guard(x), hostile_one, guard(weights), backend=backend)
        y = guard(values(mapping.num_places, 40, 2))
        total = kernels.reduce_fused(y, hostile_one, guard(weights), backend=backend)
    kept = mapping._replace(token_topk_to_pos=none)
    right, _ = kernels.expand_to_fused(x, kept, weights, backend="torch")
    filled = none[none >= 0].long()
    assert torch.equal(out[filled], right[filled])
    assert torch.allclose(total, kernels.reduce_fused(y, kept, weights, backend="torch"))


def test_pages_of_keys_that_there_are_not(backend) -> None:
    form = KVCacheFormat.INDEXER_MXFP4
    cache = torch.zeros(PAGES, form.page_bytes(PAGE), dtype=torch.uint8)
    table = torch.tensor([[0, *hostile(PAGES, torch.int32), 2]], dtype=torch.int32)
    lens = torch.tensor([[table.shape[1] * PAGE]], dtype=torch.int32)
    q = values(8, 128).view(1, 1, 8, 128).to(torch.float8_e4m3fn)
    meta = kernels.get_paged_mqa_logits_metadata(lens, PAGE, 2)
    with guarded() as guard:
        found = kernels.fp8_fp4_paged_mqa_logits(
            q, guard(cache), values(1, 8), guard(lens), guard(table), meta, table.shape[1] * PAGE, page_size=PAGE, backend=backend
        )  # fmt: skip
    inside = found[0].view(-1, PAGE)
    assert bool(inside[1:-1].isneginf().all())
    assert bool(inside[[0, -1]].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_norms_rotate_by_known_places_only(dtype, backend) -> None:
    places = torch.tensor([1, *hostile(2, dtype), 0], dtype=dtype)
    x = values(2 * len(places), 128, 4).view(-1, 2, 128)
    with guarded() as guard:
        found = kernels.rms_norm_rope_quant(
            guard(x), guard(torch.ones(128)), phases=guard(angles(2)), positions=guard(places), backend=backend
        )  # fmt: skip
    right = kernels.rms_norm_rope_quant(
        x, torch.ones(128), phases=angles(2), positions=places, backend="torch"
    )
    for one, other in zip(found, right, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    plain = kernels.rms_norm_rope_quant(x, torch.ones(128), backend="torch")
    assert torch.equal(found[0][1:-1].view(torch.uint8), plain[0][1:-1].view(torch.uint8))
