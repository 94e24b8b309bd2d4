"""How large the cache of an engine is, and the parts that are made to that measure."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch

from deepinfer.cache import BlockCacheManager, CacheIdentity, ReplayPolicy
from deepinfer.core.clock import Clock
from deepinfer.core.config import EngineConfig
from deepinfer.core.errors import ConfigError
from deepinfer.core.protocols import ModelInfo, StatsSink
from deepinfer.engine.host_tier import HostTier
from deepinfer.engine.memory import free_bytes

__all__ = [
    "CacheShape",
    "device_of",
    "fit_blocks",
    "fit_chunk",
    "fit_model_len",
    "make_host_tier",
    "make_manager",
    "narrows",
    "window_layers",
]

_MIN_FITTED_TOKENS = 256
_CHUNK_TOKENS = 512
_CHUNK_MEMORY = 8
_MAX_ROLLBACK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """The measures of a model's cache.

    Attributes:
        num_slots: Requests that can hold state at once.
        max_model_len: Most tokens of one request.
        max_step_tokens: Most tokens of one request in one step.
        num_blocks: Blocks, or None for one contiguous block a slot.
        block_size: Tokens in one block.
        draft_length: Most drafts a row.
        window_layers: Layers whose window rows a window slot holds, or None for the model's choice.
    """

    num_slots: int
    max_model_len: int
    max_step_tokens: int
    num_blocks: int | None = None
    block_size: int = 128
    draft_length: int = 0
    window_layers: int | None = None

    def make(self, model: Any) -> Any:
        """The model's cache.

        Args:
            model: Has `new_cache`.

        Returns:
            The cache.
        """
        options = self._rollback
        if self.window_layers is not None:
            options["window_layers"] = self.window_layers
        return model.new_cache(
            *self._sizes, num_blocks=self.num_blocks, block_size=self.block_size, **options
        )

    def make_contiguous(self, model: Any) -> Any:
        """The model's cache, with one block of its own for each slot.

        Args:
            model: Has `new_cache`.

        Returns:
            The cache.
        """
        return model.new_cache(*self._sizes, **self._rollback)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self.num_slots, self.max_model_len, self.max_step_tokens

    @property
    def _rollback(self) -> dict[str, int]:
        many = self.draft_length > _MAX_ROLLBACK
        return {"max_rollback": self.draft_length} if many else {}


def window_layers(model: Any, config: EngineConfig) -> int | None:
    """Layers whose window rows a window slot must hold, if these are more than the model would choose.

    Without `decoder_replay` every layer runs for every token of a prompt, so a restored prefix needs all their windows.

    Args:
        model: Its `new_cache` may take `window_layers`.
        config: Its options.

    Returns:
        All layers, or None for the model's choice.
    """
    layers: int | None = getattr(model.config, "num_hidden_layers", None)
    if config.decoder_replay or not config.num_window_slots or layers is None:
        return None
    return layers if "window_layers" in signature(model.new_cache).parameters else None


def device_of(model: Any) -> torch.device:
    """Where a model is.

    Args:
        model: Any model, or None.

    Returns:
        Its `device`, or that of its first parameter, or the CPU.
    """
    device = getattr(model, "device", None)
    if device is None and hasattr(model, "parameters"):
        device = next(model.parameters()).device
    return torch.device(device if device is not None else "cpu")


def fit_chunk(model: Any, config: EngineConfig, limit: int) -> int:
    """Most tokens of one request in one step.

    Args:
        model: Has `new_cache`; None when the cache is there already.
        config: Its lengths, its number of requests, and whether chunks are bounded by time.
        limit: Most tokens of one sequence.

    Returns:
        As configured. Without that 512, and for chunks bounded by time as many as a step may have, halved until what
        they add to the slots takes an eighth of the free memory at most; never more than `limit`.
    """
    chunk = config.prefill_chunk_tokens
    if chunk is None:
        chunk = _CHUNK_TOKENS
        if config.target_step_s is not None:
            chunk = max(chunk, min(config.max_num_batched_tokens, limit))
            if model is not None and chunk > _CHUNK_TOKENS:
                few, many = (
                    model.new_cache(1, _MIN_FITTED_TOKENS, tokens).size_bytes
                    for tokens in (_CHUNK_TOKENS, 2 * _CHUNK_TOKENS)
                )
                per_token = (many - few) / _CHUNK_TOKENS * config.max_num_seqs
                room = free_bytes(device_of(model)) / _CHUNK_MEMORY
                while chunk > _CHUNK_TOKENS and per_token * chunk > room:
                    chunk = max(_CHUNK_TOKENS, chunk // 2)
    return min(chunk, limit)


def fit_model_len(model: Any, num_slots: int, max_step_tokens: int, limit: int) -> int:
    """The longest sequence for which all slots fit into half of the memory that is free.

    Args:
        model: Has `new_cache`.
        num_slots: Slots.
        max_step_tokens: Most tokens of one request in one step.
        limit: The model's own limit in tokens.

    Returns:
        Tokens, at most `limit`, a multiple of 128 when below it.

    Raises:
        ConfigError: Not even 256 tokens fit.
    """
    short = min(limit, _MIN_FITTED_TOKENS)
    if limit <= 2 * short:
        return limit
    step = min(max_step_tokens, 2 * short)
    sizes = [model.new_cache(1, tokens, step).size_bytes for tokens in (short, 2 * short)]
    per_token = (sizes[1] - sizes[0]) / short
    fixed = sizes[0] - per_token * short
    fixed *= max(1.0, max_step_tokens / step)
    room = free_bytes(device_of(model)) / 2 / num_slots - fixed
    fitted = int(room / max(per_token, 1e-9)) // 128 * 128
    if fitted < short:
        raise ConfigError(
            f"the cache of {num_slots} requests does not fit: {free_bytes(device_of(model)) >> 20} MiB are free, half "
            f"of them for the cache, and one request of {short} tokens takes "
            f"{(fixed + per_token * short) / 2**20:.0f} MiB. Lower max_num_seqs or prefill_chunk_tokens.",
            field="max_num_seqs",
            value=num_slots,
        )
    return min(limit, fitted)


def fit_blocks(
    model: Any, config: EngineConfig, max_step_tokens: int, limit: int, device: torch.device
) -> tuple[int, int]:
    """The longest sequence and the number of blocks that fit into half of the memory that is free.

    Args:
        model: Has `new_cache`.
        config: Its numbers of requests and blocks, its lengths.
        max_step_tokens: Most tokens of one request in one step.
        limit: The model's own limit in tokens.
        device: Where the model is.

    Returns:
        Tokens of the longest sequence, and blocks: as configured, else as many as all requests can use or as fit.

    Raises:
        ConfigError: Not even one request of 256 tokens fits.
    """
    longest = limit if config.max_model_len is None else config.max_model_len
    size, slots = config.block_size, config.max_num_seqs
    if config.num_blocks is not None:
        if config.max_model_len is None:
            longest = min(longest, config.num_blocks * size)
        return longest, config.num_blocks
    wanted = slots * -(-longest // size)
    short = min(limit, _MIN_FITTED_TOKENS)

    def bytes_of(tokens: int, blocks: int) -> int:
        cache = model.new_cache(1, tokens, max_step_tokens, num_blocks=blocks, block_size=size)
        return int(cache.size_bytes)

    base = bytes_of(short, 1)
    block = max(1, bytes_of(short, 2) - base)
    token = max(0.0, (bytes_of(2 * short, 1) - base) / short) if limit >= 2 * short else 0.0
    slot = max(0.0, base - block - token * short)
    room, least = free_bytes(device) / 2, min(short, longest)
    if config.max_model_len is None:  # one sequence of the longest, and the slots of all
        spare = room - slots * slot
        longest = min(longest, int(spare / (slots * token + block / size)) // size * size)
    fitted = int((room - slots * (slot + token * longest)) // block)
    if fitted * size < least or longest < least:
        raise ConfigError(
            f"the cache of {slots} requests does not fit: {free_bytes(device) >> 20} MiB are free, half of them "
            f"for the cache; the state of one request takes {slot / 2**20:.0f} MiB and a block of {size} tokens "
            f"{block / 2**20:.2f} MiB. Lower max_num_seqs or prefill_chunk_tokens.",
            field="max_num_seqs",
            value=slots,
        )
    return longest, min(wanted, fitted)


def narrows(model_cache: Any, config: EngineConfig) -> bool:
    """Whether the layers above the last one that owns a pool run for the last window of a prompt only.

    Args:
        model_cache: Its `narrowing` is looked at.
        config: Its `decoder_replay` is looked at.

    Returns:
        True when the layout of the layers allows it and the options do.
    """
    narrowing = getattr(model_cache, "narrowing", None)
    return config.decoder_replay and narrowing is not None and narrowing.first_layer is not None


def make_host_tier(model_cache: Any, config: EngineConfig, device: torch.device) -> HostTier | None:
    """Host memory for cache content.

    Args:
        model_cache: Has `block_bytes` and `windows_bytes`.
        config: How much.
        device: Where the cache is.

    Returns:
        The memory, or None when none is asked for.

    Raises:
        ConfigError: The memory holds no block.
    """
    if not (config.host_cache_bytes or config.num_window_slots):
        return None
    blocks = 0
    if config.host_cache_bytes:
        blocks = config.host_cache_bytes // model_cache.block_bytes
        if not blocks:
            raise ConfigError(
                f"host_cache_bytes is {config.host_cache_bytes}, and one block takes "
                f"{model_cache.block_bytes}; give room for one at least, or 0 for none.",
                field="host_cache_bytes",
                value=config.host_cache_bytes,
                limit=f"0, or from {model_cache.block_bytes}",
            )
    windows = config.num_window_slots
    return HostTier(
        blocks,
        model_cache.block_bytes if blocks else 0,
        windows,
        model_cache.windows_bytes if windows else 0,
        device=device,
    )


def make_manager(
    model_cache: Any,
    shape: CacheShape,
    config: EngineConfig,
    info: ModelInfo,
    host_tier: HostTier | None,
    *,
    sink: StatsSink | None,
    clock: Clock,
) -> BlockCacheManager:
    """The books of a model's cache in blocks.

    Args:
        model_cache: The cache.
        shape: Its measures.
        config: Options.
        info: Facts of the model.
        host_tier: Host memory, or None.
        sink: Where events go, or None.
        clock: Time of events.

    Returns:
        The manager.
    """
    is_narrow = narrows(model_cache, config)
    narrowing = getattr(model_cache, "narrowing", None)
    model_config = getattr(model_cache, "config", None)
    layers = getattr(model_config, "num_hidden_layers", 1)
    if narrowing is not None and (is_narrow or model_config is None):
        layers = narrowing.window_layers
    stored = getattr(model_cache, "window_layers", 0)
    window_rows = info.window + 1 + info.draft_length if info.window else 0
    ring = getattr(model_cache, "ring_size", window_rows)
    return BlockCacheManager(
        num_slots=shape.num_slots,
        num_blocks=shape.num_blocks or shape.num_slots,
        block_size=shape.block_size,
        max_tokens=shape.max_model_len,
        prefix_cache=config.prefix_cache,
        replay=ReplayPolicy(
            mode=config.replay_form,
            window=info.window,
            layers=max(1, layers),
            narrowed=is_narrow,
            stored_layers=min(stored, layers) if stored else None,
        ),
        identity=CacheIdentity(
            model=info.fingerprint,
            determinism="deterministic" if config.deterministic else "default",
        ),
        deterministic=config.deterministic,
        num_host_blocks=host_tier.num_blocks if host_tier is not None else 0,
        num_window_slots=config.num_window_slots,
        window_rows=window_rows,
        ring_spare=max(0, ring - window_rows - (1 + shape.draft_length)),
        sink=sink,
        clock=clock,
    )
