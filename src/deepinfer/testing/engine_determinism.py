"""Checks that what an engine gives for a request depends on the request alone: not on its batch, chunks or history."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.core.params import SamplingParams
from deepinfer.engine import Engine
from deepinfer.testing.determinism import UniqueResults

__all__ = ["EngineSituation", "engine_situations", "engine_stream", "unique_engine_streams"]

_PARAMS = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=0)


@dataclass(frozen=True, slots=True)
class EngineSituation:
    """One way to run a request through an engine.

    Attributes:
        neighbours: Requests beside it: random prompts of changing lengths, half of them sampled at a temperature.
        chunk: Prompt tokens that a request runs in one step at most.
        async_depth: Steps planned ahead of the results, 0 or 1.
        is_warm: Whether the prompt ran before, so that its blocks are a prefix hit.
        preemptions: How often it is preempted while it generates.
    """

    neighbours: int = 0
    chunk: int = 512
    async_depth: int = 0
    is_warm: bool = False
    preemptions: int = 0


def engine_situations(most: int = 64) -> Iterator[EngineSituation]:
    """Batches of 1 to `most` requests at both depths, then chunk sizes, prefix hits, preemptions, and all at once."""
    sizes = (n for n in (1, 2, 3, 8, 17, 32, 64) if n <= most)
    for size, depth in itertools.product(sizes, (0, 1)):
        yield EngineSituation(size - 1, 512, depth)
    few = min(5, most - 1)
    for chunk in (33, 64, 100):
        yield EngineSituation(few, chunk, chunk % 2)
    for depth in (0, 1):
        yield EngineSituation(few, 64, depth, is_warm=True)
        yield EngineSituation(few, 512, depth, preemptions=3)
    yield EngineSituation(most - 1, 48, 1, is_warm=True, preemptions=2)


def engine_stream(
    model: Any,
    prompt: Sequence[int],
    case: EngineSituation,
    params: SamplingParams = _PARAMS,
    **options: Any,
) -> tuple[tuple[int, str], ...]:
    """Runs a prompt through an engine of its own in one situation.

    Args:
        model: The model.
        prompt: Token ids.
        case: How it is run.
        params: Of the request; logprobs are needed.
        options: More options of the engine, such as `deterministic=True`.

    Returns:
        Each token id with the bits of its log probability as a hexadecimal float.
    """
    generator = torch.Generator().manual_seed(11 + case.neighbours)
    config = {
        "max_num_seqs": case.neighbours + 1, "prefill_chunk_tokens": case.chunk, "block_size": 32,
        "async_depth": case.async_depth, "max_model_len": len(prompt) + params.max_tokens + 64,
        "prefix_cache": case.is_warm, **options,
    }  # fmt: skip
    found: list[tuple[int, str]] = []
    preempted = 0
    with Engine(model=model, config=config) as engine:
        if case.is_warm:
            engine.generate(list(prompt), params)
        for i in range(case.neighbours):
            length = int(torch.randint(4, len(prompt) + 1, (), generator=generator))
            ids = torch.randint(5, 500, (length,), generator=generator).tolist()
            hot = {"temperature": 0.8, "seed": i} if i % 2 else {"temperature": 0}
            count = params.max_tokens // 2 + i % max(1, params.max_tokens)
            other = SamplingParams(max_tokens=count, ignore_eos=True, **hot)
            engine.add_request(ids, other, rid=f"n{i}")
            if i == case.neighbours // 2:
                engine.add_request(list(prompt), params, rid="mine")
        if not case.neighbours:
            engine.add_request(list(prompt), params, rid="mine")
        while engine.has_unfinished and len(found) < params.max_tokens:
            for delta in engine.step():
                if delta.rid == "mine" and delta.logprobs is not None:
                    found += [(entry.token_id, entry.logprob.hex()) for entry in delta.logprobs]
            due = (preempted + 1) * params.max_tokens // (case.preemptions + 1)
            if preempted < case.preemptions and due <= len(found) < params.max_tokens:
                engine.preempt("mine")
                preempted += 1
        engine.check()
    return tuple(found)


def unique_engine_streams(
    model: Any,
    prompt: Sequence[int],
    cases: Iterable[EngineSituation] | None = None,
    params: SamplingParams = _PARAMS,
    options: Mapping[str, Any] | None = None,
) -> UniqueResults:
    """Counts the distinct streams of tokens and log probabilities that engines give for one request.

    Args:
        model: The model.
        prompt: Token ids.
        cases: The situations; None takes `engine_situations()`.
        params: Of the request.
        options: More options of every engine; without `deterministic` the count is the control.

    Returns:
        The distinct streams; labels are the situations.
    """
    groups: dict[tuple[tuple[int, str], ...], list[EngineSituation]] = {}
    for case in engine_situations() if cases is None else cases:
        stream = engine_stream(model, prompt, case, params, **(options or {}))
        groups.setdefault(stream, []).append(case)
    return UniqueResults(tuple(map(tuple, sorted(groups.values(), key=len, reverse=True))))
