"""Sixty schemas of the wild with labelled instances, where they are at hand."""

from __future__ import annotations

import json

import pytest

from deepinfer.core.errors import GrammarError
from deepinfer.grammar.json_schema import compile_json_schema

# Uniqueness over infinitely many strings.
REFUSED = {"JsonSchemaStore---config-file.v1"}


def test_labels(shared_data):
    folder = shared_data / "jsonschemabench"
    if not folder.is_dir():
        pytest.skip("the sample is not at hand")
    refused, wrong = set(), []
    for path in sorted(folder.glob("*.json")):
        case = json.loads(path.read_text("utf-8"))
        try:
            grammar = compile_json_schema(json.dumps(case["schema"]))
        except GrammarError:
            refused.add(path.stem)
            continue
        wrong += [
            (path.stem, index)
            for index, test in enumerate(case["tests"])
            if grammar.matches(json.dumps(test["data"], ensure_ascii=False)) != test["valid"]
        ]
    assert wrong == []
    assert refused <= REFUSED
