"""What a Lark grammar says: expressions, definitions and directives, as plain values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from deepinfer.grammar.source_text import SourceText

__all__ = [
    "Choice",
    "Definition",
    "Import",
    "Item",
    "Module",
    "Name",
    "Pattern",
    "Quantified",
    "Span",
    "String",
    "Succession",
    "fold",
]


@dataclass(frozen=True, slots=True)
class Item:
    """One part of an expression.

    Attributes:
        at: Where it stands.
    """

    at: int = field(compare=False)

    def children(self) -> tuple[Item, ...]:
        """The parts inside.

        Returns:
            The parts, in order.
        """
        return ()


@dataclass(frozen=True, slots=True)
class Name(Item):
    """A rule, a terminal or a parameter, with the arguments of a template.

    Attributes:
        name: Its name.
        arguments: The arguments, or None when it is no template.
    """

    name: str
    arguments: tuple[Item, ...] | None = None

    def children(self) -> tuple[Item, ...]:
        """The arguments."""
        return self.arguments or ()


@dataclass(frozen=True, slots=True)
class String(Item):
    """A text in quotes.

    Attributes:
        text: The text.
        ignore_case: Whether letter case does not matter.
    """

    text: str
    ignore_case: bool


@dataclass(frozen=True, slots=True)
class Pattern(Item):
    """A regular expression.

    Attributes:
        pattern: The expression.
        flags: Letters out of "imslux".
    """

    pattern: str
    flags: str


@dataclass(frozen=True, slots=True)
class Span(Item):
    """One character from a first to a last one.

    Attributes:
        first: The first character.
        last: The last one.
    """

    first: str
    last: str


@dataclass(frozen=True, slots=True)
class Succession(Item):
    """Parts one after the other.

    Attributes:
        parts: The parts.
    """

    parts: tuple[Item, ...]

    def children(self) -> tuple[Item, ...]:
        """The parts."""
        return self.parts


@dataclass(frozen=True, slots=True)
class Choice(Item):
    """Any one of several parts.

    Attributes:
        parts: The parts.
    """

    parts: tuple[Item, ...]

    def children(self) -> tuple[Item, ...]:
        """The parts."""
        return self.parts


@dataclass(frozen=True, slots=True)
class Quantified(Item):
    """A part several times.

    Attributes:
        part: The part.
        low: Least number of times.
        high: Greatest number of times, or None.
    """

    part: Item
    low: int
    high: int | None

    def children(self) -> tuple[Item, ...]:
        """The part."""
        return (self.part,)


@dataclass(frozen=True, slots=True)
class Definition:
    """A rule or a terminal.

    Attributes:
        name: Its name.
        parameters: Those of a template.
        body: Its expression.
        at: Where it stands.
        priority: Whether it has a priority.
        mode: "new", "override" or "extend".
    """

    name: str
    parameters: tuple[str, ...]
    body: Item
    at: int
    priority: bool
    mode: str = "new"


@dataclass(frozen=True, slots=True)
class Import:
    """A name from another grammar.

    Attributes:
        module: That grammar.
        name: The name there.
        alias: The name here.
        at: Where it stands.
    """

    module: str
    name: str
    alias: str
    at: int


@dataclass(slots=True)
class Module:
    """Everything that a text says.

    Attributes:
        source: The text.
        definitions: Rules and terminals, in order.
        imports: What it takes from elsewhere.
        ignored: Expressions of what may stand anywhere.
        declared: Terminals without a definition, and where they are declared.
    """

    source: SourceText
    definitions: list[Definition] = field(default_factory=list)
    imports: list[Import] = field(default_factory=list)
    ignored: list[Item] = field(default_factory=list)
    declared: dict[str, int] = field(default_factory=dict)


Result = TypeVar("Result")


def fold(root: Item, combine: Callable[[Item, Sequence[Result]], Result]) -> Result:
    """Works out a value of an expression from those of its parts, without recursion.

    Args:
        root: The expression.
        combine: Called for every part, with the values of the parts inside.

    Returns:
        The value of the whole.
    """
    values: list[Result] = []
    stack: list[tuple[Item, bool]] = [(root, False)]
    while stack:
        item, ready = stack.pop()
        children = item.children()
        if ready or not children:
            count = len(children)
            inner = values[len(values) - count :]
            del values[len(values) - count :]
            values.append(combine(item, inner))
        else:
            stack.append((item, True))
            stack += [(child, False) for child in reversed(children)]
    return values[0]
