from __future__ import annotations

import copy
import enum
import json
import pickle

import numpy as np
import pytest

from deepinfer.core.errors import InvalidRequest
from deepinfer.core.params import SamplingParams

NAN, INF = float("nan"), float("inf")
HUGE = 10**400
UNWRITABLE = 10**5000  # Python refuses to write this many digits


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class Word(str, enum.Enum):  # noqa: UP042 - `str()` of a member is not its value
    FULL = "full"


BAD = {
    "max_tokens": [0, -1, True, 1.0, "8", None, NAN, HUGE],
    "temperature": [-0.1, NAN, INF, -INF, True, "1", None, 1e-6, 100.5, HUGE],
    "top_p": [0, -1, 1.0001, NAN, True, "0.9", None],
    "top_k": [-2, 1.5, True, NAN, 2**31, None],
    "min_p": [-0.01, 1.01, NAN, False, "0"],
    "seed": [-1, 2**64, 1.0, True, "7", NAN],
    "n": [0, -3, 1025, True, 2.0],
    "stop": ["", [""], [1], [None], 5, b"x", None, ["a"] * 129, ["x" * 4097]],
    "stop_token_ids": [[-1], [1.0], [True], 3, "12", None, [2**31]],
    "ignore_eos": [1, 0, None, "yes"],
    "logprobs": [-1, 1.0, True, 1025, "5"],
    "prompt_logprobs": [-1, True, 1025],
    "presence_penalty": [-2.1, 2.1, NAN, True, None],
    "frequency_penalty": [-2.1, 2.1, INF],
    "repetition_penalty": [0, -1, 100.1, NAN, True],
    "logit_bias": [[], 3, {"a": 1}, {-1: 1}, {1: 101}, {1: NAN}, {True: 1}, {1: "x"}],
    "regex": ["", 3, b"a"],
    "json_schema": ["", 3, [1]],
    "ebnf": ["", 3],
}

GOOD = {
    "max_tokens": [1, 2**31 - 1, np.int64(7)],
    "temperature": [0, 0.0, 1e-5, 100, np.float32(0.5)],
    "top_p": [1e-9, 1, np.float64(0.5)],
    "top_k": [-1, 0, 1, 2**31 - 1],
    "min_p": [0, 1],
    "seed": [None, 0, 2**64 - 1],
    "n": [1, 1024],
    "stop": ["a", ["a", "b"], (), ("a",) * 128],
    "stop_token_ids": [[], (0, 1), {5}, np.array([1, 2]).tolist()],
    "logprobs": [None, 0, 20],
    "repetition_penalty": [0.01, 100],
    "logit_bias": [None, {}, {3: -100, 4: 100.0}],
    "json_schema": [{}, True, '{"type": "object"}'],
}


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, vs in BAD.items() for v in vs])
def test_unusable_values_are_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.limit
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["max_tokens", "top_p", "stop", "logit_bias"])
def test_values_that_cannot_be_written_out(name: str) -> None:
    for value in (UNWRITABLE, Unshowable()):
        with pytest.raises(InvalidRequest, match=name) as caught:
            SamplingParams(**{name: value})
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, vs in GOOD.items() for v in vs])
def test_usable_values_are_taken(name: str, value: object) -> None:
    params = SamplingParams(**{name: value})
    assert SamplingParams.from_dict(params.to_dict()) == params


def test_every_field_has_bad_values_in_this_test() -> None:
    assert set(BAD) == set(SamplingParams.__dataclass_fields__)


def test_values_are_stored_in_plain_types() -> None:
    params = SamplingParams(
        max_tokens=np.int32(4), temperature=1, top_p=np.float32(0.5), stop="x", stop_token_ids=[2]
    )
    kinds = [type(getattr(params, name)) for name in ("max_tokens", "temperature", "top_p")]
    assert kinds == [int, float, float]
    assert params.stop == ("x",)
    assert params.stop_token_ids == (2,)
    texts = SamplingParams(stop=[Word.FULL], regex=Word.FULL)
    assert [(type(text), text) for text in (*texts.stop, texts.regex)] == [(str, "full")] * 2


def test_unknown_key_names_the_nearest_one() -> None:
    with pytest.raises(InvalidRequest, match="did you mean 'temperature'") as caught:
        SamplingParams.from_dict({"temprature": 1})
    assert caught.value.field == "temprature"
    with pytest.raises(InvalidRequest, match="Known options: ebnf, "):
        SamplingParams.from_dict({"zzzz": 1})
    with pytest.raises(InvalidRequest, match="top_k"):
        SamplingParams().replace(topk=4)
    with pytest.raises(InvalidRequest, match="bits"):
        SamplingParams.from_dict({UNWRITABLE: 1})
    with pytest.raises(InvalidRequest, match="mapping"):
        SamplingParams.from_dict([("n", 1)])  # type: ignore[arg-type]


def test_only_one_grammar() -> None:
    with pytest.raises(InvalidRequest, match="regex and ebnf are both given"):
        SamplingParams(regex="a", ebnf="b")
    with pytest.raises(InvalidRequest, match="both given"):
        SamplingParams(regex="a", json_schema={})
    assert SamplingParams(json_schema=False).has_grammar
    assert not SamplingParams().has_grammar


def test_json_round_trip_turns_bias_keys_back() -> None:
    params = SamplingParams(logit_bias={5: 1.5}, stop=["a"], seed=2**64 - 1)
    assert SamplingParams.from_dict(json.loads(json.dumps(params.to_dict()))) == params
    with pytest.raises(InvalidRequest, match="logit_bias"):
        SamplingParams.from_dict({"logit_bias": {"²": 1}})


def test_frozen_copyable_hashable() -> None:
    params = SamplingParams(logit_bias={1: 2.0}, json_schema={"a": [1]})
    with pytest.raises(AttributeError):
        params.n = 2  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(params)) == params
    assert copy.deepcopy(params) == params
    assert hash(params) == hash(params.replace())


def test_caller_keeps_no_handle_on_the_bias() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 99.0
    params.to_dict()["logit_bias"][1] = 99.0
    assert params.logit_bias == {1: 2.0}


def test_with_seed_shares_the_rest() -> None:
    params = SamplingParams(logit_bias={1: 2.0}, stop="a")
    other = params.with_seed(7)
    assert other == params.replace(seed=7)
    assert other.logit_bias is params.logit_bias
    assert params.seed is None
    with pytest.raises(InvalidRequest, match="seed"):
        params.with_seed(-1)


def test_flags() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams().is_greedy
    assert not SamplingParams().has_penalties
    assert SamplingParams(repetition_penalty=1.1).has_penalties
    assert SamplingParams(frequency_penalty=-0.5).has_penalties
