"""Kernels of DeepSeek-V4.1 by name, each a function of tensors with a reference in torch and one or more in Triton.

Attention over caches and over picked keys, paged caches and their formats, index scores and selection, products and experts,
casts, norms and rotations, hyper-connections, Engram, sampling and verification. `explain` says what serves a call,
`use_backend` chooses it.
"""

from __future__ import annotations

import inspect

from deepinfer.kernels import arguments
from deepinfer.kernels.aligned import (
    per_token_cast_to_fp8_aligned as per_token_cast_to_fp8_aligned,
)
from deepinfer.kernels.attention import MLASchedMeta as MLASchedMeta
from deepinfer.kernels.attention import flash_mla_with_kvcache as flash_mla_with_kvcache
from deepinfer.kernels.attention import get_mla_metadata as get_mla_metadata
from deepinfer.kernels.attention import merge_attn_states as merge_attn_states
from deepinfer.kernels.attention_prefill import flash_mla_sparse_fwd as flash_mla_sparse_fwd
from deepinfer.kernels.attention_prefill import owned_indices as owned_indices
from deepinfer.kernels.attention_prefill import swa_attention as swa_attention
from deepinfer.kernels.attention_prefill import window_bands as window_bands
from deepinfer.kernels.cache import compress_norm as compress_norm
from deepinfer.kernels.cache import (
    gather_and_dequantize_k_cache as gather_and_dequantize_k_cache,
)
from deepinfer.kernels.cache import quantize_and_insert_k_cache as quantize_and_insert_k_cache
from deepinfer.kernels.cache import rope_quant_insert as rope_quant_insert
from deepinfer.kernels.engram import engram_gate as engram_gate
from deepinfer.kernels.engram import engram_hash as engram_hash
from deepinfer.kernels.engram import engram_lookup as engram_lookup
from deepinfer.kernels.experts import fused_experts as fused_experts
from deepinfer.kernels.explaining import explain as explain
from deepinfer.kernels.formats import KVCacheFormat as KVCacheFormat
from deepinfer.kernels.gemm import CONTIGUOUS_ALIGNMENT as CONTIGUOUS_ALIGNMENT
from deepinfer.kernels.gemm import bf16_gemm_nt as bf16_gemm_nt
from deepinfer.kernels.gemm import fp8_fp4_gemm_nt as fp8_fp4_gemm_nt
from deepinfer.kernels.gemm import fp8_gemm_nt as fp8_gemm_nt
from deepinfer.kernels.gemm import (
    m_grouped_bf16_gemm_nt_contiguous as m_grouped_bf16_gemm_nt_contiguous,
)
from deepinfer.kernels.gemm import m_grouped_bf16_gemm_nt_masked as m_grouped_bf16_gemm_nt_masked
from deepinfer.kernels.gemm import (
    m_grouped_fp8_fp4_gemm_nt_contiguous as m_grouped_fp8_fp4_gemm_nt_contiguous,
)
from deepinfer.kernels.gemm import (
    m_grouped_fp8_fp4_gemm_nt_masked as m_grouped_fp8_fp4_gemm_nt_masked,
)
from deepinfer.kernels.gemm import (
    m_grouped_fp8_gemm_nt_contiguous as m_grouped_fp8_gemm_nt_contiguous,
)
from deepinfer.kernels.gemm import m_grouped_fp8_gemm_nt_masked as m_grouped_fp8_gemm_nt_masked
from deepinfer.kernels.indexer import fp8_fp4_mqa_logits as fp8_fp4_mqa_logits
from deepinfer.kernels.indexer import fp8_mqa_logits as fp8_mqa_logits
from deepinfer.kernels.indexer_paged import fp8_fp4_paged_mqa_logits as fp8_fp4_paged_mqa_logits
from deepinfer.kernels.indexer_paged import fp8_paged_mqa_logits as fp8_paged_mqa_logits
from deepinfer.kernels.indexer_paged import (
    get_paged_mqa_logits_metadata as get_paged_mqa_logits_metadata,
)
from deepinfer.kernels.mhc import mhc_head as mhc_head
from deepinfer.kernels.mhc import mhc_post as mhc_post
from deepinfer.kernels.mhc import mhc_pre as mhc_pre
from deepinfer.kernels.mhc import prepare_mhc_projection as prepare_mhc_projection
from deepinfer.kernels.mhc import sinkhorn as sinkhorn
from deepinfer.kernels.moe import FusedMapping as FusedMapping
from deepinfer.kernels.moe import expand_to_fused as expand_to_fused
from deepinfer.kernels.moe import expand_to_fused_with_sf as expand_to_fused_with_sf
from deepinfer.kernels.moe import get_fused_mapping as get_fused_mapping
from deepinfer.kernels.moe import reduce_fused as reduce_fused
from deepinfer.kernels.moe import topk_gate as topk_gate
from deepinfer.kernels.norm import fused_add_rms_norm as fused_add_rms_norm
from deepinfer.kernels.norm import rms_norm as rms_norm
from deepinfer.kernels.norm import rms_norm_rope_quant as rms_norm_rope_quant
from deepinfer.kernels.quant import cast_back as cast_back
from deepinfer.kernels.quant import pack_ue8m0 as pack_ue8m0
from deepinfer.kernels.quant import per_block_cast_to_fp8 as per_block_cast_to_fp8
from deepinfer.kernels.quant import per_token_cast_to_fp4 as per_token_cast_to_fp4
from deepinfer.kernels.quant import per_token_cast_to_fp8 as per_token_cast_to_fp8
from deepinfer.kernels.quant import silu_and_mul as silu_and_mul
from deepinfer.kernels.quant import silu_and_mul_quant as silu_and_mul_quant
from deepinfer.kernels.reference.cast import decode_ue8m0 as decode_ue8m0
from deepinfer.kernels.reference.cast import encode_ue8m0 as encode_ue8m0
from deepinfer.kernels.reference.folded import prepare_mxfp4_weights as prepare_mxfp4_weights
from deepinfer.kernels.reference.quant import ceil_to_ue8m0 as ceil_to_ue8m0
from deepinfer.kernels.reference.quant import round_fp8 as round_fp8
from deepinfer.kernels.reference.quant import round_mxfp4 as round_mxfp4
from deepinfer.kernels.reference.quant import round_nvfp4 as round_nvfp4
from deepinfer.kernels.registry import use_backend as use_backend
from deepinfer.kernels.rope import apply_rope as apply_rope
from deepinfer.kernels.sampling import apply_penalties as apply_penalties
from deepinfer.kernels.sampling import apply_token_bitmask as apply_token_bitmask
from deepinfer.kernels.sampling import argmax_sample as argmax_sample
from deepinfer.kernels.sampling import gumbel_sample as gumbel_sample
from deepinfer.kernels.sampling import log_probs as log_probs
from deepinfer.kernels.sampling import top_k_top_p_mask as top_k_top_p_mask
from deepinfer.kernels.sampling import top_k_top_p_sample as top_k_top_p_sample
from deepinfer.kernels.spec import ngram_propose as ngram_propose
from deepinfer.kernels.spec import speculative_verify as speculative_verify
from deepinfer.kernels.topk import candidate_block_max as candidate_block_max
from deepinfer.kernels.topk import topk as topk
from deepinfer.kernels.topk import topk_to_physical_indices as topk_to_physical_indices

__all__ = [
    "CONTIGUOUS_ALIGNMENT",
    "FusedMapping",
    "KVCacheFormat",
    "MLASchedMeta",
    "apply_penalties",
    "apply_rope",
    "apply_token_bitmask",
    "argmax_sample",
    "bf16_gemm_nt",
    "candidate_block_max",
    "cast_back",
    "ceil_to_ue8m0",
    "compress_norm",
    "decode_ue8m0",
    "encode_ue8m0",
    "engram_gate",
    "engram_hash",
    "engram_lookup",
    "expand_to_fused",
    "expand_to_fused_with_sf",
    "explain",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "fp8_fp4_gemm_nt",
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_gemm_nt",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "fused_add_rms_norm",
    "fused_experts",
    "gather_and_dequantize_k_cache",
    "get_fused_mapping",
    "get_mla_metadata",
    "get_paged_mqa_logits_metadata",
    "gumbel_sample",
    "log_probs",
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nt_masked",
    "m_grouped_fp8_fp4_gemm_nt_contiguous",
    "m_grouped_fp8_fp4_gemm_nt_masked",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
    "merge_attn_states",
    "mhc_head",
    "mhc_post",
    "mhc_pre",
    "ngram_propose",
    "owned_indices",
    "pack_ue8m0",
    "per_block_cast_to_fp8",
    "per_token_cast_to_fp4",
    "per_token_cast_to_fp8",
    "per_token_cast_to_fp8_aligned",
    "prepare_mhc_projection",
    "prepare_mxfp4_weights",
    "quantize_and_insert_k_cache",
    "reduce_fused",
    "rms_norm",
    "rms_norm_rope_quant",
    "rope_quant_insert",
    "round_fp8",
    "round_mxfp4",
    "round_nvfp4",
    "silu_and_mul",
    "silu_and_mul_quant",
    "sinkhorn",
    "speculative_verify",
    "swa_attention",
    "top_k_top_p_mask",
    "top_k_top_p_sample",
    "topk",
    "topk_gate",
    "topk_to_physical_indices",
    "use_backend",
    "window_bands",
]

# What fails on its arguments says so by a typed error. Modules of this package call each other without this frame.
for _name in __all__:
    if inspect.isfunction(globals()[_name]) and _name not in ("explain", "use_backend"):
        globals()[_name] = arguments.typed(globals()[_name])
        globals()[_name].__module__ = __name__  # where pickle finds it
del _name
