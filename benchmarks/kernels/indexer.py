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
            if queries * count > 1 << 24:
                raise MemoryError("the products of all heads do not fit")
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
        return Built(run, check, flops, size, "fp8", {"deepgemm": deepgemm, "compiled": compiled})

    return build


def cases() -> list[Case]:
    """The goals' shapes with several tunings, and the form with MXFP4 keys."""
    found = []
    tunings = {
        32: (
            (4, 12, 8192, 3, -1),
            (4, 16, 8192, 3, 0),
            (4, 16, 8192, 3, 1),
            (4, 16, 8192, 3, 2),
            (4, 16, 16384, 3, 1),
            (4, 8, 8192, 3, 1),
            (4, 16, 8192, 2, 1),
            (8, 8, 8192, 2, 0),
            (8, 8, 8192, 2, 1),
            (8, 8, 16384, 2, 2),
        ),
        64: (
            (2, 12, 8192, 3, -1),
            (2, 16, 8192, 3, 0),
            (2, 16, 8192, 3, 1),
            (2, 16, 8192, 3, 2),
            (4, 8, 8192, 2, 1),
            (4, 8, 8192, 2, 2),
        ),
    }
    for t, s, heads in PEER:
        for tuning in tunings[heads]:
            name = "queries {} depth {} chunk {} parts {} relu {}".format(*tuning)
            build = scores(t, s, heads, "fp8", tuning)
            found.append(
                Case(
                    "fp8_mqa_logits", f"{t}x{s} {heads} heads", name, build, peer=PEER[t, s, heads]
                )
            )
        build = scores(t, s, heads, "fp4", ())
        found.append(
            Case(
                "fp8_fp4_mqa_logits",
                f"{t}x{s} {heads} heads",
                "table",
                build,
                peer=PEER[t, s, heads],
            )
        )
    for heads in (8, 16, 32, 64):
        build = scores(67, 3001, heads, "fp8", ())
        found.append(Case("fp8_mqa_logits", f"67x3001 {heads} heads", "table", build, True))
    return found
