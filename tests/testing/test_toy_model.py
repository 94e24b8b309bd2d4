from __future__ import annotations

import pytest
import torch

from deepinfer.core.errors import ConfigError, InvalidRequest, InvariantBroken
from deepinfer.models.deepseek_v41.batch import ForwardBatch
from deepinfer.testing import ToyConfig, ToyModel, ToyTokenizer

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
