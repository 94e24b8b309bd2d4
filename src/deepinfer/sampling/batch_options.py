"""Options of the rows of a batch, gathered once for as long as the same requests are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.core.params import SamplingParams
from deepinfer.core.protocols import SampleRows
from deepinfer.core.types import Request
from deepinfer.sampling.rng import SeedWords

__all__ = ["BatchOptions", "DrawGroup"]

_CHUNK_ELEMENTS = {"cpu": 1 << 17}  # what stays in a core's cache
_CHUNK_ELEMENTS_GPU = 1 << 26


@dataclass(frozen=True, slots=True)
class DrawGroup:
    """Rows that are drawn together.

    Attributes:
        places: The rows, shape [rows], int64; None for all rows of the batch.
        is_filtered: Whether any of them has top-k, top-p or min-p.
        temperature: Shape [rows], float64.
        top_k: Shape [rows], int64.
        top_p: Shape [rows], float64.
        min_p: Shape [rows], float64.
        seeds: Their seeds.
        widest: The largest number of tokens that the top-k of a row keeps.
    """

    places: Tensor | None
    is_filtered: bool
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: SeedWords
    widest: int

    def of(self, values: Tensor) -> Tensor:
        """The entries of these rows, shape [rows, ...].

        Args:
            values: Shape [rows of the batch, ...].
        """
        return values if self.places is None else values[self.places]

    def put(self, values: Tensor, mine: Tensor) -> None:
        """Writes the entries of these rows.

        Args:
            values: Shape [rows of the batch].
            mine: Shape [rows].
        """
        if self.places is None:
            values.copy_(mine)
        else:
            values[self.places] = mine


class BatchOptions:
    """What a sampler does with each row of a batch.

    Args:
        rows: The rows.
        vocab: Columns of the logits.
        device: Where the logits are.

    Attributes:
        rids: Request id of each row.
        with_history: Rows with penalties or a bias.
        with_logprobs: Rows that ask for log probabilities.
        groups: Rows that are drawn; the others are greedy.
    """

    def __init__(self, rows: SampleRows, vocab: int, device: torch.device) -> None:
        requests = rows.requests
        self._requests, self._seeds = requests, rows.seeds
        self._vocab, self._device = vocab, device
        params = [request.params for request in requests]
        self.rids = tuple([request.rid for request in requests])
        self.with_history = tuple(
            [i for i, p in enumerate(params) if p.has_penalties or p.logit_bias]
        )
        self.with_logprobs = tuple([i for i, p in enumerate(params) if p.logprobs is not None])
        drawn = [index for index, p in enumerate(params) if not p.is_greedy]
        # A few rows at a time: it bounds the memory and stays in the cache of a CPU.
        chunk = max(1, _CHUNK_ELEMENTS.get(device.type, _CHUNK_ELEMENTS_GPU) // vocab)
        dense, narrow, wide = _by_filter(params, drawn, vocab)
        self.groups = tuple(
            [
                self._group(
                    rows, params, part[start : start + chunk], is_filtered=part is not dense
                )
                for part in (dense, narrow, wide)
                for start in range(0, len(part), chunk)
            ]
        )

    def fits(self, rows: SampleRows, vocab: int, device: torch.device) -> bool:
        """Whether these are the options of some rows.

        Args:
            rows: The rows.
            vocab: Columns of the logits.
            device: Where the logits are.
        """
        return (
            rows.requests is self._requests
            and rows.seeds is self._seeds
            and type(rows.requests) is tuple
            and type(rows.seeds) is tuple  # a list may have been changed
            and vocab == self._vocab
            and device == self._device
        )

    @property
    def requests(self) -> Sequence[Request]:
        """Request of each row."""
        return self._requests

    def _group(
        self,
        rows: SampleRows,
        params: Sequence[SamplingParams],
        part: Sequence[int],
        *,
        is_filtered: bool,
    ) -> DrawGroup:
        def column(name: str) -> list[float]:
            return [float(getattr(params[index], name)) for index in part]

        names = ("temperature", "top_k", "top_p", "min_p")
        options = torch.tensor([column(name) for name in names], dtype=torch.float64)
        options = options.to(self._device, non_blocking=True)
        places = None
        if len(part) < len(params):
            places = torch.tensor(part, dtype=torch.int64).to(self._device, non_blocking=True)
        return DrawGroup(
            places=places,
            is_filtered=is_filtered,
            temperature=options[0],
            top_k=options[1].to(torch.int64),
            top_p=options[2],
            min_p=options[3],
            seeds=SeedWords.of([rows.seeds[index] for index in part], self._device),
            widest=max(_width(params[index], self._vocab) for index in part),
        )


def _by_filter(
    params: Sequence[SamplingParams], indices: Sequence[int], vocab: int
) -> tuple[list[int], list[int], list[int]]:
    """Rows without filters, rows with top-k, rows with other filters only."""
    dense: list[int] = []
    narrow: list[int] = []
    wide: list[int] = []
    for index in indices:
        p = params[index]
        if 0 < p.top_k < vocab:
            narrow.append(index)
        elif p.top_p < 1.0 or p.min_p > 0.0:
            wide.append(index)
        else:
            dense.append(index)
    return dense, narrow, wide


def _width(params: SamplingParams, vocab: int) -> int:
    return params.top_k if 0 < params.top_k < vocab else vocab
