"""Checks that results do not depend on the batch: for one operation, for a model over its cache, for a whole engine.

Each check counts distinct results, bit for bit; 1 is what determinism means. Run it on something that is known to
depend on the batch too, so that a count of 1 says something: torch's own products are such a thing on most devices.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer.core.errors import InvalidRequest
from deepinfer.models.deepseek_v41 import DeepseekV41, ForwardBatch

__all__ = [
    "ROW_COUNTS",
    "Situation",
    "UniqueResults",
    "digest",
    "model_logits",
    "situations",
    "unique_model_rows",
    "unique_rows",
    "unique_streams",
]

ROW_COUNTS = (1, 2, 3, 7, 8, 9, 16, 17, 63, 64, 65, 255, 256, 257, 512)
"""Numbers of rows around the sizes where libraries are known to change their ways."""


@dataclass(frozen=True, slots=True)
class UniqueResults:
    """Distinct results and where each was seen.

    Attributes:
        groups: Labels of the situations that gave the same result, one tuple a distinct result, largest first.
        largest_difference: Largest absolute difference to the first result, where results are tensors.
    """

    groups: tuple[tuple[Hashable, ...], ...]
    largest_difference: float = 0.0

    @property
    def count(self) -> int:
        """Distinct results; 1 is deterministic."""
        return len(self.groups)

    def __str__(self) -> str:
        total = sum(map(len, self.groups))
        return f"{self.count} distinct of {total}, largest difference {self.largest_difference:.3g}"


def digest(*tensors: Tensor) -> str:
    """SHA-256 of the bytes of tensors, with their shapes and dtypes: equal in two processes for equal bits."""
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(f"{tuple(tensor.shape)} {tensor.dtype};".encode())
        flat = tensor.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format)
        state.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return state.hexdigest()


def unique_rows(
    fn: Callable[[Tensor], Tensor], x: Tensor, sizes: Iterable[int] = ROW_COUNTS, *, places: int = 3
) -> UniqueResults:
    """Counts the results that a function of rows gives for one and the same row.

    Row 0 of `x` is put at several places of batches of several sizes, among other rows of `x` in a changing order,
    among copies of itself, and among rows of zeros.

    Args:
        fn: Takes rows, shape [m, ...], and gives one result row a row, shape [m, ...].
        x: Rows, shape [rows, ...]; the largest size is the most rows of `x` that a batch uses.
        sizes: Numbers of rows to try; those above the rows of `x` are left out.
        places: Places that are tried for each size: first, last, and others between them.

    Returns:
        The distinct results; labels are (size, place, neighbours).
    """
    row = x[:1]
    found = _Collector()
    for size in (s for s in sizes if s <= len(x)):
        at = sorted({round(i * (size - 1) / max(places - 1, 1)) for i in range(places)})
        for place, neighbours in itertools.product(at, ("others", "copies", "zeros")):
            batch = {
                "others": lambda n, p: x.roll(p, 0)[:n].clone(),
                "copies": lambda n, p: row.expand(n, *row.shape[1:]).clone(),
                "zeros": lambda n, p: torch.zeros_like(x[:n]),
            }[neighbours](size, place)
            batch[place] = row[0]
            found.add((size, place, neighbours), fn(batch)[place])
    return found.results()


@dataclass(frozen=True, slots=True)
class Situation:
    """One way to run a sequence through a model and its cache.

    Attributes:
        chunks: Tokens a step; the last one repeats. (1,) is decoding, larger ones are prefill or verification.
        neighbours: Requests beside it in every step.
        slot: Cache slot of the sequence.
        first: Whether its rows stand before those of its neighbours.
    """

    chunks: tuple[int, ...]
    neighbours: int = 0
    slot: int = 0
    first: bool = True


def situations(
    chunks: Sequence[tuple[int, ...]] = ((1,), (5,), (64,), (100, 1), (512,)),
    neighbours: Sequence[int] = (0, 1, 7, 15),
) -> Iterator[Situation]:
    """All pairs of chunkings and numbers of neighbours, with changing slots and places."""
    for i, (sizes, count) in enumerate(itertools.product(chunks, neighbours)):
        yield Situation(sizes, count, slot=i % (count + 1), first=i % 2 == 0)


@torch.inference_mode()
def model_logits(
    model: DeepseekV41, input_ids: Sequence[int], situation: Situation, *, seed: int = 0
) -> Tensor:
    """Logits of every token of a sequence, run through a new cache in one situation.

    Args:
        model: The model.
        input_ids: The sequence.
        situation: How it is run; neighbours are random sequences of the same vocabulary.
        seed: Seed of the neighbours.

    Returns:
        Shape [tokens, vocab], fp32.

    Raises:
        InvalidRequest: The situation's slot is not below its requests.
    """
    requests = situation.neighbours + 1
    if not 0 <= situation.slot < requests:
        raise InvalidRequest(
            f"slot is {situation.slot}; a situation with {situation.neighbours} neighbours has slots 0 to "
            f"{requests - 1}.",
            field="slot", value=situation.slot, limit=f"0 to {requests - 1}",
        )  # fmt: skip
    ids, device = list(input_ids), model.embed.weight.device
    room = min(2 * len(ids) + 2, model.config.max_position_embeddings)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(model.config.vocab_size, (requests, room), generator=generator)
    if model.config.image_token_id is not None:
        drawn[drawn == model.config.image_token_id] = 0
    pool = drawn.tolist()
    cache = model.new_cache(requests, room, max(max(situation.chunks), 4))
    rows, at, step = [], 0, 0
    sizes = situation.chunks
    while at < len(ids):
        part = ids[at : at + sizes[min(step, len(sizes) - 1)]]
        others = []
        for slot in (s for s in range(requests) if s != situation.slot):
            held, size = cache.lengths[slot], 1 + (slot + step) % 3
            if held + size <= room:
                others.append((slot, held, pool[slot][held : held + size]))
        mine = (situation.slot, at, part)
        segments = [mine, *others] if situation.first else [*others, mine]
        before = 0 if situation.first else sum(len(tokens) for *_, tokens in others)
        out = model(ForwardBatch.from_segments(segments, device=device), cache)
        rows.append(model.compute_logits(out.hidden[before : before + len(part)]))
        at, step = at + len(part), step + 1
    return torch.cat(rows)


def unique_model_rows(
    model: DeepseekV41, input_ids: Sequence[int], cases: Iterable[Situation] | None = None
) -> UniqueResults:
    """Counts the distinct logits that a model gives for a sequence over many situations.

    Args:
        model: The model, with `set_deterministic(True)` or, as the control, without.
        input_ids: The sequence.
        cases: The situations; None takes `situations()`.

    Returns:
        The distinct logits; labels are the situations.
    """
    found = _Collector()
    for case in situations() if cases is None else cases:
        found.add(case, model_logits(model, input_ids, case))
    return found.results()


def unique_streams(
    run: Callable[..., Iterable[tuple[int, float]]], cases: Mapping[str, Sequence[Any]]
) -> UniqueResults:
    """Counts the distinct streams of tokens and log probabilities over all combinations of some options.

    Args:
        run: Takes one value of each option by name, and gives the stream of one request: pairs of a token id and its
            log probability.
        cases: Values of each option.

    Returns:
        The distinct streams; labels are tuples of (option, value) pairs.
    """
    groups: dict[Hashable, list[Hashable]] = {}
    for values in itertools.product(*cases.values()):
        options = dict(zip(cases, values, strict=True))
        # Floats by their bits: 0.0 and -0.0 differ, and a NaN equals itself.
        stream = tuple((int(token), float(value).hex()) for token, value in run(**options))
        groups.setdefault(stream, []).append(tuple(options.items()))
    return UniqueResults(_by_size(groups.values()))


class _Collector:
    """Groups tensors by their bytes."""

    def __init__(self) -> None:
        self._groups: dict[str, list[Hashable]] = {}
        self._first: Tensor | None = None
        self._largest = 0.0

    def add(self, label: Hashable, result: Tensor) -> None:
        key = digest(result)
        if self._first is None:
            self._first = result.clone()
        elif key not in self._groups and result.numel():
            gap = (result.double() - self._first.double()).abs().max()
            self._largest = max(self._largest, float(gap))
        self._groups.setdefault(key, []).append(label)

    def results(self) -> UniqueResults:
        return UniqueResults(_by_size(self._groups.values()), self._largest)


def _by_size(groups: Iterable[list[Hashable]]) -> tuple[tuple[Hashable, ...], ...]:
    return tuple(map(tuple, sorted(groups, key=len, reverse=True)))
