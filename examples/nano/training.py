"""The `train` command: trunk, checkpoint, the trunk's own continuations, draft, checkpoint."""

from __future__ import annotations

from argparse import Namespace

import torch
from torch import Tensor

from .batches import Batches
from .compiling import EAGER, compile_parts
from .dataset import FIRST_TEXT_ID, Data
from .draft import TrainDraft
from .draft_training import TEXT, train_draft
from .engram import NgramRows
from .evaluate import acceptance_on_own, acceptance_on_text, windows
from .export import write_checkpoint
from .lockstep import continue_prompts
from .report import Report, Stopped, StopRequest, seeds
from .storage import load_rows, load_state, save_rows
from .trunk import Trunk
from .trunk_training import train_trunk, trunk_figures

OWN_PROMPT, OWN_TOKENS = 128, 384
OWN_FILE = "own.npy"
HOT_EVERY, HEAT = 5, 0.8
"""Every fifth continuation is drawn at this temperature; the others are greedy."""
JUDGED = 64
"""Continuations that the draft doesn't learn from; its acceptance is measured on the greedy ones."""


def train(options: Namespace) -> None:
    """Runs the command; a SIGTERM saves what is trained and ends it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.compile == "auto":
        options.compile = "inductor" if device.type == "cuda" else "off"
    torch.manual_seed(seeds(options.seed)["weights"])
    torch.backends.cuda.matmul.allow_tf32 = True
    options.out.mkdir(parents=True, exist_ok=True)
    report = Report(options.out / "report.json", options, device)
    stop = StopRequest()
    stop.listen()
    try:
        _train(options, report, stop, device)
    except Stopped:
        report.log(event="stopped", reason="SIGTERM")
        return
    report.log(event="done")


def _train(options: Namespace, report: Report, stop: StopRequest, device: torch.device) -> None:
    data = Data.load(options.data, device)
    context = max(options.context, OWN_PROMPT + OWN_TOKENS)
    trunk = Trunk(data.config, NgramRows(data.config, data.token_map), context).to(device)
    trunk.dropout = options.dropout
    resumed = options.resume_trunk is not None
    if not resumed or options.continue_trunk:
        first_share = _load_trunk(trunk, options) if resumed else 0.0
        train_trunk(trunk, data, options, report, stop, first_share)
        _write(trunk, TrainDraft(trunk).to(device), options, report)
        _check(stop)
        with report.phase("trunk figures"):
            report.set(trunk=trunk_figures(trunk, data, options))
    else:
        _load_trunk(trunk, options)
        trunk.sparse = True
        trunk.blend.fill_(1.0)
        if options.compile != "off":
            parts = compile_parts(EAGER, options.compile, report.log)
            trunk.use_parts(parts, (options.batch, options.context), need_grad=False)
        report.log(event="trunk loaded")
    trunk.eval()
    _check(stop)
    own = own_continuations(trunk, data, options, report) if options.own_rows else None
    _check(stop)
    judged = None
    if own is not None:
        judged, own = own[:JUDGED], own[JUDGED:]
        own = own if len(own) else None
    draft = train_draft(trunk, data, own, options, report, stop)
    _write(trunk, draft, options, report)
    with report.phase("draft figures"):
        report.set(draft=draft_figures(trunk, draft, data, judged, options))


def _load_trunk(trunk: Trunk, options: Namespace) -> float:
    state, meta = load_state(options.resume_trunk, "trunk")
    trunk.load_state_dict(state)
    return float(meta.get("share", 1.0))


def _check(stop: StopRequest) -> None:
    if stop():
        raise Stopped


def _write(trunk: Trunk, draft: TrainDraft, options: Namespace, report: Report) -> None:
    with report.phase("checkpoint"):
        write_checkpoint(trunk, draft, options.data, options.out / "checkpoint")


def own_continuations(
    trunk: Trunk, data: Data, options: Namespace, report: Report
) -> Tensor | None:
    """What the trunk makes of prompts, shape [own_rows, length]; kept beside the run and reused by it.

    None when there was no time for a whole window of new tokens.
    """
    path = options.out / OWN_FILE
    device = trunk.embed.device
    if options.resume_trunk is not None and not options.continue_trunk:
        near = [folder / OWN_FILE for folder in (options.out, options.resume_trunk)]
        found = [kept for kept in near if kept.is_file()]
        if found:
            report.log(event="own continuations reused", file=str(found[0]))
            return load_rows(found[0], device)
    with report.phase("own continuations") as phase:
        drawn_with, vocab = seeds(options.seed), trunk.c.vocab_size
        batches = Batches(
            data.streams, OWN_PROMPT, FIRST_TEXT_ID, vocab, drawn_with["prompts"], TEXT
        )
        prompts = batches.text(options.own_rows)[0][:, :-1]
        prompts[:, 0] = trunk.c.bos_token_id
        hot = torch.arange(options.own_rows, device=device) % HOT_EVERY == HOT_EVERY - 1
        own = continue_prompts(
            trunk, prompts, OWN_TOKENS, hot * HEAT, drawn_with["own"], options.own_max_seconds
        )
        phase["shape"] = list(own.shape)
        if own.shape[1] < OWN_PROMPT + trunk.c.sliding_window:
            report.log(event="own continuations are too short to learn from; text alone is used")
            return None
        save_rows(path, own)
    return own


def draft_figures(
    trunk: Trunk, draft: TrainDraft, data: Data, judged: Tensor | None, options: Namespace
) -> dict[str, object]:
    """Greedy acceptance on held-out text prefixes and on continuations that weren't learned from."""
    rows = windows(data.held_out["code"], options.context, options.context, limit=32)[:, :-1]
    prefix, tokens = acceptance_on_text(trunk, draft, rows)
    figures: dict[str, object] = {"text": {"prefix_accepted": prefix, "tokens_per_step": tokens}}
    if judged is not None:
        greedy = torch.arange(len(judged), device=judged.device) % HOT_EVERY != HOT_EVERY - 1
        prefix, tokens = acceptance_on_own(trunk, draft, judged[greedy], OWN_PROMPT)
        figures["own"] = {"prefix_accepted": prefix, "tokens_per_step": tokens}
    return figures
