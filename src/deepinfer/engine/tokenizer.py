"""Text to token ids and back, with control tokens kept out of the reach of user text."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer.core.errors import CheckpointMismatch, CheckpointMissing, ConfigError, InvalidRequest
from deepinfer.engine.detokenizer import IncrementalDetokenizer
from deepinfer.engine.tokenizer_files import (
    CHAR_TO_BYTE,
    check_byte_level,
    check_text,
    flat_config,
    load_json,
)

if TYPE_CHECKING:
    from deepinfer.engine.chat_format import ChatPrompt

__all__ = ["VISIBLE_MARKERS", "Tokenizer"]

VISIBLE_MARKERS = frozenset({"<think>", "</think>", "｜DSML｜"})
"""Control tokens that decoding shows, because parsers of completions look for them in the text."""

_BOS_NAME = "<｜begin▁of▁sentence｜>"
_EOS_NAME = "<｜end▁of▁sentence｜>"
_PAD_NAME = "<｜▁pad▁｜>"
_PUBLISHED_VOCAB = 129_280
# Placeholders of the published vocabulary that mark media in prompts and were never trained as outputs.
_PUBLISHED_INPUT_ONLY = (*range(128_847, 129_271), 129_279)


class Tokenizer:
    """A byte-level BPE tokenizer read from `tokenizer.json`.

    Every entry of the file's `added_tokens` is a control token. Text never yields one unless the call allows its
    string by name, so a user who writes the string of a role token gets ordinary tokens that spell it.

    Args:
        source: Folder with `tokenizer.json` (and `config.json`, `generation_config.json`, `tokenizer_config.json`
            when there), or path of a `tokenizer.json`.
        config: Overrides of `bos_token_id`, `eos_token_id` (one or several), `pad_token_id`, `image_token_id`,
            `noise_token_id`, `vocab_size`, `model_type`. Ids come from here first, then from the files in the order
            above, then from the usual names.

    Raises:
        CheckpointMissing: There is no `tokenizer.json`.
        CheckpointMismatch: A file is not valid JSON, or not a byte-level tokenizer.
    """

    def __init__(self, source: str | Path, *, config: Mapping[str, Any] | None = None) -> None:
        path = Path(source)
        folder = path if path.is_dir() else path.parent
        path = path / "tokenizer.json" if path.is_dir() else path
        if not path.is_file():
            raise CheckpointMissing(
                f"no tokenizer at {str(path)!r}; give a folder that holds tokenizer.json, or the file itself. "
                "A saved model gets one with save_pretrained(..., tokenizer=...).",
                path=path,
            )
        found: dict[str, Any] = {}
        names: dict[str, Any] = {}
        for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            if (folder / name).is_file():
                values = load_json((folder / name).read_text(encoding="utf-8"), folder / name)
                target = names if name == "tokenizer_config.json" else found
                for key, value in flat_config(values).items():
                    target.setdefault(key, value)
        self._set_up(path.read_text(encoding="utf-8"), {**found, **(config or {})}, names, path)

    @classmethod
    def from_json(cls, text: str, *, config: Mapping[str, Any] | None = None) -> Tokenizer:
        """Makes a tokenizer from the text of a `tokenizer.json`.

        Args:
            text: The JSON text.
            config: As for the class.

        Returns:
            The tokenizer.

        Raises:
            CheckpointMismatch: The text is not valid JSON, or not a byte-level tokenizer.
        """
        self = cls.__new__(cls)
        self._set_up(text, dict(config or {}), {}, "tokenizer.json")
        return self

    def _set_up(
        self, text: str, config: dict[str, Any], names: dict[str, Any], path: object
    ) -> None:
        from tokenizers import Tokenizer as Backend

        data = load_json(text, path)
        check_byte_level(data, path)
        self.fingerprint = hashlib.sha256(text.encode()).digest()
        self._control = {entry["content"]: entry["id"] for entry in data.get("added_tokens") or ()}
        # Without its added tokens the backend treats every text as ordinary; control tokens are matched here.
        plain = {**data, "added_tokens": [], "post_processor": None}
        plain |= {"truncation": None, "padding": None}
        try:
            self._backend = Backend.from_str(json.dumps(plain))
        except Exception as error:
            raise CheckpointMismatch(
                f"{path} is not a tokenizer that the tokenizers library reads: {error}. Check that the file is whole.",
                found=str(error),
            ) from error
        self._pieces: dict[int, str] = {i: s for s, i in self._backend.get_vocab().items()}
        self._pieces |= {i: s for s, i in self._control.items()}
        size = max(self._pieces, default=-1) + 1
        self.vocab_size = max(size, int(config.get("vocab_size") or 0))
        self.bos_token_id = self._named_id(config, names, "bos", _BOS_NAME)
        self.pad_token_id = self._named_id(config, names, "pad", _PAD_NAME)
        eos = config.get("eos_token_id")
        if isinstance(eos, Sequence) and not isinstance(eos, str):
            self.eos_token_ids = tuple(int(token) for token in eos)
        else:
            one = self._named_id(config, names, "eos", _EOS_NAME)
            self.eos_token_ids = () if one is None else (one,)
        self.image_token_id: int | None = config.get("image_token_id")
        self.noise_token_id: int | None = config.get("noise_token_id")
        self.control_ids = frozenset(self._control.values())
        self._hidden = frozenset(i for s, i in self._control.items() if s not in VISIBLE_MARKERS)
        self.input_only_ids = self._find_input_only(str(config.get("model_type", "")))
        self._bytes_cache: dict[int, bytes] = {}
        self._patterns: dict[frozenset[str], re.Pattern[str]] = {}

    def _named_id(
        self, config: Mapping[str, Any], names: Mapping[str, Any], kind: str, default: str
    ) -> int | None:
        value = config.get(f"{kind}_token_id")
        if value is not None:
            return int(value)
        name = names.get(f"{kind}_token")
        name = name.get("content") if isinstance(name, Mapping) else name
        return self._control.get(name or default)

    def _find_input_only(self, model_type: str) -> frozenset[int]:
        ids = {self.bos_token_id, self.pad_token_id, self.image_token_id, self.noise_token_id}
        ids |= set(range(self.vocab_size)) - self._pieces.keys()
        if model_type.startswith("deepseek_v41") and self.vocab_size == _PUBLISHED_VOCAB:
            ids |= set(_PUBLISHED_INPUT_ONLY)
        return frozenset(token for token in ids if token is not None) - set(self.eos_token_ids)

    def __repr__(self) -> str:
        return f"Tokenizer({self.vocab_size} ids, {len(self._control)} control tokens)"

    @property
    def eos_token_id(self) -> int | None:
        """The first token id that ends a sequence, or None."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    @property
    def control_tokens(self) -> dict[str, int]:
        """Control tokens by their string, a new dict."""
        return dict(self._control)

    def token_to_id(self, token: str) -> int | None:
        """Id of a control token by its string, or of an ordinary token by its stored form, or None.

        Args:
            token: The string.

        Returns:
            The id, or None when there is no such token.
        """
        if token in self._control:
            return self._control[token]
        found = self._backend.token_to_id(token)
        return None if found is None else int(found)

    def encode(
        self,
        text: str,
        *,
        add_bos: bool = True,
        allowed_special: Collection[str] | str = (),
    ) -> list[int]:
        """Token ids of a text.

        Args:
            text: Any text.
            add_bos: Put the begin-of-sequence id first when the tokenizer has one.
            allowed_special: Strings of control tokens that the text may yield, or "all". Use it for text that you
                wrote, never for text that a user wrote; for conversations use `encode_chat`.

        Returns:
            The ids.

        Raises:
            InvalidRequest: The text is not a string, or holds a lone surrogate, which UTF-8 cannot carry.
            ConfigError: A string in `allowed_special` is no control token.
        """
        start = [self.bos_token_id] if add_bos and self.bos_token_id is not None else []
        pattern = self._special_pattern(allowed_special)
        if pattern is None:
            return start + self._encode_ordinary(text)
        check_text(text)
        ids: list[int] = list(start)
        for part in pattern.split(text):
            if part in self._control and pattern.fullmatch(part):
                ids.append(self._control[part])
            elif part:
                ids += self._encode_ordinary(part)
        return ids

    def encode_batch(self, texts: Iterable[str], *, add_bos: bool = True) -> list[list[int]]:
        """Token ids of several ordinary texts, in parallel where the backend has threads for it.

        Args:
            texts: Any texts.
            add_bos: As in `encode`.

        Returns:
            One list a text, equal to `encode` of it.

        Raises:
            InvalidRequest: As in `encode`.
        """
        texts = list(texts)
        for text in texts:
            check_text(text)
        start = [self.bos_token_id] if add_bos and self.bos_token_id is not None else []
        batches = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [
            start + self._without_control(text, encoding.ids)
            for text, encoding in zip(texts, batches, strict=True)
        ]

    def encode_chat(self, prompt: ChatPrompt) -> list[int]:
        """Token ids of a rendered conversation: only the pieces that the renderer marked become control tokens.

        Args:
            prompt: From `deepinfer.engine.chat.render_chat`.

        Returns:
            The ids; no begin-of-sequence id is added beyond the one in the prompt.

        Raises:
            ConfigError: The tokenizer lacks a control token of the format.
            InvalidRequest: As in `encode`.
        """
        ids: list[int] = []
        for text, is_control in prompt.pieces:
            if is_control:
                ids.append(self._control_id(text))
            else:
                ids += self._encode_ordinary(text)
        return ids

    def _control_id(self, text: str) -> int:
        found = self._control.get(text)
        if found is None and text == "<｜deepseek_image｜>":
            found = self.image_token_id
        if found is None:
            raise ConfigError(
                f"the tokenizer has no control token {text!r}, which the chat format needs; use the tokenizer.json of a "
                "DeepSeek-V4.1 checkpoint.",
                field="tokenizer",
                value=text,
            )
        return found

    def _special_pattern(self, allowed: Collection[str] | str) -> re.Pattern[str] | None:
        names = frozenset(self._control if allowed == "all" else allowed)
        if isinstance(allowed, str) and allowed != "all":
            names = frozenset((allowed,))
        if not names:
            return None
        pattern = self._patterns.get(names)
        if pattern is None:
            for name in names:
                if name not in self._control:
                    raise ConfigError(
                        f"allowed_special holds {name!r}, which is no control token; see `control_tokens`.",
                        field="allowed_special",
                        value=name,
                    )
            longest_first = sorted(names, key=lambda name: (-len(name), name))
            pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
            self._patterns[names] = pattern
        return pattern

    def _encode_ordinary(self, text: str) -> list[int]:
        check_text(text)
        ids = self._backend.encode(text, add_special_tokens=False).ids
        return self._without_control(text, ids)

    def _without_control(self, text: str, ids: list[int]) -> list[int]:
        """The ids, or those of single characters when the model's own vocabulary led to a control token."""
        if self.control_ids.isdisjoint(ids):
            return ids
        if len(text) == 1:
            raise InvalidRequest(
                f"the tokenizer can write {text!r} only as a control token; remove it from the text.",
                field="text",
                value=text,
            )
        half = len(text) // 2
        return self._encode_ordinary(text[:half]) + self._encode_ordinary(text[half:])

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token stands for; of a control token, its string; empty for ids without a token.

        Args:
            token_id: From 0 to `vocab_size` - 1.

        Returns:
            The bytes, which need not be whole characters.

        Raises:
            ConfigError: The id is outside the vocabulary.
        """
        found = self._bytes_cache.get(token_id)
        if found is None:
            if not 0 <= token_id < self.vocab_size:
                raise ConfigError(
                    f"token id {token_id} is outside the vocabulary; ids go from 0 to {self.vocab_size - 1}.",
                    field="token_id",
                    value=token_id,
                    limit=f"from 0 to {self.vocab_size - 1}",
                )
            found = self._bytes_of(token_id)
            self._bytes_cache[token_id] = found
        return found

    def _bytes_of(self, token_id: int) -> bytes:
        piece = self._pieces.get(token_id, "")
        if token_id in self.control_ids:
            return piece.encode()
        try:
            return bytes(map(CHAR_TO_BYTE.__getitem__, piece))
        except KeyError:
            return piece.encode()

    def _shown_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._hidden else self.token_bytes(token_id)

    def vocabulary(self) -> list[bytes | None]:
        """Bytes of every token by id, None for control tokens and ids without a token: what a grammar needs.

        Returns:
            `vocab_size` entries.
        """
        return [
            self.token_bytes(token)
            if token in self._pieces and token not in self.control_ids
            else None
            for token in range(self.vocab_size)
        ]

    def decode(self, token_ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of token ids.

        Args:
            token_ids: The ids.
            skip_special: Leave out control tokens, all but `VISIBLE_MARKERS`.

        Returns:
            The text, with U+FFFD where bytes are no UTF-8.

        Raises:
            ConfigError: An id is outside the vocabulary.
        """
        source = self._shown_bytes if skip_special else self.token_bytes
        return b"".join(map(source, token_ids)).decode("utf-8", errors="replace")

    def decode_batch(
        self, batch: Iterable[Iterable[int]], *, skip_special: bool = True
    ) -> list[str]:
        """Texts of several lists of token ids; arguments and errors as in `decode`.

        Args:
            batch: Lists of ids.
            skip_special: As in `decode`.

        Returns:
            One text a list.
        """
        return [self.decode(ids, skip_special=skip_special) for ids in batch]

    def stream(self, *, skip_special: bool = True) -> IncrementalDetokenizer:
        """A new incremental detokenizer; its pieces, joined, equal `decode` of all the ids.

        Args:
            skip_special: As in `decode`.

        Returns:
            The detokenizer.
        """
        return IncrementalDetokenizer(self._shown_bytes if skip_special else self.token_bytes)
