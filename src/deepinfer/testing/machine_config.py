"""Sizes of a `deepinfer.testing.Machine`, and what is done to it, drawn at random."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from random import Random
from typing import Any

from deepinfer.core.clock import Clock
from deepinfer.scheduling import (
    FreeBlocks,
    Scheduler,
    StepCoefficients,
    StepTimeModel,
    TimedChunks,
)
from deepinfer.testing.toy_model import ToyConfig, ToyModel
from deepinfer.testing.toy_reference import ToyReference
from deepinfer.testing.toy_tokenizer import ToyTokenizer

__all__ = ["MAX_LEN", "VOCAB", "Action", "MachineConfig"]

VOCAB = 24
"""Token ids of the machine's model."""
MAX_LEN = 40
"""Most tokens of one of its sequences."""

Action = tuple[str, dict[str, Any]]
"""Name and arguments of something that is done to a machine."""

_PREFIXES = tuple(tuple((base * 7 + i * i) % 20 + 4 for i in range(24)) for base in range(3))
_BETWEEN = ("forward", "forward_done", "sample", "sample_done", "collect", "collect_done")
_ACTIONS = (
    ("step", 50),
    ("add", 24),
    ("abort", 4),
    ("preempt", 5),
    ("reset", 1),
    ("fail", 3),
    ("fail_copy", 4),
    ("between", 4),
    ("clock", 2),
    ("pause", 1),
    ("resume", 2),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineConfig:
    """Sizes and options of a machine.

    Attributes:
        depth: Steps ahead of the results, 0 or 1.
        drafts: Drafts a row, or 0 without a drafter.
        window: Width of the model's window, or 0 without one.
        num_seqs: Most requests at once.
        chunk: Most tokens of one request in one step.
        spare_budget: Tokens of a step beyond one a request.
        block_size: Tokens in a block, even.
        spare_blocks: Blocks beyond those of one longest sequence.
        num_host: Host blocks and window slots.
        replay: "exact", "off" or "bounded".
        deterministic: The engine's mode.
        order: Order policy.
        victim: Victim policy.
        whole_prompt: Whether admission asks for room for the whole prompt.
        target_step_s: Target of a step in seconds, or None.
        slots_only: Whether the cache has no blocks.
        faults: Whether faults are drawn.
    """

    depth: int = 0
    drafts: int = 0
    window: int = 0
    num_seqs: int = 2
    chunk: int = 6
    spare_budget: int = 8
    block_size: int = 4
    spare_blocks: int = 4
    num_host: int = 0
    replay: str = "exact"
    deterministic: bool = False
    order: str = "fcfs"
    victim: str = "last_admitted"
    whole_prompt: bool = True
    target_step_s: float | None = None
    slots_only: bool = False
    faults: bool = True

    @classmethod
    def random(cls, stream: Random) -> MachineConfig:
        """Draws a configuration.

        Args:
            stream: Source of randomness.

        Returns:
            The configuration.
        """
        draw = stream.choice
        return cls(
            depth=draw((0, 1, 1)),
            drafts=draw((0, 2, 4, 4)),
            window=draw((0, 0, 1, 2, 3)),
            num_seqs=stream.randint(1, 4),
            chunk=stream.randint(5, 9),
            spare_budget=stream.randint(0, 20),
            block_size=draw((2, 4, 8)),
            spare_blocks=stream.randint(0, 16),
            num_host=draw((0, 3, 6)),
            replay=draw(("exact", "exact", "exact", "off", "bounded")),
            deterministic=draw((False, False, True)),
            order=draw(("fcfs", "fcfs", "priority", "longest_prefix", "shortest_uncached")),
            victim=draw(("last_admitted", "lowest_priority")),
            whole_prompt=draw((True, False)),
            target_step_s=draw((None, None, 1.5e-3)),
            slots_only=stream.random() < 0.08,
        )

    @property
    def is_exact(self) -> bool:
        """Whether every output must be what the request gives alone."""
        return self.replay != "bounded" or self.deterministic or not self.window

    def toy(self) -> ToyConfig:
        """The configuration of the model."""
        return ToyConfig(
            vocab_size=VOCAB,
            max_position_embeddings=MAX_LEN,
            dspark_block_size=self.drafts,
            draft_errors=3,
            sliding_window=self.window,
            narrows=self.window > 0,
        )

    def engine(self) -> dict[str, Any]:
        """The configuration of the engine."""
        size = self.block_size
        return {
            "max_num_seqs": self.num_seqs,
            "prefill_chunk_tokens": self.chunk,
            "max_num_batched_tokens": self.num_seqs + self.spare_budget,
            "async_depth": self.depth,
            "block_size": size,
            "num_blocks": -(-MAX_LEN // size) + self.spare_blocks,
            "host_cache_bytes": 0 if self.slots_only else self.num_host * 20 * size,
            "num_window_slots": self.num_host if self.window and not self.slots_only else 0,
            "replay": self.replay,
            "deterministic": self.deterministic,
            "device": "cpu",
            "seed": 0,
        }

    def scheduler(self, limits: Any, cache: Any, clock: Clock) -> Scheduler:
        """A scheduler with these options.

        Args:
            limits: What every plan stays within.
            cache: The cache manager.
            clock: Time.

        Returns:
            The scheduler.
        """
        chunks = None
        if self.target_step_s is not None:
            most = limits.prefill_chunk_tokens
            chunks = TimedChunks(
                StepTimeModel(StepCoefficients()),
                self.target_step_s,
                max_tokens=most,
                min_tokens=min(most, max(limits.window, 2)),
                window=limits.window,
                first_tokens=most,
            )
        return Scheduler(
            limits,
            cache,
            order=self.order,
            victim=self.victim,
            admission=FreeBlocks(0.0, whole_prompt=self.whole_prompt),
            chunks=chunks,
            clock=clock,
        )

    def reference(self) -> ToyReference:
        """What outputs are compared with; machines with equal models share one."""
        return _reference(self.window)

    def draw(self, stream: Random) -> Action:
        """Draws an action.

        Args:
            stream: Source of randomness.

        Returns:
            Its name and arguments.
        """
        names, weights = zip(*_ACTIONS, strict=True)
        name = stream.choices(names, weights)[0]
        pick = stream.randrange(64)
        after = stream.randrange(4)
        if name == "step":
            return name, {"times": stream.randint(1, 3)}
        if name == "add":
            return name, self.draw_request(stream)
        if name in ("abort", "preempt"):
            return name, {"pick": pick}
        if name == "fail" and self.faults:
            site, interrupt = stream.choice(_BETWEEN), stream.random() < 0.4
            return name, {"site": site, "after": after, "interrupt": interrupt}
        if name == "fail_copy" and self.faults:
            return "fail", {"site": stream.choice(("save", "load", "load")), "after": after}
        if name == "between" and self.faults:
            what = stream.choice(("abort", "preempt", "preempt", "reset"))
            site = stream.choice(
                _BETWEEN[1:]
            )  # nobody is called between a launch and its forward pass
            return name, {"site": site, "what": what, "pick": pick, "after": after}
        if name == "clock":
            return name, {"seconds": stream.choice((0.0, 1e-3, 2.0, 86_400.0))}
        return (name, {}) if name in ("reset", "pause", "resume") else ("step", {"times": 1})

    def draw_request(self, stream: Random) -> dict[str, Any]:
        """Draws the arguments of an "add".

        Args:
            stream: Source of randomness.

        Returns:
            Prompt, parameters, priority, and now and then at which delta its sink raises.
        """
        draw = stream.choice
        length = stream.randint(1, 24)
        prompt = draw(_PREFIXES)[:length]
        if stream.random() < 0.4:  # leaves the common prefix somewhere, or at once
            cut = stream.randint(0, length)
            tail = tuple(stream.randint(4, VOCAB - 1) for _ in range(length - cut))
            prompt = prompt[:cut] + tail
        if stream.random() < 0.01:
            prompt = prompt * 40
        params: dict[str, Any] = {
            "max_tokens": stream.randint(1, 18),
            "temperature": draw((0.0, 0.0, 0.0, 0.9)),
            "seed": stream.randint(0, 3),
            "n": draw((1, 1, 1, 1, 2, 3)),
            "stop": draw(((), (), (), ("ab", "c"), ("d",))),
            "stop_token_ids": draw(((), (), (7,), (9, 20))),
            "ignore_eos": draw((True, False)),
            "logprobs": draw((None, None, 1)),
            "prompt_logprobs": draw((None, None, None, None, None, 0)),
            "frequency_penalty": draw((0.0, 0.0, 0.0, 0.0, 1.5)),
        }
        if stream.random() < 0.15:
            params["regex"] = f"toy:{stream.randint(0, 3)}:{stream.randint(1, 9)}"
            params["ignore_eos"] = False  # else the end, which the grammar allows, would not end it
        out: dict[str, Any] = {"prompt": prompt, "params": params}
        out["priority"] = stream.randint(-1, 1)
        if self.faults and stream.random() < 0.04:
            out["sink_fails_at"] = stream.randint(0, 4)
        return out


@functools.lru_cache(16)
def _reference(window: int) -> ToyReference:
    config = MachineConfig(window=window)
    return ToyReference(ToyModel(config.toy()), ToyTokenizer(VOCAB), MAX_LEN)
