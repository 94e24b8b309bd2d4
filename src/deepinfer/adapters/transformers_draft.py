"""Causal language models of `transformers` as targets of speculative generation, and of draft training."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer.core.errors import ConfigError, MissingDependency, ShapeError
from deepinfer.speculative.draft_module import TargetEnds
from deepinfer.speculative.generate import TargetOutput

__all__ = ["RecordedRows", "TransformersTarget"]


@dataclass(frozen=True, slots=True)
class RecordedRows:
    """What a draft is trained on.

    Attributes:
        features: Tapped hidden states, one tap behind the other, shape [rows, tokens, taps * hidden].
        final_hidden: What the output head reads, shape [rows, tokens, hidden].
    """

    features: Tensor
    final_hidden: Tensor


class TransformersTarget:
    """A causal language model of `transformers` behind the protocol of `speculative_generate`.

    Keys and values are kept in full for every layer, those with a sliding window included, so that rejected drafts can
    be taken back; models with a recurrent state cannot do that and are refused.

    Args:
        model: The model; it is put into evaluation mode.
        taps: Layers whose outputs a draft reads, rising; -1 is the embedding. The last layer is refused: the library
            gives its output only after the final norm.

    Raises:
        ConfigError: The model has no output head, is no decoder alone or keeps a recurrent state, or there is no such
            layer.
        MissingDependency: `transformers` is not installed.
    """

    def __init__(self, model: Any, taps: Sequence[int] = ()) -> None:
        try:
            library = importlib.import_module("transformers")
        except ImportError as error:
            raise MissingDependency(
                "targets of transformers need transformers; pip install transformers.",
                package="transformers",
                command="pip install transformers",
            ) from error
        _check_model(model)
        layers = int(model.config.get_text_config().num_hidden_layers)
        if not isinstance(taps, Sequence) or not all(isinstance(tap, int) for tap in taps):
            raise ConfigError(
                f"taps is {taps!r}; it must be a list of layers.", field="taps", value=taps
            )
        taps = tuple(taps)
        wrong = [tap for tap in taps if not -1 <= tap < layers - 1]
        if wrong or list(taps) != sorted(set(taps)):
            raise ConfigError(
                f"taps are {taps}; they must rise and lie from -1 to {layers - 2}, for a model of {layers} layers.",
                field="taps",
                value=taps,
            )
        self.model = model.eval()
        self.taps = taps
        self._new_cache = _cache_of(library, model.config.get_text_config())
        # Older versions of the library have a longer name for it.
        known = inspect.signature(type(model).forward).parameters
        self._cache_name = "cache" if "cache" in known else "past_key_values"

    @property
    def ends(self) -> TargetEnds:
        """Embedding and output head, for a draft to borrow."""
        return TargetEnds(self.model.get_input_embeddings(), self.model.get_output_embeddings())

    def forward(self, input_ids: Tensor, cache: Any = None, *, num_logits: int = 0) -> TargetOutput:
        """Runs the tokens that follow what is in the cache; see `CausalTarget`.

        Args:
            input_ids: Tokens, shape [tokens], int64.
            cache: What the call before returned; None starts a sequence.
            num_logits: Last rows whose logits are wanted; 0 says all.

        Returns:
            Logits, features (None without taps), and the cache, which is the one that came in.
        """
        if cache is None:
            cache = self._new_cache()
        out = self.model(
            input_ids=input_ids[None].to(self.model.device),
            **{self._cache_name: cache},
            use_cache=True,
            output_hidden_states=bool(self.taps),
            logits_to_keep=num_logits,
        )
        features = self._tapped(out.hidden_states)[0] if self.taps else None
        return TargetOutput(out.logits[0], features, cache)

    def crop(self, cache: Any, length: int) -> Any:
        """Forgets tokens; see `CausalTarget`.

        Args:
            cache: The cache; it is changed.
            length: Tokens that stay.

        Returns:
            The same cache.
        """
        # As a number of tokens to drop: the library has given up lengths here.
        surplus = cache.get_seq_length() - length
        if surplus > 0:
            cache.crop(-surplus)
        return cache

    @torch.no_grad()
    def record(self, input_ids: Tensor) -> RecordedRows:
        """Hidden states of whole texts, for training a draft.

        Args:
            input_ids: Texts, shape [rows, tokens], int64.

        Returns:
            The rows.

        Raises:
            ConfigError: There are no taps.
            ShapeError: There are not two axes.
        """
        if not self.taps:
            raise ConfigError(
                "this target has no taps, so there are no features to record; give taps=draft.config.taps.",
                field="taps",
            )
        if input_ids.ndim != 2:
            raise ShapeError(
                f"input_ids has shape {tuple(input_ids.shape)}; it must be [rows, tokens].",
                argument="input_ids",
                found=tuple(input_ids.shape),
            )
        out = self.model(
            input_ids=input_ids, use_cache=False, output_hidden_states=True, logits_to_keep=1
        )
        return RecordedRows(self._tapped(out.hidden_states), out.hidden_states[-1])

    def _tapped(self, states: Sequence[Tensor]) -> Tensor:
        return torch.cat([states[tap + 1] for tap in self.taps], -1)


def _cache_of(library: Any, config: Any) -> Callable[[], Any]:
    """Makes caches that keep everything.

    One that follows the configuration drops what a sliding window has left, so that nothing can be taken back; but only
    such a one has room for the keys of an indexer.
    """
    if "config" in inspect.signature(library.DynamicCache).parameters:
        layers = getattr(library.DynamicCache(config=config), "layers", ())
        if any("Indexed" in type(layer).__name__ for layer in layers):
            return lambda: library.DynamicCache(config=config)
    made: Callable[[], Any] = library.DynamicCache
    return made


def _check_model(model: Any) -> None:
    """Refuses what cannot verify drafts, before anything runs."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        found = type(model).__name__
        raise ConfigError(f"model is a {found}; it must be a model of transformers.", field="model")
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False) or model.get_output_embeddings() is None:
        raise ConfigError(
            f"{name} is no causal language model with an output head; use one of the ...ForCausalLM classes.",
            field="model",
        )
    kinds = getattr(config.get_text_config(), "layer_types", None) or ()
    others = {kind for kind in kinds if not kind.endswith("attention") or kind.startswith("linear")}
    if getattr(model, "_is_stateful", False) or others:
        layers = f" in layers of the kind {', '.join(sorted(others))}" if others else ""
        raise ConfigError(
            f"{name} keeps a recurrent state{layers}, which cannot be cropped when a draft is rejected; use a model whose "
            "layers all attend.",
            field="model",
        )
