"""Peak memory of loading, measured by the operating system in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepinfer.models import save_pretrained
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.weights import logical_weights

CODE = """
import json, sys
from pathlib import Path
import torch
from deepinfer.models import PackedWeight, load_model
from deepinfer.models.deepseek_v41 import DeepseekV41

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024

folder, packed = sys.argv[1], sys.argv[2] == "packed"
load_model(sys.argv[3], packed=packed)  # first use of torch and of the libraries
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # starts a new high-water mark
model = load_model(folder, packed=packed)
peak = status("VmHWM") - before
sizes = (p.size_bytes if isinstance(p, PackedWeight) else p.nbytes for p in model.parameters())
print(json.dumps({"peak": peak, "result": sum(sizes)}))
"""
MIB = 2**20


@pytest.fixture(scope="module")
def bulky(
    tiny_config: DeepseekV41Config, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """A model of 185 MB in fp32, nearly all in five weights, saved in both layouts."""
    config = dataclasses.replace(
        tiny_config, vocab_size=200_000, engram_compressed_vocab_size=200_000, image_token_id=199_999,
        engram_vocab_size=60_000, engram_num_embeddings=(360_214,), dspark_markov_rank=32,
    )  # fmt: skip
    weights = {name: torch.full(w.shape, 0.5) for name, w in logical_weights(config).items()}
    folders = {}
    for layout in ("plain", "published"):
        folders[layout] = tmp_path_factory.mktemp(layout)
        save_pretrained(
            weights, folders[layout], config=config, layout=layout, max_shard_bytes=55 * MIB
        )  # type: ignore[arg-type]
    folders["small"] = tmp_path_factory.mktemp("small")
    small = {name: torch.full(w.shape, 0.5) for name, w in logical_weights(tiny_config).items()}
    save_pretrained(small, folders["small"], config=tiny_config)
    return folders


def load_in_a_process(folder: Path, mode: str, small: Path) -> dict[str, int]:
    """Bytes of the result, and the most that loading it added to the process."""
    run = subprocess.run(
        [sys.executable, "-c", CODE, str(folder), mode, str(small)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if "clear_refs" in run.stderr:
        pytest.skip("this system does not let a process reset its high-water mark")
    assert run.returncode == 0, run.stderr
    measured: dict[str, int] = json.loads(run.stdout)
    return measured


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("layout", "mode"), [("plain", "whole"), ("published", "whole"), ("published", "packed")]
)
def test_peak_is_the_result_plus_one_shard(bulky: dict[str, Path], layout: str, mode: str) -> None:
    folder = bulky[layout]
    shards = [path.stat().st_size for path in folder.glob("*.safetensors")]
    pieces = 32 * MIB
    for _ in range(3):  # what the system counts as resident varies by a few MB from run to run
        measured = load_in_a_process(folder, mode, bulky["small"])
        limit = measured["result"] + max(shards) + pieces
        if measured["peak"] < limit:
            break
    everything = measured["result"] + sum(shards)
    assert measured["result"] * 0.9 < measured["peak"] < limit, measured
    if mode == "whole" and layout == "plain":
        assert limit < everything
