"""Norm, rotation and cast two values at a time, run on the CPU over a stand-in for Gluon: bytes of the reference."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.gluon_numpy import PROGRAM, Tensor, gluon_on_numpy
from tests.kernels.test_cache_pairs import FOLDER, LANGUAGE, Words, flat, modules

from deepinfer.kernels.reference.norm import rms_norm_rope_quant

FORMATS = {"fp8": (1, 32), "mxfp4": (2, 32), "nvfp4": (3, 16)}


def copies(to: Words, pointer: Any) -> None:
    to.data[...] = pointer.buffer[pointer.at]


def stand_ins() -> dict[str, types.ModuleType]:
    found = modules()
    del found[f"{FOLDER}.norm_pairs"]
    hopper = types.ModuleType("triton.experimental.gluon.language.nvidia.hopper")
    hopper.async_copy = types.SimpleNamespace(  # type: ignore[attr-defined]
        commit_group=lambda: None, wait_group=lambda n: None
    )
    nvidia = types.ModuleType("triton.experimental.gluon.language.nvidia")
    return {**found, nvidia.__name__: nvidia, hopper.__name__: hopper}


@pytest.fixture(autouse=True)
def _quotients(monkeypatch) -> None:
    monkeypatch.setattr(Tensor, "__truediv__", lambda x, n: Tensor(x.data / n), raising=False)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("shared", "ahead", "norm"),
    [(0, 0, 1), (1, 0, 1), (1, 1, 1), (1, 1, 0), (0, 0, 0)],
)
def test_rows(format, shared, ahead, norm) -> None:
    number, group = FORMATS[format]
    tokens, heads, channels, rope = (5, 4, 128, 32) if ahead else (5, 3, 128, 32)
    g = torch.Generator().manual_seed(number)
    x = torch.randn(tokens, heads, channels, generator=g).bfloat16()
    gains = torch.rand(channels, generator=g).bfloat16() + 0.5
    phases = torch.randn(7, rope // 2, 2, generator=g)
    places = torch.tensor([3, 0, 9, 6, -1])  # two that the table does not have
    rows = tokens * heads
    width = channels if format == "fp8" else channels // 2
    q = torch.full((rows, width), 0xEE, dtype=torch.uint8)
    scale = torch.full((rows, channels // group), 0xEE, dtype=torch.uint8)
    language = {**LANGUAGE, "broadcast": lambda a, b: np.broadcast_arrays(a, b)}
    with gluon_on_numpy(
        "norm_pairs", language=language, also=stand_ins(), names_of={"copy_elements": copies}
    ) as (kernel,):
        kernel.lanes = lambda *sizes: None
        for program in range(-(-rows // 4)):
            PROGRAM["id"] = program
            kernel.norm_rope_pairs_kernel(
                flat(x.view(rows, channels), np.int32), flat(gains[None], np.int32), flat(phases, np.int64),
                flat(places[:, None], np.int64), flat(q, np.int16 if format == "fp8" else np.uint8), flat(scale, np.uint8),
                rows, len(phases), heads, heads * channels // 2, channels // 2, 1e-6, CHANNELS=channels, ROPE=rope,
                HAS_NORM=bool(norm), HAS_POSITIONS=True, FLAT=True, FORMAT=number, ROWS=4, SPAN=channels // group,
                TURNED=rope // group, GROUP=group, EACH=8, SHARED=bool(shared), AHEAD=bool(ahead),
            )  # fmt: skip
    known = torch.where((places >= 0) & (places < 7), places, 7)
    turns = torch.cat((phases, torch.tensor([1.0, 0.0]).expand(1, rope // 2, 2)))
    codes, factors = rms_norm_rope_quant(x, gains if norm else None, 1e-6, turns, known, format)
    differing = (q != codes.view(torch.uint8).view(rows, width)).float().mean().item()
    assert differing == 0 if not norm else differing < 3e-3
    apart = (scale != factors.view(torch.uint8).view(scale.shape)).float().mean().item()
    assert apart == 0 if not norm else apart < 3e-3
