"""Builds the documentation site.

Pages that follow from the code are written to Markdown first (docs/reference/api, errors.md, environment.md,
measurements.md, json_schema.md, and docs/gallery from notebooks/), so the site itself needs nothing but Markdown and docstrings:

    python docs/build.py --strict           the whole site into site/
    python docs/build.py --pages-only       the generated pages only, without the gallery
    python docs/build.py --notebooks-only   run every notebook, and write the gallery
    python docs/build.py --reuse-gallery    the whole site, with the gallery that is there
    python docs/build.py --readme           write the newest measured values into the README's table
    python docs/build.py --serve            rebuild and show while editing
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import kernel_pages

from deepinfer.core import errors
from deepinfer.core.variables import VARIABLES
from deepinfer.grammar import compile_json_schema

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
GALLERY = DOCS / "gallery"
SOURCE = ROOT / "src" / "deepinfer"
# Functions in Triton's language and their launchers: what is behind the public functions of `deepinfer.kernels`.
KERNEL_CODE = SOURCE / "kernels" / "triton"
NOTEBOOK_TIMEOUT_S = 180


def api_packages() -> list[str]:
    """Names of the packages that get a page, `deepinfer` first."""
    inner = sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))
    return ["deepinfer", *(f"deepinfer.{name}" for name in inner)]


def api_modules(package: str) -> list[str]:
    """Public modules of a package: those that its own names come from, then the others, each by name.

    A module that is called like the package comes first; of `deepinfer` itself there is only the module beside it.
    """
    if package == "deepinfer":
        return ["deepinfer.env"]
    folder = SOURCE / package.partition(".")[2]
    found = []
    for path in sorted(folder.rglob("*.py")):
        if KERNEL_CODE in path.parents:
            continue
        parts = ("deepinfer", *path.relative_to(SOURCE).with_suffix("").parts)
        if not any(part.startswith("_") and part != "__init__" for part in parts):
            name = ".".join(parts).removesuffix(".__init__")
            found.append(name)
    sources = set(exports(package).values())
    last = package.rpartition(".")[2]
    return sorted(
        (name for name in found if name != package),
        key=lambda name: (name not in sources, name.rpartition(".")[2] != last, name),
    )


def exports(package: str) -> dict[str, str]:
    """The names that `from package import ...` gives, each with the module that it comes from."""
    module = importlib.import_module(package)
    lazy = getattr(module, "_EXPORTS", {})
    return {
        name: lazy.get(name) or getattr(_defined(getattr(module, name)), "__module__", package)
        for name in module.__all__
        if not name.startswith("_")
    }


def _defined(value: Any) -> Any:
    """A function without what is wrapped around it."""
    return inspect.unwrap(value) if callable(value) else value


def exported_names(package: str) -> str:
    """A sentence that lists the names that a package gives; classes and functions are links."""
    listed = []
    for name, source in exports(package).items():
        value = getattr(importlib.import_module(package), name)
        if source.endswith(":"):
            listed.append(f"[`{name}`](../{name}.md)")
        elif inspect.isclass(value) or inspect.isfunction(value):
            listed.append(f"[`{name}`][{source}.{name}]")
        else:
            listed.append(f"`{name}`")
    return f"`from {package} import` gives {', '.join(listed)}."


def api_page(package: str) -> str:
    """Markdown of one package's reference page."""
    lines = [f"# {package}", "", f"::: {package}", "    options:", "      members: false", ""]
    lines += [exported_names(package), ""]
    for module in api_modules(package):
        lines += [f"## {module}", "", f"::: {module}", ""]
    return "\n".join(lines)


def errors_page() -> str:
    """Markdown of the page about errors: the tree, then one entry a class."""
    tree = re.search(r"```\n(.*?)```", errors.__doc__ or "", re.DOTALL)
    lines = [
        "# Errors",
        "",
        "Everything that deepinfer raises on purpose, and how it is caught:",
        "",
    ]
    drawn = re.sub(r" {2,}\w.*", "", tree.group(1)) if tree else ""
    lines += ["```text", drawn.rstrip(), "```", ""]
    lines += ["Attributes can be read in handlers; messages are for people and may change.", ""]
    order = re.findall(r"\w+", tree.group(1) if tree else "")
    for name in sorted(errors.__all__, key=order.index):
        error = getattr(errors, name)
        bases = ", ".join(f"`{base.__name__}`" for base in error.__bases__)
        doc = inspect.getdoc(error) or ""
        summary, _, attributes = doc.partition("\n\nAttributes:\n")
        lines += [f"## {name}", "", f"{summary} Bases: {bases}.", ""]
        for entry in re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", attributes, re.MULTILINE):
            lines.append(f"- `{entry[0]}`: {' '.join(entry[1].split())}")
        lines.append("")
    return "\n".join(lines)


def environment_page() -> str:
    """Markdown of the page about environment variables."""
    lines = [
        "# Environment variables",
        "",
        "None is needed, and an argument always beats a variable. `python -m deepinfer env` shows the values",
        "in force and names every `DEEPINFER_*` variable that is malformed or unknown.",
        "",
        "| name | type | default | what it does |",
        "| --- | --- | --- | --- |",
    ]
    for variable in VARIABLES:
        kind = ", ".join(f"`{choice}`" for choice in variable.choices) or variable.type
        lines.append(f"| `{variable.name}` | {kind} | {variable.default} | {variable.doc} |")
    lines += [
        "",
        "`HF_HOME` and `HF_HUB_OFFLINE` are honoured when a checkpoint comes from a hub.",
        "",
    ]
    return "\n".join(lines)


def measurements_page() -> str:
    """Markdown of the page about measurements: every committed line of benchmarks/results."""
    lines = [
        "# Measurements",
        "",
        "Every line that is committed in `benchmarks/results`, as the scripts in `benchmarks/` printed it. The",
        "documentation and the README take their numbers from here and from nowhere else.",
        "",
    ]
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.jsonl")):
        folder = ROOT / "benchmarks" / path.stem
        script = f"{path.stem}/run.py" if folder.is_dir() else f"{path.stem}.py"
        lines += [f"## {path.stem}", "", f"`python benchmarks/{script}`", ""]
        lines += [
            "| case | value | machine | versions | date, commit |",
            "| --- | --- | --- | --- | --- |",
        ]
        for text in path.read_text(encoding="utf-8").splitlines():
            if text.strip():
                lines.append(measurement_row(json.loads(text)))
        lines.append("")
    return "\n".join(lines)


def nano_page() -> str:
    """Markdown of the page about the embedded checkpoint: its model card, which is generated itself."""
    card = SOURCE / "assets" / "nano" / "README.md"
    if not card.is_file():
        return "# nano\n\nThe embedded checkpoint is not in this checkout.\n"
    return re.sub(r"\A---\n.*?^---\n+", "", card.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


def json_schema_page() -> str:
    """Markdown of the page about coverage of JSON Schema: the counts that a test holds the grammar to."""
    folder = ROOT / "tests" / "grammar" / "json_schema"
    path = folder / "ratchet.json"
    lines = [
        "# JSON Schema coverage",
        "",
        "Verdicts of [`compile_json_schema`](api/grammar.md#deepinfergrammarjson_schema) on the official",
        "[JSON-Schema-Test-Suite](https://github.com/json-schema-org/JSON-Schema-Test-Suite). A test fails when a number",
        "of right verdicts falls, and when a single verdict is wrong.",
        "",
        "- **right**: valid values are accepted, invalid ones refused.",
        "- **refused**: the schema is refused by name when it is compiled (`UnsupportedKeyword`, `GrammarTooLarge`).",
        "- **noted**: the verdict differs where the report says that a keyword is approximated or an annotation.",
        "",
        "Refused are `uniqueItems` over infinitely many values, back-references in patterns, divisors of `multipleOf` with",
        "more than 10,000 remainders, the formats `idn-hostname` and `regex` where formats are asserted,",
        "`$recursiveAnchor`, and references to documents that `resources` does not give. Approximated are host names with",
        "encoded labels (`xn--`), of which fewer are accepted.",
        "",
    ]
    if not path.is_file():
        return "\n".join([*lines, "The counts are not in this checkout.", ""])
    ratchet = json.loads(path.read_text(encoding="utf-8"))
    kinds = ("passed", "refused", "noted")
    keywords = keyword_statuses(folder / "test_keywords.py")
    if keywords:
        lines += ["| keyword | cases of the project's own tests | in them |", "| --- | --- | --- |"]
        for keyword, statuses in keywords.items():
            words = ", ".join(sorted(statuses))
            lines.append(f"| `{keyword}` | {sum(statuses.values())} | {words} |")
        lines.append("")
    lines += ["| draft | right | refused | noted | wrong |", "| --- | --- | --- | --- | --- |"]
    for draft, files in ratchet.items():
        totals = [sum(counts.get(kind, 0) for counts in files.values()) for kind in kinds]
        lines.append(f"| {draft} | {' | '.join(f'{total:,}' for total in totals)} | 0 |")
    for draft, files in ratchet.items():
        lines += ["", f"## {draft}", "", "| file of the suite | right | refused | noted |"]
        lines.append("| --- | --- | --- | --- |")
        for name, counts in files.items():
            numbers = " | ".join(str(counts.get(kind, "")) for kind in kinds)
            lines.append(f"| {name.removesuffix('.json')} | {numbers} |")
    return "\n".join([*lines, ""])


def keyword_statuses(path: Path) -> dict[str, dict[str, int]]:
    """How often a keyword is enforced, approximated or ignored in the schemas of a test's table."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError:  # without pytest
        return {}
    found: dict[str, dict[str, int]] = {}
    for _, schema, *_ in module.CASES:
        try:
            report = compile_json_schema(schema).report
        except errors.EmptyLanguage:
            continue
        for entry in report:
            counts = found.setdefault(entry.keyword, {})
            counts[entry.status] = counts.get(entry.status, 0) + 1
    return dict(sorted(found.items()))


def measured_lines() -> list[dict[str, Any]]:
    """Every line of benchmarks/results, file by file."""
    paths = sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))
    texts = [text for path in paths for text in path.read_text(encoding="utf-8").splitlines()]
    return [json.loads(text) for text in texts if text.strip()]


def with_measured_values(text: str) -> str:
    """A text whose rows `| part: case (key value, ...) | number unit |` hold the newest measured number.

    Raises:
        ValueError: A row has no measured line.
    """
    lines = measured_lines()

    def fill(row: re.Match[str]) -> str:
        part, case, options, unit = row.group("part", "case", "options", "unit")
        wanted = dict(option.rsplit(" ", 1) for option in options.split(", ")) if options else {}
        found = [
            line["value"]
            for line in lines
            if (line.get("part"), line.get("case"), line.get("unit")) == (part, case, unit)
            and all(str(line.get(key)) == value for key, value in wanted.items())
        ]
        if not found:
            raise ValueError(f"no line of benchmarks/results fits the row {row.group()!r}")
        return f"{row.group('head')}{float(f'{found[-1]:.3g}'):,g} {unit} |"

    return re.sub(
        r"^(?P<head>\| (?P<part>\w+): (?P<case>.+?)(?: \((?P<options>.+)\))? \| )[\d.,?]+ (?P<unit>\S+) \|$",
        fill,
        text,
        flags=re.MULTILINE,
    )


def measurement_row(line: dict[str, Any]) -> str:
    """One row of the page about measurements."""
    known = ("part", "case", "value", "unit", "device", "versions", "date", "commit")
    rest = [f"{key} {plain(value)}" for key, value in line.items() if key not in known]
    case = "; ".join(filter(None, [str(line.get("case", "")), ", ".join(rest)]))
    value = f"{plain(line.get('value', ''))} {line.get('unit', '')}"
    versions = plain(line.get("versions", ""))
    when = ", ".join(str(line[key]) for key in ("date", "commit") if key in line)
    return f"| {case} | {value} | {line.get('device', '')} | {versions} | {when} |"


def plain(value: Any) -> str:
    """A value of a measurement in words."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {plain(inner)}" for key, inner in value.items())
    return f"{value:.5g}" if isinstance(value, float) else str(value).replace("|", "/")


def write_pages() -> None:
    """Writes every page that follows from the code."""
    folder = DOCS / "reference" / "api"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for package in api_packages():
        name = package.partition(".")[2] or "deepinfer"
        (folder / f"{name}.md").write_text(api_page(package), encoding="utf-8")
    for name, page in (
        ("errors", errors_page),
        ("environment", environment_page),
        ("measurements", measurements_page),
        ("nano", nano_page),
        ("json_schema", json_schema_page),
        ("kernel_support", kernel_pages.support_page),
        ("kernel_speed", kernel_pages.table_page),
    ):
        (DOCS / "reference" / f"{name}.md").write_text(page(), encoding="utf-8")


def run_notebooks() -> None:
    """Runs every notebook in its own folder and writes it with its outputs to docs/gallery."""
    shutil.rmtree(GALLERY, ignore_errors=True)
    GALLERY.mkdir(parents=True)
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        begin = time.perf_counter()
        write_gallery_page(path)
        print(f"{path.relative_to(ROOT)}: {time.perf_counter() - begin:.1f} s", flush=True)


def write_gallery_page(path: Path) -> None:
    """Runs one notebook; its page, its pictures and the notebook itself land in docs/gallery."""
    import nbformat
    from nbconvert import MarkdownExporter
    from nbconvert.preprocessors import ExecutePreprocessor

    notebook = nbformat.read(path, as_version=4)
    runner = ExecutePreprocessor(
        timeout=NOTEBOOK_TIMEOUT_S, kernel_name="python3", extra_arguments=["--log-level=ERROR"]
    )
    runner.preprocess(notebook, {"metadata": {"path": str(path.parent)}})
    names = {"unique_key": path.stem, "output_files_dir": f"{path.stem}_files"}
    body, resources = MarkdownExporter().from_notebook_node(notebook, resources=names)
    for name, content in resources["outputs"].items():
        (GALLERY / name).parent.mkdir(exist_ok=True)
        (GALLERY / name).write_bytes(content)
    alts = iter(picture_texts(notebook))
    body = re.sub(r"!\[png\]", lambda _: f"![{next(alts)}]", body)
    link = f"[Download the notebook]({path.name}) and run it: it takes less than a minute on a CPU."
    title, _, rest = body.partition("\n")
    (GALLERY / f"{path.stem}.md").write_text(f"{title}\n\n{link}\n{rest}", encoding="utf-8")
    shutil.copyfile(path, GALLERY / path.name)


def picture_texts(notebook: Any) -> list[str]:
    """What each picture shows, in order: the text that its cell's metadata gives under "alt"."""
    return [
        cell.metadata.get("alt", "A plot")
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]


def write_plain_text(site: Path) -> None:
    """Puts each page's Markdown beside it, and llms.txt, which lists them, into a built site."""
    listed = re.findall(
        r"^ +- (?:(.+): )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE
    )
    lines = [
        "# deepinfer",
        "",
        "> The inference stack of DeepSeek-V4.1-Flash as composable Python modules.",
        "",
    ]
    for title, name in listed:
        if name.startswith("reference/api/"):  # made of docstrings when the site is built
            lines.append(f"- [{title}]({name.removesuffix('.md')}/)")
            continue
        text = (DOCS / name).read_text(encoding="utf-8")
        text = re.sub(r'--8<-- "(.+)"', lambda found: (ROOT / found[1]).read_text("utf-8"), text)
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text, encoding="utf-8")
        lines.append(f"- [{title or 'Reference'}]({name})")
    (site / "llms.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")


def third_party_hosts(site: Path) -> list[str]:
    """Pages of a built site that would load something from another host when viewed."""
    loads = re.compile(
        r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=[\"']?((?:https?:)?//[^\"' >]+)"
    )
    imports = re.compile(r"(?:@import|url\()\s*[\"']?((?:https?:)?//[^\"')]+)")
    found = []
    for path in sorted(site.rglob("*")):
        if path.suffix == ".html":
            pattern = loads
        elif path.suffix == ".css":
            pattern = imports
        else:
            continue
        text = path.read_text(encoding="utf-8")
        found += [f"{path.relative_to(site)}: {host}" for host in pattern.findall(text)]
    return found


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Build the documentation.")
    parser.add_argument("--strict", action="store_true", help="warnings are errors")
    parser.add_argument("--pages-only", action="store_true", help="write the generated pages only")
    parser.add_argument("--notebooks-only", action="store_true", help="run the notebooks only")
    parser.add_argument("--readme", action="store_true", help="refresh the README's numbers only")
    parser.add_argument("--reuse-gallery", action="store_true", help="run no notebook")
    parser.add_argument("--serve", action="store_true", help="show the site while editing")
    options = parser.parse_args()
    if options.notebooks_only:
        run_notebooks()
        return 0
    if options.readme:
        readme = ROOT / "README.md"
        readme.write_text(with_measured_values(readme.read_text("utf-8")), encoding="utf-8")
        return 0
    write_pages()
    if options.pages_only:
        return 0
    if not (options.reuse_gallery or (options.serve and GALLERY.is_dir())):
        run_notebooks()
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "serve" if options.serve else "build"]
    command += ["--strict"] if options.strict else []
    status = subprocess.run(command, cwd=ROOT, env=environment).returncode
    if status or options.serve:
        return status
    write_plain_text(ROOT / "site")
    hosts = third_party_hosts(ROOT / "site")
    if hosts:
        print("pages that load from other hosts:", *hosts, sep="\n  ")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
