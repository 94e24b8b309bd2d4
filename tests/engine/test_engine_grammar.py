"""A grammar part plugged into the engine: masks bind late, and a row that fails, fails closed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from letter_grammar import Pattern, State, compile_regex

from deepinfer import SamplingParams
from deepinfer.core import FinishReason
from deepinfer.core.errors import InvalidRequest, RequestError
from deepinfer.testing import ToyModel, ToyTokenizer

EOS = 1
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def test_constrained_and_free_rows_in_one_batch(make_engine) -> None:
    engine = make_engine(grammar=compile_regex)
    params = [
        GREEDY.replace(regex="abc|xyz|0123456789"[:12]),
        GREEDY.replace(ignore_eos=True),
        GREEDY.replace(regex="no|yes", temperature=1.0, seed=3),
    ]
    outputs = engine.generate(["p", "p", "p"], params)
    assert [len(o.text) for o in outputs[::2]] == [3, 2]
    assert outputs[0].text[0] in "abc"
    assert outputs[0].text[1] in "xyz"
    assert outputs[0].text[2] in "0123"
    assert outputs[2].text[0] in "no"
    assert outputs[2].text[1] in "yes"
    assert outputs[0].finish_reason is FinishReason.STOP
    assert list(outputs[1].token_ids) == ToyModel().greedy(ToyTokenizer().encode("p"), 12)
    engine.check()


def test_refused_request_leaves_the_grammar_of_another_alone(make_engine) -> None:
    engine = make_engine(grammar=compile_regex)
    params = GREEDY.replace(regex="a|b|c")
    alone = engine.generate([5, 6], params)[0]
    engine.add_request([5, 6], params, rid="a[0]", keep_output=True)
    with pytest.raises(InvalidRequest, match="id 'a\\[0\\]' is not finished"):
        engine.add_request([5, 6], params.replace(n=2), rid="a")
    while engine.has_unfinished:
        engine.step()
    assert engine.take_output("a[0]")[0].text == alone.text == "abc"


def test_drafts_under_a_grammar(make_engine, drafting_model) -> None:
    params = [GREEDY.replace(regex="abc|xyz|123|456"), GREEDY.replace(ignore_eos=True)]
    plain = make_engine(grammar=compile_regex).generate(["p", "p"], params)
    engine = make_engine(drafting_model, drafter="dspark", grammar=compile_regex)
    outputs = engine.generate(["p", "p"], params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert len(outputs[0].text) == 4
    assert outputs[1].usage.drafted > 0


def test_length_still_ends(make_engine) -> None:
    engine = make_engine(grammar=compile_regex)
    output = engine.generate("p", GREEDY.replace(regex="ab|ab|ab|ab", max_tokens=2))[0]
    assert output.finish_reason is FinishReason.LENGTH


def test_mask_that_cannot_be_made_ends_its_request_alone(make_engine) -> None:
    class Failing(State):
        def fill_mask(self, row: Any) -> None:
            if self.at == 1:
                raise RuntimeError("planted")
            super().fill_mask(row)

    class FailingPattern(Pattern):
        def start(self) -> State:
            return Failing(self)

    def compile_one(params: SamplingParams) -> Pattern:
        kind = FailingPattern if params.regex == "ab|cd|ef" else Pattern
        return kind((params.regex or "").split("|"))

    engine = make_engine(grammar=compile_one)
    outputs = engine.generate(
        ["p", "p"],
        [GREEDY.replace(regex="ab|cd|ef"), GREEDY.replace(regex="ab|cd|eg")],
        on_error="return",
    )
    assert isinstance(outputs[0].error, RequestError)
    assert "planted" in str(outputs[0].error)
    assert len(outputs[0].token_ids) == 1
    assert len(outputs[1].text) == 3
    engine.check()


def test_token_that_the_grammar_refuses_is_never_shown(make_engine) -> None:
    class Open(State):
        def fill_mask(self, row: Any) -> None:
            """Lets everything through, as a lost mask would."""

    class OpenPattern(Pattern):
        def start(self) -> State:
            return Open(self)

    engine = make_engine(grammar=lambda params: OpenPattern(["a", "a", "a"]))
    output = engine.generate("p", GREEDY.replace(regex="aaa"), on_error="return")[0]
    assert output.finish_reason is FinishReason.ERROR
    assert "refuses" in str(output.error)
    assert set(output.text) <= {"a"}


def test_grammar_that_does_not_compile_concerns_its_request_only(make_engine) -> None:
    def refuse(params: SamplingParams) -> Pattern:
        raise ValueError("planted")

    engine = make_engine(grammar=refuse)
    outputs = engine.generate(["p", "p"], [GREEDY.replace(regex="a"), GREEDY], on_error="return")
    assert "planted" in str(outputs[0].error)
    assert outputs[1].error is None
    with pytest.raises(ValueError, match="planted"):
        engine.generate("p", GREEDY.replace(regex="a"))


def test_end_token_of_a_grammar_that_may_go_on(make_engine) -> None:
    class Many(State):
        is_done = False

        def accept(self, token_ids: Sequence[int]) -> bool:
            return EOS not in token_ids

        def fill_mask(self, row: Any) -> None:
            row.fill_(0)
            row[0] = (1 << EOS) | (1 << 4)

    class ManyPattern(Pattern):
        def start(self) -> State:
            return Many(self)

    engine = make_engine(grammar=lambda params: ManyPattern([]))
    output = engine.generate("p", GREEDY.replace(regex="a*", max_tokens=50))[0]
    assert output.finish_reason is FinishReason.STOP
    assert set(output.text) <= {"a"}
    assert output.token_ids[-1] == EOS


class Letters(State):
    """Any number of one letter up to a length, then the end; or an end that may come at any time."""

    most = 0
    may_end = True

    @property
    def is_done(self) -> bool:
        return False  # a grammar need not know

    def accept(self, token_ids: Sequence[int]) -> bool:
        self.at += len(token_ids)
        return EOS not in token_ids and self.at <= self.most

    def fill_mask(self, row: Any) -> None:
        row.fill_(0)
        if self.at < self.most:
            row[1] = -(1 << 31)  # id 63, the highest bit of the last word
        if self.at == self.most or self.may_end:
            row[0] = 1 << EOS


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("most", [0, 1, 5, 50])
@pytest.mark.parametrize("may_end", [False, True])
def test_ignoring_the_end_goes_on_as_long_as_the_grammar_does(
    make_engine, depth: int, most: int, may_end: bool
) -> None:
    kind = type("Kind", (Letters,), {"most": most, "may_end": may_end})

    class AnyPattern(Pattern):
        def start(self) -> State:
            return kind(self)

    engine = make_engine(
        grammar=lambda params: AnyPattern([]), config={"async_depth": depth, "deterministic": True}
    )
    params = GREEDY.replace(regex="a*", max_tokens=20, logit_bias={EOS: 100.0}, logprobs=0)
    going_on = params.replace(ignore_eos=True)
    other = GREEDY.replace(ignore_eos=True, logit_bias={EOS: 100.0})
    ended, output, free = engine.generate(["p", "p", "q"], [params, going_on, other])
    count = min(most, 20)
    if most < 20:
        assert list(output.token_ids) == [63] * count + [EOS]
        assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, EOS)
        assert len(output.logprobs) == count + 1
    else:
        assert list(output.token_ids) == [63] * count
        assert output.finish_reason is FinishReason.LENGTH
    assert output.text == ToyTokenizer().decode([63] * count)
    assert ended.finish_reason is (
        FinishReason.STOP if may_end or most < 20 else FinishReason.LENGTH
    )
    assert len(ended.token_ids) == (1 if may_end else len(output.token_ids))
    assert list(free.token_ids) == [EOS] * 12
    engine.check()
