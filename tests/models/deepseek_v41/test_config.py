"""Reading, checking and writing configurations; skeletons without memory."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from deepinfer.core.errors import CheckpointMissing, ConfigError
from deepinfer.models.deepseek_v41 import DeepseekV41, DeepseekV41Config, VisionConfig


@pytest.fixture(scope="module")
def published_file(repo_root) -> dict:
    return json.loads((repo_root / "tests/data/deepseek_v41_flash/config.json").read_text())


def test_published_file(published_file) -> None:
    config = DeepseekV41Config.from_dict(published_file)
    assert (config.hidden_size, config.vocab_size, config.image_token_id) == (5120, 129280, 129264)
    assert config.compress_ratios == (0, 0, *[2] * 18, *[1] * 20, 0, 0, 0)
    assert config.dtype == "bfloat16"
    assert config.vision.num_hidden_layers == 32
    assert [config.kv_source(i) for i in (0, 2, 7, 8, 19, 20, 39)] == [None, 2, 2, 8, 14, 20, 20]
    assert [config.index_source(i) for i in (1, 2, 13, 23, 24, 39)] == [None, 2, 8, 20, 24, 36]
    assert config.engram_width == 6144


@pytest.mark.parametrize("source", ["published", "golden"])
def test_round_trip(source, published_file, golden_folder) -> None:
    if source == "published":
        config = DeepseekV41Config.from_dict(published_file)
    else:
        config = DeepseekV41Config.from_pretrained(golden_folder)
        assert config.vision is None
    written = json.loads(json.dumps(config.to_dict()))
    assert DeepseekV41Config.from_dict(written) == config
    text = set(published_file["text_config"])
    if source == "published":
        assert text <= set(written["text_config"])
        assert set(published_file) <= set(written)


def test_skeleton_of_the_published_size_takes_no_memory(published_file) -> None:
    model = DeepseekV41(DeepseekV41Config.from_dict(published_file), device="meta")
    assert all(p.is_meta for p in model.parameters())
    assert not list(model.buffers())
    count = sum(p.numel() for p in model.parameters())
    assert count == pytest.approx(763.2e9 - 0.5e9, rel=5e-4)


def test_parameters_need_no_gradient_until_asked(small_config) -> None:
    model = DeepseekV41(small_config(), rounding="none")
    assert not any(p.requires_grad for p in model.parameters())


def test_logits_can_be_differentiated(random_model, small_config) -> None:
    model = random_model(small_config()).requires_grad_(True)
    model.logits([3, 4, 5, 6, 7, 8] * 8).logsumexp(-1).sum().backward()
    missing = {n for n, p in model.named_parameters() if p.grad is None}
    # The selection has no gradient, and neither draft nor image bias takes part.
    assert all(
        ("indexer" in n) or n.startswith("mtp.") or n.endswith("bias_vl") or n.endswith("gate.bias")
        for n in missing
    )
    assert model.layers[3].attn.wq_a.weight.grad.abs().sum() > 0


def test_missing_key_names_the_nearest(published_file) -> None:
    data = json.loads(json.dumps(published_file))
    data["text_config"]["num_experts_per_token"] = data["text_config"].pop("num_experts_per_tok")
    with pytest.raises(ConfigError, match=r"num_experts_per_tok is missing.*num_experts_per_token"):
        DeepseekV41Config.from_dict(data)
    data["text_config"].pop("num_experts_per_token")
    with pytest.raises(ConfigError, match="num_experts_per_tok is missing; add it"):
        DeepseekV41Config.from_dict(data)


def test_unread_keys_are_kept(published_file) -> None:
    data = json.loads(json.dumps(published_file))
    data["text_config"]["attention_dropout"] = 0.0
    config = DeepseekV41Config.from_dict(data)
    assert config.extra["attention_dropout"] == 0.0
    assert config.to_dict()["text_config"]["attention_dropout"] == 0.0


def test_another_model(published_file) -> None:
    with pytest.raises(ConfigError, match="model_type is 'llama'"):
        DeepseekV41Config.from_dict({**published_file, "model_type": "llama"})


def test_missing_and_broken_files(tmp_path) -> None:
    with pytest.raises(CheckpointMissing, match=r"config\.json does not exist"):
        DeepseekV41Config.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        DeepseekV41Config.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size is 0; it must be a positive integer"),
        ({"num_hidden_layers": 7}, r"compress_ratios.*of 7 \+ 1 entries"),
        ({"compress_ratios": [0, 2, 2, 4, 1, 1, 1, 1, 0]}, "made of 0, 1 and 2"),
        ({"compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1, 1]}, "0 for every draft stage"),
        (
            {"compress_ratios": [2, 2, 2, 2, 1, 1, 1, 1, 0]},
            "sources of pool and selection for layer 0",
        ),
        ({"compress_ratios": [0, 2, 2, 2, 2, 1, 1, 1, 0]}, "equal at layer 5 and its KV source 4"),
        ({"kv_source_layer_ids": [2, 1, 4]}, "rising layer ids"),
        ({"index_source_layer_ids": [1, 2, 6]}, "index_source_layer_ids"),
        ({"candidate_source_layer_id": 5}, "an index source"),
        ({"candidate_source_layer_id": 2}, "the last KV source 4 or above"),
        ({"qk_rope_head_dim": 7}, "even"),
        ({"o_groups": 3}, "divisor of num_attention_heads"),
        ({"num_experts_per_tok": 9}, "at most n_routed_experts"),
        ({"engram_num_embeddings": [5190]}, "one a layer with Engram"),
        ({"engram_compressed_vocab_size": 161}, "within vocab_size"),
        ({"dspark_target_layer_ids": []}, "not empty when there is a draft"),
        ({"dspark_num_experts_per_tok": 5}, "at most dspark_n_routed_experts"),
    ],
)
def test_fields_that_do_not_fit(changes, message, small_config) -> None:
    with pytest.raises(ConfigError, match=message):
        small_config(**changes)


def test_without_draft_engram_and_candidates(small_config, random_model) -> None:
    config = small_config(
        num_nextn_predict_layers=0,
        compress_ratios=[0, 2, 2, 2, 1, 1, 1, 1],
        engram_layer_ids=[],
        engram_num_embeddings=[],
        candidate_source_layer_id=None,
    )
    model = random_model(config)
    assert model.draft is None
    assert model.engram_hash is None
    assert torch.isfinite(model.logits(list(range(40)))).all()


def test_older_vision_key() -> None:
    data = {
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    config = VisionConfig.from_dict({**data, "max_num_tokens": 77})
    assert config.max_image_tokens == 77
    assert dataclasses.replace(config, patch_size=7).patch_size == 7
