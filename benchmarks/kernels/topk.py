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


def shaped(x: torch.Tensor, data: str) -> torch.Tensor:
    """Normal values, or what is hard to select from."""
    if data == "equal":
        return torch.full_like(x, 1.5)
    if data == "few values":
        return x.round()
    if data == "positive parts":  # more zeros than there is room for
        return (x.float() - 3).relu().to(x.dtype)
    if data == "rising":
        return torch.arange(x.shape[1], device="cuda").to(x.dtype).expand_as(x).contiguous()
    if data == "a cluster":  # all winners are neighbours
        x[:, x.shape[1] // 3 :][:, :4096] += 9
    return x


def select(
    dtype: torch.dtype, rows: int, n: int, k: int, kind: str, tuning: tuple[int, ...], data: str
):
    """Builds a selection by one of the kernels, or by the table."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.configs import topk as configs
        from deepinfer.kernels.topk import TOPK
        from deepinfer.kernels.triton import topk_launch as launch

        count = 18 if small else rows
        x = shaped(torch.randn(count, n, device="cuda").to(dtype), data)
        lengths = spoil(x, k) if small else None
        wide = torch.full((count, k + 9), -7, device="cuda", dtype=torch.int32)
        out = wide[:, 5 : 5 + k]
        if kind == "table" and small:
            # What the table says for all the rows, of which only some are checked.
            sizes = configs.lookup_by_groups(rows, n, k, x.itemsize)
            if sizes:
                conf = launch.ByGroupsTuning(*sizes)
                run = lambda: launch.topk_by_groups(x, k, lengths, out, -1, conf)  # noqa: E731
            else:
                own = launch.WideTuning(*configs.lookup_wide(rows, n, k))
                run = lambda: launch.topk_wide(x, k, lengths, out, -1, own)  # noqa: E731
        elif kind == "table":
            run = lambda: TOPK(None, x, k, lengths, out, -1)  # noqa: E731
        elif kind == "groups":
            groups = launch.ByGroupsTuning(*tuning)
            run = lambda: launch.topk_by_groups(x, k, lengths, out, -1, groups)  # noqa: E731
        else:
            own = launch.WideTuning(*tuning)
            run = lambda: launch.topk_wide(x, k, lengths, out, -1, own)  # noqa: E731

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

        peers = {} if data else {"flashinfer": flashinfer_peer, "torch": torch_peer}
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
    dtype: torch.dtype,
    rows: int,
    n: int,
    k: int,
    kind: str,
    tuning: tuple[int, ...] = (),
    data: str = "",
) -> Case:
    """A case by its parts."""
    return Case(
        "topk",
        f"{NAMES[dtype]} {rows}x{n} k {k}" + (f", {data}" if data else ""),
        " ".join([kind, *map(str, tuning)]),
        select(dtype, rows, n, k, kind, tuning, data),
    )


GROUPS = {
    (torch.bfloat16, 768, 65536, 1024): ((8, 4096, 4, 4096, 2048, 2, 8, True, 128),),
    (torch.bfloat16, 256, 32768, 2048): ((4, 4096, 4, 4096, 4096, 2, 8, True, 128),),
}
WIDE = {
    (torch.bfloat16, 64, 32768, 512): ((1024, 1024, 16),),
    (torch.float32, 256, 4096, 512): ((4096, 4096, 8),),
    (torch.float32, 768, 32768, 512): ((1024, 1024, 8, 64),),
}


def cases() -> list[Case]:
    """The shapes of the goals by the table and with other sizes, the plane by the table, rows that are hard."""
    b, f = torch.bfloat16, torch.float32
    found = []
    goals = [
        (b, 64, 131072, 512), (f, 64, 129280, 512), (b, 1024, 32768, 512), (b, 4096, 8192, 512),
        (b, 768, 65536, 1024), (b, 256, 32768, 2048), (b, 64, 131072, 2048), (b, 64, 131072, 4096),
        (f, 256, 4096, 512), (f, 6, 1048576, 512), (f, 256, 16384, 512), (f, 768, 32768, 512),
        (b, 64, 32768, 512),
    ]  # fmt: skip
    for shape in goals:
        found.append(case(*shape, "table"))
        found += [case(*shape, "groups", t) for t in GROUPS.get(shape, ())]
        found += [case(*shape, "wide", t) for t in WIDE.get(shape, ())]
    for data in ("a cluster", "few values", "rising", "positive parts", "equal"):
        for shape in ((b, 64, 131072, 512), (b, 4096, 8192, 512), (f, 64, 129280, 512)):
            found.append(case(*shape, "table", data=data))
    plane = [
        (b, 1, 131072, 512), (b, 6, 65536, 512), (f, 64, 129280, 64), (b, 512, 262144, 1024),
        (b, 4096, 65536, 512), (b, 1, 8192, 512), (b, 256, 256, 64), (b, 4096, 256, 64),
        (f, 64, 1048576, 512), (b, 64, 1048576, 1024), (f, 4096, 4096, 512), (b, 64, 8192, 4096),
        (b, 256, 16384, 2048), (b, 4096, 1024, 512), (f, 4096, 16384, 512),
    ]  # fmt: skip
    found += [case(*shape, "table") for shape in plane]
    for rows in (512, 8192):
        found.append(Case("topk_to_physical_indices", f"{rows}x512", "table", slots(rows, 512)))
    found.append(Case("candidate_block_max", "4096x16384 by 8", "table", blocks(4096, 16384)))
    return found
