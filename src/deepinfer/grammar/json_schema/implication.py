"""Implications between formulas over objects, in the form that is cheapest to work out."""

from __future__ import annotations

from deepinfer.grammar.json_schema.formula import (
    FALSE,
    NOTHING,
    TRUE,
    And,
    Formula,
    Or,
    Properties,
    conjunction,
    disjunction,
)

__all__ = ["implication"]


def implication(
    condition: Formula, otherwise: Formula, consequent: Formula, *, by_clauses: bool
) -> Formula:
    """Where `condition` holds, `consequent` does.

    Args:
        condition: A formula over values of one type.
        otherwise: Its negation.
        consequent: Another one.
        by_clauses: Whether parts of the consequent that a bag of members can check are kept as conditions on the
            members. Otherwise the two cases are told apart, which is better for many conditions on one member.

    Returns:
        The formula.
    """
    if consequent == TRUE or condition == FALSE:
        return TRUE
    if not by_clauses or _universal([otherwise]) is None:
        return disjunction([otherwise, conjunction([condition, consequent])])
    easy: list[Formula] = []
    hard: list[Formula] = []
    for part in consequent.parts if isinstance(consequent, And) else (consequent,):
        count = _universal([otherwise, part])
        (easy if count is not None and count <= 1 else hard).append(part)
    clauses = [disjunction([otherwise, part]) for part in easy]
    if hard:
        clauses.append(disjunction([otherwise, conjunction([condition, *hard])]))
    return conjunction(clauses)


def _universal(formulas: list[Formula]) -> int | None:
    """How many atoms of a clause speak of every member; None when the formulas are no clause over members."""
    count = 0
    for formula in formulas:
        for atom in formula.parts if isinstance(formula, Or) else (formula,):
            if not isinstance(atom, Properties):
                return None
            count += atom.every and atom.value != NOTHING
    return count
