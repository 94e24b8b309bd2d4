"""`add_request`, `step`, `abort`, `stream`: the engine inside somebody else's loop."""

from __future__ import annotations

import gc
from collections import defaultdict

import pytest

from deepinfer import Engine, SamplingParams
from deepinfer.core import FinishReason, OutputDelta
from deepinfer.core.errors import EngineDead, InvalidRequest, RequestTooLong
from deepinfer.testing import ToyModel

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = GREEDY.replace(max_tokens=200)


def drain(engine: Engine) -> dict[str, list[OutputDelta]]:
    found: dict[str, list[OutputDelta]] = defaultdict(list)
    while engine.has_unfinished:
        for delta in engine.step():
            found[delta.rid].append(delta)
        engine.check()
    return found


class TestLoop:
    def test_deltas_add_up_to_the_output(self, make_engine) -> None:
        engine = make_engine()
        rids = [engine.add_request([5, 6, i], GREEDY) for i in range(4, 10)]
        found = drain(engine)
        assert list(found) == rids
        for i, rid in zip(range(4, 10), rids, strict=True):
            tokens = [token for delta in found[rid] for token in delta.token_ids]
            assert tokens == ToyModel().greedy([5, 6, i], 12)
            assert [delta.finished for delta in found[rid]] == [False] * 11 + [True]
            assert [delta.usage.generated for delta in found[rid]] == list(range(1, 13))
        assert engine.step() == []

    def test_requests_join_and_leave_while_others_run(self, make_engine) -> None:
        engine = make_engine()
        first = engine.add_request("abc", GREEDY.replace(max_tokens=30))
        for _ in range(5):
            engine.step()
        second = engine.add_request("de", GREEDY)
        found = drain(engine)
        assert [t for d in found[second] for t in d.token_ids] == ToyModel().greedy([0, 7, 8], 12)
        assert found[first][-1].usage.generated == 30

    def test_own_ids(self, make_engine) -> None:
        engine = make_engine()
        assert engine.add_request("abc", GREEDY, rid="mine") == "mine"
        with pytest.raises(InvalidRequest, match="'mine' is not finished"):
            engine.add_request("abc", GREEDY, rid="mine")
        engine.add_request("abc", GREEDY, rid="request-1")
        engine.add_request("abc", GREEDY)
        engine.check()
        found = drain(engine)
        assert len(found) == 3
        engine.add_request("abc", GREEDY, rid="mine")
        assert list(drain(engine)) == ["mine"]

    def test_ids_of_samples_do_not_collide_with_own_ids(self, make_engine) -> None:
        engine = make_engine()
        engine.add_request("abc", GREEDY, rid="a[1]")
        with pytest.raises(InvalidRequest, match="not finished"):
            engine.add_request("abc", GREEDY.replace(n=3), rid="a")
        engine.check()
        assert list(drain(engine)) == ["a[1]"]

    @pytest.mark.parametrize("rid", ["", 5, ["a"], 0])
    def test_unusable_ids_and_sinks_are_refused(self, make_engine, rid) -> None:
        engine = make_engine()
        for call in (engine.add_request, engine.stream):
            with pytest.raises(InvalidRequest, match="rid is "):
                call("abc", GREEDY.replace(n=2), rid=rid)
        with pytest.raises(InvalidRequest, match="sink is "):
            engine.add_request("abc", GREEDY, sink=rid)
        assert not engine.has_unfinished

    def test_samples_come_under_one_id(self, make_engine) -> None:
        engine = make_engine()
        params = SamplingParams(max_tokens=5, n=3, seed=1, ignore_eos=True)
        rid = engine.add_request("abc", params)
        found = drain(engine)[rid]
        assert sorted(delta.index for delta in found if delta.finished) == [0, 1, 2]

    def test_sinks_take_deltas(self, make_engine) -> None:
        engine = make_engine()
        taken: list[OutputDelta] = []
        rid = engine.add_request("abc", GREEDY, sink=taken.append)
        while engine.has_unfinished:
            assert engine.step() == []
        assert {delta.rid for delta in taken} == {rid}
        assert taken[-1].finished

    def test_outputs_are_kept_when_asked(self, make_engine) -> None:
        engine = make_engine()
        rid = engine.add_request("abc", GREEDY.replace(prompt_logprobs=0), keep_output=True)
        engine.step()
        assert not engine.take_output(rid)[0].finished
        drain(engine)
        output = engine.take_output(rid)[0]
        assert output.finished
        assert output.prompt_logprobs is not None
        for unknown in (rid, "other"):
            with pytest.raises(InvalidRequest, match="keep_output"):
                engine.take_output(unknown)

    def test_priority(self, make_engine) -> None:
        engine = make_engine(scheduler="priority", config={"max_num_seqs": 1})
        rids = [engine.add_request("abc", GREEDY, priority=p) for p in (2, 1, 0)]
        found = drain(engine)
        assert list(found) == rids[::-1]


class TestAbort:
    @pytest.mark.parametrize("num_steps", range(7))
    def test_at_any_step(self, make_engine, num_steps: int) -> None:
        engine = make_engine()
        other = engine.add_request("abc", GREEDY)
        rid = engine.add_request("a prompt in chunks", LONG)
        before: list[OutputDelta] = []
        for _ in range(num_steps):
            before += [delta for delta in engine.step() if delta.rid == rid]
        outputs = engine.abort(rid)
        engine.check()
        assert [output.finish_reason for output in outputs] == [FinishReason.ABORT]
        assert outputs[0].token_ids == tuple(t for d in before for t in d.token_ids)
        assert engine.abort(rid) == []
        found = drain(engine)
        assert [(d.token_ids, d.finish_reason) for d in found[rid]] == [((), FinishReason.ABORT)]
        tokens = [t for d in (*before, *found[other]) for t in d.token_ids if d.rid == other]
        assert tokens[-4:] == ToyModel().greedy([0, 4, 5, 6], 12)[-4:]

    def test_unknown_ids_are_ignored(self, make_engine) -> None:
        assert make_engine().abort("nobody") == []

    def test_all_samples_end(self, make_engine) -> None:
        engine = make_engine()
        rid = engine.add_request("abc", LONG.replace(n=5))
        engine.step()
        assert len(engine.abort(rid)) == 5
        engine.check()
        assert len(drain(engine)[rid]) == 5

    def test_from_inside_a_sink(self, make_engine) -> None:
        engine = make_engine()
        seen: list[OutputDelta] = []

        def sink(delta: OutputDelta) -> None:
            seen.append(delta)
            if len(seen) == 3:
                engine.abort(delta.rid)
                engine.abort(other)

        other = engine.add_request("def", LONG)
        engine.add_request("abc", LONG, sink=sink)
        drain(engine)
        assert [delta.finished for delta in seen] == [False] * 3 + [True]
        assert seen[-1].finish_reason is FinishReason.ABORT


class TestStream:
    def test_pieces_are_the_output(self, make_engine) -> None:
        engine = make_engine()
        whole = engine.generate("hello", GREEDY)[0]
        deltas = list(engine.stream("hello", GREEDY))
        assert "".join(delta.text for delta in deltas) == whole.text
        assert [t for delta in deltas for t in delta.token_ids] == list(whole.token_ids)
        assert deltas[-1].finish_reason is whole.finish_reason
        assert deltas[-1].usage == whole.usage

    def test_no_piece_is_taken_back_at_a_stop_string(self, make_engine) -> None:
        engine = make_engine()
        text = engine.generate("hello", GREEDY.replace(max_tokens=60))[0].text
        for start in range(5, 30, 5):
            for length in (1, 2, 4):
                stop = text[start : start + length]
                params = GREEDY.replace(max_tokens=60, stop=(stop, "never this"))
                pieces = [delta.text for delta in engine.stream("hello", params)]
                assert "".join(pieces) == text[: text.index(stop)]

    def test_bad_requests_are_refused_by_the_call(self, make_engine) -> None:
        engine = make_engine()
        with pytest.raises(RequestTooLong):
            engine.stream([5] * 600, GREEDY)
        with pytest.raises(InvalidRequest):
            engine.stream("", GREEDY)
        gc.collect()
        assert not engine.has_unfinished

    def test_refused_stream_does_not_abort_the_owner_of_its_id(self, make_engine) -> None:
        engine = make_engine()
        rid = engine.add_request("abc", GREEDY, rid="mine")
        with pytest.raises(InvalidRequest):
            engine.stream("abc", GREEDY, rid="mine")
        gc.collect()
        assert drain(engine)[rid][-1].finish_reason is FinishReason.LENGTH

    def test_closing_aborts(self, make_engine) -> None:
        engine = make_engine()
        stream = engine.stream("hello", LONG)
        next(stream)
        stream.close()
        stream.close()
        assert not engine.has_unfinished
        assert list(stream) == []
        with engine.stream("hello", LONG) as stream:
            next(stream)
        assert not engine.has_unfinished
        assert engine.stats().requests_finished == {"abort": 2}

    def test_dropping_aborts(self, make_engine) -> None:
        engine = make_engine()
        stream = engine.stream("hello", LONG)
        for count, _ in enumerate(stream):
            if count == 3:
                break
        del stream
        gc.collect()
        assert not engine.has_unfinished

    def test_a_stream_nobody_reads_holds_nothing(self, make_engine) -> None:
        engine = make_engine()
        engine.stream("hello", LONG)
        gc.collect()
        assert not engine.has_unfinished

    def test_streams_interleave(self, make_engine) -> None:
        engine = make_engine()
        rid = engine.add_request("xyz", GREEDY)
        streams = [engine.stream([5, i], GREEDY) for i in range(4, 9)]
        tokens: list[list[int]] = [[] for _ in streams]
        while any(len(part) < 12 for part in tokens):
            for part, stream in zip(tokens, streams, strict=True):
                delta = next(stream, None)
                part.extend(delta.token_ids if delta else ())
        assert tokens == [ToyModel().greedy([5, i], 12) for i in range(4, 9)]
        found = drain(engine)
        assert [t for d in found[rid] for t in d.token_ids] == ToyModel().greedy(
            [0, 27, 28, 29], 12
        )

    def test_several_samples(self, make_engine) -> None:
        deltas = list(make_engine().stream("hello", GREEDY.replace(n=2)))
        assert sum(delta.finished for delta in deltas) == 2
        assert {delta.index for delta in deltas} == {0, 1}

    def test_abort_from_outside_ends_the_stream(self, make_engine) -> None:
        engine = make_engine()
        stream = engine.stream("hello", LONG, rid="s")
        next(stream)
        engine.abort("s")
        assert [delta.finish_reason for delta in stream] == [FinishReason.ABORT]

    def test_closed_engine_ends_the_stream(self, make_engine) -> None:
        engine = make_engine()
        stream = engine.stream("hello", LONG)
        next(stream)
        engine.close()
        assert [delta.finish_reason for delta in stream] == [FinishReason.ABORT]
        with pytest.raises(EngineDead):
            engine.stream("hello", LONG)
