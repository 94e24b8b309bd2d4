"""Batch-invariant Triton kernels without a GPU: values under the interpreter, and machine code for sm_90a."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version

import numpy
import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

INTERPRETED = """
import torch
from deepinfer.kernels import batch_invariant as bi
torch.set_num_threads(1)
g = torch.Generator().manual_seed(0)
def r(*shape): return torch.randn(shape, generator=g)
def check(name, found, wanted, limit=1e-6):
    error = float((found.double() - wanted.double()).norm() / wanted.double().norm())
    assert error < limit, (name, error)
on = {"backend": "triton"}
for rows, out, inner in ((1, 40, 72), (17, 100, 96), (70, 33, 2100)):
    x, w = r(rows, inner), r(out, inner)
    check("linear", bi.linear(x, w, **on), x.double() @ w.double().T)
x, w = r(5, 3, 64), r(3, 40, 64)
check("grouped", bi.grouped_linear(x, w, **on), bi.grouped_linear(x, w))
counts = [0, 3, 20, 0, 1]
x, w = r(24, 64), r(5, 40, 64)
check("expert", bi.expert_linear(x, w, counts, **on), bi.expert_linear(x, w, counts))
from deepinfer.kernels.reference.experts import ExpertOrder
experts = torch.tensor([2, 0, 2, 2, 1, 0])
places = torch.full((3 * 16,), 6, dtype=torch.int32)  # a tile of 16 places for each expert
for e in range(3):
    found = (experts == e).nonzero().flatten().int()
    places[e * 16 : e * 16 + len(found)] = found
order = ExpertOrder(experts, places, torch.tensor([0, 1, 2, -1], dtype=torch.int32), 16)
x, w = r(3, 72), r(3, 40, 72)
check("pair", bi.pair_linear(x, w, order, 2, **on), bi.pair_linear(x, w, ExpertOrder(experts), 2))
q, kv, sink = r(3, 5, 24), r(50, 24), r(5)
index = torch.randint(0, 50, (3, 40), generator=g)
valid = torch.rand(3, 40, generator=g) > 0.3
valid[2] = False
valid[0, :35] = False  # the first tiles are masked as a whole
kv[49] = float("nan")
index[~valid] = 49
index[valid & (index == 49)] = 1
clean = kv.nan_to_num()
check("attention", bi.sparse_attention(q, kv, index, valid, sink, 0.2, **on),
      bi.sparse_attention(q, clean, index, valid, sink, 0.2))
low = torch.full_like(sink, -torch.inf)
out = bi.sparse_attention(q, kv, index, valid, low, 0.2, **on)
assert torch.isfinite(out).all() and not out[2].any()
q, w, k = r(2, 3, 4, 32), r(2, 3, 4), r(2, 150, 32)
check("scores", bi.index_scores(q, w, k, **on), bi.index_scores(q, w, k))
seen = torch.tensor([[150, 0, 1], [70, 64, 149]])
hidden = torch.arange(150) >= seen.unsqueeze(-1)
for more in ({}, on):
    found = bi.index_scores(q, w, k, seen, **more)
    assert torch.equal(found == -torch.inf, hidden)
    assert torch.equal(found[~hidden], bi.index_scores(q, w, k, **more)[~hidden])
x, w = r(5, 300), r(300)
check("mean_square", bi.mean_square(x, **on), bi.mean_square(x))
check("row_sum", bi.row_sum(x, **on), bi.row_sum(x))
check("rms_norm", bi.rms_norm(x, w, 1e-6, **on), bi.rms_norm(x, w, 1e-6))
check("log_softmax", bi.log_softmax(x, **on), bi.log_softmax(x))
for n in (4, 3):
    x = r(37, n, n)
    check("sinkhorn", bi.sinkhorn(x, 20, 1e-6, **on), bi.sinkhorn(x, 20, 1e-6))
s, o, p, m = r(5, 4, 100), r(5, 100), r(5, 4), r(5, 4, 4)
check("sum_streams", bi.sum_streams(s, p, **on), bi.sum_streams(s, p))
check("mix_streams", bi.mix_streams(s, o, p, m, **on), bi.mix_streams(s, o, p, m))
assert bi.linear(r(0, 8), r(4, 8), **on).shape == (0, 4)
x, w = r(70, 64), r(48, 64)
whole = bi.linear(x, w, **on)
for rows in (1, 16, 17, 64, 65):
    assert torch.equal(bi.linear(x[70 - rows:], w, **on), whole[70 - rows:]), rows
print("fine")
"""


def test_values_under_the_interpreter() -> None:
    old = tuple(int(p) for p in version("triton").split(".")[:2]) < (3, 9)
    if old and tuple(int(p) for p in numpy.__version__.split(".")[:2]) >= (2, 4):
        pytest.skip("the interpreter of this triton needs numpy < 2.4")
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    found = subprocess.run(
        [sys.executable, "-c", INTERPRETED], capture_output=True, text=True, env=env
    )
    assert found.stdout.strip() == "fine", found.stderr[-2000:]


def compile_kernel(fn, types: dict[str, str], constants: dict, warps: int, stages: int):
    """Assembly and metadata for sm_90a, with every pointer and stride a multiple of 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    signature = {n: "constexpr" if n in constants else types[n] for n in fn.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(fn.arg_names)
        if n not in constants and (types[n].startswith("*") or n.startswith("stride") or n in "NK")
    }
    source = ASTSource(fn, signature, constants, aligned)
    options = {"num_warps": warps, "num_stages": stages}
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def spilled_bytes(ptx: str, folder) -> int:
    import triton

    path = folder / "kernel.ptx"
    path.write_text(ptx)
    ptxas = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/ptxas")
    command = [ptxas, "-v", "-arch=sm_90a", str(path), "-o", os.devnull]
    found = subprocess.run(command, capture_output=True, text=True)
    report = found.stdout + found.stderr
    if found.returncode:
        pytest.skip(f"the assembler that came with triton does not take this code: {report[-200:]}")
    return int(report.split(" bytes spill stores")[0].rsplit(" ", 1)[1])


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("tokens", [1, 32, 64, 128, 4096])
@pytest.mark.parametrize("shape", [(1280, 5120), (32768, 1280), (24, 20480), (512, 2048)])
def test_products_use_one_family_of_instructions(dtype, tokens, shape, tmp_path) -> None:
    import torch

    from deepinfer.kernels.batch_invariant import cuda
    from deepinfer.kernels.batch_invariant.triton_linear import linear_kernel

    tile = cuda.product_tile(tokens, *shape, torch.bfloat16 if dtype == "bf16" else torch.float32)
    parts = -(-shape[1] // tile.part_k)
    in_turn = parts if tokens > 256 else 1
    types = dict.fromkeys(linear_kernel.arg_names, "i32")
    types |= {"x": f"*{dtype}", "weight": f"*{dtype}", "out": "*fp32" if parts > in_turn else f"*{dtype}"}  # fmt: skip
    constants = {
        "PART_K": tile.part_k, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
        "EVEN_K": True, "GROUP": 8, "NUM_STAGES": tile.num_stages, "IN_TURN": in_turn,
    }  # fmt: skip
    kernel = compile_kernel(linear_kernel, types, constants, tile.num_warps, tile.num_stages)
    ptx = kernel.asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "mma.sync" not in ptx
    assert "cp.async" in ptx
    assert kernel.metadata.shared <= 227 * 1024
    assert spilled_bytes(ptx, tmp_path) == 0


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_products_of_experts_use_the_same_family(dtype, rows, tmp_path) -> None:
    from deepinfer.kernels.batch_invariant.triton_linear import pair_linear_kernel

    is_large, is_narrow = rows > 64, dtype == "bf16"
    stages = (4 if is_large else 6) if is_narrow else (3 if is_large else 4)
    types = dict.fromkeys(pair_linear_kernel.arg_names, "i32")
    types |= dict.fromkeys(("x", "weight", "out"), f"*{dtype}")
    types |= dict.fromkeys(("places", "tile_experts"), "*i32")
    constants = {
        "PER_INPUT": 6, "BLOCK_M": rows, "BLOCK_N": 128 if is_large and is_narrow else 64,
        "BLOCK_K": 64 if is_narrow else 32, "EVEN_K": True, "NUM_STAGES": stages,
    }  # fmt: skip
    kernel = compile_kernel(pair_linear_kernel, types, constants, 8 if is_large else 4, stages)
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    assert "mma.sync" not in kernel.asm["ptx"]
    assert kernel.metadata.shared <= 227 * 1024
    assert spilled_bytes(kernel.asm["ptx"], tmp_path) == 0


def test_inner_tiles_follow_from_the_weight_alone() -> None:
    import torch

    from deepinfer.kernels.batch_invariant import cuda

    for dtype in (torch.bfloat16, torch.float32):
        for shape in ((1280, 5120), (32768, 1280), (24, 20480), (128, 320)):
            tiles = [cuda.product_tile(m, *shape, dtype) for m in (1, 17, 40, 100, 600, 9000)]
            assert len({(t.block_k, t.part_k) for t in tiles}) == 1


@pytest.mark.parametrize(("heads", "dim", "warps"), [(16, 128, 4), (16, 512, 8), (32, 512, 8)])
def test_attention_does_not_spill(heads, dim, warps, tmp_path) -> None:
    from deepinfer.kernels.batch_invariant.triton_attention import sparse_attention_kernel

    types = dict.fromkeys(sparse_attention_kernel.arg_names, "i32")
    types |= {"queries": "*bf16", "kv": "*bf16", "out": "*bf16", "index": "*i64", "valid": "*u8"}
    types |= {"sink": "*fp32", "scale": "fp32"}
    constants = {"DIM": dim, "BLOCK_D": dim, "BLOCK_H": heads, "BLOCK_R": 32}
    kernel = compile_kernel(sparse_attention_kernel, types, constants, warps, 2)
    assert kernel.metadata.shared <= 227 * 1024
    assert spilled_bytes(kernel.asm["ptx"], tmp_path) == 0
