"""Times tokenizing, streaming detokenisation, stop strings and completion parsing; prints one JSON line a case.

Times are processor time of the process, which other work on the machine disturbs little.
Run: python benchmarks/text.py FOLDER_WITH_TOKENIZER [--kilobytes 256]
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import tokenizers

from deepinfer.engine.chat import render_chat
from deepinfer.engine.chat_parser import ChatParser
from deepinfer.engine.stop import OutputText
from deepinfer.engine.tokenizer import Tokenizer

TEXT = (
    "The quick brown fox jumps over the lazy dog; 3.14159 is less than 22/7.\n"
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n"
    "深度学习需要大量的数据。 naïve café 🙂\n"
)


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Median time of one call after one to warm up."""
    times = []
    for number in range(repeats + 1):
        start = time.process_time()
        call()
        if number:
            times.append(time.process_time() - start)
    return statistics.median(times)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--kilobytes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    start = time.process_time()
    tokenizer = Tokenizer(options.tokenizer)
    load_s = time.process_time() - start
    text = TEXT * (options.kilobytes * 1024 // len(TEXT.encode()))
    size = len(text.encode())
    ids = tokenizer.encode(text, add_bos=False)
    messages = [{"role": "user", "content": text}]
    pieces = [tokenizer.decode([token]) for token in ids]

    def stream() -> None:
        out = tokenizer.stream()
        for token in ids:
            out.push(token)

    def stream_with_stops() -> None:
        out = OutputText(tokenizer.stream(), ["\n\nUser:", "<|end|>", "never there"])
        for token in ids:
            out.push((token,))

    def parse() -> None:
        chat = ChatParser(thinking_mode="thinking")
        for piece in pieces:
            chat.push(piece)

    def per_token(call: Callable[[], object]) -> float:
        return seconds(call, options.repeats) / len(ids) * 1e6

    def speed(call: Callable[[], object]) -> float:
        return size / seconds(call, options.repeats) / 1e6

    lines = [
        ("load tokenizer.json", load_s * 1e3, "ms"),
        ("encode", speed(lambda: tokenizer.encode(text)), "MB/s"),
        ("render and encode a chat", speed(lambda: tokenizer.encode_chat(render_chat(messages))), "MB/s"),
        ("decode", per_token(lambda: tokenizer.decode(ids)), "us/token"),
        ("stream", per_token(stream), "us/token"),
        ("stream with 3 stop strings", per_token(stream_with_stops), "us/token"),
        ("parse a streamed completion", per_token(parse), "us/token"),
    ]  # fmt: skip
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    machine = {
        "tokens": len(ids),
        "bytes": size,
        "vocab": tokenizer.vocab_size,
        "device": processor(),
        "versions": {"python": platform.python_version(), "tokenizers": tokenizers.__version__},
        "commit": git.stdout.strip(),
        "date": datetime.date.today().isoformat(),
    }
    for case, value, unit in lines:
        line = {"part": "text", "case": case, "value": round(value, 3), "unit": unit}
        print(json.dumps({**line, **machine}))


def processor() -> str:
    """Name of the CPU as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
