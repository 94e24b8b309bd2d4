"""What a simulated fleet is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from deepinfer.balancers.prefill.cost import PrefillCost
from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError

__all__ = [
    "CacheKind",
    "DecodeConfig",
    "FleetChange",
    "FleetChangeKind",
    "PrefillConfig",
    "RankChoice",
    "Slo",
    "TransferConfig",
]


class CacheKind(Enum):
    """Where prompts find the blocks of earlier ones."""

    NONE = "none"
    """Nowhere."""
    ENGINE = "engine"
    """Each engine keeps its own, least recently used blocks go first."""
    STORE = "store"
    """All engines share one store."""


class RankChoice(Enum):
    """When a prompt gets the rank of its engine that runs it."""

    LATE = "late"
    """When a rank has time left in a step: until then it waits in one queue of the engine."""
    LEAST_SECONDS = "least_seconds"
    """On arrival, the rank with the least remaining seconds."""
    IN_TURN = "in_turn"
    """On arrival, each rank in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """Engines that run prompts, each of some ranks that step together.

    Attributes:
        num_engines: Engines.
        num_ranks: Data-parallel ranks of an engine; a step of the engine lasts as long as that of its slowest rank.
        cost: Seconds of prompt tokens.
        chunk_tokens: Most tokens of a rank in a step.
        chunk_s: Seconds that a rank's part of a step may take, without `cost.step_s`; None lets `chunk_tokens` alone
            decide.
        chunk_multiple: Chunks that do not end a prompt are rounded down to it.
        cache: Where prompts find cached blocks.
        cache_blocks: Blocks of an engine's cache, or of the store.
        block_tokens: Tokens of a block.
        ranks: When a prompt gets its rank.

    Raises:
        ConfigError: A field is out of range or of another type.
    """

    num_engines: int = 8
    num_ranks: int = 1
    cost: PrefillCost = field(
        default_factory=lambda: PrefillCost.of_rate(20_000, crossover_tokens=65_536, step_s=0.01)
    )
    chunk_tokens: int = 32_768
    chunk_s: float | None = None
    chunk_multiple: int = 128
    cache: CacheKind = CacheKind.ENGINE
    cache_blocks: int = 2_000
    block_tokens: int = 512
    ranks: RankChoice = RankChoice.LATE

    def __post_init__(self) -> None:
        """Checks the fields."""
        checks.check_int("num_engines", self.num_engines, 1, 65_536, ConfigError)
        checks.check_int("num_ranks", self.num_ranks, 1, 4_096, ConfigError)
        checks.check_int("chunk_tokens", self.chunk_tokens, 1, 2**31, ConfigError)
        checks.check_int("chunk_multiple", self.chunk_multiple, 1, self.chunk_tokens, ConfigError)
        checks.check_int("cache_blocks", self.cache_blocks, 0, 2**40, ConfigError)
        checks.check_int("block_tokens", self.block_tokens, 1, 2**31, ConfigError)
        if self.chunk_s is not None:
            checks.check_float("chunk_s", self.chunk_s, 0.0, 1e6, ConfigError, open_low=True)
        _check_type("cost", self.cost, PrefillCost)
        _check_type("cache", self.cache, CacheKind)
        _check_type("ranks", self.ranks, RankChoice)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """Engines that decode, each of some ranks that step together.

    Attributes:
        num_engines: Engines.
        num_ranks: Ranks of an engine; a step lasts as long as that of its slowest rank.
        step_s: Seconds of a step that runs nothing.
        request_s: Seconds a request of the rank.
        kv_token_s: Seconds a cached token of the rank's requests.
        capacity_tokens: Tokens that a rank's cache holds.
        max_requests: Most requests of a rank.
    """

    num_engines: int = 1
    num_ranks: int = 8
    step_s: float = 8e-3
    request_s: float = 1e-4
    kv_token_s: float = 6e-9
    capacity_tokens: int = 4_000_000
    max_requests: int = 256

    def __post_init__(self) -> None:
        """Checks the fields."""
        checks.check_int("num_engines", self.num_engines, 1, 65_536, ConfigError)
        checks.check_int("num_ranks", self.num_ranks, 1, 4_096, ConfigError)
        for name in ("step_s", "request_s", "kv_token_s"):
            checks.check_float(name, getattr(self, name), 0.0, 1e6, ConfigError)
        checks.check_int("capacity_tokens", self.capacity_tokens, 1, 2**60, ConfigError)
        checks.check_int("max_requests", self.max_requests, 1, 2**31, ConfigError)
        if not self.step_s + self.request_s + self.kv_token_s > 0:
            checks.fail("step_s", self.step_s, "above 0 when all else is 0", ConfigError)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """How cache entries travel from prefill to decode.

    Attributes:
        token_bytes: Bytes a token; DeepSeek-V4.1-Flash keeps 890.
        fixed_bytes: Bytes a request beside them; its window rows are 1,415,040.
        bytes_per_s: Rate of one transfer.
        latency_s: Seconds before the first byte.
    """

    token_bytes: int = 890
    fixed_bytes: int = 1_415_040
    bytes_per_s: float = 50e9
    latency_s: float = 1e-3

    def __post_init__(self) -> None:
        """Checks the fields."""
        checks.check_int("token_bytes", self.token_bytes, 0, 2**40, ConfigError)
        checks.check_int("fixed_bytes", self.fixed_bytes, 0, 2**50, ConfigError)
        checks.check_float("bytes_per_s", self.bytes_per_s, 0.0, 1e18, ConfigError, open_low=True)
        checks.check_float("latency_s", self.latency_s, 0.0, 1e6, ConfigError)

    def seconds(self, tokens: int) -> float:
        """Seconds of one transfer.

        Args:
            tokens: Tokens of the prompt.

        Returns:
            The seconds.
        """
        return self.latency_s + (tokens * self.token_bytes + self.fixed_bytes) / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What users were promised.

    Attributes:
        ttft_s: Most seconds to the first token.
        tpot_s: Most mean seconds between tokens.

    Raises:
        ConfigError: A promise is no number from 0.
    """

    ttft_s: float = 5.0
    tpot_s: float = 0.05

    def __post_init__(self) -> None:
        """Checks the fields."""
        checks.check_float("ttft_s", self.ttft_s, 0.0, 1e12, ConfigError)
        checks.check_float("tpot_s", self.tpot_s, 0.0, 1e12, ConfigError)


class FleetChangeKind(Enum):
    """What happens to an engine."""

    FAIL = "fail"
    """It dies with all that it holds; its requests are routed again."""
    DRAIN = "drain"
    """It takes nothing new and finishes what it has."""
    JOIN = "join"
    """It takes requests again; after a failure with an empty cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetChange:
    """Something that happens to an engine at a known time.

    Attributes:
        time_s: When.
        engine: Which.
        kind: What.
        is_decode: Whether it is an engine of the decode pool.

    Raises:
        ConfigError: A field is out of range or of another type.
    """

    time_s: float
    engine: int
    kind: FleetChangeKind
    is_decode: bool = False

    def __post_init__(self) -> None:
        """Checks the fields."""
        checks.check_float("time_s", self.time_s, 0.0, 1e12, ConfigError)
        checks.check_int("engine", self.engine, 0, 65_535, ConfigError)
        _check_type("kind", self.kind, FleetChangeKind)
        checks.check_bool("is_decode", self.is_decode, ConfigError)


def _check_type(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        members = (
            [str(member) for member in kind] if issubclass(kind, Enum) else ["a " + kind.__name__]
        )
        checks.fail(name, value, " or ".join(members), ConfigError)
