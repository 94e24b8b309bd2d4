"""Where white space may stand in generated JSON, and how much of it."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.core.errors import ConfigError
from deepinfer.grammar.ir import EPS, Expr, alt, byte_set, literal, repeat, seq, star

__all__ = ["Whitespace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Whitespace:
    r"""White space between the tokens of JSON.

    One gap is at most `max_newlines` line ends (`\n` or `\r\n`) followed by at most `max_blanks` blanks (spaces
    and tabs). The default takes whatever JSON writers produce down to a depth of 16 levels of two blanks, and
    bounds what a model can emit: without a bound, white space is a loop that some models never leave.

    Attributes:
        max_blanks: Most spaces and tabs in one gap, >= 0; None for no bound.
        max_newlines: Most line ends in one gap, >= 0.
        around: Whether white space may also stand before and after the whole value.
        item_separator: When given, exactly this text stands between members, and `max_blanks` and `max_newlines`
            count for nothing: the style of `json.dumps(separators=...)` without indentation.
        key_separator: The same for what stands between a key and its value; give both or neither.
    """

    max_blanks: int | None = 32
    max_newlines: int = 1
    around: bool = False
    item_separator: str | None = None
    key_separator: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_blanks", "max_newlines"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or not 0 <= value <= 1 << 20):
                raise ConfigError(
                    f"{name} is {value!r}; use a number from 0 to 1048576", field=name, value=value
                )
        if (self.item_separator is None) != (self.key_separator is None):
            raise ConfigError(
                "item_separator and key_separator go together; give both or neither",
                field="item_separator",
                value=self.item_separator,
            )
        for name, mark in (("item_separator", ","), ("key_separator", ":")):
            value = getattr(self, name)
            if value is not None and (value.strip(" \t\r\n") != mark):
                raise ConfigError(
                    f"{name} is {value!r}; use {mark!r} with white space around it at most",
                    field=name,
                    value=value,
                )

    @classmethod
    def compact(cls) -> Whitespace:
        """No white space at all: `{"a":[1,2]}`."""
        return cls(item_separator=",", key_separator=":")

    @property
    def gap(self) -> Expr:
        """White space that may stand next to a bracket."""
        if self.item_separator is not None:
            return EPS
        return self._run()

    @property
    def outside(self) -> Expr:
        """White space before and after the whole value."""
        return self._run() if self.around else EPS

    @property
    def comma(self) -> Expr:
        """What stands between two members, white space behind the first one not included."""
        if self.item_separator is not None:
            return literal(self.item_separator.encode())
        return seq(literal(b","), self.gap)

    @property
    def colon(self) -> Expr:
        """What stands between a key and its value."""
        if self.key_separator is not None:
            return literal(self.key_separator.encode())
        return seq(self.gap, literal(b":"), self.gap)

    def _run(self) -> Expr:
        blank = byte_set(b" \t")
        blanks = star(blank) if self.max_blanks is None else repeat(blank, 0, self.max_blanks)
        line_end = alt(literal(b"\n"), literal(b"\r\n"))
        return seq(repeat(line_end, 0, self.max_newlines), blanks)
