"""Matrix products on a Hopper GPU: checked on fresh random data, then timed.

    [KERNELS=masked,dense_fp8] python benchmarks/kernels_hopper.py [--rounds variants|final] [--out FILE.jsonl]

Every variant runs once in a process of its own, where it is compiled and compared with fp32 references; what failed is
not timed. Times are medians of `triton.testing.do_bench` over graph replays, the L2 cache flushed before each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

import torch

FP8 = torch.float8_e4m3fn
REPEATS = int(os.environ.get("REPEATS", "20"))
ANCHORS = {  # DeepGEMM 0.1.5 (SGLang's build) on the same card, ms
    "masked_fp8 48x1x4608x5120": 0.297,
    "masked_fp8 48x8x4608x5120": 0.297,
    "masked_fp8 48x16x4608x5120": 0.298,
    "masked_fp8 48x32x4608x5120": 0.298,
    "masked_fp8 48x64x4608x5120": 0.299,
    "masked_fp8 48x32x5120x2304": 0.159,
    "dense_fp8 64x5120x8192": 0.0242,
    "dense_fp8 16x32768x1280": 0.0236,
    "dense_fp8 4096x4096x7168": 0.187,
    "dense_fp8 8192x8192x8192": 0.886,
    "contiguous_fp8 48x256x4608x5120": 0.523,
    "contiguous_fp8 8x2048x4096x7168": 0.805,
}
for key in [k for k in ANCHORS if k.startswith("masked_fp8")]:
    ANCHORS[key.replace("masked_fp8", "masked_mxfp4")] = ANCHORS[key]


def quantised(rows: int, k: int, *lead: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random e4m3 codes with a scale per 128 channels."""
    x = torch.randn(*lead, rows, k, device="cuda", dtype=torch.bfloat16)
    g = x.float().unflatten(-1, (k // 128, 128))
    scale = g.abs().amax(-1).clamp_min(1e-4) / 448
    return (g / scale[..., None]).flatten(-2).to(FP8), scale


def block_weights(groups: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 weights with a scale for each block of 128 x 128."""
    q = torch.empty(groups, n, k, device="cuda", dtype=FP8)
    for g in range(groups):
        q[g] = (torch.randn(n, k, device="cuda") * 100).clamp(-448, 448).to(FP8)
    return q, torch.rand(groups, -(-n // 128), k // 128, device="cuda") * 0.01 + 0.001


def fp4_weights(groups: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP4 weights: two codes a byte, an e8m0 scale for 32."""
    q = torch.randint(0, 256, (groups, n, k // 2), device="cuda", dtype=torch.uint8)
    s = torch.randint(110, 131, (groups, n, k // 32), device="cuda", dtype=torch.uint8)
    return q, s


def dequant_x(q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Rows times their scales, one for 128 columns, in fp32."""
    return (q.float().unflatten(-1, (-1, 128)) * s[..., None]).flatten(-2)


def dequant_w(q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Weights times their scales, one for each block, in fp32."""
    if q.dtype == torch.uint8:
        grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=q.device)
        grid = torch.cat([grid, -grid])
        v = torch.stack([grid[(q & 15).long()], grid[(q >> 4).long()]], -1).flatten(-2)
        f = torch.exp2(s.float() - 127)
        return (v.unflatten(-1, (-1, 32)) * f[..., None]).flatten(-2)
    f = s.repeat_interleave(128, -2)[..., : q.shape[-2], :].repeat_interleave(128, -1)
    return q.float() * f


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """1 - 2<x, y> / (|x|^2 + |y|^2) in fp64."""
    x, y = x.double(), y.double()
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


# ---- one case: build(small) -> (run, check, flops, bytes) -------------------------------------------------------------


def masked(packed: bool, groups: int, m: int, n: int, k: int, tuning: tuple, small: bool):
    """A grouped product with rows counted on the device."""
    from deepinfer.kernels.triton.gemm_launch import SwappedTuning, grouped_swapped

    max_m = 64
    if small:
        groups = 7
    x, xs = quantised(max_m, k, groups)
    w, ws = fp4_weights(groups, n, k) if packed else block_weights(groups, n, k)
    counts = torch.full((groups,), m, device="cuda", dtype=torch.int32)
    if small:
        counts = torch.tensor([m, 0, 1, m, min(17, max_m), 64, 3], device="cuda", dtype=torch.int32)
        for g, c in enumerate(counts.tolist()):
            x.view(torch.uint8)[g, c:] = 0x7F  # NaN
            xs[g, c:] = float("nan")
    out = torch.full((groups, max_m, n), 777.0, device="cuda", dtype=torch.bfloat16)
    t = SwappedTuning(*tuning)
    run = lambda: grouped_swapped(x, xs, w, ws, counts, out, t)  # noqa: E731

    def check() -> dict:
        worst = 0.0
        for g, c in enumerate(counts.tolist()):
            assert bool((out[g, c:] == 777).all()), f"group {g}: rows behind {c} were written"
            if c:
                ref = dequant_x(x[g, :c], xs[g, :c]) @ dequant_w(w[g], ws[g]).T
                assert bool(torch.isfinite(out[g, :c]).all()), f"group {g} not finite"
                worst = max(worst, calc_diff(ref, out[g, :c]))
        first = out.clone()
        wrong = 0
        for _ in range(REPEATS):
            out.fill_(777)
            run()
            wrong += not torch.equal(out, first)
        assert not wrong, (
            f"{wrong} of {REPEATS} repeats differ, the last in {(out != first).nonzero()[:6].tolist()}"
        )
        return {"diff": worst}

    weight_bytes = w.numel() * w.itemsize + ws.numel() * ws.itemsize
    return run, check, 2 * groups * m * n * k, weight_bytes + groups * m * (k + k // 32 + 2 * n)


def dense(kind: str, m: int, n: int, k: int, tuning: tuple, small: bool):
    """One product of two matrices."""
    from deepinfer.kernels.triton import gemm_launch as gemm

    swapped = len(tuning) >= 5
    out = torch.full((m, n), 777.0, device="cuda", dtype=torch.bfloat16)
    if kind == "fp8":
        x, xs = quantised(m, k)
        w, ws = block_weights(1, n, k)
    else:
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(1, n, k, device="cuda", dtype=torch.bfloat16)
        xs = ws = None
    if swapped:
        t = gemm.SwappedTuning(*tuning)
        run = lambda: gemm.grouped_swapped(x[None], xs[None], w, ws, None, out[None], t)  # noqa: E731
    else:
        t = gemm.TallTuning(*tuning)
        run = lambda: gemm.gemm_tall(x, xs, w, ws, None, out, t)  # noqa: E731

    def check() -> dict:
        ref = (dequant_x(x, xs) if xs is not None else x.float()) @ (
            dequant_w(w[0], ws[0]) if ws is not None else w[0].float()
        ).T
        first = out.clone()
        for _ in range(5):
            out.fill_(777)
            run()
            assert torch.equal(out, first), "repeats differ"
        return {"diff": calc_diff(ref, out)}

    b = x.itemsize
    return run, check, 2 * m * n * k, b * (m * k + n * k) + 2 * m * n


def contiguous(groups: int, m: int, n: int, k: int, tuning: tuple, small: bool):
    """A grouped product over rows that stand one behind the other."""
    from deepinfer.kernels.triton.gemm_launch import TallTuning, gemm_tall

    if small:
        groups = 3
    x, xs = quantised(groups * m, k)
    w, ws = block_weights(groups, n, k)
    layout = torch.arange(groups, device="cuda", dtype=torch.int32).repeat_interleave(m)
    if small:
        layout[m - 5 : m] = -1
        layout[2 * m :] = -1
        layout[2 * m : 2 * m + 200] = 2
        x.view(torch.uint8)[layout < 0] = 0x7F
    out = torch.full((groups * m, n), 777.0, device="cuda", dtype=torch.bfloat16)
    t = TallTuning(*tuning)
    run = lambda: gemm_tall(x, xs, w, ws, layout, out, t)  # noqa: E731

    def check() -> dict:
        assert bool((out[layout < 0] == 777).all()), "padding rows were written"
        worst = 0.0
        for g in range(groups):
            r = layout == g
            ref = dequant_x(x[r], xs[r]) @ dequant_w(w[g], ws[g]).T
            worst = max(worst, calc_diff(ref, out[r]))
        return {"diff": worst}

    rows = groups * m
    return run, check, 2 * rows * n * k, groups * n * k + rows * k + 2 * rows * n


def peer(name: str, build, args: tuple):
    """The published DeepGEMM, or torch, on the same shape with fresh data."""
    kind = name.split()[0]
    if kind == "dense_bf16":
        _, m, n, k = args
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        return lambda: torch.mm(x, w.T, out=out)
    import deep_gemm as dg

    def pick(*names):
        return next(getattr(dg, n) for n in names if hasattr(dg, n))

    if kind == "dense_fp8":
        _, m, n, k = args
        a, (w, ws) = quantised(m, k), block_weights(1, n, k)
        out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        f = pick("fp8_fp4_gemm_nt", "fp8_gemm_nt")
        return lambda: f(a, (w[0], ws[0]), out)
    if kind == "masked_fp8":
        _, g, m, n, k = args
        a, b = quantised(64, k, g), block_weights(g, n, k)
        out = torch.empty(g, 64, n, device="cuda", dtype=torch.bfloat16)
        counts = torch.full((g,), m, device="cuda", dtype=torch.int32)
        f = pick("m_grouped_fp8_fp4_gemm_nt_masked", "m_grouped_fp8_gemm_nt_masked")
        return lambda: f(a, b, out, counts, m)
    if kind == "contiguous_fp8":
        g, m, n, k = args
        a, b = quantised(g * m, k), block_weights(g, n, k)
        out = torch.empty(g * m, n, device="cuda", dtype=torch.bfloat16)
        layout = torch.arange(g, device="cuda", dtype=torch.int32).repeat_interleave(m)
        f = pick("m_grouped_fp8_fp4_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_contiguous")
        return lambda: f(a, b, out, layout)
    return None


def cases(rounds: str) -> list[tuple]:
    """(name, builder, args, variants)."""
    out: list[tuple] = []
    swap8 = {
        64: [(64, 2, 8), (64, 2, 8, 1, 1, True), (64, 1, 6, 1, 2, True), (64, 2, 4, 1, 2, True)],
        32: [(32, 2, 5, 1, 2), (32, 2, 10), (32, 2, 5, 1, 2, True)],
        16: [(16, 2, 6, 1, 2), (16, 2, 6, 1, 2, True)],
    }
    swap4 = {
        64: [(64, 2, 6, 2), (64, 2, 12, 1), (64, 1, 6, 1, 2), (64, 1, 4, 2, 2)],
        32: [(32, 2, 8, 2), (32, 1, 4, 2, 2), (32, 2, 8, 1, 2), (32, 1, 6, 1, 3), (32, 1, 3, 2, 3)],
        16: [(16, 2, 5, 2, 2), (16, 1, 5, 2, 3), (16, 1, 5, 1, 4), (16, 1, 8, 1, 4)],
    }
    for packed, table in ((False, swap8), (True, swap4)):
        for m in (16, 32, 64):
            v = table[m]
            name = f"masked_{'mxfp4' if packed else 'fp8'} 48x{m}x4608x5120"
            out.append((name, masked, (packed, 48, m, 4608, 5120), v))
        v = table[32]
        name = f"masked_{'mxfp4' if packed else 'fp8'} 48x32x5120x2304"
        out.append((name, masked, (packed, 48, 32, 5120, 2304), v))
    small = [(64, 1, 10, 1, 1), (64, 1, 10, 1, 1, True)]
    out.append(("dense_fp8 64x5120x8192", dense, ("fp8", 64, 5120, 8192), small))
    small = [(16, 1, 16, 1, 1), (16, 2, 10, 1, 1), (16, 2, 5, 1, 2)]
    out.append(("dense_fp8 16x32768x1280", dense, ("fp8", 16, 32768, 1280), small))
    tall = [(2, 128, 6, 8), (3, 128, 5, 8), (3, 128, 5, 16)]
    for m, n, k in ((2048, 4096, 7168), (4096, 4096, 7168), (8192, 8192, 8192)):
        out.append((f"dense_fp8 {m}x{n}x{k}", dense, ("fp8", m, n, k), tall))
    out.append(
        (
            "contiguous_fp8 48x256x4608x5120",
            contiguous,
            (48, 256, 4608, 5120),
            [tall[0], (2, 128, 6, 4)],
        )
    )
    out.append(("contiguous_fp8 8x2048x4096x7168", contiguous, (8, 2048, 4096, 7168), tall[:1]))
    tall16 = [(2, 256, 4, 8), (3, 128, 5, 8)]
    for m, n, k in ((4096, 4096, 7168), (8192, 8192, 8192)):
        out.append((f"dense_bf16 {m}x{n}x{k}", dense, ("bf16", m, n, k), tall16))
    if rounds == "final":
        chosen = {
            "masked_fp8 48x16": [(16, 2, 6, 1, 2)],
            "masked_fp8 48x32": [(32, 2, 5, 1, 2)],
            "masked_fp8 48x64": [(64, 2, 4, 1, 2, True), (64, 2, 8, 1, 1, True)],
            "masked_mxfp4 48x16": [(16, 1, 5, 1, 4), (16, 1, 5, 2, 3), (16, 1, 8, 1, 4)],
            "masked_mxfp4 48x32": [(32, 1, 3, 2, 3), (32, 2, 8, 2)],
            "masked_mxfp4 48x64": [(64, 2, 6, 2)],
            "dense_fp8 64": [(64, 1, 10, 1, 1, True)],
            "dense_fp8 16": [(16, 2, 5, 1, 2)],
            "dense_fp8 2048": [(2, 128, 6, 8)],
            "dense_fp8 4096": [(2, 128, 6, 8)],
            "dense_fp8 8192": [(3, 128, 5, 16)],
            "contiguous_fp8": [(2, 128, 6, 8)],
            "dense_bf16": [(2, 256, 4, 8)],
        }
        out = [
            (name, build, args, next(v for k, v in chosen.items() if name.startswith(k)))
            for name, build, args, _ in out
        ]
    only = tuple(os.environ.get("KERNELS", "").split(","))
    return [case for case in out if case[0].startswith(only)]


def worker(rounds: str, index: int, count: int) -> None:
    """Compiles and checks every count-th variant; one JSON line each."""
    torch.backends.cuda.matmul.allow_tf32 = False
    jobs = [(n, b, a, v) for n, b, a, vs in cases(rounds) for v in vs]
    if rounds != "variants":
        jobs += [(n, b, a, ("peer",)) for n, b, a, _ in cases(rounds) if "mxfp4" not in n]
    for i, (name, build, args, variant) in enumerate(jobs):
        if i % count != index:
            continue
        torch.manual_seed(1000 + i + int(time.time()))
        row = {"name": name, "variant": variant}
        try:
            if variant == ("peer",):
                run, check = peer(name, build, args), lambda: {"diff": 0.0}
            else:
                run, check, _, _ = build(*args, variant, True)
            run()
            torch.cuda.synchronize()
            row |= check()
            limit = 5e-6
            row["ok"] = abs(row["diff"]) < limit
        except Exception as error:
            row |= {"ok": False, "error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(json.dumps(row), flush=True)
        run = check = None
        torch.cuda.empty_cache()


def measure(run) -> float:
    """Milliseconds of a call: the median over graph replays."""
    import triton

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return float(triton.testing.do_bench(graph.replay, warmup=10, rep=60, return_mode="median"))


def main() -> int:
    """Checks and times every case, and prints a table last."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", default="variants")
    parser.add_argument("--worker", type=int, default=None)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--out", default=None)
    parser.add_argument("--check-s", type=float, default=150)
    options = parser.parse_args()
    if options.worker is not None:
        worker(options.rounds, options.worker, options.workers)
        return 0
    begin = time.time()
    command = [
        sys.executable,
        __file__,
        "--rounds",
        options.rounds,
        "--workers",
        str(options.workers),
    ]
    processes = [
        subprocess.Popen([*command, "--worker", str(i)], stdout=subprocess.PIPE, text=True)
        for i in range(options.workers)
    ]
    checked = {}
    for p in processes:
        try:
            text = p.communicate(timeout=max(5, options.check_s - (time.time() - begin)))[0]
        except subprocess.TimeoutExpired:
            p.kill()
            text = p.communicate()[0]
        for line in text.splitlines():
            if line.startswith("{"):
                row = json.loads(line)
                checked[row["name"], tuple(row["variant"])] = row
    print(f"checked {len(checked)} in {time.time() - begin:.0f} s", flush=True)
    file = open(options.out, "a") if options.out else None  # noqa: SIM115 - written line by line until the end
    best = {}
    for name, build, args, variants in cases(options.rounds):
        for v in variants:
            row = checked.get((name, tuple(v)), {"ok": False, "error": "no answer"})
            if not row["ok"]:
                print(
                    "BAD",
                    name,
                    v,
                    {k: x for k, x in row.items() if k not in ("name", "variant")},
                    flush=True,
                )
                continue
            try:
                run, _, flops, size = build(*args, v, False)
                ms = measure(run)
            except Exception as error:
                print("BAD time", name, v, str(error)[:200], flush=True)
                continue
            run = None
            line = {"op": name, "variant": list(v), "ms": round(ms, 5), "diff": row["diff"],
                    "tb_s": round(size / ms / 1e9, 3), "tflop_s": round(flops / ms / 1e9, 1)}  # fmt: skip
            if name in ANCHORS:
                line["speed_of_anchor"] = round(ANCHORS[name] / ms, 3)
            if file:
                file.write(json.dumps(line) + "\n")
                file.flush()
            print(f"{name:36} {v!s:22} {ms:8.4f} ms {line['tb_s']:6.2f} TB/s {line['tflop_s']:7.0f} TF {line.get('speed_of_anchor', '')} d{row['diff']:.0e}", flush=True)  # fmt: skip
        torch.cuda.empty_cache()
        if checked.get((name, ("peer",)), {"ok": False})["ok"]:
            ms = measure(peer(name, build, args))
            line = {"op": name, "variant": ["peer"], "ms": round(ms, 5)}
            if file:
                file.write(json.dumps(line) + "\n")
                file.flush()
            print(f"{name:36} {'peer':22} {ms:8.4f} ms", flush=True)
    print(f"total {time.time() - begin:.0f} s", best)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
