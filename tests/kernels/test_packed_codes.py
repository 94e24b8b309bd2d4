"""The instructions that turn pairs of bf16 into codes of e2m1, run one by one on the CPU: bytes of the reference."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from deepinfer.kernels.reference.cast import per_token_cast_to_fp4

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
from deepinfer.kernels.triton import e2m1_codes

Words = np.ndarray


def halves(clamp: str, x: Words, y: Words) -> Words:
    """The larger or smaller magnitudes of fp16 pairs with the signs of the first; a NaN gives way."""
    result = np.zeros_like(x)
    for shift in (np.uint32(0), np.uint32(16)):
        p, q = (x >> shift) & 0xFFFF, (y >> shift) & 0xFFFF
        sizes = p & 0x7FFF, q & 0x7FFF
        size = np.maximum(*sizes) if clamp == "max" else np.minimum(*sizes)
        size = np.where(sizes[0] > 0x7C00, sizes[1], size)
        result |= (size | ((p ^ q) & 0x8000)) << shift
    return result


def to_half(x: Words) -> Words:
    values = torch.from_numpy(x.view(np.float32).copy())
    bits = values.half().view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    return np.where(values.isnan().numpy(), np.uint32(0x7FFF), bits)


def permuted(x: Words, y: Words, selector: int) -> Words:
    given = np.stack((x, y), -1).view(np.uint8)  # little endian: bytes 0 to 3 of x, then those of y
    order = [(selector >> (4 * i)) & 7 for i in range(4)]
    return np.ascontiguousarray(given[..., order]).view(np.uint32)[..., 0]


STEPS = {
    "mov.b32": lambda x: x,
    "shl.b32": lambda x, n: x << n,
    "shr.u32": lambda x, n: x >> n,
    "and.b32": lambda x, y: x & y,
    "or.b32": lambda x, y: x | y,
    "add.u32": lambda x, y: x + y,
    "mul.rn.f32": lambda x, y: (x.view(np.float32) * y.view(np.float32)).view(np.uint32),
    "cvt.rn.f16x2.f32": lambda x, y: (to_half(x) << np.uint32(16)) | to_half(y),
    "max.xorsign.abs.f16x2": lambda x, y: halves("max", x, y),
    "min.xorsign.abs.f16x2": lambda x, y: halves("min", x, y),
    "prmt.b32": lambda x, y, n: permuted(x, y, int(n[0])),
}


def run(text: str, given: list[Words]) -> Words:
    registers = {f"${i + 1}": x.view(np.uint32) for i, x in enumerate(given)}
    for line in (part.strip() for part in text.strip("{} ").split(";")):
        if line and not line.startswith(".reg"):
            name, rest = line.split(" ", 1)
            to, *names = (part.strip() for part in rest.split(","))
            values = [
                registers[n] if n in registers else np.full(len(given[0]), int(n, 0), np.uint32)
                for n in names
            ]
            registers[to] = STEPS[name](*values)
    return registers["$0"]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("group", [32, 16])
def test_codes_of_every_bf16_number(group) -> None:
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(group // 8)
    strangers = every.view(128, 512).T.reshape(-1, group)
    x = torch.cat((every.view(-1, group), strangers, ties[None].bfloat16(), -ties[None].bfloat16()))
    wanted, scale = per_token_cast_to_fp4(x, group)
    words = x.view(torch.int32).numpy()
    if group == 32:
        text, byte = e2m1_codes._POWER.value, scale.view(torch.uint8).int()
        factor = torch.where(byte == 255, 0, (254 - byte) << 23).view(torch.float32)
    else:
        text, divisor = e2m1_codes._QUOTIENT.value, scale.float()
        factor = (1 / divisor).nan_to_num(0.0)
        words = np.where(divisor.isnan().numpy(), 0, words)
    factor = (factor * 2.0**-14).expand(words.shape).reshape(-1, 4).numpy()
    words = words.reshape(-1, 4)
    found = run(text, [a[:, i].copy() for a in (words, factor) for i in range(4)])
    assert np.array_equal(found.view(np.uint8).reshape(wanted.shape), wanted.numpy())
