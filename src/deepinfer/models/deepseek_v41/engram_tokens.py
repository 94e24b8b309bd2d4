"""Folding of token ids for Engram: ids whose texts differ only in case, accents or spaces become one."""

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["TOKEN_MAP_FILE", "build_token_map"]

TOKEN_MAP_FILE = "engram_token_map.json"
"""Name of the file beside a checkpoint that holds the map as a JSON list."""

_UNDECODABLE = "\ufffd"
_SPACES = re.compile(r"[ \t\r\n]+")


def build_token_map(tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Computes the folding from a tokenizer; a second or so for a large vocabulary, so keep the result.

    Every id is decoded alone. Its text is normalised (NFKC, NFD, accents dropped, lower case, runs of spaces
    to one space, stripped; a lone space stays). Ids with equal normalised texts share a folded id; folded ids
    are numbered in order of first appearance. A piece that is no text of its own (bytes of a longer character)
    is keyed by its token; a text that normalises to nothing is keyed by itself.

    Args:
        tokenizer: The checkpoint's tokenizer.
        vocab_size: Ids to fold, from 0.

    Returns:
        Folded id of every id, shape [vocab].
    """
    folded: dict[str, int] = {}
    return [folded.setdefault(_key(tokenizer, i), len(folded)) for i in range(vocab_size)]


def _key(tokenizer: Tokenizer, token_id: int) -> str:
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    if _UNDECODABLE in text:
        return tokenizer.id_to_token(token_id) or text
    plain = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    plain = "".join(c for c in plain if unicodedata.category(c)[0] != "M").lower()
    plain = _SPACES.sub(" ", plain)
    return plain if plain == " " else plain.strip() or text
