"""Sparse decode attention on a GPU: against the reference, repeated, each row alone and beside NaN."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer.kernels.attention import flash_mla_with_kvcache, get_mla_metadata
from deepinfer.kernels.formats import KVCacheFormat
from deepinfer.kernels.reference.cache import insert_rows

pytestmark = pytest.mark.gpu
FP8, FP4 = KVCacheFormat.V41_MXFP8, KVCacheFormat.V41_NVFP4


def cache_of(form: KVCacheFormat, rows: int, page: int) -> torch.Tensor:
    """Random rows in the even slots, NaN scales in the odd ones."""
    size = form.page_bytes(page)
    data = torch.full((-(-rows // page), size), 255, dtype=torch.uint8, device="cuda")
    x = 0.1 * torch.randn(rows // 2, 512, device="cuda")
    insert_rows(x, data, 2 * torch.arange(rows // 2, device="cuda"), form, page)
    return data


@pytest.mark.parametrize("backend", ["hopper", "portable"])
@pytest.mark.parametrize("heads", [8, 12, 32, 64, 128])
@pytest.mark.parametrize("more", [FP8, FP4], ids=lambda f: f.name)
def test_rows(backend, heads, more) -> None:
    rows, page, more_page = 150, 16, 64
    data, more_data = cache_of(FP8, 4096, page), cache_of(more, 8192, more_page)
    q = 5 * torch.randn(rows, 2, heads, 512, device="cuda", dtype=torch.bfloat16)
    first = 2 * torch.randint(0, 2048, (rows, 2, 128), device="cuda", dtype=torch.int32)
    second = 2 * torch.randint(0, 4096, (rows, 2, 300), device="cuda", dtype=torch.int32)
    second[torch.rand(second.shape, device="cuda") < 0.1] = -1
    first[3], second[3] = -1, 1 << 30
    first[4, :, :64] = -1
    sink = torch.randn(heads, device="cuda")
    sink[0], sink[1] = math.inf, -math.inf
    meta, _ = get_mla_metadata(2 * rows, heads, 428, batch_invariant=True)

    def call(part: slice, name: str, queries: torch.Tensor = q):
        return flash_mla_with_kvcache(
            queries[part], data, first[part], page_size=page, attn_sink=sink, extra_k_cache=more_data,
            extra_indices_in_kvcache=second[part], extra_page_size=more_page, extra_format=more, sched_meta=meta,
            backend=name,
        )  # fmt: skip

    out, lse = call(slice(None), backend)
    right, right_lse = call(slice(None), "torch")
    x, y = out.double(), right.double()
    assert float(1 - 2 * (x * y).sum() / (x * x + y * y).sum()) < 5e-6
    torch.testing.assert_close(out, right, atol=1e-3, rtol=2.01 / 128)
    torch.testing.assert_close(lse, right_lse, atol=1e-6, rtol=8.01 / 65536)
    assert (out[3] == 0).all()
    for _ in range(20):
        assert torch.equal(call(slice(None), backend)[0], out)
    assert torch.equal(call(slice(77, 79), backend)[0], out[77:79])
    spoilt = q.clone()
    spoilt[::2] = math.nan
    assert torch.equal(call(slice(None), backend, spoilt)[0][1::2], out[1::2])
