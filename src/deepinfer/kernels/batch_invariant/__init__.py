"""Kernels whose rows do not depend on the batch.

Row i of a result has the same bits whatever the number of rows, the place of row i among them and the content of the
others: on one device, with one build of torch (and Triton) and one number of CPU threads, in every process. Sums have
a fixed order that hangs on the shape of the weight or of the row alone: no split of the inner axis by the number of
rows, no atomics, no autotuning.

CPU tensors are served by torch, on fixed row tiles; CUDA tensors by Triton. `backend` asks for one of the two, and is
refused where it cannot serve. A call without rows gives a result without rows. Nothing here has a gradient.
"""

from __future__ import annotations

from deepinfer.kernels.batch_invariant.operations import expert_linear as expert_linear
from deepinfer.kernels.batch_invariant.operations import grouped_linear as grouped_linear
from deepinfer.kernels.batch_invariant.operations import index_scores as index_scores
from deepinfer.kernels.batch_invariant.operations import linear as linear
from deepinfer.kernels.batch_invariant.operations import log_softmax as log_softmax
from deepinfer.kernels.batch_invariant.operations import mean_square as mean_square
from deepinfer.kernels.batch_invariant.operations import mix_streams as mix_streams
from deepinfer.kernels.batch_invariant.operations import pair_linear as pair_linear
from deepinfer.kernels.batch_invariant.operations import rms_norm as rms_norm
from deepinfer.kernels.batch_invariant.operations import row_sum as row_sum
from deepinfer.kernels.batch_invariant.operations import sinkhorn as sinkhorn
from deepinfer.kernels.batch_invariant.operations import sparse_attention as sparse_attention
from deepinfer.kernels.batch_invariant.operations import sum_streams as sum_streams
from deepinfer.kernels.batch_invariant.pointwise import ordered_sum as ordered_sum
from deepinfer.kernels.batch_invariant.pointwise import sigmoid as sigmoid
from deepinfer.kernels.batch_invariant.pointwise import silu as silu
from deepinfer.kernels.batch_invariant.pointwise import softplus as softplus

__all__ = [
    "expert_linear",
    "grouped_linear",
    "index_scores",
    "linear",
    "log_softmax",
    "mean_square",
    "mix_streams",
    "ordered_sum",
    "pair_linear",
    "rms_norm",
    "row_sum",
    "sigmoid",
    "silu",
    "sinkhorn",
    "softplus",
    "sparse_attention",
    "sum_streams",
]
