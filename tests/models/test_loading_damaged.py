"""A folder of damaged checkpoints: each gets a typed error that names what is wrong, and nothing is loaded."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file as map_file
from safetensors.torch import save_file

from deepinfer.core.errors import CheckpointMismatch, CheckpointMissing
from deepinfer.models import load_model, save_pretrained
from deepinfer.models.checkpoint import Checkpoint, read_header
from deepinfer.models.deepseek_v41.config import DeepseekV41Config

SHARD_BYTES = 290_000
INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00003.safetensors"
SECOND = "model-00002-of-00003.safetensors"
LAST = "model-00003-of-00003.safetensors"


def load_file(path: Path) -> dict[str, torch.Tensor]:
    """Tensors in memory of their own, so that the file may be written over."""
    return {name: tensor.clone() for name, tensor in map_file(path).items()}


@pytest.fixture(scope="module")
def whole_folder(
    tiny_config: DeepseekV41Config,
    tiny_weights: dict[str, torch.Tensor],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Three shards and an index."""
    folder = tmp_path_factory.mktemp("whole")
    save_pretrained(tiny_weights, folder, config=tiny_config, max_shard_bytes=SHARD_BYTES)
    assert (folder / LAST).exists(), sorted(path.name for path in folder.iterdir())
    return folder


@pytest.fixture
def folder(whole_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole_folder, tmp_path / "damaged"))


def edit_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header = change(header) or header
    new = json.dumps(header).encode()
    path.write_bytes(len(new).to_bytes(8, "little") + new + raw[8 + length :])


def edit_raw_header(path: Path, change: Callable[[bytes], bytes]) -> None:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    new = change(raw[8 : 8 + length])
    path.write_bytes(len(new).to_bytes(8, "little") + new + raw[8 + length :])


def edit_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((folder / INDEX).read_text())
    content = change(content) or content
    (folder / INDEX).write_text(json.dumps(content))


def edit_tensor(folder: Path, name: str, change: Callable[[torch.Tensor], None]) -> None:
    file = json.loads((folder / INDEX).read_text())["weight_map"][name]
    tensors = load_file(folder / file)
    change(tensors[name])
    save_file(tensors, folder / file)


def cut(path: Path, keep: float) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * keep)])


def first_entry(header: dict[str, Any]) -> dict[str, Any]:
    return next(value for key, value in header.items() if key != "__metadata__")


def duplicate_in_header(raw: bytes) -> bytes:
    start = raw.index(b'"', raw.index(b"}") + 1)
    end = raw.index(b"}", start) + 1
    return raw[:end] + b"," + raw[start:end] + raw[end:]


DAMAGE: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    # files that are not there
    "missing shard": (lambda f: (f / SECOND).unlink(), CheckpointMissing, f"lacks {SECOND}"),
    "missing shards": (
        lambda f: [(f / n).unlink() for n in (FIRST, LAST)], CheckpointMissing, f"lacks {FIRST}, {LAST}"),
    "missing index": (lambda f: (f / INDEX).unlink(), CheckpointMissing, f"but no {INDEX}"),
    "no weights": (
        lambda f: [p.unlink() for p in f.iterdir() if p.name != "config.json"],
        CheckpointMissing, r"holds no model\.safetensors"),
    "other formats": (
        lambda f: ([p.unlink() for p in f.iterdir() if p.name != "config.json"],
                   (f / "pytorch_model.bin").write_bytes(b"x")),
        CheckpointMissing, r"pytorch_model\.bin; only safetensors"),
    "shard is a folder": (
        lambda f: ((f / SECOND).unlink(), (f / SECOND).mkdir()), CheckpointMissing, f"lacks {SECOND}"),
    # cut and foreign files
    "empty shard": (lambda f: (f / SECOND).write_bytes(b""), CheckpointMismatch, f"{SECOND}: .*0 bytes in all"),
    "seven bytes": (lambda f: (f / SECOND).write_bytes(b"1234567"), CheckpointMismatch, "7 bytes in all"),
    "cut in data": (lambda f: cut(f / SECOND, 0.9), CheckpointMismatch, rf"{SECOND}: its header promises \d+ bytes"),
    "cut in header": (lambda f: cut(f / SECOND, 0.01), CheckpointMismatch, "header alone needs"),
    "one byte short": (
        lambda f: (f / LAST).write_bytes((f / LAST).read_bytes()[:-1]), CheckpointMismatch, f"{LAST}: .*promises"),
    "one byte more": (
        lambda f: (f / LAST).write_bytes((f / LAST).read_bytes() + b"\0"), CheckpointMismatch, "promises"),
    "two cut": (
        lambda f: [cut(f / n, 0.9) for n in (FIRST, LAST)], CheckpointMismatch, f"{FIRST}: .*; {LAST}: "),
    "git lfs pointer": (
        lambda f: (f / FIRST).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        CheckpointMismatch, "git lfs pull"),
    "a pickle": (lambda f: (f / FIRST).write_bytes(b"\x80\x02" + b"x" * 400), CheckpointMismatch, "no header length"),
    "a web page": (
        lambda f: (f / FIRST).write_text("<!doctype html><html>" + "x" * 400), CheckpointMismatch, "no header length"),
    # headers
    "header not JSON": (
        lambda f: edit_raw_header(f / FIRST, lambda raw: b"{" + raw), CheckpointMismatch, "header is damaged"),
    "header not UTF-8": (
        lambda f: edit_raw_header(f / FIRST, lambda raw: raw.replace(b"embed", b"\xff\xfe\xfd\xfc\xfb")),
        CheckpointMismatch, "header is damaged"),
    "header is a list": (lambda f: edit_header(f / FIRST, lambda h: [1]), CheckpointMismatch, "not a JSON object"),
    "deeply nested": (
        lambda f: edit_raw_header(f / FIRST, lambda raw: b"[" * 100_000), CheckpointMismatch, "header is damaged"),
    "huge header length": (
        lambda f: (f / FIRST).write_bytes(struct.pack("<Q", 2**63) + b"{}"), CheckpointMismatch, "no header length"),
    "entry is a number": (
        lambda f: edit_header(f / FIRST, lambda h: {**h, "embed.weight": 3}), CheckpointMismatch, "embed.weight"),
    "unknown dtype": (
        lambda f: edit_header(f / FIRST, lambda h: first_entry(h).update(dtype="F3")),
        CheckpointMismatch, "unknown dtype 'F3'"),
    "negative shape": (
        lambda f: edit_header(f / FIRST, lambda h: first_entry(h).update(shape=[-1, -1])),
        CheckpointMismatch, r"shape \[-1, -1\]"),
    "fractional shape": (
        lambda f: edit_header(f / FIRST, lambda h: first_entry(h).update(shape=[1.5])),
        CheckpointMismatch, r"shape \[1.5\]"),
    "boolean shape": (
        lambda f: edit_header(f / FIRST, lambda h: first_entry(h).update(shape=[True])),
        CheckpointMismatch, r"shape \[True\]"),
    "shape without its bytes": (
        lambda f: edit_header(f / FIRST, lambda h: first_entry(h).update(shape=[7])), CheckpointMismatch, "needs"),
    "astronomical shape": (
        lambda f: edit_header(f / FIRST, lambda h: first_entry(h).update(shape=[2**62, 2**62])),
        CheckpointMismatch, "needs"),
    "offsets are text": (
        lambda f: edit_header(f / FIRST, lambda h: first_entry(h).update(data_offsets="ab")),
        CheckpointMismatch, "data_offsets 'ab'"),
    "three offsets": (
        lambda f: edit_header(f / FIRST, lambda h: first_entry(h)["data_offsets"].append(5)),
        CheckpointMismatch, "data_offsets"),
    "offsets reversed": (
        lambda f: edit_header(f / FIRST, lambda h: first_entry(h)["data_offsets"].reverse()),
        CheckpointMismatch, "data_offsets"),
    "overlapping data": (
        lambda f: edit_header(f / FIRST, overlap), CheckpointMismatch, "starts at byte 0 and not at"),
    "hole in data": (
        lambda f: edit_header(f / FIRST, hole), CheckpointMismatch, "starts at byte"),
    "a name twice in a header": (
        lambda f: edit_raw_header(f / FIRST, duplicate_in_header), CheckpointMismatch, "occurs twice"),
    # index
    "index not JSON": (lambda f: (f / INDEX).write_text("{"), CheckpointMismatch, "not a usable index"),
    "index is a list": (lambda f: (f / INDEX).write_text("[]"), CheckpointMismatch, "not a usable index"),
    "index without map": (lambda f: (f / INDEX).write_text("{}"), CheckpointMismatch, "no key 'weight_map'"),
    "index with empty map": (
        lambda f: (f / INDEX).write_text('{"weight_map": {}}'), CheckpointMismatch, "not a filled object"),
    "index maps to a number": (
        lambda f: edit_index(f, lambda c: c["weight_map"].update({"embed.weight": 1})),
        CheckpointMismatch, "embed.weight is mapped to 1"),
    "index leaves the folder": (
        lambda f: edit_index(f, lambda c: c["weight_map"].update({"embed.weight": "../../etc/passwd"})),
        CheckpointMismatch, "not the name of a file in the folder"),
    "index is absolute": (
        lambda f: edit_index(f, lambda c: c["weight_map"].update({"embed.weight": "/etc/passwd"})),
        CheckpointMismatch, "not the name of a file in the folder"),
    "index names an absent file": (
        lambda f: edit_index(f, lambda c: c["weight_map"].update({"embed.weight": "other.safetensors"})),
        CheckpointMissing, r"lacks other\.safetensors"),
    "index names the wrong shard": (
        lambda f: edit_index(f, lambda c: c["weight_map"].update({"embed.weight": LAST})),
        CheckpointMismatch, f"puts embed.weight into {LAST}; it is in {FIRST}"),
    "index names an absent tensor": (
        lambda f: edit_index(f, lambda c: c["weight_map"].update({"extra": LAST})),
        CheckpointMismatch, f"puts extra into {LAST}, which lacks it"),
    "index forgets a tensor": (
        lambda f: edit_index(f, lambda c: c["weight_map"].pop("embed.weight") and None),
        CheckpointMismatch, f"embed.weight is in {FIRST} but not in {INDEX}"),
    "a name twice in the index": (
        lambda f: (f / INDEX).write_text(
            (f / INDEX).read_text().replace('"weight_map": {', f'"weight_map": {{"embed.weight": "{LAST}",')),
        CheckpointMismatch, "'embed.weight' occurs twice"),
    "a tensor in two shards": (
        lambda f: save_file(
            {**load_file(f / LAST), "embed.weight": torch.zeros(96, 64, dtype=torch.bfloat16)}, f / LAST),
        CheckpointMismatch, f"embed.weight is both in {FIRST} and in {LAST}"),
    # values
    "NaN scale byte": (
        lambda f: edit_tensor(
            f, "layers.1.attn.wkv.scale", lambda t: t.view(torch.uint8)[0].__setitem__(1, 255)),
        CheckpointMismatch, r"layers\.1\.attn\.wkv\.scale holds NaN at \[0, 1\]"),
    "NaN expert scale byte": (
        lambda f: edit_tensor(
            f, "layers.1.ffn.experts.2.w3.scale", lambda t: t.view(torch.uint8)[31].fill_(255)),
        CheckpointMismatch, r"layers\.1\.ffn\.experts\.2\.w3\.scale holds NaN at \[31, 0\]"),
    "NaN code": (
        lambda f: edit_tensor(
            f, "layers.0.engram.embed.weight", lambda t: t.view(torch.uint8)[400].__setitem__(5, 0xFF)),
        CheckpointMismatch, r"layers\.0\.engram\.embed\.weight holds NaN at \[400, 5\]"),
    "NaN float": (
        lambda f: edit_tensor(f, "norm.weight", lambda t: t[3].fill_(torch.nan)),
        CheckpointMismatch, r"norm\.weight holds NaN at \[3\]"),
}  # fmt: skip


def overlap(header: dict[str, Any]) -> None:
    entries = [v for k, v in header.items() if k != "__metadata__"]
    a, b = entries[:2]
    size = b["data_offsets"][1] - b["data_offsets"][0]
    b["data_offsets"] = [a["data_offsets"][0], a["data_offsets"][0] + size]


def hole(header: dict[str, Any]) -> None:
    for key, value in list(header.items()):
        if key != "__metadata__" and value["data_offsets"][0] == 0:
            del header[key]


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_named(folder: Path, what: str) -> None:
    damage, error, match = DAMAGE[what]
    damage(folder)
    for packed in (False, True) if what.startswith("NaN") else (False,):
        with pytest.raises(error, match=match) as caught:
            load_model(folder, packed=packed)
        assert len(str(caught.value)) < 2000


def test_the_undamaged_folder_loads(folder: Path) -> None:
    load_model(folder)


def test_single_file_of_any_name(save_tiny: Callable[..., Path]) -> None:
    folder = save_tiny(max_shard_bytes=10**9)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    load_model(folder)
    (folder / "more.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointMissing, match=r"more\.safetensors, weights\.safetensors but no"):
        load_model(folder)


def test_a_file_that_shrinks_after_the_check(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    cut(folder / LAST, 0.5)
    with pytest.raises(CheckpointMismatch, match="cannot be read"), checkpoint.shard(LAST) as shard:
        shard.read(checkpoint.tensors.keys().__iter__().__next__())


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_random_damage_to_a_header_is_typed_or_harmless(
    tmp_path: Path, data: st.DataObject
) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}, path)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, 150))] = data.draw(st.integers(0, 255))
    path.write_bytes(
        bytes(raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw)
    )
    with contextlib.suppress(CheckpointMismatch):
        read_header(path)
