"""Grammars of requests by kind and text, compiled once and shared."""

from __future__ import annotations

import inspect
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from deepinfer.core._checks import check_int, check_keys
from deepinfer.core.errors import ConfigError, GrammarSyntaxError
from deepinfer.core.params import SamplingParams
from deepinfer.grammar.argument_checks import check_ids, check_part, check_text
from deepinfer.grammar.choice import choices
from deepinfer.grammar.compiled import CompiledGrammar
from deepinfer.grammar.ebnf import compile_ebnf
from deepinfer.grammar.grammar import Grammar
from deepinfer.grammar.json_schema import compile_json_schema
from deepinfer.grammar.regex import compile_regex
from deepinfer.grammar.request_state import RequestOptions
from deepinfer.grammar.structural_tag import compile_structural_tag
from deepinfer.grammar.vocab import TokenVocab

__all__ = ["KINDS", "GrammarLibrary", "compile_kind"]

KINDS: dict[str, Callable[[Any], Grammar]] = {
    "json": lambda spec: compile_json_schema(spec),
    "json_object": lambda spec: compile_json_schema({"type": "object"}),
    "regex": lambda spec: compile_regex(spec),
    "grammar": lambda spec: compile_ebnf(spec),
    "choice": lambda spec: choices(_parsed(spec) if isinstance(spec, str) else spec),
    "structural_tag": lambda spec: compile_structural_tag(spec),
}
"""Compilers by the names that serving engines have for the kinds of structured output."""


def _parsed(spec: str) -> list[Any]:
    """The texts of a choice."""
    try:
        value = json.loads(spec)
    except ValueError as error:
        raise GrammarSyntaxError(
            f"the choices are no JSON ({error}); give a JSON list of texts"
        ) from error
    if not isinstance(value, list):
        raise GrammarSyntaxError(
            f"the choices are a {type(value).__name__}; give a JSON list of texts"
        )
    return value


def compile_kind(kind: str, spec: Any) -> Grammar:
    """A grammar from a kind and its text.

    Args:
        kind: "json" (a JSON Schema), "json_object", "regex", "grammar" (EBNF), "choice" (a JSON list of texts) or
            "structural_tag".
        spec: The text, or the parsed value where there is one.

    Returns:
        The grammar.

    Raises:
        ConfigError: The kind is not known.
        GrammarError: The text is malformed, or cannot be enforced.
    """
    if kind not in KINDS:
        raise ConfigError(
            f"structured output of kind {kind!r} is not known; use one of {', '.join(KINDS)}",
            field="kind",
            value=kind,
        )
    return KINDS[kind](spec)


class GrammarLibrary:
    """Bound grammars of one vocabulary, the least recently used one dropped first. Thread-safe.

    An engine takes it as its grammar part: `Engine.from_pretrained("nano", grammar=library)`.

    Args:
        vocab: The vocabulary.
        max_grammars: Grammars that are kept.
        text_ids: Control tokens that grammars may spell, as for `Grammar.bind`.
        schema_options: Options of `compile_json_schema` for every schema, such as `whitespace`, `order` and
            `additional`.
        reasoning: Ids of the tokens that begin and end reasoning. A request whose prompt leaves reasoning open is free up
            to the token that ends it, and bound from there on. None binds every output from its first token.

    Raises:
        ConfigError: `vocab` is no vocabulary, `max_grammars` is not positive, an option is not known, or an id is outside
            of the vocabulary.
    """

    def __init__(
        self,
        vocab: TokenVocab,
        *,
        max_grammars: int = 256,
        text_ids: Iterable[int] = (),
        schema_options: Mapping[str, Any] | None = None,
        reasoning: tuple[int, int] | None = None,
    ) -> None:
        check_part("vocab", vocab, TokenVocab, "make one with TokenVocab.from_tokenizer(...)")
        hint = "It must keep one at least."
        check_int("max_grammars", max_grammars, 1, 1 << 31, ConfigError, hint)
        self._schema_options = dict(schema_options or {})
        known = inspect.signature(compile_json_schema).parameters.keys() - {"schema"}
        check_keys("schema_options", self._schema_options, known, ConfigError)
        self.vocab = vocab
        self._text_ids = tuple(text_ids)
        self._reasoning: tuple[int, ...] = ()
        if reasoning is not None:
            self._reasoning = tuple(check_ids("reasoning", reasoning, vocab.vocab_size))
            if len(self._reasoning) != 2:
                raise ConfigError(
                    f"reasoning is {reasoning!r}; give two ids, of the token that begins it and of the one that ends it",
                    field="reasoning",
                    value=reasoning,
                )
        self._max = max_grammars
        self._kept: OrderedDict[tuple[str, str], CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, kind: str, spec: str) -> CompiledGrammar:
        """The bound grammar of a kind and its text, compiled if it is not kept.

        Args:
            kind: As in `compile_kind`.
            spec: The text.

        Returns:
            The bound grammar, shared.

        Raises:
            ConfigError: The kind is not known, or `spec` is no text.
            GrammarError: The text is malformed, or cannot be enforced.
        """
        check_text("spec", spec)
        key = (kind, spec)
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        # Compiled without the lock: two threads may both do it, and the first one's stays.
        if kind == "json" and self._schema_options:
            grammar = compile_json_schema(spec, **self._schema_options)
        else:
            grammar = compile_kind(kind, spec)
        compiled = grammar.bind(self.vocab, text_ids=self._text_ids)
        with self._lock:
            compiled = self._kept.setdefault(key, compiled)
            self._kept.move_to_end(key)
            while len(self._kept) > self._max:
                self._kept.popitem(last=False)
        return compiled

    def __call__(self, params: SamplingParams) -> CompiledGrammar | RequestOptions:
        """As `for_request`, with a prompt that leaves nothing open."""
        return self.for_request(params, ())

    def for_request(
        self, params: SamplingParams, prompt_token_ids: Sequence[int]
    ) -> CompiledGrammar | RequestOptions:
        """The bound grammar of a request's `regex`, `json_schema` or `ebnf`, with its `stop_token_ids`.

        Args:
            params: Parameters that have one of the three.
            prompt_token_ids: The prompt.

        Returns:
            The bound grammar, shared, or one with what this request adds to it.

        Raises:
            ConfigError: They have none.
            GrammarError: The text is malformed, or cannot be enforced.
        """
        compiled = self._compiled(params)
        stops = [token for token in params.stop_token_ids if token not in self.vocab.eos_ids]
        after = self._boundary(prompt_token_ids)
        if not stops and after is None:
            return compiled
        return RequestOptions(compiled, stop_ids=stops, after_token=after)

    def _compiled(self, params: SamplingParams) -> CompiledGrammar:
        if params.regex is not None:
            return self.get("regex", params.regex)
        if params.ebnf is not None:
            return self.get("grammar", params.ebnf)
        if params.json_schema is None:
            raise ConfigError("the parameters have no regex, json_schema or ebnf", field="params")
        schema = params.json_schema
        return self.get(
            "json", schema if isinstance(schema, str) else json.dumps(schema, default=_plain)
        )

    def _boundary(self, prompt_token_ids: Sequence[int]) -> int | None:
        """The token that ends the reasoning in which a prompt stops; None when it stops in none."""
        if not self._reasoning:
            return None
        begin, end = self._reasoning
        last = next((token for token in reversed(prompt_token_ids) if token in (begin, end)), end)
        return end if last == begin else None

    def clear(self) -> None:
        """Forgets all grammars; matchers that run keep theirs."""
        with self._lock:
            self._kept.clear()

    def __len__(self) -> int:
        return len(self._kept)


def _plain(value: Any) -> Any:
    """What `json` knows in place of read-only mappings."""
    if isinstance(value, Mapping):
        return dict(value)
    raise GrammarSyntaxError(
        f"a schema holds a {type(value).__name__}, which is no JSON value; use null, a number, ..."
    )
