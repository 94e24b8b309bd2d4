"""Training of the trunk, and its figures afterwards."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .batches import Batches, Mixture, copy_distance
from .compiling import EAGER, agree, compile_parts
from .dataset import FIRST_TEXT_ID, Data
from .evaluate import autocast, bits_per_byte, recall, windows
from .optimizer import MuonAdamW
from .report import Report, Stopped, seeds
from .schedule import Budget, Schedule
from .storage import save_state
from .trunk import Clamp, Trunk

BALANCE_STEP = 0.001
CHECK_EVERY = 100
EVALUATE_EVERY_LOGS = 5


def balance(layers: Iterable[nn.Module], loads: Sequence[Tensor]) -> None:
    """Moves each router bias a fixed step towards an even load."""
    for layer, load in zip(layers, loads, strict=True):
        layer.gate_bias += BALANCE_STEP * torch.sign(load.mean() - load)


def replay_clamp(batches: Batches, size: int, window: int) -> Clamp:
    """Half of the rows continue a prefix hit; every row's decoder is cut at a random prompt end."""

    def position() -> Tensor:
        return (batches.uniform(size) * (batches.context - window)).long()

    encoder = torch.where(batches.uniform(size) < 0.5, position(), 0)
    return Clamp(encoder, torch.maximum(encoder, position()))


class TrunkTrainer:
    """Steps the trunk.

    Args:
        trunk: The trunk, in training mode.
        batches: Draws the rows.
        options: `batch`, `context`, `muon_lr`, `adam_lr`.
        schedule: What changes over training.
    """

    def __init__(
        self, trunk: Trunk, batches: Batches, options: Namespace, schedule: Schedule
    ) -> None:
        self.trunk, self.batches, self.options, self.schedule = trunk, batches, options, schedule
        named = trunk.named_parameters()
        self.optimizer = MuonAdamW(named, options.muon_lr, options.adam_lr, decay=0.1)

    def losses(self, i: int, share: float) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Text loss, index loss and expert loads of a fresh batch, at a share of the schedule."""
        o, trunk = self.options, self.trunk
        trunk.sparse = share >= self.schedule.sparse_from
        trunk.blend.fill_(self.schedule.blend(share))
        self.batches.mixture = Mixture().early(share)
        x, weight = self.batches.draw(o.batch, copy_distance(share, o.context))
        clamp = None
        if share >= self.schedule.replay_from:
            clamp = replay_clamp(self.batches, o.batch, trunk.c.sliding_window)
        return batch_losses(trunk, x, weight, i % 4, clamp)

    def step(self, i: int, share: float) -> tuple[Tensor, Tensor]:
        """One optimiser step; gives the detached text and index losses."""
        loss, index_loss, loads = self.losses(i, share)
        (loss + index_loss).backward()
        self.optimizer.step(self.schedule.learning_rate(i, share))
        with torch.no_grad():
            balance(self.trunk.layers, loads)
        return loss.detach(), index_loss.detach()

    def compile(self, backend: str, report: Report) -> None:
        """Compiles the parts for the training shape, runs each once, and keeps them if they agree with eager."""
        trunk, o = self.trunk, self.options
        shape = (o.batch, o.context)
        trunk.use_parts(compile_parts(EAGER, backend, report.log), shape, need_grad=True)
        loss, index_loss, _ = self.losses(0, 1.0)
        (loss + index_loss).backward()
        trunk.zero_grad(set_to_none=True)
        x, weight = self.batches.draw(o.batch, o.context)
        trunk.eval()
        compiled = [value.item() for value in batch_losses(trunk, x, weight, 0)[:2]]
        parts = trunk.parts
        trunk.use_parts(EAGER, None, need_grad=False)
        with torch.no_grad():
            eager = [value.item() for value in batch_losses(trunk, x, weight, 0)[:2]]
        trunk.train()
        if agree(compiled, eager, report, "trunk"):
            trunk.use_parts(parts, shape, need_grad=True)


def batch_losses(
    trunk: Trunk, x: Tensor, weight: Tensor, index_chunk: int, clamp: Clamp | None = None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Text loss, index loss and expert loads of rows [B, T + 1] with target weights [B, T]."""
    with autocast(x.device):
        out = trunk(x[:, :-1], clamp=clamp, index_chunk=index_chunk)
        logits = trunk.logits(out.hidden)
    nats = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), reduction="none")
    return (nats * weight.flatten()).sum() / weight.sum(), out.index_loss, out.loads


def train_trunk(
    trunk: Trunk,
    data: Data,
    options: Namespace,
    report: Report,
    stop: Callable[[], bool],
    first_share: float = 0.0,
) -> None:
    """Trains to the end of the budget; saves now and then, and at the end.

    Args:
        trunk: The trunk.
        data: Streams and held-out text.
        options: The command line.
        report: Takes the log.
        stop: Whether to save and end.
        first_share: Share of the schedule that an earlier run has done.

    Raises:
        Stopped: `stop()` said so; the trunk is saved.
        FloatingPointError: The loss is not finite.
    """
    budget = Budget(options.steps, options.max_seconds, first_share)
    begun = budget.clock()
    seed = seeds(options.seed)["trunk"] + round(1e6 * first_share)
    context, vocab = options.context, trunk.c.vocab_size
    batches = Batches(data.streams, context, FIRST_TEXT_ID, vocab, seed)
    trunk.train()
    trainer = TrunkTrainer(trunk, batches, options, Schedule())
    rows = windows(data.held_out["code"], context, context, limit=options.batch)
    with report.phase("trunk") as phase:
        if options.compile != "off":
            trainer.compile(options.compile, report)
        _synchronise(trunk)
        spent = budget.clock() - begun
        report.log(event="trunk ready", seconds=round(spent, 1))
        budget.start(already_spent=spent)
        i, last = 0, budget.clock()
        while not (ended := budget.ended_by(i)):
            share = budget.share(i)
            loss, index_loss = trainer.step(i, share)
            if not i % CHECK_EVERY and not math.isfinite(loss.item()):
                raise FloatingPointError(f"the loss is {loss.item()} at step {i}: lower --muon-lr")
            i += 1
            if stop():
                save_trunk(trunk, options, i, share)
                phase |= {"steps": i, "ended_by": "stop request"}
                raise Stopped
            if not i % options.log_every:
                values = {"loss": round(loss.item(), 4), "index_loss": round(index_loss.item(), 4)}
                rate = options.log_every * options.batch * context / (budget.clock() - last)
                if not i % (EVALUATE_EVERY_LOGS * options.log_every):
                    values |= quick_figures(trunk, rows, data)
                report.log(step=i, share=round(share, 4), tokens_per_s=round(rate), **values)
                last = budget.clock()
            if not i % options.save_every:
                save_trunk(trunk, options, i, share)
        trunk.sparse = True
        trunk.blend.fill_(1.0)
        save_trunk(trunk, options, i, 1.0)
        phase |= {"steps": i, "ended_by": ended, "tokens": i * options.batch * context}


def save_trunk(trunk: Trunk, options: Namespace, step: int, share: float) -> None:
    """Saves the trunk's state with the share of the schedule it has seen."""
    save_state(options.out, "trunk", step, trunk.state_dict(), {"share": f"{share:.6f}"})


def quick_figures(trunk: Trunk, rows: Tensor, data: Data) -> dict[str, float]:
    """Held-out bits per byte of a few rows and recall at two distances."""
    context = rows.shape[1] - 1
    values = {"held_out_bpb": round(bits_per_byte(trunk, rows, data.bytes_of), 4)}
    for distance in (256, 1024):
        if distance < context // 2 + 1:
            values[f"recall_{distance}"] = round(recall(trunk, rows, distance, FIRST_TEXT_ID), 3)
    return values


def trunk_figures(trunk: Trunk, data: Data, options: Namespace) -> dict[str, Any]:
    """The twin's own figures after training: bits per byte by domain, recall, expert loads."""
    T = options.context
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
    with autocast(rows.device):
        loads = trunk.frozen(rows[: options.batch, :-1]).loads
    figures["load_max_over_mean"] = [round((x.max() / x.mean()).item(), 2) for x in loads]
    figures["parameters"] = sum(p.numel() for p in trunk.parameters())
    return figures


def _synchronise(trunk: Trunk) -> None:
    if trunk.embed.is_cuda:
        torch.cuda.synchronize()
