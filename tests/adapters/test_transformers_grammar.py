"""The logits processor: by hand, and in `generate` of a real small model."""

from __future__ import annotations

import pytest
import torch

from deepinfer.adapters import GrammarLogitsProcessor
from deepinfer.core.errors import ConfigError, ShapeError
from deepinfer.grammar import CompiledGrammar, TokenVocab, choices, compile_regex

EOS, PAD = 256, 257
WIDTH = 300


@pytest.fixture
def vocab() -> TokenVocab:
    pieces = [bytes([b]) for b in range(256)] + [None, None, b"yes", b"no", b"12"]
    return TokenVocab(pieces, eos_ids=[EOS], special_ids=[PAD], vocab_size=len(pieces))


@pytest.fixture
def answers(vocab: TokenVocab) -> CompiledGrammar:
    return choices(["yes", "no", "maybe"]).bind(vocab)


def allowed(scores: torch.Tensor) -> list[set[int]]:
    return [set((row > -torch.inf).nonzero().flatten().tolist()) for row in scores]


def test_rows_move_beams_and_ends(answers: CompiledGrammar) -> None:
    processor = GrammarLogitsProcessor(answers)
    prompt = torch.tensor([[5, 6], [7, 8]])
    scores = torch.zeros(2, WIDTH)
    out = processor(prompt, scores)
    assert (scores == 0).all()
    assert allowed(out) == [{ord("y"), ord("n"), ord("m"), 258, 259}] * 2

    def step(*rows: list[int]) -> list[set[int]]:
        ids = torch.cat([prompt, torch.tensor(rows)], 1)
        return allowed(processor(ids, scores))

    assert step([ord("n")], [ord("m")]) == [{ord("o")}, {ord("a")}]
    # The beams change places, and one of them is continued twice.
    assert step([ord("m"), ord("a")], [ord("m"), ord("a")]) == [{ord("y")}, {ord("y")}]
    processor.reset()
    processor(prompt, scores)
    assert step([258], [ord("y")]) == [{EOS}, {ord("e")}]
    everything = set(range(WIDTH))
    assert step([258, EOS], [ord("y"), ord("e")]) == [everything, {ord("s")}]
    assert step([258, EOS, PAD], [ord("y"), ord("e"), ord("s")]) == [everything, {EOS}]


def test_a_grammar_for_each_row(answers: CompiledGrammar, vocab: TokenVocab) -> None:
    digits = compile_regex("[0-9]{2}").bind(vocab)
    processor = GrammarLogitsProcessor([None, digits, answers])
    out = allowed(processor(torch.zeros(3, 1, dtype=torch.long), torch.zeros(3, WIDTH)))
    assert out[0] == set(range(WIDTH))
    assert out[1] == {*b"0123456789", 260}
    assert out[2] == {ord("y"), ord("n"), ord("m"), 258, 259}
    with pytest.raises(ShapeError, match="there are 2 rows of scores and 3 can be served"):
        processor(torch.zeros(2, 1, dtype=torch.long), torch.zeros(2, WIDTH))
    with pytest.raises(ConfigError, match="leave the processor out"):
        GrammarLogitsProcessor([None])


def test_a_real_model_generates_in_the_grammar(vocab: TokenVocab) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WIDTH,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        eos_token_id=EOS,
        pad_token_id=PAD,
        bos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    grammar = compile_regex(r"(yes|no), \d{1,3}(\.\d)?")
    compiled = grammar.bind(vocab)
    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])

    def texts(ids: torch.Tensor) -> list[str]:
        found = []
        for row in ids[:, prompt.shape[1] :].tolist():
            assert EOS in row
            found.append(b"".join(vocab.token_bytes(i) for i in row[: row.index(EOS)]).decode())
        return found

    for options in (
        {"do_sample": False},
        {"do_sample": True, "num_return_sequences": 4},
        {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    ):
        ids = model.generate(
            prompt,
            max_new_tokens=16,
            logits_processor=[GrammarLogitsProcessor(compiled)],
            **options,
        )
        written = texts(ids)
        assert len(written) == 2 * options.get("num_return_sequences", 1)
        assert [text for text in written if not grammar.matches(text)] == []
