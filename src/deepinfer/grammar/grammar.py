"""A grammar without a vocabulary: what every front end returns."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from deepinfer.core.errors import ConfigError
from deepinfer.grammar.report import Report

if TYPE_CHECKING:
    from deepinfer.grammar.automaton import Automaton
    from deepinfer.grammar.compiled import CompiledGrammar
    from deepinfer.grammar.ir import Rules
    from deepinfer.grammar.vocab import TokenVocab

__all__ = ["Grammar"]


class Grammar:
    """A set of byte strings, ready to be bound to any vocabulary.

    Immutable. Two grammars are equal when their rules are, whatever text they came from; the hash follows. It
    survives pickling: the rules and the report travel, the automaton is built again where it is needed.

    `first + second` accepts an output of the first followed by one of the second, and `first | second` an output
    of either.

    Args:
        rules: The rules, over bytes.
        report: What the front end did with its input.
        source: Kind of input, for `repr`: "regex", "json_schema", "ebnf", "choices", ...
    """

    __slots__ = ("_automaton", "_lock", "_report", "_rules", "_source")

    def __init__(
        self, rules: Rules, *, report: Report | None = None, source: str = "rules"
    ) -> None:
        self._rules = rules
        self._report = Report() if report is None else report
        self._source = source
        self._automaton: Automaton | None = None
        self._lock = threading.Lock()

    @property
    def rules(self) -> Rules:
        """The rules."""
        return self._rules

    @property
    def report(self) -> Report:
        """What is enforced, approximated and ignored of the input."""
        return self._report

    @property
    def source(self) -> str:
        """Kind of input that it was made from."""
        return self._source

    @property
    def automaton(self) -> Automaton:
        """The automaton over bytes, built on first use and shared by everything bound to this grammar.

        Raises:
            EmptyLanguage: The grammar accepts no string.
            GrammarTooLarge: The rules need more than their budget.
        """
        if self._automaton is None:
            from deepinfer.grammar.automaton import Automaton

            with self._lock:
                if self._automaton is None:
                    self._automaton = Automaton(self._rules)
        return self._automaton

    def bind(self, vocab: TokenVocab, **options: Any) -> CompiledGrammar:
        """Prepares masks over the tokens of a vocabulary.

        Args:
            vocab: The vocabulary.
            **options: Options of `CompiledGrammar`.

        Returns:
            The grammar over tokens; share it between requests, since it keeps the masks that were computed.

        Raises:
            EmptyLanguage: The grammar accepts no string.
            GrammarTooLarge: The rules need more than their budget.
        """
        from deepinfer.grammar.compiled import CompiledGrammar

        return CompiledGrammar(self, vocab, **options)

    def matches(self, data: bytes | str) -> bool:
        """Whether a whole output is in the grammar.

        Args:
            data: The output; text is encoded as UTF-8, and lone surrogates in it match nothing.

        Returns:
            True when the grammar accepts it from the first byte to the last.
        """
        state = self._run(data)
        return state is not None and self.automaton.accepting(state)

    def matches_prefix(self, data: bytes | str) -> bool:
        """Whether an output that begins like this can still end well.

        Args:
            data: The beginning of an output; text is encoded as UTF-8.

        Returns:
            True when some continuation, the empty one included, is accepted. For recursive grammars it may say
            True of a beginning whose every continuation is refused later.
        """
        return self._run(data) is not None

    def _run(self, data: bytes | str) -> int | None:
        """The automaton's state behind `data`, or None when it died."""
        if isinstance(data, str):
            try:
                data = data.encode()
            except UnicodeEncodeError:
                return None
        elif not isinstance(data, bytes):
            raise ConfigError(
                f"data is a {type(data).__name__}; give bytes or str", field="data", value=data
            )
        automaton = self.automaton
        state = automaton.start
        for byte in data:
            state = automaton.step(state, byte)
            if state == 0:  # the dead state
                return None
        return state

    def __add__(self, other: Grammar) -> Grammar:
        if not isinstance(other, Grammar):
            return NotImplemented
        from deepinfer.grammar.combine import concatenate

        return concatenate(self, other)

    def __or__(self, other: Grammar) -> Grammar:
        if not isinstance(other, Grammar):
            return NotImplemented
        from deepinfer.grammar.combine import either

        return either(self, other)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Grammar):
            return NotImplemented
        return self._rules == other._rules

    def __hash__(self) -> int:
        return hash(self._rules)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self._rules, self._report, self._source)

    def __repr__(self) -> str:
        return f"Grammar({self._source}, {len(self._rules.rules)} rules)"


def _restore(rules: Rules, report: Report, source: str) -> Grammar:
    return Grammar(rules, report=report, source=source)
