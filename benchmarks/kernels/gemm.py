"""Matrix products: every tuning that was considered, on random data, beside DeepGEMM and torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from harness import Built, Case, Run, assert_repeats, calc_diff

FP8 = torch.float8_e4m3fn
LIMIT = 5e-6
NAN = 0x7F
DEEPGEMM_MS = {  # DeepGEMM 0.1.5 (SGLang's build) on the same card in another run
    "48x1x4608x5120": 0.297, "48x16x4608x5120": 0.298, "48x32x4608x5120": 0.298, "48x64x4608x5120": 0.299,
    "48x32x5120x2304": 0.159, "64x5120x8192": 0.0242, "16x32768x1280": 0.0236, "4096x4096x7168": 0.187,
    "8192x8192x8192": 0.886, "48x256x4608x5120": 0.523, "8x2048x4096x7168": 0.805,
}  # fmt: skip


def tokens(rows: int, k: int, *lead: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random e4m3 codes with a scale per 128 channels."""
    x = torch.randn(*lead, rows, k, device="cuda", dtype=torch.bfloat16)
    g = x.float().unflatten(-1, (k // 128, 128))
    scale = g.abs().amax(-1).clamp_min(1e-4) / 448
    return (g / scale[..., None]).flatten(-2).to(FP8), scale


def tokens32(rows: int, k: int, *lead: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random e4m3 codes with an e8m0 scale per 32 channels."""
    x = (torch.randn(*lead, rows, k, device="cuda") * 100).clamp(-448, 448).to(FP8)
    return x, torch.randint(118, 128, (*lead, rows, k // 32), device="cuda", dtype=torch.uint8)


def some_tokens(kind: str, rows: int, k: int, *lead: int) -> tuple[torch.Tensor, Any]:
    """Tokens of a kind of product."""
    if kind == "bf16":
        return torch.randn(*lead, rows, k, device="cuda").bfloat16(), None
    if kind == "fp8_columns":
        x, scale = tokens(rows, k, *lead)
        return x, scale.mT.contiguous().mT
    return (tokens32 if kind.endswith("32") else tokens)(rows, k, *lead)


def weights(kind: str, groups: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Random weights: "fp8" with a scale for 128x128, "fp4" with one for 32, "bf16"."""
    if kind == "bf16":
        return torch.randn(groups, n, k, device="cuda", dtype=torch.bfloat16), None
    if kind.startswith("fp4"):
        q = torch.randint(0, 256, (groups, n, k // 2), device="cuda", dtype=torch.uint8)
        return q, torch.randint(112, 124, (groups, n, k // 32), device="cuda", dtype=torch.uint8)
    q = torch.empty(groups, n, k, device="cuda", dtype=FP8)
    for g in range(groups):
        q[g] = (torch.randn(n, k, device="cuda") * 100).clamp(-448, 448).to(FP8)
    if kind == "fp8_32":
        powers = (groups, -(-n // 32), k // 32)
        return q, torch.randint(112, 124, powers, device="cuda", dtype=torch.uint8)
    return q, torch.rand(groups, -(-n // 128), k // 128, device="cuda") * 0.01 + 0.001


def values(x: torch.Tensor, s: torch.Tensor | None) -> torch.Tensor:
    """Operands times their scales, fp32."""
    from deepinfer.kernels.reference.gemm import dequantise

    return dequantise("it", x, s)


def prepared(kind: str, w: torch.Tensor, s: torch.Tensor | None) -> tuple[Any, Any]:
    """Weights in the form that the kernel reads."""
    if not kind.startswith("fp4"):
        return w, s
    from deepinfer.kernels.reference.folded import prepare_mxfp4_weights

    words, steps = prepare_mxfp4_weights(w, s)
    assert words.dtype == torch.int32, "these weights cannot be folded"
    return words, steps


def folded(x: Any, xs: Any, p: Any, ps: Any, rows_of: Any, out: Any, sizes: tuple[int, ...]) -> Run:
    """A call with prepared MXFP4 weights; sizes that begin with 1 or 2 warpgroups are those of many tokens."""
    from deepinfer.kernels.triton import folded_decoded_launch as many
    from deepinfer.kernels.triton import folded_ragged_launch as ragged
    from deepinfer.kernels.triton import grouped_folded_launch as few
    from deepinfer.kernels.triton.gemm_launch import SwappedTuning

    if sizes[0] == 0:
        depth = ragged.RaggedTuning(sizes[1])
        return lambda: ragged.folded_ragged(x, xs, p, ps, rows_of, out, depth)
    if sizes[0] < 8:
        tuning = many.DecodedTuning(*sizes)
        return lambda: many.folded_decoded(x, xs, p, ps, rows_of, out, tuning)
    return lambda: few.grouped_folded(x, xs, p, ps, rows_of, out, SwappedTuning(*sizes))


def near(wanted: torch.Tensor, found: torch.Tensor, what: str) -> float:
    """Their difference; refuses a large one."""
    assert bool(torch.isfinite(found).all()), f"{what}: not finite"
    diff = calc_diff(wanted, found)
    assert diff < LIMIT, f"{what}: calc_diff {diff:.2e}"
    return diff


def masked(kind: str, groups: int, m: int, n: int, k: int, sizes: tuple[int, ...], small: bool) -> Built:  # fmt: skip
    """A grouped product with rows counted on the device."""
    from deepinfer.kernels.triton.gemm_launch import SwappedTuning, grouped_swapped

    groups, max_m = 7 if small else groups, 64
    x, xs = some_tokens(kind, max_m, k, groups)
    w, ws = weights(kind, groups, n, k)
    counts = torch.full((groups,), m, device="cuda", dtype=torch.int32)
    if small:
        counts = torch.tensor([m, 0, 1, m, 17, 64, 3], device="cuda", dtype=torch.int32)
        for g, c in enumerate(counts.tolist()):
            x.view(torch.uint8)[g, c:] = NAN
            xs.view(torch.uint8)[g, c:] = 255
    out = torch.full((groups, max_m, n), 777.0, device="cuda", dtype=torch.bfloat16)
    p, ps = prepared(kind, w, ws)
    if kind.startswith("fp4"):
        run = folded(x, xs, p, ps, counts, out, sizes)
    else:
        run = lambda: grouped_swapped(x, xs, p, ps, counts, out, SwappedTuning(*sizes))  # noqa: E731

    def check() -> Mapping[str, float]:
        worst = 0.0
        for g, c in enumerate(counts.tolist()):
            assert bool((out[g, c:] == 777).all()), f"group {g}: rows behind {c} were written"
            if c:
                wanted = values(x[g, :c], xs[g, :c]) @ values(w[g], ws[g]).T
                worst = max(worst, near(wanted, out[g, :c], f"group {g}"))
        assert_repeats(run, out)
        return {"calc_diff": worst}

    size = p.numel() * p.itemsize + ps.numel() * ps.itemsize + groups * m * (k + k // 32 + 2 * n)
    return Built(run, check, 2 * groups * m * n * k, size, "fp8",
                 {"deepgemm": lambda: deepgemm_masked(groups, m, n, k)})  # fmt: skip


def dense(kind: str, m: int, n: int, k: int, sizes: tuple[int, ...], small: bool) -> Built:
    """One product of two matrices; sizes that begin with 2 or 3 warpgroups are those of many tokens."""
    from deepinfer.kernels.triton import gemm_launch as launch

    out = torch.full((m, n), 777.0, device="cuda", dtype=torch.bfloat16)
    x, xs = some_tokens(kind, m, k)
    w, ws = weights(kind, 1, n, k)
    p, ps = prepared(kind, w, ws)

    def run() -> None:
        if kind.startswith("fp4"):
            folded(x, xs, p, ps, None, out, sizes)()
        elif sizes[0] >= 16:
            launch.grouped_swapped(
                x[None], xs[None], p, ps, None, out[None], launch.SwappedTuning(*sizes)
            )
        else:
            launch.gemm_tall(x, xs, p, ps, None, out, launch.TallTuning(*sizes))

    def check() -> Mapping[str, float]:
        rows = torch.randperm(m, device="cuda")[:512]
        wanted = values(x[rows], xs[rows] if xs is not None else None) @ values(w[0], None if ws is None else ws[0]).T  # fmt: skip
        found = near(wanted, out[rows], "the product")
        assert_repeats(run, out)
        return {"calc_diff": found}

    size = x.numel() * x.itemsize + p.numel() * p.itemsize + 2 * m * n
    size += 0 if xs is None else xs.numel() * xs.itemsize + ps.numel() * ps.itemsize
    peers: dict[str, Callable[[], Run]] = {}
    if kind == "bf16":
        peers["torch"] = lambda: torch_mm(m, n, k)
    else:
        peers["deepgemm"] = lambda: deepgemm_dense(m, n, k)
    return Built(run, check, 2 * m * n * k, size, "bf16" if kind == "bf16" else "fp8", peers)


def contiguous(kind: str, groups: int, m: int, n: int, k: int, sizes: tuple[int, ...], small: bool) -> Built:  # fmt: skip
    """A grouped product over rows that stand one behind the other."""
    from deepinfer.kernels.triton.gemm_launch import TallTuning, gemm_tall

    groups, used, m = 8 if small else groups, m, -(-m // 128) * 128
    if small:
        m = 384
    x, xs = some_tokens(kind, groups * m, k)
    w, ws = weights(kind, groups, n, k)
    p, ps = prepared(kind, w, ws)
    layout = torch.arange(groups, device="cuda", dtype=torch.int32).repeat_interleave(m)
    layout.view(groups, m)[:, used:] = -1
    if small:
        first = 0
        layout.fill_(-1)
        for g, rows in enumerate((100, 300, 272, 70, 280, 0, 161, 90)):
            layout[first : first + rows] = g
            first += -(-rows // 128) * 128
        x.view(torch.uint8)[layout < 0] = NAN
    out = torch.full((groups * m, n), 777.0, device="cuda", dtype=torch.bfloat16)

    def run() -> None:
        if kind.startswith("fp4"):
            folded(x, xs, p, ps, layout, out, sizes)()
        else:
            gemm_tall(x, xs, p, ps, layout, out, TallTuning(*sizes))

    def check() -> Mapping[str, float]:
        assert bool((out[layout < 0] == 777).all()), "padding rows were written"
        worst = 0.0
        for g in range(groups):
            r = layout == g
            wanted = values(x[r], xs[r]) @ values(w[g], ws[g]).T
            worst = max(worst, near(wanted, out[r], f"group {g}") if int(r.sum()) else 0.0)
        if kind.startswith("fp4"):  # tiles of another size change no bit
            other = torch.full_like(out, 777.0)
            folded(x, xs, p, ps, layout, other, (64, 1, 4, 1, 1))()
            assert torch.equal(out, other), "the bits hang on the tiles"
        assert_repeats(run, out)
        return {"calc_diff": worst}

    rows = groups * used
    size = p.numel() * p.itemsize + ps.numel() * ps.itemsize + rows * (k + k // 32 + 2 * n)
    return Built(run, check, 2 * rows * n * k, size, "fp8",
                 {"deepgemm": lambda: deepgemm_contiguous(groups, used, n, k)} if used == m else {})  # fmt: skip


def invariant(kind: str, m: int, n: int, k: int, sizes: tuple[int, ...], small: bool) -> Built:
    """The linear layer of the batch-invariant mode, which is also for fp32 and for every GPU."""
    from deepinfer.kernels.batch_invariant import linear

    m = max(m, 1024) if small else m
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)

    def check() -> Mapping[str, float]:
        found = linear(x, w)
        rows = torch.randperm(m, device="cuda")[:512]
        for count in (1, 2, 3, 15, 16, 17, 63, 64, 65, 128, 257, 512, 513, 1000):
            some = torch.randperm(m, device="cuda")[:count]
            assert torch.equal(linear(x[some], w), found[some]), f"{count} rows depend on the batch"
        return {"calc_diff": near(x[rows].float() @ w.float().T, found[rows], "the product")}

    peers = {"torch": lambda: torch_mm(m, n, k)}
    size = 2 * (m * k + n * k + m * n)
    return Built(lambda: linear(x, w), check, 2 * m * n * k, size, "bf16", peers)


# ---- peers -----------------------------------------------------------------------------------------------------------


def _deepgemm(*names: str) -> Any:
    import deep_gemm

    return next(getattr(deep_gemm, n) for n in names if hasattr(deep_gemm, n))


def deepgemm_masked(groups: int, m: int, n: int, k: int) -> Run:
    """DeepGEMM with FP8 weights; it has no MXFP4 on Hopper."""
    a, b = tokens(64, k, groups), weights("fp8", groups, n, k)
    out = torch.empty(groups, 64, n, device="cuda", dtype=torch.bfloat16)
    counts = torch.full((groups,), m, device="cuda", dtype=torch.int32)
    f = _deepgemm("m_grouped_fp8_fp4_gemm_nt_masked", "m_grouped_fp8_gemm_nt_masked")
    return lambda: f(a, b, out, counts, m)


def deepgemm_dense(m: int, n: int, k: int) -> Run:
    """DeepGEMM with FP8 weights."""
    a, (w, ws) = tokens(m, k), weights("fp8", 1, n, k)
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    f = _deepgemm("fp8_fp4_gemm_nt", "fp8_gemm_nt")
    return lambda: f(a, (w[0], ws[0]), out)


def deepgemm_contiguous(groups: int, m: int, n: int, k: int) -> Run:
    """DeepGEMM with FP8 weights."""
    a, b = tokens(groups * m, k), weights("fp8", groups, n, k)
    out = torch.empty(groups * m, n, device="cuda", dtype=torch.bfloat16)
    layout = torch.arange(groups, device="cuda", dtype=torch.int32).repeat_interleave(m)
    f = _deepgemm("m_grouped_fp8_fp4_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_contiguous")
    return lambda: f(a, b, out, layout)


def torch_mm(m: int, n: int, k: int) -> Run:
    """torch.mm in bf16."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    return lambda: torch.mm(x, w.T, out=out)


# ---- cases -----------------------------------------------------------------------------------------------------------

Sizes = tuple[int, ...]
FP8_MASKED: dict[int, list[Sizes]] = {
    16: [(16, 2, 6, 1, 2)],
    32: [(32, 2, 5, 1, 2)],
    64: [(64, 2, 4, 1, 2)],
}
FP4_MASKED: dict[int, list[Sizes]] = {
    16: [(16, 1, 5, 2, 3), (16, 1, 4, 2, 4)],
    32: [(32, 1, 3, 2, 3), (32, 1, 3, 2, 4)],
    64: [(64, 1, 4, 2, 2), (64, 1, 5, 1, 3)],
}
FP4X32_MASKED: dict[int, list[Sizes]] = {
    8: [(8, 2, 11, 1, 2)],
    16: [(16, 1, 5, 2, 3), (16, 1, 4, 2, 4)],
    32: [(32, 1, 3, 2, 3)],
    64: [(1, 2, 5), (64, 1, 8, 1, 2)],
}
# Results by bulk copies, or by the threads
TALL: list[Sizes] = [(2, 256, 4, 16, 1, 0, 2), (2, 256, 4, 16)]


def _name(sizes: Sizes) -> str:
    return "x".join(map(str, sizes))


def cases() -> list[Case]:
    """All of them, the most wanted first."""
    found: list[Case] = []

    def add(op: str, build: Any, kind: str, shape: tuple[int, ...], variants: list[Sizes]) -> None:
        text = "x".join(map(str, shape))
        for sizes in variants:
            found.append(
                Case(
                    op,
                    text,
                    f"{kind} {_name(sizes)}",
                    lambda small, s=sizes: build(kind, *shape, s, small),  # type: ignore[misc]
                    peer=None if kind == "bf16" else DEEPGEMM_MS.get(text),
                )
            )

    masked_fp4, masked_fp8 = "m_grouped_fp8_fp4_gemm_nt_masked", "m_grouped_fp8_gemm_nt_masked"
    contiguous_fp4 = "m_grouped_fp8_fp4_gemm_nt_contiguous"
    contiguous_fp8 = "m_grouped_fp8_gemm_nt_contiguous"
    many: list[Sizes] = [(2, 1, 6)]
    # What is open: FP8 of many tokens with tokens out of registers, products of few tokens and rows, powers as values
    add("fp8_gemm_nt", dense, "fp8", (8192, 8192, 8192), TALL)
    add("fp8_gemm_nt", dense, "fp8", (4096, 5120, 8192), TALL)
    add("fp8_gemm_nt", dense, "fp8", (4096, 4096, 7168), TALL)
    add("fp8_gemm_nt", dense, "fp8", (2048, 4096, 7168), TALL)
    shape = (48, 256, 4608, 5120)
    by_groups: list[Sizes] = [(2, 256, 4, 2, 1, 0, 2), (2, 256, 4, 2)]
    add(contiguous_fp8, contiguous, "fp8", shape, by_groups)
    add(contiguous_fp8, contiguous, "fp8", (8, 2048, 4096, 7168), by_groups)
    dense32: list[Sizes] = [(2, 128, 6, 8, 1, 1), (2, 128, 6, 8)]
    add("fp8_gemm_nt", dense, "fp8_32", (8192, 32768, 1280), dense32)
    add("fp8_gemm_nt", dense, "fp8_32", (4096, 4096, 7168), dense32)
    add("fp8_gemm_nt", dense, "fp8", (64, 1280, 5120), [(16, 2, 16, 1, 1, 2)])
    add("fp8_gemm_nt", dense, "fp8", (64, 5120, 8192), [(64, 1, 10, 1, 1, 1, 1)])
    add("fp8_gemm_nt", dense, "fp8_32", (64, 5120, 8192), [(1, 64, 12, 8)])
    add("fp8_gemm_nt", dense, "fp8", (16, 32768, 1280), [(16, 2, 5, 1, 2)])
    shape = (256, 5120, 8192)
    add("fp8_gemm_nt", dense, "fp8", shape, [(2, 128, 6, 8)])
    add("fp8_gemm_nt", dense, "fp8_32", shape, [(2, 128, 6, 8)])
    add("fp8_gemm_nt", dense, "fp8_32", (64, 1280, 5120), [(16, 1, 12)])
    add("bf16_gemm_nt", dense, "bf16", shape, [(2, 128, 6, 8)])
    # What was measured and did not change
    add("batch_invariant.linear", invariant, "bf16", (4096, 4096, 7168), [()])
    for m, n, k in ((4096, 4096, 7168), (8192, 8192, 8192)):
        add("bf16_gemm_nt", dense, "bf16", (m, n, k), [(2, 256, 4, 8)])
    for rows in (64, 32, 16):
        add(masked_fp4, masked, "fp4", (48, rows, 4608, 5120), FP4_MASKED[rows])
    add(contiguous_fp4, contiguous, "fp4", (48, 256, 4608, 5120), [*many, (128, 2, 8, 1, 1)])
    add(contiguous_fp4, contiguous, "fp4x32", (48, 256, 4608, 5120), many)
    shape = (96, 64, 4608, 5120)
    add(contiguous_fp4, contiguous, "fp4x32", shape, [*many, (1, 2, 5), (64, 1, 8, 1, 2)])
    shape = (96, 16, 4608, 5120)
    add(contiguous_fp4, contiguous, "fp4x32", shape, [(16, 1, 5, 2, 3), (32, 1, 3, 2, 3)])
    add(masked_fp4, masked, "fp4x32", (48, 64, 4608, 5120), FP4X32_MASKED[64])
    add("fp8_gemm_nt", dense, "fp8_32", (16, 32768, 1280), [(16, 2, 5, 1, 2)])
    add(masked_fp8, masked, "fp8_32", (48, 32, 4608, 5120), [(32, 2, 5, 1, 2)])
    for rows in (64, 32, 16):
        add(masked_fp8, masked, "fp8", (48, rows, 4608, 5120), FP8_MASKED[rows])
    shape = (48, 32, 5120, 2304)
    add(masked_fp4, masked, "fp4", shape, FP4_MASKED[32])
    add(masked_fp8, masked, "fp8", shape, FP8_MASKED[32])
    for rows in (32, 16):
        add(masked_fp4, masked, "fp4x32", (48, rows, 4608, 5120), FP4X32_MASKED[rows])
    add(masked_fp4, masked, "fp4x32", (384, 1, 4608, 5120), [(8, 2, 11, 1, 2), (16, 2, 10, 1, 2)])
    add("fp8_fp4_gemm_nt", dense, "fp4", (4096, 4096, 7168), [*many, (128, 2, 8, 1, 1)])
    return found
