"""Grouped products of many tokens with prepared MXFP4 weights: tiles of several widths beside the others."""

from __future__ import annotations

from gemm import DEEPGEMM_MS, contiguous, masked
from harness import Case

OPERATION = "m_grouped_fp8_fp4_gemm_nt_contiguous"
VARIANTS: dict[tuple[int, int], list[tuple[int, ...]]] = {
    (48, 256): [(0, 7), (2, 1, 6)],
    (96, 144): [(0, 7)],
    (96, 64): [(0, 7), (64, 1, 4, 2, 2)],
    (96, 32): [(0, 7)],
}


def cases() -> list[Case]:
    """All of them, the most wanted first."""
    found = []
    for (groups, rows), variants in VARIANTS.items():
        shape = (groups, rows, 4608, 5120)
        text = "x".join(map(str, shape))
        for sizes in variants:
            found.append(
                Case(
                    OPERATION,
                    text,
                    f"fp4 {'x'.join(map(str, sizes))} by groups",
                    lambda small, shape=shape, sizes=sizes: contiguous("fp4", *shape, sizes, small),
                    peer=DEEPGEMM_MS.get(text),
                )
            )
    for rows, sizes in ((64, (64, 1, 4, 2, 2)), (32, (32, 1, 3, 2, 3))):
        shape = (48, rows, 4608, 5120)
        found.append(
            Case(
                "m_grouped_fp8_fp4_gemm_nt_masked",
                "x".join(map(str, shape)),
                f"fp4 {'x'.join(map(str, sizes))} by groups",
                lambda small, shape=shape, sizes=sizes: masked("fp4", *shape, sizes, small),
            )
        )
    return found
