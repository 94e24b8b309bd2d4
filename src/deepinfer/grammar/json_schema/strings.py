"""Strings under patterns, lengths, formats and finite sets: their spellings, membership, emptiness."""

from __future__ import annotations

from deepinfer.grammar.codepoints import ALL
from deepinfer.grammar.ir import (
    EMPTY,
    EPS,
    Expr,
    alt,
    complement,
    intersect,
    literal,
    repeat,
    seq,
    star,
)
from deepinfer.grammar.json_schema.budget import Budget
from deepinfer.grammar.json_schema.formats import format_expr
from deepinfer.grammar.json_schema.formula import (
    TRUE,
    And,
    Format,
    Formula,
    Length,
    Or,
    Pattern,
    StringIn,
    conjunction,
    evaluate,
    unit_atoms,
)
from deepinfer.grammar.json_schema.language import Derivatives, is_bounded
from deepinfer.grammar.json_schema.pattern import pattern_expr
from deepinfer.grammar.json_schema.spelling import Spelling, free_string, spell_class, spell_text

__all__ = ["Strings"]

_MAX_STATES = 3000
_FEW = 4


class Strings:
    """Answers about formulas over strings, remembered for one compilation.

    Args:
        every_spelling: Whether constrained strings may be spelled in every way that JSON allows; otherwise as JSON
            writers spell them.
        budget: What the compilation may still take.
    """

    def __init__(self, *, every_spelling: bool = False, budget: Budget | None = None) -> None:
        self._spelling = Spelling.ANY if every_spelling else Spelling.CANONICAL
        self._derivatives = Derivatives((budget or Budget(None)).spend)
        self._empty: dict[Formula, bool] = {}
        self._spelled: dict[Formula, Expr] = {}

    def spelled(self, formula: Formula) -> Expr:
        """JSON strings, with quotes, whose decoded text satisfies a formula."""
        known = self._spelled.get(formula)
        if known is None:
            known = self._spelled[formula] = self._spell(formula)
        return known

    def _spell(self, formula: Formula) -> Expr:
        if formula == TRUE:
            return free_string()
        quote = literal(b'"')
        texts = self.finite(formula)
        if texts is not None:
            return seq(quote, self._choices(sorted(texts)), quote) if texts else EMPTY
        if all(isinstance(atom, Length) for atom in unit_atoms(formula)):
            return seq(quote, self._body(formula, Spelling.ANY), quote)
        return seq(quote, self._body(formula, self._spelling), quote)

    def literal(self, text: str) -> Expr:
        """One string, with quotes."""
        return seq(literal(b'"'), spell_text(text, self._spelling), literal(b'"'))

    def _choices(self, texts: list[str]) -> Expr:
        """Texts in ascending order, sharing their beginnings."""
        if len(texts) <= _FEW:
            return alt(*(spell_text(text, self._spelling) for text in texts))
        # Groups by first character until a group is small; explicit, as texts may be long.
        groups: dict[str, list[str]] = {}
        for text in texts:
            groups.setdefault(text[:1], []).append(text)
        parts: list[Expr] = []
        for first, members in groups.items():
            if not first:
                parts.append(EPS)
                continue
            if len(members) == 1:
                parts.append(spell_text(members[0], self._spelling))
                continue
            shared = _common_prefix(members[0], members[-1])
            rest = self._choices([text[len(shared) :] for text in members])
            parts.append(seq(spell_text(shared, self._spelling), rest))
        return alt(*parts)

    def _body(self, formula: Formula, spelling: Spelling) -> Expr:
        """Texts that satisfy a formula, without quotes."""
        character = spell_class(ALL, spelling)
        if isinstance(formula, Or):
            return alt(*(self._body(part, spelling) for part in formula.parts))
        low, high = 0, None
        wanted: list[Expr] = []
        unwanted: list[Expr] = []
        for atom in unit_atoms(formula):
            if isinstance(atom, Length):
                low = max(low, atom.low)
                if atom.high is not None:
                    high = atom.high if high is None else min(high, atom.high)
            elif isinstance(atom, And | Or):
                wanted.append(self._body(atom, spelling))
            else:
                expr, holds = self._atom(atom, spelling)
                (wanted if holds else unwanted).append(expr)
        if high is not None and high < low:
            return EMPTY
        if low or high is not None or not wanted:
            wanted.append(
                repeat(character, low, high) if (low or high is not None) else star(character)
            )
        if unwanted:
            wanted.append(complement(alt(*unwanted)))
        return intersect(*wanted)

    def _atom(self, atom: Formula, spelling: Spelling) -> tuple[Expr, bool]:
        if isinstance(atom, Pattern):
            return pattern_expr(atom.source, spelling), atom.holds
        if isinstance(atom, Format):
            return format_expr(atom.name, spelling), atom.holds
        if isinstance(atom, StringIn):
            if spelling is self._spelling:
                return self._choices(sorted(atom.values)), atom.holds
            return alt(*(spell_text(text, spelling) for text in sorted(atom.values))), atom.holds
        raise TypeError(f"{atom!r} does not speak of strings")

    def holds(self, formula: Formula, text: str) -> bool:
        """Whether a text satisfies a formula."""
        return evaluate(formula, lambda atom: self._atom_holds(atom, text))

    def _atom_holds(self, atom: Formula, text: str) -> bool:
        if isinstance(atom, StringIn):
            return (text in atom.values) == atom.holds
        if isinstance(atom, Length):
            return atom.low <= len(text) and (atom.high is None or len(text) <= atom.high)
        expr, holds = self._atom(atom, Spelling.TEXT)
        return self._derivatives.matches(expr, text.encode("utf-8", "surrogatepass")) == holds

    def is_empty(self, formula: Formula) -> bool:
        """Whether no text satisfies a formula. False also where that could not be found out."""
        known = self._empty.get(formula)
        if known is None:
            texts = self.finite(formula)
            if texts is not None:
                known = not texts
            elif all(_excludes(a) or isinstance(a, Length) for a in unit_atoms(formula)):
                known = False if _unbounded(formula) else self._search(formula)
            elif isinstance(formula, Format) and formula.holds:
                known = False
            elif isinstance(formula, Pattern) and formula.holds:
                body = pattern_expr(formula.source, self._spelling)
                known = self._derivatives.is_empty(body, _MAX_STATES) is True
            else:
                known = self._search(formula)
            self._empty[formula] = known
        return known

    def _search(self, formula: Formula) -> bool:
        """Whether no text satisfies a formula, by searching for one."""
        find = self._derivatives.witness
        names = [atom for atom in unit_atoms(formula) if _excludes(atom)]
        if names:
            # One text of the rest is found far sooner than one that is checked against all names.
            rest = conjunction(atom for atom in unit_atoms(formula) if not _excludes(atom))
            text = find(self._body(rest, Spelling.TEXT), _MAX_STATES)
            if text is False:
                return True
            if text is None or self.holds(formula, text.decode("utf-8", "surrogatepass")):
                return False
        return find(self._body(formula, Spelling.TEXT), _MAX_STATES) is False

    def finite(self, formula: Formula) -> frozenset[str] | None:
        """The texts that satisfy a formula, when a part of it names a finite set that must hold; else None."""
        named = _named(formula)
        if named is None:
            return None
        if isinstance(formula, StringIn):
            return named
        return frozenset(text for text in named if self.holds(formula, text))

    def pattern_texts(self, source: str, limit: int) -> list[str] | None:
        """All texts that match a pattern, when they are at most `limit`; else None."""
        expr = pattern_expr(source, Spelling.TEXT)
        if not is_bounded(expr):
            return None
        found = self._derivatives.strings(expr, limit, _MAX_STATES)
        return None if found is None else [text.decode() for text in found]


def _unbounded(formula: Formula) -> bool:
    """Whether the lengths among the parts of a formula leave infinitely many."""
    return all(atom.high is None for atom in unit_atoms(formula) if isinstance(atom, Length))


def _excludes(atom: Formula) -> bool:
    return isinstance(atom, StringIn) and not atom.holds


def _named(formula: Formula) -> frozenset[str] | None:
    """A finite superset of the texts that satisfy a formula, if its shape shows one."""
    best: frozenset[str] | None = None
    for atom in unit_atoms(formula):
        found: frozenset[str] | None = None
        if isinstance(atom, StringIn) and atom.holds:
            found = atom.values
        elif isinstance(atom, Or):
            sets = [_named(part) for part in atom.parts]
            if all(values is not None for values in sets):
                found = frozenset().union(*(values for values in sets if values is not None))
        if found is not None and (best is None or len(found) < len(best)):
            best = found
    return best


def _common_prefix(first: str, last: str) -> str:
    size = 0
    for a, b in zip(first, last, strict=False):
        if a != b:
            break
        size += 1
    return first[:size]
