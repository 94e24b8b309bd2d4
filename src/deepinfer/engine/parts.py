"""What the engine needs of its parts beyond the protocols of core, and what it reads off a model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from deepinfer.core.plan import StepPlan, StepResult
from deepinfer.core.protocols import Drafter, ModelInfo, Scheduler, StepHandle
from deepinfer.core.types import Request
from deepinfer.scheduling import Progress

__all__ = ["EngineDrafter", "EngineRunner", "EngineScheduler", "model_info", "ungenerated_ids"]

_SAMPLED_TENSORS = 64
_SAMPLED_VALUES = 64


@runtime_checkable
class EngineScheduler(Scheduler, Protocol):
    """A scheduler that an engine can drive.

    It may also have `reset()`, which forgets every request whatever state the books are in (without it an
    interrupt that breaks the books ends the engine), `sequence(rid)`, `preempt(rid)` and `reset_prefix_cache()`.
    """

    def apply(self, result: StepResult) -> Sequence[Progress]:
        """Settles the result of the oldest launched step."""
        ...


@runtime_checkable
class EngineRunner(Protocol):
    """A runner that an engine can drive."""

    info: ModelInfo

    def forward(self, plan: StepPlan, requests: Mapping[str, Request]) -> StepHandle:
        """Starts the forward pass of a plan."""
        ...

    def sample(self, handle: Any, masks: Any = None) -> StepHandle:
        """Starts sampling."""
        ...

    def collect(self, handle: Any) -> StepResult:
        """Waits for the step and returns its result."""
        ...

    def close(self) -> None:
        """Gives the device memory back."""
        ...


@runtime_checkable
class EngineDrafter(Drafter, Protocol):
    """A drafter that says how far it looks ahead.

    A drafter may also have `bind(cache)`, called with the cache of the runner that it serves from now on;
    `unbind(cache)`, called when that runner closes, maybe after the next one was bound; `release(slot)`, called when the
    request of a slot has ended; and `observe(features, positions, slots)`, called with the target features of every settled row, in order, and
    with one position and one slot a row. One that takes features within a recorded step has `write_context(features,
    positions, ring_rows)`, called with those of all tokens, `settle(slots, starts, ends)`, called with those that stay,
    and `is_ready(slot, position)`: steps in which no row is verified do not feed it.
    """

    @property
    def draft_length(self) -> int:
        """Most drafts that one row gets."""
        ...


def model_info(model: Any, tokenizer: Any = None) -> ModelInfo:
    """What the other parts need to know of a model.

    Args:
        model: Has `config` with `vocab_size` and `max_position_embeddings`.
        tokenizer: Source of the begin and end tokens that the configuration does not name, or None.

    Returns:
        The facts. The fingerprint covers the configuration, the rounding level, the dtype of the weights, and a
        sample of their values.
    """
    config = model.config
    eos = _first(config, tokenizer, "eos_token_id")
    eos_ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    draft = getattr(model, "draft", None)
    return ModelInfo(
        vocab_size=config.vocab_size,
        max_model_len=config.max_position_embeddings,
        eos_token_ids=eos_ids,
        bos_token_id=_first(config, tokenizer, "bos_token_id"),
        window=getattr(config, "sliding_window", 0),
        draft_length=getattr(config, "dspark_block_size", 0) if draft is not None else 0,
        fingerprint=_fingerprint(model),
    )


def ungenerated_ids(model: Any, tokenizer: Any = None) -> tuple[int, ...]:
    """Token ids that only mark places in prompts, such as images, and that an output must not hold.

    Args:
        model: Has a `config`; its `image_token_id` is such an id.
        tokenizer: Its `input_only_ids` are such ids, or None.

    Returns:
        The ids, ascending.
    """
    ids = set(getattr(tokenizer, "input_only_ids", ()))
    image = getattr(model.config, "image_token_id", None)
    if image is not None:
        ids.add(image)
    return tuple(sorted(token for token in ids if 0 <= token < model.config.vocab_size))


def _first(config: Any, tokenizer: Any, name: str) -> Any:
    value = getattr(config, name, None)
    return value if value is not None else getattr(tokenizer, name, None)


def _fingerprint(model: Any) -> bytes:
    digest = hashlib.sha256(b"deepinfer-model-1")
    digest.update(repr(getattr(model, "rounding", None)).encode())
    digest.update(repr(model.config).encode())
    named = list(model.named_parameters()) if hasattr(model, "named_parameters") else []
    stride = max(1, len(named) // _SAMPLED_TENSORS)
    for index, (name, tensor) in enumerate(named):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        if index % stride == 0 and tensor.device.type != "meta":
            values = tensor.detach().flatten()[:_SAMPLED_VALUES].float().cpu().numpy()
            digest.update(values.tobytes())
    return digest.digest()
