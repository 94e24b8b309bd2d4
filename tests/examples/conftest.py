"""A tiny data folder and one tiny run of the training command."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from tiny_training import (
    TINY_RUN,
    VOCAB,
    options,
    predictable_text,
    random_trunk,
    shrink_constants,
    tiny_config,
    training_command,
)

from deepinfer.models.deepseek_v41 import DeepseekV41Config


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def config() -> DeepseekV41Config:
    return tiny_config()


@pytest.fixture
def trunk() -> object:
    return random_trunk()


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the `data` command writes, for the tiny configuration."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "config.json").write_text(json.dumps(tiny_config().to_dict()))
    (folder / "tokenizer.json").write_text("{}")
    np.save(folder / "token_map.npy", np.arange(VOCAB, dtype=np.int32))
    names = ("code", "docs", "tasks", "held_out_code", "held_out_docs")
    streams = {name: predictable_text(3000, seed) for seed, name in enumerate(names)}
    np.savez(folder / "streams.npz", bytes=np.full(VOCAB, 3.0, dtype=np.float32), **streams)
    return folder


@pytest.fixture(scope="session")
def trained(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a tiny run of the whole command."""
    out = tmp_path_factory.mktemp("run")
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        shrink_constants(patch)
        training_command.train(
            options("train", "--data", data_folder, "--out", out, "--steps", "20", "--draft-steps", "10", *TINY_RUN)
        )  # fmt: skip
    signal.signal(signal.SIGTERM, handler)
    return out
