"""Grammars in the shapes that serving engines want, without those engines."""

from __future__ import annotations

import abc
import enum
import importlib
import sys
import types
from typing import Any

import pytest
import torch

from deepinfer.adapters import (
    SglangGrammarBackend,
    VllmGrammarBackend,
    register_with_sglang,
    sglang_grammar,
    vllm_grammar,
)
from deepinfer.core.errors import (
    ConfigError,
    GrammarSyntaxError,
    InvalidRequest,
    MissingDependency,
)
from deepinfer.grammar import TokenVocab

EOS = 256
PIECES = [bytes([b]) for b in range(256)] + [None, b"yes", b"ye", b"no", "é".encode()]
WIDTH = 288  # more columns than tokens


@pytest.fixture
def vocab() -> TokenVocab:
    return TokenVocab(PIECES, eos_ids=[EOS], vocab_size=WIDTH)


def ids_of(row: torch.Tensor) -> set[int]:
    words = [int(word) & 0xFFFFFFFF for word in row]
    return {32 * at + bit for at, word in enumerate(words) for bit in range(32) if word >> bit & 1}


class Options(enum.Enum):
    CHOICE = enum.auto()
    REGEX = enum.auto()


def test_vllm_backend(vocab: TokenVocab) -> None:
    backend = VllmGrammarBackend(None, None, WIDTH, vocab=vocab)
    grammar = backend.compile_grammar(Options.CHOICE, '["yes", "no"]')
    bitmask = backend.allocate_token_bitmask(2)
    assert bitmask.shape == (2, WIDTH // 32)
    assert bitmask.dtype == torch.int32
    grammar.fill_bitmask(bitmask, 1)
    assert ids_of(bitmask[0]) == set(range(WIDTH))
    assert ids_of(bitmask[1]) == {ord("y"), ord("n"), 257, 258, 259}
    assert grammar.validate_tokens([258, ord("s"), EOS, 5]) == [258, ord("s"), EOS]
    assert grammar.accept_tokens("r", [258])
    assert not grammar.accept_tokens("r", [ord("x")])
    assert grammar.accept_tokens("r", [ord("s")])
    assert not grammar.is_terminated()
    grammar.fill_bitmask(bitmask, 0)
    assert ids_of(bitmask[0]) == {EOS}
    assert grammar.accept_tokens("r", [EOS, 7])
    assert grammar.is_terminated()
    grammar.rollback(2)
    assert not grammar.is_terminated()
    assert grammar.num_processed_tokens == 1
    assert grammar.validate_tokens([ord("s")]) == [ord("s")]
    grammar.reset()
    assert grammar.num_processed_tokens == 0
    assert grammar.validate_tokens([259, EOS]) == [259, EOS]
    stops = backend.compile_grammar("REGEX", "a", {EOS, 5})
    assert stops.accept_tokens("r", [ord("a")])
    stops.fill_bitmask(bitmask, 0)
    assert ids_of(bitmask[0]) == {EOS, 5}
    with pytest.raises(ConfigError, match="StructuredOutputOptions"):
        backend.compile_grammar(3, "a")
    with pytest.raises(GrammarSyntaxError):
        backend.compile_grammar("REGEX", "(")
    backend.destroy()


def test_sglang_backend(vocab: TokenVocab) -> None:
    backend = SglangGrammarBackend(None, WIDTH, vocab=vocab)
    grammar = backend.dispatch_regex("aé(yes|no)")
    mask = grammar.allocate_vocab_mask(WIDTH, 2, "cpu")
    grammar.fill_vocab_mask(mask, 0)
    logits = torch.zeros(2, WIDTH + 5)
    grammar.apply_vocab_mask(logits, grammar.move_vocab_mask(mask, "cpu"))
    assert (logits[0] == 0).nonzero().flatten().tolist() == [ord("a")]
    assert (logits[1] == 0).sum() == WIDTH
    row = types.SimpleNamespace(row=1, grammar=grammar)
    grammar.fill_vocab_mask_batched([row], mask)
    assert (mask[0] == mask[1]).all()
    grammar.reset_vocab_mask(mask)
    assert (mask == -1).all()
    assert grammar.try_jump_forward(None) == ([], "aé")
    assert grammar.jump_forward_str_state(([], "aé")) == ("aé", -1)
    grammar.accept_token(ord("a"))
    grammar.accept_token(0xC3)
    grammar.jump_and_retokenize([ord("a"), 0xC3], [ord("a"), 260, 258], -1)
    assert grammar.try_jump_forward(None) == ([], "s")
    with pytest.raises(InvalidRequest, match="the grammar refuses token 5"):
        grammar.accept_token(5)
    fresh = grammar.copy()
    fresh.accept_token(ord("a"))
    for token in (ord("s"), EOS, 9):
        grammar.accept_token(token)
    assert grammar.is_terminated()
    assert grammar.current_token == EOS
    grammar.rollback(1)
    assert not grammar.is_terminated()
    assert not fresh.is_terminated()
    assert fresh.try_jump_forward(None) == ([], "é")
    for text in ("{}", "[]"):
        assert backend.dispatch_json("$$ANY$$").matcher.validate([*text.encode(), EOS]) == 3
    assert backend.dispatch_json('{"type": "null"}').try_jump_forward(None) == ([], "null")
    assert backend.dispatch_ebnf('root ::= "x"').try_jump_forward(None) == ([], "x")
    tag = backend.dispatch_structural_tag('{"format": {"type": "any_text"}}')
    assert tag.try_jump_forward(None) is None
    with pytest.raises(GrammarSyntaxError):
        backend.dispatch_regex("(")
    backend.reset()


def test_registering_needs_sglang() -> None:
    with pytest.raises(MissingDependency, match="sglang"):
        register_with_sglang()


def module(name: str, **members: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(members)
    return made


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """Stands in for an installed host: a module with its base classes, and the adapter loaded on top of it."""

    def load(path: str, adapter: types.ModuleType, **members: Any) -> types.ModuleType:
        parts = path.split(".")
        for at in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:at]), module(".".join(parts[:at])))
        monkeypatch.setitem(sys.modules, path, module(path, **members))
        return importlib.reload(adapter)

    yield load
    monkeypatch.undo()
    importlib.reload(vllm_grammar)
    importlib.reload(sglang_grammar)


def test_vllm_classes_are_those_of_an_installed_vllm(installed: Any, vocab: TokenVocab) -> None:
    methods = (
        "accept_tokens",
        "validate_tokens",
        "rollback",
        "fill_bitmask",
        "is_terminated",
        "reset",
    )
    grammar_base = abc.ABCMeta(
        "StructuredOutputGrammar",
        (),
        {name: abc.abstractmethod(lambda self: None) for name in methods},
    )
    methods = ("compile_grammar", "allocate_token_bitmask", "destroy")
    backend_base = abc.ABCMeta(
        "StructuredOutputBackend",
        (),
        {name: abc.abstractmethod(lambda self: None) for name in methods},
    )
    adapter = installed(
        "vllm.v1.structured_output.backend_types",
        vllm_grammar,
        StructuredOutputGrammar=grammar_base,
        StructuredOutputBackend=backend_base,
    )
    backend = adapter.VllmGrammarBackend(None, None, WIDTH, vocab=vocab)
    assert isinstance(backend, backend_base)
    assert isinstance(backend.compile_grammar("REGEX", "a"), grammar_base)


def test_sglang_classes_are_those_of_an_installed_sglang(installed: Any, vocab: TokenVocab) -> None:
    class BaseGrammarObject:
        def __init__(self) -> None:
            self.grammar_stats = None

    class BaseGrammarBackend:
        def __init__(self) -> None:
            self.cache = {"x": 1}

        def reset(self) -> None:
            self.cache.clear()

    class InvalidGrammarObject(BaseGrammarObject):
        def __init__(self, error_message: str) -> None:
            self.error_message = error_message

    registry = {}
    adapter = installed(
        "sglang.srt.constrained.base_grammar_backend",
        sglang_grammar,
        BaseGrammarObject=BaseGrammarObject,
        BaseGrammarBackend=BaseGrammarBackend,
        InvalidGrammarObject=InvalidGrammarObject,
        register_grammar_backend=registry.__setitem__,
    )
    adapter.register_with_sglang("ours")
    backend = adapter.SglangGrammarBackend(None, WIDTH, vocab=vocab)
    assert isinstance(backend, BaseGrammarBackend)
    assert isinstance(backend.dispatch_regex("a"), BaseGrammarObject)
    assert backend.dispatch_regex("(").error_message.startswith("at character 0")
    backend.reset()
    assert backend.cache == {}
    tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_str(TINY)
    made = registry["ours"](None, tokenizer, 4, [3])
    assert made.dispatch_regex("ab").matcher.validate([2, 3]) == 2


TINY = (
    '{"version": "1.0", "added_tokens": [{"id": 3, "content": "<eos>", "single_word": false, "lstrip": false, '
    '"rstrip": false, "normalized": false, "special": true}], "pre_tokenizer": {"type": "ByteLevel", '
    '"add_prefix_space": false, "trim_offsets": true, "use_regex": false}, "decoder": {"type": "ByteLevel", '
    '"add_prefix_space": false, "trim_offsets": true, "use_regex": false}, '
    '"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}}'
)
