r"""Named sets of code points: `\d`, `\w`, `\s`, `\p{...}`, and what letter case leaves the same.

General categories, letter case and digits are those of this Python's Unicode Character Database
(`unicodedata.unidata_version`); scripts come from a table of their own.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Callable
from importlib import resources

from deepinfer.grammar.codepoints import ALL, CodePoints, complement, make, union

__all__ = [
    "ASCII_DIGITS",
    "ASCII_SPACE",
    "ASCII_WORD",
    "ECMA_SPACE",
    "LINE_TERMINATORS",
    "case_closure",
    "property_set",
    "unicode_digits",
    "unicode_space",
    "unicode_word",
]

ASCII_DIGITS: CodePoints = ((0x30, 0x39),)
ASCII_WORD: CodePoints = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
ASCII_SPACE: CodePoints = ((0x09, 0x0D), (0x20, 0x20))
LINE_TERMINATORS: CodePoints = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
"""Where a line ends in ECMA-262."""
_WHITE_SPACE: CodePoints = (
    (0x09, 0x0D),
    (0x20, 0x20),
    (0x85, 0x85),
    (0xA0, 0xA0),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
)
ECMA_SPACE: CodePoints = make([*(r for r in _WHITE_SPACE if r != (0x85, 0x85)), (0xFEFF, 0xFEFF)])
r"""`\s` of ECMA-262: white space and line terminators."""

# No character with a case, a category of its own or a numeric value lies beyond these two blocks.
_ASSIGNED_ENDS = ((0, 0x33479), (0xE0000, 0xE01EF))

_LONG_CATEGORIES = {
    "casedletter": "LC",
    "closepunctuation": "Pe",
    "cntrl": "Cc",
    "combiningmark": "M",
    "connectorpunctuation": "Pc",
    "control": "Cc",
    "currencysymbol": "Sc",
    "dashpunctuation": "Pd",
    "decimalnumber": "Nd",
    "digit": "Nd",
    "enclosingmark": "Me",
    "finalpunctuation": "Pf",
    "format": "Cf",
    "initialpunctuation": "Pi",
    "letter": "L",
    "letternumber": "Nl",
    "lineseparator": "Zl",
    "lowercaseletter": "Ll",
    "mark": "M",
    "mathsymbol": "Sm",
    "modifierletter": "Lm",
    "modifiersymbol": "Sk",
    "nonspacingmark": "Mn",
    "number": "N",
    "openpunctuation": "Ps",
    "other": "C",
    "otherletter": "Lo",
    "othernumber": "No",
    "otherpunctuation": "Po",
    "othersymbol": "So",
    "paragraphseparator": "Zp",
    "privateuse": "Co",
    "punct": "P",
    "punctuation": "P",
    "separator": "Z",
    "spaceseparator": "Zs",
    "spacingmark": "Mc",
    "surrogate": "Cs",
    "symbol": "S",
    "titlecaseletter": "Lt",
    "unassigned": "Cn",
    "uppercaseletter": "Lu",
}


@functools.cache
def _categories() -> dict[str, CodePoints]:
    """Every two-letter general category that occurs, with its code points."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    for start, stop in (*_ASSIGNED_ENDS, (0xF0000, 0xF0000), (0x100000, 0x100000)):
        at, current = start, unicodedata.category(chr(start))
        for code_point in range(start + 1, stop + 1):
            category = unicodedata.category(chr(code_point))
            if category != current:
                ranges.setdefault(current, []).append((at, code_point - 1))
                at, current = code_point, category
        ranges.setdefault(current, []).append((at, stop))
    ranges["Co"] += [(0xF0000, 0xFFFFD), (0x100000, 0x10FFFD)]
    ranges.pop("Cs", None)
    known = {category: make(parts) for category, parts in ranges.items()}
    known["Cn"] = complement(union(*(points for name, points in known.items() if name != "Cn")))
    return known


def _where(accepts: Callable[[str], bool]) -> CodePoints:
    """The characters of which a method of `str` is true."""
    return make(
        (code_point, code_point)
        for start, stop in _ASSIGNED_ENDS
        for code_point in range(start, stop + 1)
        if accepts(chr(code_point))
    )


@functools.cache
def unicode_digits() -> CodePoints:
    r"""`\d` of Python: decimal digits of every script.

    Returns:
        The set.
    """
    return _categories()["Nd"]


@functools.cache
def unicode_word() -> CodePoints:
    r"""`\w` of Python: what `str.isalnum` accepts, and the underscore.

    Returns:
        The set.
    """
    return union(_where(str.isalnum), ((0x5F, 0x5F),))


@functools.cache
def unicode_space() -> CodePoints:
    r"""`\s` of Python: what `str.isspace` accepts.

    Returns:
        The set.
    """
    return _where(str.isspace)


def property_set(expression: str) -> CodePoints | None:
    r"""The set of a Unicode property escape.

    Names are compared without case, spaces, hyphens and underscores (the loose matching of UAX 44).

    Args:
        expression: What stands in the braces of `\p{...}`: a general category (`Lu`, `Letter`, `gc=Nd`), a script
            (`Script=Greek`, `sc=Grek`, `Greek`), or one of the properties Any, ASCII, Assigned, ASCII_Hex_Digit,
            White_Space, Uppercase, Lowercase, XID_Start, XID_Continue.

    Returns:
        The set, or None when the property is not known.
    """
    name, equals, value = expression.partition("=")
    if equals:
        key = _loose(name)
        if key in ("gc", "generalcategory"):
            return _category(value)
        if key in ("sc", "script"):
            return _scripts().get(_loose(value))
        return None
    for found in (_category(name), _binary(_loose(name)), _scripts().get(_loose(name))):
        if found is not None:
            return found
    return None


def _loose(name: str) -> str:
    return name.translate({0x20: None, 0x2D: None, 0x5F: None}).lower()


def _category(name: str) -> CodePoints | None:
    short = _LONG_CATEGORIES.get(_loose(name), name.strip().capitalize())
    if short.upper() in ("LC", "L&"):
        return union(*(_categories()[part] for part in ("Lu", "Ll", "Lt")))
    if short == "Cs":
        return ()
    if len(short) == 1:
        members = [points for key, points in _categories().items() if key[0] == short]
        return union(*members) if members else None
    return _categories().get(short)


@functools.cache
def _binary(key: str) -> CodePoints | None:
    if key == "any":
        return ALL
    if key == "ascii":
        return ((0, 0x7F),)
    if key == "assigned":
        return complement(_categories()["Cn"])
    if key in ("asciihexdigit", "ahex"):
        return make([(0x30, 0x39), (0x41, 0x46), (0x61, 0x66)])
    if key in ("whitespace", "space", "wspace"):
        return _WHITE_SPACE
    if key in ("uppercase", "upper"):
        return _where(str.isupper)
    if key in ("lowercase", "lower"):
        return _where(str.islower)
    if key in ("xidstart", "xids"):
        return _where(lambda character: character != "_" and character.isidentifier())
    if key in ("xidcontinue", "xidc"):
        return _where(lambda character: ("a" + character).isidentifier())
    return None


@functools.cache
def _scripts() -> dict[str, CodePoints]:
    """Scripts by their short and long names, in the loose form."""
    text = resources.files("deepinfer.grammar").joinpath("data/scripts.txt").read_text("utf-8")
    found: dict[str, CodePoints] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        short, long, *parts = line.split()
        ends = (part.partition("-") for part in parts)
        points = make((int(first, 16), int(last or first, 16)) for first, _, last in ends)
        found[_loose(short)] = found[_loose(long)] = points
    found["zzzz"] = found["unknown"] = complement(union(*found.values()))
    return found


@functools.cache
def _case_groups() -> dict[int, tuple[int, ...]]:
    """Characters that differ in case only: each one's group, for those that are not alone."""
    parent: dict[int, int] = {}

    def root(code_point: int) -> int:
        while parent.setdefault(code_point, code_point) != code_point:
            parent[code_point] = parent[parent[code_point]]
            code_point = parent[code_point]
        return code_point

    for start, stop in _ASSIGNED_ENDS[:1]:
        for code_point in range(start, stop + 1):
            character = chr(code_point)
            for other in (character.lower(), character.upper()):
                if len(other) == 1 and other != character:
                    parent[root(ord(other))] = root(code_point)
    groups: dict[int, list[int]] = {}
    for code_point in list(parent):
        groups.setdefault(root(code_point), []).append(code_point)
    return {member: tuple(group) for group in groups.values() for member in group}


@functools.lru_cache(maxsize=4096)
def case_closure(points: CodePoints, *, ascii_only: bool, dotless: bool = True) -> CodePoints:
    """A set together with what differs from its members in letter case only.

    Args:
        points: The set.
        ascii_only: Only A-Z and a-z have a case.
        dotless: Whether U+0130 and U+0131 (the Turkish i) count as forms of i and I, as they do in Python and do
            not in ECMA-262.

    Returns:
        The larger set.
    """
    extra: list[tuple[int, int]] = []
    if ascii_only:
        for first, last in points:
            for low, high, offset in ((0x41, 0x5A, 32), (0x61, 0x7A, -32)):
                extra.append((max(first, low) + offset, min(last, high) + offset))
        return union(points, tuple(part for part in extra if part[0] <= part[1]))
    turkish = {0x130, 0x131}
    for member, group in _case_groups().items():
        if any(first <= member <= last for first, last in points):
            kept = group if dotless else [c for c in group if c not in turkish]
            if dotless or member not in turkish:
                extra += [(other, other) for other in kept]
    return union(points, tuple(extra))
