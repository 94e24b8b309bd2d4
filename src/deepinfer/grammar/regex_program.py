"""Regular expressions with assertions as programs, run over all threads at once.

A thread is a place in the program with its obligations: looks ahead that were begun and are not decided yet, each
a set of threads of its own. Looks behind run beside the whole text from its start. So a step needs the class of
the character before, the next one, and nothing else of the text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from deepinfer.core.errors import GrammarTooLarge, UnsupportedKeyword
from deepinfer.grammar.codepoints import ALL, CodePoints, contains, intersection
from deepinfer.grammar.regex_ast import (
    ANY_TEXT,
    Alternatives,
    Characters,
    Concatenation,
    Filtered,
    LineEnd,
    LineStart,
    Look,
    Node,
    Repetition,
    WordBoundary,
    alternatives,
    sequence,
)

__all__ = ["END", "START", "Program", "Threads", "partition"]

START = -1
"""Class of the character before the first one."""
END = -2
"""Class of the character behind the last one."""
_MAX_INSTRUCTIONS = 4_000
_MAX_THREADS = 2_000
_MAX_NESTED_LOOKS = 8

Obligation = tuple[bool, "Threads"]
"""Whether it is negated, and the threads of the look ahead."""
Thread = tuple[int, frozenset[Obligation]]
Threads = frozenset[Thread]


@dataclass(slots=True)
class _Instruction:
    """One step of a program.

    Attributes:
        kind: "char", "split", "assert", "ahead", "behind" or "match".
        targets: Where it goes on.
        points: The characters that it takes.
        node: The assertion.
        start: Where the program of a look begins, or which program of a look behind it asks.
    """

    kind: str
    targets: list[int] = field(default_factory=list)
    points: CodePoints = ()
    node: Node | None = None
    start: int = 0


def partition(sets: list[CodePoints]) -> list[CodePoints]:
    """The coarsest classes of characters that tell all sets apart.

    Args:
        sets: The sets.

    Returns:
        Disjoint sets that together hold every character.
    """
    ends = {0, 0xE000}
    for points in sets:
        for first, last in points:
            ends |= {first, last + 1}
    starts = sorted(end for end in ends if end <= 0x10FFFF and not 0xD800 <= end < 0xE000)
    classes: dict[tuple[bool, ...], list[tuple[int, int]]] = {}
    for first, after in zip(starts, [*starts[1:], 0x110000], strict=True):
        part = intersection(((first, after - 1),), ALL)
        signature = tuple(contains(points, first) for points in sets)
        classes.setdefault(signature, []).extend(part)
    return [tuple(sorted(parts)) for parts in classes.values()]


class Program:
    """A regular expression as instructions over classes of characters.

    Args:
        root: The tree.

    Attributes:
        classes: The classes of characters.
        behinds: Where the program of each look behind begins.

    Raises:
        UnsupportedKeyword: A look behind holds a look ahead.
        GrammarTooLarge: The program is too long.
    """

    def __init__(self, root: Node) -> None:
        self.code: list[_Instruction] = []
        self.behinds: list[int] = []
        self._looks = 0
        match = self._emit(_Instruction("match"))
        self.start = self._compile(root, match)
        self.classes = partition(self._sets())
        self._member: dict[CodePoints, frozenset[int]] = {
            # A class is inside of a set as a whole, or outside.
            points: frozenset(
                at for at, part in enumerate(self.classes) if contains(points, part[0][0])
            )
            for points in self._sets()
        }

    def _sets(self) -> list[CodePoints]:
        sets = {instruction.points for instruction in self.code if instruction.kind == "char"}
        for instruction in self.code:
            node = instruction.node
            if isinstance(node, LineStart):
                sets.add(node.after)
            elif isinstance(node, LineEnd):
                sets.add(node.before)
            elif isinstance(node, WordBoundary):
                sets.add(node.word)
        return sorted(sets)

    def _emit(self, instruction: _Instruction) -> int:
        self.code.append(instruction)
        if len(self.code) > _MAX_INSTRUCTIONS:
            raise GrammarTooLarge(
                "the regular expression has look-arounds inside repeats and is too large for them; simplify it",
                resource="instructions",
                limit=_MAX_INSTRUCTIONS,
                found=len(self.code),
            )
        return len(self.code) - 1

    def _compile(self, node: Node, after: int) -> int:
        """Instructions for a node that go on at `after`; returns where they begin."""
        if isinstance(node, Characters):
            return self._emit(_Instruction("char", [after], node.points))
        if isinstance(node, Concatenation):
            for part in reversed(node.parts):
                after = self._compile(part, after)
            return after
        if isinstance(node, Alternatives):
            return self._emit(
                _Instruction("split", [self._compile(part, after) for part in node.parts])
            )
        if isinstance(node, Repetition):
            return self._compile_repetition(node, after)
        if isinstance(node, Filtered):
            look = Look(node.condition, ahead=node.ahead, negative=node.negative, position=0)
            # A filter is about its part only: ahead the part is long enough, behind it is too.
            parts = [look, node.part] if node.ahead else [node.part, look]
            return self._compile(Concatenation(tuple(parts)), after)
        if isinstance(node, LineEnd) and node.final_newline and not node.before:
            newline = Characters(((0x0A, 0x0A),))
            end = alternatives([LineEnd(), sequence([newline, LineEnd()])])
            return self._compile(Look(end, ahead=True, negative=False, position=0), after)
        if isinstance(node, Look):
            return self._compile_look(node, after)
        return self._emit(_Instruction("assert", [after], node=node))

    def _compile_repetition(self, node: Repetition, after: int) -> int:
        if node.high is None:
            loop = self._emit(_Instruction("split", [after]))
            self.code[loop].targets.append(self._compile(node.part, loop))
            after = loop
        else:
            end = after
            for _ in range(node.high - node.low):
                after = self._emit(_Instruction("split", [end, self._compile(node.part, after)]))
        for _ in range(node.low):
            after = self._compile(node.part, after)
        return after

    def _compile_look(self, node: Look, after: int) -> int:
        self._looks += 1
        if self._looks > _MAX_NESTED_LOOKS:
            raise GrammarTooLarge(
                f"look-arounds nest more than {_MAX_NESTED_LOOKS} deep; simplify them",
                resource="nesting",
                limit=_MAX_NESTED_LOOKS,
                found=self._looks,
            )
        match = self._emit(_Instruction("match"))
        if node.ahead:
            start = self._compile(node.part, match)
        else:
            first = len(self.code)
            start = self._compile(Concatenation((ANY_TEXT, node.part)), match)
            if any(instruction.kind == "ahead" for instruction in self.code[first:]):
                raise UnsupportedKeyword(
                    "a look behind that holds a look ahead cannot be enforced; write it as one condition",
                    keyword="look-around",
                )
            self.behinds.append(start)
            start = len(self.behinds) - 1
        self._looks -= 1
        kind = "ahead" if node.ahead else "behind"
        return self._emit(_Instruction(kind, [after], node=node, start=start))

    # Running

    def begin(self, at: int) -> Threads:
        """The threads of a program before its first character.

        Args:
            at: Where it begins.

        Returns:
            The one thread.
        """
        return frozenset([(at, frozenset())])

    def advance(
        self, threads: Threads, before: int, next_: int, behinds: tuple[Threads, ...]
    ) -> tuple[Threads, list[frozenset[Obligation]]]:
        """Moves threads over one character.

        Args:
            threads: The threads.
            before: Class of the character before, or `START`.
            next_: Class of the character, or `END`.
            behinds: The threads of the looks behind, at the same place.

        Returns:
            The threads behind the character, and the obligations with which threads matched before it, as they
            were at this place.
        """
        seen: set[Thread] = set(threads)
        stack = list(threads)
        matched: list[frozenset[Obligation]] = []
        moved: dict[int, list[frozenset[Obligation]]] = {}
        while stack:
            at, duties = stack.pop()
            instruction = self.code[at]
            if instruction.kind == "match":
                matched.append(duties)
                continue
            if instruction.kind == "char":
                if next_ in self._member[instruction.points]:
                    left = self._settle(duties, before, next_, behinds)
                    if left is not None:
                        moved.setdefault(instruction.targets[0], []).append(left)
                continue
            if instruction.kind == "ahead" and isinstance(instruction.node, Look):
                duties = duties | {(instruction.node.negative, self.begin(instruction.start))}
            elif not self._holds(instruction, before, next_, behinds):
                continue
            for target in instruction.targets:
                thread = (target, duties)
                if thread not in seen:
                    seen.add(thread)
                    stack.append(thread)
            if len(seen) > _MAX_THREADS:
                raise GrammarTooLarge(
                    "the look-arounds of the regular expression need too many threads; simplify them",
                    resource="threads",
                    limit=_MAX_THREADS,
                    found=len(seen),
                )
        return frozenset(
            (at, duties)
            for at, ways in moved.items()
            for duties in ways
            # A thread that owes less makes one that owes more superfluous.
            if not any(other < duties for other in ways)
        ), matched

    def accepts(
        self, matched: list[frozenset[Obligation]], before: int, behinds: tuple[Threads, ...]
    ) -> bool:
        """Whether a match stands at the end of the text.

        Args:
            matched: What `advance` over `END` gave.
            before: Class of the character before the end, or `START`.
            behinds: The threads of the looks behind at the end.

        Returns:
            Whether the obligations of one match hold.
        """
        return any(self._settle(duties, before, END, behinds) is not None for duties in matched)

    def _settle(
        self, duties: frozenset[Obligation], before: int, next_: int, behinds: tuple[Threads, ...]
    ) -> frozenset[Obligation] | None:
        """Obligations behind a character; None when one of them failed."""
        left: set[Obligation] = set()
        for negative, threads in duties:
            after, matched = self.advance(threads, before, next_, behinds)
            decided = self._is_decided(matched, before, next_, behinds)
            if decided is None:
                raise UnsupportedKeyword(
                    "a look ahead that holds another one and ends before it cannot be enforced; write them as one",
                    keyword="look-around",
                )
            if decided:
                if negative:
                    return None
            elif after and next_ != END:
                left.add((negative, after))
            elif not negative:
                return None
        return frozenset(left)

    def _is_decided(
        self,
        matched: list[frozenset[Obligation]],
        before: int,
        next_: int,
        behinds: tuple[Threads, ...],
    ) -> bool | None:
        """Whether a look ahead matched here; None when that hangs on obligations of its own."""
        if any(not duties for duties in matched):
            return True
        if next_ == END:
            return self.accepts(matched, before, behinds)
        return None if matched else False

    def _holds(
        self, instruction: _Instruction, before: int, next_: int, behinds: tuple[Threads, ...]
    ) -> bool:
        node = instruction.node
        if isinstance(node, LineStart):
            return before == START or before in self._member[node.after]
        if isinstance(node, LineEnd):
            return next_ == END or next_ in self._member[node.before]
        if isinstance(node, WordBoundary):
            word = self._member[node.word]
            return ((before in word) != (next_ in word)) != node.negative
        if isinstance(node, Look):
            _, matched = self.advance(behinds[instruction.start], before, next_, behinds)
            return bool(matched) != node.negative
        return True
