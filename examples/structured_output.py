"""Outputs in a form: a regular expression, a JSON Schema, a grammar, and calls of tools between free text.

Run: python examples/structured_output.py [--model nano]
"""

from __future__ import annotations

import argparse
import json
import os

from deepinfer import Engine, SamplingParams
from deepinfer.core.types import FinishReason
from deepinfer.grammar import (
    GrammarLibrary,
    GrammarMatcher,
    TokenVocab,
    allocate_bitmask,
    tool_calls,
)
from deepinfer.models import resolve_checkpoint

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "units": {"enum": ["metric", "imperial"]},
    },
    "required": ["city", "days", "units"],
    "additionalProperties": False,
}
SUMS = 'root ::= number (" + " number){1,3} ";"\nnumber ::= [0-9]{1,3}'


def constrained(engine: Engine) -> None:
    """Generates one output in each of three forms."""
    params = SamplingParams(max_tokens=96, seed=7)
    forms = {
        "regex": params.replace(regex=r"(yes|no), because [a-z ]{3,20}\."),
        "json_schema": params.replace(json_schema=SCHEMA),
        "ebnf": params.replace(ebnf=SUMS),
    }
    outputs = engine.generate(["Answer: "] * len(forms), list(forms.values()))
    for name, output in zip(forms, outputs, strict=True):
        print(f"{name:>12}  {output.finish_reason.value:>6}  {output.text}")
    if outputs[1].finish_reason is FinishReason.STOP:  # else the form was cut off by max_tokens
        print(f"{'':>12}  {'':>6}  {json.loads(outputs[1].text)}")


def masks_of_tools(vocab: TokenVocab) -> None:
    """Shows how many tokens are allowed in a call of a tool, with no engine at all."""
    tool = {"name": "get_weather", "parameters": SCHEMA}
    mark = "｜DSML｜".encode()
    text_ids = [token for token in vocab.special_ids if vocab.token_bytes(token) == mark]
    matcher = GrammarMatcher(tool_calls([tool]).bind(vocab, text_ids=text_ids))
    bitmask = allocate_bitmask(1, vocab.vocab_size)
    for piece in (
        "Sure.\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name=",
        '"get_weather">\n<',
        "｜DSML｜ parameter",
    ):
        matcher.accept_bytes(piece.encode())
        matcher.fill_bitmask(bitmask)
        allowed = sum(int(word).bit_count() for word in bitmask.view("uint32")[0])
        print(
            f"{piece.splitlines()[-1]!r:>40}  {allowed:>5} tokens, forced {matcher.forced_bytes()!r}"
        )


def main() -> None:
    """Generates in three forms, then follows a call of a tool."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=os.environ.get("DEEPINFER_HF_MODEL_DIR") or "nano")
    args = parser.parse_args()
    vocab = TokenVocab.from_tokenizer(resolve_checkpoint(args.model))
    with Engine.from_pretrained(args.model, grammar=GrammarLibrary(vocab)) as engine:
        constrained(engine)
    masks_of_tools(vocab)


if __name__ == "__main__":
    main()
