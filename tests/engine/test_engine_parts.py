"""Parts: given, made, replaced; options, numbers, events."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from deepinfer import Engine, EngineConfig, SamplingParams
from deepinfer.cache import SlotCacheManager
from deepinfer.core import FakeClock, MemorySink
from deepinfer.core.errors import ConfigError, UnsupportedHardware
from deepinfer.core.events import RequestAdded, RequestFinished, RequestPreempted, StepFinished
from deepinfer.engine import DSparkDrafter, cache_setup
from deepinfer.engine.cache_setup import fit_model_len
from deepinfer.engine.loading import resolve_device, resolve_dtype
from deepinfer.engine.memory import free_bytes
from deepinfer.engine.runner import ModelRunner
from deepinfer.sampling import Sampler
from deepinfer.scheduling import Scheduler, SchedulerLimits
from deepinfer.testing import ToyCache, ToyConfig, ToyModel, ToyTokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class TestReplace:
    def test_scheduler(self, make_engine) -> None:
        class Mine(Scheduler):
            pass

        engine = make_engine()
        wanted = engine.generate("abc", GREEDY)[0].token_ids
        new = engine.replace(scheduler=Mine)
        assert type(new._parts.scheduler) is Mine
        assert new.generate("abc", GREEDY)[0].token_ids == wanted
        assert "closed" in repr(engine)
        newer = new.replace(scheduler="priority", config={"max_num_seqs": 1})
        assert newer.config.max_num_seqs == 1
        assert newer.generate("abc", GREEDY)[0].token_ids == wanted
        newer.close()

    def test_drafter_and_back(self, make_engine, drafting_model) -> None:
        engine = make_engine(drafting_model, drafter="dspark")
        wanted = engine.generate("abc", GREEDY)[0]
        assert wanted.usage.drafted > 0
        plain = engine.replace(drafter=None)
        output = plain.generate("abc", GREEDY)[0]
        assert output.token_ids == wanted.token_ids
        assert output.usage.drafted == 0
        plain.close()

    def test_parts_that_stay_are_not_closed(self, make_engine, drafting_model) -> None:
        drafter = DSparkDrafter(drafting_model)
        engine = make_engine(drafting_model, drafter=drafter).replace(scheduler="priority")
        assert engine.generate("abc", GREEDY)[0].usage.drafted > 0
        engine.close()
        inner = make_engine()
        engine = make_engine(runner=inner._parts.runner).replace(scheduler="priority")
        assert engine.generate("abc", GREEDY)[0].finished
        engine.close()
        assert inner._parts.runner.cache is None

    def test_unknown_names_and_running_requests_are_refused(self, make_engine) -> None:
        engine = make_engine()
        with pytest.raises(ConfigError, match="did you mean 'scheduler'"):
            engine.replace(schedular=None)
        engine.add_request("abc", GREEDY)
        with pytest.raises(ConfigError, match="unfinished requests: 1"):
            engine.replace(drafter=None)

    def test_bad_part_leaves_the_old_engine_usable(self, make_engine) -> None:
        engine = make_engine()
        with pytest.raises(ConfigError, match="no DSpark draft"):
            engine.replace(drafter="dspark")
        assert engine.generate("abc", GREEDY)[0].finished


class TestByHand:
    def test_every_part_given(self) -> None:
        model = ToyModel()
        limits = SchedulerLimits(max_model_len=64, max_num_seqs=2)
        cache = SlotCacheManager(2, 64)
        config = EngineConfig(max_num_seqs=2, max_model_len=64)
        with Engine(model=model, config=config) as other:
            runner = ModelRunner(model, Sampler(), info=other.info, num_slots=2, max_model_len=64)
        with Engine(
            runner=runner, scheduler=Scheduler(limits, cache), cache=cache, config=config
        ) as engine:
            output = engine.generate([5, 6], GREEDY)[0]
            assert list(output.token_ids) == ToyModel().greedy([5, 6], 12)
            engine.check()

    def test_factories(self, make_engine) -> None:
        seen = []

        def cache(limits: SchedulerLimits) -> SlotCacheManager:
            seen.append(limits)
            return SlotCacheManager(1, limits.max_model_len)

        engine = make_engine(cache=cache)
        engine.generate(["a", "b"], GREEDY)
        assert seen[0].max_num_seqs == 3
        assert engine._parts.cache.num_slots == 1

    def test_nothing_given(self) -> None:
        with pytest.raises(ConfigError, match="needs a model or a runner"):
            Engine()

    @pytest.mark.parametrize(
        ("part", "value", "match"),
        [
            ("scheduler", object(), "lacks abort, add"),
            ("drafter", object(), "lacks draft_length, propose"),
            ("runner", type("R", (), {"info": None})(), "lacks"),
            ("sampler", object(), r"called with \(logits, rows\)"),
            ("sampler", Sampler, "Give an object of the class"),
            ("grammar", "json", r"called with \(params\)"),
            ("scheduler", "fcs", "did you mean 'fcfs'"),
            ("drafter", "dsparc", "did you mean 'dspark'"),
        ],
    )
    def test_parts_that_cannot_work(self, part, value, match) -> None:
        with pytest.raises(ConfigError, match=match):
            Engine(model=ToyModel(), **{part: value})


class TestOptions:
    def test_mapping_and_unknown_names(self, make_engine) -> None:
        assert make_engine(config={"max_num_seqs": 2}).config.max_num_seqs == 2
        with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'"):
            Engine(model=ToyModel(), config={"max_num_seq": 2})
        with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'"):
            Engine.from_pretrained("nano", max_num_seq=2)
        with pytest.raises(ConfigError, match="did you mean 'drafter'"):
            Engine.from_pretrained("nano", draft="dspark")

    def test_model_length(self, make_engine) -> None:
        assert make_engine().max_model_len == 512
        with pytest.raises(ConfigError, match="at most 512"):
            make_engine(config={"max_model_len": 513})

    def test_length_is_fitted_to_the_memory(self, monkeypatch) -> None:
        model = ToyModel(ToyConfig(max_position_embeddings=2**20))
        per_token = 8 + 4
        monkeypatch.setattr(
            "deepinfer.engine.cache_setup.free_bytes", lambda device: 2 * 4 * 5000 * 12
        )
        assert fit_model_len(model, 4, 512, 2**20) == 5000 // 128 * 128
        assert fit_model_len(model, 4, 512, 1000) == 1000
        assert ToyCache(1, 256).size_bytes == 256 * per_token
        monkeypatch.setattr("deepinfer.engine.cache_setup.free_bytes", lambda device: 1000)
        with pytest.raises(ConfigError, match="does not fit"):
            fit_model_len(model, 4, 512, 2**20)

    @pytest.mark.parametrize("error", [MemoryError("none"), torch.OutOfMemoryError("none")])
    def test_cache_that_cannot_be_allocated(self, make_engine, monkeypatch, error) -> None:
        def refuse(*sizes: int, **options: int) -> None:
            raise error

        monkeypatch.setattr(ToyModel, "new_cache", refuse)
        with pytest.raises(ConfigError, match="Lower max_num_seqs or max_model_len"):
            make_engine(config={"max_model_len": 64})
        error = RuntimeError("something else")
        with pytest.raises(RuntimeError, match="something else"):
            make_engine(config={"max_model_len": 64})

    def test_free_memory(self, monkeypatch, tmp_path) -> None:
        cpu = torch.device("cpu")
        monkeypatch.setattr("deepinfer.engine.memory._MEMINFO", tmp_path / "meminfo")
        assert free_bytes(cpu) > 0
        # files in the page cache take MemFree, and give way
        (tmp_path / "meminfo").write_text("MemFree: 5 kB\nMemAvailable:   70 kB\n")
        assert free_bytes(cpu) == 70 * 1024

    def test_device(self, monkeypatch) -> None:
        assert resolve_device("cpu") == "cpu"
        with pytest.raises(ConfigError, match="does not know"):
            resolve_device("gpu0")
        monkeypatch.setenv("DEEPINFER_ACCELERATOR", "cpu")
        assert resolve_device("auto") == "cpu"
        monkeypatch.setenv("DEEPINFER_ACCELERATOR", "ascend")
        with pytest.raises(UnsupportedHardware, match="pip install torch-npu"):
            resolve_device("auto")
        with pytest.raises(UnsupportedHardware, match="finds no xpu"):
            resolve_device("xpu")
        monkeypatch.delenv("DEEPINFER_ACCELERATOR")
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        assert resolve_device("auto") == "cpu"
        with pytest.raises(UnsupportedHardware, match="finds no cuda"):
            resolve_device("cuda")
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        assert (resolve_device("auto"), resolve_device("cuda:1")) == ("cuda", "cuda:1")

    def test_dtype(self) -> None:
        import torch

        assert resolve_dtype("auto") is None
        assert resolve_dtype("bfloat16") is torch.bfloat16


def test_numbers_add_up(make_engine, drafting_model) -> None:
    engine = make_engine(drafting_model, drafter="dspark")
    outputs = engine.generate(["abc", "defg", "h"], GREEDY)
    stats = engine.stats()
    assert stats.requests_added == 3
    assert stats.requests_finished == {"length": 3}
    assert stats.prefill_tokens == sum(o.usage.prompt for o in outputs)
    assert stats.generated_tokens == sum(o.usage.generated for o in outputs) == 36
    assert stats.draft_tokens_verified == sum(o.usage.verified for o in outputs)
    assert stats.draft_tokens_accepted == sum(o.usage.accepted for o in outputs)
    assert stats.requests_running == stats.requests_waiting == 0
    assert stats.kv_size_bytes > 0
    assert stats.step_seconds > 0 < stats.overhead_seconds
    assert stats.time_to_first_token.count == stats.queue.count == stats.end_to_end.count == 3
    assert stats.inter_token.p50_s is not None
    assert stats.inter_token.p99_s >= stats.inter_token.p50_s
    assert stats.step.count == stats.steps
    assert json.loads(json.dumps(stats.to_dict()))["steps"] == stats.steps
    engine.add_request("abc", GREEDY)
    engine.step()
    assert engine.load.num_running == engine.stats().requests_running == 1
    assert engine.stats().kv_used_ratio == engine.stats().cache.used_ratio > 0


def test_events(make_engine) -> None:
    sink, clock = MemorySink(), FakeClock(5.0)
    engine = make_engine(sink=sink, clock=clock)
    rid = engine.add_request("abc", GREEDY.replace(max_tokens=3))
    clock.advance(1.0)
    while engine.has_unfinished:
        engine.step()
        clock.advance(1.0)
    (added,) = sink.of_type(RequestAdded)
    (finished,) = sink.of_type(RequestFinished)
    steps = sink.of_type(StepFinished)
    assert (added.rid, added.prompt_tokens, added.time_s) == (rid, 4, 5.0)
    assert (finished.queue_seconds, finished.time_to_first_token_seconds) == (1.0, 1.0)
    assert finished.inter_token_seconds == 1.0
    assert finished.usage.generated == 3
    assert [step.generated_tokens for step in steps] == [1, 1, 1]
    assert [step.requests_running for step in steps] == [1, 1, 0]


def test_fingerprint_tells_engines_apart(make_engine, drafting_model) -> None:
    one, same = make_engine(), make_engine()
    assert one.fingerprint() == same.fingerprint()
    assert json.loads(json.dumps(one.fingerprint()))["device"] == "cpu"
    other = make_engine(drafting_model, drafter="dspark")
    assert other.fingerprint()["model"] != one.fingerprint()["model"]
    assert other.fingerprint()["parts"]["drafter"] == "DSparkDrafter"


def test_parts_can_be_looked_at() -> None:
    model, tokenizer = ToyModel(), ToyTokenizer()
    with Engine(model=model, tokenizer=tokenizer) as engine:
        assert engine.model is model
        assert engine.tokenizer is tokenizer
        assert engine.info.vocab_size == 64
        assert engine.info.eos_token_ids == (1,)
        assert repr(engine) == "Engine(ToyModel, 0 unfinished)"


def test_preemptions_are_counted_and_told(make_engine) -> None:
    sink = MemorySink()
    config = {"max_num_seqs": 2, "block_size": 2, "num_blocks": 16, "max_model_len": 32}
    engine = make_engine(sink=sink, config=config)
    engine.generate([[5, 6, 7], [8, 9, 10]], GREEDY.replace(max_tokens=20))
    told = sink.of_type(RequestPreempted)
    assert len(told) == engine.stats().preemptions > 0
    assert all(event.lost_tokens > 0 for event in told)


def test_time_target_predicts_steps(make_engine) -> None:
    engine = make_engine(config={"target_step_s": 0.5, "max_num_batched_tokens": 64})
    runner = engine._parts.runner
    collect = runner.collect

    def collect_timed(handle):  # real steps of a toy model take too little time to learn from
        seconds = 1e-3 + 1e-5 * handle.plan.num_tokens
        return dataclasses.replace(collect(handle), duration_s=seconds)

    runner.collect = collect_timed
    prompts = [[5 + i % 40] * (3 + i % 30) for i in range(60)]
    outputs = engine.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == ToyModel().greedy(prompt, 12)
    stats = engine.stats()
    assert stats.predicted_seconds > 0
    assert stats.predicted_seconds == pytest.approx(stats.predicted_measured_seconds, rel=0.05)


@pytest.mark.parametrize(
    ("options", "longest"),
    [
        ({}, 512),
        ({"max_model_len": 200}, 200),
        ({"target_step_s": 0.5}, 32_768),
        ({"target_step_s": 0.5, "max_num_batched_tokens": 1_024}, 1_024),
        ({"target_step_s": 0.5, "max_model_len": 5_000}, 5_000),
        ({"target_step_s": 0.5, "max_num_batched_tokens": 4}, 512),
        ({"target_step_s": 0.5, "prefill_chunk_tokens": 96}, 96),
    ],
)
def test_time_bounds_chunks_when_there_is_a_target(options, longest) -> None:
    model = ToyModel(ToyConfig(max_position_embeddings=65_536))
    config = {"max_num_seqs": 1, "num_blocks": 400, **options}
    with Engine(model=model, config=config) as engine:
        assert engine._parts.limits.prefill_chunk_tokens == longest


def test_chunks_by_time_leave_memory_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model:
        device = torch.device("cpu")

        def new_cache(self, num_slots: int, tokens: int, step_tokens: int) -> SimpleNamespace:
            return SimpleNamespace(size_bytes=num_slots * (tokens * 3 + (step_tokens + 64) * 7))

    config = EngineConfig(target_step_s=0.5, max_num_seqs=4)
    for share, chunk in ((1.0, 32_768), (0.99, 16_384), (0.2, 4_096), (0.001, 512)):
        free = int(8 * share * 4 * 7 * 32_768)
        monkeypatch.setattr(cache_setup, "free_bytes", lambda device, free=free: free)
        assert cache_setup.fit_chunk(Model(), config, 65_536) == chunk


def test_a_chunk_is_as_long_as_its_time(make_engine) -> None:
    model = ToyModel(ToyConfig(max_position_embeddings=65_536))
    config = {
        "target_step_s": 0.0085, "prefill_chunk_tokens": None, "max_num_batched_tokens": 32_768,
        "num_blocks": 200, "max_num_seqs": 1,
    }  # fmt: skip
    engine = make_engine(model, config=config)
    runner, sizes = engine._parts.runner, []
    collect = runner.collect

    def collect_timed(handle):
        sizes.append(handle.plan.num_tokens)
        return dataclasses.replace(collect(handle), duration_s=1e-3 + 1e-5 * sizes[-1])

    runner.collect = collect_timed
    for length in (100, 200, 450, 300, 60, 350) * 3:
        engine.generate([[5 + i % 40 for i in range(length)]], GREEDY.replace(max_tokens=4))
    sizes.clear()
    engine.generate([[5 + i % 50 for i in range(3_000)]], GREEDY.replace(max_tokens=1))
    assert max(sizes) == pytest.approx(750, rel=0.05)
    assert sum(size > 650 for size in sizes) >= 3


@pytest.mark.parametrize("depth", [0, 1])
def test_a_runner_that_changes_hands_begins_with_empty_slots(depth) -> None:
    """Ids and slot generations start over, so what its slots held must not be taken for the new engine's."""
    model = ToyModel()
    with Engine(model=model) as engine:
        info = engine.info
    runner = ModelRunner(model, Sampler(), info=info, num_slots=3, max_model_len=64)
    engine = Engine(runner=runner, config={"max_num_seqs": 3, "async_depth": depth})
    for prompt in ([5, 6, 7], [5, 6, 7], [9]):
        output = engine.generate(prompt, GREEDY)[0]
        assert list(output.token_ids) == ToyModel().greedy(prompt, 12)
        engine = engine.replace(scheduler="priority")
    engine.close()


def test_a_runner_with_too_few_slots() -> None:
    model = ToyModel()
    with Engine(model=model) as engine:
        info = engine.info
    runner = ModelRunner(model, Sampler(), info=info, num_slots=3, max_model_len=64)
    with pytest.raises(ConfigError, match=r"max_num_seqs is 4 .* at most 3"):
        Engine(runner=runner, config={"max_num_seqs": 4})
    with Engine(runner=runner, config={"max_num_seqs": 2}) as engine:
        assert list(engine.generate([5], GREEDY)[0].token_ids) == ToyModel().greedy([5], 12)


def test_flags_are_flags(make_engine) -> None:
    engine = make_engine()
    with pytest.raises(ConfigError, match="keep_output"):
        engine.add_request("abc", GREEDY, keep_output=1)
    with pytest.raises(ConfigError, match="packed"):
        Engine.from_pretrained("nano", packed="no")
    with pytest.raises(ConfigError, match="'blocks'"):
        make_engine(cache="pages")
