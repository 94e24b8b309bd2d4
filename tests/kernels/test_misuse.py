"""Calls by mistake: each is refused by a typed error that says what was found, or gives what its docstring says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from deepinfer import kernels
from deepinfer.core.errors import ConfigError, DeepInferError, ShapeError

ONES = torch.ones(2, 128)
WHOLE = torch.ones(2, 128, dtype=torch.int32)
SCALAR = torch.tensor(1.0)
GAIN = torch.ones(128)
CODES, SCALES = kernels.per_token_cast_to_fp8(ONES, 128, scale_dtype=torch.float32)
PACKED, _ = kernels.per_token_cast_to_fp4(ONES)
PHASES = torch.zeros(2, 4, 2)
INDEX_Q = torch.zeros(1, 1, 8, 128).to(torch.float8_e4m3fn)
FORMAT = kernels.KVCacheFormat.V41_MXFP8
CACHE = torch.zeros(1, FORMAT.page_bytes(4), dtype=torch.uint8)


INDEX_CACHE = torch.zeros(1, kernels.KVCacheFormat.INDEXER_FP8.page_bytes(4), dtype=torch.uint8)


def _insert(phases: torch.Tensor) -> None:
    k = torch.zeros(1, FORMAT.channels)
    kernels.rope_quant_insert(k, phases, CACHE.clone(), torch.tensor([0]), FORMAT, 4)


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _experts(**other: torch.Tensor) -> torch.Tensor:
    x = torch.zeros(2, 128, dtype=torch.bfloat16)
    given = {
        "x": x,
        "w13": x.new_zeros(2, 256, 128),
        "w2": x.new_zeros(2, 128, 128),
        "topk_weights": torch.ones(2, 1),
        "topk_ids": torch.zeros(2, 1, dtype=torch.int64),
    }
    return kernels.fused_experts(**(given | other))


def _decode(**other: object) -> object:
    given: dict[str, object] = {
        "q": torch.zeros(1, 1, 8, FORMAT.channels),
        "k_cache": CACHE,
        "indices": _int32(0).view(1, 1, 1),
        "page_size": 4,
    }
    return kernels.flash_mla_with_kvcache(**(given | other))  # type: ignore[arg-type]


def _compress(slots: torch.Tensor) -> torch.Tensor:
    x, gain = torch.zeros(1, FORMAT.channels), torch.ones(FORMAT.channels)
    return kernels.compress_norm(
        x, None, gain, 0.0, torch.ones(1, 32, 2), CACHE.clone(), slots, FORMAT, 4
    )


def _hash(rows: int) -> torch.Tensor:
    one = torch.ones(2, dtype=torch.int64)
    table = torch.arange(4)
    return kernels.engram_hash(one[None], table, one, one[:1] * rows, one[:1], 0)


# Each with the argument that the error speaks of.
REFUSED: dict[str, tuple[str, Callable[[], object]]] = {
    "norm of integers": ("x", lambda: kernels.rms_norm(WHOLE, GAIN)),
    "norm of a number": ("x", lambda: kernels.rms_norm(SCALAR, GAIN)),
    "sum and norm of integers": ("x", lambda: kernels.fused_add_rms_norm(WHOLE, WHOLE, GAIN)),
    "norm and cast of integers": ("x", lambda: kernels.rms_norm_rope_quant(WHOLE, None)),
    "rotation of integers": ("x", lambda: kernels.apply_rope(WHOLE, PHASES)),
    "cast of integers": ("x", lambda: kernels.per_token_cast_to_fp8(WHOLE)),
    "cast of a number": ("x", lambda: kernels.per_token_cast_to_fp4(SCALAR)),
    "groups of none": ("group", lambda: kernels.per_token_cast_to_fp8(ONES, 0)),
    "groups below none": ("group", lambda: kernels.silu_and_mul_quant(ONES, group=-3)),
    "blocks of none": ("block", lambda: kernels.per_block_cast_to_fp8(ONES, (0, 32))),
    "back from blocks of none": ("block", lambda: kernels.cast_back(CODES, SCALES, block=(1, 0))),
    "scales of integers": (
        "scale",
        lambda: kernels.cast_back(CODES, SCALES.long(), block=(1, 128)),
    ),
    "gates of integers": ("x", lambda: kernels.silu_and_mul(WHOLE)),
    "product, no scales of a": ("a", lambda: kernels.fp8_gemm_nt((CODES, None), (CODES, SCALES))),
    "product, no scales of b": (
        "b",
        lambda: kernels.fp8_fp4_gemm_nt((CODES, SCALES), (PACKED, None)),
    ),
    "product, values alone": ("a", lambda: kernels.fp8_gemm_nt(CODES, (CODES, SCALES))),  # type: ignore[arg-type]
    "product, packed exponents": (
        "scales of a",
        lambda: kernels.fp8_gemm_nt((CODES, SCALES.int()), (CODES, SCALES)),
    ),
    "product, MXFP4 weights as floats": (
        "b",
        lambda: kernels.fp8_fp4_gemm_nt((CODES, SCALES), (ONES, SCALES)),
    ),
    "bands in one tensor": (
        "bands",
        lambda: kernels.swa_attention(torch.zeros(1, 8, 512), torch.zeros(1, 1, 512), _int32(0)),  # type: ignore[arg-type]
    ),
    "experts, tokens of other channels": ("x", lambda: _experts(x=torch.zeros(2, 64).bfloat16())),
    "experts, fp32 without scales": ("x", lambda: _experts(x=torch.zeros(2, 128))),
    "experts, other halves": ("w13", lambda: _experts(w13=torch.zeros(2, 256, 128).half())),
    "experts, other gates": ("w2", lambda: _experts(w2=torch.zeros(2, 128, 64).bfloat16())),
    "experts, other sums": ("added", lambda: _experts(added=torch.zeros(3, 128))),
    "places without rotations": (
        "positions",
        lambda: kernels.rms_norm_rope_quant(ONES, None, positions=_int32(0, 1)),
    ),
    "values as integers": (
        "dtype",
        lambda: kernels.cast_back(CODES, SCALES, block=(1, 128), dtype=torch.int32),
    ),
    "rows as integers": (
        "dtype",
        lambda: kernels.engram_lookup(
            torch.zeros(1, 1).long(),
            torch.zeros(1, 32, dtype=torch.uint8),
            torch.zeros(1, 1, dtype=torch.uint8),
            dtype=torch.int64,
        ),
    ),
    "product, scales of integers": (
        "scales of a",
        lambda: kernels.fp8_gemm_nt((CODES, SCALES.long()), (CODES, SCALES)),
    ),
    "product, prepared values with other scales": (
        "scales of b",
        lambda: kernels.fp8_fp4_gemm_nt((CODES, SCALES), (WHOLE[:, :16], SCALES)),
    ),
    "experts, a number": ("x", lambda: _experts(x=SCALAR)),
    "experts, odd rows": ("w13", lambda: _experts(w13=torch.zeros(2, 255, 128).bfloat16())),
    "experts, other width": ("w2", lambda: _experts(w2=torch.zeros(2, 64, 128).bfloat16())),
    "experts, other weights": ("topk_weights", lambda: _experts(topk_weights=torch.ones(2, 3))),
    "experts, no tokens into another shape": (
        "out",
        lambda: _experts(
            x=torch.zeros(0, 128).bfloat16(),
            topk_weights=torch.ones(0, 1),
            topk_ids=torch.zeros(0, 1, dtype=torch.int64),
            out=torch.zeros(5, 5),
        ),
    ),
    "streams of integers": (
        "streams",
        lambda: kernels.mhc_head(WHOLE.view(2, 4, 32), torch.ones(2, 4)),
    ),
    "hash of a folded table": (
        "token_map",
        lambda: kernels.engram_hash(
            torch.zeros(1, 2).long(),
            torch.zeros(4, 1).long(),
            torch.ones(2).long(),
            torch.ones(1).long(),
            torch.zeros(1).long(),
            0,
        ),
    ),
    **{f"hash to {rows} rows": ("primes", partial(_hash, rows)) for rows in (0, -7)},
    "no iterations": ("iterations", lambda: kernels.sinkhorn(torch.ones(1, 4, 4), 0)),
    "matrix of a number": ("scores", lambda: kernels.sinkhorn(SCALAR)),
    "attention of integers": ("q", lambda: _decode(q=torch.zeros(1, 1, 8, FORMAT.channels).int())),
    "attention into integers": (
        "out",
        lambda: _decode(out=torch.zeros(1, 1, 8, FORMAT.channels).int()),
    ),
    "merge into integers": (
        "out",
        lambda: kernels.merge_attn_states(
            torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1), out=torch.zeros(1, 1, 2).int()
        ),
    ),
    "scores of a number": (
        "q",
        lambda: kernels.fp8_mqa_logits(SCALAR, (CODES, SCALES[:, 0]), ONES, _int32(0), _int32(1)),
    ),
    "latents at a number": ("slot_mapping", lambda: _compress(torch.tensor(0))),
    "attention by all that the schedule's function returns": (
        "sched_meta",
        lambda: _decode(sched_meta=kernels.get_mla_metadata(1, 8, 64)),
    ),
    "attention, second list of another shape": (
        "extra_indices_in_kvcache",
        lambda: _decode(extra_k_cache=CACHE, extra_indices_in_kvcache=_int32(0)),
    ),
    "attention that turns nothing": ("phases", lambda: _decode(phases=torch.zeros(1, 0, 2))),
    "merge that turns nothing": (
        "phases",
        lambda: kernels.merge_attn_states(
            torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1), phases=torch.zeros(1, 0, 2)
        ),
    ),
    "rows of no cache": (
        "slot_mapping",
        lambda: kernels.quantize_and_insert_k_cache(
            torch.zeros(1, FORMAT.channels), CACHE, torch.zeros(1), FORMAT, 4
        ),
    ),
    "rows turned by 24 pairs": ("phases", lambda: _insert(torch.zeros(1, 24, 2))),
    "rows turned by pairs apart": ("phases", lambda: _insert(torch.zeros(1, 32, 3)[..., :2])),
    "scores of keys of other channels": (
        "kv[0]",
        lambda: kernels.fp8_mqa_logits(
            INDEX_Q[0], (CODES[:, :64], SCALES[:, 0]), torch.ones(1, 8), _int32(0), _int32(1)
        ),
    ),
    "scores of keys in halves of groups": (
        "q",
        lambda: kernels.fp8_fp4_mqa_logits(
            INDEX_Q[0, ..., :48],
            (PACKED[:, :24], PACKED[:, :1]),
            torch.ones(1, 8),
            _int32(0),
            _int32(1),
        ),
    ),
    "scores in less than no column": (
        "max_context_len",
        lambda: kernels.fp8_paged_mqa_logits(
            INDEX_Q,
            INDEX_CACHE,
            torch.ones(1, 8),
            _int32(1),
            _int32(0)[None],
            None,
            -1,
            page_size=4,
        ),
    ),
    "bands of no key": ("window", lambda: kernels.window_bands(_int32(0, 1), _int32(0, 1), 1, 0)),
    "bands of less than no row": (
        "rows",
        lambda: kernels.window_bands(_int32(0, 1), _int32(0, 1), -1),
    ),
    "bands of floats": (
        "cu_seqlens_q",
        lambda: kernels.window_bands(torch.ones(2), _int32(0, 1), 1),
    ),
    "shares of floats": ("indices", lambda: kernels.owned_indices(ONES, 0, 2)),
    "top-k as a float": ("top_k", lambda: kernels.top_k_top_p_mask(ONES, 2.0)),
    "min-p above 1": ("min_p", lambda: kernels.top_k_top_p_mask(ONES, min_p=2.0)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_refused_by_name(name: str) -> None:
    argument, call = REFUSED[name]
    with pytest.raises((ShapeError, ConfigError)) as caught:
        call()
    assert isinstance(caught.value, DeepInferError)
    found = caught.value.argument if isinstance(caught.value, ShapeError) else caught.value.field
    assert found == argument
    assert argument.rsplit(" ", 1)[-1] in str(caught.value)


def test_bytes_of_another_dtype_are_looked_at_and_not_cast() -> None:
    for a, b in (
        ((CODES.view(torch.uint8), SCALES), (CODES, SCALES)),
        ((CODES, SCALES), (PACKED.view(torch.int8), SCALES)),
    ):
        product = kernels.fp8_gemm_nt if b[0] is CODES else kernels.fp8_fp4_gemm_nt
        with pytest.raises(
            ShapeError, match=r"\.view\(torch\.(float8_e4m3fn|uint8)\).* cast would change"
        ):
            product(a, b)


def test_a_block_is_a_number_or_two() -> None:
    w = torch.randn(64, 64)
    q, scale = kernels.per_block_cast_to_fp8(w)
    both = kernels.cast_back(q, scale, block=(32, 32))
    assert torch.equal(kernels.cast_back(q, scale, block=32), both)


def test_scores_end_at_the_columns_and_the_table() -> None:
    """A length far behind both reads nothing there, and takes no time."""
    form = kernels.KVCacheFormat.INDEXER_FP8
    cache = torch.zeros(2, form.page_bytes(4), dtype=torch.uint8)
    for table, columns in ((_int32(0, 1), 6), (_int32(0), 6)):
        seen = min(columns, 4 * len(table))
        out = kernels.fp8_paged_mqa_logits(
            INDEX_Q, cache, torch.ones(1, 8), _int32(2**31 - 1), table[None], None, columns, page_size=4
        )  # fmt: skip
        assert torch.equal(out[0, :seen], torch.zeros(seen))
        assert torch.isneginf(out[0, seen:]).all()


def test_a_table_without_rows_gives_zeros() -> None:
    """None of the rows is in it."""
    table, scale = torch.zeros(0, 32).to(torch.float8_e4m3fn), torch.zeros(0, 1, dtype=torch.uint8)
    out = kernels.engram_lookup(torch.tensor([[0, -1]]), table, scale)
    assert torch.equal(out, torch.zeros(1, 64, dtype=torch.bfloat16))
