"""Cases of choosing tokens from rows of logits: the highest, draws from whole laws, changes of logits, log probabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from harness import Built, Case, assert_repeats, same_bits
from row_checks import assert_rows_alone

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
        run = lambda: launch.highest_tokens(x, out, sizes)  # noqa: E731

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
            x, out, seeds, positions, temperature=warm, sizes=sizes
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

    def named(sizes: tuple[int, int] | None) -> str:
        return "table" if sizes is None else f"{sizes[0]} w{sizes[1]}"

    highest = (
        (256, torch.bfloat16, (None, (8192, 4))),
        (256, torch.float32, (None,)),
        (1, torch.float32, (None,)),
    )
    for rows, dtype, forms in highest:
        shape = f"{rows} x {VOCAB} {'fp32' if dtype == torch.float32 else 'bf16'}"
        for sizes in forms:
            found.append(Case("argmax_sample", shape, named(sizes), argmax(rows, sizes, dtype)))
    for rows, forms in (
        (256, (None, (1024, 2), (4096, 8))),
        (64, (None,)),
        (1, (None,)),
    ):
        shape = f"{rows} x {VOCAB} fp32"
        for sizes in forms:
            found.append(Case("gumbel_sample", shape, named(sizes), gumbel(rows, sizes)))
    found.append(Case("apply_token_bitmask", f"256 x {VOCAB} fp32", "table", bitmask(256)))
    found.append(Case("apply_penalties", "64 x (2048 + 512)", "table", penalties(64, 2048, 512)))
    for top in (0, 20):
        found.append(Case("log_probs", f"64 x {VOCAB} top {top}", "table", logprobs(64, top)))
    for op in ("argmax_sample", "gumbel_sample", "top_k_top_p_sample", "log_probs"):
        found.append(Case(op, "rows alone", "table", alone(op), check_only=True))
    return found
