"""The `data` command: collects text, trains the tokenizer, stores token streams and configuration."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from deepinfer.models.deepseek_v41.engram import EngramHash
from deepinfer.models.deepseek_v41.engram_tokens import build_token_map

from .corpus import build_corpus
from .dataset import FIRST_TEXT_ID, HELD_OUT, SPECIAL_TOKENS, STREAMS
from .report import say
from .tasks import TaskWriter

CONFIG = Path(__file__).with_name("nano_config.json")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with single digits; special tokens take the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_documents(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Begin, text and end of every document, uint16. A dialogue brings its own begin and end."""
    begin, end = (tokenizer.token_to_id(t) for t in SPECIAL_TOKENS[:2])
    ids: list[int] = []
    for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
        found = encoding.ids
        if found and found[0] != begin:
            ids.append(begin)
        ids.extend(found)
        if found and found[-1] != end:
            ids.append(end)
    return np.array(ids, dtype=np.uint16)


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """Bytes each id stands for, float32; special ids count 0."""
    size = tokenizer.get_vocab_size()
    return np.array(
        [0 if i < FIRST_TEXT_ID else len(tokenizer.id_to_token(i)) for i in range(size)],
        dtype=np.float32,
    )


def fit_engram(text_config: dict[str, Any], token_map: list[int]) -> None:
    """Sets the Engram sizes that follow from the tokenizer and from the other fields."""
    text_config["engram_compressed_vocab_size"] = max(token_map) + 1
    names = ("layer_ids", "vocab_size", "n_heads", "max_ngram_size")
    fields = {f"engram_{name}": text_config[f"engram_{name}"] for name in names}
    text_config["engram_num_embeddings"] = list(EngramHash.table_rows(**fields))


def prepare(options: Namespace) -> None:
    """The `data` command."""
    train, held_out = build_corpus(options.stdlib, options.docs, options.more_stdlib)
    code = [d.text for d in train["code"]]
    writer = TaskWriter([d.text for d in train["code"] if "CPython" in d.source], options.seed)
    texts = {
        "code": code,
        "docs": [d.text for d in train["docs"]],
        "tasks": list(writer.documents(options.task_characters)),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    config = json.loads(CONFIG.read_text())
    sample = [*code, *texts["docs"], *texts["tasks"][::4]]
    tokenizer = train_tokenizer(sample, config["text_config"]["vocab_size"])
    tokenizer.save(str(options.out / "tokenizer.json"))
    token_map = build_token_map(tokenizer, config["text_config"]["vocab_size"])
    np.save(options.out / "token_map.npy", np.array(token_map, dtype=np.int32))
    fit_engram(config["text_config"], token_map)
    (options.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    streams = {name: encode_documents(tokenizer, texts[name]) for name in STREAMS if texts[name]}
    for name, documents in held_out.items():
        streams[HELD_OUT + name] = encode_documents(tokenizer, [d.text for d in documents])
    test_writer = TaskWriter([d.text for d in held_out["code"]], options.seed + 1)
    streams[HELD_OUT + "tasks"] = encode_documents(tokenizer, list(test_writer.documents(300_000)))
    np.savez_compressed(options.out / "streams.npz", bytes=token_bytes(tokenizer), **streams)
    card: dict[str, Any] = {
        "sources": sorted({d.source for documents in train.values() for d in documents}),
        "held_out": {name: [d.name for d in documents] for name, documents in held_out.items()},
        "tokens": {name: len(ids) for name, ids in streams.items()},
        "bytes": {name: sum(len(t.encode()) for t in texts[name]) for name in texts},
    }
    (options.out / "data_card.json").write_text(json.dumps(card, indent=1) + "\n")
    say(json.dumps({k: card[k] for k in ("sources", "tokens", "bytes")}))
