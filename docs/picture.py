"""Draws the pictures of the documentation, docs/assets/*.svg: `python docs/picture.py`.

Each picture is made of rectangles, lines and text on a grid of pixels. The plan of layers is read from the published
configuration, so it cannot disagree with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = ROOT / "tests" / "data" / "deepseek_v41_flash" / "config.json"

# Each layer: a name, or several names side by side, with what they do.
LAYERS = (
    (("adapters", "transformers, vLLM, SGLang, servers, exporters"),),
    (("disaggregation", "vision, prefill and decode as separate stages"),),
    (("engine", "wires the parts: add_request, step, stream"),),
    (("models", "DeepSeek-V4.1, checkpoints, the embedded nano"),),
    (
        ("parallel", "ranks, dispatch"),
        ("sampling", "tokens from logits"),
        ("speculative", "drafts, lengths"),
    ),
    (
        ("balancers", "who runs what"),
        ("cache", "blocks, prefixes"),
        ("grammar", "allowed tokens"),
        ("kernels", "formats, GPU code"),
        ("scheduling", "the next step"),
    ),
    (("core", "types, plans, protocols, errors, config: no torch, no NumPy"),),
)
WIDTH, ROW, GAP, MARGIN = 860, 54, 10, 10

# Each picture brings its own background, so it can be read whatever the page around it looks like.
STYLE = """
text { font-family: system-ui, sans-serif; fill: #1f2430 }
.name { font-size: 15px; font-weight: 600 }
.what { font-size: 12px; fill: #555e70 }
.page { fill: #ffffff; stroke: none }
rect, circle { fill: #f3f5fa; stroke: #8a94ad }
.blue { fill: #0072b2 } .sky { fill: #bfe1f5 } .orange { fill: #f3c566 } .green { fill: #8fd6bf }
.none { fill: none }
.light { fill: #ffffff; font-size: 12px }
path { fill: none; stroke: #5b6478; stroke-width: 1.5 }
marker path { fill: #5b6478; stroke: none }
@media (prefers-color-scheme: dark) {
  .page { fill: #1b1f27 }
  text { fill: #e8ebf2 } .what { fill: #a9b2c5 } .light { fill: #ffffff }
  rect, circle { fill: #232834; stroke: #65708a }
  .blue { fill: #0072b2 } .sky { fill: #1d4f6b } .orange { fill: #8a6414 } .green { fill: #14624c }
  .none { fill: none }
  path { stroke: #a9b2c5 } marker path { fill: #a9b2c5 }
}
"""
ARROW = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto"><path d="M0 0L8 4L0 8z"/></marker></defs>'
)


class Picture:
    """A picture under construction; coordinates are pixels from the top left corner."""

    def __init__(self, title: str, height: float) -> None:
        self.title = title
        self.height = height
        self.parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, look: str = "", extra: str = ""
    ) -> None:
        """A rounded rectangle."""
        kind = f' class="{look}"' if look else ""
        self.parts.append(
            f'<rect{kind} x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" '
            f'rx="{min(6, height / 4, width / 4):.0f}"{extra}/>'
        )

    def text(
        self, x: float, y: float, text: str, look: str = "what", anchor: str = "middle"
    ) -> None:
        """A line of text around, or from, a point."""
        self.parts.append(
            f'<text class="{look}" x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def arrow(self, *points: tuple[float, float], tip: bool = True) -> None:
        """A line through points."""
        steps = "L".join(f"{x:.0f} {y:.0f}" for x, y in points)
        end = ' marker-end="url(#tip)"' if tip else ""
        self.parts.append(f'<path d="M{steps}"{end}/>')

    def svg(self) -> str:
        """The picture as SVG text."""
        head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height:.0f}" role="img">',
            f"<title>{escape(self.title)}</title>",
            f"<style>{STYLE}</style>",
            ARROW,
            f'<rect class="page" width="{WIDTH}" height="{self.height:.0f}" rx="8"/>',
        ]
        return "\n".join([*head, *self.parts, "</svg>", ""])


def structure(built: set[str]) -> Picture:
    """The layers of the package; parts that do not exist yet have a dashed border."""
    height = 2 * MARGIN + len(LAYERS) * ROW + (len(LAYERS) - 1) * GAP
    picture = Picture(
        "The parts of deepinfer in layers; each imports only from the layers below it", height
    )
    for row, layer in enumerate(LAYERS):
        top = MARGIN + row * (ROW + GAP)
        width = (WIDTH - 2 * MARGIN - GAP * (len(layer) - 1)) / len(layer)
        for column, (name, what) in enumerate(layer):
            left = MARGIN + column * (width + GAP)
            dashes = "" if name in built else ' stroke-dasharray="5 4"'
            picture.box(left, top, width, ROW, extra=dashes)
            picture.text(left + width / 2, top + 23, name, "name")
            picture.text(left + width / 2, top + 41, what)
    return picture


def layer_plan(built: set[str]) -> Picture:
    """Which layer owns, chooses and reads what, from the published configuration."""
    config = json.loads(PUBLISHED.read_text(encoding="utf-8"))["text_config"]
    layers, ratios = config["num_hidden_layers"], config["compress_ratios"]
    sources, choosers = config["kv_source_layer_ids"], config["index_source_layer_ids"]
    picture = Picture(
        "The layers of DeepSeek-V4.1-Flash and what each owns, chooses and reads", 330
    )
    left, cell = 112, 17

    def at(layer: float) -> float:
        return left + layer * cell

    def row(y: float, name: str, what: str) -> None:
        picture.text(left - 10, y + 12, name, "name", "end")
        picture.text(left - 10, y + 27, what, "what", "end")

    for first, last, name in (
        (0, sources[-1], "causal encoder"),
        (sources[-1], layers, "decoder"),
        (layers, len(ratios), "draft"),
    ):
        picture.text((at(first) + at(last)) / 2, 24, name, "name")
        picture.arrow((at(first) + 2, 32), (at(last) - 2, 32), tip=False)
    row(44, "layer", "")
    for layer in range(0, layers, 5):
        picture.text(at(layer + 0.5), 57, str(layer))
    row(72, "window", "every layer")
    for layer in range(len(ratios)):
        picture.box(at(layer) + 1, 72, cell - 2, 30, "sky")
    row(120, "pool", "rows made of")
    for source, end in zip(sources, [*sources[1:], layers], strict=True):
        picture.box(at(source) + 1, 120, (end - source) * cell - 2, 30)
        picture.box(at(source) + 1, 120, cell - 2, 30, "blue")
        label = "pairs" if ratios[source] == 2 else "single tokens"
        picture.text((at(source + 1) + at(end)) / 2, 139, label)
    row(168, "rows", "chosen by")
    for chooser, end in zip(choosers, [*choosers[1:], layers], strict=True):
        picture.box(at(chooser) + 1, 168, (end - chooser) * cell - 2, 30)
        picture.box(at(chooser) + 1, 168, cell - 2, 30, "blue" if chooser in sources else "green")
        picture.text((at(chooser + 1) + at(end)) / 2, 187, "reuse")
    row(216, "Engram", "n-grams")
    for layer in config["engram_layer_ids"]:
        picture.box(at(layer) + 1, 216, cell - 2, 30, "orange")
    row(264, "features", "for the draft")
    targets = config["dspark_target_layer_ids"]
    for layer in targets:
        picture.box(at(layer) + 1, 264, cell - 2, 30, "orange")
    picture.arrow((at(targets[-1] + 1), 279), (at(layers + 1.5), 279), (at(layers + 1.5), 106))
    picture.text(at(0), 318, "blue: owns the pool and its index keys, and chooses", anchor="start")
    picture.text(at(20), 318, "green: chooses again, among the keys of the owner", anchor="start")
    return picture


def attention(built: set[str]) -> Picture:
    """What one query attends to."""
    picture = Picture(
        "One query attends jointly to its window, to chosen pool rows and to a sink", 300
    )
    cell = 20
    picture.text(20, 30, "pool: a row for one or two tokens each", "name", "start")
    chosen = {2, 5, 6, 11, 17}
    for i in range(20):
        picture.box(20 + i * cell, 42, cell - 3, 30, "blue" if i in chosen else "")
    picture.text(
        20,
        92,
        "over the whole text; the indexer scores all rows and keeps the best (blue)",
        anchor="start",
    )
    picture.text(470, 30, "window: the last tokens", "name", "start")
    for i in range(14):
        picture.box(470 + i * cell, 42, cell - 3, 30, "sky")
    picture.text(470, 92, "the newest is the query's own", anchor="start")
    picture.text(800, 30, "sink", "name")
    picture.box(782, 42, 36, 30, "orange")
    picture.text(800, 92, "no value")
    for x in (220, 610, 800):
        picture.arrow((x, 102), (x, 134), tip=False)
    picture.arrow((220, 134), (800, 134), tip=False)
    picture.arrow((430, 134), (430, 158))
    picture.box(265, 160, 330, 40)
    picture.text(430, 185, "one softmax over all of them", "name")
    picture.text(253, 185, "query of a head", anchor="end")
    picture.arrow((430, 200), (430, 224))
    picture.box(265, 226, 330, 40)
    picture.text(430, 251, "sum of rows: key and value are one", "name")
    picture.text(430, 288, "undo the rotation at the query's position, then project back")
    return picture


def streams(built: set[str]) -> Picture:
    """How one sublayer reads, writes and moves the residual streams."""
    picture = Picture("A sublayer reads, writes and mixes four residual streams", 300)
    ys = [60, 100, 140, 180]
    for i, y in enumerate(ys):
        picture.text(40, y + 5, f"X{i}", "name")
        picture.arrow((60, y), (540, y), tip=False)
        picture.arrow((670, y), (810, y))
        picture.text(832, y + 5, f"X'{i}", "name")
    picture.box(540, 40, 130, 160, "green")
    picture.text(605, 116, "mix", "name")
    picture.text(605, 134, "doubly stochastic")
    for y in ys:
        picture.arrow((110, y), (110, 240), tip=False)
    picture.arrow((110, 240), (168, 240))
    picture.text(20, 268, "sum, with weights pre of", anchor="start")
    picture.text(20, 284, "the sublayer before", anchor="start")
    picture.box(170, 220, 80, 40)
    picture.text(210, 245, "norm", "name")
    picture.arrow((250, 240), (288, 240))
    picture.box(290, 220, 190, 40, "sky")
    picture.text(385, 245, "attention or experts", "name")
    picture.arrow((480, 240), (740, 240), (740, 186))
    for y in ys:
        picture.parts.append(f'<circle class="orange" cx="740" cy="{y}" r="6"/>')
    picture.arrow((740, 186), (740, 60), tip=False)
    picture.text(840, 268, "added to each stream, with weights post", anchor="end")
    picture.text(
        330, 30, "pre (for the next sublayer), post and mix are computed from the streams", "what"
    )
    return picture


def draft(built: set[str]) -> Picture:
    """How the draft proposes a block."""
    picture = Picture(
        "DSpark: context from the target's features, a block in one pass, then a chain", 330
    )
    picture.text(20, 30, "features of verified tokens", "name", "start")
    for i in range(8):
        picture.box(20 + i * 26, 42, 22, 30, "sky")
    picture.text(20, 92, "streams that enter the last layers", anchor="start")
    picture.text(270, 30, "block", "name", "start")
    for i, name in enumerate(("anchor", "noise", "noise", "noise", "noise")):
        picture.box(270 + i * 66, 42, 62, 30, "orange" if i == 0 else "")
        picture.text(301 + i * 66, 62, name)
    picture.text(270, 92, "newest token, and places behind it", anchor="start")
    picture.arrow((124, 100), (124, 128))
    picture.arrow((435, 100), (435, 128))
    picture.box(20, 130, 580, 44)
    picture.text(310, 150, "draft stages", "name")
    picture.text(310, 166, "each query sees the window of context rows and the whole block")
    for i in range(5):
        x = 301 + i * 66
        picture.arrow((x, 174), (x, 198))
        picture.box(x - 31, 200, 62, 30)
        picture.text(x, 220, "logits")
        picture.arrow((x, 230), (x, 254))
        picture.box(x - 31, 256, 62, 30, "green")
        picture.text(x, 276, f"draft {i + 1}")
        if i:
            picture.arrow((x - 35, 271), (x - 31, 271), tip=False)
    picture.text(250, 220, "base logits", anchor="end")
    picture.text(250, 268, "chained: plus the Markov", anchor="end")
    picture.text(250, 284, "bias of the token before", anchor="end")
    picture.arrow((601, 271), (640, 271), (640, 214), (666, 214))
    picture.box(668, 190, 182, 48, "blue")
    picture.text(759, 211, "target verifies", "light")
    picture.text(759, 227, "anchor and drafts at once", "light")
    picture.text(759, 262, "kept up to the first that")
    picture.text(759, 278, "the target would not choose")
    picture.text(
        301,
        312,
        "confidence of a draft: from the same hidden row and the token before",
        anchor="start",
    )
    return picture


def step(built: set[str]) -> Picture:
    """What passes between the parts in one step."""
    picture = Picture("One step: plan, forward, sample, apply, and what passes between them", 300)
    picture.text(60, 68, "prompt", "name")
    picture.text(60, 86, "text, ids, messages")
    picture.arrow((100, 64), (148, 64))
    for x, width, name, what in (
        (150, 170, "Scheduler.plan", "who runs what next"),
        (400, 190, "ModelRunner.forward", "one ragged batch"),
        (670, 170, "Sampler", "a token a row"),
    ):
        picture.box(x, 40, width, 54, "sky")
        picture.text(x + width / 2, 63, name, "name")
        picture.text(x + width / 2, 81, what)
    picture.arrow((320, 64), (398, 64))
    picture.text(359, 54, "StepPlan")
    picture.arrow((590, 64), (668, 64))
    picture.text(629, 54, "logits")
    picture.arrow((755, 94), (755, 247), (322, 247))
    picture.text(520, 238, "StepResult: tokens, matched by request, slot and epoch")
    picture.box(150, 220, 170, 54, "sky")
    picture.text(235, 243, "Scheduler.apply", "name")
    picture.text(235, 261, "settles, ends, frees")
    picture.arrow((150, 247), (104, 247))
    picture.text(60, 243, "deltas", "name")
    picture.text(60, 261, "text, tokens")
    picture.box(150, 130, 170, 54)
    picture.text(235, 153, "CacheManager", "name")
    picture.text(235, 171, "gives out slots")
    picture.arrow((235, 130), (235, 96))
    picture.arrow((235, 184), (235, 218), tip=False)
    picture.box(400, 130, 120, 54)
    picture.text(460, 153, "Drafter", "name")
    picture.text(460, 171, "proposes tokens")
    picture.arrow((460, 130), (460, 96))
    picture.box(550, 130, 160, 54)
    picture.text(630, 153, "Grammar", "name")
    picture.text(630, 171, "masks, made meanwhile")
    picture.arrow((700, 130), (720, 96))
    return picture


def life(built: set[str]) -> Picture:
    """The way of a request through an engine, what the cache does meanwhile, and the order of calls at both depths."""
    picture = Picture(
        "The life of a request: its way through the parts, the cache beside it, and steps at depth 0 and 1",
        530,
    )
    width, gap = 82, 12
    stations = (
        ("submit", "checks, ids", ""),
        ("waiting", "in order", ""),
        ("plan", "pure", "sky"),
        ("launch", "commits", "sky"),
        ("forward", "enqueued", "sky"),
        ("sample", "masks first", "sky"),
        ("collect", "waits", "sky"),
        ("apply", "settles", "sky"),
        ("deltas", "text, ids", ""),
    )
    lefts = [13 + i * (width + gap) for i in range(len(stations))]
    for i, (left, (name, what, look)) in enumerate(zip(lefts, stations, strict=True)):
        picture.box(left, 50, width, 48, look)
        picture.text(left + width / 2, 71, name, "name")
        picture.text(left + width / 2, 88, what)
        if i:
            picture.arrow((left - gap, 74), (left - 1, 74))
    middle = [left + width / 2 for left in lefts]
    picture.arrow((middle[7], 50), (middle[7], 26), (middle[2] + 16, 26), (middle[2] + 16, 48))
    picture.text((middle[2] + middle[7]) / 2 + 8, 20, "next step, while the request is unfinished")
    picture.arrow((middle[2] - 16, 50), (middle[2] - 16, 26), (middle[1], 26), (middle[1], 48))
    picture.text(middle[1] - 6, 20, "preempted", "what", "end")
    calls = (
        (2, "lookup", "finds a prefix"),
        (3, "allocate", "slot, blocks"),
        (4, "copies", "to device"),
        (6, "step_done", "gives back"),
        (7, "settle", "publishes"),
        (8, "release", "quarantine"),
    )
    for station, name, what in calls:
        x = middle[station]
        picture.arrow((x, 98), (x, 132))
        picture.box(lefts[station] - 4, 134, width + 8, 44, "green")
        picture.text(x, 153, name, "name")
        picture.text(x, 170, what)
        picture.arrow((x, 178), (x, 198), tip=False)
    picture.box(lefts[2], 198, lefts[8] + width - lefts[2], 36)
    picture.text(
        (lefts[2] + lefts[8] + width) / 2, 221, "cache: blocks, prefix index, host memory", "name"
    )
    _timeline(
        picture,
        262,
        "async_depth 0: a step is applied before the next is planned",
        (
            ("plan k", 62),
            ("forward k", 70),
            ("sample k", 66),
            ("", 46),
            ("collect k", 66),
            ("apply k", 60),
            ("plan k+1", 66),
            ("forward k+1", 82),
            ("sample k+1", 76),
        ),
        (
            (100, 150, "forward k, sample k"),
            (496, 150, "forward k+1"),
        ),
    )
    _timeline(
        picture,
        402,
        "async_depth 1: step k+1 is planned and launched while step k runs",
        (
            ("plan k+1", 66),
            ("forward", 62),
            ("", 40),
            ("collect, apply k", 110),
            ("sample k+1", 80),
            ("plan k+2", 66),
            ("forward", 62),
            ("", 30),
            ("collect, apply k+1", 130),
        ),
        (
            (0, 140, "forward k, sample k"),
            (142, 250, "forward k+1, sample k+1"),
            (394, 262, "forward k+2"),
        ),
    )
    return picture


def _timeline(
    picture: Picture,
    top: float,
    title: str,
    host: tuple[tuple[str, float], ...],
    device: tuple[tuple[float, float, str], ...],
) -> None:
    """Two lanes over time: calls of the host one after the other, and what the device runs."""
    left = 100
    picture.text(13, top + 14, title, "name", "start")
    picture.text(88, top + 47, "host", "what", "end")
    picture.text(88, top + 89, "device", "what", "end")
    at = left
    for name, width in host:
        if name:
            picture.box(at, top + 28, width, 30, "sky")
            picture.text(at + width / 2, top + 47, name)
        at += width + 2
    for begin, width, name in device:
        picture.box(left + begin, top + 70, width, 30, "orange")
        picture.text(left + begin + width / 2, top + 89, name)


def grammar(built: set[str]) -> Picture:
    """From the text of a grammar, and from a tokenizer, to the mask of one output."""
    picture = Picture(
        "Front ends give rules over bytes, rules an automaton; with the trie of a vocabulary it gives rows, which matchers fill in",
        250,
    )
    for row, name in enumerate(("regular expression", "JSON Schema", "EBNF", "text with tags")):
        top = 14 + row * 36
        picture.box(MARGIN, top, 132, 28, "light")
        picture.text(MARGIN + 66, top + 18, name)
        picture.arrow((142, top + 14), (156, top + 14), (156, 82), (170, 82))
    boxes = (
        (172, 54, 136, "Rules", "languages of bytes"),
        (338, 54, 136, "Automaton", "knows no tokens"),
        (338, 174, 136, "TokenVocab", "a trie of byte strings"),
        (504, 110, 160, "CompiledGrammar", "one row a state"),
        (694, 20, 156, "GrammarMatcher", "one output"),
        (694, 110, 156, "GrammarMatcher", "another output"),
    )
    for left, top, width, name, what in boxes:
        picture.box(left, top, width, 56, "sky" if name == "CompiledGrammar" else "")
        picture.text(left + width / 2, top + 24, name, "name")
        picture.text(left + width / 2, top + 44, what)
    picture.arrow((308, 82), (336, 82))
    picture.arrow((474, 82), (488, 82), (488, 130), (502, 130))
    picture.arrow((474, 202), (488, 202), (488, 146), (502, 146))
    picture.arrow((664, 130), (678, 130), (678, 48), (692, 48))
    picture.arrow((664, 138), (692, 138))
    picture.box(694, 200, 156, 34, "green")
    picture.text(772, 222, "a row of the bitmask")
    picture.arrow((772, 166), (772, 198))
    return picture


def mask(built: set[str]) -> Picture:
    """The walk of a trie from a state that takes digits, a comma, or the end of an array."""
    picture = Picture(
        "Tokens as paths of a trie: paths along which the automaton lives are allowed, others are cut at their first wrong byte",
        330,
    )
    places = {
        "": (60, 165),
        "1": (210, 66),
        "1,": (360, 24),
        "12": (360, 66),
        "1a": (360, 108),
        ",": (210, 171),
        ', "': (360, 150),
        ",,": (360, 192),
        "a": (210, 265),
        "an": (360, 240),
        "and": (510, 240),
        "at": (360, 290),
    }
    allowed = {"", "1", "1,", "12", ",", ', "'}
    hidden = {"an", "and", "at"}
    for token, (x, y) in places.items():
        if token:
            parent = next(begin for begin in (token[:-1], token[:-2]) if begin in places)
            picture.arrow((places[parent][0] + 44, places[parent][1]), (x - 46, y), tip=False)
    for token, (x, y) in places.items():
        look = "green" if token in allowed else "none" if token in hidden else "orange"
        picture.box(x - 44, y - 17, 88, 34, look)
        picture.text(x, y + 5, token or "state", "what" if token else "name")
    legend = (
        ("green", "the automaton lives: if a token ends here, its bit is 1"),
        ("orange", "the automaton dies: nothing below is looked at"),
        ("none", "never visited"),
    )
    for row, (look, text) in enumerate(legend):
        picture.box(470, 50 + row * 34, 26, 22, look)
        picture.text(506, 66 + row * 34, text, anchor="start")
    return picture


PICTURES: dict[str, Callable[[set[str]], Picture]] = {
    "structure": structure,
    "layer_plan": layer_plan,
    "attention": attention,
    "streams": streams,
    "draft": draft,
    "step": step,
    "life": life,
    "grammar": grammar,
    "mask": mask,
}


def draw_all() -> dict[str, str]:
    """Every picture as SVG text, by file name."""
    built = {path.parent.name for path in (ROOT / "src" / "deepinfer").glob("*/__init__.py")}
    return {f"{name}.svg": make(built).svg() for name, make in PICTURES.items()}


def main() -> None:
    """Writes the files."""
    for name, text in draw_all().items():
        (ROOT / "docs" / "assets" / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
