"""Regular expressions as trees over sets of code points, between the parser and the byte expressions.

Every node knows facts about its language, worked out from its children when it is made, so nothing walks a tree
to ask. A node is *pure* when it contains no assertion: then its language does not depend on what stands around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from deepinfer.core.errors import GrammarTooLarge
from deepinfer.grammar.codepoints import ALL, NONE, CodePoints, intersection, union

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
    "ending_in",
    "repetition",
    "sequence",
]

MAX_DEPTH = 200
"""Nesting of parts that cannot be simplified away; deeper expressions are refused."""


class Node:
    """One part of a regular expression.

    Attributes:
        min_length: Code points of the shortest string, assertions taken to hold.
        max_length: Code points of the longest string, or None when there is none.
        pure: Whether no assertion is inside.
        last: A set that holds the last character of every string of the language.
        depth: Nesting of this part.
    """

    __slots__ = ("depth", "last", "max_length", "min_length", "pure")

    def __init__(
        self,
        min_length: int,
        max_length: int | None,
        *,
        pure: bool = True,
        last: CodePoints = NONE,
        depth: int = 0,
    ) -> None:
        if depth > MAX_DEPTH:
            raise GrammarTooLarge(
                f"the regular expression nests more than {MAX_DEPTH} groups in one another; flatten it",
                resource="nesting",
                limit=MAX_DEPTH,
                found=depth,
            )
        self.min_length = min_length
        self.max_length = max_length
        self.pure = pure
        self.last = last
        self.depth = depth

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
            depth=1 + max((part.depth for part in parts), default=-1),
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
            depth=1 + max((part.depth for part in parts), default=-1),
        )
        self.parts = parts


class Repetition(Node):
    """A part several times.

    Attributes:
        part: The part.
        low: Least number of times.
        high: Greatest number of times, or None for any.
    """

    __slots__ = ("high", "low", "part")

    def __init__(self, part: Node, low: int, high: int | None) -> None:
        longest = None
        if part.max_length == 0:
            longest = 0
        elif part.max_length is not None and high is not None:
            longest = part.max_length * high
        super().__init__(
            part.min_length * low, longest, pure=part.pure, last=part.last, depth=part.depth + 1
        )
        self.part = part
        self.low = low
        self.high = high


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
            depth=1 + max(part.depth, condition.depth),
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
        super().__init__(0, 0, pure=False, depth=part.depth + 1)
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


def repetition(part: Node, low: int, high: int | None) -> Node:
    """A part several times.

    Args:
        part: The part.
        low: Least number of times, from 0.
        high: Greatest number of times, or None for any.

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
    if isinstance(part, Repetition) and (part.low, part.high) in ((0, None), (1, None), (0, 1)):
        inner = (part.low, part.high)
        if inner == (low, high) or inner == (0, None):
            return part if inner == (low, high) else Repetition(part.part, 0, None)
        if (low, high) in ((0, None), (1, None), (0, 1)):
            return Repetition(part.part, 0, None)
    return Repetition(part, low, high)


ANY_TEXT: Final = Repetition(Characters(ALL), 0, None)
"""Every text."""


def ending_in(node: Node, points: CodePoints) -> Node:
    """The strings of a pure node that are not empty and whose last character is in a set.

    Args:
        node: The node.
        points: The set.

    Returns:
        A node for them.
    """
    if not intersection(node.last, points):
        return NOTHING
    if isinstance(node, Characters):
        return Characters(intersection(node.points, points))
    if isinstance(node, Filtered):
        part = ending_in(node.part, points)
        if part is NOTHING:
            return NOTHING
        return Filtered(part, node.condition, ahead=node.ahead, negative=node.negative)
    if isinstance(node, Repetition):
        high = None if node.high is None else node.high - 1
        low = 0 if node.part.nullable else max(node.low - 1, 0)
        return sequence([repetition(node.part, low, high), ending_in(node.part, points)])
    if isinstance(node, Alternatives):
        found = (ending_in(part, points) for part in node.parts)
        return alternatives([part for part in found if part is not NOTHING])
    if not isinstance(node, Concatenation):
        raise TypeError(f"{type(node).__name__} is not pure")
    ways: list[Node] = []
    for at in range(len(node.parts) - 1, -1, -1):
        tail = ending_in(node.parts[at], points)
        if tail is not NOTHING:
            ways.append(sequence([*node.parts[:at], tail]))
        if not node.parts[at].nullable:
            break
    return alternatives(ways)
