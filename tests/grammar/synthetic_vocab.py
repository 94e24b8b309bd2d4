"""A small vocabulary with what makes masks go wrong: split characters, twins, control tokens, padding."""

from __future__ import annotations

from deepinfer.grammar.vocab import TokenVocab

EOS = 1
SECOND_EOS = 2
THINK_END = 4

_CONTROL = [b"<bos>", b"<eos>", b"<end_of_turn>", b"<think>", b"</think>"]
_PIECES = """the of and in ab abc abcd bcd abce aa aaa aaaa aaaaaaaa bb ba bab yes no ye name value null true false tr ue
 (( )) ))) ((( () )( [[ ]] {" "} ": ", "a "b" :" ,, {} [] \\" \\n \\\\ \\u 00 01 12 123 10 99 -1 0. .5 1e e+ <think> <th ink>
 = == + ++ ** // ; ;; SEL ECT FROM select final answer """.split()
_EXTRA = [
    *[b" " * n for n in (1, 2, 3, 4, 8, 16)],
    *[
        b"\n",
        b"\n\n",
        b"\n  ",
        b"\t",
        b"\r\n",
        b" the",
        b" a",
        b' "',
        b'": "',
        b'":',
        b'", "',
        b"'",
        b'\\\\"',
    ],
    "é".encode(),
    "è".encode(),
    "道".encode(),
    "一".encode(),
    "龥".encode(),
    "ж".encode(),
    "а".encode(),
    "😀".encode(),
    "🙏".encode(),
    "道金".encode(),
    "éa".encode(),
    *[
        b"\xc3",
        b"\xa9",
        b"\xe9",
        b"\x81\x93",
        b"\xe9\x81",
        b"\x93",
        b"\xf0\x9f",
        b"\x98\x80",
        b"\xf0",
        b"\x9f\x98",
        b"\x80",
    ],
    *[b"\xc0\x80", b"\xc0", b"\xff", b"\xed\xa0\x80", b"a\xc3", b"\xa9b", b'\x93"'],
    b"-" * 40,
    b" " * 128,
    b"a" * 100,
]


def synthetic_vocab(*, padding: int = 5, **options) -> TokenVocab:
    """Control tokens 0 to 4, every single byte, whole and split pieces, twins of some, ids without text."""
    tokens: list[bytes | None] = list(_CONTROL)
    tokens += [bytes([b]) for b in range(256)]
    tokens += [p.encode() for p in _PIECES] + _EXTRA
    tokens += [
        b"a",
        b'"',
        b"abc",
        b"\xe9",
        b"",
    ]  # twins, as byte fallback and added tokens make them
    tokens += [None]
    return TokenVocab(
        tokens,
        eos_ids=[EOS],
        special_ids=[0, 2, 3, 4],
        vocab_size=len(tokens) + padding,
        **options,
    )
