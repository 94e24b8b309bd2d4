"""What a request must give, worked out one token at a time without scheduler, cache or engine; and a toy grammar."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.core.params import SamplingParams
from deepinfer.core.protocols import SampleRows
from deepinfer.core.types import FinishReason, Request, TokenLogprob
from deepinfer.sampling import Sampler, resolve_seed
from deepinfer.testing.toy_model import ToyModel
from deepinfer.testing.toy_tokenizer import ToyTokenizer

__all__ = ["Expected", "ToyGrammar", "ToyReference"]

_FIRST_LETTER = 4


@dataclass(frozen=True, slots=True)
class Expected:
    """One output as it must come out.

    Attributes:
        text: Its text.
        token_ids: Its tokens.
        finish_reason: Why it ends.
        logprobs: One entry a token when asked for, else empty.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...]


class ToyGrammar:
    """A grammar over toy ids: which letters may come next depends on all before them; it ends at a given length.

    Args:
        seed: Which grammar, from 0.
        length: Tokens after which nothing but the end can follow, from 1.
        vocab_size: Number of ids.
        eos_token_id: The end; allowed from half of the length on.

    Examples:
        >>> state = ToyGrammar(seed=3, length=2).start()
        >>> state.accept([4]), state.accept([7]), state.is_done
        (True, True, True)
    """

    def __init__(self, seed: int, length: int, vocab_size: int = 64, eos_token_id: int = 1) -> None:
        self.seed, self.length = seed, length
        self.vocab_size, self.eos_token_id = vocab_size, eos_token_id

    @classmethod
    def compile(cls, params: SamplingParams, vocab_size: int = 64) -> ToyGrammar:
        """The grammar of parameters whose `regex` is "toy:SEED:LENGTH"; fits as the grammar part of an engine.

        Args:
            params: The parameters.
            vocab_size: Number of ids.

        Returns:
            The grammar.
        """
        _, seed, length = (params.regex or "toy:0:1").split(":")
        return cls(int(seed), int(length), vocab_size)

    def start(self) -> _ToyState:
        """The state before the first token."""
        return _ToyState(self, [])

    def allows(self, before: Sequence[int], token: int) -> bool:
        """Whether a token may follow.

        Args:
            before: Tokens before it.
            token: The token.

        Returns:
            Whether it may.
        """
        if token == self.eos_token_id:
            return 2 * len(before) >= self.length
        if len(before) >= self.length or not _FIRST_LETTER <= token < self.vocab_size:
            return False
        return (5 * token + 3 * sum(before) + len(before) + self.seed) % 7 < 4


class _ToyState:
    def __init__(self, grammar: ToyGrammar, ids: list[int]) -> None:
        self._grammar = grammar
        self._ids = ids

    @property
    def is_done(self) -> bool:
        return len(self._ids) >= self._grammar.length

    def accept(self, token_ids: Sequence[int]) -> bool:
        ids = list(self._ids)
        for token in token_ids:
            if token == self._grammar.eos_token_id or not self._grammar.allows(ids, token):
                return False
            ids.append(int(token))
        self._ids = ids
        return True

    def fill_mask(self, row: Any) -> None:
        row[:] = 0
        for token in range(self._grammar.vocab_size):
            if self._grammar.allows(self._ids, token):
                bit = token & 31
                row[token >> 5] |= (1 << bit) - (1 << 32) * (bit == 31)

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            del self._ids[-num_tokens:]

    def clone(self) -> _ToyState:
        return _ToyState(self._grammar, list(self._ids))


class ToyReference:
    """Outputs of requests that run alone on a toy model, each token from a forward pass over the whole sequence.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        max_model_len: Most tokens of prompt plus output.

    Examples:
        >>> reference = ToyReference(ToyModel(), ToyTokenizer(), 64)
        >>> params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
        >>> list(reference.output((5, 6), params).token_ids) == ToyModel().greedy((5, 6), 3)
        True
    """

    def __init__(self, model: ToyModel, tokenizer: ToyTokenizer, max_model_len: int) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._sampler = Sampler()
        self._remembered = functools.lru_cache(4096)(self._output)
        self._logits = functools.lru_cache(65_536)(self._last_logits)

    def output(
        self, prompt: tuple[int, ...], params: SamplingParams, sample_index: int = 0
    ) -> Expected:
        """What a request must give.

        Args:
            prompt: Token ids.
            params: Sampling options, with a seed.
            sample_index: Which of its samples.

        Returns:
            The output.
        """
        return self._remembered(prompt, params, sample_index)

    def _last_logits(self, ids: tuple[int, ...]) -> torch.Tensor:
        return self._model.logits(ids)[-1:]

    def _output(self, prompt: tuple[int, ...], params: SamplingParams, index: int) -> Expected:
        vocab, eos = self._model.config.vocab_size, self._model.config.eos_token_id
        seed = resolve_seed(resolve_seed(params.seed), index)
        request = Request(rid="alone", prompt_token_ids=prompt, params=params.with_seed(seed))
        grammar = ToyGrammar.compile(params, vocab) if params.has_grammar else None
        state = grammar.start() if grammar is not None else None
        limit = min(len(prompt) + params.max_tokens, self._max_model_len)
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else (eos,))}
        out: list[int] = []
        logprobs: list[TokenLogprob] = []
        text, reason = "", None
        while reason is None:
            token, entry = self._choose(request, out, state)
            out.append(token)
            if entry is not None:
                logprobs.append(entry)
            if token in ends:
                reason = FinishReason.STOP
                break
            text += self._tokenizer.decode((token,))
            found = [stop for stop in params.stop if text.endswith(stop)]
            if len(prompt) + len(out) >= limit:
                reason = FinishReason.LENGTH
            if state is not None:
                state.accept((token,))
                if state.is_done and reason is None:
                    reason = FinishReason.STOP
            if found and self._tokenizer.decode((token,)):
                text, reason = text[: -max(map(len, found))], FinishReason.STOP
        return Expected(text, tuple(out), reason, tuple(logprobs))

    def _choose(
        self, request: Request, out: list[int], state: Any
    ) -> tuple[int, TokenLogprob | None]:
        ids = (*request.prompt_token_ids, *out)
        logits = self._logits(ids).clone()
        rows = SampleRows(
            requests=(request,),
            positions=(len(ids),),
            seeds=(request.params.seed or 0,),
            output_token_ids=(tuple(out),),
        )
        masks = None
        if state is not None:
            masks = torch.zeros((1, -(-logits.shape[1] // 32)), dtype=torch.int32)
            state.fill_mask(masks[0])
        sampled = self._sampler(logits, rows, masks)
        entry = sampled.logprobs[0] if sampled.logprobs else None
        return int(sampled.token_ids[0]), entry
