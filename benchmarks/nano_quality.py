"""Measures how good a checkpoint is, records the figures, and writes them into its model card.

Run: python benchmarks/nano_quality.py [--model nano] [--device cpu] [--data build/nano] [--docs FOLDER]

Figures come from the inference model with the rounding of inference: bits per byte of text that training never saw,
recall of copied spans, drafting, chat answers, JSON and functions. Each is one JSON line with the content hash of the
weights: in benchmarks/results for nano, beside the weights for another checkpoint. The card, README.md beside the
weights, shows the newest line of every case; --card-only writes it without measuring. Quick runs (--limit) are printed,
not recorded.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from quality import card
from quality.held_out import CODE_SUFFIXES, DOCS_SUFFIXES, held_out_documents, stdlib_folder
from quality.parts import PARTS, Bench, run_parts
from quality.results import RESULTS, Recorder, content_hash, device_name

from deepinfer.engine.tokenizer import Tokenizer
from deepinfer.models import resolve_checkpoint


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="nano", help="nano, or a checkpoint folder")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--limit", type=int, help="quick run: most texts and prompts of a kind")
    parser.add_argument(
        "--all-files", action="store_true", help="every figure on all files, not on every fourth"
    )
    parser.add_argument(
        "--processes", type=int, default=min(4, os.cpu_count() or 1), help="for scoring on a CPU"
    )
    parser.add_argument("--data", type=Path, help="folder that `train_nano.py data` wrote")
    parser.add_argument("--docs", type=Path, help="folder of the documentation's .rst sources")
    parser.add_argument(
        "--report",
        type=Path,
        help="folder with data_card.json and report.json of the training, to keep beside the weights",
    )
    parser.add_argument("--card-only", action="store_true", help="measure nothing")
    parser.add_argument("--results", type=Path, help="lines go here, those of a quick run too")
    return parser


def main() -> None:
    """Measures, records, writes the card."""
    options = build_parser().parse_args()
    folder = resolve_checkpoint(options.model)
    if options.report is not None:
        card.keep_report(options.report, folder)
    results = options.results or (RESULTS if options.model == "nano" else folder / RESULTS.name)
    if options.card_only:
        print(card.write(folder, results))
        return
    if options.device == "cpu":
        torch.set_num_threads(1)
    recorder = Recorder(
        None if options.limit and not options.results else results,
        content_hash(folder),
        folder.name,
        device_name(options.device),
        "float32" if options.device == "cpu" else "bfloat16",
        options.limit,
    )
    names = held_out_names(folder, options.data)
    code = held_out_documents(stdlib_folder(), CODE_SUFFIXES, names.get("code"))
    docs = (
        held_out_documents(options.docs, DOCS_SUFFIXES, names.get("docs")) if options.docs else []
    )
    bench = Bench(
        folder=folder,
        tokenizer=Tokenizer(folder),
        recorder=recorder,
        device=options.device,
        processes=options.processes,
        code=code[: options.limit],
        docs=docs[: options.limit],
        data=options.data,
        docs_folder=options.docs,
        limit=options.limit,
        all_files=options.all_files,
    )
    run_parts(bench, options.parts)
    if options.limit is None:
        card.write(folder, results)


def held_out_names(folder: Path, data: Path | None) -> dict[str, list[str]]:
    """Names of the files that training held out, from the data card beside the weights or in the data folder."""
    for place in filter(None, (folder, data)):
        path = place / "data_card.json"
        if path.is_file():
            names: dict[str, list[str]] = json.loads(path.read_text(encoding="utf-8"))["held_out"]
            return names
    return {}


if __name__ == "__main__":
    main()
