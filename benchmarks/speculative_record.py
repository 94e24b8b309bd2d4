"""Blocks of drafts that were all verified, as (confidences, margins, accepted), recorded with the embedded `nano`."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speculative_report import Report

from deepinfer import Engine, SamplingParams
from deepinfer.core.protocols import DraftBatch, DraftView
from deepinfer.engine import DSparkDrafter
from speculative import prompts

__all__ = ["record_blocks"]


class Recorder(DSparkDrafter):
    """Proposes the likeliest tokens, and writes down confidences, margins, and how far each block was accepted."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.open: dict[str, tuple[int, np.ndarray, np.ndarray]] = {}
        self.blocks: list[tuple[str, int, np.ndarray, np.ndarray, int]] = []

    def propose(self, view: DraftView, max_drafts: int) -> DraftBatch:
        """Proposes, and notes how far the blocks before came."""
        draft = self._draft
        out = draft.propose(view.anchor_ids, view.positions, view.slots, self._cache)
        before = torch.tensor(view.anchor_ids, device=out.hidden.device)
        tokens, margins, inputs = [], [], []
        for logits in out.base_logits.unbind(1):
            inputs.append(before)
            best = (logits + draft.markov_bias(before)).topk(2, -1)
            before = best.indices[:, 0]
            tokens.append(before)
            margins.append(best.values[:, 0] - best.values[:, 1])
        confidence = draft.confidence(out.hidden, torch.stack(inputs, 1)).double()
        logit = torch.logit(confidence, eps=1e-9).float().cpu().numpy()
        gaps = torch.stack(margins, 1).float().cpu().numpy()
        for at, (rid, position) in enumerate(zip(view.rids, view.positions, strict=True)):
            known = self.open.get(rid)
            if known is not None and position - known[0] <= max_drafts + 1:
                self.blocks.append((rid, known[0], known[1], known[2], position - known[0] - 1))
            self.open[rid] = (position, logit[at], gaps[at])
        proposed = torch.stack(tokens, 1)[:, :max_drafts].tolist()
        return DraftBatch(
            token_ids=tuple(map(tuple, proposed)),
            confidences=tuple(map(tuple, confidence[:, :max_drafts].tolist())),
        )


def record_blocks(report: Report, options: Any) -> None:
    """Blocks of every kind of text; those that the end of an answer may have cut are left out."""
    made: list[Recorder] = []

    def make(model: Any) -> Recorder:
        made.append(Recorder(model))
        return made[0]

    config = {"max_num_seqs": 256, "max_model_len": 1024, "device": options.device}
    columns: dict[str, list[Any]] = {
        name: [] for name in ("kind", "request", "position", "logits", "margins", "accepted")
    }
    params = SamplingParams(max_tokens=options.tokens, temperature=0, ignore_eos=True)
    texts = prompts(options.prompts)
    with Engine.from_pretrained("nano", config=config, drafter=make) as engine:
        recorder, request = made[0], 0
        for number, (kind, given) in enumerate(texts.items()):
            recorder.open.clear()
            recorder.blocks.clear()
            began = time.perf_counter()
            outputs = engine.generate(given, params)
            seconds = time.perf_counter() - began
            ends = {}
            for rid, position, *_ in recorder.blocks:
                ends[rid] = max(ends.get(rid, 0), position)
            names = {rid: request + at for at, rid in enumerate(sorted(ends))}
            request += len(names)
            kept = [b for b in recorder.blocks if b[1] < ends[b[0]] - 6]
            for rid, position, logits, gaps, accepted in kept:
                columns["kind"].append(number)
                columns["request"].append(names[rid])
                columns["position"].append(position)
                columns["logits"].append(logits)
                columns["margins"].append(gaps)
                columns["accepted"].append(accepted)
            report.add(
                f"recorded, {kind}", blocks=len(kept), requests=len(given), seconds=seconds,
                accepted_length=1 + statistics.mean(b[-1] for b in kept),
                generated=sum(o.usage.generated for o in outputs),
            )  # fmt: skip
    np.savez_compressed(
        Path(options.out) / "speculative_blocks.npz",
        kinds=np.array(list(texts)),
        kind=np.array(columns["kind"], np.uint8),
        request=np.array(columns["request"], np.uint16),
        position=np.array(columns["position"], np.uint16),
        logits=np.array(columns["logits"], np.float16),
        margins=np.array(columns["margins"], np.float16),
        accepted=np.array(columns["accepted"], np.uint8),
    )
