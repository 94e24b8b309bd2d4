"""The `train` command: trunk first, then the draft on the frozen trunk."""

from __future__ import annotations

import json
import math
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .batches import Batches, Mixture, copy_distance
from .data import FIRST_TEXT_ID, STREAMS, load_config, say
from .draft import TrainDraft, draft_loss
from .evaluate import autocast, bits_per_byte, draft_acceptance, recall, windows
from .hashing import EngramHash
from .optimizer import MuonAdamW
from .trunk import Clamp, Parts, Trunk

WARMUP_STEPS = 100
BALANCE_STEP = 0.001
ANCHORS = 192
OWN_PROMPT, OWN_TOKENS = 128, 384


@dataclass(frozen=True)
class Schedule:
    """What changes over training, by the share of steps done."""

    sparse_from: float = 0.15
    round_from: float = 0.10
    round_until: float = 0.40
    decay_from: float = 0.6
    replay_from: float = 0.80

    def learning_rate(self, step: int, steps: int) -> float:
        share = step / steps
        warm = min(1.0, (step + 1) / WARMUP_STEPS)
        return warm * min(1.0, max(0.0, (1 - share) / (1 - self.decay_from)))

    def blend(self, share: float) -> float:
        return min(1.0, max(0.0, (share - self.round_from) / (self.round_until - self.round_from)))


@dataclass
class Data:
    """Everything on the device: training streams, held-out rows, bytes an id."""

    streams: dict[str, Tensor]
    held_out: dict[str, Tensor]
    bytes_of: Tensor

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> Data:
        arrays = np.load(folder / "streams.npz")

        def tensor(name: str) -> Tensor:
            return torch.from_numpy(arrays[name].astype(np.int32)).to(device)

        names = [n for n in STREAMS if n in arrays.files]
        held_out = {
            n.removeprefix("held_out_"): tensor(n)
            for n in arrays.files
            if n.startswith("held_out_")
        }
        return cls(
            {n: tensor(n) for n in names}, held_out, torch.from_numpy(arrays["bytes"]).to(device)
        )


def balance(layers: Sequence[nn.Module], loads: Sequence[Tensor]) -> None:
    """Moves each router bias a fixed step towards an even load."""
    for layer, load in zip(layers, loads, strict=True):
        layer.gate_bias += BALANCE_STEP * torch.sign(load.mean() - load)


def replay_clamp(batches: Batches, size: int, window: int) -> Clamp:
    """Half of the rows continue a prefix hit; every row's decoder is cut at a random prompt end."""

    def position() -> Tensor:
        return (batches.uniform(size) * (batches.T - window)).long()

    encoder = torch.where(batches.uniform(size) < 0.5, position(), 0)
    return Clamp(encoder, torch.maximum(encoder, position()))


class TrunkTrainer:
    """Steps the trunk; `step(i)` returns detached (loss, index loss)."""

    def __init__(
        self, trunk: Trunk, batches: Batches, options: Namespace, schedule: Schedule
    ) -> None:
        self.trunk, self.batches, self.options, self.schedule = trunk, batches, options, schedule
        named = list(trunk.named_parameters())
        self.optimizer = MuonAdamW(named, options.muon_lr, options.adam_lr, decay=0.1)

    def step(self, i: int) -> tuple[Tensor, Tensor]:
        o, trunk = self.options, self.trunk
        share = i / o.steps
        trunk.sparse = share >= self.schedule.sparse_from
        trunk.blend.fill_(self.schedule.blend(share))
        self.batches.mixture = Mixture().early(share)
        x, weight = self.batches.draw(o.batch, copy_distance(share, o.context))
        clamp = (
            replay_clamp(self.batches, o.batch, trunk.c.sliding_window)
            if share >= self.schedule.replay_from
            else None
        )
        with autocast(x.device):
            out = trunk(x[:, :-1], clamp=clamp, index_chunk=i % 4)
            logits = trunk.logits(out.hidden)
        nats = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), reduction="none")
        loss = (nats * weight.flatten()).sum() / weight.sum()
        (loss + out.index_loss).backward()
        self.optimizer.step(self.schedule.learning_rate(i, o.steps))
        with torch.no_grad():
            balance(trunk.layers, out.loads)
        return loss.detach(), out.index_loss.detach()


class Progress:
    """Rates and smoothed losses for the log, and the lines kept for the card."""

    def __init__(self, every: int, tokens_per_step: int) -> None:
        self.every, self.tokens_per_step = every, tokens_per_step
        self.start = self.last = time.perf_counter()
        self.lines: list[dict[str, Any]] = []

    def report(self, step: int, figures: Callable[[], dict[str, float]]) -> None:
        if (step + 1) % self.every:
            return
        values = figures()
        now = time.perf_counter()
        rate = self.every * self.tokens_per_step / (now - self.last)
        line = {
            "step": step + 1,
            "seconds": round(now - self.start, 1),
            "tokens_per_s": round(rate),
            **values,
        }
        self.lines.append(line)
        say(json.dumps(line))
        self.last = time.perf_counter()


def train_trunk(trunk: Trunk, data: Data, options: Namespace) -> list[dict[str, Any]]:
    c = trunk.c
    batches = Batches(data.streams, options.context, FIRST_TEXT_ID, c.vocab_size, options.seed + 1)
    trainer = TrunkTrainer(trunk, batches, options, Schedule())
    rows = windows(data.held_out["code"], options.context, options.context, limit=options.batch)
    progress = Progress(options.log_every, options.batch * options.context)
    trunk.train()
    for i in range(options.steps):
        loss, index_loss = trainer.step(i)
        if not i % 100 and not math.isfinite(loss.item()):
            raise FloatingPointError(f"the loss is {loss.item()} at step {i}: lower --muon-lr")

        def figures(
            loss: Tensor = loss, index_loss: Tensor = index_loss, i: int = i
        ) -> dict[str, float]:
            values = {"loss": round(loss.item(), 4), "index_loss": round(index_loss.item(), 4)}
            if not (i + 1) % (5 * options.log_every):
                values["held_out_bpb"] = round(bits_per_byte(trunk, rows, data.bytes_of), 4)
                for distance in (256, 1024):
                    if distance < options.context // 2 + 1:
                        values[f"recall_{distance}"] = round(
                            recall(trunk, rows, distance, FIRST_TEXT_ID), 3
                        )
            return values

        progress.report(i, figures)
    return progress.lines


def trunk_figures(trunk: Trunk, data: Data, options: Namespace) -> dict[str, Any]:
    """The twin's own figures after training."""
    T, c = options.context, trunk.c
    figures: dict[str, Any] = {}
    for name, stream in data.held_out.items():
        figures[f"bpb_{name}"] = bits_per_byte(trunk, windows(stream, T, T), data.bytes_of)
        figures[f"bpb_{name}_overlapping"] = bits_per_byte(
            trunk, windows(stream, T, T // 2), data.bytes_of, first=T // 2
        )
    rows = windows(data.held_out["code"], T, T, limit=64)
    for distance in (64, 128, 256, 512, 1024, 1536):
        if distance + 64 < T:
            figures[f"recall_{distance}"] = recall(trunk, rows, distance, FIRST_TEXT_ID)
    with torch.no_grad(), autocast(rows.device):
        trunk.eval()
        loads = trunk(rows[: options.batch, :-1]).loads
        trunk.train()
    figures["load_max_over_mean"] = [round((x.max() / x.mean()).item(), 2) for x in loads]
    figures["parameters"] = sum(p.numel() for p in trunk.parameters())
    figures["window"] = c.sliding_window
    return figures


def train_draft(
    trunk: Trunk, data: Data, options: Namespace, own: Tensor | None
) -> tuple[TrainDraft, list[dict[str, Any]]]:
    """Trains the draft on text and, if given, on the trunk's own continuations `own` [rows, T]."""
    c, device = trunk.c, trunk.embed.device
    trunk.requires_grad_(False).eval()
    draft = TrainDraft(trunk).to(device)
    optimizer = MuonAdamW(
        list(draft.named_parameters()), options.muon_lr, options.adam_lr, decay=0.05
    )
    mixture = Mixture(code=0.75, docs=0.08, tasks=0.17, repeat=0.0, spans=0.0)
    batches = Batches(
        data.streams, options.context, FIRST_TEXT_ID, c.vocab_size, options.seed + 77, mixture
    )
    progress = Progress(options.log_every, options.batch * ANCHORS)
    steps = torch.arange(c.dspark_block_size, device=device)
    for i in range(options.draft_steps):
        share = i / options.draft_steps
        if own is not None and i % 2:
            x = own[
                torch.randint(
                    0,
                    len(own),
                    (options.batch * options.context // own.shape[1],),
                    generator=batches.generator,
                    device=device,
                )
            ].long()
        else:
            x = batches.text(options.batch)[0][:, :-1]
        B, T = x.shape
        anchors = ANCHORS * options.batch // B
        low = c.sliding_window
        at = low + (batches.uniform(B, anchors) * (T - low - c.dspark_block_size)).long()
        places = (at[..., None] + steps).flatten(1)
        with torch.no_grad(), autocast(device):
            out = trunk(x, features=True)
            hidden = out.hidden.gather(1, places[..., None].expand(-1, -1, c.hidden_size))
            target = trunk.logits(hidden).view(-1, c.dspark_block_size, c.vocab_size)
        previous = x.gather(1, places).view(-1, c.dspark_block_size)
        with autocast(device):
            drafted = draft(trunk, out.features, at, previous[:, 0].view(B, anchors))
            loss = draft_loss(draft, drafted, target, previous)
        loss.total.backward()
        optimizer.step(min(1.0, (i + 1) / 50) * min(1.0, (1 - share) / 0.5))
        with torch.no_grad():
            balance(draft.stages, drafted.loads)
        progress.report(
            i,
            lambda loss=loss: {
                "l1": round(loss.l1.item(), 4),
                "confidence": round(loss.confidence.item(), 4),
                "greedy": [round(v, 3) for v in loss.greedy.tolist()],
            },
        )
    return draft, progress.lines


def own_continuations(trunk: Trunk, data: Data, options: Namespace) -> Tensor:
    """Rows [own_rows, 512] of 128 prompt tokens and what the stored model makes of them, mostly greedily."""
    import tempfile

    from deepinfer.models import load_model

    from .continuations import continue_prompts
    from .data import write_checkpoint
    from .export import checkpoint_tensors

    device = trunk.embed.device
    mixture = Mixture(code=0.8, docs=0.05, tasks=0.15, repeat=0.0, spans=0.0)
    batches = Batches(
        data.streams, OWN_PROMPT, FIRST_TEXT_ID, trunk.c.vocab_size, options.seed + 5, mixture
    )
    prompts = batches.text(options.own_rows)[0][:, :-1]
    prompts[:, 0] = 0
    temperature = (torch.arange(options.own_rows, device=device) % 5 == 4) * 0.8
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(
            checkpoint_tensors(trunk, TrainDraft(trunk).to(device)), options.data, Path(folder)
        )
        model = load_model(folder, device=str(device), rounding="full")
        return continue_prompts(model, prompts, OWN_TOKENS, temperature, options.seed)


def train(options: Namespace) -> None:
    """The `train` command."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    c: SimpleNamespace = load_config(options.data)
    data = Data.load(options.data, device)
    hashing = EngramHash(c, np.load(options.data / "token_map.npy"), device)
    trunk = Trunk(c, hashing, max(options.context, OWN_PROMPT + OWN_TOKENS)).to(device)
    trunk.dropout = options.dropout
    options.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"options": {k: str(v) for k, v in vars(options).items()}}
    if options.resume_trunk:
        trunk.load_state_dict(torch.load(options.resume_trunk, map_location=device))
        trunk.sparse = True
    else:
        trunk.parts = Parts() if options.eager or device.type == "cpu" else Parts.compiled()
        report["trunk_log"] = train_trunk(trunk, data, options)
        torch.save(trunk.state_dict(), options.out / "trunk.pt")
    trunk.blend.fill_(1.0)
    report["trunk"] = {} if options.resume_trunk else trunk_figures(trunk, data, options)
    say(json.dumps(report["trunk"]))
    own = None
    if options.own_rows:
        start = time.perf_counter()
        own = own_continuations(trunk, data, options)
        say(f"{own.numel()} tokens of own continuations in {time.perf_counter() - start:.0f} s")
    draft, report["draft_log"] = train_draft(trunk, data, options, own)
    torch.save(draft.state_dict(), options.out / "draft.pt")
    rows = windows(data.held_out["code"], options.context, options.context, limit=64)[:, :-1]
    by_position, tokens_per_step = draft_acceptance(trunk, draft, rows)
    report["draft"] = {"prefix_accepted": by_position, "tokens_per_step_on_text": tokens_per_step}
    say(json.dumps(report["draft"]))
    (options.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
