"""Corpus, generated documents and batches: determinism, the held-out split, copies where the weights say."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from nano.batches import CUE, SHORTEST, Batches, Mixture, copy_distance
from nano.corpus import build_corpus, long_lines
from nano.data import train_tokenizer
from nano.dataset import FIRST_TEXT_ID, SPECIAL_TOKENS, Data
from nano.tasks import TaskWriter

LENGTH = 96
LOW, HIGH = 50, 1000
"""Ids of random spans; text has lower ones."""


def streams() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randint(low, low + 10, (4000,), dtype=torch.int32, generator=generator)
        for name, low in (("code", 12), ("docs", 22), ("tasks", 32))
    }


def batches(seed: int = 0, **shares: float) -> Batches:
    return Batches(streams(), LENGTH, LOW, HIGH, seed, Mixture(**shares))


def test_batches_are_fixed_by_their_seed() -> None:
    first, again, other = (batches(seed).draw(8, 64) for seed in (1, 1, 2))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


def test_domains_follow_their_shares() -> None:
    rows, is_task = batches(code=0.5, docs=0.2, tasks=0.3).text(2000)
    domain = (rows[:, 0] - 12) // 10
    assert torch.equal(domain == 2, is_task)
    shares = torch.bincount(domain, minlength=3) / len(rows)
    assert shares.tolist() == pytest.approx([0.5, 0.2, 0.3], abs=0.04)
    # a row stays in its domain
    assert torch.equal((rows - 12) // 10, domain[:, None].expand_as(rows))


def test_copied_spans_are_where_the_weights_say() -> None:
    wide = Batches(streams(), 1024, LOW, HIGH, 0, Mixture(repeat=0.0, spans=1.0, tasks=0.0))
    x, weight = wide.draw(100, 64)
    targets = x[:, 1:]
    random = targets >= LOW
    assert random.any(1).float().mean() > 0.9
    # text is learned, random tokens only as copies, each with a cue without weight in front
    assert (weight[~random] == 1).all()
    learned = random & (weight == 1)
    starts = learned & ~torch.nn.functional.pad(learned, (1, 0))[:, :-1]
    for row, column in starts.nonzero().tolist():
        assert (weight[row, column - CUE : column] == 0).all()
    copied = []
    for row, column in learned.nonzero().tolist():
        originals = (x[row, : column + 1] == targets[row, column]).nonzero().flatten()
        copied.append(any(16 <= column + 1 - at <= 64 for at in originals.tolist()))
    # a later span can lie over the original of an earlier one, seldom
    assert np.mean(copied) > 0.97


def test_repetitions() -> None:
    x, weight = batches(repeat=1.0).draw(50, 64)
    for row, weights in zip(x, weight, strict=True):
        period = int((weights == 1).nonzero()[0]) + 1 - CUE
        assert SHORTEST <= period <= LENGTH // 2
        assert torch.equal(row[period:], row[:-period])
        assert (weights[period + CUE - 1 :] == 1).all()
        assert (weights[: period + CUE - 1] == 0).all()


def test_curriculum_of_copy_distances() -> None:
    shares = np.linspace(0, 1, 101)
    distances = [copy_distance(share, 2048) for share in shares]
    assert distances[0] == 96
    assert distances == sorted(distances)
    assert set(distances[41:]) == {2048}
    early, late = Mixture().early(0.0), Mixture().early(0.5)
    assert early.repeat == pytest.approx(3 * Mixture().repeat)
    assert early.spans == pytest.approx(3 * Mixture().spans)
    assert late == Mixture()


def write_library(folder: Path, files: int) -> None:
    folder.mkdir()
    for number in range(files):
        lines = [f"def function_{number}_{i}(argument_one):" for i in range(20)]
        (folder / f"module_{number:03}.py").write_text("\n".join(lines))


def test_held_out_files_do_not_leak(tmp_path: Path) -> None:
    library, newer = tmp_path / "python3.11", tmp_path / "python3.12"
    write_library(library, 60)
    (library / "site-packages").mkdir()
    (library / "site-packages" / "other.py").write_text("secret = 1\n")
    secret = (library / "module_019.py").read_text()
    newer.mkdir()
    (newer / "renamed.py").write_text(secret + "\n# a comment that makes it another file\n")
    (newer / "fresh.py").write_text("\n".join(f"value_{i} = compute_it({i})" for i in range(9)))
    (library / "zz_copy.py").write_text(secret)
    train, held_out = build_corpus(library, None, [newer])
    assert [d.name for d in held_out["code"]] == [f"module_{n:03}.py" for n in (19, 39, 59)]
    names = {d.name for d in train["code"]}
    assert "fresh.py" in names
    assert not names & {"renamed.py", "zz_copy.py", "other.py", "site-packages/other.py"}
    known = {line for d in held_out["code"] for line in long_lines(d.text)}
    assert not known & {line for d in train["code"] for line in long_lines(d.text)}


def test_corpus_and_tasks_are_deterministic(tmp_path: Path) -> None:
    write_library(tmp_path / "lib", 25)
    once, again = (build_corpus(tmp_path / "lib") for _ in range(2))
    assert once == again
    code = [d.text for d in once[0]["code"]] + [Path(math.__spec__.origin or "").name]
    code += [Path(__file__).read_text(), Path(train_tokenizer.__code__.co_filename).read_text()]
    documents = [list(TaskWriter(code, seed).documents(20_000)) for seed in (3, 3, 4)]
    assert documents[0] == documents[1] != documents[2]


def test_tokenizer_keeps_special_ids_and_round_trips() -> None:
    text = "def f(x):\n    return x + 1234  # é\n"
    tokenizer = train_tokenizer([text * 20], 300)
    ids = [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS]
    assert ids == list(range(FIRST_TEXT_ID))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_data_folder(data_folder: Path) -> None:
    data = Data.load(data_folder, torch.device("cpu"))
    assert set(data.streams) == {"code", "docs", "tasks"}
    assert set(data.held_out) == {"code", "docs"}
    assert data.bytes_of.shape == (data.config.vocab_size,)
