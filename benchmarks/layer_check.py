"""Where the layer's kernels and their references in torch part: stage by stage from the same inputs, and end to end.

Random weights route by small margins, and every product casts its input to FP8 anew: a last bit that differs becomes a code
that differs, an expert that differs, and after two layers a large error that says nothing about a kernel. So three
questions are asked apart. Each stage gets the inputs of the reference run, through the kernels and through torch. The
whole runs with the reference's choices of experts and pool rows, also in the published form of FP8 products. And the references run beside themselves with the last
bits of their results changed, as often as the kernels changed them: as far apart may two right computations lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from deepinfer.kernels import use_backend
from deepinfer.kernels.fused import fused_kernels
from deepinfer.kernels.reference import fused as reference
from deepinfer.models.deepseek_v41 import (
    DeepseekV41,
    ForwardBatch,
    Segment,
    SlotCache,
    compressor,
    packed_pass,
    packed_products,
    packed_stack,
    prompt_selection,
    step_pass,
    wide_products,
)
from deepinfer.models.deepseek_v41.decode_inputs import DecodeInputs, row_values
from deepinfer.models.deepseek_v41.decode_step import DecodeStep

__all__ = ["check_layers"]

# Relative errors that sums in another order and bf16 results explain; behind a cast inside, codes that flip.
_LIMITS = {
    "enter": 0.006, "enter, coefficients": 1e-4, "last norm": 0.006, "norm": 0.006, "leave": 0.006, "cast": 0.001, "norm, cast": 0.02, "rotation": 0.006, "product": 0.006,
    "window rows": 0.02, "pool rows": 0.06, "index keys": 0.06, "tails": 1e-4, "index queries": 0.06, "scores": 0.002,
    "attention": 0.01, "output groups": 0.006, "router scores": 1e-5, "pool projections": 1e-5, "weights of experts": 1e-5,
    "swiglu, cast": 0.02, "experts": 0.02,
}  # fmt: skip
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
                (kind, "write_windows", "window rows", _windows_of),
                (kind, "extend_pool", "pool rows", _pools_of),
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
            selection = _selection_of(args[0])
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
        for x in _tensors(out):
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
        copies, other = _fresh(label, args, kwargs)
        selection = _selection_of(args[0]) if label in ("rows chosen", "attention") else None
        with self._fast_side():
            fast = function(*copies, **other)
        if label == "rows chosen":
            fast = _picked(selection).clone()
            vars(selection).get("_shared", {}).clear()
        elif label == "attention" and getattr(args[0], "_prompt", None) is not None:
            args[0]._prompt[0]._pools.clear()
        elif label == "topk":
            fast = _rows_of(fast, other)
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
            self._note_sets(label, layer, fast, _picked(selection))
        elif label == "topk":
            self._note_sets(label, layer, fast, _rows_of(out, kwargs))
        elif label == "experts chosen":
            self._note_sets(label, layer, fast[1], out[1])
            self._note_margin(layer, fast[1], out[1], args)
        else:
            seen = _visible(label, args)
            if label == "index queries" and isinstance(out, tuple):
                fast, out_values = (x[0].float() * x[1].unsqueeze(-1) for x in (fast, out))
            else:
                out_values = out
            for i, (one, ref) in enumerate(zip(_values(fast), _values(out_values), strict=True)):
                self._note(_name(label, i, args, kwargs), layer, one, ref, seen)
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


def _selection_of(run: Any) -> Any:
    prompt = getattr(run, "_prompt", None)
    return run._selection if prompt is None else prompt[1]


def _picked(selection: Any) -> Tensor:
    found: Tensor = selection.lists if hasattr(selection, "lists") else selection.index
    return found


def _rows_of(out: Any, kwargs: dict[str, Any]) -> Tensor:
    found: Tensor = kwargs["output_idx"] if "output_idx" in kwargs else out[1]
    return found


def _fresh(label: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """Arguments of which what is written is another tensor."""
    kwargs = dict(kwargs)
    if label == "rotation":
        copy = args[0].clone()
        return (copy, *args[1:]), {**kwargs, "out": copy}
    if label == "topk" and "output_idx" in kwargs:
        kwargs["output_idx"] = kwargs["output_idx"].clone()
    return args, kwargs


def _name(label: str, part: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    if label == "product":
        return f"{label} [{args[0].shape[0]} x {args[0].shape[1]}]"
    if label == "index queries" and len(args) < 4 and kwargs.get("rounding") != "mxfp4":
        return "last norm"
    return f"{label}, coefficients" if label == "enter" and part else label


def _visible(label: str, args: tuple[Any, ...]) -> Tensor | None:
    """Scores that count."""
    if label != "scores":
        return None
    paged = args[1].dtype == torch.uint8 if isinstance(args[1], Tensor) else False
    ends = (args[3] if paged else args[4]).flatten()
    width = args[6] if paged else len(args[1][0])
    return torch.arange(width, device=ends.device) < ends.unsqueeze(1)


def _tensors(out: Any) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out]
    if isinstance(out, (tuple, list)):
        return [t for part in out for t in _tensors(part)]
    return []


def _values(out: Any) -> list[Tensor]:
    """Tensors of a result; codes and scales as their values."""
    if isinstance(out, (tuple, list)) and len(out) == 2 and out[0].dtype == torch.float8_e4m3fn:
        codes, scale = out
        size = (
            2.0 ** (scale.view(torch.uint8).float() - 127) if scale.element_size() == 1 else scale
        )
        return [(codes.float().unflatten(1, (size.shape[1], -1)) * size.unsqueeze(2)).flatten(1)]
    return _tensors(out)


State = Sequence[tuple[str, Tensor, Callable[[Tensor], Tensor]]]


def _rows_and_cache(run: Any) -> tuple[Any, SlotCache]:
    cache = run.cache if hasattr(run, "cache") else run._cache
    return cache.rows, cache


def _windows_of(args: tuple[Any, ...]) -> State:
    rows, cache = _rows_and_cache(args[0])
    form = cache.formats.window
    return [("window rows", rows.window_data[args[1].layer_id], lambda x: form.unpack(x, torch.float32))]  # fmt: skip


def _pools_of(args: tuple[Any, ...]) -> State:
    rows, cache = _rows_and_cache(args[0])
    source, forms = args[1].layer_id, cache.formats
    codes, scales = rows.key_parts(source)
    half = codes.shape[2]

    def unpack_keys(x: Tensor) -> Tensor:
        data = x[:, : codes.shape[1] * half].unflatten(1, (-1, half))
        tail = x[:, codes.shape[1] * half :].unflatten(1, (codes.shape[1], scales.shape[2]))
        return forms.key.unpack(torch.cat((data, tail), -1), torch.float32)

    return [
        ("pool rows", rows.pools[source].flatten(0, 1), lambda x: forms.pool.unpack(x, torch.float32)),
        ("index keys", rows.index_keys[source], unpack_keys),
        ("tails", cache.tails[source].flatten(0, 1), lambda x: x.float().flatten(1)),
    ]  # fmt: skip


def _run(model: DeepseekV41, stages: Stages, ids: Tensor, long: int, short: int) -> dict[str, Tensor]:  # fmt: skip
    """A prompt, one beside a request that decodes, and a step behind them."""
    steps = {
        "prompt": (Segment(1, 0, long),),
        "prompt beside a decoding row": (Segment(0, 0, short), Segment(1, long, 1)),
    }
    last = (Segment(0, short, 1), Segment(1, long + 1, 1))
    out = {}
    had = model.__dict__.get("row_kernels")
    kernels = stages.kernels
    model.__dict__["row_kernels"] = lambda: kernels
    try:
        with stages.watch():
            cache = model.new_cache(2, long + short, long, storage="packed")
            for name, segments in steps.items():
                stages.errors.append((f"-- {name}", 0, 0.0, 0.0, 0.0))
                stages._enters = 0
                part = ids[: sum(s.num_tokens for s in segments)]
                out[name] = model(ForwardBatch(part, segments), cache).hidden
            inputs = DecodeInputs.empty(2, 1, ids.device)
            inputs.fill([[7], [8]], [row_values(s, 0) for s in last])
            cache.begin(last)
            stages.errors.append(("-- decode step", 0, 0.0, 0.0, 0.0))
            stages._enters = 0
            out["decode step"] = DecodeStep(model, cache, kernels)(inputs, long + 2).hidden
    finally:
        if had is None:
            del model.__dict__["row_kernels"]
        else:
            model.__dict__["row_kernels"] = had
    return out


def check_layers(
    model: DeepseekV41, device: str, long: int, short: int, say: Callable[[str], None], share: float | None = None
) -> None:  # fmt: skip
    """Checks a model of few layers, and says what was found.

    Args:
        model: Packed weights.
        device: Where it lies.
        long: Tokens of the longer prompt.
        short: Of the shorter one.
        say: Takes lines.
        share: Of values whose last bit the changed run changes; None for what was measured.
    """
    ids = torch.randint(3, 1000, (long + short + 2,), device=device)
    beside = Stages(device, "beside")
    wanted = _run(model, beside, ids, long, short)
    for name, layer, whole, worst, differing in beside.errors:
        if name.startswith("--"):
            say(name)
            continue
        limit = next((v for k, v in _LIMITS.items() if name.split(" [")[0] == k), None)
        far = limit is not None and (whole > limit or worst > 5 * limit)
        mark = "  ABOVE" if far else ""
        say(f"   {whole:9.2e} {worst:9.2e} {differing:8.4f}  layer {layer}  {name}{mark}")
    if share is not None:
        beside.shares = dict.fromkeys(_LIMITS, share)
    runs: list[tuple[str, Stages]] = [("kernels", Stages(device, "kernels"))]
    runs.append(("torch, last bits changed", Stages(device, "changed", beside)))
    for name, mode in (("kernels, choices of torch", "kernels"), ("the same, scales for 32", "kernels"), ("last bits changed, choices of torch", "changed")):  # fmt: skip
        stages = Stages(device, mode, beside)
        stages.forced = beside.choices
        runs.append((name, stages))
    say("-- relative errors of rows behind all layers")
    for name, stages in runs:
        packed_stack._ALIGNED = "32" not in name
        out = _run(model, stages, ids, long, short)
        packed_stack._ALIGNED = True
        for step, one in out.items():
            error = _relative(one, wanted[step])
            say(
                f"   {name}: {step}: median {float(error.median()):.4f}, mean {float(error.mean()):.4f}, "
                f"most {float(error.max()):.4f}, last {float(error[-1]):.4f}"
            )
        if stages.forced is None:
            _say_choices(stages, beside, out, wanted, say)


def _say_choices(stages: Stages, plain: Stages, out: dict[str, Tensor], wanted: dict[str, Tensor], say: Any) -> None:  # fmt: skip
    """Errors of rows by whether they chose the same experts and pool rows."""
    found = list(zip(stages.choices, plain.choices, strict=True))
    at = 0
    for step, one in out.items():
        same = torch.ones(len(one), dtype=torch.bool, device=one.device)
        parts = []
        experts = 0
        while at < len(found) and experts < _layers(stages, out):
            (kind, mine), (_, theirs) = found[at]
            at += 1
            if kind.endswith("weights"):
                experts += 1
                continue
            differs = (mine.sort(1).values != theirs.sort(1).values).any(1)
            parts.append(f"{kind} differ in {float(differs.float().mean()):.3f}")
            same &= ~differs
        error = _relative(one, wanted[step])
        kept = float(error[same].median()) if bool(same.any()) else float("nan")
        lost = float(error[~same].median()) if bool((~same).any()) else float("nan")
        say(f"      {step}: {'; '.join(parts)}; rows with equal choices: {float(same.float().mean()):.3f}, median {kept:.4f}; others {lost:.4f}")  # fmt: skip


def _layers(stages: Stages, out: dict[str, Tensor]) -> int:
    return sum(kind.endswith("weights") for kind, _ in stages.choices) // len(out)


def _relative(one: Tensor, other: Tensor) -> Tensor:
    return (one.float() - other.float()).norm(dim=1) / other.float().norm(dim=1)
