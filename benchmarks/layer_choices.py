"""Both forms of steps whose form follows from the number of tokens, and sizes of their kernels."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import torch
from layer_times import Clock

from deepinfer.kernels.fused import fused_kernels
from deepinfer.models.deepseek_v41 import DeepseekV41, packed_stack, wide_products

__all__ = ["choices"]


def choices(model: DeepseekV41, clock: Clock) -> list[str]:
    """Tables of both forms, and of sizes, at several numbers of tokens."""
    tables: list[str] = []
    layer, hidden = model.layers[0], model.config.hidden_size
    run = SimpleNamespace(kernels=fused_kernels(clock.device))
    gate, pool = layer.ffn.gate, layer.attn.compressor
    pair = [pool.wkv.weight, pool.wgate.weight]
    for rows in (16, 64, 128, 256, 512, 1024):
        streams = torch.randn(rows, 4, hidden, device=clock.device, dtype=torch.bfloat16)
        pre = torch.rand(rows, 4, device=clock.device)
        y = streams[:, 0].contiguous()

        def enter() -> None:
            packed_stack.enter(layer, streams, pre, run, "attn")  # noqa: B023

        def router() -> None:
            wide_products.wide_linear(gate, (gate.weight,), y)  # noqa: B023

        def compressor() -> None:
            wide_products.wide_linear(pool, pair, y)  # noqa: B023

        for module, name, call in (
            (packed_stack, "_MANY_TOKENS", enter),
            (wide_products, "_MANY_SUMS", router),
            (wide_products, "_MANY_SUMS", compressor),
        ):
            kept, found = getattr(module, name), []
            for least in (1, 1 << 60):
                setattr(module, name, least)
                found.append(clock.time(call, record=True))
            setattr(module, name, kept)
            times = f"form for many tokens {found[0]:.4f} ms, for few {found[1]:.4f} ms"
            tables.append(f"-- {call.__name__}, {rows} tokens: {times}; {name} {kept}")
        for name, weight in (("router", gate.weight), ("compressor", pool.wide_whole)):
            tables.append(wide_sizes(clock, f"{name}, {rows} tokens", y, weight))
    return tables


def wide_sizes(clock: Clock, case: str, y: torch.Tensor, weight: torch.Tensor) -> str:
    """Times and errors of products with an fp32 weight, by the sizes of the kernel."""
    from deepinfer.kernels.triton.wide_products import WideTuning, tuning_for, wide_linear

    exact = y.double() @ weight.double().T
    usual = tuning_for(len(y), *weight.shape)
    sizes = [usual, dataclasses.replace(usual, pieces=2 * usual.pieces)]
    sizes += [dataclasses.replace(usual, tokens=n) for n in (16, 32, 128) if n <= len(y)]
    sizes.append(WideTuning(32, usual.pieces, usual.tokens, 6))
    found = []
    for one in dict.fromkeys(sizes):
        error = (wide_linear(y, weight, one) - exact).norm() / exact.norm()
        ms = clock.time(lambda: wide_linear(y, weight, one), record=True)  # noqa: B023
        found.append(f"   {ms:.4f} ms, error {float(error):.1e}: {one}")
    other = torch.nn.functional.linear
    ms = clock.time(lambda: other(y.float(), weight), record=True)
    error = (other(y.float(), weight) - exact).norm() / exact.norm()
    return "\n".join([f"-- {case}: torch {ms:.4f} ms, error {float(error):.1e}", *found])
