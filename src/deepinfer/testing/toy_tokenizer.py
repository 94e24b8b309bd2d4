"""One character a token, for toy models."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.core.errors import InvalidRequest

__all__ = ["ToyTokenizer"]

_ALPHABET = (
    "abcdefghijklmnopqrstuvwxyz .,:;!?-+*/=<>()[]{}'\"_#\n0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
)
_NUM_SPECIAL = 4


class _Stream:
    def __init__(self, tokenizer: ToyTokenizer) -> None:
        self._tokenizer = tokenizer

    def push(self, token_id: int) -> str:
        return self._tokenizer.decode((token_id,))

    def finish(self) -> str:
        return ""


class ToyTokenizer:
    """Ids 0 to 3 are special (begin, end, pad, noise) and have no text; each other id is one character.

    Args:
        vocab_size: Number of ids, at least 8.

    Examples:
        >>> tokenizer = ToyTokenizer()
        >>> tokenizer.encode("cab"), tokenizer.decode([6, 4, 5, 1])
        ([0, 6, 4, 5], 'cab')
    """

    bos_token_id = 0
    eos_token_id = 1

    def __init__(self, vocab_size: int = 64) -> None:
        self._vocab_size = vocab_size
        self._ids = {
            char: index + _NUM_SPECIAL
            for index, char in enumerate(_ALPHABET[: vocab_size - _NUM_SPECIAL])
        }
        self._text = {index: char for char, index in self._ids.items()}

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return self._vocab_size

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: The text.
            add_bos: Put the begin token first.

        Returns:
            The ids.

        Raises:
            InvalidRequest: A character has no id.
        """
        unknown = [char for char in text if char not in self._ids]
        if unknown:
            raise InvalidRequest(
                f"the toy tokenizer has no id for {unknown[0]!r}; use plain ASCII, or a larger "
                "vocab_size.",
                field="prompt",
                value=unknown[0],
            )
        return [self.bos_token_id] * add_bos + [self._ids[char] for char in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids.

        Args:
            token_ids: The ids; special and unassigned ones have no text.

        Returns:
            The text.
        """
        return "".join(self._text.get(int(token), "") for token in token_ids)

    def stream(self) -> _Stream:
        """A new incremental detokenizer."""
        return _Stream(self)
