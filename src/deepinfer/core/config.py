"""Options of an engine: one frozen dataclass, checked when it is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError

__all__ = ["DTYPES", "REPLAY_FORMS", "ROUNDING_LEVELS", "EngineConfig"]

ROUNDING_LEVELS = ("none", "cache", "full")
"""How much of the published number formats a forward pass simulates."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
"""Names accepted for the dtype of weights that are not quantised."""
REPLAY_FORMS = ("bounded", "exact", "off")
"""How much of a cached prefix is run again to rebuild the window rows before its end."""

_INT_MAX = 2**31 - 1
_BYTES_MAX = 2**50


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of one engine.

    Attributes:
        deterministic: Same tokens bit for bit whatever the batch, the chunking and the history of the cache.
        max_num_seqs: Most requests that run at once; each holds a slot.
        max_num_batched_tokens: Most tokens in one step.
        prefill_chunk_tokens: Most prompt tokens that one request runs in one step. None takes 512, and with
            `target_step_s`, which bounds chunks by time, as many as `max_num_batched_tokens` and an eighth of the free
            memory allow: window rows of a chunk are kept for every slot.
        max_model_len: Most tokens of prompt plus output; None takes the model's own limit.
        block_size: Tokens in one cache block.
        num_blocks: Cache blocks in all; None takes what half of the free memory holds, at most enough for
            `max_num_seqs` requests of `max_model_len` tokens.
        prefix_cache: Reuse the cache entries of prompts that begin alike.
        replay: What a request runs again after such a hit, to rebuild the window rows before its end. "bounded": one
            window, which gives other numbers than a full run (`Output.approximate_prefix`). "exact": as many
            windows as there are layers to rebuild, with the numbers of a full run; taken only where it pays. "off":
            a hit needs window rows kept in host memory. Deterministic engines use "exact" for "bounded".
        decoder_replay: Run the layers above the last one that owns a pool for the last window of a prompt only; it
            is what the architecture is made for. False runs every layer for every token.
        host_cache_bytes: Bytes of host memory for blocks that the device had to give up; 0 for none.
        num_window_slots: Places in host memory for the window rows at the end of a prefix; 0 for none.
        async_depth: Steps planned ahead of the results: 0, or 1 to plan while the device runs. The tokens are the
            same.
        cuda_graphs: Record decode and verify steps on a CUDA device as graphs, each shape when it first comes, and
            launch them as one from then on. False, and other devices, launch every kernel.
        target_step_s: Seconds that a step with prompts should take at most, by a cost model that is fitted as steps
            are run; None bounds prompts by tokens alone.
        rounding: "none", "cache" or "full": how much of the published number formats is simulated.
        device: Device of weights and cache, such as "cpu", "cuda" or "cuda:1"; "auto" takes what is there.
        dtype: Dtype of weights that are not quantised; "auto" is float32 on a CPU and bfloat16 elsewhere;
            a `torch.dtype` is taken too.
        seed: Base of the seeds of requests that bring none; None draws one at start.

    Raises:
        ConfigError: A value has the wrong type or is out of range.

    Examples:
        >>> EngineConfig(max_num_seqs=4).max_num_seqs
        4
        >>> EngineConfig.from_dict({"max_num_seq": 4})
        Traceback (most recent call last):
            ...
        deepinfer.core.errors.ConfigError: EngineConfig has no option 'max_num_seq'; did you mean \
'max_num_seqs'? Known options: ...
    """

    deterministic: bool = False
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 32_768
    prefill_chunk_tokens: int | None = None
    max_model_len: int | None = None
    block_size: int = 128
    num_blocks: int | None = None
    prefix_cache: bool = True
    replay: str = "bounded"
    decoder_replay: bool = True
    host_cache_bytes: int = 0
    num_window_slots: int = 0
    async_depth: int = 0
    cuda_graphs: bool = True
    target_step_s: float | None = None
    rounding: str = "full"
    device: str = "auto"
    dtype: str = "auto"
    seed: int | None = None

    def __post_init__(self) -> None:
        """Checks every field and stores it in its plain type."""
        new: dict[str, Any] = {
            name: checks.check_bool(name, getattr(self, name), ConfigError)
            for name in ("deterministic", "prefix_cache", "decoder_replay", "cuda_graphs")
        }
        new |= {
            "replay": checks.check_choice("replay", self.replay, REPLAY_FORMS, ConfigError),
            "rounding": checks.check_choice(
                "rounding", self.rounding, ROUNDING_LEVELS, ConfigError
            ),
            "dtype": checks.check_choice(
                "dtype", _name(self.dtype).removeprefix("torch."), DTYPES, ConfigError
            ),
            "device": checks.check_text("device", _device(self.device), ConfigError),
        }
        for name, low, high in (
            ("max_num_seqs", 1, 65_536),
            ("max_num_batched_tokens", 1, _INT_MAX),
            ("block_size", 1, 65_536),
            ("host_cache_bytes", 0, _BYTES_MAX),
            ("num_window_slots", 0, 1_000_000),
            ("async_depth", 0, 1),
        ):
            new[name] = checks.check_int(name, getattr(self, name), low, high, ConfigError)
        for name, low, high in (
            ("prefill_chunk_tokens", 1, _INT_MAX),
            ("max_model_len", 1, _INT_MAX),
            ("num_blocks", 1, _INT_MAX),
            ("seed", 0, 2**64 - 1),
        ):
            value = getattr(self, name)
            new[name] = (
                None if value is None else checks.check_int(name, value, low, high, ConfigError)
            )
        if self.target_step_s is not None:
            new["target_step_s"] = checks.check_float(
                "target_step_s", self.target_step_s, 1e-6, 3_600.0, ConfigError
            )
        for name, value in new.items():
            object.__setattr__(self, name, value)
        if self.max_num_batched_tokens < self.max_num_seqs:
            checks.fail(
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                f"at least max_num_seqs ({self.max_num_seqs})",
                ConfigError,
                "Every running request needs one token of each step.",
            )

    @property
    def replay_form(self) -> str:
        """`replay`, with "exact" for "bounded" when deterministic."""
        return "exact" if self.deterministic and self.replay == "bounded" else self.replay

    def replace(self, **changes: Any) -> EngineConfig:
        """A copy with some fields changed.

        Args:
            changes: Field names and new values.

        Returns:
            The checked copy.

        Raises:
            ConfigError: A name is unknown or a value unusable.
        """
        checks.check_keys("EngineConfig", changes, self.__dataclass_fields__, ConfigError)
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values that `from_dict` takes."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Makes a config from a mapping such as parsed JSON or YAML.

        Args:
            values: Field names and values.

        Returns:
            The checked config.

        Raises:
            ConfigError: A name is unknown (the message gives the nearest known one) or a value unusable.
        """
        checks.check_mapping("EngineConfig", values, ConfigError)
        checks.check_keys("EngineConfig", values, cls.__dataclass_fields__, ConfigError)
        return cls(**values)


def _name(value: object) -> str:
    return checks.plain_text(value) if isinstance(value, str) else str(value)


def _device(value: object) -> str:
    if value is None or isinstance(value, bool | int | float):
        checks.fail(
            "device", value, "a name such as 'cpu' or 'cuda:0', or a torch.device", ConfigError
        )
    return _name(value)
