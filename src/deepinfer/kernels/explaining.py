"""Which implementation would serve a call, and why no other."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from deepinfer.core.errors import ConfigError
from deepinfer.kernels.arguments import described
from deepinfer.kernels.registry import Choice, Operation, noting, operation, operations

__all__ = ["explain"]


def explain(kernel: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Choice:
    """Which implementation of a kernel serves a call, and why no other; nothing is computed.

    Args:
        kernel: A public function of `deepinfer.kernels`, as `fp8_gemm_nt`; or the name of an operation of the registry, as
            "gemm_nt", which takes the arguments of its schema (`operation(name).schema`: outputs too); or the name of a
            public function that is no operation's.
        args: What the function would be called with.
        kwargs: What the function would be called with, `backend` too.

    Returns:
        The choice, with those behind it when the call makes several operations; `print` shows them with all reasons. What
        comes behind an operation that would write to a tensor of the caller's is not looked at.

    Raises:
        ConfigError: There is no operation of this name, it takes other arguments, or the function calls none for these.
        DeepInferError: What the function raises for its arguments.
    """
    if isinstance(kernel, str):
        public = _public_functions()
        if kernel not in {o.name for o in operations()} and kernel in public:
            kernel = public[kernel]
        else:
            backend = kwargs.pop("backend", None)
            return _explain_operation(operation(kernel), backend, args, kwargs)
    if not callable(kernel):
        raise ConfigError(
            f"kernel is {described(kernel)}; it must be a function of deepinfer.kernels, or a name.",
            field="kernel", value=kernel, limit="a function or a name",
        )  # fmt: skip
    with noting((*args, *kwargs.values())) as found:
        kernel(*args, **kwargs)
    if not found:
        name = getattr(kernel, "__name__", repr(kernel))
        raise ConfigError(
            f"{name} makes no choice for these arguments: it is plain torch, or its tensors have no rows.",
            field="kernel", value=name, limit="a call that computes something",
        )  # fmt: skip
    return replace(found[0], then=tuple(found[1:]))


def _public_functions() -> dict[str, Callable[..., Any]]:
    package = importlib.import_module("deepinfer.kernels")
    found = {name: getattr(package, name) for name in package.__all__}
    return {name: x for name, x in found.items() if callable(x) and not isinstance(x, type)}


def _explain_operation(
    found: Operation, backend: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Choice:
    """`Operation.explain` of arguments by place and by the names of the schema."""
    parts = [part.split() for part in found.schema.split(",")]
    names = [name.partition("=")[0] for *_, name in parts]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    fits = len(args) <= len(names) and len(args) + len(kwargs) == len(given)
    given = {name: None for kind, name in parts if kind.endswith("?")} | given
    if fits and set(given) == set(names):
        try:
            return found.explain(backend, *(given[name] for name in names))
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            reason = f" ({type(error).__name__}: {error})"
    else:
        reason = ""
    listed = described(args) + "".join(f", {k} {described(x)}" for k, x in kwargs.items())
    raise ConfigError(
        f"the operation {found.name!r} takes ({found.schema}); it was given {listed}{reason}. To ask by the arguments of the "
        "public function, hand over the function itself.",
        field="kernel", value=found.name, limit=found.schema,
    )  # fmt: skip
