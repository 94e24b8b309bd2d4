"""Configuration of DeepSeek-V4.1: the published `config.json`, as one frozen object.

Field names are the published ones. Text fields sit directly on `DeepseekV41Config`; the vision tower has
its own `VisionConfig`. The file's nesting (`text_config`, `vision_config`, `quantization_config`) is only
seen by `from_dict` and `to_dict`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer.core.errors import CheckpointMissing, ConfigError
from deepinfer.models.deepseek_v41.config_checks import check_config

__all__ = ["DeepseekV41Config", "VisionConfig"]

MODEL_TYPE = "deepseek_v41"
_TOP_LEVEL = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id", "dtype")


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The vision tower and its aligner.

    Attributes:
        num_hidden_layers: Transformer blocks.
        hidden_size: Channels of a patch.
        num_attention_heads: Attention heads.
        intermediate_size: Channels of the gated MLP.
        patch_size: Side of a square patch, in pixels.
        rope_theta: Base of the 2-D rotary angles.
        downsample_ratio: Side of the square of patches that becomes one image token.
        max_image_tokens: Most tokens of one image, start, newlines and end included.
        min_pixels: Smaller images are scaled up to this many pixels.
        max_wh_ratio: Largest width / height (or its inverse), or None for no limit.
        extra: Published keys that nothing here reads; kept for `to_dict`.
    """

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int = 14
    rope_theta: float = 10000.0
    downsample_ratio: int = 3
    max_image_tokens: int = 1024
    min_pixels: int = 295936
    max_wh_ratio: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> VisionConfig:
        """Reads a published `vision_config` block.

        Args:
            data: The block; `max_num_tokens` is taken as an older name of `max_image_tokens`.

        Raises:
            ConfigError: A field is missing.
        """
        data = dict(data)
        if "max_num_tokens" in data:
            data.setdefault("max_image_tokens", data.pop("max_num_tokens"))
        return cls(**_split(cls, data, "vision_config"))

    def to_dict(self) -> dict[str, Any]:
        """The published `vision_config` block."""
        return {"model_type": f"{MODEL_TYPE}_vision", **_plain(self, skip=()), **self.extra}


@dataclass(frozen=True, kw_only=True)
class DeepseekV41Config:
    """DeepSeek-V4.1: the text model, the DSpark draft, and optionally the vision tower.

    Attributes:
        vocab_size: Rows of the embedding and of the head.
        hidden_size: Channels of a residual stream.
        num_hidden_layers: Layers of the target model.
        moe_intermediate_size: Channels of one expert.
        num_attention_heads: Query heads.
        head_dim: Channels of a head; the one key-value head has as many.
        qk_rope_head_dim: Trailing channels of a head that are rotated.
        q_lora_rank: Channels of the query bottleneck.
        o_lora_rank: Channels of one group of the output bottleneck.
        o_groups: Groups of heads in the output projection.
        n_routed_experts: Routed experts of a layer.
        num_experts_per_tok: Routed experts that a token uses.
        sliding_window: Window of the local attention, in tokens, the query included.
        compress_ratios: Per layer, then per draft stage: 0 window only, 1 pool of every token, 2 of every pair.
        kv_source_layer_ids: Layers that own a pool and its index keys.
        index_source_layer_ids: Layers that select pool rows.
        candidate_source_layer_id: Index source whose best blocks bound the later index sources, or None.
        index_n_heads: Heads of the indexer.
        index_head_dim: Channels of an indexer head.
        index_topk: Pool rows that a query attends to.
        candidate_topk_blocks: Blocks kept by the candidate source.
        candidate_block_size: Pool rows in a block.
        swiglu_limit: Clamp of the expert activations.
        routed_scaling_factor: Factor on the normalised routing weights.
        rms_norm_eps: Added to the mean square in every RMS norm.
        hc_mult: Residual streams.
        hc_sinkhorn_iters: Sinkhorn iterations of the stream mixing matrix.
        hc_eps: Added in the stream mixing.
        rope_theta: Rotary base of the layers of ratio 0.
        compress_rope_theta: Rotary base of the other layers, with YaRN.
        rope_scaling: YaRN block: factor, beta_fast, beta_slow, original_max_position_embeddings.
        max_position_embeddings: Longest sequence, in tokens.
        engram_layer_ids: Layers with an Engram.
        engram_num_embeddings: Rows of each Engram table.
        engram_max_ngram_size: Longest n-gram; n-grams of 2 up to this are hashed.
        engram_vocab_size: Buckets of one hash head, about; each head has its own prime above.
        engram_n_heads: Hash heads per n-gram size.
        engram_head_dim: Channels of one table row.
        engram_pad_token_id: Token id that stands for positions before the start.
        engram_compressed_vocab_size: Token ids left after folding case, accents and spaces.
        num_nextn_predict_layers: Stages of the DSpark draft; 0 means no draft.
        dspark_block_size: Tokens drafted at once.
        dspark_noise_token_id: Token id at the draft positions behind the anchor.
        dspark_target_layer_ids: Layers whose input streams feed the draft.
        dspark_markov_rank: Rank of the draft's Markov head.
        dspark_n_routed_experts: Routed experts of a draft stage.
        dspark_num_experts_per_tok: Routed experts that a token uses in a draft stage.
        bos_token_id: Beginning of sequence.
        eos_token_id: End of sequence.
        pad_token_id: Padding.
        image_token_id: Placeholder at every position of an image span, or None.
        dtype: Published dtype of the unquantised weights.
        vision: The vision tower, or None.
        quantization_config: Published quantisation block, or None.
        extra: Published text keys that nothing here reads; kept for `to_dict`.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    moe_intermediate_size: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    n_routed_experts: int
    num_experts_per_tok: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    candidate_source_layer_id: int | None = None
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8
    swiglu_limit: float = 10.0
    routed_scaling_factor: float = 1.5
    rms_norm_eps: float = 1e-20
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: Mapping[str, Any]
    max_position_embeddings: int = 1048576
    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 16000000
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 0
    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 0
    dspark_n_routed_experts: int = 0
    dspark_num_experts_per_tok: int = 0
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    image_token_id: int | None = None
    dtype: str = "bfloat16"
    vision: VisionConfig | None = None
    quantization_config: Mapping[str, Any] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if str(f.type).startswith("tuple") and not isinstance(value, tuple):
                object.__setattr__(self, f.name, tuple(value))
        check_config(self)

    # ---- layer plan ----

    def kv_source(self, layer: int) -> int | None:
        """Layer whose pool `layer` reads: the largest KV source not above it, or None for a ratio of 0."""
        return (
            _last_not_above(self.kv_source_layer_ids, layer)
            if self.compress_ratios[layer]
            else None
        )

    def index_source(self, layer: int) -> int | None:
        """Layer whose row selection `layer` uses, or None for a ratio of 0."""
        return (
            _last_not_above(self.index_source_layer_ids, layer)
            if self.compress_ratios[layer]
            else None
        )

    @property
    def engram_width(self) -> int:
        """Channels of the concatenated table rows of one token."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads * self.engram_head_dim

    # ---- files ----

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DeepseekV41Config:
        """Reads a published `config.json`.

        Args:
            data: The parsed file. Text fields may also sit at the top level.

        Returns:
            The checked configuration. Keys that nothing here reads are kept in `extra`.

        Raises:
            ConfigError: A field is missing (the nearest unknown key is named) or out of range.
        """
        data = dict(data)
        model_type = data.pop("model_type", MODEL_TYPE)
        if model_type != MODEL_TYPE:
            raise ConfigError(
                f"model_type is {model_type!r}; this class reads {MODEL_TYPE!r}. Use the class of that model.",
                field="model_type", value=model_type, limit=MODEL_TYPE,
            )  # fmt: skip
        data.pop("architectures", None)
        vision = data.pop("vision_config", None)
        quantization = data.pop("quantization_config", None)
        text = {**data, **data.pop("text_config", {})}
        text.pop("text_config", None)
        text.pop("model_type", None)
        for key in _TOP_LEVEL:
            if key in data:
                text[key] = data[key]
        has_vision = bool(vision) and vision.get("num_hidden_layers", 0) > 0
        return cls(
            **_split(cls, text, "text_config"),
            vision=VisionConfig.from_dict(vision) if has_vision else None,
            quantization_config=quantization,
        )

    def to_dict(self) -> dict[str, Any]:
        """The published form of `config.json`; `from_dict(to_dict())` gives an equal configuration."""
        text = _plain(self, skip=("vision", "quantization_config", *_TOP_LEVEL))
        out: dict[str, Any] = {
            "architectures": ["DeepseekV41ForCausalLM"],
            "model_type": MODEL_TYPE,
        }
        out |= {key: getattr(self, key) for key in _TOP_LEVEL if getattr(self, key) is not None}
        out["text_config"] = {"model_type": f"{MODEL_TYPE}_text", **text, **self.extra}
        if self.vision is not None:
            out["vision_config"] = self.vision.to_dict()
        if self.quantization_config is not None:
            out["quantization_config"] = dict(self.quantization_config)
        return out

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> DeepseekV41Config:
        """Reads `config.json` of a local checkpoint folder.

        Raises:
            CheckpointMissing: The folder has no `config.json`.
            ConfigError: The file is not JSON, or a field is missing or out of range.
        """
        path = Path(folder) / "config.json"
        try:
            data = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            raise CheckpointMissing(
                f"{path} does not exist; give a checkpoint folder that holds config.json.",
                path=path,
            ) from None
        except ValueError as error:
            raise ConfigError(f"{path} is not valid JSON ({error}); download it again.") from error
        return cls.from_dict(data)


def _last_not_above(sources: Sequence[int], layer: int) -> int | None:
    return max((source for source in sources if source <= layer), default=None)


def _plain(config: Any, skip: Sequence[str]) -> dict[str, Any]:
    out = {}
    for f in dataclasses.fields(config):
        if f.name in skip or f.name == "extra":
            continue
        value = getattr(config, f.name)
        out[f.name] = (
            list(value)
            if isinstance(value, tuple)
            else dict(value)
            if isinstance(value, Mapping)
            else value
        )
    return out


def _split(cls: type, data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Known fields as they are, the rest under `extra`; a missing field is an error that names the nearest key."""
    fields = {
        f.name: f
        for f in dataclasses.fields(cls)
        if f.name not in ("extra", "vision", "quantization_config")
    }
    known = {key: value for key, value in data.items() if key in fields}
    extra = {key: value for key, value in data.items() if key not in fields and key != "model_type"}
    for name, f in fields.items():
        if name in known:
            continue
        close = difflib.get_close_matches(name, extra, n=1, cutoff=0.85)
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required or close:
            hint = (
                f"did you mean it by {close[0]!r}?"
                if close
                else "add it, or use the published file."
            )
            raise ConfigError(
                f"{where}.{name} is missing; {hint}", field=f"{where}.{name}", limit="present"
            )
    return {**known, "extra": extra}
