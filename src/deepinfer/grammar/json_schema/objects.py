"""Objects in normal form: members by key and kind of value, with conditions on which of them occur."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from deepinfer.core.errors import GrammarTooLarge
from deepinfer.grammar.json_schema.algebra import Algebra
from deepinfer.grammar.json_schema.alternatives import Alternative
from deepinfer.grammar.json_schema.formula import (
    NOTHING,
    TRUE,
    And,
    Conjunction,
    Formula,
    Or,
    Properties,
    PropertyCount,
    StringIn,
    conjunction,
    evaluate,
)

__all__ = ["OBJECT_RESOURCES", "MemberForm", "ObjectForm", "normal", "object_form", "satisfiable"]

OBJECT_RESOURCES = frozenset(
    ("alternatives", "kinds of members", "kinds of values of one member", "conditions")
)
"""Resources of which another form of the conditions may need less."""

_MAX_CELLS = 4096
_MAX_MEMBERS = 20_000
_MAX_VARIANTS = 256
_MAX_CLAUSES = 20_000
_FEW_TEXTS = 64
_MAX_STEPS = 20_000


@dataclass(frozen=True, slots=True)
class MemberForm:
    """One kind of member.

    Attributes:
        key: The key, or None when `keys` gives a language of keys.
        keys: Formula of the keys when `key` is None.
        value: The value set.
    """

    key: str | None
    keys: Formula
    value: Conjunction


@dataclass(frozen=True, slots=True)
class ObjectForm:
    """Objects whose members are of these kinds, under clauses.

    Attributes:
        members: The kinds. Those of one key exclude each other.
        clauses: (positive, negative) member indices: at least one of the first occurs or one of the second does not.
        low: Fewest members.
        high: Most members, or None.
    """

    members: tuple[MemberForm, ...]
    clauses: tuple[tuple[frozenset[int], frozenset[int]], ...]
    low: int
    high: int | None


def object_form(
    algebra: Algebra,
    alternative: Alternative,
    impossible: Callable[[Conjunction], bool],
    closed: bool,
) -> ObjectForm | None:
    """The normal form of one alternative, or None when it is contradictory.

    Args:
        algebra: The schemas.
        alternative: Atoms over objects, and clauses of them.
        impossible: Whether a value set is certainly empty.
        closed: Whether keys that nothing speaks of are left out where keys are declared.

    Raises:
        GrammarTooLarge: There are too many kinds of members or conditions.
    """
    units, clause_atoms = alternative
    low, high = 0, None
    every: list[Properties] = []
    clauses: list[list[Properties]] = []
    for atom in units:
        if isinstance(atom, PropertyCount):
            low = max(low, atom.low)
            if atom.high is not None:
                high = atom.high if high is None else min(high, atom.high)
        elif isinstance(atom, Properties):
            if atom.every:
                every.append(atom)
            else:
                clauses.append([atom])
    clauses += [[a for a in atoms if isinstance(a, Properties)] for atoms in clause_atoms]
    if high is not None and high < low:
        return None
    cells = list(
        _cells(algebra, [*every, *itertools.chain.from_iterable(clauses)], impossible, every)
    )
    if closed and any(cell.key is not None for cell in cells):
        cells = [cell for cell in cells if cell.key is not None or cell.spoken]
    members: list[MemberForm] = []
    inside: dict[Properties, list[int]] = {}
    for cell in cells:
        algebra.budget.spend(4 + len(clauses))
        tests = sorted(
            {
                abs(n)
                for clause in clauses
                for a in clause
                if a in cell.covered
                for n in a.value
                if n
            }
        )
        tests = [n for n in tests if n not in cell.value and -n not in cell.value]
        for value in _variants(cell.value, tests, impossible):
            for atom in cell.covered:
                inside.setdefault(atom, []).append(len(members))
            members.append(MemberForm(cell.key, cell.keys, value))
            if len(members) > _MAX_MEMBERS:
                raise _too_large("kinds of members", _MAX_MEMBERS)
    conditions: dict[Condition, None] = {}
    for clause in clauses:
        conditions.update(dict.fromkeys(_conditions(clause, members, inside)))
        if len(conditions) > _MAX_CLAUSES:
            raise _too_large("conditions", _MAX_CLAUSES)
    form = ObjectForm(tuple(members), tuple(conditions), low, high)
    return form if all(p or n for p, n in conditions) else None


Condition = tuple[frozenset[int], frozenset[int]]


def _conditions(
    clause: list[Properties], members: list[MemberForm], inside: dict[Properties, list[int]]
) -> Iterator[Condition]:
    """A clause over members: for each way to choose violators of its universal atoms, one condition."""
    positive: set[int] = set()
    violators: list[list[int]] = []
    for atom in clause:
        covered = inside.get(atom, ())
        if atom.every:
            bad = [i for i in covered if not atom.value <= members[i].value]
            if not bad:
                return  # nothing can violate it
            violators.append(bad)
        else:
            positive.update(i for i in covered if atom.value <= members[i].value)
    if math.prod(map(len, violators)) > _MAX_CLAUSES:
        raise _too_large("conditions", _MAX_CLAUSES)
    for choice in itertools.product(*violators):
        yield frozenset(positive), frozenset(choice)


def _atoms(atoms: list[Properties]) -> dict[Properties, None]:
    return dict.fromkeys(atoms)


def _too_large(what: str, limit: int) -> GrammarTooLarge:
    return GrammarTooLarge(
        f"one object of the schema needs more than {limit} {what}; use fewer patterns and conditions",
        resource=what,
        limit=limit,
        found=limit + 1,
    )


@dataclass(slots=True)
class _Cell:
    """Keys that no language in the schema tells apart, and what their values must satisfy."""

    key: str | None
    keys: Formula
    value: Conjunction
    covered: frozenset[Properties]
    spoken: bool


def _cells(
    algebra: Algebra,
    atoms: list[Properties],
    impossible: Callable[[Conjunction], bool],
    every: list[Properties],
) -> Iterator[_Cell]:
    """Partitions the keys: one cell for each key by name, one for each combination of the other languages."""
    listed = list(_atoms(atoms))
    names: dict[str, None] = {}
    languages: dict[Formula, None] = {}
    for atom in listed:
        stack = [atom.keys]
        while stack:
            node = stack.pop()
            if isinstance(node, And | Or):
                stack.extend(node.parts)
            elif isinstance(node, StringIn):
                names.update(dict.fromkeys(sorted(node.values)))
            else:
                positive = node if getattr(node, "holds", True) else node.negated()  # type: ignore[attr-defined]
                languages[positive] = None
    for language in list(languages):
        source = getattr(language, "source", None)
        if source is not None:
            texts = algebra.strings.pattern_texts(source, _FEW_TEXTS)
            if texts is not None:
                names.update(dict.fromkeys(texts))
    required = set(every)
    mandatory = frozenset(place for place, atom in enumerate(listed) if atom in required)
    order = algebra.key_order
    by_name: dict[str, list[int]] = {}
    general: list[int] = []
    for place, atom in enumerate(listed):
        if isinstance(atom.keys, StringIn) and atom.keys.holds:
            for name in atom.keys.values:
                by_name.setdefault(name, []).append(place)
        else:
            general.append(place)
    algebra.budget.spend(len(names) * (1 + len(general)))
    for name in sorted(names, key=lambda n: (order.get(n, len(order)), n)):
        covered = frozenset(by_name.get(name, ())) | {
            place for place in general if _key_in(algebra, listed[place].keys, name)
        }
        cell = _cell(name, TRUE, covered, listed, mandatory, True)
        if not impossible(cell.value):
            yield cell
    others: list[Formula] = [StringIn(frozenset(names), False)] if names else []
    for signs in _sign_vectors(algebra, list(languages)):
        algebra.budget.spend(64)
        truth = dict(zip(languages, signs, strict=True))
        covered = frozenset(place for place, atom in enumerate(listed) if _signed(atom.keys, truth))
        parts = [
            language if sign else language.negated()  # type: ignore[attr-defined]
            for language, sign in truth.items()
        ]
        keys = conjunction([*others, *parts])
        cell = _cell(None, keys, covered, listed, mandatory, any(signs))
        if impossible(cell.value) or (languages and algebra.strings.is_empty(keys)):
            continue
        yield cell


def _sign_vectors(algebra: Algebra, languages: list[Formula]) -> list[tuple[bool, ...]]:
    """Which languages a key may be in together; languages that exclude each other are told apart early."""
    vectors: list[tuple[bool, ...]] = [()]
    for _ in languages:
        longer = []
        for vector in vectors:
            longer.append((*vector, False))
            holding = [x for x, sign in zip(languages, (*vector, True), strict=False) if sign]
            algebra.budget.spend(4)
            if len(holding) < 2 or not algebra.strings.is_empty(conjunction(holding)):
                longer.append((*vector, True))
        vectors = longer
        if len(vectors) > _MAX_CELLS:
            raise _too_large("combinations of key patterns", _MAX_CELLS)
    return vectors


def _cell(
    key: str | None,
    keys: Formula,
    covered: frozenset[int],
    listed: list[Properties],
    mandatory: frozenset[int],
    spoken: bool,
) -> _Cell:
    value: set[int] = set()
    for place in covered & mandatory:
        value |= listed[place].value
    return _Cell(key, keys, normal(value), frozenset(listed[place] for place in covered), spoken)


def normal(value: set[int] | frozenset[int]) -> Conjunction:
    """A value set with contradictions made plain."""
    if 0 in value or any(-literal in value for literal in value):
        return NOTHING
    return frozenset(value)


def _key_in(algebra: Algebra, keys: Formula, name: str) -> bool:
    if isinstance(keys, StringIn):
        return (name in keys.values) == keys.holds
    return algebra.strings.holds(keys, name)


def _signed(keys: Formula, truth: dict[Formula, bool]) -> bool:
    """Whether a key that is none of the named ones is in a language, given which others it is in."""

    def holds(atom: Formula) -> bool:
        if isinstance(atom, StringIn):
            return not atom.holds
        if atom in truth:
            return truth[atom]
        return not truth[atom.negated()]  # type: ignore[attr-defined]

    return evaluate(keys, holds)


def _variants(
    value: Conjunction, tests: list[int], impossible: Callable[[Conjunction], bool]
) -> list[Conjunction]:
    """The value set, divided by whether each test holds."""
    variants = [value]
    for test in tests:
        divided = []
        for part in variants:
            for literal in (test, -test):
                both = normal(part | {literal})
                if not impossible(both):
                    divided.append(both)
        variants = divided
        if len(variants) > _MAX_VARIANTS:
            raise _too_large("kinds of values of one member", _MAX_VARIANTS)
    return variants


def satisfiable(form: ObjectForm, possible: Callable[[Conjunction], bool]) -> bool:
    """Whether some object has the form, when only some value sets have members.

    Args:
        form: The form.
        possible: Whether a value set has members.

    Returns:
        False only when there is no such object; True also when the search was given up.
    """
    usable = [possible(member.value) for member in form.members]
    clauses = []
    for positive, negative in form.clauses:
        if all(usable[i] for i in negative):
            clauses.append((sorted(i for i in positive if usable[i]), sorted(negative)))
    clauses.sort(key=lambda clause: len(clause[0]) + len(clause[1]))
    keys = [member.key for member in form.members]
    if form.low:
        free = any(ok and key is None for ok, key in zip(usable, keys, strict=True))
        distinct = {key for ok, key in zip(usable, keys, strict=True) if ok and key is not None}
        if not free and len(distinct) < form.low:
            return False
    steps = 0
    # A state: index of the next clause, members that occur, members that do not.
    stack: list[tuple[int, frozenset[int], frozenset[int]]] = [(0, frozenset(), frozenset())]
    while stack:
        place, present, absent = stack.pop()
        steps += 1
        if steps > _MAX_STEPS:
            return True
        while place < len(clauses):
            positive_left, negative_left = clauses[place]
            if any(i in present for i in positive_left) or any(i in absent for i in negative_left):
                place += 1
                continue
            break
        if place == len(clauses):
            if form.high is not None and len(present) > form.high:
                continue
            if form.low and not _enough(form, usable, keys, present, absent):
                continue
            return True
        taken = {keys[i] for i in present if keys[i] is not None}
        for i in reversed(negative_left):
            if i not in present:
                stack.append((place + 1, present, absent | {i}))
        for i in reversed(positive_left):
            if i not in absent and (keys[i] is None or keys[i] not in taken):
                stack.append((place + 1, present | {i}, absent))
    return False


def _enough(
    form: ObjectForm,
    usable: list[bool],
    keys: list[str | None],
    present: frozenset[int],
    absent: frozenset[int],
) -> bool:
    """Whether the members that may still occur make up the fewest that must."""
    names: set[str] = set()
    for i, key in enumerate(keys):
        if i in present or (usable[i] and i not in absent):
            if key is None:
                return True
            names.add(key)
    return len(names) >= form.low
