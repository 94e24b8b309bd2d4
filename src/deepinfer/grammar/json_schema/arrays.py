"""Arrays in normal form: items by position and kind of value, with conditions and counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from deepinfer.core.errors import GrammarTooLarge
from deepinfer.grammar.json_schema.alternatives import Alternative
from deepinfer.grammar.json_schema.formula import (
    NOTHING,
    Conjunction,
    Contains,
    ItemCount,
    Items,
    Unique,
)
from deepinfer.grammar.json_schema.objects import normal

__all__ = ["ArrayForm", "Letter", "Word", "array_form"]

_MAX_TESTS = 10
_MAX_STATES = 20_000
_MAX_PREFIX = 20_000


@dataclass(frozen=True, slots=True)
class Letter:
    """One kind of item.

    Attributes:
        value: The value set.
        hits: Indices of the conditions that such an item counts for.
        identity: A number for the single value that the set consists of, when items must differ; else None.
    """

    value: Conjunction
    hits: frozenset[int]
    identity: int | None = None


@dataclass(frozen=True, slots=True)
class ArrayForm:
    """Arrays as words over letters.

    Attributes:
        prefix: Letters that may stand at each of the first positions.
        rest: Letters that may stand behind them.
        counts: For each condition, the fewest and the most items that hit it (None: no bound).
        low: Fewest items.
        high: Most items, or None.
        unique: Whether no identity may occur twice, or (False) some identity must; None: either.
    """

    prefix: tuple[tuple[Letter, ...], ...]
    rest: tuple[Letter, ...]
    counts: tuple[tuple[int, int | None], ...]
    low: int
    high: int | None
    unique: bool | None

    @property
    def is_plain(self) -> bool:
        """Whether only positions and the number of items matter."""
        return not self.counts and self.unique is None

    @property
    def is_bag(self) -> bool:
        """Whether the items are alike at all positions and must differ, so that order does not matter."""
        return (
            self.unique is True
            and not self.prefix
            and all(least <= 1 and most is None for least, most in self.counts)
            and len(self.counts) <= 1
        )


def array_form(
    alternative: Alternative,
    impossible: Callable[[Conjunction], bool],
    members: Callable[[Conjunction], list[Conjunction] | None],
) -> ArrayForm | str | None:
    """The normal form of one alternative.

    Args:
        alternative: Atoms over arrays, and clauses of them (there are none: arrays distribute them).
        impossible: Whether a value set is certainly empty.
        members: The single values of a finite value set, each as a value set; None when it is infinite.

    Returns:
        The form; None when it is contradictory; a keyword when that keeps it from being one.

    Raises:
        GrammarTooLarge: There are too many conditions.
    """
    low, high = 0, None
    every: list[Items] = []
    some: list[tuple[Items | Contains, int, int | None]] = []
    unique: bool | None = None
    for atom in alternative[0]:
        if isinstance(atom, ItemCount):
            low = max(low, atom.low)
            if atom.high is not None:
                high = atom.high if high is None else min(high, atom.high)
        elif isinstance(atom, Items):
            if atom.every:
                every.append(atom)
            else:
                some.append((atom, 1, None))
        elif isinstance(atom, Contains):
            some.append((atom, atom.low, atom.high))
        elif isinstance(atom, Unique):
            if unique is not None and unique != atom.holds:
                return None
            unique = atom.holds
    size = 0
    for items in [*every, *(a for a, _, _ in some if isinstance(a, Items))]:
        size = max(size, items.start, items.stop or 0)
    if unique is not None and high is not None and high <= 1:
        if unique is False:
            return None
        unique = None
    if size > _MAX_PREFIX or len(some) > _MAX_TESTS:
        raise GrammarTooLarge(
            f"an array of the schema has more than {_MAX_PREFIX} positions or {_MAX_TESTS} conditions; use fewer",
            resource="positions",
            limit=_MAX_PREFIX,
            found=size,
        )
    # Merge conditions on the same items.
    merged: dict[tuple[int, int | None, Conjunction], tuple[int, int | None]] = {}
    for test, least, most in some:
        place = (test.start, test.stop) if isinstance(test, Items) else (0, None)
        key = (*place, test.value)
        before = merged.get(key, (0, None))
        top = before[1] if most is None else most if before[1] is None else min(most, before[1])
        merged[key] = (max(before[0], least), top)
    tests = list(merged)
    counts = tuple(merged.values())
    if any(most is not None and most < least for least, most in counts):
        return None
    if high is not None:
        size = min(size, high)

    def letters(position: int) -> tuple[Letter, ...]:
        value: set[int] = set()
        for items in every:
            if items.start <= position and (items.stop is None or position < items.stop):
                value |= items.value
        kinds: list[tuple[Conjunction, frozenset[int]]] = [(normal(value), frozenset())]
        for index, (start, stop, wanted) in enumerate(tests):
            if not (start <= position and (stop is None or position < stop)):
                continue
            divided = []
            for part, hits in kinds:
                if wanted <= part:
                    divided.append((part, hits | {index}))
                    continue
                yes = normal(part | wanted)
                if not impossible(yes):
                    divided.append((yes, hits | {index}))
                no = normal(part | {-n for n in wanted}) if wanted != NOTHING else part
                if not impossible(no):
                    divided.append((no, hits))
            kinds = divided
        return tuple(Letter(part, hits) for part, hits in kinds if not impossible(part))

    prefix = [letters(position) for position in range(size)]
    rest = letters(size)
    for position, options in enumerate(prefix):
        if not options:
            high = position if high is None else min(high, position)
            prefix = prefix[:position]
            break
    if not rest:
        high = len(prefix) if high is None else min(high, len(prefix))
    if high is not None and high < low:
        return None
    if unique is not None:
        if high is not None and high <= 1:
            if unique is False:
                return None
            unique = None
        else:
            numbers: dict[Conjunction, int] = {}
            expanded = []
            positions = prefix if high is not None and high <= len(prefix) else [*prefix, rest]
            for options in positions:
                singles = []
                for letter in options:
                    values = members(letter.value)
                    if values is None:
                        return "uniqueItems"
                    singles += [
                        Letter(v, letter.hits, numbers.setdefault(v, len(numbers))) for v in values
                    ]
                expanded.append(tuple(singles))
            prefix = expanded[: len(prefix)]
            rest = expanded[len(prefix)] if len(expanded) > len(prefix) else ()
            if unique:
                high = len(numbers) if high is None else min(high, len(numbers))
                if high < low:
                    return None
    return ArrayForm(tuple(prefix), rest, counts, low, high, unique)


State = tuple[int, tuple[int, ...], frozenset[int], bool]


class Word:
    """The automaton of an array form over its letters.

    A state holds the number of items, the hits of each condition, the identities seen, and whether one came twice;
    each is capped where more of it makes no difference.

    Args:
        form: The form.
        possible: Whether a value set has members; other letters never occur.
    """

    def __init__(self, form: ArrayForm, possible: Callable[[Conjunction], bool]) -> None:
        self._form = form
        self._possible = possible
        # At least 1: the first item has no separator before it.
        cap = max(len(form.prefix), form.low, 1)
        self._cap = cap if form.high is None else max(cap, form.high)
        self.start: State = (0, (0,) * len(form.counts), frozenset(), False)
        self._states: dict[State, list[tuple[Letter, State]]] = {}
        self._explore()

    def accepting(self, state: State) -> bool:
        """Whether an array may end here."""
        number, hits, _, twice = state
        if number < self._form.low or (self._form.unique is False and not twice):
            return False
        return all(hit >= least for hit, (least, _) in zip(hits, self._form.counts, strict=True))

    def _moves(self, state: State) -> Iterator[tuple[Letter, State]]:
        form = self._form
        number, hits, seen, twice = state
        if form.high is not None and number >= form.high:
            return
        letters = form.prefix[number] if number < len(form.prefix) else form.rest
        for letter in letters:
            if not self._possible(letter.value):
                continue
            after = []
            for index, (hit, (least, most)) in enumerate(zip(hits, form.counts, strict=True)):
                if index in letter.hits:
                    hit += 1
                    if most is not None and hit > most:
                        break
                    if most is None:
                        hit = min(hit, least)
                after.append(hit)
            else:
                seen_after, twice_after = seen, twice
                if letter.identity is not None and not twice:
                    if letter.identity in seen:
                        if form.unique:
                            continue
                        twice_after, seen_after = True, frozenset()
                    else:
                        seen_after = seen | {letter.identity}
                yield letter, (min(number + 1, self._cap), tuple(after), seen_after, twice_after)

    def _explore(self) -> None:
        stack = [self.start]
        self._states[self.start] = []
        sources: dict[State, list[State]] = {}
        while stack:
            state = stack.pop()
            edges = self._states[state]
            for letter, target in self._moves(state):
                edges.append((letter, target))
                sources.setdefault(target, []).append(state)
                if target not in self._states:
                    if len(self._states) >= _MAX_STATES:
                        raise GrammarTooLarge(
                            f"an array of the schema needs more than {_MAX_STATES} states; use smaller bounds of "
                            "minItems, minContains and maxContains, or fewer values under uniqueItems",
                            resource="states",
                            limit=_MAX_STATES,
                            found=len(self._states) + 1,
                        )
                    self._states[target] = []
                    stack.append(target)
        alive = {state for state in self._states if self.accepting(state)}
        frontier = list(alive)
        while frontier:
            for source in sources.get(frontier.pop(), ()):
                if source not in alive:
                    alive.add(source)
                    frontier.append(source)
        self.edges: dict[State, list[tuple[Letter, State]]] = {
            state: [(letter, target) for letter, target in edges if target in alive]
            for state, edges in self._states.items()
            if state in alive
        }

    @property
    def is_empty(self) -> bool:
        """Whether no array has the form."""
        return self.start not in self.edges
