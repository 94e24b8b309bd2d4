from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.engine.detokenizer import IncrementalDetokenizer
from deepinfer.engine.stop import OutputText, StopChecker

sys.path.insert(0, str(Path(__file__).parent))
from tiny_tokenizer import tiny_tokenizer

STOPS = st.lists(st.text("ab,", min_size=1, max_size=4), min_size=1, max_size=4)
TEXT = st.text("ab,c", max_size=30)


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character, with nothing clever."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def cut(text: str, sizes: list[int]) -> list[str]:
    out, at = [], 0
    for size in [*sizes, len(text)]:
        out.append(text[at : at + size])
        at += size
    return out


@given(TEXT, STOPS, st.lists(st.integers(1, 4), max_size=30), st.booleans())
@settings(max_examples=1500, deadline=None)
def test_any_cut_gives_the_text_before_the_first_stop(text, stops, sizes, include):
    want, stop = reference(text, stops)
    checker = StopChecker(stops, include_stop=include)
    shown, taken = "", ""
    for piece in cut(text, sizes):
        shown += checker.push(piece)
        taken += piece
        if checker.matched is None:
            # held back is exactly the longest end that may still become a stop string
            longest = max(
                (n for s in stops for n in range(1, len(s)) if taken.endswith(s[:n])), default=0
            )
            assert shown == (taken if include else taken[: len(taken) - longest])
            assert checker.held == taken[len(shown) :]
    shown += checker.finish()
    assert checker.matched == stop
    assert shown == (want + (stop or "") if include else want)
    if stop is not None:
        assert checker.push("more") == ""


def test_one_character_at_a_time():
    checker = StopChecker(["b,c"])
    assert [checker.push(c) for c in "a b,b,c,d"] == ["a", " ", "", "", "b,", "", "", "", ""]
    assert checker.matched == "b,c"
    assert checker.finish() == ""


def test_inside_one_token_and_across_tokens():
    assert StopChecker(["END"]).push("xENDy") == "x"
    checker = StopChecker(["END"])
    assert [checker.push(p) for p in ("xE", "N", "Dy")] == ["x", "", ""]


def test_overlapping_stops():
    # the one that is complete first ends the text
    assert StopChecker(["abcd", "bc"]).push("xabcd") == "xa"
    # of two complete at the same character the longer one counts
    checker = StopChecker(["bc", "abc"])
    assert checker.push("xabc") == "x"
    assert checker.matched == "abc"
    # a failed candidate inside another one
    assert StopChecker(["aab", "xyz"]).push("aaab") == "a"


def test_what_was_held_comes_out_at_the_end():
    checker = StopChecker(["\n\nUser:"])
    assert checker.push("hi\n\nUse") == "hi"
    assert checker.held == "\n\nUse"
    assert checker.finish() == "\n\nUse"
    assert checker.finish() == ""


def test_include_stop():
    checker = StopChecker(["END"], include_stop=True)
    assert [checker.push(p) for p in ("xE", "ND", "y")] == ["xE", "ND", ""]
    assert checker.matched == "END"
    whole = StopChecker(["END"], include_stop=True)
    assert whole.push("aENDb") == "aEND"


def test_no_stop_strings():
    checker = StopChecker([])
    assert checker.push("anything") == "anything"
    assert checker.finish() == ""


def test_long_and_repetitive_stops():
    stop = "ab" * 2000 + "c"
    checker = StopChecker([stop] * 3)
    text = "ab" * 2500 + "c" + "tail"
    shown = "".join(checker.push(text[i : i + 7]) for i in range(0, len(text), 7))
    assert shown == "ab" * 500
    assert checker.matched == stop


TOKENS = {0: b"a", 1: b"b", 2: b"bc", 3: b"abc", 4: b"", 5: b"\xe4", 6: b"\xbd\xa0", 7: b"d"}


def output(stop, **options) -> OutputText:
    return OutputText(IncrementalDetokenizer(TOKENS.__getitem__), stop, **options)


def test_token_ids_follow_the_text():
    text = output(["bc"])
    assert text.push([0, 7]) == "ad"
    assert text.push([0, 2, 7]) == "a"
    assert text.text == "ada"
    assert text.stop_reason == "bc"
    # the last id completed the stop; the id after it was not taken
    assert text.token_ids == (0, 7, 0, 2)
    assert text.text_token_ids == (0, 7, 0)
    assert text.push([7]) == ""
    assert text.finish() == ""


def test_a_token_that_the_stop_begins_in_is_kept():
    text = output(["bcd"])
    text.push([7, 3, 7])
    assert text.text == "da"
    assert text.token_ids == (7, 3, 7)
    assert text.text_token_ids == (7, 3)


def test_a_stop_at_the_start_leaves_no_tokens():
    text = output(["ab"])
    assert text.push([0, 1]) == ""
    assert (text.text, text.text_token_ids, text.token_ids) == ("", (), (0, 1))


def test_tokens_without_text_and_split_characters():
    text = output(["d"])
    assert text.push([5]) == ""
    assert text.push([6, 4, 7]) == "你"
    assert text.text_token_ids == (5, 6)
    with_stop = output(["d"], include_stop=True)
    assert with_stop.push([5, 6, 7, 0]) == "你d"
    assert with_stop.text_token_ids == (5, 6, 7)


def test_without_a_stop_everything_is_reported():
    text = output(["zzz", "bcx"])
    assert text.push([0, 2]) == "a"
    assert text.push([5]) == ""
    assert text.finish() == "bc\ufffd"
    assert text.finish() == ""
    assert text.text == "abc\ufffd"
    assert text.text_token_ids == text.token_ids == (0, 2, 5)


@given(
    st.lists(st.integers(0, tiny_tokenizer().vocab_size - 1), max_size=40),
    st.lists(st.text("aeshn .t", min_size=1, max_size=3), max_size=3),
    st.integers(1, 5),
)
@settings(max_examples=300, deadline=None)
def test_random_tokens(ids, stops, step):
    tokenizer = tiny_tokenizer()
    text = OutputText(tokenizer.stream(), stops)
    deltas = [text.push(ids[i : i + step]) for i in range(0, len(ids), step)]
    deltas.append(text.finish())
    want, stop = reference(tokenizer.decode(ids), stops)
    assert "".join(deltas) == text.text
    assert text.stop_reason == stop
    assert text.text == want
    assert ids[: len(text.token_ids)] == list(text.token_ids)
    kept = tokenizer.decode(text.text_token_ids)
    assert kept.startswith(text.text) or kept.endswith("\ufffd")
    if stop is None:
        assert list(text.token_ids) == ids


@pytest.mark.parametrize("stop", ["\ufffd"])
def test_a_replacement_character_may_be_a_stop(stop):
    text = output([stop])
    assert text.push([0, 5]) == "a"
    assert text.finish() == ""
    assert text.stop_reason == stop


def test_many_long_stop_strings_cost_nothing_before_they_begin() -> None:
    stops = ["x" * 4000 + str(i) for i in range(128)]
    started = time.process_time()
    for _ in range(40):
        assert StopChecker(stops).push("abc") == "abc"
    assert time.process_time() - started < 2  # every border of every string took 5 s
    checker = StopChecker(stops)
    assert checker.push("ax" + "x" * 4000 + "7") == "ax"
    assert checker.matched == stops[7]
