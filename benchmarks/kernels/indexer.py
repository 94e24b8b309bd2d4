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


def paged(
    requests: int,
    next_n: int,
    keys: int,
    heads: int,
    packed: bool,
    tuning: tuple[int, ...],
    shares: int = 4,
    page: int = 64,
):
    """Builds scores over paged keys.

    The tuning is that of pages, or, with three numbers, keys at once, stages and warps of the portable kernel, or none
    for what the tables say; shares are those of the work list for each processor.
    """

    def build(small: bool) -> Built:
        from deepinfer.kernels.configs import indexer as configs
        from deepinfer.kernels.formats import KVCacheFormat
        from deepinfer.kernels.reference import cache as rows
        from deepinfer.kernels.reference import indexer as reference
        from deepinfer.kernels.triton import indexer_paged_launch as portable
        from deepinfer.kernels.triton import indexer_pages_launch as hopper

        form = KVCacheFormat.INDEXER_MXFP4 if packed else KVCacheFormat.INDEXER_FP8
        edges = [0, 1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1500]
        count, most = (len(edges) + 9, 1500) if small else (requests, keys)
        lengths = torch.full((count,), most, device="cuda", dtype=torch.int32)
        if small:
            lengths = torch.randint(1, most, (count,), device="cuda", dtype=torch.int32)
            lengths[4 : 4 + len(edges)] = torch.tensor(edges, device="cuda", dtype=torch.int32)
        each = -(-most // page)
        size = form.page_bytes(page)
        cache = torch.full((count * each + 3, size + 256), 0xFF, device="cuda", dtype=torch.uint8)[
            :, :size
        ]
        table = torch.randperm(count * each, device="cuda").view(count, each).int()
        if small:
            at = torch.arange(each * page, device="cuda")
            for b in range(count):
                slots = table[b, at // page].long() * page + at % page
                used = slots[: int(lengths[b])]
                rows.insert_rows(
                    torch.randn(len(used), 128, device="cuda"), cache, used, form, page
                )
            # Pages that are none, at places that the first request and the longest one see.
            table[0, 0] = -1
            if each > 10:
                table[count - 10, 3], table[count - 10, 4] = len(cache), 2**31 - 1
                table[count - 10, 9], table[count - 10, 10] = -(2**31), -1
        else:
            # Any codes, no NaN; scales of 1, or of 2^-7 to 1.
            codes = page * (64 if packed else 128)
            cache[:, :codes] = torch.randint(0, 120, (len(cache), codes), device="cuda").byte()
            one = torch.ones(page, device="cuda").view(torch.uint8)
            powers = torch.randint(120, 128, (len(cache), 4 * page), device="cuda").byte()
            cache[:, codes : codes + 4 * page] = powers if packed else one
        back = torch.arange(next_n - 1, -1, -1, device="cuda", dtype=torch.int32)
        ends = lengths[:, None] - back
        q = torch.randn(count, next_n, heads, 128, device="cuda").to(FP8)
        w = torch.randn(count * next_n, heads, device="cuda")
        wide = torch.full((count * next_n, most + 32), 777.0, device="cuda")
        out = wide[:, 16 : 16 + most]
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        meta = reference.share_splits(ends, shares * processors, configs.SPLIT)
        wanted = tuning or configs.lookup_pages(next_n, heads, packed)
        if len(wanted) == 3:
            conf, launch = portable.PagedTuning(*wanted), portable.paged_scores
        else:
            conf, launch = hopper.PageTuning(*wanted), hopper.page_scores

        def run():
            launch(q, cache, w, ends, table, meta, out, page, packed, conf)

        def check():
            right = torch.full_like(out, 777.0)
            reference.paged_mqa_logits(q, cache, w, ends, table, right, form, page)
            assert torch.equal(right.isinf(), out.isinf()), "another mask"
            assert torch.equal(right == 777, out == 777), "columns behind the keys"
            assert bool((wide[:, :16] == 777).all() and (wide[:, 16 + most :] == 777).all())
            seen = right.isfinite() & (right != 777)
            found = calc_diff(right[seen], out[seen])
            assert found < 5e-6, f"diff {found}"
            worst = float((right[seen] - out[seen]).abs().max() / right[seen].abs().max())
            assert worst < 1e-3, f"a score is off by {worst} of the largest"
            assert_repeats(run, out)
            first = out.clone()
            for other in (7, 1, 1000):
                other = reference.share_splits(ends, other, configs.SPLIT)
                out.fill_(777.0)
                launch(q, cache, w, ends, table, other, out, page, packed, conf)
                assert torch.equal(first, out), "scores hang on the number of programs"
            turned = torch.full_like(out, 777.0)
            flip = lambda x: x.flip(0).contiguous()  # noqa: E731
            w_flip = flip(w.view(count, next_n, heads)).view(count * next_n, heads)
            other = reference.share_splits(flip(ends), 50, configs.SPLIT)
            launch(
                flip(q), cache, w_flip, flip(ends), flip(table), other, turned, page, packed, conf
            )
            same = flip(turned.view(count, next_n, most)).view_as(out)
            assert torch.equal(first, same), "scores hang on the order of requests"
            # The first query of each request alone: other products, the same bits.
            alone = torch.full((count, most), 777.0, device="cuda")
            one = w.view(count, next_n, heads)[:, 0].contiguous()
            if len(wanted) != 3:
                sizes = hopper.PageTuning(*configs.lookup_pages(1, heads, packed))
                hopper.page_scores(
                    q[:, :1].contiguous(), cache, one, ends[:, :1].contiguous(), table,
                    reference.share_splits(ends[:, :1], 99, configs.SPLIT), alone, page, packed, sizes,
                )  # fmt: skip
                both = (alone != 777) & (first[::next_n] != 777)
                same = bool(torch.equal(alone[both], first[::next_n][both]))
                return {"diff": found, "worst": worst, "alone": float(same)}
            return {"diff": found, "worst": worst}

        def deepgemm():
            import deep_gemm

            theirs = cache.contiguous().view(-1, 64, 1, 132)
            lens = ends.contiguous()  # of each query
            plan = deep_gemm.get_paged_mqa_logits_metadata(lens, 64, processors)
            return lambda: deep_gemm.fp8_paged_mqa_logits(
                q, theirs, w, lens, table, plan, most, clean_logits=False
            )

        peers = {} if packed or next_n > 2 or page != 64 else {"deepgemm": deepgemm}
        flops = 2.0 * count * next_n * most * heads * 128
        size = count * most * form.bytes_per_token + 4 * count * next_n * most
        return Built(run, check, flops, size, "fp8", peers)

    return build


def shares(requests: int, next_n: int):
    """Builds the work list of paged scores."""

    def build(small: bool) -> Built:
        from deepinfer.kernels import indexer_paged
        from deepinfer.kernels.configs.indexer import SPLIT
        from deepinfer.kernels.reference import indexer as reference

        count = 300 if small else requests
        lengths = torch.randint(-3, 9000, (count, next_n), device="cuda", dtype=torch.int32)
        meta = torch.empty((4 * 132 + 1, 2), device="cuda", dtype=torch.int32)

        def check():
            for given in (lengths, lengths[:, 0], lengths[:1], lengths * 0):
                meta.fill_(-7)
                indexer_paged.SHARES(None, given, meta)
                assert torch.equal(meta, reference.share_splits(given, 4 * 132, SPLIT))
            return {}

        run = lambda: indexer_paged.SHARES(None, lengths, meta)  # noqa: E731
        return Built(run, check, 0.0, 4 * lengths.numel() + 4 * meta.numel(), "none")

    return build


def _paged(
    shape: tuple[int, int, int, int, bool], tuning: tuple[int, ...], check_only: bool = False
) -> Case:
    requests, next_n, keys, heads, packed = shape
    op = "fp8_fp4_paged_mqa_logits" if packed else "fp8_paged_mqa_logits"
    name = "portable" if len(tuning) == 3 else "table"
    if len(tuning) > 3:
        name = "{} queries {} slots {} parts {}".format(
            *tuning[:3], "together" if tuning[3] else "in turn"
        ) + (" folded" if tuning[4] else "")
    build = paged(*shape, tuning)
    return Case(op, f"{requests}x{next_n}x{keys} {heads} heads", name, build, check_only)


def cases() -> list[Case]:
    """Paged keys first, then the scores of many queries."""
    found = []
    eight, four = (64, 1, 32768, 32, False), (64, 1, 32768, 32, True)
    for shape, tuning in (
        (eight, ()), (four, ()), (four, (1, 15, 3, False, False)),
        ((64, 2, 32768, 32, False), ()), ((64, 2, 32768, 32, True), ()), ((64, 2, 32768, 32, True), (2, 14, 2, False, False)),
        ((4, 1, 131072, 32, False), ()), ((4, 1, 131072, 32, True), ()),
        ((64, 1, 32768, 64, False), ()), ((64, 1, 32768, 64, True), ()),
        ((256, 1, 4096, 32, False), ()), ((256, 1, 4096, 32, True), ()),
        ((64, 6, 32768, 32, False), ()), ((64, 6, 32768, 32, True), ()),
    ):  # fmt: skip
        found.append(_paged(shape, tuning))
    op = "get_paged_mqa_logits_metadata"
    found.append(Case(op, "256x1", "table", shares(256, 1)))
    for next_n, heads in ((1, 8), (3, 16), (4, 32), (5, 32), (2, 64), (2, 128)):
        for packed in (False, True):
            if heads < 128 or not packed:
                found.append(_paged((9, next_n, 1500, heads, packed), (), True))
    found.append(_paged((9, 1, 1500, 32, True), (64, 3, 4), True))
    found.append(_paged((9, 2, 1500, 64, True), (1, 14, 2, True, True), True))
    found.append(_paged((9, 1, 1500, 32, False), (1, 9, 3, False, False), True))
    for packed in (False, True):
        build = paged(9, 1, 1500, 32, packed, (), page=1504)
        op = "fp8_fp4_paged_mqa_logits" if packed else "fp8_paged_mqa_logits"
        found.append(Case(op, "9x1x1500 32 heads, a page a request", "table", build, True))
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
