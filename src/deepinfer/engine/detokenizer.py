"""Tokens to text, one at a time, without ever showing a broken character."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable

__all__ = ["IncrementalDetokenizer"]


class IncrementalDetokenizer:
    r"""Turns a stream of tokens into text that is safe to show.

    Bytes that may still become a character wait; bytes that cannot any more come out as U+FFFD. The pieces,
    joined, equal the decoding of all tokens at once, whatever the split: nothing is lost, repeated or taken
    back. Nothing is added or removed at the start either: a leading space of the first token is part of the
    text.

    Args:
        token_bytes: Bytes of a token id; empty for tokens that are not shown.

    Examples:
        >>> stream = IncrementalDetokenizer({0: b"caf", 1: b"\xc3", 2: b"\xa9"}.__getitem__)
        >>> [stream.push(token) for token in (0, 1, 2)], stream.finish()
        (['caf', '', 'é'], '')
    """

    __slots__ = ("_decode", "_token_bytes")

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Takes a token.

        Args:
            token_id: Its id.

        Returns:
            The text that became complete, maybe empty.

        Raises:
            ConfigError: The id is outside the vocabulary.
        """
        return self._decode.decode(self._token_bytes(token_id))

    def push_all(self, token_ids: Iterable[int]) -> str:
        """Takes several tokens; the same as joining `push` of each.

        Args:
            token_ids: Their ids.

        Returns:
            The text that became complete, maybe empty.

        Raises:
            ConfigError: An id is outside the vocabulary; none was taken then.
        """
        return self._decode.decode(b"".join(map(self._token_bytes, token_ids)))

    @property
    def pending(self) -> bool:
        """Whether bytes of an unfinished character are waiting."""
        return bool(self._decode.getstate()[0])

    def finish(self) -> str:
        """Ends the stream.

        Returns:
            U+FFFD for bytes that never became a character, else nothing. Calling it again gives nothing.
        """
        text = self._decode.decode(b"", final=True)
        self._decode.reset()
        return text
