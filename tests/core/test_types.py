from __future__ import annotations

import array
import pickle

import numpy as np
import pytest

from deepinfer.core.errors import InvalidRequest
from deepinfer.core.types import (
    FinishReason,
    Output,
    OutputDelta,
    Request,
    SamplingParams,
    TokenLogprob,
    Usage,
)


def test_request_takes_every_usual_container() -> None:
    for ids in ([1, 2], (1, 2), np.array([1, 2]), array.array("i", [1, 2]), range(1, 3)):
        request = Request(rid="a", prompt_token_ids=ids)
        assert request.prompt_token_ids == (1, 2)
        assert {type(i) for i in request.prompt_token_ids} == {int}
    assert request.num_prompt_tokens == 2
    assert repr(request) == "Request('a', 2 prompt tokens, priority=0)"
    assert pickle.loads(pickle.dumps(request)) == request


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"prompt_token_ids": ()}, "at least one"),
        ({"prompt_token_ids": "text"}, "tokenizer"),
        ({"prompt_token_ids": None}, "sequence of integers"),
        ({"prompt_token_ids": 5}, "sequence of integers"),
        ({"prompt_token_ids": np.array(5)}, "sequence of integers"),
        ({"prompt_token_ids": (3, -1)}, r"prompt_token_ids\[1\] is -1"),
        ({"prompt_token_ids": (3, 1.0)}, r"prompt_token_ids\[1\] is 1.0"),
        ({"prompt_token_ids": (True,)}, r"\[0\] is True"),
        ({"prompt_token_ids": (2**31,)}, r"\[0\]"),
        ({"rid": ""}, "rid"),
        ({"rid": 3}, "rid"),
        ({"params": {"n": 1}}, "SamplingParams"),
        ({"priority": 1.5}, "priority"),
        ({"arrival_s": float("nan")}, "arrival_s"),
        ({"arrival_s": -1.0}, "arrival_s"),
        ({"sample_index": -1}, "sample_index"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
def test_request_refuses(changes: dict[str, object], match: str) -> None:
    with pytest.raises(InvalidRequest, match=match):
        Request(**{"rid": "a", "prompt_token_ids": (1,), **changes})


def test_outputs_know_when_they_are_finished() -> None:
    assert not Output(rid="a").finished
    assert Output(rid="a", finish_reason=FinishReason.STOP).finished
    assert not OutputDelta(rid="a").finished
    assert OutputDelta(rid="a", finish_reason=FinishReason.ERROR).finished


def test_times_and_totals() -> None:
    assert Output(rid="a", arrival_s=2.0, first_token_s=2.5).time_to_first_token_s == 0.5
    assert Output(rid="a").time_to_first_token_s is None
    assert Usage(prompt=3, generated=4).total == 7


def test_finish_reasons_are_the_usual_words() -> None:
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "abort", "error"]


def test_defaults() -> None:
    assert Request(rid="a", prompt_token_ids=(1,)).params == SamplingParams()
    assert TokenLogprob(token_id=1, logprob=-0.5).top == ()
