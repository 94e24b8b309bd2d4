"""Cases of the index scores: ragged and paged, FP8 and MXFP4 keys."""

from __future__ import annotations

import torch
from harness import Built, Case, assert_repeats, calc_diff

from deepinfer.kernels.reference.cast import cast_back

FP8 = torch.float8_e4m3fn
# Milliseconds of DeepGEMM on the same card in another run.
PEER = {(4096, 16384, 32): 0.606, (2048, 32768, 64): 1.105}


def scores(t: int, s: int, heads: int, keys: str, tuning: tuple[int, ...]):
    """Builds scores of one set of keys."""

    def build(small: bool) -> Built:
        from deepinfer.kernels import indexer
        from deepinfer.kernels.triton import indexer_launch as launch

        queries, count = (67, 3001) if small else (t, s)
        q = torch.randn(queries, heads, 128, device="cuda").to(FP8)
        w = torch.randn(queries, heads, device="cuda")
        starts = torch.zeros(queries, device="cuda", dtype=torch.int32)
        ends = torch.full((queries,), count, device="cuda", dtype=torch.int32)
        if small:
            starts = torch.randint(0, 900, (queries,), device="cuda", dtype=torch.int32)
            ends = torch.randint(900, count + 1, (queries,), device="cuda", dtype=torch.int32)
            ends[5], starts[6], ends[6] = starts[5], 0, 0
        wide = torch.full((queries, count + 32), 777.0, device="cuda")
        out = wide[:, 16 : 16 + count]
        if keys == "fp4":
            codes = torch.randint(0, 256, (count, 64), device="cuda", dtype=torch.uint8)
            scale = torch.randint(115, 127, (count, 4), device="cuda", dtype=torch.uint8)
            values = cast_back(codes, scale)
            run = lambda: indexer.FP4(None, q, codes, scale, w, starts, ends, out)  # noqa: E731
        else:
            codes = torch.randn(count, 128, device="cuda").to(FP8)
            scale = torch.rand(count, device="cuda") + 0.5
            values = codes.float() * scale[:, None]
            if tuning:
                conf = launch.IndexTuning(*tuning)
                run = lambda: launch.index_scores(q, codes, scale, w, starts, ends, out, conf)  # noqa: E731
            else:
                run = lambda: indexer.FP8(None, q, codes, scale, w, starts, ends, out)  # noqa: E731

        def check():
            dots = torch.einsum("thd,sd->hts", q.double(), values.double()).relu()
            right = (dots * w.T[:, :, None].double()).sum(0)
            at = torch.arange(count, device="cuda")
            seen = (at >= starts[:, None]) & (at < ends[:, None])
            assert bool((out[~seen] == float("-inf")).all()), "scores of unseen keys"
            assert bool((wide[:, :16] == 777).all() and (wide[:, 16 + count :] == 777).all())
            found = calc_diff(right[seen], out[seen])
            assert found < 5e-6, f"diff {found}"
            assert_repeats(run, out)
            first = out.clone()
            q[1:], w[1:] = q[1:].flip(0), w[1:].flip(0)
            starts[1:], ends[1:] = starts[1:].flip(0), ends[1:].flip(0)
            run()
            assert torch.equal(out[1:].flip(0), first[1:]), "a score hangs on the other queries"
            return {"diff": found}

        def compiled():
            function = torch.compile(
                lambda: (torch.einsum("thd,sd->ths", q.bfloat16(), values.bfloat16()).relu() * w[:, :, None]).sum(1)
            )  # fmt: skip
            return lambda: function()

        def deepgemm():
            import deep_gemm

            fp8 = (
                (codes, scale)
                if keys != "fp4"
                else (values.to(FP8), torch.ones(count, device="cuda"))
            )
            return lambda: deep_gemm.fp8_mqa_logits(q, fp8, w, starts, ends, clean_logits=False)

        flops = 2.0 * queries * count * heads * 128
        size = 4 * queries * count + count * (68 if keys == "fp4" else 132) + q.numel()
        # DeepGEMM's Hopper kernel has 32 or 64 heads; torch holds the products of all heads.
        peers = {"deepgemm": deepgemm} if heads >= 32 else {}
        if queries * count <= 1 << 24:
            peers["compiled"] = compiled
        return Built(run, check, flops, size, "fp8", peers)

    return build


def paged(requests: int, next_n: int, keys: int, heads: int, packed: bool, tuning: tuple[int, ...]):
    """Builds scores over paged keys; the tuning is keys at once, stages, warps and programs a processor."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.configs.indexer import SPLIT
        from deepinfer.kernels.formats import KVCacheFormat
        from deepinfer.kernels.reference import cache as rows
        from deepinfer.kernels.reference import indexer as reference
        from deepinfer.kernels.triton import indexer_paged_launch as launch

        form = KVCacheFormat.INDEXER_MXFP4 if packed else KVCacheFormat.INDEXER_FP8
        count, most = (9, 1500) if small else (requests, keys)
        lengths = torch.full((count,), most, device="cuda", dtype=torch.int32)
        if small:
            lengths = torch.randint(1, most, (count,), device="cuda", dtype=torch.int32)
            lengths[2], lengths[4] = 0, most
        each = -(-most // 64)
        size = form.page_bytes(64)
        cache = torch.full((count * each + 3, size + 256), 0xFF, device="cuda", dtype=torch.uint8)[
            :, :size
        ]
        table = torch.randperm(count * each, device="cuda").view(count, each).int()
        if small:
            at = torch.arange(each * 64, device="cuda")
            for b in range(count):
                slots = table[b, at // 64].long() * 64 + at % 64
                used = slots[: int(lengths[b])]
                rows.insert_rows(torch.randn(len(used), 128, device="cuda"), cache, used, form, 64)
        else:
            # Any codes, no NaN; scales of 1, or of 2^-7 to 1.
            codes = 64 * (64 if packed else 128)
            cache[:, :codes] = torch.randint(0, 120, (len(cache), codes), device="cuda").byte()
            one = torch.ones(64, device="cuda").view(torch.uint8)
            powers = torch.randint(120, 128, (len(cache), 256), device="cuda").byte()
            cache[:, codes : codes + 256] = powers if packed else one
        ends = lengths[:, None] - torch.arange(next_n - 1, -1, -1, device="cuda", dtype=torch.int32)
        q = torch.randn(count, next_n, heads, 128, device="cuda").to(FP8)
        w = torch.randn(count * next_n, heads, device="cuda")
        out = torch.full((count * next_n, most), 777.0, device="cuda")
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        meta = reference.share_splits(ends, tuning[3] * processors, SPLIT)
        conf = launch.PagedTuning(*tuning[:3])

        def run():
            launch.paged_scores(q, cache, w, ends, table, meta, out, 64, packed, conf)

        def check():
            right = torch.full_like(out, 777.0)
            reference.paged_mqa_logits(q, cache, w, ends, table, right, form, 64)
            assert torch.equal(right.isinf(), out.isinf()), "another mask"
            assert torch.equal(right == 777, out == 777), "columns behind the keys"
            seen = right.isfinite() & (right != 777)
            found = calc_diff(right[seen], out[seen])
            assert found < 5e-6, f"diff {found}"
            assert_repeats(run, out)
            first = out.clone()
            other = reference.share_splits(ends, 7, SPLIT)
            launch.paged_scores(q, cache, w, ends, table, other, out, 64, packed, conf)
            assert torch.equal(first, out), "scores hang on the number of programs"
            return {"diff": found}

        def deepgemm():
            import deep_gemm

            theirs = cache.contiguous().view(-1, 64, 1, 132)
            lens = ends.contiguous()  # of each query
            plan = deep_gemm.get_paged_mqa_logits_metadata(lens, 64, processors)
            return lambda: deep_gemm.fp8_paged_mqa_logits(
                q, theirs, w, lens, table, plan, most, clean_logits=False
            )

        peers = {} if packed else {"deepgemm": deepgemm}
        flops = 2.0 * count * next_n * most * heads * 128
        size = count * most * form.bytes_per_token + 4 * count * next_n * most
        return Built(run, check, flops, size, "fp8", peers)

    return build


def cases() -> list[Case]:
    """Paged keys first, then the scores of many queries."""
    found = []
    tunings = ((64, 4, 4, 4), (64, 2, 4, 4), (128, 3, 8, 3))
    for requests, next_n, keys, heads, count in (
        (64, 1, 32768, 32, 3),
        (64, 2, 32768, 32, 1),
        (4, 1, 131072, 32, 1),
        (64, 1, 32768, 64, 1),
    ):
        for packed in (False, True):
            for tuning in tunings[:count]:
                op = "fp8_fp4_paged_mqa_logits" if packed else "fp8_paged_mqa_logits"
                name = "{} keys {} stages {} warps {} programs".format(*tuning)
                build = paged(requests, next_n, keys, heads, packed, tuning)
                found.append(Case(op, f"{requests}x{next_n}x{keys} {heads} heads", name, build))
    for t, s, heads in PEER:
        for keys, op in (("fp4", "fp8_fp4_mqa_logits"), ("fp8", "fp8_mqa_logits")):
            shape = f"{t}x{s} {heads} heads"
            build = scores(t, s, heads, keys, ())
            found.append(Case(op, shape, "table", build, peer=PEER[t, s, heads]))
    for heads in (8, 16):
        build = scores(2048, 16384, heads, "fp8", ())
        found.append(Case("fp8_mqa_logits", f"2048x16384 {heads} heads", "table", build))
    for heads in (8, 16, 32, 64):
        build = scores(67, 3001, heads, "fp8", ())
        found.append(Case("fp8_mqa_logits", f"67x3001 {heads} heads", "table", build, True))
    return found
