"""What the benchmarks of row kernels share: hard values, rows alone and beside others, compiled peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from harness import Case, same_bits

ROWS = (1, 2, 3, 15, 16, 17, 63, 64, 65, 128, 257, 1000)
Outputs = tuple[torch.Tensor, ...]


def cases() -> list[Case]:
    """None of its own."""
    return []


def hard_rows(rows: int, channels: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random rows of many magnitudes, the first ones with zeros, ties, borders, NaN, infinities, huge and tiny values."""
    x = torch.randn(rows, channels, device="cuda") * torch.exp(
        torch.randn(rows, 1, device="cuda") * 4
    )
    x[0] = 0.0
    x[1] = -0.0
    x[2, 3], x[2, 40], x[2, 70] = float("nan"), float("inf"), float("-inf")
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0], device="cuda")
    x[3] = torch.cat((ties, -ties)).repeat(-(-channels // 16))[:channels]
    powers = 2.0 ** (torch.arange(channels, device="cuda") // 32 % 40 - 20)
    x[4] = 448 * powers
    x[5] = 448 * powers * (1 + 2**-23)
    x[6] = 6 * powers * (1 + 2**-23)
    x[7], x[8] = 1e-30, 3e38
    x[9] = torch.randn(channels, device="cuda") * 1e-39
    x[10] = (torch.randint(-127, 128, (channels,), device="cuda") * 2.0**-3) * powers
    x[11, 1::2] = 1e38
    return x.to(dtype)


def same_codes(q: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equality of bytes, with all NaN codes of e4m3 equal when the dtype is that."""
    a, b = q.cpu().view(torch.uint8), wanted.cpu().view(torch.uint8)
    equal = a == b
    if wanted.dtype == torch.float8_e4m3fn:
        equal |= ((a & 0x7F) == 0x7F) & ((b & 0x7F) == 0x7F)
    return bool(equal.all())


def same_cast(
    q: torch.Tensor, scale: torch.Tensor, wanted: torch.Tensor, wanted_scale: torch.Tensor
) -> bool:
    """Equality of codes and scales."""
    scales = same_bits(scale.cpu().view(torch.uint8), wanted_scale.cpu().view(torch.uint8))
    return scales and same_codes(q, wanted)


def assert_rows_alone(
    make: Callable[..., Outputs], given: Sequence[torch.Tensor], counts: Sequence[int] = ROWS
) -> None:
    """Asks for the same bits of a row in every number of rows, permuted, and beside rows of NaN.

    Args:
        make: Makes outputs with a row for each row of its arguments.
        given: Arguments of 1,000 rows.
        counts: Numbers of rows.
    """

    def f(*some: torch.Tensor) -> Outputs:
        return tuple(o.view(torch.uint8) if o.dtype.itemsize == 1 else o for o in make(*some))

    whole = f(*given)
    n = len(given[0])
    for count in (c for c in counts if c <= n):
        for first in {0, n - count}:
            part = f(*(x[first : first + count] for x in given))
            for p, w in zip(part, whole, strict=True):
                assert same_bits(p, w[first : first + count]), f"{count} rows from {first} differ"
    order = torch.randperm(n, device="cuda")
    for p, w in zip(f(*(x[order] for x in given)), whole, strict=True):
        assert same_bits(p, w[order]), "permuted rows differ"
    bad = torch.arange(n, device="cuda") % 3 == 1
    spoiled = []
    for x in given:
        y = x.clone()
        if y.is_floating_point() and y.dtype.itemsize > 1:
            y[bad] = float("nan")
        spoiled.append(y)
    for p, w in zip(f(*spoiled), whole, strict=True):
        assert same_bits(p[~bad], w[~bad]), "rows beside NaN differ"


def apart(x: torch.Tensor, more: int, shift: int = 0) -> torch.Tensor:
    """The same rows, `more` elements apart and `shift` elements off, with NaN in between."""
    wide = torch.full((x.shape[0], x.shape[1] + more), float("nan"), device=x.device, dtype=x.dtype)
    view = wide[:, shift : shift + x.shape[1]]
    view.copy_(x)
    return view


def compiled(f: Callable[..., object], *given: torch.Tensor) -> Callable[[], Callable]:
    """Builder of a peer: the same steps through torch.compile."""

    def make() -> Callable:
        torch._dynamo.reset()
        step = torch.compile(f, dynamic=False, fullgraph=True)
        step(*given)
        return lambda: step(*given)

    return make


def eager(f: Callable[..., object], *given: torch.Tensor) -> Callable[[], Callable]:
    """Builder of a peer: the steps as torch runs them."""
    return lambda: lambda: f(*given)


def copy_of(size_bytes: int) -> Callable[[], Callable]:
    """Builder of a peer: a copy that reads and writes as many bytes together."""

    def make() -> Callable:
        x = torch.empty(size_bytes // 8, device="cuda", dtype=torch.float32).normal_()
        y = torch.empty_like(x)
        return lambda: y.copy_(x)

    return make
