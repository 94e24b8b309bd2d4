"""A toy grammar for engine tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepinfer import SamplingParams
from deepinfer.testing import ToyTokenizer


class Pattern:
    """A toy grammar: a fixed list of sets of allowed characters, one a token, then the end."""

    def __init__(self, sets: Sequence[str]) -> None:
        self.sets = [frozenset(ToyTokenizer().encode(text, add_bos=False)) for text in sets]

    def start(self) -> State:
        return State(self)


class State:
    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.at = 0

    @property
    def is_done(self) -> bool:
        return self.at == len(self.pattern.sets)

    def accept(self, token_ids: Sequence[int]) -> bool:
        for token in token_ids:
            if self.is_done or token not in self.pattern.sets[self.at]:
                return False
            self.at += 1
        return True

    def fill_mask(self, row: Any) -> None:
        row.fill_(0)
        for token in self.pattern.sets[self.at]:
            row[token >> 5] |= (1 << (token & 31)) - (1 << 32) * ((token & 31) == 31)

    def rollback(self, num_tokens: int) -> None:
        self.at -= num_tokens

    def clone(self) -> State:
        copy = State(self.pattern)
        copy.at = self.at
        return copy


def compile_regex(params: SamplingParams) -> Pattern:
    assert params.regex is not None
    return Pattern(params.regex.split("|"))
