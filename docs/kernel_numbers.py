"""Times in the tables of the kernels' pages, against the lines of benchmarks/results.

    python docs/kernel_numbers.py                 times without a line, then times of which a newer run says another
    python docs/kernel_numbers.py more.jsonl      the same as if these lines were kept too
    python docs/kernel_numbers.py --write         put the newest times into rows that have one time, with what follows from it

A time is what stands in a column "ms" of a table under a heading "Speed". It belongs to a line if the line's value rounds to it,
of an operation of the page; among several lines, the shape that shares most numbers with the row. The newest time of its operation
and shape, that of the table's entry if there is one and else the fastest, is printed beside it, so that the text around can be
written anew too. `--write` leaves columns alone whose figure the line does not have, and says so.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LINES = ROOT / "benchmarks" / "results" / "kernels.jsonl"
PAGES = ROOT / "docs" / "explanation"
# How far a time without a line may lie from the line that is offered in its place.
NEAR = 0.06
# What is measured for a page, where its benchmark has another name or more operations than the page speaks of.
OPERATIONS: Mapping[str, str] = {
    "attention": "flash_mla_with_kvcache|merge_attn_states",
    "attention_prefill": "flash_mla_sparse_fwd|swa_attention",
    "cache": ".*k_cache|rope_quant_insert|compress_norm",
    "engram": "engram_.*",
    "indexer": ".*mqa_logits.*",
    "mhc": "mhc_.*|sinkhorn",
    "moe": "topk_gate|get_fused_mapping|silu_and_mul_quant_fused|expand_to_fused.*|reduce_fused|fused_experts",
    "norm": ".*rms_norm.*|apply_rope",
    "products": ".*gemm_nt.*|batch_invariant.linear",
    "quant": ".*cast_.*|silu_and_mul.*",
    "sampling": ".*sample|apply_.*|log_probs|ngram_propose|speculative_verify|top_k_top_p_mask",
    "topk": "topk|candidate_block_max|topk_to_physical_indices",
}


@dataclass(frozen=True)
class Time:
    """A time that stands in a table: its page, the number of its line there, the row's label and the figure."""

    page: str
    at: int
    label: str
    figure: str

    def fits(self, ms: float) -> bool:
        """Whether a measured time rounds to the figure."""
        digits = len(self.figure.partition(".")[2])
        return bool(abs(ms - float(self.figure)) <= 0.5000001 * 10**-digits)


def times(page: str, text: str) -> Iterator[Time]:
    """The times in the tables of a page, from the heading "Speed" on."""
    columns: list[int] = []
    inside = False
    for at, line in enumerate(text.splitlines(), 1):
        if line.startswith("## "):
            inside = line == "## Speed"
        if not line.startswith("|") or not inside:
            columns = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not columns:
            columns = [i for i, c in enumerate(cells) if re.search(r"\bms$", c)] or [-1]
        elif columns != [-1] and not set(line) <= set("|- :"):
            label = ", ".join(filter(None, cells[: columns[0]]))
            for i in columns:
                for figure in re.findall(r"(?<![\d.])\d+\.\d+", cells[i].partition("(")[0]):
                    yield Time(page, at, label, figure)


def lines(more: Iterable[Path] = ()) -> list[dict[str, Any]]:
    """Every line of a measured kernel, older ones first."""
    found = []
    for path in (LINES, *more):
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text) if text.strip() else {}
            if "op" in line and "shape" in line:
                found.append(line)
    return found


Key = tuple[str, str, str]


def key_of(line: Mapping[str, Any]) -> Key:
    """Operation, shape and form of a line: entries of one form differ in sizes only."""
    first = line["variant"].partition(" ")[0]
    form = first if first[:1].isalpha() and first != "table" else ""
    return line["op"], line["shape"], form + " by groups" * ("by groups" in line["variant"])


def newest(kept: Iterable[Mapping[str, Any]]) -> dict[Key, list[Mapping[str, Any]]]:
    """The lines of the newest run of each operation, shape and form."""
    groups: dict[Key, list[Mapping[str, Any]]] = {}
    for line in kept:
        group = groups.setdefault(key_of(line), [])
        run = (line.get("date"), line.get("commit"))
        if group and run != (group[-1].get("date"), group[-1].get("commit")):
            group.clear()
        group.append(line)
    return groups


def current(group: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The line of a run that a page speaks of: the table's entry, else the fastest; with peers that any entry was timed with."""
    listed = list(group)
    table = [line for line in listed if line["variant"] == "table"]
    line = dict(min(table or listed, key=lambda line: float(line["value"])))
    for other in listed:
        for name in other:
            if name.endswith("_ms"):
                line.setdefault(name, other[name])
    return line


def of_row(time: Time, fitting: list[dict[str, Any]]) -> set[Key]:
    """What a time may belong to: lines with most of the row's numbers in their names."""
    numbers = set(re.findall(r"\d+", time.label.replace(",", "")))
    scores: dict[Key, int] = {}
    for line in fitting:
        found = set(re.findall(r"\d+", line["shape"]))
        key = key_of(line)
        scores[key] = max(scores.get(key, 0), len(numbers & found))
    best = max(scores.values())
    return {key for key, score in scores.items() if score == best}


def report(
    kept: list[dict[str, Any]],
) -> tuple[list[str], list[tuple[Time, list[Mapping[str, Any]]]]]:
    """What is to be written anew.

    Args:
        kept: Lines, older ones first.

    Returns:
        Times that no line has; times of older runs, and those that lie near a line, with what the newest run has.
    """
    groups = newest(kept)
    missing, old = [], []
    for name, operations in OPERATIONS.items():
        page = f"kernels_{name}.md"
        mine = [line for line in kept if re.fullmatch(operations, line["op"])]
        for time in times(page, (PAGES / page).read_text(encoding="utf-8")):
            fitting = [line for line in mine if time.fits(line["value"])]
            if not fitting:
                missing.append(f"{page}:{time.at}: {time.figure} ms ({time.label})")
                near = [line for line in mine if abs(line["value"] / float(time.figure) - 1) < NEAR]
                if near:
                    old.append((time, [current(groups[key]) for key in of_row(time, near)]))
                continue
            mine_now = [groups[key] for key in of_row(time, fitting)]
            if not any(time.fits(line["value"]) for group in mine_now for line in group):
                old.append((time, [current(group) for group in mine_now]))
    return missing, old


def cell(header: str, old: str, line: Mapping[str, Any]) -> str | None:
    """What a line has for a column; None where it has nothing."""
    ms = float(line["value"])
    if header == "TB/s":
        return f"{line['TB/s']:.2f}"
    if header == "TFLOP/s":
        return f"{line['TFLOP/s']:,.0f}"
    if header == "rate":
        return f"{line['TB/s']:.2f} TB/s" if "TB/s" in old else f"{line['TFLOP/s']:,.0f} TFLOP/s"
    if header in ("share", "of the limit"):
        return re.sub(r"^\d+", f"{100 * line['share_of_limit']:.0f}", old)
    peers = {"copy": "copy", "torch's compiler": "compiled", "speed to compiled": "compiled", "FlashInfer": "flashinfer",
             "of FlashInfer's speed": "flashinfer", "torch / ours": "torch", "of the peer's speed": "deepgemm"}  # fmt: skip
    if header in peers and f"{peers[header]}_ms" in line and re.fullmatch(r"[\d.]+", old):
        digits = len(old.partition(".")[2])
        return f"{line[f'{peers[header]}_ms'] / ms:.{digits}f}"
    return None


def write(kept: list[dict[str, Any]]) -> list[str]:
    """Writes the rows that have one time and one line for it; returns what is left to be done by hand."""
    _, old = report(kept)
    left = []
    counts = Counter(t for p in {t.page for t, _ in old} for t in _rows_of(p))
    for time, said in old:
        path = PAGES / time.page
        rows = path.read_text(encoding="utf-8").splitlines()
        row = rows[time.at - 1]
        where = f"{time.page}:{time.at}"
        if not any(time.fits(line["value"]) for line in kept):
            left.append(f"{where}: {time.figure} ms, which no line has")
            continue
        operations = OPERATIONS[time.page.removeprefix("kernels_").removesuffix(".md")]
        mine = [line for line in kept if re.fullmatch(operations, line["op"])]
        if not {key_of(line) for line in said} & of_row(time, mine):
            left.append(f"{where}: {time.figure} ms, whose row names another shape than its line")
            continue
        several = counts[time.page, time.at] > 1
        if len(said) != 1 or several:
            reason = (
                "several times in a row" if several else f"{len(said)} lines that may be its own"
            )
            left.append(f"{where}: {time.figure} ms, {reason}")
            continue
        digits = len(time.figure.partition(".")[2])
        head = time.at - 1
        while rows[head - 1].startswith("|"):
            head -= 1
        headers = [c.strip() for c in rows[head].strip("|").split("|")]
        cells = [c.strip() for c in row.strip("|").split("|")]
        for i, header in enumerate(headers):
            if time.figure in cells[i]:
                cells[i] = cells[i].replace(time.figure, f"{said[0]['value']:.{digits}f}")
            elif "ms" in headers and i > headers.index("ms"):
                new = cell(header, cells[i], said[0])
                if new is None and cells[i]:
                    left.append(f"{where}: column {header!r}, {cells[i]}")
                cells[i] = cells[i] if new is None or not cells[i] else new
        rows[time.at - 1] = f"| {' | '.join(cells)} |".replace("|  |", "| |")
        path.write_text("\n".join([*rows, ""]), encoding="utf-8")
    return left


def _rows_of(page: str) -> list[tuple[str, int]]:
    return [(page, t.at) for t in times(page, (PAGES / page).read_text(encoding="utf-8"))]


def main() -> int:
    """Prints the report, or writes; the exit status is 1 if a time has no line."""
    paths = [Path(a) for a in sys.argv[1:] if a != "--write"]
    missing, old = report(lines(paths))
    said = [
        f"{len(missing)} times without a line",
        *(f"  {text}" for text in missing),
        f"{len(old)} times of an older run",
    ]
    for time, now in old:
        names = " or ".join(
            f"{x['value']:.5g} ms ({x['op']} {x['shape']}, {x['variant']})" for x in now
        )
        said.append(f"  {time.page}:{time.at}: {time.figure} ms ({time.label}) -> {names}")
    if "--write" in sys.argv:
        left = write(lines(paths))
        said += [f"{len(left)} left to be done by hand", *(f"  {text}" for text in left)]
    sys.stdout.write("\n".join([*said, ""]))
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
