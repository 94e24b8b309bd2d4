"""The projection of four streams on Hopper, with its roles as threads on the CPU: values, places, and when slots are given back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.gluon_numpy import PROGRAM, Tensor
from tests.kernels.gluon_threads import Descriptor, Memory, gluon_on_threads
from tests.kernels.test_cache_pairs import Rows

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")


class Sum:
    """A product that is added to what was there, once it is waited for."""

    def __init__(self, a: Memory, b: Memory, before: Tensor) -> None:
        self.a, self.b, self.before = a, b, before

    def done(self) -> Tensor:
        found = self.a.array.astype(np.float64) @ self.b.array.astype(np.float64)
        return Tensor((found + self.before.data).astype(np.float32))


def prepare(kernel: Any) -> None:
    """More of the language, and products of fp16, which stands for bf16."""
    more = {
        "reshape": lambda x, shape: x.reshape(shape), "bfloat16": np.float32,
        "zeros_like": lambda x: Tensor(np.zeros_like(x.data)), "inline_asm_elementwise": lambda *a, **k: None,
    }  # fmt: skip
    for name, value in more.items():
        setattr(kernel.gl, name, value)
    kernel.warpgroup_mma = lambda a, b, before, is_async: Sum(a, b, before)
    kernel.warpgroup_mma_wait = lambda pending, sums: sums[0].done()


def project(
    given: tuple[torch.Tensor, ...],
    blocks: int,
    depth: int,
    programs: int,
    **waits: float,
):
    """Sums of the parts, shape [tokens, parts, 32], and the weighted sums of the streams."""
    streams, pre, high, low = given
    tokens, _, channels = streams.shape
    parts = channels // (64 * blocks)
    x = Descriptor(streams.flatten(1).numpy(), [64, 64])
    w = [Descriptor(part.numpy(), [32, 64]) for part in (high, low)]
    sums, out = (
        np.full(tokens * parts * 32, 7, np.float32),
        np.full(tokens * channels, 7, np.float32),
    )
    with gluon_on_threads("mhc_bulk", **waits) as (kernel,):
        prepare(kernel)
        for i in range(programs * parts):
            PROGRAM["id"], PROGRAM["count"] = i, programs * parts
            kernel.mhc_project_bulk_kernel(
                x, *w, Rows(pre.flatten().numpy(), np.int64(0)), Rows(sums, np.int64(0)), Rows(out, np.int64(0)), tokens,
                parts, channels, CHANNELS=channels, BLOCKS=blocks, DEPTH=depth,
            )  # fmt: skip
    return torch.from_numpy(sums).view(tokens, parts, 32), torch.from_numpy(out).view(tokens, -1)


def streams_of(tokens: int, channels: int) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(tokens)
    streams = torch.randn(tokens, 4, channels, generator=g).half()
    fn = torch.randn(24, 4 * channels, generator=g) * 0.02
    high = fn.half()
    return streams, torch.rand(tokens, 4, generator=g), high, (fn - high.float()).half()


@pytest.mark.parametrize(
    ("blocks", "depth", "programs", "waits"),
    [(2, 3, 2, {}), (4, 6, 1, {}), (2, 2, 1, {"late_s": 0.002}), (4, 4, 2, {"rest_s": 0.002})],
)  # fmt: skip
def test_sums(blocks, depth, programs, waits) -> None:
    given = streams_of(300, 256)
    streams, pre, high, low = given
    sums, out = project(given, blocks, depth, programs, **waits)
    wide = streams.double().flatten(1)
    wanted = wide @ (high.double() + low.double()).T
    assert torch.allclose(sums[..., :24].sum(1).double(), wanted, atol=2e-5)
    assert torch.allclose(sums[..., 24].sum(1).double(), wide.square().sum(1), rtol=1e-5)
    assert (sums[..., 25:] == 0).all()
    summed = torch.einsum("ti,tic->tc", pre.double(), streams.double())
    assert torch.allclose(out.double(), summed, atol=1e-5)


def test_pieces_that_are_programs_of_their_own() -> None:
    """Few tokens: pieces added by the next kernel, one after the other, are the parts of many tokens."""
    given = streams_of(130, 256)
    whole, out = project(given, 2, 4, 1)
    apart, same = project(given, 1, 4, 1)
    added = torch.zeros(130, 2, 32)
    for piece in range(2):
        added += apart[:, piece::2]
    assert torch.equal(added, whole)
    assert torch.equal(out, same)
