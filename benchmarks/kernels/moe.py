"""Cases of routing: choice of experts, places, rows there and back."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from harness import REPEATS, Built, Case, assert_repeats, calc_diff, same_bits
from row_checks import assert_rows_alone, compiled, eager

EXPERTS, TOPK, HIDDEN = 384, 6, 5120


def choices(tokens: int, experts: int = EXPERTS, topk: int = TOPK) -> torch.Tensor:
    """Different random experts for each token."""
    return torch.rand(tokens, experts, device="cuda").topk(topk, -1).indices


def gate_steps(x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gate in the operations of torch."""
    scores = torch.nn.functional.softplus(x).sqrt()
    experts = (scores + bias).topk(TOPK, -1).indices
    weights = scores.gather(-1, experts)
    return weights * (1.5 / (weights.sum(-1, keepdim=True) + 1e-20)), experts


def gate(tokens: int, warps: int, calls: int = 1):
    """Builds the choice of experts of V4.1."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.reference import moe as reference
        from deepinfer.kernels.triton import moe_launch as launch

        x = torch.randn(tokens, EXPERTS, device="cuda")
        bias = torch.randn(EXPERTS, device="cuda") * 0.1
        if small:
            x[0], x[1, ::2] = 0.0, float("nan")
            bias[5:9] = bias[5]
            x[2] = torch.randint(-1, 2, (EXPERTS,), device="cuda").float()
        weights = torch.full((tokens, TOPK), 777.0, device="cuda")
        experts = torch.full((tokens, TOPK), 777, device="cuda", dtype=torch.int64)
        fixed = (None, None, None, "sqrtsoftplus", True, 1.5, 1, 1)

        def run() -> None:
            for _ in range(calls):
                launch.gate(x, bias, *fixed, weights, experts, warps)

        def check() -> Mapping[str, float]:
            w, e = torch.empty_like(weights), torch.empty_like(experts)
            reference.topk_gate(x, bias, *fixed, w, e)
            # Scores that differ by rounding may change places.
            near = (e != experts).any(-1)
            assert int(near[:3].sum()) == 0
            assert int(near.sum()) <= tokens * 1e-3, int(near.sum())
            worst = float((w - weights)[~near].nan_to_num(0.0).abs().max())
            assert worst < 1e-6, worst
            assert_repeats(run, weights, experts)
            return {"worst": worst}

        peers = {"torch": eager(gate_steps, x, bias), "compiled": compiled(gate_steps, x, bias)}
        return Built(run, check, size_bytes=calls * tokens * (EXPERTS * 4 + TOPK * 12), peers=peers)

    return build


def gate_forms():
    """Builds the check of every form of the gate."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.moe import topk_gate

        def check() -> Mapping[str, float]:
            x = torch.randn(200, 256, device="cuda")
            bias, other = torch.randn(2, 256, device="cuda")
            is_image = torch.rand(200, device="cuda") < 0.5
            some = torch.tensor([150], device="cuda")
            for score in ("sqrtsoftplus", "sigmoid", "softmax"):
                for keys in (
                    {},
                    {"groups": 8, "topk_groups": 4},
                    {"bias_vl": other, "is_image": is_image, "scale": 2.5},
                    {"renormalise": False, "num_tokens": some},
                ):
                    w, e = topk_gate(x, bias, 8, score=score, backend="torch", **keys)
                    v, f = topk_gate(x, bias, 8, score=score, backend="triton", **keys)
                    same = (e == f).all(-1)
                    assert float(same.float().mean()) > 0.98, (score, keys)
                    assert float((w - v)[same].abs().max()) < 1e-5
            bf16 = x.bfloat16()
            assert torch.equal(
                topk_gate(bf16, None, 8, backend="triton")[1][:, 0], bf16.float().argmax(-1)
            )
            given = (torch.randn(1000, 384, device="cuda"),)
            assert_rows_alone(lambda x: topk_gate(x, None, 6, backend="triton"), given)
            assert topk_gate(x[:0], bias, 8)[1].shape == (0, 8)
            return {}

        return Built(lambda: None, check)

    return build


def map_steps(ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Places by a sort, in the operations of torch."""
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(EXPERTS, device=ids.device, dtype=torch.int64)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    padded = (counts + 127) // 128 * 128
    start, first = padded.cumsum(0) - padded, counts.cumsum(0) - counts
    ranks = torch.arange(len(flat), device=ids.device) - first[flat[order]]
    place = torch.empty_like(flat)
    place[order] = start[flat[order]] + ranks
    size = len(flat) + EXPERTS * 127
    layout = torch.full((size,), -1, device=ids.device, dtype=torch.int32)
    layout[place] = flat.int()
    pairs = torch.full((size,), -1, device=ids.device, dtype=torch.int64)
    pairs[place] = torch.arange(len(flat), device=ids.device)
    return place, layout, pairs, start


def mapping(tokens: int, masked: bool, sizes: tuple[int, int, int] | None, directly: int):
    """Builds places of pairs."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.moe import get_fused_mapping
        from deepinfer.kernels.triton import moe_launch as launch

        ids = choices(tokens)
        if small:
            ids[torch.rand(tokens, TOPK, device="cuda") < 0.1] = -1
            ids[0, 0] = 100_000
            ids[tokens // 3 : tokens // 2, 0] = 7
        max_m = tokens if masked else None
        want = get_fused_mapping(ids, EXPERTS, max_m=max_m, backend="torch")
        parts = [torch.full_like(p, 777) for p in want[:5]]
        run = lambda: launch.mapping(ids, EXPERTS, 128, max_m, *parts, sizes, directly)  # noqa: E731

        def check() -> Mapping[str, float]:
            for own, right, name in zip(parts, want, want._fields, strict=False):
                assert torch.equal(own, right), name
            assert_repeats(run, *[p for p in parts if p.numel()])
            return {"differing": 0.0}

        peers = {"torch": eager(map_steps, ids)}
        size = ids.numel() * 12 + 8 * parts[1].numel()
        return Built(run, check, size_bytes=size, peers=peers)

    return build


def rows_of(tokens: int, kind: str, sizes: tuple[int, int] | None):
    """Builds the copy of rows to their places, or the sum of rows."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.moe import get_fused_mapping
        from deepinfer.kernels.reference import moe as reference
        from deepinfer.kernels.triton import moe_launch as launch

        ids = choices(tokens)
        if small:
            ids[torch.rand(tokens, TOPK, device="cuda") < 0.1] = -1
            ids[5] = -1
        map_ = get_fused_mapping(ids, EXPERTS, backend="torch")
        places = map_.token_topk_to_pos
        weights = torch.rand(tokens, TOPK, device="cuda")
        pairs = int((places >= 0).sum())
        flat = places[places >= 0].long()
        token = (places >= 0).nonzero()[:, 0]
        if kind == "reduce":
            y = torch.full(
                (map_.num_places, HIDDEN), float("nan"), device="cuda", dtype=torch.bfloat16
            )
            y[flat] = torch.randn(pairs, HIDDEN, device="cuda").bfloat16()
            out = torch.full((tokens, HIDDEN), 777.0, device="cuda", dtype=torch.bfloat16)
            run = lambda: launch.reduce(y, weights, places, None, out, sizes)  # noqa: E731

            def check() -> Mapping[str, float]:
                want = torch.empty_like(out)
                reference.reduce_fused(y, weights, places, None, want)
                assert same_bits(out, want)
                assert_repeats(run, out)
                return {"differing": 0.0}

            def steps(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
                rows = y.index_select(0, flat).view(tokens, TOPK, HIDDEN)
                return (rows * weights.unsqueeze(-1)).sum(1)

            peers = (
                {}
                if small
                else {"torch": eager(steps, y, weights), "compiled": compiled(steps, y, weights)}
            )
            return Built(run, check, size_bytes=(pairs + tokens) * HIDDEN * 2, peers=peers)
        fp8 = kind == "expand fp8"
        x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        scale = out_scale = None
        out = torch.zeros((map_.num_places, HIDDEN), device="cuda", dtype=torch.bfloat16)
        if fp8:
            x, out = x.to(torch.float8_e4m3fn), out.to(torch.float8_e4m3fn)
            scale = torch.rand(tokens, HIDDEN // 128, device="cuda")
            out_scale = torch.zeros((len(out), HIDDEN // 128), device="cuda")
        out_weights = torch.zeros((len(out),), device="cuda")
        given = (x, scale, weights, places)
        run = lambda: launch.expand(*given, out, out_scale, out_weights, sizes)  # noqa: E731

        def check() -> Mapping[str, float]:
            want = [
                torch.zeros_like(t) if t is not None else None
                for t in (out, out_scale, out_weights)
            ]
            reference.expand_to_fused(*given, *want)
            for own, right in zip((out, out_scale, out_weights), want, strict=True):
                assert own is None or same_bits(own, right)
            return {"differing": 0.0}

        size = x.shape[1] * x.itemsize + (160 if fp8 else 0)
        row = x.view(torch.uint8) if fp8 else x
        peers = {"torch": lambda: lambda: row.index_select(0, token)}
        return Built(run, check, size_bytes=(pairs + tokens) * size, peers=peers)

    return build


def swiglu(tokens: int, sizes: tuple[int, int, int] | None):
    """Builds SwiGLU of the rows of pairs and its cast."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.moe import get_fused_mapping
        from deepinfer.kernels.reference import moe as reference
        from deepinfer.kernels.triton import moe_launch as launch

        ids = choices(tokens)
        if small:
            ids[torch.rand(tokens, TOPK, device="cuda") < 0.1] = -1
        map_ = get_fused_mapping(ids, EXPERTS, backend="torch")
        places, weights = map_.token_topk_to_pos, torch.rand(tokens, TOPK, device="cuda")
        x = torch.full((map_.num_places, 4608), float("nan"), device="cuda", dtype=torch.bfloat16)
        flat = places[places >= 0].long()
        x[flat] = (torch.randn(len(flat), 4608, device="cuda") * 5).bfloat16()
        q = torch.zeros((len(x), 2304), device="cuda").to(torch.float8_e4m3fn)
        scale = torch.zeros((len(x), 18), device="cuda")
        given = (x, weights, places, 10.0, 128)
        run = lambda: launch.swiglu(*given, q, scale, sizes)  # noqa: E731

        def check() -> Mapping[str, float]:
            codes, factors = torch.zeros_like(q), torch.zeros_like(scale)
            reference.silu_and_mul_quant_fused(*given, codes, factors)
            own, right = (
                (q.float() * scale.repeat_interleave(128, -1)),
                codes.float() * factors.repeat_interleave(128, -1),
            )
            differs = float((own != right).float().mean())
            diff = calc_diff(own, right)
            assert diff < 1e-5, (diff, differs)
            codes, factors = q.view(torch.uint8)[flat], scale[flat]
            for _ in range(REPEATS):
                q.view(torch.uint8).fill_(111)
                scale.fill_(777.0)
                run()
                assert torch.equal(q.view(torch.uint8)[flat], codes)
                assert torch.equal(scale[flat], factors)
            return {"diff": diff, "differing": differs}

        size = len(flat) * (4608 * 2 + 2304 + 72)
        return Built(run, check, size_bytes=size)

    return build


def expert_weights(
    count: int, hidden: int, inter: int, fold: bool
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Random MXFP4 weights of both products, prepared or not."""
    from deepinfer.kernels.reference.folded import prepare_mxfp4_weights

    pairs = []
    for rows, k in ((2 * inter, hidden), (hidden, inter)):
        q = torch.randint(0, 256, (count, rows, k // 2), device="cuda", dtype=torch.uint8)
        s = torch.randint(116, 121, (count, rows, k // 32), device="cuda", dtype=torch.uint8)
        pairs.append(prepare_mxfp4_weights(q, s) if fold else (q, s))
    return pairs


@lru_cache(maxsize=1)
def prepared_weights(
    count: int, hidden: int, inter: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same for all cases that are timed: to make them takes longer than to time them."""
    return expert_weights(count, hidden, inter, True)


def experts(tokens: int, kind: str, layout: str, sizes: tuple[int, ...] | None = None):
    """Builds all routed experts of a layer of V4.1 with MXFP4 weights; `sizes` instead of those of the table."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.configs import gemm as configs
        from deepinfer.kernels.experts import fused_experts
        from deepinfer.kernels.reference.folded import prepare_mxfp4_weights

        count, hidden, inter = (24, 1024, 512) if small else (EXPERTS, HIDDEN, 2304)
        n = tokens if not small else 50 if tokens < 4096 else 500
        plain = pairs = expert_weights(count, hidden, inter, False) if small or kind == "plain" else []  # fmt: skip
        if small and kind != "plain":
            pairs = [prepare_mxfp4_weights(*p) for p in plain]
        elif not small and kind != "plain":
            pairs = prepared_weights(count, hidden, inter)
        x = torch.randn(n, hidden, device="cuda").bfloat16()
        ids = choices(n, count)
        if small:
            ids[3], ids[4, 2] = -1, count + 3
        weights = torch.rand(n, TOPK, device="cuda")
        out = torch.full((n, hidden), 777.0, device="cuda", dtype=torch.bfloat16)

        def run(backend: str | None = None, weights_of=pairs, to=out) -> torch.Tensor:
            kept = configs.CONTIGUOUS_MXFP4
            if sizes is not None:
                configs.CONTIGUOUS_MXFP4 = (("", 0, 0, 0, sizes),)
            try:
                return call(backend, weights_of, to)
            finally:
                configs.CONTIGUOUS_MXFP4 = kept

        def call(backend: str | None, weights_of, to) -> torch.Tensor:
            return fused_experts(
                x,
                *weights_of,
                weights,
                ids,
                limit=10.0,
                scale_group=32 if kind == "prepared 32" else 128,
                layout="contiguous" if tokens >= 1024 else layout,
                out=to,
                backend=backend,
            )

        def check() -> Mapping[str, float]:
            want = run("torch", plain, torch.empty_like(out))
            diff = calc_diff(out, want)
            assert diff < 1e-3, diff
            assert bool((out[3] == 0).all())
            assert_repeats(run, out)
            return {"diff": diff}

        used = len(ids.unique())
        size = used * (3 * hidden * inter // 2 * 33 // 32) + 2 * x.numel() * 2
        return Built(run, check, 2 * n * TOPK * 3 * hidden * inter, size, "fp8")

    return build


def cases() -> list[Case]:
    """The cases, the most wanted first."""
    found = [Case("topk_gate", "all forms", "table", gate_forms(), check_only=True)]
    for tokens in (64, 8192):
        found.append(Case("topk_gate", f"{tokens} x 384, top-6", "w1", gate(tokens, 1)))
        found.append(
            Case("get_fused_mapping", f"{tokens} x 6", "table", mapping(tokens, False, None, 2048))
        )
        found.append(
            Case("silu_and_mul_quant_fused", f"{tokens} x 6 x 2304", "table", swiglu(tokens, None))
        )
    found.append(Case("get_fused_mapping", "64 x 6 masked", "table", mapping(64, True, None, 2048)))
    others: dict[int, list[tuple[int, ...]]] = {
        8192: [(2, 1, 6)],
        4096: [(64, 1, 4, 2, 2)],
        2048: [(0, 7)],
    }
    for tokens in (8192, 4096, 2048, 1024, 512, 256, 64):
        shape = f"{tokens} x 6 of 384 MXFP4"
        found.append(
            Case("fused_experts", shape, "prepared 32 auto", experts(tokens, "prepared 32", "auto"))
        )
        for sizes in others.get(tokens, ()):
            case = experts(tokens, "prepared 32", "contiguous", sizes)
            name = f"prepared 32 {'x'.join(map(str, sizes))}"
            found.append(Case("fused_experts", shape, name, case))
    found.append(
        Case(
            "fused_experts",
            "8192 x 6 of 384 MXFP4",
            "prepared auto",
            experts(8192, "prepared", "auto"),
        )
    )
    # What was measured and did not change
    found.append(Case("topk_gate", "64 x 384, top-6, 20 calls", "w1", gate(64, 1, 20)))
    forms = [("direct", (512, 128, 4), 10**9), ("counted", (512, 128, 4), 0)]
    for tokens in (64, 512, 8192):
        for name, sizes, directly in forms:
            case = mapping(tokens, False, sizes, directly)
            found.append(Case("get_fused_mapping", f"{tokens} x 6", name, case))
    for tokens in (256, 8192):
        for kind in ("expand bf16", "expand fp8", "reduce"):
            op = "reduce_fused" if kind == "reduce" else "expand_to_fused"
            shape = f"{tokens} x 6 x {HIDDEN} {kind.split()[-1]}"
            found.append(Case(op, shape, "table", rows_of(tokens, kind, None)))
    for kind in ("plain", "prepared"):
        found.append(
            Case(
                "fused_experts",
                "64 x 6 of 384 MXFP4",
                f"{kind} masked",
                experts(64, kind, "masked"),
            )
        )
    return found
