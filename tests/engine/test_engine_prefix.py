"""Prefix hits through the whole engine: what is reused, what is run again, and what the output says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer import Engine, Output, SamplingParams
from deepinfer.cache import SlotCacheManager
from deepinfer.core import CacheCopy, CopyKind
from deepinfer.core.errors import ConfigError, InvalidRequest
from deepinfer.models import load_model
from deepinfer.models.deepseek_v41 import DeepseekV41
from deepinfer.testing import ToyConfig, ToyModel, ToyTokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = [(i * i) % 50 + 5 for i in range(60)]
WINDOW = 3
BLOCKS = {"block_size": 4, "num_blocks": 60, "max_model_len": 96, "prefill_chunk_tokens": 64}
GOLDEN = Path(__file__).resolve().parents[1] / "data" / "oracle_v41"


def windowed(**options: Any) -> ToyModel:
    return ToyModel(ToyConfig(sliding_window=WINDOW, **options))


def one(engine: Engine, prompt: list[int], params: SamplingParams = GREEDY) -> Output:
    output = engine.generate(prompt, params)[0]
    engine.check()
    return output


@pytest.mark.parametrize("depth", [0, 1])
class TestToy:
    def test_cold_and_warm_without_windows(self, make_engine, depth: int) -> None:
        engine = make_engine(config={**BLOCKS, "async_depth": depth})
        cold, warm = one(engine, PROMPT), one(engine, PROMPT)
        other = one(engine, [*PROMPT[:30], 7, 8, 9])
        assert (cold.usage.cached, cold.usage.replayed) == (0, 0)
        assert (warm.usage.cached, warm.usage.replayed) == (56, 0)
        assert other.usage.cached == 28
        assert not warm.approximate_prefix
        assert list(warm.token_ids) == list(cold.token_ids) == ToyModel().greedy(PROMPT, 8)
        assert list(other.token_ids) == ToyModel().greedy([*PROMPT[:30], 7, 8, 9], 8)
        stats = engine.stats()
        assert stats.cache.hit_tokens_total == 56 + 28
        assert stats.cache.reread_tokens_total == 0

    @pytest.mark.parametrize("narrows", [False, True])
    def test_exact_replay(self, make_engine, depth: int, narrows: bool) -> None:
        config = {**BLOCKS, "async_depth": depth, "replay": "exact"}
        engine = make_engine(windowed(narrows=narrows), config=config)
        wanted = windowed().greedy(PROMPT, 8)
        cold, warm = one(engine, PROMPT), one(engine, PROMPT)
        assert list(cold.token_ids) == list(warm.token_ids) == wanted
        assert warm.usage.cached == 56
        last = min(56, 60 - WINDOW) if narrows else 56
        assert warm.usage.replayed == 56 - (last - 2 * (WINDOW - 1) - 1)
        assert not warm.approximate_prefix
        assert engine.stats().replayed_tokens == warm.usage.replayed

    def test_bounded_replay_says_so(self, make_engine, depth: int) -> None:
        engine = make_engine(windowed(), config={**BLOCKS, "async_depth": depth})
        prompt = PROMPT[:57]  # its last token sees the rows that the replay begins with
        cold, warm = one(engine, prompt), one(engine, prompt)
        assert warm.approximate_prefix
        assert not cold.approximate_prefix
        assert (warm.usage.cached, warm.usage.replayed) == (56, WINDOW)
        assert list(cold.token_ids) == windowed().greedy(prompt, 8)
        assert warm.token_ids != cold.token_ids  # the toy shows every row that differs

    def test_bounded_replay_is_a_run_that_begins_late(self, make_engine, depth: int) -> None:
        """The oracle of a bounded replay: the rows of the whole prompt, and windows that begin at its start."""
        engine = make_engine(windowed(), config={**BLOCKS, "async_depth": depth})
        prompt = PROMPT[:57]
        one(engine, prompt)
        warm = one(engine, prompt)
        model = windowed()
        cache = model.new_cache(1, 96, 96)
        cache.write(0, 0, torch.tensor(PROMPT[:56]))
        cache.adopted[0] = 56
        cache._ring_positions[0] = -1
        start = 56 - WINDOW
        cache.write(0, start, torch.tensor(PROMPT[start:56]), window_start=start, pool_start=56)
        ids = prompt[56:]
        tokens: list[int] = []
        for _ in range(8):
            begin = cache.lengths[0]
            cache.write(0, begin, torch.tensor(ids), window_start=start, pool_start=56)
            end = cache.lengths[0]
            logits = model.compute_logits(cache.digests(0, end - 1, end).unsqueeze(1))
            ids = [int(logits.argmax())]
            tokens += ids
        assert list(warm.token_ids) == tokens

    @pytest.mark.parametrize("length", [11, 12, 13, 57, 60, 61])
    def test_block_borders_with_preemption(self, make_engine, depth: int, length: int) -> None:
        """B17: prompts around multiples of the block, again and again, with the slot lost on the way."""
        config = {**BLOCKS, "async_depth": depth, "replay": "exact"}
        prompt = (PROMPT * 2)[:length]
        for model in (ToyModel(), windowed(narrows=True)):
            engine = make_engine(model, config=config)
            wanted = type(model)(model.config).greedy(prompt, 8)
            for steps in (0, 2, 5):
                rid = engine.add_request(prompt, GREEDY, keep_output=True)
                for _ in range(steps):
                    engine.step()
                engine.preempt(rid)
                while engine.has_unfinished:
                    engine.step()
                    engine.check()
                assert list(engine.take_output(rid)[0].token_ids) == wanted
            stats = engine.stats().cache
            if not model.config.sliding_window or length > 50:
                assert stats.reread_tokens_total > 0  # and not among the hits
            assert stats.hit_tokens_total <= 2 * length

    def test_drafts_behind_a_hit(self, make_engine, depth: int) -> None:
        config = {**BLOCKS, "async_depth": depth, "replay": "exact"}
        model = windowed(dspark_block_size=4, narrows=True)
        engine = make_engine(model, drafter="dspark", config=config)
        for _ in range(2):
            output = one(engine, PROMPT)
            assert list(output.token_ids) == windowed().greedy(PROMPT, 8)
            assert output.usage.drafted > 0
        assert output.usage.cached == 56

    def test_prompt_logprobs_run_everything(self, make_engine, depth: int) -> None:
        engine = make_engine(windowed(narrows=True), config={**BLOCKS, "async_depth": depth})
        one(engine, PROMPT)
        output = one(engine, PROMPT, GREEDY.replace(prompt_logprobs=0))
        assert output.usage.cached == 0
        exact = torch.log_softmax(windowed().logits(PROMPT).double(), -1)
        assert output.prompt_logprobs is not None
        for index, entry in enumerate(output.prompt_logprobs[1:], start=1):
            assert entry is not None
            assert entry.logprob == pytest.approx(float(exact[index - 1, PROMPT[index]]), abs=1e-5)

    def test_samples_of_one_prompt_share_it(self, make_engine, depth: int) -> None:
        engine = make_engine(config={**BLOCKS, "async_depth": depth, "max_num_seqs": 1})
        outputs = engine.generate(PROMPT, GREEDY.replace(n=3, temperature=0.9, seed=1))
        assert [o.usage.cached for o in outputs] == [0, 56, 56]

    def test_a_reset_forgets(self, make_engine, depth: int) -> None:
        engine = make_engine(config={**BLOCKS, "async_depth": depth})
        one(engine, PROMPT)
        assert one(engine, PROMPT).usage.cached == 56
        engine.reset_prefix_cache()
        assert one(engine, PROMPT).usage.cached == 0

    def test_salts_keep_tenants_apart(self, make_engine, depth: int) -> None:
        engine = make_engine(config={**BLOCKS, "async_depth": depth, "num_blocks": 400})
        found = []
        for salt in (None, "a", "b", "a", None, "salt:a", "\ud800", "\ud800"):
            output = engine.generate(PROMPT, GREEDY, cache_salt=salt)[0]
            assert list(output.token_ids) == ToyModel().greedy(PROMPT, 8)
            found.append(output.usage.cached)
        assert found == [0, 0, 0, 56, 56, 0, 0, 56]
        last = list(engine.stream(PROMPT, GREEDY, cache_salt="c"))[-1]
        assert last.usage.cached == 0
        assert list(engine.stream(PROMPT, GREEDY, cache_salt="c"))[-1].usage.cached == 56
        engine.add_request(PROMPT, GREEDY, cache_salt="d", rid="x", keep_output=True)
        engine.add_request(PROMPT, GREEDY, cache_salt="b", rid="y", keep_output=True)
        while engine.has_unfinished:
            engine.step()
        assert [engine.take_output(rid)[0].usage.cached for rid in "xy"] == [0, 56]
        engine.check()

    @pytest.mark.parametrize("salt", ["", b"a", 1])
    def test_salts_are_text(self, make_engine, depth: int, salt: Any) -> None:
        engine = make_engine(config={**BLOCKS, "async_depth": depth})
        for call in (engine.generate, engine.stream, engine.add_request):
            with pytest.raises(InvalidRequest, match="cache_salt"):
                call(PROMPT, GREEDY, cache_salt=salt)

    def test_off(self, make_engine, depth: int) -> None:
        engine = make_engine(config={**BLOCKS, "async_depth": depth, "prefix_cache": False})
        one(engine, PROMPT)
        assert one(engine, PROMPT).usage.cached == 0
        engine = make_engine(cache="slots", config={**BLOCKS, "async_depth": depth})
        assert isinstance(engine._parts.cache, SlotCacheManager)
        one(engine, PROMPT)
        assert one(engine, PROMPT).usage.cached == 0


@pytest.mark.parametrize("depth", [0, 1])
class TestHostTier:
    """A device for one request and a half, and host memory for the others."""

    def engine(self, make_engine: Any, depth: int, **options: Any) -> Engine:
        config = {
            **BLOCKS, "num_blocks": 26, "async_depth": depth, "host_cache_bytes": 80 * 60,
            "replay": "exact", "max_num_seqs": 1, **options,
        }  # fmt: skip
        return make_engine(windowed(narrows=True), config=config)

    def prompts(self) -> list[list[int]]:
        return [[first, *PROMPT[1:]] for first in (5, 6, 7)]

    def test_blocks_come_back(self, make_engine, depth: int) -> None:
        engine = self.engine(make_engine, depth)
        for _ in range(2):
            for prompt in self.prompts():
                output = one(engine, prompt)
                assert list(output.token_ids) == windowed().greedy(prompt, 8)
        stats = engine.stats()
        assert stats.cache.host_hit_tokens_total > 0
        assert stats.host_copies > 0 == stats.host_copies_failed
        assert stats.host_size_bytes == 80 * 60
        assert output.usage.cached == 56

    @pytest.mark.parametrize("kind", [CopyKind.LOAD_BLOCK, CopyKind.SAVE_BLOCK])
    @pytest.mark.parametrize("failing", [1, 2, 1000])
    def test_failed_copies(self, make_engine, depth: int, kind: CopyKind, failing: int) -> None:
        """B46, B50: a copy that fails costs its request the prefix and nothing else."""
        engine = self.engine(make_engine, depth)
        left = [failing]

        def hook(copy: CacheCopy) -> None:
            if copy.kind is kind and left[0]:
                left[0] -= 1
                raise OSError("planted")

        engine._parts.runner.host_tier.hook = hook
        for _ in range(3):
            for prompt in self.prompts():
                output = one(engine, prompt)
                assert list(output.token_ids) == windowed().greedy(prompt, 8)
                assert output.error is None
        stats = engine.stats()
        assert stats.host_copies_failed > 0
        assert stats.failed_steps == 0
        if kind is CopyKind.LOAD_BLOCK:
            assert stats.cache.failed_loads_total > 0

    def test_a_neighbour_of_a_failed_load_is_unharmed(self, make_engine, depth: int) -> None:
        engine = self.engine(make_engine, depth, max_num_seqs=2, num_blocks=44)
        for prompt in self.prompts():
            one(engine, prompt)

        def hook(copy: CacheCopy) -> None:
            if copy.kind is CopyKind.LOAD_BLOCK:
                raise OSError("planted")

        engine._parts.runner.host_tier.hook = hook
        neighbour = engine.add_request([9, 8, 7], GREEDY.replace(max_tokens=20), keep_output=True)
        engine.step()
        for prompt in self.prompts():
            assert list(one(engine, prompt).token_ids) == windowed().greedy(prompt, 8)
        while engine.has_unfinished:
            engine.step()
        assert list(engine.take_output(neighbour)[0].token_ids) == windowed().greedy([9, 8, 7], 20)

    def test_freed_host_blocks_hold_nothing_of_others(self, make_engine, depth: int) -> None:
        """B49: what is in a host block when it is free is never seen."""
        engine = self.engine(make_engine, depth, host_cache_bytes=80 * 10)
        tier = engine._parts.runner.host_tier
        run = tier.run

        def poison(copies: Any, cache: Any, before: Any = None) -> Any:
            for copy in copies:
                if copy.kind is CopyKind.SAVE_BLOCK:
                    tier._blocks[copy.host] = 0xAA
            return run(copies, cache, before)

        tier.run = poison
        for _ in range(3):
            for prompt in self.prompts():
                assert list(one(engine, prompt).token_ids) == windowed().greedy(prompt, 8)
        assert engine.stats().host_copies > 10

    def test_window_slots_make_hits_exact(self, make_engine, depth: int) -> None:
        engine = self.engine(
            make_engine, depth, num_window_slots=4, num_blocks=60, replay="off", host_cache_bytes=0
        )
        first = one(engine, PROMPT[:24], GREEDY.replace(max_tokens=2))
        assert first.usage.cached == 0
        again = [*PROMPT[:24], *first.token_ids, *PROMPT[24:50]]
        output = one(engine, again)
        assert list(output.token_ids) == windowed().greedy(again, 8)
        assert (output.usage.cached, output.usage.replayed) == (24, 0)
        assert not output.approximate_prefix
        assert engine.stats().cache.window_hits_total == 1

    def test_failed_load_of_windows(self, make_engine, depth: int) -> None:
        engine = self.engine(
            make_engine, depth, num_window_slots=4, num_blocks=60, replay="off", host_cache_bytes=0
        )

        def hook(copy: CacheCopy) -> None:
            if copy.kind is CopyKind.LOAD_WINDOWS:
                raise OSError("planted")

        engine._parts.runner.host_tier.hook = hook
        first = one(engine, PROMPT[:24], GREEDY.replace(max_tokens=2))
        again = [*PROMPT[:24], *first.token_ids, *PROMPT[24:50]]
        output = one(engine, again)
        assert list(output.token_ids) == windowed().greedy(again, 8)
        assert engine.stats().host_copies_failed == 1


def test_host_memory_too_small_for_a_block(make_engine) -> None:
    with pytest.raises(ConfigError, match="host_cache_bytes is 10"):
        Engine(model=ToyModel(), config={**BLOCKS, "host_cache_bytes": 10})


class TestOwners:
    def test_part_of_two_engines_is_refused(self, make_engine) -> None:
        drafter = type("Drafter", (), {"draft_length": 2, "propose": lambda *a: None})()
        cache = SlotCacheManager(3, 64)
        engine = make_engine(drafter=drafter, cache=cache, config={"max_model_len": 64})
        for parts in ({"drafter": drafter}, {"cache": cache}):
            with pytest.raises(ConfigError, match="another engine uses"):
                Engine(model=ToyModel(), tokenizer=ToyTokenizer(), **parts)
        engine.check()
        engine.close()
        with Engine(model=ToyModel(), cache=cache, config={"max_num_seqs": 3, "max_model_len": 64}):
            pass

    def test_failed_replacement_keeps_the_parts(self, make_engine) -> None:
        cache = SlotCacheManager(3, 64)
        engine = make_engine(cache=cache, config={"max_model_len": 64})
        with pytest.raises(ConfigError):
            engine.replace(sampler=3)
        with pytest.raises(ConfigError, match="another engine uses"):
            Engine(model=ToyModel(), cache=cache)
        engine = engine.replace(scheduler="priority")
        assert engine.generate([5, 6], GREEDY)[0].finished
        engine.close()

    def test_cache_of_a_closed_engine_starts_empty(self, make_engine) -> None:
        """What its books say is in memory that is gone."""
        from deepinfer.cache import BlockCacheManager

        cache = BlockCacheManager(num_slots=3, num_blocks=60, block_size=4, max_tokens=96)
        config = {"max_num_seqs": 3, "max_model_len": 96}
        with Engine(model=ToyModel(), cache=cache, config=config) as engine:
            one(engine, PROMPT)
            assert one(engine, PROMPT).usage.cached == 56
        with Engine(model=ToyModel(), cache=cache, config=config) as engine:
            output = one(engine, PROMPT)
            assert output.usage.cached == 0
            assert list(output.token_ids) == ToyModel().greedy(PROMPT, 8)


@pytest.fixture(scope="module")
def model() -> DeepseekV41:
    return load_model(GOLDEN, rounding="full")  # type: ignore[return-value]


LONG = [(i * 7 + i * i) % 120 + 5 for i in range(230)]


class TestRealModel:
    @pytest.mark.parametrize("depth", [0, 1])
    def test_deterministic_engines_are_warm_as_cold(self, model: DeepseekV41, depth: int) -> None:
        """B43: cold, cold, warm, warm: the same bits, and the warm ones really hit."""
        config = {
            "deterministic": True, "async_depth": depth, "max_model_len": 256, "block_size": 8,
            "max_num_seqs": 2,
        }  # fmt: skip
        params = GREEDY.replace(logprobs=2)
        found = []
        hits = 0
        for _ in range(2):
            with Engine(model=model, config=config) as engine:
                for _ in range(2):
                    output = one(engine, LONG, params)
                    found.append((output.token_ids, output.logprobs))
                    assert not output.approximate_prefix
                    hits += output.usage.cached > 0
        assert hits == 2
        assert found == [found[0]] * 4
        assert not model.deterministic

    def test_bounded_hits_are_marked(self, model: DeepseekV41) -> None:
        config = {"max_model_len": 256, "block_size": 8, "max_num_seqs": 2}
        with Engine(model=model, config=config) as engine:
            cold, warm = one(engine, LONG), one(engine, LONG)
        assert warm.approximate_prefix
        assert not cold.approximate_prefix
        assert warm.usage.cached == 224
        assert warm.usage.replayed == model.config.sliding_window

    @pytest.mark.parametrize("drafter", [None, "dspark"])
    def test_depths_agree_bit_for_bit(self, model: DeepseekV41, drafter: str | None) -> None:
        prompts = [LONG[: 20 + 30 * i] for i in range(5)]
        params = [GREEDY.replace(max_tokens=10 + i, logprobs=0) for i in range(5)]
        params[2] = params[2].replace(temperature=0.8, seed=3, frequency_penalty=0.5)
        found = []
        for depth in (0, 1):
            config = {
                "deterministic": True, "async_depth": depth, "max_model_len": 256,
                "block_size": 16, "max_num_seqs": 3, "prefill_chunk_tokens": 48,
            }  # fmt: skip
            with Engine(model=model, config=config, drafter=drafter) as engine:
                outputs = engine.generate(prompts, params)
                engine.check()
            found.append([(o.token_ids, o.logprobs) for o in outputs])
        assert found[0] == found[1]

    def test_host_tier_and_window_slots(self, model: DeepseekV41) -> None:
        config = {
            "deterministic": True, "max_model_len": 256, "block_size": 8, "num_blocks": 40,
            "max_num_seqs": 1, "host_cache_bytes": 1 << 20, "num_window_slots": 4,
        }  # fmt: skip
        prompts = [[first, *LONG[1:]] for first in (5, 6, 7)]
        with Engine(model=model, config=config) as engine:
            cold = [one(engine, prompt).token_ids for prompt in prompts]
            warm = [one(engine, prompt).token_ids for prompt in prompts]
            stats = engine.stats()
        assert cold == warm
        assert stats.cache.host_hit_tokens_total > 0
        assert stats.host_copies_failed == 0

    @pytest.mark.parametrize("drafter", [None, "dspark"])
    def test_window_slots_hold_every_layer_that_runs(
        self, model: DeepseekV41, drafter: str | None
    ) -> None:
        """Without layers that stop early a hit needs the windows of all, and is exact behind any tail."""
        config = {
            "deterministic": True, "max_model_len": 256, "block_size": 8, "num_blocks": 80,
            "max_num_seqs": 2, "num_window_slots": 4, "decoder_replay": False, "replay": "off",
        }  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
        with Engine(
            model=model, config={**config, "num_window_slots": 0}, drafter=drafter
        ) as engine:
            first = engine.generate(LONG[:200], params)[0]
            said = [*LONG[:200], *first.token_ids]
            prompts = [[*said, *tail] for tail in ([], [9], [9, 8, 7, 6, 5] * 4)]
            cold = [engine.generate(prompt, params)[0] for prompt in prompts]
        assert [o.usage.cached for o in cold] == [0, 0, 0]
        with Engine(model=model, config=config, drafter=drafter) as engine:
            assert engine.generate(LONG[:200], params)[0].token_ids == first.token_ids
            warm = [engine.generate(prompt, params)[0] for prompt in prompts]
            assert engine.stats().cache.window_hits_total == 3
            engine.check()
        assert all(o.usage.cached >= 200 and o.usage.replayed == 0 for o in warm)
        assert not any(o.approximate_prefix for o in warm)
        assert [(o.token_ids, o.logprobs) for o in warm] == [
            (o.token_ids, o.logprobs) for o in cold
        ]
