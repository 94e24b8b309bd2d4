"""Where the time of a layer goes: the functions that a layer calls, each between two events of its stream.

Inside a recorded graph the events are part of the recording, so that decode steps are told apart as well. The whole is
timed without them; "other" is what lies between the parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from deepinfer.kernels import experts as expert_kernels
from deepinfer.models.deepseek_v41 import (
    packed_pass,
    packed_products,
    packed_stack,
    prompt_keys,
    prompt_selection,
    step_pass,
)
from deepinfer.models.deepseek_v41.config import DeepseekV41Config

__all__ = ["Parts"]


class Parts:
    """Times functions of the layer by name while `watch` is on.

    Attributes:
        spans: Name, begin and end of each call, in order; events on a GPU, else seconds.
    """

    def __init__(self, config: DeepseekV41Config, device: str, kernels: ModuleType) -> None:
        self._gpu = device == "cuda"
        self._open: list[str] = []
        self.spans: list[tuple[str, Any, Any]] = []
        c = config
        inter, low = c.moe_intermediate_size, c.q_lora_rank
        self._products = {
            (low + c.head_dim, c.hidden_size): "query and window > product down",
            (low, c.hidden_size): "query and window > product down",
            (c.head_dim, c.hidden_size): "query and window > product down",
            (c.num_attention_heads * c.head_dim, low): "query and window > product up",
            (c.index_n_heads * c.index_head_dim, low): "index > product",
            (c.hidden_size, c.o_groups * c.o_lora_rank): "output > product",
            (2 * inter, c.hidden_size): "shared expert > product up",
            (inter, c.hidden_size): "shared expert > product up",
            (c.hidden_size, inter): "shared expert > product down",
        }
        stack, steps, decode = packed_stack, step_pass.StepPass, packed_pass.PackedDecodePass
        self._targets: list[tuple[Any, str, str]] = [
            (stack, "enter", "streams > enter"),
            (stack, "leave", "streams > leave"),
            (stack, "product", ""),
            (stack, "per_token_cast_to_fp8", "casts"),
            (stack, "per_token_cast_to_fp8_aligned", "casts"),
            (stack, "rms_norm", "query and window > norm"),
            (stack, "rms_norm_rope_quant", "query and window > norm, cast"),
            (stack, "apply_rope", "query and window > rotation"),
            (steps, "write_windows", "query and window > write"),
            (decode, "write_windows", "query and window > write"),
            (steps, "extend_pool", "pool"),
            (decode, "extend_pool", "pool"),
            (packed_pass, "compress_norm", "compress_norm"),
            (packed_pass, "rope_quant_insert", "rope_quant_insert"),
            (steps, "needs_scores", "index > select all"),
            (decode, "needs_scores", "index > select all"),
            (steps, "pick", "index > pick"),
            (decode, "pick", "index > pick"),
            (prompt_selection, "fp8_fp4_mqa_logits", "scores"),
            (prompt_selection, "topk", "topk"),
            (packed_pass, "fp8_fp4_paged_mqa_logits", "scores"),
            (packed_pass, "topk", "topk"),
            (packed_pass, "get_paged_mqa_logits_metadata", "shares"),
            (steps, "attend_back", "attention"),
            (decode, "attend_back", "attention"),
            (prompt_keys, "gather_and_dequantize_k_cache", "unpack"),
            (stack, "group_outputs", "output > groups"),
            (stack, "wide_linear", "router > product"),
            (kernels, "topk_gate", "router > topk_gate"),
            (stack, "silu_and_mul_quant", "shared expert > swiglu"),
            (packed_products, "experts", "experts"),
            (expert_kernels, "get_fused_mapping", "mapping"),
            (expert_kernels, "expand_to_fused_with_sf", "expand"),
            (expert_kernels, "per_token_cast_to_fp8", "cast"),
            (expert_kernels, "_product", "product"),
            (expert_kernels, "SWIGLU", "swiglu"),
            (expert_kernels, "reduce_fused", "reduce"),
        ]

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Times the functions inside of the block."""
        self.spans = []
        found = [(o, name, label) for o, name, label in self._targets if hasattr(o, name)]
        saved = [(owner, name, vars(owner)[name]) for owner, name, _ in found]
        for owner, name, label in found:
            setattr(owner, name, self._timed(getattr(owner, name), label))
        try:
            yield
        finally:
            for owner, name, function in saved:
                setattr(owner, name, function)

    def _timed(self, function: Callable[..., Any], label: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            name = label or self._products.get(
                tuple(args[0].shape), f"product {tuple(args[0].shape)}"
            )
            self._open.append(name)
            path, begin = " > ".join(self._open), self._mark()
            try:
                return function(*args, **kwargs)
            finally:
                self._open.pop()
                self.spans.append((path, begin, self._mark()))

        return run

    def _mark(self) -> Any:
        if not self._gpu:
            return time.perf_counter()
        is_recorded = torch.cuda.is_current_stream_capturing()
        event = torch.cuda.Event(enable_timing=True, external=is_recorded)
        event.record()
        return event

    def milliseconds(self) -> dict[str, float]:
        """Time of each path of names, calls added up, in the order of their first call."""
        times: dict[str, float] = {}
        for path, begin, end in self.spans:
            ms = begin.elapsed_time(end) if self._gpu else 1e3 * (end - begin)
            times[path] = times.get(path, 0.0) + ms
        return times
