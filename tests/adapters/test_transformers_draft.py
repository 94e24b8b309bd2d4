"""Models of `transformers` as targets: the same output as `generate`, with whatever drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from deepinfer.adapters import TransformersTarget  # noqa: E402
from deepinfer.core.errors import ConfigError, ShapeError  # noqa: E402
from deepinfer.core.views import DraftBatch, DraftView  # noqa: E402
from deepinfer.speculative import (  # noqa: E402
    BlockDrafter,
    DraftConfig,
    DraftModule,
    ModelDrafter,
    NgramDrafter,
    draft_training_loss,
    draw_blocks,
    speculative_generate,
)

VOCAB, PROMPT, COUNT = 40, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], 14


def model_of(kind: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.3,
    }  # fmt: skip
    if kind == "indexed":
        if not hasattr(transformers, "DeepseekV32Config"):
            pytest.skip("this version of transformers has no DeepSeek V3.2")
        del sizes["head_dim"]
        sizes |= {
            "num_key_value_heads": 4, "index_topk": 64, "first_k_dense_replace": 4, "q_lora_rank": 16, "kv_lora_rank": 16,
            "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "index_n_heads": 2, "index_head_dim": 16,
        }  # fmt: skip
        config = transformers.DeepseekV32Config(**sizes)
        return transformers.DeepseekV32ForCausalLM(config).double()
    if kind == "window":
        # Four layers of which some look back six tokens only: a cache that follows that cannot be cropped.
        config = transformers.Gemma2Config(**sizes, sliding_window=6)
        return transformers.Gemma2ForCausalLM(config).double()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).double()


def draft_of(target: TransformersTarget) -> DraftModule:
    torch.manual_seed(1)
    config = DraftConfig(
        vocab_size=VOCAB, hidden_size=32, taps=target.taps, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
        intermediate_size=32, block_size=4, rank=8,
    )  # fmt: skip
    return DraftModule(config).double()


class Mixed:
    """Proposes what the target would say, up to a place that wanders."""

    draft_length = 5

    def __init__(self, expected: list[int]) -> None:
        self._expected = [*expected, *([0] * 8)]

    def propose(self, view: DraftView, max_drafts: int) -> DraftBatch:
        at = view.positions[0] + 1 - len(PROMPT)
        drafts = self._expected[at : at + max_drafts]
        wrong = at % 4
        return DraftBatch(
            token_ids=(tuple((t + (k == wrong)) % VOCAB for k, t in enumerate(drafts)),)
        )


@pytest.mark.parametrize("kind", ["llama", "window", "indexed"])
def test_output_is_that_of_generate(kind: str) -> None:
    model = model_of(kind)
    target = TransformersTarget(model, (-1, 1, 2))
    ids = torch.tensor([PROMPT])
    whole = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False
    )
    expected = whole[0, len(PROMPT) :].tolist()
    drafters = {
        "none": None,
        "mixed": Mixed(expected),
        "n-gram": NgramDrafter(4, min_n=1),
        "block": BlockDrafter(draft_of(target).eval(), target.ends),
        "same model": ModelDrafter(TransformersTarget(model), 4),
        "other model": ModelDrafter(TransformersTarget(model_of("llama", 7)), 3),
    }
    for name, drafter in drafters.items():
        found = speculative_generate(target, drafter, PROMPT, COUNT)
        assert list(found.token_ids) == expected, name
        if name == "same model":
            assert found.stats.accepted == found.stats.drafted


def test_features_are_outputs_of_layers_and_training_sees_the_same() -> None:
    model = model_of("llama")
    target = TransformersTarget(model, (-1, 2))
    ids = torch.tensor(PROMPT)
    with torch.no_grad():
        states = model(input_ids=ids[None], output_hidden_states=True, use_cache=False)
        first = target.forward(ids[:6], num_logits=1)
        rest = target.forward(ids[6:], first.cache)
    assert first.logits.shape == (1, VOCAB)
    wanted = torch.cat([states.hidden_states[0], states.hidden_states[3]], -1)[0]
    torch.testing.assert_close(torch.cat([first.features, rest.features]), wanted)
    torch.testing.assert_close(rest.logits, states.logits[0, 6:])
    recorded = target.record(ids[None])
    torch.testing.assert_close(recorded.features[0], wanted)
    torch.testing.assert_close(target.ends.lm_head(recorded.final_hidden), states.logits)


def test_a_draft_learns_from_recorded_rows() -> None:
    target = TransformersTarget(model_of("llama"), (0, 2))
    target.model.requires_grad_(False)
    draft = draft_of(target)
    ids = torch.randint(0, VOCAB, (4, 24))
    rows = target.record(ids)
    drawn = draw_blocks(ids, 8, 4)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=5e-3)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = draft_training_loss(draft, rows.features, rows.final_hidden, drawn, target.ends)
        loss.total.backward()
        optimizer.step()
        losses.append(float(loss.total.detach()))
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("taps", [(3,), (-2,), (1, 1), (2, 0), 2, ("a",)])
def test_layers_that_cannot_be_tapped_are_refused(taps: Any) -> None:
    with pytest.raises(ConfigError, match="taps"):
        TransformersTarget(model_of("llama"), taps)


def test_models_with_a_recurrent_state_are_refused() -> None:
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    with pytest.raises(ConfigError, match="recurrent"):
        TransformersTarget(transformers.MambaForCausalLM(transformers.MambaConfig(**sizes)))


@pytest.mark.parametrize("kind", ["Lfm2", "MiniMax"])
def test_models_of_which_some_layers_are_recurrent_are_refused(kind: str) -> None:
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip(f"this version of transformers has no {kind}")
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1,
    }  # fmt: skip
    kinds = {"Lfm2": ["conv", "full_attention"], "MiniMax": ["linear_attention", "full_attention"]}
    config = getattr(transformers, f"{kind}Config")(**sizes, layer_types=kinds[kind])
    with pytest.raises(ConfigError, match="recurrent state in layers of the kind"):
        TransformersTarget(getattr(transformers, f"{kind}ForCausalLM")(config))


def test_what_is_no_causal_language_model_is_refused() -> None:
    for wrong in (model_of("llama").model, torch.nn.Linear(1, 1), "llama"):
        with pytest.raises(ConfigError, match="model"):
            TransformersTarget(wrong)


def test_nothing_is_recorded_without_taps_or_rows() -> None:
    model, ids = model_of("llama"), torch.tensor([PROMPT])
    with pytest.raises(ConfigError, match="taps"):
        TransformersTarget(model).record(ids)
    with pytest.raises(ShapeError, match="rows, tokens"):
        TransformersTarget(model, (0,)).record(ids[0])
