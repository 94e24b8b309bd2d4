"""Draws docs/assets/structure.svg, the picture of the layers: `python docs/picture.py`."""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

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
        ("cache", "slots, blocks"),
        ("grammar", "allowed tokens"),
        ("kernels", "formats, GPU code"),
        ("scheduling", "the next step"),
    ),
    (("core", "types, plans, protocols, errors, config: no torch, no NumPy"),),
)
WIDTH, ROW, GAP, MARGIN = 860, 54, 10, 10

STYLE = """
text { font-family: system-ui, sans-serif; fill: #1f2430 }
.name { font-size: 15px; font-weight: 600 }
.what { font-size: 12px; fill: #555e70 }
rect { fill: #f3f5fa; stroke: #8a94ad }
@media (prefers-color-scheme: dark) {
  text { fill: #e8ebf2 } .what { fill: #a9b2c5 } rect { fill: #232834; stroke: #65708a }
}
"""


def draw(built: set[str]) -> str:
    """The picture as SVG text; parts that do not exist yet are drawn with a dashed line.

    Args:
        built: Names of the parts that exist.
    """
    height = 2 * MARGIN + len(LAYERS) * ROW + (len(LAYERS) - 1) * GAP
    title = "The parts of deepinfer in layers; each imports only from the layers below it"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{title}</title>",
        f"<style>{STYLE}</style>",
    ]
    for row, layer in enumerate(LAYERS):
        top = MARGIN + row * (ROW + GAP)
        width = (WIDTH - 2 * MARGIN - GAP * (len(layer) - 1)) / len(layer)
        for column, (name, what) in enumerate(layer):
            left = MARGIN + column * (width + GAP)
            dashes = "" if name in built else ' stroke-dasharray="5 4"'
            middle = left + width / 2
            lines += [
                f'<rect x="{left:.0f}" y="{top}" width="{width:.0f}" height="{ROW}" rx="6"{dashes}/>',
                f'<text class="name" x="{middle:.0f}" y="{top + 23}" text-anchor="middle">{name}</text>',
                f'<text class="what" x="{middle:.0f}" y="{top + 41}" text-anchor="middle">{escape(what)}</text>',
            ]
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    """Writes the file."""
    root = Path(__file__).resolve().parent.parent
    built = {path.parent.name for path in (root / "src" / "deepinfer").glob("*/__init__.py")}
    target = root / "docs" / "assets" / "structure.svg"
    target.write_text(draw(built), encoding="utf-8")


if __name__ == "__main__":
    main()
