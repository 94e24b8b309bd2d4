"""Token streams, tokenizer and config of `nano`: what `train` reads and `export` writes beside the weights."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .corpus import build_corpus
from .hashing import table_rows

CONFIG = Path(__file__).with_name("nano_config.json")
SPECIAL_TOKENS = [
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜draft▁noise｜>", "<｜deepseek_image｜>",
    "<｜User｜>", "<｜Assistant｜>", "<｜System｜>", "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>",
]  # fmt: skip
FIRST_TEXT_ID = len(SPECIAL_TOKENS)
STREAMS = ("code", "docs", "tasks")
MAX_SHARD_BYTES = 11_900_000


def say(text: str) -> None:
    """A line of progress on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


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


def prepare(options: Namespace) -> None:
    """The `data` command."""
    from deepinfer.models.deepseek_v41.engram_tokens import build_token_map

    from .tasks import TaskWriter

    train, held_out = build_corpus(options.stdlib, options.docs, options.more_stdlib)
    code = [d.text for d in train["code"]]
    writer = TaskWriter([d.text for d in train["code"] if "CPython" in d.source], options.seed)
    texts = {
        "code": code,
        "docs": [d.text for d in train["docs"]],
        "tasks": list(writer.documents(options.task_characters)),
    }
    config = json.loads(CONFIG.read_text())
    text_config = config["text_config"]
    sample = [*code, *texts["docs"], *texts["tasks"][::4]]
    tokenizer = train_tokenizer(sample, text_config["vocab_size"])
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(options.out / "tokenizer.json"))
    token_map = build_token_map(tokenizer, text_config["vocab_size"])
    text_config["engram_compressed_vocab_size"] = int(max(token_map)) + 1
    text_config["engram_num_embeddings"] = table_rows(SimpleNamespace(**text_config))
    (options.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    np.save(options.out / "token_map.npy", np.array(token_map, dtype=np.int32))
    streams = {name: encode_documents(tokenizer, texts[name]) for name in STREAMS if texts[name]}
    for name, documents in held_out.items():
        streams[f"held_out_{name}"] = encode_documents(tokenizer, [d.text for d in documents])
    test_writer = TaskWriter([d.text for d in held_out["code"]], options.seed + 1)
    streams["held_out_tasks"] = encode_documents(tokenizer, list(test_writer.documents(300_000)))
    np.savez_compressed(options.out / "streams.npz", bytes=token_bytes(tokenizer), **streams)
    card: dict[str, Any] = {
        "sources": sorted({d.source for documents in train.values() for d in documents}),
        "held_out": {name: [d.name for d in documents] for name, documents in held_out.items()},
        "tokens": {name: len(ids) for name, ids in streams.items()},
        "bytes": {name: sum(len(t.encode()) for t in texts[name]) for name in texts},
    }
    (options.out / "data_card.json").write_text(json.dumps(card, indent=1) + "\n")
    say(json.dumps({k: card[k] for k in ("sources", "tokens", "bytes")}))


def load_config(folder: Path) -> SimpleNamespace:
    """The text config of a data folder as a namespace, as the twin takes it."""
    config = json.loads((folder / "config.json").read_text())["text_config"]
    config["rope_scaling"] = SimpleNamespace(**config["rope_scaling"])
    return SimpleNamespace(**config)


def write_checkpoint(tensors: dict[str, Any], data: Path, out: Path) -> None:
    """Writes tensors by published name, with the data folder's config, tokenizer and token map."""
    import shutil

    from deepinfer.models import save_pretrained
    from deepinfer.models.deepseek_v41 import DeepseekV41Config

    save_pretrained(
        tensors,
        out,
        config=DeepseekV41Config.from_pretrained(data),
        max_shard_bytes=MAX_SHARD_BYTES,
    )
    shutil.copyfile(data / "tokenizer.json", out / "tokenizer.json")
    token_map = np.load(data / "token_map.npy").tolist()
    (out / "engram_token_map.json").write_text(json.dumps(token_map, separators=(",", ":")) + "\n")


def export_folder(options: Namespace) -> None:
    """The `export` command: published layout, tokenizer, token map and config."""
    import torch

    from .draft import TrainDraft
    from .export import checkpoint_tensors
    from .trunk import Trunk

    c = load_config(options.data)
    trunk = Trunk(c, lambda ids: [], 16)
    trunk.load_state_dict(torch.load(options.train_out / "trunk.pt", map_location="cpu"))
    draft = TrainDraft(trunk)
    draft.load_state_dict(torch.load(options.train_out / "draft.pt", map_location="cpu"))
    write_checkpoint(checkpoint_tensors(trunk, draft), options.data, options.out)
