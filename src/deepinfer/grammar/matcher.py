"""Where one output is in its grammar: accept tokens, fill masks, take tokens back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.core._checks import check_int
from deepinfer.core.errors import ConfigError
from deepinfer.grammar.argument_checks import as_id, check_ids, check_part
from deepinfer.grammar.bitmask import MaskRow, clear_from, clear_ids, pack_few, row_of
from deepinfer.grammar.compiled import CompiledGrammar
from deepinfer.grammar.draft import fill_draft, fill_tree
from deepinfer.grammar.forced import forced_bytes, forced_tokens

__all__ = ["GrammarMatcher"]

Int32Array = NDArray[np.int32]

FREE = -1
"""Before the token after which the grammar begins. A state that an output ended in is kept as -1 - state."""


class GrammarMatcher:
    """Follows one output through a grammar.

    All that it knows is the list of states behind each accepted token; whether the output ended is part of a state. So a
    rollback is exact whatever was accepted, the end included, and a token that does not fit leaves everything as it was.

    A token's bit is set exactly where `accept_token` would take it. A matcher belongs to one request and to one thread at
    a time; the grammar behind it is shared.

    Args:
        compiled: The grammar.
        max_rollback: Tokens that can be taken back at least; None for all. A limit bounds the memory of long outputs.
        stop_ids: Ids that end the output; None for those of the vocabulary. They are allowed where the output may end,
            and nowhere else. After the end they alone stay allowed.
        after_token: Token after which the grammar begins, such as the end of reasoning; before it every token but those of
            `stop_ids` is free. None when the grammar holds from the first token.
        canonical_forced: Whether masks hold only the tokenizer's own next token where the following bytes are forced.
            Other spellings of these bytes are still accepted, so a bit may then be 0 though `accept_token` takes the
            token.

    Raises:
        ConfigError: An option is out of range.
    """

    def __init__(
        self,
        compiled: CompiledGrammar,
        *,
        max_rollback: int | None = None,
        stop_ids: Iterable[int] | None = None,
        after_token: int | None = None,
        canonical_forced: bool = False,
    ) -> None:
        check_part("compiled", compiled, CompiledGrammar, "bind a grammar: grammar.bind(vocab)")
        vocab = compiled.vocab
        if max_rollback is not None:
            hint = "None is no limit."
            max_rollback = check_int("max_rollback", max_rollback, 0, 1 << 62, ConfigError, hint)
        self.compiled = compiled
        stops = vocab.eos_ids if stop_ids is None else stop_ids
        self.stop_ids = frozenset(check_ids("stop_ids", stops, vocab.vocab_size))
        if after_token is not None:
            (after_token,) = check_ids("after_token", [after_token], vocab.vocab_size)
        self._after = after_token
        self._canonical = canonical_forced
        self._max_rollback = max_rollback
        words, bits = pack_few(self.stop_ids)
        self._stop_words = list(zip(words.tolist(), bits.tolist(), strict=True))
        # Ends that some row may hold as text, so that their bits must be taken out elsewhere.
        self._textual_stops = any(
            compiled.is_text(stop) and stop not in compiled.text_ids for stop in self.stop_ids
        )
        self._num_words = vocab.num_words
        plain = after_token is None and not canonical_forced
        # Matchers with one object here have equal masks in equal states.
        self._kin = compiled.kin(self.stop_ids) if plain else object()
        self._first = compiled.start_state if after_token is None else FREE
        self._states = [self._first]
        self._num_tokens = 0
        self._seen: Any = self  # no bitmask yet

    def accept_token(self, token_id: int) -> bool:
        """Moves over a token.

        Args:
            token_id: Any id.

        Returns:
            Whether it fits; where it does not, nothing changes.

        Raises:
            ConfigError: It is no integer.
        """
        after = self._next(self._states[-1], token_id)
        if not after:
            return False
        self._push(after)
        return True

    def accept_tokens(self, token_ids: Iterable[int]) -> int:
        """Moves over tokens, up to the first that does not fit.

        Args:
            token_ids: The tokens.

        Returns:
            How many fit.
        """
        count = 0
        for token_id in token_ids:
            if not self.accept_token(token_id):
                break
            count += 1
        return count

    def accept_bytes(self, data: bytes) -> bool:
        """Moves over bytes, as over one token with these bytes.

        Args:
            data: The bytes. No bytes change nothing, yet count as a token for `rollback`.

        Returns:
            Whether they fit; where they do not, nothing changes. False before `after_token` and after the end.

        Raises:
            ConfigError: They are a text, or no bytes at all.
        """
        if not isinstance(data, bytes | bytearray | memoryview):
            message = f"data is a {type(data).__name__}; give bytes, such as text.encode()"
            raise ConfigError(message, field="data", value=data, limit="bytes")
        state = self._states[-1]
        after = self.compiled.advance_bytes(state, data) if state > 0 else 0
        if not after:
            return False
        self._push(after)
        return True

    def rollback(self, num_tokens: int) -> None:
        """Takes the last tokens back, ends of the output among them.

        Args:
            num_tokens: How many.

        Raises:
            ConfigError: More than were accepted, or than `max_rollback` allows.
        """
        if type(num_tokens) is not int:
            num_tokens = check_int("num_tokens", num_tokens, 0, self._num_tokens, ConfigError)
        if num_tokens == 0:
            return
        limit = self._num_tokens
        if self._max_rollback is not None:
            limit = min(limit, self._max_rollback, len(self._states) - 1)
        if not 0 <= num_tokens <= limit:
            message = f"cannot take {num_tokens} tokens back: {limit} are kept; give fewer, or raise max_rollback"
            raise ConfigError(message, field="num_tokens", value=num_tokens, limit=f"0..{limit}")
        del self._states[-num_tokens:]
        self._num_tokens -= num_tokens

    def reset(self) -> None:
        """Goes back to the start."""
        self._states = [self._first]
        self._num_tokens = 0

    def fork(self) -> GrammarMatcher:
        """An independent copy with the same history, as `copy.copy` and `copy.deepcopy` make it too."""
        other = GrammarMatcher.__new__(GrammarMatcher)
        other.__dict__.update(self.__dict__)
        other._states = self._states.copy()
        return other

    def fill_bitmask(self, bitmask: Any, row: int = 0) -> bool:
        """Writes which tokens are allowed next.

        Args:
            bitmask: Shape [rows, words] or [words], int32, a NumPy array or a torch tensor on the CPU; words past the
                vocabulary's are cleared.
            row: Row to write.

        Returns:
            False when every token is allowed, so that no mask need be applied.

        Raises:
            ShapeError: The bitmask has another dtype, or is too small.
            GrammarTooLarge: The grammar ran out of its budget; the row holds nothing of use.
        """
        # The same array as before, two axes and of the right width.
        if bitmask is self._seen and type(row) is int:
            try:
                return self._fill(self._states[-1], bitmask[row])
            except IndexError:
                pass  # said better below
        out = row_of(bitmask, row, self._num_words)
        if type(bitmask) is np.ndarray and bitmask.ndim == 2:
            self._seen = bitmask
        return self._fill(self._states[-1], out)

    def allowed(self, token_id: int) -> bool:
        """Whether a token's bit is set, without making the row.

        Args:
            token_id: Any id.

        Returns:
            What `fill_bitmask` would say.
        """
        state = self._states[-1]
        forced = self._forced_id(state)
        return token_id == forced if forced is not None else self._next(state, token_id) != 0

    def validate(self, token_ids: Iterable[int]) -> int:
        """How many tokens fit from here, one after the other; nothing changes.

        Args:
            token_ids: The tokens.

        Returns:
            Tokens before the first that does not fit.
        """
        state, count = self._states[-1], 0
        for token_id in token_ids:
            state = self._next(state, token_id)
            if not state:
                break
            count += 1
        return count

    def is_accepting(self) -> bool:
        """Whether the output may end here, or has ended."""
        state = self._states[-1]
        return state < FREE or (state > 0 and self.compiled.accepting(state))

    def is_terminated(self) -> bool:
        """Whether the output has ended."""
        return self._states[-1] < FREE

    def is_complete(self) -> bool:
        """Whether nothing but the end can follow."""
        state = self._states[-1]
        if state < FREE:
            return True
        if state == FREE or not self.compiled.accepting(state):
            return False
        return not self.compiled.row(state).words().any()

    def forced_bytes(self, max_bytes: int = 1024) -> bytes:
        """The bytes that every continuation begins with.

        Args:
            max_bytes: Bytes after which it stops looking.

        Returns:
            The bytes, none where there is a choice, or where the output may end.
        """
        state = self._states[-1]
        return forced_bytes(self.compiled, state, max_bytes) if state > 0 else b""

    def forced_tokens(self, max_tokens: int = 64) -> list[int]:
        """The tokens that every continuation begins with, as the tokenizer would write it.

        A token is left out when some token of the vocabulary begins in it or before it and goes on past the forced bytes:
        the model might have chosen that one.

        Args:
            max_tokens: The most tokens to return.

        Returns:
            Ids, each allowed behind the ones before; none when the vocabulary was made without `encode`.
        """
        state = self._states[-1]
        return forced_tokens(self.compiled, state, max_tokens) if state > 0 else []

    def fill_draft(self, bitmask: Any, row: int, draft_ids: Sequence[int]) -> int:
        """Writes the rows of a drafted continuation; nothing changes.

        Args:
            bitmask: As for `fill_bitmask`.
            row: Row of the mask before the first draft; that behind draft k goes to `row + k`.
            draft_ids: The drafted tokens.

        Returns:
            Drafts before the first that does not fit. The row behind the last of them is the last one that means
            something; later ones, which no sampler may use, repeat it.
        """
        return fill_draft(self, bitmask, row, draft_ids)

    def fill_tree(
        self, bitmask: Any, parents: Sequence[int], token_ids: Sequence[int], row: int = 0
    ) -> list[bool]:
        """Writes the rows of a tree of drafted tokens; nothing changes.

        Args:
            bitmask: As for `fill_bitmask`.
            parents: Parent of each node, one that stands before it, or -1 for this matcher's place.
            token_ids: Token of each node.
            row: Row of the mask here; that behind node k goes to `row + 1 + k`.

        Returns:
            For each node, whether its tokens fit from here to it. The row of one that does not repeats its parent's.

        Raises:
            ConfigError: A parent does not stand before its node, or the lengths differ.
        """
        return fill_tree(self, bitmask, parents, token_ids, row)

    @property
    def num_tokens(self) -> int:
        """Tokens accepted, less those taken back."""
        return self._num_tokens

    @property
    def state(self) -> int:
        """Equal for two matchers of one grammar and equal options exactly when the same tokens can follow."""
        return self._states[-1]

    @property
    def mask_key(self) -> tuple[object, int]:
        """Equal for two matchers whose masks are equal now; unequal keys say nothing."""
        return self._kin, self._states[-1]

    def _push(self, state: int) -> None:
        self._states.append(state)
        self._num_tokens += 1
        limit = self._max_rollback
        if limit is not None and len(self._states) > 2 * limit + 64:
            del self._states[: len(self._states) - limit - 1]

    def _next(self, state: int, token_id: int) -> int:
        """The state behind a token, or 0."""
        if type(token_id) is not int:
            token_id = as_id(token_id)
        if state > 0:
            if token_id in self.stop_ids:
                if self.compiled.accepting(state):
                    return -1 - state
                if token_id not in self.compiled.text_ids:
                    return 0
            return self.compiled.advance(state, token_id)
        if state == FREE:
            if token_id == self._after:
                return self.compiled.start_state
            inside = 0 <= token_id < self.compiled.vocab.num_tokens
            return FREE if inside and token_id not in self.stop_ids else 0
        return state if token_id in self.stop_ids else 0

    def _fill(self, state: int, out: Int32Array) -> bool:
        """Writes the row of a state into a row of at least the vocabulary's words."""
        if len(out) != self._num_words:
            out[self._num_words :] = 0
            out = out[: self._num_words]
        if self._canonical:
            forced = self._forced_id(state)
            if forced is not None:
                MaskRow(np.zeros_like(out), *pack_few([forced])).write(out)
                return True
        if state > 0:
            self.compiled.row(state).write(out)
            if self.compiled.accepting(state):
                for word, bits in self._stop_words:
                    out[word] |= bits
            elif self._textual_stops:
                clear_ids(out, self.stop_ids - self.compiled.text_ids)
            return True
        if state == FREE:
            out[:] = -1
            clear_from(out, self.compiled.vocab.num_tokens)
            clear_ids(out, self.stop_ids - {self._after})
            return bool(self.stop_ids)
        out[:] = 0
        for word, bits in self._stop_words:
            out[word] |= bits
        return True

    def _forced_id(self, state: int) -> int | None:
        if not self._canonical or state <= 0:
            return None
        found = forced_tokens(self.compiled, state, 1)
        return found[0] if found else None

    __copy__ = fork

    def __deepcopy__(self, memo: dict[int, Any]) -> GrammarMatcher:
        return self.fork()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a GrammarMatcher cannot be pickled: its states are numbers of this process's automaton; pickle its "
            "CompiledGrammar, and accept the same tokens again there"
        )

    def __repr__(self) -> str:
        where = "ended" if self.is_terminated() else "may end" if self.is_accepting() else "inside"
        return f"GrammarMatcher({self._num_tokens} tokens, {where})"
