"""The matcher's own methods, rows, batches, forced tokens, and masks on logits."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import synthetic_vocab as sv
import toy_automata
from mask_checks import bits, mask

from deepinfer.core import protocols
from deepinfer.core.errors import ConfigError, EmptyLanguage, ShapeError
from deepinfer.grammar.batch import fill_batch
from deepinfer.grammar.bitmask import MaskRow, allocate_bitmask, pack_few, pack_ids
from deepinfer.grammar.compiled import CompiledGrammar
from deepinfer.grammar.matcher import GrammarMatcher
from deepinfer.grammar.regex import compile_regex
from deepinfer.grammar.row_cache import RowCache
from deepinfer.grammar.vocab import TokenVocab

VOCAB = sv.synthetic_vocab()
IDS = {
    VOCAB.token_bytes(i): i
    for i in range(VOCAB.num_tokens - 1, -1, -1)
    if i not in VOCAB.special_ids
}


def matcher(pattern: str, **options) -> GrammarMatcher:
    return compile_regex(pattern).bind(VOCAB).matcher(**options)


def spelling_vocab(*pieces: str) -> TokenVocab:
    """A vocabulary of pieces that encodes by the longest piece first."""
    table = [b"<eos>", *(bytes([b]) for b in range(128)), *(p.encode() for p in pieces)]
    ids = {text: index for index, text in enumerate(table) if index}

    def encode(text: str) -> list[int]:
        data, out = text.encode(), []
        while data:
            size = max(n for n in range(1, len(data) + 1) if data[:n] in ids)
            out.append(ids[data[:size]])
            data = data[size:]
        return out

    return TokenVocab(table, eos_ids=[0], encode=encode)


def test_accept_many_and_validate():
    at = matcher("abcab")
    ids = [IDS[b"ab"], IDS[b"c"], IDS[b"ab"], sv.EOS, IDS[b"a"]]
    assert at.validate(ids) == 4
    assert at.num_tokens == 0
    assert at.accept_tokens(ids) == 4
    assert at.is_terminated()
    assert at.validate([sv.EOS]) == 1
    at.reset()
    assert at.num_tokens == 0
    assert at.accept_tokens(ids[:2]) == 2
    assert "2 tokens, inside" in repr(at)


def test_bytes_count_as_one_token():
    at = matcher("道金!")
    assert at.accept_bytes("道".encode() + b"\xe9")
    assert at.num_tokens == 1
    assert not at.accept_bytes(b"x")
    at.rollback(1)
    assert at.accept_bytes("道金!".encode())
    assert at.is_accepting()
    assert at.is_complete()
    assert not matcher("ab*").is_complete()


def test_a_fork_goes_its_own_way():
    at = matcher("(ab|ac)*")
    at.accept_token(IDS[b"a"])
    fork = at.fork()
    assert fork.accept_token(IDS[b"b"])
    assert at.accept_token(IDS[b"c"])
    fork.rollback(2)
    assert at.num_tokens == 2
    assert fork.num_tokens == 0
    assert fork.compiled is at.compiled


def test_random_walks_end_inside_the_language():
    import re

    for pattern in ["[a-c]{2,9}x?", "(ab|abc|abcd)+e", '"[^"]{0,5}"', "-?(0|[1-9][0-9]*)"]:
        compiled = compile_regex(pattern).bind(VOCAB)
        for seed in range(15):
            rng = random.Random(seed)
            at, out = compiled.matcher(), b""
            for _ in range(60):
                allowed = mask(at)
                ended = sv.EOS in allowed and (rng.random() < 0.4 or len(allowed) == 1)
                token = sv.EOS if ended else rng.choice(sorted(allowed - {sv.EOS}))
                assert at.accept_token(token)
                if ended:
                    assert re.fullmatch(pattern, out.decode())
                    break
                out += VOCAB.token_bytes(token)


@pytest.mark.parametrize("make", [lambda a: a, pytest.importorskip("torch").from_numpy])
def test_kinds_of_bitmasks(make):
    at = matcher("[a-z]+")
    array = np.zeros((3, VOCAB.num_words), dtype=np.int32)
    assert at.fill_bitmask(make(array), 1)
    assert bits(array[1]) == mask(at)
    assert not array[[0, 2]].any()
    single = np.zeros(VOCAB.num_words, dtype=np.int32)
    at.fill_bitmask(make(single))
    assert (single == array[1]).all()
    at.fill_bitmask(make(array), -1)
    assert (array[2] == array[1]).all()


@pytest.mark.parametrize(
    ("bitmask", "row"),
    [
        (np.zeros((2, VOCAB.num_words), dtype=np.int64), 0),
        (np.zeros((2, VOCAB.num_words - 1), dtype=np.int32), 0),
        (np.zeros((2, VOCAB.num_words), dtype=np.int32), 2),
        (np.zeros((1, 1, VOCAB.num_words), dtype=np.int32), 0),
        ([0] * VOCAB.num_words, 0),
    ],
)
def test_bitmasks_that_do_not_fit(bitmask, row):
    with pytest.raises(ShapeError):
        matcher("a").fill_bitmask(bitmask, row)


def test_allocated_bitmasks_allow_everything():
    assert allocate_bitmask(2, 70).shape == (2, 3)
    assert (allocate_bitmask(2, 70) == -1).all()
    torch = pytest.importorskip("torch")
    made = allocate_bitmask(1, 33, backend="torch")
    assert made.dtype == torch.int32
    assert made.shape == (1, 2)
    with pytest.raises(ShapeError):
        allocate_bitmask(-1, 3)
    with pytest.raises(ShapeError):
        allocate_bitmask(1, 3, backend="jax")


def test_options_are_checked():
    for options in [{"max_rollback": -1}, {"stop_ids": [10**6]}, {"after_token": -3}]:
        with pytest.raises(ConfigError):
            matcher("a", **options)
    with pytest.raises(EmptyLanguage):
        CompiledGrammar(type("Nothing", (), {"start": 0})(), VOCAB)
    with pytest.raises(ConfigError):
        RowCache(-1)


def test_packing_of_ids():
    ids = np.array([70, 3, 31, 95, 32, 64], dtype=np.int32)
    for index, values in (pack_ids(ids), pack_few(ids.tolist())):
        row = np.zeros(4, dtype=np.int32)
        row[index] = values
        assert bits(row) == set(ids.tolist())
    assert len(pack_ids(np.zeros(0, dtype=np.int32))[0]) == 0


def test_compact_rows_hold_what_they_were_made_of():
    rng = np.random.default_rng(0)
    empty, full = np.zeros(4000, dtype=np.int32), np.full(4000, -1, dtype=np.int32)
    full[7] = 5
    for base, changed in [(empty, 10), (full, 10), (empty, 2500), (full, 0), (empty, 0)]:
        words = base.copy()
        words[rng.choice(4000, changed, replace=False)] = 12345
        row = MaskRow.compact(words, empty, full)
        assert (row.words() == words).all()
        out = np.full(4000, 77, dtype=np.int32)
        row.write(out)
        assert (out == words).all()
        assert (row.size_bytes < 1000) == (changed < 1000)


def test_the_cache_forgets_what_was_used_longest_ago():
    words = [np.full(10, n, dtype=np.int32) for n in range(4)]
    rows = [MaskRow(w, owns_base=True) for w in words]
    cache = RowCache(3 * rows[0].size_bytes)
    for n in range(3):
        cache.put(n, rows[n])
    assert cache.get(0) is rows[0]
    cache.put(3, rows[3])
    assert 1 not in cache
    assert cache.get(1) is None
    assert [n in cache for n in (0, 2, 3)] == [True, True, True]
    assert cache.size_bytes == 3 * rows[0].size_bytes
    assert (cache.num_hits, cache.num_misses, cache.num_evictions) == (1, 1, 1)
    cache.put(3, rows[3])
    assert len(cache) == 3
    tiny = RowCache(0)
    tiny.put(1, rows[1])
    tiny.put(2, rows[2])
    assert len(tiny) == 1
    assert 2 in tiny
    cache.clear()
    assert cache.size_bytes == len(cache) == 0


def test_requests_share_rows_and_a_cleared_grammar_goes_on():
    compiled = compile_regex("[a-z]+[0-9]*").bind(VOCAB)
    first, second = compiled.matcher(), compiled.matcher()
    before = mask(first)
    misses = compiled.rows.num_misses
    assert mask(second) == before
    assert compiled.rows.num_misses == misses
    assert compiled.has_row(second.state)
    compiled.clear()
    assert not compiled.has_row(second.state)
    assert mask(second) == before
    copied = pickle.loads(pickle.dumps(compile_regex("[a-z]+[0-9]*"))).bind(VOCAB)
    assert mask(copied.matcher()) == before


def test_threads_share_one_grammar():
    compiled = CompiledGrammar(toy_automata.json_values(), VOCAB, max_cache_bytes=20_000)
    expected = {}
    for text in (b"", b"{", b'{"a', b"[1", b'["x', b"-", b"[[[", b'{"a":[{"b'):
        state = compiled.advance_bytes(compiled.start_state, text)
        expected[state] = bits(compiled.row(state).words())
    compiled.clear()
    failures: list[object] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(150):
            state = rng.choice(list(expected))
            if bits(compiled.row(state).words()) != expected[state]:
                failures.append(state)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_batch_equals_single_rows():
    grammars = [compile_regex(p).bind(VOCAB) for p in ("[a-z]+", "[0-9]+x", "(ab)*")]
    matchers: list[GrammarMatcher | None] = []
    for n in range(12):
        at = grammars[n % 3].matcher(stop_ids=[1, 2] if n % 4 == 0 else None)
        at.accept_tokens([IDS[b"ab"], IDS[b"12"]][: n % 2])
        matchers.append(at)
    matchers[5] = None
    matchers.append(grammars[0].matcher(after_token=sv.THINK_END))
    rows = list(range(len(matchers) - 1, -1, -1))
    out = np.full((len(matchers), VOCAB.num_words), 7, dtype=np.int32)
    assert fill_batch(matchers, out, rows) == []
    for at, row in zip(matchers, rows, strict=True):
        if at is None:
            assert (out[row] == 7).all()
        else:
            assert bits(out[row]) == mask(at)
    with pytest.raises(ConfigError):
        fill_batch(matchers, out, [0])


def test_walks_over_the_whole_vocabulary_can_be_put_off(monkeypatch):
    compiled = [compile_regex(p).bind(VOCAB) for p in ("[a-z]+", "[a-y]+", "[a-x]+")]
    compiled[1].matcher().fill_bitmask(np.zeros(VOCAB.num_words, dtype=np.int32))
    calls = iter(range(100))
    monkeypatch.setattr(CompiledGrammar, "num_full_walks", property(lambda self: next(calls)))
    matchers = [
        compiled[0].matcher(),
        compiled[1].matcher(),
        compiled[2].matcher(),
        compiled[2].matcher(),
    ]
    out = np.zeros((4, VOCAB.num_words), dtype=np.int32)
    assert fill_batch(matchers, out, max_full_walks=1) == [2, 3]
    assert out[0].any()
    assert out[1].any()  # its row was there
    assert not out[2:].any()
    later = fill_batch(matchers[2:], out, [2, 3], max_full_walks=1)
    assert later == []
    assert bits(out[3]) == mask(matchers[3])


def test_forced_bytes():
    assert matcher('"name": [a-z]').forced_bytes() == b'"name": '
    assert matcher("abc|abd").forced_bytes() == b"ab"
    assert matcher("(abc)?").forced_bytes() == b""
    assert matcher("a{2000}").forced_bytes(16) == b"a" * 16
    assert matcher("abc", after_token=4).forced_bytes() == b""
    at = matcher("abc")
    at.accept_tokens([IDS[b"abc"], sv.EOS])
    assert at.forced_bytes() == b""
    assert at.forced_tokens() == []


def test_forced_tokens_leave_out_what_could_go_on():
    vocab = spelling_vocab("order", "orderId", '":', '", "', "na", "me", '"}')
    ids = {vocab.token_bytes(i): i for i in range(1, len(vocab))}

    def forced(pattern: str) -> list[bytes]:
        at = compile_regex(pattern).bind(vocab).matcher()
        found = at.forced_tokens()
        assert at.accept_tokens(found) == len(found)
        return [vocab.token_bytes(i) for i in found]

    assert forced("order[0-9]") == [b"order"]  # nothing that begins here goes on into a digit
    assert forced("order(Id|Ie)") == [b"order"] or forced("order(Id|Ie)") == []
    assert forced("order(Id)?[0-9]") == []  # `orderId` is one token
    assert forced("name(:|=)x") == [b"na", b"me"]
    assert forced('name(":|"})') == [b"na", b"me"]  # the quote might be `":` or `"}`
    assert forced("nam(e|f)") == [b"na"]  # `m` might become `me`
    assert ids[b"order"] in compile_regex("order").bind(vocab).matcher().forced_tokens()
    plain = TokenVocab([b"<eos>", b"a"], eos_ids=[0])
    assert compile_regex("aa").bind(plain).matcher().forced_tokens() == []


def test_forced_tokens_hold_whole_characters():
    table = [b"<eos>", "é".encode(), b"\xc3", b"\xa9", b"a"]
    vocab = TokenVocab(table, eos_ids=[0], encode=lambda text: [1 if c == "é" else 4 for c in text])
    at = compile_regex("aéa").bind(vocab).matcher()
    assert at.forced_tokens() == [4, 1, 4]
    at.accept_tokens([4, 2])
    assert at.forced_bytes() == b"\xa9a"
    assert at.forced_tokens() == []  # inside of a character


def test_the_engine_can_hold_it():
    compiled = compile_regex("abc?").bind(VOCAB)
    assert isinstance(compiled, protocols.Grammar)
    state = compiled.start()
    wanted = {name for name in vars(protocols.GrammarState) if name[0] != "_"}
    assert wanted <= set(dir(state))
    assert not state.is_done
    assert not state.accept([IDS[b"ab"], IDS[b"x"]])
    assert state.accept([IDS[b"ab"]])
    copied = state.clone()
    assert copied.accept([IDS[b"c"]])
    assert copied.is_done
    assert not state.is_done
    row = np.zeros(VOCAB.num_words, dtype=np.int32)
    state.fill_mask(row)
    assert bits(row) == mask(state.matcher)
    state.rollback(1)
    assert state.accept([IDS[b"abc"]])
    rows = np.zeros((2, VOCAB.num_words), dtype=np.int32)
    assert state.fill_draft(rows, [sv.EOS]) == 1


def test_import_loads_no_torch():
    code = "import sys, deepinfer.grammar.matcher, deepinfer.grammar.batch, deepinfer.grammar.apply; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
