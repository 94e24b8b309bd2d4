"""Saving: the published layout, bit for bit repeatable, and refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from deepinfer.core.errors import CheckpointMismatch, CheckpointMissing, ConfigError
from deepinfer.models import check_checkpoint, load_model, save_pretrained
from deepinfer.models.checkpoint import Checkpoint
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.weights import expected_tensors, logical_weights
from deepinfer.models.formats import scale_name

SaveTiny = Callable[..., Path]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("layout", ["published", "plain"])
def test_exactly_the_expected_tensors_are_written(
    save_tiny: SaveTiny, tiny_config: DeepseekV41Config, layout: str
) -> None:
    folder = save_tiny(layout=layout)
    assert Checkpoint.open(folder).tensors == expected_tensors(tiny_config, layout)  # type: ignore[arg-type]
    assert check_checkpoint(folder) == []


def test_shards_index_and_config(save_tiny: SaveTiny, tiny_config: DeepseekV41Config) -> None:
    folder = save_tiny(max_shard_bytes=100_000)
    shards = sorted(folder.glob("*.safetensors"))
    assert [path.name for path in shards] == [
        f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)
    ]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    total = sum(spec.size_bytes for spec in expected_tensors(tiny_config).values())
    assert index["metadata"]["total_size"] == total
    for path in shards:
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            assert file.metadata() == {"format": "pt"}
        assert all(index["weight_map"][name] == path.name for name in names)
        assert path.stat().st_size <= 100_000
    for name in logical_weights(tiny_config):
        if scale_name(name) in index["weight_map"]:
            assert index["weight_map"][scale_name(name)] == index["weight_map"][name]

    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0", "expert_dtype": "fp4",
    }  # fmt: skip
    assert config["dtype"] == "bfloat16"
    assert config["text_config"]["hidden_size"] == 64
    assert config["vision_config"]["patch_size"] == 4


def test_weights_are_as_readable_as_the_configuration(save_tiny: SaveTiny) -> None:
    folder = save_tiny()
    modes = {path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == {(folder / "config.json").stat().st_mode & 0o777}


def test_saving_twice_gives_identical_bytes(save_tiny: SaveTiny, tmp_path: Path) -> None:
    folder = save_tiny("a")
    assert contents(folder) == contents(save_tiny("b"))
    model = load_model(folder)
    for name in ("c", "d"):
        save_pretrained(model, tmp_path / name, max_shard_bytes=50_000)
    assert contents(tmp_path / "c") == contents(tmp_path / "d")


def test_saving_what_was_loaded_changes_no_value(save_tiny: SaveTiny, tmp_path: Path) -> None:
    folder = save_tiny()
    model = load_model(folder)
    save_pretrained(model, tmp_path / "again")
    again = load_model(tmp_path / "again")
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    save_pretrained(model, tmp_path / "plain", layout="plain")
    plain = load_model(tmp_path / "plain")
    for (name, a), (_, b) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_packed_model_is_written_as_the_bytes_it_came_from(
    save_tiny: SaveTiny, tmp_path: Path
) -> None:
    folder = save_tiny()
    save_pretrained(load_model(folder, packed=True), tmp_path / "packed", max_shard_bytes=100_000)
    saved = contents(tmp_path / "packed")
    saved.pop("engram_token_map.json")
    assert saved == contents(folder)
    save_pretrained(load_model(folder, packed=True), tmp_path / "plain", layout="plain")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    expected = load_model(folder).layers[1].ffn.experts.w13[2, :32]
    assert torch.equal(plain["layers.1.ffn.experts.2.w1.weight"], expected)


def test_a_bf16_model_and_a_dict_of_bf16_are_saved_alike(
    tiny_config: DeepseekV41Config, tiny_weights: dict[str, Tensor], tmp_path: Path
) -> None:
    half = {name: value.bfloat16() for name, value in tiny_weights.items()}
    save_pretrained(half, tmp_path / "a", config=tiny_config)
    save_pretrained({k: v.float() for k, v in half.items()}, tmp_path / "b", config=tiny_config)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_weights_that_share_memory_or_are_strided(
    tiny_config: DeepseekV41Config, tiny_weights: dict[str, Tensor], tmp_path: Path
) -> None:
    strange = {name: value.clone() for name, value in tiny_weights.items()}
    strange["head.weight"] = strange["embed.weight"]
    wide = torch.randn(64, 128)
    strange["aligner.w2.weight"] = wide[:, ::2]
    strange["layers.0.ffn.shared_experts.w1.weight"] = torch.randn(64, 32).T
    for layout in ("published", "plain"):
        save_pretrained(strange, tmp_path / layout, config=tiny_config, layout=layout)  # type: ignore[arg-type]
        loaded = load_model(tmp_path / layout)
        assert torch.equal(loaded.head.weight, loaded.embed.weight.float())
    assert torch.equal(loaded.image_encoder.aligner.w2.weight, wide[:, ::2])


def test_the_token_map_goes_with_the_model(golden_v41: Path, tmp_path: Path) -> None:
    model = load_model(golden_v41)
    save_pretrained(model, tmp_path)
    again = load_model(tmp_path)
    assert torch.equal(again.engram_hash.token_map, model.engram_hash.token_map)
    ids = list(range(10))
    assert again.logits(ids).isfinite().all()


def test_the_tokenizer_goes_with_the_model_when_it_is_named(
    save_tiny: SaveTiny, tmp_path: Path
) -> None:
    folder = save_tiny()
    model = load_model(folder)
    with pytest.raises(CheckpointMissing, match=r"has no tokenizer\.json"):
        save_pretrained(model, tmp_path / "none", tokenizer=folder)
    with pytest.raises(CheckpointMissing, match="no folder"):
        save_pretrained(model, tmp_path / "none", tokenizer=tmp_path / "absent")
    assert not (tmp_path / "none").exists()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text(f'{{"of": "{name}"}}', encoding="utf-8")
    files = save_pretrained(model, tmp_path / "with", tokenizer=folder)
    assert [path.name for path in files][-2:] == ["tokenizer.json", "tokenizer_config.json"]
    for path in files[-2:]:
        assert path.read_bytes() == (folder / path.name).read_bytes()
    assert save_pretrained(model, folder, tokenizer=folder)[-1] == folder / "tokenizer_config.json"
    assert (folder / "tokenizer.json").read_bytes() == files[-2].read_bytes()
    save_pretrained(model, tmp_path / "with")  # one that is there stays
    assert (tmp_path / "with" / "tokenizer.json").is_file()


def test_an_older_checkpoint_in_the_folder_is_replaced(save_tiny: SaveTiny) -> None:
    folder = save_tiny(max_shard_bytes=20_000)
    (folder / "generation_config.json").write_text("{}")
    (folder / "model-notes.safetensors").write_bytes(b"mine")
    few = save_tiny(max_shard_bytes=300_000)
    assert few == folder
    shards = [path.name for path in folder.glob("model-0*.safetensors")]
    assert len(shards) == 3
    load_model(folder)
    save_tiny(max_shard_bytes=10**9)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "generation_config.json", "model-notes.safetensors", "model.safetensors",
    ]  # fmt: skip


def test_other_weights_replace_files_of_the_same_name(
    save_tiny: SaveTiny, tiny_config: DeepseekV41Config, tiny_weights: dict[str, Tensor]
) -> None:
    folder = save_tiny()
    doubled = {name: value * 2 for name, value in tiny_weights.items()}
    save_pretrained(doubled, folder, config=tiny_config, max_shard_bytes=100_000)
    loaded = load_model(folder)
    assert torch.equal(loaded.norm.weight, doubled["norm.weight"].bfloat16().float())


def test_a_failure_leaves_the_older_checkpoint(
    save_tiny: SaveTiny, tiny_config: DeepseekV41Config, tiny_weights: dict[str, Tensor]
) -> None:
    folder = save_tiny()
    before = contents(folder)
    broken = {**tiny_weights, "mtp.0.norm.weight": tiny_weights["mtp.0.norm.weight"] * torch.nan}
    with pytest.raises(CheckpointMismatch, match=r"mtp\.0\.norm\.weight holds NaN"):
        save_pretrained(broken, folder, config=tiny_config, max_shard_bytes=100_000)
    assert contents(folder) == before


def test_saving_over_the_folder_that_was_loaded(save_tiny: SaveTiny) -> None:
    folder = save_tiny()
    for packed in (False, True):
        model = load_model(folder, packed=packed)
        logits = model.logits([1, 2, 3])
        save_pretrained(model, folder, max_shard_bytes=70_000)
        assert torch.equal(model.logits([1, 2, 3]), logits)
        assert torch.equal(load_model(folder).logits([1, 2, 3]), logits)


def test_weights_that_do_not_fit_are_refused(
    tiny_config: DeepseekV41Config, tiny_weights: dict[str, Tensor], tmp_path: Path
) -> None:
    def save(weights: dict[str, Tensor], **options: object) -> None:
        save_pretrained(weights, tmp_path / "x", **{"config": tiny_config, **options})  # type: ignore[arg-type]

    missing = dict(tiny_weights)
    del missing["head.weight"], missing["norm.weight"]
    with pytest.raises(CheckpointMismatch, match=r"2 missing: head\.weight, norm\.weight"):
        save({**missing})
    with pytest.raises(CheckpointMismatch, match="1 unexpected: extra") as caught:
        save({**tiny_weights, "extra": torch.zeros(1)})
    assert (caught.value.tensor, caught.value.expected) == ("extra", "absent")
    with pytest.raises(
        CheckpointMismatch, match=r"norm\.weight has shape \[65\].*\[64\]"
    ) as caught:
        save({**tiny_weights, "norm.weight": torch.zeros(65)})
    assert (caught.value.expected, caught.value.found) == ((64,), (65,))
    for bad in (torch.inf, -torch.inf, torch.nan):
        with pytest.raises(CheckpointMismatch, match=r"norm\.weight holds NaN or infinity"):
            save({**tiny_weights, "norm.weight": torch.full((64,), bad)})
    with pytest.raises(ConfigError, match="pass config="):
        save(tiny_weights, config=None)
    with pytest.raises(ConfigError, match="layout is 'fp16'"):
        save(tiny_weights, layout="fp16")
    with pytest.raises(ConfigError, match="max_shard_bytes is 0"):
        save(tiny_weights, max_shard_bytes=0)
    assert not list(tmp_path.glob("x/*"))


def test_another_reader_understands_the_files(
    save_tiny: SaveTiny, tiny_weights: dict[str, Tensor]
) -> None:
    """Decoded with numpy from the format's definition alone, from the raw bytes of the file."""
    import numpy as np

    folder = save_tiny(max_shard_bytes=10**9)
    raw = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])

    def read(name: str) -> np.ndarray:
        first, last = header[name]["data_offsets"]
        data = np.frombuffer(raw[8 + length + first : 8 + length + last], dtype=np.uint8)
        return data.reshape(header[name]["shape"])

    name = "layers.2.ffn.experts.3.w2"
    assert header[f"{name}.weight"]["dtype"] == "I8"
    assert header[f"{name}.scale"]["dtype"] == "F8_E8M0"
    packed = read(f"{name}.weight")
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(64, 32)
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.where(codes & 8, -1, 1) * grid[codes & 7]
    values = values * 2.0 ** (read(f"{name}.scale").astype(int) - 127)
    original = tiny_weights[f"{name}.weight"].numpy()
    assert np.abs(values - original).max() <= np.abs(original).max() / 4

    name = "layers.1.attn.wq_b"
    byte = read(f"{name}.weight").astype(int)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    magnitude = np.where(
        exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0)
    )
    scale = 2.0 ** (read(f"{name}.scale").astype(int) - 127)
    values = np.where(byte & 128, -1, 1) * magnitude * scale.repeat(32, 0).repeat(32, 1)
    original = tiny_weights[f"{name}.weight"].numpy()
    assert np.abs(values - original).max() <= np.abs(original).max() / 16


def test_loaded_logits_survive_a_move_of_the_folder(save_tiny: SaveTiny, tmp_path: Path) -> None:
    folder = save_tiny()
    logits = load_model(folder).logits([5, 6, 7])
    moved = Path(shutil.move(folder, tmp_path / "elsewhere"))
    assert torch.equal(load_model(moved).logits([5, 6, 7]), logits)
