"""Runs of the layer's functions, each through the kernels and through torch, or through one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from layer_results import (
    fresh_arguments,
    picked_rows,
    pools_of,
    rows_of,
    selection_of,
    stage_name,
    tensors_of,
    values_of,
    visible_scores,
    windows_of,
)
from torch import Tensor

from deepinfer.kernels import use_backend
from deepinfer.kernels.fused import fused_kernels
from deepinfer.kernels.reference import fused as reference
from deepinfer.models.deepseek_v41 import (
    compressor,
    packed_pass,
    packed_products,
    packed_stack,
    prompt_selection,
    step_pass,
    wide_products,
)

__all__ = ["Stages"]

_PASSES = (step_pass.StepPass, packed_pass.PackedDecodePass)


class Stages:
    """Runs of the layer's functions, each through the kernels and through torch.

    Attributes:
        errors: Stage, layer, relative error, worst row, share of values that differ; in the order of the calls.
        choices: Rows and experts that were chosen, in order: a kind and a tensor each.
        shares: Share of the values that differ by stage, the largest found.
    """

    def __init__(self, device: str, mode: str, like: Stages | None = None) -> None:
        """Prepares a run.

        Args:
            device: Where it runs.
            mode: "beside": both, going on with torch's results; "kernels": those; "changed": torch, and
                last bits of its results changed as often as `like` found.
            like: A run whose choices are taken ("kernels", "changed"), or None for own ones.
        """
        self.errors: list[tuple[str, int, float, float, float]] = []
        self.choices: list[tuple[str, Tensor]] = []
        self.shares: dict[str, float] = {}
        self.forced: list[tuple[str, Tensor]] | None = None
        self._mode, self._fast = mode, fused_kernels(device)
        self._in_fast = mode == "kernels"
        self._enters = 0
        self._depth = 0
        self.changes = like.shares if like is not None else {}
        self._random = torch.Generator(device=device).manual_seed(1)

    @property
    def kernels(self) -> Any:
        """Row-wise steps, through this object."""
        return _Kernels(self)

    def row_kernels(self) -> ModuleType:
        """The form of the row-wise steps that counts now."""
        return self._fast if self._in_fast else reference

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Puts itself between the functions of a layer inside of the block."""
        stack, routed = packed_stack, packed_products
        names: list[tuple[Any, str, str, Any]] = [
            (stack, "enter", "enter", None), (stack, "leave", "leave", None),
            (stack, "per_token_cast_to_fp8", "cast", None), (stack, "per_token_cast_to_fp8_aligned", "cast", None),
            (stack, "rms_norm", "norm", None),
            (stack, "rms_norm_rope_quant", "norm, cast", None), (stack, "apply_rope", "rotation", None),
            (stack, "product", "product", None), (stack, "group_outputs", "output groups", None),
            (stack, "wide_linear", "router scores", None), (stack, "silu_and_mul_quant", "swiglu, cast", None),
            (stack, "_choices", "experts chosen", None), (routed, "experts", "experts", None),
            (compressor, "wide_linear", "pool projections", None),
            (prompt_selection, "fp8_fp4_mqa_logits", "scores", None),
            (prompt_selection, "fp8_fp4_paged_mqa_logits", "scores", None),
            (prompt_selection, "topk", "topk", None),
            (packed_pass, "fp8_fp4_paged_mqa_logits", "scores", None), (packed_pass, "topk", "topk", None),
        ]  # fmt: skip
        for kind in _PASSES:
            names += [
                (kind, "write_windows", "window rows", windows_of),
                (kind, "extend_pool", "pool rows", pools_of),
                (kind, "pick", "rows chosen", None), (kind, "attend_back", "attention", None),
            ]  # fmt: skip
        found = [n for n in names if n[1] in vars(n[0])]
        saved = [(owner, name, vars(owner)[name]) for owner, name, *_ in found]
        for owner, name, label, state in found:
            setattr(owner, name, self._wrapped(getattr(owner, name), label, state))
        self._many, kept = wide_products._MANY_SUMS, wide_products.fused_kernels
        wide_products.__dict__["fused_kernels"] = lambda device: self.row_kernels()
        self._set_many()
        try:
            with use_backend(None if self._in_fast else "torch"):
                yield
        finally:
            wide_products._MANY_SUMS = self._many
            wide_products.__dict__["fused_kernels"] = kept
            for owner, name, function in saved:
                setattr(owner, name, function)

    def _set_many(self) -> None:
        wide_products._MANY_SUMS = self._many if self._in_fast else 1 << 60

    def _wrapped(self, function: Callable[..., Any], label: str, state: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if label == "enter" and not (self._mode == "beside" and self._in_fast):
                self._enters += 1
            if self._mode == "beside" and self._in_fast:
                return function(*args, **kwargs)
            if self._mode == "beside":
                out = self._beside(function, label, state, args, kwargs)
            else:
                out = function(*args, **kwargs)
            if label in ("experts chosen", "rows chosen"):
                return self._chosen(label, out, args)
            if self._mode == "changed" and label in self.changes:
                self._change(out, self.changes[label])
            return out

        return run

    def _chosen(self, label: str, out: Any, args: tuple[Any, ...]) -> Any:
        """Notes a choice, or puts the other run's in its place."""
        forced = None
        if self.forced is not None:
            forced = [t for kind, t in self.forced[len(self.choices) : len(self.choices) + 2] if kind.startswith(label)]  # fmt: skip
        if label == "rows chosen":
            selection = selection_of(args[0])
            name = "lists" if hasattr(selection, "lists") else "index"
            if forced:
                setattr(selection, name, forced[0])
            self.choices.append((label, getattr(selection, name)))
            return out
        if forced:
            out = forced[1], forced[0]
        self.choices += [(label, out[1]), (f"{label}, weights", out[0])]
        return out

    def _change(self, out: Any, share: float) -> None:
        """Moves a share of bf16 values by their last bit, in place; fp32 values by about theirs."""
        for x in tensors_of(out):
            if x.dtype == torch.bfloat16 and x.is_contiguous():
                draw = torch.rand(x.shape, generator=self._random, device=x.device)
                step = (draw < share / 2).short() - (draw > 1 - share / 2).short()
                x.view(torch.int16).add_(step * (x != 0))
            elif x.dtype == torch.float32:
                x.mul_(1 + 2e-7 * torch.randn(x.shape, generator=self._random, device=x.device))

    @contextmanager
    def _fast_side(self) -> Iterator[None]:
        self._in_fast = True
        self._set_many()
        try:
            with use_backend(None):
                yield
        finally:
            self._in_fast = False
            self._set_many()

    def _beside(self, function: Callable[..., Any], label: str, state: Any, args: Any, kwargs: Any) -> Any:  # fmt: skip
        """Runs a function both ways, compares, and gives torch's result."""
        layer = (self._enters - 1) // 2
        kept = [] if state is None else [t for _, t, _ in state(args)]
        before = [t.clone() for t in kept]
        copies, other = fresh_arguments(label, args, kwargs)
        selection = selection_of(args[0]) if label in ("rows chosen", "attention") else None
        with self._fast_side():
            fast = function(*copies, **other)
        if label == "rows chosen":
            fast = picked_rows(selection).clone()
            vars(selection).get("_shared", {}).clear()
        elif label == "attention" and getattr(args[0], "_prompt", None) is not None:
            args[0]._prompt[0]._pools.clear()
        elif label == "topk":
            fast = rows_of(fast, other)
        after = [t.clone() for t in kept]
        for t, old in zip(kept, before, strict=True):
            t.copy_(old)
        out = function(*args, **kwargs)
        if state is not None:
            for (name, t, unpack), old, new in zip(state(args), before, after, strict=True):
                changed = (t != old).flatten(1).any(1)
                both = (unpack(x).flatten(0, -2)[changed.repeat_interleave(len(unpack(x).flatten(0, -2)) // len(changed))] for x in (new, t))  # fmt: skip
                self._note(name, layer, *both)
                stray = ((new != t).flatten(1).any(1) & ~changed).sum()
                if int(stray):
                    self._note(f"{name} that torch left alone", layer, torch.ones(int(stray), 1), torch.zeros(int(stray), 1))  # fmt: skip
        elif label == "rows chosen":
            self._note_sets(label, layer, fast, picked_rows(selection))
        elif label == "topk":
            self._note_sets(label, layer, fast, rows_of(out, kwargs))
        elif label == "experts chosen":
            self._note_sets(label, layer, fast[1], out[1])
            self._note_margin(layer, fast[1], out[1], args)
        else:
            seen = visible_scores(label, args)
            if label == "index queries" and isinstance(out, tuple):
                fast, out_values = (x[0].float() * x[1].unsqueeze(-1) for x in (fast, out))
            else:
                out_values = out
            for i, (one, ref) in enumerate(
                zip(values_of(fast), values_of(out_values), strict=True)
            ):
                self._note(stage_name(label, i, args, kwargs), layer, one, ref, seen)
        return out

    def _note(
        self, name: str, layer: int, one: Tensor, ref: Tensor, seen: Tensor | None = None
    ) -> None:
        one, ref = one.float().flatten(1), ref.float().flatten(1)
        if seen is not None:
            one, ref = one.where(seen, 0.0), ref.where(seen, 0.0)
        rows = (one - ref).norm(dim=1) / ref.norm(dim=1).clamp_min(1e-30)
        whole = float((one - ref).norm() / ref.norm().clamp_min(1e-30)) if ref.numel() else 0.0
        share = float((one != ref).float().mean()) if ref.numel() else 0.0
        self.errors.append((name, layer, whole, float(rows.max()) if len(rows) else 0.0, share))
        label = name.split(" [")[0]
        self.shares[label] = max(self.shares.get(label, 0.0), share)

    def _note_sets(self, name: str, layer: int, one: Tensor, ref: Tensor) -> None:
        differ = (one.sort(1).values != ref.sort(1).values).any(1)
        most = 0.0
        for row in torch.nonzero(differ).flatten().tolist()[:64]:
            most = max(most, len(set(ref[row].tolist()) - set(one[row].tolist())) / ref.shape[1])
        self.errors.append((f"{name} (sets; worst: share of a set)", layer, 0.0, most, float(differ.float().mean())))  # fmt: skip

    def _note_margin(self, layer: int, one: Tensor, ref: Tensor, args: tuple[Any, ...]) -> None:
        """The gap between the last expert that is chosen and the next, of rows that differ and of all."""
        gate = args[0].gate
        scores = torch.nn.functional.softplus(args[1].float() @ gate.weight.T).sqrt() + gate.bias
        best = scores.topk(gate.topk + 1, dim=1).values
        gap = best[:, -2] - best[:, -1]
        differ = (one.sort(1).values != ref.sort(1).values).any(1)
        most = float(gap[differ].max()) if bool(differ.any()) else 0.0
        name = "gap behind the last expert (median of all; worst: largest of rows that differ)"
        self.errors.append((name, layer, float(gap.median()), most, float(differ.float().mean())))


class _Kernels:
    """Row-wise steps of the side that runs."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(self._stages.row_kernels(), name)(*args, **kwargs)

        if name not in ("norm_rope_round", "index_queries"):
            return call
        return self._stages._wrapped(call, "index queries", None)
