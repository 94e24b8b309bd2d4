"""Attention of many query rows: sparse prefill at 8 to 128 heads, windows, two scopes, parts of the keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from harness import Built, Case, assert_repeats, calc_diff, same_bits

from deepinfer.kernels.attention_prefill import (
    flash_mla_sparse_fwd,
    owned_indices,
    swa_attention,
    window_bands,
)
from deepinfer.kernels.reference import attention_prefill as reference

Run = Callable[[], Any]
SCALE = 512**-0.5
STRANGE = (-(2**31), -123456, -1, 10**9, 2**31 - 1)

# Forms of the kernel for 64 heads: keys at once, registers of the warps that copy, and of those that multiply.
PAIRED = ((64, 64, 224), (32, 48, 232))
# Forms of the kernel for few heads: heads, pieces, depth, keys at once, copying warps, their registers.
FEW = (
    (8, 1, 3, 64, 4, 96),
    (8, 2, 3, 32, 4, 96),
    (16, 1, 3, 64, 4, 96),
    (16, 2, 3, 32, 4, 96),
    (16, 2, 2, 32, 4, 96),
    (32, 1, 2, 64, 4, 96),
    (32, 2, 2, 32, 4, 96),
)


class Data:
    """Random queries, keys and lists; keys that no list names are NaN."""

    def __init__(
        self,
        rows: int,
        heads: int,
        keys: int,
        width: int,
        *,
        more: tuple[int, int] | None = None,
        hard: bool = False,
        dim: int = 512,
    ) -> None:
        device = "cuda"
        self.rows, self.heads, self.width, self.window = rows, heads, width, None
        # Shares of bf16 err by their own last bit: the tolerances are for values of a tenth.
        self.q = (10 * torch.randn(rows, heads, dim, device=device)).bfloat16()
        self.kv = (torch.randn(keys, dim, device=device) / 10).bfloat16()
        self.indices = torch.randint(0, keys, (rows, width), device=device, dtype=torch.int32)
        self.sink = torch.randn(heads, device=device)
        self.lengths = self.more_kv = self.more = self.more_lengths = self.phases = None
        if more:
            self.more_kv = (torch.randn(more[0], dim, device=device) / 10).bfloat16()
            self.more = torch.randint(0, more[0], (rows, more[1]), device=device, dtype=torch.int32)
        if hard:
            self._harden(keys)
        self.out = torch.full((rows, heads, 512), 777.0, device=device, dtype=torch.bfloat16)
        self.top = torch.full((rows, heads), 777.0, device=device)
        self.lse = torch.full((rows, heads), 777.0, device=device)

    def _harden(self, keys: int) -> None:
        """Wrong indices, short and empty rows, strided tensors, NaN where nothing may be read."""
        rows, device = self.rows, self.q.device
        used = torch.rand(keys, device=device) < 0.7
        used[0] = False
        wrong = torch.tensor(STRANGE, device=device, dtype=torch.int32)
        for name, kv in (("indices", self.kv), ("more", self.more_kv)):
            ids = getattr(self, name)
            if ids is None:
                continue
            if name == "indices":
                kv[~used] = torch.nan
                bad = ~used[ids.long()] | (torch.rand(ids.shape, device=device) < 0.1)
            else:
                bad = torch.rand(ids.shape, device=device) < 0.3
            ids = torch.where(bad, wrong[torch.randint(0, 5, ids.shape, device=device)], ids)
            ids[1::7, : ids.shape[1] // 2] = -1
            ids[2::11] = -1
            wide = torch.full((rows, ids.shape[1] + 3), 5, device=device, dtype=torch.int32)
            wide[:, : ids.shape[1]] = ids
            setattr(self, name, wide[:, : ids.shape[1]])
        self.lengths = torch.randint(-1, self.width + 9, (rows,), device=device, dtype=torch.int32)
        self.lengths[::3] = self.width
        self.lengths[5::9] = 0
        self.sink[0], self.sink[1], self.sink[2] = torch.inf, -torch.inf, 1e38
        angle = torch.randn(rows, 32, device=device)
        self.phases = torch.stack((angle.cos(), angle.sin()), -1)
        dim = self.q.shape[2]
        wide_q = torch.full((rows, self.heads + 1, dim + 32), torch.nan, device=device).bfloat16()
        wide_q[:, : self.heads, :dim] = self.q
        self.q = wide_q[:, : self.heads, :dim]
        wide_kv = torch.full((keys, dim + 16), torch.nan, device=device, dtype=torch.bfloat16)
        wide_kv[:, :dim] = self.kv
        self.kv = wide_kv[:, :dim]

    def as_window(self, window: int, keys: int) -> None:
        """The first list becomes a band of three ragged sequences."""
        cuts = [0, self.rows // 3, self.rows // 3 + 1, self.rows]
        cu_q = torch.tensor(cuts, device="cuda", dtype=torch.int32)
        cu_k = cu_q + torch.tensor([0, 200, 207, keys - self.rows], device="cuda").int()
        self.indices, self.lengths = window_bands(cu_q, cu_k, self.rows, window)
        self.window = window

    def arguments(self) -> tuple[Any, ...]:
        """What the launchers take."""
        return (
            self.q, self.kv, self.indices, self.lengths, self.more_kv, self.more, self.more_lengths, self.sink,
            self.phases, SCALE, self.window, self.out, self.top, self.lse,
        )  # fmt: skip

    def wanted(self, rows: slice = slice(None)) -> list[torch.Tensor]:
        """The reference in fp64."""
        n = len(range(*rows.indices(self.rows)))
        results = [
            torch.empty(n, self.heads, 512, device="cuda", dtype=torch.float64),
            torch.empty(n, self.heads, device="cuda", dtype=torch.float64),
            torch.empty(n, self.heads, device="cuda", dtype=torch.float64),
        ]
        pick = [None if x is None else x[rows] for x in (self.indices, self.lengths, self.more)]
        phases = None if self.phases is None else self.phases[rows]
        tail = (self.more_kv, pick[2], None, self.sink, phases, SCALE)
        if self.window is None:
            reference.sparse_attention(
                self.q[rows].double(), self.kv, pick[0], pick[1], *tail, *results
            )
        else:
            reference.band_attention(
                self.q[rows].double(), self.kv, pick[0], pick[1], *tail, self.window, *results
            )
        return results

    @property
    def keys_per_row(self) -> int:
        """Keys of a full row."""
        return (self.window or self.width) + (0 if self.more is None else self.more.shape[1])

    @property
    def flops(self) -> float:
        """Operations of both products."""
        return 2.0 * self.rows * self.heads * self.keys_per_row * (512 + self.q.shape[2])

    @property
    def size_bytes(self) -> float:
        """Queries, outputs, lists, and each key once."""
        keys = len(self.kv) + (0 if self.more_kv is None else len(self.more_kv))
        lists = self.keys_per_row * 4 * self.rows
        return self.rows * self.heads * 2048.0 + keys * 1024.0 + lists


def compare(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> dict[str, float]:
    """Errors against fp64; raises when they are too large."""
    figures = {}
    for name, x, y in zip(("out", "max", "lse"), found, wanted, strict=True):
        x, y = x.double(), y.double()
        assert torch.equal(x.isfinite(), y.isfinite()), f"{name}: infinite at other places"
        assert torch.equal(x[~x.isfinite()], y[~y.isfinite()]), f"{name}: other infinities"
        x, y = x[x.isfinite()], y[y.isfinite()]
        error = (x - y).abs()
        allowed = (8e-4, 3.01 / 128) if name == "out" else (2e-6, 2.01 / 65536)
        wrong = ((error > allowed[0]) & (error > allowed[1] * y.abs())).sum()
        figures[f"{name}_max_abs"] = float(error.max()) if len(error) else 0.0
        figures[f"{name}_diff"] = calc_diff(x, y)
        assert not wrong, f"{name}: {int(wrong)} of {y.numel()} are wrong; {figures}"
    assert figures["out_diff"] < 7e-6, str(figures)
    return figures


def assert_invariant(data: Data, launch: Callable[..., None]) -> None:
    """A row has the same bits alone, in chunks, permuted and beside NaN."""
    launch(*data.arguments())
    whole = [x.clone() for x in (data.out, data.top, data.lse)]
    arguments = list(data.arguments())
    by_row = [0, 2, 3, 5, 6, 8]
    poisoned = data.q.clone()
    poisoned[::2] = torch.nan

    def part(rows: Any, q: torch.Tensor) -> None:
        inputs = [a[rows] if i in by_row and a is not None else a for i, a in enumerate(arguments)]
        inputs[0] = q[rows]
        inputs[7] = data.sink
        n = len(inputs[0])
        outs = [x.new_full((n, *x.shape[1:]), 777.0) for x in whole]
        launch(*inputs[:11], *outs)
        for x, y in zip(outs, whole, strict=True):
            mine = y[rows]
            if q is poisoned:
                keep = torch.arange(data.rows, device=x.device)[rows] % 2 == 1
                x, mine = x[keep], mine[keep]
            assert same_bits(x, mine), f"rows {rows if isinstance(rows, slice) else 'permuted'}"

    for rows in (1, 2, 3, 15, 17, 63, 65, 128, 257):
        at = int(torch.randint(0, data.rows - min(rows, data.rows) + 1, ()))
        part(slice(at, at + rows), data.q)
    part(torch.randperm(data.rows, device="cuda"), data.q)
    part(slice(None), poisoned)


def checked(data: Data, launch: Callable[..., None], repeats: bool = True) -> Callable[[], dict]:
    """Errors, repeats and invariance."""

    def check() -> dict[str, float]:
        found = [x.clone() for x in (data.out, data.top, data.lse)]
        figures = compare(found, data.wanted())
        if repeats:
            assert_repeats(lambda: launch(*data.arguments()), data.out, data.top, data.lse)
            assert_invariant(data, launch)
        return figures

    return check


def eager(data: Data) -> Run:
    """Gather, product, softmax, product in torch, 512 rows at a time."""
    ids, kv, q, sink = data.indices.long(), data.kv, data.q, data.sink.view(1, -1, 1)

    def attend(q: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        keys = kv[ids]
        logits = torch.bmm(q, keys.transpose(1, 2)).float() * SCALE
        logits = torch.cat((logits, sink.expand(len(q), -1, 1)), -1)
        return torch.bmm(torch.softmax(logits, -1)[..., :-1].bfloat16(), keys)

    def run() -> None:
        for at in range(0, data.rows, 512):
            data.out[at : at + 512] = attend(q[at : at + 512], ids[at : at + 512])

    return run


def masked_sdpa(data: Data) -> Run:
    """Dense attention of torch with a band as its mask."""
    keys = len(data.kv)
    q = data.q.transpose(0, 1)[None]
    kv = data.kv[None, None].expand(1, data.heads, -1, -1)
    at = torch.arange(keys, device="cuda")
    begin, end = data.indices[:, None], (data.indices + data.lengths)[:, None]
    mask = ((at >= begin) & (at < end))[None, None]
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, kv, kv, mask, scale=SCALE)


def paired_launch(form: tuple) -> Callable[..., None]:
    """The kernel for 64 heads in a form."""
    from deepinfer.kernels.triton import mla_prefill_launch as launch

    tuning = launch.PairedTuning(*form)
    return lambda *arguments: launch.attend_paired(*arguments, tuning)


def few_launch(form: tuple) -> Callable[..., None]:
    """The kernel for few heads in a form."""
    from deepinfer.kernels.triton import mla_prefill_launch as launch

    tuning = launch.FewTuning(*form)
    return lambda *arguments: launch.attend_few(*arguments, tuning)


def portable_launch(form: tuple) -> Callable[..., None]:
    """The portable kernel with tiles of a size."""
    from deepinfer.kernels.triton import mla_prefill_portable_launch as launch

    tuning = launch.PortableTuning(*form)
    return lambda *arguments: launch.attend_portable(*arguments, tuning)


def sparse(rows: int, heads: int, keys: int, width: int, launch: Callable, **more: Any) -> Callable:
    """Case of lists; checked on hard data."""

    def build(small: bool) -> Built:
        data = Data(min(rows, 300), heads, 2000, min(width, 640), more=more.get("more") and (900, 512), hard=True, dim=more.get("dim", 512)) if small else Data(
            rows, heads, keys, width, **more
        )  # fmt: skip
        run = launch()
        plain = data.more is None and data.q.shape[2] == 512
        peers = {"torch": lambda: eager(data)} if plain else {}
        return Built(
            lambda: run(*data.arguments()),
            checked(data, run, repeats=data.rows < 1000),
            data.flops,
            data.size_bytes,
            "bf16",
            peers,
        )

    return build


def window(rows: int, heads: int, keys: int, launch: Callable, more: Any = None) -> Callable:
    """Case of bands."""

    def build(small: bool) -> Built:
        if small:
            data = Data(400, heads, 1000, 128, more=more and (700, 512))
            data.as_window(128, 1000)
        else:
            data = Data(rows, heads, keys, 128, more=more)
            data.as_window(128, keys)
        run = launch()
        peers = {"sdpa": lambda: masked_sdpa(data)} if more is None else {}
        return Built(
            lambda: run(*data.arguments()),
            checked(data, run),
            data.flops,
            data.size_bytes,
            "bf16",
            peers,
        )

    return build


def no_copies(heads: int, launch: Callable) -> Callable:
    """The same work with nothing to copy: every index is -1, and its key reads as zero without traffic."""

    def build(small: bool) -> Built:
        data = Data(300 if small else 4096, heads, 8192, 640)
        data.indices.fill_(-1)
        run = launch()
        return Built(lambda: run(*data.arguments()), dict, data.flops, data.size_bytes, "bf16")

    return build


def gather_only(depth: int) -> Callable:
    """Copies of the keys into shared memory and nothing else: the least time of any kernel that gathers."""

    def build(small: bool) -> Built:
        from diagnosis.gather_only import gather

        data = Data(300 if small else 4096, 8, 8192, 640)
        out = torch.zeros(data.rows, device="cuda")
        copied = data.rows * 640 * 1024.0
        return Built(lambda: gather(data.kv, data.indices, out, depth), dict, 0.0, copied)

    return build


def contract_check(_: bool) -> Built:
    """Public functions on the GPU: no rows, no keys, many rows, parts of the keys, far addresses."""

    def check() -> dict[str, float]:
        data = Data(40, 64, 1000, 192)
        kv, ids = data.kv[:, None], data.indices[:, None]
        out, top, lse = flash_mla_sparse_fwd(data.q[:0], kv, ids[:0])
        assert out.shape == (0, 64, 512)
        out, top, lse = flash_mla_sparse_fwd(data.q, kv[:0], ids)
        assert (out == 0).all()
        assert (lse == torch.inf).all()
        assert (top == -torch.inf).all()
        # More rows than a grid's second axis holds.
        many = data.q[:1].expand(70000, -1, -1)
        few = data.indices[:1, None, :64].expand(70000, -1, -1)
        out = flash_mla_sparse_fwd(many[:, :16], kv, few)[0]
        assert (out == out[:1]).all()
        # Parts of the keys on three ranks.
        whole = flash_mla_sparse_fwd(data.q, kv, ids)
        outs, sums = [], []
        for rank in range(3):
            local, count = owned_indices(ids, rank, 3, 4)
            owned = torch.arange(1000, device="cuda") // 4 % 3 == rank
            mine = data.kv[owned][:, None]
            y = flash_mla_sparse_fwd(data.q, mine, local, topk_length=count)
            outs.append(y[0].float())
            sums.append(y[2].masked_fill(y[2] == torch.inf, -torch.inf))
        share = torch.stack(sums).softmax(0)[..., None]
        joined = (torch.stack(outs) * share).sum(0)
        figures = {"parts_diff": calc_diff(joined, whole[0].float())}
        assert figures["parts_diff"] < 1e-5
        # Keys beyond 2^31 elements: 4.6 M rows of 512.
        far = torch.empty(4_600_000, 512, device="cuda", dtype=torch.bfloat16)
        far[-1000:] = data.kv
        moved = (data.indices + 4_599_000).int()[:, None]
        y = flash_mla_sparse_fwd(data.q, far[:, None], moved)
        assert all(same_bits(a, b) for a, b in zip(y, whole, strict=True)), "far keys"
        y = flash_mla_sparse_fwd(data.q, far[:, None], moved, backend="portable")
        figures["portable_diff"] = calc_diff(y[0].float(), whole[0].float())
        assert figures["portable_diff"] < 1e-5
        bands = window_bands(*(torch.tensor([0, 40], device="cuda").int(),) * 2, 40)
        y = swa_attention(data.q, kv[:40], bands)
        assert y[0].isfinite().all()
        return figures

    return Built(lambda: None, check)


def cases() -> list[Case]:
    """All cases."""
    found = [Case("prefill_contract", "public functions", "all", contract_check, check_only=True)]
    op = "flash_mla_sparse_fwd"
    shapes = (
        (64, 8192, 640, 0.672),
        (64, 32768, 640, 0.750),
        (64, 8192, 2048, 2.0),
        (128, 8192, 640, None),
        (32, 8192, 640, None),
        (16, 8192, 640, None),
        (8, 8192, 640, None),
    )
    for heads, keys, width, peer in shapes:
        name = f"4096 rows x {heads} heads, {width} of {keys} keys"
        for form, launch in _forms(heads, (keys, width) == (8192, 640)):
            build = sparse(4096, heads, keys, width, launch)
            found.append(Case(op, name, form, build, peer=peer))
    name = "4096 rows x 128 heads x 576, 640 of 8192 keys"
    launch = _bind(portable_launch, (16, 32, 4, 2))
    build = sparse(4096, 128, 8192, 640, launch, dim=576)
    found.append(Case(op, name, "portable (16, 32, 4, 2)", build))
    for heads, form, launch in (
        (64, "paired", _bind(paired_launch, PAIRED[0])),
        (16, "few", _bind(few_launch, (16, 1, 3, 64, 4, 96))),
    ):
        rows = f"4096 rows x {heads} heads"
        build = sparse(4096, heads, 8192, 128, launch, more=(8192, 512))
        found.append(Case(op, f"{rows}, 128 + 512 of 8192 keys", form, build))
        build = window(4096, heads, 8192, launch)
        found.append(Case("swa_attention", f"{rows}, window 128", form, build))
        build = window(4096, heads, 8192, launch, more=(8192, 512))
        found.append(Case("swa_attention", f"{rows}, window 128 + 512 keys", form, build))
        name = f"4096 x {heads} heads x 640, no copies"
        found.append(Case("diagnosis", name, form, no_copies(heads, launch)))
    build = window(4096, 64, 8192, _bind(portable_launch, (64, 32, 8, 2)))
    found.append(Case("swa_attention", "4096 rows x 64 heads, window 128", "portable", build))
    for depth in (2, 6):
        shape = "4096 x 640 keys of 8192, copies alone"
        found.append(Case("diagnosis", shape, f"{depth} x 32 keys", gather_only(depth)))
    return found


def _bind(launch: Callable, form: tuple) -> Callable:
    """A launcher that is made when the case is built."""
    return lambda: launch(form)


def _forms(heads: int, every: bool) -> list[tuple[str, Callable]]:
    """Kernels and forms for a number of heads; the first of each kernel, or every one."""
    forms = [("paired", paired_launch, form) for form in PAIRED if heads >= 64]
    forms += [("few", few_launch, form) for form in FEW if form[0] == heads]
    if every:
        sizes = [(16, 32, 4, 2)] + ([(64, 32, 8, 2)] if heads >= 64 else [])
        forms += [("portable", portable_launch, form) for form in sizes]
    else:
        forms = forms[:1]
    return [(f"{name} {form}", _bind(launch, form)) for name, launch, form in forms]
