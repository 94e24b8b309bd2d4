"""How the tests of this folder ask whether a schema's grammar accepts a value."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from deepinfer.core.errors import EmptyLanguage
from deepinfer.grammar.json_schema import compile_json_schema

Accepts = Callable[..., bool]


def accepted(schema: Any, value: Any, **options: Any) -> bool:
    """Whether the grammar takes a value, written by `json.dumps`."""
    return accepted_text(schema, json.dumps(value), **options)


def accepted_text(schema: Any, text: str | bytes, **options: Any) -> bool:
    try:
        grammar = compile_json_schema(schema, **options)
    except EmptyLanguage:
        return False
    return grammar.matches(text)


@pytest.fixture
def accepts() -> Accepts:
    return accepted


@pytest.fixture
def accepts_text() -> Accepts:
    return accepted_text
