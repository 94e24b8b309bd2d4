"""Measures what a bounded replay after a prefix hit, and layers that stop early, cost in bits per byte and in drafts.

Run: python benchmarks/replay.py [--model nano] [--texts 8] [--hit 1024] [--behind 512] [--device cpu]

Every held-out text is first run cold, through a cache in blocks. Then its first `hit` tokens are adopted as cached blocks
and its window rows are brought back in one of several ways; the text behind is scored again and compared with the cold
run by distance behind the hit. With narrowing the prompt ends `--prompt-behind` tokens behind the hit, and distances
count from its end. Draft acceptance is that of greedy continuations of the same prompts. One JSON line a case and
distance; --results appends them to a file.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quality.held_out import CODE_SUFFIXES, held_out_documents, stdlib_folder
from quality.results import content_hash, device_name

from deepinfer.core.plan import BlockUpdate
from deepinfer.engine.tokenizer import Tokenizer
from deepinfer.models import load_model, resolve_checkpoint
from deepinfer.models.deepseek_v41 import DeepseekV41, ForwardBatch, ForwardOutput, Segment

BLOCK = 128
CHUNK = 512
COLD, WARM = 0, 1
EDGES = (0, 4, 16, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to continue a cached prefix of `hit` tokens.

    Attributes:
        name: What it is called.
        replay: Tokens run again before the end of the hit; 0 when saved window rows are restored.
        prompt_behind: Prompt tokens behind the hit when layers stop early, or None when every row runs every layer.
    """

    name: str
    replay: int
    prompt_behind: int | None = None


class Bench:
    """One text in slot 0, and again in slot 1 behind a hit.

    Args:
        model: The model.
        hit: Tokens of the adopted prefix, a multiple of the block size.
        behind: Tokens scored behind it.
    """

    def __init__(self, model: DeepseekV41, hit: int, behind: int) -> None:
        self.model, self.hit, self.behind = model, hit, behind
        self.length = -(-(hit + behind + 64) // BLOCK) * BLOCK
        blocks = self.length // BLOCK
        options = {"num_blocks": 2 * blocks, "block_size": BLOCK}
        config = model.config
        self.cache = model.new_cache(2, self.length, hit + CHUNK, **options)
        self.saved: torch.Tensor | None = None
        self.window = config.sliding_window
        shared = hit // BLOCK
        self.cold_blocks = tuple(range(blocks))
        self.warm_blocks = (*range(shared), *range(blocks, 2 * blocks - shared))

    def cold(self, ids: Sequence[int]) -> np.ndarray:
        """Nats of the tokens behind the hit, shape [behind]; leaves cached blocks and saved windows."""
        cache = self.cache
        cache.reset(COLD)
        cache.apply_updates([BlockUpdate(slot=COLD, first=0, blocks=self.cold_blocks)])
        nats = []
        for at in [*range(0, self.hit, CHUNK), *range(self.hit, self.hit + self.behind, CHUNK)]:
            if at == self.hit:
                self.saved = cache.save_windows(COLD, self.hit)
            limit = self.hit if at < self.hit else self.hit + self.behind
            out = self._run(ids, [Segment(COLD, at, min(CHUNK, limit - at))])
            if at >= self.hit:
                nats.append(self._nats(out.hidden, ids, at))
        return np.concatenate(nats)

    def full_start(self, case: Case) -> int:
        """First position that runs every layer."""
        if case.prompt_behind is None:
            return 0
        return max(0, self.hit + case.prompt_behind - self.window)

    def warm(self, ids: Sequence[int], case: Case) -> np.ndarray:
        """Nats of the tokens behind the hit, NaN where no row ran every layer, shape [behind]."""
        found = np.full(self.behind, np.nan)
        for out, start in self._continue(ids, case, self.hit + self.behind):
            rows = len(out.hidden)
            if rows:
                first = max(start, self.full_start(case))
                skipped = max(self.hit - first, 0)
                nats = self._nats(out.hidden[skipped:], ids, first + skipped)
                at = first + skipped - self.hit
                found[at : at + len(nats)] = nats
        return found

    def accepted(self, ids: Sequence[int], case: Case, tokens: int) -> list[int]:
        """Accepted drafts of each block while `tokens` tokens are generated greedily behind the prompt."""
        draft, cache = self.model.draft, self.cache
        if draft is None:
            return []
        end = self.hit + (case.prompt_behind or self.window)
        last = None
        for out, start in self._continue(ids, case, end):
            first = max(start, self.full_start(case))
            rows = range(first, first + len(out.hidden))
            if rows:
                draft.extend_context(out.features, rows, [WARM] * len(rows), cache)
                last = out.hidden[-1:]
        anchor = int(self.model.compute_logits(last).argmax())
        at, counts, bounds = end, [], self._bounds(case)
        while at < end + tokens:
            drafts = draft.draft_greedy([anchor], [at], [WARM], cache)[0][0].tolist()
            segment = Segment(WARM, at, 1 + len(drafts), *bounds)
            out = self._forward([anchor, *drafts], [segment])
            chosen = self.model.compute_logits(out.hidden).argmax(-1).tolist()
            kept = 0
            while kept < len(drafts) and drafts[kept] == chosen[kept]:
                kept += 1
            cache.truncate(WARM, at + 1 + kept)
            rows = range(at, at + 1 + kept)
            draft.extend_context(out.features[: len(rows)], rows, [WARM] * len(rows), cache)
            counts.append(kept)
            at, anchor = at + 1 + kept, chosen[kept]
        return counts

    def _bounds(self, case: Case) -> tuple[int, int, int]:
        start = self.hit - (case.replay or self.window)
        return max(start, 0), self.hit, self.full_start(case)

    def _continue(self, ids: Sequence[int], case: Case, end: int) -> Any:
        """Adopts the prefix, brings its windows back and runs on to `end`; gives outputs and their first positions."""
        cache = self.cache
        cache.reset(WARM)
        cache.apply_updates([BlockUpdate(slot=WARM, first=0, blocks=self.warm_blocks)])
        cache.adopt_prefix(WARM, ids[: self.hit])
        bounds = self._bounds(case)
        segments = []
        if case.replay:
            segments.append(Segment(WARM, bounds[0], self.hit - bounds[0], *bounds))
        else:
            cache.load_windows(WARM, self.hit, self.saved)
        at = self.hit
        while at < end:
            size = min(CHUNK, end - at)
            segments.append(Segment(WARM, at, size, *bounds))
            start = segments[0].start
            yield self._run(ids, segments), start
            segments, at = [], at + size

    def _run(self, ids: Sequence[int], segments: list[Segment]) -> ForwardOutput:
        return self._forward([t for s in segments for t in ids[s.start : s.end]], segments)

    def _forward(self, tokens: list[int], segments: list[Segment]) -> ForwardOutput:
        host = np.asarray(tokens, dtype=np.int64)
        return self.model(
            ForwardBatch(torch.from_numpy(host), tuple(segments), None, host), self.cache
        )

    def _nats(self, hidden: torch.Tensor, ids: Sequence[int], start: int) -> np.ndarray:
        logits = self.model.compute_logits(hidden)
        wanted = torch.tensor(ids[start + 1 : start + 1 + len(hidden)], device=logits.device)
        nats = torch.nn.functional.cross_entropy(logits, wanted, reduction="none")
        return nats.double().cpu().numpy()


def cases(model: DeepseekV41, hit: int, prompt_behind: Sequence[int]) -> list[Case]:
    """What is measured: each way to bring windows back, alone and with prompts that end at some distances."""
    config, window = model.config, model.config.sliding_window
    layers = config.num_hidden_layers
    replays = [("one window", window), ("two windows", 2 * window)]
    out = [Case(name=f"replay, {name}", replay=rows) for name, rows in replays]
    out.append(Case(name="replay, exact", replay=min(layers * (window - 1) + 1, hit)))
    narrowing = model.new_cache(1, BLOCK, 1).narrowing
    for behind in prompt_behind if narrowing.first_layer is not None else ():
        # The same numbers as a narrowed prompt without a hit.
        exact = narrowing.exact_replay(window) + max(0, window - behind)
        out.append(
            Case(name="narrowed, replay, exact", replay=min(exact, hit), prompt_behind=behind)
        )
        for name, rows in replays:
            out.append(Case(name=f"narrowed, replay, {name}", replay=rows, prompt_behind=behind))
        out.append(Case(name="narrowed, restored windows", replay=0, prompt_behind=behind))
    return out


def lines(
    case: Case, hit: int, nats: np.ndarray, base: np.ndarray, sizes: np.ndarray
) -> list[dict[str, Any]]:
    """One line a distance: bits per byte, and how many more than cold on the same tokens.

    Args:
        case: The case.
        hit: Tokens of the hit.
        nats: Nats of the case, shape [texts, behind].
        base: Nats of the cold run, same shape.
        sizes: Bytes of the scored tokens, same shape.
    """
    zero = (case.prompt_behind or 0) - (case.prompt_behind is not None)
    out = []
    for low, high in [*itertools.pairwise(EDGES), (0, EDGES[-1])]:
        part = slice(zero + low, min(zero + high, nats.shape[1]))
        known = ~np.isnan(nats[:, part])
        num_bytes = float(sizes[:, part][known].sum())
        if not num_bytes:
            continue
        scale = 1 / math.log(2) / num_bytes
        here, cold = nats[:, part][known], base[:, part][known]
        out.append(
            {
                "part": "replay",
                "case": case.name,
                "hit_tokens": hit,
                "replay_tokens": case.replay,
                "prompt_tokens_behind_hit": case.prompt_behind,
                "distance_from": low,
                "distance_to": high,
                "value": round(float(here.sum()) * scale, 5),
                "unit": "bits per byte",
                "added": round(float((here - cold).sum()) * scale, 5),
                "largest_difference_nats": round(float(np.abs(here - cold).max()), 6),
                "tokens": int(known.sum()),
            }
        )
    return out


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="nano", help="nano, or a checkpoint folder")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounding", default="full", choices=["none", "cache", "full"])
    parser.add_argument("--texts", type=int, default=8, help="most held-out texts")
    parser.add_argument("--hit", type=int, default=1024, help="tokens of the cached prefix")
    parser.add_argument("--behind", type=int, default=512, help="tokens scored behind it")
    parser.add_argument("--prompt-behind", type=int, nargs="*", default=[16, 64, 256])
    parser.add_argument("--draft-texts", type=int, default=4, help="texts for draft acceptance")
    parser.add_argument("--draft-tokens", type=int, default=32, help="tokens generated for each")
    parser.add_argument("--results", type=Path, help="file that lines are appended to")
    return parser


def main() -> None:
    """Measures every case and prints its lines."""
    args = build_parser().parse_args()
    torch.set_num_threads(1)
    folder = resolve_checkpoint(args.model)
    tokenizer = Tokenizer(folder)
    card = folder / "data_card.json"
    names = json.loads(card.read_text("utf-8"))["held_out"].get("code") if card.is_file() else None
    model = load_model(folder, device=args.device, rounding=args.rounding, progress=False)
    texts = []
    for document in held_out_documents(stdlib_folder(), CODE_SUFFIXES, names):
        ids = tokenizer.encode(document.text)
        if len(ids) > args.hit + args.behind:
            texts.append(ids)
        if len(texts) == args.texts:
            break
    bench = Bench(model, args.hit, args.behind)
    sizes = np.array(
        [
            [len(tokenizer.token_bytes(t)) for t in ids[args.hit + 1 :][: args.behind]]
            for ids in texts
        ],
        dtype=np.float64,
    )
    plan = cases(model, args.hit, args.prompt_behind)
    base: list[np.ndarray] = []
    found: dict[Case, list[np.ndarray]] = {case: [] for case in plan}
    drafts: dict[Case, list[int]] = {case: [] for case in plan}
    with torch.inference_mode():
        for number, ids in enumerate(texts):
            base.append(bench.cold(ids))
            for case in plan:
                found[case].append(bench.warm(ids, case))
                if number < args.draft_texts:
                    drafts[case] += bench.accepted(ids, case, args.draft_tokens)
    git = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "--short", "HEAD"]
    common = {
        "texts": len(texts),
        "model": folder.name,
        "checkpoint": content_hash(folder),
        "rounding": args.rounding,
        "device": device_name(args.device),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
        "date": datetime.date.today().isoformat(),
    }
    record: list[dict[str, Any]] = []
    for case in plan:
        record += lines(case, args.hit, np.stack(found[case]), np.stack(base), sizes)
        if drafts[case]:
            record.append(
                {
                    "part": "replay",
                    "case": case.name,
                    "hit_tokens": args.hit,
                    "replay_tokens": case.replay,
                    "prompt_tokens_behind_hit": case.prompt_behind,
                    "value": round(float(np.mean(drafts[case])), 4),
                    "unit": "accepted drafts per block",
                    "blocks": len(drafts[case]),
                }
            )
    for line in record:
        text = json.dumps({**line, **common})
        print(text, flush=True)
        if args.results is not None:
            with args.results.open("a", encoding="utf-8") as file:
                file.write(text + "\n")


if __name__ == "__main__":
    main()
