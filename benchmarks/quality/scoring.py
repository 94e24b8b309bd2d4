"""What texts cost a model in nats, in windows, with the cached forward pass that inference uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer.models import load_model
from deepinfer.models.deepseek_v41 import DeepseekV41, ForwardBatch

WINDOW = 2048
STRIDE = 1024
CHUNK = 512
GPU_SLOTS = 32


@dataclass(frozen=True)
class Window:
    """Targets `start` to `end` of a text, scored from `first` on; target t is token t + 1."""

    start: int
    end: int
    first: int


def windows(num_targets: int, size: int = WINDOW, stride: int = WINDOW) -> list[Window]:
    """Windows that score every target once.

    Args:
        num_targets: Targets of the text, one fewer than its tokens.
        size: Targets of a window.
        stride: Distance of windows; below `size`, every target behind the first window has at least
            `size - stride` tokens of context.

    Returns:
        The windows, in order.
    """
    kept = size - stride
    starts = [at for at in range(0, num_targets, stride) if at == 0 or at + kept < num_targets]
    return [Window(at, min(at + size, num_targets), 0 if at == 0 else at + kept) for at in starts]


class Scorer:
    """Scores windows with one model, a few at a time.

    Args:
        model: The model.

    Attributes:
        loads: Tokens that each expert of each layer got, shape [layers, experts], int64.
    """

    def __init__(self, model: DeepseekV41) -> None:
        self.model = model
        self.device = model.embed.weight.device
        # One window at a time makes a figure independent of how windows are spread over processes.
        num_slots = 1 if self.device.type == "cpu" else GPU_SLOTS
        self.cache = model.new_cache(num_slots, WINDOW, max_step_tokens=CHUNK)
        self.loads = np.zeros((len(model.layers), model.config.n_routed_experts), dtype=np.int64)

    @torch.inference_mode()
    def score(self, rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Negative log-likelihoods in nats of every token but the first, one float64 array a row."""
        out: list[list[np.ndarray]] = [[] for _ in rows]
        waiting = list(range(len(rows)))[::-1]
        running: dict[int, tuple[int, int]] = {}
        hooks = [
            layer.ffn.gate.register_forward_hook(self._count(number))
            for number, layer in enumerate(self.model.layers)
        ]
        try:
            while waiting or running:
                for slot in range(self.cache.num_slots):
                    if slot not in running and waiting:
                        self.cache.reset(slot)
                        running[slot] = (waiting.pop(), 0)
                self._step(rows, running, out)
        finally:
            for hook in hooks:
                hook.remove()
        return [np.concatenate(parts) for parts in out]

    def _step(
        self,
        rows: Sequence[Sequence[int]],
        running: dict[int, tuple[int, int]],
        out: list[list[np.ndarray]],
    ) -> None:
        segments, targets = [], []
        for slot, (row, at) in running.items():
            ids = rows[row]
            end = min(at + CHUNK, len(ids) - 1)
            segments.append((slot, at, ids[at:end]))
            targets.append(ids[at + 1 : end + 1])
        batch = ForwardBatch.from_segments(segments, device=self.device)
        logits = self.model.compute_logits(self.model(batch, self.cache).hidden)
        wanted = torch.tensor([token for part in targets for token in part], device=self.device)
        costs = torch.nn.functional.cross_entropy(logits, wanted, reduction="none")
        parts = costs.double().cpu().split([len(part) for part in targets])
        for (slot, (row, at)), part in zip(list(running.items()), parts, strict=True):
            out[row].append(part.numpy())
            if at + len(part) == len(rows[row]) - 1:
                del running[slot]
            else:
                running[slot] = (row, at + len(part))

    def _count(self, layer: int) -> Any:
        def count(module: torch.nn.Module, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
            experts = output[1].flatten()
            self.loads[layer] += (
                torch.bincount(experts, minlength=self.loads.shape[1]).cpu().numpy()
            )

        return count


@dataclass(frozen=True)
class Scores:
    """Nats of rows, one array a row, and the expert loads of the run, shape [layers, experts]."""

    nats: list[np.ndarray]
    loads: np.ndarray


def score_rows(
    folder: Path, rows: Sequence[Sequence[int]], *, rounding: str, device: str, processes: int = 1
) -> Scores:
    """Loads a checkpoint and scores rows with it.

    Args:
        folder: The checkpoint.
        rows: Token ids, at least two a row.
        rounding: "none", "cache" or "full".
        device: A torch device.
        processes: Processes to share the work among, on a CPU; the figures do not depend on it.

    Returns:
        The scores.
    """
    if processes <= 1 or device != "cpu" or len(rows) < 2 * processes:
        return _score_part(folder, rows, rounding, device)
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    parts = [order[number::processes] for number in range(processes)]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        jobs = [
            pool.submit(_score_part, folder, [rows[i] for i in part], rounding, device)
            for part in parts
        ]
        results = [job.result() for job in jobs]
    nats: list[Any] = [None] * len(rows)
    for part, result in zip(parts, results, strict=True):
        for i, values in zip(part, result.nats, strict=True):
            nats[i] = values
    return Scores(nats, sum((result.loads for result in results[1:]), results[0].loads))


def _score_part(folder: Path, rows: Sequence[Sequence[int]], rounding: Any, device: str) -> Scores:
    if device == "cpu":
        torch.set_num_threads(1)
    scorer = Scorer(load_model(folder, device=device, rounding=rounding, progress=False))
    return Scores(scorer.score(rows), scorer.loads)


class Costs:
    """Nats of the windows of some texts, by text and start.

    Args:
        texts: Token ids of each text, the begin-of-sequence token first.
    """

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.texts = texts
        self._nats: dict[tuple[int, int], np.ndarray] = {}
        self.loads: np.ndarray | None = None

    def measure(
        self, plans: Iterable[tuple[Iterable[int], int]], folder: Path, **options: Any
    ) -> None:
        """Scores the windows of (numbers of texts, stride) plans; a window that two share is scored once."""
        wanted = sorted(
            {
                (number, window.start, window.end)
                for numbers, stride in plans
                for number in numbers
                for window in windows(len(self.texts[number]) - 1, stride=stride)
            }
        )
        rows = [self.texts[number][start : end + 1] for number, start, end in wanted]
        scores = score_rows(folder, rows, **options)
        self.loads = scores.loads
        for (number, start, _), nats in zip(wanted, scores.nats, strict=True):
            self._nats[number, start] = nats

    def nats(self, number: int, stride: int = WINDOW) -> np.ndarray:
        """Nats of every target of a text, shape [targets]."""
        return np.concatenate(
            [
                self._nats[number, window.start][window.first - window.start :]
                for window in windows(len(self.texts[number]) - 1, stride=stride)
            ]
        )
