"""A prepared data folder: token streams on the device, configuration and token map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deepinfer.models.deepseek_v41.config import DeepseekV41Config

SPECIAL_TOKENS = [
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜draft▁noise｜>", "<｜deepseek_image｜>",
    "<｜User｜>", "<｜Assistant｜>", "<｜System｜>", "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>",
]  # fmt: skip
FIRST_TEXT_ID = len(SPECIAL_TOKENS)
STREAMS = ("code", "docs", "tasks")
HELD_OUT = "held_out_"


@dataclass(frozen=True)
class Data:
    """What training reads.

    Attributes:
        config: The model's configuration.
        token_map: Folded id of every token id, for Engram.
        streams: Training tokens by domain, int32 on the device.
        held_out: Held-out tokens by domain.
        bytes_of: Bytes each id stands for, shape [vocab], fp32; 0 for special ids.
    """

    config: DeepseekV41Config
    token_map: Sequence[int]
    streams: dict[str, Tensor]
    held_out: dict[str, Tensor]
    bytes_of: Tensor

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> Data:
        """Reads a folder that the `data` command has written."""
        with np.load(folder / "streams.npz") as file:
            arrays = {name: file[name] for name in file.files}
        bytes_of = torch.from_numpy(arrays.pop("bytes")).to(device)
        tokens = {
            name: torch.from_numpy(array.astype(np.int32)).to(device)
            for name, array in arrays.items()
        }
        held_out = {
            name.removeprefix(HELD_OUT): ids
            for name, ids in tokens.items()
            if name.startswith(HELD_OUT)
        }
        return cls(
            DeepseekV41Config.from_pretrained(folder),
            np.load(folder / "token_map.npy").tolist(),
            {name: tokens[name] for name in STREAMS if name in tokens},
            held_out,
            bytes_of,
        )
