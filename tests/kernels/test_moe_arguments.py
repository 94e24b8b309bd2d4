"""Routing is refused where a CPU would give something and a GPU something else: places, layouts, groups, pairs that repeat."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from deepinfer import kernels
from deepinfer.core.errors import ShapeError

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("what is checked comes before any kernel of Triton's", allow_module_level=True)


def _gate(**other: Any) -> object:
    return kernels.topk_gate(torch.ones(3, 8), **{"bias": torch.zeros(8), "topk": 2, **other})


GATES: dict[str, tuple[str, dict[str, Any]]] = {
    "a bias of images without images": ("bias_vl", {"bias_vl": torch.zeros(8)}),
    "a bias of images without a bias": (
        "bias_vl",
        {"bias": None, "bias_vl": torch.zeros(8), "is_image": torch.ones(3).bool()},
    ),
    "images without their bias": ("is_image", {"is_image": torch.ones(3).bool()}),
    "unequal groups": ("groups", {"groups": 3}),
    "no groups": ("groups", {"groups": 0}),
    "more groups than there are": ("groups", {"groups": 2, "topk_groups": 3}),
    "more than may be chosen": ("topk", {"groups": 4, "topk_groups": 1, "topk": 3}),
}


@pytest.mark.parametrize("name", GATES)
def test_gates(name: str) -> None:
    argument, other = GATES[name]
    with pytest.raises(ShapeError) as caught:
        _gate(**other)
    assert caught.value.argument == argument


def test_places_are_numbers_of_32_bits() -> None:
    ids = torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(ShapeError, match=r"3221225472 places; they must be fewer than 2\^31"):
        kernels.get_fused_mapping(ids, 3, max_m=2**30)
    with pytest.raises(ShapeError, match="places"):
        kernels.get_fused_mapping(ids.expand(2, 1).contiguous(), 2, alignment=2**31)


@pytest.mark.parametrize("change", ["int64", "int16", "fp32", "apart"])
def test_places_as_they_were_made(change: str) -> None:
    """Kernels step through them as numbers of 32 bits side by side."""
    mapping = kernels.get_fused_mapping(torch.tensor([[0, 1], [1, 2]]), 3, alignment=8)
    places = mapping.token_topk_to_pos
    other = {
        "int64": places.long(), "int16": places.short(), "fp32": places.float(),
        "apart": torch.stack((places, places), -1)[..., 0],
    }[change]  # fmt: skip
    mapping = mapping._replace(token_topk_to_pos=other)
    x, y = torch.ones(2, 32), torch.ones(mapping.num_places, 32)
    for call in (
        lambda: kernels.expand_to_fused(x, mapping),
        lambda: kernels.expand_to_fused_with_sf((x, x), mapping),
        lambda: kernels.reduce_fused(y, mapping),
    ):
        with pytest.raises(ShapeError, match=r"token_topk_to_pos is .* int32") as caught:
            call()
        assert caught.value.argument == "mapping"


def _experts(x: torch.Tensor, ids: list[list[int]], **other: Any) -> torch.Tensor:
    w13, w2 = torch.ones(4, 64, 32).bfloat16() / 32, torch.ones(4, 32, 32).bfloat16() / 32
    topk = torch.tensor(ids)
    return kernels.fused_experts(x, w13, w2, torch.ones(topk.shape), topk, **other)


@pytest.mark.parametrize("layout", ["auto", "masked"])
def test_experts_that_a_token_names_twice(layout: str) -> None:
    """Rooms for each token once would be full, and tokens behind lose their own."""
    x = torch.ones(3, 32).bfloat16()
    with pytest.raises(ShapeError, match="token 1 names expert 2 twice"):
        _experts(x, [[0, 1, -1], [2, 0, 2], [2, 3, 1]], layout=layout)
    once = _experts(x, [[0, 1], [2, 0], [2, 3]], layout=layout)
    none = _experts(x, [[0, 1, -1, -1], [2, 0, 9, 9], [2, 3, -1, 4]], layout=layout)
    assert torch.equal(once, none)
    twice = _experts(x, [[0, 1], [2, 2], [2, 3]], layout="contiguous")
    assert torch.equal(once, twice)


def test_tokens_whose_channels_lie_apart() -> None:
    with pytest.raises(ShapeError, match="x has stride 2"):
        _experts(torch.ones(3, 64).bfloat16()[:, ::2], [[0], [1], [2]])


@pytest.mark.parametrize("limit", [-1.0, float("nan")])
def test_clamps_with_their_ends_in_order(limit: float) -> None:
    x = torch.ones(3, 32)
    for call in (
        lambda: _experts(x.bfloat16(), [[0], [1], [2]], limit=limit),
        lambda: kernels.silu_and_mul(x, limit=limit),
        lambda: kernels.silu_and_mul_quant(x, limit=limit),
    ):
        with pytest.raises(ShapeError, match="limit is"):
            call()
