"""Times in the tables of the kernels' pages, against the lines of benchmarks/results.

    python docs/kernel_numbers.py                 times without a line, then times of which a newer run says another
    python docs/kernel_numbers.py more.jsonl      the same as if these lines were kept too
    python docs/kernel_numbers.py --write         put the newest times in, with what follows from them

A time is what stands in a column "ms" of a table under a heading "Speed". It belongs to a line if the line's value rounds to it,
of an operation of the page; among several lines, the shape that shares most numbers with the row. The newest time of its operation
and shape, that of the table's entry if there is one and else the fastest, is printed beside it, so that the text around can be
written anew too. `--write` leaves columns alone whose figure the line does not have, and says so.
"""

from __future__ import annotations

import json
import re
import sys
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
    """A time that stands in a table.

    Attributes:
        page: Name of the page.
        at: Number of its line there.
        label: What the cells before it say; of cells with as many parts ("1 / 64") as it has, the part at its place.
        figure: As it is written.
        column: Its cell.
        part: Its place among the times of the cell.
    """

    page: str
    at: int
    label: str
    figure: str
    column: int = 0
    part: int = 0

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
            for i in columns:
                found = re.findall(r"(?<![\d.])\d+\.\d+", cells[i].partition("(")[0])
                for j, figure in enumerate(found):
                    yield Time(page, at, _label(cells[: columns[0]], j, len(found)), figure, i, j)


def parts_of(text: str) -> tuple[list[str], str]:
    """The parts of a cell, and what stands between them."""
    between = "; " if "; " in text else " / "
    return text.split(between), between


def _label(cells: list[str], part: int, parts: int) -> str:
    said = []
    for text in filter(None, cells):
        own, _ = parts_of(text)
        said.append(own[part] if len(own) == parts else text)
    return ", ".join(said)


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


PEERS = {
    "copy": "copy",
    "torch's compiler": "compiled",
    "speed to compiled": "compiled",
    "FlashInfer": "flashinfer",
    "of FlashInfer's speed": "flashinfer",
    "to FlashInfer from logits": "flashinfer",
    "torch / ours": "torch",
    "of the peer's speed": "deepgemm",
    "of DeepGEMM's speed": "deepgemm",
}


def number(header: str, whole: str, old: str, line: Mapping[str, Any]) -> str | None:
    """What a line has for a column of a page.

    Args:
        header: Head of the column.
        whole: The cell as it is.
        old: The part of it that is of this line.
        line: The line.

    Returns:
        The number; None where the line has nothing.
    """
    if header == "TB/s" or (header == "rate" and "TB/s" in whole):
        return f"{line['TB/s']:.2f}"
    if header == "TFLOP/s" or (header == "rate" and "TFLOP/s" in whole):
        return f"{line['TFLOP/s']:,.0f}"
    if header in ("share", "of the limit"):
        return f"{100 * line['share_of_limit']:.0f}"
    ms = line.get(f"{PEERS.get(header, '')}_ms")
    if ms is None or not re.fullmatch(r"[\d.]+( \(of its FP8\))?", old):
        return None
    digits = len(old.partition(" ")[0].partition(".")[2])
    return f"{ms / line['value']:.{digits}f}"


def write(kept: list[dict[str, Any]]) -> list[str]:
    """Writes the times that one line alone may have, and what follows; returns what is left to be done by hand."""
    _, old = report(kept)
    left = []
    for time, said in old:
        where = f"{time.page}:{time.at}: {time.figure} ms"
        operations = OPERATIONS[time.page.removeprefix("kernels_").removesuffix(".md")]
        mine = [line for line in kept if re.fullmatch(operations, line["op"])]
        if not any(time.fits(line["value"]) for line in mine):
            left.append(f"{where}, which no line has")
        elif len(said) != 1:
            left.append(f"{where}, {len(said)} lines that may be its own")
        elif key_of(said[0]) not in of_row(time, mine):
            left.append(f"{where}, whose row names another shape than its line")
        else:
            left += [f"{where}: {text}" for text in _write(time, said[0])]
    return left


def _write(time: Time, line: Mapping[str, Any]) -> list[str]:
    """Writes one time, and the columns up to the next one of times."""
    path = PAGES / time.page
    rows = path.read_text(encoding="utf-8").splitlines()
    head = time.at - 1
    while rows[head - 1].startswith("|"):
        head -= 1
    headers = [c.strip() for c in rows[head].strip("|").split("|")]
    cells = [c.strip() for c in rows[time.at - 1].strip("|").split("|")]
    own, between = parts_of(cells[time.column])
    digits = len(time.figure.partition(".")[2])
    own[time.part] = own[time.part].replace(time.figure, f"{line['value']:.{digits}f}")
    count = len(own)
    cells[time.column] = between.join(own)
    left = []
    for i in range(time.column + 1, len(cells)):
        if re.search(r"\bms$", headers[i]):
            break
        own, between = parts_of(cells[i])
        if len(own) != count:
            left += [f"column {headers[i]!r}, {cells[i]}"] if cells[i] else []
            continue
        new = number(headers[i], cells[i], own[time.part], line)
        if new is not None and own[time.part]:
            own[time.part] = re.sub(r"^[\d.,]+", new, own[time.part])
            cells[i] = between.join(own)
        elif own[time.part]:
            left.append(f"column {headers[i]!r}, {cells[i]}")
    rows[time.at - 1] = f"| {' | '.join(cells)} |".replace("|  |", "| |")
    path.write_text("\n".join([*rows, ""]), encoding="utf-8")
    return left


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
