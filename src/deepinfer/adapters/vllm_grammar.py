"""Grammars in vLLM: a structured-output backend with the interface of vLLM's v1 engine.

With vLLM installed the classes derive from vLLM's own; without it they have the same methods, so they can be used
and tested alone.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deepinfer.adapters.host_base import base_class
from deepinfer.core.errors import ConfigError
from deepinfer.grammar import GrammarLibrary, GrammarMatcher, TokenVocab, allocate_bitmask

__all__ = ["VllmGrammar", "VllmGrammarBackend"]

_TYPES = "vllm.v1.structured_output.backend_types"


class VllmGrammar(base_class(_TYPES, "StructuredOutputGrammar")):  # type: ignore[misc]
    """The grammar of one request.

    Args:
        matcher: Where its output is.
    """

    def __init__(self, matcher: GrammarMatcher) -> None:
        self.matcher = matcher
        self.num_processed_tokens = 0

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Moves over tokens.

        Args:
            request_id: Id of the request; not needed.
            tokens: The tokens. Those behind the end of the output are not looked at.

        Returns:
            Whether all of them fit. Where one does not, those before it stay accepted.
        """
        for token in tokens:
            if self.matcher.is_terminated():
                return True
            if not self.matcher.accept_token(token):
                return False
            self.num_processed_tokens += 1
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """The tokens before the first that does not fit; nothing changes.

        Args:
            tokens: The tokens.

        Returns:
            A prefix of them.
        """
        return tokens[: self.matcher.validate(tokens)]

    def rollback(self, num_tokens: int) -> None:
        """Takes tokens back.

        Args:
            num_tokens: How many of those accepted last.

        Raises:
            ConfigError: Fewer were accepted.
        """
        self.matcher.rollback(num_tokens)
        self.num_processed_tokens -= num_tokens

    def fill_bitmask(self, bitmask: Tensor, batch_index: int) -> None:
        """Writes which tokens may come next.

        Args:
            bitmask: Shape [rows, words], int32, on the CPU.
            batch_index: The row.
        """
        self.matcher.fill_bitmask(bitmask, batch_index)

    def is_terminated(self) -> bool:
        """Whether the output has ended."""
        return self.matcher.is_terminated()

    def reset(self) -> None:
        """Goes back to the start."""
        self.matcher.reset()
        self.num_processed_tokens = 0


class VllmGrammarBackend(base_class(_TYPES, "StructuredOutputBackend")):  # type: ignore[misc]
    """The backend of one engine.

    vLLM looks backends up by names of its own. To use this one, put it in place of the manager's before the first
    request: `manager.backend = VllmGrammarBackend(vllm_config, tokenizer, vocab_size)`.

    Args:
        vllm_config: The engine's configuration; not needed.
        tokenizer: The engine's tokenizer.
        vocab_size: Columns of the logits.
        vocab: The vocabulary, or None to read it from the tokenizer.
    """

    def __init__(
        self,
        vllm_config: Any,
        tokenizer: Any,
        vocab_size: int,
        *,
        vocab: TokenVocab | None = None,
    ) -> None:
        self.vllm_config = vllm_config
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._library = GrammarLibrary(
            TokenVocab.from_tokenizer(tokenizer, vocab_size=vocab_size) if vocab is None else vocab
        )

    def compile_grammar(
        self, request_type: Any, grammar_spec: str, stop_token_ids: set[int] | None = None
    ) -> VllmGrammar:
        """The grammar of a request.

        Args:
            request_type: A `StructuredOutputOptions`, or its name.
            grammar_spec: The text that goes with it.
            stop_token_ids: Ids that end this output, or None for those of the vocabulary.

        Returns:
            The grammar, at its start. Requests with the same text share masks.

        Raises:
            ConfigError: The type is not known.
            GrammarError: The text is malformed, or cannot be enforced.
        """
        name = getattr(request_type, "name", request_type)
        if not isinstance(name, str):
            raise ConfigError(
                f"request_type is {request_type!r}; give a StructuredOutputOptions or its name",
                field="request_type",
                value=request_type,
            )
        compiled = self._library.get(name.lower(), grammar_spec)
        return VllmGrammar(GrammarMatcher(compiled, stop_ids=stop_token_ids))

    def allocate_token_bitmask(self, max_num_seqs: int) -> Tensor:
        """A bitmask for all requests.

        Args:
            max_num_seqs: Rows.

        Returns:
            Shape [max_num_seqs, words], int32, on the CPU, every bit 1.
        """
        bitmask: Tensor = allocate_bitmask(max_num_seqs, self.vocab_size, backend="torch")
        return bitmask

    def destroy(self) -> None:
        """Forgets the grammars."""
        self._library.clear()
