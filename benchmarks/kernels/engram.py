"""Cases of Engram: hash, gather, gate."""

from __future__ import annotations

import torch
from harness import Built, Case, assert_repeats, same_bits
from quant import intact, room
from row_checks import assert_rows_alone, compiled, copy_of, eager

HIDDEN, MANY, VOCAB, FOLDED = 5120, 8192, 129_280, 99_092


def tables() -> tuple[torch.Tensor, ...]:
    """Map, multipliers, primes and offsets of layer 1 of the published model, the map at random."""
    token_map = torch.randint(0, FOLDED, (VOCAB,), device="cuda")
    multipliers = torch.tensor(
        [76632096046245, 4839876093313, 35959672319349, 73987337458391], device="cuda"
    )
    primes = torch.tensor([16_000_057 + 18 * i for i in range(24)], device="cuda")
    return token_map, multipliers, primes, torch.cumsum(primes, 0) - primes


def steps_hash(
    history: torch.Tensor,
    token_map: torch.Tensor,
    multipliers: torch.Tensor,
    primes: torch.Tensor,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """Rows in the operations of torch."""
    broken = ((history < 0) | (history >= len(token_map))).int().cummax(-1).values.bool()
    mixed = token_map[history.masked_fill(broken, 0)].masked_fill(broken, 2) * multipliers
    two = mixed[:, 0] ^ mixed[:, 1]
    three = two ^ mixed[:, 2]
    four = three ^ mixed[:, 3]
    return torch.stack((two, three, four), -1).repeat_interleave(8, -1) % primes + offsets


def by_definition(history: torch.Tensor, given: tuple[torch.Tensor, ...], pad: int) -> torch.Tensor:
    """Rows in Python's integers, wrapped to 64 bits."""
    token_map, multipliers, primes, offsets = (t.tolist() for t in given)
    rows = []
    for ids in history.tolist():
        broken, folded = False, []
        for i in ids:
            broken = broken or not 0 <= i < len(token_map)
            folded.append(pad if broken else token_map[i])
        wrapped = [
            (a * m + 2**63) % 2**64 - 2**63 for a, m in zip(folded, multipliers, strict=True)
        ]
        row, running = [], wrapped[0]
        for n in range(1, 4):
            running ^= wrapped[n]
            row += [
                running % p + o
                for p, o in zip(primes[8 * n - 8 : 8 * n], offsets[8 * n - 8 : 8 * n], strict=True)
            ]
        rows.append(row)
    return torch.tensor(rows)


def hash_rows(tokens: int, wrap: bool):
    """Builds the hash; with `wrap`, multipliers whose products do not fit."""

    def build(small: bool) -> Built:
        from deepinfer.kernels import engram_hash
        from deepinfer.kernels.triton import engram_launch as launch

        count = 300 if small else tokens
        given = list(tables())
        if wrap:
            given[1] = torch.randint(2**61, 2**62, (4,), device="cuda") * 2 + 1
        history = torch.randint(0, VOCAB, (count, 4), device="cuda")
        if small:
            history[::7, 1] = -1
            history[3::11, 2], history[5::13, 0] = VOCAB, -5
            history[::17, 3] = 2**40
        flat, whole = room(count, 24, torch.int64)
        run = lambda: launch.engram_hash(history, *given, 2, flat)  # noqa: E731

        def check():
            assert torch.equal(flat.cpu(), by_definition(history, tuple(given), 2))
            assert bool((flat >= 0).all())
            assert intact(whole)
            assert_repeats(run, flat)
            assert_rows_alone(
                lambda h: (engram_hash(h, *given, 2, backend="triton"),),
                [torch.randint(-9, VOCAB + 9, (1000, 4), device="cuda")],
            )
            assert engram_hash(history[:0], *given, 2).shape == (0, 24)
            return {"differing": 0.0}

        peers = {
            "torch": eager(steps_hash, history, *given),
            "compiled": compiled(steps_hash, history, *given),
        }
        return Built(
            run,
            check,
            0,
            history.nbytes + flat.nbytes,
            "none",
            {"copy": copy_of(history.nbytes + flat.nbytes), **peers},
        )

    return build


def steps_lookup(rows: torch.Tensor, table: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Gather and product in the operations of torch."""
    codes = table[rows].view(torch.float8_e4m3fn).float().unflatten(-1, (8, 32))
    factors = torch.exp2(scale[rows].float() - 127.0)
    return (codes * factors.unsqueeze(-1)).flatten(1).bfloat16()


def lookup(
    tokens: int,
    tuning: tuple[int, int, int, bool] | None,
    spread: int = 20_000_000,
    ordered: bool = False,
):
    """Builds the gather of 24 rows of 256 a token from a table of `spread` rows, at random or from the first on."""

    def build(small: bool) -> Built:
        from deepinfer.kernels import engram_lookup
        from deepinfer.kernels.reference.engram import engram_lookup as reference
        from deepinfer.kernels.triton import engram_launch as launch

        count, size = (100, 5000) if small else (tokens, spread)
        table = torch.randint(0, 256, (size, 256), device="cuda", dtype=torch.uint8)
        scale = torch.randint(100, 140, (size, 8), device="cuda", dtype=torch.uint8)
        rows = torch.randint(0, size, (count, 24), device="cuda")
        if ordered:
            rows = torch.arange(count * 24, device="cuda").view(count, 24) % size
        if small:
            scale[:3], scale[3:6] = 0, 255
            rows[0, :8] = torch.arange(8, device="cuda")
            rows[1, 3], rows[2, 5], rows[3, 7] = -1, size, 2**40
        out, whole = room(count, 24 * 256, torch.bfloat16)
        run = lambda: launch.engram_lookup(rows, table, scale, out, tuning)  # noqa: E731

        def check():
            wanted, found = reference(rows.cpu(), table.cpu(), scale.cpu()), out.cpu()
            assert torch.equal(found.isnan(), wanted.isnan())
            assert same_bits(found.nan_to_num(1.0), wanted.nan_to_num(1.0))
            assert intact(whole)
            assert_repeats(run, out)
            inside = torch.randint(-5, size, (1000, 24), device="cuda")
            assert_rows_alone(
                lambda r: (engram_lookup(r, table, scale, backend="triton"),), [inside]
            )
            assert engram_lookup(rows[:0], table, scale).shape == (0, 6144)
            wide = torch.full((size, 272), 0x7F, device="cuda", dtype=torch.uint8)
            wide[:, :256], wide[:, 256:264] = table, scale
            joined = engram_lookup(rows, wide[:, :256], wide[:, 256:264], backend="triton").cpu()
            assert same_bits(joined.nan_to_num(1.0), wanted.nan_to_num(1.0)), "rows apart differ"
            return {"differing": 0.0}

        peers = {
            "torch": eager(steps_lookup, rows, table, scale),
            "compiled": compiled(steps_lookup, rows, table, scale),
        }
        return Built(
            run,
            check,
            0,
            rows.numel() * (264 + 8 + 512),
            "none",
            {"copy": copy_of(rows.numel() * (264 + 8 + 512)), **peers},
        )

    return build


def steps_gate(
    streams: torch.Tensor, projected: torch.Tensor, q: torch.Tensor, k: torch.Tensor
) -> torch.Tensor:
    """The gate in the operations of torch, in the dtype of `q`."""
    kv = projected.to(q.dtype).unflatten(-1, (5, -1))
    key, value, wide = kv[:, :-1], kv[:, -1:], streams.to(q.dtype)
    dot = (wide * (q * k) * key).sum(-1)
    scale = (wide.square().mean(-1) + 1e-20) * (key.square().mean(-1) + 1e-20)
    dot = dot * torch.rsqrt(scale * wide.shape[-1])
    gate = torch.sigmoid(dot.sign() * dot.abs().clamp_min(1e-6).sqrt())
    return (wide + gate.unsqueeze(-1) * value).to(streams.dtype)


def gate(tokens: int, tuning: tuple[int, int] | None):
    """Builds the gate."""

    def build(small: bool) -> Built:
        from deepinfer.kernels import engram_gate
        from deepinfer.kernels.triton import engram_launch as launch

        count = 257 if small else tokens
        streams = torch.randn(count, 4, HIDDEN, device="cuda").bfloat16()
        projected = torch.randn(count, 5 * HIDDEN, device="cuda").bfloat16()
        q, k = (torch.randn(4, HIDDEN, device="cuda") for _ in range(2))
        flat, whole = room(count * 4, HIDDEN, torch.bfloat16)
        out = flat.view(count, 4, HIDDEN)
        run = lambda: launch.engram_gate(streams, projected, q, k, 1e-20, None, out, tuning)  # noqa: E731

        def check():
            wanted = steps_gate(streams.double(), projected, q.double(), k.double())
            error = (out.double() - wanted).abs() / (wanted.abs() * 2**-8 + 1e-4)
            assert float(error.max()) < 1.1, float(error.max())
            assert intact(whole)
            assert_repeats(run, out)
            image = torch.rand(count, device="cuda") > 0.5
            # With the same number of warps, which are part of the order of sums.
            kept = torch.empty_like(streams)
            launch.engram_gate(streams, projected, q, k, 1e-20, image, kept, tuning)
            assert same_bits(kept[image], streams[image]), "an image token changed"
            assert same_bits(kept[~image], out[~image])
            x, p = (
                torch.randn(1000, *t.shape[1:], device="cuda").bfloat16()
                for t in (streams, projected)
            )
            assert_rows_alone(lambda x, p: (engram_gate(x, p, q, k, backend="triton"),), [x, p])
            assert engram_gate(streams[:0], projected[:0], q, k).shape == (0, 4, HIDDEN)
            return {"half_steps": float(error.max())}

        peers = {
            "torch": eager(steps_gate, streams, projected, q, k),
            "compiled": compiled(steps_gate, streams, projected, q, k),
        }
        return Built(
            run,
            check,
            0,
            2 * streams.nbytes + projected.nbytes,
            "none",
            {"copy": copy_of(2 * streams.nbytes + projected.nbytes), **peers},
        )

    return build


def cases() -> list[Case]:
    """All of them."""
    found = [
        Case("engram_hash", f"{MANY} x 24", "table", hash_rows(MANY, False)),
        Case(
            "engram_hash",
            f"{MANY} x 24, products that wrap",
            "table",
            hash_rows(MANY, True),
            check_only=True,
        ),
    ]
    shape = f"{MANY} x 24 x 256 of"
    found.append(Case("engram_lookup", f"{shape} 20 M rows", "table", lookup(MANY, None)))
    # What bounds it: the same rows one behind the other, and at random in tables that a TLB holds.
    for rows, ordered in ((20_000_000, True), (2_000_000, False), (400_000, False)):
        name = f"{shape} {rows // 1000} thousand rows{' in order' * ordered}"
        found.append(Case("engram_lookup", name, "table", lookup(MANY, None, rows, ordered)))
    for tokens in (64, MANY):
        found.append(Case("engram_gate", f"{tokens} x 4 x {HIDDEN}", "table", gate(tokens, None)))
    return found
