"""Times the cache's books: hashing, lookup, allocate, settle, release; prints one JSON line a case.

Hashing is measured from a list of ids, as the engine has them, and from an int32 buffer; beside it stands SHA-256 of
the same bytes in one go, which is the floor. Lookups are those of a 32,768-token prompt: the first one hashes, later
ones find the keys computed. Growth, settling and release are measured per call over 32 requests, in a pool of 16,384
blocks and in one of 2,048, so that a cost that grows with the pool would show; every block has cached content, so
each new one evicts. Median of the repeats, in processor time of one thread.
Run: python benchmarks/cache.py [--repeats 30]
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import platform
import random
import statistics
import subprocess
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from deepinfer.cache import BlockCacheManager, BlockHasher
from deepinfer.core import Request
from deepinfer.core.protocols import Hit

PROMPT = 32_768
VOCAB = 129_280


def median_seconds(
    call: Callable[[Any], object], repeats: int, prepare: Callable[[], Any] = lambda: None
) -> float:
    """Median time of one call in processor time, without that of its preparation."""
    seconds = []
    for _ in range(repeats + 2):
        given = prepare()
        start = time.thread_time()
        call(given)
        seconds.append(time.thread_time() - start)
    return statistics.median(seconds[2:])


def hashing(repeats: int) -> Iterator[dict[str, Any]]:
    """Nanoseconds a token, from a list and from a buffer, and of the bare digest."""
    rng = random.Random(0)
    ids = [rng.randrange(VOCAB) for _ in range(PROMPT)]
    buffer = array("i", ids)
    raw = buffer.tobytes()
    floor = median_seconds(lambda _: hashlib.sha256(raw).digest(), repeats)
    yield {"case": "hash, floor: SHA-256 of all bytes at once", "value": floor}
    for block in (16, 64, 128, 256):
        for name, given in (("list", ids), ("int32 buffer", buffer)):
            value = median_seconds(
                lambda hasher, given=given: hasher.extend(given, PROMPT // hasher.block_size),
                repeats,
                lambda block=block: BlockHasher(bytes(32), block),
            )
            yield {
                "case": f"hash, blocks of {block}, from a {name}",
                "value": value,
                "times_floor": round(value / floor, 2),
            }


def filled(num_blocks: int, block_size: int) -> tuple[BlockCacheManager, tuple[int, ...]]:
    """A manager whose every block is idle and cached, and the prompt that ran last."""
    cache = BlockCacheManager(num_slots=64, num_blocks=num_blocks, block_size=block_size)
    base = array("i", random.Random(1).choices(range(VOCAB), k=PROMPT))
    prompt: tuple[int, ...] = ()
    for number in range(num_blocks * block_size // PROMPT):
        base[0] = number
        prompt = tuple(base)
        request = Request(rid=f"old{number}", prompt_token_ids=prompt)
        cache.allocate(request, None, upto=PROMPT)
        cache.settle(request, prompt, PROMPT, step=0)
        cache.release(request, after_step=-1)
    assert cache.stats().idle_blocks == num_blocks
    return cache, prompt


def lookups(repeats: int) -> Iterator[dict[str, Any]]:
    """Microseconds of a lookup: all found, found again by the same request, and nothing found."""
    for block in (16, 64, 128, 256):
        cache, prompt = filled(4 * PROMPT // block, block)
        longer = (*prompt, 1)
        warm = Request(rid="warm", prompt_token_ids=longer)
        cold = Request(rid="cold", prompt_token_ids=(VOCAB, *longer))
        look = partial(look_up, cache)
        assert look(warm).num_tokens == PROMPT
        assert look(cold).num_tokens == 0
        for name, request, forget in (
            ("all found", warm, True),
            ("all found, keys known", warm, False),
            ("nothing found", cold, True),
        ):
            value = median_seconds(look, repeats, partial(forgotten, cache, request, forget))
            yield {"case": f"lookup of 32768 tokens, blocks of {block}, {name}", "value": value}


def look_up(cache: BlockCacheManager, request: Request) -> Hit:
    """The longest hit of a request."""
    return cache.lookup(request, request.prompt_token_ids, PROMPT)


def forgotten(cache: BlockCacheManager, request: Request, forget: bool) -> Request:
    """The request, after the keys computed for it were dropped or not."""
    if forget:
        cache.release(request, -1)
    return request


def calls(repeats: int) -> Iterator[dict[str, Any]]:
    """Microseconds of the calls that a running request makes at a block border, and of its end."""
    block, count, tokens = 128, 32, 2_048
    for num_blocks in (2_048, 16_384):
        cache, prompt = filled(num_blocks, block)
        rng = random.Random(2)
        timed: dict[str, list[float]] = defaultdict(list)
        for number in range(repeats + 2):
            begin = [rng.randrange(VOCAB) for _ in range(count)]
            requests = [
                Request(rid=f"{number}.{i}", prompt_token_ids=(first,) * tokens)
                for i, first in enumerate(begin)
            ]
            ids = {r.rid: [*r.prompt_token_ids, *r.prompt_token_ids[:block]] for r in requests}
            for request in requests:
                cache.allocate(request, None, tokens)
                cache.settle(request, request.prompt_token_ids, tokens, 0)
            cache.take_updates()
            steps: dict[str, Callable[[Request], object]] = {
                "blocks_for, the 17th block": partial(cache.blocks_for, hit=None, upto=tokens + 1),
                "allocate, the 17th block": partial(cache.allocate, hit=None, upto=tokens + 1),
                "settle, the 17th block": lambda request, ids=ids: cache.settle(  # noqa: B023
                    request, ids[request.rid], tokens + block, 1
                ),
                "settle, no block border": lambda request, ids=ids: cache.settle(  # noqa: B023
                    request, ids[request.rid], tokens + block, 1
                ),
                "release, 17 blocks": partial(cache.release, after_step=-1),
            }
            for name, call in steps.items():
                start = time.thread_time()
                for request in requests:
                    call(request)
                timed[name].append((time.thread_time() - start) / count)
            sharer = Request(rid=f"{number}.s", prompt_token_ids=(*prompt, number))
            hit = look_up(cache, sharer)
            assert hit.num_tokens == len(prompt)
            start = time.thread_time()
            cache.allocate(sharer, hit, len(prompt) + 1)
            timed[f"allocate, hit of {len(prompt)} tokens"].append(time.thread_time() - start)
            cache.release(sharer, -1)
            cache.take_updates()
        for name, seconds in timed.items():
            yield {"case": f"{name}, pool of {num_blocks}", "value": statistics.median(seconds[2:])}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    repeats = parser.parse_args().repeats
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    machine = {
        "device": processor(),
        "versions": {"python": platform.python_version()},
        "commit": git.stdout.strip(),
        "date": datetime.date.today().isoformat(),
    }
    for measure, scale, unit in (
        (hashing, 1e9 / PROMPT, "ns/token"),
        (lookups, 1e6, "us"),
        (calls, 1e6, "us"),
    ):
        for line in measure(repeats):
            value = round(line.pop("value") * scale, 3)
            case = {"part": "cache", "case": line.pop("case"), "value": value, "unit": unit}
            print(json.dumps({**case, **line, **machine}))


def processor() -> str:
    """Name of the CPU as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, 1 thread"
    return f"{platform.machine()}, 1 thread"


if __name__ == "__main__":
    main()
