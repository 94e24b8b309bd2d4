"""Index scores: the references against float64, MXFP4 keys, recast keys under the interpreter, the contract."""

from __future__ import annotations

import os

import pytest
import torch

from deepinfer.core.errors import ShapeError, UnsupportedHardware
from deepinfer.kernels.indexer import fp8_fp4_mqa_logits, fp8_mqa_logits
from deepinfer.kernels.reference.cast import cast_back, per_token_cast_to_fp4

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


def parts(t: int, s: int, heads: int = 8, dim: int = 64):
    g = torch.Generator().manual_seed(5)
    q = torch.randn((t, heads, dim), generator=g).to(torch.float8_e4m3fn)
    keys = torch.randn((s, dim), generator=g)
    weights = torch.randn((t, heads), generator=g)
    starts = torch.randint(0, s // 2, (t,), generator=g, dtype=torch.int32)
    ends = torch.randint(s // 2, s + 1, (t,), generator=g, dtype=torch.int32)
    return q, keys, weights, starts, ends


def wanted(q, keys, weights, starts, ends) -> torch.Tensor:
    scores = torch.einsum("thd,sd->ths", q.double(), keys.double()).relu()
    y = torch.einsum("ths,th->ts", scores, weights.double())
    at = torch.arange(keys.shape[0])
    return y.masked_fill((at < starts[:, None]) | (at >= ends[:, None]), -torch.inf)


def test_fp8_keys() -> None:
    q, keys, weights, starts, ends = parts(300, 90)
    codes, scale = keys.to(torch.float8_e4m3fn), torch.rand(90) + 0.5
    ends[4] = starts[4]
    out = fp8_mqa_logits(q, (codes, scale), weights, starts, ends)
    right = wanted(q, codes.float() * scale[:, None], weights, starts, ends)
    seen = right.isfinite()
    assert torch.equal(out == -torch.inf, ~seen)
    assert float((out[seen] - right[seen]).norm() / right[seen].norm()) < 1e-6


def test_mxfp4_keys() -> None:
    q, keys, weights, starts, ends = parts(7, 40)
    packed, scale = per_token_cast_to_fp4(keys)
    out = torch.empty(7, 60, dtype=torch.bfloat16)[:, 10:50]
    assert fp8_fp4_mqa_logits(q, (packed, scale), weights, starts, ends, out=out) is out
    right = wanted(q, cast_back(packed, scale), weights, starts, ends)
    seen = right.isfinite()
    assert torch.equal(out == -torch.inf, ~seen)
    assert float((out[seen].double() - right[seen]).norm() / right[seen].norm()) < 4e-3


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_recast_keys_are_the_same_values() -> None:
    from deepinfer.kernels.triton.indexer_launch import recast_keys

    packed = torch.randint(0, 256, (70, 64), dtype=torch.uint8)
    codes = torch.randint(100, 114, (70, 4), dtype=torch.uint8)  # within 2^14
    codes[3], codes[4, 0], codes[5] = 255, 255, torch.tensor([0, 3, 2, 1])
    wide, scale = recast_keys(packed, codes)
    found = wide.float() * scale[:, None]
    right = cast_back(packed, codes)
    assert found[3:5].isnan().all()
    good = torch.ones(70, dtype=torch.bool)
    good[3:5] = False
    assert torch.equal(found[good], right[good])


def test_wrong_arguments_are_refused() -> None:
    q, keys, weights, starts, ends = parts(3, 20)
    kv = (keys.to(torch.float8_e4m3fn), torch.ones(20))
    assert fp8_mqa_logits(q[:0], kv, weights[:0], starts[:0], ends[:0]).shape == (0, 20)
    with pytest.raises(ShapeError, match="keys has dtype float32"):
        fp8_mqa_logits(q, (keys, torch.ones(20)), weights, starts, ends)
    with pytest.raises(ShapeError, match="weights has shape"):
        fp8_mqa_logits(q, kv, weights[:2], starts, ends)
    with pytest.raises(ShapeError, match="cu_seq_len_k_end has dtype"):
        fp8_mqa_logits(q, kv, weights, starts, ends.long())
    with pytest.raises(UnsupportedHardware, match="triton"):
        fp8_mqa_logits(q, kv, weights, starts, ends, backend="triton")
