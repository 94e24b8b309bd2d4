"""Model architectures by the name that `config.json` gives: what loading and saving need to know of a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from deepinfer.core.errors import ConfigError
from deepinfer.core.registry import Registry

if TYPE_CHECKING:
    import torch
    from torch import nn

    from deepinfer.models.formats import Layout, Weight

__all__ = ["ARCHITECTURES", "Architecture", "architecture_of"]


class Architecture(Protocol):
    """What a model brings so that checkpoints of it can be loaded and saved."""

    def parse_config(self, data: Mapping[str, Any]) -> Any:
        """The configuration object of a parsed `config.json`; raises ConfigError when it does not fit."""

    def config_dict(self, config: Any, layout: Layout) -> dict[str, Any]:
        """The `config.json` that belongs to a checkpoint in the given layout."""

    def layout(self, config: Any) -> Layout:
        """The layout that the configuration announces; raises ConfigError for a quantisation it cannot read."""

    def weights(self, config: Any) -> dict[str, Weight]:
        """Every weight by its published name, in the order in which checkpoints are written."""

    def build(
        self,
        config: Any,
        *,
        rounding: str,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> nn.Module:
        """The module with unset parameters; on the device "meta" it takes no memory."""

    def finish(self, model: nn.Module, folder: Path) -> None:
        """Sets what is not a weight, from other files of the folder, after the weights are in."""

    def side_files(self, model: nn.Module) -> dict[str, Any]:
        """File names and JSON contents that `finish` reads and the model holds."""


ARCHITECTURES: Registry[Architecture] = Registry("model architecture", group="deepinfer.models")
"""Name in `config.json` to a factory of the `Architecture`; plug-ins use the entry-point group `deepinfer.models`."""

ARCHITECTURES.register(
    "DeepseekV41ForCausalLM",
    "deepinfer.models.deepseek_v41.architecture:DeepseekV41Architecture",
)


def architecture_of(data: Mapping[str, Any]) -> Architecture:
    """The architecture that a `config.json` names.

    Args:
        data: The parsed file; `architectures` is a list of one name.

    Returns:
        The architecture.

    Raises:
        ConfigError: No name, or one that nothing is registered for (the known ones are listed).
    """
    names = data.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ConfigError(
            f"config.json has architectures = {names!r}; it must be a list with one name, "
            f"for example ['DeepseekV41ForCausalLM'].",
            field="architectures",
            value=names,
        )
    return ARCHITECTURES.create(names[0])
