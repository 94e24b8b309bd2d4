"""The count of operations against the published parameter counts, and what narrowing takes away."""

from __future__ import annotations

import pytest

from deepinfer.models.deepseek_v41 import DeepseekV41Config
from deepinfer.models.deepseek_v41.flops import _sum_of_visible, prefill_flops


@pytest.fixture(scope="module")
def flash(repo_root) -> DeepseekV41Config:
    return DeepseekV41Config.from_pretrained(repo_root / "tests" / "data" / "deepseek_v41_flash")


def test_parameters_of_one_token(flash) -> None:
    """A short prompt costs twice the activated parameters: about 16 billion with the head."""
    one = prefill_flops(flash, 1)
    assert one / 2 == pytest.approx(16.1e9, rel=0.02)
    per_token = (prefill_flops(flash, 129) - one) / 128 / 2
    assert per_token == pytest.approx(15.5e9, rel=0.02)


@pytest.mark.parametrize(
    ("tokens", "share"), [(128, 0.0), (256, 0.242), (4096, 0.479), (32768, 0.498), (1 << 20, 0.617)]
)
def test_share_that_narrowing_removes(tokens, share, flash) -> None:
    """Close to the half of the layers that are decoder; beyond that in long prompts, where its index scores count."""
    removed = 1 - prefill_flops(flash, tokens, narrowed=True) / prefill_flops(flash, tokens)
    assert removed == pytest.approx(share, abs=0.003)


def test_narrowed_tokens_cost_half(flash) -> None:
    """About 8 billion parameters a token in place of about 15.5."""
    cost = prefill_flops(flash, 4096, narrowed=True) - prefill_flops(flash, 2048, narrowed=True)
    without_attention = cost / 2048 / 2
    assert 7.9e9 < without_attention < 9.3e9


def test_a_layout_that_cannot_narrow(small_config) -> None:
    config = small_config(engram_layer_ids=[0, 5], engram_num_embeddings=[5190, 5436])
    assert prefill_flops(config, 64, narrowed=True) == prefill_flops(config, 64)


@pytest.mark.parametrize(("start", "end"), [(0, 10), (0, 100), (64, 100), (90, 100)])
@pytest.mark.parametrize("most", [None, 20, 40])
def test_visible_rows(start, end, most) -> None:
    for ratio in (1, 2):
        wanted = [(t + 1) / ratio for t in range(start, end)]
        if most is not None:
            wanted = [min(n, most) for n in wanted]
        assert _sum_of_visible(start, end, ratio, most) == pytest.approx(
            sum(wanted), abs=(end - start)
        )
