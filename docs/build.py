"""Builds the documentation site.

Pages that follow from the code are written to Markdown first (docs/reference/api, errors.md, environment.md, and
docs/gallery from notebooks/), so the site itself needs nothing but Markdown and docstrings:

    python docs/build.py --strict           the whole site into site/
    python docs/build.py --pages-only       the generated pages only
    python docs/build.py --notebooks-only   run every notebook, and write the gallery
    python docs/build.py --serve            rebuild and show while editing
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from deepinfer.core import errors
from deepinfer.core.variables import VARIABLES

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "deepinfer"
NOTEBOOK_TIMEOUT_S = 180


def api_packages() -> list[str]:
    """Names of the packages that get a page, `deepinfer` first."""
    inner = sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))
    return ["deepinfer", *(f"deepinfer.{name}" for name in inner)]


def api_modules(package: str) -> list[str]:
    """Public modules of a package, in order of name; of `deepinfer` itself only the module beside it."""
    if package == "deepinfer":
        return ["deepinfer.env"]
    folder = SOURCE / package.partition(".")[2]
    found = []
    for path in sorted(folder.rglob("*.py")):
        parts = ("deepinfer", *path.relative_to(SOURCE).with_suffix("").parts)
        if not any(part.startswith("_") and part != "__init__" for part in parts):
            name = ".".join(parts).removesuffix(".__init__")
            found.append(name)
    return [name for name in found if name != package]


def api_page(package: str) -> str:
    """Markdown of one package's reference page."""
    lines = [f"# {package}", "", f"::: {package}", "    options:", "      members: false", ""]
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


def write_pages() -> None:
    """Writes every page that follows from the code."""
    folder = DOCS / "reference" / "api"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for package in api_packages():
        name = package.partition(".")[2] or "deepinfer"
        (folder / f"{name}.md").write_text(api_page(package), encoding="utf-8")
    (DOCS / "reference" / "errors.md").write_text(errors_page(), encoding="utf-8")
    (DOCS / "reference" / "environment.md").write_text(environment_page(), encoding="utf-8")


def run_notebooks() -> None:
    """Runs every notebook in its own folder and writes it with its outputs to docs/gallery."""
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    if notebooks:
        command = [sys.executable, "-m", "nbconvert", "--to", "markdown", "--execute"]
        command += [f"--ExecutePreprocessor.timeout={NOTEBOOK_TIMEOUT_S}"]
        command += ["--output-dir", str(DOCS / "gallery"), *map(str, notebooks)]
        subprocess.run(command, check=True, cwd=ROOT)


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
    parser.add_argument("--serve", action="store_true", help="show the site while editing")
    options = parser.parse_args()
    if options.notebooks_only:
        run_notebooks()
        return 0
    write_pages()
    if options.pages_only:
        return 0
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "serve" if options.serve else "build"]
    command += ["--strict"] if options.strict else []
    status = subprocess.run(command, cwd=ROOT, env=environment).returncode
    if status:
        return status
    hosts = [] if options.serve else third_party_hosts(ROOT / "site")
    if hosts:
        print("pages that load from other hosts:", *hosts, sep="\n  ")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
