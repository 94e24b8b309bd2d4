"""A whole decode or verify step of fixed shape, from device tensors to logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.core.errors import ConfigError
from deepinfer.kernels.fused import fused_kernels
from deepinfer.models.deepseek_v41.autocast import without_autocast
from deepinfer.models.deepseek_v41.cache import SlotCache
from deepinfer.models.deepseek_v41.decode_inputs import DecodeInputs
from deepinfer.models.deepseek_v41.decode_pass import DecodePass
from deepinfer.models.deepseek_v41.decode_stack import run_layers, why_not_fused
from deepinfer.models.deepseek_v41.hyper_connection import collapse, initial_pre
from deepinfer.models.deepseek_v41.model import DeepseekV41
from deepinfer.models.deepseek_v41.packed_pass import PackedDecodePass, why_no_packed_steps
from deepinfer.models.deepseek_v41.packed_rows import PackedRows
from deepinfer.models.deepseek_v41.rope import rope_frequencies

__all__ = ["DecodeOutput", "DecodeStep", "why_no_fixed_shape"]


@dataclass(frozen=True, slots=True)
class DecodeOutput:
    """What a step gives; padding included.

    Attributes:
        hidden: Collapsed streams before the final norm, shape [rows * tokens per row, hidden].
        features: Mean streams that entered the draft's target layers, side by side; None without a draft, or when they
            were not wanted.
        logits: Shape [rows * tokens per row, vocab], fp32.
    """

    hidden: Tensor
    features: Tensor | None
    logits: Tensor


def why_no_fixed_shape(model: DeepseekV41, cache: SlotCache) -> str:
    """Why a model cannot run steps of fixed shape over a cache, or "".

    Args:
        model: The model.
        cache: The cache.
    """
    if isinstance(cache.rows, PackedRows):
        reason = why_no_packed_steps(model, cache)
        if reason:
            return reason
    if cache.device.type == "cuda" and model.config.hc_mult != 4:
        return f"the kernels take 4 residual streams, and the model has {model.config.hc_mult}"
    return why_not_fused(model)


class DecodeStep:
    """Runs steps of fixed shape; on a GPU a call can be recorded, since it reads nothing on the host.

    The caller keeps the books of the cache on the host: `begin` before a step and `commit` after it.
    """

    def __init__(
        self, model: DeepseekV41, cache: SlotCache, kernels: ModuleType | None = None
    ) -> None:
        """Binds a model and a cache.

        Args:
            model: The model.
            cache: The cache.
            kernels: Row-wise steps; None for those of the cache's device.

        Raises:
            ConfigError: They cannot run steps of fixed shape.
        """
        reason = why_no_fixed_shape(model, cache)
        if reason:
            raise ConfigError(f"No step of fixed shape: {reason}. Use model.forward.")
        self._model = model
        self._cache = cache
        self._kernels = kernels or fused_kernels(cache.device)
        self._frequencies = tuple(
            rope_frequencies(model.config, compressed=kind, device=cache.device)
            for kind in (False, True)
        )

    @without_autocast
    @torch.inference_mode()
    def __call__(
        self,
        inputs: DecodeInputs,
        context: int,
        future: Tensor | None = None,
        *,
        with_features: bool = True,
        feed: Callable[[Tensor, Tensor, Tensor], None] | None = None,
    ) -> DecodeOutput:
        """Runs one step.

        Args:
            inputs: Rows, on the cache's device.
            context: Tokens that any row holds at most, this step included.
            future: Token sampled last for each slot, shape [slots], int64, or None when all ids are known.
            with_features: Whether features are given, or fed.
            feed: Called with the features, positions and ring rows of all tokens, see `DraftStep.write_context`, instead
                of giving them.

        Returns:
            Hidden rows, features and logits of all tokens.
        """
        model = self._model
        kind = PackedDecodePass if isinstance(self._cache.rows, PackedRows) else DecodePass
        run = kind(
            inputs,
            self._cache,
            self._frequencies,
            context,
            self._kernels,
            future,
            deterministic=model.deterministic,
            own_steps=model.row_kernels() is None,
            with_features=with_features,
        )
        if model.engram_hash is not None:
            run.engram_rows = model.engram_hash.rows(run.history(model.engram_hash.ngram))
        streams = F.embedding(run.ids, model.embed.weight).unsqueeze(1)
        streams = streams.repeat(1, model.config.hc_mult, 1)
        pre = initial_pre(len(run.ids), model.config.hc_mult, run.ids.device)
        if model.deterministic and model.row_kernels() is None:
            # The layers' own steps: those of the general pass, so that its bits come out.
            for layer in model.layers:
                streams, pre = layer(streams, pre, run)
            hidden = collapse(streams, pre, deterministic=True)
        else:
            streams, pre = run_layers(model.layers, streams, pre, run)
            hidden = collapse(streams, pre, deterministic=model.deterministic)
        if model.deterministic:
            logits = model.compute_logits(hidden)
        else:
            norm = model.norm
            normed = self._kernels.norm_rope_round(hidden.unsqueeze(1), norm.weight, norm.eps)
            logits = model.head(normed.squeeze(1).float())
        features = None if run.features is None else torch.cat(run.features, -1)
        if features is not None and feed is not None:
            feed(features, run.flat_positions, run.ring_index)
            features = None
        return DecodeOutput(hidden, features, logits)
