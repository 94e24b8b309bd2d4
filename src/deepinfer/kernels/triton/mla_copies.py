"""Cached records to bf16 tiles in shared memory on Hopper, read ahead by asynchronous copies.

Raw bytes go to a ring of two steps in shared memory, slots are read a tile of 64 keys ahead, both across lists and rows;
see `mla_records` for how codes become bf16.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
)

from deepinfer.kernels.triton.gluon_names import block_barrier, copy_elements
from deepinfer.kernels.triton.mla_records import (
    copy_queries,
    decode_rows,
    rows_layout,
    tile_range,
    view_memory,
)

__all__ = ["copy_records"]


@gluon.constexpr_function
def _keys_of(warps, keys):
    """Bits of a key beyond the four of a warp: those of warps, and those of a thread."""
    bits = [[1 << i] for i in range(2, 6) if 1 << i < keys]
    low = 1 if warps == 4 else 2
    return bits[:low], bits[low:]


@gluon.constexpr_function
def _raw_layout(warps, keys, fp4):
    """Raw records [keys, words]: four lanes copy 64 bytes of a record, a thread copies of one record in four."""
    of_warps, of_threads = _keys_of(warps, keys)
    regs = [[0, 1], [0, 2]] + ([] if fp4 else [[0, 64]])
    return gl.DistributedLinearLayout(
        regs + [[*bit, 0] for bit in of_threads],
        [[0, 4], [0, 8], [1, 0], [2, 0], [0, 16]],
        [[0, 32]] + [[*bit, 0] for bit in of_warps],
        [],
        [keys, 64 if fp4 else 128],
    )


@gluon.constexpr_function
def _scale_layout(warps, keys, fp4):
    """Raw scales [keys, words], by the threads that copy of the same records."""
    of_warps, of_threads = _keys_of(warps, keys)
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2]] + [[*bit, 0] for bit in of_threads],
        [[0, 4] if fp4 else [0, 0], [0, 0], [1, 0], [2, 0], [0, 0]],
        [[0, 0]] + [[*bit, 0] for bit in of_warps],
        [],
        [keys, 8 if fp4 else 4],
    )


@gluon.constexpr_function
def _flat_layout(warps, keys, fp4):
    """`rows_layout` with the words of a record side by side."""
    words = 4 if fp4 else 8
    wide = rows_layout(warps, keys, fp4)

    def flat(bases):
        return [[key, block * words + word] for key, block, word in bases]

    return gl.DistributedLinearLayout(
        flat(wide.reg_bases), flat(wide.lane_bases), flat(wide.warp_bases), [], [keys, 16 * words]
    )


@gluon.jit
def _slots(index, base, end, WARPS: gl.constexpr, KEYS: gl.constexpr):
    """Slots of the steps of a tile."""
    layout: gl.constexpr = gl.SliceLayout(1, _raw_layout(WARPS, KEYS, False))
    found = ()
    for step in gl.static_range(64 // KEYS):
        at = base + step * KEYS + gl.arange(0, KEYS, layout=layout)
        found = found + (gl.load(index + at, mask=at < end, other=-1),)  # noqa: RUF005
    return found


@gluon.jit
def _views(raw, raw_scales, KEYS: gl.constexpr, FP4: gl.constexpr):
    """A slot of the raw ring as the records of a format."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
    values = view_memory(raw, gl.int32, [KEYS, 64 if FP4 else 128], layout)
    scales = view_memory(raw_scales, gl.int32, [KEYS, 8 if FP4 else 4], plain)
    return values, scales


@gluon.jit
def _copy(
    words, n, limit, page16, raw, raw_scales,
    WARPS: gl.constexpr, KEYS: gl.constexpr, FP4: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Begins to copy the raw records of some slots; zeros for slots out of range."""
    WORDS: gl.constexpr = 64 if FP4 else 128
    SCALES: gl.constexpr = 8 if FP4 else 4
    C: gl.constexpr = _raw_layout(WARPS, KEYS, FP4)
    S: gl.constexpr = _scale_layout(WARPS, KEYS, FP4)
    n = gl.convert_layout(n, gl.SliceLayout(1, C), assert_trivial=True)
    valid = (n >= 0) & (n < limit)
    slot = gl.where(valid, n, 0).to(gl.uint32)
    page = slot // PAGE
    line = (slot - page * PAGE).to(gl.int32)
    page = page.to(gl.int64) * page16
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, C))
    at = (page * 4 + line * WORDS)[:, None] + word[None, :]
    values, scales = _views(raw, raw_scales, KEYS, FP4)
    copy_elements(values, words + at, mask=valid[:, None].broadcast_to([KEYS, WORDS]))
    at = gl.convert_layout(page * 4 + (PAGE * WORDS + line * SCALES), gl.SliceLayout(1, S), assert_trivial=True)  # fmt: skip
    valid = gl.convert_layout(valid, gl.SliceLayout(1, S), assert_trivial=True)
    word = gl.arange(0, SCALES, layout=gl.SliceLayout(0, S))
    mask = valid[:, None].broadcast_to([KEYS, SCALES])
    copy_elements(scales, words + (at[:, None] + word[None, :]), mask=mask)


@gluon.jit
def _begin(
    words, n, limit, page16, extra_words, extra_limit, extra_page16, is_extra, raw, raw_scales,
    FP4: gl.constexpr, PAGE: gl.constexpr, EXTRA: gl.constexpr, EXTRA_FP4: gl.constexpr, EXTRA_PAGE: gl.constexpr,
    WARPS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Begins to copy records of one of two caches."""
    if EXTRA:
        if is_extra:
            _copy(extra_words, n, extra_limit, extra_page16, raw, raw_scales, WARPS, KEYS, EXTRA_FP4, EXTRA_PAGE)  # fmt: skip
        else:
            _copy(words, n, limit, page16, raw, raw_scales, WARPS, KEYS, FP4, PAGE)
    else:
        _copy(words, n, limit, page16, raw, raw_scales, WARPS, KEYS, FP4, PAGE)
    async_copy.commit_group()


@gluon.jit
def _turn(
    words, limit, page16, extra_words, extra_limit, extra_page16, n_then, is_extra_then, raw, raw_scales, to,
    NOW_FP4: gl.constexpr, FP4: gl.constexpr, PAGE: gl.constexpr, EXTRA: gl.constexpr, EXTRA_FP4: gl.constexpr,
    EXTRA_PAGE: gl.constexpr, WARPS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Takes a step of raw records from its slot, begins to copy another one there, and decodes."""
    L: gl.constexpr = rows_layout(WARPS, KEYS, NOW_FP4)
    WORDS: gl.constexpr = 4 if NOW_FP4 else 8
    values, scales = _views(raw, raw_scales, KEYS, NOW_FP4)
    bytes_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    w = values.load(_flat_layout(WARPS, KEYS, NOW_FP4)).reshape([KEYS, 16, WORDS])
    w = gl.convert_layout(w, L, assert_trivial=True)
    kind: gl.constexpr = gl.int16 if NOW_FP4 else gl.uint8
    s = view_memory(scales, kind, [KEYS, 16], bytes_layout).load(gl.SliceLayout(2, L))
    block_barrier()
    _begin(
        words, n_then, limit, page16, extra_words, extra_limit, extra_page16, is_extra_then, raw, raw_scales,
        FP4, PAGE, EXTRA, EXTRA_FP4, EXTRA_PAGE, WARPS, KEYS,
    )  # fmt: skip
    decode_rows(w, s, to, L, NOW_FP4)


@gluon.jit
def copy_records(
    q_desc, words, scales, index, lengths, limit, page16, width, stride_i,
    extra_words, extra_scales, extra_index, extra_lengths, extra_limit, extra_page16, extra_width, stride_e,
    raw_ring, scale_ring, q_tile, q_full, q_empty, k_ring, bias_ring, full, empty, units, splits, tiles_a_split, heads,
    HEADS: gl.constexpr, FP4: gl.constexpr, PAGE: gl.constexpr, LENGTHS: gl.constexpr,
    EXTRA: gl.constexpr, EXTRA_FP4: gl.constexpr, EXTRA_PAGE: gl.constexpr, EXTRA_LENGTHS: gl.constexpr,
    WARPS: gl.constexpr, KEYS: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """Decodes the records of each unit into the ring of tiles and copies its queries."""
    STEPS: gl.constexpr = 64 // KEYS
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32)
    slot = 0
    phase = 1
    q_phase = 1
    unit = gl.program_id(0)
    row, head, _, count, more, first, last, first_more, last_more = tile_range(
        unit, lengths, extra_lengths, width, extra_width, splits, tiles_a_split, heads, HEADS, LENGTHS, EXTRA_LENGTHS
    )  # fmt: skip
    is_extra = first == last
    if EXTRA:
        begin = gl.where(is_extra, first_more, first) * 64
        end = gl.where(is_extra, gl.minimum(more, last_more * 64), gl.minimum(count, last * 64))
        of = index + row.to(gl.int64) * stride_i
        if is_extra:
            of = extra_index + row.to(gl.int64) * stride_e
    else:
        is_extra = first < first
        begin = first * 64
        end = gl.minimum(count, last * 64)
        of = index + row.to(gl.int64) * stride_i
    now = _slots(of, begin, end, WARPS, KEYS)
    for step in gl.static_range(2):
        _begin(
            words, now[step], limit, page16, extra_words, extra_limit, extra_page16, is_extra, raw_ring.index(step),
            scale_ring.index(step), FP4, PAGE, EXTRA, EXTRA_FP4, EXTRA_PAGE, WARPS, KEYS,
        )  # fmt: skip
    while unit < units:
        tiles = gl.maximum(last - first + last_more - first_more, 1)
        q_at = row * heads + head
        for tile in range(tiles):
            # The tile after this one: of this list, of the second list, or of the next unit.
            begin += 64
            after = is_extra
            if tile == tiles - 1:
                unit += gl.num_programs(0)
                row, head, _, count, more, first, last, first_more, last_more = tile_range(
                    gl.minimum(unit, units - 1), lengths, extra_lengths, width, extra_width, splits, tiles_a_split,
                    heads, HEADS, LENGTHS, EXTRA_LENGTHS,
                )  # fmt: skip
                after = first < first
                begin = first * 64
                end = gl.minimum(count, last * 64)
                of = index + row.to(gl.int64) * stride_i
            if EXTRA:  # noqa: SIM102
                if (begin >= last * 64) & (after == 0):
                    after = first == first
                    begin = first_more * 64
                    end = gl.minimum(more, last_more * 64)
                    of = extra_index + row.to(gl.int64) * stride_e
            then = _slots(of, begin, gl.where(unit < units, end, 0), WARPS, KEYS)
            mbarrier.wait(empty.index(slot), phase)
            for step in gl.static_range(STEPS):
                raw = raw_ring.index(step % 2)
                raw_scales = scale_ring.index(step % 2)
                to = view_memory(k_ring.index(slot), gl.int32, [64, 256], tile_layout)
                to = to.slice(step * KEYS, KEYS)
                n = now[step]
                n_then = then[(step + 2) % STEPS]
                is_extra_then = after
                if step + 2 < STEPS:
                    n_then = now[(step + 2) % STEPS]
                    is_extra_then = is_extra
                valid = (n >= 0) & (n < limit)
                if EXTRA:
                    valid = (n >= 0) & (n < gl.where(is_extra, extra_limit, limit))
                bias = bias_ring.index(slot).slice(step * KEYS, KEYS)
                bias.store(gl.where(valid, 0.0, float("-inf")))
                async_copy.wait_group(1)
                block_barrier()
                if EXTRA and EXTRA_FP4 != FP4:
                    if is_extra:
                        _turn(
                            words, limit, page16, extra_words, extra_limit, extra_page16, n_then, is_extra_then, raw,
                            raw_scales, to, EXTRA_FP4, FP4, PAGE, EXTRA, EXTRA_FP4, EXTRA_PAGE, WARPS, KEYS,
                        )  # fmt: skip
                    else:
                        _turn(
                            words, limit, page16, extra_words, extra_limit, extra_page16, n_then, is_extra_then, raw,
                            raw_scales, to, FP4, FP4, PAGE, EXTRA, EXTRA_FP4, EXTRA_PAGE, WARPS, KEYS,
                        )  # fmt: skip
                else:
                    _turn(
                        words, limit, page16, extra_words, extra_limit, extra_page16, n_then, is_extra_then, raw,
                        raw_scales, to, FP4, FP4, PAGE, EXTRA, EXTRA_FP4, EXTRA_PAGE, WARPS, KEYS,
                    )  # fmt: skip
            # Tensor cores read what other threads wrote.
            fence_async_shared()
            block_barrier()
            mbarrier.arrive(full.index(slot), count=1)
            if tile == 0:
                copy_queries(q_desc, q_tile, q_full, q_empty, q_phase, q_at)
            now = then
            is_extra = after
            slot += 1
            if slot == DEPTH:
                slot = 0
                phase ^= 1
        q_phase ^= 1
    async_copy.wait_group(0)
