"""The instructions that turn pairs of bf16 into codes of e2m1, run one by one on the CPU: bytes of the reference."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import numpy as np
import pytest
import torch

from deepinfer.kernels.reference.cast import cast_back, per_token_cast_to_fp4

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
from deepinfer.kernels.triton import e2m1_codes

Words = np.ndarray


def in_pairs(function: Callable[..., torch.Tensor], *given: Words) -> Words:
    """A function of the values of pairs of bf16, computed in fp64 and rounded once."""
    result = np.zeros_like(given[0])
    for shift in (np.uint32(0), np.uint32(16)):
        bits = [
            torch.from_numpy(((x >> shift) & 0xFFFF).astype(np.uint16).view(np.int16))
            for x in given
        ]
        found = to_nearest(function(*(b.view(torch.bfloat16).double() for b in bits)))
        half = found.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
        half = np.where(found.isnan().numpy(), np.uint32(0x7FFF), half)
        result |= half << shift
    return result


def to_nearest(x: torch.Tensor) -> torch.Tensor:
    """Values in fp64 as bf16: over fp32 with an odd last bit where digits are lost, so that they are rounded once."""
    near = x.float()
    wide = near.double()
    away = (wide != x) & x.isfinite() & near.isfinite()
    bits = near.view(torch.int32)
    # Towards zero, then odd.
    bits = torch.where(away & (wide.abs() > x.abs()), bits - 1, bits)
    return torch.where(away, bits | 1, bits).view(torch.float32).bfloat16()


def smaller_halves(x: Words, y: Words) -> Words:
    low = np.minimum(x & 0xFFFF, y & 0xFFFF)
    return low | (np.minimum(x >> np.uint32(16), y >> np.uint32(16)) << np.uint32(16))


def permuted(x: Words, y: Words, selector: Words) -> Words:
    given = np.stack((x, y), -1).view(np.uint8)  # little endian: bytes 0 to 3 of x, then those of y
    order = (selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)) & 15
    assert (order < 8).all()  # 8 and more would repeat signs
    return np.ascontiguousarray(np.take_along_axis(given, order.astype(np.int64), 1)).view(
        np.uint32
    )[:, 0]


def both_or_third(x: Words, y: Words, z: Words, table: Words) -> Words:
    assert int(table[0]) == 0xEA
    return (x & y) | z


STEPS = {
    "mov.b32": lambda x: x,
    "shl.b32": lambda x, n: x << n,
    "shr.u32": lambda x, n: x >> n,
    "and.b32": lambda x, y: x & y,
    "mul.rn.bf16x2": lambda x, y: in_pairs(torch.mul, x, y),
    "add.rn.bf16x2": lambda x, y: in_pairs(torch.add, x, y),
    "fma.rn.bf16x2": lambda x, y, z: in_pairs(lambda a, b, c: a * b + c, x, y, z),
    "min.u16x2": smaller_halves,
    "lop3.b32": both_or_third,
    "prmt.b32": permuted,
    "mad.lo.u32": lambda x, y, z: x * y + z,
}


def run(text: str, given: list[Words], outputs: int = 1) -> list[Words]:
    registers = {f"${i + outputs}": x.view(np.uint32) for i, x in enumerate(given)}
    for line in (part.strip() for part in text.strip("{} ").split(";")):
        if line and not line.startswith(".reg"):
            name, rest = line.split(" ", 1)
            to, *names = (part.strip() for part in rest.split(","))
            values = [
                registers[n] if n in registers else np.full(len(given[0]), int(n, 0), np.uint32)
                for n in names
            ]
            registers[to] = STEPS[name](*values)
    return [registers[f"${i}"] for i in range(outputs)]


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
        byte = scale.view(torch.uint8).int()
        factor = torch.where(byte == 255, 0, (254 - byte) << 23).view(torch.float32)
        text, more = e2m1_codes._POWER.value, (twice(factor), np.where(factor == 0, 0, 0x7FFF7FFF))
    else:
        text, more = e2m1_codes._QUOTIENT.value, parts_of(scale.float())
    given = (words, *(np.broadcast_to(a, words.shape) for a in more))
    given = [a.astype(np.uint32).reshape(-1, 4)[:, i] for a in given for i in range(4)]
    (found,) = run(text, [a.copy() for a in given])
    assert np.array_equal(found.view(np.uint8).reshape(wanted.shape), wanted.numpy())


def twice(x: torch.Tensor) -> Words:
    """Values of bf16, each in both halves of a word."""
    bits = x.bfloat16().view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    return bits | (bits << np.uint32(16))


def parts_of(divisor: torch.Tensor, off: float = 1.0) -> tuple[Words, ...]:
    """Inverses as two numbers of bf16, and what groups that are not finite are held to. `off`: an error of the inverse."""
    broken = divisor.isnan().numpy()
    inverse = off / divisor
    high = inverse.bfloat16().float()
    most = np.where(broken, np.uint32(0x42804280), np.uint32(0x42874287))
    return twice(high), twice(inverse - high), most, np.where(broken, 0, np.uint32(0x80008000))


@pytest.mark.parametrize("off", [1.0, 1 + 2.0**-22, 1 - 2.0**-22])
def test_quotients_of_every_mantissa(off) -> None:
    """Also when the inverse is wrong in its last bits: no quotient that is no tie becomes one, and ties stay ties."""
    mantissas = torch.arange(128, 256).repeat(8)
    eighths = torch.arange(8, 16).repeat_interleave(128).double()
    for exponent in range(-12, 6):
        value = mantissas.double() * 2.0**exponent
        steps = (value / eighths).float()  # exact enough: ties have few bits
        exact = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
        above = (value[:, None] > exact * eighths[:, None]).sum(1)
        tie = (value[:, None] == exact * eighths[:, None]).any(1)
        wanted = above + (tie & (above % 2 == 1)).long()
        assert (wanted[steps < 0.2] == 0).all()
        words = twice(value.float())
        given = (words, *parts_of(eighths.float(), off))
        (found,) = run(
            e2m1_codes._QUOTIENT.value,
            [a.astype(np.uint32) for a in given for _ in range(4)],
        )
        assert np.array_equal(found & 0xF, wanted.numpy().astype(np.uint32))


def test_sixths_of_every_bf16_number() -> None:
    """A product with the rounded inverse of 6 becomes the same number of e4m3 as the quotient."""
    every = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    size = every.clamp_min(6 * 2.0**-9)
    wanted = (size / 6).clamp_max(448.0).to(torch.float8_e4m3fn)
    found = (size * 0.16666667163372040).clamp_max(448.0).to(torch.float8_e4m3fn)
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


def test_values_of_every_code() -> None:
    """Eight codes a word become pairs of bf16: what the cast back gives, for every e4m3 scale and signs of zero too."""
    from deepinfer.kernels.triton import cache_gather_pairs

    bytes_ = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    codes = torch.cat((bytes_, bytes_.flip(0), bytes_.roll(77), bytes_.roll(131))).view(-1, 8)
    scales = torch.arange(127, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    every = codes[None].expand(127, -1, -1).reshape(-1, 8)
    each = scales[:, None].expand(-1, len(codes)).reshape(-1, 1)
    wanted = cast_back(every, each, block=(1, 16), dtype=torch.bfloat16)
    words = np.ascontiguousarray(every.numpy()).view(np.uint32)
    factor = np.broadcast_to(twice(each.float()), words.shape)
    found = run(
        cache_gather_pairs._VALUES.value, [words.reshape(-1), factor.reshape(-1).copy()], outputs=4
    )
    values = np.stack(found, -1).reshape(len(every), -1).view(np.int16)
    assert np.array_equal(values, wanted.view(torch.int16).numpy())
