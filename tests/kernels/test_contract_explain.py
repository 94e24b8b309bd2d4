"""What `explain` says of a call, by every public kernel: it computes nothing, and names what would serve."""

from __future__ import annotations

import inspect
import os

import pytest
import torch
from tests.kernels.right_calls import CALLS

from deepinfer import kernels
from deepinfer.core.errors import ConfigError, ShapeError
from deepinfer.kernels import explain, use_backend

# They are plain torch, and have no operation.
PLAIN = {
    "ceil_to_ue8m0", "decode_ue8m0", "encode_ue8m0", "get_mla_metadata", "owned_indices",
    "pack_ue8m0", "prepare_mhc_projection", "prepare_mxfp4_weights", "round_fp8", "round_mxfp4", "round_nvfp4", "window_bands",
}  # fmt: skip
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.parametrize("name", sorted(CALLS))
def test_every_kernel_is_explained_by_itself_and_its_arguments(name: str) -> None:
    function, given = getattr(kernels, name), CALLS[name]()
    if name in PLAIN:
        with pytest.raises(ConfigError, match=f"{name} makes no choice"):
            explain(function, **given)
        return
    written = {k: v.clone() for k, v in given.items() if isinstance(v, torch.Tensor)}
    choice = explain(function, **given)
    for part in (choice, *choice.then):
        assert part.backend is not None
        assert part.operation in str(choice)
    assert all(torch.equal(given[k].view(torch.uint8), v.view(torch.uint8)) for k, v in written.items() if v.numel() and v.dim() and v.is_contiguous())  # fmt: skip
    if not INTERPRETED:
        assert choice.backend == "torch"
        if "backend" in inspect.signature(function).parameters:
            refused = explain(function, **given, backend="triton")
            assert refused.backend is None
            assert refused.wish == "triton"
            with use_backend("triton"):
                assert str(explain(function, **given)) == str(refused)


def test_a_call_of_several_operations_shows_all_of_them() -> None:
    choice = explain(kernels.fused_experts, **CALLS["fused_experts"]())
    assert choice.operation == "get_fused_mapping"
    assert [c.operation for c in choice.then][-1] == "reduce_fused"
    assert len(str(choice).splitlines()) > len(choice.then)


def test_what_was_not_computed_is_not_used() -> None:
    """Values of a selection that was not made are read from the first place; the caller's memory stays as it is."""
    x = torch.randn(2, 100)
    for _ in range(20):
        assert explain(kernels.topk, x, 4).operation == "topk"
    places = torch.full((2, 4), 2**30, dtype=torch.int32)
    assert explain(kernels.topk, x, 4, output_idx=places).operation == "topk"
    assert torch.equal(places, torch.full_like(places, 2**30))


def test_wrong_arguments_and_what_comes_after() -> None:
    x = torch.ones(2, 32)
    with pytest.raises(ShapeError, match="weight has shape"):
        explain(kernels.rms_norm, x, torch.ones(3))
    with pytest.raises(ConfigError, match="makes no choice"):
        explain(kernels.rms_norm, x[:0], torch.ones(32))
    with pytest.raises(ConfigError, match="there is no kernel 'rms'"):
        explain("rms", x)
    assert torch.equal(kernels.rms_norm(x, torch.ones(32), 0.0), x)  # calls compute again
