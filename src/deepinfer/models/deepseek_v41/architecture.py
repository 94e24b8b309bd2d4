"""DeepSeek-V4.1 as an architecture that checkpoints can be loaded into and saved from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from deepinfer.core.errors import ConfigError
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.engram_tokens import TOKEN_MAP_FILE, build_token_map
from deepinfer.models.deepseek_v41.model import DeepseekV41
from deepinfer.models.deepseek_v41.rounding import RoundingLevel
from deepinfer.models.deepseek_v41.vision import ImageEncoder
from deepinfer.models.deepseek_v41.weights import logical_weights
from deepinfer.models.formats import Layout, Weight

__all__ = ["PUBLISHED_QUANTIZATION", "DeepseekV41Architecture"]

PUBLISHED_QUANTIZATION: Mapping[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
"""The published `quantization_config`. It gives one block size; experts and Engram tables have layouts of their own."""


class DeepseekV41Architecture:
    """See `deepinfer.models.registry.Architecture`."""

    def parse_config(self, data: Mapping[str, Any]) -> DeepseekV41Config:
        """Reads a published `config.json`."""
        return DeepseekV41Config.from_dict(data)

    def config_dict(self, config: DeepseekV41Config, layout: Layout) -> dict[str, Any]:
        """The published form, with `quantization_config` and dtype as the layout has them."""
        data = config.to_dict()
        data.pop("quantization_config", None)
        data["dtype"] = "bfloat16" if layout == "published" else "float32"
        if layout == "published":
            data["quantization_config"] = dict(PUBLISHED_QUANTIZATION)
        return data

    def layout(self, config: DeepseekV41Config) -> Layout:
        """Published with a `quantization_config`, plain without."""
        given = config.quantization_config
        if given is None:
            return "plain"
        for key, value in PUBLISHED_QUANTIZATION.items():
            if given.get(key, value) != value:
                raise ConfigError(
                    f"quantization_config.{key} is {given[key]!r}; only {value!r} can be read. "
                    f"Convert the checkpoint to the published layout, or to plain floats.",
                    field=f"quantization_config.{key}",
                    value=given[key],
                    limit=repr(value),
                )
        return "published"

    def weights(self, config: DeepseekV41Config) -> dict[str, Weight]:
        """Every weight by its published name."""
        return logical_weights(config)

    def build(
        self,
        config: DeepseekV41Config,
        *,
        rounding: str,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> DeepseekV41:
        """The module with unset parameters; `image_encoder` is there when the configuration has a vision tower."""
        model = DeepseekV41(
            config, rounding=cast(RoundingLevel, rounding), device=device, dtype=dtype
        )
        if config.vision is not None:
            model.image_encoder = ImageEncoder(
                config.vision, config.hidden_size, device=device, dtype=dtype
            )
        return model

    def finish(self, model: nn.Module, folder: Path) -> None:
        """Sets the Engram token map from its file, or else from the tokenizer."""
        engram = cast(DeepseekV41, model).engram_hash
        source = folder / TOKEN_MAP_FILE
        if engram is None:
            return
        try:
            if source.is_file():
                engram.set_token_map(json.loads(source.read_text("utf-8")))
                return
            source = folder / "tokenizer.json"
            if source.is_file():
                from tokenizers import Tokenizer

                vocab_size = cast(DeepseekV41Config, model.config).vocab_size
                engram.set_token_map(build_token_map(Tokenizer.from_file(str(source)), vocab_size))
        except Exception as error:  # tokenizers raises nothing more specific
            raise ConfigError(
                f"{source} gives no Engram token map for this model: {error}. "
                f"Use the file that belongs to these weights.",
                field=source.name,
            ) from error

    def side_files(self, model: nn.Module) -> dict[str, Any]:
        """The Engram token map, when it is set."""
        engram = getattr(model, "engram_hash", None)
        if engram is None or engram.token_map is None:
            return {}
        return {TOKEN_MAP_FILE: engram.token_map.tolist()}
