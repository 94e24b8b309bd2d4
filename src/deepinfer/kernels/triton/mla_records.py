"""Cached records to bf16 tiles in shared memory on Hopper: the copying half of the sparse MLA kernels.

A warp takes 4 records at a time and half of their 16 blocks of 32 channels, a thread one block of one record. Raw bytes
are read one step of 32 or 64 keys ahead into registers, their slots two steps ahead. Codes become bf16 by shifts: the fields of e4m3 and e2m1 fit into those of
bf16, subnormal codes too, and one product sets the exponent. Tiles hold 2^-32 of the values, so that the products of
every scale up to 2^39 stay in range.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from deepinfer.kernels.triton.gluon_names import block_barrier, load_tile

__all__ = [
    "copy_queries",
    "decode_rows",
    "read_records",
    "rows_layout",
    "tile_range",
    "view_memory",
]

# Called _reinterpret up to Triton 3.6; the same arguments.
view_memory = (
    getattr(gl.shared_memory_descriptor, "reinterpret", None)
    or gl.shared_memory_descriptor._reinterpret
)
"""Shared memory with another type, shape and layout."""

# Four e4m3 codes and a pair of equal bf16 factors to four bf16: s eeee mmm to s 0000eeee mmm0000.
_FP8 = gl.constexpr("""{
.reg .b32 p, q, a, b;
prmt.b32 p, $2, 0, 0x1404;
prmt.b32 q, $2, 0, 0x3424;
shr.u32 a, p, 4;
shr.u32 b, q, 4;
and.b32 a, a, 0x07F007F0;
and.b32 b, b, 0x07F007F0;
lop3.b32 a, p, a, 0x80008000, 0xEC;
lop3.b32 b, q, b, 0x80008000, 0xEC;
mul.rn.bf16x2 $0, a, $3;
mul.rn.bf16x2 $1, b, $3;
}""")
# Eight e2m1 codes and a pair of equal bf16 factors to eight bf16: s ee m to s 000000ee m000000.
_FP4 = gl.constexpr("""{
.reg .b32 w, p, q, r, t, a, b, c, d;
shl.b32 w, $4, 4;
prmt.b32 p, w, $4, 0x4400;
prmt.b32 q, w, $4, 0x5511;
prmt.b32 r, w, $4, 0x6622;
prmt.b32 t, w, $4, 0x7733;
shl.b32 a, p, 2;
shl.b32 b, q, 2;
shl.b32 c, r, 2;
shl.b32 d, t, 2;
and.b32 a, a, 0x01C001C0;
and.b32 b, b, 0x01C001C0;
and.b32 c, c, 0x01C001C0;
and.b32 d, d, 0x01C001C0;
lop3.b32 a, p, a, 0x80008000, 0xEC;
lop3.b32 b, q, b, 0x80008000, 0xEC;
lop3.b32 c, r, c, 0x80008000, 0xEC;
lop3.b32 d, t, d, 0x80008000, 0xEC;
mul.rn.bf16x2 $0, a, $5;
mul.rn.bf16x2 $1, b, $5;
mul.rn.bf16x2 $2, c, $5;
mul.rn.bf16x2 $3, d, $5;
}""")


@gluon.constexpr_function
def rows_layout(warps, keys, fp4):
    """Words of records, [keys, 16 blocks, words of a block]: a thread has whole blocks of 32 channels.

    A warp has half of the blocks of four records; so that its stores meet no bank twice, neighbours lie at two halves of
    128 bytes of output and at four records.
    """
    words = [[0, 0, 1], [0, 0, 2]] if fp4 else [[0, 0, 1], [0, 0, 2], [0, 0, 4]]
    low = 0 if warps == 4 else 1
    high = {16: 1, 32: 2, 64: 3}[keys]
    rest = [[8, 0, 0], [16, 0, 0], [32, 0, 0]]
    return gl.DistributedLinearLayout(
        words + rest[low:high],
        [[0, 1, 0], [1, 0, 0], [2, 0, 0], [0, 2, 0], [0, 4, 0]],
        [[0, 8, 0], [4, 0, 0], *rest[:low]],
        [],
        [keys, 16, 4 if fp4 else 8],
    )


@gluon.jit
def tile_range(
    unit, lengths, extra_lengths, width, extra_width, splits, tiles_a_split, heads,
    HEADS: gl.constexpr, LENGTHS: gl.constexpr, EXTRA_LENGTHS: gl.constexpr,
):  # fmt: skip
    """Row, first head, part and tiles of a unit of work: those of the first list, then those of the second."""
    split = unit % splits
    row = unit // splits
    blocks = gl.cdiv(heads, HEADS)
    head = (row % blocks) * HEADS
    row = row // blocks
    count = width
    more = extra_width
    if LENGTHS:
        count = gl.minimum(count, gl.maximum(gl.load(lengths + row), 0))
    if EXTRA_LENGTHS:
        more = gl.minimum(more, gl.maximum(gl.load(extra_lengths + row), 0))
    low = split * tiles_a_split
    high = low + tiles_a_split
    tiles = gl.cdiv(width, 64)
    first = low
    last = gl.minimum(high, gl.cdiv(count, 64))
    last = gl.maximum(last, first)
    first_more = gl.maximum(low - tiles, 0)
    last_more = gl.minimum(high - tiles, gl.cdiv(more, 64))
    last_more = gl.maximum(last_more, first_more)
    return row, head, split, count, more, first, last, first_more, last_more


@gluon.jit
def _load(
    words, scales, n, limit, page16, L: gl.constexpr, FP4: gl.constexpr, PAGE: gl.constexpr
):  # fmt: skip
    """Raw words [keys, 16, words] and raw scales [keys, 16] of slots [keys]; zeros for slots out of range."""
    WORDS: gl.constexpr = 4 if FP4 else 8
    valid = (n >= 0) & (n < limit)
    slot = gl.where(valid, n, 0).to(gl.uint32)
    page = slot // PAGE
    line = (slot - page * PAGE).to(gl.int32)
    page = page.to(gl.int64) * page16
    block = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    at = page * 4 + line * (16 * WORDS)
    at = at[:, None] + (block * WORDS)[None, :]
    at = at[:, :, None] + word[None, None, :]
    w = gl.load(words + at, mask=valid[:, None, None], other=0)
    at = line * 16
    at += page * 8 + PAGE * 128 if FP4 else page * 16 + PAGE * 512
    s = gl.load(scales + (at[:, None] + block[None, :]), mask=valid[:, None], other=0)
    return w, s


@gluon.jit
def _factors(s, L: gl.constexpr, FP4: gl.constexpr):
    """Pairs of equal bf16 factors, as words, from raw scales [keys, 16]: [keys, 16, 8 or 4]."""
    KEYS: gl.constexpr = s.shape[0]
    if FP4:
        both = s.to(gl.int32)
        pair = gl.join(both & 127, (both >> 8) & 127)
        x = (pair << 20).to(gl.float32, bitcast=True) * 162259276829213363391578010288128.0
        x = x * 162259276829213363391578010288128.0
        x = gl.where(pair == 127, float("nan"), x)
        bits = x.to(gl.int32, bitcast=True)
        f = (bits & -65536) | ((bits >> 16) & 65535)
        f = gl.join(f, f).reshape([KEYS, 16, 4])
        f = gl.convert_layout(f, L, assert_trivial=True)
    else:
        e = s.to(gl.int32)
        f = (gl.minimum(e, 166) + 88) * 0x00800080
        f = gl.where(e == 255, 0x7FC07FC0, f)
        f = f.expand_dims(2).broadcast_to([KEYS, 16, 8])
    return f


@gluon.jit
def decode_rows(w, s, to, L: gl.constexpr, FP4: gl.constexpr):
    """Writes the bf16 values of raw words to 32-bit words [keys, 256] of shared memory."""
    KEYS: gl.constexpr = w.shape[0]
    f = _factors(s, L, FP4)
    if FP4:
        a, b, c, d = gl.inline_asm_elementwise(
            _FP4, "=r,=r,=r,=r,r,r", [w, f], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1
        )  # fmt: skip
        y = gl.join(gl.join(a, b), gl.join(c, d)).permute((0, 1, 2, 4, 3))
    else:
        a, b = gl.inline_asm_elementwise(
            _FP8, "=r,=r,r,r", [w, f], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
        y = gl.join(a, b)
    to.store(y.reshape([KEYS, 256]))


@gluon.jit
def copy_queries(q_desc, q_tile, q_full, q_empty, phase, at):
    """Begins to copy the queries of a unit, once those before are no longer read."""
    mbarrier.wait(q_empty, phase)
    mbarrier.expect(q_full, q_desc.block_type.nbytes)
    load_tile(q_desc, [at, 0], q_full, q_tile)


@gluon.jit
def _fill_tiles(
    words,
    scales,
    index,
    limit,
    page16,
    count,
    first,
    last,
    k_ring,
    bias_ring,
    full,
    empty,
    slot,
    phase,
    q_desc,
    q_tile,
    q_full,
    q_empty,
    q_phase,
    q_at,
    ask,
    FP4: gl.constexpr,
    PAGE: gl.constexpr,
    WARPS: gl.constexpr,
    KEYS: gl.constexpr,
    DEPTH: gl.constexpr,
):
    """Fills the ring with tiles of 64 keys of one list: bf16 [64, 512], and 0 or -inf for each key.

    `index` is the list of the row, `count` its valid entries. If `ask`, the queries are copied behind the first tile.
    """
    STEPS: gl.constexpr = 64 // KEYS
    L: gl.constexpr = rows_layout(WARPS, KEYS, FP4)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32)
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))
    end = gl.minimum(count, last * 64)
    at = first * 64 + key
    n = gl.load(index + at, mask=at < end, other=-1)
    at += KEYS
    # Records are read one step ahead, slots two: a thread waits for all that it reads at once.
    w, s = _load(words, scales, n, limit, page16, L, FP4, PAGE)
    v = n
    n = gl.load(index + at, mask=at < end, other=-1)
    for tile in range(first, last):
        for step in gl.static_range(STEPS):
            at += KEYS
            w_now = w
            s_now = s
            v_now = v
            w, s = _load(words, scales, n, limit, page16, L, FP4, PAGE)
            v = n
            n = gl.load(index + at, mask=at < end, other=-1)
            if step == 0:
                mbarrier.wait(empty.index(slot), phase)
            to = view_memory(k_ring.index(slot), gl.int32, [64, 256], tile_layout)
            decode_rows(w_now, s_now, to.slice(step * KEYS, KEYS), L, FP4)
            bias = gl.where((v_now >= 0) & (v_now < limit), 0.0, float("-inf"))
            bias_ring.index(slot).slice(step * KEYS, KEYS).store(bias)
        # Tensor cores read what other threads wrote.
        fence_async_shared()
        block_barrier()
        mbarrier.arrive(full.index(slot), count=1)
        if ask & (tile == first):
            copy_queries(q_desc, q_tile, q_full, q_empty, q_phase, q_at)
        slot += 1
        if slot == DEPTH:
            slot = 0
            phase ^= 1
    return slot, phase


@gluon.jit
def read_records(
    q_desc, words, scales, index, lengths, limit, page16, width, stride_i,
    extra_words, extra_scales, extra_index, extra_lengths, extra_limit, extra_page16, extra_width, stride_e,
    q_tile, q_full, q_empty, k_ring, bias_ring, full, empty, units, splits, tiles_a_split, heads,
    HEADS: gl.constexpr, FP4: gl.constexpr, PAGE: gl.constexpr, LENGTHS: gl.constexpr,
    EXTRA: gl.constexpr, EXTRA_FP4: gl.constexpr, EXTRA_PAGE: gl.constexpr, EXTRA_LENGTHS: gl.constexpr,
    WARPS: gl.constexpr, KEYS: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """Decodes the records of each unit and copies its queries."""
    slot = 0
    phase = 1
    q_phase = 1
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row, head, _, count, more, first, last, first_more, last_more = tile_range(
            unit, lengths, extra_lengths, width, extra_width, splits, tiles_a_split, heads, HEADS, LENGTHS,
            EXTRA_LENGTHS,
        )  # fmt: skip
        q_at = row * heads + head
        if first < last:
            slot, phase = _fill_tiles(
                words, scales, index + row.to(gl.int64) * stride_i, limit, page16, count, first, last,
                k_ring, bias_ring, full, empty, slot, phase, q_desc, q_tile, q_full, q_empty, q_phase, q_at, True,
                FP4, PAGE, WARPS, KEYS, DEPTH,
            )  # fmt: skip
        if EXTRA:  # noqa: SIM102
            if first_more < last_more:
                slot, phase = _fill_tiles(
                    extra_words, extra_scales, extra_index + row.to(gl.int64) * stride_e, extra_limit, extra_page16,
                    more, first_more, last_more,
                    k_ring, bias_ring, full, empty, slot, phase,
                    q_desc, q_tile, q_full, q_empty, q_phase, q_at, first == last,
                    EXTRA_FP4, EXTRA_PAGE, WARPS, KEYS, DEPTH,
                )  # fmt: skip
        if (first == last) & (first_more == last_more):
            copy_queries(q_desc, q_tile, q_full, q_empty, q_phase, q_at)
        q_phase ^= 1
