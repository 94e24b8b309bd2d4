"""A random checkpoint that fits in a second, and the benchmarks' modules on the path."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from deepinfer.models import save_pretrained
from deepinfer.models.deepseek_v41 import DeepseekV41Config
from deepinfer.models.deepseek_v41.weights import logical_weights

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))

from tiny_tokenizer import tokenizer_json


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights and every mechanism but vision, in the published layout, with a tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    vocab = len(json.loads(tokenizer_json())["model"]["vocab"])
    config = DeepseekV41Config(
        vocab_size=vocab, hidden_size=64, num_hidden_layers=4, moe_intermediate_size=32,
        num_attention_heads=2, head_dim=64, qk_rope_head_dim=32, q_lora_rank=32, o_lora_rank=32,
        o_groups=1, n_routed_experts=4, num_experts_per_tok=2, sliding_window=16,
        compress_ratios=(0, 2, 1, 1, 0), kv_source_layer_ids=(1, 2), index_source_layer_ids=(1, 2, 3),
        candidate_source_layer_id=2, index_n_heads=2, index_head_dim=32, index_topk=16,
        candidate_topk_blocks=8, candidate_block_size=4, max_position_embeddings=4096,
        rope_scaling={"rope_type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1,
                      "original_max_position_embeddings": 512},
        engram_layer_ids=(0,), engram_num_embeddings=(462,), engram_vocab_size=64, engram_n_heads=2,
        engram_head_dim=32, engram_compressed_vocab_size=vocab, num_nextn_predict_layers=1,
        dspark_block_size=5, dspark_noise_token_id=3, dspark_target_layer_ids=(2, 3),
        dspark_markov_rank=16, dspark_n_routed_experts=2, dspark_num_experts_per_tok=1,
        bos_token_id=0, eos_token_id=1, pad_token_id=2, image_token_id=4,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, weight in logical_weights(config).items():
        scale = weight.shape[-1] ** -0.5 if len(weight.shape) > 1 else 1.0
        weights[name] = torch.randn(weight.shape, generator=generator) * scale
    save_pretrained(weights, folder, config=config)
    (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    (folder / "engram_token_map.json").write_text(json.dumps(list(range(vocab))))
    return folder
