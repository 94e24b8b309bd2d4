"""Operations of routing, and what serves them."""

from __future__ import annotations

from torch import Tensor

from deepinfer.kernels import contract
from deepinfer.kernels.reference import moe as reference
from deepinfer.kernels.registry import Operation

__all__ = ["EXPAND", "GATE", "MAPPING", "OPERATIONS", "REDUCE", "SWIGLU"]

GATE = Operation(
    "topk_gate",
    "Tensor logits, Tensor? bias, Tensor? bias_vl, Tensor? is_image, Tensor? num_tokens, str score, bool renormalise, "
    "float scale, int groups, int topk_groups, Tensor(x!) weights, Tensor(y!) experts",
)
MAPPING = Operation(
    "get_fused_mapping",
    "Tensor topk_ids, int num_experts, int alignment, int? max_m, Tensor(a!) token_topk_to_pos, "
    "Tensor(b!) pos_to_token_topk, Tensor(c!) pos_to_expert, Tensor(d!) expert_start, Tensor(e!) expert_end",
)
EXPAND = Operation(
    "expand_to_fused",
    "Tensor x, Tensor? scale, Tensor? topk_weights, Tensor places, Tensor(a!) out, Tensor(b!)? out_scale, "
    "Tensor(c!)? out_weights",
)
REDUCE = Operation(
    "reduce_fused",
    "Tensor y, Tensor? topk_weights, Tensor places, Tensor? added, Tensor(x!) out",
)
SWIGLU = Operation(
    "silu_and_mul_quant_fused",
    "Tensor x, Tensor topk_weights, Tensor places, float limit, int group, Tensor(x!) q, Tensor(y!)? scale",
)
OPERATIONS = (GATE, MAPPING, EXPAND, REDUCE, SWIGLU)


def _always(*args: object) -> None:
    """References serve every call."""


GATE.register("torch", supports=_always)(reference.topk_gate)
MAPPING.register("torch", supports=_always)(reference.get_fused_mapping)
EXPAND.register("torch", supports=_always)(reference.expand_to_fused)
REDUCE.register("torch", supports=_always)(reference.reduce_fused)
SWIGLU.register("torch", supports=_always)(reference.silu_and_mul_quant_fused)


def _refusal(*args: object) -> str | None:
    return contract.triton_refusal(*[a for a in args if isinstance(a, Tensor)])


@GATE.register("triton", supports=_refusal, priority=10)
def _gate(logits: Tensor, *rest: object) -> None:
    import deepinfer.kernels.triton.moe_launch as launch

    launch.gate(logits, *rest)  # type: ignore[arg-type]


@MAPPING.register("triton", supports=_refusal, priority=10)
def _mapping(topk_ids: Tensor, *rest: object) -> None:
    import deepinfer.kernels.triton.moe_launch as launch

    launch.mapping(topk_ids, *rest)  # type: ignore[arg-type]


@EXPAND.register("triton", supports=_refusal, priority=10)
def _expand_triton(x: Tensor, *rest: object) -> None:
    import deepinfer.kernels.triton.moe_launch as launch

    launch.expand(x, *rest)  # type: ignore[arg-type]


@REDUCE.register("triton", supports=_refusal, priority=10)
def _reduce(y: Tensor, *rest: object) -> None:
    import deepinfer.kernels.triton.moe_launch as launch

    launch.reduce(y, *rest)  # type: ignore[arg-type]


@SWIGLU.register("triton", supports=_refusal, priority=10)
def _swiglu(x: Tensor, *rest: object) -> None:
    import deepinfer.kernels.triton.moe_launch as launch

    launch.swiglu(x, *rest)  # type: ignore[arg-type]
