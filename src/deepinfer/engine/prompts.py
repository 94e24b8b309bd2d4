"""Prompts as callers write them (text, token ids, messages) to requests."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from inspect import signature
from typing import Any

from deepinfer.core import _checks as checks
from deepinfer.core.errors import InvalidRequest
from deepinfer.core.params import SamplingParams
from deepinfer.core.protocols import ModelInfo, Tokenizer
from deepinfer.core.types import Request
from deepinfer.sampling import resolve_seed

__all__ = ["Message", "Prompt", "PromptEncoder", "as_params", "split_prompts"]

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or the messages of a conversation."""


def split_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """Tells one prompt from several.

    Args:
        prompts: A text, a sequence of integers, a sequence of messages, or a sequence of those.

    Returns:
        The prompts, in order.

    Raises:
        InvalidRequest: It is none of these.
    """
    if isinstance(prompts, str):
        return [prompts]
    if hasattr(prompts, "tolist") and not isinstance(prompts, memoryview):
        prompts = prompts.tolist()
    refused = Mapping | Set | bytes | bytearray | memoryview  # a set has no order for the outputs
    if isinstance(prompts, refused) or not isinstance(prompts, Iterable):
        raise InvalidRequest(
            f"the prompt is {checks.show(prompts)} ({type(prompts).__name__}); give text, a list of token "
            "ids, a list of messages, or a list of those.",
            field="prompt",
            value=prompts,
        )
    items: list[Any] = list(prompts)
    if items and all(isinstance(item, numbers.Integral | Mapping) for item in items):
        return [items]
    return items


def as_params(
    params: SamplingParams | Mapping[str, Any] | Sequence[Any] | None, count: int
) -> list[SamplingParams]:
    """One `SamplingParams` a prompt.

    Args:
        params: One for all, a mapping with the same fields, one a prompt, or None for the defaults.
        count: Number of prompts.

    Returns:
        `count` parameters.

    Raises:
        InvalidRequest: The number differs from that of the prompts, or an option is unknown or unusable.
    """
    if isinstance(params, Sequence) and not isinstance(params, str):
        if len(params) != count:
            raise InvalidRequest(
                f"there are {count} prompts and {len(params)} sampling parameters; give one for each "
                "prompt, or a single one for all.",
                field="params",
                value=len(params),
                limit=str(count),
            )
        return [_one_params(item) for item in params]
    return [_one_params(params)] * count


def _one_params(params: Any) -> SamplingParams:
    if params is None:
        return SamplingParams()
    if isinstance(params, Mapping):
        return SamplingParams.from_dict(params)
    if not isinstance(params, SamplingParams):
        checks.fail(
            "params", params, "a SamplingParams, a mapping, or a list of them", InvalidRequest
        )
    return params


class PromptEncoder:
    """Turns prompts into requests, and refuses what the model could not run.

    Args:
        info: Facts of the model.
        tokenizer: Needed for text, messages and stop strings, or None.
        grammar: Compiles the grammar of a request's parameters, or None. With a method `for_request` that is called with
            the prompt's ids as well.
        seed: Base of the seeds of requests that bring none, or None to draw each.
        image_token_id: Id that stands for an image, or None.
    """

    def __init__(
        self,
        info: ModelInfo,
        tokenizer: Tokenizer | None,
        *,
        grammar: Callable[[SamplingParams], Any] | None = None,
        seed: int | None = None,
        image_token_id: int | None = None,
    ) -> None:
        self._info = info
        self._image_token_id = image_token_id
        self._tokenizer = tokenizer
        self._grammar = grammar
        self._seed = seed
        self._num_seeded = 0

    def token_ids(self, prompt: Prompt) -> list[int]:
        """Token ids of one prompt.

        Text gets the begin-of-sequence token in front; token ids are taken as they are; messages are rendered
        in the model's chat format, ready for the assistant's answer.

        Args:
            prompt: The prompt.

        Returns:
            The ids, at least one.

        Raises:
            InvalidRequest: The prompt is empty or of another kind, an id is outside the vocabulary, or there is
                no tokenizer for text or messages.
        """
        if isinstance(prompt, str):
            if not prompt:
                self._refuse_empty("text")
            return self._need_tokenizer("text").encode(prompt)
        if hasattr(prompt, "tolist") and not isinstance(prompt, memoryview):
            prompt = prompt.tolist()
        if isinstance(prompt, Mapping | bytes | bytearray | memoryview) or not isinstance(
            prompt, Sequence
        ):
            checks.fail(
                "prompt", prompt, "text, a list of token ids, or a list of messages", InvalidRequest
            )
        if not prompt:
            self._refuse_empty("list")
        if isinstance(prompt[0], Mapping):
            return self.encode_chat(prompt)  # type: ignore[arg-type]
        if isinstance(prompt[0], str | list | tuple):
            raise InvalidRequest(
                f"the prompt is a list that begins with {checks.show(prompt[0])}, so it looks like several "
                "prompts; here one is taken. Give several to generate, or make a request of each.",
                field="prompt",
                value=prompt,
            )
        return self._check_ids(prompt)

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        Args:
            messages: Mappings with "role" and "content", oldest first.
            options: Passed to `deepinfer.engine.chat.render_chat`.

        Returns:
            The ids.

        Raises:
            InvalidRequest: A message is malformed, an option unknown, or no tokenizer knows the chat format.
        """
        from deepinfer.engine.chat import render_chat

        known = [name for name in signature(render_chat).parameters if name != "messages"]
        checks.check_keys("encode_chat", options, known, InvalidRequest)
        tokenizer: Any = self._need_tokenizer("messages")
        if not hasattr(tokenizer, "encode_chat"):
            raise InvalidRequest(
                f"{type(tokenizer).__name__} has no encode_chat, so messages cannot be rendered; give text "
                "or token ids, or a tokenizer that has it.",
                field="tokenizer",
            )
        return list(tokenizer.encode_chat(render_chat(messages, **options)))

    def requests(
        self,
        prompt: Prompt,
        params: SamplingParams,
        rid: str,
        priority: int = 0,
        *,
        arrival_s: float = 0.0,
        cache_salt: str | None = None,
    ) -> list[Request]:
        """The requests of one prompt, one a sample, each with its own id and seed.

        Args:
            prompt: The prompt.
            params: Sampling options.
            rid: Id that the caller knows. Sample i of several is called `rid[i]` inside the engine.
            priority: Lower runs first.
            arrival_s: Time of arrival in seconds.
            cache_salt: Requests share cached prefixes only when it is equal.

        Returns:
            `params.n` requests.

        Raises:
            InvalidRequest: As in `token_ids`, an option does not fit the model, or a part that an option needs
                is not there.
        """
        checks.check_text("rid", rid, InvalidRequest)
        ids = tuple(self.token_ids(prompt))
        if self._image_token_id in ids:
            raise InvalidRequest(
                f"the prompt holds the image token {self._image_token_id} at position "
                f"{ids.index(self._image_token_id)}, and prompts with images are not built into this version "
                "of the engine; leave images out.",
                field="prompt",
                value=self._image_token_id,
                limit="text only",
            )
        self._check_params(params)
        grammar = self._compile(params, ids)
        seed = resolve_seed(params.seed if params.seed is not None else self._next_seed())
        return [
            Request(
                rid=rid if params.n == 1 else f"{rid}[{index}]",
                prompt_token_ids=ids,
                params=params.with_seed(resolve_seed(seed, index)),
                priority=priority,
                arrival_s=arrival_s,
                sample_index=index,
                cache_salt=cache_salt,
                grammar=grammar,
            )
            for index in range(params.n)
        ]

    def _next_seed(self) -> int | None:
        if self._seed is None:
            return None
        self._num_seeded += 1
        return resolve_seed(self._seed, self._num_seeded)

    def _check_ids(self, ids: Sequence[Any]) -> list[int]:
        vocab = self._info.vocab_size
        if set(map(type, ids)) != {int} or not 0 <= min(ids) <= max(ids) < vocab:
            return [
                checks.check_int(
                    f"prompt token {index}",
                    item,
                    0,
                    vocab - 1,
                    InvalidRequest,
                    "Use the tokenizer of this checkpoint.",
                )
                for index, item in enumerate(ids)
            ]
        return list(ids)

    def _check_params(self, params: SamplingParams) -> None:
        if params.stop:
            self._need_tokenizer("stop strings")
        for token in (*params.stop_token_ids, *(params.logit_bias or ())):
            if token >= self._info.vocab_size:
                name = "stop_token_ids" if token in params.stop_token_ids else "logit_bias"
                raise InvalidRequest(
                    f"{name} holds the id {token}; ids go from 0 to {self._info.vocab_size - 1}.",
                    field=name,
                    value=token,
                    limit=f"0 to {self._info.vocab_size - 1}",
                )

    def _compile(self, params: SamplingParams, prompt: Sequence[int]) -> Any:
        if not params.has_grammar:
            return None
        if self._grammar is None:
            name = next(
                n for n in ("regex", "json_schema", "ebnf") if getattr(params, n) is not None
            )
            raise InvalidRequest(
                f"{name} is set, and this engine knows no vocabulary: it has no tokenizer, or one without vocabulary(). "
                "Give it a tokenizer (Engine.from_pretrained does), or a grammar part: "
                "Engine(..., grammar=GrammarLibrary(vocab)).",
                field=name,
                value=getattr(params, name),
                limit="None without a grammar part",
            )
        # A part that looks at the prompt, too, says where in the output its grammars begin.
        for_request = getattr(self._grammar, "for_request", None)
        return self._grammar(params) if for_request is None else for_request(params, prompt)

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequest(
                f"{what} cannot be used without a tokenizer, and this engine has none; give token ids, or make the engine "
                "with tokenizer=.",
                field="tokenizer",
            )
        return self._tokenizer

    def _refuse_empty(self, kind: str) -> None:
        raise InvalidRequest(
            f"the prompt is an empty {kind}; give at least one token. To start from nothing, give the "
            f"begin-of-sequence id ({self._info.bos_token_id}) as token ids.",
            field="prompt",
            limit="at least one token",
        )
