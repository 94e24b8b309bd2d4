"""The published tensor list, at full size and without allocating it."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from deepinfer.models import ARCHITECTURES, check_checkpoint
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.weights import expected_tensors, logical_weights
from deepinfer.models.formats import TensorSpec, stored_tensors


@pytest.fixture(scope="module")
def flash_tensors(flash_config: DeepseekV41Config) -> dict[str, TensorSpec]:
    return expected_tensors(flash_config)


def gigabytes(tensors: dict[str, TensorSpec]) -> float:
    return sum(spec.size_bytes for spec in tensors.values()) / 1e9


def test_full_size_counts(flash_tensors: dict[str, TensorSpec]) -> None:
    tensors = flash_tensors
    assert len(tensors) == 96_085
    assert gigabytes(tensors) == pytest.approx(510.29, abs=0.01)

    engram = {n: s for n, s in tensors.items() if ".engram.embed." in n}
    draft = {n: s for n, s in tensors.items() if n.startswith("mtp.")}
    vision = {n: s for n, s in tensors.items() if n.startswith(("vision.", "aligner.", "image_"))}
    backbone = {
        n: s for n, s in tensors.items() if not (n in draft or n in vision or ".engram." in n)
    }
    assert gigabytes(engram) == pytest.approx(202.76, abs=0.01)
    assert gigabytes(draft) == pytest.approx(7.93, abs=0.01)
    assert gigabytes(vision) == pytest.approx(0.97, abs=0.01)
    assert gigabytes(backbone) == pytest.approx(298.3, abs=0.05)
    assert len(vision) == 266
    assert len(tensors) - len(vision) == 95_819


def test_full_size_parameters(flash_config: DeepseekV41Config) -> None:
    weights = logical_weights(flash_config)
    sizes = {name: math.prod(weight.shape) for name, weight in weights.items()}
    assert sum(sizes.values()) / 1e9 == pytest.approx(763.2, abs=0.05)
    tables = sum(n for name, n in sizes.items() if ".engram.embed." in name)
    assert tables / 1e9 == pytest.approx(196.6, abs=0.05)


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("embed.weight", "BF16 [129280, 5120]"),
        ("layers.0.attn.wkv.weight", "F8_E4M3 [512, 5120]"),
        ("layers.0.attn.wkv.scale", "F8_E8M0 [16, 160]"),
        ("layers.39.attn.wq_b.scale", "F8_E8M0 [1024, 40]"),
        ("layers.7.attn.wo_a.scale", "F8_E8M0 [256, 128]"),
        ("layers.7.attn.wo_b.scale", "F8_E8M0 [160, 256]"),
        ("layers.3.attn.attn_sink", "F32 [64]"),
        ("layers.14.attn.compressor.wgate.weight", "BF16 [512, 5120]"),
        ("layers.36.attn.indexer.wq_b.scale", "F8_E8M0 [128, 40]"),
        ("layers.20.attn.indexer.wk.weight", "BF16 [128, 512]"),
        ("layers.5.hc_ffn_fn", "F32 [24, 20480]"),
        ("layers.5.ffn.gate.bias_vl", "F32 [384]"),
        ("layers.5.ffn.experts.383.w1.weight", "I8 [2304, 2560]"),
        ("layers.5.ffn.experts.383.w3.scale", "F8_E8M0 [2304, 160]"),
        ("layers.5.ffn.experts.0.w2.weight", "I8 [5120, 1152]"),
        ("layers.5.ffn.experts.0.w2.scale", "F8_E8M0 [5120, 72]"),
        ("layers.5.ffn.shared_experts.w2.weight", "F8_E4M3 [5120, 2304]"),
        ("layers.1.engram.embed.weight", "F8_E4M3 [384006168, 256]"),
        ("layers.1.engram.embed.scale", "F8_E8M0 [384006168, 8]"),
        ("layers.14.engram.wkv.scale", "F8_E8M0 [800, 192]"),
        ("mtp.0.main_proj.scale", "F8_E8M0 [160, 480]"),
        ("mtp.1.ffn.experts.127.w1.weight", "I8 [2304, 2560]"),
        ("mtp.2.confidence_head.proj.weight", "BF16 [1, 5376]"),
        ("vision.blocks.31.mlp.w1.weight", "BF16 [5632, 1024]"),
        ("aligner.w1.weight", "BF16 [5120, 9216]"),
        ("image_newline", "BF16 [5120]"),
    ],
)
def test_full_size_examples(flash_tensors: dict[str, TensorSpec], name: str, spec: str) -> None:
    assert str(flash_tensors[name]) == spec


def test_absent_on_purpose(flash_tensors: dict[str, TensorSpec]) -> None:
    for name in (
        "layers.20.attn.compressor.wgate.weight",
        "layers.24.attn.compressor.wkv.weight",
        "layers.24.attn.indexer.wk.weight",
        "layers.3.attn.indexer.wq_b.weight",
        "layers.0.attn.indexer.wq_b.weight",
        "mtp.0.attn.compressor.wkv.weight",
        "mtp.0.ffn.experts.128.w1.weight",
        "mtp.1.main_proj.weight",
        "mtp.0.norm.weight",
        "layers.0.engram.wkv.weight",
        "embed.scale",
    ):
        assert name not in flash_tensors


def test_names_and_shapes_of_the_golden_checkpoint(golden_v41: Path) -> None:
    """Written by another implementation under the published names."""
    expected = expected_tensors(DeepseekV41Config.from_pretrained(golden_v41), "plain")
    with safe_open(golden_v41 / "model.safetensors", "pt") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert found == {name: spec.shape for name, spec in expected.items()}


@pytest.mark.parametrize("which", ["flash_config", "tiny_config"])
def test_every_weight_has_its_place_in_the_module(
    which: str, request: pytest.FixtureRequest
) -> None:
    """Each element of each parameter is covered once; the module is built on the meta device."""
    config = request.getfixturevalue(which)
    architecture = ARCHITECTURES.create("DeepseekV41ForCausalLM")
    model: nn.Module = architecture.build(
        config, rounding="full", device="meta", dtype=torch.bfloat16
    )
    parameters = dict(model.named_parameters())
    covered: Counter[str] = Counter()
    for name, weight in architecture.weights(config).items():
        target = parameters[weight.parameter or name]
        place = target[weight.index] if weight.index else target
        assert tuple(place.shape) == weight.shape, name
        covered[weight.parameter or name] += place.numel()
    assert covered == {name: p.numel() for name, p in parameters.items()}


def test_full_size_checkpoint_on_paper(flash_config: DeepseekV41Config, tmp_path: Path) -> None:
    """510 GB of holes in files with real headers and index: the loader's checks accept it, and see one change."""
    shards: list[dict[str, TensorSpec]] = [{}]
    filled = 0
    for name, weight in logical_weights(flash_config).items():
        specs = stored_tensors(name, weight, "published")
        size = sum(spec.size_bytes for spec in specs.values())
        if filled + size > 11.3e9 and shards[-1]:
            shards.append({})
            filled = 0
        shards[-1] |= specs
        filled += size
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        weight_map |= dict.fromkeys(shard, file)
        write_holes(tmp_path / file, shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps(flash_config.to_dict()))

    assert check_checkpoint(tmp_path) == []

    other = {**flash_config.to_dict()}
    other["text_config"] = {**other["text_config"], "n_routed_experts": 383}
    (tmp_path / "config.json").write_text(json.dumps(other))
    kinds = Counter(problem.kind for problem in check_checkpoint(tmp_path))
    assert kinds == {"unexpected": 40 * 6, "shape": 40 * 3}


def write_holes(path: Path, specs: dict[str, TensorSpec]) -> None:
    header, end = {}, 0
    for name, spec in specs.items():
        start, end = end, end + spec.size_bytes
        header[name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [start, end],
        }
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        try:
            file.truncate(8 + len(raw) + end)
        except OSError as error:
            pytest.skip(f"this file system has no sparse files of {end} bytes: {error}")
