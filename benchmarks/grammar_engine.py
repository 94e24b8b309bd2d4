"""Generates under JSON Schemas with the embedded `nano` and prints one JSON line a measurement.

Each schema gets ten requests of one batch, over temperatures and prompts, and more until ten have finished. Every output that ends by itself is parsed
and judged by the jsonschema library, formats asserted; those that `max_tokens` cut are counted apart. The same prompts
then run without a grammar for as many tokens each, in turns, so both times see the same machine. Forced tokens are
those that `GrammarMatcher.forced_tokens` knew before the model was asked, counted afterwards along the outputs.

Twelve schemas are here; the other eight are files of JSONSchemaBench, read in place (`--data`).

Run: OMP_NUM_THREADS=1 python benchmarks/grammar_engine.py --data ../shared/jsonschemabench
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import torch
from jsonschema.validators import validator_for

from deepinfer import Engine, SamplingParams
from deepinfer.core.types import Output
from deepinfer.grammar import GrammarLibrary, TokenVocab, Whitespace
from deepinfer.models import resolve_checkpoint

_NAME = {"type": "string", "pattern": "^[A-Z][a-z]+$", "maxLength": 12}
OWN: dict[str, Any] = {
    "record": {
        "type": "object",
        "properties": {"name": _NAME, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "colours": {
        "type": "array",
        "items": {"enum": ["red", "green", "blue", None, 3]},
        "minItems": 1,
        "maxItems": 4,
        "uniqueItems": True,
    },
    "price": {
        "type": "object",
        "properties": {
            "price": {"type": "number", "minimum": 0, "maximum": 100, "multipleOf": 0.25},
            "tags": {"type": "array", "items": {"enum": ["new", "used"]}, "uniqueItems": True},
        },
        "required": ["price"],
        "if": {"properties": {"price": {"const": 0}}},
        "then": {"required": ["tags"]},
        "additionalProperties": False,
    },
    "date or not": {"anyOf": [{"type": "boolean"}, {"type": "string", "format": "date"}]},
    "one of two": {
        "oneOf": [
            {"type": "string", "pattern": "^[a-f]{2,6}$"},
            {"type": "string", "pattern": "^.[0-9a-c]*$", "maxLength": 5},
        ]
    },
    "no secret": {
        "type": "object",
        "propertyNames": {"enum": ["user", "secret", "token"]},
        "additionalProperties": {"type": "string", "maxLength": 8},
        "minProperties": 1,
        "not": {"required": ["secret"]},
    },
    "tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "v": {"enum": ["leaf", "branch"]},
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                },
                "required": ["v", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "tuple": {
        "type": "array",
        "prefixItems": [{"const": "point"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}],
        "items": False,
        "minItems": 3,
    },
    "contains": {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 99},
        "contains": {"const": 7},
        "maxItems": 5,
    },
    "card": {
        "type": "object",
        "properties": {
            "card": {"type": "string", "pattern": "^[0-9]{4}$"},
            "owner": _NAME,
            "email": {"type": "string", "format": "email", "maxLength": 24},
        },
        "dependentRequired": {"card": ["owner"]},
        "minProperties": 1,
        "maxProperties": 2,
        "additionalProperties": False,
    },
    "nested constants": {"enum": [{"a": [1, {"b": None}]}, [[], {}], "x y", True]},
    "address": {
        "type": "object",
        "properties": {
            "ip": {"type": "string", "format": "ipv4"},
            "id": {"type": "string", "format": "uuid"},
        },
        "required": ["ip", "id"],
        "additionalProperties": False,
    },
}
# A small model left to itself adds members and blanks until it is cut: members as declared, nothing between them.
STYLE = {"whitespace": Whitespace.compact(), "order": "declared", "additional": "closed"}
BENCH = [
    "Github_easy---o21499",
    "Github_trivial---o89088",
    "Github_trivial---o2142",
    "Glaiveai2K---calculate_area_6996fda5",
    "Glaiveai2K---schedule_meeting_0ade2521",
    "Github_trivial---o85907",
    "Handwritten---pnmp7",
    "Snowplow---sp_44_Normalized",
]
PROMPTS = ["The record: ", "x = ", "Answer in JSON: ", "def f():\n    return ", "["]


def schemas(data: Path | None) -> dict[str, Any]:
    """Schemas by name."""
    found = dict(OWN)
    for name in BENCH if data is not None else ():
        found[name] = json.loads((data / f"{name}.json").read_text(encoding="utf-8"))["schema"]
    return found


def is_valid(schema: Any, text: str) -> bool:
    """Whether a text is JSON that fits a schema."""
    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def forced_share(library: GrammarLibrary, params: SamplingParams, outputs: list[Output]) -> int:
    """Tokens of the outputs that were known before the model was asked."""
    eos = set(library.vocab.eos_ids)
    count = 0
    for output in outputs:
        matcher = library(params).matcher()
        ids = [token for token in output.token_ids if token not in eos]
        at = 0
        while at < len(ids):
            forced = matcher.forced_tokens()
            # Forced means that masks left these bytes only, which the model may have spelled in other tokens.
            run = 0
            while run < len(forced) and at + run < len(ids) and forced[run] == ids[at + run]:
                run += 1
            count += run
            step = max(run, 1)
            if matcher.accept_tokens(ids[at : at + step]) != step:
                raise RuntimeError(f"a matcher refuses the output {output.text!r}")
            at += step
    return count


def measure(
    engine: Engine, library: GrammarLibrary, data: Path | None, max_tokens: int
) -> Iterator[dict[str, Any]]:
    """One line a schema, and the totals."""
    special = library.vocab.special_ids
    base = SamplingParams(max_tokens=max_tokens)
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(10)]
    engine.generate(prompts, base.replace(max_tokens=8, regex="[a-z]+"))  # warm
    totals = dict.fromkeys(("generations", "finished", "valid", "tokens", "forced"), 0)
    totals_s = {"with": 0.0, "without": 0.0}
    for number, (name, schema) in enumerate(schemas(data).items()):
        params = [
            base.replace(temperature=(0.0, 0.7, 1.0)[i % 3], seed=100 * number + i, json_schema=schema)
            for i in range(10)
        ]  # fmt: skip
        seconds = {}
        begin = time.perf_counter()
        outputs = engine.generate(prompts, params)
        seconds["with"] = time.perf_counter() - begin
        free = [
            p.replace(json_schema=None, ignore_eos=True, max_tokens=max(1, len(o.token_ids)))
            for p, o in zip(params, outputs, strict=True)
        ]
        begin = time.perf_counter()
        engine.generate(prompts, free)
        seconds["without"] = time.perf_counter() - begin
        finished = [o for o in outputs if o.finish_reason.value == "stop"]
        again = 0
        while len(finished) < 10 and again < 30:  # those that were cut, with other seeds
            seeds = range(5000 + again, 5000 + again + 10 - len(finished))
            more = [params[0].replace(temperature=1.0, seed=seed) for seed in seeds]
            again += len(more)
            late = engine.generate(prompts[: len(more)], more)
            finished += [o for o in late if o.finish_reason.value == "stop"]
        stray = [t for o in (*outputs, *finished) for t in o.token_ids[:-1] if t in special]
        if stray:
            raise RuntimeError(f"{name}: control tokens {stray} in an output")
        tokens = sum(len(o.token_ids) for o in outputs)  # of the first ten, which are timed
        line = {
            "generations": len(outputs) + again,
            "finished": len(finished),
            "valid": sum(is_valid(schema, o.text) for o in finished),
            "tokens": tokens,
            "forced": forced_share(library, params[0], outputs),
        }
        for key, value in line.items():
            totals[key] += value
        for key, value in seconds.items():
            totals_s[key] += value
        yield {
            "case": name,
            "value": line["valid"],
            "unit": f"valid of {line['finished']} finished",
            **line,
            "forced_share": round(line["forced"] / max(tokens, 1), 3),
            "tokens_per_s": {k: round(tokens / v, 1) for k, v in seconds.items()},
            "first": statistics.mode(o.text for o in outputs)[:80],
        }
    yield {
        "case": "all schemas",
        "value": totals["valid"],
        "unit": f"valid of {totals['finished']} finished",
        **totals,
        "cut_by_max_tokens": totals["generations"] - totals["finished"],
        "forced_share": round(totals["forced"] / totals["tokens"], 3),
        "tokens_per_s": {k: round(totals["tokens"] / v, 1) for k, v in totals_s.items()},
        "speed_with_of_without": round(totals_s["without"] / totals_s["with"], 3),
    }


def main() -> None:
    """Prints every line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder of JSONSchemaBench files")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    options = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    common = {
        "device": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} thread",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "commit": commit.stdout.strip(),
        "date": datetime.date.today().isoformat(),
    }
    vocab = TokenVocab.from_tokenizer(resolve_checkpoint("nano"))
    library = GrammarLibrary(vocab, schema_options=STYLE)
    with Engine.from_pretrained("nano", max_num_seqs=10, grammar=library) as engine:
        for line in measure(engine, library, options.data, options.max_tokens):
            text = json.dumps({"part": "grammar_engine", **line, **common})
            print(text, flush=True)
            if options.out:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(text + "\n")


if __name__ == "__main__":
    main()
