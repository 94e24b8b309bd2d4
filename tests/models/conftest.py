"""A tiny DeepSeek-V4.1 with every kind of weight, and checkpoints of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepinfer.models import save_pretrained
from deepinfer.models.deepseek_v41.config import DeepseekV41Config, VisionConfig
from deepinfer.models.deepseek_v41.weights import logical_weights

DATA = Path(__file__).resolve().parents[1] / "data"


@pytest.fixture(scope="session")
def golden_v41() -> Path:
    """The golden checkpoint: fp32, one file."""
    return DATA / "oracle_v41"


@pytest.fixture(scope="session")
def flash_config() -> DeepseekV41Config:
    """The configuration of DeepSeek-V4.1-Flash at full size."""
    return DeepseekV41Config.from_pretrained(DATA / "deepseek_v41_flash")


@pytest.fixture(scope="session")
def tiny_config() -> DeepseekV41Config:
    """Pools of both ratios, Engram, draft and vision."""
    return DeepseekV41Config(
        vocab_size=96, hidden_size=64, num_hidden_layers=5, moe_intermediate_size=32,
        num_attention_heads=4, head_dim=32, qk_rope_head_dim=8, q_lora_rank=32, o_lora_rank=16, o_groups=2,
        n_routed_experts=4, num_experts_per_tok=2, sliding_window=8, compress_ratios=(0, 2, 2, 1, 1, 0),
        kv_source_layer_ids=(1, 3), index_source_layer_ids=(1, 3, 4), candidate_source_layer_id=3,
        index_n_heads=2, index_head_dim=32, index_topk=8, candidate_topk_blocks=4, candidate_block_size=4,
        rope_scaling={"rope_type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1,
                      "original_max_position_embeddings": 64},
        max_position_embeddings=512, engram_layer_ids=(0,), engram_num_embeddings=(462,), engram_vocab_size=64,
        engram_n_heads=2, engram_head_dim=32, engram_compressed_vocab_size=96, num_nextn_predict_layers=1,
        dspark_target_layer_ids=(2, 4), dspark_markov_rank=8, dspark_n_routed_experts=2,
        dspark_num_experts_per_tok=1, image_token_id=95,
        vision=VisionConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=40,
                            patch_size=4, max_image_tokens=20, min_pixels=64),
    )  # fmt: skip


def random_weights(config: DeepseekV41Config, seed: int = 0) -> dict[str, Tensor]:
    """Logical fp32 weights by published name."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, weight in logical_weights(config).items():
        scale = weight.shape[-1] ** -0.5 if len(weight.shape) > 1 else 1.0
        weights[name] = torch.randn(weight.shape, generator=generator) * scale
    return weights


@pytest.fixture(scope="session")
def tiny_weights(tiny_config: DeepseekV41Config) -> dict[str, Tensor]:
    """Random weights of the tiny model; do not change them."""
    return random_weights(tiny_config)


@pytest.fixture
def save_tiny(
    tiny_config: DeepseekV41Config, tiny_weights: dict[str, Tensor], tmp_path: Path
) -> Callable[..., Path]:
    """Writes the tiny model and gives its folder; options are those of `save_pretrained`."""

    def save(name: str = "tiny", **options: object) -> Path:
        folder = tmp_path / name
        options = {"max_shard_bytes": 100_000, **options}
        save_pretrained(tiny_weights, folder, config=tiny_config, **options)  # type: ignore[arg-type]
        return folder

    return save
