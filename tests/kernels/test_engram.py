"""Engram by every backend: hashes in Python's integers, ids that are none, rows that are none, the gate, operations."""

from __future__ import annotations

import os

import pytest
import torch

from deepinfer.core.errors import ShapeError
from deepinfer.kernels import engram
from deepinfer.kernels.reference.cast import cast_back

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ["torch", "triton"] if INTERPRETED else ["torch"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
PRIMES = torch.tensor([101, 103, 107, 109, 113, 127])
OFFSETS = torch.cumsum(PRIMES, 0) - PRIMES
PAD = 3


def by_definition(history: torch.Tensor, token_map: torch.Tensor, multipliers: torch.Tensor) -> list[list[int]]:  # fmt: skip
    """Rows in integers of any size, wrapped to 64 bits by hand."""
    rows = []
    for ids in history.tolist():
        broken, wrapped = False, []
        for i, m in zip(ids, multipliers.tolist(), strict=True):
            broken = broken or not 0 <= i < len(token_map)
            product = (PAD if broken else int(token_map[i])) * m
            wrapped.append((product + 2**63) % 2**64 - 2**63)
        row, running = [], wrapped[0]
        for n in range(1, 4):
            running ^= wrapped[n]
            row += [running % int(PRIMES[c]) + int(OFFSETS[c]) for c in (2 * n - 2, 2 * n - 1)]
        rows.append(row)
    return rows


def tables(large: bool) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    most = 2**62 if large else 2**30
    multipliers = torch.randint(most // 2, most, (4,), generator=g) * 2 + 1
    return torch.randint(0, 40, (50,), generator=g), multipliers


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("large", [False, True])
def test_hashes_also_when_products_wrap(backend, large) -> None:
    token_map, multipliers = tables(large)
    history = torch.randint(-4, 55, (60, 4), generator=torch.Generator().manual_seed(1))
    wanted = by_definition(history, token_map, multipliers)
    wide = torch.full((60, 9), 7)
    wide[:, 2:6] = history
    for given in (history, wide[:, 2:6]):
        found = engram.engram_hash(
            given, token_map, multipliers, PRIMES, OFFSETS, PAD, backend=backend
        )
        assert found.tolist() == wanted
    if large:
        first = history[:, 0].clamp(0, 49)
        assert (token_map[first] * multipliers[0] < 0).any()  # some products did wrap
    assert (found >= OFFSETS).all()
    assert (found < OFFSETS + PRIMES).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_ids_that_are_none_break_the_ngram(backend) -> None:
    """A negative id must not read the map from its end, and nothing older than a break counts."""
    token_map, multipliers = tables(False)
    options = (token_map, multipliers, PRIMES, OFFSETS, PAD)
    history = torch.tensor(
        [[5, -1, 8, 9], [5, 50, 1, 2], [5, 2**40, -7, 49], [-1, 5, 6, 7], [-1] * 4]
    )
    found = engram.engram_hash(history, *options, backend=backend)
    assert found[0].tolist() == found[1].tolist() == found[2].tolist()
    assert found[3].tolist() == found[4].tolist()
    other = token_map.clone()
    other[-1] = (other[-1] + 1) % 40
    again = engram.engram_hash(history[:1], other, *options[1:], backend=backend)
    assert torch.equal(again, found[:1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_of_the_table(backend, dtype) -> None:
    g = torch.Generator().manual_seed(2)
    joined = torch.randint(0, 256, (30, 80), generator=g, dtype=torch.uint8)
    table, scale = joined[:, :64], joined[:, 70:72]
    joined[:, 70:72] = torch.randint(110, 134, (30, 2), generator=g, dtype=torch.uint8)
    scale[0], scale[1] = 0, 255
    rows = torch.randint(0, 30, (5, 6), generator=g)
    rows[0, :4] = torch.tensor([-1, 30, 2**40, 0])
    found = engram.engram_lookup(rows, table, scale, dtype=dtype, backend=backend)
    every = cast_back(table.view(torch.float8_e4m3fn), scale.contiguous(), dtype=dtype)
    wanted = every[rows.masked_fill((rows < 0) | (rows >= 30), 0)]
    wanted[0, :3] = 0
    assert found.shape == (5, 384)
    assert found.dtype == dtype
    assert torch.equal(found.nan_to_num(7), wanted.flatten(1).nan_to_num(7))
    typed = engram.engram_lookup(
        rows, table.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu), dtype=dtype, backend=backend
    )  # fmt: skip
    assert torch.equal(typed.nan_to_num(7), found.nan_to_num(7))


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("tuning", [(16, 4, 4, False), (4, 1, 3, True), (2, 1, 2, False)])
def test_programs_that_gather_several_times_give_the_same(tuning) -> None:
    from deepinfer.kernels.triton import engram_launch

    g = torch.Generator().manual_seed(5)
    table = torch.randint(0, 120, (50, 64), generator=g, dtype=torch.uint8)
    scale = torch.randint(110, 130, (50, 2), generator=g, dtype=torch.uint8)
    rows = torch.randint(-2, 53, (7, 24), generator=g)
    out = torch.full((7, 24 * 64), 7.0)
    engram_launch.engram_lookup(rows, table, scale, out, tuning)
    wanted = engram.engram_lookup(rows, table, scale, dtype=torch.float32, backend="torch")
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("n", "channels"), [(4, 96), (4, 64), (2, 640)])
def test_the_gate(backend, n, channels) -> None:
    g = torch.Generator().manual_seed(3)
    streams = torch.randn(9, n + 1, channels, generator=g)[:, :n]
    projected = torch.randn(9, (n + 1) * channels + 2, generator=g)[:, 1:-1]
    q, k = torch.randn(n, channels, generator=g), torch.randn(n, channels, generator=g)
    x, kv = streams.double(), projected.double().unflatten(1, (n + 1, channels))
    key, value = kv[:, :n], kv[:, n:]
    d = (x * q * key * k).sum(-1) / (channels**0.5)
    d = d / (x.square().mean(-1).sqrt() * key.square().mean(-1).sqrt())
    gate = torch.sigmoid(d.sign() * d.abs().clamp_min(1e-6).sqrt())
    wanted = x + gate.unsqueeze(-1) * value
    found = engram.engram_gate(streams, projected, q, k, backend=backend)
    assert torch.allclose(found.double(), wanted, atol=3e-6)
    images = torch.arange(9) % 3 == 1
    kept = engram.engram_gate(streams, projected, q, k, is_image=images, backend=backend)
    assert torch.equal(kept[images], streams[images])
    assert torch.equal(kept[~images], found[~images])
    spoiled = streams.clone()
    spoiled[::2] = torch.nan
    beside = engram.engram_gate(spoiled, projected, q, k, backend=backend)
    assert torch.equal(beside[1::2], found[1::2])
    assert beside[::2].isnan().all()


@pytest.mark.parametrize("backend", [None, "torch"])
def test_no_tokens(backend) -> None:
    token_map, multipliers = tables(False)
    none = torch.empty(0, 4, dtype=torch.int64)
    rows = engram.engram_hash(none, token_map, multipliers, PRIMES, OFFSETS, PAD, backend=backend)
    assert rows.shape == (0, 6)
    table = torch.zeros(3, 64, dtype=torch.uint8)
    assert engram.engram_lookup(rows, table, table[:, :2], backend=backend).shape == (0, 384)
    q = torch.ones(4, 64)
    found = engram.engram_gate(torch.empty(0, 4, 64), torch.empty(0, 320), q, q, backend=backend)
    assert found.shape == (0, 4, 64)


def test_wrong_arguments() -> None:
    token_map, multipliers = tables(False)
    history = torch.zeros(3, 4, dtype=torch.int64)
    with pytest.raises(ShapeError, match="multiple of 3 columns"):
        engram.engram_hash(history, token_map, multipliers, PRIMES[:5], OFFSETS[:5], PAD)
    with pytest.raises(ShapeError, match="multipliers has shape"):
        engram.engram_hash(history, token_map, multipliers[:3], PRIMES, OFFSETS, PAD)
    with pytest.raises(ShapeError, match="history has dtype int32"):
        engram.engram_hash(history.int(), token_map, multipliers, PRIMES, OFFSETS, PAD)
    table = torch.zeros(3, 64, dtype=torch.uint8)
    with pytest.raises(ShapeError, match="groups must be of one size"):
        engram.engram_lookup(history, table, table[:, :3])
    with pytest.raises(ShapeError, match="projected has shape"):
        engram.engram_gate(torch.ones(3, 4, 64), torch.ones(3, 256), table, table)


@pytest.mark.skipif(INTERPRETED, reason="the compiler of torch needs no interpreter")
def test_in_torch_compile() -> None:
    token_map, multipliers = tables(True)
    history = torch.randint(-4, 55, (7, 4), generator=torch.Generator().manual_seed(1))
    table = torch.arange(700 * 64).to(torch.uint8).view(700, 64) % 120
    scale = torch.full((700, 2), 120, dtype=torch.uint8)
    streams, q = torch.randn(7, 4, 64), torch.ones(4, 64)

    def step(history: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
        rows = engram.engram_hash(history, token_map, multipliers, PRIMES, OFFSETS, PAD)
        found = engram.engram_lookup(rows, table, scale, dtype=torch.float32)
        return engram.engram_gate(streams, found[:, :320], q, q)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(history, streams), step(history, streams))
    ops, rows = torch.ops.deepinfer, torch.empty(7, 6, dtype=torch.int64)
    args = (None, history, token_map, multipliers, PRIMES, OFFSETS, PAD, rows)
    torch.library.opcheck(ops.engram_hash, args)
    torch.library.opcheck(
        ops.engram_lookup, (None, rows.clone().zero_(), table, scale, torch.empty(7, 384))
    )
    args = (None, streams, torch.randn(7, 320), q, q, 1e-20, None, torch.empty_like(streams))
    torch.library.opcheck(ops.engram_gate, args)
