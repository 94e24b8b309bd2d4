"""Training of the draft: features of the frozen trunk are computed once and serve many steps."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

import torch
from torch import Tensor

from .batches import Batches, Mixture
from .compiling import agree, compile_parts
from .dataset import FIRST_TEXT_ID, Data
from .draft import Anchors, DraftLoss, DraftParts, TrainDraft
from .evaluate import autocast
from .optimizer import MuonAdamW
from .report import Report, Stopped, seeds
from .schedule import Budget
from .storage import save_state
from .trunk import Trunk, TrunkOutput
from .trunk_training import balance

ANCHORS_PER_WINDOW = 7
SHORT_CONTEXTS = 0.1
"""Share of the blocks whose context is cut short, as it is behind a short prompt."""
SEGMENT = 512
TEXT_ROWS = 4096
"""Segments of text whose features are kept (2.6 KB a token at nano's size)."""
FIRST_FILLS = 16
STEPS_PER_FILL = 6
"""Steps on text between two forwards of the trunk."""
WARMUP_STEPS = 50
TEXT = Mixture(code=0.75, docs=0.08, tasks=0.17, repeat=0.0, spans=0.0)


class FeatureStore:
    """A ring of token rows with what the frozen trunk makes of them.

    Args:
        capacity: Rows.
        length: Tokens a row.
        like: A forward's output, for sizes and dtype.

    Attributes:
        filled: Rows that hold something.
    """

    def __init__(self, capacity: int, length: int, like: TrunkOutput) -> None:
        device, dtype = like.hidden.device, like.hidden.dtype
        self.length, self.capacity, self.filled, self._next = length, capacity, 0, 0

        def empty(width: int) -> Tensor:
            return torch.empty(capacity, length, width, device=device, dtype=dtype)

        self.ids = torch.empty(capacity, length, device=device, dtype=torch.long)
        self.features = empty(like.features.shape[-1])
        self.hidden = empty(like.hidden.shape[-1])

    def add(self, ids: Tensor, out: TrunkOutput) -> None:
        """Cuts rows [B, T] and their outputs into segments; the oldest make room."""
        fit = ids.shape[1] // self.length * self.length
        pairs = ((self.ids, ids), (self.features, out.features), (self.hidden, out.hidden))
        count = len(ids) * (fit // self.length)
        places = (self._next + torch.arange(count, device=ids.device)) % self.capacity
        for store, new in pairs:
            store[places] = new[:, :fit].unflatten(1, (-1, self.length)).flatten(0, 1)
        self._next = (self._next + count) % self.capacity
        self.filled = min(self.capacity, self.filled + count)

    def draw(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Random rows, with replacement: ids [size, length], features and hidden of them."""
        device = self.ids.device
        picked = torch.randint(0, self.filled, (size,), generator=generator, device=device)
        return self.ids[picked], self.features[picked], self.hidden[picked]


class DraftTrainer:
    """Steps the draft on stored features of text and, in turn, of the trunk's own continuations.

    Args:
        trunk: The frozen trunk.
        batches: Draws the text.
        own: The trunk's own continuations, shape [rows, length], or None.
        options: `batch`, `context`, `muon_lr`, `adam_lr`.
    """

    def __init__(
        self, trunk: Trunk, batches: Batches, own: Tensor | None, options: Namespace
    ) -> None:
        self.trunk, self.batches, self.options = trunk, batches, options
        self.draft = TrainDraft(trunk).to(trunk.embed.device)
        self.optimizer = MuonAdamW(
            self.draft.named_parameters(), options.muon_lr, options.adam_lr, decay=0.05
        )
        self.length = SEGMENT if own is None else own.shape[1]
        self.length = min(self.length, options.context)
        self.segments = max(1, options.batch * options.context // self.length)
        self.text: FeatureStore | None = None
        self.own: FeatureStore | None = None
        for _ in range(FIRST_FILLS):
            self.fill_text()
        if own is not None:
            self._fill_own(own.long())

    @property
    def blocks_per_step(self) -> int:
        """Blocks of one step."""
        windows = self.length // self.trunk.c.sliding_window - 1
        return self.segments * windows * ANCHORS_PER_WINDOW

    def fill_text(self) -> None:
        """One forward of the trunk over fresh text."""
        ids = self.batches.text(self.options.batch)[0][:, :-1]
        self.text = self._add(self.text, TEXT_ROWS, ids)

    def _fill_own(self, own: Tensor) -> None:
        for rows in own.split(self.segments):
            self.own = self._add(self.own, len(own), rows)

    def _add(self, store: FeatureStore | None, capacity: int, ids: Tensor) -> FeatureStore:
        with autocast(ids.device):
            out = self.trunk.frozen(ids, features=True)
        store = store or FeatureStore(capacity, self.length, out)
        store.add(ids, out)
        return store

    def step(self, i: int, factor: float) -> DraftLoss:
        """One optimiser step at a step size factor."""
        if not i % 2 and i and not (i // 2) % STEPS_PER_FILL:
            self.fill_text()
        store = self.own if self.own is not None and i % 2 else self.text
        loss, loads = self.loss(*self.draw(store))
        loss.total.backward()
        self.optimizer.step(factor)
        with torch.no_grad():
            balance(self.draft.stages, loads)
        return loss

    def draw(self, store: FeatureStore) -> tuple[Anchors, Tensor, Tensor, Tensor]:
        """Random anchors in random stored rows, and the rows' ids, features and hidden."""
        c = self.trunk.c
        ids, features, hidden = store.draw(self.segments, self.batches.generator)
        anchors = draw_anchors(ids, c.sliding_window, c.dspark_block_size, self.batches.uniform)
        return anchors, ids, features, hidden

    def compile(self, backend: str, report: Report) -> None:
        """Compiles the parts, runs each once, and keeps them if they agree with eager."""
        draft, drawn = self.draft, self.draw(self.text)
        eager = self.loss(*drawn)[0]
        draft.parts = compile_parts(DraftParts(), backend, report.log)
        compiled = self.loss(*drawn)[0]
        compiled.total.backward()
        draft.zero_grad(set_to_none=True)
        values = ([value.item() for value in loss[:3]] for loss in (compiled, eager))
        if not agree(*values, report, "draft"):
            draft.parts = DraftParts()

    def loss(
        self, anchors: Anchors, ids: Tensor, features: Tensor, hidden: Tensor
    ) -> tuple[DraftLoss, list[Tensor]]:
        """Loss and expert loads of blocks at anchors of stored rows."""
        c, draft = self.trunk.c, self.draft
        places = anchors.at[..., None] + torch.arange(c.dspark_block_size, device=ids.device)
        flat = places.flatten(1)
        previous = ids.gather(1, flat).view(-1, c.dspark_block_size)
        target = hidden.gather(1, flat[..., None].expand(-1, -1, hidden.shape[-1]))
        target = target.view(*previous.shape, -1)
        with autocast(ids.device):
            drafted, loads = draft(features, anchors)
            loss = draft.parts.loss(
                drafted, target, previous, draft.trunk_head(), draft.head_weights()
            )
        return loss, loads


def draw_anchors(ids: Tensor, window: int, block: int, uniform: Callable[..., Tensor]) -> Anchors:
    """Random anchors in every window of rows [G, L] but the first; blocks end within the row."""
    G, L = ids.shape
    starts = torch.arange(window, L, window, device=ids.device)[:, None]
    ends = (starts + window).clamp_max(L - block + 1)
    shape = (G, len(starts), ANCHORS_PER_WINDOW)
    at = starts + (uniform(*shape) * (ends - starts)).long()
    short = 1 + (uniform(*shape) * window).long()
    reach = torch.where(uniform(*shape) < SHORT_CONTEXTS, short, window)
    return Anchors(at, ids.gather(1, at.flatten(1)).view(shape), reach)


def train_draft(
    trunk: Trunk,
    data: Data,
    own: Tensor | None,
    options: Namespace,
    report: Report,
    stop: Callable[[], bool],
) -> TrainDraft:
    """Trains the draft on text and, if given, on the trunk's own continuations [rows, length].

    Raises:
        Stopped: `stop()` said so; the draft is saved.
    """
    budget = Budget(options.draft_steps, options.draft_max_seconds)
    begun = budget.clock()
    context, vocab = options.context, trunk.c.vocab_size
    seed = seeds(options.seed)["draft"]
    batches = Batches(data.streams, context, FIRST_TEXT_ID, vocab, seed, TEXT)
    with report.phase("draft") as phase:
        trainer = DraftTrainer(trunk, batches, own, options)
        draft = trainer.draft
        report.log(event="features stored", rows=trainer.text.filled, length=trainer.length)
        if options.compile != "off":
            trainer.compile(options.compile, report)
        _synchronise(trunk)
        spent = budget.clock() - begun
        report.log(event="draft ready", seconds=round(spent, 1))
        budget.start(already_spent=spent)
        i, last = 0, budget.clock()
        while not (ended := budget.ended_by(i)):
            share = budget.share(i)
            factor = min(1.0, (i + 1) / WARMUP_STEPS) * min(1.0, (1 - share) / 0.5)
            loss = trainer.step(i, factor)
            i += 1
            if stop():
                save_draft(draft, options, i, share)
                phase |= {"steps": i, "ended_by": "stop request"}
                raise Stopped
            if not i % options.log_every:
                now = budget.clock()
                rate = options.log_every * trainer.blocks_per_step / (now - last)
                report.log(
                    draft_step=i, share=round(share, 4), blocks_per_s=round(rate),
                    l1=round(loss.l1.item(), 4), confidence=round(loss.confidence.item(), 4),
                    greedy=[round(v, 3) for v in loss.greedy.tolist()],
                )  # fmt: skip
                last = budget.clock()
            if not i % options.save_every:
                save_draft(draft, options, i, share)
        save_draft(draft, options, i, 1.0)
        phase |= {"steps": i, "ended_by": ended, "blocks": i * trainer.blocks_per_step}
    return draft


def save_draft(draft: TrainDraft, options: Namespace, step: int, share: float) -> None:
    """Saves the draft's state."""
    save_state(options.out, "draft", step, draft.state_dict(), {"share": f"{share:.6f}"})


def _synchronise(trunk: Trunk) -> None:
    if trunk.embed.is_cuda:
        torch.cuda.synchronize()
