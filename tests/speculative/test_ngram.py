"""Prompt lookup: the longest and latest match, periods, and identical output in the engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.core.errors import ConfigError
from deepinfer.core.views import DraftView
from deepinfer.speculative.ngram import NgramDrafter, lookup


def slow(tokens: list[int], count: int, min_n: int, max_n: int) -> tuple[tuple[int, ...], int]:
    for n in range(max_n, min_n - 1, -1):
        if len(tokens) <= n:
            continue
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                found = list(tokens)
                for at in range(count):
                    found.append(found[end + at])
                return tuple(found[len(tokens) :]), n
    return (), 0


@given(
    st.lists(st.integers(0, 3), max_size=30),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(0, 2),
)
def test_agrees_with_a_search_written_plainly(
    tokens: list[int], count: int, low: int, more: int
) -> None:
    found = lookup(tokens, count, min_n=low, max_n=low + more)
    assert found == slow(tokens, count, low, low + more)


def test_longer_ends_win_and_then_later_places() -> None:
    assert lookup([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 1) == ((9,), 3)
    assert lookup([2, 3, 9, 2, 3, 8, 2, 3], 2) == ((8, 2), 2)
    assert lookup([7, 7, 7], 4) == ((7, 7, 7, 7), 2)
    assert lookup([1, 2, 3], 4) == ((), 0)


def test_the_window_bounds_the_search() -> None:
    tokens = [1, 2, 3, *range(10, 40), 1, 2]
    assert lookup(tokens, 1) == ((3,), 2)
    assert lookup(tokens, 1, window=20) == ((), 0)


def test_rows_by_themselves() -> None:
    view = DraftView(
        rids=("a", "b"),
        slots=(0, 1),
        anchor_ids=(2, 9),
        positions=(4, 1),
        token_ids=((1, 2, 3, 1, 2), (8, 9)),
    )
    assert NgramDrafter(5).propose(view, 2).token_ids == ((3, 1), ())
    with pytest.raises(ConfigError, match="token_ids"):
        NgramDrafter(5).propose(replace(view, token_ids=()), 2)
    with pytest.raises(ConfigError, match="max_n"):
        NgramDrafter(min_n=3, max_n=2)


def test_output_in_the_engine_is_that_without_drafts() -> None:
    deepinfer = pytest.importorskip("deepinfer")
    pytest.importorskip("torch")
    params = deepinfer.SamplingParams(max_tokens=24, temperature=0.0)
    prompts = [
        "def add(a, b):\n    return a + b\n\ndef add(a, b):\n",
        "import os\nimport sys\nimport os\nimport",
    ]
    with deepinfer.Engine.from_pretrained("nano", rounding="none") as plain:
        wanted = [out.token_ids for out in plain.generate(prompts, params)]
    with deepinfer.Engine.from_pretrained("nano", rounding="none", drafter="ngram") as engine:
        outs = engine.generate(prompts, params)
        engine.check()
    assert [out.token_ids for out in outs] == wanted
    assert sum(out.usage.accepted for out in outs) > 0
