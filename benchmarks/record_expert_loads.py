"""Records which experts the router of nano chooses on real text: `python benchmarks/record_expert_loads.py out.npz`.

The text is the source of the standard library of the Python that runs this, one file a sequence, in the order of names.
Written are counts only:

    prefill  tokens of each expert in chunks of 512 tokens, shape [sequences, chunks, layers, experts], uint16
    decode   the same at groups of consecutive positions of all sequences, shape [groups, layers, experts], uint16
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import numpy as np
import torch

from deepinfer.engine import Tokenizer
from deepinfer.models import load_model
from deepinfer.models.deepseek_v41.moe import Gate

CHUNK = 512


def texts() -> list[str]:
    """Files of the standard library in the order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [*root.glob("*.py"), *root.glob("asyncio/*.py"), *root.glob("email/*.py")]
    return [path.read_text(encoding="utf-8", errors="replace") for path in sorted(found)]


def main() -> None:
    """Runs the model over the text and writes the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sequences", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=2_048, help="a sequence; a multiple of 512")
    parser.add_argument("--group", type=int, default=30, help="positions of a step of decode")
    options = parser.parse_args()
    model = load_model("nano")
    tokenizer = Tokenizer("src/deepinfer/assets/nano/tokenizer.json")
    chosen: list[np.ndarray] = []
    for name, module in model.named_modules():
        if isinstance(module, Gate) and name.startswith("layers."):
            module.register_forward_hook(
                lambda _module, _inputs, output: chosen.append(output[1].numpy().copy())
            )
    experts = model.config.n_routed_experts
    prefill, positions = [], []
    for text in texts():
        ids = tokenizer.encode(text)[: options.tokens]
        if len(ids) < options.tokens:
            continue
        chosen.clear()
        with torch.inference_mode():
            model.logits(torch.tensor(ids))
        one_hot = np.zeros((options.tokens, len(chosen), experts), np.uint16)
        for layer, picks in enumerate(chosen):
            np.add.at(one_hot[:, layer], (np.arange(len(picks))[:, None], picks), 1)
        prefill.append(one_hot.reshape(-1, CHUNK, *one_hot.shape[1:]).sum(1, dtype=np.uint16))
        positions.append(one_hot.astype(np.uint8))
        print(len(prefill), flush=True)
        if len(prefill) == options.sequences:
            break
    summed = np.sum(positions, axis=0, dtype=np.uint32)
    groups = len(summed) // options.group
    decode = summed[: groups * options.group].reshape(groups, options.group, *summed.shape[1:])
    np.savez_compressed(
        options.out, prefill=np.stack(prefill), decode=decode.sum(1).astype(np.uint16)
    )


if __name__ == "__main__":
    main()
