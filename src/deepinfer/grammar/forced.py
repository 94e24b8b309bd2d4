"""What must come next: bytes that every continuation begins with, and the tokens that spell them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer.grammar.compiled import CompiledGrammar

__all__ = ["forced_bytes", "forced_tokens"]


def forced_bytes(compiled: CompiledGrammar, state: int, max_bytes: int) -> bytes:
    """The bytes that every continuation of a live state begins with; see `GrammarMatcher.forced_bytes`."""
    return _forced(compiled, state, max_bytes)[0]


def _forced(compiled: CompiledGrammar, state: int, max_bytes: int) -> tuple[bytes, int]:
    states, out = compiled.builder.states, bytearray()
    while len(out) < max_bytes and not compiled.accepting(state):
        live = states.moves(state)[1]
        if live is None or len(live) != 1:
            break
        byte, state = live[0]
        out.append(byte)
    return bytes(out), state


def forced_tokens(compiled: CompiledGrammar, state: int, max_tokens: int) -> list[int]:
    """The tokens that every continuation of a live state begins with; see `GrammarMatcher.forced_tokens`."""
    encode = compiled.vocab.encode
    if encode is None or max_tokens <= 0:
        return []
    data, last = _forced(compiled, state, 32 * max_tokens)
    text = _whole_characters(data)
    if not text:
        return []
    limit = _first_straddled(compiled, data, last)
    out: list[int] = []
    end = 0
    for token_id in encode(text):
        piece = compiled.vocab.token_bytes(token_id)
        # A tokenizer that rewrites text, or a control token in it, ends what can be said.
        if not compiled.is_text(token_id) or data[end : end + len(piece)] != piece:
            break
        end += len(piece)
        if end > limit or len(out) == max_tokens:
            break
        out.append(token_id)
    return out


def _whole_characters(data: bytes) -> str:
    """The text of the longest beginning that is whole characters; empty where it begins inside of one."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode()


def _first_straddled(compiled: CompiledGrammar, data: bytes, last: int) -> int:
    """The first place from which some token goes on past the end of the forced bytes, in bytes.

    `last` is the state behind them: only tokens that it allows to go on count. Where it allows nothing, no token does.
    """
    trie, states = compiled.vocab.trie, compiled.builder.states
    row = states.moves(last)[0]
    longest = compiled.vocab.max_token_bytes
    for start in range(max(0, len(data) - longest + 1), len(data)):
        node = trie.find(data[start:])
        if node < 0:
            continue
        for child in range(trie.children[node], trie.children[node + 1]):
            if row[states.classes[trie.labels[child]]]:
                return start
    return len(data)
