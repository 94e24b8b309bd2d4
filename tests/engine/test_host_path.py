"""Rows as columns: what is done for many rows at once is what was done for each of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer import SamplingParams
from deepinfer.core.errors import InvariantBroken
from deepinfer.core.plan import PlanRow, PlanRows, RowResults, RowRole
from deepinfer.core.protocols import SampleRows
from deepinfer.core.types import OutputDelta, Request, Usage
from deepinfer.engine.decode_lane import DecodeLanes
from deepinfer.engine.sample_batch import RowsOfLogits
from deepinfer.engine.step_state import SlotStates
from deepinfer.engine.token_delta import token_delta, usage_of
from deepinfer.sampling import Sampler
from deepinfer.testing import ToyModel

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def test_fast_values_are_the_values() -> None:
    usage = usage_of(1, 2, 3, 4, 5, 6, 7)
    assert usage == Usage(
        prompt=1, cached=2, replayed=3, generated=4, drafted=5, verified=6, accepted=7
    )
    delta = token_delta("a", 2, "x", 9, usage)
    assert delta == OutputDelta(rid="a", index=2, text="x", token_ids=(9,), usage=usage)
    for value in (usage, delta):
        names = {field.name for field in dataclasses.fields(value)}
        assert all(hasattr(value, name) for name in names)  # none was forgotten


def test_results_of_decoded_rows_are_those_of_the_checked_way() -> None:
    rows = PlanRows(
        ("a", "b"), [3, 1], [8, 5], [1, 1], [RowRole.DECODE] * 2, num_known=[1, 1], token_ids=[4, 5]
    )
    error = ValueError("no")
    found = RowResults.of_decoded(rows, np.array([7, 8]), {}, {1: error})
    assert found == RowResults(rows, [7, 8], errors={1: error})
    assert found[1].error is error
    assert found.with_errors({0: error})[0].error is error


def test_rows_from_a_number_on() -> None:
    rows = PlanRows(
        ("a", "b", "c"), [0, 1, 2], [8, 2, 0], [1, 1, 3],
        [RowRole.DECODE, RowRole.DECODE, RowRole.PREFILL], num_known=[1, 0, 3], token_ids=[5, 1, 2, 3],
    )  # fmt: skip
    assert rows.tail(1) == (*tuple(rows)[1:],)
    assert rows.tail(2)[0].token_ids == (1, 2, 3)
    assert rows.tail(3) == ()


class TestDecodeLanes:
    def lanes(self) -> tuple[SlotStates, DecodeLanes, PlanRows, dict[str, Request]]:
        states = SlotStates(3, ToyModel().new_cache(3, 64))
        requests = {rid: Request(rid=rid, prompt_token_ids=(5, 6)) for rid in "ab"}
        for slot, rid in enumerate("ab"):
            row = PlanRow(
                rid=rid, slot=slot, first_position=0, num_tokens=2, role=RowRole.LAST_PREFILL, token_ids=(5, 6)
            )  # fmt: skip
            states.enter(row, requests[rid])
        rows = PlanRows(
            ("a", "b"),
            [0, 1],
            [2, 2],
            [1, 1],
            [RowRole.DECODE] * 2,
            num_known=[1, 1],
            token_ids=[7, 8],
        )
        return states, DecodeLanes(states, torch.device("cpu")), rows, requests

    def test_known_ids_are_noted_and_chosen_ones_kept(self) -> None:
        states, lanes, rows, requests = self.lanes()
        lane = lanes.enter(rows, requests)
        assert lane is not None
        assert lane.ids.tolist() == [7, 8]
        assert lane.is_future is None
        assert states[1].token_ids == [5, 6, 8]
        states[1].token_ids.append(60)  # of an epoch whose tokens do not count
        lane.keep([9, -1], states)
        assert states[0].token_ids == [5, 6, 7, 9]
        assert states[1].token_ids == [5, 6, 8, 0]
        assert lane.tokens == [9, -1]
        states._latest["b"] = None  # the request began again
        states.version += 1
        lane.keep([3, 4], states)
        assert states[0].token_ids == [5, 6, 7, 3]
        assert states[1].token_ids == [5, 6, 8, 0]

    def test_slots_that_changed_are_for_others_to_look_at(self) -> None:
        states, lanes, rows, requests = self.lanes()
        first, again = lanes.enter(rows, requests), lanes.enter(rows, requests)
        assert again.company is first.company
        states.make_void(states[1])
        assert lanes.enter(rows, requests) is None
        states[1].is_void = False
        assert lanes.enter(rows, requests) is not None
        states.clear_slot(0)
        assert lanes.enter(rows, requests) is None

    def test_a_row_behind_what_is_known_is_refused(self) -> None:
        _, lanes, _, requests = self.lanes()
        late = PlanRows(
            ("a", "b"),
            [0, 1],
            [2, 4],
            [1, 1],
            [RowRole.DECODE] * 2,
            num_known=[1, 1],
            token_ids=[7, 8],
        )
        with pytest.raises(InvariantBroken, match="2 tokens of 'b', and a row starts at 4"):
            lanes.enter(late, requests)


class TestSampleRows:
    def test_custom_samplers_see_every_row_in_any_company(self, make_engine) -> None:
        seen: list[SampleRows] = []

        class Watching(Sampler):
            def __call__(self, logits: torch.Tensor, rows: SampleRows, masks: Any = None) -> Any:
                seen.append(rows)
                for at, request in enumerate(rows.requests):
                    row: PlanRow = rows.plan_rows[at]
                    assert row.rid == request.rid
                    assert rows.positions[at] == row.end_position
                    assert rows.seeds[at] == request.params.seed
                    if request.params.has_penalties:
                        done = rows.positions[at] - request.num_prompt_tokens
                        assert len(rows.output_token_ids[at]) == done
                return super().__call__(logits, rows, masks)

        params = [
            GREEDY.replace(seed=index, max_tokens=4 + index, presence_penalty=0.1 * (index % 2))
            for index in range(7)
        ]
        prompts = [[5 + index] * (2 + 3 * index) for index in range(7)]
        for depth in (0, 1):
            engine = make_engine(sampler=Watching(), config={"async_depth": depth})
            outputs = engine.generate(prompts, params)
            assert [len(output.token_ids) for output in outputs] == list(range(4, 11))
        assert any(len(rows.requests) == 3 for rows in seen)

    def test_rows_of_logits_are_a_sequence(self) -> None:
        rows = PlanRows(("a", "b"), [0, 1], [8, 2], [1, 1], [RowRole.DECODE] * 2)
        view = RowsOfLogits(rows, [1, 1, 0])
        assert [row.rid for row in view] == ["b", "b", "a"]
        assert [row.rid for row in view[1:]] == ["b", "a"]
        assert len(view) == 3

    def test_options_follow_the_requests(self) -> None:
        logits = torch.zeros(1, 8)
        logits[0, 3] = 1.0
        sampler = Sampler()

        def rows(as_type: type, **options: Any) -> SampleRows:
            params = SamplingParams(**options)
            request = Request(rid="a", prompt_token_ids=(1,), params=params)
            return SampleRows(requests=as_type([request]), positions=(4,), seeds=(1,))  # type: ignore[arg-type]

        first = rows(tuple, temperature=0)
        assert sampler(logits, first).token_ids.tolist() == [3]
        assert sampler(
            logits, rows(tuple, temperature=0, logit_bias={5: 9.0})
        ).token_ids.tolist() == [5]
        assert sampler(logits, first).token_ids.tolist() == [3]
        changing = rows(list, temperature=0)
        assert sampler(logits, changing).token_ids.tolist() == [3]
        changing.requests[:] = rows(list, temperature=0, logit_bias={6: 9.0}).requests  # type: ignore[index]
        assert sampler(logits, changing).token_ids.tolist() == [6]


class TestDelivery:
    @pytest.mark.parametrize("depth", [0, 1])
    def test_a_sink_that_wants_ends_gets_ends(self, make_engine, depth: int) -> None:
        class Ends(list):
            only_ends = True

            def __call__(self, delta: OutputDelta) -> None:
                self.append(delta)

        engine = make_engine(config={"async_depth": depth})
        ends = Ends()
        for index in range(5):
            engine.add_request([5 + index, 6], GREEDY, rid=str(index), sink=ends, keep_output=True)
        engine.add_request("abc", GREEDY, rid="told")
        told = []
        while engine.has_unfinished:
            told += engine.step()
        assert sorted(delta.rid for delta in ends) == list("01234")
        assert all(delta.finished and delta.usage.generated == 12 for delta in ends)
        assert [len(delta.token_ids) for delta in told] == [1] * 12
        for index in range(5):
            (output,) = engine.take_output(str(index))
            assert list(output.token_ids) == ToyModel().greedy([5 + index, 6], 12)
        stats = engine.stats()
        assert stats.generated_tokens == 72
        assert stats.inter_token.count == 66
        assert stats.time_to_first_token.count == 6

    def test_a_sink_may_end_another_request_of_the_same_step(self, make_engine) -> None:
        engine = make_engine()
        told: dict[str, list[str]] = {"second": [], "third": []}

        def first(delta: OutputDelta) -> None:
            if delta.usage.generated == 3:
                engine.abort("second")

        def note(delta: OutputDelta) -> None:
            told[delta.rid].append(str(delta.finish_reason))

        engine.add_request([5, 6], GREEDY, rid="first", sink=first)
        engine.add_request([7, 8], GREEDY, rid="second", sink=note)
        engine.add_request([9, 8], GREEDY, rid="third", sink=note)
        while engine.has_unfinished:
            engine.step()
        assert told["second"] == ["None", "None", "abort"]
        assert told["third"] == ["None"] * 11 + ["length"]

    def test_text_that_cannot_be_made_ends_one_request(self, make_engine) -> None:
        engine = make_engine()
        stream = engine._loop._tokenizer.stream

        def breaking() -> Any:
            detokenizer = stream()
            push, count = detokenizer.push, iter(range(100))

            def push_or_raise(token: int) -> str:
                if next(count) == 4:
                    raise ValueError("no text")
                return push(token)

            detokenizer.push = push_or_raise
            return detokenizer

        engine._loop._tokenizer.stream = breaking
        engine.add_request([5, 6], GREEDY, rid="bad", keep_output=True)
        engine._loop._tokenizer.stream = stream
        engine.add_request([7, 8], GREEDY, rid="good", keep_output=True)
        while engine.has_unfinished:
            engine.step()
        (bad,), (good,) = engine.take_output("bad"), engine.take_output("good")
        assert "no text" in str(bad.error)
        assert len(bad.token_ids) == 4
        assert list(good.token_ids) == ToyModel().greedy([7, 8], 12)

    def test_progress_in_numbers_is_progress(self, make_engine) -> None:
        engine = make_engine(config={"async_depth": 1})
        loop = engine._loop
        applied, seen = loop._pipeline._on_applied, []

        def check(flight: Any, progress: Any, began: float) -> None:
            entries = [progress[at] for at in range(len(progress))]
            tokens = progress.tokens()
            assert progress.num_tokens == sum(len(entry.token_ids) for entry in progress)
            for one, entry, token in zip(entries, progress, tokens, strict=True):
                assert (one.request, one.token_ids, one.index) == (
                    entry.request, entry.token_ids, entry.index,
                )  # fmt: skip
                goes_on = entry.finish_reason is None and entry.role is RowRole.DECODE
                assert token == (entry.token_ids[0] if goes_on else -1)
                seen.append(token)
            applied(flight, progress, began)

        loop._pipeline._on_applied = check
        engine.generate([[5 + index] * (1 + 4 * index) for index in range(6)], GREEDY)
        assert min(seen) == -1
        assert max(seen) > 0
