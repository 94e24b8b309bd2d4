"""Grammars in SGLang: a grammar backend with the interface of SGLang's runtime.

With SGLang installed the classes derive from SGLang's own; without it they have the same methods, so they can be
used and tested alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from deepinfer.adapters.host_base import base_class
from deepinfer.core.errors import GrammarError, InvalidRequest
from deepinfer.core.lazy import optional_import
from deepinfer.grammar import (
    GrammarLibrary,
    GrammarMatcher,
    TokenVocab,
    allocate_bitmask,
    apply_bitmask_,
    fill_batch,
)

__all__ = ["SglangGrammar", "SglangGrammarBackend", "register_with_sglang"]

_BASE = "sglang.srt.constrained.base_grammar_backend"


class SglangGrammar(base_class(_BASE, "BaseGrammarObject")):  # type: ignore[misc]
    """The grammar of one request.

    Args:
        matcher: Where its output is.
    """

    def __init__(self, matcher: GrammarMatcher) -> None:
        super().__init__()
        self.matcher = matcher
        self.current_token: int | None = None
        self.finished = False

    def accept_token(self, token: int) -> None:
        """Moves over a token; behind the end of the output it does nothing.

        Args:
            token: The token.

        Raises:
            InvalidRequest: It does not fit.
        """
        if self.is_terminated():
            return
        if not self.matcher.accept_token(token):
            raise InvalidRequest(
                f"the grammar refuses token {token}, which its mask did not allow; apply the mask before sampling",
                field="token",
                value=token,
            )
        self.current_token = token

    def rollback(self, k: int) -> None:
        """Takes tokens back.

        Args:
            k: How many of those accepted last.

        Raises:
            ConfigError: Fewer were accepted.
        """
        self.matcher.rollback(k)

    def is_terminated(self) -> bool:
        """Whether the output has ended."""
        return self.matcher.is_terminated()

    def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device: Any) -> Tensor:
        """A bitmask for a batch.

        Args:
            vocab_size: Columns of the logits.
            batch_size: Rows.
            device: Where it will be needed; it is filled on the CPU, and `move_vocab_mask` takes it there.

        Returns:
            Shape [batch_size, words], int32, on the CPU, every bit 1.
        """
        bitmask: Tensor = allocate_bitmask(batch_size, vocab_size, backend="torch")
        return bitmask

    def fill_vocab_mask(self, vocab_mask: Tensor, idx: int) -> None:
        """Writes which tokens may come next.

        Args:
            vocab_mask: Shape [rows, words], int32, on the CPU.
            idx: The row.
        """
        self.matcher.fill_bitmask(vocab_mask, idx)

    @staticmethod
    def fill_vocab_mask_batched(entries: Sequence[Any], vocab_mask: Tensor) -> None:
        """Fills the rows of several requests; equal states are worked out once.

        Args:
            entries: Pairs of a row and its grammar, as `row` and `grammar`. Other rows stay as they are.
            vocab_mask: Shape [rows, words], int32, on the CPU.
        """
        ours = [entry for entry in entries if isinstance(entry.grammar, SglangGrammar)]
        for entry in entries:
            if not isinstance(entry.grammar, SglangGrammar):
                entry.grammar.fill_vocab_mask(vocab_mask, entry.row)
        fill_batch(
            [entry.grammar.matcher for entry in ours], vocab_mask, [entry.row for entry in ours]
        )

    @staticmethod
    def reset_vocab_mask(vocab_mask: Tensor) -> None:
        """Allows every token, in place.

        Args:
            vocab_mask: Shape [rows, words], int32.
        """
        vocab_mask.fill_(-1)

    @staticmethod
    def move_vocab_mask(vocab_mask: Tensor, device: Any) -> Tensor:
        """The bitmask on the device of the logits.

        Args:
            vocab_mask: Shape [rows, words], int32.
            device: The device.

        Returns:
            Shape [rows, words], int32.
        """
        return vocab_mask.to(device, non_blocking=True)

    @staticmethod
    def apply_vocab_mask(logits: Tensor, vocab_mask: Tensor) -> None:
        """Sets the logits of tokens that are not allowed to minus infinity, in place.

        Args:
            logits: Shape [rows, vocab].
            vocab_mask: Shape [rows, words], int32, on the same device.
        """
        apply_bitmask_(logits, vocab_mask)

    def copy(self) -> SglangGrammar:
        """A grammar at its start for another request, which shares the masks."""
        other = self.matcher.fork()
        other.reset()
        return SglangGrammar(other)

    def try_jump_forward(self, tokenizer: Any) -> tuple[list[int], str] | None:
        """The text that every continuation begins with.

        Args:
            tokenizer: The engine's tokenizer; not needed.

        Returns:
            No tokens and the text, or None where there is a choice.
        """
        data = self.matcher.forced_bytes()
        text = data.decode("utf-8", errors="ignore")
        while text and not data.startswith(text.encode()):
            text = text[:-1]  # bytes of a character that is not complete stay behind
        return ([], text) if text else None

    def jump_forward_str_state(self, helper: tuple[list[int], str]) -> tuple[str, int]:
        """The text to go on with.

        Args:
            helper: What `try_jump_forward` gave.

        Returns:
            The text, and -1: the state follows from the tokens.
        """
        return helper[1], -1

    def jump_and_retokenize(
        self, old_output_ids: list[int], new_output_ids: list[int], next_state: int
    ) -> None:
        """Takes the tokens back that a jump has changed, and moves over the new ones.

        Args:
            old_output_ids: Tokens accepted so far.
            new_output_ids: Tokens of the same output after the jump.
            next_state: Not needed.

        Raises:
            InvalidRequest: The new tokens do not fit.
        """
        same = 0
        for old, new in zip(old_output_ids, new_output_ids, strict=False):
            if old != new:
                break
            same += 1
        self.matcher.rollback(len(old_output_ids) - same)
        for token in new_output_ids[same:]:
            self.accept_token(token)


class SglangGrammarBackend(base_class(_BASE, "BaseGrammarBackend")):  # type: ignore[misc]
    """The backend of one runtime; `register_with_sglang` makes it known by name.

    Args:
        tokenizer: The runtime's tokenizer.
        vocab_size: Columns of the logits.
        eos_token_ids: Ids that end an output, or None for those of the tokenizer.
        vocab: The vocabulary, or None to read it from the tokenizer.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        eos_token_ids: Iterable[int] | None = None,
        *,
        vocab: TokenVocab | None = None,
    ) -> None:
        super().__init__()
        if vocab is None:
            vocab = TokenVocab.from_tokenizer(
                tokenizer, vocab_size=vocab_size, eos_ids=eos_token_ids
            )
        self._library = GrammarLibrary(vocab)

    def dispatch_json(self, key_string: str) -> Any:
        """The grammar of a JSON Schema.

        Args:
            key_string: The schema as text; "$$ANY$$" is any JSON value.

        Returns:
            The grammar; where it does not compile, SGLang's object for that, with the message.
        """
        return self._dispatch("json", "{}" if key_string == "$$ANY$$" else key_string)

    def dispatch_regex(self, key_string: str) -> Any:
        """The grammar of a regular expression.

        Args:
            key_string: The expression.

        Returns:
            As `dispatch_json`.
        """
        return self._dispatch("regex", key_string)

    def dispatch_ebnf(self, key_string: str) -> Any:
        """The grammar of an EBNF.

        Args:
            key_string: The EBNF.

        Returns:
            As `dispatch_json`.
        """
        return self._dispatch("grammar", key_string)

    def dispatch_structural_tag(self, key_string: str) -> Any:
        """The grammar of a structural tag.

        Args:
            key_string: Its JSON form.

        Returns:
            As `dispatch_json`.
        """
        return self._dispatch("structural_tag", key_string)

    def _dispatch(self, kind: str, text: str) -> Any:
        try:
            return SglangGrammar(GrammarMatcher(self._library.get(kind, text)))
        except GrammarError as error:
            invalid = base_class(_BASE, "InvalidGrammarObject")
            if invalid is object:
                raise
            return invalid(str(error))

    def reset(self) -> None:
        """Forgets the grammars."""
        parent = getattr(super(), "reset", None)
        if parent is not None:
            parent()
        self._library.clear()


def register_with_sglang(name: str = "deepinfer") -> None:
    """Makes the backend known to SGLang, for `--grammar-backend NAME`.

    Args:
        name: The name.

    Raises:
        MissingDependency: SGLang is not installed.
    """
    module = optional_import(_BASE, package="sglang")

    def make(server_args: Any, tokenizer: Any, vocab_size: int, eos_token_ids: Any) -> Any:
        return SglangGrammarBackend(tokenizer, vocab_size, eos_token_ids)

    module.register_grammar_backend(name, make)
