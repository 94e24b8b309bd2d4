"""Loading a model: name or path to a module with its weights, checked against what the configuration asks for."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from deepinfer.core import _checks as checks
from deepinfer.core.errors import (
    CheckpointMismatch,
    CheckpointMissing,
    ConfigError,
    UnsupportedHardware,
)
from deepinfer.models.checkpoint import Checkpoint, Shard
from deepinfer.models.formats import (
    FLOAT_CODES,
    Layout,
    TensorSpec,
    Weight,
    block_of,
    dequantise,
    row_chunks,
    scale_name,
    stored_tensors,
)
from deepinfer.models.hub import resolve_checkpoint
from deepinfer.models.packed import PackedWeight
from deepinfer.models.registry import Architecture, architecture_of

if TYPE_CHECKING:
    from deepinfer.core.protocols import ProgressFn
    from deepinfer.models.deepseek_v41.model import DeepseekV41

__all__ = ["Problem", "check_checkpoint", "load_model"]

_SHOWN = 8
_SAME_BYTES = {"I8": ("I8", "U8"), "F8_E8M0": ("F8_E8M0", "U8")}


def load_model(
    path_or_repo: str | os.PathLike[str] = "nano",
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    rounding: Literal["none", "cache", "full"] = "full",
    revision: str | None = None,
    packed: bool = False,
    offline: bool | None = None,
    progress: bool | ProgressFn | None = None,
) -> DeepseekV41:
    """Loads a model with its weights.

    Files are memory-mapped and weights are read one at a time in pieces of at most 16 MiB, so the peak memory is that
    of the result plus one shard. Files, names, shapes and dtypes are checked before the first weight is read.

    Args:
        path_or_repo: "nano" (inside the package), a checkpoint folder, or a hub repository "owner/name".
        device: Where the weights go.
        dtype: Dtype of activations and most weights; None for fp32 on a CPU and bf16 elsewhere.
        rounding: "full" as inference does; "cache" rounds what caches hold only; "none" rounds nothing.
        revision: Branch, tag or commit of a hub repository.
        packed: Keep quantised weights as their bytes and dequantise on use: the same outputs bit for bit, less memory,
            slower. Plain checkpoints have nothing to keep packed.
        offline: True never uses the network; None does as HF_HUB_OFFLINE says. A folder never does.
        progress: True or False draws bars or not, None on a terminal or in a notebook only; a function is called with
            (bytes done, bytes in all).

    Returns:
        The module, in eval mode, without gradients: a `DeepseekV41`, or what another registered architecture builds.

    Raises:
        CheckpointMissing: No such folder, repository or file.
        CheckpointMismatch: Tensors are missing, unexpected, of another shape or dtype, damaged, or NaN. The message
            counts all problems and shows the first; `check_checkpoint` lists them.
        HubOffline: A file is not cached and the network is off.
        ConfigError: `config.json` is unusable, or names an architecture that is not known; the device or dtype is no
            such thing.
        UnsupportedHardware: The device is CUDA and there is none.
    """
    device = _check_device(device)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        checks.fail("dtype", dtype, "a floating torch.dtype, or None", ConfigError)
    bars = progress if isinstance(progress, bool) or progress is None else False
    folder = resolve_checkpoint(path_or_repo, revision, offline, progress=bars)
    architecture, config = _read_config(folder)
    checkpoint = Checkpoint.open(folder)
    weights, layout = architecture.weights(config), architecture.layout(config)
    problems = _compare(weights, layout, checkpoint)
    if problems:
        raise _mismatch(problems, folder, layout)

    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = architecture.build(config, rounding=rounding, device="meta", dtype=dtype)
    _materialise(model, weights, device, packed=packed and layout == "published")
    total = sum(spec.size_bytes for spec in checkpoint.tensors.values())
    with torch.no_grad(), _reporter(progress, total) as report:
        _copy_weights(model, weights, checkpoint, report)
    architecture.finish(model, folder)
    return cast("DeepseekV41", model.eval())


@dataclass(frozen=True, slots=True)
class Problem:
    """One way in which a checkpoint does not fit its configuration.

    Attributes:
        tensor: Name of the tensor.
        kind: "missing", "unexpected", "shape" or "dtype".
        expected: What the configuration asks for, in words.
        found: What the checkpoint holds, in words.
        near: For a missing tensor, an unexpected one of nearly the same name, or None.
    """

    tensor: str
    kind: Literal["missing", "unexpected", "shape", "dtype"]
    expected: str
    found: str
    near: str | None = None

    def __str__(self) -> str:
        hint = f" (is it {self.near}?)" if self.near else ""
        return f"{self.tensor}: expected {self.expected}, found {self.found}{hint}"


def _check_device(device: object) -> torch.device:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"device is {checks.show(device)}, which torch does not take: {reason}. Give 'cpu', 'cuda' or "
            "'cuda:0'.",
            field="device",
            value=device,
        ) from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedHardware(
            f"device {str(found)!r} is asked for, and torch {torch.__version__} finds no CUDA device here. Use "
            "device='cpu'.",
            needed="cuda",
            found="cpu",
            fallback="device='cpu'",
        )
    return cast("torch.device", found)


def check_checkpoint(folder: str | os.PathLike[str]) -> list[Problem]:
    """Compares a checkpoint folder with its own `config.json`, without reading any weight.

    Args:
        folder: A local checkpoint folder.

    Returns:
        All problems: missing tensors, then unexpected ones, then wrong shapes and dtypes; empty when it fits.

    Raises:
        CheckpointMissing: No folder, config or weights, or an absent shard.
        CheckpointMismatch: A file is truncated or damaged.
        ConfigError: `config.json` is unusable.
    """
    folder = Path(folder)
    architecture, config = _read_config(folder)
    layout = architecture.layout(config)
    return _compare(architecture.weights(config), layout, Checkpoint.open(folder))


def _read_config(folder: Path) -> tuple[Architecture, Any]:
    path = folder / "config.json"
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise CheckpointMissing(
            f"{path} does not exist. Give the folder that holds config.json and the weights.",
            path=path,
        ) from error
    except OSError as error:
        raise CheckpointMissing(f"{path} cannot be read: {error.strerror}.", path=path) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not valid JSON: {error}. Download or save it again."
        ) from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds a {type(data).__name__}; it must be a JSON object.")
    architecture = architecture_of(data)
    return architecture, architecture.parse_config(data)


def _compare(
    weights: Mapping[str, Weight], layout: Layout, checkpoint: Checkpoint
) -> list[Problem]:
    expected: dict[str, TensorSpec] = {}
    for name, weight in weights.items():
        expected |= stored_tensors(name, weight, layout)
    found = checkpoint.tensors
    unexpected = [name for name in found if name not in expected]
    problems = [
        Problem(name, "missing", str(spec), "no such tensor", _near(name, unexpected))
        for name, spec in expected.items()
        if name not in found
    ]
    problems += [
        Problem(name, "unexpected", "no such tensor", str(found[name])) for name in unexpected
    ]
    for name, spec in expected.items():
        if name not in found:
            continue
        if found[name].shape != spec.shape:
            problems.append(Problem(name, "shape", str(spec), str(found[name])))
        elif found[name].dtype not in _accepted(spec.dtype):
            problems.append(Problem(name, "dtype", str(spec), str(found[name])))
    return problems


def _accepted(dtype: str) -> tuple[str, ...]:
    return FLOAT_CODES if dtype in FLOAT_CODES else _SAME_BYTES.get(dtype, (dtype,))


def _near(name: str, candidates: list[str]) -> str | None:
    # a whole layout that differs would make this quadratic; one hint is for a single wrong name
    if len(candidates) > 100:
        return None
    return next(iter(difflib.get_close_matches(name, candidates, n=1, cutoff=0.8)), None)


def _mismatch(problems: list[Problem], folder: Path, layout: Layout) -> CheckpointMismatch:
    first = problems[0]
    shown = "; ".join(str(problem) for problem in problems[:_SHOWN])
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    why = {
        "published": "quantization_config asks for FP8 and FP4 tensors with scales",
        "plain": "without quantization_config every weight is a float tensor",
    }[layout]
    count = f"{len(problems)} tensor{'s do' if len(problems) > 1 else ' does'}"
    return CheckpointMismatch(
        f"{count} not fit {folder / 'config.json'} ({why}). {shown}{more}. "
        f"Use the config.json that belongs to these weights.",
        tensor=first.tensor,
        expected=first.expected,
        found=first.found,
    )


def _materialise(
    model: nn.Module, weights: Mapping[str, Weight], device: torch.device | str, *, packed: bool
) -> None:
    """Gives every parameter of a module on the meta device its memory."""
    storages = {weight.parameter or name: weight.storage for name, weight in weights.items()}
    for name, parameter in list(model.named_parameters()):
        owner, _, attribute = name.rpartition(".")
        storage = storages.pop(name)
        value: Tensor
        if packed and block_of(storage) is not None:
            shape, dtype = tuple(parameter.shape), parameter.dtype
            value = PackedWeight.empty(shape, storage, device=device, dtype=dtype)
        else:
            value = torch.empty_like(parameter, device=device)
        setattr(model.get_submodule(owner), attribute, nn.Parameter(value, requires_grad=False))
    if storages:
        raise ConfigError(f"the model has no parameters for {', '.join(list(storages)[:_SHOWN])}.")


def _copy_weights(
    model: nn.Module,
    weights: Mapping[str, Weight],
    checkpoint: Checkpoint,
    report: Callable[[int], None],
) -> None:
    parameters = dict(model.named_parameters())
    scales = checkpoint.tensors.keys() - weights.keys()
    for file, names in checkpoint.by_file():
        with checkpoint.shard(file) as shard:
            for name in names:
                if name not in scales:
                    weight = weights[name]
                    target = parameters[weight.parameter or name]
                    with _scale_reader(name, checkpoint, shard) as scale_shard:
                        _copy_weight(name, weight, target, shard, scale_shard)
                report(checkpoint.tensors[name].size_bytes)


@contextmanager
def _scale_reader(name: str, checkpoint: Checkpoint, shard: Shard) -> Iterator[Shard | None]:
    """The file that holds a weight's scales: mostly its own, but an index may put them elsewhere."""
    scale = scale_name(name)
    if scale not in checkpoint.files:
        yield None
    elif checkpoint.files[scale] == checkpoint.files[name]:
        yield shard
    else:
        with checkpoint.shard(checkpoint.files[scale]) as other:
            yield other


def _copy_weight(
    name: str, weight: Weight, target: Tensor, shard: Shard, scale_shard: Shard | None
) -> None:
    """Copies one weight into its place in `target`, some rows at a time."""
    block = block_of(weight.storage) if scale_shard is not None else None
    for start, stop in row_chunks(weight.shape):
        codes = shard.read(name, start, stop).to(target.device)
        if block is None or scale_shard is None:
            _refuse_nan(name, codes.isnan(), start)
            _place(target, weight.index)[start:stop].copy_(codes)
            continue
        rows = (start // block[0], -(-stop // block[0]))
        scale = scale_shard.read(scale_name(name), *rows)
        scale = scale.view(torch.uint8).to(target.device)
        _refuse_nan(scale_name(name), scale == 0xFF, rows[0])
        if codes.dtype == torch.float8_e4m3fn:
            _refuse_nan(name, codes.view(torch.uint8) & 0x7F == 0x7F, start)
        if isinstance(target, PackedWeight):
            _place(target.codes, weight.index)[start:stop].copy_(codes.view(torch.uint8))
            _place(target.scale, weight.index)[rows[0] : rows[1]].copy_(scale)
        else:
            values = dequantise(codes, scale, weight.storage, target.dtype)
            _place(target, weight.index)[start:stop].copy_(values)


def _place(target: Tensor, index: tuple[int | slice, ...]) -> Tensor:
    return target[index] if index else target


def _refuse_nan(name: str, bad: Tensor, first_row: int) -> None:
    if not bool(bad.any()):
        return
    position = [int(i) for i in bad.nonzero()[0]]
    if position:
        position[0] += first_row
    raise CheckpointMismatch(
        f"{name} holds NaN at {position}. The checkpoint is damaged; download or save it again.",
        tensor=name,
        expected="no NaN",
        found=f"NaN at {position}",
    )


@contextmanager
def _reporter(progress: bool | ProgressFn | None, total: int) -> Iterator[Callable[[int], None]]:
    """A function to be called with bytes just done."""
    if callable(progress):
        done = 0

        def report(size: int) -> None:
            nonlocal done
            done += size
            progress(done, total)

        yield report
        return
    if progress is False:  # in a notebook the import alone may warn about missing widgets
        yield lambda size: None
        return
    from tqdm.auto import tqdm

    disable = None if progress is None else not progress
    with tqdm(total=total, unit="B", unit_scale=True, desc="Loading", disable=disable) as bar:

        def advance(size: int) -> None:
            bar.update(size)

        yield advance
