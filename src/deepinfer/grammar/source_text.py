"""Places in a grammar text, and the escapes that the dialects share."""

from __future__ import annotations

from typing import NoReturn

from deepinfer.core.errors import GrammarSyntaxError

__all__ = ["SourceText"]

_SIMPLE = {
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "f": "\f",
    "v": "\v",
    "b": "\b",
    "a": "\a",
    "0": "\0",
}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


class SourceText:
    """A grammar text that knows its lines.

    Args:
        text: The text.

    Attributes:
        text: As given.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def place(self, at: int) -> tuple[int, int]:
        """Line and column of an offset.

        Args:
            at: Offset in code points, from 0.

        Returns:
            Line and column, both from 1.
        """
        return self.text.count("\n", 0, at) + 1, at - self.text.rfind("\n", 0, at)

    def fail(self, message: str, at: int) -> NoReturn:
        """Refuses the text.

        Args:
            message: What is wrong, and what would be right.
            at: Where.

        Raises:
            GrammarSyntaxError: Always.
        """
        line, column = self.place(at)
        raise GrammarSyntaxError(
            f"line {line}, column {column}: {message}", line=line, column=column, position=at
        )

    def escape(self, at: int) -> tuple[str, int]:
        r"""Reads an escape.

        Args:
            at: Where its backslash stands.

        Returns:
            The character, and the offset behind the escape. A lone surrogate is refused.

        Raises:
            GrammarSyntaxError: The escape is unknown or malformed.
        """
        letter = self.text[at + 1 : at + 2]
        if letter in _HEX_DIGITS:
            size = _HEX_DIGITS[letter]
            digits = self.text[at + 2 : at + 2 + size]
            if len(digits) < size or not digits.isascii() or not digits.isalnum():
                self.fail(f"\\{letter} needs {size} hexadecimal digits", at)
            try:
                code_point = int(digits, 16)
            except ValueError:
                self.fail(f"\\{letter} needs {size} hexadecimal digits", at)
            if code_point > 0x10FFFF or 0xD800 <= code_point < 0xE000:
                self.fail(f"{digits} is no character; it must be below 110000 and no surrogate", at)
            return chr(code_point), at + 2 + size
        if letter in _SIMPLE and letter:
            return _SIMPLE[letter], at + 2
        if not letter or letter.isalnum():
            self.fail(f"unknown escape \\{letter}; write \\\\ for a backslash", at)
        return letter, at + 2
