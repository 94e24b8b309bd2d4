"""What callers and their parts do wrong, or in the middle of something: typed errors, and an engine that goes on."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer import Engine, SamplingParams
from deepinfer.core import FinishReason, OutputDelta
from deepinfer.core.errors import ConfigError, InvalidRequest, RequestError, ShapeError
from deepinfer.core.protocols import DraftBatch, Sampled
from deepinfer.sampling import Sampler
from deepinfer.testing import ToyModel, ToyTokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
WANTED = {text: ToyModel().greedy(ToyTokenizer().encode(text), 12) for text in ("abc", "defg")}
DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def finish(engine: Engine) -> None:
    while engine.has_unfinished:
        engine.step()
    engine.check()


ACTIONS: dict[str, Callable[[Engine, Any], Any]] = {
    "abort itself": lambda engine, sink: engine.abort("a"),
    "abort the other": lambda engine, sink: engine.abort("b"),
    "add one": lambda engine, sink: engine.add_request("abc", GREEDY, rid="c", sink=sink),
    "add several": lambda engine, sink: engine.add_request("abc", GREEDY.replace(n=3), sink=sink),
    "add the same": lambda engine, sink: engine.add_request("abc", GREEDY, rid="a", sink=sink),
    "reset": lambda engine, sink: engine.reset_prefix_cache(),
    "preempt itself": lambda engine, sink: engine.preempt("a"),
    "preempt the other": lambda engine, sink: engine.preempt("b"),
    "pause": lambda engine, sink: engine.pause(),
    "look": lambda engine, sink: (
        engine.stats(),
        engine.load,
        engine.check(),
        engine.has_unfinished,
    ),
    "step": lambda engine, sink: engine.step(),
    "generate": lambda engine, sink: engine.generate("abc", GREEDY),
    "stream": lambda engine, sink: list(engine.stream("abc", GREEDY)),
    "replace": lambda engine, sink: engine.replace(scheduler="priority"),
    "close": lambda engine, sink: engine.close(),
}
REFUSED = {
    "step": RequestError, "generate": RequestError, "stream": RequestError, "replace": ConfigError,
    "add the same": InvalidRequest,
}  # fmt: skip


@DEPTHS
@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize("action", ACTIONS)
def test_what_a_sink_may_do(make_engine, drafting_model, depth: int, at: int, action: str) -> None:
    """Every request ends in exactly one delta, and what it got is right up to there."""
    engine = make_engine(drafting_model, drafter="dspark", config={"async_depth": depth})
    deltas: list[OutputDelta] = []
    errors: list[Exception] = []

    def sink(delta: OutputDelta) -> None:
        deltas.append(delta)
        if len(deltas) == at:
            try:
                ACTIONS[action](engine, sink)
            except Exception as error:
                errors.append(error)

    for rid, text in (("a", "abc"), ("b", "defg")):
        engine.add_request(text, GREEDY, rid=rid, sink=sink)
    finish(engine)
    engine.resume()
    finish(engine)
    ends = Counter((delta.rid, delta.index) for delta in deltas if delta.finished)
    assert set(ends.values()) == {1}
    assert {"a", "b"} <= {rid for rid, _ in ends}
    for rid, text in (("a", "abc"), ("b", "defg")):
        tokens = [token for delta in deltas if delta.rid == rid for token in delta.token_ids]
        assert tokens == WANTED[text][: len(tokens)]
        reasons = {delta.finish_reason for delta in deltas if delta.rid == rid and delta.finished}
        assert reasons == {FinishReason.LENGTH if len(tokens) == 12 else FinishReason.ABORT}
    assert [type(error) for error in errors] == ([REFUSED[action]] if action in REFUSED else [])
    if action != "close":
        assert list(engine.generate("abc", GREEDY)[0].token_ids) == WANTED["abc"]


@DEPTHS
@pytest.mark.parametrize("num_steps", range(14))
def test_a_request_that_is_ended_twice_ends_once(make_engine, depth: int, num_steps: int) -> None:
    """Cancelled at any moment around its end, twice, and from another thread at the same time."""
    engine = make_engine(config={"async_depth": depth})
    deltas: list[OutputDelta] = []
    params = GREEDY.replace(n=2, max_tokens=8, stop=ToyTokenizer().decode(WANTED["abc"][6:7]))
    engine.add_request("abc", params, rid="a", sink=deltas.append, keep_output=True)
    engine.add_request("defg", GREEDY, rid="b", keep_output=True)
    for _ in range(num_steps):
        engine.step()
    thread = threading.Thread(target=lambda: engine.abort("a"))
    thread.start()
    first, second = engine.abort("a"), engine.abort("a")
    thread.join()
    finish(engine)
    assert engine.abort("a") == second == []
    assert len(first) <= 2
    ends = Counter(delta.index for delta in deltas if delta.finished)
    assert ends == {0: 1, 1: 1}
    assert deltas[-1].finished
    for output in engine.take_output("a"):
        assert list(output.token_ids) == WANTED["abc"][: len(output.token_ids)]
    assert list(engine.take_output("b")[0].token_ids) == WANTED["defg"]
    assert sum(engine.stats().requests_finished.values()) == 3


@DEPTHS
def test_threads_that_share_an_engine(make_engine, drafting_model, depth: int) -> None:
    engine = make_engine(drafting_model, drafter="dspark", config={"async_depth": depth})
    wrong: list[Any] = []

    def generate() -> None:
        for text, wanted in list(WANTED.items()) * 3:
            output = engine.generate(text, GREEDY)[0]
            wrong.extend([text] * (list(output.token_ids) != wanted))

    def stream() -> None:
        for text, wanted in list(WANTED.items()) * 3:
            tokens = [token for delta in engine.stream(text, GREEDY) for token in delta.token_ids]
            wrong.extend([text] * (tokens != wanted))
            engine.stream(text, GREEDY)  # dropped at once

    def disturb() -> None:
        for number in range(30):
            engine.preempt(f"request-{number}")
            engine.check()
            engine.stats()
            if number % 10 == 0:
                engine.reset_prefix_cache()

    threads = [threading.Thread(target=target) for target in (generate, stream, disturb, generate)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    finish(engine)


@pytest.mark.parametrize("rid", [None, 5, [], {}, ("a",), np.array([1])])
def test_ids_are_text(make_engine, rid: Any) -> None:
    engine = make_engine()
    for method in (engine.abort, engine.preempt, engine.take_output):
        with pytest.raises(InvalidRequest, match="rid is"):
            method(rid)
    if rid is not None:
        with pytest.raises(InvalidRequest, match="rid is"):
            engine.add_request("abc", GREEDY, rid=rid)


def test_arrays_of_stop_ids(make_engine) -> None:
    stop = WANTED["abc"][4]
    for ids in (np.array([stop]), torch.tensor([stop]), (np.int64(stop),)):
        output = make_engine().generate("abc", GREEDY.replace(stop_token_ids=ids))[0]
        assert list(output.token_ids) == WANTED["abc"][: WANTED["abc"].index(stop) + 1]


@pytest.mark.parametrize("progress", ["x", 1, 0.5])
def test_progress_is_a_flag_or_a_function(make_engine, progress: Any) -> None:
    with pytest.raises(ConfigError, match="progress is"):
        make_engine().generate(["abc", "def"], GREEDY, progress=progress)


@pytest.mark.parametrize(
    "name", ["model", "tokenizer", "sink", "clock", "scheduler", "cache", "sampler", "drafter"]
)
@pytest.mark.parametrize("part", [5, object(), SimpleNamespace(config=None)])
def test_parts_of_the_wrong_kind(name: str, part: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} is "):
        Engine(**{"model": ToyModel(), name: part})


def test_a_class_is_no_model() -> None:
    with pytest.raises(ConfigError, match="config"):
        Engine(model=ToyModel)


@pytest.mark.parametrize("length", [-1, "x", 1.5, True])
def test_draft_lengths(length: Any) -> None:
    drafter = SimpleNamespace(draft_length=length, propose=lambda view, most: None)
    with pytest.raises(ConfigError, match=r"drafter\.draft_length"):
        Engine(model=ToyModel(), drafter=drafter)


@pytest.mark.parametrize("processors", [5, [5], None, "x", len])
def test_processors_are_functions(processors: Any) -> None:
    with pytest.raises(ConfigError, match="processors is"):
        Sampler(processors=processors)


class Choosing:
    """A sampler of the caller's, wrong from the third call on."""

    def __init__(self, choose: Callable[[torch.Tensor], Any]) -> None:
        self.choose, self.calls = choose, 0

    def __call__(self, logits: torch.Tensor, rows: Any) -> Any:
        self.calls += 1
        right = logits.argmax(-1)
        return Sampled(token_ids=right) if self.calls < 3 else self.choose(right)


@DEPTHS
@pytest.mark.parametrize(
    ("choose", "cause"),
    [
        (lambda ids: None, ShapeError),
        (lambda ids: Sampled(token_ids=ids[:1]), ShapeError),
        (lambda ids: Sampled(token_ids=ids.float()), ShapeError),
        (lambda ids: Sampled(token_ids=ids.int()), ShapeError),
        (lambda ids: Sampled(token_ids=ids.tolist()), ShapeError),
        (lambda ids: Sampled(token_ids=ids[:, None]), ShapeError),
        (lambda ids: Sampled(token_ids=ids + 1_000), None),
        (lambda ids: Sampled(token_ids=ids * 0 - 1), None),
    ],
)
def test_samplers_that_choose_nothing_of_use(make_engine, depth: int, choose, cause) -> None:
    sampler = Choosing(choose)
    engine = make_engine(sampler=sampler, config={"async_depth": depth})
    outputs = engine.generate(["abc", "defg"], GREEDY, on_error="return")
    for output, wanted in zip(outputs, WANTED.values(), strict=True):
        assert output.finish_reason is FinishReason.ERROR
        assert isinstance(output.error, RequestError)
        assert "the sampler" in str(output.error)
        assert list(output.token_ids) == wanted[: len(output.token_ids)]
        assert cause is None or isinstance(output.error.__cause__, cause)
    sampler.choose = lambda ids: Sampled(token_ids=ids)
    assert list(engine.generate("abc", GREEDY)[0].token_ids) == WANTED["abc"]


@DEPTHS
@pytest.mark.parametrize(
    "propose",
    [
        lambda rows, most: DraftBatch(token_ids=np.full((rows, most), 5)),
        lambda rows, most: DraftBatch(token_ids=torch.full((rows, 99), 5), confidences=torch.ones(rows, 99)),
        lambda rows, most: DraftBatch(token_ids=[[5, -1]] * rows, confidences=[[0.5, 0.5]] * rows),
        lambda rows, most: DraftBatch(token_ids=[[10**9]] * rows),
        lambda rows, most: DraftBatch(token_ids=[[]] * rows),
    ],
)  # fmt: skip
def test_drafts_of_any_form(make_engine, depth: int, propose: Callable[[int, int], Any]) -> None:
    drafter = SimpleNamespace(draft_length=3, propose=lambda v, most: propose(len(v.rids), most))
    engine = make_engine(drafter=drafter, config={"async_depth": depth})
    outputs = engine.generate(list(WANTED), GREEDY)
    assert [list(output.token_ids) for output in outputs] == list(WANTED.values())


class Failing(ToyTokenizer):
    """A tokenizer whose streams fail."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def stream(self) -> Any:
        def part(name: str) -> Callable[..., str]:
            def call(*ids: int) -> str:
                if name in self.names:
                    raise RuntimeError(f"planted in {name}")
                return "x" * len(ids)

            return call

        return SimpleNamespace(push=part("push"), finish=part("finish"))


@DEPTHS
@pytest.mark.parametrize("names", [("push",), ("finish",), ("push", "finish")])
def test_tokenizers_that_fail(make_engine, depth: int, names: Sequence[str]) -> None:
    engine = make_engine(tokenizer=Failing(*names), config={"async_depth": depth})
    outputs = engine.generate(["abc", "defg"], GREEDY, on_error="return")
    assert all(output.finish_reason is FinishReason.ERROR for output in outputs)
    assert all(f"planted in {names[0]}" in str(output.error) for output in outputs)
    rid = engine.add_request([5, 6], GREEDY, keep_output=True)
    engine.abort(rid)
    finish(engine)
    assert engine.take_output(rid)[0].finished


@DEPTHS
def test_sinks_of_events_that_raise_are_left_out(make_engine, caplog, depth: int) -> None:
    calls = []

    def record(event: Any) -> None:
        calls.append(event)
        raise ValueError("planted")

    config = {"async_depth": depth, "block_size": 4}
    engine = make_engine(sink=SimpleNamespace(record=record), config=config)
    outputs = engine.generate(list(WANTED), GREEDY)
    assert [list(output.token_ids) for output in outputs] == list(WANTED.values())
    assert len(calls) == 2  # one from the engine, one from the cache
    assert "planted" in caplog.text
