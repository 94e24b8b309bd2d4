"""Measures in the engine what a bounded replay after a prefix hit costs in accepted drafts.

Run: python benchmarks/replay_drafts.py [--model nano] [--prompts 240] [--hit 896] [--tokens 64] [--device cpu]

Every prompt is a piece of held-out text that ends some tokens behind the hit. It is continued greedily with drafts, first
cold, then again behind a hit on its own prefix: by a bounded replay, and as a control by an exact one, whose numbers are
those of a full run. Verified blocks are counted over whole continuations, and once more up to the first token in which a
continuation differs from the cold one, so that both draft for the same text. Intervals are of a bootstrap over prompts.
One JSON line a case and distance behind the hit, and one a loss; --results appends them to a file.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import platform
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quality.held_out import CODE_SUFFIXES, held_out_documents, stdlib_folder
from quality.results import content_hash, device_name

from deepinfer import Engine, EngineConfig, SamplingParams
from deepinfer.core.types import OutputDelta
from deepinfer.engine.tokenizer import Tokenizer
from deepinfer.models import load_model, resolve_checkpoint

BLOCK = 128
BEHIND = (4, 16, 48, 96)
EDGES = (0, 16, 32, 64, 96, 128, 192, 256)
RESAMPLES = 2_000


@dataclass(slots=True)
class Continuation:
    """What one prompt got, block by block.

    Attributes:
        distance: Tokens from the hit to the end of the prompt.
        token_ids: The tokens.
        starts: Tokens there were before each verified block.
        kept: Accepted drafts of each.
        cached: Tokens taken from the cache.
        replayed: Tokens run again.
    """

    distance: int
    token_ids: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    cached: int = 0
    replayed: int = 0

    def __call__(self, delta: OutputDelta) -> None:
        """Takes a delta of the engine."""
        usage = delta.usage
        if self.token_ids and delta.token_ids and usage.verified > self._verified:
            self.starts.append(len(self.token_ids))
            self.kept.append(usage.accepted - sum(self.kept))
        self._verified = usage.verified
        self.token_ids += delta.token_ids
        self.cached, self.replayed = usage.cached, usage.replayed

    _verified: int = 0

    def blocks(self, limit: int, low: int = 0, high: int = 1 << 30) -> tuple[int, int]:
        """Blocks that began among the first `limit` tokens and in a range of distances, and their accepted drafts."""
        found = [
            kept
            for start, kept in zip(self.starts, self.kept, strict=True)
            if start < limit and low <= self.distance + start < high
        ]
        return len(found), sum(found)


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens up to the first difference."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return sum(1 for _ in pairs)


def pieces(texts: Sequence[Sequence[int]], hit: int, count: int) -> list[list[int]]:
    """Prompts from all over some texts, none of which begins where another does.

    Args:
        texts: Token ids of the texts, each behind the token that begins a sequence.
        hit: Tokens of the prefix.
        count: Most prompts.

    Returns:
        The prompts; they end 4, 16, 48 and 96 tokens behind the hit by turns.
    """
    length = hit + max(BEHIND)
    places = [
        (at, number)
        for number, ids in enumerate(texts)
        for at in range(1, len(ids) - length, length)
    ]
    wanted = np.unique(np.linspace(0, len(places) - 1, min(count, len(places))).astype(int))
    out = []
    for turn, (at, number) in enumerate(places[index] for index in wanted):
        size = hit + BEHIND[turn % len(BEHIND)]
        out.append([texts[number][0], *texts[number][at : at + size - 1]])
    return out


def run(
    engine: Engine, prompts: Sequence[Sequence[int]], hit: int, tokens: int
) -> list[Continuation]:
    """Continues some prompts at once, greedily.

    Args:
        engine: The engine.
        prompts: The prompts.
        hit: Tokens of their prefix that are or will be cached.
        tokens: Tokens generated for each.

    Returns:
        The continuations.
    """
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    found = [Continuation(len(prompt) - hit) for prompt in prompts]
    for prompt, sink in zip(prompts, found, strict=True):
        engine.add_request(prompt, params, sink=sink)
    while engine.has_unfinished:
        engine.step()
    return found


def loss(cold: np.ndarray, warm: np.ndarray, seed: int = 0) -> dict[str, float]:
    """How much lower the mean of accepted drafts is.

    Args:
        cold: Blocks and accepted drafts of each prompt, shape [prompts, 2].
        warm: The same behind a hit.
        seed: Seed of the bootstrap.

    Returns:
        The loss as a share of the cold mean, 0 when that is 0, and the ends of its 95 % interval.
    """

    def of(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        rate = np.asarray(a[..., 1] * b[..., 0], dtype=np.float64)
        share = np.divide(b[..., 1] * a[..., 0], rate, out=np.ones_like(rate), where=rate > 0)
        return np.asarray(1 - share)

    picks = np.random.default_rng(seed).integers(0, len(cold), (RESAMPLES, len(cold)))
    drawn = np.sort(of(cold[picks].sum(1), warm[picks].sum(1)))
    low, high = drawn[round(0.025 * RESAMPLES)], drawn[round(0.975 * RESAMPLES) - 1]
    value = of(cold.sum(0), warm.sum(0))
    return {"value": round(float(value), 5), "low": round(float(low), 5), "high": round(float(high), 5)}  # fmt: skip


def lines(
    name: str, cold: Sequence[Continuation], warm: Sequence[Continuation]
) -> Iterator[dict[str, Any]]:
    """What is recorded of one case.

    Args:
        name: What the case is called.
        cold: Continuations without a hit.
        warm: Those of the same prompts in this case.
    """
    whole = 1 << 30
    for low, high in [*itertools.pairwise(EDGES), (0, whole)]:
        found = np.array([one.blocks(whole, low, high) for one in warm])
        blocks, kept = found.sum(0)
        if blocks:
            line = {"case": name, "value": round(float(kept / blocks), 4)}
            line |= {"unit": "accepted drafts per block", "blocks": int(blocks)}
            yield line if high == whole else line | {"distance_from": low, "distance_to": high}
    if warm is cold:
        return
    shared = [common_length(a.token_ids, b.token_ids) for a, b in zip(cold, warm, strict=True)]
    for what, limits in (("whole continuations", [whole] * len(cold)), ("the same text", shared)):
        before, behind = (
            np.array([one.blocks(limit) for one, limit in zip(side, limits, strict=True)])
            for side in (cold, warm)
        )
        yield {
            "case": f"{name}, drafts lost over {what}",
            "unit": "share of accepted drafts",
            **loss(before, behind),
            "blocks": int(behind[:, 0].sum()),
        }
    same = sum(a.token_ids == b.token_ids for a, b in zip(cold, warm, strict=True))
    yield {"case": f"{name}, same continuation", "value": round(same / len(cold), 4), "unit": "share"}  # fmt: skip


def measure(
    model: Any, prompts: Sequence[Sequence[int]], hit: int, tokens: int, batch: int
) -> dict[str, list[Continuation]]:
    """Continues every prompt cold and behind a hit of each kind.

    Args:
        model: The model.
        prompts: The prompts.
        hit: Tokens of the hit, a multiple of the block size.
        tokens: Tokens generated for each.
        batch: Prompts at once.

    Returns:
        The continuations by case, in order of the prompts.
    """
    longest = hit + max(BEHIND) + tokens
    cases: dict[str, list[Continuation]] = {}
    for replay in ("bounded", "exact"):
        config = EngineConfig(
            max_num_seqs=batch, max_model_len=longest, block_size=BLOCK, replay=replay
        )
        with Engine(model=model, drafter="dspark", config=config) as engine:
            for at in range(0, len(prompts), batch):
                part = prompts[at : at + batch]
                engine.reset_prefix_cache()
                for name in ("cold", replay):
                    found = run(engine, part, hit, tokens)
                    wanted = 0 if name == "cold" else hit
                    if any(one.cached != wanted for one in found):
                        raise SystemExit(f"{name}: not every prompt has a hit of {wanted} tokens")
                    if name != "cold" or replay == "bounded":
                        cases.setdefault(name, []).extend(found)
    return cases


def main() -> None:
    """Measures and prints lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="nano", help="nano, or a checkpoint folder")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=240, help="most prompts")
    parser.add_argument("--hit", type=int, default=896, help="tokens of the hit")
    parser.add_argument("--tokens", type=int, default=64, help="tokens generated for each")
    parser.add_argument("--batch", type=int, default=16, help="prompts at once")
    parser.add_argument("--results", type=Path, help="file that lines are appended to")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = resolve_checkpoint(args.model)
    tokenizer = Tokenizer(folder)
    card = folder / "data_card.json"
    names = json.loads(card.read_text("utf-8"))["held_out"].get("code") if card.is_file() else None
    model = load_model(folder, device=args.device, progress=False)
    documents = held_out_documents(stdlib_folder(), CODE_SUFFIXES, names)
    texts = [tokenizer.encode(document.text) for document in documents]
    prompts = pieces(texts, args.hit, args.prompts)
    cases = measure(model, prompts, args.hit, args.tokens, args.batch)
    git = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "--short", "HEAD"]
    for name, found in cases.items():
        title = "engine, cold" if name == "cold" else f"engine, {name} replay"
        for line in lines(title, cases["cold"], found):
            replayed = max(one.replayed for one in found)
            text = json.dumps(
                {"part": "replay"}
                | line
                | {
                    "prompts": len(prompts),
                    "hit_tokens": 0 if name == "cold" else args.hit,
                    "replay_tokens": replayed,
                    "tokens_each": args.tokens,
                    "model": folder.name,
                    "checkpoint": content_hash(folder),
                    "device": device_name(args.device),
                    "versions": {"python": platform.python_version(), "torch": torch.__version__},
                    "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
                    "date": datetime.date.today().isoformat(),
                }
            )
            print(text, flush=True)
            if args.results is not None:
                with args.results.open("a", encoding="utf-8") as file:
                    file.write(text + "\n")


if __name__ == "__main__":
    main()
