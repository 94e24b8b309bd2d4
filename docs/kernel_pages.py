"""Pages about the kernels that follow from compiling and measuring them.

    python docs/kernel_pages.py --record     compile every kernel for every chip (minutes) and keep what came out
    python docs/kernel_pages.py --picture    draw the roofline of the newest measured lines

`docs/build.py` writes the pages from what is kept: docs/assets/kernel_support.json and benchmarks/results/kernels.jsonl.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).resolve().parent))

import kernel_choices

ROOT = Path(__file__).resolve().parent.parent
SUPPORT = ROOT / "docs" / "assets" / "kernel_support.json"
PICTURE = ROOT / "docs" / "assets" / "roofline.svg"
LINES = ROOT / "benchmarks" / "results" / "kernels.jsonl"
CHIPS = {
    "80": "sm_80 (A100)",
    "89": "sm_89 (L20, L40, RTX 40)",
    "90": "sm_90a (H100, H200)",
    "100": "sm_100a (B200, GB200)",
    "120": "sm_120a (RTX 50, GB10)",
}
TENSOR_CORE = ("QGMMA", "HGMMA", "UTCQMMA", "UTCHMMA", "QMMA", "HMMA", "IMMA")


def record() -> None:
    """Compiles every case for every chip and keeps registers, stack, shared memory and instructions."""
    import triton

    from deepinfer.kernels.compile_cases import all_cases

    jobs = [(i, chip) for i, case in enumerate(all_cases()) for chip in case.chips]
    with ProcessPoolExecutor(2) as pool:
        rows = list(pool.map(_compiled, jobs, chunksize=8))
    data = {"triton": triton.__version__, "cases": rows}
    SUPPORT.write_text(json.dumps(data, indent=0) + "\n", encoding="utf-8")


def _compiled(job: tuple[int, int]) -> dict[str, Any]:
    from deepinfer.kernels.compile_cases import all_cases

    case = all_cases()[job[0]]
    row: dict[str, Any] = {"operation": case.operation, "entry": case.entry, "chip": job[1]}
    try:
        report = case.compile(job[1])
    except Exception as error:
        return row | {"faults": [f"{type(error).__name__}: {str(error)[:200]}"]}
    used = next((name for name in TENSOR_CORE if report.count(name)), "")
    return row | {
        "registers": report.registers,
        "stack": report.stack_bytes,
        "shared": report.shared_bytes,
        "tensor_core": used,
        "faults": case.faults(report),
    }


def support_page() -> str:
    """Markdown of the matrix: operations by chips."""
    data = json.loads(SUPPORT.read_text(encoding="utf-8"))
    rows = [row for row in data["cases"] if not row["faults"]]
    chosen, public, plain = kernel_choices.choices()
    ran = {part for line in measured() for part in public.get(line["op"], [line["op"]])}
    lines = [
        "# Which kernel runs where",
        "",
        "A cell says what serves a usual call on that chip, found by asking each implementation with a device of that compute",
        "capability in mind, as `explain` does. Kernels with the entries of their tables are compiled for every chip with no",
        "GPU at hand: they assemble, fit the chip's shared memory, spill nothing beyond what is stated, and have the tensor core",
        "instruction that they are meant to have. Only the H200 was there to *run* them: **ran** means checked against a",
        "reference and timed on one; *compiled* means just that, never run; *Triton, not compiled* that Triton takes the call",
        "and nobody has compiled it for that chip. Where a cell says torch, the call goes to the reference in torch, and asking",
        'for `backend="triton"` raises `UnsupportedHardware`, which names the fallback. Shapes or strides that a kernel does not',
        "take go to another one, or to torch: `explain` says so of one call. FP8 values on sm_80 are widened by hand.",
        "",
        "| operation | " + " | ".join(CHIPS.values()) + " |",
        "| --- |" + " --- |" * len(CHIPS),
    ]
    for operation in sorted(chosen):
        cells = []
        for chip in CHIPS:
            mine = [r for r in rows if r["operation"] == operation and str(r["chip"]) == chip]
            word = "**ran**" if chip == "90" and operation in ran else "compiled"
            if chosen[operation][chip] == "torch":
                cells.append("torch")
            else:
                cells.append(f"{word}, {_cores(mine)}" if mine else "Triton, not compiled")
        lines.append(f"| `{operation}` | " + " | ".join(cells) + " |")
    lines += [
        "",
        "## Which operations a function calls",
        "",
        "What an operation is, is written by its name where a function of another name calls it.",
        "",
        "| function | operations |",
        "| --- | --- |",
    ]
    lines += [
        f"| `{name}` | {', '.join(f'`{part}`' for part in parts)} |"
        for name, parts in sorted(public.items())
        if parts != [name]
    ]
    inner = sorted({row["operation"] for row in rows} - set(chosen))
    lines += [
        "",
        "Plain torch on every device, made of no operation: "
        + ", ".join(f"`{n}`" for n in plain)
        + ".",
        "",
        "Of the model's own steps, behind no public function: "
        + ", ".join(f"`{n}`" for n in inner)
        + ".",
        "",
        f"## Machine code, by the assembler of Triton {data['triton']}",
        "",
        "| operation | entry | chip | registers | stack, bytes | shared memory, KiB | tensor core |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| `{r['operation']}` | {r['entry']} | sm_{r['chip']} | {r['registers']} | {r['stack']} | "
        f"{r['shared'] / 1024:.0f} | {r['tensor_core'] or '-'} |"
        for r in sorted(rows, key=lambda r: (r["operation"], r["entry"], r["chip"]))
    ]
    return "\n".join([*lines, ""])


def _cores(rows: Sequence[Mapping[str, Any]]) -> str:
    found = [name for name in TENSOR_CORE if any(r["tensor_core"] == name for r in rows)]
    return found[0] if found else "no tensor core"


def measured() -> list[dict[str, Any]]:
    """The fastest variant of each operation and shape of the newest run that measured it."""
    if not LINES.is_file():
        return []
    newest: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for text in LINES.read_text(encoding="utf-8").splitlines():
        line = json.loads(text) if text.strip() else {}
        if "op" not in line or "shape" not in line:
            continue
        group = newest.setdefault((line["op"], line["shape"]), [])
        run = (line["date"], line["commit"])
        if group and run != (group[-1]["date"], group[-1]["commit"]):
            group.clear()
        group.append(line)
    best = []
    for group in newest.values():
        line = dict(min(group, key=lambda line: float(line["value"])))
        for other in group:
            for name, value in other.items():
                if name.endswith("_ms"):
                    line.setdefault(name, value)
        best.append(line)
    return sorted(best, key=lambda line: (line["op"], line["shape"]))


def table_page() -> str:
    """Markdown of the table of measured kernels."""
    lines = [
        "# What the kernels reach",
        "",
        "One NVIDIA H200, random data, medians over replays of recorded graphs with a cold L2 cache; the fastest entry of each",
        "shape. *Share* is the least possible time (bytes over the copy bandwidth, or operations over the rate of the matrix",
        "units, both measured in the same run) over the time. A peer's column is its time over ours, measured in the same",
        "run on data of the same shape; above 1 this kernel is the faster one. *Other run* compares with the best public",
        "kernel on the same card in another run, where it has no package.",
        "",
        "![Roofline of the measured kernels](../assets/roofline.svg)",
        "",
        "| operation | shape | entry | time, ms | TB/s | TFLOP/s | share | DeepGEMM | FlashInfer | torch | torch.compile | other run |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for line in measured():
        ms = float(line["value"])
        peers = [
            f"{line[f'{name}_ms'] / ms:.2f}" if f"{name}_ms" in line else ""
            for name in ("deepgemm", "flashinfer", "torch", "compiled")
        ]
        other = line.get("speed_to_peer_of_another_run", "")
        lines.append(
            f"| `{line['op']}` | {line['shape']} | {line['variant']} | {ms:.4f} | {line['TB/s']:.2f} | "
            f"{line['TFLOP/s']:.0f} | {100 * line['share_of_limit']:.0f} % of {line['limit']} | "
            + " | ".join(peers)
            + f" | {other} |"
        )
    return "\n".join([*lines, ""])


def roofline() -> str:
    """The picture: operations a byte against operations a second, with the limits of the run."""
    points = [line for line in measured() if line["TFLOP/s"] > 0 and line["TB/s"] > 0]
    limits = points[-1]["limits"] if points else {}
    copy, bf16, fp8 = (limits.get(k, 1.0) for k in ("copy_tb_s", "bf16_tflop_s", "fp8_tflop_s"))
    width, height, left, low = 860, 460, 70, 410

    def x(intensity: float) -> float:
        return left + 740 * min(1.0, max(0.0, math.log10(max(intensity, 1.0)) / 4))

    def y(rate: float) -> float:
        return low - 370 * min(1.0, max(0.0, math.log10(max(rate, 1.0)) / 3.4))

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        "<title>Roofline of the measured kernels on one H200</title>",
        "<style>text{font:12px system-ui,sans-serif;fill:#1f2430}path{fill:none;stroke:#5b6478;stroke-width:1.5}"
        "line{stroke:#d5dae6}.page{fill:#fff}circle{fill-opacity:.75}</style>",
        f'<rect class="page" width="{width}" height="{height}"/>',
    ]
    for power in range(5):
        at = x(10**power)
        lines += [f'<line x1="{at:.0f}" y1="40" x2="{at:.0f}" y2="{low}"/>', f'<text x="{at - 8:.0f}" y="{low + 18}">{10**power:,}</text>']  # fmt: skip
    for power in range(4):
        at = y(10**power)
        lines += [f'<line x1="{left}" y1="{at:.0f}" x2="810" y2="{at:.0f}"/>', f'<text x="24" y="{at + 4:.0f}">{10**power:,}</text>']  # fmt: skip
    for name, rate in (("bf16", bf16), ("FP8", fp8)):
        knee = rate / copy
        lines += [
            f'<path d="M{x(1):.0f} {y(copy):.0f} L{x(knee):.0f} {y(rate):.0f} L{x(1e4):.0f} {y(rate):.0f}"/>',
            f'<text x="{x(1e4) - 130:.0f}" y="{y(rate) - 5:.0f}">{name} {rate:,.0f} TFLOP/s</text>',
        ]
    lines.append(f'<text x="{x(3):.0f}" y="{y(copy * 3) - 16:.0f}">copy {copy:.2f} TB/s</text>')
    colours = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#444")
    families = sorted({line["op"] for line in points})
    for line in points:
        colour = colours[families.index(line["op"]) % len(colours)]
        intensity = line["TFLOP/s"] / line["TB/s"]
        label = escape(f"{line['op']} {line['shape']}: {line['TFLOP/s']:.0f} TFLOP/s")
        lines.append(
            f'<circle cx="{x(intensity):.1f}" cy="{y(line["TFLOP/s"]):.1f}" r="5" fill="{colour}"><title>{label}</title></circle>'
        )
    for i, op in enumerate(families[:16]):
        lines.append(
            f'<circle cx="{left + 16}" cy="{56 + 15 * i}" r="5" fill="{colours[i % len(colours)]}"/>'
        )
        lines.append(f'<text x="{left + 26}" y="{60 + 15 * i}">{escape(op)}</text>')
    lines += [
        f'<text x="330" y="{height - 8}">operations a byte</text>',
        '<text x="10" y="26">TFLOP/s</text>',
        "</svg>",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Records or draws."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--picture", action="store_true")
    arguments = parser.parse_args()
    if arguments.record:
        record()
    if arguments.picture:
        PICTURE.write_text(roofline(), encoding="utf-8")


if __name__ == "__main__":
    main()
