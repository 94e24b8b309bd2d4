"""The golden comparison notices the mistakes that are easily made."""

from __future__ import annotations

import dataclasses

import torch

from deepinfer.models.deepseek_v41 import full_pass, hyper_connection, indexer, layer
from deepinfer.models.deepseek_v41.hyper_connection import StreamMix


def difference(model, golden, golden_ids) -> float:
    return float((model.logits(golden_ids) - golden["plain.logits.0"]).abs().max())


def test_transposed_stream_mixing(load_golden, golden, golden_ids, monkeypatch) -> None:
    right = hyper_connection.leave_sublayer

    def wrong(streams, output, mixes, **options):
        return right(streams, output, StreamMix(mixes.pre, mixes.post, mixes.mix.mT))

    monkeypatch.setattr(layer, "leave_sublayer", wrong)
    assert difference(load_golden(), golden, golden_ids) > 1e-2


def test_window_one_row_short_or_long(load_golden, golden, golden_ids) -> None:
    for window in (7, 9):
        model = load_golden()
        model.config = dataclasses.replace(model.config, sliding_window=window)
        assert difference(model, golden, golden_ids) > 1e-2


def test_ties_to_the_higher_index(random_model, small_config, run_chunks, monkeypatch) -> None:
    """Without the tie rule the outcome hangs on how the sequence was cut into chunks."""
    model = random_model(small_config(), "cache")
    for block in model.layers:
        if block.attn.indexer is not None:
            block.attn.indexer.weights_proj.weight.clamp_(min=0)
    ids = torch.randint(0, 159, (80,), generator=torch.Generator().manual_seed(3))

    def spread() -> float:
        logits, _ = run_chunks(model, ids, [16])
        return float((logits - model.logits(ids)).abs().median())

    kept = spread()

    def unstable(scores, k):
        # Ties fall differently for another number of columns, as they do in plain top-k kernels.
        order = torch.randperm(
            scores.shape[-1], generator=torch.Generator().manual_seed(scores.shape[-1])
        )
        picked = scores[..., order].sort(dim=-1, descending=True, stable=True).indices[..., :k]
        return order[picked].sort(-1).values

    monkeypatch.setattr(indexer, "topk_lowest_index", unstable)
    assert kept < 1e-4
    assert spread() > 1e-3


def test_pool_row_visible_one_token_early(load_golden, golden, golden_ids, monkeypatch) -> None:
    right = full_pass.FullPass.select

    def wrong(self, attention, indexer_, bottleneck, y):
        self.positions = self.positions + 1
        right(self, attention, indexer_, bottleneck, y)
        self.positions = self.positions - 1

    monkeypatch.setattr(full_pass.FullPass, "select", wrong)
    assert difference(load_golden(), golden, golden_ids) > 1e-2
