"""Normal forms as rules over bytes."""

from __future__ import annotations

import functools

from deepinfer.core.errors import EmptyLanguage
from deepinfer.grammar.ir import (
    EMPTY,
    EPS,
    Clause,
    Expr,
    Member,
    Rules,
    alt,
    bag,
    literal,
    optional,
    ref,
    repeat,
    seq,
)
from deepinfer.grammar.json_schema.algebra import Algebra
from deepinfer.grammar.json_schema.arrays import ArrayForm, Letter, State, Word
from deepinfer.grammar.json_schema.digits import capped
from deepinfer.grammar.json_schema.forms import Forms, ValueForm
from deepinfer.grammar.json_schema.formula import (
    ANYTHING,
    FALSE,
    Conjunction,
    Formula,
)
from deepinfer.grammar.json_schema.numbers import any_number, number_language
from deepinfer.grammar.json_schema.objects import MemberForm, ObjectForm
from deepinfer.grammar.json_schema.spelling import free_string
from deepinfer.grammar.json_schema.whitespace import Whitespace

__all__ = ["Emitter", "any_value_rules"]

ANY_VALUE, ANY_OBJECT, ANY_ARRAY = "any", "any-object", "any-array"


@functools.lru_cache(maxsize=16)
def any_value_rules(whitespace: Whitespace, max_digits: int | None) -> dict[str, Expr]:
    """Rules of any JSON value, any object and any array, by name."""
    gap, comma, colon = whitespace.gap, whitespace.comma, whitespace.colon
    value = ref(ANY_VALUE)

    def members(one: Expr) -> Expr:
        item = seq(one, gap)
        return optional(seq(item, repeat(seq(comma, item), 0, None)))

    scalars = alt(
        literal(b"null"),
        literal(b"true"),
        literal(b"false"),
        capped(any_number(), max_digits),
        free_string(),
    )
    return {
        ANY_VALUE: alt(ref(ANY_OBJECT), ref(ANY_ARRAY), scalars),
        ANY_OBJECT: seq(
            literal(b"{"), gap, members(seq(free_string(), colon, value)), literal(b"}")
        ),
        ANY_ARRAY: seq(literal(b"["), gap, members(value), literal(b"]")),
    }


class Emitter:
    """Writes the rules of one compilation.

    Args:
        algebra: The schemas.
        forms: Their normal forms.
        whitespace: Where white space may stand.
        ordered: Whether members of objects stand in the declared order.
        max_digits: Bound of each repeat of a digit in numbers; None for none.
    """

    def __init__(
        self,
        algebra: Algebra,
        forms: Forms,
        whitespace: Whitespace,
        ordered: bool,
        max_digits: int | None,
    ) -> None:
        self._strings = algebra.strings
        self._budget = algebra.budget
        self._forms = forms
        self._whitespace = whitespace
        self._gap = whitespace.gap
        self._comma = whitespace.comma
        self._colon = whitespace.colon
        self._ordered = ordered
        self._max_digits = max_digits
        self._rules: dict[str, Expr] = {}
        self._names: dict[Conjunction, str] = {}
        self._queue: list[Conjunction] = []
        self._inline: dict[Conjunction, Expr] = {}
        self._members: dict[tuple[str | Formula, Conjunction], Expr] = {}
        self._uses_any = False

    def rules(self, start: Conjunction) -> Rules:
        """The rules of a value set.

        Raises:
            EmptyLanguage: It has no members.
        """
        if not self._forms.possible(start):
            raise EmptyLanguage(
                "no JSON value satisfies the schema; correct what contradicts itself in it"
            )
        outside = self._whitespace.outside
        root = seq(outside, self._value(start), outside)
        while self._queue:
            value = self._queue.pop()
            self._budget.spend(32)
            name = self._names[value]
            self._rules[name] = self._body(self._forms.forms[value], name)
        rules = {"root": root, **self._rules}
        if self._uses_any:
            rules.update(any_value_rules(self._whitespace, self._max_digits))
        return Rules("root", rules)

    def _value(self, value: Conjunction) -> Expr:
        """An expression for a value set that has members."""
        if value == ANYTHING:
            self._uses_any = True
            return ref(ANY_VALUE)
        known = self._inline.get(value)
        if known is not None:
            return known
        form = self._forms.forms[value]
        if form.objects == [] and form.arrays == []:
            name = f"n{len(self._inline)}"
            expr = self._body(form, name)
        else:
            name = self._names.get(value) or f"v{len(self._names)}"
            if value not in self._names:
                self._names[value] = name
                self._queue.append(value)
            expr = ref(name)
        self._inline[value] = expr
        return expr

    def _body(self, form: ValueForm, name: str) -> Expr:
        parts: list[Expr] = []
        if form.objects is None:
            self._uses_any = True
            parts.append(ref(ANY_OBJECT))
        else:
            parts += [self._object(shape) for shape in form.objects]
        if form.arrays is None:
            self._uses_any = True
            parts.append(ref(ANY_ARRAY))
        else:
            for index, row in enumerate(form.arrays):
                parts.append(self._array(row, f"{name}.{index}"))
        if form.string != FALSE and not self._strings.is_empty(form.string):
            parts.append(self._strings.spelled(form.string))
        if form.number != FALSE:
            self._budget.spend(64)
            expr, rules = number_language(form.number).emit(f"{name}.n", self._max_digits)
            self._rules.update(rules)
            parts.append(expr)
        parts += [literal(constant.encode()) for constant in form.constants]
        return alt(*parts)

    def _object(self, shape: ObjectForm) -> Expr:
        self._budget.spend(4 * len(shape.members))
        left = self._usable(shape)
        if left is None:
            return EMPTY
        usable, conditions = left
        sizes: dict[str, int] = {}
        for index in usable:
            key = shape.members[index].key
            if key is not None:
                sizes[key] = sizes.get(key, 0) + 1
        places: dict[int, int] = {}
        members: list[Member] = []
        groups: dict[str, int] = {}
        named = frozenset().union(*(present | absent for present, absent in conditions))
        unnamed: list[Expr] = []
        for index in usable:
            member = shape.members[index]
            expr = self._member(member)
            if member.key is None and index not in named:
                unnamed.append(expr)  # no condition tells them apart, so that they are one kind
                continue
            places[index] = len(members)
            if member.key is None:
                members.append(Member(expr, 0, None))
            elif sizes[member.key] == 1:
                members.append(Member(expr, 0, 1))
            else:
                group = groups.setdefault(member.key, len(groups))
                members.append(Member(expr, 0, 1, group))
        if unnamed:
            members.append(Member(alt(*unnamed), 0, None))
        clauses = [
            Clause(frozenset(places[i] for i in present), frozenset(places[i] for i in absent))
            for present, absent in conditions
        ]
        if not members and shape.low:
            return EMPTY
        inside = bag(members, self._comma, clauses, shape.low, shape.high, self._ordered)
        if not members:
            inside = EPS
        return seq(literal(b"{"), self._gap, inside, literal(b"}"))

    def _usable(
        self, shape: ObjectForm
    ) -> tuple[list[int], list[tuple[frozenset[int], frozenset[int]]]] | None:
        """Members that may occur, and the conditions left over them; None when some condition cannot hold."""
        possible = self._forms.possible
        usable = {i: None for i, member in enumerate(shape.members) if possible(member.value)}
        conditions = list(shape.clauses)
        while True:
            left = []
            forbidden: set[int] = set()
            for positive, negative in conditions:
                if any(index not in usable for index in negative):
                    continue
                present = frozenset(index for index in positive if index in usable)
                if not present and not negative:
                    return None
                if not present and len(negative) == 1:
                    forbidden |= negative
                else:
                    left.append((present, negative))
            conditions = left
            if not forbidden:
                return list(usable), conditions
            for index in forbidden:
                del usable[index]

    def _member(self, member: MemberForm) -> Expr:
        """One member, with the white space behind it."""
        place = (member.keys if member.key is None else member.key, member.value)
        expr = self._members.get(place)
        if expr is None:
            if member.key is not None:
                key = self._strings.literal(member.key)
            else:
                key = self._strings.spelled(member.keys)
            expr = seq(key, self._colon, self._value(member.value), self._gap)
            self._members[place] = expr
        return expr

    def _array(self, row: ArrayForm, name: str) -> Expr:
        if row.is_plain:
            body = self._plain(row)
        else:
            body = self._bag(row) if row.is_bag else self._word(row, name)
        return EMPTY if body is None else seq(literal(b"["), self._gap, body, literal(b"]"))

    def _letters(self, letters: tuple[Letter, ...]) -> Expr:
        found = [self._value(x.value) for x in letters if self._forms.possible(x.value)]
        return seq(alt(*found), self._gap)

    def _plain(self, row: ArrayForm) -> Expr | None:
        low, high = row.low, row.high
        prefix = [self._letters(letters) for letters in row.prefix[:high]]
        for index, item in enumerate(prefix):
            if item == EMPTY:
                prefix, high = prefix[:index], index
                break
        size = len(prefix)
        body: Expr = EPS
        if high is None or high > size:
            item = self._letters(row.rest)
            if item == EMPTY:
                high = size
            else:
                rest = None if high is None else high - size
                least = max(low - size, 0)
                if size:
                    body = repeat(seq(self._comma, item), least, rest)
                else:
                    more = repeat(
                        seq(self._comma, item),
                        max(least - 1, 0),
                        None if rest is None else rest - 1,
                    )
                    body = seq(item, more)
                    body = optional(body) if low == 0 else body
        if high is not None and high < low:
            return None
        for index in range(size - 1, -1, -1):
            body = seq(self._comma if index else EPS, prefix[index], body)
            if low <= index:
                body = optional(body)
        return body

    def _bag(self, row: ArrayForm) -> Expr:
        """Items that all differ: each of finitely many values once at most."""
        letters = [letter for letter in row.rest if self._forms.possible(letter.value)]
        members = [Member(seq(self._value(x.value), self._gap), 0, 1) for x in letters]
        clauses = [
            Clause(frozenset(i for i, x in enumerate(letters) if index in x.hits), frozenset())
            for index, (least, _) in enumerate(row.counts)
            if least
        ]
        return bag(members, self._comma, clauses, row.low, row.high) if members else EPS

    def _word(self, row: ArrayForm, name: str) -> Expr | None:
        word = Word(row, self._forms.possible)
        if word.is_empty:
            return None
        names: dict[State, str] = {state: f"{name}.{i}" for i, state in enumerate(word.edges)}
        for state, edges in word.edges.items():
            by_target: dict[State, list[Letter]] = {}
            for letter, target in edges:
                by_target.setdefault(target, []).append(letter)
            first = self._comma if state[0] else EPS
            branches = [
                seq(first, self._letters(tuple(letters)), ref(names[target]))
                for target, letters in by_target.items()
            ]
            self._rules[names[state]] = alt(*([EPS] if word.accepting(state) else []), *branches)
        return ref(names[word.start])
