"""Sets of code points, and their encodings."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.grammar import codepoints, ir
from deepinfer.grammar.unicode_classes import case_closure, property_set
from deepinfer.grammar.utf8 import byte_sequences, encode_utf8

EDGES = [0, 0x7F, 0x80, 0x7FF, 0x800, 0xFFF, 0x1000, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF]
POINTS = st.one_of(st.sampled_from(EDGES), st.integers(0, 0x10FFFF))
SETS = st.lists(st.tuples(POINTS, POINTS), max_size=4).map(codepoints.make)


@given(SETS, SETS, POINTS)
@settings(max_examples=150, deadline=None)
def test_algebra(left: codepoints.CodePoints, right: codepoints.CodePoints, point: int) -> None:
    has = codepoints.contains
    scalar = not 0xD800 <= point <= 0xDFFF
    assert has(codepoints.union(left, right), point) == (has(left, point) or has(right, point))
    assert has(codepoints.intersection(left, right), point) == (
        has(left, point) and has(right, point)
    )
    assert has(codepoints.difference(left, right), point) == (
        has(left, point) and not has(right, point)
    )
    assert has(codepoints.complement(left), point) == (scalar and not has(left, point))
    assert codepoints.complement(codepoints.complement(left)) == left
    assert codepoints.overlaps(left, right) == bool(codepoints.intersection(left, right))


@given(SETS)
@settings(max_examples=60, deadline=None)
def test_products_hold_as_many_strings_as_the_set(points: codepoints.CodePoints) -> None:
    sizes = []
    for sequence in byte_sequences(points):
        size = 1
        for low, high in sequence:
            size *= high - low + 1
        sizes.append(size)
    assert sum(sizes) == sum(last - first + 1 for first, last in points)


@given(SETS, POINTS)
@settings(max_examples=100, deadline=None)
def test_a_character_matches_when_it_is_in_the_set(
    slow_match: Callable[..., bool], points: codepoints.CodePoints, point: int
) -> None:
    if 0xD800 <= point <= 0xDFFF:
        return
    assert slow_match(encode_utf8(points), chr(point)) == codepoints.contains(points, point)


def test_ill_formed_bytes_match_nothing(slow_match: Callable[..., bool]) -> None:
    anything = encode_utf8(codepoints.ALL)
    for size in (1, 2):
        for values in itertools.product(range(0x80, 0x100), repeat=size):
            text = bytes(values)
            try:
                expected = len(text.decode()) == 1
            except UnicodeDecodeError:
                expected = False
            assert slow_match(anything, text) == expected
    for text in (b"\xe0\x80\x80", b"\xed\xa0\x80", b"\xf0\x80\x80\x80", b"\xf4\x90\x80\x80"):
        assert not slow_match(anything, text)


def test_equal_tails_share_a_branch() -> None:
    expr = encode_utf8(codepoints.ALL)
    assert isinstance(expr, ir.Alt)
    assert len(expr.parts) == 8  # ASCII, C2-DF, E0, E1-EC and EE-EF, ED, F0, F1-F3, F4
    assert encode_utf8([]) == ir.EMPTY
    assert encode_utf8([(0xD800, 0xDFFF)]) == ir.EMPTY


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("Lu", "AÉЖ", "aé1"),
        ("Letter", "aé道ℵ", "1 _"),
        ("gc=Nd", "0٣", "a½"),
        ("General_Category=Decimal_Number", "0٣", "a½"),
        ("digit", "7", "a"),
        ("Greek", "αΩ", "aж"),
        ("sc=Cyrl", "ж", "α"),
        ("Script=Han", "道", "ア"),
        ("L", "aé", "1"),
        ("LC", "aA", "ª道"),
        ("Any", "a\U0010ffff", ""),
        ("ASCII", "a\x7f", "é"),
        ("White_Space", " \u3000\x85", "a\ufeff"),
        ("Uppercase", "AⅠ", "a"),
        ("XID_Start", "aé", "1_"),
        ("P", "!¿", "$a"),
        ("Co", "\ue000\U00100000", "a"),
        ("Cn", "\u0378\U0003ffff", "a\ue000"),
    ],
)
def test_properties(name: str, inside: str, outside: str) -> None:
    points = property_set(name)
    assert points is not None
    assert all(codepoints.contains(points, ord(c)) for c in inside)
    assert not any(codepoints.contains(points, ord(c)) for c in outside)


@pytest.mark.parametrize("name", ["", "Foo", "sc=Foo", "gc=", "Emoji=Yes", "Lx"])
def test_unknown_properties(name: str) -> None:
    assert property_set(name) is None


def test_letter_case() -> None:
    def closed(text: str, **options: bool) -> str:
        points = case_closure(codepoints.from_text(text), **{"ascii_only": False, **options})
        return "".join(chr(c) for first, last in points for c in range(first, last + 1))

    assert closed("k") == "Kk\u212a"
    assert closed("Σ") == "Σςσ"
    assert closed("1") == "1"
    assert closed("K", ascii_only=True) == "Kk"
    assert closed("é", ascii_only=True) == "é"
    assert closed("i") == "Iiı"
    assert closed("i", dotless=False) == "Ii"
