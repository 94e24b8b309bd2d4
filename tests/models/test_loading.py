"""Loading: layouts, dtypes, shards, options, and what a checkpoint of another shape is told."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file as map_file
from safetensors.torch import save_file
from torch import Tensor, nn

from deepinfer.core.errors import (
    CheckpointMismatch,
    CheckpointMissing,
    ConfigError,
    UnsupportedHardware,
)
from deepinfer.kernels import cast_back
from deepinfer.models import (
    ARCHITECTURES,
    PackedWeight,
    check_checkpoint,
    load_model,
    save_pretrained,
)
from deepinfer.models.deepseek_v41 import DeepseekV41
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.weights import logical_weights
from deepinfer.models.formats import Weight, block_of, scale_name

SaveTiny = Callable[..., Path]


def load_file(path: Path) -> dict[str, Tensor]:
    """Tensors in memory of their own, so that the file may be written over."""
    return {name: tensor.clone() for name, tensor in map_file(path).items()}


def named(model: nn.Module, config: DeepseekV41Config) -> dict[str, Tensor]:
    """Logical weights of a module by published name."""
    parameters = dict(model.named_parameters())
    return {
        name: parameters[w.parameter or name][w.index]
        if w.index
        else parameters[w.parameter or name]
        for name, w in logical_weights(config).items()
    }


def rounded(values: Tensor, weight: Weight, folder: Path, name: str) -> Tensor:
    """What the published layout keeps of a weight, decoded independently from the files."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= {k: v for k, v in load_file(path).items() if k in (name, scale_name(name))}
    block = block_of(weight.storage)
    if block is None:
        return tensors[name].float()
    return cast_back(tensors[name], tensors[scale_name(name)], block=block)


def test_plain_fp32_checkpoint_of_another_program(golden_v41: Path) -> None:
    model = load_model(golden_v41, rounding="none")
    assert isinstance(model, DeepseekV41)
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    golden = load_file(golden_v41 / "golden.safetensors")
    difference = model.logits(golden["input_ids.0"].flatten()) - golden["plain.logits.0"]
    assert float(difference.abs().max()) < 2e-4
    original = load_file(golden_v41 / "model.safetensors")
    for name, value in named(model, model.config).items():
        assert torch.equal(value.float(), original[name]), name


@pytest.mark.parametrize("max_shard_bytes", [10**9, 100_000, 1])
def test_published_layout_gives_the_quantised_weights(
    save_tiny: SaveTiny,
    tiny_config: DeepseekV41Config,
    tiny_weights: dict[str, Tensor],
    max_shard_bytes: int,
) -> None:
    folder = save_tiny(max_shard_bytes=max_shard_bytes)
    assert (folder / "model.safetensors").exists() == (max_shard_bytes == 10**9)
    model = load_model(folder)
    loaded = named(model, model.config)
    for name, weight in logical_weights(tiny_config).items():
        if max_shard_bytes > 1 or "experts" not in name:  # one file a weight: a sample is enough
            expected = rounded(tiny_weights[name], weight, folder, name)
            assert torch.equal(loaded[name], expected), name
        limit = 2**-2 if weight.storage == "mxfp4" else 2**-4 if "fp8" in weight.storage else 2**-8
        error = (loaded[name] - tiny_weights[name]).abs().max() / tiny_weights[name].abs().max()
        assert float(error) <= limit, name


def test_plain_layout_of_our_own(
    save_tiny: SaveTiny, tiny_config: DeepseekV41Config, tiny_weights: dict[str, Tensor]
) -> None:
    model = load_model(save_tiny(layout="plain"))
    assert model.config.quantization_config is None
    for name, value in named(model, tiny_config).items():
        assert torch.equal(value, tiny_weights[name]), name


def test_dtype_applies_where_the_model_lets_it(save_tiny: SaveTiny) -> None:
    folder = save_tiny()
    single, half = load_model(folder), load_model(folder, dtype=torch.bfloat16)
    assert half.layers[0].attn.wq_a.weight.dtype == torch.bfloat16
    assert half.layers[0].attn.attn_sink.dtype == torch.float32
    assert half.head.weight.dtype == torch.float32
    for (name, a), (_, b) in zip(single.named_parameters(), half.named_parameters(), strict=True):
        assert torch.equal(a.to(b.dtype), b), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_plain_checkpoints_of_any_float_dtype(save_tiny: SaveTiny, dtype: torch.dtype) -> None:
    folder = save_tiny(layout="plain", max_shard_bytes=10**9)
    path = folder / "model.safetensors"
    converted = {name: value.to(dtype) for name, value in load_file(path).items()}
    save_file(converted, path)
    model = load_model(folder)
    assert torch.equal(model.embed.weight, converted["embed.weight"].float())


def test_unquantised_weights_of_a_published_checkpoint_may_be_any_float(
    save_tiny: SaveTiny,
) -> None:
    folder = save_tiny(max_shard_bytes=10**9)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["layers.0.engram.q_weight"] = tensors["layers.0.engram.q_weight"].bfloat16()
    tensors["norm.weight"] = tensors["norm.weight"].float()
    save_file(tensors, path)
    assert check_checkpoint(folder) == []
    model = load_model(folder)
    assert torch.equal(model.norm.weight, tensors["norm.weight"])


def test_scale_bytes_are_never_cast(save_tiny: SaveTiny) -> None:
    """All e8m0 bytes of a scale survive, whether the file calls them F8_E8M0 or U8; experts may be U8 as well."""
    folder = save_tiny(max_shard_bytes=10**9)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "layers.0.engram.embed.scale"
    scale = tensors[name].view(torch.uint8)
    scale.copy_((torch.arange(scale.numel()) % 230 + 1).view(scale.shape))
    save_file(tensors, path)
    expected = torch.ldexp(torch.ones(scale.shape), scale.int() - 127)
    codes = tensors["layers.0.engram.embed.weight"].float()
    model = load_model(folder)
    assert torch.equal(
        model.layers[0].engram.embed.weight, codes * expected.repeat_interleave(32, 1)
    )
    assert model.layers[0].engram.embed.weight.isfinite().all()

    as_bytes = {
        key: value.view(torch.uint8) if value.dtype in (torch.float8_e8m0fnu, torch.int8) else value
        for key, value in tensors.items()
    }
    save_file(as_bytes, path)
    again = load_model(folder)
    for (key, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), key


def test_a_scale_may_lie_in_another_file_than_its_weight(save_tiny: SaveTiny) -> None:
    folder = save_tiny(max_shard_bytes=10**9)
    tensors = load_file(folder / "model.safetensors")
    expected = load_model(folder)
    (folder / "model.safetensors").unlink()
    scales = {name: value for name, value in tensors.items() if name.endswith(".scale")}
    rest = {name: value for name, value in tensors.items() if name not in scales}
    save_file(scales, folder / "a.safetensors")
    save_file(rest, folder / "b.safetensors")
    weight_map = dict.fromkeys(scales, "a.safetensors") | dict.fromkeys(rest, "b.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    model = load_model(folder)
    for (name, a), (_, b) in zip(
        expected.named_parameters(), model.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name


def test_large_weights_are_read_in_pieces(
    save_tiny: SaveTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny()
    whole, packed = load_model(folder), load_model(folder, packed=True)
    monkeypatch.setattr("deepinfer.models.formats.CHUNK_ELEMENTS", 1)
    for expected, model in ((whole, load_model(folder)), (packed, load_model(folder, packed=True))):
        for (name, a), (_, b) in zip(
            expected.named_parameters(), model.named_parameters(), strict=True
        ):
            assert torch.equal(torch.as_tensor(a * 1), torch.as_tensor(b * 1)), name


def test_the_loaded_model_does_not_depend_on_its_files(save_tiny: SaveTiny) -> None:
    folder = save_tiny()
    models = [load_model(folder), load_model(folder, packed=True)]
    before = [model.logits([1, 2, 3, 4, 5]) for model in models]
    for path in folder.glob("*.safetensors"):
        path.write_bytes(b"\0" * path.stat().st_size)
    shutil.rmtree(folder)
    for model, logits in zip(models, before, strict=True):
        assert torch.equal(model.logits([1, 2, 3, 4, 5]), logits)


def test_packed_outputs_are_the_same_bit_for_bit(save_tiny: SaveTiny) -> None:
    folder = save_tiny()
    ids = torch.randint(0, 90, (40,), generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        plain = load_model(folder, dtype=dtype)
        packed = load_model(folder, dtype=dtype, packed=True)
        assert torch.equal(plain.logits(ids), packed.logits(ids))
        kinds = {name for name, p in packed.named_parameters() if isinstance(p, PackedWeight)}
        assert "layers.0.attn.wq_a.weight" in kinds
        assert "layers.0.ffn.experts.w13" in kinds
        assert "layers.0.engram.embed.weight" in kinds
        assert "embed.weight" not in kinds


def test_packed_of_a_plain_checkpoint_keeps_nothing_packed(golden_v41: Path) -> None:
    model = load_model(golden_v41, packed=True)
    assert not any(isinstance(p, PackedWeight) for p in model.parameters())


def test_engram_token_map_comes_from_its_file_or_the_tokenizer(
    golden_v41: Path, tmp_path: Path
) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json", "engram_token_map.json"):
        shutil.copy(golden_v41 / name, tmp_path)
    from_file = load_model(tmp_path).engram_hash.token_map
    assert from_file.tolist() == json.loads((golden_v41 / "engram_token_map.json").read_text())
    (tmp_path / "engram_token_map.json").unlink()
    assert load_model(tmp_path).engram_hash.token_map.tolist() == from_file.tolist()
    (tmp_path / "tokenizer.json").unlink()
    model = load_model(tmp_path)
    with pytest.raises(ConfigError, match=r"token.map"):
        model.logits([1, 2, 3])
    for bad in ("[1, 2]", "{", '"text"', '{"0": 1}', "[[1], 2]"):
        (tmp_path / "engram_token_map.json").write_text(bad)
        with pytest.raises(ConfigError, match="gives no Engram token map"):
            load_model(tmp_path)
    (tmp_path / "engram_token_map.json").unlink()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json gives no Engram token map"):
        load_model(tmp_path)


def test_vision_weights_serve_the_text_model(
    save_tiny: SaveTiny, tiny_config: DeepseekV41Config
) -> None:
    import numpy as np

    from deepinfer.models.deepseek_v41.image import expand_image_tokens, prepare_image

    model = load_model(save_tiny())
    pixels = np.random.default_rng(0).integers(0, 256, (20, 20, 3), dtype=np.uint8)
    image = prepare_image(pixels, tiny_config.vision)
    ids = expand_image_tokens([1, 2, 95, 4], [image.plan], 95)
    assert ids.count(95) == image.plan.num_tokens
    rows = model.image_encoder([image])
    logits = model.logits(ids, images=rows)
    assert logits.shape == (len(ids), 96)
    other = prepare_image(255 - pixels, tiny_config.vision)
    changed = model.logits(ids, images=model.image_encoder([other]))
    assert torch.equal(logits[:2], changed[:2])
    assert not torch.equal(logits[-1], changed[-1])


def test_progress_function_and_bar(
    save_tiny: SaveTiny, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny()
    calls: list[tuple[int, int]] = []
    load_model(folder, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] == calls[0][1]
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert capsys.readouterr().err == ""
    load_model(folder)
    assert capsys.readouterr().err == ""
    load_model(folder, progress=True)
    assert "Loading" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)  # without a bar it is not even imported
    load_model(folder, progress=False)
    assert capsys.readouterr() == ("", "")


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_missing_unexpected_and_misshaped_tensors_are_all_reported(save_tiny: SaveTiny) -> None:
    folder = save_tiny(max_shard_bytes=10**9)

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["layers.2.attn.q_norm.wieght"] = tensors.pop("layers.2.attn.q_norm.weight")
        del tensors["layers.1.attn.wkv.scale"]
        tensors["norm.weight"] = torch.zeros(65, dtype=torch.bfloat16)
        tensors["layers.0.ffn.experts.1.w2.weight"] = torch.zeros(64, 16)
        tensors["layers.0.attn.wq_a.weight"] = tensors["layers.0.attn.wq_a.weight"].float()
        tensors["layers.0.attn.attn_sink"] = torch.zeros(4, dtype=torch.int32)

    rewrite(folder, change)
    problems = check_checkpoint(folder)
    assert [(p.tensor, p.kind) for p in problems] == [
        ("layers.1.attn.wkv.scale", "missing"),
        ("layers.2.attn.q_norm.weight", "missing"),
        ("layers.2.attn.q_norm.wieght", "unexpected"),
        ("layers.0.attn.wq_a.weight", "dtype"),
        ("layers.0.attn.attn_sink", "dtype"),
        ("layers.0.ffn.experts.1.w2.weight", "dtype"),
        ("norm.weight", "shape"),
    ]
    assert problems[1].near == "layers.2.attn.q_norm.wieght"
    with pytest.raises(CheckpointMismatch) as caught:
        load_model(folder)
    text = str(caught.value)
    assert text.startswith("7 tensors do not fit")
    assert "layers.1.attn.wkv.scale: expected F8_E8M0 [1, 2], found no such tensor" in text
    assert "(is it layers.2.attn.q_norm.wieght?)" in text
    assert "norm.weight: expected BF16 [64], found BF16 [65]" in text
    assert "expected I8 [64, 16], found F32 [64, 16]" in text
    error = caught.value
    assert (error.tensor, error.expected, error.found) == (
        "layers.1.attn.wkv.scale", "F8_E8M0 [1, 2]", "no such tensor",
    )  # fmt: skip


def test_many_problems_show_the_first_and_the_count(golden_v41: Path, tmp_path: Path) -> None:
    """A plain checkpoint under a configuration that announces quantisation."""
    shutil.copy(golden_v41 / "model.safetensors", tmp_path)
    config = json.loads((golden_v41 / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "expert_dtype": "fp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointMismatch, match=r"and \d+ more\. Use the config.json") as caught:
        load_model(tmp_path)
    assert "quantization_config asks for FP8 and FP4 tensors with scales" in str(caught.value)
    assert len(str(caught.value)) < 1500


def test_quantised_tensors_under_a_plain_configuration(save_tiny: SaveTiny) -> None:
    folder = save_tiny()
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointMismatch, match="without quantization_config every weight is a float"
    ):
        load_model(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("weight_block_size", [128, 128]),
        ("expert_dtype", "fp8"),
        ("quant_method", "awq"),
        ("scale_fmt", "float"),
    ],
)
def test_other_quantisations_are_refused_before_reading(
    save_tiny: SaveTiny, key: str, value: object
) -> None:
    folder = save_tiny()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"][key] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=rf"quantization_config.{key}.*only"):
        load_model(folder)


@pytest.mark.parametrize(
    ("content", "error", "match"),
    [
        ("{", ConfigError, "not valid JSON"),
        ("[]", ConfigError, "holds a list"),
        ("{}", ConfigError, "architectures = None"),
        ('{"architectures": []}', ConfigError, "list with one name"),
        (
            '{"architectures": ["DeepseekV4ForCausalLM"]}',
            ConfigError,
            "did you mean 'DeepseekV41ForCausalLM'",
        ),
        ('{"architectures": ["DeepseekV41ForCausalLM"]}', ConfigError, "missing"),
        (None, CheckpointMissing, r"config\.json does not exist"),
    ],
)
def test_unusable_configurations(
    save_tiny: SaveTiny, content: str | None, error: type[Exception], match: str
) -> None:
    folder = save_tiny()
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content)
    with pytest.raises(error, match=match):
        load_model(folder)


def test_another_architecture_can_be_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tiny(nn.Module):
        def __init__(self, config: dict[str, object], device: str) -> None:
            super().__init__()
            self.config = config
            self.table = nn.Parameter(torch.empty(2, 32, 32, device=device))

    class TinyArchitecture:
        def parse_config(self, data):
            return DictConfig(data)

        def config_dict(self, config, layout):
            return dict(config)

        def layout(self, config):
            return "published"

        def weights(self, config):
            return {
                f"half.{i}.weight": Weight((32, 32), "fp8_block", "table", (i,)) for i in (0, 1)
            }

        def build(self, config, *, rounding, device, dtype):
            return Tiny(config, device)

        def finish(self, model, folder):
            model.ready = True

        def side_files(self, model):
            return {}

    class DictConfig(dict):
        def to_dict(self):
            return dict(self)

    monkeypatch.setattr(ARCHITECTURES, "_factories", {**ARCHITECTURES._factories})
    ARCHITECTURES.register("TinyForTests", TinyArchitecture)
    config = DictConfig(architectures=["TinyForTests"])
    halves = {f"half.{i}.weight": torch.randn(32, 32) for i in (0, 1)}
    save_pretrained(halves, tmp_path, config=config)
    model = load_model(tmp_path)
    assert model.ready
    assert float((model.table - torch.stack(list(halves.values()))).abs().max()) < 0.2


def test_a_model_that_lacks_a_parameter_is_named(
    save_tiny: SaveTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepinfer.models.deepseek_v41 import architecture

    folder = save_tiny()
    full = architecture.logical_weights

    def more(config: DeepseekV41Config) -> dict[str, Weight]:
        return {"embed.weight": full(config)["embed.weight"], **full(config)}

    monkeypatch.setattr(architecture, "ImageEncoder", lambda *args, **kwargs: nn.Module())
    monkeypatch.setattr(architecture, "logical_weights", more)
    with pytest.raises(ConfigError, match="no parameters for image_encoder"):
        load_model(folder)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"device": "gpu0"}, "device is 'gpu0'"),
        ({"device": None}, "device is None"),
        ({"dtype": "float32"}, "dtype is 'float32'"),
        ({"dtype": torch.int8}, "dtype is torch.int8"),
    ],
)
def test_unusable_options(golden_v41: Path, options: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load_model(golden_v41, **options)  # type: ignore[arg-type]


def test_a_device_that_is_not_there(golden_v41: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedHardware, match="'cuda:1' is asked for"):
        load_model(golden_v41, device="cuda:1")


def test_a_configuration_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointMissing, match=r"config\.json cannot be read"):
        load_model(tmp_path)
