"""Cases of choosing tokens from rows of logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from harness import Built, Case, assert_repeats, same_bits
from row_checks import assert_rows_alone, eager

VOCAB = 129_280


def logits_of(rows: int, vocab: int = VOCAB, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random rows, apart in memory, with NaN between them."""
    wide = torch.full((rows, vocab + 64), float("nan"), device="cuda", dtype=dtype)
    x = wide[:, :vocab]
    x.copy_(torch.randn(rows, vocab, device="cuda") * 3)
    return x


def spoil(x: torch.Tensor) -> None:
    """Makes some rows hard."""
    n = x.shape[1]
    x[1] = float("-inf")
    x[2, n // 2] = float("nan")
    x[3] = 1.5
    x[4] = torch.randint(-2, 3, (n,), device="cuda").to(x.dtype)
    x[5, 7] = float("inf")
    x[6, : n - 3] = float("-inf")
    x[7] = 0.0
    x[7, ::3] = -0.0
    x[8] *= 40
    x[9] *= 0.001
    x[10] = torch.arange(n, device="cuda") % 1000 * 0.01


def options(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Seeds and positions."""
    seeds = torch.randint(-(2**62), 2**62, (rows,), device="cuda")
    return seeds, torch.randint(0, 2**20, (rows,), device="cuda")


def argmax(rows: int, sizes: tuple[int, int] | None, dtype: torch.dtype = torch.float32):
    """Builds the highest logit of rows."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.reference import sampling as reference
        from deepinfer.kernels.triton import sampling_launch as launch

        count = 24 if small else rows
        x = (
            logits_of(count, dtype=dtype)
            if small
            else torch.randn(count, VOCAB, device="cuda").to(dtype) * 3
        )
        if small:
            spoil(x)
        out = torch.full((count,), 777, device="cuda", dtype=torch.int64)
        run = lambda: launch.best_tokens(x, out, sizes=sizes)  # noqa: E731

        def check() -> Mapping[str, float]:
            want = torch.empty_like(out)
            reference.argmax_sample(x, want)
            assert torch.equal(out, want), (out - want).nonzero()[:5].tolist()
            assert_repeats(run, out)
            return {"differing": 0.0}

        peers = {"torch": lambda: lambda: x.argmax(-1)}
        return Built(run, check, size_bytes=x.numel() * x.itemsize, peers=peers)

    return build


def gumbel(rows: int, sizes: tuple[int, int] | None):
    """Builds draws from whole laws."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.reference import sampling as reference
        from deepinfer.kernels.triton import sampling_launch as launch

        count = 24 if small else rows
        x = logits_of(count) if small else torch.randn(count, VOCAB, device="cuda") * 3
        warm = None
        if small:
            spoil(x)
            warm = torch.rand(count, device="cuda", dtype=torch.float64) * 2
            warm[11], warm[12], warm[13] = 0.0, 1e-6, 100.0
        seeds, positions = options(count)
        out = torch.full((count,), 777, device="cuda", dtype=torch.int64)
        run = lambda: launch.best_tokens(  # noqa: E731
            x, out, temperature=warm, seeds=seeds, positions=positions, sizes=sizes
        )

        def check() -> Mapping[str, float]:
            want = torch.empty_like(out)
            reference.gumbel_sample(x, warm, seeds, positions, 0, want)
            assert torch.equal(out, want), (out - want).nonzero()[:5].tolist()
            assert_repeats(run, out)
            return {"differing": 0.0}

        def flashinfer() -> Callable:
            import flashinfer as fi

            return lambda: fi.sampling.sampling_from_logits(x)

        def multinomial() -> Callable:
            return lambda: torch.multinomial(torch.softmax(x, -1), 1)

        return Built(
            run,
            check,
            size_bytes=x.numel() * 4,
            peers={"flashinfer": flashinfer, "torch": multinomial},
        )

    return build


def sort_path(x: torch.Tensor, k: int, p: float) -> torch.Tensor:
    """Top-k, top-p and a draw with a sort, in the operations of torch."""
    values, index = x.sort(-1, descending=True)
    if k:
        values[:, k:] = float("-inf")
    law = values.softmax(-1)
    law[law.cumsum(-1) - law >= p] = 0.0
    return index.gather(-1, (law / torch.empty_like(law).exponential_()).argmax(-1, keepdim=True))


def filtered(rows: int, k: int, p: float, sizes: dict):
    """Builds draws among the top."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.reference import sampling as reference
        from deepinfer.kernels.triton import sampling_launch as launch

        count = 32 if small else rows
        x = logits_of(count) if small else torch.randn(count, VOCAB, device="cuda") * 3
        warm = None
        top_k = torch.full((count,), k, device="cuda") if k else None
        top_p = torch.full((count,), p, device="cuda", dtype=torch.float64) if p < 1 else None
        if small:
            spoil(x)
            warm = torch.rand(count, device="cuda", dtype=torch.float64) + 0.5
            warm[11] = 0.0
        seeds, positions = options(count)
        out = torch.full((count,), 777, device="cuda", dtype=torch.int64)
        filters = launch.Filters(warm, top_k, top_p, None, k)

        run = lambda: launch.draw_filtered(x, filters, seeds, positions, 0, out, **sizes)  # noqa: E731

        def check() -> Mapping[str, float]:
            want = torch.empty_like(out)
            reference.top_k_top_p_sample(x, warm, top_k, top_p, None, seeds, positions, 0, k, want)
            assert torch.equal(out, want), (out - want).nonzero()[:5].tolist()
            assert_repeats(run, out)
            return {"differing": 0.0}

        def flashinfer() -> Callable:
            import flashinfer as fi

            if k and p < 1:
                return lambda: fi.sampling.top_k_top_p_sampling_from_logits(x, k, p)
            law = torch.softmax(x, -1)
            if k:
                return lambda: fi.sampling.top_k_sampling_from_probs(law, k)
            return lambda: fi.sampling.top_p_sampling_from_probs(law, p)

        peers = {"flashinfer": flashinfer, "torch": eager(lambda x: sort_path(x, k, p), x)}
        return Built(run, check, size_bytes=x.numel() * 4, peers=peers)

    return build


def masked(rows: int, vocab: int, kind: str):
    """Builds the mask of all filters together."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.sampling import top_k_top_p_mask

        count = 48 if small else rows
        x = logits_of(count, vocab)
        keys: dict = {"top_k": 50, "top_p": 0.95}
        if small:
            spoil(x)
            r = lambda: torch.rand(count, device="cuda", dtype=torch.float64)  # noqa: E731
            warm = r() + 0.3
            warm[11] = 0.0
            top_k = torch.randint(-5, 60, (count,), device="cuda")
            top_k[20:28] = torch.tensor([1, 1024, 1025, 3000, vocab, vocab + 1, 500, 0])
            top_p, min_p = r().clamp_min(0.01), r() * 0.01
            top_p[30:36], min_p[34:40] = 1.0, 0.0
            keys = {
                "k": {"top_k": top_k, "temperature": warm},
                "p": {"top_p": top_p, "temperature": warm},
                "all": {"top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": warm},
                "min": {"min_p": min_p},
            }[kind]
        out = torch.full_like(x, 777.0)
        run = lambda: top_k_top_p_mask(x, out=out, backend="triton", **keys)  # noqa: E731

        def check() -> Mapping[str, float]:
            want = top_k_top_p_mask(x, backend="torch", **keys)
            wrong = [
                r
                for r in range(count)
                if not torch.equal(out[r].nan_to_num(7.0), want[r].nan_to_num(7.0))
            ]
            counts = [
                (r, int(out[r].isfinite().sum()), int(want[r].isfinite().sum())) for r in wrong
            ]
            assert not wrong, f"rows, kept and wanted: {counts[:8]}"
            assert_repeats(run, out)
            return {"differing": 0.0}

        return Built(run, check, size_bytes=8 * x.numel())

    return build


def brackets(warps: int):
    """Builds the check of what is between logits and the cut of top-p alone."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.triton import sampling_bracket as bracket

        rows, chunks, block = 64, 16, 8192
        x = torch.randn(rows, VOCAB, device="cuda") * 3
        tops = torch.nn.functional.pad(x, (0, chunks * block - VOCAB), value=float("-inf"))
        tops = tops.view(rows, chunks, block).amax(-1).contiguous()
        top_p = torch.full((rows,), 0.95, device="cuda", dtype=torch.float64)
        sums = [torch.zeros((rows, chunks, 16), device="cuda") for _ in "ab"]
        exact = torch.zeros((rows, chunks, 2), device="cuda", dtype=torch.int64)
        found = torch.full((rows, chunks, 256), -1, device="cuda", dtype=torch.int32)
        counts = torch.zeros((rows, chunks), device="cuda", dtype=torch.int32)
        given = (x, tops, tops, top_p, tops, tops)
        flags = {"WARM": False, "TOP_K": False, "MIN_P": False, "CHUNKS": chunks, "BLOCK": block, "num_warps": warps}  # fmt: skip

        def run() -> None:
            for fine, to in ((False, sums[0]), (True, sums[1])):
                bracket.bracket_mass_kernel[(rows * chunks,)](
                    *given, sums[0], to, VOCAB, x.stride(0), chunks, FINE=fine, **flags
                )
            bracket.bracket_tokens_kernel[(rows * chunks,)](
                *given, *sums, exact, found, counts, VOCAB, x.stride(0), chunks, EACH=256, **flags
            )

        def check() -> Mapping[str, float]:
            run()
            high = x.amax(-1, keepdim=True)
            mass = (x.double() - high.double()).exp()
            worst = 0.0
            for j in range(15):
                want = torch.where(x >= high - (j + 1) * 2.0, mass, 0.0).sum(-1)
                got = sums[0][:, :, j].double().sum(-1)
                worst = max(worst, float(((got - want).abs() / want.clamp_min(1e-3)).max()))
            assert worst < 1e-4, f"coarse masses differ by {worst}"
            units = (mass * 2.0**42).round().long()
            assert int((exact[:, :, 0].sum(-1) - units.sum(-1)).abs().max()) < 1000, (
                "integer masses"
            )
            assert int(counts.max()) <= 256, f"{int(counts.max())} tokens in a chunk"
            target = (units.sum(-1).double() * 0.95).ceil()
            above = exact[:, :, 1].sum(-1)
            assert bool((above < target).all()), "what is above reaches the target"
            used = torch.arange(256, device="cuda") < counts.unsqueeze(-1)
            ids = torch.where(used, found, 0).view(rows, -1).long()
            inside = torch.where(used.view(rows, -1), units.gather(1, ids), 0).sum(-1)
            missing = (above + inside < target).nonzero().flatten().tolist()
            assert not missing, f"the bracket is too low in rows {missing[:8]}"
            return {"worst": worst, "most": float(counts.max())}

        return Built(lambda: None, check)

    return build


def alone(op: str):
    """Builds the check that a row does not hang on its batch."""

    def build(small: bool) -> Built:
        from deepinfer.kernels import sampling as kernels

        x = torch.randn(1000, 9000, device="cuda") * 3
        seeds, positions = options(1000)
        top_k = torch.randint(0, 100, (1000,), device="cuda")
        top_p = torch.rand(1000, device="cuda")

        def f(x, seeds, positions, top_k, top_p):
            if op == "argmax_sample":
                return (kernels.argmax_sample(x, backend="triton"),)
            if op == "gumbel_sample":
                return (kernels.gumbel_sample(x, seeds, positions, backend="triton"),)
            if op == "log_probs":
                out = kernels.log_probs(x, top_k, 5, backend="triton")
                return (out[0], out[1], out[2], out[3])
            return (
                kernels.top_k_top_p_sample(x, seeds, positions, top_k, top_p, backend="triton"),
            )

        def check() -> Mapping[str, float]:
            assert_rows_alone(f, (x, seeds, positions, top_k, top_p))
            return {}

        return Built(lambda: None, check)

    return build


def bitmask(rows: int):
    """Builds the application of token bitmasks that let a twentieth through."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.sampling import apply_token_bitmask

        x = logits_of(rows)
        before = x.clone()
        allowed = torch.rand(rows, VOCAB, device="cuda") < 0.05
        bits = allowed.view(rows, -1, 32).to(torch.int64) << torch.arange(32, device="cuda")
        mask = bits.sum(-1).to(torch.int32)
        run = lambda: apply_token_bitmask(x, mask, backend="triton")  # noqa: E731

        def check() -> Mapping[str, float]:
            assert same_bits(x, torch.where(allowed, before, float("-inf")))
            wide = torch.randn(5, 200, 3, device="cuda").permute(0, 2, 1)[:, 1]
            want, own = wide.clone(), torch.full((3, 5), -1, device="cuda", dtype=torch.int32)
            own[:, 2] = 0x0F0F0F0F
            at = torch.tensor([4, -1, 0], device="cuda")
            apply_token_bitmask(wide, own, rows=at, vocab_size=150, backend="triton")
            apply_token_bitmask(want, own, rows=at, vocab_size=150, backend="torch")
            assert same_bits(wide, want)
            return {}

        def torch_peer() -> Callable:
            forbidden = ~allowed
            return lambda: x.masked_fill_(forbidden, float("-inf"))

        return Built(run, check, size_bytes=x.numel() * 4, peers={"torch": torch_peer})

    return build


def penalties(rows: int, prompt: int, length: int):
    """Builds penalties over prompts and outputs."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.sampling import apply_penalties

        x = logits_of(rows)
        before = x.clone()
        output = torch.randint(-1, 3000, (rows, length), device="cuda")
        ids = torch.randint(-1, VOCAB + 50, (rows, prompt), device="cuda")
        r = lambda: torch.rand(rows, device="cuda")  # noqa: E731
        keys = {"presence": r(), "frequency": r(), "repetition": r() + 0.5}
        keys["repetition"][: rows // 3] = 1.0
        run = lambda: apply_penalties(x, output, prompt_ids=ids, backend="triton", **keys)  # noqa: E731

        def check() -> Mapping[str, float]:
            x.copy_(before)
            run()
            want = apply_penalties(before.clone(), output, prompt_ids=ids, backend="torch", **keys)
            assert same_bits(x, want)
            return {}

        def torch_peer() -> Callable:
            return lambda: apply_penalties(x, output, prompt_ids=ids, backend="torch", **keys)

        size = rows * (length + prompt) * (8 + 8)
        return Built(run, check, size_bytes=size, peers={"torch": torch_peer})

    return build


def logprobs(rows: int, top: int):
    """Builds log probabilities of a token and of the likeliest."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.sampling import log_probs

        count = 24 if small else rows
        x = logits_of(count)
        if small:
            spoil(x)
        tokens = torch.randint(0, VOCAB, (count,), device="cuda")
        if small:
            tokens[13] = -1
        run = lambda: log_probs(x, tokens, top, backend="triton")  # noqa: E731

        def check() -> Mapping[str, float]:
            good = x.amax(-1).isfinite()
            good[13] = False
            own, want = run(), log_probs(x, tokens, top, backend="torch")
            worst = 0.0
            for a, b in zip(own, want, strict=True):
                a, b = a[good], b[good]
                if a.is_floating_point():
                    close = torch.where(a == b, 0.0, (a - b).abs())
                    worst = max(worst, float(close.max())) if a.numel() else worst
                else:
                    assert torch.equal(a, b)
            assert worst < 2e-5, worst
            assert bool(own[0][13].isnan())
            return {"worst": worst}

        def torch_peer() -> Callable:
            return lambda: torch.log_softmax(x, -1).topk(max(top, 1), -1)

        return Built(run, check, size_bytes=x.numel() * 4, peers={"torch": torch_peer})

    return build


def cases() -> list[Case]:
    """The cases."""
    found = []
    for rows in (1, 64, 256):
        shape = f"{rows} x {VOCAB} fp32"
        for sizes in (None, (8192, 8)) if rows == 256 else (None,):
            name = "table" if sizes is None else f"{sizes[0]} w{sizes[1]}"
            found.append(Case("argmax_sample", shape, name, argmax(rows, sizes)))
        for sizes in (None, (8192, 8), (2048, 4)):
            name = "table" if sizes is None else f"{sizes[0]} w{sizes[1]}"
            found.append(Case("gumbel_sample", shape, name, gumbel(rows, sizes)))
        both = {
            "table": {},
            "row w4": {"row_warps": 4},
        }
        for name, sizes in both.items():
            found.append(
                Case(
                    "top_k_top_p_sample",
                    f"{shape} k 50 p 0.95",
                    name,
                    filtered(rows, 50, 0.95, sizes),
                )
            )
        found.append(
            Case("top_k_top_p_sample", f"{shape} p 0.95", "table", filtered(rows, 0, 0.95, {}))
        )
        found.append(
            Case(
                "top_k_top_p_sample",
                f"{shape} p 0.95",
                "bracket w8",
                filtered(rows, 0, 0.95, {"bracket_warps": 8}),
            )
        )
        found.append(
            Case("top_k_top_p_sample", f"{shape} k 1000", "table", filtered(rows, 1000, 1.0, {}))
        )
    found.append(
        Case("argmax_sample", f"256 x {VOCAB} bf16", "table", argmax(256, None, torch.bfloat16))
    )
    for kind in ("k", "p", "all", "min"):
        for vocab in (VOCAB, 1000, 9000):
            found.append(
                Case(
                    "top_k_top_p_mask",
                    f"{vocab} {kind}",
                    "table",
                    masked(256, vocab, kind),
                    kind != "k" or vocab != VOCAB,
                )
            )
    for op in ("argmax_sample", "gumbel_sample", "top_k_top_p_sample", "log_probs"):
        found.append(Case(op, "rows alone", "table", alone(op), check_only=True))
    for warps in (8, 16):
        found.append(Case("top_k_top_p_sample", "brackets", f"w{warps}", brackets(warps), True))
    found.append(Case("apply_token_bitmask", f"256 x {VOCAB} fp32", "table", bitmask(256)))
    found.append(Case("apply_penalties", "64 x (2048 + 512)", "table", penalties(64, 2048, 512)))
    for top in (0, 20):
        found.append(Case("log_probs", f"64 x {VOCAB} top {top}", "table", logprobs(64, top)))
    return found
