"""Regular expressions as trees over sets of code points, between the parser and the byte expressions.

Every node knows facts about its language, worked out from its children when it is made, so nothing walks a tree
to ask. A node is *pure* when it contains no assertion: then its language does not depend on what stands around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from deepinfer.core.errors import GrammarTooLarge
from deepinfer.grammar.codepoints import ALL, NONE, CodePoints, union

__all__ = [
    "ANY_TEXT",
    "EPSILON",
    "NOTHING",
    "Alternatives",
    "Characters",
    "Concatenation",
    "Filtered",
    "LineEnd",
    "LineStart",
    "Look",
    "Node",
    "Repetition",
    "WordBoundary",
    "alternatives",
    "repetition",
    "sequence",
]

MAX_DEPTH = 200
"""Nesting of parts that cannot be simplified away; deeper expressions are refused."""
MAX_SIZE = 4_000_000
"""Nodes of one expression, those that occur several times counted as often."""


class Node:
    """One part of a regular expression.

    Attributes:
        min_length: Code points of the shortest string, assertions taken to hold.
        max_length: Code points of the longest string, or None when there is none.
        pure: Whether no assertion is inside.
        last: A set that holds the last character of every string of the language.
        depth: Nesting of this part.
        size: Nodes of this part.
    """

    __slots__ = ("depth", "last", "max_length", "min_length", "pure", "size")

    depth: int
    size: int

    def __init__(
        self,
        min_length: int,
        max_length: int | None,
        *,
        pure: bool = True,
        last: CodePoints = NONE,
        children: Sequence[Node] = (),
    ) -> None:
        self.depth = 1 + max([child.depth for child in children], default=-1)
        self.size = 1 + sum([child.size for child in children])
        for resource, found, limit in (
            ("nesting", self.depth, MAX_DEPTH),
            ("nodes", self.size, MAX_SIZE),
        ):
            if found > limit:
                raise GrammarTooLarge(
                    f"the {resource} of the regular expression are {found} and may be {limit}; simplify it",
                    resource=resource,
                    limit=limit,
                    found=found,
                )
        self.min_length = min_length
        self.max_length = max_length
        self.pure = pure
        self.last = last

    @property
    def nullable(self) -> bool:
        """Whether it matches the empty string where its assertions hold."""
        return self.min_length == 0


class Characters(Node):
    """One character of a set.

    Attributes:
        points: The set.
    """

    __slots__ = ("points",)

    def __init__(self, points: CodePoints) -> None:
        super().__init__(1, 1, last=points)
        self.points = points


class Concatenation(Node):
    """Parts one after the other; without parts it is the empty string.

    Attributes:
        parts: The parts.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: tuple[Node, ...]) -> None:
        longest: int | None = 0
        last = NONE
        for part in parts:
            longest = (
                None if longest is None or part.max_length is None else longest + part.max_length
            )
            last = union(last, part.last) if part.min_length == 0 else part.last
        super().__init__(
            sum(part.min_length for part in parts),
            longest,
            pure=all(part.pure for part in parts),
            last=last,
            children=parts,
        )
        self.parts = parts


class Alternatives(Node):
    """Any one of several parts; without parts it matches nothing.

    Attributes:
        parts: The parts.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: tuple[Node, ...]) -> None:
        lengths = [part.max_length for part in parts]
        super().__init__(
            min((part.min_length for part in parts), default=1),
            None if None in lengths else max((n for n in lengths if n is not None), default=1),
            pure=all(part.pure for part in parts),
            last=union(*(part.last for part in parts)),
            children=parts,
        )
        self.parts = parts


class Repetition(Node):
    """A part several times.

    Attributes:
        part: The part.
        low: Least number of times.
        high: Greatest number of times, or None for any.
        lazy: Whether fewer times are preferred. It changes which match is found, never whether a text matches.
    """

    __slots__ = ("high", "lazy", "low", "part")

    def __init__(self, part: Node, low: int, high: int | None, *, lazy: bool = False) -> None:
        longest = None
        if part.max_length == 0:
            longest = 0
        elif part.max_length is not None and high is not None:
            longest = part.max_length * high
        super().__init__(
            part.min_length * low, longest, pure=part.pure, last=part.last, children=[part]
        )
        self.part = part
        self.low = low
        self.high = high
        self.lazy = lazy


class Filtered(Node):
    """A pure part, restricted to strings that begin or end in a certain way.

    Attributes:
        part: The part.
        condition: The pure language that a string must begin with, or end with.
        ahead: Whether it is about the beginning.
        negative: Whether strings that do so are the ones left out.
    """

    __slots__ = ("ahead", "condition", "negative", "part")

    def __init__(self, part: Node, condition: Node, *, ahead: bool, negative: bool) -> None:
        super().__init__(
            part.min_length,
            part.max_length,
            last=part.last,
            children=[part, condition],
        )
        self.part = part
        self.condition = condition
        self.ahead = ahead
        self.negative = negative


class LineStart(Node):
    """The start of the text, or of a line.

    Attributes:
        after: Characters behind which it holds too.
    """

    __slots__ = ("after",)

    def __init__(self, after: CodePoints = NONE) -> None:
        super().__init__(0, 0, pure=False)
        self.after = after


class LineEnd(Node):
    """The end of the text, or of a line.

    Attributes:
        before: Characters before which it holds too.
        final_newline: Whether it holds before a line feed that ends the text.
    """

    __slots__ = ("before", "final_newline")

    def __init__(self, before: CodePoints = NONE, *, final_newline: bool = False) -> None:
        super().__init__(0, 0, pure=False)
        self.before = before
        self.final_newline = final_newline


class WordBoundary(Node):
    """A place with a word character on one side only, or, negated, any other place.

    Attributes:
        word: The word characters.
        negative: Whether it is negated.
    """

    __slots__ = ("negative", "word")

    def __init__(self, word: CodePoints, *, negative: bool = False) -> None:
        super().__init__(0, 0, pure=False)
        self.word = word
        self.negative = negative


class Look(Node):
    """A condition on the text behind or before a place.

    Attributes:
        part: What must, or must not, stand there.
        ahead: Whether it is about the text to come.
        negative: Whether it must not.
        position: Where it stands in the pattern, in code points.
    """

    __slots__ = ("ahead", "negative", "part", "position")

    def __init__(self, part: Node, *, ahead: bool, negative: bool, position: int) -> None:
        super().__init__(0, 0, pure=False, children=[part])
        self.part = part
        self.ahead = ahead
        self.negative = negative
        self.position = position


EPSILON: Final = Concatenation(())
NOTHING: Final = Alternatives(())


def sequence(parts: Sequence[Node]) -> Node:
    """Parts one after the other.

    Look-around that concerns only neighbours long enough to decide it becomes a filter of those neighbours.

    Args:
        parts: The parts.

    Returns:
        The sequence, simplified.
    """
    flat: list[Node] = []
    for part in parts:
        if part is NOTHING:
            return NOTHING
        if isinstance(part, Concatenation) and len(part.parts) < 16:
            flat += part.parts
        else:
            flat.append(part)
    if not all(part.pure for part in flat):
        flat = _apply_looks(flat)
    return flat[0] if len(flat) == 1 else Concatenation(tuple(flat)) if flat else EPSILON


def _apply_looks(parts: list[Node]) -> list[Node]:
    """Turns conditions into filters of the neighbours that they look at, where those are long enough."""
    ahead = _absorb(parts[::-1], ahead=True)
    return _absorb(ahead[::-1], ahead=False)


def _absorb(parts: Sequence[Node], *, ahead: bool) -> list[Node]:
    """One pass over parts in an order in which each condition stands behind what it looks at."""
    out: list[Node] = []
    for part in parts:
        reach = part.part.max_length if isinstance(part, Look) and part.part.pure else None
        if isinstance(part, Look) and part.ahead == ahead and reach:
            taken = length = 0
            while taken < len(out) and length < reach and out[-1 - taken].pure:
                taken += 1
                length += out[-taken].min_length
            if length >= reach:
                neighbours = out[-taken:]
                del out[-taken:]
                body = sequence(neighbours[::-1] if ahead else neighbours)
                out.append(Filtered(body, part.part, ahead=ahead, negative=part.negative))
                continue
        out.append(part)
    return out


def alternatives(parts: Sequence[Node]) -> Node:
    """Any one of several parts.

    Args:
        parts: The parts.

    Returns:
        The alternatives, simplified: sets of characters are joined into one.
    """
    flat: list[Node] = []
    for part in parts:
        if isinstance(part, Alternatives):
            flat += part.parts
        else:
            flat.append(part)
    sets = [part.points for part in flat if isinstance(part, Characters)]
    if len(sets) > 1:
        flat = [part for part in flat if not isinstance(part, Characters)]
        flat.append(Characters(union(*sets)))
    return flat[0] if len(flat) == 1 else Alternatives(tuple(flat)) if flat else NOTHING


def repetition(part: Node, low: int, high: int | None, *, lazy: bool = False) -> Node:
    """A part several times.

    Args:
        part: The part.
        low: Least number of times, from 0.
        high: Greatest number of times, or None for any.
        lazy: Whether fewer times are preferred.

    Returns:
        The repetition, simplified.
    """
    if (low, high) == (1, 1):
        return part
    if high == 0 or part is EPSILON:
        return EPSILON
    if part is NOTHING:
        return EPSILON if low == 0 else NOTHING
    if part.max_length == 0:
        # Assertions move nothing: once is as good as many times.
        return part if low else alternatives([EPSILON, part])
    if lazy or (isinstance(part, Repetition) and part.lazy):
        return Repetition(part, low, high, lazy=lazy)
    if isinstance(part, Repetition) and (part.low, part.high) in ((0, None), (1, None), (0, 1)):
        inner = (part.low, part.high)
        if inner == (low, high) or inner == (0, None):
            return part if inner == (low, high) else Repetition(part.part, 0, None)
        if (low, high) in ((0, None), (1, None), (0, 1)):
            return Repetition(part.part, 0, None)
    return Repetition(part, low, high)


ANY_TEXT: Final = Repetition(Characters(ALL), 0, None)
"""Every text."""
