"""Shape of a draft that is attached to a target model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError

__all__ = ["DraftConfig"]

_SIZES = {
    "vocab_size": 2**31,
    "hidden_size": 2**24,
    "num_layers": 1024,
    "num_heads": 4096,
    "num_kv_heads": 4096,
    "head_dim": 65_536,
    "intermediate_size": 2**24,
    "block_size": 256,
    "rank": 65_536,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """Everything that decides what a `DraftModule` computes.

    Attributes:
        vocab_size: Tokens of the target.
        hidden_size: Width of the target's hidden states, and of the draft.
        taps: Layers of the target whose outputs the draft reads, rising; -1 is the embedding. The last layer cannot be
            among them where its output is only known after the final norm.
        num_layers: Layers of the draft.
        num_heads: Query heads.
        num_kv_heads: Heads of keys and values; divides `num_heads`.
        head_dim: Width of a head, even.
        intermediate_size: Width of the feed-forward part.
        block_size: Drafts of a block. A trained draft has one: a shorter block would be another model, so fewer drafts
            are had by dropping the last ones.
        mask_token_id: Token whose embedding stands at positions that are not known; None learns one of its own.
        head: Sequential head: "markov", "gated" or "rnn".
        rank: Width of the sequential head.
        confidence: Whether there is a confidence head.
        confidence_with_token: Whether it also reads the token before the draft.
        confidence_bias: Whether it has a constant.
        rope_theta: Base of the rotary frequencies.
        rms_norm_eps: Constant in the norms.

    Raises:
        ConfigError: A number is out of range, or two do not fit together.
    """

    vocab_size: int
    hidden_size: int
    taps: tuple[int, ...]
    num_layers: int = 2
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 64
    intermediate_size: int = 1024
    block_size: int = 5
    mask_token_id: int | None = None
    head: str = "markov"
    rank: int = 64
    confidence: bool = True
    confidence_with_token: bool = True
    confidence_bias: bool = True
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        """Checks every field."""
        for name, most in _SIZES.items():
            checks.check_int(name, getattr(self, name), 1, most, ConfigError)
        if isinstance(self.taps, str) or not isinstance(self.taps, Iterable):
            checks.fail("taps", self.taps, "a list of layers", ConfigError)
        taps = tuple(checks.check_int("taps", tap, -1, 2**20, ConfigError) for tap in self.taps)
        if not taps or any(low >= high for low, high in pairwise(taps)):
            checks.fail(
                "taps", self.taps, "at least one layer, each above the one before", ConfigError
            )
        object.__setattr__(self, "taps", taps)
        if self.num_heads % self.num_kv_heads:
            limit = f"a divisor of num_heads, {self.num_heads}"
            checks.fail("num_kv_heads", self.num_kv_heads, limit, ConfigError)
        if self.head_dim % 2:
            checks.fail("head_dim", self.head_dim, "even: rotations turn pairs", ConfigError)
        if self.mask_token_id is not None:
            last = self.vocab_size - 1
            checks.check_int("mask_token_id", self.mask_token_id, 0, last, ConfigError)
        checks.check_choice("head", self.head, ("markov", "gated", "rnn"), ConfigError)
        for name in ("confidence", "confidence_with_token", "confidence_bias"):
            checks.check_bool(name, getattr(self, name), ConfigError)
        checks.check_float("rope_theta", self.rope_theta, 1.0, 1e12, ConfigError)
        checks.check_float("rms_norm_eps", self.rms_norm_eps, 0.0, 1.0, ConfigError)

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> DraftConfig:
        """Reads what `to_dict` wrote.

        Args:
            options: The fields.

        Returns:
            The configuration.

        Raises:
            ConfigError: A key is unknown, one without a default is missing, or a value is out of range.
        """
        known = {field.name for field in fields(cls)}
        checks.check_keys("DraftConfig", options, known, ConfigError)
        missing = sorted({"vocab_size", "hidden_size", "taps"} - set(options))
        if missing:
            raise ConfigError(
                f"DraftConfig lacks {', '.join(missing)}; give them, they have no default.",
                field=missing[0],
            )
        taken = dict(options)
        return cls(**taken)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, ready for JSON.

        Returns:
            One entry a field.
        """
        return {**asdict(self), "taps": list(self.taps)}
