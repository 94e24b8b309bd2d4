"""A grammar bound to a vocabulary: token steps and mask rows of its states, shared by all requests."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from deepinfer.core._checks import check_int
from deepinfer.core.errors import ConfigError, EmptyLanguage, InvariantBroken
from deepinfer.grammar.argument_checks import as_id, check_ids, check_part
from deepinfer.grammar.automaton import Automaton
from deepinfer.grammar.bitmask import MaskRow
from deepinfer.grammar.frame_rows import FrameRows, TooManyFrames
from deepinfer.grammar.frame_tokens import Tokens
from deepinfer.grammar.mask_build import MaskBuilder
from deepinfer.grammar.mask_states import ByteAutomaton, NeedsDepth
from deepinfer.grammar.row_cache import RowCache
from deepinfer.grammar.vocab import TokenVocab

if TYPE_CHECKING:
    from deepinfer.grammar.matcher import GrammarMatcher
    from deepinfer.grammar.request_state import RequestGrammar

__all__ = ["CompiledGrammar"]

FIRST_DEPTH = 2
"""Frames of the stack that a row is first computed with; doubled while they do not suffice."""

MANY_USES = 3
"""Uses after which a row in compact form is kept whole."""

MAX_KEPT = 1 << 18
"""Token steps, and states with a known row, that are remembered; past it they are computed again."""


class CompiledGrammar:
    """A grammar over the tokens of one vocabulary.

    Make one and share it between the requests that use the grammar: the masks that one computes serve the others. Rows
    are kept by state, least recently used out first. A recursive grammar has no end of states, so a row belongs to the
    top frames of the stack, as many as tokens can reach: the states that agree in them share it.

    Everything may be called from several threads.

    Args:
        grammar: A `Grammar`, or an automaton over bytes.
        vocab: The vocabulary.
        text_ids: Control tokens whose names count as text in this grammar, for one that spells such a name. Without this
            they are in no mask. An id that also ends outputs ends them where they may end, and is text elsewhere.
        max_cache_bytes: Bytes that the kept rows may take.
        by_frames: Whether rows are put together from the frames of the automaton's stacks. False walks each state as a
            whole: slower on most grammars, and the reference for the other way.

    Raises:
        EmptyLanguage: The grammar accepts no string.
        ConfigError: `vocab` is no vocabulary, or a text id is outside of it, or without bytes.
    """

    def __init__(
        self,
        grammar: Any,
        vocab: TokenVocab,
        *,
        text_ids: Iterable[int] = (),
        max_cache_bytes: int = 64 << 20,
        by_frames: bool = True,
    ) -> None:
        check_part("vocab", vocab, TokenVocab, "make one with TokenVocab.from_tokenizer(...)")
        check_int("max_cache_bytes", max_cache_bytes, 0, 1 << 62, ConfigError)
        self.grammar = grammar
        self.vocab = vocab
        self.automaton = cast(ByteAutomaton, getattr(grammar, "automaton", grammar))
        self.start_state = int(self.automaton.start)
        if not self.start_state:
            raise EmptyLanguage("the grammar accepts no output at all; check what it requires")
        self.text_ids = frozenset(check_ids("text_ids", text_ids, vocab.vocab_size))
        for index in self.text_ids:
            if not vocab.token_bytes(index):
                raise ConfigError(
                    f"text_ids holds {index}, which has no bytes in this vocabulary of {vocab.num_tokens} tokens; "
                    "give ids of control tokens whose names the grammar spells",
                    field="text_ids",
                    value=index,
                )
        self.rows = RowCache(max_cache_bytes)
        self.by_frames = by_frames
        self._builder: MaskBuilder | None = None
        self._frames: FrameRows | None = None
        self._generation = 0
        self._num_named = 0
        self._parts: dict[frozenset[int], tuple[int, list[Tokens]]] = {}
        self._max_cache_bytes = max_cache_bytes
        self._lock = threading.RLock()
        self._keys: dict[int, int] = {}  # state -> state whose row it has
        self._shallow: set[int] = set()  # truncated states whose row needs more frames
        self._steps: dict[int, int] = {}
        self._ends: dict[int, bool] = {}
        self._kin: dict[frozenset[int], object] = {}

    def row(self, state: int) -> MaskRow:
        """The mask of a state, without the ids that end an output.

        Args:
            state: A live state of the automaton.

        Returns:
            The row; immutable, and shared.

        Raises:
            GrammarTooLarge: The automaton ran out of its budget.
        """
        key = self._keys.get(state)
        if key is not None:
            row = self.rows.get(key)
            if row is not None:
                if row.index is not None:
                    row.uses += 1
                    if row.uses == MANY_USES:
                        row = row.whole()
                        self.rows.put(key, row)
                return row
        return self._find_row(state)

    def has_row(self, state: int) -> bool:
        """Whether a state's row is kept, so that `row` computes nothing."""
        key = self._keys.get(state)
        return key is not None and key in self.rows

    def advance(self, state: int, token_id: int) -> int:
        """The state behind a token that is taken as text.

        Args:
            state: A live state.
            token_id: Any id; one outside of the vocabulary leads nowhere.

        Returns:
            The next state, or 0 where the token does not fit.

        Raises:
            GrammarTooLarge: The automaton ran out of its budget.
        """
        if type(token_id) is not int:
            token_id = as_id(token_id)
        if not 0 <= token_id < self.vocab.num_tokens:
            return 0
        key = state << 24 | token_id  # a vocabulary has at most 2 ** 24 ids
        after = self._steps.get(key)
        if after is None:
            after = self._step(state, token_id)
            if len(self._steps) >= MAX_KEPT:
                self._steps.clear()
            self._steps[key] = after
        return after

    def advance_bytes(self, state: int, data: bytes) -> int:
        """The state behind some bytes, or 0 where they do not fit.

        Args:
            state: A live state.
            data: The bytes.

        Returns:
            The next state; `state` itself for no bytes.

        Raises:
            GrammarTooLarge: The automaton ran out of its budget.
        """
        return int(self.automaton.run(state, data))

    def accepting(self, state: int) -> bool:
        """Whether an output may end in a live state."""
        known = self._ends.get(state)
        if known is None:
            if len(self._ends) >= MAX_KEPT:
                self._ends.clear()
            known = self._ends[state] = bool(self.automaton.accepting(state))
        return known

    def is_text(self, token_id: int) -> bool:
        """Whether a token stands for its bytes in this grammar."""
        vocab = self.vocab
        if token_id in vocab.special_ids and token_id not in self.text_ids:
            return False
        return bool(vocab.token_bytes(token_id))

    def kin(self, stop_ids: frozenset[int]) -> object:
        """One object for each set of ids that end outputs: matchers that share it have equal masks in equal states."""
        return self._kin.setdefault(stop_ids, object())

    def matcher(self, **options: Any) -> GrammarMatcher:
        """Makes a matcher.

        Args:
            **options: Options of `GrammarMatcher`.

        Returns:
            The matcher, at the start.
        """
        from deepinfer.grammar.matcher import GrammarMatcher

        return GrammarMatcher(self, **options)

    def start(self) -> RequestGrammar:
        """The state before the first token, in the form that the engine uses (`deepinfer.core.protocols.Grammar`)."""
        from deepinfer.grammar.request_state import RequestGrammar

        return RequestGrammar(self.matcher())

    @property
    def frames(self) -> FrameRows | None:
        """What puts rows together from frames; None for an automaton that has none."""
        if self._frames is None and self.by_frames and isinstance(self.automaton, Automaton):
            with self._lock:
                if self._frames is None:
                    self._frames = FrameRows(self.automaton, self.vocab)
        return self._frames

    @property
    def num_full_walks(self) -> int:
        """Walks over most of the vocabulary so far."""
        total = 0 if self._builder is None else self._builder.num_full_walks
        return total if self._frames is None else total + self._frames.num_full_walks

    @property
    def builder(self) -> MaskBuilder:
        """What computes rows; made on first use."""
        if self._builder is None:
            with self._lock:
                if self._builder is None:
                    self._builder = MaskBuilder(self.automaton, self.vocab, self.text_ids)
        return self._builder

    def clear(self) -> None:
        """Forgets everything computed; matchers go on and compute it again."""
        with self._lock:
            for kept in (
                self.rows,
                self._keys,
                self._shallow,
                self._steps,
                self._ends,
                self._parts,
            ):
                kept.clear()
            self._builder = None
            self._frames = None

    def _step(self, state: int, token_id: int) -> int:
        if not self.is_text(token_id):
            return 0
        return self.advance_bytes(state, self.vocab.token_bytes(token_id))

    def _find_row(self, state: int) -> MaskRow:
        with self._lock:
            if len(self._keys) >= MAX_KEPT:
                self._keys.clear()
                self._shallow.clear()
                self._parts.clear()
            row = self._from_frames(state)
            return self._from_walks(state) if row is None else row

    def _from_frames(self, state: int) -> MaskRow | None:
        """A row put together from frames; None for an automaton without them, or a state with too many."""
        frames = self.frames
        if frames is None:
            return None
        try:
            parts = frames.parts(state)
        except TooManyFrames:
            return None
        if frames.generation != self._generation:  # the objects that name the rows were let go
            self._generation = frames.generation
            self._parts.clear()
        # States with the same parts share a row, under a key that no state has.
        name = frozenset(map(id, parts))
        place = self._parts.get(name)
        if place is None:
            self._num_named += 1
            place = self._parts[name] = (-self._num_named, parts)
        key = self._keys[state] = place[0]
        row = self.rows.get(key)
        if row is None:
            row = frames.row(parts)
            if self.text_ids:
                row = self.builder.with_text(row, state)
            self.rows.put(key, row)
        return row

    def _from_walks(self, state: int) -> MaskRow:
        """A row from the walk of the whole state, cut to as many frames as tokens reach."""
        automaton, rows = self.automaton, self.rows
        depth = FIRST_DEPTH
        while True:
            key = automaton.truncate(state, depth)
            if key not in self._shallow:
                row = rows.get(key)
                if row is not None:
                    break
                row = self._build(key, check=key != state)
                if row is not None:
                    break
                self._shallow.add(key)
            if key == state:
                raise InvariantBroken(
                    f"state {state} is whole and yet uncertain: the automaton and its truncation disagree; "
                    "please report the grammar"
                )
            depth *= 2
        self._keys[state] = key
        return row

    def _build(self, key: int, *, check: bool) -> MaskRow | None:
        """Computes and keeps a row; None when the frames that are left do not suffice."""

        def row_of(state: int) -> MaskRow:
            found = self.rows.get(state)
            if found is None:
                found = self.builder.build(state, row_of, check=check)
                self.rows.put(state, found)
            return found

        try:
            return row_of(key)
        except NeedsDepth:
            return None

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.grammar, self.vocab, self.text_ids, self._max_cache_bytes)

    def __repr__(self) -> str:
        return f"CompiledGrammar({self.grammar!r}, {self.rows!r})"


def _restore(
    grammar: Any, vocab: TokenVocab, text_ids: frozenset[int], max_cache_bytes: int
) -> CompiledGrammar:
    return CompiledGrammar(grammar, vocab, text_ids=text_ids, max_cache_bytes=max_cache_bytes)
