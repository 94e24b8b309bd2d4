r"""Escapes and bracketed classes of regular expressions: what one backslash or one `[...]` stands for."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Literal, NoReturn

from deepinfer.core.errors import GrammarSyntaxError
from deepinfer.grammar.codepoints import ALL, CodePoints, complement, difference, union
from deepinfer.grammar.unicode_classes import (
    ASCII_DIGITS,
    ASCII_SPACE,
    ASCII_WORD,
    ECMA_SPACE,
    LINE_TERMINATORS,
    case_closure,
    property_set,
    unicode_digits,
    unicode_space,
    unicode_word,
)

__all__ = ["Flags", "Flavor", "PatternReader"]

Flavor = Literal["json-schema", "python"]
"""Syntax and meaning: ECMA-262 with the `u` flag, as JSON Schema has it, or Python's `re` for `str`."""

_CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}


@dataclass(frozen=True, slots=True)
class Flags:
    """Options that hold for a part of a pattern.

    Attributes:
        ignore_case: Letter case does not matter.
        multiline: `^` and `$` hold at every line.
        dot_all: `.` matches line ends too.
        verbose: White space and comments in the pattern count for nothing.
        ascii_only: Digits, words, spaces and case are those of ASCII. Python only.
    """

    ignore_case: bool = False
    multiline: bool = False
    dot_all: bool = False
    verbose: bool = False
    ascii_only: bool = False


@dataclass(frozen=True, slots=True)
class _Escape:
    """What an escape stands for: one code point, or a class.

    Attributes:
        code_point: The code point, or None for a class. A lone surrogate is one, and matches nothing.
        points: The set.
    """

    code_point: int | None
    points: CodePoints


class PatternReader:
    """A pattern, a place in it, and the readers of its small constructs.

    Args:
        pattern: The pattern.
        flavor: Its flavour.
    """

    def __init__(self, pattern: str, flavor: Flavor) -> None:
        self.pattern = pattern
        self.python = flavor == "python"
        self.at = 0

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        """Refuses the pattern.

        Args:
            message: What is wrong, and what would be right.
            at: Where, or None for the present place.

        Raises:
            GrammarSyntaxError: Always.
        """
        at = self.at if at is None else at
        line = self.pattern.count("\n", 0, at) + 1
        column = at - (self.pattern.rfind("\n", 0, at) + 1) + 1
        raise GrammarSyntaxError(
            f"at character {at} of the regular expression: {message}",
            line=line,
            column=column,
            position=at,
        )

    def peek(self, length: int = 1) -> str:
        """The next characters, which stay unread.

        Args:
            length: How many.

        Returns:
            Up to that many characters; the empty string at the end.
        """
        return self.pattern[self.at : self.at + length]

    def take(self, text: str) -> bool:
        """Reads a text if it comes next.

        Args:
            text: The text.

        Returns:
            Whether it was there.
        """
        if self.pattern.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def until(self, end: str, what: str) -> str:
        """Reads up to and over a closing text.

        Args:
            end: The closing text.
            what: What is being read, for the error.

        Returns:
            What stands before it.

        Raises:
            GrammarSyntaxError: It never comes.
        """
        stop = self.pattern.find(end, self.at)
        if stop < 0:
            self.fail(f"{what} has no closing {end!r}")
        text = self.pattern[self.at : stop]
        self.at = stop + len(end)
        return text

    def literal(self, code_point: int, flags: Flags) -> CodePoints:
        """The set that a literal character matches.

        Args:
            code_point: The character.
            flags: The options at this place.

        Returns:
            The set; empty for a lone surrogate.
        """
        if 0xD800 <= code_point < 0xE000:
            return ()
        return self._cased(((code_point, code_point),), flags)

    def _cased(self, points: CodePoints, flags: Flags) -> CodePoints:
        if not flags.ignore_case or not points:
            return points
        return case_closure(points, ascii_only=flags.ascii_only, dotless=self.python)

    def dot(self, flags: Flags) -> CodePoints:
        """The set that `.` matches.

        Args:
            flags: The options at this place.

        Returns:
            The set.
        """
        if flags.dot_all:
            return ALL
        return complement(((0x0A, 0x0A),) if self.python else LINE_TERMINATORS)

    def word(self, flags: Flags) -> CodePoints:
        """The characters that count as parts of words.

        Args:
            flags: The options at this place.

        Returns:
            The set.
        """
        if self.python and not flags.ascii_only:
            return unicode_word()
        return ASCII_WORD if self.python else self._cased(ASCII_WORD, flags)

    def escape(self, flags: Flags, *, in_class: bool) -> _Escape:
        """Reads what follows a backslash, when it stands for a character or a class.

        Args:
            flags: The options at this place.
            in_class: Whether it stands in brackets.

        Returns:
            What it stands for.

        Raises:
            GrammarSyntaxError: The escape is malformed or unknown.
        """
        begin = self.at - 1
        letter = self.peek()
        if not letter:
            self.fail("a backslash ends the pattern; write \\\\ for a backslash", begin)
        self.at += 1
        if letter in "dDwWsS":
            points = self._class_escape(letter.lower(), flags)
            return _Escape(None, complement(points) if letter.isupper() else points)
        if letter in _CONTROLS:
            return self._one(_CONTROLS[letter], flags)
        if letter == "b" and in_class:
            return self._one(0x08, flags)
        if letter == "x":
            return self._one(self._hex(2, begin), flags)
        if letter == "u":
            return self._one(self._unicode_escape(begin), flags)
        if letter in "0123456789":
            return self._one(self._octal(letter, begin), flags)
        special = self._python_escape if self.python else self._ecma_escape
        found = special(letter, flags, begin)
        if found is not None:
            return found
        if letter.isascii() and letter.isalnum():
            hint = "; write ^ or $" if letter in "AZz" else ""
            self.fail(f"\\{letter} is not an escape of this flavour{hint}", begin)
        return self._one(ord(letter), flags)

    def _one(self, code_point: int, flags: Flags) -> _Escape:
        return _Escape(code_point, self.literal(code_point, flags))

    def _class_escape(self, letter: str, flags: Flags) -> CodePoints:
        if letter == "w":
            return self.word(flags)
        if self.python and not flags.ascii_only:
            return unicode_digits() if letter == "d" else unicode_space()
        if letter == "d":
            return ASCII_DIGITS
        return ASCII_SPACE if self.python else ECMA_SPACE

    def _python_escape(self, letter: str, flags: Flags, begin: int) -> _Escape | None:
        if letter == "a":
            return self._one(0x07, flags)
        if letter == "U":
            return self._one(self._hex(8, begin), flags)
        if letter == "N":
            if not self.take("{"):
                self.fail("\\N needs the name of a character in braces", begin)
            name = self.until("}", "the name of a character")
            try:
                return self._one(ord(unicodedata.lookup(name)), flags)
            except (KeyError, TypeError):
                self.fail(f"no character is named {name!r}", begin)
        return None

    def _ecma_escape(self, letter: str, flags: Flags, begin: int) -> _Escape | None:
        if letter == "c":
            control = self.peek()
            if not (control.isascii() and control.isalpha()):
                self.fail("\\c needs a letter from A to Z", begin)
            self.at += 1
            return self._one(ord(control) % 32, flags)
        if letter in "pP":
            if not self.take("{"):
                self.fail(f"\\{letter} needs a property in braces, such as \\{letter}{{Lu}}", begin)
            name = self.until("}", "a property")
            points = property_set(name)
            if points is None:
                self.fail(
                    f"unknown Unicode property {name!r}; general categories, scripts and a few more are known",
                    begin,
                )
            return _Escape(
                None, self._cased(complement(points) if letter == "P" else points, flags)
            )
        return None

    def _hex(self, digits: int, begin: int) -> int:
        text = self.peek(digits)
        if len(text) < digits or any(c not in "0123456789abcdefABCDEF" for c in text):
            self.fail(f"this escape needs {digits} hexadecimal digits", begin)
        self.at += digits
        value = int(text, 16)
        if value > 0x10FFFF:
            self.fail(f"{text} is past the last code point, 10FFFF", begin)
        return value

    def _unicode_escape(self, begin: int) -> int:
        if not self.python and self.take("{"):
            text = self.until("}", "a code point")
            if not text or any(c not in "0123456789abcdefABCDEF" for c in text):
                self.fail("\\u{...} needs hexadecimal digits", begin)
            digits = text.lstrip("0") or "0"
            if len(digits) > 6 or int(digits, 16) > 0x10FFFF:
                self.fail(f"{text[:12]} is past the last code point, 10FFFF", begin)
            return int(digits, 16)
        value = self._hex(4, begin)
        if not self.python and 0xD800 <= value < 0xDC00 and self.peek(2) == "\\u":
            low = self.pattern[self.at + 2 : self.at + 6]
            if len(low) == 4 and all(c in "0123456789abcdefABCDEF" for c in low):
                second = int(low, 16)
                if 0xDC00 <= second < 0xE000:
                    self.at += 6
                    return 0x10000 + ((value - 0xD800) << 10) + (second - 0xDC00)
        return value

    def _octal(self, first: str, begin: int) -> int:
        """A digit behind a backslash that is no back-reference: those are read by the parser."""
        if not self.python:
            if first == "0" and not self.peek().isdecimal():
                return 0
            self.fail("octal escapes are not part of ECMA-262; write \\xHH", begin)
        text = first
        while len(text) < 3 and self.peek() and self.peek() in "01234567":
            text += self.peek()
            self.at += 1
        if any(c not in "01234567" for c in text) or int(text, 8) > 0o377:
            self.fail("an octal escape goes from \\0 to \\377", begin)
        return int(text, 8)

    def bracket(self, flags: Flags) -> CodePoints:
        """Reads a class whose opening bracket was read.

        Args:
            flags: The options at this place.

        Returns:
            The set of the class.

        Raises:
            GrammarSyntaxError: It is not closed, or a range in it is wrong.
        """
        begin = self.at - 1
        negated = self.take("^")
        found: list[CodePoints] = []
        first = True
        while True:
            if not self.peek():
                self.fail("this class has no closing bracket", begin)
            if self.peek() == "]" and not (first and self.python):
                self.at += 1
                break
            first = False
            start_at = self.at
            start = self._class_atom(flags)
            if self.peek() != "-" or self.peek(2) in ("-", "-]"):
                found.append(start.points)
                continue
            self.at += 1
            end = self._class_atom(flags)
            if start.code_point is None or end.code_point is None:
                if self.python:
                    self.fail("a range cannot begin or end with a class", start_at)
                # As Annex B of ECMA-262 has it: the hyphen is one more member.
                found += [start.points, end.points, self.literal(0x2D, flags)]
                continue
            if start.code_point > end.code_point:
                self.fail("this range runs backwards; put its smaller end first", start_at)
            found.append(self._cased(union(((start.code_point, end.code_point),)), flags))
        points = union(*found)
        return difference(ALL, points) if negated else points

    def _class_atom(self, flags: Flags) -> _Escape:
        character = self.peek()
        if not character:
            self.fail("the pattern ends inside a class; close it with ]")
        self.at += 1
        if character == "\\":
            return self.escape(flags, in_class=True)
        return _Escape(ord(character), self.literal(ord(character), flags))
