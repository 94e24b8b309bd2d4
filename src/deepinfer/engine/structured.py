"""The engine's own grammar part: structured output over the vocabulary of its tokenizer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deepinfer.core.params import SamplingParams

if TYPE_CHECKING:
    from deepinfer.grammar.compiled import CompiledGrammar
    from deepinfer.grammar.library import GrammarLibrary
    from deepinfer.grammar.request_state import RequestOptions

__all__ = ["REASONING", "StructuredOutput"]

REASONING = ("<think>", "</think>")
"""Control tokens that begin and end reasoning."""


class StructuredOutput:
    """Compiles the grammars of requests; the vocabulary is read when the first one comes.

    Grammars are kept by their text and shared between requests, and so are the masks that they have computed.

    A request whose prompt leaves reasoning open (it ends in `<think>` and something behind it, as a chat template leaves it in
    thinking mode) is free up to the token that ends the reasoning, and bound from there on. The tokenizer's control tokens
    `<think>` and `</think>` say where that is; a tokenizer without them has no such boundary.

    Args:
        tokenizer: A tokenizer with `vocabulary()`, the bytes of each id, and `encode`.
        vocab_size: Columns of the logits.
        eos_token_ids: Ids that end an output.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = tuple(token for token in eos_token_ids if 0 <= token < vocab_size)
        self._library: GrammarLibrary | None = None
        self._lock = threading.Lock()

    @property
    def library(self) -> GrammarLibrary:
        """The grammars that are kept; made on first use."""
        if self._library is None:
            from deepinfer.grammar.library import GrammarLibrary
            from deepinfer.grammar.vocab import TokenVocab

            with self._lock:
                if self._library is None:
                    tokenizer = self._tokenizer
                    vocab = TokenVocab(
                        tokenizer.vocabulary()[: self._vocab_size],
                        eos_ids=self._eos,
                        vocab_size=self._vocab_size,
                        encode=lambda text: list(tokenizer.encode(text, add_bos=False)),
                    )
                    self._library = GrammarLibrary(vocab, reasoning=self._reasoning())
        return self._library

    def _reasoning(self) -> tuple[int, int] | None:
        """Ids of the control tokens around reasoning; None without them."""
        control = getattr(self._tokenizer, "control_tokens", None) or {}
        begin, end = (control.get(name) for name in REASONING)
        return None if begin is None or end is None else (begin, end)

    def __call__(self, params: SamplingParams) -> CompiledGrammar | RequestOptions:
        """As `for_request`, with a prompt that leaves nothing open."""
        return self.for_request(params, ())

    def for_request(
        self, params: SamplingParams, prompt_token_ids: Sequence[int]
    ) -> CompiledGrammar | RequestOptions:
        """The grammar of a request.

        Args:
            params: Parameters with `regex`, `json_schema` or `ebnf`; each of their `stop_token_ids` ends the output, and is
                allowed where it may end and nowhere else.
            prompt_token_ids: The prompt.

        Returns:
            The grammar, bound to the engine's vocabulary.

        Raises:
            GrammarError: The text is malformed, accepts nothing, or cannot be enforced.
        """
        return self.library.for_request(params, prompt_token_ids)

    def __repr__(self) -> str:
        kept = 0 if self._library is None else len(self._library)
        return f"StructuredOutput({kept} grammars)"
