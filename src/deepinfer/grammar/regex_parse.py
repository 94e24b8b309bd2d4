"""The parser of regular expressions, for both flavours: text to tree, with a stack of its own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, NoReturn

from deepinfer.core.errors import GrammarTooLarge, UnsupportedKeyword
from deepinfer.grammar.argument_checks import check_text
from deepinfer.grammar.codepoints import NONE
from deepinfer.grammar.regex_ast import (
    NOTHING,
    Characters,
    LineEnd,
    LineStart,
    Look,
    Node,
    WordBoundary,
    alternatives,
    repetition,
    sequence,
)
from deepinfer.grammar.regex_escapes import Flags, Flavor, PatternReader
from deepinfer.grammar.unicode_classes import LINE_TERMINATORS

__all__ = ["MAX_PATTERN_LENGTH", "parse_regex"]

MAX_PATTERN_LENGTH = 1_000_000
"""Longest pattern that is read, in code points."""
_FLAG_NAMES = {
    "i": "ignore_case",
    "m": "multiline",
    "s": "dot_all",
    "x": "verbose",
    "a": "ascii_only",
}


@dataclass(slots=True)
class _Group:
    """A group that is being read.

    Attributes:
        kind: What its parenthesis says.
        flags: The options outside of it, which come back behind it.
        begin: Where it begins.
        branches: The alternatives that are complete.
        items: The parts of the present alternative.
    """

    kind: Literal["group", "ahead", "not-ahead", "behind", "not-behind"]
    flags: Flags
    begin: int
    branches: list[Node] = field(default_factory=list)
    items: list[Node] = field(default_factory=list)

    def node(self) -> Node:
        last = sequence(self.items)
        return alternatives([*self.branches, last]) if self.branches else last


def parse_regex(pattern: str, flavor: Flavor = "json-schema", *, flags: Flags = Flags()) -> Node:  # noqa: B008
    """Parses a regular expression.

    Args:
        pattern: The pattern.
        flavor: Its flavour.
        flags: The options that hold from the start.

    Returns:
        Its tree. Capturing and naming leave no trace in it.

    Raises:
        ConfigError: The pattern is no text.
        GrammarSyntaxError: The pattern is malformed; `position` says where.
        UnsupportedKeyword: It uses a back-reference, a conditional, or an atomic group or quantifier.
        GrammarTooLarge: It is too long or nested too deeply.
    """
    check_text("pattern", pattern)
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise GrammarTooLarge(
            f"the regular expression has {len(pattern)} characters and may have {MAX_PATTERN_LENGTH}; split it",
            resource="characters",
            limit=MAX_PATTERN_LENGTH,
            found=len(pattern),
        )
    return _Parser(pattern, flavor, flags).parse()


class _Parser(PatternReader):
    def __init__(self, pattern: str, flavor: Flavor, flags: Flags) -> None:
        super().__init__(pattern, flavor)
        self.flags = flags
        self.stack = [_Group("group", flags, 0)]
        self.quantifiable = False

    def parse(self) -> Node:
        length = len(self.pattern)
        while self.at < length:
            character = self.pattern[self.at]
            if self.flags.verbose and (character.isspace() or character == "#"):
                self._skip_comment(character)
                continue
            self._step(character)
        if len(self.stack) > 1:
            self.fail("this group has no closing parenthesis", self.stack[-1].begin)
        return self.stack[0].node()

    def _skip_comment(self, character: str) -> None:
        if character == "#":
            end = self.pattern.find("\n", self.at)
            self.at = len(self.pattern) if end < 0 else end
        else:
            self.at += 1

    def _step(self, character: str) -> None:
        begin = self.at
        self.at += 1
        top = self.stack[-1]
        if character == "(":
            self._open(begin)
        elif character == ")":
            self._close(begin)
        elif character == "|":
            top.branches.append(sequence(top.items))
            top.items = []
            self.quantifiable = False
        elif character in "*+?":
            low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[character]
            self._quantify(low, high, begin)
        elif character == "{" and (bounds := self._bounds(begin)) is not None:
            self._quantify(*bounds, begin)
        elif character == "[":
            self._put_set(self.bracket(self.flags))
        elif character == ".":
            self._put_set(self.dot(self.flags))
        elif character == "^":
            line_ends = self._line_ends() if self.flags.multiline else NONE
            self._put(LineStart(line_ends), quantifiable=False)
        elif character == "$":
            line_ends = self._line_ends() if self.flags.multiline else NONE
            self._put(LineEnd(line_ends, final_newline=self.python), quantifiable=False)
        elif character == "\\":
            self._escape(begin)
        else:
            self._put_set(self.literal(ord(character), self.flags))

    def _line_ends(self) -> tuple[tuple[int, int], ...]:
        return ((0x0A, 0x0A),) if self.python else LINE_TERMINATORS

    def _put(self, node: Node, *, quantifiable: bool = True) -> None:
        self.stack[-1].items.append(node)
        self.quantifiable = quantifiable

    def _put_set(self, points: tuple[tuple[int, int], ...]) -> None:
        self._put(Characters(points) if points else NOTHING)

    def _escape(self, begin: int) -> None:
        letter = self.peek()
        if letter in ("b", "B"):
            self.at += 1
            word = self.word(self.flags)
            self._put(WordBoundary(word, negative=letter == "B"), quantifiable=False)
        elif self.python and letter in ("A", "Z") and letter:
            self.at += 1
            self._put(LineStart() if letter == "A" else LineEnd(), quantifiable=False)
        elif (letter == "k" and not self.python) or (
            letter and letter in "123456789" and not self._is_python_octal()
        ):
            self._unsupported("back-reference", begin)
        else:
            self._put_set(self.escape(self.flags, in_class=False).points)

    def _is_python_octal(self) -> bool:
        """Three octal digits are a character in Python, whatever the number of groups."""
        digits = self.peek(3)
        return self.python and len(digits) == 3 and all(c in "01234567" for c in digits)

    def _unsupported(self, what: str, begin: int) -> NoReturn:
        raise UnsupportedKeyword(
            f"at character {begin} of the regular expression: {what}s cannot be enforced, since the language "
            "is not regular; write the alternatives out",
            keyword=what,
        )

    def _quantify(self, low: int, high: int | None, begin: int) -> None:
        items = self.stack[-1].items
        if not items or not self.quantifiable:
            self.fail("there is nothing to repeat; escape it with a backslash", begin)
        lazy = self.take("?")
        if not lazy and self.python and self.peek() == "+":
            self._unsupported("possessive quantifier", begin)
        items[-1] = repetition(items[-1], low, high, lazy=lazy)
        self.quantifiable = False

    def _bounds(self, begin: int) -> tuple[int, int | None] | None:
        """Reads `n}`, `n,}` or `n,m}` behind a brace, or nothing when the brace is a plain character."""
        end = self.at
        while end < len(self.pattern) and self.pattern[end] in "0123456789,":
            end += 1
        text = self.pattern[self.at : end]
        low, comma, high = text.partition(",")
        if self.pattern[end : end + 1] != "}" or not text or "," in high:
            return None
        if not low and not self.python:
            if not high:
                return None
            self.fail(f"{{{text}}} is no quantifier in ECMA-262; write {{0{text}}}", begin)
        longest = max(len(low), len(high))
        if longest > 9:
            raise GrammarTooLarge(
                f"at character {begin} of the regular expression: a repeat bound has {longest} digits and may have "
                "9; lower it",
                resource="digits",
                limit=9,
                found=longest,
            )
        least = int(low or 0)
        most = int(high) if high else None if comma else least
        if most is not None and most < least:
            self.fail(f"{{{text}}} has its bounds in the wrong order", begin)
        self.at = end + 1
        return least, most

    def _open(self, begin: int) -> None:
        group = _Group("group", self.flags, begin)
        if self.take("?"):
            if self.python and self.take("#"):
                self.until(")", "a comment")
                return
            if self.take(":"):
                pass
            elif self.take("="):
                group.kind = "ahead"
            elif self.take("!"):
                group.kind = "not-ahead"
            elif self.take("<="):
                group.kind = "behind"
            elif self.take("<!"):
                group.kind = "not-behind"
            elif self.take("P<") or (not self.python and self.take("<")):
                self._name(self.until(">", "the name of a group"), begin)
            elif self.take("P="):
                self._unsupported("back-reference", begin)
            elif self.take("("):
                self._unsupported("conditional", begin)
            elif self.take(">"):
                self._unsupported("atomic group", begin)
            elif not self._inline_flags(begin):
                return
        self.stack.append(group)
        self.quantifiable = False

    def _name(self, name: str, begin: int) -> None:
        bare = name.replace("$", "_") if not self.python else name
        if not bare.isidentifier():
            self.fail(f"{name!r} is no name for a group", begin)

    def _inline_flags(self, begin: int) -> bool:
        """Reads `imsx-imsx:` and says True, or `imsx)` at the start of the pattern and says False."""
        known = "imsxaLu" if self.python else "ims"
        changes: dict[str, bool] = {}
        on = True
        while (letter := self.peek()) and letter not in ":)":
            if letter == "-" and on:
                on = False
            elif letter in known:
                if letter == "L":
                    self.fail("the flag L is for bytes patterns only", self.at)
                if letter == "u":
                    changes["ascii_only"] = False
                else:
                    changes[_FLAG_NAMES[letter]] = on
            else:
                self.fail(f"unknown extension (?{letter}", begin)
            self.at += 1
        if self.take(":"):
            self.flags = replace(self.flags, **changes)
            return True
        if not self.take(")") or not on or not changes:
            self.fail("this group is malformed", begin)
        if self.pattern[:begin].strip() or len(self.stack) > 1:
            self.fail("options for the whole pattern stand at its start", begin)
        self.flags = replace(self.flags, **changes)
        self.stack[0].flags = self.flags
        return False

    def _close(self, begin: int) -> None:
        if len(self.stack) == 1:
            self.fail("this parenthesis closes nothing; escape it with a backslash", begin)
        group = self.stack.pop()
        self.flags = group.flags
        node = group.node()
        if group.kind == "group":
            self._put(node)
            return
        look = Look(
            node,
            ahead=group.kind.endswith("ahead"),
            negative=group.kind.startswith("not"),
            position=group.begin,
        )
        self._put(look, quantifiable=self.python)
