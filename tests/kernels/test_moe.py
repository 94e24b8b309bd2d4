"""Routing: choices by definition, places by counting, rows there and back, experts as a whole; the kernels interpreted."""

from __future__ import annotations

import math
import os

import pytest
import torch
from tests.kernels.test_aligned import in_one_scale, uneven

from deepinfer.core.errors import ShapeError
from deepinfer.kernels import experts as whole
from deepinfer.kernels import moe, prepare_mxfp4_weights
from deepinfer.kernels.moe_backends import SWIGLU
from deepinfer.kernels.reference.cast import (
    cast_back,
    per_block_cast_to_fp8,
    per_token_cast_to_fp4,
)
from deepinfer.kernels.reference.moe import swiglu_rows

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ["torch", "triton"] if INTERPRETED else ["torch"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def score_of(x: float, name: str, row: list[float]) -> float:
    if name == "sqrtsoftplus":
        return math.sqrt(math.log1p(math.exp(x)))
    if name == "sigmoid":
        return 1 / (1 + math.exp(-x))
    return math.exp(x) / sum(math.exp(y) for y in row)


def best(values: list[float], k: int) -> list[int]:
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


def f32(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float32))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("score", ["sqrtsoftplus", "sigmoid", "softmax"])
@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2)])
def test_choices_are_those_of_the_definition(backend, score, groups, kept) -> None:
    x, bias = randn(6, 24), randn(24, seed=1) * 0.3
    weights, experts = moe.topk_gate(
        x, bias, 5, score=score, scale=1.5, groups=groups, topk_groups=kept, backend=backend
    )
    assert experts.dtype == torch.int64
    for row in range(6):
        values = x[row].tolist()
        scores = [score_of(v, score, values) for v in values]
        choice = [s + float(b) for s, b in zip(scores, bias, strict=True)]
        size = 24 // groups
        worth = [sum(sorted(choice[g * size : g * size + size])[-2:]) for g in range(groups)]
        for g in set(range(groups)) - set(best(worth, kept)):
            choice[g * size : g * size + size] = [-math.inf] * size
        wanted = best(choice, 5)
        assert experts[row].tolist() == wanted
        total = sum(scores[e] for e in wanted)
        assert weights[row].tolist() == pytest.approx([1.5 * scores[e] / total for e in wanted])


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_go_to_the_lowest_expert_and_nan_comes_last(backend) -> None:
    x = torch.zeros(3, 10)
    x[1] = torch.tensor([1.0, 2.0, 1.0, 2.0, 0.0, 2.0, 1.0, 1.0, 0.0, 0.0])
    x[2, 0] = math.nan
    _, experts = moe.topk_gate(x, None, 4, backend=backend)
    assert experts.tolist() == [[0, 1, 2, 3], [1, 3, 5, 0], [1, 2, 3, 4]]
    weights, experts = moe.topk_gate(x[2:], None, 10, backend=backend)
    assert experts[0, -1] == 0
    assert weights.isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_biases_of_text_and_image_choose_and_do_not_weigh(backend) -> None:
    x, bias, other = randn(4, 12), torch.zeros(12), torch.zeros(12)
    bias[3], other[9] = 100.0, 100.0
    is_image = torch.tensor([False, True, False, True])
    weights, experts = moe.topk_gate(
        x, bias, 2, bias_vl=other, is_image=is_image, renormalise=False, scale=2.0, backend=backend
    )
    assert experts[:, 0].tolist() == [3, 9, 3, 9]
    wanted = [
        2 * math.sqrt(math.log1p(math.exp(float(x[t, e])))) for t, e in enumerate((3, 9, 3, 9))
    ]
    assert weights[:, 0].tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padded_tokens_choose_nothing(backend) -> None:
    count = torch.tensor([2])
    weights, experts = moe.topk_gate(randn(4, 12), None, 3, num_tokens=count, backend=backend)
    assert (experts[:2] >= 0).all()
    assert experts[2:].tolist() == [[-1] * 3] * 2
    assert weights[2:].tolist() == [[0.0] * 3] * 2
    weights, experts = moe.topk_gate(randn(4, 12)[:0], None, 3, backend=backend)
    assert weights.shape == experts.shape == (0, 3)


def choices(tokens: int, topk: int, experts: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(tokens)
    ids = torch.stack([torch.randperm(max(experts, topk), generator=g)[:topk] for _ in range(tokens)])  # fmt: skip
    ids[torch.rand(tokens, topk, generator=g) < 0.15] = -1
    ids[0, 0] = experts + 4
    return ids


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("tokens", "topk", "experts"), [(1, 6, 40), (7, 3, 5), (300, 2, 3)])
@pytest.mark.parametrize("alignment", [1, 16])
def test_places_of_the_contiguous_layout(backend, tokens, topk, experts, alignment) -> None:
    ids = choices(tokens, topk, experts)
    found = moe.get_fused_mapping(ids, experts, alignment=alignment, backend=backend)
    start = 0
    pair_at = [-1] * found.num_places
    expert_at = [-1] * found.num_places
    for expert in range(experts):
        pairs = (ids.flatten() == expert).nonzero().flatten().tolist()
        assert int(found.expert_start[expert]) == start
        assert int(found.expert_end[expert]) == start + len(pairs)
        for i, pair in enumerate(pairs):
            pair_at[start + i], expert_at[start + i] = pair, expert
            assert int(found.token_topk_to_pos.flatten()[pair]) == start + i
        start += -(-len(pairs) // alignment) * alignment
    assert start <= found.num_places
    assert found.pos_to_token_topk.tolist() == pair_at
    assert found.pos_to_expert.tolist() == expert_at
    skipped = (ids < 0) | (ids >= experts)
    assert torch.equal(found.token_topk_to_pos < 0, skipped)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("max_m", [3, 50])
def test_places_of_the_masked_layout_and_full_experts(backend, max_m) -> None:
    ids = choices(50, 3, 6)
    found = moe.get_fused_mapping(ids, 6, max_m=max_m, with_places=True, backend=backend)
    assert found.expert_start.tolist() == [e * max_m for e in range(6)]
    for expert in range(6):
        pairs = (ids.flatten() == expert).nonzero().flatten().tolist()
        assert int(found.expert_end[expert]) == len(pairs)
        row = found.pos_to_token_topk[expert * max_m : (expert + 1) * max_m].tolist()
        kept = pairs[:max_m]
        assert row == kept + [-1] * (max_m - len(kept))
        places = found.token_topk_to_pos.flatten()[pairs].tolist()
        assert places == [expert * max_m + i for i in range(len(kept))] + [-1] * (len(pairs) - len(kept))  # fmt: skip
    plain = moe.get_fused_mapping(ids, 6, max_m=max_m, backend=backend)
    assert plain.pos_to_expert.numel() == 0
    assert torch.equal(plain.token_topk_to_pos, found.token_topk_to_pos)


@pytest.mark.skipif(not INTERPRETED, reason="a form of the kernel")
def test_places_counted_by_blocks_are_the_same() -> None:
    from deepinfer.kernels.triton import moe_launch as launch

    ids = choices(300, 2, 5)
    wanted = moe.get_fused_mapping(ids, 5, alignment=16, backend="torch")
    parts = [torch.full_like(p, 777) for p in wanted[:5]]
    launch.mapping(ids, 5, 16, None, *parts, sizes=(256, 64, 1), directly=0)
    assert all(torch.equal(p, w) for p, w in zip(parts, wanted, strict=False))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("channels", [72, 33])
def test_rows_there_and_back(backend, channels) -> None:
    ids, x = choices(9, 3, 5), randn(9, channels)
    ids[4] = -1
    map_ = moe.get_fused_mapping(ids, 5, alignment=4)
    weights = randn(9, 3, seed=5).abs()
    rows, at = moe.expand_to_fused(x, map_, weights, backend=backend)
    used = map_.pos_to_token_topk >= 0
    pairs = map_.pos_to_token_topk[used].long()
    assert torch.equal(rows[used], x[pairs // 3])
    assert at is not None
    assert torch.equal(at[used], weights.flatten()[pairs])
    rows[~used] = math.nan  # garbage in padding reaches no sum
    out = moe.reduce_fused(rows, map_, weights, backend=backend)
    good = map_.token_topk_to_pos >= 0
    for token in range(9):
        total = torch.zeros(channels)
        for k in range(3):
            if good[token, k]:
                total = total + x[token] * weights[token, k]
        assert torch.equal(out[token], total)
    added = randn(9, channels, seed=3)
    out = torch.full((9, channels + 4), 777.0)
    moe.reduce_fused(rows, map_, weights, added=added, out=out[:, 2:-2], backend=backend)
    assert torch.equal(out[4, 2:-2], added[4])
    assert bool((out[:, :2] == 777).all() and (out[:, -2:] == 777).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_with_scales_keep_their_bytes(backend) -> None:
    ids = choices(6, 2, 4)
    map_ = moe.get_fused_mapping(ids, 4, max_m=6, with_places=True)
    codes = torch.randint(0, 256, (6, 48), dtype=torch.uint8).view(torch.float8_e4m3fn)
    for scale in (randn(6, 3), torch.randint(0, 256, (6, 3), dtype=torch.uint8)):
        (q, s), weights = moe.expand_to_fused_with_sf((codes, scale), map_, backend=backend)
        used = map_.pos_to_token_topk >= 0
        token = map_.pos_to_token_topk[used].long() // 2
        assert torch.equal(q.view(torch.uint8)[used], codes.view(torch.uint8)[token])
        assert torch.equal(s[used], scale[token])
        assert weights is None


def test_no_tokens() -> None:
    ids = torch.empty((0, 6), dtype=torch.int64)
    map_ = moe.get_fused_mapping(ids, 8)
    assert map_.num_places == 0
    assert map_.expert_end.tolist() == [0] * 8
    masked = moe.get_fused_mapping(ids, 8, max_m=2, with_places=True)
    assert masked.pos_to_expert.tolist() == [-1] * 16
    rows, _ = moe.expand_to_fused(torch.empty(0, 16), map_)
    assert rows.shape == (0, 16)
    assert moe.reduce_fused(rows, map_).shape == (0, 16)
    assert whole.fused_experts(torch.empty(0, 16).bfloat16(), randn(8, 8, 16).bfloat16(), randn(8, 16, 4).bfloat16(), torch.empty(0, 6), ids).shape == (0, 16)  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("limit", [math.inf, 1.0])
def test_swiglu_of_pairs_alone(backend, limit) -> None:
    ids = choices(5, 2, 4)
    places = moe.get_fused_mapping(ids, 4, alignment=4).token_topk_to_pos
    x, weights = randn(24, 128) * 3, randn(5, 2, seed=2).abs()
    out = torch.full((24, 64), 777.0)
    SWIGLU(backend, x, weights, places, limit, 32, out, None)
    used = torch.zeros(24, dtype=torch.bool)
    used[places[places >= 0].long()] = True
    assert (out[~used] == 777).all()
    rows = places[places >= 0].long()
    wanted = swiglu_rows(x[rows].double().float(), limit, weights[places >= 0])
    assert torch.allclose(out[rows], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_swiglu_in_one_scale(backend) -> None:
    ids = choices(5, 2, 4)
    ids[2, 1] = -1
    places = moe.get_fused_mapping(ids, 4, alignment=4).token_topk_to_pos
    x, weights = (
        torch.cat((uneven(24, 256), randn(24, 256, seed=1) * 3), -1),
        randn(5, 2, seed=2).abs(),
    )
    q = torch.full((24, 256), 3.0).to(torch.float8_e4m3fn)
    scale = torch.full((24, 2), 777.0)
    SWIGLU(backend, x, weights, places, 10.0, 32, q, scale)
    rows = places[places >= 0].long()
    used = torch.zeros(24, dtype=torch.bool)
    used[rows] = True
    assert (scale[~used] == 777).all()
    assert (q[~used].float() == 3).all()
    wanted, top = in_one_scale(swiglu_rows(x[rows], 10.0, weights[places >= 0]))
    assert torch.equal(scale[rows], top)
    differ = q[rows].view(torch.uint8) != wanted.view(torch.uint8)
    assert float(differ.double().mean()) < (1e-3 if INTERPRETED else 1e-9)


def per_pair(x, w13, w2, weights, ids, limit) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            if 0 <= expert < len(w13):
                hidden = swiglu_rows((x[token].double() @ w13[expert].double().T)[None].float(), limit, weight[None])  # fmt: skip
                out[token] += (hidden.double() @ w2[expert].double().T)[0]
    return out


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    x, y = x.double(), y.double()
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


@pytest.mark.skipif(INTERPRETED, reason="the interpreter multiplies the bits of bf16")
@pytest.mark.parametrize("layout", ["auto", "masked", "contiguous"])
@pytest.mark.parametrize(
    ("kind", "group"), [("bf16", 128), ("fp8", 128), ("fp4", 128), ("fp4", 32)]
)
def test_experts_as_a_whole(layout, kind, group) -> None:
    x, ids = randn(20, 256).bfloat16(), choices(20, 3, 6)
    ids[3] = -1
    weights, added = randn(20, 3, seed=1).abs(), randn(20, 256, seed=2).bfloat16()
    w13, w2 = randn(6, 256, 256, seed=3) * 0.05, randn(6, 256, 128, seed=4) * 0.05
    if kind == "bf16":
        packed = exact = (w13.bfloat16(), w2.bfloat16())
    elif kind == "fp4":
        packed = tuple(per_token_cast_to_fp4(w) for w in (w13, w2))
        exact = tuple(cast_back(*p) for p in packed)
    else:
        casts = [per_block_cast_to_fp8(w, 128) for w in (w13, w2)]
        packed = tuple((q, s.float()) for q, s in casts)
        exact = tuple(cast_back(*c, block=(128, 128)) for c in casts)
    out = whole.fused_experts(
        x, *packed, weights, ids, limit=10.0, added=added, layout=layout, scale_group=group
    )
    wanted = per_pair(x, *exact, weights, ids, 10.0)
    assert torch.equal(out[3], added[3])
    assert calc_diff(out, wanted + added) < (1e-5 if kind == "bf16" else 1e-3)


@pytest.mark.parametrize("lie", ["slice", "expand"])
def test_weights_of_pairs_reach_the_kernels_side_by_side(monkeypatch, lie) -> None:
    seen = []

    def step(backend, rows, weights, *rest):
        seen.append(weights)
        return SWIGLU(backend, rows, weights, *rest)

    monkeypatch.setattr(whole, "SWIGLU", step)
    x, ids = randn(5, 64), choices(5, 3, 6)
    w13, w2 = randn(6, 64, 64, seed=3), randn(6, 64, 32, seed=4)
    weights = randn(5, 8)[:, ::2][:, :3] if lie == "slice" else randn(5, 1).expand(5, 3)
    found = whole.fused_experts(x.bfloat16(), w13.bfloat16(), w2.bfloat16(), weights, ids)
    assert seen[0].is_contiguous()
    assert torch.equal(seen[0], weights)
    again = whole.fused_experts(
        x.bfloat16(), w13.bfloat16(), w2.bfloat16(), weights.contiguous(), ids
    )
    assert torch.equal(found, again)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter multiplies the bits of bf16")
def test_prepared_experts_take_groups_of_32() -> None:
    x, ids, weights = (
        (uneven(20, 256) / 64).bfloat16(),
        choices(20, 3, 6),
        randn(20, 3, seed=1).abs(),
    )
    packed = [per_token_cast_to_fp4(randn(6, 256, k, seed=k) * 0.05) for k in (256, 128)]
    ready = [prepare_mxfp4_weights(*p) for p in packed]
    assert ready[0][0].dtype == torch.int32
    outs = [
        whole.fused_experts(x, *w, weights, ids, scale_group=32, out=torch.empty(20, 256))
        for w in (packed, ready)
    ]
    assert 0 < calc_diff(*outs) < 1e-6


def test_wrong_arguments_are_refused() -> None:
    x, ids = randn(4, 12), torch.zeros((4, 3), dtype=torch.int64)
    with pytest.raises(ShapeError, match="topk is 13"):
        moe.topk_gate(x, None, 13)
    with pytest.raises(ShapeError, match="5 groups of 12"):
        moe.topk_gate(x, None, 2, groups=5)
    with pytest.raises(ShapeError, match="score is 'relu'"):
        moe.topk_gate(x, None, 2, score="relu")
    with pytest.raises(ShapeError, match="num_experts is 4000"):
        moe.get_fused_mapping(ids, 4000)
    with pytest.raises(ShapeError, match="must be contiguous"):
        moe.get_fused_mapping(ids.T, 4)
    map_ = moe.get_fused_mapping(ids, 4)
    with pytest.raises(ShapeError, match="x has shape"):
        moe.expand_to_fused(x[:3], map_)
    with pytest.raises(ShapeError, match="topk_weights has shape"):
        moe.expand_to_fused(x, map_, torch.zeros(4, 2))
    with pytest.raises(ShapeError, match="y has shape"):
        moe.reduce_fused(x, map_)
    w = randn(4, 32, 12)
    with pytest.raises(ShapeError, match="layout is 'dense'"):
        whole.fused_experts(x, w, w, torch.zeros(4, 3), ids, layout="dense")
    pair = w.to(torch.float8_e4m3fn), torch.ones(4, 1, 1)
    with pytest.raises(ShapeError, match="multiple of 128"):
        whole.fused_experts(x, pair, pair, torch.zeros(4, 3), ids)


@pytest.mark.skipif(INTERPRETED, reason="the compiler of torch is not for the interpreter")
def test_operations_of_torch() -> None:
    ops, x, bias = torch.ops.deepinfer, randn(4, 12), randn(12)
    weights, ids = torch.empty(4, 3), torch.empty((4, 3), dtype=torch.int64)
    form = ("sigmoid", True, 1.0, 1, 1)
    torch.library.opcheck(ops.topk_gate, (None, x, bias, None, None, None, *form, weights, ids))
    weights, ids = moe.topk_gate(x, bias, 3)
    map_ = moe.get_fused_mapping(ids, 12, alignment=4)
    parts = [torch.empty_like(p) for p in map_[:5]]
    torch.library.opcheck(ops.get_fused_mapping, (None, ids, 12, 4, None, *parts))
    places, out = map_.token_topk_to_pos, torch.zeros(map_.num_places, 12)
    per_place = torch.zeros(len(out))
    torch.library.opcheck(
        ops.expand_to_fused, (None, x, x, weights, places, out, out + 0, per_place)
    )
    torch.library.opcheck(ops.expand_to_fused, (None, x, None, None, places, out, None, None))
    torch.library.opcheck(ops.reduce_fused, (None, out, weights, places, x, torch.empty_like(x)))
    half = torch.zeros(len(out), 6)
    torch.library.opcheck(ops.silu_and_mul_quant_fused, (None, out, weights, places, 1.0, 2, half, None))  # fmt: skip

    def step(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        weights, ids = moe.topk_gate(x, bias, 3)
        return whole.fused_experts(x, w13, w2, weights, ids, limit=10.0)

    w13, w2 = randn(12, 16, 12).bfloat16(), randn(12, 12, 8).bfloat16()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    x = x.bfloat16()
    assert torch.equal(compiled(x, bias), step(x, bias))
