"""Kernels of several roles on the CPU: each role of a program is a thread, with barriers that count as the chip's do.

On top of `gluon_numpy`: shared memory, bulk copies through descriptors, barriers in memory with their phases, products of
e4m3 operands, and the inline instructions that these kernels use. A role that waits for what never comes fails. Copies may
be made to arrive late, so that a slot that is given back too early is overwritten while it is read.
"""

from __future__ import annotations

import re
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from tests.kernels.gluon_numpy import PROGRAM, Pointer, Tensor, gluon_on_numpy

_LIMIT_S = 20.0
_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


class Memory:
    """A part of shared memory: bytes, seen with a type and a shape."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def index(self, at: Any) -> Memory:
        at = int(at)
        assert 0 <= at < len(self.array), "a place outside of a ring"
        return Memory(self.array[at])

    def slice(self, start: int, length: int, dim: int = 0) -> Memory:
        return Memory(self.array[(slice(None),) * dim + (slice(start, start + length),)])

    def permute(self, order: tuple[int, ...]) -> Memory:
        return Memory(self.array.transpose(order))

    def load(self, layout: Any) -> Tensor:
        return Tensor(self.array.copy())

    def store(self, value: Tensor) -> None:
        self.array[...] = value.data.astype(self.array.dtype)


def _view(memory: Memory, dtype: Any, shape: list[int], layout: Any) -> Memory:
    assert memory.array.flags.c_contiguous
    return Memory(memory.array.reshape(-1).view(np.uint8).view(dtype).reshape(shape))


class Barrier:
    """A barrier in memory: arrivals and bytes that it still waits for, and how often it was completed."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.done = 0
        self.changed = threading.Condition()

    def _settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.done += 1
            self.pending = self.count
            self.changed.notify_all()

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def arrive(self, bytes_more: int = 0, count: int = 1) -> None:
        with self.changed:
            assert self.pending >= count, "more arrivals than a barrier counts"
            self.pending -= count
            self.bytes += bytes_more
            self._settle()

    def copied(self, size: int) -> None:
        with self.changed:
            self.bytes -= size
            self._settle()

    def wait(self, parity: int) -> None:
        with self.changed:
            found = self.changed.wait_for(lambda: self.done % 2 != parity, _LIMIT_S)
        assert found, "a wait without an end"


class Barriers:
    """Barriers side by side."""

    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]

    def index(self, at: Any) -> Barrier:
        return self.all[int(at)]


class Descriptor:
    """An array that is copied by blocks; places outside of it read as zeros."""

    def __init__(self, array: np.ndarray, block: list[int]) -> None:
        self.array, self.block, self.layout = array, block, None
        self.dtype = array.dtype.type

    def copy(self, at: list[Any], to: Memory) -> None:
        found = np.zeros(self.block, self.array.dtype)
        of, into = [], []
        for first, size, most in zip(map(int, at), self.block, self.array.shape, strict=True):
            assert -(2**31) <= first < 2**31
            low, high = max(first, 0), min(first + size, most)
            of.append(slice(low, max(high, low)))
            into.append(slice(low - first, max(high, low) - first))
        part = self.array[tuple(of)]
        if part.size:
            found[tuple(into)] = part
        to.array[...] = found.reshape(to.array.shape)

    def write(self, at: list[int], given: Memory) -> None:
        """Writes a block, but for places outside of the array."""
        rows, columns = (slice(a, a + size) for a, size in zip(at, self.block, strict=True))
        part = self.array[rows, columns]
        part[...] = given.array[: part.shape[0], : part.shape[1]]


def _instructions(text: str, inputs: list[np.ndarray], outputs: int) -> list[np.ndarray]:
    """Runs the integer and shuffle instructions of an inline block; the last axis is the lanes of a quad."""
    shape = np.broadcast_shapes(*(x.shape for x in inputs))
    regs: dict[str, np.ndarray] = {
        f"${outputs + i}": np.broadcast_to(x, shape) for i, x in enumerate(inputs)
    }
    regs["%laneid"] = np.broadcast_to(np.arange(shape[-1], dtype=np.uint32), shape)

    def get(name: str) -> Any:
        return regs[name] if name in regs else np.uint32(int(name, 0) & 0xFFFFFFFF)

    for line in re.split(r"[;{}]", text):
        line = line.strip()
        if not line or line.startswith(".reg"):
            continue
        name, rest = line.split(None, 1)
        to, *names = (x.strip() for x in rest.split(","))
        a = [get(x) for x in names]
        if name.startswith("mov"):
            found = a[0]
        elif name.startswith("and.b32"):
            found = a[0] & a[1]
        elif name.startswith("shl.b32"):
            found = a[0] << a[1]
        elif name.startswith("shr.u32"):
            found = a[0] >> a[1]
        elif name.startswith("lop3.b32"):
            assert int(names[3], 0) == 0xEA
            found = (a[0] & a[1]) | a[2]
        elif name.startswith("mad.lo"):
            found = a[0] * a[1] + a[2]
        elif name.startswith("prmt.b32"):
            parts = np.stack(
                [(x >> s) & 255 for x in map(np.asarray, a[:2]) for s in (0, 8, 16, 24)]
            )
            found = np.zeros(shape, np.uint32)
            for byte in range(4):
                which = np.broadcast_to((a[2] >> np.uint32(4 * byte)) & 7, shape)
                found |= np.take_along_axis(
                    np.stack([np.broadcast_to(x, shape) for x in parts]),
                    which[None].astype(np.int64),
                    0,
                )[0] << np.uint32(8 * byte)
        elif name.startswith("setp.lt.s32"):
            found = a[0].view(np.int32) < np.int32(a[1])
        elif name.startswith("setp.ne"):
            found = a[0] != a[1]
        elif name.startswith("selp"):
            found = np.where(a[2], a[0], a[1])
        elif name.startswith("add.f32"):
            found = a[0] + a[1]
        elif name.startswith("shfl.sync.bfly"):
            found = a[0][..., np.arange(shape[-1]) ^ int(a[1])]
        else:
            raise AssertionError(f"unknown instruction {line}")
        regs[to] = found
    return [regs[f"${i}"] for i in range(outputs)]


def _inline(asm: str, constraints: str, args: list[Tensor], dtype: Any, is_pure: bool, pack: int) -> Any:  # fmt: skip
    many = isinstance(dtype, tuple)
    outputs = len(dtype) if many else 1
    values = [x.data for x in args]
    if pack == 1:
        signed = values[0].dtype == np.int32
        words = [x.view(np.uint32) if signed else x for x in values]
        words = _instructions(asm, words, outputs)
        parts = [Tensor(x.view(np.int32) if signed else x) for x in words]
        return tuple(parts) if many else parts[0]
    assert values[0].shape[-1] == pack == 4
    words = [x[..., i].astype(np.int32).view(np.uint32) for x in values for i in range(4)]
    found = _instructions(asm, words, outputs)
    parts = [
        Tensor(np.ascontiguousarray(x)[..., None].view(np.uint8).reshape(values[0].shape))
        for x in found
    ]
    return tuple(parts) if many else parts[0]


class Product:
    """A product under way: it reads its operands when it is waited for, and is no value before."""

    def __init__(self, a: Any, b: Memory) -> None:
        self.a, self.b = a, b

    def done(self) -> Tensor:
        left = self.a.array if isinstance(self.a, Memory) else self.a.data
        assert left.dtype == self.b.array.dtype == np.uint8
        found = _E4M3[left].astype(np.float64) @ _E4M3[self.b.array]
        return Tensor(found.astype(np.float32))


def _multiply(a: Any, b: Memory, acc: Tensor, use_acc: bool, is_async: bool) -> Product:
    assert is_async
    assert not use_acc
    return Product(a, b)


def _wait(pending: int, products: list[Any]) -> Any:
    found = [x.done() if isinstance(x, Product) else x for x in products]
    return found[0] if len(found) == 1 else tuple(found)


def _copy_elements(to: Memory, pointer: Pointer) -> None:
    at = np.broadcast_to(pointer.at, to.array.shape)
    assert ((at >= 0) & (at < len(pointer.buffer))).all(), "a read outside the buffer"
    to.array[...] = pointer.buffer[at]


def _assert(holds: bool) -> None:
    assert holds


def _extend() -> None:
    def split(x: Tensor) -> tuple[Tensor, Tensor]:
        return Tensor(x.data[..., 0]), Tensor(x.data[..., 1])

    Tensor.permute = lambda self, order: Tensor(self.data.transpose(order))  # type: ignore[attr-defined]
    Tensor.expand_dims = lambda self, axis: Tensor(np.expand_dims(self.data, axis))  # type: ignore[attr-defined]
    Tensor.broadcast_to = lambda self, shape: Tensor(np.broadcast_to(self.data, shape))  # type: ignore[attr-defined]
    Tensor.split = split  # type: ignore[attr-defined]
    Tensor.type = property(lambda self: types.SimpleNamespace(layout=None, shape=self.data.shape))  # type: ignore[assignment]
    Pointer.dtype = property(lambda self: types.SimpleNamespace(element_ty=self.buffer.dtype.type))  # type: ignore[attr-defined]


class Threads:
    """The roles of the programs that run."""

    def __init__(self, late_s: float) -> None:
        self.late_s = late_s
        self.own = threading.local()

    def write_tile(self, descriptor: Descriptor, at: Any, given: Memory) -> None:
        """A copy to global memory reads as late as it may: when its role waits for it."""
        self.own.__dict__.setdefault("pending", []).append((descriptor, [int(x) for x in at], given))  # fmt: skip

    def written_tiles(self, count: int) -> None:
        pending = self.own.__dict__.setdefault("pending", [])
        while len(pending) > count:
            descriptor, at, given = pending.pop(0)
            descriptor.write(at, given)

    def specialize(self, roles: list[Any], warps: Any, registers: Any) -> None:
        failed: list[BaseException] = []

        def play(function: Callable[..., None], args: tuple[Any, ...]) -> None:
            try:
                function(*args)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=play, args=role, daemon=True) for role in roles]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * _LIMIT_S)
            assert not thread.is_alive(), "a role without an end"
        if failed:
            raise failed[0]

    def load_tile(self, descriptor: Descriptor, at: Any, barrier: Barrier, to: Memory) -> None:
        at = [int(x) for x in at]

        def arrive() -> None:
            descriptor.copy(at, to)
            barrier.copied(to.array.nbytes)

        if self.late_s:
            threading.Timer(self.late_s, arrive).start()
        else:
            arrive()


@contextmanager
def gluon_on_threads(
    *names: str, late_s: float = 0.0, rest_s: float = 0.0
) -> Iterator[list[types.ModuleType]]:
    """Modules of `deepinfer.kernels.triton` over the stand-in.

    `late_s` is how long copies take, and `rest_s` how long a role rests that has arrived at a barrier.
    """
    _extend()
    threads = Threads(late_s)

    def arrive(bar: Barrier, count: int = 1, pred: Any = True) -> None:
        if pred:
            bar.arrive()
            time.sleep(rest_s)

    def allocate(dtype: Any, shape: list[int], layout: Any) -> Any:
        if layout == "barriers":
            return Barriers(shape[0])
        # Whatever was there before.
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return Memory(np.full(size, 0xFF, np.uint8).view(dtype).reshape(shape))

    language = {
        "constexpr": lambda x: x, "float8e4nv": np.uint8, "uint8": np.uint8, "int16": np.int16,
        "abs": lambda x: Tensor(np.abs(x.data)), "cdiv": lambda x, y: -(-x // y) if isinstance(x, int) else (x + (y - 1)) // y,
        "static_assert": _assert, "split": lambda x: x.split(), "join": lambda x, y: Tensor(np.stack((x.data, y.data), -1)),
        "inline_asm_elementwise": _inline, "allocate_shared_memory": allocate, "warp_specialize": threads.specialize,
        "convert_layout": lambda x, layout, assert_trivial=False: x,
        "num_programs": lambda axis: Tensor(np.int32(PROGRAM["count"])),
        "program_id": lambda axis: Tensor(np.int32(PROGRAM["id"])),
        "sum": lambda x, axis: Tensor(x.data.sum(axis, dtype=x.data.dtype)),
        **{name: (lambda *a, **k: None) for name in (
            "NVMMASharedLayout", "SwizzledSharedLayout", "DistributedLinearLayout", "NVMMADistributedLayout",
            "DotOperandLayout", "BlockedLayout", "SliceLayout",
        )},
    }  # fmt: skip
    hopper = types.ModuleType("triton.experimental.gluon.language.nvidia.hopper")
    hopper.fence_async_shared = lambda: None  # type: ignore[attr-defined]
    hopper.warpgroup_mma = _multiply  # type: ignore[attr-defined]
    hopper.warpgroup_mma_wait = _wait  # type: ignore[attr-defined]
    hopper.async_copy = types.SimpleNamespace(  # type: ignore[attr-defined]
        mbarrier_arrive=lambda bar, increment_count: bar.arrive(count=32)
    )
    hopper.mbarrier = types.SimpleNamespace(  # type: ignore[attr-defined]
        init=lambda bar, count: bar.init(count), wait=lambda bar, phase: bar.wait(int(phase)),
        expect=lambda bar, size: bar.arrive(size), arrive=arrive,
        MBarrierLayout=lambda: "barriers",
    )  # fmt: skip
    records = types.ModuleType("deepinfer.kernels.triton.mla_records")
    records.view_memory = _view  # type: ignore[attr-defined]
    also = {
        "triton.experimental.gluon.language.nvidia": types.ModuleType("nvidia"),
        hopper.__name__: hopper, records.__name__: records,
    }  # fmt: skip
    with gluon_on_numpy(
        *names,
        language=language,
        also=also,
        names_of={
            "load_tile": threads.load_tile,
            "copy_elements": _copy_elements,
            "write_tile": threads.write_tile,
            "written_tiles": threads.written_tiles,
        },
    ) as modules:
        yield modules
