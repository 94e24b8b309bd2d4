"""Formulas over objects and arrays as alternatives: conjunctions of atoms and of clauses.

A clause is a disjunction of atoms that a bag of members can check by itself; keeping it whole saves a case
distinction. What cannot be kept is distributed, and contradictory alternatives are dropped on the way.
"""

from __future__ import annotations

from collections.abc import Callable

from deepinfer.core.errors import GrammarTooLarge
from deepinfer.grammar.json_schema.budget import Budget
from deepinfer.grammar.json_schema.formula import (
    ANYTHING,
    FALSE,
    NOTHING,
    And,
    Conjunction,
    Formula,
    ItemCount,
    Items,
    Or,
    Properties,
    PropertyCount,
    StringIn,
)

__all__ = ["Alternative", "Alternatives"]

_MAX_ALTERNATIVES = 4096
_MAX_WORK = 60_000

Units = frozenset[Formula]
Clauses = frozenset[frozenset[Formula]]
Alternative = tuple[Units, Clauses]
"""Atoms that hold, and sets of atoms of which at least one holds."""

_EMPTY: Alternative = (frozenset(), frozenset())


class Alternatives:
    """Expands formulas, remembered for one compilation.

    Args:
        impossible: Whether a value set is certainly empty.
        key_holds: Whether a key is in a language of keys.
        budget: What the compilation may still take.
    """

    def __init__(
        self,
        impossible: Callable[[Conjunction], bool],
        key_holds: Callable[[Formula, str], bool],
        budget: Budget,
    ) -> None:
        self._budget = budget
        self._impossible = impossible
        self._key_holds = key_holds
        self._known: dict[Formula, list[Alternative]] = {}
        self._work = 0

    def of(self, formula: Formula) -> list[Alternative]:
        """The alternatives of a formula over objects or over arrays; none when it is contradictory.

        Raises:
            GrammarTooLarge: There are too many.
        """
        known = self._known.get(formula)
        if known is None:
            known = self._known[formula] = self._expand(formula)
        return known

    def _expand(self, formula: Formula) -> list[Alternative]:
        if isinstance(formula, And):
            return self._product(formula)
        if isinstance(formula, Or):
            clause = _as_clause(formula)
            if clause is not None:
                return [(frozenset(), frozenset((clause,)))]
            found: dict[Alternative, None] = {}
            for part in formula.parts:
                found.update(dict.fromkeys(self.of(part)))
                self._charge(len(found))
            return list(found)
        if _is_false(formula):
            return []
        return [(frozenset((formula,)), frozenset())]

    def _product(self, formula: And) -> list[Alternative]:
        units: list[Formula] = []
        branching: list[list[Alternative]] = []
        clauses: set[frozenset[Formula]] = set()
        for part in formula.parts:
            if isinstance(part, And | Or):
                options = self.of(part)
                if len(options) == 1:
                    units.extend(options[0][0])
                    clauses.update(options[0][1])
                else:
                    branching.append(options)
            elif _is_false(part):
                return []
            else:
                units.append(part)
        first = self.simplify((frozenset(units), frozenset(clauses)))
        results = [] if first is None else [first]
        branching.sort(key=len)
        for options in branching:
            merged: dict[Alternative, None] = {}
            for left in results:
                for right in options:
                    self._work += 1
                    self._budget.spend(1 + len(left[0]) + len(left[1]))
                    both = self.simplify((left[0] | right[0], left[1] | right[1]))
                    if both is not None and self._possible(both):
                        merged[both] = None
                self._charge(len(merged))
            results = list(merged)
        return results

    def _charge(self, count: int) -> None:
        if count > _MAX_ALTERNATIVES or self._work > _MAX_WORK:
            raise GrammarTooLarge(
                f"the schema's combinations of anyOf, oneOf, if and the like have more than {_MAX_ALTERNATIVES} "
                "cases for one value; use fewer choices, or tell them apart by a constant property",
                resource="alternatives",
                limit=_MAX_ALTERNATIVES,
                found=count,
            )

    def simplify(self, alternative: Alternative) -> Alternative | None:
        """Drops what the atoms decide; None when they contradict each other."""
        units, clauses = alternative
        if not clauses:
            return alternative
        known = set(units)
        open_clauses = set(clauses)
        changed = True
        while changed:
            changed = False
            for clause in list(open_clauses):
                if clause & known:
                    open_clauses.discard(clause)
                    continue
                left = frozenset(
                    a
                    for a in clause
                    if not _is_false(a) and a.negated() not in known  # type: ignore[attr-defined]
                )
                if not left:
                    return None
                if len(left) == 1:
                    open_clauses.discard(clause)
                    known |= left
                    changed = True
                elif left != clause:
                    open_clauses.discard(clause)
                    open_clauses.add(left)
        return frozenset(known), frozenset(open_clauses)

    def _possible(self, alternative: Alternative) -> bool:
        """False when the atoms are seen to contradict each other."""
        units = alternative[0]
        low, high = 0, None
        by_key: dict[str, set[int]] = {}
        required: dict[str, Conjunction] = {}
        general: list[Properties] = []
        by_place: dict[int, set[int]] = {}
        for atom in units:
            if isinstance(atom, PropertyCount | ItemCount):
                low = max(low, atom.low)
                if atom.high is not None:
                    high = atom.high if high is None else min(high, atom.high)
            elif isinstance(atom, Properties):
                keys = atom.keys
                if isinstance(keys, StringIn) and keys.holds:
                    if atom.every:
                        for key in keys.values:
                            by_key.setdefault(key, set()).update(atom.value)
                    elif len(keys.values) == 1:
                        (key,) = keys.values
                        required[key] = required.get(key, ANYTHING)
                        if self._impossible(atom.value):
                            return False
                elif atom.every:
                    general.append(atom)
            elif isinstance(atom, Items) and atom.every and atom.stop == atom.start + 1:
                by_place.setdefault(atom.start, set()).update(atom.value)
        for key in required:
            value = set(by_key.get(key, ()))
            for atom in general:
                if self._key_holds(atom.keys, key):
                    value |= atom.value
            if self._impossible(frozenset(value)):
                return False
        if isinstance(next(iter(units), None), ItemCount | Items):
            for place, value in by_place.items():
                if self._impossible(frozenset(value)):
                    high = place if high is None else min(high, place)
        return high is None or low <= high


def _is_false(atom: Formula) -> bool:
    if atom == FALSE:
        return True
    if isinstance(atom, Properties | Items):
        return not atom.every and atom.value == NOTHING
    return False


def _as_clause(formula: Or) -> frozenset[Formula] | None:
    """The formula as one clause, when a bag can check it and that is no dearer than a case distinction."""
    universal = 0
    for part in formula.parts:
        if not isinstance(part, Properties):
            return None
        if part.every and part.value != NOTHING:
            universal += 1
            if universal > 1:
                return None
    return frozenset(formula.parts)
