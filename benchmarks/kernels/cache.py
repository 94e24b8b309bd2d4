"""Cases of the cache kernels: inserts and gathers of each format, the compressor."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from harness import Built, Case, assert_repeats, same_bits

from deepinfer.kernels.formats import KVCacheFormat
from deepinfer.kernels.reference import cache as reference

F = KVCacheFormat
PAGE = 64
PEERS_AT = 32768  # rows at which torch.compile is a peer: each shape takes it many seconds


def pages_for(rows: int, form: KVCacheFormat) -> torch.Tensor:
    """A poisoned cache with room for the rows, and a page of another cache behind each of its pages."""
    count = -(-2 * rows // PAGE)
    size = form.page_bytes(PAGE)
    return torch.full((count, size + 512), 0xFF, device="cuda", dtype=torch.uint8)[:, :size]


def slots_for(rows: int, small: bool) -> torch.Tensor:
    """Distinct slots in runs, as prefill writes them; when small, some before and behind the cache."""
    slots = torch.arange(rows, device="cuda")
    pages = torch.randperm(-(-2 * rows // PAGE), device="cuda")[: -(-rows // PAGE)]
    slots = pages[slots // PAGE] * PAGE + slots % PAGE
    if small:
        slots[torch.rand(rows, device="cuda") < 0.1] = -1
        slots[torch.rand(rows, device="cuda") < 0.1] = -(-2 * rows // PAGE) * PAGE + 5
    return slots


def phases_for(rows: int) -> torch.Tensor:
    """Rotations of rows."""
    angle = torch.rand(rows, 32, device="cuda") * 6.28
    return torch.stack((angle.cos(), angle.sin()), -1).contiguous()


def values_for(rows: int, channels: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows whose groups differ in size."""
    x = torch.randn(rows, channels, device="cuda")
    x *= torch.exp2(torch.randint(-9, 9, (rows, channels // 16), device="cuda")).repeat_interleave(
        16, 1
    )
    x[0], x[1, ::2], x[2, :7] = 0.0, -0.0, 448.0
    return x.to(dtype)


def copy_of(size_bytes: int) -> Mapping[str, Callable]:
    """A copy that moves as many bytes."""

    def make():
        x = torch.randint(0, 255, (size_bytes // 2,), device="cuda", dtype=torch.uint8)
        y = torch.empty_like(x)
        return lambda: y.copy_(x)

    return {"copy": make}


def eager(form: KVCacheFormat, norm: bool, rope: bool) -> Callable:
    """The same in torch, without masks, to be compiled."""

    def run(k, weight, phases, data, slots):
        if norm or rope:
            k = reference.rotated(
                k, phases if rope else None, None, weight if norm else None, 1e-20
            )
        for part, (begin, stride) in zip(
            reference.encode_rows(k, form), reference._offsets(form, PAGE), strict=True
        ):
            if part.shape[1]:
                at = begin + slots % PAGE * stride
                span = torch.arange(part.shape[1], device=k.device)
                data[(slots // PAGE)[:, None], at[:, None] + span] = part

    return run


def insert(form: KVCacheFormat, rows: int, norm: bool, rope: bool, tuning: tuple[int, ...]):
    """Builds an insert."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.triton import cache_launch as launch

        count = min(rows, 777) if small else rows
        k = values_for(count, form.channels, torch.bfloat16)
        data, slots, phases = pages_for(count, form), slots_for(count, small), phases_for(count)
        weight = torch.rand(form.channels, device="cuda").bfloat16() + 0.5 if norm else None
        conf = launch.CacheTuning(*tuning) if tuning else None

        def run():
            launch.insert_rows(
                k, data, slots, form, PAGE, conf, kind=k.dtype, weight=weight, eps=1e-20,
                phases=phases if rope else None,
            )  # fmt: skip

        def check():
            wanted = torch.full_like(data, 0xFF)
            turned = reference.rotated(k, phases if rope else None, None, weight, 1e-20)
            reference.insert_rows(turned, wanted, slots, form, PAGE)
            differing = (data != wanted).float().mean().item()
            if not norm:
                assert differing == 0, f"{differing} of the bytes differ from the casts"
            known = slots[(slots >= 0) & (slots < len(data) * PAGE)]
            a = torch.empty(len(known), form.channels, device="cuda")
            b = torch.empty_like(a)
            reference.gather_rows(data, known, a, form, PAGE)
            reference.gather_rows(wanted, known, b, form, PAGE)
            error = ((a - b).norm() / b.norm()).item()
            assert error < 2e-2, f"relative error {error}"
            untouched = torch.full_like(data, 0xFF)
            reference.insert_rows(turned * 0, untouched, slots, form, PAGE)
            empty = untouched == 0xFF
            assert bool((data[empty] == 0xFF).all()), "bytes outside of the rows were written"
            first = data.clone()
            for _ in range(20):
                data[:] = torch.where(empty, 0xFF, 0x11)
                run()
                assert same_bits(data, first), "repeats differ"
            return {"differing_bytes": differing, "relative": error}

        def compiled():
            function = torch.compile(eager(form, norm, rope))
            return lambda: function(k, weight, phases, data, slots)

        size = count * (2 * form.channels + form.bytes_per_token + 8 + (256 if rope else 0))
        more = {"compiled": compiled} if count >= PEERS_AT else {}
        return Built(run, check, size_bytes=size, peers={**copy_of(size), **more})

    return build


def gather(form: KVCacheFormat, rows: int, tuning: tuple[int, ...]):
    """Builds a gather of random slots."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.triton import cache_launch as launch

        count = 777 if small else rows
        data, slots = pages_for(count, form), slots_for(count, False)
        reference.insert_rows(
            values_for(count, form.channels, torch.bfloat16), data, slots, form, PAGE
        )
        slots = slots[torch.randperm(count, device="cuda")]
        if small:
            slots[torch.rand(count, device="cuda") < 0.1] = -1
            slots[torch.rand(count, device="cuda") < 0.1] = len(data) * PAGE
        out = torch.full((count, form.channels), 777.0, device="cuda", dtype=torch.bfloat16)
        conf = launch.CacheTuning(*tuning) if tuning else None
        run = lambda: launch.gather_rows(data, slots, out, form, PAGE, conf)  # noqa: E731

        def check():
            wanted = torch.empty_like(out)
            reference.gather_rows(data, slots, wanted, form, PAGE)
            assert same_bits(out, wanted), "rows differ from the casts back"
            assert_repeats(run, out)
            return {"relative": 0.0}

        def compiled():
            offsets = reference._offsets(form, PAGE)
            sizes = (form.code_bytes, form.scale_bytes, 2 * form.tail_channels)

            def eager_gather(data, slots):
                parts = [
                    data[reference._places(slots, offset, size, PAGE)]
                    for offset, size in zip(offsets, sizes, strict=True)
                ]
                return reference.decode_rows(parts[0], parts[1], parts[2], form).to(torch.bfloat16)

            function = torch.compile(eager_gather)
            return lambda: function(data, slots)

        size = count * (2 * form.channels + form.bytes_per_token + 8)
        more = {"compiled": compiled} if count >= PEERS_AT else {}
        return Built(run, check, size_bytes=size, peers={**copy_of(size), **more})

    return build


def compress(tokens: int, pair: bool, tuning: tuple[int, ...], early: bool = True):
    """Builds the compressor over requests of 1,024 tokens."""
    form = F.V41_NVFP4

    def build(small: bool) -> Built:
        from deepinfer.kernels.triton import cache_launch as launch

        count = 1500 if small else tokens
        each = 100 if small else 1024
        requests = torch.arange(count, device="cuda") // each
        starts = torch.randint(0, 9, (int(requests[-1]) + 1,), device="cuda")
        positions = torch.arange(count, device="cuda") % each + starts[requests]
        both = torch.randn(count, 2, 512, device="cuda")
        values, gates = both[:, 0], both[:, 1]
        state = torch.randn(len(starts), 8, 2, 512, device="cuda")
        first_state = state.clone()
        last = (positions % 2 == 1).nonzero().flatten() if pair else None
        rows = count if last is None else len(last)
        data, slots, phases = pages_for(rows, form), slots_for(rows, small), phases_for(rows)
        weight = torch.rand(512, device="cuda").bfloat16() + 0.5
        latents = torch.full((rows, 512), 777.0, device="cuda", dtype=torch.bfloat16)
        conf = launch.CacheTuning(*tuning) if tuning else None

        def run():
            launch.insert_rows(
                values, data, slots, form, PAGE, conf, kind=torch.bfloat16, gates=gates if pair else None,
                state=state if pair else None, requests=requests, last=last, weight=weight, eps=1e-20,
                phases=phases, positions=positions, latents=latents, early=early,
            )  # fmt: skip
            if pair:
                launch.keep_state(values, gates, requests, positions, state, early=early)

        def check():
            at = torch.arange(count, device="cuda") if last is None else last
            pooled = values[at]
            if pair:
                after = state.clone()
                pooled = reference.pool_pairs(values, gates, at, requests, positions, first_state)
                reference.keep_state(values, gates, requests, positions, first_state)
                assert same_bits(after, first_state), "the state differs"
                state.copy_(first_state)
            right = reference.rotated(pooled.bfloat16(), None, None, weight, 1e-20)
            # The state was overwritten by the first run: rows whose partner waited there are compared in that run only.
            error = ((latents.float() - right.float()).norm() / right.float().norm()).item()
            assert error < 3e-3, f"latents differ by {error}"
            wanted = torch.full_like(data, 0xFF)
            reference.insert_rows(
                reference.rotated(latents, phases, None, None, 0.0), wanted, slots, form, PAGE
            )
            assert same_bits(data, wanted), "the bytes are not those of the latents"
            run()
            assert_repeats(run, latents)
            return {"relative": error}

        def compiled():
            def eager_compress(values, gates, at, state):
                pooled = values[at]
                if pair:
                    pooled = reference.pool_pairs(values, gates, at, requests, positions, state)
                found = reference.rotated(pooled.bfloat16(), None, None, weight, 1e-20)
                turned = reference.rotated(found, phases, None, None, 0.0)
                for part, (begin, stride) in zip(
                    reference.encode_rows(turned, form),
                    reference._offsets(form, PAGE),
                    strict=True,
                ):
                    if part.shape[1]:
                        to = begin + slots % PAGE * stride
                        span = torch.arange(part.shape[1], device="cuda")
                        data[(slots // PAGE)[:, None], to[:, None] + span] = part
                return found

            function = torch.compile(eager_compress)
            at = torch.arange(count, device="cuda") if last is None else last
            return lambda: function(values, gates, at, state)

        each_row = (4 if pair else 1) * 512 * 4 + 1024 + form.bytes_per_token + 8 + 256
        size = rows * each_row
        more = {"compiled": compiled} if count == PEERS_AT else {}
        return Built(run, check, size_bytes=size, peers={**copy_of(size), **more})

    return build


def cases() -> list[Case]:
    """Prefill first, then decode; of each the entry of the tables and the tuning next to it."""
    found = []

    def add(op: str, shape: str, build: Callable, *tunings: tuple[int, ...]) -> None:
        found.append(Case(op, shape, "table", build(())))
        for tuning in tunings:
            single = " one by one" if len(tuning) > 2 and not tuning[2] else ""
            each = " shared" if len(tuning) > 3 else ""
            variant = f"{tuning[0]} rows {tuning[1]} warps{single}{each}"
            found.append(Case(op, shape, variant, build(tuning)))

    def inserts(form: F, rows: int, norm: bool, rope: bool, *tunings: tuple[int, ...]) -> None:
        op = "rope_quant_insert" if norm or rope else "quantize_and_insert_k_cache"
        shape = f"{form.name}{' norm' if norm else ''} {rows} rows"
        add(op, shape, lambda t: insert(form, rows, norm, rope, t), *tunings)

    def latents(tokens: int, pair: bool, *tunings: tuple[int, ...]) -> None:
        shape = f"{tokens} tokens, {'pairs' if pair else 'single'}"
        add("compress_norm", shape, lambda t: compress(tokens, pair, t), *tunings)

    def gathers(form: F, rows: int, *tunings: tuple[int, ...]) -> None:
        op, shape = "gather_and_dequantize_k_cache", f"{form.name} {rows} rows"
        add(op, shape, lambda t: gather(form, rows, t), *tunings)

    # "One by one": values rounded and coded one at a time, not two; pairs of a thread side by side.
    spread = True, 8, True
    latents(32768, True, (2, 2, *spread))
    inserts(F.V41_NVFP4, 32768, False, True, (4, 4, *spread))
    inserts(F.V41_MXFP8, 32768, True, True, (4, 4, *spread))
    latents(32768, False, (2, 2, *spread))
    gathers(F.V41_NVFP4, 65536, (8, 4, False))
    inserts(F.INDEXER_MXFP4, 32768, True, True, (16, 4))
    inserts(F.V41_NVFP4, 32768, False, False)
    inserts(F.V41_MXFP8, 32768, False, False)
    latents(8192, True)
    latents(64, True)
    inserts(F.V41_MXFP8, 64, True, True)
    gathers(F.V41_MXFP8, 65536)
    inserts(F.V4_FP8, 32768, False, True)
    for form, norm in ((F.V41_NVFP4, False), (F.V41_MXFP8, True)):
        build = insert(form, 777, norm, True, (1, 1, False))
        found.append(Case("rope_quant_insert", f"{form.name} 777 rows", "one by one", build, True))
    for pair in (True, False):
        build = compress(1500, pair, (1, 2, False))
        name = f"1500 tokens, {'pairs' if pair else 'single'}"
        found.append(Case("compress_norm", name, "one by one", build, True))
    for form in (F.V32_FP8, F.INDEXER_FP8):
        build = insert(form, 777, False, True, (4, 4))
        found.append(Case("rope_quant_insert", f"{form.name} 777 rows", "check", build, True))
    for form in (F.V4_FP8, F.V32_FP8, F.INDEXER_FP8, F.INDEXER_MXFP4):
        build = gather(form, 777, ())
        found.append(
            Case("gather_and_dequantize_k_cache", f"{form.name} 777 rows", "check", build, True)
        )
    return found
