from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deepinfer import Engine
from deepinfer.testing import ToyConfig, ToyModel, ToyTokenizer

sys.path.insert(0, str(Path(__file__).parent))  # the tests share helpers

SMALL = {"max_num_seqs": 3, "prefill_chunk_tokens": 7, "max_num_batched_tokens": 16}


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    """Makes engines around a toy model; at the end of the test their books must add up."""
    made: list[Engine] = []

    def make(model: ToyModel | None = None, **parts: Any) -> Engine:
        parts.setdefault("tokenizer", ToyTokenizer())
        parts["config"] = {**SMALL, **parts.get("config", {})}
        if "runner" not in parts:
            parts["model"] = model if model is not None else ToyModel()
        engine = Engine(**parts)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.check()
        engine.close()


@pytest.fixture
def drafting_model() -> ToyModel:
    return ToyModel(ToyConfig(dspark_block_size=5))
