"""The engine on a real DeepSeek-V4.1, small and with random weights."""

from __future__ import annotations

import gc
import runpy
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer import Engine, Output, SamplingParams
from deepinfer.core.errors import CheckpointMismatch, CheckpointMissing, InvalidRequest
from deepinfer.models import load_model, save_pretrained
from deepinfer.models.deepseek_v41 import DeepseekV41, DeepseekV41Config
from deepinfer.models.deepseek_v41.step_pass import StepPass
from deepinfer.models.deepseek_v41.weights import logical_weights

sys.path.insert(0, str(Path(__file__).parent))
from tiny_tokenizer import tokenizer_json

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "oracle_v41"
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
PROMPTS = [[(i * 7 + j * j) % 120 + 5 for j in range(1 + 5 * i)] for i in range(16)]
# Sums in another order move logits by about 1e-5; the golden set's tolerance is 2e-4.
NOISE = 1e-3


@pytest.fixture(scope="module")
def model() -> DeepseekV41:
    return load_model(GOLDEN, rounding="none")  # type: ignore[return-value]


def engine_of(model: DeepseekV41, **parts: Any) -> Engine:
    # Every layer for every token, as `model.logits` runs them.
    defaults = {"max_num_seqs": 16, "max_model_len": 256, "decoder_replay": False}
    config = {**defaults, **parts.pop("config", {})}
    return Engine(model=model, config=config, **parts)


def check_greedy(model: DeepseekV41, prompt: Sequence[int], output: Output) -> None:
    """Every token is the likeliest one after those before it, or so close to it that rounding decides."""
    logits = model.logits([*prompt, *output.token_ids])
    logits[
        :, model.config.image_token_id
    ] = -torch.inf  # stands for an image, so it is never generated
    assert output.logprobs is not None
    for index, token in enumerate(output.token_ids):
        row = logits[len(prompt) - 1 + index]
        assert float(row.max() - row[token]) < NOISE
        exact = float(torch.log_softmax(row.double(), -1)[token])
        assert output.logprobs[index].logprob == pytest.approx(exact, abs=NOISE)


def test_sixteen_at_once_and_one_at_a_time(model: DeepseekV41) -> None:
    params = GREEDY.replace(max_tokens=12)
    with engine_of(model) as engine:
        together = engine.generate(PROMPTS, params)
        engine.check()
        alone = [engine.generate(prompt, params)[0] for prompt in PROMPTS]
    for prompt, one, other in zip(PROMPTS, together, alone, strict=True):
        check_greedy(model, prompt, one)
        check_greedy(model, prompt, other)
        assert len(one.token_ids) == len(other.token_ids) == 12
    same = sum(one.token_ids == other.token_ids for one, other in zip(together, alone, strict=True))
    assert same >= 15


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks(model: DeepseekV41, chunk: int) -> None:
    with engine_of(model, config={"prefill_chunk_tokens": chunk, "max_num_seqs": 4}) as engine:
        for prompt, output in zip(PROMPTS[::4], engine.generate(PROMPTS[::4], GREEDY), strict=True):
            check_greedy(model, prompt, output)


def test_drafts(model: DeepseekV41) -> None:
    with engine_of(model, drafter="dspark") as engine:
        outputs = engine.generate(PROMPTS, GREEDY)
        engine.check()
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        check_greedy(model, prompt, output)
        assert output.usage.drafted > 0


def test_drafts_that_are_right_are_accepted(model: DeepseekV41) -> None:
    """Accepted and rejected drafts of the real cache: rings, pools and compressor tails roll back."""
    with engine_of(model) as engine:
        plain = engine.generate(PROMPTS[:6], GREEDY)

    class Cheat:
        draft_length = 5

        def propose(self, view, max_drafts):  # type: ignore[no-untyped-def]
            from deepinfer.core.protocols import DraftBatch

            rows = []
            for ids in view.token_ids:
                known = next(
                    (
                        [*prompt, *output.token_ids]
                        for prompt, output in zip(PROMPTS, plain, strict=False)
                        if [*prompt, *output.token_ids][: len(ids)] == list(ids)
                    ),
                    [],
                )
                right = list(known[len(ids) : len(ids) + len(ids) % 6])
                rows.append(tuple((right + [0] * 5)[:max_drafts]))
            return DraftBatch(token_ids=tuple(rows))

    with engine_of(model, drafter=Cheat()) as engine:
        outputs = engine.generate(PROMPTS[:6], GREEDY)
        engine.check()
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        check_greedy(model, prompt, output)
    assert sum(o.usage.accepted for o in outputs) > 40
    assert sum(o.usage.verified - o.usage.accepted for o in outputs) > 40


def test_prompt_logprobs(model: DeepseekV41) -> None:
    prompt = PROMPTS[9]
    with engine_of(model, config={"prefill_chunk_tokens": 11}) as engine:
        output = engine.generate(prompt, GREEDY.replace(prompt_logprobs=0, max_tokens=1))[0]
    exact = torch.log_softmax(model.logits(prompt).double(), -1)
    assert output.prompt_logprobs is not None
    for index, entry in enumerate(output.prompt_logprobs[1:], start=1):
        assert entry is not None
        assert entry.logprob == pytest.approx(float(exact[index - 1, prompt[index]]), abs=NOISE)


def test_image_token_is_neither_taken_nor_given(model: DeepseekV41) -> None:
    image = model.config.image_token_id
    assert image is not None
    with engine_of(model) as engine:
        with pytest.raises(InvalidRequest, match="image"):
            engine.generate([5, image, 6], GREEDY)
        wanted = GREEDY.replace(logit_bias={image: 100.0})
        outputs = engine.generate(PROMPTS[:4], wanted)
    assert all(image not in output.token_ids for output in outputs)


def test_slots_are_used_again(model: DeepseekV41) -> None:
    with engine_of(model, config={"max_num_seqs": 2}) as engine:
        outputs = engine.generate(PROMPTS[:8], GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        check_greedy(model, prompt, output)


def test_failure_in_the_middle_of_the_model(model: DeepseekV41, monkeypatch) -> None:
    """The step dies in layer 3; other requests' cache rows are unharmed and its slot is usable again."""
    with engine_of(model, config={"max_num_seqs": 2}) as engine:
        kept = engine.add_request(PROMPTS[5], GREEDY, keep_output=True)
        for _ in range(6):
            engine.step()
        original = StepPass.attend
        calls = [0]

        def fail(self, attention, *args):  # type: ignore[no-untyped-def]
            out = original(self, attention, *args)
            if attention.layer_id == 3:
                calls[0] += 1
                raise KeyboardInterrupt
            return out

        monkeypatch.setattr(StepPass, "attend", fail)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS[3], GREEDY)
        monkeypatch.undo()
        assert calls == [1]
        engine.check()
        other = engine.generate(PROMPTS[4], GREEDY)[0]
        check_greedy(model, PROMPTS[4], other)
        while engine.has_unfinished:
            engine.step()
        check_greedy(model, PROMPTS[5], engine.take_output(kept)[0])


@pytest.mark.gpu
def test_on_a_gpu(model: DeepseekV41) -> None:
    """The same near-greedy tokens, drafts included, and the memory comes back."""

    def run() -> int:
        on_gpu = load_model(GOLDEN, device="cuda", dtype=torch.float32, rounding="none")
        for drafter in (None, "dspark"):
            with engine_of(on_gpu, drafter=drafter) as engine:  # type: ignore[arg-type]
                assert engine.fingerprint()["device"].startswith("cuda")
                outputs = engine.generate(PROMPTS, GREEDY)
                assert engine.stats().graph_steps > 0
                engine.check()
            for prompt, output in zip(PROMPTS, outputs, strict=True):
                check_greedy(model, prompt, output)
        del on_gpu, engine
        gc.collect()
        return torch.cuda.memory_allocated()

    # The library of matrix products keeps a workspace a stream for the process.
    before = run()
    assert before <= 100 * 2**20
    assert run() <= before * 1.01 + 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = DeepseekV41Config(
        vocab_size=400, hidden_size=64, num_hidden_layers=5, moe_intermediate_size=32,
        num_attention_heads=4, head_dim=32, qk_rope_head_dim=8, q_lora_rank=32, o_lora_rank=32, o_groups=2,
        n_routed_experts=4, num_experts_per_tok=2, sliding_window=8, compress_ratios=(0, 2, 2, 1, 1, 0),
        kv_source_layer_ids=(1, 3), index_source_layer_ids=(1, 3, 4), candidate_source_layer_id=3,
        index_n_heads=2, index_head_dim=32, index_topk=8, candidate_topk_blocks=4, candidate_block_size=4,
        rope_scaling={"rope_type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1,
                      "original_max_position_embeddings": 64},
        max_position_embeddings=512, num_nextn_predict_layers=1, dspark_target_layer_ids=(2, 4),
        dspark_markov_rank=8, dspark_n_routed_experts=2, dspark_num_experts_per_tok=1,
        engram_layer_ids=(), bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(weight.shape, generator=generator)
        * (weight.shape[-1] ** -0.5 if len(weight.shape) > 1 else 1.0)
        for name, weight in logical_weights(config).items()
    }
    folder = tmp_path_factory.mktemp("checkpoint")
    save_pretrained(weights, folder, config=config)
    (folder / "tokenizer.json").write_text(tokenizer_json(400), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("offline_inference", ["--max-tokens", "4", "--device", "cpu"]),
        ("offline_inference", ["--max-tokens", "4", "--device", "cpu", "--drafter", "dspark"]),
        ("stream", ["a prompt"]),
        ("embed_engine", []),
    ],
)
def test_examples(folder: Path, repo_root: Path, monkeypatch, capsys, name, options) -> None:
    monkeypatch.setenv("DEEPINFER_HF_MODEL_DIR", str(folder))
    monkeypatch.setattr(sys, "argv", [name, *options])
    runpy.run_path(str(repo_root / "examples" / f"{name}.py"), run_name="__main__")
    out = capsys.readouterr().out
    expected = {
        "stream": "'import ' -> ",
        "embed_engine": "third ended by",
        "offline_inference": "tokens/s",
    }
    assert expected[name] in out


class TestCheckpoint:
    def test_text_in_text_out(self, folder: Path, no_network: None) -> None:
        with Engine.from_pretrained(folder, device="cpu", max_num_seqs=4) as engine:
            assert engine.info.eos_token_ids == (1,)
            params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
            prompts = ["def fib(n):", "The capital of France", "深度求索"]
            outputs = engine.generate(prompts, params)
            for prompt, output in zip(prompts, outputs, strict=True):
                assert output.usage.prompt == len(engine.tokenizer.encode(prompt))
                assert output.text == engine.tokenizer.decode(output.token_ids)
            pieces = [delta.text for delta in engine.stream(prompts[2], params)]
            assert "".join(pieces) == outputs[2].text
            engine.check()

    def test_messages(self, folder: Path) -> None:
        messages = [{"role": "user", "content": "user tool result"}]
        with Engine.from_pretrained(folder, device="cpu") as engine:
            ids = engine.encode_chat(messages)
            params = SamplingParams(temperature=0, max_tokens=4)
            output = engine.generate(messages, params)[0]
            assert output.usage.prompt == len(ids)
            assert output.token_ids == engine.generate(ids, params)[0].token_ids
            with pytest.raises(InvalidRequest, match="did you mean 'thinking_mode'"):
                engine.encode_chat(messages, thinking="chat")
            thinking = engine.encode_chat(messages, thinking_mode="thinking")
            assert thinking != ids
            with pytest.raises(InvalidRequest):
                engine.generate([{"role": "nobody", "content": "x"}], params)

    def test_options_and_parts(self, folder: Path) -> None:
        with Engine.from_pretrained(
            folder, config={"max_num_seqs": 2}, drafter="dspark", rounding="none", device="cpu",
            scheduler="priority", progress=False,
        ) as engine:  # fmt: skip
            assert engine.config.rounding == engine.model.rounding == "none"
            assert engine.config.max_num_seqs == 2
            output = engine.generate("def", SamplingParams(temperature=0, ignore_eos=True))[0]
            assert output.usage.drafted > 0

    def test_close_gives_the_memory_back(self, folder: Path) -> None:
        engine = Engine.from_pretrained(folder, device="cpu", drafter="dspark")
        engine.generate("def", SamplingParams(max_tokens=4))
        held = [
            weakref.ref(engine.model.embed.weight),
            weakref.ref(engine.model.mtp),
            weakref.ref(engine._parts.runner.cache.kv),
        ]
        assert all(ref() is not None for ref in held)
        engine.close()
        gc.collect()
        assert [ref() for ref in held] == [None] * 3

    def test_two_in_one_process(self, folder: Path) -> None:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        with (
            Engine.from_pretrained(folder, device="cpu") as one,
            Engine.from_pretrained(folder, device="cpu", max_num_seqs=1) as two,
        ):
            first, second = one.stream("def", params), two.stream("def", params)
            both = list(zip(first, second, strict=True))
            assert [a.token_ids for a, _ in both] == [b.token_ids for _, b in both]
            one.close()
            assert len(two.generate("def", params)[0].token_ids) == 6

    def test_what_is_not_there(self, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(CheckpointMissing):
            Engine.from_pretrained(tmp_path / "nothing")
        broken = tmp_path / "broken"
        broken.mkdir()
        for path in folder.iterdir():
            data = path.read_bytes()
            is_shard = path.suffix == ".safetensors"
            (broken / path.name).write_bytes(data[: len(data) // 2] if is_shard else data)
        with pytest.raises(CheckpointMismatch):
            Engine.from_pretrained(broken, device="cpu")
        (broken / "tokenizer.json").unlink()
        with pytest.raises(CheckpointMissing, match="tokenizer"):
            Engine.from_pretrained(broken, device="cpu")
