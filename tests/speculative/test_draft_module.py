"""The attached draft: what a block sees, training blocks, saving, and the drafter's books."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from tiny_target import HIDDEN, TAPS, VOCAB, TinyTarget

from deepinfer.core.errors import (
    CheckpointMismatch,
    CheckpointMissing,
    ConfigError,
    InvariantBroken,
    ShapeError,
)
from deepinfer.core.views import DraftView
from deepinfer.speculative import (
    BlockDrafter,
    DraftConfig,
    DraftModule,
    TargetEnds,
    draft_training_loss,
    draw_blocks,
)

CONFIG = DraftConfig(
    vocab_size=VOCAB, hidden_size=HIDDEN, taps=TAPS, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    intermediate_size=24, block_size=4, rank=6,
)  # fmt: skip
WIDTH = len(TAPS) * HIDDEN


@pytest.fixture
def target() -> TinyTarget:
    return TinyTarget()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(1)


def blocks(
    draft: DraftModule, target: TinyTarget, features: Tensor, anchors: list[int], ids: list[int]
) -> Tensor:
    """Hidden rows of blocks of one text, shape [blocks, block_size, hidden]."""
    at = torch.arange(features.shape[0])
    context = draft.context_rows(features[None], at[None])
    return draft.block_hidden(
        torch.tensor([ids]), torch.tensor([anchors]), context, target.ends,
        first_positions=torch.zeros(1, dtype=torch.long),
    )[0]  # fmt: skip


def test_a_block_sees_exactly_what_is_strictly_before_its_anchor(target: TinyTarget) -> None:
    draft = DraftModule(CONFIG)
    features = torch.randn(9, WIDTH)
    before = blocks(draft, target, features, [3, 6], [1, 2])
    for position in range(9):
        changed = features.clone()
        changed[position] += 1.0
        moved = (blocks(draft, target, changed, [3, 6], [1, 2]) - before).abs().amax((1, 2)) > 1e-6
        assert moved.tolist() == [position < 3, position < 6]


def test_blocks_do_not_see_each_other_and_equal_one_block_alone(target: TinyTarget) -> None:
    draft = DraftModule(CONFIG)
    features = torch.randn(9, WIDTH)
    both = blocks(draft, target, features, [3, 6], [1, 2])
    for at, (anchor, token) in enumerate([(3, 1), (6, 2)]):
        context = draft.context_rows(features[None, :anchor], torch.arange(anchor)[None])
        alone = draft.block_hidden(
            torch.tensor([[token]]), torch.tensor([[anchor]]), context, target.ends
        )
        torch.testing.assert_close(alone[0, 0], both[at], atol=1e-5, rtol=0)
    other = blocks(draft, target, features, [3, 6], [7, 2])
    assert not torch.allclose(other[0], both[0])
    torch.testing.assert_close(other[1], both[1])


@pytest.mark.parametrize("mask_token_id", [None, 5])
def test_attention_goes_both_ways_inside_a_block(
    target: TinyTarget, mask_token_id: int | None
) -> None:
    draft = DraftModule(replace(CONFIG, mask_token_id=mask_token_id))
    made = draft._inputs
    context = draft.context_rows(torch.randn(1, 5, WIDTH), torch.arange(5)[None])

    def hidden() -> Tensor:
        ids, at = torch.tensor([[1]]), torch.tensor([[5]])
        return draft.block_hidden(ids, at, context, target.ends)[0, 0]

    before = hidden()
    # The last input of the block changes, and with it every row.
    draft._inputs = lambda *given: made(*given) + torch.eye(4)[3][:, None]  # type: ignore[method-assign]
    assert ((hidden() - before).abs().amax(-1) > 1e-6).all()


def test_masks_are_one_embedding_and_the_anchor_is_its_own(target: TinyTarget) -> None:
    anchor = target.ends.embed(torch.tensor(3))
    own = DraftModule(CONFIG)
    rows = own._inputs(torch.tensor([[3]]), target.ends)[0, 0]
    torch.testing.assert_close(rows[0], anchor)
    for row in rows[1:]:
        torch.testing.assert_close(row, own.mask_embedding.detach())  # type: ignore[union-attr]
    given = DraftModule(replace(CONFIG, mask_token_id=5))
    rows = given._inputs(torch.tensor([[3]]), target.ends)[0, 0]
    torch.testing.assert_close(rows[1:], target.ends.embed(torch.tensor([5, 5, 5])))
    assert given.mask_embedding is None


def test_positions_are_absolute_and_only_distances_count(target: TinyTarget) -> None:
    draft = DraftModule(CONFIG)
    features = torch.randn(1, 5, WIDTH)

    def hidden(first: int, anchor: int) -> Tensor:
        context = draft.context_rows(features, torch.arange(first, first + 5)[None])
        return draft.block_hidden(
            torch.tensor([[1]]), torch.tensor([[anchor]]), context, target.ends
        )

    near = hidden(0, 5)
    torch.testing.assert_close(hidden(100, 105), near, atol=1e-4, rtol=0)
    assert not torch.allclose(hidden(0, 9), near, atol=1e-4)


def test_nothing_of_the_target_is_owned(target: TinyTarget) -> None:
    names = set(dict(DraftModule(CONFIG).named_parameters()))
    assert not any("embed_tokens" in name or "lm_head" in name for name in names)
    assert "combiner.weight" in names
    assert sum("kv_proj" in name for name in names) == 2


# ---- training ----


def test_drawn_blocks_end_with_the_text_and_at_gaps() -> None:
    ids = torch.arange(40).view(2, 20)
    supervised = torch.ones(2, 20, dtype=torch.bool)
    supervised[1, 10] = False
    drawn = draw_blocks(
        ids, 16, 4, supervised=supervised, generator=torch.Generator().manual_seed(0)
    )
    for row in range(2):
        anchors = drawn.anchors[row].tolist()
        assert len(set(anchors)) == len(anchors)
        assert min(anchors) >= 1
        for at, anchor in enumerate(anchors):
            assert drawn.inputs[row, at, 0] == ids[row, anchor]
            known = [p for p in range(anchor + 1, anchor + 5) if p < 20]
            if row == 1:
                assert anchor not in (9, 10)
                known = [p for p in known if not anchor < 10 <= p]
            assert drawn.mask[row, at].tolist() == [
                p in known for p in range(anchor + 1, anchor + 5)
            ]
            wanted = [int(ids[row, p]) for p in known]
            assert drawn.labels[row, at][: len(known)].tolist() == wanted
            assert drawn.inputs[row, at, 1 : len(known)].tolist() == wanted[:-1]


def test_rows_without_anchors_count_nothing_and_short_texts_are_refused() -> None:
    ids = torch.arange(20).view(2, 10)
    supervised = torch.tensor([[True] * 10, [False] * 10])
    drawn = draw_blocks(ids, 4, 3, supervised=supervised)
    assert drawn.mask[0].any()
    assert not drawn.mask[1].any()
    with pytest.raises(ShapeError, match="3 tokens"):
        draw_blocks(ids[:, :2], 4, 3)
    with pytest.raises(ShapeError, match="supervised"):
        draw_blocks(ids, 4, 3, supervised=supervised[:1])
    with pytest.raises(ShapeError, match="input_ids"):
        draw_blocks(ids[0], 4, 3)


def test_a_row_without_anchors_costs_the_others_nothing() -> None:
    ids = torch.randint(0, VOCAB, (3, 20))
    supervised = torch.ones(3, 20, dtype=torch.bool)
    supervised[1] = False
    drawn = draw_blocks(ids, 8, 3, supervised=supervised)
    assert drawn.anchors.shape == (3, 8)
    assert drawn.mask.any(-1).any(-1).tolist() == [True, False, True]
    assert draw_blocks(ids, 8, 3, supervised=supervised & False).anchors.shape == (3, 8)


def test_training_rows_that_do_not_fit(target: TinyTarget) -> None:
    ids = torch.randint(0, VOCAB, (2, 12))
    features, final = torch.randn(2, 12, WIDTH), torch.randn(2, 12, HIDDEN)
    drawn = draw_blocks(ids, 2, CONFIG.block_size)
    draft = DraftModule(CONFIG)
    for arguments, match in (
        ((features[0], final, drawn), "features"),
        (("rows", final, drawn), "features"),
        ((features, final[:, :5], drawn), "final_hidden"),
        ((features, final, draw_blocks(ids, 2, CONFIG.block_size - 1)), "drafts"),
        ((features, final, draw_blocks(ids[:1], 2, CONFIG.block_size)), "rows=2"),
    ):
        with pytest.raises(ShapeError, match=match):
            draft_training_loss(draft, *arguments, target.ends)


@pytest.mark.parametrize("head", ["markov", "gated", "rnn"])
def test_the_loss_decreases(target: TinyTarget, head: str) -> None:
    draft = DraftModule(replace(CONFIG, head=head))
    ids = torch.randint(0, VOCAB, (8, 24))
    features, final = target.states(ids)
    drawn = draw_blocks(ids, 12, 4)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=5e-3)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        terms = draft_training_loss(draft, features.float(), final, drawn, target.ends)
        terms.total.backward()
        optimizer.step()
        losses.append(float(terms.total.detach()))
    assert losses[-1] < 0.8 * losses[0]
    assert all(weight.grad is None for weight in target.parameters())
    assert all(weight.grad is not None for weight in draft.parameters())


def test_training_rows_are_the_rows_of_drafting(target: TinyTarget) -> None:
    """The loss of one block alone, from what the drafter computes and the target's own logits."""
    draft = DraftModule(CONFIG)
    torch.nn.init.normal_(draft.head.output.weight)
    ids = torch.randint(0, VOCAB, (1, 12))
    features, final = target.states(ids)
    drawn = draw_blocks(ids, 1, 4, generator=torch.Generator().manual_seed(3))
    terms = draft_training_loss(draft, features.float(), final, drawn, target.ends, ce=0, conf=0)
    anchor = int(drawn.anchors)
    context = draft.context_rows(features[:, :anchor].float(), torch.arange(anchor)[None])
    hidden = draft.block_hidden(ids[:, anchor, None], drawn.anchors, context, target.ends)[0]
    base = target.ends.lm_head(hidden)
    count = int(drawn.mask.sum())
    weighted = total = 0.0
    for k in range(count):
        at = anchor + k
        logits = base[0, k] + draft.head.output(draft.head.embed(ids[0, at]))
        p = torch.softmax(target.lm_head(final[0, at]), -1)
        weight = float(torch.exp(torch.tensor(-k / 4.0)))
        weighted += weight * float((torch.softmax(logits, -1) - p).abs().sum().detach())
        total += weight
    assert float(terms.distance.detach()) == pytest.approx(weighted / total, abs=1e-5)


# ---- configuration and files ----


def test_saving_and_loading(target: TinyTarget, tmp_path: Path) -> None:
    draft = DraftModule(replace(CONFIG, head="rnn", confidence_with_token=False))
    draft.save(tmp_path / "draft")
    again = DraftModule.load(tmp_path / "draft")
    assert again.config == draft.config
    assert not again.training
    wanted = draft.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in again.state_dict().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("norm.weight"), "norm.weight: found nothing"),
        (lambda t: t.update(extra=torch.ones(1)), "extra"),
        (lambda t: t.update({"norm.weight": torch.ones(3)}), "norm.weight: found \\(3,\\)"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path: Path, change: object, message: str) -> None:
    DraftModule(CONFIG).save(tmp_path)
    tensors = load_file(tmp_path / "draft.safetensors")
    change(tensors)  # type: ignore[operator]
    save_file(tensors, tmp_path / "draft.safetensors")
    with pytest.raises(CheckpointMismatch, match=message):
        DraftModule.load(tmp_path)


def test_broken_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMissing, match=r"draft_config\.json"):
        DraftModule.load(tmp_path)
    DraftModule(CONFIG).save(tmp_path)
    (tmp_path / "draft.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointMismatch, match="cannot be read"):
        DraftModule.load(tmp_path)
    for text, message in (("{", "no JSON"), ("[" * 100_000, "no JSON"), ("[]", "not an object")):
        (tmp_path / "draft_config.json").write_text(text)
        with pytest.raises(CheckpointMismatch, match=message):
            DraftModule.load(tmp_path)
    options = {**CONFIG.to_dict(), "sample_from_anchor": False}
    (tmp_path / "draft_config.json").write_text(json.dumps(options))
    with pytest.raises(ConfigError, match="sample_from_anchor"):
        DraftModule.load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"taps": ()},
        {"taps": (1, 1)},
        {"taps": (-2,)},
        {"taps": 3},
        {"taps": "12"},
        {"num_kv_heads": 3},
        {"head_dim": 7},
        {"mask_token_id": VOCAB},
        {"head": "lstm"},
        {"block_size": 0},
        {"confidence": 1},
        {"rope_theta": 0.5},
    ],
)
def test_configurations_are_checked(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        DraftConfig.from_dict({**CONFIG.to_dict(), **change})


def test_a_configuration_without_its_target_is_refused() -> None:
    with pytest.raises(ConfigError, match="taps"):
        DraftConfig.from_dict({"vocab_size": 3, "hidden_size": 4})
    assert DraftConfig.from_dict(CONFIG.to_dict()) == CONFIG


# ---- the drafter ----


def view(anchor: int, position: int, slot: int = 0) -> DraftView:
    return DraftView(rids=("r",), slots=(slot,), anchor_ids=(anchor,), positions=(position,))


def test_the_drafter_proposes_what_the_module_gives(target: TinyTarget) -> None:
    draft = DraftModule(CONFIG).eval()
    torch.nn.init.normal_(draft.head.output.weight)
    drafter = BlockDrafter(draft, target.ends)
    features = torch.randn(70, WIDTH)
    # In pieces, across the growth of the buffers, with a second sequence in between.
    for low, high in ((0, 3), (3, 4), (4, 67), (67, 70)):
        drafter.observe(features[low:high], range(low, high), [0] * (high - low))
        drafter.observe(torch.randn(2, WIDTH), (low, low + 1), [1, 1])
    batch = drafter.propose(view(4, 70), 3)
    hidden = blocks(draft, target, features, [70], [4])[0]
    base = target.ends.lm_head(hidden)
    expected, previous = [], 4
    for row in base:
        bias = draft.head.output(draft.head.embed(torch.tensor(previous)))
        previous = int((row + bias).argmax())
        expected.append(previous)
    assert batch.token_ids == (tuple(expected[:3]),)
    known = draft.head.embed(torch.tensor([4, *expected[:-1]]))
    wanted = torch.sigmoid(draft.confidence(hidden, known))  # type: ignore[misc]
    assert batch.confidences[0] == pytest.approx(wanted[:3].tolist(), abs=1e-5)


def test_the_drafter_takes_back_and_begins_anew(target: TinyTarget) -> None:
    draft = DraftModule(CONFIG).eval()
    features = torch.randn(9, WIDTH)

    def fresh(rows: Tensor, first: int) -> tuple[tuple[int, ...], ...]:
        other = BlockDrafter(draft, target.ends)
        other.observe(rows, range(first, first + len(rows)), [0] * len(rows))
        return other.propose(view(1, first + len(rows)), 4).token_ids

    drafter = BlockDrafter(draft, target.ends)
    drafter.observe(torch.randn(6, WIDTH), range(6), [0] * 6)
    drafter.observe(features[:4], range(4), [0] * 4)
    assert drafter.propose(view(1, 4), 4).token_ids == fresh(features[:4], 0)
    drafter.observe(torch.randn(3, WIDTH), range(4, 7), [0] * 3)
    drafter.observe(features[4:6], range(4, 6), [0] * 2)
    assert drafter.propose(view(1, 6), 4).token_ids == fresh(features[:6], 0)
    drafter.observe(features[:2], range(20, 22), [0] * 2)
    assert drafter.propose(view(1, 22), 4).token_ids == fresh(features[:2], 20)
    drafter.release(0)
    with pytest.raises(InvariantBroken, match="observe"):
        drafter.propose(view(1, 22), 4)


def test_the_drafter_refuses_gaps_and_odd_shapes(target: TinyTarget) -> None:
    drafter = BlockDrafter(DraftModule(CONFIG), target.ends)
    drafter.observe(torch.randn(3, WIDTH), range(3), [0] * 3)
    for position in (2, 4):
        with pytest.raises(InvariantBroken, match=f"anchor is at {position}"):
            drafter.propose(view(1, position), 4)
    with pytest.raises(ShapeError, match="positions"):
        drafter.observe(torch.randn(3, WIDTH), range(2), [0] * 3)
    with pytest.raises(ShapeError, match="features"):
        drafter.observe(torch.randn(3, WIDTH + 1), range(3), [0] * 3)
    whole = TargetEnds(target.embed, target.lm_head)
    for change in ({"vocab_size": VOCAB + 1}, {"vocab_size": VOCAB - 1}, {"hidden_size": 2}):
        with pytest.raises(ConfigError, match="vocab_size and hidden_size"):
            BlockDrafter(DraftModule(replace(CONFIG, mask_token_id=None, **change)), whole)
    without = BlockDrafter(DraftModule(replace(CONFIG, confidence=False)), target.ends)
    without.observe(torch.randn(3, WIDTH), range(3), [0] * 3)
    assert without.propose(view(1, 3), 4).confidences == ()
