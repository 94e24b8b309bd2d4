"""Value sets in normal form, and which of them are empty."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from deepinfer.core.errors import GrammarTooLarge
from deepinfer.grammar.json_schema.algebra import Algebra
from deepinfer.grammar.json_schema.alternatives import Alternatives
from deepinfer.grammar.json_schema.arrays import ArrayForm, Word, array_form
from deepinfer.grammar.json_schema.concrete import Concrete
from deepinfer.grammar.json_schema.formula import (
    ANYTHING,
    FALSE,
    NOTHING,
    TRUE,
    Compare,
    Conjunction,
    Formula,
    Properties,
    StringIn,
    Unique,
    unit_atoms,
)
from deepinfer.grammar.json_schema.numbers import finite_numbers
from deepinfer.grammar.json_schema.objects import ObjectForm, normal, object_form, satisfiable
from deepinfer.grammar.json_schema.values import JsonValue

__all__ = ["Forms", "ValueForm"]

_MAX_VALUES = 100_000
_MAX_MEMBERS = 256
# How deep a look into required members goes when a case distinction is checked for contradictions.
_LOOK = 3


@dataclass(slots=True)
class ValueForm:
    """A value set, type by type.

    Attributes:
        constants: Which of null, false and true are in it.
        number: Formula of its numbers.
        string: Formula of its strings.
        objects: Alternatives of its objects; None: any object.
        arrays: Alternatives of its arrays; None: any array.
    """

    constants: list[str] = field(default_factory=list)
    number: Formula = FALSE
    string: Formula = FALSE
    objects: list[ObjectForm] | None = field(default_factory=list)
    arrays: list[ArrayForm] | None = field(default_factory=list)


class Forms:
    """Brings value sets into normal form and finds the empty ones.

    Args:
        algebra: The schemas.
        closed: Whether undeclared keys are left out where keys are declared.
    """

    def __init__(self, algebra: Algebra, closed: bool) -> None:
        self._algebra = algebra
        self._closed = closed
        self._alternatives = Alternatives(self.impossible, algebra.strings.holds, algebra.budget)
        self._concrete = Concrete(algebra)
        self._impossible: dict[Conjunction, bool] = {NOTHING: True, ANYTHING: False}
        self._signatures: dict[Formula, dict[str, frozenset[JsonValue]]] = {}
        self._depth = 0
        self.forms: dict[Conjunction, ValueForm] = {}
        self._possible: dict[Conjunction, bool] = {}
        algebra.exclusive = self._exclusive

    def build(self, start: Conjunction) -> None:
        """Normal forms of a value set and of every one that it refers to.

        Raises:
            GrammarTooLarge: There are too many.
            UnsupportedKeyword: Something cannot be enforced.
        """
        queue = [normal(start)]
        while queue:
            value = queue.pop()
            if value in self.forms or value == ANYTHING:
                continue
            if len(self.forms) >= _MAX_VALUES:
                raise GrammarTooLarge(
                    f"the schema has more than {_MAX_VALUES} different kinds of values; use a smaller one",
                    resource="values",
                    limit=_MAX_VALUES,
                    found=_MAX_VALUES + 1,
                )
            self._algebra.budget.spend(32)
            form = self.forms[value] = self._form(value)
            found: list[Conjunction] = []
            for shape in form.objects or ():
                found += [member.value for member in shape.members]
            for row in form.arrays or ():
                for letters in (*row.prefix, row.rest):
                    found += [letter.value for letter in letters]
            queue.extend(reversed(found))
        self._find_possible()

    def _form(self, value: Conjunction) -> ValueForm:
        form = ValueForm()
        if value == NOTHING:
            return form
        of = self._algebra.of_set
        form.constants = [kind for kind in ("null", "false", "true") if of(value, kind) == TRUE]
        form.number = of(value, "number")
        form.string = of(value, "string")
        objects = of(value, "object")
        if objects == TRUE:
            form.objects = None
        elif objects != FALSE:
            shapes = []
            for alternative in self._alternatives.of(objects):
                shape = object_form(self._algebra, alternative, self.impossible, self._closed)
                if shape is not None:
                    shapes.append(shape)
            form.objects = list(dict.fromkeys(shapes))
        arrays = of(value, "array")
        if arrays == TRUE:
            form.arrays = None
        elif arrays != FALSE:
            rows = []
            for alternative in self._alternatives.of(arrays):
                row = self._array(alternative)
                if row is not None:
                    rows.append(row)
            form.arrays = list(dict.fromkeys(rows))
        return form

    def _array(
        self,
        alternative: tuple[frozenset[Formula], frozenset[frozenset[Formula]]],
    ) -> ArrayForm | None:
        row = array_form(alternative, self.impossible, self._members)
        if isinstance(row, str):
            for atom in alternative[0]:
                if isinstance(atom, Unique):
                    node = self._algebra.nodes[atom.node]
                    why = "the items may take infinitely many values, and a grammar cannot remember them all"
                    self._algebra.skip(node, "uniqueItems", why)
            units = frozenset(a for a in alternative[0] if not isinstance(a, Unique))
            row = array_form((units, alternative[1]), self.impossible, self._members)
        return row if isinstance(row, ArrayForm) else None

    def _members(self, value: Conjunction) -> list[Conjunction] | None:
        found = self._concrete.members(value, _MAX_MEMBERS)
        if found is None:
            return None
        root = self._algebra.nodes.registry.root
        return [self._algebra.nodes.frozen(v, root, root.pointer) for v in found]

    # Emptiness.

    def impossible(self, value: Conjunction) -> bool:
        """Whether a value set is seen to be empty without looking far."""
        known = self._impossible.get(value)
        if known is not None:
            return known
        if normal(value) == NOTHING:
            self._impossible[value] = True
            return True
        if self._depth >= _LOOK:
            return False
        # Until the answer is known, a recursive question is answered with "possible".
        self._impossible[value] = False
        self._depth += 1
        try:
            found = not any(self._shows(value, kind) for kind in _ORDER)
        finally:
            self._depth -= 1
        self._impossible[value] = found
        return found

    def _shows(self, value: Conjunction, kind: str) -> bool:
        formula = self._algebra.of_set(value, kind)
        if formula == FALSE:
            return False
        if formula == TRUE:
            return True
        if kind == "number":
            return not _no_number(formula)
        if kind == "string":
            texts = self._algebra.strings.finite(formula)
            return texts is None or bool(texts)
        return bool(self._alternatives.of(formula))

    def _exclusive(self, left: Formula, right: Formula, kind: str) -> bool:
        from deepinfer.grammar.json_schema.formula import conjunction

        both = conjunction([left, right])
        if FALSE in (left, right, both):
            return True
        if kind == "number":
            return _no_number(both)
        if kind == "string":
            texts = self._algebra.strings.finite(both)
            return texts is not None and not texts
        if kind == "object":
            first, second = self._signature(left), self._signature(right)
            for key, values in first.items():
                others = second.get(key)
                if others is not None and values.isdisjoint(others):
                    return True
        if kind in ("object", "array"):
            return not self._alternatives.of(both)
        return False

    def _signature(self, formula: Formula) -> dict[str, frozenset[JsonValue]]:
        """Members that every object of a formula has, with their values, where these are few."""
        known = self._signatures.get(formula)
        if known is None:
            known = self._signatures[formula] = {}
            values: dict[str, set[int]] = {}
            required: set[str] = set()
            for atom in unit_atoms(formula):
                if not isinstance(atom, Properties):
                    continue
                keys = atom.keys
                if isinstance(keys, StringIn) and keys.holds and len(keys.values) == 1:
                    (key,) = keys.values
                    if atom.every:
                        values.setdefault(key, set()).update(atom.value)
                    else:
                        required.add(key)
            for key in required & values.keys():
                members = self._concrete.members(normal(values[key]), _MAX_MEMBERS)
                if members is not None:
                    known[key] = frozenset(members)
        return known

    def possible(self, value: Conjunction) -> bool:
        """Whether a value set has members; exact for the forms that were built."""
        return self._possible.get(value, True)

    def _find_possible(self) -> None:
        """The least fixed point of having members."""
        possible = self._possible
        possible.clear()
        possible[NOTHING] = False
        waiting = []
        for value, form in self.forms.items():
            possible[value] = False
            waiting.append((value, form))

        def known(value: Conjunction) -> bool:
            return value == ANYTHING or possible.get(value, False)

        changed = True
        while changed and waiting:
            changed = False
            rest = []
            self._algebra.budget.spend(len(waiting))
            for value, form in reversed(waiting):
                if self._has_members(form, known):
                    possible[value] = changed = True
                else:
                    rest.append((value, form))
            rest.reverse()
            waiting = rest

    def _has_members(self, form: ValueForm, known: Callable[[Conjunction], bool]) -> bool:
        from deepinfer.grammar.json_schema.numbers import number_language

        if form.constants or form.objects is None or form.arrays is None:
            return True
        if form.string != FALSE and not self._algebra.strings.is_empty(form.string):
            return True
        if form.number != FALSE:
            self._algebra.budget.spend(64)
            if not number_language(form.number).is_empty:
                return True
        for shape in form.objects:
            if (not shape.clauses and not shape.low) or satisfiable(shape, known):
                return True
        return any(array_possible(row, known) for row in form.arrays)


_ORDER = ("null", "false", "true", "string", "number", "object", "array")


def array_possible(row: ArrayForm, known: Callable[[Conjunction], bool]) -> bool:
    """Whether some array has the form, when only some value sets have members."""
    if row.is_bag:
        letters = [letter for letter in row.rest if known(letter.value)]
        return len(letters) >= row.low and all(
            sum(index in letter.hits for letter in letters) >= least
            for index, (least, _) in enumerate(row.counts)
        )
    if not row.is_plain:
        return not Word(row, known).is_empty
    for position in range(min(row.low, len(row.prefix))):
        if not any(known(letter.value) for letter in row.prefix[position]):
            return False
    return row.low <= len(row.prefix) or any(known(letter.value) for letter in row.rest)


def _no_number(formula: Formula) -> bool:
    """Whether the bounds and finite sets of a formula are seen to leave no number."""
    finite = finite_numbers(formula)
    if finite is not None:
        return not finite
    low = high = None
    low_strict = high_strict = False
    for atom in unit_atoms(formula):
        if isinstance(atom, Compare):
            if atom.above and (low is None or (atom.bound, atom.strict) > (low, low_strict)):
                low, low_strict = atom.bound, atom.strict
            elif not atom.above and (
                high is None or (-atom.bound, atom.strict) > (-high, high_strict)
            ):
                high, high_strict = atom.bound, atom.strict
    if low is None or high is None:
        return False
    return low > high or (low == high and (low_strict or high_strict))
