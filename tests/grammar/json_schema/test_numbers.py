"""Numbers against exact arithmetic on their spelling."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from deepinfer.core.errors import ConfigError, EmptyLanguage, GrammarTooLarge
from deepinfer.grammar.grammar import Grammar
from deepinfer.grammar.ir import Rules
from deepinfer.grammar.json_schema import compile_json_schema
from deepinfer.grammar.json_schema.formula import (
    Compare,
    Multiple,
    NumberIn,
    conjunction,
    disjunction,
)
from deepinfer.grammar.json_schema.numbers import number_holds, number_language

BOUNDS = [0, 1, 3, -4, 10, 99, 100, 255, -1, "0.5", "2.75", "-0.01", "1234.5"]
DIVISORS = [1, 2, 3, 5, 7, 10, "0.5", "0.25", "0.01", "0.3", "2.5", 12]


def random_formula(rng: random.Random):
    atoms = []
    for _ in range(rng.randint(1, 3)):
        kind = rng.random()
        if kind < 0.6:
            bound = Fraction(rng.choice(BOUNDS))
            atoms.append(Compare(bound, rng.random() < 0.5, rng.random() < 0.5))
        elif kind < 0.9:
            atoms.append(Multiple(Fraction(rng.choice(DIVISORS)), rng.random() < 0.7))
        else:
            atoms.append(
                NumberIn(frozenset(map(Fraction, rng.sample(BOUNDS, 2))), rng.random() < 0.4)
            )
    return disjunction(atoms) if rng.random() < 0.3 else conjunction(atoms)


def random_decimal(rng: random.Random) -> str:
    sign = rng.choice(["", "-"])
    whole = str(rng.choice([0, rng.randint(0, 12), rng.randint(0, 300), rng.randint(0, 99999)]))
    fraction = rng.choice(
        ["", "", ".0", ".5", ".25", ".750", ".01", ".00", f".{rng.randint(0, 999)}"]
    )
    return sign + whole + fraction


@pytest.mark.parametrize("seed", range(40))
def test_plain_decimals_are_exact(seed):
    rng = random.Random(seed)
    formula = random_formula(rng)
    expr, rules = number_language(formula).emit("n")
    texts = {random_decimal(rng) for _ in range(60)}
    wanted = {text for text in texts if number_holds(formula, Fraction(text))}
    try:
        grammar = Grammar(Rules("root", {"root": expr, **rules}))
        found = {text for text in texts if grammar.matches(text)}
    except EmptyLanguage:
        found = set()
    assert found == wanted


@pytest.mark.parametrize("seed", range(40))
def test_scientific_notation_is_never_wrong(seed):
    rng = random.Random(1000 + seed)
    formula = random_formula(rng)
    expr, rules = number_language(formula).emit("n")
    try:
        grammar = Grammar(Rules("root", {"root": expr, **rules}))
        grammar.matches("0")
    except EmptyLanguage:
        return
    for _ in range(60):
        lead = f"{rng.choice(['', '-'])}{rng.randint(1, 9)}{rng.choice(['', '.5', '.25', '.0', '.125'])}"
        text = f"{lead}{rng.choice('eE')}{rng.choice(['', '+', '-'])}{rng.choice(['0', '1', '2', '02', '3', '17'])}"
        if grammar.matches(text):
            assert number_holds(formula, Fraction(text)), text


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "integer"}, ["0", "-0", "12", "1.0", "1e2", "1.5E+01", "1.25e2", "1e+308"], ["1.5", "1e-1", "01", "1.", ".5", "-"]),
        ({"type": "number"}, ["-0.5", "1E400", "0e0", "1.50", "-0"], ["01", "1.", ".5", "+1", "1e", "NaN"]),
        ({"type": "number", "minimum": 3}, ["3", "3.0", "1e1", "3e0", "3.1e0", "1.0e01"], ["01", "2.9e0", "3e-1"]),
        ({"maximum": 0.1}, ["0.1", "1e-1", "9.99e-2", "-5e3", "0.10"], ["0.11", "1.1e-1", "1e0"]),
        ({"multipleOf": 0.01}, ["4.35", "1e2", "1.5e-1"], ["4.355", "1.5e-2"]),
        ({"minimum": -5, "type": "integer"}, ["-5", "-3", "7", "-5.0"], ["-6", "-5.5", "-"]),
    ],
)  # fmt: skip
def test_spellings(accepts_text, schema, valid, invalid):
    assert [text for text in valid if not accepts_text(schema, text)] == []
    assert [text for text in invalid if accepts_text(schema, text)] == []


def test_text_keeps_decimals_exact(accepts_text):
    schema = '{"maximum": 0.1000000000000000055511151231257827}'
    assert accepts_text(schema, "0.1000000000000000055511151231257827")
    assert not accepts_text(schema, "0.1000000000000000055511151231257828")


def test_numbers_beyond_the_limits_are_refused():
    with pytest.raises(GrammarTooLarge, match="remainders"):
        compile_json_schema({"multipleOf": 123457})
    with pytest.raises(GrammarTooLarge, match="exponent"):
        compile_json_schema('{"minimum": 1e5000}')
    with pytest.raises(GrammarTooLarge, match="bounds"):
        compile_json_schema(
            {
                "anyOf": [{"minimum": i + 0.5, "maximum": i + 0.7} for i in range(60)],
                "type": "number",
            }
        )


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "number"}, "1.5{}"),
        ({"type": "number"}, "1{}"),
        ({}, "-0.{}"),
        ({"items": {}}, "[1e{}]"),
        ({"not": {"const": 1}}, "2.0{}"),
        ({"not": {"enum": list(range(100))}}, "100.0{}"),
        ({"type": "integer", "minimum": 7}, "8.0{}"),
        ({"type": "number", "multipleOf": 0.7}, "1.40{}"),
        ({"enum": [2.5, 3]}, "2.5{}"),
    ],
)
def test_digits_do_not_go_on_for_ever(schema, text):
    grammar = compile_json_schema(schema, max_digits=8)
    assert grammar.matches(text.format("00"))
    assert not grammar.matches(text.format("0" * 9))
    assert compile_json_schema(schema).matches(text.format("0" * 60))
    assert not compile_json_schema(schema).matches(text.format("0" * 65))
    assert compile_json_schema(schema, max_digits=None).matches(text.format("0" * 300))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"not": {"const": 1}}, "1.{}"),
        ({"not": {"enum": list(range(100))}}, "5.{}"),
        ({"not": {"multipleOf": 1}}, "5.{}"),
    ],
)
def test_a_bound_on_digits_excludes_no_less(schema, text):
    grammar = compile_json_schema(schema, max_digits=4)
    assert not any(grammar.matches(text.format("0" * count)) for count in range(1, 90))


def test_digits_that_are_needed_are_never_cut():
    grammar = compile_json_schema({"minimum": 10**100, "type": "number"}, max_digits=4)
    assert grammar.matches("1" + "0" * 100)
    assert grammar.matches(str(10**103))
    constant = "0." + "0" * 40 + "1"
    assert compile_json_schema(f'{{"const": {constant}}}', max_digits=1).matches(constant)


@pytest.mark.parametrize("count", [0, -1, 1.5, "8"])
def test_a_bound_on_digits_is_a_positive_number(count):
    with pytest.raises(ConfigError):
        compile_json_schema({}, max_digits=count)
