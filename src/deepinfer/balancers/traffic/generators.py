"""Traffic drawn from a seed, for when no trace is at hand or none is long enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepinfer.balancers.traffic.loaders import MOONCAKE_BLOCK
from deepinfer.balancers.traffic.records import TraceRecord
from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError

__all__ = ["TrafficClass", "generate_chat_trace", "generate_herd", "generate_traffic"]


def generate_chat_trace(
    num_requests: int,
    *,
    rate_per_s: float = 2.0,
    seed: int = 0,
    mean_input_tokens: int = 4_000,
    max_input_tokens: int = 65_536,
    mean_output_tokens: int = 200,
    follow_up: float = 0.4,
    system_tokens: int = 512,
) -> list[TraceRecord]:
    """Draws a trace that looks like chat: long-tailed lengths, one system prompt, conversations that grow.

    Args:
        num_requests: How many requests.
        rate_per_s: Mean arrivals a second; the gaps between them are exponential.
        seed: Seed; equal arguments give equal traces.
        mean_input_tokens: Mean of the new tokens of a prompt, drawn from a log-normal distribution.
        max_input_tokens: Longest prompt.
        mean_output_tokens: Mean of the outputs, drawn alike.
        follow_up: Probability that a request continues an earlier one, whose prompt its own begins with.
        system_tokens: Tokens with which every prompt begins.

    Returns:
        The records in order of arrival, with ids of 512-token blocks.

    Raises:
        ConfigError: A number is out of range.
    """
    checks.check_int("num_requests", num_requests, 1, 10_000_000, ConfigError)
    checks.check_float("rate_per_s", rate_per_s, 0.0, 1e9, ConfigError, open_low=True)
    checks.check_float("follow_up", follow_up, 0.0, 1.0, ConfigError)
    checks.check_int(
        "max_input_tokens", max_input_tokens, system_tokens + 1, 2**31 - 1, ConfigError
    )
    generator = np.random.default_rng(seed)
    shared = tuple(range(system_tokens // MOONCAKE_BLOCK))
    next_id = len(shared)
    open_prompts: list[tuple[int, ...]] = []  # whole blocks of prompts that may be continued
    records = []
    now = 0.0
    for _ in range(num_requests):
        now += float(generator.exponential(1.0 / rate_per_s))
        begin = shared
        if open_prompts and generator.random() < follow_up:
            begin = open_prompts.pop(int(generator.integers(len(open_prompts))))
        new = _log_normal(generator, mean_input_tokens, 1.2)
        length = min(len(begin) * MOONCAKE_BLOCK + new, max_input_tokens)
        count = -(-length // MOONCAKE_BLOCK)
        ids = begin[:count] + tuple(range(next_id, next_id + max(0, count - len(begin))))
        next_id += max(0, count - len(begin))
        output = min(_log_normal(generator, mean_output_tokens, 1.0), 16 * mean_output_tokens)
        records.append(TraceRecord(now, length, output, ids, MOONCAKE_BLOCK))
        if length < max_input_tokens:
            open_prompts.append(ids[: length // MOONCAKE_BLOCK])
    return records


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficClass:
    """One class of a mix: how long its prompts and answers are, and how its conversations grow.

    Attributes:
        name: Becomes the `kind` of its records.
        share: Its share of the arrivals, relative to the other classes, above 0.
        new_tokens: Median of the tokens that a turn adds; log-normal.
        new_sigma: Width of that distribution; 0 makes all alike, 1.2 is long-tailed chat.
        output_tokens: Median of the answers, log-normal with width 1.
        follow_up: Probability that a request continues a conversation of its class, whose last prompt and answer its
            own prompt begins with.
        system_tokens: Tokens with which every prompt of the class begins.
        max_input_tokens: Longest prompt.
        ttl_s: Mean seconds between the turns of a conversation.

    Raises:
        ConfigError: A number is out of range.
    """

    name: str
    share: float = 1.0
    new_tokens: int = 1_000
    new_sigma: float = 1.2
    output_tokens: int = 200
    follow_up: float = 0.4
    system_tokens: int = 512
    max_input_tokens: int = 131_072
    ttl_s: float = 60.0

    def __post_init__(self) -> None:
        """Checks the fields."""
        checks.check_text("name", self.name, ConfigError)
        checks.check_float("share", self.share, 0.0, 1e9, ConfigError, open_low=True)
        checks.check_int("new_tokens", self.new_tokens, 1, 2**31 - 1, ConfigError)
        checks.check_float("new_sigma", self.new_sigma, 0.0, 5.0, ConfigError)
        checks.check_int("output_tokens", self.output_tokens, 1, 2**31 - 1, ConfigError)
        checks.check_float("follow_up", self.follow_up, 0.0, 1.0, ConfigError)
        checks.check_int("system_tokens", self.system_tokens, 0, 2**31 - 1, ConfigError)
        low = self.system_tokens + 1
        checks.check_int("max_input_tokens", self.max_input_tokens, low, 2**31 - 1, ConfigError)
        checks.check_float("ttl_s", self.ttl_s, 0.0, 1e9, ConfigError)


DEFAULT_MIX = (
    TrafficClass(name="chat", share=0.80, new_tokens=1_500, output_tokens=250, follow_up=0.5),
    TrafficClass(
        name="agent",
        share=0.17,
        new_tokens=4_000,
        output_tokens=150,
        follow_up=0.85,
        system_tokens=8_192,
        max_input_tokens=262_144,
        ttl_s=15.0,
    ),
    TrafficClass(
        name="long",
        share=0.03,
        new_tokens=300_000,
        new_sigma=0.4,
        output_tokens=400,
        follow_up=0.2,
        system_tokens=512,
        max_input_tokens=1_048_576,
        ttl_s=120.0,
    ),
)
"""Chat, agents and a few contexts beyond 256K tokens, which no public trace has."""


def generate_traffic(
    num_requests: int,
    classes: Sequence[TrafficClass] = DEFAULT_MIX,
    *,
    rate_per_s: float = 3.0,
    seed: int = 0,
) -> list[TraceRecord]:
    """Draws a mix of classes whose conversations grow turn by turn.

    Args:
        num_requests: How many requests.
        classes: The classes; the default mixes chat, agents and contexts beyond 256K tokens.
        rate_per_s: Mean arrivals a second; the gaps between them are exponential.
        seed: Seed; equal arguments give equal traces.

    Returns:
        The records in order of arrival, with ids of 512-token blocks, a session and a kind.

    Raises:
        ConfigError: A number is out of range, or there is no class.
    """
    checks.check_int("num_requests", num_requests, 1, 10_000_000, ConfigError)
    checks.check_float("rate_per_s", rate_per_s, 0.0, 1e9, ConfigError, open_low=True)
    if not classes:
        checks.fail("classes", classes, "at least one class", ConfigError)
    generator = np.random.default_rng(seed)
    shares = np.array([item.share for item in classes])
    kinds = generator.choice(len(classes), num_requests, p=shares / shares.sum())
    times = np.cumsum(generator.exponential(1.0 / rate_per_s, num_requests))
    next_id = 0
    systems = []
    for item in classes:
        count = item.system_tokens // MOONCAKE_BLOCK
        systems.append(tuple(range(next_id, next_id + count)))
        next_id += count
    # Of each class: when a conversation may go on, its id, its tokens so far, and the ids of their whole blocks.
    waiting: list[list[tuple[float, int, int, tuple[int, ...]]]] = [[] for _ in classes]
    records = []
    for index in range(num_requests):
        kind, now = int(kinds[index]), float(times[index])
        item = classes[kind]
        session, before, begin = index, item.system_tokens, systems[kind]
        pool = waiting[kind]
        if pool and generator.random() < item.follow_up:
            ready = [at for at, entry in enumerate(pool) if entry[0] <= now]
            if ready:
                _, session, before, begin = pool.pop(ready[int(generator.integers(len(ready)))])
        new = max(1, round(float(generator.lognormal(np.log(item.new_tokens), item.new_sigma))))
        output = max(1, round(float(generator.lognormal(np.log(item.output_tokens), 1.0))))
        length = min(before + new, item.max_input_tokens)
        count = -(-length // MOONCAKE_BLOCK)
        whole_after = (length + output) // MOONCAKE_BLOCK
        ids = begin[:count] + tuple(range(next_id, next_id + max(0, count - len(begin))))
        next_id += max(0, count - len(begin))
        records.append(
            TraceRecord(now, length, output, ids, MOONCAKE_BLOCK, session=session, kind=item.name)
        )
        if length < item.max_input_tokens:
            # A partial last block gets other content as the answer fills it, so it is no prefix of the next turn.
            kept = ids[: length // MOONCAKE_BLOCK]
            grown = tuple(range(next_id, next_id + whole_after - len(kept)))
            next_id += len(grown)
            pause = float(generator.exponential(item.ttl_s)) if item.ttl_s else 0.0
            pool.append((now + pause, session, length + output, kept + grown))
    return records


def generate_herd(
    num_requests: int,
    *,
    prefix_tokens: int = 16_384,
    hot_share: float = 0.8,
    rate_per_s: float = 20.0,
    new_tokens: int = 600,
    output_tokens: int = 100,
    seed: int = 0,
) -> list[TraceRecord]:
    """Draws a herd: most requests share one long prefix, which a pure prefix router sends to one worker.

    Args:
        num_requests: How many requests.
        prefix_tokens: Length of the hot prefix, in whole blocks of 512.
        hot_share: Share of the requests that begin with it.
        rate_per_s: Mean arrivals a second.
        new_tokens: Median of the tokens behind it.
        output_tokens: Median of the answers.
        seed: Seed; equal arguments give equal traces.

    Returns:
        The records in order of arrival, of kinds "hot" and "cold".

    Raises:
        ConfigError: A number is out of range.
    """
    checks.check_int("num_requests", num_requests, 1, 10_000_000, ConfigError)
    checks.check_int("prefix_tokens", prefix_tokens, MOONCAKE_BLOCK, 2**30, ConfigError)
    checks.check_float("hot_share", hot_share, 0.0, 1.0, ConfigError)
    checks.check_float("rate_per_s", rate_per_s, 0.0, 1e9, ConfigError, open_low=True)
    generator = np.random.default_rng(seed)
    hot = tuple(range(prefix_tokens // MOONCAKE_BLOCK))
    next_id = len(hot)
    now = 0.0
    records = []
    for _ in range(num_requests):
        now += float(generator.exponential(1.0 / rate_per_s))
        is_hot = bool(generator.random() < hot_share)
        begin = hot if is_hot else ()
        length = len(begin) * MOONCAKE_BLOCK + _log_normal(generator, new_tokens, 0.8)
        count = -(-length // MOONCAKE_BLOCK) - len(begin)
        ids = begin + tuple(range(next_id, next_id + count))
        next_id += count
        output = _log_normal(generator, output_tokens, 0.8)
        kind = "hot" if is_hot else "cold"
        records.append(TraceRecord(now, length, output, ids, MOONCAKE_BLOCK, kind=kind))
    return records


def _log_normal(generator: np.random.Generator, mean: int, sigma: float) -> int:
    return max(1, round(float(generator.lognormal(np.log(mean) - sigma**2 / 2, sigma))))
