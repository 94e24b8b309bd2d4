"""The contract of the matrix products, as the tests have it: checked beside the times, never timed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from harness import Built, Case

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "kernels"))


def same_bits(kind: str) -> Built:
    """Every tiling of prepared MXFP4 weights gives the same bytes."""
    import gemm
    import torch

    x, xs = gemm.some_tokens(kind, 64, 1024, 5)
    p, ps = gemm.prepared(kind, *gemm.weights(kind, 5, 640, 1024))
    counts = torch.tensor([64, 0, 17, 33, 1], device="cuda", dtype=torch.int32)
    table = gemm.FP4_MASKED if kind == "fp4" else gemm.FP4X32_MASKED
    tilings = list(dict.fromkeys([*(s for row in table.values() for s in row), (1, 2, 5), (2, 1, 6), (64, 2, 6, 2, 1), (128, 2, 8, 1, 1)]))  # fmt: skip

    def check() -> Mapping[str, float]:
        first = None
        for sizes in tilings:
            out = torch.full((5, 64, 640), 777.0, device="cuda", dtype=torch.bfloat16)
            gemm.folded(x, xs, p, ps, counts, out, sizes)()
            first = out if first is None else first
            assert torch.equal(out, first), f"{sizes} gives other bits than {tilings[0]}"
        return {"tilings": len(tilings)}

    return Built(run=bool, check=check)


def same_bits_of_fp8(kind: str) -> Built:
    """Every tiling of FP8 products gives the same bytes, with tokens as either operand."""
    import gemm
    import torch

    from deepinfer.kernels.triton import gemm_launch as launch

    m, n, k = 300, 1280, 1664
    x, xs = gemm.some_tokens(kind, m, k)
    w, ws = gemm.weights(kind, 1, n, k)
    tall = [
        (2, 128, 6, 8),
        (2, 256, 4, 8),
        (2, 256, 4, 3, 1, 0, 2),
        (2, 256, 4, 3, 1, 0, 1),
    ]
    few = [
        (64, 1, 10),
        (64, 1, 10, 1, 1, 1, 1),
        (32, 1, 8, 1, 2, 1, 1),
        (16, 2, 6, 1, 2, 1, 1),
        (16, 2, 5, 1, 2),
    ]
    if kind == "fp8_32":
        tall, few = [(2, 128, 6, 8), (2, 128, 6, 8, 1, 1), (1, 64, 12, 8)], [(64, 1, 9), (32, 1, 8, 1, 2), (16, 2, 5, 1, 2)]  # fmt: skip

    def product(sizes: tuple[int, ...], rows: int, wide: bool) -> torch.Tensor:
        out = torch.full((rows, n), 777.0, device="cuda", dtype=torch.bfloat16)
        if wide:
            launch.gemm_tall(x[:rows], xs[:rows], w, ws, None, out, launch.TallTuning(*sizes))
        else:
            tuning = launch.SwappedTuning(*sizes)
            launch.grouped_swapped(x[None, :rows], xs[None, :rows], w, ws, None, out[None], tuning)
        return out

    def check() -> Mapping[str, float]:
        wanted = gemm.values(x, xs) @ gemm.values(w[0], ws[0]).T
        first = product(tall[0], m, True)
        gemm.near(wanted, first, "the product")
        for wide, sizes in [*((True, s) for s in tall), *((False, s) for s in few)]:
            for rows in (m, 65, 1):
                found = product(sizes, rows, wide)
                assert torch.equal(found, first[:rows]), (
                    f"{sizes}, {rows} rows: other bits than {tall[0]}"
                )
        return {"tilings": len(tall) + len(few)}

    return Built(run=bool, check=check)


def cases() -> list[Case]:
    """Each test with each of its arguments."""
    import test_gpu_gemm as tests

    found: list[Case] = []

    def add(function: Callable[..., None], *arguments: Any) -> None:
        def check() -> Mapping[str, float]:
            function(*arguments)
            return {}

        name = function.__name__.removeprefix("test_").replace("_", " ")
        text = " ".join(map(str, arguments)) or "-"
        found.append(Case("gemm contract", name, text, lambda small: Built(run=bool, check=check), True))  # fmt: skip

    for n, k in tests.LINEAR:
        add(tests.test_two_kernels_of_the_linear_layer_have_one_order, n, k)
    for kind in tests.KINDS:
        for n, k in tests.SHAPES:
            add(tests.test_a_row_does_not_depend_on_the_others, kind, n, k)
        add(tests.test_another_process_gets_the_same_bytes, kind)
        add(tests.test_contiguous_products, kind)
        if kind != "bf16":
            for expected in (16, 32, 64):
                add(tests.test_masked_products, kind, expected)
            add(tests.test_a_row_of_a_group_does_not_depend_on_the_counts, kind)
            add(tests.test_groups_without_tokens_leave_the_output_alone, kind)
            for expected in (16, 64):
                add(tests.test_counts_end_with_the_rows_that_there_are, kind, expected)
            add(tests.test_outputs_with_gaps, kind)
    for kind, k in (("bf16", 520), ("fp8", 1040), ("fp8", 2304), ("bf16", 2312)):
        for m in (5, 300):
            add(tests.test_the_last_block_of_channels_may_be_short, kind, k, m)
    add(tests.test_weights_that_were_not_prepared_are_served_by_another_kernel)
    add(tests.test_odd_numbers_of_channels_are_served_by_another_kernel)
    for kind in ("fp8", "fp8_32"):
        found.append(Case("gemm contract", "all tilings give the same bits", kind, lambda small, k=kind: same_bits_of_fp8(k), True))  # type: ignore[misc]  # fmt: skip
    for kind in ("fp4", "fp4x32"):
        found.append(Case("gemm contract", "all tilings give the same bits", kind, lambda small, k=kind: same_bits(k), True))  # type: ignore[misc]  # fmt: skip
    return found
