"""Implementations of the kernels by name, and which of them serves a call.

An operation has one or more implementations, each of one backend ("torch", "triton", ...). Without a wish the one of
the highest priority that can serve the arguments is called; a backend that was asked for either serves the call or the
call raises and says why it cannot.

    with use_backend("torch"):
        out = fp8_gemm_nt(a, b)
    print(explain(fp8_gemm_nt, a, b))
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from deepinfer.core.errors import ConfigError, UnsupportedHardware
from deepinfer.kernels.arguments import check_devices, refuse_gradients

__all__ = [
    "FAMILIES",
    "Choice",
    "Implementation",
    "Operation",
    "check_backend",
    "noting",
    "operation",
    "operations",
    "use_backend",
]

FAMILIES = (
    "aligned",
    "attention",
    "attention_prefill",
    "cache",
    "engram",
    "gemm",
    "indexer",
    "indexer_paged",
    "mhc",
    "moe",
    "norm",
    "quant",
    "rope",
    "sampling",
    "spec",
    "topk",
)
"""Modules of this package with a tuple `OPERATIONS`."""

# The namespace of the operations in torch, which torch.compile calls: held here, because it lives as long as this name.
_library = torch.library.Library("deepinfer", "FRAGMENT")
_wish: ContextVar[str | None] = ContextVar("deepinfer_kernel_backend", default=None)
# Inside of `explain`: choices instead of calls.
_choices: ContextVar[_Choices | None] = ContextVar("deepinfer_kernel_choices", default=None)


@dataclass(frozen=True)
class Implementation:
    """One implementation of an operation.

    Attributes:
        backend: Name of the backend.
        name: Its own name; the backend's unless the backend has several for the operation.
        function: Takes what the operation takes.
        supports: Takes what the operation takes; returns None if it can be served, else the reason why not.
        priority: The highest that can serve a call is chosen.
    """

    backend: str
    name: str
    function: Callable[..., Any]
    supports: Callable[..., str | None]
    priority: int


@dataclass(frozen=True)
class Choice:
    """Why an implementation was chosen.

    Attributes:
        operation: Name of the operation.
        backend: Name of the chosen implementation, or None if nothing can serve the call.
        refusals: Why each other implementation was not chosen, by name.
        wish: The backend that was asked for, or None.
        then: Choices of the operations behind it, when one call makes several.
    """

    operation: str
    backend: str | None
    refusals: dict[str, str]
    wish: str | None
    then: tuple[Choice, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.operation}: {self.backend or 'nothing'} serves this call"]
        if self.wish:
            lines[0] += f" ({self.wish!r} was asked for)"
        lines += [f"  not {name}: {reason}" for name, reason in self.refusals.items()]
        return "\n".join(lines + [str(choice) for choice in self.then])


@dataclass(frozen=True)
class Operation:
    """A kernel by name, with its implementations.

    What it writes is an argument, marked in the schema. Called by code that torch traces (torch.compile, make_fx, fake
    tensors), it is the operation `deepinfer::name` of torch; otherwise the implementation is called directly.

    Attributes:
        name: Public name.
        schema: Arguments as torch.library writes them.
        implementations: In the order of their priority, highest first.
    """

    name: str
    schema: str
    implementations: list[Implementation] = field(default_factory=list)

    def __post_init__(self) -> None:
        _library.define(f"{self.name}(str? backend, {self.schema}) -> ()")
        _library.impl(self.name, self._run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"deepinfer::{self.name}", _nothing, lib=_library)

    def register(
        self,
        backend: str,
        *,
        supports: Callable[..., str | None],
        priority: int = 0,
        name: str | None = None,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator that adds an implementation.

        Args:
            backend: Name of the backend.
            supports: Takes what the operation takes; returns None, or the reason why the call cannot be served.
            priority: The highest that can serve a call is chosen; the references have 0.
            name: Its own name, when the backend has several for the operation.

        Returns:
            A decorator that returns its function unchanged.

        Raises:
            ConfigError: The operation has an implementation of this name already.
        """
        own = name or backend
        if any(i.name == own for i in self.implementations):
            raise ConfigError(
                f"{self.name} has an implementation {own!r} already; choose another name.",
                field="name",
                value=own,
            )

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            self.implementations.append(Implementation(backend, own, function, supports, priority))
            self.implementations.sort(key=lambda i: -i.priority)
            return function

        return add

    def choose(self, backend: str | None, *args: Any, **kwargs: Any) -> Implementation:
        """The implementation that serves a call.

        Args:
            backend: The backend asked for; None for that of `use_backend`, or the best.
            args: What the operation is called with.
            kwargs: What the operation is called with.

        Returns:
            The implementation.

        Raises:
            ConfigError: There is no such backend.
            UnsupportedHardware: The backend asked for, or every backend, cannot serve the call.
        """
        wish = _wished(backend)
        if wish is None:
            for found in self.implementations:
                if found.supports(*args, **kwargs) is None:
                    return found
            choice = self.explain(None, *args, **kwargs)
            raise UnsupportedHardware(
                f"{choice}.", needed="a backend that serves the call", found="none"
            )
        asked = [i for i in self.implementations if wish in (i.backend, i.name)]
        if not asked:
            known = ", ".join(sorted({repr(i.backend) for i in self.implementations}))
            raise ConfigError(
                f"{self.name} has no backend {wish!r}; it has {known}.",
                field="backend", value=wish, limit=known,
            )  # fmt: skip
        reasons = []
        for found in asked:
            reason = found.supports(*args, **kwargs)
            if reason is None:
                return found
            reasons.append(reason)
        text = "; ".join(dict.fromkeys(reasons))
        raise UnsupportedHardware(
            f"Backend {wish!r} of {self.name} cannot serve this call: {text}. Leave the backend to deepinfer, or ask "
            "for another.",
            needed=text, found=wish, fallback=f"use_backend({self.implementations[-1].backend!r})",
        )  # fmt: skip

    def explain(self, backend: str | None, *args: Any, **kwargs: Any) -> Choice:
        """Which implementation serves a call, and why no other; raises nothing."""
        wish = _wished(backend)
        refusals: dict[str, str] = {}
        chosen = None
        for found in self.implementations:
            if wish is not None and wish not in (found.backend, found.name):
                refusals[found.name] = f"{wish!r} was asked for"
                continue
            reason = found.supports(*args, **kwargs)
            if reason is not None:
                refusals[found.name] = reason
            elif chosen is None:
                chosen = found.name
            else:
                refusals[found.name] = f"{chosen!r} comes first"
        return Choice(self.name, chosen, refusals, wish)

    def __call__(self, backend: str | None, *args: Any) -> None:
        """Calls the implementation that `choose` finds; inside of `explain`, notes it only."""
        if torch.compiler.is_compiling():
            if torch.is_grad_enabled():
                refuse_gradients(self.name, *args)
            # Inductor cannot reuse memory of e8m0; every operation takes the bytes as well.
            bytes_ = [x.view(torch.uint8) if _is_e8m0(x) else x for x in args]
            getattr(torch.ops.deepinfer, self.name)(backend, *bytes_)
            return
        choices = _choices.get()
        if choices is not None:
            choices.note(self, backend, args)
        elif torch._C._len_torch_dispatch_stack():
            # Fake tensors and make_fx know the operation of torch, not what it calls.
            getattr(torch.ops.deepinfer, self.name)(backend, *args)
        else:
            self._run(backend, *args)

    def _run(self, backend: str | None, *args: Any) -> None:
        chosen = self.choose(backend, *args)
        if chosen.backend == "torch":
            # Torch takes some indices from another device, and waits for them: that would be a silent fallback.
            check_devices(self.name, *args)
            if torch._C._is_any_autocast_enabled():
                # References compute in the dtypes that they say, as the kernels do.
                with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                    chosen.function(*args)
                return
        chosen.function(*args)


class _Choices:
    """What is noted inside of `explain`, instead of calls."""

    def __init__(self, given: Iterable[object]) -> None:
        """None yet.

        Args:
            given: The caller's arguments, whose tensors stay as they are.
        """
        self.found: list[Choice] = []
        parts = (p for x in given for p in (x if isinstance(x, (tuple, list)) else (x,)))
        self._owned = {_memory(x) for x in parts if isinstance(x, torch.Tensor)}

    def note(self, operation: Operation, backend: str | None, args: tuple[Any, ...]) -> None:
        """Notes the choice of one operation, and goes on with zeros for what it would have written.

        Raises:
            _Noted: It would have written to a tensor of the caller, so that what comes behind cannot go on.
        """
        self.found.append(operation.explain(backend, *args))
        written = [
            x
            for part, x in zip(operation.schema.split(","), args, strict=True)
            if "!)" in part and isinstance(x, torch.Tensor)
        ]
        if any(_memory(x) in self._owned for x in written):
            raise _Noted
        for x in written:
            x.zero_()


class _Noted(BaseException):
    """Ends the call that `explain` looks into."""


def _is_e8m0(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype == torch.float8_e8m0fnu


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _nothing(*args: Any) -> None:
    """What an operation returns: it writes one of its arguments."""


@contextmanager
def use_backend(backend: str | None) -> Iterator[None]:
    """Asks for a backend in every call of a kernel inside the block, in this thread or task.

    Args:
        backend: Name of a backend ("torch", "triton"), or None for the best one of each call.

    Yields:
        Nothing. A call that the backend cannot serve raises `UnsupportedHardware`. It goes around code that torch.compile
        made, and not into it.

    Raises:
        ConfigError: No kernel has a backend of this name.
    """
    check_backend(backend)
    token = _wish.set(backend)
    try:
        yield
    finally:
        _wish.reset(token)


def check_backend(backend: str | None) -> None:
    """Refuses a name that is no kernel's backend, also where a call has no rows and would not look for one.

    Raises:
        ConfigError: No kernel has a backend of this name.
    """
    if backend in (None, "torch", "triton"):
        return
    known = {n for o in operations() for i in o.implementations for n in (i.backend, i.name)}
    if not isinstance(backend, str) or backend not in known:
        listed = ", ".join(repr(name) for name in sorted(known))
        text = f"no kernel has a backend {backend!r}; there are {listed}."
        raise ConfigError(text, field="backend", value=backend, limit=listed)


@contextmanager
def noting(given: Iterable[object]) -> Iterator[list[Choice]]:
    """A block in which operations are not called: what would serve each is noted.

    Args:
        given: The caller's arguments, whose tensors stay as they are: the block ends before what comes behind an operation
            that would write to one of them.

    Yields:
        The choices, filled by and by.
    """
    choices = _Choices(given)
    token = _choices.set(choices)
    try:
        yield choices.found
    except _Noted:
        pass
    finally:
        _choices.reset(token)


def operations() -> tuple[Operation, ...]:
    """All operations, family by family."""
    modules = [importlib.import_module(f"deepinfer.kernels.{family}") for family in FAMILIES]
    return tuple(o for module in modules for o in module.OPERATIONS)


def operation(name: str) -> Operation:
    """A kernel by name.

    Args:
        name: Its name, as "gemm_nt".

    Returns:
        The operation.

    Raises:
        ConfigError: There is none of this name.
    """
    known = {o.name: o for o in operations()}
    if name not in known:
        raise ConfigError(
            f"there is no kernel {name!r}; there are {', '.join(sorted(known))}.",
            field="name", value=name, limit=", ".join(sorted(known)),
        )  # fmt: skip
    return known[name]


def _wished(backend: str | None) -> str | None:
    """The backend that a call asks for: its own, that of the block around it, or that of the environment."""
    wish = backend or _wish.get()
    if wish is None and os.environ.get("DEEPINFER_ACCELERATOR") in ("cpu", "ascend"):
        return "torch"
    return wish
