"""Where the layer's kernels and their references in torch part: stage by stage from the same inputs, and end to end.

Random weights route by small margins, and every product casts its input to FP8 anew: a last bit that differs becomes a code
that differs, an expert that differs, and after two layers a large error that says nothing about a kernel. So three
questions are asked apart. Each stage gets the inputs of the reference run, through the kernels and through torch. The
whole runs with the reference's choices of experts and pool rows, also in the published form of FP8 products. And the references run beside themselves with the last
bits of their results changed, as often as the kernels changed them: as far apart may two right computations lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from layer_stages import Stages
from torch import Tensor

from deepinfer.models.deepseek_v41 import DeepseekV41, ForwardBatch, Segment, packed_stack
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
