"""The measurements themselves: each takes a `Bench` and records its figures."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer import Engine, SamplingParams
from deepinfer.core.types import Output
from deepinfer.engine.tokenizer import Tokenizer
from deepinfer.models import load_model

from . import recall
from .answers import TaskMaker, is_well_formed
from .drafting import DraftRun, RecordingDrafter, draft_run
from .held_out import (
    Document,
    TaskWriter,
    local_training_texts,
    overlaps,
    subset,
    training_texts,
)
from .metrics import (
    acceptance,
    auroc,
    bits_per_byte,
    brier_score,
    common_prefix,
    expected_calibration_error,
    outcomes_at,
    rate,
    xz_bits_per_byte,
)
from .results import Recorder
from .scoring import STRIDE, WINDOW, Costs, score_rows

NUM_SEQS = 16
CODE_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 32, 192, 128
GENERATED_CHARACTERS = 10_000
GENERATED_SEED = 20_012


@dataclass
class Bench:
    """What every part works with.

    Attributes:
        folder: The checkpoint.
        tokenizer: Its tokenizer.
        recorder: Takes the figures.
        device: A torch device.
        processes: Processes that score text on a CPU.
        code: Held-out code.
        docs: Held-out documentation; empty when no folder was given.
        data: Folder that `train_nano.py data` wrote, or None.
        docs_folder: Folder of the documentation's sources, or None.
        limit: Most texts and prompts of a kind, or None.
        all_files: Whether to measure everything on all files, not on every fourth.
    """

    folder: Path
    tokenizer: Tokenizer
    recorder: Recorder
    device: str
    processes: int
    code: list[Document]
    docs: list[Document]
    data: Path | None = None
    docs_folder: Path | None = None
    limit: int | None = None
    all_files: bool = False

    def few(self, documents: Sequence[Document]) -> list[int]:
        """Numbers of the documents for the slower figures."""
        everything = self.all_files or len(documents) < 8
        return list(range(len(documents))) if everything else subset(documents)


# ---- bits per byte --------------------------------------------------------------------------


def measure_bits(bench: Bench) -> None:
    """Bits per byte on code, documentation and generated text; overlap; router load."""
    for domain, documents in (("code", bench.code), ("docs", bench.docs)):
        if documents:
            _measure_documents(bench, domain, documents)
    _measure_generated(bench)


def _measure_documents(bench: Bench, domain: str, documents: Sequence[Document]) -> None:
    texts = [document.text for document in documents]
    costs = Costs([bench.tokenizer.encode(text) for text in texts])
    few, everything = bench.few(documents), range(len(documents))
    is_code = domain == "code"
    first = everything if is_code else few

    def add(case: str, numbers: Sequence[int], stride: int = WINDOW) -> None:
        chosen = [texts[i] for i in numbers]
        size = sum(len(text.encode()) for text in chosen)
        nats = sum(float(costs.nats(i, stride).sum()) for i in numbers)
        counts = {"files": len(numbers), "bytes": size}
        counts["tokens"] = sum(len(costs.texts[i]) - 1 for i in numbers)
        bench.recorder.add(
            f"bits per byte, {domain}", case, bits_per_byte(nats, size), "bits/byte", **counts
        )

    def add_xz(case: str, numbers: Sequence[int]) -> None:
        chosen = [texts[i] for i in numbers]
        bench.recorder.add(
            f"bits per byte, {domain}", case, xz_bits_per_byte(chosen), "bits/byte",
            files=len(numbers), bytes=sum(len(text.encode()) for text in chosen),
        )  # fmt: skip

    options: dict[str, Any] = {"device": bench.device, "processes": bench.processes}
    costs.measure([(first, WINDOW), (few, STRIDE)], bench.folder, rounding="full", **options)
    if is_code:
        add("full", first)
        add_xz("xz -9e", first)
        _measure_overlap(
            bench, documents, lambda numbers: add("full, files of little overlap", numbers)
        )
        _add_router_load(bench, costs.loads)
    add("full, few files", few)
    add_xz("xz -9e, few files", few)
    add("full, few files, overlapping windows", few, STRIDE)
    if is_code:
        for rounding in ("cache", "none"):
            costs.measure([(few, WINDOW)], bench.folder, rounding=rounding, **options)
            add(f"{rounding}, few files", few)


def _measure_overlap(
    bench: Bench, documents: Sequence[Document], add: Callable[[Sequence[int]], None]
) -> None:
    if bench.data is not None:
        training, source = training_texts(bench.data, bench.tokenizer), "all training text"
    else:
        training, source = local_training_texts(bench.docs_folder), "this interpreter's library"
    found = overlaps(documents, training)
    lines, shared = sum(o.lines for o in found), sum(o.found for o in found)
    numbers = [i for i, overlap in enumerate(found) if overlap.is_small]
    bench.recorder.add(
        "overlap with training text", "long lines of held-out code", shared / max(1, lines), "share",
        count=shared, of=lines, compared_with=source, files_of_little_overlap=len(numbers),
    )  # fmt: skip
    if numbers:
        add(numbers)


def _add_router_load(bench: Bench, loads: np.ndarray | None) -> None:
    if loads is not None:
        peaks = (loads.max(1) / loads.mean(1)).tolist()
        bench.recorder.add(
            "router load", "max over mean by layer, held-out code", peaks, "ratio",
            tokens=int(loads[0].sum()), least_used_share=(loads.min(1) / loads.mean(1)).tolist(),
        )  # fmt: skip


def _measure_generated(bench: Bench) -> None:
    """Generated documents by kind, each document a sequence of its own."""
    writer = TaskWriter([document.text for document in bench.code], GENERATED_SEED)
    kinds = {
        "JSON": writer.json_document,
        "assignments": writer.assignments,
        "records": writer.records,
        "repeated text": writer.repeated_text,
        "arithmetic": writer.arithmetic,
        "chat": writer.chat,
    }
    texts: dict[str, list[str]] = {}
    for kind, write in kinds.items():
        texts[kind] = []
        while sum(map(len, texts[kind])) < GENERATED_CHARACTERS // (20 if bench.limit else 1):
            texts[kind].append(write())
    bos = bench.tokenizer.decode([bench.tokenizer.bos_token_id or 0], skip_special=False)
    rows = [
        bench.tokenizer.encode(text, add_bos=not text.startswith(bos), allowed_special="all")
        for group in texts.values()
        for text in group
    ]
    rows = [row[: WINDOW + 1] for row in rows]
    scores = score_rows(
        bench.folder, rows, rounding="full", device=bench.device, processes=bench.processes
    )
    sizes = np.array(
        [
            0 if token in bench.tokenizer.control_ids else len(bench.tokenizer.token_bytes(token))
            for token in range(bench.tokenizer.vocab_size)
        ]
    )
    at = 0
    for kind, group in texts.items():
        part = range(at, at + len(group))
        at += len(group)
        counted = [sizes[rows[i][1:]] for i in part]
        nats = sum(float(scores.nats[i][c > 0].sum()) for i, c in zip(part, counted, strict=True))
        size = int(sum(c.sum() for c in counted))
        bench.recorder.add(
            "bits per byte, generated", kind, bits_per_byte(nats, size), "bits/byte",
            documents=len(group), bytes=size,
        )  # fmt: skip


# ---- recall ---------------------------------------------------------------------------------


def measure_recall(bench: Bench) -> None:
    """Recall of copied random spans by distance."""
    model = load_model(bench.folder, device=bench.device, rounding="full", progress=False)
    stream = [token for d in bench.code for token in bench.tokenizer.encode(d.text)]
    while len(stream) < recall.ROW_TOKENS:
        stream += stream
    vocabulary = bench.tokenizer.vocabulary()
    ordinary = [token for token, data in enumerate(vocabulary) if data]
    num_rows = min(recall.ROWS, 2 * bench.limit) if bench.limit else recall.ROWS
    rows = recall.recall_rows(stream, ordinary, num_rows)
    for distance, found in recall.measure(model, rows).items():
        bench.recorder.add_rate("recall, tokens", str(distance), found.tokens)
        bench.recorder.add_rate("recall, whole spans", str(distance), found.spans)


# ---- generation -----------------------------------------------------------------------------


def code_prompts(bench: Bench) -> list[list[int]]:
    """Beginnings of lines all over the held-out code, `PROMPT_TOKENS` tokens from each."""
    texts = [d.text for d in bench.code if len(d.text) >= 3000] or [d.text for d in bench.code]
    total = sum(map(len, texts))
    count = min(bench.limit or CODE_PROMPTS, CODE_PROMPTS)
    prompts = []
    for number in range(count):
        at = int((number + 0.5) / count * total)
        for text in texts:
            if at < len(text):
                break
            at -= len(text)
        at = text.rfind("\n", 0, max(0, min(at, len(text) - 1500))) + 1
        prompts.append(bench.tokenizer.encode(text[at : at + 2000])[:PROMPT_TOKENS])
    return prompts


def generate(
    bench: Bench,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    drafts: bool,
    rounding: Any = "full",
) -> tuple[list[Output], RecordingDrafter | None]:
    """Runs prompts through an engine, greedily, with or without drafts."""
    model = load_model(bench.folder, device=bench.device, rounding=rounding, progress=False)
    drafter = RecordingDrafter(model) if drafts else None
    longest = max(len(p) + q.max_tokens for p, q in zip(prompts, params, strict=True))
    config = {"max_num_seqs": NUM_SEQS, "max_model_len": longest, "device": bench.device}
    with Engine(model=model, tokenizer=bench.tokenizer, drafter=drafter, config=config) as engine:
        return engine.generate([list(p) for p in prompts], list(params), progress=False), drafter


def measure_drafts(bench: Bench) -> None:
    """Greedy drafting on held-out code, and whether it changes any token."""
    prompts = code_prompts(bench)
    params = [SamplingParams(temperature=0, max_tokens=NEW_TOKENS)] * len(prompts)
    outputs, drafter = generate(bench, prompts, params, drafts=True)
    if drafter is not None:
        _add_draft_run(bench, "code", draft_run(drafter, prompts, outputs))
    _compare_with_plain(bench, "", prompts, params, outputs)
    few, params = prompts[::4], params[::4]
    outputs, _ = generate(bench, few, params, drafts=True, rounding="none")
    _compare_with_plain(bench, ", rounding none", few, params, outputs, rounding="none")


def _compare_with_plain(
    bench: Bench,
    case: str,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    outputs: Sequence[Output],
    rounding: str = "full",
) -> None:
    params = [one.replace(logprobs=2) for one in params]
    plain, _ = generate(bench, prompts, params, drafts=False, rounding=rounding)
    pairs = list(zip(outputs, plain, strict=True))
    same = rate(a.token_ids == b.token_ids for a, b in pairs)
    prefixes = [common_prefix(a.token_ids, b.token_ids) for a, b in pairs]
    gaps = [
        logprobs[at].top[0][1] - logprobs[at].top[1][1]
        for (a, b), at in zip(pairs, prefixes, strict=True)
        if a.token_ids != b.token_ids and at < len(logprobs := b.logprobs or ())
    ]
    bench.recorder.add_rate(
        "draft", f"outputs equal to decoding without drafts{case}", same,
        tokens_before_a_difference=sum(prefixes), tokens=sum(len(b.token_ids) for b in plain),
        gap_of_best_two_at_a_difference=gaps,
    )  # fmt: skip


def _add_draft_run(bench: Bench, domain: str, run: DraftRun) -> None:
    add = bench.recorder.add
    if not run.steps:
        return
    add(
        f"draft, {domain}",
        "tokens a step",
        run.tokens / run.steps,
        "tokens/step",
        tokens=run.tokens,
        steps=run.steps,
    )
    if not run.blocks:
        return
    conditional, cumulative = acceptance(run.blocks)
    reached = [one.of if one else 0 for one in conditional]
    values = [one.value if one else None for one in conditional]
    add(f"draft, {domain}", "accepted by position, conditional", values, "share", reached=reached)
    add(
        f"draft, {domain}",
        "accepted by position, cumulative",
        [one.value for one in cumulative],
        "share",
        blocks=len(run.blocks),
    )
    pairs = [outcomes_at(run.blocks, position) for position in range(len(reached))]
    for name, measure in (
        ("calibration error", expected_calibration_error),
        ("Brier score", brier_score),
        ("AUROC", auroc),
    ):
        figures = [measure(sure, kept) if kept else None for sure, kept in pairs]
        add(f"draft, {domain}", f"confidence by position, {name}", figures, "1", reached=reached)


def measure_answers(bench: Bench) -> None:
    """Chat answers, JSON documents and functions."""
    tasks = TaskMaker(bench.tokenizer, bench.code).tasks(bench.limit)
    params = [SamplingParams(temperature=0, max_tokens=t.max_tokens, stop=t.stop) for t in tasks]
    prompts = [task.prompt_ids for task in tasks]
    outputs, drafter = generate(bench, prompts, params, drafts=True)
    pairs = list(zip(tasks, outputs, strict=True))
    chats = [(task, output) for task, output in pairs if task.part == "chat"]
    formed = [is_well_formed(output, bench.tokenizer) for _, output in chats]
    bench.recorder.add_rate("chat", "well-formed", rate(formed))
    for kind in dict.fromkeys(task.kind for task, _ in chats):
        of_kind = [ok for (task, _), ok in zip(chats, formed, strict=True) if task.kind == kind]
        bench.recorder.add_rate("chat", f"{kind}: well-formed", rate(of_kind))
    for part, kind in dict.fromkeys((task.part, task.kind) for task in tasks):
        verdicts = [t.judge(output) for t, output in pairs if (t.part, t.kind) == (part, kind)]
        known = [verdict for verdict in verdicts if verdict is not None]
        if known:
            bench.recorder.add_rate(part, f"{kind}: right", rate(known))
    if drafter is None:
        return
    for part in dict.fromkeys(task.part for task in tasks):
        of_part = [(t.prompt_ids, output) for t, output in pairs if t.part == part]
        run = draft_run(drafter, *zip(*of_part, strict=True))
        _add_draft_run(bench, part, run)


PARTS: dict[str, Callable[[Bench], None]] = {
    "bits": measure_bits,
    "recall": measure_recall,
    "drafts": measure_drafts,
    "answers": measure_answers,
}


def run_parts(bench: Bench, names: Sequence[str]) -> None:
    """Runs parts in order, and says on stderr how long each took."""
    for name in names:
        sys.stderr.write(f"{name} ...\n")
        begin, work = time.perf_counter(), _processor_seconds()
        PARTS[name](bench)
        seconds, work = time.perf_counter() - begin, _processor_seconds() - work
        sys.stderr.write(f"{name}: {seconds:.0f} s, {work:.0f} s of processor time\n")


def _processor_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
