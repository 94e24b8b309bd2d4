"""Grammars in `transformers`: a logits processor for `model.generate`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from deepinfer.core.errors import ConfigError, ShapeError
from deepinfer.grammar import (
    CompiledGrammar,
    GrammarMatcher,
    allocate_bitmask,
    apply_bitmask_,
    fill_batch,
)

__all__ = ["GrammarLogitsProcessor"]


class GrammarLogitsProcessor:
    """Keeps the outputs of `model.generate` in a grammar.

    Give it as `logits_processor=[processor]`. It works with greedy search, sampling, several sequences a prompt and
    beams, which may change places. Use one object for one call of `generate`, or call `reset` between two.

    Rows that ended keep their logits: `generate` pads them. The prompt is what `input_ids` holds at the first call.

    Args:
        compiled: One bound grammar for all rows, or one for each row of the batch; None leaves a row free. With beams or
            several sequences a prompt, rows are counted after they were multiplied.
        max_rows: Rows whose history is kept; larger batches are refused.

    Raises:
        ConfigError: There is no grammar at all.
    """

    def __init__(
        self,
        compiled: CompiledGrammar | Sequence[CompiledGrammar | None],
        *,
        max_rows: int = 4096,
    ) -> None:
        self._compiled = compiled
        self._max_rows = max_rows
        if isinstance(compiled, Sequence) and not any(compiled):
            raise ConfigError(
                "every row's grammar is None; leave the processor out", field="compiled"
            )
        self.reset()

    def reset(self) -> None:
        """Forgets every row, so that another call of `generate` can begin."""
        self._prompt_length: int | None = None
        # What each row has generated, and where it is: beams look up where they come from.
        self._known: dict[tuple[int, tuple[int, ...]], GrammarMatcher] = {}
        self._bitmask: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Sets the scores of tokens that may not come next to minus infinity.

        Args:
            input_ids: Prompts and what was generated, shape [rows, tokens], integers.
            scores: Scores of the next token, shape [rows, vocab], any floating dtype.

        Returns:
            The scores, shape [rows, vocab]; the input is left as it was.

        Raises:
            ShapeError: There are more rows than grammars, or than `max_rows`.
        """
        num_rows = scores.shape[0]
        if num_rows > self._max_rows or (
            isinstance(self._compiled, Sequence) and num_rows != len(self._compiled)
        ):
            limit = len(self._compiled) if isinstance(self._compiled, Sequence) else self._max_rows
            raise ShapeError(
                f"there are {num_rows} rows of scores and {limit} can be served; give one grammar a row",
                argument="scores",
                expected=f"[{limit}, vocab]",
                found=tuple(scores.shape),
            )
        if self._prompt_length is None or input_ids.shape[1] < self._prompt_length:
            self.reset()
            self._prompt_length = input_ids.shape[1]
        matchers = self._matchers(input_ids[:, self._prompt_length :].tolist())
        active = [
            None if matcher is None or matcher.is_terminated() else matcher for matcher in matchers
        ]
        rows = [row for row, matcher in enumerate(active) if matcher is not None]
        if not rows:
            return scores
        bitmask = self._rows(num_rows, scores.shape[1])
        bitmask.fill_(-1)
        fill_batch(active, bitmask)
        out = scores.clone()
        apply_bitmask_(out, bitmask[rows].to(scores.device), rows)
        return out

    def _rows(self, num_rows: int, vocab_size: int) -> Tensor:
        if self._bitmask is None or self._bitmask.shape[0] != num_rows:
            # The grammar's vocabulary may be wider than the scores, and bits of padding are never set.
            grammars = (
                [self._compiled] if not isinstance(self._compiled, Sequence) else self._compiled
            )
            width = max(g.vocab.vocab_size for g in grammars if g is not None)
            self._bitmask = allocate_bitmask(num_rows, max(width, vocab_size), backend="torch")
        return self._bitmask

    def _matchers(self, generated: list[list[int]]) -> list[GrammarMatcher | None]:
        """The place of each row, moved over the token that came last."""
        known: dict[tuple[int, tuple[int, ...]], GrammarMatcher] = {}
        found: list[GrammarMatcher | None] = []
        for row, tokens in enumerate(generated):
            compiled = (
                self._compiled[row] if isinstance(self._compiled, Sequence) else self._compiled
            )
            if compiled is None:
                found.append(None)
                continue
            key = (id(compiled), tuple(tokens))
            matcher = known.get(key)
            if matcher is None:
                matcher = known[key] = self._place(compiled, tokens)
            found.append(matcher)
        self._known = known
        return found

    def _place(self, compiled: CompiledGrammar, tokens: list[int]) -> GrammarMatcher:
        before = self._known.get((id(compiled), tuple(tokens[:-1]))) if tokens else None
        if before is None:
            matcher = GrammarMatcher(compiled)
            matcher.accept_tokens(tokens)
            return matcher
        matcher = before.fork()
        if not matcher.is_terminated():
            matcher.accept_token(tokens[-1])
        return matcher
