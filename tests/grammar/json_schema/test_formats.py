"""Formats that are asserted."""

from __future__ import annotations

import calendar
import ipaddress
import random

import pytest

from deepinfer.core.errors import UnsupportedKeyword
from deepinfer.grammar.json_schema import compile_json_schema

CASES = {
    "date": (["2024-02-29", "2000-02-29", "1999-12-31"], ["2023-02-29", "1900-02-29", "2026-02-30", "2026-13-01", "26-1-1"]),
    "time": (["08:30:06Z", "23:59:60Z", "12:00:00.52+02:30", "01:29:60+01:30", "15:59:60-08:00"], ["24:00:00Z", "22:59:60Z", "12:00:00", "1:2:3Z", "23:59:60+01:00"]),
    "date-time": (["1963-06-19T08:30:06.283185Z", "1998-12-31t23:59:60z"], ["1990-02-31T15:59:59Z", "1998-12-31T23:58:60Z", "2020-01-01 00:00:00Z"]),
    "duration": (["P4DT12H30M5S", "P1Y2M", "PT36H", "P2W"], ["P", "PT", "P1Y2D", "P1D2H", "4D"]),
    "email": (["joe.bloggs@example.com", '"joe bloggs"@example.com', "a@[127.0.0.1]"], ["2962", ".a@b.c", "a..b@c.d", "a@"]),
    "hostname": (["www.example.com", "a-b.c", "x" * 63], ["-a.b", "a..b", "x" * 64, "a_b", ".".join(["a" * 50] * 6)]),
    "ipv4": (["192.168.0.1", "0.0.0.0"], ["256.1.1.1", "1.1.1", "01.1.1.1"]),
    "ipv6": (["::1", "::", "1:2:3:4:5:6:7:8", "::ffff:1.2.3.4", "1::8"], ["1::2::3", "12345::", "1:2:3:4:5:6:7", ":1::"]),
    "uuid": (["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08aa9811eab4aa73b441d16380", "2eb8aa08-aa98-11ea-b4aa-73b441d1638"]),
    "uri": (["http://foo.bar/?baz=qux#quux", "urn:oasis:names", "mailto:a@b.c"], ["//foo.bar", "a b:c", "http://a b", "\\\\x"]),
    "uri-reference": (["/abc", "#frag", "//foo.bar/x"], ["\\\\x", "a b"]),
    "iri": (["http://ƒøø.ßår/?∂éœ=πîx#πîüx"], ["http://a b"]),
    "uri-template": (["http://a/{term:1}/{term}"], ["http://a/{term:1}/{term"]),
    "json-pointer": (["", "/foo/0", "/a~1b"], ["foo", "/a~2"]),
    "relative-json-pointer": (["1", "0/foo", "2#"], ["/foo", "-1", "01"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_format(accepts, name):
    schema = {"type": "string", "format": name}
    valid, invalid = CASES[name]
    assert [text for text in valid if not accepts(schema, text)] == []
    assert [text for text in invalid if accepts(schema, text)] == []


def test_dates_are_those_of_the_calendar():
    rng = random.Random(1)
    grammar = compile_json_schema({"type": "string", "format": "date"})
    for _ in range(300):
        year = rng.choice([rng.randint(1, 9999), 100 * rng.randint(1, 99)])
        month, day = rng.randint(1, 12), rng.randint(27, 32)
        real = day <= calendar.monthrange(year, month)[1]
        assert grammar.matches(f'"{year:04}-{month:02}-{day:02}"') == real


def test_ipv6_agrees_with_the_library():
    rng = random.Random(2)
    grammar = compile_json_schema({"type": "string", "format": "ipv6"})
    for _ in range(400):
        parts = [
            rng.choice(["", "", "0", "f", "1a2b", "1.2.3.4", "12345"])
            for _ in range(rng.randint(2, 9))
        ]
        text = ":".join(parts)
        try:
            ipaddress.IPv6Address(text)
            real = True
        except ValueError:
            real = False
        assert grammar.matches(f'"{text}"') == real, text


def test_unknown_formats_are_annotations(accepts):
    schema = {"type": "string", "format": "x-mine"}
    assert accepts(schema, "anything")
    entry = compile_json_schema(schema).report.by_status("ignored")[0]
    assert (entry.path, entry.keyword) == ("/format", "format")


def test_formats_that_no_grammar_checks_are_refused(accepts):
    for name in ("regex", "idn-hostname"):
        with pytest.raises(UnsupportedKeyword) as caught:
            compile_json_schema({"items": {"format": name}})
        assert caught.value.path == "/items/format"
        assert accepts({"format": name}, "(", on_unsupported="warn")
        assert accepts({"format": name}, "(", formats="annotate")


def test_formats_join_lengths_and_patterns(accepts):
    schema = {"format": "ipv4", "maxLength": 7, "pattern": "^1", "type": "string"}
    assert accepts(schema, "1.2.3.4")
    assert not accepts(schema, "2.2.3.4")
    assert not accepts(schema, "1.2.3.44")


def test_reserved_host_names_are_reported():
    report = compile_json_schema({"format": "hostname"}).report
    assert [entry.status for entry in report] == ["approximated"]
