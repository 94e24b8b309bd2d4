"""Cases of the selection of the k largest."""

from __future__ import annotations

from collections.abc import Callable

import torch
from harness import Built, Case, assert_repeats

NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def spoil(x: torch.Tensor, k: int) -> torch.Tensor:
    """Makes the first rows hard, and returns lengths."""
    rows, n = x.shape
    x[1] = 1.5
    x[2] = torch.randint(-2, 3, (n,), device="cuda").to(x.dtype)
    x[3, ::2] = float("nan")
    x[4] = torch.arange(n, device="cuda").to(x.dtype)
    x[5, : n // 2] = float("-inf")
    x[6] = 0.0
    x[6, ::3] = -0.0
    x[10] = float("nan")
    x[11, n // 3 : n // 3 + 2 * k] += 40
    lengths = torch.randint(1, n + 1, (rows,), device="cuda", dtype=torch.int32)
    lengths[:7] = n
    lengths[10:14] = n
    lengths[7], lengths[8], lengths[9] = 0, min(k, n), min(k + 1, n)
    return lengths


def verify(x: torch.Tensor, k: int, lengths: torch.Tensor, out: torch.Tensor) -> None:
    """Compares with a stable sort: the set, its order, what is behind it."""
    for r in range(len(x)):
        v = x[r, : int(lengths[r])].double()
        v = torch.where(v.isnan(), torch.full_like(v, -1e308), v.clamp(-1e300, 1e300)) + 0.0
        best = torch.sort(v, descending=True, stable=True).indices[:k].sort().values.int()
        assert torch.equal(out[r, : len(best)], best), f"row {r} of {x.shape}, k {k}"
        assert bool((out[r, len(best) :] == -1).all()), f"fill of row {r}"


def select(dtype: torch.dtype, rows: int, n: int, k: int, kind: str, tuning: tuple[int, ...]):
    """Builds a selection by one of the kernels, or by the table."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.topk import TOPK
        from deepinfer.kernels.triton import topk_launch as launch

        count = 18 if small else rows
        x = torch.randn(count, n, device="cuda").to(dtype)
        lengths = spoil(x, k) if small else None
        wide = torch.full((count, k + 9), -7, device="cuda", dtype=torch.int32)
        out = wide[:, 5 : 5 + k]
        if kind == "table":
            run = lambda: TOPK(None, x, k, lengths, out, -1)  # noqa: E731
        elif kind == "grouped":
            conf = launch.GroupedTuning(*tuning)
            run = lambda: launch.topk_grouped(x, k, lengths, out, -1, conf)  # noqa: E731
        elif kind == "groups":
            groups = launch.ByGroupsTuning(*tuning)
            run = lambda: launch.topk_by_groups(x, k, lengths, out, -1, groups)  # noqa: E731
        elif kind == "wide":
            own = launch.WideTuning(*tuning)
            run = lambda: launch.topk_wide(x, k, lengths, out, -1, own)  # noqa: E731
        else:
            sizes = launch.TopkTuning(*tuning)
            run = lambda: launch.topk_select(x, k, lengths, out, -1, sizes)  # noqa: E731

        def check():
            verify(x, k, lengths, out)
            assert bool((wide[:, :5] == -7).all() and (wide[:, 5 + k :] == -7).all())
            assert_repeats(run, out)
            want = out[3].clone()
            other = torch.randn_like(x)
            other[0] = x[3]
            x.copy_(other)
            lengths.fill_(n)
            run()
            assert torch.equal(out[0], want), "a row's result hangs on its place"
            return {"differing": 0.0}

        def torch_peer() -> Callable:
            return lambda: torch.topk(x, k, sorted=False)

        def flashinfer_peer() -> Callable:
            import flashinfer

            return lambda: flashinfer.top_k(x, k)

        peers = {"torch": torch_peer, "flashinfer": flashinfer_peer}
        size = count * (n * x.itemsize + 4 * k)
        return Built(run, check, size_bytes=size, peers=peers)

    return build


def slots(rows: int, k: int):
    """Builds the step from positions to slots."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.reference import topk as reference
        from deepinfer.kernels.topk import SLOTS

        index = torch.randint(0, 65536, (rows, k), device="cuda", dtype=torch.int32)
        index[torch.rand(rows, k, device="cuda") < 0.1] = -1
        table = torch.randperm(rows * 1024, device="cuda").view(rows, 1024).int()
        table[:, 1000:] = -1
        out = torch.full((rows, k), 777, device="cuda", dtype=torch.int32)
        run = lambda: SLOTS(None, index, table, None, out, 64)  # noqa: E731

        def check():
            wanted = torch.empty_like(out)
            reference.physical_slots(index, table, None, wanted, 64)
            assert torch.equal(out, wanted)
            assert_repeats(run, out)
            return {"differing": 0.0}

        def eager():
            right = torch.empty_like(out)
            return lambda: reference.physical_slots(index, table, None, right, 64)

        return Built(run, check, size_bytes=12 * rows * k, peers={"torch": eager})

    return build


def blocks(rows: int, n: int):
    """Builds the maxima of candidate blocks."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.reference import topk as reference
        from deepinfer.kernels.topk import BLOCKS

        count, keys = (37, 1003) if small else (rows, n)
        x = torch.randn(count, keys, device="cuda")
        lengths = torch.randint(0, keys + 1, (count,), device="cuda", dtype=torch.int32)
        if not small:
            lengths.fill_(keys)
        x[1, ::7] = float("nan")
        out = torch.full((count, -(-keys // 8)), 777.0, device="cuda")
        run = lambda: BLOCKS(None, x, lengths, out, 8)  # noqa: E731

        def check():
            wanted = torch.empty_like(out)
            reference.block_max(x, lengths, wanted, 8)
            assert torch.equal(out, wanted)
            assert_repeats(run, out)
            return {"differing": 0.0}

        def compiled():
            right = torch.empty_like(out)
            function = torch.compile(reference.block_max)
            return lambda: function(x, lengths, right, 8)

        size = 4 * x.numel() + 4 * out.numel()
        return Built(run, check, size_bytes=size, peers={"compiled": compiled})

    return build


def case(
    dtype: torch.dtype, rows: int, n: int, k: int, kind: str, tuning: tuple[int, ...] = ()
) -> Case:
    """A case by its parts."""
    return Case(
        "topk",
        f"{NAMES[dtype]} {rows}x{n} k {k}",
        " ".join([kind, *map(str, tuning)]),
        select(dtype, rows, n, k, kind, tuning),
    )


def cases() -> list[Case]:
    """The shapes of the goals with several tunings, then a sweep by the table."""
    b, f = torch.bfloat16, torch.float32
    found = []
    long = [
        (16, 4096, 4, 1024, 3, 8, 0, 4, True),
        (16, 4096, 4, 1024, 3, 8, 0, 4, False),
        (16, 4096, 4, 1024, 4, 8, 0, 8, False),
        (16, 4096, 4, 2048, 3, 8, 0, 3, True),
        (16, 4096, 4, 1024, 2, 16, 0, 4, True),
        (16, 2048, 4, 1024, 3, 8, 0, 4, True),
        (16, 8192, 8, 1024, 3, 8, 0, 4, True),
        (8, 4096, 4, 1024, 3, 8, 0, 4, True),
        (16, 4096, 4, 1024, 3, 8, 128, 4, True),
    ]
    for dtype, n in ((b, 131072), (f, 129280)):
        found += [case(dtype, 64, n, 512, "groups", t) for t in long]
        found.append(case(dtype, 64, n, 512, "wide", (1024, 1024, 16)))
    middle = (
        (16, 4096, 4, 1024, 2, 4, 96, 4, False),
        (16, 4096, 4, 1024, 3, 4, 128, 4, False),
        (8, 4096, 4, 1024, 4, 4, 128, 4, False),
        (8, 4096, 4, 1024, 2, 4, 96, 4, True),
        (8, 2048, 4, 1024, 2, 4, 96, 4, False),
    )
    found += [case(b, 1024, 32768, 512, "groups", t) for t in middle]
    found.append(case(b, 1024, 32768, 512, "wide", (1024, 1024, 8)))
    found.append(case(b, 4096, 8192, 512, "wide", (1024, 1024, 4)))
    found.append(case(f, 4096, 16384, 512, "groups", (8, 4096, 4, 1024, 2, 4, 96, 4, False)))
    found.append(case(f, 4096, 16384, 512, "wide", (1024, 1024, 4)))
    for t in ((32, 4096, 4, 1024, 1, 16, 0, 4, True), (64, 8192, 8, 1024, 1, 8, 0, 4, True)):
        found += [case(f, 64, 1048576, 512, "groups", t), case(b, 64, 1048576, 512, "groups", t)]
    for t in ((16, 4096, 4, 4096, 2, 16, 0, 6, True), (8, 4096, 4, 4096, 2, 16, 0, 6, True)):
        found.append(case(b, 64, 131072, 2048, "groups", t))
    found.append(case(b, 64, 131072, 2048, "wide", (4096, 4096, 16)))
    sweep = [
        (b, 256, 256, 64), (b, 4096, 1024, 512), (f, 256, 4096, 512), (f, 4096, 16384, 512),
        (b, 6, 65536, 512), (b, 768, 65536, 1024), (f, 6, 1048576, 512), (b, 64, 1048576, 1024),
        (b, 256, 32768, 2048), (b, 64, 131072, 4096), (f, 64, 129280, 64), (b, 1, 131072, 512),
        (b, 64, 131072, 512), (b, 1024, 32768, 512), (b, 4096, 8192, 512), (f, 64, 129280, 512),
    ]  # fmt: skip
    found += [case(*shape, "table") for shape in sweep]
    for rows in (512, 8192):
        found.append(Case("topk_to_physical_indices", f"{rows}x512", "table", slots(rows, 512)))
    found.append(Case("candidate_block_max", "4096x16384 by 8", "table", blocks(4096, 16384)))
    return found
