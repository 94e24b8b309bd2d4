"""A stack of layers of the published widths with random packed weights, and what its steps cost by rows.

Five layers stand for the published forty: one that owns a pool and selects its rows, and four that reuse the selection, as
8 of 40 layers select. The draft's three stages see windows only and have 128 experts, of which 3 serve a token.
`borrowed_by` lets engines of the embedded `nano` run at this cost: every recorded step launches the step of this stack for as
many rows behind its own, and every recorded draft the stages for five rows a block. Tokens and confidences are `nano`'s,
seconds are those of real widths.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from layer import filled_cache, layer_config, random_model

from deepinfer.engine.draft_graphs import DraftGraphs
from deepinfer.engine.graphs import DecodeGraphs
from deepinfer.engine.recording import record_call
from deepinfer.kernels.fused import fused_kernels
from deepinfer.models.deepseek_v41 import DeepseekV41Config, Segment
from deepinfer.models.deepseek_v41.decode_inputs import DecodeInputs, row_values
from deepinfer.models.deepseek_v41.decode_step import DecodeStep
from deepinfer.models.deepseek_v41.packed_products import prepare_products

LAYERS, PUBLISHED_LAYERS, STAGES, BLOCK = 5, 40, 3, 5
VOCAB = 129280
ROWS = (
    1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536
)  # fmt: skip


def stack_config(small: bool) -> DeepseekV41Config:
    """The layers of the target."""
    config = layer_config("S", small)
    return dataclasses.replace(config, num_hidden_layers=LAYERS, compress_ratios=(2,) * LAYERS)


def stage_config(small: bool) -> DeepseekV41Config:
    """One stage of the draft as a layer of its own."""
    return dataclasses.replace(
        layer_config("S", small),
        compress_ratios=(0,), kv_source_layer_ids=(), index_source_layer_ids=(),
        n_routed_experts=8 if small else 128, num_experts_per_tok=3,
    )  # fmt: skip


class WideStack:
    """Recorded steps of a stack.

    Args:
        config: Its shape.
        device: Where it runs.
        context: Tokens that every slot holds.
        slots: Slots; more rows than these are further tokens of them.
    """

    def __init__(self, config: DeepseekV41Config, device: str, context: int, slots: int) -> None:
        self.device, self.slots, self.context = device, slots, context
        self.model = random_model(config, device)
        prepare_products(self.model)
        if device != "cuda":
            vars(self.model)["row_kernels"] = lambda: fused_kernels("cpu")
        self._step = DecodeStep(self.model, filled_cache(self.model, slots, context, 16))
        self._graphs: dict[int, Any] = {}
        self._calls: list[Callable[[], Any]] = []  # recordings read what these hold
        self._pool: Any = None

    def call(self, rows: int) -> Callable[[], Any]:
        """A step of so many rows."""
        inputs = DecodeInputs.empty(rows, 1, self.device)
        places = [(at % self.slots, self.context + at // self.slots) for at in range(rows)]
        values = [row_values(Segment(slot, at, 1), 0) for slot, at in places]
        inputs.fill([[5 + at % 500] for at in range(rows)], values)
        return lambda: self._step(inputs, self.context + 16)

    def graph(self, rows: int) -> Any:
        """The recording of a step of so many rows, or of the next size that there is."""
        rows = next((size for size in ROWS if size >= rows), rows)
        if rows not in self._graphs:
            self._calls.append(self.call(rows))
            device = torch.device(self.device)
            self._graphs[rows], _ = record_call(self._calls[-1], device, self._pool)
            self._pool = self._pool or self._graphs[rows].pool()
        return self._graphs[rows]

    def milliseconds(self, rows: int, repeats: int = 8) -> float:
        """Median milliseconds of a recorded step; on a CPU those of one call."""
        return replay_ms(self.graph(rows).replay, repeats)


def replay_ms(run: Callable[[], Any], repeats: int = 8) -> float:
    """Median milliseconds of what is launched, after two runs that do not count."""
    times = []
    for _ in range(repeats + 2):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        run()
        events[1].record()
        times.append(events)
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in times[2:])


class WideModel:
    """Target stack and draft stage.

    Args:
        device: Where they run.
        small: Tiny widths, to try the benchmark itself.
        slots: Requests at once.
    """

    def __init__(self, device: str, small: bool = False, slots: int = 256) -> None:
        context = 256 if small else 2048
        self.target = WideStack(stack_config(small), device, context, slots)
        self.stage = WideStack(stage_config(small), device, context, slots)
        width = self.target.model.config.hidden_size
        self._head = torch.randn(1024 if small else VOCAB, width, device=device).bfloat16()

    def head_ms(self, rows: int) -> float:
        """Milliseconds of the published head over so many rows."""
        x = torch.randn(rows, self._head.shape[1], device=self._head.device).bfloat16()
        return replay_ms(lambda: x @ self._head.T)

    def target_lines(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The curve of a step by rows, 40 layers as eight times five."""
        for rows in ROWS:
            step, head = self.target.milliseconds(rows), self.head_ms(rows)
            value = PUBLISHED_LAYERS / LAYERS * step + head
            yield f"curve, real widths, {rows} rows", {
                "step_ms": step, "head_ms": head, "value": value, "unit": "ms", "layers": PUBLISHED_LAYERS,
            }  # fmt: skip

    def draft_lines(self, requests: tuple[int, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
        """The curve of drafting by requests."""
        for count in requests:
            stage, head = self.stage.milliseconds(BLOCK * count), self.head_ms(BLOCK * count)
            yield f"curve, real widths, drafting for {count}", {
                "stage_ms": stage, "head_ms": head, "value": STAGES * stage + head, "unit": "ms",
            }  # fmt: skip

    @contextlib.contextmanager
    def borrowed_by(self) -> Iterator[None]:
        """Recordings made meanwhile, of any engine, take the time of this model as well."""
        with torch.inference_mode():
            self.stage.graph(BLOCK)  # fails here, if it does, and not inside of an engine
        record_step, record_draft = DecodeGraphs._record, DraftGraphs._record

        def step(graphs: Any, step: Any, bucket: Any) -> Any:
            made = record_step(graphs, step, bucket)
            if made.graph is None:
                return made
            behind = [self.target.graph(bucket.rows * bucket.tokens)]
            return dataclasses.replace(made, graph=_Both(made.graph, behind))

        def draft(graphs: Any, rows: int, *, is_drawn: bool) -> Any:
            made = record_draft(graphs, rows, is_drawn=is_drawn)
            if made.graph is not None:
                made.graph = _Both(made.graph, [self.stage.graph(BLOCK * rows)] * STAGES)
            return made

        with mock.patch.object(DecodeGraphs, "_record", step), mock.patch.object(DraftGraphs, "_record", draft):  # fmt: skip
            yield


class _Both:
    """Replays a recording and others behind it."""

    def __init__(self, first: Any, behind: list[Any]) -> None:
        self._first, self._behind = first, behind

    def replay(self) -> None:
        """Launches all."""
        self._first.replay()
        for graph in self._behind:
            graph.replay()

    def pool(self) -> Any:
        """Memory of the first."""
        return self._first.pool()
