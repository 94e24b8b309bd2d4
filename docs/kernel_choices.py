"""Which implementation of a kernel would serve its usual calls on a chip that is not there."""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

CAPABILITIES = {"80": (8, 0), "89": (8, 9), "90": (9, 0), "100": (10, 0), "120": (12, 0)}
CALLS = Path(__file__).resolve().parent.parent / "tests" / "kernels" / "right_calls.py"
# Other calls of a function that go to another operation.
MORE: dict[str, list[dict[str, Any]]] = {
    "speculative_verify": [{"rule": "coupled", "draft_logits": None}],
}


def choices() -> tuple[dict[str, dict[str, str]], dict[str, list[str]], list[str]]:
    """What would serve the usual calls of every public kernel.

    Returns:
        The backend of each operation by chip, "torch" or "triton"; the operations of each public function; the functions
        that are plain torch.

    Raises:
        ValueError: No public function calls an operation.
    """
    from deepinfer import kernels
    from deepinfer.kernels.registry import operations

    calls: dict[str, Callable[[], dict[str, Any]]] = runpy.run_path(str(CALLS))["CALLS"]
    chosen: dict[str, dict[str, str]] = {}
    public: dict[str, list[str]] = {}
    backend_of = {(o.name, i.name): i.backend for o in operations() for i in o.implementations}
    for chip, capability in CAPABILITIES.items():
        made = [
            (n, given() | other) for n, given in calls.items() for other in ({}, *MORE.get(n, []))
        ]
        with _device_of(capability):
            found = [(name, _explained(getattr(kernels, name), given)) for name, given in made]
        for name, parts in found:
            for part in parts:
                if part.operation not in public.setdefault(name, []):
                    public[name].append(part.operation)
                # One usual call in Triton is enough for the chip.
                if chosen.setdefault(part.operation, {}).get(chip) != "triton":
                    chosen[part.operation][chip] = backend_of[part.operation, str(part.backend)]
    missing = sorted({o.name for o in operations()} - set(chosen))
    if missing:
        raise ValueError(f"no call in {CALLS.name} reaches the operations {', '.join(missing)}")
    return chosen, public, sorted(set(calls) - set(public))


def _explained(function: Callable[..., Any], given: dict[str, Any]) -> list[Any]:
    from deepinfer.core.errors import ConfigError
    from deepinfer.kernels import explain

    try:
        first = explain(function, **given)
    except ConfigError:
        return []
    return [first, *first.then]


@contextmanager
def _device_of(capability: tuple[int, int]) -> Iterator[None]:
    """A block in which tensors count as on a device of a compute capability, with a Triton that has everything."""

    def hopper(*tensors: object) -> str | None:
        return None if capability[0] == 9 else "it is for compute capability 9.0"

    environment = {k: v for k, v in os.environ.items() if k != "DEEPINFER_ACCELERATOR"}
    with (
        mock.patch.dict(os.environ, environment, clear=True),
        mock.patch.multiple(
            "deepinfer.kernels.contract",
            triton_refusal=lambda *tensors: None,
            gluon_refusal=hopper,
            capability=lambda device: capability,
        ),
    ):
        yield
