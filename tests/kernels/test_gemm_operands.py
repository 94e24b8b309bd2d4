"""Scales that belong to other tokens, weights, groups or channels are refused before anything is read."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from tests.kernels.right_calls import CALLS

from deepinfer import kernels
from deepinfer.core.errors import ShapeError

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("what is checked comes before any kernel of Triton's", allow_module_level=True)

SCALED = [name for name in CALLS if "fp8" in name and "gemm" in name]
OTHER: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a row more": lambda s: torch.cat((s, s[..., :1, :]), -2),
    "no rows": lambda s: s[..., :0, :],
    "a column more": lambda s: torch.cat((*[s] * 4, s[..., :1]), -1),
    "no columns": lambda s: s[..., :0],
    "a group more": lambda s: torch.cat((s, s[:1])),
    "no groups": lambda s: s[:0],
    "an axis more": lambda s: s[None],
    "an axis less": lambda s: s[0],
}


@pytest.mark.parametrize("operand", ["a", "b"])
@pytest.mark.parametrize("name", SCALED)
def test_scales_of_another_shape(name: str, operand: str) -> None:
    values, scale = CALLS[name]()[operand]
    for what, change in OTHER.items():
        given = {**CALLS[name](), operand: (values, change(scale))}
        with pytest.raises(ShapeError, match="they must be") as caught:
            getattr(kernels, name)(**given)
        assert caught.value.argument == f"scales of {operand}", what


def test_tokens_do_not_share_scales() -> None:
    """Weights have one for 32 rows; kernels step through those of tokens row by row."""
    x = torch.ones(256, 128)
    a, b = kernels.per_block_cast_to_fp8(x), kernels.per_block_cast_to_fp8(torch.ones(8, 128))
    with pytest.raises(ShapeError, match=r"\(8, 4\).*\[256, 1\] or \[256, 4\]\."):
        kernels.fp8_gemm_nt(a, b)
    tokens = kernels.per_token_cast_to_fp8(x)
    assert torch.equal(kernels.fp8_gemm_nt(tokens, b), torch.full((256, 8), 128.0).bfloat16())


@pytest.mark.parametrize(("block", "shape"), [(32, (1, 4)), (128, (2, 1)), (128, (3, 1))])
def test_blocks_of_weights_are_square(block: int, shape: tuple[int, int]) -> None:
    """A row of scales lost or too many would fit blocks of 128 by 32 or of 32 by 128."""
    x, w = torch.ones(2, 128), torch.ones(64, 128)
    a, b = kernels.per_token_cast_to_fp8(x, block), kernels.per_block_cast_to_fp8(w, block)
    kernels.fp8_gemm_nt(a, b)
    with pytest.raises(ShapeError, match="scales of b have shape"):
        kernels.fp8_gemm_nt(a, (b[0], torch.full(shape, 127, dtype=torch.uint8)))


@pytest.mark.parametrize("change", ["a group less", "a column less", "a row less"])
def test_scales_of_other_prepared_weights(change: str) -> None:
    values, scale = kernels.per_token_cast_to_fp4(torch.ones(2, 8, 128))
    words, steps = kernels.prepare_mxfp4_weights(values, scale)
    steps = {"a group less": steps[:1], "a column less": steps[..., :4], "a row less": steps[:, 1:]}[change]  # fmt: skip
    given = CALLS["m_grouped_fp8_fp4_gemm_nt_masked"]()
    with pytest.raises(ShapeError, match="as prepare_mxfp4_weights returned them"):
        kernels.m_grouped_fp8_fp4_gemm_nt_masked(**{**given, "b": (words, steps)})


def test_prepared_scales_lie_side_by_side() -> None:
    words, steps = kernels.prepare_mxfp4_weights(*kernels.per_token_cast_to_fp4(torch.ones(2, 8, 128)))  # fmt: skip
    given = CALLS["m_grouped_fp8_fp4_gemm_nt_masked"]()
    apart = torch.stack((steps, steps), -1)[..., 0]
    with pytest.raises(ShapeError, match="prepared ones must be contiguous"):
        kernels.m_grouped_fp8_fp4_gemm_nt_masked(**{**given, "b": (words, apart)})


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool])
def test_packed_weights_are_looked_at_as_bytes(dtype: torch.dtype) -> None:
    given = CALLS["fp8_fp4_gemm_nt"]()
    values, scale = given["b"]
    with pytest.raises(ShapeError, match=r"\.view\(torch\.uint8\)"):
        kernels.fp8_fp4_gemm_nt(**{**given, "b": (values.view(dtype), scale)})


@pytest.mark.parametrize("name", [name for name in CALLS if name.startswith("m_grouped")])
def test_groups_are_likely_to_have_rows(name: str) -> None:
    for wrong in (0, -5):
        with pytest.raises(ShapeError, match="expected_m is"):
            getattr(kernels, name)(**CALLS[name](), expected_m=wrong)


@pytest.mark.parametrize("name", [name for name in CALLS if name.startswith("m_grouped")])
def test_groups_do_not_make_their_result(name: str) -> None:
    """Rows of no group would be whatever lay there."""
    with pytest.raises(ShapeError, match="d is None") as caught:
        getattr(kernels, name)(**{**CALLS[name](), "d": None})
    assert caught.value.argument == "d"


LAYOUTS: dict[str, tuple[list[int], str | None]] = {
    "one group": ([1] * 200, None),
    "two of many rows": ([0] * 130 + [-1] * 126 + [1] * 5, None),
    "the later one first": ([1] * 128 + [0] * 128, None),
    "padding of a group that is not there": ([0] * 3 + [2] * 125 + [1] * 3 + [-5], None),
    "in turns": ([0, 1] * 64, "group 0 at row 0 and 1 behind"),
    "a group too early": ([0] * 64 + [1] * 64, "group 0 at row 63 and 1 behind"),
    "padding in between": ([0] * 128 + [1] * 3 + [-1] + [1], "group -1 at row 131 and 1 behind"),
    "padding in front": ([-1] + [0] * 9, "group -1 at row 0 and 0 behind"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_groups_begin_at_multiples(name: str) -> None:
    """What a tile of a GPU would take for rows of one group is refused where it can be seen."""
    rows, said = LAYOUTS[name]
    layout = torch.tensor(rows, dtype=torch.int32)
    a, b = torch.ones(len(rows), 8).bfloat16(), torch.ones(2, 4, 8).bfloat16()
    d = torch.zeros(len(rows), 4)
    if said is None:
        kernels.m_grouped_bf16_gemm_nt_contiguous(a, b, d, layout)
        used = (layout >= 0) & (layout < 2)
        assert torch.equal(d, torch.where(used[:, None], 8.0, 0.0).expand(-1, 4))
    else:
        with pytest.raises(ShapeError, match=said):
            kernels.m_grouped_bf16_gemm_nt_contiguous(a, b, d, layout)
