"""Inserts and gathers two values at a time, run on the CPU over a stand-in for Gluon: bytes and rows of the reference."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.gluon_numpy import PROGRAM, Pointer, Tensor, gluon_on_numpy

from deepinfer.kernels.formats import KVCacheFormat as F
from deepinfer.kernels.reference import cache as reference
from deepinfer.kernels.reference.swiglu import cast_rows

PAGE, PAGES, FOLDER = 8, 5, "deepinfer.kernels.triton"
CODES = {F.V41_MXFP8: 1, F.INDEXER_MXFP4: 2, F.V41_NVFP4: 3}


class Rows(Pointer):
    """Places that can be chosen from."""

    def __add__(self, offset: Any) -> Rows:
        found = super().__add__(offset)
        return Rows(found.buffer, found.at)

    def __getitem__(self, at: Any) -> Rows:
        return Rows(self.buffer, self.at[at])


def values(words: np.ndarray) -> torch.Tensor:
    """Values of pairs of bf16, side by side on the last axis."""
    return torch.from_numpy(np.ascontiguousarray(words)).view(torch.bfloat16)


def pair_of(a: Tensor, b: Tensor) -> Tensor:
    both = torch.stack([torch.from_numpy(np.asarray(x.data, np.float32)) for x in (a, b)], -1)
    return Tensor(both.bfloat16().view(torch.int32)[..., 0].numpy())


def pair_codes(w: Tensor, form: int) -> tuple[Tensor, Tensor]:
    x = values(w.data)
    codes, scale = cast_rows(x.flatten(0, 1), ("fp8", "mxfp4", "nvfp4")[form - 1], x.shape[-1])
    codes, scale = codes.view(torch.uint8), scale.view(torch.uint8)
    if form == 1:
        codes = codes.view(torch.int16)
    shape = w.data.shape
    return Tensor(codes.numpy().reshape(shape)), Tensor(scale.numpy().reshape(*shape[:2], 1))


def choice(condition: Any, x: Any, y: Any) -> Any:
    pick = condition.data
    if isinstance(x, Pointer):
        assert x.buffer is y.buffer
        return Rows(x.buffer, np.where(pick, x.at, y.at))
    x, y = (v.data if isinstance(v, Tensor) else v for v in (x, y))
    kind = x.dtype if isinstance(x, np.ndarray) else np.asarray(y).dtype
    return Tensor(np.where(pick, x, y).astype(kind))


def instructions(text: str, constraints: str, given: list, **options: Any) -> Any:
    if "griddepcontrol" in text:
        return None
    assert "rcp.approx.ftz.f32 $0, t" in text
    return Tensor(1 / (1 + np.exp(-given[0].data)))


def modules() -> dict[str, types.ModuleType]:
    """Stand-ins for the device functions, whose instructions have tests of their own."""
    pairs = types.ModuleType(f"{FOLDER}.bf16_pairs")
    pairs.even = lambda w: Tensor((w.data << 16).view(np.float32))  # type: ignore[attr-defined]
    pairs.odd = lambda w: Tensor((w.data & -65536).view(np.float32))  # type: ignore[attr-defined]
    pairs.pair_of, pairs.pair_codes = pair_of, pair_codes  # type: ignore[attr-defined]
    pairs.squares = lambda w, tensor: Tensor(  # type: ignore[attr-defined]
        (values(w.data).float() ** 2).sum((1, 2)).numpy()
    )
    norms = types.ModuleType(f"{FOLDER}.norm_pairs")
    norms.lanes = lambda *sizes: None  # type: ignore[attr-defined]
    return {pairs.__name__: pairs, norms.__name__: norms}


class Words:
    """Shared memory; a slice of it is of the same."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data

    def store(self, x: Tensor) -> None:
        self.data[...] = x.data

    def load(self, layout: Any) -> Tensor:
        return Tensor(self.data.copy())

    def slice(self, start: int, length: int, dim: int) -> Words:
        assert dim == 1
        return Words(self.data[:, start : start + length])


LANGUAGE = {
    "reshape": lambda x, shape: x.reshape(shape), "SwizzledSharedLayout": lambda *a: None,
    "allocate_shared_memory": lambda kind, shape, layout: Words(np.full(shape, 7, kind)),
    "where": choice, "inline_asm_elementwise": instructions, "multiple_of": lambda x, n: x,
    "convert_layout": lambda x, layout: x, "fma": lambda a, b, c: a * b + c, "rsqrt": lambda x: Tensor((1 / np.sqrt(x.data)).astype(np.float32)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _quotients(monkeypatch) -> None:
    monkeypatch.setattr(Tensor, "__truediv__", lambda x, n: Tensor(x.data / n), raising=False)


def sizes(form: F) -> dict[str, int]:
    return {
        "CHANNELS": form.channels, "FORMAT": CODES[form], "GROUP": form.group, "ROW_STRIDE": form.row_stride,
        "SCALE_STRIDE": form.scale_stride, "SCALES_AT": form.scales_offset(PAGE), "PAGE": PAGE,
    }  # fmt: skip


def caches(form: F) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache, its pages apart, to be written by the kernel, and another for the reference."""
    size = form.page_bytes(PAGE)
    both = torch.full((2, PAGES, size + 64), 0xEE, dtype=torch.uint8)
    return both[0, :, :size], both[1, :, :size]


def flat(x: torch.Tensor, dtype: Any) -> Rows:
    """All memory behind a tensor."""
    whole = x.as_strided((x.shape[0] * x.stride(0),), (1,))
    return Rows(whole.view(torch.uint8).numpy().view(dtype), np.int64(0))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("form", CODES)
@pytest.mark.parametrize(
    ("norm", "rope", "shared"),
    [(False, False, False), (False, True, False), (True, True, False), (True, True, True)],
)
def test_rows(form, norm, rope, shared, monkeypatch) -> None:
    if not rope:
        monkeypatch.setitem(globals(), "PAGES", PAGE * PAGES)
        monkeypatch.setitem(globals(), "PAGE", 1)
    rows = 23
    x = torch.randn(rows, form.channels).bfloat16()
    slots = torch.randperm(PAGE * PAGES)[:rows]
    slots[3], slots[7] = -1, PAGE * PAGES
    weight = torch.rand(form.channels).bfloat16() + 0.5
    phases, turns = torch.randn(rows, 32, 2), torch.randperm(rows)
    positions, floors = torch.arange(rows), torch.where(torch.arange(rows) % 5 == 0, 100, 0)
    cache, wanted = caches(form)
    memory = flat(cache, np.int16 if form.code_bits == 8 else np.uint8)
    with gluon_on_numpy("cache_pairs", language=LANGUAGE, also=modules()) as (kernel,):
        for program in range(-(-rows // 4)):
            PROGRAM["id"] = program
            words = flat(x, np.int32)
            kernel.cache_pairs_kernel(
                words, words, words, None, None, flat(weight[None], np.int32), flat(phases, np.int64),
                flat(turns[:, None], np.int64), flat(positions[:, None], np.int64), flat(floors[:, None], np.int64),
                flat(slots[:, None], np.int64), words, memory, flat(cache, np.uint8), rows, rows, PAGES, 0, rows, 1e-6,
                form.channels // 2, 0, 0, 0, 1, 0, 32, cache.stride(0) // (2 if form.code_bits == 8 else 1),
                cache.stride(0), WIDE=False, PAIR=False, HAS_LAST=False, HAS_NORM=norm, HAS_FLOOR=rope, HAS_LATENTS=False,
                HAS_PHASE_INDEX=True, ROPE=64 if rope else 0, **sizes(form), ROWS=4, EACH=8, EARLY=False, SHARED=shared,
            )  # fmt: skip
    turned = x
    if norm or rope:
        turned = reference.rotated(
            x, phases if rope else None, turns if rope else None, weight if norm else None, 1e-6
        )
    kept = slots.masked_fill((slots < 0) | (slots >= PAGE * PAGES), -1)
    if rope:
        kept = kept.masked_fill(positions < floors, -1)
    reference.insert_rows(turned, wanted, kept, form, PAGE)
    differing = (cache != wanted).float().mean().item()
    assert differing == 0 if not norm else differing < 2e-3
    assert (cache != 0xEE).any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("pools", [True, False])
def test_latents(pools) -> None:
    """Tokens of three requests, some of whose first tokens wait in the ring; a token of no request."""
    form, tokens, ring = F.V41_NVFP4, 30, 4
    memory = torch.randn(2 * tokens + 3 * ring * 2, 512)
    both = memory[: 2 * tokens].view(tokens, 2, 512)
    state = memory[2 * tokens :].view(3, ring, 2, 512)
    x, gates = both[:, 0], both[:, 1]
    requests = torch.arange(tokens) // 10
    positions = torch.arange(tokens) % 10 + torch.tensor([1, 4, 7])[requests]
    requests[12] = 9
    last = (positions % 2 == 1).nonzero().flatten() if pools else torch.arange(tokens)
    last[4] = tokens + 3
    rows = len(last)
    slots = torch.randperm(PAGE * PAGES)[:rows]
    weight, phases = torch.rand(512).bfloat16() + 0.5, torch.randn(rows, 32, 2)
    cache, wanted = caches(form)
    latents = torch.full((rows, 512), 7.0).bfloat16()
    words = flat(memory, np.int64)
    with gluon_on_numpy("cache_pairs", language=LANGUAGE, also=modules()) as (kernel,):
        for program in range(-(-rows // 4)):
            PROGRAM["id"] = program
            kernel.cache_pairs_kernel(
                words, words + 256, words + tokens * 512, flat(requests[:, None], np.int64), flat(last[:, None], np.int64),
                flat(weight[None], np.int32), flat(phases, np.int64), None, flat(positions[:, None], np.int64), None,
                flat(slots[:, None], np.int64), flat(latents, np.int32), flat(cache, np.uint8), flat(cache, np.uint8),
                rows, tokens, PAGES, 3, rows, 1e-6, 512, 512, ring * 512, 512, ring, 256, 32, cache.stride(0),
                cache.stride(0), WIDE=True, PAIR=pools, HAS_LAST=True, HAS_NORM=True, HAS_FLOOR=False, HAS_LATENTS=True,
                HAS_PHASE_INDEX=False, ROPE=64, **sizes(form), ROWS=4, EACH=8, EARLY=True, SHARED=pools,
            )  # fmt: skip
    row, at = reference.known_tokens(
        x, last, requests if pools else None, positions if pools else None, state
    )
    pooled = reference.pool_pairs(x, gates, at, requests, positions, state) if pools else x[at]
    right = torch.zeros(rows, 512)
    right[row] = reference.rotated(pooled.bfloat16(), None, None, weight, 1e-6).float()
    assert (latents.float() - right).norm() / right.norm() < 2e-3
    assert (latents[4] == 0).all()
    turned = reference.rotated(latents[row], phases, row, None, 0.0)
    reference.insert_rows(turned, wanted, slots[row], form, PAGE)
    assert torch.equal(cache, wanted)


def read_values(text: str, constraints: str, given: list, **options: Any) -> Any:
    """Four pairs of each word times its factor, or factors of scales: by the cast back, whose instructions have a test."""
    if "e4m3x2" in text:
        factor = torch.from_numpy(given[0].data.astype(np.uint8)).view(torch.float8_e4m3fn)
        return Tensor(factor.float().numpy())
    words, factor = given[0].data.view(np.uint32), given[1].data
    if factor.dtype != np.float32:
        factor = values(factor.astype(np.int32)).float().numpy()[..., ::2]
    found = []
    for n in range(8):
        code = (words >> np.uint32(4 * n)) & np.uint32(15)
        size = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)[code & 7]
        found.append(np.where(code > 7, -size, size) * factor)
    both = torch.from_numpy(np.stack(found, -1)).bfloat16().view(torch.int32).numpy()
    return tuple(Tensor(both[..., i]) for i in range(4))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("form", [F.V41_NVFP4, F.INDEXER_MXFP4])
@pytest.mark.parametrize("page", [PAGE, 1])
def test_gathers(form, page, monkeypatch) -> None:
    monkeypatch.setitem(globals(), "PAGES", PAGE * PAGES // page)
    monkeypatch.setitem(globals(), "PAGE", page)
    rows = 21
    cache, _ = caches(form)
    x = torch.randn(PAGE * PAGES, form.channels).bfloat16()
    x[5] = -0.0
    reference.insert_rows(x, cache, torch.arange(PAGE * PAGES), form, PAGE)
    slots = torch.randperm(PAGE * PAGES)[:rows]
    slots[2], slots[9], slots[4] = -1, PAGE * PAGES, 5
    whole = torch.full((rows, form.channels + 16), 7.0).bfloat16()
    out = whole[:, : form.channels]
    wanted = torch.empty_like(out)
    reference.gather_rows(cache, slots, wanted, form, PAGE)
    given = sizes(form)
    del given["FORMAT"]
    joined = {
        "join": lambda x, y: Tensor(np.stack((x.data, y.data), -1)),
        "inline_asm_elementwise": read_values,
        "constexpr": lambda x: x,
    }
    with gluon_on_numpy("cache_gather_pairs", language=joined) as (kernel,):
        for program in range(-(-rows // 4)):
            PROGRAM["id"] = program
            kernel.cache_gather_pairs_kernel(
                flat(cache, np.int32), flat(cache, np.uint8), flat(slots[:, None], np.int64), flat(whole, np.int32), rows,
                PAGES, cache.stride(0) // 4, cache.stride(0), whole.stride(0) // 2, E4M3=form == F.V41_NVFP4, ROWS=4, **given,
            )  # fmt: skip
    assert torch.equal(out.view(torch.int16), wanted.view(torch.int16))
    assert (whole[:, form.channels :] == 7).all()
