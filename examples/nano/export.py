"""Between the twin's parameters and checkpoints with the published names."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deepinfer.models import save_pretrained
from deepinfer.models.deepseek_v41 import DeepseekV41Config

from .draft import TrainDraft
from .layer import TrainLayer
from .storage import load_state, replace_folder
from .trunk import Trunk

MAX_SHARD_BYTES = 11_900_000

PUBLISHED = {
    "wq_a": "attn.wq_a.weight",
    "q_norm": "attn.q_norm.weight",
    "wq_b": "attn.wq_b.weight",
    "wkv": "attn.wkv.weight",
    "kv_norm": "attn.kv_norm.weight",
    "wo_a": "attn.wo_a.weight",
    "wo_b": "attn.wo_b.weight",
    "attn_sink": "attn.attn_sink",
    "attn_norm": "attn_norm.weight",
    "ffn_norm": "ffn_norm.weight",
    "compressor_wkv": "attn.compressor.wkv.weight",
    "compressor_wgate": "attn.compressor.wgate.weight",
    "compressor_norm": "attn.compressor.norm.weight",
    "indexer_wk": "attn.indexer.wk.weight",
    "indexer_k_norm": "attn.indexer.k_norm.weight",
    "indexer_wq_b": "attn.indexer.wq_b.weight",
    "indexer_weights_proj": "attn.indexer.weights_proj.weight",
    "engram_embed": "engram.embed.weight",
    "engram_wkv": "engram.wkv.weight",
    "engram_q_weight": "engram.q_weight",
    "engram_k_weight": "engram.k_weight",
    "gate": "ffn.gate.weight",
    "hc_attn_fn": "hc_attn_fn",
    "hc_attn_base": "hc_attn_base",
    "hc_attn_scale": "hc_attn_scale",
    "hc_ffn_fn": "hc_ffn_fn",
    "hc_ffn_base": "hc_ffn_base",
    "hc_ffn_scale": "hc_ffn_scale",
}
"""Parameter name in the twin -> name below the layer in the checkpoint."""


def layer_tensors(layer: TrainLayer) -> Iterator[tuple[str, Tensor]]:
    """(name below the layer, tensor) of one layer; experts one by one, the last is the shared one."""
    for name, tensor in layer.named_parameters():
        if name in PUBLISHED:
            yield PUBLISHED[name], tensor
    for name in ("w1", "w2", "w3"):
        *routed, shared = getattr(layer, name).unbind(0)
        for number, expert in enumerate(routed):
            yield f"ffn.experts.{number}.{name}.weight", expert
        yield f"ffn.shared_experts.{name}.weight", shared
    yield "ffn.gate.bias", layer.gate_bias
    yield "ffn.gate.bias_vl", layer.gate_bias


def trunk_tensors(trunk: Trunk) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the backbone."""
    yield "embed.weight", trunk.embed
    yield "head.weight", trunk.head
    yield "norm.weight", trunk.norm
    for layer in trunk.layers:
        yield from ((f"layers.{layer.index}.{name}", t) for name, t in layer_tensors(layer))


def draft_tensors(draft: TrainDraft) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the draft; the heads belong to its last stage."""
    last = f"mtp.{len(draft.stages) - 1}"
    for number, stage in enumerate(draft.stages):
        yield from ((f"mtp.{number}.{name}", t) for name, t in layer_tensors(stage))
    yield "mtp.0.main_proj.weight", draft.main_proj
    yield "mtp.0.main_norm.weight", draft.main_norm
    yield f"{last}.norm.weight", draft.norm
    yield f"{last}.markov_head.embed.weight", draft.markov_embed
    yield f"{last}.markov_head.head.weight", draft.markov_head
    yield f"{last}.confidence_head.proj.weight", draft.confidence


def checkpoint_tensors(trunk: Trunk, draft: TrainDraft) -> dict[str, Tensor]:
    """All tensors by published name, fp32 on the CPU."""
    pairs = [*trunk_tensors(trunk), *draft_tensors(draft)]
    return {name: tensor.detach().float().cpu().contiguous() for name, tensor in pairs}


def assign_tensors(trunk: Trunk, draft: TrainDraft, tensors: Mapping[str, Tensor]) -> None:
    """The way back: copies unpacked tensors by published name into the twin.

    Raises:
        KeyError: A tensor of the twin is missing.
    """
    with torch.no_grad():
        for name, parameter in [*trunk_tensors(trunk), *draft_tensors(draft)]:
            parameter.copy_(tensors[name])


def write_checkpoint(trunk: Trunk, draft: TrainDraft, data: Path, out: Path) -> None:
    """Writes the published, quantised layout beside configuration, tokenizer and token map.

    Args:
        trunk: The trained trunk.
        draft: Its draft.
        data: The data folder.
        out: Where the checkpoint is written; an older one is replaced when the new one is complete.
    """

    def fill(folder: Path) -> None:
        save_pretrained(
            checkpoint_tensors(trunk, draft),
            folder,
            config=DeepseekV41Config.from_pretrained(data),
            max_shard_bytes=MAX_SHARD_BYTES,
        )
        shutil.copyfile(data / "tokenizer.json", folder / "tokenizer.json")
        token_map = json.dumps(np.load(data / "token_map.npy").tolist(), separators=(",", ":"))
        (folder / "engram_token_map.json").write_text(token_map + "\n")

    replace_folder(out, fill)


def export_folder(options: Namespace) -> None:
    """The `export` command: a checkpoint from the saved states of a run; without a draft, an untrained one."""
    trunk = Trunk(DeepseekV41Config.from_pretrained(options.data), None, context=0)
    trunk.load_state_dict(load_state(options.train_out, "trunk")[0])
    draft = TrainDraft(trunk)
    if not options.untrained_draft:
        draft.load_state_dict(load_state(options.train_out, "draft")[0])
    write_checkpoint(trunk, draft, options.data, options.out)
