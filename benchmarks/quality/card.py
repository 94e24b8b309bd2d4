"""The model card: tables from the recorded lines and the training report, filled into a template."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deepinfer.models.deepseek_v41 import DeepseekV41Config
from deepinfer.models.deepseek_v41.weights import logical_weights

from .recall import CUE, DISTANCES, SPAN
from .results import content_hash, read_lines

TEMPLATE = Path(__file__).with_name("card_template.md")
BLOCK = re.compile(r"(<!-- table: ([\w ]+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)
NOT_MEASURED = "Not measured yet for these weights.\n"

_PLACES = ("command", "data", "out", "resume_trunk")

Line = dict[str, Any]
Lines = Mapping[tuple[str, str], Line]


def fill(text: str, tables: Mapping[str, str]) -> str:
    """A text with every block between `<!-- table: NAME -->` and `<!-- end of table -->` written anew.

    Raises:
        KeyError: A block names a table that there is not.
    """
    return BLOCK.sub(lambda found: f"{found[1]}{tables[found[2]]}{found[4]}", text)


def write(folder: Path, results: Path) -> Path:
    """Writes the card beside the weights: the card that is there, or the template, with its tables filled."""
    path = folder / "README.md"
    source = path if path.is_file() and BLOCK.search(path.read_text("utf-8")) else TEMPLATE
    path.write_text(fill(source.read_text("utf-8"), tables(folder, results)), "utf-8")
    return path


def keep_report(source: Path, folder: Path) -> None:
    """Copies the training's report and data card beside the weights, without the paths of the machine."""
    for name in ("data_card.json", "report.json"):
        path = source / name
        if path.is_file():
            content = _without_paths(json.loads(path.read_text("utf-8")))
            (folder / name).write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def _without_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_paths(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_paths(inner) for inner in value]
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def tables(folder: Path, results: Path) -> dict[str, str]:
    """Every table about a checkpoint, as Markdown by name.

    Args:
        folder: The checkpoint.
        results: The recorded lines.

    Returns:
        Tables; those without figures say that they were not measured.
    """
    checkpoint = content_hash(folder)
    lines = read_lines(results, checkpoint)
    out = {"facts": _facts(folder, checkpoint), "training": _training(folder)}
    for name, make in _TABLES.items():
        out[name] = make(lines) or NOT_MEASURED
    return out


# ---- Markdown -------------------------------------------------------------------------------


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; nothing without rows."""
    if not rows:
        return ""
    parts = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in parts)


def number(value: float | None, digits: int = 3) -> str:
    """A figure with so many decimals; a dash for none."""
    return "–" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A share in percent, rounded towards neither end: 100 % and 0 % are said only when exact."""
    if value is None:
        return "–"
    if 0.0 < value < 1.0:
        value = min(0.999, max(0.001, value))
    return f"{100 * value:.1f} %"


def share(line: Line) -> str:
    """A rate with its counts and its interval."""
    low, high = percent(line["low"]), percent(line["high"])
    return f"{percent(line['value'])} ({line['count']} of {line['of']}; {low} to {high})"


def _present(lines: Lines, part: str) -> dict[str, Line]:
    return {case: line for (name, case), line in lines.items() if name == part}


# ---- tables ---------------------------------------------------------------------------------


def _facts(folder: Path, checkpoint: str) -> str:
    config = DeepseekV41Config.from_pretrained(folder)
    parameters = {True: 0, False: 0}
    for name, weight in logical_weights(config).items():
        parameters[name.startswith("mtp.")] += math.prod(weight.shape)
    files = sorted(folder.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in files)
    rows = [
        ["parameters", f"{parameters[False] / 1e6:.1f} M, and {parameters[True] / 1e6:.1f} M in the draft"],
        ["weights", f"{size / 1e6:.1f} MB in {len(files)} file{'s' if len(files) > 1 else ''}"],
        ["layers, hidden size", f"{config.num_hidden_layers}, {config.hidden_size}"],
        ["heads, head size", f"{config.num_attention_heads}, {config.head_dim}"],
        ["experts", f"{config.n_routed_experts}, {config.num_experts_per_tok} used by a token, and a shared one"],
        ["window, pool rows used", f"{config.sliding_window}, {config.index_topk}"],
        ["vocabulary", f"{config.vocab_size} byte-level BPE tokens"],
        ["longest sequence", f"{config.max_position_embeddings} tokens"],
        ["draft", f"{config.num_nextn_predict_layers} stages, {config.dspark_block_size} tokens a block"],
        ["content hash", f"`{checkpoint}`"],
    ]  # fmt: skip
    return table(["what", "value"], rows)


def _training(folder: Path) -> str:
    rows: list[list[str]] = []
    card_path, report_path = folder / "data_card.json", folder / "report.json"
    if card_path.is_file():
        card = json.loads(card_path.read_text("utf-8"))
        rows.append(["text", ", ".join(card["sources"]) + ", and generated documents"])
        for name, size in card["bytes"].items():
            tokens = card["tokens"].get(name, 0)
            rows.append(
                [f"training text, {name}", f"{size / 1e6:.1f} MB, {tokens / 1e6:.2f} M tokens"]
            )
        for name, names in card["held_out"].items():
            rows.append(
                [
                    f"held out, {name}",
                    f"{len(names)} whole files, {card['tokens'].get(f'held_out_{name}', 0)} tokens",
                ]
            )
    if report_path.is_file():
        rows += _training_run(json.loads(report_path.read_text("utf-8")))
    return table(["what", "value"], rows) or "No training report is kept beside these weights.\n"


def _training_run(report: dict[str, Any]) -> list[list[str]]:
    versions, options = report.get("versions", {}), report.get("options", {})
    rows = [["trained on", ", ".join(f"{name} {value}" for name, value in versions.items())]]
    for name, phase in report.get("phases", {}).items():
        rows.append([f"phase: {name}", _words(phase)])
    for title, key in (("model", "step"), ("draft", "draft_step")):
        lines = [line for line in report.get("log", ()) if key in line]
        if lines:
            rows.append([f"last line of the {title}'s log", _words(lines[-1])])
    told = {
        name: value for name, value in options.items() if name not in _PLACES and value != "None"
    }
    return [*rows, ["options", _words(told)]]


def _words(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())


def _bits(lines: Lines) -> str:
    rows = []
    names = {
        "full": "rounding of inference, windows of 2,048",
        "full, files of little overlap": "the same, files with under 2 % of their long lines in the training text",
        "xz -9e": "`xz -9e`",
        "full, few files": "rounding of inference, windows of 2,048, few files",
        "full, few files, overlapping windows": "the same, overlapping windows",
        "cache, few files": "the same, windows of 2,048, rounding of caches only",
        "none, few files": "the same, no rounding",
        "xz -9e, few files": "the same, `xz -9e`",
    }
    for domain in ("code", "docs"):
        found = _present(lines, f"bits per byte, {domain}")
        for case, title in names.items():
            if case in found:
                line = found[case]
                rows.append(
                    [
                        domain,
                        title,
                        str(line["files"]),
                        f"{line['bytes']:,}",
                        f"**{number(line['value'])}**" if case == "full" else number(line["value"]),
                    ]
                )
    return table(["text", "how", "files", "bytes", "bits per byte"], rows)


def _generated(lines: Lines) -> str:
    found = _present(lines, "bits per byte, generated")
    rows = [
        [case, str(line["documents"]), f"{line['bytes']:,}", number(line["value"])]
        for case, line in found.items()
    ]
    return table(["generated text", "documents", "bytes", "bits per byte"], rows)


def _overlap(lines: Lines) -> str:
    line = lines.get(("overlap with training text", "long lines of held-out code"))
    if line is None:
        return ""
    return (
        f"Of the {line['of']:,} lines of 24 characters or more in held-out code, {line['count']:,} "
        f"({percent(line['value'])}) also occur in the text compared with ({line['compared_with']}); "
        f"{line['files_of_little_overlap']} files have under 2 % of such lines.\n"
    )


def _recall(lines: Lines) -> str:
    tokens, spans = _present(lines, "recall, tokens"), _present(lines, "recall, whole spans")
    rows = [
        [f"{distance:,}", share(tokens[str(distance)]), share(spans[str(distance)])]
        for distance in DISTANCES
        if str(distance) in tokens and str(distance) in spans
    ]
    head = [
        "distance in tokens",
        f"right tokens of the {SPAN - CUE} behind the cue",
        "whole spans, running free",
    ]
    return table(head, rows)


_DRAFT_DOMAINS = {
    "code": "code",
    "chat": "chat",
    "json": "JSON documents",
    "functions": "functions",
}


def _drafts(lines: Lines) -> str:
    rows = []
    for domain, title in _DRAFT_DOMAINS.items():
        found = _present(lines, f"draft, {domain}")
        if "tokens a step" not in found:
            continue
        steps = found["tokens a step"]
        cells = [title, f"**{number(steps['value'], 2)}**", f"{steps['steps']:,}"]
        for kind in ("conditional", "cumulative"):
            line = found.get(f"accepted by position, {kind}")
            cells.append(" ".join(number(v, 2) for v in line["value"]) if line else "–")
        rows.append(cells)
    text = table(
        [
            "text",
            "tokens a step",
            "steps",
            "accepted given those before, by position",
            "accepted with all before",
        ],
        rows,
    )
    for end, how in (
        ("", "with the rounding of inference"),
        (", rounding none", "without rounding"),
    ):
        same = lines.get(("draft", f"outputs equal to decoding without drafts{end}"))
        if same is None:
            continue
        text += (
            f"\nOutputs equal to decoding without drafts, {how}: {share(same)}; "
            f"{same['tokens_before_a_difference']:,} of {same['tokens']:,} tokens come before any difference."
        )
        gaps = same["gap_of_best_two_at_a_difference"]
        text += (
            f" Where outputs part, the best two tokens differ by at most {max(gaps):.3f} nats."
            if gaps
            else ""
        )
        text += "\n"
    return text


def _confidence(lines: Lines) -> str:
    rows = []
    for domain, title in _DRAFT_DOMAINS.items():
        found = _present(lines, f"draft, {domain}")
        figures = [
            found.get(f"confidence by position, {name}")
            for name in ("calibration error", "AUROC", "Brier score")
        ]
        if figures[0] is not None:
            rows.append(
                [
                    title,
                    *(
                        " ".join(number(v, 2) for v in line["value"]) if line else "–"
                        for line in figures
                    ),
                ]
            )
    return table(["text", "calibration error by position", "AUROC", "Brier score"], rows)


def _answers(lines: Lines) -> str:
    rows = []
    chat = _present(lines, "chat")
    if "well-formed" in chat:
        rows.append(["chat, all prompts", share(chat["well-formed"]), ""])
    kinds = [case.removesuffix(": well-formed") for case in chat if case.endswith(": well-formed")]
    for kind in kinds:
        right = chat.get(f"{kind}: right")
        rows.append(
            [f"chat, {kind}", share(chat[f"{kind}: well-formed"]), share(right) if right else ""]
        )
    for part, case, title in (
        ("json", "document: right", "JSON document cut at 30 %, completed to valid JSON"),
        (
            "functions",
            "held-out function: right",
            "held-out function from signature and docstring, parses as Python",
        ),
    ):
        if (part, case) in lines:
            rows.append([title, "", share(lines[part, case])])
    return table(["prompts", "well-formed", "right"], rows)


def _router(lines: Lines) -> str:
    line = lines.get(("router load", "max over mean by layer, held-out code"))
    if line is None:
        return ""
    head = ["layer", *(str(i) for i in range(len(line["value"])))]
    rows = [["busiest expert over mean", *(number(v, 2) for v in line["value"])]]
    rows.append(["least busy expert over mean", *(number(v, 2) for v in line["least_used_share"])])
    return table(head, rows)


def _measured(lines: Lines) -> str:
    if not lines:
        return ""
    kinds = sorted(
        {
            (
                line["date"],
                line["commit"],
                line["device"],
                line["dtype"],
                line["versions"]["python"],
                line["versions"]["torch"],
            )
            for line in lines.values()
        }
    )
    return table(
        ["date", "commit", "device", "dtype", "Python", "torch"], [list(kind) for kind in kinds]
    )


_TABLES: dict[str, Callable[[Lines], str]] = {
    "bits": _bits,
    "generated": _generated,
    "overlap": _overlap,
    "recall": _recall,
    "drafts": _drafts,
    "confidence": _confidence,
    "answers": _answers,
    "router": _router,
    "measured": _measured,
}
