"""Faults that random machines found, each with the smallest input that shows it."""

from __future__ import annotations

from typing import Any

from deepinfer import Engine, SamplingParams
from deepinfer.cache import BlockCacheManager
from deepinfer.core import Request
from deepinfer.testing import MachineConfig, ToyConfig, ToyModel, ToyTokenizer, replay_actions

GREEDY = {"temperature": 0.0, "ignore_eos": True}
LONG = (4, 5, 8, 13, 20, 9, 20, 13, 8, 5, 4, 5, 8, 13, 20, 9, 20, 13, 8, 5, 4, 5, 8, 13)


def add(prompt: tuple[int, ...], **params: Any) -> tuple[str, dict[str, Any]]:
    return "add", {"prompt": prompt, "params": {**GREEDY, **params}}


def step(times: int = 1) -> tuple[str, dict[str, Any]]:
    return "step", {"times": times}


def test_queue_stays_in_order_when_a_waiting_request_gets_tokens() -> None:
    """Preempted in flight, it waits for a token that makes its uncached rest longer."""
    config = MachineConfig(
        depth=1,
        num_seqs=4,
        spare_blocks=0,
        num_host=3,
        order="shortest_uncached",
        target_step_s=1.5e-3,
    )
    drawn = {"temperature": 0.9, "ignore_eos": False}
    prompt = (11, 12, 15, 20, 7, 16, 7, 20, 15, 12, 11, 12, 15, 20, 7)
    actions = [
        add(prompt, max_tokens=6, n=3, stop_token_ids=(7,), **drawn),
        step(),
        add((4, 5, 8, 13, 20, 9), max_tokens=11, n=3, regex="toy:1:4", **drawn),
        step(2),
        add((4, 5, 8, 13), max_tokens=17, seed=3, stop_token_ids=(7,)),
    ]
    assert replay_actions(config, actions) is None


def test_logged_plan_gets_the_blocks_that_the_live_one_got() -> None:
    """A request that decodes takes blocks ahead; its logged plan took the block of the next token only."""
    actions = [add(LONG[:12], max_tokens=15, n=2)]
    assert replay_actions(MachineConfig(), actions, record=True) is None


def test_loaded_blocks_are_shared_only_once_something_was_run_behind_them() -> None:
    """Preempted before the result of its step came, a request published what a failed load had left in its blocks."""
    cache = BlockCacheManager(num_slots=2, num_blocks=4, block_size=4, num_host_blocks=4)
    ids = tuple(range(9))
    first = Request(rid="a", prompt_token_ids=ids)
    assert cache.allocate(first, None, upto=9) is not None
    cache.settle(first, ids, settled=9, step=0)
    cache.release(first, after_step=-1)
    other = Request(rid="b", prompt_token_ids=tuple(range(20, 36)))
    assert cache.allocate(other, None, upto=16) is not None
    cache.release(other, after_step=-1)
    again = Request(rid="c", prompt_token_ids=ids)
    hit = cache.lookup(again, ids, limit=8)
    assert len(hit.host_blocks) == 2
    assert cache.allocate(again, hit, upto=9) is not None
    cache.settle(
        again, ids, settled=8, step=1
    )  # as when it loses its slot before the step is collected
    cache.release(again, after_step=-1)
    late = Request(rid="d", prompt_token_ids=ids)
    assert cache.lookup(late, ids, limit=8).blocks == ()


def test_draft_context_behind_a_long_prompt_whose_window_moved_on() -> None:
    """The next chunk overwrites the rows by which the toy's draft checks the features of the one before."""
    config = MachineConfig(depth=1, drafts=2, window=2)
    assert replay_actions(config, [add(LONG, max_tokens=15, prompt_logprobs=0)]) is None


def test_tokens_discarded_by_a_reset_are_no_history_for_penalties() -> None:
    """The void row of the old epoch added its token to what the new one had sampled so far."""
    params = {"max_tokens": 9, "frequency_penalty": 1.5}
    for steps in range(1, 7):
        actions = [add((18, 19), **params), step(steps), ("reset", {}), step()]
        assert replay_actions(MachineConfig(depth=1), actions) is None


def test_preempted_twice_while_a_replay_is_cut() -> None:
    """Rows of the first resumption cut the list of known tokens, and the hit of the second reached further."""
    config = MachineConfig(drafts=4, window=2, chunk=8)
    interrupt = ("fail", {"site": "sample", "after": 3, "interrupt": True})
    actions = [add(LONG, max_tokens=17, seed=3, stop_token_ids=(7,), ignore_eos=False), step(3)]
    actions += [interrupt, step(), step(2), step(), step(), ("preempt", {"pick": 0})]
    assert replay_actions(config, actions) is None


def test_abort_of_samples_whose_sink_raises() -> None:
    def sink(delta: object) -> None:
        raise ValueError("planted")

    with Engine(model=ToyModel(), tokenizer=ToyTokenizer(), config={"device": "cpu"}) as engine:
        rid = engine.add_request((5, 6), SamplingParams(n=3, **GREEDY), sink=sink)
        engine.abort(rid)
        engine.check()


def test_tokens_behind_a_stop_string_are_not_counted_as_generated() -> None:
    """Accepted drafts after the one that completed the stop string never became output."""
    model = ToyModel(ToyConfig(dspark_block_size=4, draft_errors=0))
    config = {"device": "cpu"}
    with Engine(model=model, tokenizer=ToyTokenizer(), drafter="dspark", config=config) as engine:
        whole = engine.generate("abc", SamplingParams(max_tokens=16, **GREEDY))[0]
        before = engine.stats().generated_tokens
        params = SamplingParams(max_tokens=16, stop=whole.text[:2], **GREEDY)
        output = engine.generate("abc", params)[0]
        assert engine.stats().generated_tokens - before == output.usage.generated


def test_saves_of_a_step_that_failed_are_not_counted_on() -> None:
    """The index said that host blocks held what was never copied there."""
    config = MachineConfig(spare_blocks=0, num_host=6)
    other = tuple(4 + (7 * i) % 20 for i in range(24))
    for after in range(8):
        actions = [add(LONG, max_tokens=2), step(8), ("fail", {"site": "forward", "after": after})]
        actions += [add(other, max_tokens=9), step(9), add(LONG, max_tokens=2)]
        assert replay_actions(config, actions) is None
