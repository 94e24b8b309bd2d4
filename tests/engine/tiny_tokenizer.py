"""A small byte-level BPE tokenizer, made when it is needed."""

from __future__ import annotations

import functools
import json

from deepinfer.engine.chat_format import (
    ASSISTANT,
    BOS,
    DSML,
    EOS,
    IMAGE,
    LATEST_REMINDER,
    SYSTEM,
    TASKS,
    THINK_CLOSE,
    THINK_OPEN,
    USER,
)
from deepinfer.engine.tokenizer import Tokenizer

PAD = "<｜▁pad▁｜>"
NOISE = "<｜noise｜>"
SPECIALS = [
    BOS,
    EOS,
    PAD,
    NOISE,
    IMAGE,
    USER,
    ASSISTANT,
    SYSTEM,
    LATEST_REMINDER,
    THINK_OPEN,
    THINK_CLOSE,
    DSML,
]
SPECIALS += list(TASKS.values())
CONFIG = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": 4,
    "noise_token_id": 3,
}

CORPUS = [
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n",
    "The capital of France is Paris. The weather is sunny, sunny, sunny.",
    "深度求索公司 于2026年发布。深度学习 深度 深度",
    "émigré naïve café 🙂🙂👩‍👩‍👧‍👦",
    '{"a": [1, 2, {"b": null}]} ## Tools\n\nuser tool result think',
] * 5


@functools.cache
def tokenizer_json(vocab_size: int = 400) -> str:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend.to_str()


@functools.cache
def tiny_tokenizer() -> Tokenizer:
    return Tokenizer.from_json(tokenizer_json(), config=CONFIG)


def with_added(text: str, *names: str) -> str:
    """The same tokenizer with more control tokens at the end of the vocabulary."""
    data = json.loads(text)
    next_id = max(entry["id"] for entry in data["added_tokens"])
    next_id = max(next_id, max(data["model"]["vocab"].values()))
    for name in names:
        next_id += 1
        data["added_tokens"].append(
            {
                "id": next_id,
                "content": name,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        )
    return json.dumps(data)
