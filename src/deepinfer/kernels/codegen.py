"""Machine code of the kernels without a GPU: compiled for a chip, with its registers, spills and instructions.

Every kernel and every entry of the tables is compiled for the chips that it is meant for, so that a change that spills,
outgrows a chip's shared memory or loses its tensor core instruction is seen where no GPU is.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer.kernels.codegen_operands import overwritten_operands

__all__ = ["CHIPS", "SHARED_BYTES", "CodeReport", "CompileCase", "compile_for"]

CHIPS = (80, 89, 90, 100, 120)
"""Compute capabilities, times 10, that the kernels are compiled for."""

SHARED_BYTES: Mapping[int, int] = {
    80: 166_912,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    120: 101_376,
}
"""Shared memory that a program may have, in bytes, by compute capability times 10."""


@dataclass(frozen=True)
class CodeReport:
    """What became of a kernel.

    Attributes:
        capability: Compute capability times 10.
        registers: Registers a thread at launch.
        stack_bytes: Stack a thread: where spilled registers go.
        shared_bytes: Shared memory a program.
        opcodes: How often each instruction occurs.
        overwritten: Instructions that write a register which a product of tensor cores in flight reads.
    """

    capability: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    opcodes: Mapping[str, int]
    overwritten: tuple[str, ...] = ()

    def count(self, *prefixes: str) -> int:
        """How many instructions begin with one of these names."""
        return sum(n for name, n in self.opcodes.items() if name.startswith(prefixes))


@dataclass(frozen=True)
class CompileCase:
    """A kernel with one entry of its table, and what its machine code must be.

    Attributes:
        operation: Public name of the operation that it serves.
        entry: What distinguishes it: form, dtype, tile sizes.
        kernel: A function of Triton's, or of Gluon's.
        signature: Types of the arguments by name, as Triton writes them.
        constants: Values of the constants by name.
        aligned: Arguments that are multiples of 16.
        options: Options of the launch (num_warps, maxnreg, ...).
        chips: Compute capabilities, times 10, that it is for.
        tensor_core: Prefixes of which one must begin an instruction, by chip; none where the chip is missing.
        stack_bytes: Stack a thread that is known and accepted.
        tested: Those that tests compile for, where the code of the others is the same; none for all of `chips`.
    """

    operation: str
    entry: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    chips: tuple[int, ...] = CHIPS
    tensor_core: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    stack_bytes: int = 0
    tested: tuple[int, ...] = ()

    def compile(self, chip: int) -> CodeReport:
        """Compiles it for a chip."""
        return compile_for(
            self.kernel, self.signature, self.constants, chip, aligned=self.aligned, **self.options
        )

    def faults(self, report: CodeReport) -> list[str]:
        """What is wrong with its machine code; empty when nothing is."""
        found = []
        limit = SHARED_BYTES[report.capability]
        if report.shared_bytes > limit:
            found.append(f"{report.shared_bytes} bytes of shared memory; the chip has {limit}")
        if report.stack_bytes > self.stack_bytes:
            found.append(f"{report.stack_bytes} bytes of stack; {self.stack_bytes} are accepted")
        if report.overwritten:
            found.append(f"a product in flight reads what is written by {report.overwritten[0]}")
        wanted = self.tensor_core.get(report.capability)
        if wanted and not report.count(*wanted):
            found.append(f"none of the instructions {', '.join(wanted)}")
        return found


def compile_for(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    capability: int,
    *,
    aligned: tuple[str, ...] = (),
    **options: Any,
) -> CodeReport:
    """Compiles a kernel.

    Args:
        kernel: A function of Triton's, or of Gluon's.
        signature: Types of the arguments by name, as Triton writes them.
        constants: Values of the constants by name.
        capability: Compute capability times 10.
        aligned: Arguments that are multiples of 16.
        options: Options of the launch (num_warps, maxnreg, ...).

    Returns:
        What the assembler says, and the instructions.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    source = GluonASTSource if getattr(kernel, "is_gluon", lambda: False)() else ASTSource
    compiled = triton.compile(
        source(
            fn=kernel,
            signature={**signature, **dict.fromkeys(constants, "constexpr")},
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
        ),
        target=GPUTarget("cuda", capability, 32),
        options=options,
    )
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    handle, name = tempfile.mkstemp(suffix=".cubin")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(compiled.asm["cubin"])
        usage = _run(tools / "cuobjdump", "-res-usage", name)
        listing = _run(tools / "nvdisasm", "-c", name)
    finally:
        os.unlink(name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    registers, stack = (int(found[1]), int(found[2])) if found else (0, 0)
    opcodes: dict[str, int] = {}
    for opcode in re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_]+)", listing):
        opcodes[opcode] = opcodes.get(opcode, 0) + 1
    overwritten = tuple(overwritten_operands(listing))
    return CodeReport(capability, registers, stack, compiled.metadata.shared, opcodes, overwritten)


def _run(*command: Any) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
