"""The bytes that each token of a tokenizer stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.core.errors import ConfigError

__all__ = ["TokenTable", "knows_its_bytes", "read_tokenizer"]

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MARKER = re.compile(r"<[^<>]+>|<\|.+\|>|\[[A-Z_0-9]+\]")
_EOS_NAMES = (
    "<｜end▁of▁sentence｜>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|im_end|>",
    "</s>",
    "<eos>",
    "<end_of_turn>",
    "<|return|>",
)


@dataclass(frozen=True)
class TokenTable:
    """What a tokenizer file says about its tokens.

    Attributes:
        token_bytes: Bytes of each id; empty for an id that no text yields.
        special_ids: Ids of control tokens, ascending.
        eos_ids: Ids of the control tokens whose text is one of the usual ends of an output, ascending.
    """

    token_bytes: list[bytes]
    special_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]


def read_tokenizer(tokenizer: Any) -> TokenTable:
    """Reads the tokens of a tokenizer.

    Byte-level pieces, whose characters each stand for one byte, are told from SentencePiece ones by the tokenizer's
    decoder and pre-tokenizer. In the latter `▁` is a space and `<0x41>` is a byte. An added token is a control token
    when it is marked special, or when its text has the form of a marker, such as `<|name|>`; other added tokens are
    text.

    Args:
        tokenizer: A `tokenizers.Tokenizer`, an object that holds one as `backend_tokenizer` or `_tokenizer`, the
            tokenizer of an engine, which says its bytes and control tokens itself, or the path of a `tokenizer.json`
            or of its folder.

    Returns:
        The table.

    Raises:
        ConfigError: It is none of these, or the file holds no vocabulary.
    """
    if knows_its_bytes(tokenizer):
        return _told_by(tokenizer)
    data = _load(tokenizer)
    model = data.get("model") or {}
    pieces = _pieces(model)
    added = {entry["id"]: entry for entry in data.get("added_tokens") or ()}
    if not pieces and not added:
        raise ConfigError(
            "the tokenizer has no vocabulary; give a tokenizer.json with model.vocab",
            field="tokenizer",
        )
    size = 1 + max([*pieces.values(), *added])
    table = [b""] * size
    byte_level = _uses(data.get("decoder"), "ByteLevel") or _uses(
        data.get("pre_tokenizer"), "ByteLevel"
    )
    convert = _byte_level if byte_level else _sentencepiece
    names = list(pieces)
    for index, text in zip(pieces.values(), convert(names), strict=True):
        table[index] = text
    special = set()
    for index, entry in added.items():
        table[index] = entry["content"].encode("utf-8", "surrogatepass")
        if entry.get("special") or _MARKER.fullmatch(entry["content"]):
            special.add(index)
    if not byte_level:
        # Control pieces of SentencePiece models that the file does not list as added.
        for name in ("<s>", "</s>", "<unk>", "<pad>"):
            if name in pieces:
                special.add(pieces[name])
    unknown = model.get("unk_token")
    if isinstance(unknown, str) and unknown in pieces:
        special.add(pieces[unknown])
    ends = {name.encode() for name in _EOS_NAMES}
    eos = tuple(sorted(index for index in special if table[index] in ends))
    return TokenTable(table, tuple(sorted(special)), eos)


def knows_its_bytes(tokenizer: Any) -> bool:
    """Whether a tokenizer says the bytes and the control tokens itself, as an engine's does.

    What such a one holds inside need not know its control tokens, and must not be read in its place.

    Args:
        tokenizer: Any object.

    Returns:
        Whether it has `token_bytes`, `vocab_size`, `control_ids` and `eos_token_ids`.
    """
    names = ("token_bytes", "vocab_size", "control_ids", "eos_token_ids")
    return all(hasattr(tokenizer, name) for name in names)


def _told_by(tokenizer: Any) -> TokenTable:
    size = int(tokenizer.vocab_size)
    ends = {int(token) for token in tokenizer.eos_token_ids}
    special = {int(token) for token in tokenizer.control_ids} | ends
    return TokenTable(
        [bytes(tokenizer.token_bytes(token)) for token in range(size)],
        tuple(sorted(special)),
        tuple(sorted(ends)),
    )


def _load(tokenizer: Any) -> Mapping[str, Any]:
    if isinstance(tokenizer, str | Path):
        path = Path(tokenizer)
        path = path / "tokenizer.json" if path.is_dir() else path
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"cannot read a tokenizer at {str(path)!r} ({error}); give a tokenizer.json or its folder",
                field="tokenizer",
                value=str(path),
            ) from error
    else:
        for name in ("backend_tokenizer", "_backend", "_tokenizer"):
            tokenizer = getattr(tokenizer, name, tokenizer)
        if not hasattr(tokenizer, "to_str"):
            raise ConfigError(
                f"a {type(tokenizer).__name__} is no tokenizer; give a tokenizers.Tokenizer, the path of a "
                "tokenizer.json, or build TokenVocab from the bytes of each token",
                field="tokenizer",
            )
        text = tokenizer.to_str()
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"the tokenizer file is not valid JSON ({error}); check that it is whole",
            field="tokenizer",
        ) from error
    if not isinstance(data, dict):
        raise ConfigError("the tokenizer file holds no JSON object", field="tokenizer")
    return data


def _pieces(model: Mapping[str, Any]) -> dict[str, int]:
    """Piece to id; a Unigram model lists pairs of piece and score instead."""
    vocab = model.get("vocab") or {}
    if isinstance(vocab, list):
        return {entry[0]: index for index, entry in enumerate(vocab)}
    return dict(vocab)


def _uses(part: Any, kind: str) -> bool:
    """Whether a decoder or pre-tokenizer is of a kind, or a sequence with one of it."""
    if not isinstance(part, dict):
        return False
    if part.get("type") == kind:
        return True
    return any(
        _uses(inner, kind) for key in ("decoders", "pretokenizers") for inner in part.get(key) or ()
    )


def _byte_level_table() -> np.ndarray[Any, np.dtype[np.int16]]:
    """Byte of each character of the byte-level alphabet, -1 elsewhere.

    Printable Latin-1 characters stand for themselves; the other 68 bytes, in order, for U+0100 onwards.
    """
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = np.full(256 + 68, -1, dtype=np.int16)
    table[plain] = plain
    rest = sorted(set(range(256)) - set(plain))
    table[256 : 256 + len(rest)] = rest
    return table


def _byte_level(pieces: Sequence[str]) -> list[bytes]:
    table = _byte_level_table()
    text = "".join(pieces)
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    known = codes < len(table)
    values = np.where(known, table[np.where(known, codes, 0)], -1)
    data = values.astype(np.uint8).tobytes()
    wrong = np.append(0, np.cumsum(values < 0)).tolist()
    out, at = [], 0
    for piece in pieces:
        end = at + len(piece)
        if wrong[at] == wrong[end]:
            out.append(data[at:end])
        else:  # not of the alphabet: a piece that stands for its own text
            out.append(piece.encode("utf-8", "surrogatepass"))
        at = end
    return out


def _sentencepiece(pieces: Sequence[str]) -> list[bytes]:
    out = []
    for piece in pieces:
        byte = _BYTE_FALLBACK.fullmatch(piece)
        if byte:
            out.append(bytes([int(byte[1], 16)]))
        else:
            out.append(piece.replace("▁", " ").encode("utf-8", "surrogatepass"))
    return out
