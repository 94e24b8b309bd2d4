from __future__ import annotations

import pytest
import torch

from deepinfer.core.errors import ConfigError, InvalidRequest, InvariantBroken
from deepinfer.core.plan import BlockUpdate
from deepinfer.models.deepseek_v41.batch import ForwardBatch, Segment
from deepinfer.testing import ToyCache, ToyConfig, ToyModel, ToyTokenizer

IDS = [5, 9, 30, 7, 12, 44, 8]


def logits(model: ToyModel, cuts: list[int], slot: int = 1) -> torch.Tensor:
    cache = model.new_cache(3, 16)
    parts = []
    for start, stop in zip([0, *cuts], [*cuts, len(IDS)], strict=True):
        batch = ForwardBatch.from_segments([(slot, start, IDS[start:stop])])
        parts.append(model.compute_logits(model.forward(batch, cache).hidden))
    return torch.cat(parts)


@pytest.mark.parametrize("cuts", [[], [1], [3], [2, 5], [1, 2, 3, 4, 5, 6]])
def test_chunks_give_the_same_bits(cuts: list[int]) -> None:
    model = ToyModel()
    assert torch.equal(logits(model, cuts), model.logits(IDS))


def test_every_row_matters() -> None:
    model = ToyModel()
    last = model.logits(IDS)[-1]
    for at in range(len(IDS)):
        changed = [*IDS]
        changed[at] += 1
        assert not torch.equal(model.logits(changed)[-1], last)
    swapped = [IDS[1], IDS[0], *IDS[2:]]
    assert not torch.equal(model.logits(swapped)[-1], last)


def test_every_cached_row_and_pair_is_read() -> None:
    model = ToyModel()
    cache = model.new_cache(1, 16)
    model.forward(ForwardBatch.from_segments([(0, 0, IDS)]), cache)
    last = cache.digests(0, len(IDS) - 1, len(IDS))
    for tensor in (cache.rows, cache.pairs):
        for at in range(len(IDS) // 2):
            tensor[0, at] += 1
            assert int(cache.digests(0, len(IDS) - 1, len(IDS))) != int(last)
            tensor[0, at] -= 1


def test_truncate_restores_every_length() -> None:
    model = ToyModel()
    for keep in range(len(IDS) + 1):
        cache = model.new_cache(1, 16)
        model.forward(ForwardBatch.from_segments([(0, 0, [*IDS[:keep], 60, 61, 62])]), cache)
        cache.truncate(0, keep)
        rest = IDS[keep:]
        if rest:
            out = model.forward(ForwardBatch.from_segments([(0, keep, rest)]), cache)
            assert torch.equal(model.compute_logits(out.hidden), model.logits(IDS)[keep:])


def test_misuse_is_seen() -> None:
    model = ToyModel()
    cache = model.new_cache(2, 8)
    with pytest.raises(InvariantBroken, match="starts at 2"):
        model.forward(ForwardBatch.from_segments([(0, 2, [5])]), cache)
    model.forward(ForwardBatch.from_segments([(0, 0, [5, 6, 7])]), cache)
    with pytest.raises(InvariantBroken, match="starts at 2"):
        model.forward(ForwardBatch.from_segments([(0, 2, [5])]), cache)
    with pytest.raises(InvariantBroken, match="room for 8"):
        model.forward(ForwardBatch.from_segments([(0, 3, [5] * 6)]), cache)
    with pytest.raises(InvariantBroken, match="outside the vocabulary"):
        model.forward(ForwardBatch.from_segments([(1, 0, [64])]), cache)
    with pytest.raises(InvariantBroken, match="cannot keep 4"):
        cache.truncate(0, 4)
    cache.rows[0, 1] = -1
    with pytest.raises(InvariantBroken, match="unwritten"):
        model.forward(ForwardBatch.from_segments([(0, 3, [5])]), cache)
    cache.reset(0)
    assert cache.lengths == [0, 0]


def test_draft_guesses_and_errs_as_told() -> None:
    for errors, right in ((0, 5), (1, 0)):
        model = ToyModel(ToyConfig(dspark_block_size=5, draft_errors=errors))
        cache = model.new_cache(1, 32)
        out = model.forward(ForwardBatch.from_segments([(0, 0, IDS)]), cache)
        assert model.draft is not None
        assert out.features is not None
        model.draft.extend_context(out.features, range(len(IDS)), [0] * len(IDS), cache)
        anchor, *following = model.greedy(IDS, 6)
        tokens, confidences = model.draft.draft_greedy([anchor], [len(IDS)], [0], cache)
        assert (tokens[0] == torch.tensor(following)).sum() == right
        assert confidences.shape == (1, 5)


def test_draft_refuses_a_wrong_context() -> None:
    model = ToyModel(ToyConfig(dspark_block_size=5))
    cache = model.new_cache(1, 32)
    out = model.forward(ForwardBatch.from_segments([(0, 0, IDS)]), cache)
    assert model.draft is not None
    assert out.features is not None
    with pytest.raises(InvariantBroken, match="knows 0 tokens"):
        model.draft.draft_greedy([5], [len(IDS)], [0], cache)
    with pytest.raises(InvariantBroken, match="foreign feature"):
        model.draft.extend_context(out.features[:1], [1], [0], cache)


def test_sizes_are_checked() -> None:
    with pytest.raises(ConfigError, match="vocab_size"):
        ToyConfig(vocab_size=2)


def test_tokenizer() -> None:
    tokenizer = ToyTokenizer()
    text = "hello, world!"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text, add_bos=False) == ids[1:]
    stream = tokenizer.stream()
    assert "".join(map(stream.push, ids)) + stream.finish() == text
    with pytest.raises(InvalidRequest, match="no id for"):
        tokenizer.encode("é")


class TestBlocks:
    """A cache in blocks with a window of two layers, as the engine drives it."""

    def cache(self, model: ToyModel, **options: int) -> ToyCache:
        return model.new_cache(2, 16, 16, **{"num_blocks": 8, "block_size": 2, **options})

    def run(
        self, model: ToyModel, cache: ToyCache, slot: int, start: int, ids: list[int], **at: int
    ) -> torch.Tensor:
        segment = Segment(slot, start, len(ids), **at)
        batch = ForwardBatch(torch.tensor(ids), (segment,))
        return model.compute_logits(model.forward(batch, cache).hidden)

    def test_tables_in_any_order_give_the_same(self) -> None:
        model = ToyModel(ToyConfig(sliding_window=3))
        for blocks in ((0, 1, 2, 3), (5, 2, 7, 0)):
            cache = self.cache(model)
            cache.apply_updates([BlockUpdate(slot=1, first=0, blocks=blocks)])
            assert torch.equal(self.run(model, cache, 1, 0, IDS), model.logits(IDS))

    def test_exact_replay_is_exact_and_a_shorter_one_is_not(self) -> None:
        model = ToyModel(ToyConfig(sliding_window=2))
        ids = [*IDS, 9, 10, 11]
        full = model.logits(ids)
        for length, same in ((3, True), (1, False)):
            cache = self.cache(model)
            cache.apply_updates([BlockUpdate(slot=0, first=0, blocks=(3, 4, 5))])
            self.run(model, cache, 0, 0, ids[:6])
            before = cache.rows.clone()
            cache.apply_updates([BlockUpdate(slot=1, first=0, blocks=(3, 4, 5, 6, 7))])
            cache.adopt_prefix(1, ids[:6])
            start = 6 - length
            at = {"window_start": start, "pool_start": 6}
            self.run(model, cache, 1, start, ids[start:6], **at)
            assert torch.equal(cache.rows, before)  # a replay writes no blocks
            out = self.run(model, cache, 1, 6, ids[6:], **at)
            assert torch.equal(out, full[6:]) == same

    def test_foreign_and_missing_rows_are_refused(self) -> None:
        model = ToyModel(ToyConfig(sliding_window=3))
        cache = self.cache(model)
        cache.apply_updates([BlockUpdate(slot=0, first=0, blocks=(0, 1, 2))])
        self.run(model, cache, 0, 0, IDS[:6])
        cache.apply_updates([BlockUpdate(slot=1, first=0, blocks=(0, 1, 2, 3))])
        cache.adopt_prefix(1, [*IDS[:5], 60])
        with pytest.raises(InvariantBroken, match="another sequence"):
            self.run(model, cache, 1, 6, [5], window_start=6, pool_start=6)
        cache.reset(1)
        cache.adopt_prefix(1, IDS[:6])
        with pytest.raises(InvariantBroken, match="lacks window rows"):
            self.run(model, cache, 1, 6, [5], pool_start=6)
        cache.reset(1)
        cache.adopt_prefix(1, IDS[:6])
        with pytest.raises(InvariantBroken, match="starts at 4"):
            self.run(model, cache, 1, 4, IDS[4:6], window_start=4)
        with pytest.raises(InvariantBroken, match="does not fit the table"):
            cache.apply_updates([BlockUpdate(slot=1, first=1, blocks=(3,))])
        with pytest.raises(InvariantBroken, match="room for 8 tokens"):
            self.run(model, cache, 1, 6, [5] * 3, window_start=6, pool_start=6)

    def test_saved_bytes_come_back(self) -> None:
        model = ToyModel(ToyConfig(sliding_window=3))
        cache = self.cache(model)
        cache.apply_updates([BlockUpdate(slot=0, first=0, blocks=(0, 1, 2))])
        self.run(model, cache, 0, 0, IDS[:6])
        blocks = [cache.save_block(block) for block in (0, 1, 2)]
        windows = cache.save_windows(0, 6)
        assert {len(data) for data in blocks} == {cache.block_bytes}
        assert len(windows) == cache.windows_bytes
        other = self.cache(model)
        other.apply_updates([BlockUpdate(slot=1, first=0, blocks=(6, 5, 4, 3))])
        for block, data in zip((6, 5, 4), blocks, strict=True):
            other.load_block(block, data)
        other.adopt_prefix(1, IDS[:6])
        other.load_windows(1, 6, windows)
        out = self.run(model, other, 1, 6, IDS[6:], window_start=3, pool_start=6)
        assert torch.equal(out, model.logits(IDS)[6:])
        with pytest.raises(InvariantBroken, match="lacks window rows"):
            other.save_windows(0, 4)

    def test_narrowed_tokens_have_no_output(self) -> None:
        model = ToyModel(ToyConfig(narrows=True))
        cache = self.cache(model)
        cache.apply_updates([BlockUpdate(slot=0, first=0, blocks=(0, 1, 2, 3))])
        batch = ForwardBatch(torch.tensor(IDS), (Segment(0, 0, len(IDS), full_start=4),))
        out = model.forward(batch, cache)
        assert out.kept is not None
        assert out.kept.tolist() == [4, 5, 6]
        assert torch.equal(model.compute_logits(out.hidden), model.logits(IDS)[4:])

    def test_odd_blocks_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="block_size"):
            self.cache(ToyModel(), block_size=3)
