"""deepinfer's grammars in the form that a side-by-side harness of grammar engines drives.

An engine there is a class with `setup`, `compile`, `new`, `fill`, `accept`, `fork`, `rollback` and `forced`; give the
harness `grammar_peer:DeepInfer` with this folder and `src` on the path.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
from numpy.typing import NDArray

import deepinfer
from deepinfer.grammar.compiled import CompiledGrammar
from deepinfer.grammar.ebnf import compile_ebnf
from deepinfer.grammar.grammar import Grammar
from deepinfer.grammar.json_schema import compile_json_schema
from deepinfer.grammar.matcher import GrammarMatcher
from deepinfer.grammar.regex import compile_regex
from deepinfer.grammar.vocab import TokenVocab

EOS = 1


class DeepInfer:
    """One engine: a vocabulary, and a row that masks are written into."""

    name = "deepinfer"

    def setup(self, tokenizer: str) -> None:
        """Reads the tokenizer and builds what all grammars share."""
        self.version = deepinfer.__version__
        self.vocab = TokenVocab.from_tokenizer(tokenizer, eos_ids=[EOS])
        self.vocab.prepare()
        # As a server does that collects between requests: a collection is no part of a mask.
        gc.collect()
        gc.freeze()
        gc.disable()
        self.row: NDArray[np.int32] = np.zeros(self.vocab.num_words, dtype=np.int32)

    def compile(self, kind: str, text: str) -> CompiledGrammar:
        """Compiles from text; kept from one call to the next are the walks that grammars over a vocabulary share."""
        grammar: Grammar
        if kind == "json_schema":
            grammar = compile_json_schema(text)
        elif kind == "regex":
            grammar = compile_regex(text)
        else:
            grammar = compile_ebnf(text)
        return grammar.bind(self.vocab)

    def new(self, handle: CompiledGrammar) -> GrammarMatcher:
        """A matcher at the start."""
        return GrammarMatcher(handle)

    def fill(self, matcher: GrammarMatcher) -> NDArray[np.int32]:
        """The mask, shape [words], int32."""
        matcher.fill_bitmask(self.row)
        return self.row

    def accept(self, matcher: GrammarMatcher, token: int) -> bool:
        """Moves over a token."""
        return matcher.accept_token(token)

    def fork(self, matcher: GrammarMatcher) -> GrammarMatcher:
        """An independent copy."""
        return matcher.fork()

    def rollback(self, matcher: GrammarMatcher, count: int) -> None:
        """Takes tokens back."""
        matcher.rollback(count)

    def forced(self, matcher: GrammarMatcher) -> list[int] | Any:
        """Tokens that must follow."""
        return matcher.forced_tokens()
