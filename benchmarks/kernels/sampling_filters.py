"""Cases of draws among what top-k, top-p and min-p keep, with laws from flat to one token."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from harness import Built, Case, assert_repeats
from row_checks import eager

from sampling import VOCAB, logits_of, options, spoil


def sort_path(x: torch.Tensor, k: int, p: float) -> torch.Tensor:
    """Top-k, top-p and a draw with a sort, in the operations of torch."""
    values, index = x.sort(-1, descending=True)
    if k:
        values[:, k:] = float("-inf")
    law = values.softmax(-1)
    law[law.cumsum(-1) - law >= p] = 0.0
    return index.gather(-1, (law / torch.empty_like(law).exponential_()).argmax(-1, keepdim=True))


def law_of(rows: int, law: str) -> torch.Tensor:
    """Rows of logits.

    "normal" and "flat" are random; "peaked" falls with the rank as logits of a language model do, in steps of bf16; "masked"
    is that with 500 tokens left; "equal" and "one" have one logit for all, or for all but one.
    """
    if law in ("normal", "flat"):
        return torch.randn(rows, VOCAB, device="cuda") * (3.0 if law == "normal" else 1.0)
    x = torch.full((rows, VOCAB), 1.5, device="cuda")
    if law == "one":
        x[:, VOCAB // 2] = 25.0
    if law in ("peaked", "masked"):
        ranks = torch.rand(rows, VOCAB, device="cuda").argsort(-1) + 1
        x = 20.0 - 1.3 * ranks.float().log() + 0.3 * torch.randn(rows, VOCAB, device="cuda")
        x = x.bfloat16().float()
    if law == "masked":
        x.masked_fill_(torch.rand(rows, VOCAB, device="cuda") > 500 / VOCAB, float("-inf"))
    return x


def filtered(
    rows: int,
    k: int,
    p: float,
    sizes: dict,
    law: str = "normal",
    judged: bool = True,
):
    """Builds draws among the top."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.reference import sampling as reference
        from deepinfer.kernels.triton import sampling_launch as launch

        count = 32 if small else rows
        x = logits_of(count) if small else law_of(count, law)
        warm = None
        top_k = torch.full((count,), k, device="cuda") if k else None
        top_p = torch.full((count,), p, device="cuda", dtype=torch.float64) if p < 1 else None
        if small:
            spoil(x)
            for i, kind in enumerate(("flat", "peaked", "masked", "equal", "one")):
                x[14 + 3 * i : 17 + 3 * i] = law_of(3, kind)
            warm = torch.rand(count, device="cuda", dtype=torch.float64) + 0.5
            warm[11], warm[13] = 0.0, float("nan")
        seeds, positions = options(count)
        out = torch.full((count,), 777, device="cuda", dtype=torch.int64)
        filters = launch.Filters(warm, top_k, top_p, None, k)

        draw = launch.Draw(seeds, positions, 0, out)
        run = lambda: launch.draw_filtered(x, filters, draw, **sizes)  # noqa: E731

        def check() -> Mapping[str, float]:
            if not judged:  # another case with the same filters is
                return {}
            for _ in range(8):
                seeds.copy_(options(count)[0])
                run()
                want = torch.empty_like(out)
                reference.top_k_top_p_sample(
                    x, warm, top_k, top_p, None, seeds, positions, 0, k, want
                )
                assert torch.equal(out, want), (out - want).nonzero()[:5].tolist()
            assert_repeats(run, out)
            return {"differing": 0.0}

        def from_logits() -> Callable:
            import flashinfer as fi

            if k and p < 1:
                return lambda: fi.sampling.top_k_top_p_sampling_from_logits(x, k, p)
            if k:
                return lambda: fi.sampling.top_k_sampling_from_probs(fi.sampling.softmax(x), k)
            return lambda: fi.sampling.top_p_sampling_from_probs(fi.sampling.softmax(x), p)

        def from_probabilities() -> Callable:
            import flashinfer as fi

            probs = torch.softmax(x, -1)
            if k and p < 1:
                return lambda: fi.sampling.top_k_top_p_sampling_from_probs(probs, k, p)
            if k:
                return lambda: fi.sampling.top_k_sampling_from_probs(probs, k)
            return lambda: fi.sampling.top_p_sampling_from_probs(probs, p)

        peers = {"flashinfer": from_logits, "flashinfer_probabilities": from_probabilities}
        if law == "normal" and (k, p) == (50, 0.95):
            peers["torch"] = eager(lambda x: sort_path(x, k, p), x)
        return Built(run, check, size_bytes=x.numel() * 4, peers=peers)

    return build


def masked(rows: int, vocab: int, kind: str):
    """Builds the mask of all filters together."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.sampling import top_k_top_p_mask

        count = 48 if small else rows
        x = logits_of(count, vocab)
        keys: dict = {"top_k": 50, "top_p": 0.95} if kind == "k" else {"top_p": 0.95}
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


def mixed(vocab: int, kind: str):
    """Builds the check of draws whose filters differ from row to row."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.sampling import top_k_top_p_sample

        count = 64
        x = logits_of(count, vocab)
        spoil(x)
        r = lambda: torch.rand(count, device="cuda", dtype=torch.float64)  # noqa: E731
        warm = r() + 0.3
        warm[11], warm[12] = 0.0, float("nan")
        top_k = torch.randint(-5, vocab + 5, (count,), device="cuda")
        top_k[20:28] = torch.tensor([1, 1024, 1025, 3000, vocab, vocab + 1, 500, 0])
        top_k[::3] = torch.randint(1, 60, top_k[::3].shape, device="cuda")
        top_p, min_p = r(), r() * 0.01
        top_p[30:36], min_p[34:40], top_p[36], top_p[37] = 1.0, 0.0, 0.0, float("nan")
        min_p[41], min_p[42], min_p[43] = 1.0, float("nan"), 2.0
        keys = {
            "k": {"top_k": top_k, "temperature": warm},
            "p": {"top_p": top_p, "temperature": warm},
            "all": {"top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": warm},
            "min": {"min_p": min_p, "top_p": top_p},
        }[kind]

        def check() -> Mapping[str, float]:
            for _ in range(6):
                seeds, positions = options(count)
                own = top_k_top_p_sample(x, seeds, positions, backend="triton", **keys)
                want = top_k_top_p_sample(x, seeds, positions, backend="torch", **keys)
                wrong = (own != want).nonzero().flatten().tolist()
                assert not wrong, (wrong[:8], own[wrong[:8]].tolist(), want[wrong[:8]].tolist())
            return {"differing": 0.0}

        return Built(lambda: None, check)

    return build


FIRST = (
    (0, 0.95, ("normal", "flat", "peaked", "equal", "masked", "one")),
    (1000, 1.0, ("normal", "flat", "peaked", "equal", "masked")),
    (0, 0.5, ("normal", "flat")),
    (0, 0.9, ("flat",)),
    (50, 0.95, ("normal", "peaked")),
    (1000, 0.95, ("peaked",)),
    (500, 1.0, ("normal",)),
    (4096, 1.0, ("normal", "flat")),
    (4096, 0.95, ("normal",)),
    (50_000, 1.0, ("flat",)),
    (50_000, 0.9, ("flat",)),
    (1, 1.0, ("peaked",)),
)
"""Top-k, top-p, and the laws that they are timed with at many rows."""

FEWER = (
    (0, 0.95, ("normal", "flat", "peaked", "equal")),
    (0, 0.5, ("normal", "flat")),
    (1000, 1.0, ("normal", "peaked", "equal", "masked")),
    (4096, 0.95, ("normal",)),
    (50_000, 0.9, ("flat",)),
    (50, 0.95, ("normal",)),
)
"""The same at 64 rows."""

ONE = (
    (0, 0.95, ("normal", "flat")),
    (1000, 1.0, ("normal", "peaked")),
    (4096, 1.0, ("flat",)),
    (50_000, 1.0, ("flat",)),
    (50, 0.95, ("normal",)),
)
"""The same at one row."""

FORMS: tuple[tuple[int, float, str, dict[str, dict]], ...] = (
    (0, 0.95, "normal", {"scores 4096 w8": {"sizes": (4096, 8)}, "row w8": {"row_warps": 8}}),
    (
        0,
        0.95,
        "flat",
        {"weigh, 64 registers": {"weigh_registers": 64}, "weigh, all": {"weigh_registers": None}},
    ),
    (1000, 1.0, "masked", {"ranks": {"by_rank": True}}),
    (4096, 1.0, "normal", {"ranks": {"by_rank": True}}),
    (4096, 1.0, "flat", {"ranks": {"by_rank": True}}),
)
"""Forms at many rows."""


def named(k: int, p: float, law: str) -> str:
    """The name of filters and of a law."""
    return (f"k {k} " if k else "") + (f"p {p} " if p < 1 else "") + law


def cases() -> list[Case]:
    """The cases."""
    op, found = "top_k_top_p_sample", []
    for rows, laws in ((256, FIRST), (64, FEWER), (1, ONE)):
        for k, p, kinds in laws:
            for law in kinds:
                build = filtered(rows, k, p, {}, law, judged=rows == 256 and law == kinds[0])
                form = f"{rows} x {VOCAB} fp32 {named(k, p, law)}"
                found.append(Case(op, form, "table", build))
        for k, p, law, forms in FORMS if rows == 256 else ():
            for name, sizes in forms.items():
                form = f"{rows} x {VOCAB} fp32 {named(k, p, law)}"
                found.append(Case(op, form, name, filtered(rows, k, p, sizes, law)))
    for kind in ("k", "p", "all", "min"):
        for vocab in (VOCAB, 1000, 9000):
            build = masked(256, vocab, kind)
            timed = vocab == VOCAB and kind in ("k", "p")
            found.append(Case("top_k_top_p_mask", f"{vocab} {kind}", "table", build, not timed))
    for kind in ("k", "p", "all", "min"):
        for vocab in (1000, VOCAB):
            found.append(Case(op, f"{vocab} rows by {kind}", "table", mixed(vocab, kind), True))
    return found
