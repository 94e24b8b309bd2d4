"""A tiny model, text and command line for the tests of the training example."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer.models.deepseek_v41 import DeepseekV41Config

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from nano import draft_training, trunk_training
from nano import training as training_command
from nano.engram import NgramRows
from nano.trunk import Trunk
from train_nano import build_parser

VOCAB = 128


def tiny_config() -> DeepseekV41Config:
    """Pools of both ratios, every kind of source, Engram and a draft; every size divides 32."""
    return DeepseekV41Config(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=4, moe_intermediate_size=32,
        num_attention_heads=2, head_dim=32, qk_rope_head_dim=16, q_lora_rank=32, o_lora_rank=32, o_groups=1,
        n_routed_experts=4, num_experts_per_tok=2, sliding_window=16, compress_ratios=(0, 2, 1, 1, 0),
        kv_source_layer_ids=(1, 2), index_source_layer_ids=(1, 2, 3), candidate_source_layer_id=2,
        index_n_heads=2, index_head_dim=32, index_topk=12, candidate_topk_blocks=6, candidate_block_size=4,
        hc_sinkhorn_iters=6, max_position_embeddings=512,
        rope_scaling={"rope_type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1,
                      "original_max_position_embeddings": 64},
        engram_layer_ids=(0,), engram_num_embeddings=(462,), engram_vocab_size=64, engram_n_heads=2,
        engram_head_dim=32, engram_compressed_vocab_size=VOCAB, num_nextn_predict_layers=1,
        dspark_block_size=3, dspark_noise_token_id=3, dspark_target_layer_ids=(2, 3), dspark_markov_rank=32,
        dspark_n_routed_experts=2, dspark_num_experts_per_tok=1,
    )  # fmt: skip


def random_trunk(context: int = 128) -> Trunk:
    """A trunk in which every weight matters; fresh ones have zero output projections."""
    torch.manual_seed(3)
    c = tiny_config()
    trunk = Trunk(c, NgramRows(c, range(VOCAB)), context)
    with torch.no_grad():
        for name, parameter in trunk.named_parameters():
            if name.endswith(("wo_b", "w2")):
                parameter.normal_(std=0.1)
    return trunk


def predictable_text(length: int, seed: int) -> np.ndarray:
    """Tokens of which each has two equally likely successors."""
    random = np.random.default_rng(0)
    successors = random.integers(12, VOCAB, size=(VOCAB, 2))
    choices = np.random.default_rng(seed).integers(0, 2, size=length)
    tokens = [20]
    for choice in choices[1:]:
        tokens.append(successors[tokens[-1]][choice])
    return np.array(tokens, dtype=np.uint16)


def options(*arguments: str | Path) -> Namespace:
    """The command line, parsed."""
    return build_parser().parse_args([str(a) for a in arguments])


def shrink_constants(patch: pytest.MonkeyPatch) -> None:
    """Sizes of the command that are constants, for a run of seconds."""
    patch.setattr(training_command, "OWN_PROMPT", 32)
    patch.setattr(training_command, "OWN_TOKENS", 32)
    patch.setattr(training_command, "JUDGED", 5)
    patch.setattr(draft_training, "FIRST_FILLS", 2)
    patch.setattr(draft_training, "TEXT_ROWS", 8)
    patch.setattr(draft_training, "STEPS_PER_FILL", 2)
    patch.setattr(draft_training, "SEGMENT", 64)
    patch.setattr(trunk_training, "CHECK_EVERY", 5)


TINY_RUN = ("--batch", "2", "--context", "128", "--own-rows", "12", "--log-every", "5", "--save-every", "8")  # fmt: skip


def text_rows(rows: int, length: int) -> Tensor:
    """Rows of predictable text, int64."""
    stream = torch.from_numpy(predictable_text(rows * length, 9).astype(np.int64))
    return stream.view(rows, length)
