"""Whether there is room to start a waiting request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError
from deepinfer.scheduling.ledger import Sequence

__all__ = ["AdmissionPolicy", "Demand", "FreeBlocks", "Supply"]


@dataclass(frozen=True, slots=True)
class Demand:
    """What a waiting request asks for.

    Attributes:
        first_blocks: Blocks that its first chunk takes.
        known_blocks: Blocks that all its known tokens take.
    """

    first_blocks: int
    known_blocks: int


@dataclass(frozen=True, slots=True)
class Supply:
    """What there is.

    Attributes:
        free_blocks: Blocks free now, after what this step takes.
        promised_blocks: Blocks that running prompts still need to be run to their end.
        num_blocks: Blocks in all.
        num_running: Requests that run, those that this step starts included.
    """

    free_blocks: int
    promised_blocks: int
    num_blocks: int
    num_running: int


class AdmissionPolicy(Protocol):
    """Keeps requests waiting that would soon be preempted again.

    It is asked only about requests whose first chunk fits. When nothing runs, the first request starts whatever it says.
    """

    def may_start(self, sequence: Sequence, demand: Demand, supply: Supply) -> bool:
        """Whether a request may start in this step."""
        ...


class FreeBlocks:
    """Starts a request while enough blocks stay free behind it.

    Args:
        watermark: Share of all blocks that stays free for the growth of what runs, from 0 to 1, rounded down.
        whole_prompt: Start a request only when its whole prompt fits beside what running prompts still need. Without
            it two long prompts may each hold half of the cache and wait for the other half.

    Raises:
        ConfigError: `watermark` is out of range.

    Examples:
        >>> policy = FreeBlocks(watermark=0.1)
        >>> policy.may_start(None, Demand(2, 8), Supply(9, 0, 10, 1))
        True
        >>> policy.may_start(None, Demand(2, 8), Supply(9, 1, 10, 1))
        False
    """

    def __init__(self, watermark: float = 0.01, *, whole_prompt: bool = True) -> None:
        self.watermark = checks.check_float("watermark", watermark, 0.0, 1.0, ConfigError)
        self.whole_prompt = checks.check_bool("whole_prompt", whole_prompt, ConfigError)

    def may_start(self, sequence: Sequence, demand: Demand, supply: Supply) -> bool:
        """Whether a request may start in this step.

        Args:
            sequence: The request; it does not matter.
            demand: What it asks for.
            supply: What there is.

        Returns:
            True when it may.
        """
        need = demand.first_blocks
        if self.whole_prompt:
            need = demand.known_blocks + supply.promised_blocks
        return need + int(self.watermark * supply.num_blocks) <= supply.free_blocks

    def __repr__(self) -> str:
        return f"FreeBlocks({self.watermark}, whole_prompt={self.whole_prompt})"
