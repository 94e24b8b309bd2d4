r"""String formats as regular expressions over decoded text.

Sources: RFC 3339 (date, time, date-time, duration), RFC 2673 and RFC 4291 (ipv4, ipv6), RFC 5321 (email), RFC 1123
(hostname), RFC 3986 and 3987 (uri, iri and their references), RFC 4122 (uuid), RFC 6570 (uri-template), RFC 6901
(json-pointer and its relative form). Calendar dates are real: 02-30 is refused, 02-29 needs a leap year. A leap
second is accepted where it is 23:59:60 in UTC, with offsets of whole quarters of an hour.
"""

from __future__ import annotations

import functools

from deepinfer.grammar.ir import Expr
from deepinfer.grammar.json_schema.pattern import pattern_expr
from deepinfer.grammar.json_schema.spelling import Spelling

__all__ = ["APPROXIMATED", "FORMATS", "format_expr"]


def _date() -> str:
    leap = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
    return (
        r"(?:\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
        rf"|02-(?:0[1-9]|1\d|2[0-8]))|{leap}-02-29)"
    )


def _leap_seconds() -> str:
    """Local times at which it is 23:59:60 in UTC, with their offsets."""
    last = 23 * 60 + 59
    offsets: dict[int, dict[int, list[str]]] = {}
    for sign in (1, -1):
        for hours in range(24):
            for minutes in (0, 15, 30, 45):
                local = (last + sign * (60 * hours + minutes)) % (24 * 60)
                text = f"[{'+' if sign > 0 else '-'}]{hours:02}:{minutes:02}"
                offsets.setdefault(local // 60, {}).setdefault(local % 60, []).append(text)
    offsets[23][59].append("[zZ]")
    hours_text = []
    for hour, by_minute in sorted(offsets.items()):
        minutes_text = [
            rf"{minute:02}:60(?:\.\d+)?(?:{'|'.join(tails)})"
            for minute, tails in sorted(by_minute.items())
        ]
        hours_text.append(f"{hour:02}:(?:{'|'.join(minutes_text)})")
    return f"(?:{'|'.join(hours_text)})"


def _time() -> str:
    hour = r"(?:[01]\d|2[0-3])"
    offset = rf"(?:[zZ]|[+-]{hour}:[0-5]\d)"
    return rf"(?:{hour}:[0-5]\d:[0-5]\d(?:\.\d+)?{offset}|{_leap_seconds()})"


def _duration() -> str:
    seconds = r"\d+S"
    minutes = rf"\d+M(?:{seconds})?"
    time = rf"T(?:\d+H(?:{minutes})?|{minutes}|{seconds})"
    days = r"\d+D"
    months = rf"\d+M(?:{days})?"
    date = rf"(?:\d+Y(?:{months})?|{months}|{days})"
    return rf"P(?:{date}(?:{time})?|{time}|\d+W)"


_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"


def _ipv6() -> str:
    group = r"[0-9A-Fa-f]{1,4}"
    last = rf"(?:{group}:{group}|{_IPV4})"
    forms = [rf"(?:{group}:){{6}}{last}", rf"::(?:{group}:){{0,5}}{last}", rf"::(?:{group})?"]
    for before in range(1, 8):
        head = rf"{group}(?::{group}){{{before - 1}}}::"
        after = 7 - before
        tails = [f"(?:{group})?"] if after else [""]
        if after >= 2:
            tails.append(rf"(?:{group}:){{0,{after - 2}}}{last}")
        forms.append(f"{head}(?:{'|'.join(tails)})")
    return f"(?:{'|'.join(forms)})"


_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
# Labels with hyphens at places 3 and 4 are reserved (RFC 5891): valid ones are encoded, which no grammar checks.
_EDGE, _INNER = "[A-Za-z0-9]", "[A-Za-z0-9-]"
_PLAIN_LABEL = (
    rf"(?:{_EDGE}(?:{_INNER}?{_EDGE})?|{_EDGE}{_INNER}{_INNER}{_EDGE}"
    rf"|{_EDGE}{_INNER}(?:{_EDGE}{_INNER}|-{_EDGE}){_INNER}{{0,58}}{_EDGE})"
)
_HOSTNAME = rf"(?=.{{1,253}}$){_PLAIN_LABEL}(?:\.{_PLAIN_LABEL})*"

_ATEXT = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_QUOTED = r'"(?:[ !#-\[\]-~]|\\[ -~])*"'
_WIDE = r"\u0080-\uD7FF\uE000-\u{10FFFF}"
_WIDE_QUOTED = rf'"(?:[ !#-\[\]-~{_WIDE}]|\\[ -~{_WIDE}])*"'


def _email(atext: str, quoted: str, label: str) -> str:
    local = rf"(?:{atext}+(?:\.{atext}+)*|{quoted})"
    domain = rf"(?:{label}(?:\.{label})*|\[(?:{_IPV4}|IPv6:{_ipv6()})\])"
    return rf"{local}@{domain}"


_UCS = (
    r"\u00A0-\uD7FF\uF900-\uFDCF\uFDF0-\uFFEF\u{10000}-\u{1FFFD}\u{20000}-\u{2FFFD}\u{30000}-\u{3FFFD}"
    r"\u{40000}-\u{4FFFD}\u{50000}-\u{5FFFD}\u{60000}-\u{6FFFD}\u{70000}-\u{7FFFD}\u{80000}-\u{8FFFD}"
    r"\u{90000}-\u{9FFFD}\u{A0000}-\u{AFFFD}\u{B0000}-\u{BFFFD}\u{C0000}-\u{CFFFD}\u{D0000}-\u{DFFFD}"
    r"\u{E1000}-\u{EFFFD}"
)
_PRIVATE = r"\uE000-\uF8FF\u{F0000}-\u{FFFFD}\u{100000}-\u{10FFFD}"


def _uri(extra: str = "", private: str = "", *, relative: bool = False) -> str:
    percent = "%[0-9A-Fa-f]{2}"
    plain = rf"A-Za-z0-9._~!$&'()*+,;={extra}-"
    char = rf"(?:[:@{plain}]|{percent})"
    user = rf"(?:[:{plain}]|{percent})*@"
    name = rf"(?:[{plain}]|{percent})*"
    future = r"[vV][0-9A-Fa-f]+\.[:A-Za-z0-9._~!$&'()*+,;=-]+"
    host = rf"(?:\[(?:{_ipv6()}|{future})\]|{name})"
    authority = rf"(?:{user})?{host}(?::\d*)?"
    slashed = rf"(?:/{char}*)*"
    rooted = rf"/(?:{char}+{slashed})?"
    tail = rf"(?:\?(?:{char}|[/?{private}])*)?(?:#(?:{char}|[/?])*)?"
    absolute = (
        rf"[A-Za-z][A-Za-z0-9+.-]*:(?:\/\/{authority}{slashed}|{rooted}|{char}+{slashed}|){tail}"
    )
    if not relative:
        return absolute
    first = rf"(?:[@{plain}]|{percent})+"
    return rf"(?:{absolute}|(?:\/\/{authority}{slashed}|{rooted}|{first}{slashed}|){tail})"


def _uri_template() -> str:
    literal = rf"[!#$&-;=?-\[\]_a-z~{_UCS}{_PRIVATE}]|%[0-9A-Fa-f]{{2}}"
    char = r"(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2})"
    name = rf"{char}(?:\.?{char})*"
    variable = rf"{name}(?::[1-9]\d{{0,3}}|\*)?"
    return rf"(?:{literal}|\{{[+#./;?&=,!@|]?{variable}(?:,{variable})*\}})*"


_POINTER = r"(?:/(?:[^~/]|~[01])*)*"

_SOURCES = {
    "date": _date(),
    "time": _time(),
    "date-time": rf"{_date()}[tT]{_time()}",
    "duration": _duration(),
    "ipv4": _IPV4,
    "ipv6": _ipv6(),
    "uuid": "[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}",
    "hostname": _HOSTNAME,
    "email": _email(_ATEXT, _QUOTED, _LABEL),
    "idn-email": _email(
        rf"(?:{_ATEXT}|[{_WIDE}])",
        _WIDE_QUOTED,
        rf"(?:{_LABEL}|[\p{{L}}\p{{N}}][\p{{L}}\p{{N}}\p{{M}}-]*)",
    ),
    "uri": _uri(),
    "uri-reference": _uri(relative=True),
    "iri": _uri(_UCS, _PRIVATE),
    "iri-reference": _uri(_UCS, _PRIVATE, relative=True),
    "uri-template": _uri_template(),
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9]\d*)(?:#|{_POINTER})",
}

FORMATS: dict[str, str | None] = {
    **{name: f"^(?:{source})$" for name, source in _SOURCES.items()},
    "idn-hostname": None,
    "regex": None,
}
"""Pattern of each known format; None when it is no regular language."""

APPROXIMATED = {
    "hostname": (
        "labels with hyphens at places 3 and 4 (xn--...) are left out: which of them are names depends on the characters that "
        "they decode to"
    )
}
"""Formats of which some strings are left out, with what these are."""


@functools.cache
def format_expr(name: str, spelling: Spelling) -> Expr:
    """Texts of a known format.

    Args:
        name: The format.
        spelling: How the texts are spelled.

    Returns:
        The expression, without quotes.
    """
    source = FORMATS[name]
    if source is None:
        raise ValueError(f"format {name!r} is no regular language")
    return pattern_expr(source, spelling)
