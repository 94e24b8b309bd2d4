"""A vocabulary as token masks need it: the bytes of each id, which ids end an output, and a trie."""

from __future__ import annotations

import hashlib
import importlib.util
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.core._checks import check_int, show
from deepinfer.core.errors import ConfigError
from deepinfer.grammar.argument_checks import MAX_IDS, check_ids
from deepinfer.grammar.byte_loops import ByteLoops
from deepinfer.grammar.mask_splits import TrieSplits
from deepinfer.grammar.slices import Slice, build_slices
from deepinfer.grammar.text_kinds import TextKinds
from deepinfer.grammar.token_bytes import knows_its_bytes, read_tokenizer
from deepinfer.grammar.trie import TokenTrie
from deepinfer.grammar.trie_cache import load_or_build

__all__ = ["TokenVocab"]


class TokenVocab:
    """The tokens of a model as byte strings.

    Immutable and safe to share between threads. A bit of a mask belongs to an id, and ids with equal bytes all get it.
    Control tokens stand for no text: they are in no mask, except where an output may end (`eos_ids`) or where a
    grammar is bound with their names as text (`text_ids` of `CompiledGrammar`).

    Args:
        token_bytes: Bytes of each id, in order; empty or None for an id that is never text.
        eos_ids: Ids that end an output; there may be several or none.
        special_ids: Control tokens. Those in `eos_ids` count as such without being named here.
        vocab_size: Columns of the logits; ids from `len(token_bytes)` up to it are padding, never allowed. None for
            `len(token_bytes)`.
        encode: Turns text into ids as the tokenizer does it, without added control tokens, or None. Forced tokens
            need it.
        cache_dir: Folder where the trie is kept between processes, or None to build it each time.

    Raises:
        ConfigError: A token is no byte string, an id is outside of the vocabulary, or `vocab_size` is smaller than it, or
            larger than 2 ** 24.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes | None],
        *,
        eos_ids: Iterable[int] = (),
        special_ids: Iterable[int] = (),
        vocab_size: int | None = None,
        encode: Callable[[str], list[int]] | None = None,
        cache_dir: str | Path | None = None,
    ) -> None:
        self._token_bytes = _byte_strings(token_bytes)
        self.num_tokens = len(self._token_bytes)
        if vocab_size is None:
            vocab_size = self.num_tokens
        self.vocab_size = check_int("vocab_size", vocab_size, 0, MAX_IDS, ConfigError)
        if self.vocab_size < self.num_tokens:
            raise ConfigError(
                f"vocab_size is {self.vocab_size}, but there are {self.num_tokens} tokens; give the number of "
                "columns of the logits, which is at least as large",
                field="vocab_size",
                value=vocab_size,
            )
        self.eos_ids = check_ids("eos_ids", eos_ids, self.vocab_size)
        special = check_ids("special_ids", special_ids, self.vocab_size)
        self.special_ids = frozenset(special) | frozenset(self.eos_ids)
        self.num_words = -(-self.vocab_size // 32)
        self.encode = encode
        self._cache_dir = None if cache_dir is None else Path(cache_dir)
        # Distinct strings in byte order, and the ids of each: those of rank r are rank_ids[offset[r] : offset[r + 1]].
        plain = [
            i for i, text in enumerate(self._token_bytes) if text and i not in self.special_ids
        ]
        plain.sort(key=self._token_bytes.__getitem__)
        texts = [self._token_bytes[i] for i in plain]
        ids = np.asarray(plain, dtype=np.int32)
        first = np.ones(len(texts), dtype=bool)
        for k in range(1, len(texts)):
            if texts[k] == texts[k - 1]:
                first[k] = False
        at = np.flatnonzero(first)
        self.strings: list[bytes] = texts if len(at) == len(texts) else [texts[k] for k in at]
        self.rank_ids: NDArray[np.int32] = ids
        self.rank_offset: NDArray[np.int32] = np.append(at, len(ids)).astype(np.int32)
        self.id_of_rank: NDArray[np.int32] = ids[at]
        self._slice_words: dict[str, NDArray[np.int32]] = {}
        self._has_twins = len(at) < len(ids)
        self.shared: dict[
            str, Any
        ] = {}  # what the grammars over the vocabulary share, by who keeps it

    @classmethod
    def from_tokenizer(
        cls,
        tokenizer: Any,
        *,
        eos_ids: Iterable[int] | None = None,
        vocab_size: int | None = None,
        cache_dir: str | Path | None = None,
    ) -> TokenVocab:
        """Reads the vocabulary of a tokenizer.

        Args:
            tokenizer: A `tokenizers.Tokenizer`, an object that wraps one, an engine's tokenizer, or the path of a
                `tokenizer.json` or of its folder.
            eos_ids: Ids that end an output. None takes the control tokens with a usual name for it; a model's
                generation config says it better.
            vocab_size: Columns of the logits, or None for the number of tokens.
            cache_dir: Folder where the trie is kept between processes, or None.

        Returns:
            The vocabulary.

        Raises:
            ConfigError: This is no tokenizer, or an id is out of range.
        """
        table = read_tokenizer(tokenizer)
        return cls(
            table.token_bytes,
            eos_ids=table.eos_ids if eos_ids is None else eos_ids,
            special_ids=table.special_ids,
            vocab_size=vocab_size,
            encode=_encoder(tokenizer),
            cache_dir=cache_dir,
        )

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of an id.

        Args:
            token_id: Any id from 0 to `vocab_size - 1`.

        Returns:
            Its bytes; empty for padding and for ids without text. A control token has those of its name.
        """
        return self._token_bytes[token_id] if 0 <= token_id < self.num_tokens else b""

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that masks depend on: the bytes of each id, control tokens, ends, and the width."""
        digest = hashlib.sha256(b"deepinfer token vocabulary 1")
        lengths = np.fromiter(map(len, self._token_bytes), dtype=np.int64, count=self.num_tokens)
        special = np.asarray(sorted(self.special_ids), dtype=np.int64)
        ends = np.asarray(self.eos_ids, dtype=np.int64)
        for numbers in (lengths, special, ends, np.asarray([self.vocab_size], dtype=np.int64)):
            digest.update(len(numbers).to_bytes(8, "little") + numbers.tobytes())
        digest.update(b"".join(self._token_bytes))
        return digest.hexdigest()

    @cached_property
    def _parts(self) -> tuple[TokenTrie, tuple[Slice, ...]]:
        return load_or_build(self._cache_dir, self.fingerprint, self._build)

    def _build(self) -> tuple[TokenTrie, tuple[Slice, ...]]:
        trie = TokenTrie.build(self.strings)
        return trie, build_slices(trie, self.strings)

    def prepare(self) -> None:
        """Builds now what masks need, rather than when the first one is asked for."""
        self.splits  # noqa: B018 - made on first use, and so is all that it stands on
        self.byte_loops  # noqa: B018
        from deepinfer.grammar.warm_up import warm_up

        warm_up(self)

    @property
    def trie(self) -> TokenTrie:
        """Trie over the distinct strings of all tokens but control tokens; built, or read, on first use."""
        return self._parts[0]

    @property
    def slices(self) -> tuple[Slice, ...]:
        """Parts of the vocabulary whose masks are ready, largest first; built with the trie."""
        return self._parts[1]

    @cached_property
    def splits(self) -> TrieSplits:
        """Splits of the trie's subtrees, made as walks want them; those that every schema needs are made at once."""
        splits = TrieSplits(self.trie)
        text, digits = self.slices[0].characters, self.slices[4].characters
        for prefix in (b'"', b' "', b'{"', b'["', b':"', b',"'):
            node = self.trie.find(prefix)
            if node > 0 and splits.fits(node):
                splits.make(node, text)
        outside = self.slices[0].outside
        for tries in (splits,) if outside is None else (splits, outside.splits):
            for part in self.slices[:5]:
                for prefix in (b'"', b' "', *[bytes([byte]) for byte in b"'().,:;=?]}>/"]):
                    node = tries.trie.find(prefix)
                    if node > 0 and tries.fits(node):
                        tries.make(node, part.characters).residue  # noqa: B018 - made on first use
        for digit in b"0123456789":
            node = self.trie.find(bytes([digit]))
            if node > 0 and splits.fits(node):
                splits.make(node, digits)
        self.trie.prepare()
        return splits

    @cached_property
    def byte_loops(self) -> ByteLoops:
        """Tokens by the bytes that they hold."""
        return ByteLoops(self)

    @cached_property
    def text_kinds(self) -> TextKinds:
        """The strings by kinds of characters."""
        return TextKinds(self.strings, self.byte_loops.rank_of_id)

    @cached_property
    def full_row(self) -> NDArray[np.int32]:
        """Mask of every id that is text, shape [words], int32; read-only."""
        bits = np.zeros(self.num_words * 32, dtype=np.uint8)
        bits[self.rank_ids] = 1
        row: NDArray[np.int32] = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
        row.flags.writeable = False
        return row

    def ids_of(self, ranks: NDArray[np.int32]) -> NDArray[np.int32]:
        """The ids of strings, all of them where ids have equal bytes.

        Args:
            ranks: Ranks of strings, shape [n], int32.

        Returns:
            Ids, shape [at least n], int32.
        """
        if not self._has_twins:
            return self.id_of_rank[ranks]
        low, count = self.rank_offset[ranks], np.diff(self.rank_offset)[ranks]
        ends = np.cumsum(count, dtype=np.int32)
        at = np.repeat(low - ends + count, count)
        out: NDArray[np.int32] = self.rank_ids[at + np.arange(len(at), dtype=np.int32)]
        return out

    @cached_property
    def ids_by_rank(self) -> array[int]:
        """`id_of_rank` as an array whose single elements Python reads fast."""
        return array("i", self.id_of_rank.tobytes())

    def slice_words(self, part: Slice) -> NDArray[np.int32]:
        """Mask of the tokens of a slice.

        Args:
            part: One of `slices`.

        Returns:
            Shape [words], int32; read-only.
        """
        words = self._slice_words.get(part.characters.name)
        if words is None:
            bits = np.zeros(self.num_words * 32, dtype=np.uint8)
            bits[self.ids_of(np.flatnonzero(part.num_chars).astype(np.int32))] = 1
            words = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32, copy=False)
            words.flags.writeable = False  # shared by every grammar over this vocabulary
            self._slice_words[part.characters.name] = words
        return words

    @property
    def has_twins(self) -> bool:
        """Whether some ids have equal bytes."""
        return self._has_twins

    @property
    def max_token_bytes(self) -> int:
        """Length of the longest token, in bytes."""
        return self.trie.num_levels

    def __len__(self) -> int:
        return self.vocab_size

    def __repr__(self) -> str:
        return (
            f"TokenVocab({self.num_tokens} tokens, {len(self.strings)} strings, {self.vocab_size} columns, "
            f"ends {list(self.eos_ids)})"
        )


def _byte_strings(token_bytes: Sequence[bytes | None]) -> list[bytes]:
    if isinstance(token_bytes, Mapping | str | bytes) or not hasattr(token_bytes, "__iter__"):
        raise ConfigError(
            f"token_bytes is a {type(token_bytes).__name__}; give a sequence with the bytes of each id, in the order of "
            "the ids",
            field="token_bytes",
            limit="a sequence of bytes",
        )
    out = []
    for text in token_bytes:
        if type(text) is not bytes:
            if not (text is None or isinstance(text, bytes | bytearray | memoryview)):
                raise ConfigError(
                    f"token {len(out)} is {show(text)} ({type(text).__name__}); give its bytes, or None for an id that is "
                    "never text",
                    field="token_bytes",
                    value=text,
                    limit="bytes or None",
                )
            text = b"" if text is None else bytes(text)
        out.append(text)
    return out


class _Encoder:
    """How text becomes ids; goes through pickling, unlike a closure."""

    def __init__(self, tokenizer: Any, *, speaks_for_itself: bool) -> None:
        self._tokenizer = tokenizer
        self._speaks_for_itself = speaks_for_itself

    def __call__(self, text: str) -> list[int]:
        if self._speaks_for_itself:
            return list(self._tokenizer.encode(text, add_bos=False))
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


class _FileEncoder:
    """As `_Encoder`, with a tokenizer that is read when the first text comes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._loaded: Any = None

    def __call__(self, text: str) -> list[int]:
        if self._loaded is None:
            from tokenizers import Tokenizer

            self._loaded = Tokenizer.from_file(str(self._path))
        return list(self._loaded.encode(text, add_special_tokens=False).ids)


def _encoder(tokenizer: Any) -> Callable[[str], list[int]] | None:
    """How text becomes ids; None where only a file was given and the tokenizers library is absent."""
    if isinstance(tokenizer, str | Path):
        if importlib.util.find_spec("tokenizers") is None:
            return None
        path = Path(tokenizer)
        return _FileEncoder(path / "tokenizer.json" if path.is_dir() else path)
    if knows_its_bytes(tokenizer):
        return _Encoder(tokenizer, speaks_for_itself=True)
    for name in ("backend_tokenizer", "_backend", "_tokenizer"):
        tokenizer = getattr(tokenizer, name, tokenizer)
    return _Encoder(tokenizer, speaks_for_itself=False)
