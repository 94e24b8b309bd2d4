"""Bytes are looked at as what they are: a scale or a code of another dtype is refused, not read as if it were one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from deepinfer import kernels
from deepinfer.core.errors import ShapeError

CODES, SCALES = kernels.per_token_cast_to_fp4(torch.ones(4, 128))
ONES = torch.ones(2, 64)
WHOLE = torch.ones(2, 64, dtype=torch.int32)
NUMBER = torch.tensor(1.0)

REFUSED: dict[str, tuple[str, Callable[[], object]]] = {
    **{
        f"{kernel.__name__} of {dtype}": (argument, partial(kernel, ONES.to(dtype)))
        for kernel, argument, others in (
            (kernels.ceil_to_ue8m0, "x", (torch.bfloat16, torch.float64, torch.int32)),
            (kernels.encode_ue8m0, "scale", (torch.bfloat16, torch.float64, torch.int32)),
            (kernels.decode_ue8m0, "scale", (torch.float32, torch.int32, torch.float8_e4m3fn)),
            (kernels.pack_ue8m0, "scale", (torch.float32, torch.float8_e4m3fn)),
            (kernels.round_fp8, "x", (torch.int32, torch.bool)),
            (kernels.round_mxfp4, "x", (torch.int32,)),
            (kernels.round_nvfp4, "x", (torch.int64,)),
        )
        for dtype in others
    },
    "a group of none": ("group", lambda: kernels.round_fp8(ONES, 0)),
    "a group below none": ("group", lambda: kernels.round_fp8(ONES, -1)),
    "a number": ("x", lambda: kernels.round_nvfp4(NUMBER)),
    "no scales to pack": ("scale", lambda: kernels.pack_ue8m0(SCALES[:, :0])),
    "a scale without an axis": ("scale", lambda: kernels.pack_ue8m0(SCALES[0, 0])),
    "prepared, fp32 scales": (
        "scales",
        lambda: kernels.prepare_mxfp4_weights(CODES, SCALES.float()),
    ),
    "prepared, signed scales": (
        "scales",
        lambda: kernels.prepare_mxfp4_weights(CODES, SCALES.view(torch.int8)),
    ),
    "prepared, fp32 values": (
        "values",
        lambda: kernels.prepare_mxfp4_weights(CODES.float(), SCALES),
    ),
    "prepared, one row": ("values", lambda: kernels.prepare_mxfp4_weights(CODES[0], SCALES[0])),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_dtypes_are_refused(name: str) -> None:
    argument, call = REFUSED[name]
    with pytest.raises(ShapeError) as caught:
        call()
    assert caught.value.argument == argument


def test_the_right_ones_pass() -> None:
    scales = torch.tensor([0.5, 4.0])
    assert torch.equal(kernels.decode_ue8m0(kernels.encode_ue8m0(scales)), scales)
    assert torch.equal(kernels.decode_ue8m0(torch.tensor([126, 129], dtype=torch.uint8)), scales)
    assert torch.equal(kernels.ceil_to_ue8m0(torch.tensor([0.4, 3.0])), scales)
    for bytes_ in (SCALES, SCALES.view(torch.uint8)):
        words, steps = kernels.prepare_mxfp4_weights(CODES, bytes_)
        assert words.dtype == steps.dtype == torch.int32
