"""The steps between the matrix products of a layer, by name, in Triton."""

from __future__ import annotations

from deepinfer.kernels.reference.experts import ExpertOrder as ExpertOrder
from deepinfer.kernels.reference.rows import RoundingFormat as RoundingFormat
from deepinfer.kernels.triton.engram import add_engram as add_engram
from deepinfer.kernels.triton.engram import pair_latents as pair_latents
from deepinfer.kernels.triton.experts import expert_order as expert_order
from deepinfer.kernels.triton.experts import grouped_linear as grouped_linear
from deepinfer.kernels.triton.experts import topk_gate as topk_gate
from deepinfer.kernels.triton.hyper_connection import enter_streams as enter_streams
from deepinfer.kernels.triton.hyper_connection import leave_streams as leave_streams
from deepinfer.kernels.triton.index_queries import index_queries as index_queries
from deepinfer.kernels.triton.rows import norm_rope_round as norm_rope_round
from deepinfer.kernels.triton.rows import scatter_rows as scatter_rows
from deepinfer.kernels.triton.rows import swiglu_round as swiglu_round
from deepinfer.kernels.triton.sparse_attention import sparse_attention as sparse_attention
from deepinfer.kernels.triton.topk_rows import topk_rows as topk_rows
from deepinfer.kernels.triton.wide_products import wide_linear as wide_linear

__all__ = [
    "ExpertOrder",
    "RoundingFormat",
    "add_engram",
    "enter_streams",
    "expert_order",
    "grouped_linear",
    "index_queries",
    "leave_streams",
    "norm_rope_round",
    "pair_latents",
    "scatter_rows",
    "sparse_attention",
    "swiglu_round",
    "topk_gate",
    "topk_rows",
    "wide_linear",
]
