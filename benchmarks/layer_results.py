"""What a function of the layer was given, gave back and wrote, in a form that can be compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from deepinfer.models.deepseek_v41 import SlotCache

__all__ = [
    "State", "fresh_arguments", "picked_rows", "pools_of", "rows_of", "selection_of", "stage_name", "tensors_of", "values_of",
    "visible_scores", "windows_of",
]  # fmt: skip


# Name, tensor, and how its rows become values.
State = Sequence[tuple[str, Tensor, Callable[[Tensor], Tensor]]]


def selection_of(run: Any) -> Any:
    """The selection of pool rows of a pass."""
    prompt = getattr(run, "_prompt", None)
    return run._selection if prompt is None else prompt[1]


def picked_rows(selection: Any) -> Tensor:
    """The rows that a selection holds."""
    found: Tensor = selection.lists if hasattr(selection, "lists") else selection.index
    return found


def rows_of(out: Any, kwargs: dict[str, Any]) -> Tensor:
    """The rows that a top-k wrote or gave back."""
    found: Tensor = kwargs["output_idx"] if "output_idx" in kwargs else out[1]
    return found


def fresh_arguments(label: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """Arguments of which what is written is another tensor."""
    kwargs = dict(kwargs)
    if label == "rotation":
        copy = args[0].clone()
        return (copy, *args[1:]), {**kwargs, "out": copy}
    if label == "topk" and "output_idx" in kwargs:
        kwargs["output_idx"] = kwargs["output_idx"].clone()
    return args, kwargs


def stage_name(label: str, part: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What one result of a stage is called."""
    if label == "product":
        return f"{label} [{args[0].shape[0]} x {args[0].shape[1]}]"
    if label == "index queries" and len(args) < 4 and kwargs.get("rounding") != "mxfp4":
        return "last norm"
    return f"{label}, coefficients" if label == "enter" and part else label


def visible_scores(label: str, args: tuple[Any, ...]) -> Tensor | None:
    """Scores that count."""
    if label != "scores":
        return None
    paged = args[1].dtype == torch.uint8 if isinstance(args[1], Tensor) else False
    ends = (args[3] if paged else args[4]).flatten()
    width = args[6] if paged else len(args[1][0])
    return torch.arange(width, device=ends.device) < ends.unsqueeze(1)


def tensors_of(out: Any) -> list[Tensor]:
    """Tensors of a result, in order."""
    if isinstance(out, Tensor):
        return [out]
    if isinstance(out, (tuple, list)):
        return [t for part in out for t in tensors_of(part)]
    return []


def values_of(out: Any) -> list[Tensor]:
    """Tensors of a result; codes and scales as their values."""
    if isinstance(out, (tuple, list)) and len(out) == 2 and out[0].dtype == torch.float8_e4m3fn:
        codes, scale = out
        size = (
            2.0 ** (scale.view(torch.uint8).float() - 127) if scale.element_size() == 1 else scale
        )
        return [(codes.float().unflatten(1, (size.shape[1], -1)) * size.unsqueeze(2)).flatten(1)]
    return tensors_of(out)


def _rows_and_cache(run: Any) -> tuple[Any, SlotCache]:
    cache = run.cache if hasattr(run, "cache") else run._cache
    return cache.rows, cache


def windows_of(args: tuple[Any, ...]) -> State:
    """The window rows that a step writes."""
    rows, cache = _rows_and_cache(args[0])
    form = cache.formats.window
    return [("window rows", rows.window_data[args[1].layer_id], lambda x: form.unpack(x, torch.float32))]  # fmt: skip


def pools_of(args: tuple[Any, ...]) -> State:
    """The pool rows, index keys and tails that a step writes."""
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
