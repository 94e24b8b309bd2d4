"""Generation with drafts is generation without them, whoever drafts; and the counts are those of the output."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from tiny_target import HIDDEN, TAPS, VOCAB, TinyTarget

from deepinfer.core.errors import ConfigError, InvalidLogits, ShapeError
from deepinfer.core.types import FinishReason
from deepinfer.core.views import DraftBatch, DraftView
from deepinfer.speculative import (
    BlockDrafter,
    CounterNoise,
    DraftConfig,
    DraftModule,
    DrawStream,
    ModelDrafter,
    NgramDrafter,
    speculative_generate,
)

PROMPT = [3, 1, 4, 1, 5]


class Scripted:
    """Drafts by a function of the text; records features that it is shown."""

    def __init__(self, propose: Callable[[list[int], int], Sequence[int]], length: int = 4) -> None:
        self._propose = propose
        self.draft_length = length
        self.settled: list[int] = []
        self.rows: list[Tensor] = []

    def propose(self, view: DraftView, max_drafts: int) -> DraftBatch:
        text = list(view.token_ids[0])
        assert view.positions == (len(text) - 1,)
        assert view.anchor_ids == (text[-1],)
        return DraftBatch(token_ids=(tuple(self._propose(text, max_drafts)),))

    def observe(self, features: Tensor, positions: Sequence[int], slots: Sequence[int]) -> None:
        self.settled += positions
        self.rows += features


def oracle(target: TinyTarget, right: int = 99) -> Scripted:
    """Proposes what the target would say, and from place `right` on something else."""

    def propose(text: list[int], count: int) -> list[int]:
        own = target.alone(text, count)
        return [token if at < right else (token + 1) % VOCAB for at, token in enumerate(own)]

    return Scripted(propose)


def block_drafter(target: TinyTarget, seed: int = 0) -> BlockDrafter:
    torch.manual_seed(seed)
    config = DraftConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, taps=TAPS, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
        intermediate_size=16, block_size=3, rank=4,
    )  # fmt: skip
    module = DraftModule(config).eval()
    torch.nn.init.normal_(module.head.output.weight)
    return BlockDrafter(module, target.ends)


def drafters(target: TinyTarget, seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {
        "none": None,
        "right": oracle(target),
        "wrong": oracle(target, 0),
        "wrong at the second place": oracle(target, 1),
        "wrong at the last place": oracle(target, 3),
        "random": Scripted(lambda text, n: random.integers(0, VOCAB, n).tolist()),
        "of changing length": Scripted(
            lambda text, n: target.alone(text, n)[: len(text) % (n + 1)]
        ),
        "empty": Scripted(lambda text, n: ()),
        "too many": Scripted(lambda text, n: target.alone(text, n + 7)),
        "negative": Scripted(lambda text, n: [target.alone(text, 1)[0], -1, 0, 0][:n]),
        "outside": Scripted(lambda text, n: [VOCAB, 0, VOCAB + 7]),
        "huge": Scripted(lambda text, n: [2**62] * n),
        "n-gram": NgramDrafter(4, min_n=1),
        "block": block_drafter(target, seed),
        "same model": ModelDrafter(TinyTarget(seed), 4),
        "other model": ModelDrafter(TinyTarget(seed + 50), 3),
    }


@pytest.mark.parametrize("seed", range(1, 5))
def test_greedy_output_is_that_of_the_target_alone(seed: int) -> None:
    target = TinyTarget(seed)
    expected = tuple(target.alone(PROMPT, 16))
    for name, drafter in drafters(target, seed).items():
        # Twice: a drafter that served a sequence before starts anew.
        for prompt in (PROMPT, PROMPT):
            found = speculative_generate(target, drafter, prompt, 16)
            assert found.token_ids == expected, name
            assert found.finish_reason is FinishReason.LENGTH
            assert found.stats.tokens == 15


@pytest.mark.parametrize("seed", range(3))
def test_sampled_output_depends_on_the_seed_alone(seed: int) -> None:
    target = TinyTarget(seed)
    text = list(PROMPT)
    noise = CounterNoise([11])
    for _ in range(14):
        _, final = target.states(torch.tensor([text]))
        law = torch.log_softmax(target.lm_head(final[0, -1]) / 0.8, -1)
        drawn = noise.gumbel([0], [len(text)], VOCAB, DrawStream.SHARED)[0]
        text.append(int((law + torch.from_numpy(drawn)).argmax()))
    for name, drafter in drafters(target, seed).items():
        found = speculative_generate(target, drafter, PROMPT, 14, temperature=0.8, seed=11)
        assert list(found.token_ids) == text[len(PROMPT) :], name
    other = speculative_generate(target, None, PROMPT, 14, temperature=0.8, seed=12)
    assert list(other.token_ids) != text[len(PROMPT) :]


def test_the_same_model_is_always_right_with_a_temperature_too() -> None:
    target = TinyTarget(1)
    drafter = ModelDrafter(TinyTarget(1), 4)
    found = speculative_generate(target, drafter, PROMPT, 21, temperature=1.0, seed=3)
    assert found.stats.accepted == found.stats.drafted
    assert found.stats.steps == 4


def test_a_rejection_crops_to_what_stays_and_a_full_block_does_not() -> None:
    target = TinyTarget(2)
    speculative_generate(target, oracle(target, 1), PROMPT, 7)
    # The prompt's run gives one token, the others two each, with no more drafts than may still come.
    assert target.forwards == [5, 5, 4, 2]
    # Positions 0 to 4 are the prompt, the anchor is at 5, its one right draft at 6: seven tokens stay.
    assert target.crops == [7, 9]
    target.crops.clear()
    speculative_generate(target, oracle(target), PROMPT, 11)
    assert target.crops == []


def test_a_drafter_sees_features_of_settled_tokens_once_and_in_order() -> None:
    target = TinyTarget(3)
    for right in (0, 2, 99):
        drafter = oracle(target, right)
        found = speculative_generate(target, drafter, PROMPT, 12)
        text = [*PROMPT, *found.token_ids]
        assert drafter.settled == list(range(len(drafter.settled)))
        # All but the newest token.
        assert len(drafter.settled) == len(text) - 1
        features, _ = target.states(torch.tensor([text[:-1]]))
        torch.testing.assert_close(torch.stack(drafter.rows), features[0].float())


def test_counts_by_place() -> None:
    target = TinyTarget(4)
    stats = speculative_generate(target, oracle(target, 2), PROMPT, 13).stats
    # The first token comes of the prompt; then three a run, four times.
    assert stats.steps == 4
    assert stats.tokens == 12
    assert stats.accepted_length == 3.0
    # The last run may draft two, and its two are right.
    assert stats.drafted == (4, 4, 3, 3)
    assert stats.accepted == (4, 4, 0, 0)
    assert stats.draft_s > 0
    assert stats.verify_s > 0
    assert speculative_generate(target, None, PROMPT, 1).stats.accepted_length == 0.0


def test_a_stop_inside_an_accepted_run_ends_it_and_the_tail_is_not_counted() -> None:
    for seed in range(8):
        target = TinyTarget(seed)
        own = target.alone(PROMPT, 20)
        at = next((at for at, token in enumerate(own) if at > 1 and token not in own[:at]), None)
        if at is None:
            continue
        stops = {own[at]}
        for drafter in (None, oracle(target), oracle(target, 1)):
            found = speculative_generate(target, drafter, PROMPT, 20, stop_token_ids=stops)
            assert list(found.token_ids) == own[: at + 1]
            assert found.finish_reason is FinishReason.STOP
            assert found.stats.tokens == at
            assert sum(found.stats.accepted) <= at
        first = speculative_generate(target, oracle(target), PROMPT, 20, stop_token_ids={own[0]})
        assert first.token_ids == (own[0],)
        assert first.finish_reason is FinishReason.STOP
        assert first.stats.steps == 0


def test_limits_are_kept_to_the_token() -> None:
    target = TinyTarget(5)
    for count in range(1, 9):
        found = speculative_generate(target, oracle(target), PROMPT, count)
        assert list(found.token_ids) == target.alone(PROMPT, count)
    few = speculative_generate(target, oracle(target), PROMPT, 9, max_drafts=1)
    assert few.stats.steps == 4
    assert len(few.stats.drafted) == 1
    assert speculative_generate(target, oracle(target), PROMPT, 9, max_drafts=0).stats.steps == 8


def test_faults_of_the_caller_and_of_the_target() -> None:
    target = TinyTarget(6)
    for prompt in ([], [[1, 2]]):
        with pytest.raises(ShapeError, match="input_ids"):
            speculative_generate(target, None, prompt, 3)
    for options in ({"temperature": -1.0}, {"seed": -1}, {"max_drafts": -1}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            speculative_generate(target, None, PROMPT, 3, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_new_tokens"):
        speculative_generate(target, None, PROMPT, 0)
    target.lm_head.weight.fill_(torch.nan)
    with pytest.raises(InvalidLogits, match="finite"):
        speculative_generate(target, None, PROMPT, 3)


def test_the_model_drafter_follows_a_text_that_changes_behind_it() -> None:
    small = TinyTarget(7)
    drafter = ModelDrafter(small, 3)

    def propose(text: list[int], slot: int = 0, count: int = 3) -> list[int]:
        view = DraftView(
            rids=("r",), slots=(slot,), anchor_ids=(text[-1],), positions=(len(text) - 1,), token_ids=(text,)
        )  # fmt: skip
        return list(drafter.propose(view, count).token_ids[0])

    for text in ([1, 2, 3], [1, 2, 3, 4], [1, 2], [1, 5, 2, 2, 2], [7], [1, 5, 2], [1, 5, 2]):
        assert propose(text) == small.alone(text, 3)
        assert propose([9, *text], slot=1) == small.alone([9, *text], 3)
    assert propose([1, 2], count=1) == small.alone([1, 2], 1)
    assert propose([1, 2], count=0) == []
    drafter.release(0)
    assert propose([1, 2]) == small.alone([1, 2], 3)
    with pytest.raises(ConfigError, match="token_ids"):
        drafter.propose(DraftView(rids=("r",), slots=(0,), anchor_ids=(1,), positions=(0,)), 2)
    with pytest.raises(ConfigError, match="draft_length"):
        ModelDrafter(small, 0)


class Mute:
    """A target without features."""

    def __init__(self, target: TinyTarget) -> None:
        self._target = target
        self.crop = target.crop

    def forward(self, *args: Any, **options: Any) -> Any:
        return replace(self._target.forward(*args, **options), features=None)


class Nameless:
    def __init__(self, found: Any) -> None:
        self.propose = lambda view, max_drafts: found


TARGET = TinyTarget(7)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"drafter": "ngram"}, "drafter"),
        ({"drafter": torch.nn.Linear(1, 1)}, "drafter"),
        ({"drafter": Nameless(None)}, "draft_length"),
        ({"drafter": Nameless(None), "max_drafts": 2}, "drafts"),
        ({"drafter": Nameless([[1]]), "max_drafts": 2}, "Nameless"),
        ({"drafter": Nameless(DraftBatch(token_ids=(("a",),))), "max_drafts": 2}, "drafts"),  # type: ignore[arg-type]
        ({"drafter": block_drafter(TARGET), "target": Mute(TARGET)}, "taps"),
        ({"target": torch.nn.Linear(1, 1)}, "TransformersTarget"),
        ({"stop_token_ids": "ab"}, "stop_token_ids"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids"),
        ({"input_ids": "hello"}, "input_ids"),
        ({"input_ids": [1.5]}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"input_ids": [[1, 2]]}, r"input_ids\[0\]"),
    ],
)
def test_what_cannot_work_is_refused(arguments: dict[str, Any], match: str) -> None:
    """Not run without drafts, or to its end, in silence."""
    given = {"target": TARGET, "drafter": None, "input_ids": PROMPT, **arguments}
    with pytest.raises((ConfigError, ShapeError), match=match):
        speculative_generate(max_new_tokens=4, **given)


def test_a_model_drafter_wants_a_target_too() -> None:
    with pytest.raises(ConfigError, match="TransformersTarget"):
        ModelDrafter(torch.nn.Linear(1, 1))


def test_stops_of_any_kind() -> None:
    own = TARGET.alone(PROMPT, 6)
    stop = own[3]
    for stops in (stop, [stop], torch.tensor([stop]), torch.tensor(stop), np.array([stop]), {stop}):
        found = speculative_generate(TARGET, None, PROMPT, 6, stop_token_ids=stops)
        assert list(found.token_ids) == own[: own.index(stop) + 1]
        assert found.finish_reason is FinishReason.STOP
    plain = speculative_generate(TARGET, None, PROMPT, 6, stop_token_ids=None)
    assert list(plain.token_ids) == own


def test_the_smallest_temperature_takes_the_likeliest_token() -> None:
    own = TARGET.alone(PROMPT, 6)
    found = speculative_generate(TARGET, NgramDrafter(2), PROMPT, 6, temperature=5e-324)
    assert list(found.token_ids) == own


def test_drafters_forget_what_is_over() -> None:
    drafter, model = block_drafter(TARGET), ModelDrafter(TARGET, 2)
    for found in (drafter, model):
        speculative_generate(TARGET, found, PROMPT, 6)
    assert not drafter._contexts
    assert not model._known
