"""Paged caches: bytes against the casts, the interpreter against the reference, addresses, slots, floors, the contract."""

from __future__ import annotations

import os

import pytest
import torch

from deepinfer.core.errors import ShapeError, UnsupportedHardware
from deepinfer.kernels import cache as kernels
from deepinfer.kernels.formats import KVCacheFormat
from deepinfer.kernels.reference.cast import (
    cast_back,
    per_token_cast_to_fp4,
    per_token_cast_to_fp8,
)
from deepinfer.kernels.reference.quant import round_fp8, round_mxfp4, round_nvfp4
from deepinfer.kernels.reference.rows import norm_rope_round

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ["torch", "triton"] if INTERPRETED else ["torch"]
FORMATS = list(KVCacheFormat)
each_format = pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
each_backend = pytest.mark.parametrize("backend", BACKENDS)
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]


if INTERPRETED:
    import triton
    import triton.language as tl

    from deepinfer.kernels.triton import cache_codes

    @triton.jit
    def both(x, code, back, FP4: tl.constexpr):
        i = tl.arange(0, 2048)
        v = tl.load(x + i)
        if FP4:
            c = cache_codes.encode_e2m1(v)
            tl.store(back + i, cache_codes.decode_e2m1(c))
        else:
            c = cache_codes.encode_e4m3(v, False).to(tl.int32)
            tl.store(back + i, cache_codes.decode_e4m3(c, False))
        tl.store(code + i, c)

    @triton.jit
    def fused_quotients(x, divisor, out):
        i = tl.arange(0, 64)
        tl.store(out + i, cache_codes.quotients(tl.load(x + i), tl.load(divisor + i), True))


def rows_of(form: KVCacheFormat, count: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn((count, form.channels), generator=g)
    x *= torch.exp2(
        torch.randint(-12, 9, (count, form.channels // 16), generator=g)
    ).repeat_interleave(16, 1)
    x[0], x[1, ::2] = 0.0, -0.0
    x[:, form.coded_channels :] = x[:, form.coded_channels :].bfloat16().float()
    return x


def poisoned(form: KVCacheFormat, pages: int, page_size: int) -> torch.Tensor:
    return torch.full((pages, form.page_bytes(page_size) + 32), 0xFF, dtype=torch.uint8)


def phases_of(rows: int, half: int = 32) -> torch.Tensor:
    angle = torch.rand((rows, half), generator=torch.Generator().manual_seed(9)) * 6.28
    return torch.stack((angle.cos(), angle.sin()), -1)


@each_backend
@pytest.mark.parametrize("page_size", [64, 5])
@each_format
def test_rows_come_back_as_the_roundings_give_them(form, page_size, backend) -> None:
    if backend == "triton" and form in (KVCacheFormat.V4_FP8, KVCacheFormat.V32_FP8):
        pytest.skip("the interpreter has no bf16")
    x = rows_of(form, 7)
    slots = torch.tensor([4, 12, 0, 9, 3, 14, 8])
    data = poisoned(form, 3, page_size)
    kernels.quantize_and_insert_k_cache(x, data, slots, form, page_size, backend=backend)
    found = kernels.gather_and_dequantize_k_cache(
        data, slots, form, page_size, dtype=torch.float32, backend=backend
    )
    coded = x[:, : form.coded_channels]
    if form.code_bits == 8:
        wanted = round_fp8(coded, form.group)
    else:
        wanted = round_nvfp4(coded) if form.group == 16 else round_mxfp4(coded)
    wanted = torch.cat((wanted, x[:, form.coded_channels :]), 1)
    assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))


@each_backend
@each_format
def test_bytes_are_those_of_the_casts_and_no_others_are_written(form, backend) -> None:
    page_size = 4
    x = rows_of(form, 5).to(torch.float16).float() if form.tail_channels else rows_of(form, 5)
    if form.tail_channels and backend == "triton":
        pytest.skip("the interpreter has no bf16")
    slots = torch.tensor([9, -1, 2, 7, -1], dtype=torch.int32)
    data = poisoned(form, 3, page_size)
    kernels.quantize_and_insert_k_cache(x, data, slots, form, page_size, backend=backend)
    wanted = poisoned(form, 3, page_size)
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        coded = x[row, : form.coded_channels]
        if form.code_bits == 8:
            codes, scales = per_token_cast_to_fp8(coded[None], form.group)
        else:
            codes, scales = per_token_cast_to_fp4(coded[None], form.group)
        if form.scale_type == "fp32":
            scales = scales.float()
        raw = scales.view(torch.uint8)[0]
        page, at = form.row_offset(slot, page_size)
        wanted[page, at : at + form.code_bytes] = codes.view(torch.uint8)[0]
        tail = x[row, form.coded_channels :].bfloat16().view(torch.uint8)
        wanted[page, at + form.tail_offset : at + form.tail_offset + len(tail)] = tail
        page, at = form.scale_offset(slot, page_size)
        wanted[page, at : at + form.scale_bytes] = 0
        wanted[page, at : at + len(raw)] = raw
    assert torch.equal(data, wanted)


@each_backend
def test_rows_are_those_of_the_models_packed_cache(backend) -> None:
    from deepinfer.models.deepseek_v41 import row_formats

    for form, packed, rounding in (
        (KVCacheFormat.V41_MXFP8, row_formats.window_format(512), round_fp8),
        (KVCacheFormat.V41_NVFP4, row_formats.pool_format(512), round_nvfp4),
        (KVCacheFormat.INDEXER_MXFP4, row_formats.key_format(128), round_mxfp4),
    ):
        x = rows_of(form, 6)
        data = poisoned(form, 1, 6)
        kernels.quantize_and_insert_k_cache(x, data, torch.arange(6), form, 6, backend=backend)
        size = 6 * form.code_bytes
        codes = data[0, :size].view(6, -1)
        scales = data[0, size : size + 6 * form.scale_bytes].view(6, -1)
        found = packed.unpack(torch.cat((codes, scales), 1), torch.float32)
        assert torch.equal(found, rounding(x))
        assert torch.equal(found, packed.unpack(packed.pack(rounding(x)), torch.float32))


@each_backend
@pytest.mark.parametrize(
    "form", [KVCacheFormat.V41_MXFP8, KVCacheFormat.V41_NVFP4, KVCacheFormat.INDEXER_MXFP4]
)
def test_values_that_are_not_finite_show(form, backend) -> None:
    x = torch.ones(3, form.channels)
    x[0, 40], x[1, 3], x[2, 17] = torch.nan, torch.inf, 1e38
    data = poisoned(form, 1, 4)
    slots = torch.tensor([0, 1, 2])
    kernels.quantize_and_insert_k_cache(x, data, slots, form, 4, backend=backend)
    found = kernels.gather_and_dequantize_k_cache(
        data, slots, form, 4, dtype=torch.float32, backend=backend
    )
    bad = found.isnan().view(3, -1, form.group).sum(2)
    group = [40 // form.group, 3 // form.group]
    for row in range(2):
        assert bad[row].nonzero().flatten().tolist() == [group[row]]
        assert bad[row, group[row]] == form.group
    assert not bad[2].any()


@each_backend
def test_exact_powers_and_their_neighbours(backend) -> None:
    form = KVCacheFormat.V41_MXFP8
    tops = torch.cat(
        [448 * 2.0**e * torch.tensor([1, 1 + 2**-23, 1 - 2**-24]) for e in range(-10, 6)]
    )
    x = (tops[:, None] * torch.linspace(-1, 1, 32)).repeat(1, 16)
    x[:, 31::32] = tops[:, None]
    data, slots = poisoned(form, 1, 48), torch.arange(48)
    kernels.quantize_and_insert_k_cache(x, data, slots, form, 48, backend=backend)
    codes, scales = per_token_cast_to_fp8(x)
    assert torch.equal(data[0, : 48 * 512].view(48, 512), codes.view(torch.uint8))
    assert torch.equal(data[0, 48 * 512 : 48 * 528].view(48, 16), scales.view(torch.uint8))


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_every_code_is_encoded_and_decoded() -> None:
    grid = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = grid[grid.isfinite()].unique()
    ties = (finite[1:] + finite[:-1]) / 2
    near = torch.cat([finite, ties, ties * (1 + 2**-22), ties * (1 - 2**-22), -finite * 0.3])
    x = torch.cat([near, torch.randn(2048 - len(near))])
    code, back = torch.empty(2048, dtype=torch.int32), torch.empty(2048)
    both[(1,)](x, code, back, FP4=False)
    wanted = x.to(torch.float8_e4m3fn)
    assert torch.equal(code, wanted.view(torch.uint8).int())
    assert torch.equal(back.view(torch.int32), wanted.float().view(torch.int32))
    y = torch.cat([torch.linspace(-7, 7, 1793), torch.randn(255)])
    both[(1,)](y, code, back, FP4=True)
    scale = torch.full((1, 64), 127, dtype=torch.uint8)
    bytes_ = (code[0::2] | (code[1::2] << 4)).to(torch.uint8)[None]
    assert torch.equal(back, cast_back(bytes_, scale)[0])
    from deepinfer.kernels.reference.quant import round_to_fp4_grid

    assert torch.equal(back.view(torch.int32), round_to_fp4_grid(y).view(torch.int32))


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_quotients_without_a_division_keep_the_sign_of_zero() -> None:
    x = torch.randn(64)
    x[:4] = torch.tensor([0.0, -0.0, -0.0, 0.0])
    divisor = torch.arange(64, 128, dtype=torch.uint8).view(torch.float8_e4m3fn)[:63].float()
    divisor = torch.cat((divisor, torch.ones(1)))
    out = torch.empty(64)
    fused_quotients[(1,)](x, divisor, out)
    assert torch.allclose(out, x / divisor, rtol=1e-6, atol=0)
    assert torch.equal(out.signbit(), x.signbit())


@each_backend
@pytest.mark.parametrize("form", [KVCacheFormat.V41_MXFP8, KVCacheFormat.INDEXER_FP8])
def test_rotation_norm_and_floor(form, backend) -> None:
    x = rows_of(form, 6)
    phases = phases_of(20)
    index = torch.tensor([3, 19, 0, 7, 7, 1], dtype=torch.int32)
    slots = torch.tensor([5, 2, -1, 7, 0, 1])
    positions, floors = torch.arange(6), torch.tensor([0, 2, 0, 3, 5, 0])
    data, wanted = poisoned(form, 2, 4), poisoned(form, 2, 4)
    kernels.rope_quant_insert(
        x,
        phases,
        data,
        slots,
        form,
        4,
        phase_index=index,
        positions=positions,
        write_floor=floors,
        backend=backend,
    )
    turned = norm_rope_round(x[:, None], phases=phases[index.long()])[:, 0]
    kept = torch.tensor([0, 3, 5])
    kernels.quantize_and_insert_k_cache(turned[kept], wanted, slots[kept], form, 4, backend="torch")
    assert torch.equal(data, wanted)
    weight = torch.rand(form.channels)
    kernels.rope_quant_insert(
        x, phases, data, slots, form, 4, weight=weight, eps=1e-6, backend=backend
    )
    got = kernels.gather_and_dequantize_k_cache(data, slots, form, 4, dtype=torch.float32)
    right = norm_rope_round(x[:, None], weight, 1e-6, phases[:6])[:, 0]
    right[2] = 0
    assert float((got - right).norm() / right.norm()) < 0.05


def pairs(seed: int = 1):
    """Two steps of three requests: tokens that wait, pairs in the batch, a request without tokens."""
    g = torch.Generator().manual_seed(seed)
    requests = torch.tensor([2, 2, 2, 0, 1, 1])
    positions = torch.tensor([5, 6, 7, 3, 8, 9])
    values, gates = torch.randn((2, 6, 512), generator=g)
    state = torch.randn((4, 3, 2, 512), generator=g)
    last = torch.tensor([0, 2, 3, 5, -1])
    return values, gates, state, requests, positions, last


@each_backend
@pytest.mark.parametrize("form", [KVCacheFormat.V41_NVFP4, KVCacheFormat.V41_MXFP8])
def test_pairs_are_pooled_normed_rotated_and_written(form, backend) -> None:
    values, gates, state, requests, positions, last = pairs()
    both = torch.stack((values, gates), 1)  # as the model has them: rows apart
    ring, weight, phases = state.clone(), torch.rand(512) + 0.5, phases_of(5)
    slots = torch.tensor([6, 1, 4, 9, 2])
    floors = torch.tensor([0, 0, 0, 4, 0, 0])
    data = poisoned(form, 3, 4)
    latents = kernels.compress_norm(
        both[:, 0], both[:, 1], weight, 1e-20, phases, data, slots, form, 4, last=last, state=ring,
        requests=requests, positions=positions, write_floor=floors, dtype=torch.float32, backend=backend,
    )  # fmt: skip
    firsts = [state[2, 4 % 3], both[1], state[0, 2 % 3], both[4]]
    wanted = []
    for first, second in zip(firsts, both[[0, 2, 3, 5]], strict=True):
        share = torch.softmax(torch.stack((first[1], second[1])).double(), 0)
        wanted.append((share * torch.stack((first[0], second[0])).double()).sum(0))
    pooled = torch.stack(wanted)
    normed = pooled * torch.rsqrt(pooled.square().mean(-1, keepdim=True)) * weight
    assert torch.allclose(latents[:4].double(), normed, rtol=1e-5, atol=1e-6)
    assert torch.equal(latents[4], torch.zeros(512))
    again = poisoned(form, 3, 4)
    turned = norm_rope_round(latents[:, None], phases=phases)[:, 0]
    kept = torch.tensor([0, 1, 3])
    kernels.quantize_and_insert_k_cache(turned[kept], again, slots[kept], form, 4, backend="torch")
    assert torch.equal(data, again)
    kept_state = state.clone()
    for token in range(6):
        kept_state[requests[token], positions[token] % 3] = both[token]
    assert torch.equal(ring, kept_state)


@each_backend
def test_single_tokens_and_a_ring_that_holds_fewer_than_a_step(backend) -> None:
    form = KVCacheFormat.V41_NVFP4
    values, gates, state, *_ = pairs()
    weight, phases = torch.ones(512), phases_of(6)
    data = poisoned(form, 2, 4)
    latents = kernels.compress_norm(
        values,
        None,
        weight,
        1e-20,
        phases,
        data,
        torch.arange(6),
        form,
        4,
        dtype=torch.float32,
        backend=backend,
    )
    right = values / values.square().mean(-1, keepdim=True).sqrt()
    assert torch.allclose(latents, right, rtol=1e-5)
    requests, positions = torch.full((6,), 1), torch.arange(10, 16)
    kernels.compress_norm(
        values, gates, weight, 0.0, phases, data, torch.empty(0, dtype=torch.int64), form, 4,
        last=torch.empty(0, dtype=torch.int64), state=state, requests=requests, positions=positions, backend=backend,
    )  # fmt: skip
    for token in (3, 4, 5):
        assert torch.equal(state[1, (10 + token) % 3], torch.stack((values[token], gates[token])))


@each_backend
@pytest.mark.parametrize("form", [KVCacheFormat.V41_MXFP8, KVCacheFormat.V41_NVFP4])
def test_addresses_behind_four_gigabytes(form, backend) -> None:
    """Pages so far apart that 32 bits do not hold the byte; the memory is never touched but for two rows."""
    stride, pages = 149_760, 30_000
    try:
        data = torch.empty(pages, stride, dtype=torch.uint8)
    except RuntimeError:
        pytest.skip("no address space for 4.5 GB")
    page_size = 64
    x = rows_of(form, 2)
    slots = torch.tensor([29_999 * page_size + 63, 14_500 * page_size])
    kernels.quantize_and_insert_k_cache(x, data, slots, form, page_size, backend=backend)
    found = kernels.gather_and_dequantize_k_cache(
        data, slots, form, page_size, dtype=torch.float32, backend=backend
    )
    small = poisoned(form, 1, 2)
    kernels.quantize_and_insert_k_cache(x, small, torch.arange(2), form, 2, backend="torch")
    assert torch.equal(
        found,
        kernels.gather_and_dequantize_k_cache(small, torch.arange(2), form, 2, dtype=torch.float32),
    )


@each_backend
def test_no_slot_reads_zeros_and_no_rows_do_nothing(backend) -> None:
    form = KVCacheFormat.V41_NVFP4
    data = poisoned(form, 2, 4)
    wide = torch.full((3, 600), 777.0)
    out = wide[:, 40:552]
    slots = torch.tensor([-1, -7, -(2**31)], dtype=torch.int64)
    assert (
        kernels.gather_and_dequantize_k_cache(data, slots, form, 4, out=out, backend=backend) is out
    )
    assert torch.equal(out, torch.zeros(3, 512))
    assert bool((wide[:, :40] == 777).all() and (wide[:, 552:] == 777).all())
    kernels.quantize_and_insert_k_cache(torch.ones(3, 512), data, slots, form, 4, backend=backend)
    assert bool((data == 0xFF).all())
    none = torch.empty(0, dtype=torch.int64)
    kernels.quantize_and_insert_k_cache(torch.ones(0, 512), data, none, form, 4, backend=backend)
    assert kernels.gather_and_dequantize_k_cache(data, none.view(0, 3), form, 4).shape == (
        0,
        3,
        512,
    )


def test_wrong_arguments_are_refused() -> None:
    form = KVCacheFormat.V41_MXFP8
    data, slots, x = poisoned(form, 2, 4), torch.arange(3), torch.ones(3, 512)
    with pytest.raises(ShapeError, match="pages of 100 bytes"):
        kernels.quantize_and_insert_k_cache(x, data[:, :100], slots, form, 4)
    with pytest.raises(ShapeError, match="k has shape"):
        kernels.quantize_and_insert_k_cache(x[:, :128], data, slots, form, 4)
    with pytest.raises(ShapeError, match="slots has dtype float32"):
        kernels.gather_and_dequantize_k_cache(data, slots.float(), form, 4)
    with pytest.raises(ShapeError, match="phases has 2 entries for 3 rows"):
        kernels.rope_quant_insert(x, phases_of(2), data, slots, form, 4)
    with pytest.raises(ShapeError, match="write_floor is given without positions"):
        kernels.rope_quant_insert(x, phases_of(3), data, slots, form, 4, write_floor=slots)
    with pytest.raises(ShapeError, match="pairs of tokens need all three"):
        kernels.compress_norm(x, x, x[0], 0.0, phases_of(3), data, slots, form, 4)
    with pytest.raises(ShapeError, match="give `last`"):
        kernels.compress_norm(x, None, x[0], 0.0, phases_of(3), data, slots[:2], form, 4)
    if not INTERPRETED:
        with pytest.raises(UnsupportedHardware, match="triton"):
            kernels.quantize_and_insert_k_cache(x, data, slots, form, 4, backend="triton")


@pytest.mark.skipif(INTERPRETED, reason="the compiler of torch needs no interpreter")
def test_operations_of_torch_and_a_whole_graph() -> None:
    form = KVCacheFormat.V41_NVFP4
    data, slots, x, phases = (
        poisoned(form, 2, 4),
        torch.tensor([3, -1, 5]),
        torch.randn(3, 512),
        phases_of(3),
    )
    ops = torch.ops.deepinfer
    torch.library.opcheck(ops.quantize_and_insert_k_cache, (None, x, data, slots, form.name, 4))
    torch.library.opcheck(
        ops.gather_and_dequantize_k_cache, (None, data, slots, torch.empty(3, 512), form.name, 4)
    )
    torch.library.opcheck(
        ops.rope_quant_insert,
        (None, x, phases, data, slots, form.name, 4, None, 0.0, None, None, None),
    )
    values, gates, state, requests, positions, last = pairs()
    more = torch.tensor([3, 1, 5, 0, 7])
    torch.library.opcheck(
        ops.compress_norm,
        (None, values, gates, x[0], 0.0, phases_of(5), data, more, form.name, 4, last, state, requests, positions,
         None, None, torch.empty(5, 512)),
    )  # fmt: skip

    def step(x, phases, data, slots):
        kernels.rope_quant_insert(x, phases, data, slots, form, 4)
        return kernels.gather_and_dequantize_k_cache(data, slots, form, 4) * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    other = data.clone()
    assert torch.equal(compiled(x, phases, data, slots), step(x, phases, other, slots))
    assert torch.equal(data, other)
