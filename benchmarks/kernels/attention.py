"""Sparse MLA decode over the 528-byte and 288-byte records, and the merge of partial states."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from harness import Built, Case, assert_repeats, calc_diff, same_bits

from deepinfer.kernels.attention import (
    MLASchedMeta,
    flash_mla_with_kvcache,
    get_mla_metadata,
    merge_attn_states,
)
from deepinfer.kernels.formats import KVCacheFormat
from deepinfer.kernels.reference import attention as reference
from deepinfer.kernels.reference.cache import encode_rows

FP8, FP4 = KVCacheFormat.V41_MXFP8, KVCacheFormat.V41_NVFP4
# FlashMLA from source on an H200 with the record of 584 bytes, 64 heads, 128 + 512 keys, in ms.
FLASHMLA = {(64, 1): 0.0483, (64, 4): 0.0911, (256, 1): 0.0908, (256, 4): 0.329}


def make_cache(pages: int, page: int, form: KVCacheFormat, *, gap: int = 0) -> torch.Tensor:
    """Random records in every slot, poisoned with NaN scales in the odd ones."""
    cache = torch.empty((pages, form.page_bytes(page) + gap), dtype=torch.uint8, device="cuda")
    cache.fill_(255)
    step = max(1, (1 << 16) // page)
    for low in range(0, pages, step):
        part = cache[low : low + step]
        rows = 0.1 * torch.randn((len(part) * page, 512), device="cuda")
        codes, scales, _ = encode_rows(rows, form)
        scales[1::2] = 255 if form is FP8 else 127
        part[:, : page * form.code_bytes] = codes.view(len(part), -1)
        end = page * form.bytes_per_token
        part[:, page * form.code_bytes : end] = scales.view(len(part), -1)
    return cache


def even_slots(shape: tuple[int, ...], slots: int) -> torch.Tensor:
    """Slots that are not poisoned."""
    return 2 * torch.randint(0, slots // 2, shape, device="cuda", dtype=torch.int32)


def wanted(
    q, cache, indices, form, page, more, sink, phases, lengths=None, more_lengths=None, scale=None
):
    """Output and log-sum-exp in fp32 on the dequantised rows."""
    rows = q.shape[0] * q.shape[1]
    flat = q.reshape(rows, *q.shape[2:])
    scopes = [(cache, indices.reshape(rows, -1), lengths, form, page)]
    if more is not None:
        scopes.append((more[0], more[1].reshape(rows, -1), more_lengths, more[2], more[3]))
    out = torch.empty(flat.shape, device=q.device)
    lse = torch.empty(flat.shape[:2], device=q.device)
    reference.attend_cached(flat, scopes, sink, phases, scale or 512**-0.5, out, lse)
    return out.view(q.shape), lse.view(*q.shape[:3]).transpose(1, 2)


def compare(out, lse, right, right_lse) -> dict[str, float]:
    """Cosine difference and largest errors; raises AssertionError beyond the bars."""
    out, right = out.float(), right.float()
    assert torch.equal(out.isnan(), right.isnan()), "NaN elsewhere than expected"
    diff = calc_diff(out.nan_to_num(), right.nan_to_num())
    error = (out - right).abs().nan_to_num()
    bad = int(((error > 1e-3) & (error > right.abs().nan_to_num() * 2.01 / 128)).sum())
    same = (lse == right_lse) | (lse.isnan() & right_lse.isnan())
    lse_error = torch.where(same, 0.0, (lse - right_lse).abs())
    bad_lse = int(((lse_error > 1e-6) & ~(lse_error <= right_lse.abs() * 8.01 / 65536)).sum())
    assert diff < 5e-6, (
        f"cosine difference {diff:.2e}, {bad} bad elements, {bad_lse} bad lse, largest {float(error.max()):.3g}"
    )
    assert not bad, (
        f"{bad} elements differ by more than 1e-3 and 2/128, largest {float(error.max()):.3g}"
    )
    assert not bad_lse, f"{bad_lse} log-sum-exps differ, largest {float(lse_error.max()):.3g}"
    return {"diff": diff, "max_error": float(error.max()), "max_lse_error": float(lse_error.max())}


def decode(
    small: bool,
    *,
    batch: int,
    s_q: int = 1,
    heads: int = 64,
    more_form: KVCacheFormat = FP8,
    split: int | None = None,
    portable: bool = False,
    tuning: object = None,
) -> Built:
    """Window of 128 neighbours and 512 random rows of a pool."""
    page, window, pool = 64, 128, 512
    slots = 1 << 17
    cache = make_cache(2 * (batch + 8) * (window + 8) // page + 2, page, FP8)
    more = make_cache(slots // page, page, more_form)
    q = 5 * torch.randn((batch, s_q, heads, 512), device="cuda", dtype=torch.bfloat16)
    at = torch.arange(batch, device="cuda")[:, None, None] * (window + 8)
    at = at + torch.arange(s_q, device="cuda")[:, None] + torch.arange(window, device="cuda")
    indices = (2 * at).to(torch.int32)
    more_indices = even_slots((batch, s_q, pool), slots)
    sink = torch.randn(heads, device="cuda")
    angle = torch.randn((batch * s_q, 32), device="cuda")
    phases = torch.stack((angle.cos(), angle.sin()), -1)
    out = torch.full_like(q, 777.0)
    meta = None if split is None else MLASchedMeta(split)
    found = {}

    def call() -> None:
        _, found["lse"] = flash_mla_with_kvcache(
            q, cache, indices, page_size=page, attn_sink=sink, extra_k_cache=more,
            extra_indices_in_kvcache=more_indices, extra_format=more_form, phases=phases, sched_meta=meta, out=out,
            backend="portable" if portable else None,
        )  # fmt: skip

    def tuned() -> None:
        from deepinfer.kernels.triton import mla_decode_launch as launch

        rows = batch * s_q
        lse = torch.empty((batch, s_q, heads), device="cuda")
        launch.decode(
            q.view(rows, heads, 512),
            launch.Scope(cache, indices.view(rows, -1), None, False, page),
            launch.Scope(more, more_indices.view(rows, -1), None, more_form is FP4, page),
            launch.Ends(sink, phases, None), 512**-0.5, -1 if split is None else split,
            out.view(rows, heads, 512), lse.view(rows, heads), tuning,
        )  # fmt: skip
        found["lse"] = lse.transpose(1, 2)

    run = call if tuning is None else tuned

    def check() -> dict[str, float]:
        first, lse = out.clone(), found["lse"].clone()
        right = wanted(
            q, cache, indices, FP8, page, (more, more_indices, more_form, page), sink, phases
        )
        figures = compare(first, lse, *right)
        assert_repeats(run, out)
        assert same_bits(out, first), "another run differs"
        return figures

    def plain(compiled: bool) -> Callable[[], None]:
        rows = batch * s_q
        near = torch.randn((cache.shape[0] * page, 512), device="cuda", dtype=torch.bfloat16)
        far = torch.randn((slots, 512), device="cuda", dtype=torch.bfloat16)
        flat_q = q.view(rows, heads, 512)
        i, j = indices.view(-1).long(), more_indices.view(-1).long()

        def eager():
            keys = torch.cat((near[i].view(rows, window, 512), far[j].view(rows, pool, 512)), 1)
            logits = torch.bmm(flat_q, keys.transpose(1, 2)).float() * 512**-0.5
            top = torch.maximum(logits.amax(-1, keepdim=True), sink[:, None])
            shares = torch.exp(logits - top)
            total = shares.sum(-1, keepdim=True) + torch.exp(sink[:, None] - top)
            return torch.bmm((shares / total).to(torch.bfloat16), keys)

        call = torch.compile(eager, dynamic=False) if compiled else eager
        call()
        return call

    rows = batch * s_q
    record = more_form.bytes_per_token
    return Built(
        run=run,
        check=check,
        flops=2.0 * rows * heads * (window + pool) * 1024,
        size_bytes=rows * (window * 528 + pool * record + 2 * heads * 1024 + 4 * (window + pool)),
        peak="bf16",
        peers={"torch": partial(plain, False), "compiled": partial(plain, True)},
    )


def contract_case(
    small: bool, *, backend: str, heads: int, form: KVCacheFormat, split: int
) -> Built:
    """Pages of odd sizes that lie apart, wild indices, lengths, sinks of all kinds, empty rows, s_q of 3."""
    batch, s_q = 37, 3
    page, more_page = 61, 5
    cache = make_cache(40, page, FP8, gap=16 * 7 - (-page * 528) % 16)
    gap = (-more_page * form.bytes_per_token) % 16
    more = make_cache(400, more_page, form, gap=gap)
    q = 5 * torch.randn((batch, s_q, heads, 512), device="cuda", dtype=torch.bfloat16)
    indices = even_slots((batch, s_q, 100), 40 * page)
    wild = torch.tensor([-(2**31), -123456, -1, 40 * page, 114514, 2**31 - 1], device="cuda")
    some = torch.rand(indices.shape, device="cuda") < 0.2
    indices[some] = wild[torch.randint(0, 6, indices.shape, device="cuda")][some].to(torch.int32)
    more_indices = even_slots((batch, s_q, 200), 400 * more_page)
    wild[3] = 400 * more_page
    some = torch.rand(more_indices.shape, device="cuda") < 0.2
    more_indices[some] = wild[torch.randint(0, 6, more_indices.shape, device="cuda")][some].to(torch.int32)  # fmt: skip
    indices[3] = -1
    more_indices[3] = -1
    indices[4, :, :64] = -1  # the first tile has no key
    indices[5] = -1
    more_indices[6, :, :64] = 2**31 - 1
    indices[7, 0] = indices[7, 0, 0]  # one slot many times
    lengths = torch.randint(0, 101, (batch, s_q), device="cuda", dtype=torch.int32)
    more_lengths = torch.randint(0, 201, (batch, s_q), device="cuda", dtype=torch.int32)
    lengths[8], more_lengths[8] = 0, 0
    lengths[9], more_lengths[9] = 0, 1
    lengths[10], more_lengths[10] = 100, 0
    lengths[11] = -5
    lengths[12], more_lengths[12] = 1 << 30, 1 << 30
    sink = torch.randn(heads, device="cuda")
    sink[:5] = torch.tensor([math.inf, -math.inf, 1e38, -1e38, 3.4e38], device="cuda")
    entries = torch.randint(0, 500, (batch, s_q), device="cuda", dtype=torch.int32)
    angle = torch.randn((500, 32), device="cuda")
    phases = torch.stack((angle.cos(), angle.sin()), -1)
    big = torch.full((batch, s_q, heads + 1, 520), 777.0, device="cuda", dtype=torch.bfloat16)
    out = big[:, :, :heads, :512]
    found = {}

    def run() -> None:
        _, found["lse"] = flash_mla_with_kvcache(
            q, cache, indices, page_size=page, attn_sink=sink, topk_length=lengths, extra_k_cache=more,
            extra_indices_in_kvcache=more_indices, extra_topk_length=more_lengths, extra_page_size=more_page,
            extra_format=form, phases=phases, phase_index=entries, sched_meta=MLASchedMeta(split), out=out,
            backend=backend,
        )  # fmt: skip

    def check() -> dict[str, float]:
        right = wanted(
            q, cache, indices, FP8, page, (more, more_indices, form, more_page), sink,
            phases[entries.view(-1).long()], lengths.view(-1), more_lengths.view(-1),
        )  # fmt: skip
        figures = compare(out, found["lse"], *right)
        assert bool((out[3] == 0).all() and (found["lse"][3] == math.inf).all())
        assert bool((out[8] == 0).all() and (out[:, :, 0] == 0).all())
        assert bool((big[:, :, heads] == 777).all() and (big[..., 512:] == 777).all()), (
            "it wrote beside the output"
        )
        nothing = q[:0]
        empty, _ = flash_mla_with_kvcache(
            nothing, cache, indices[:0], page_size=page, backend=backend
        )
        assert empty.shape == nothing.shape
        q2 = q[:5].clone()
        alone, lse = flash_mla_with_kvcache(q2, cache, indices[:5], page_size=page, backend=backend, topk_length=lengths[:5, 0].contiguous())  # fmt: skip
        right = wanted(q2, cache, indices[:5], FP8, page, None, None, None, lengths[:5, :1].expand(5, s_q).reshape(-1))  # fmt: skip
        compare(alone, lse, *right)
        return figures

    return Built(run=run, check=check)


def far_case(small: bool, *, backend: str, heads: int, form: KVCacheFormat) -> Built:
    """Pages behind 2^31 bytes."""
    page = 64
    pages = 5 * (1 << 29) // form.page_bytes(page) + 1
    more = torch.full((pages, form.page_bytes(page)), 255, dtype=torch.uint8, device="cuda")
    chosen = torch.randint(0, pages, (64,), device="cuda")
    chosen[0] = pages - 1
    more[chosen] = make_cache(64, page, form)
    cache = make_cache(4, page, FP8)
    q = 5 * torch.randn((20, 1, heads, 512), device="cuda", dtype=torch.bfloat16)
    indices = even_slots((20, 1, 64), 4 * page)
    of = torch.randint(0, 64, (20, 1, 128), device="cuda")
    more_indices = (chosen[of] * page + even_slots((20, 1, 128), page)).to(torch.int32)
    found = {}

    def run() -> None:
        found["out"], found["lse"] = flash_mla_with_kvcache(
            q, cache, indices, page_size=page, extra_k_cache=more, extra_indices_in_kvcache=more_indices,
            extra_format=form, backend=backend,
        )  # fmt: skip

    def check() -> dict[str, float]:
        right = wanted(q, cache, indices, FP8, page, (more, more_indices, form, page), None, None)
        return compare(found["out"], found["lse"], *right)

    return Built(run=run, check=check)


def invariance_case(small: bool, *, backend: str, heads: int, form: KVCacheFormat) -> Built:
    """Bits of a row over numbers of rows, orders, and NaN neighbours."""
    page, rows = 64, 1000
    cache, more = make_cache(64, page, FP8), make_cache(512, page, form)
    q = 5 * torch.randn((rows, 1, heads, 512), device="cuda", dtype=torch.bfloat16)
    indices = even_slots((rows, 1, 128), 64 * page)
    more_indices = even_slots((rows, 1, 512), 512 * page)
    sink = torch.randn(heads, device="cuda")
    keys = 640
    meta, _ = get_mla_metadata(rows, heads, keys, batch_invariant=True)

    def call(part, queries=None):
        out, lse = flash_mla_with_kvcache(
            (q if queries is None else queries)[part], cache, indices[part], page_size=page, attn_sink=sink,
            extra_k_cache=more, extra_indices_in_kvcache=more_indices[part], extra_format=form, sched_meta=meta,
            backend=backend,
        )  # fmt: skip

        return out, lse.transpose(1, 2).contiguous()

    whole = {}

    def run() -> None:
        whole["out"], whole["lse"] = call(slice(None))

    def check() -> dict[str, float]:
        for m in (1, 2, 3, 15, 16, 17, 63, 64, 65, 128, 257):
            low = int(torch.randint(0, rows - m, ()))
            out, lse = call(slice(low, low + m))
            assert same_bits(out, whole["out"][low : low + m]), f"{m} rows differ"
            assert same_bits(lse, whole["lse"][low : low + m]), f"lse of {m} rows differs"
        order = torch.randperm(rows, device="cuda")
        assert same_bits(call(order)[0], whole["out"][order]), "another order differs"
        spoilt = q.clone()
        spoilt[::2] = math.nan
        assert same_bits(call(slice(None), spoilt)[0][1::2], whole["out"][1::2]), "NaN neighbours"
        fewer, _ = flash_mla_with_kvcache(
            q[:9], cache, indices[:9], page_size=page, attn_sink=sink, extra_k_cache=more,
            extra_indices_in_kvcache=more_indices[:9], extra_format=form, sched_meta=MLASchedMeta(64), backend=backend,
        )  # fmt: skip
        return {"diff_of_splits": calc_diff(fewer, whole["out"][:9])}

    return Built(run=run, check=check)


def merge(small: bool, *, rows: int, parts: int, heads: int) -> Built:
    """Partial states of 512 channels in fp32 to bf16."""
    v = torch.randn((rows, parts, heads, 512), device="cuda")
    s = torch.randn((rows, parts, heads), device="cuda")
    sink = torch.randn(heads, device="cuda")
    angle = torch.randn((rows, 32), device="cuda")
    phases = torch.stack((angle.cos(), angle.sin()), -1)
    if small:
        s[0], s[1, 0], s[2, -1] = math.inf, -math.inf, math.inf
        v[0], v[1, 0], v[2, -1] = math.nan, math.nan, math.nan
        sink[:3] = torch.tensor([math.inf, -math.inf, 1e38], device="cuda")
    out = torch.full((rows, heads, 512), 777.0, device="cuda", dtype=torch.bfloat16)
    found = {}

    def run() -> None:
        _, found["lse"] = merge_attn_states(v, s, attn_sink=sink, phases=phases, out=out)

    def check() -> dict[str, float]:
        right, lse = (
            torch.empty(out.shape, device="cuda"),
            torch.empty((rows, heads), device="cuda"),
        )
        reference.merge_states(v, s, sink, phases, right, lse)
        figures = compare(out, found["lse"], right, lse)
        assert bool((out[0] == 0).all() and (out[:, 0] == 0).all())
        assert_repeats(run, out)
        return figures

    def eager(compiled: bool) -> Callable[[], None]:
        def call():
            top = s.amax(1, keepdim=True)
            weight = torch.exp(s - top)
            total = weight.sum(1)
            weight = weight / (total * (1 + torch.exp(sink - top[:, 0] - total.log())))[:, None]
            y = (weight[..., None] * v).sum(1)
            even, odd = y[..., 448:].unflatten(-1, (-1, 2)).unbind(-1)
            c, d = phases[:, None].unbind(-1)
            pairs = torch.stack((even * c + odd * d, odd * c - even * d), -1).flatten(-2)
            return torch.cat((y[..., :448], pairs), -1).to(torch.bfloat16)

        f = torch.compile(call, dynamic=False) if compiled else call
        f()
        return f

    return Built(
        run=run,
        check=check,
        size_bytes=rows * heads * (parts * (2048 + 4) + 1024 + 4),
        peers={"torch": partial(eager, False), "compiled": partial(eager, True)},
    )


def cases() -> list[Case]:
    """What is checked and timed."""
    from deepinfer.kernels.triton.mla_decode_launch import FewTuning, WideTuning

    op = "flash_mla_with_kvcache"
    found = []
    for form in (FP8, FP4):
        name = f"{form.bytes_per_token} B"
        for batch, s_q in ((256, 1), (256, 4), (64, 1), (64, 4)):
            shape = f"{batch}x{s_q} rows, 64 heads, 128 + 512 keys, {name}"
            peer = FLASHMLA[batch, s_q]
            build = partial(decode, batch=batch, s_q=s_q, more_form=form)
            found.append(Case(op, shape, "table", build, peer=peer))
            if (batch, s_q) == (256, 1):
                variant = partial(build, portable=True)
                found.append(Case(op, shape, "portable", variant, peer=peer))
            if batch * s_q == 64:
                found.append(Case(op, shape, "split 0", partial(build, split=0), peer=peer))
            else:
                variant = partial(build, tuning=WideTuning(208, 168))
                found.append(Case(op, shape, "wide 208 168", variant, peer=peer))
        shape = f"128x2 rows, 128 heads, 128 + 512 keys, {name}"
        build = partial(decode, batch=128, s_q=2, heads=128, more_form=form)
        found.append(Case(op, shape, "table", build, peer=0.129 if form is FP8 else None))
        for heads in (8, 16, 32):
            for batch, s_q in ((1, 1), (16, 1), (128, 1), (256, 4)):
                shape = f"{batch}x{s_q} rows, {heads} heads, 128 + 512 keys, {name}"
                build = partial(decode, batch=batch, s_q=s_q, heads=heads, more_form=form)
                found.append(Case(op, shape, "table", build))
                if heads == 16 and batch == 128:
                    found.append(Case(op, shape, "portable", partial(build, portable=True)))
                if heads == 16 and batch > 16:
                    for tuning in (FewTuning(8, 16, 104, 136), FewTuning(4, 16, 104, 136)):
                        words = f"few {tuning.warps} {tuning.keys}"
                        found.append(Case(op, shape, words, partial(build, tuning=tuning)))
        for backend, heads, split in (
            ("hopper", 64, 0), ("hopper", 64, 128), ("hopper", 128, 64), ("hopper", 40, 0), ("hopper", 8, 0),
            ("hopper", 8, 64), ("hopper", 12, 0), ("hopper", 12, 128), ("hopper", 32, 0), ("hopper", 32, 64),
            ("portable", 64, 0), ("portable", 12, 128),
        ):  # fmt: skip
            build = partial(contract_case, backend=backend, heads=heads, form=form, split=split)
            words = f"{backend} {heads} split {split}"
            found.append(Case(op, f"contract {name}", words, build, check_only=True))
        for backend, heads in (("hopper", 64), ("hopper", 16), ("portable", 16)):
            words = f"{backend} {heads}"
            build = partial(far_case, backend=backend, heads=heads, form=form)
            found.append(Case(op, f"far pages {name}", words, build, check_only=True))
            build = partial(invariance_case, backend=backend, heads=heads, form=form)
            found.append(Case(op, f"batch invariance {name}", words, build, check_only=True))
    for rows, parts, heads in ((64, 2, 64), (1024, 4, 64), (16, 10, 16), (16, 33, 16)):
        shape = f"{rows} rows, {parts} parts, {heads} heads"
        build = partial(merge, rows=rows, parts=parts, heads=heads)
        found.append(Case("merge_attn_states", shape, "table", build))
    return found
