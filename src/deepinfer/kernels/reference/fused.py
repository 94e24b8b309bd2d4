"""The steps between the matrix products of a layer, by name; `deepinfer.kernels.triton.fused` has the same names."""

from __future__ import annotations

from deepinfer.kernels.reference.engram import add_engram as add_engram
from deepinfer.kernels.reference.engram import pair_latents as pair_latents
from deepinfer.kernels.reference.experts import ExpertOrder as ExpertOrder
from deepinfer.kernels.reference.experts import expert_order as expert_order
from deepinfer.kernels.reference.experts import grouped_linear as grouped_linear
from deepinfer.kernels.reference.experts import topk_gate as topk_gate
from deepinfer.kernels.reference.hyper_connection import enter_streams as enter_streams
from deepinfer.kernels.reference.hyper_connection import leave_streams as leave_streams
from deepinfer.kernels.reference.index_queries import index_queries as index_queries
from deepinfer.kernels.reference.rows import RoundingFormat as RoundingFormat
from deepinfer.kernels.reference.rows import norm_rope_round as norm_rope_round
from deepinfer.kernels.reference.rows import scatter_rows as scatter_rows
from deepinfer.kernels.reference.rows import sparse_attention as sparse_attention
from deepinfer.kernels.reference.rows import swiglu_round as swiglu_round
from deepinfer.kernels.reference.topk_rows import topk_rows as topk_rows
from deepinfer.kernels.reference.wide_products import wide_linear as wide_linear

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
