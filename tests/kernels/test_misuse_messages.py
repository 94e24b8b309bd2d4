"""Wrong names and arguments: what is said of them, and that the argument is the caller's own."""

from __future__ import annotations

import pytest
import torch

from deepinfer import kernels
from deepinfer.core.errors import ConfigError
from deepinfer.kernels.registry import operations


@pytest.mark.parametrize("backend", ["tritn", "Triton", 3, ["torch"]])
def test_backends_that_there_are_not(backend) -> None:
    """Also where nothing would be computed."""
    with pytest.raises(
        ConfigError, match=r"no kernel has a backend .*'hopper', .*'torch', 'triton'"
    ):
        kernels.bf16_gemm_nt(
            torch.zeros(0, 8).bfloat16(), torch.zeros(4, 8).bfloat16(), backend=backend
        )
    with (
        pytest.raises(ConfigError, match="no kernel has a backend"),
        kernels.use_backend(backend),
    ):
        pass


def test_names_that_explain_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPINFER_ACCELERATOR", raising=False)  # else only the reference is asked
    a, b = torch.ones(3, 64).bfloat16(), torch.ones(5, 64).bfloat16()
    assert kernels.explain("bf16_gemm_nt", a, b).operation == "gemm_nt"
    known = {o.name for o in operations()}
    assert {
        "fp8_paged_mqa_logits",
        "fp8_fp4_paged_mqa_logits",
        "get_paged_mqa_logits_metadata",
    } <= known
    x, gain = torch.ones(2, 32), torch.ones(32)
    for given in ((x, gain), (x, gain, 1e-6, x, x), (x, 1, 1e-6, x)):
        with pytest.raises(
            ConfigError, match=r"'rms_norm' takes \(Tensor x, .*hand over the function"
        ):
            kernels.explain("rms_norm", *given)
    assert kernels.explain("rms_norm", x, gain, eps=1e-6, out=x).backend in ("torch", "triton")
    with pytest.raises(ConfigError, match="kernel is 3; it must be a function"):
        kernels.explain(3)  # type: ignore[arg-type]
