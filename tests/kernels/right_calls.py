"""A call that is right of every public kernel, by its name: what tests of all kernels at once change and count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepinfer import kernels
from deepinfer.kernels import KVCacheFormat

__all__ = ["CALLS"]

FORM, POOL = KVCacheFormat.V41_MXFP8, KVCacheFormat.V41_NVFP4
PAGE = 4


def _int(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _cache(form: KVCacheFormat, pages: int = 3) -> torch.Tensor:
    return torch.zeros(pages, form.page_bytes(PAGE), dtype=torch.uint8)


def _bf16(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def _fp8(*shape: int) -> torch.Tensor:
    return torch.ones(shape).to(torch.float8_e4m3fn)


def _codes(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def _phases(entries: int, half: int = 32) -> torch.Tensor:
    return torch.ones(entries, half, 2)


def _mapping() -> Any:
    return kernels.get_fused_mapping(torch.tensor([[0, 1], [1, 2]]), 3, alignment=8)


def _sampled() -> dict[str, Any]:
    return {
        "logits": torch.ones(2, 64),
        "seeds": torch.tensor([1, 2]),
        "positions": torch.tensor([3, 4]),
    }


def _attention() -> dict[str, Any]:
    return {
        "q": torch.ones(3, 4, 512),
        "kv": torch.ones(6, 1, 512),
        "attn_sink": torch.zeros(4),
        "extra_kv": torch.ones(5, 1, 512),
        "extra_indices": _int(0, 1, 2, 3, 4, 0).view(3, 1, 2),
        "extra_topk_length": _int(2, 1, 0),
        "phases": _phases(3),
    }


def _paged(form: KVCacheFormat) -> dict[str, Any]:
    return {
        "q": _fp8(2, 1, 8, 128),
        "kv_cache": _cache(form),
        "weights": torch.ones(2, 8),
        "context_lens": _int(5, 3),
        "block_table": _int(0, 1, 2, 0).view(2, 2),
        "schedule_meta": None,
        "max_context_len": 8,
        "page_size": PAGE,
    }


def _grouped(a: Any, b: Any, d: torch.Tensor, masked: bool) -> dict[str, Any]:
    given = {"a": a, "b": b, "d": d}
    if masked:
        return {**given, "masked_m": _int(2, 1)}
    layout = torch.full((len(d),), 1, dtype=torch.int32)
    return {**given, "grouped_layout": layout}


def _pair(rows: int, k: int, group: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    return _fp8(rows, k), torch.ones(rows, k // group)


CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "apply_penalties": lambda: {
        "logits": torch.ones(2, 64), "output_ids": torch.tensor([[1, -1], [2, 3]]),
        "prompt_ids": torch.tensor([[1], [2]]), "presence": torch.zeros(2), "frequency": torch.zeros(2),
        "repetition": torch.ones(2),
    },
    "apply_rope": lambda: {"x": torch.ones(3, 2, 128), "phases": _phases(5), "positions": torch.tensor([0, 4, 2])},
    "apply_token_bitmask": lambda: {
        "logits": torch.ones(2, 64), "bitmask": _int(-1, 1).view(1, 2), "rows": torch.tensor([1])
    },
    "argmax_sample": lambda: {"logits": torch.ones(2, 64)},
    "bf16_gemm_nt": lambda: {"a": _bf16(2, 64), "b": _bf16(8, 64), "d": _bf16(2, 8)},
    "candidate_block_max": lambda: {"scores": torch.ones(2, 16), "lengths": _int(3, 16), "block_size": 8},
    "cast_back": lambda: {"q": _fp8(2, 64), "scale": _codes(2, 2)},
    "ceil_to_ue8m0": lambda: {"x": torch.ones(2, 4)},
    "compress_norm": lambda: {
        "values": torch.ones(4, 512), "gates": torch.ones(4, 512), "weight": torch.ones(512), "eps": 1e-6,
        "phases": _phases(4), "cache": _cache(POOL), "slot_mapping": torch.tensor([1, 2]), "format": POOL,
        "page_size": PAGE, "last": torch.tensor([1, 3]), "state": torch.zeros(2, 2, 2, 512),
        "requests": torch.tensor([0, 0, 1, 1]), "positions": torch.tensor([0, 1, 0, 1]),
        "phase_index": torch.tensor([0, 3]), "write_floor": torch.zeros(4, dtype=torch.int64),
        "latents": torch.zeros(2, 512),
    },
    "decode_ue8m0": lambda: {"scale": _codes(2, 4)},
    "encode_ue8m0": lambda: {"scale": torch.ones(2, 4)},
    "engram_gate": lambda: {
        "streams": torch.ones(2, 4, 32), "projected": torch.ones(2, 160), "q_weight": torch.ones(4, 32),
        "k_weight": torch.ones(4, 32), "is_image": torch.tensor([True, False]),
    },
    "engram_hash": lambda: {
        "history": torch.tensor([[1, 2], [3, -1]]), "token_map": torch.arange(8), "multipliers": torch.tensor([3, 5]),
        "primes": torch.tensor([7, 11]), "offsets": torch.tensor([0, 7]), "pad_id": 0,
    },
    "engram_lookup": lambda: {"rows": torch.tensor([[0, 5]]), "table": _codes(6, 64), "scale": _codes(6, 2)},
    "expand_to_fused": lambda: {"x": torch.ones(2, 32), "mapping": _mapping(), "topk_weights": torch.ones(2, 2)},
    "expand_to_fused_with_sf": lambda: {
        "x": (_fp8(2, 128), torch.ones(2, 1)), "mapping": _mapping(), "topk_weights": torch.ones(2, 2)
    },
    "flash_mla_sparse_fwd": lambda: {
        **_attention(), "indices": _int(*range(6)).view(3, 1, 2), "topk_length": _int(2, 1, 0)
    },
    "flash_mla_with_kvcache": lambda: {
        "q": torch.ones(2, 1, 4, 512), "k_cache": _cache(FORM), "indices": _int(0, 1, 2, 3).view(2, 1, 2),
        "page_size": PAGE, "attn_sink": torch.zeros(4), "topk_length": _int(2, 1), "extra_k_cache": _cache(POOL),
        "extra_indices_in_kvcache": _int(0, 1).view(2, 1, 1), "extra_topk_length": _int(1, 1), "extra_format": POOL,
        "phases": _phases(3), "phase_index": _int(0, 2).view(2, 1), "out": torch.zeros(2, 1, 4, 512),
    },
    "fp8_fp4_gemm_nt": lambda: {
        "a": _pair(2, 128), "b": (_codes(8, 64), _codes(8, 4)), "d": _bf16(2, 8)
    },
    "fp8_fp4_mqa_logits": lambda: {
        "q": _fp8(2, 8, 128), "kv": (_codes(6, 64), _codes(6, 4)), "weights": torch.ones(2, 8),
        "cu_seq_len_k_start": _int(0, 0), "cu_seq_len_k_end": _int(6, 3),
    },
    "fp8_fp4_paged_mqa_logits": lambda: _paged(KVCacheFormat.INDEXER_MXFP4),
    "fp8_gemm_nt": lambda: {"a": _pair(2, 128), "b": (_fp8(8, 128), torch.ones(1, 1)), "d": _bf16(2, 8)},
    "fp8_mqa_logits": lambda: {
        "q": _fp8(2, 8, 128), "kv": (_fp8(6, 128), torch.ones(6)), "weights": torch.ones(2, 8),
        "cu_seq_len_k_start": _int(0, 0), "cu_seq_len_k_end": _int(6, 3),
    },
    "fp8_paged_mqa_logits": lambda: _paged(KVCacheFormat.INDEXER_FP8),
    "fused_add_rms_norm": lambda: {
        "x": torch.ones(2, 32), "residual": torch.ones(2, 32), "weight": torch.ones(32)
    },
    "fused_experts": lambda: {
        "x": _bf16(2, 128), "w13": _bf16(2, 256, 128), "w2": _bf16(2, 128, 128), "topk_weights": torch.ones(2, 1),
        "topk_ids": torch.zeros(2, 1, dtype=torch.int64), "added": _bf16(2, 128), "out": _bf16(2, 128),
    },
    "gather_and_dequantize_k_cache": lambda: {
        "cache": _cache(FORM), "slots": torch.tensor([1, -1]), "format": FORM, "page_size": PAGE,
        "out": torch.zeros(2, 512),
    },
    "get_fused_mapping": lambda: {"topk_ids": torch.tensor([[0, 1], [1, 2]]), "num_experts": 3},
    "get_mla_metadata": lambda: {"rows": 2, "num_heads": 8, "num_keys": 640},
    "get_paged_mqa_logits_metadata": lambda: {"context_lens": _int(5, 3), "block_kv": 64, "num_sms": 4},
    "gumbel_sample": lambda: {**_sampled(), "temperature": torch.ones(2)},
    "log_probs": lambda: {"logits": torch.ones(2, 64), "token_ids": torch.tensor([1, 2]), "num_top": 2},
    "m_grouped_bf16_gemm_nt_contiguous": lambda: _grouped(
        _bf16(128, 64), _bf16(2, 8, 64), _bf16(128, 8), False
    ),
    "m_grouped_bf16_gemm_nt_masked": lambda: _grouped(_bf16(2, 4, 64), _bf16(2, 8, 64), _bf16(2, 4, 8), True),
    "m_grouped_fp8_fp4_gemm_nt_contiguous": lambda: _grouped(
        _pair(128, 128), (_codes(2, 8, 64), _codes(2, 8, 4)), _bf16(128, 8), False
    ),
    "m_grouped_fp8_fp4_gemm_nt_masked": lambda: _grouped(
        (_fp8(2, 4, 128), torch.ones(2, 4, 1)), (_codes(2, 8, 64), _codes(2, 8, 4)), _bf16(2, 4, 8), True
    ),
    "m_grouped_fp8_gemm_nt_contiguous": lambda: _grouped(
        _pair(128, 128), (_fp8(2, 8, 128), torch.ones(2, 1, 1)), _bf16(128, 8), False
    ),
    "m_grouped_fp8_gemm_nt_masked": lambda: _grouped(
        (_fp8(2, 4, 128), torch.ones(2, 4, 1)), (_fp8(2, 8, 128), torch.ones(2, 1, 1)), _bf16(2, 4, 8), True
    ),
    "merge_attn_states": lambda: {
        "v": torch.ones(2, 3, 4, 64), "s": torch.ones(2, 3, 4), "attn_sink": torch.zeros(4), "phases": _phases(3, 16),
        "phase_index": _int(0, 2), "out": torch.zeros(2, 4, 64),
    },
    "mhc_head": lambda: {"streams": torch.ones(2, 4, 32), "pre": torch.ones(2, 4), "norm_weight": torch.ones(32)},
    "mhc_post": lambda: {
        "streams": torch.ones(2, 4, 32), "output": torch.ones(2, 32), "post": torch.ones(2, 4),
        "mix": torch.ones(2, 4, 4),
    },
    "mhc_pre": lambda: {
        "streams": torch.ones(2, 4, 32), "pre": torch.ones(2, 4), "fn": torch.ones(24, 128), "base": torch.ones(24),
        "scale": torch.ones(3), "norm_weight": torch.ones(32),
    },
    "ngram_propose": lambda: {"tokens": torch.zeros(2, 8, dtype=torch.int64), "lengths": _int(8, 3), "num_drafts": 2},
    "owned_indices": lambda: {"indices": _int(0, 1, 2).view(1, 3), "rank": 0, "world_size": 2},
    "pack_ue8m0": lambda: {"scale": _codes(2, 4)},
    "per_block_cast_to_fp8": lambda: {"w": torch.ones(32, 64)},
    "per_token_cast_to_fp4": lambda: {"x": torch.ones(2, 64)},
    "per_token_cast_to_fp8": lambda: {"x": torch.ones(2, 64)},
    "per_token_cast_to_fp8_aligned": lambda: {"x": torch.ones(2, 128)},
    "prepare_mxfp4_weights": lambda: {"values": _codes(2, 128, 64), "scales": _codes(2, 128, 4)},
    "prepare_mhc_projection": lambda: {"fn": torch.ones(24, 128)},
    "quantize_and_insert_k_cache": lambda: {
        "k": torch.ones(2, 512), "cache": _cache(FORM), "slot_mapping": torch.tensor([1, 3]), "format": FORM,
        "page_size": PAGE,
    },
    "reduce_fused": lambda: {
        "y": _bf16(32, 32), "mapping": _mapping(), "topk_weights": torch.ones(2, 2), "added": _bf16(2, 32),
        "out": _bf16(2, 32),
    },
    "rms_norm": lambda: {"x": torch.ones(2, 32), "weight": torch.ones(32), "out": torch.zeros(2, 32)},
    "rms_norm_rope_quant": lambda: {
        "x": torch.ones(2, 4, 128), "weight": torch.ones(128), "phases": _phases(5), "positions": torch.tensor([1, 4])
    },
    "rope_quant_insert": lambda: {
        "k": torch.ones(2, 512), "phases": _phases(5), "cache": _cache(FORM), "slot_mapping": torch.tensor([1, 3]),
        "format": FORM, "page_size": PAGE, "weight": torch.ones(512), "phase_index": torch.tensor([0, 4]),
        "positions": torch.tensor([1, 2]), "write_floor": torch.tensor([0, 0]),
    },
    "round_fp8": lambda: {"x": torch.ones(2, 64)},
    "round_mxfp4": lambda: {"x": torch.ones(2, 64)},
    "round_nvfp4": lambda: {"x": torch.ones(2, 64)},
    "silu_and_mul": lambda: {"x": torch.ones(2, 64), "weights": torch.ones(2)},
    "silu_and_mul_quant": lambda: {"x": torch.ones(2, 128), "weights": torch.ones(2)},
    "sinkhorn": lambda: {"scores": torch.ones(2, 4, 4)},
    "speculative_verify": lambda: {
        "target_logits": torch.ones(5, 64), "draft_tokens": torch.tensor([[1, 2], [3, -1]]), "lengths": _int(2, 1),
        "positions": torch.tensor([5, 9]), "seeds": torch.tensor([1, 2]), "rule": "standard",
        "draft_logits": torch.ones(2, 2, 64), "temperature": torch.ones(2),
    },
    "swa_attention": lambda: {**_attention(), "bands": (_int(0, 1, 2), _int(1, 2, 3)), "window": 4},
    "top_k_top_p_mask": lambda: {
        "logits": torch.ones(2, 64), "top_k": torch.tensor([3, 4]), "top_p": torch.tensor([0.5, 0.9]),
        "min_p": torch.zeros(2), "temperature": torch.ones(2), "out": torch.zeros(2, 64),
    },
    "top_k_top_p_sample": lambda: {
        **_sampled(), "top_k": torch.tensor([3, 4]), "top_p": torch.tensor([0.5, 0.9]), "min_p": torch.zeros(2),
        "temperature": torch.ones(2),
    },
    "topk": lambda: {
        "input": torch.ones(2, 64), "topk": 4, "end": _int(64, 3), "output_idx": torch.zeros(2, 4, dtype=torch.int32)
    },
    "topk_gate": lambda: {
        "logits": torch.ones(2, 8), "bias": torch.zeros(8), "topk": 2, "bias_vl": torch.zeros(8),
        "is_image": torch.tensor([True, False]), "groups": 2, "topk_groups": 1, "num_tokens": _int(2),
    },
    "topk_to_physical_indices": lambda: {
        "indices": _int(0, 5, -1, 3).view(2, 2), "block_table": _int(0, 1, 2, 3).view(2, 2), "page_size": PAGE,
        "requests": torch.tensor([1, 0]), "out": torch.zeros(2, 2, dtype=torch.int64),
    },
    "window_bands": lambda: {"cu_seqlens_q": _int(0, 2, 3), "cu_seqlens_k": _int(0, 4, 6), "rows": 3},
}  # fmt: skip
