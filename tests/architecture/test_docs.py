"""Documentation that follows from the code, and the README, stay true."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from deepinfer.core import errors
from deepinfer.core.variables import VARIABLES

FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def blocks(path: Path, language: str) -> list[str]:
    found = []
    for indent, name, text in FENCE.findall(path.read_text(encoding="utf-8")):
        if name == language:
            found.append(re.sub(f"^{indent}", "", text, flags=re.MULTILINE))
    return found


@pytest.fixture(scope="module")
def build(repo_root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_build", repo_root / "docs" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_error_page_holds_every_error(build: ModuleType) -> None:
    headings = re.findall(r"^## (\w+)$", build.errors_page(), re.MULTILINE)
    assert sorted(headings) == sorted(errors.__all__)


def test_api_pages_begin_with_what_the_package_gives(build: ModuleType) -> None:
    page = build.api_page("deepinfer.engine")
    assert "[`StopChecker`][deepinfer.engine.stop.StopChecker]" in page
    headings = re.findall(r"^## (\S+)$", page, re.MULTILINE)
    assert headings[0] == "deepinfer.engine.engine"
    assert headings.index("deepinfer.engine.stop") < headings.index("deepinfer.engine.assemble")
    assert "[`errors`](../errors.md)" in build.api_page("deepinfer")


def test_environment_page_holds_every_variable(build: ModuleType) -> None:
    rows = re.findall(r"^\| `(\w+)` \|", build.environment_page(), re.MULTILINE)
    assert rows == [variable.name for variable in VARIABLES]


def test_variables_named_anywhere_are_in_the_table(repo_root: Path) -> None:
    known = {variable.name for variable in VARIABLES}
    paths = [repo_root / "build.sh", repo_root / "README.md", *(repo_root / "docs").rglob("*.md")]
    for folder in ("src", "examples", "benchmarks"):
        paths += (repo_root / folder).rglob("*.py")
    named = {
        name: str(path)
        for path in paths
        for name in re.findall(r"\bDEEPINFER_[A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8"))
    }
    assert {name: path for name, path in named.items() if name not in known} == {}


def test_every_package_has_a_reference_page_in_the_navigation(
    build: ModuleType, repo_root: Path
) -> None:
    listed = re.findall(r"reference/api/(\w+)\.md", (repo_root / "mkdocs.yml").read_text())
    assert sorted(listed) == sorted(
        name.partition(".")[2] or "deepinfer" for name in build.api_packages()
    )


def test_hosts_of_others_are_found(build: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="https://x.org">ok</a><img src="img/b.png">')
    assert build.third_party_hosts(tmp_path) == []
    (tmp_path / "b.html").write_text('<script async src="https://x.org/a.js"></script>')
    (tmp_path / "c.css").write_text("@import url('//x.org/a.css');")
    assert build.third_party_hosts(tmp_path) == [
        "b.html: https://x.org/a.js",
        "c.css: //x.org/a.css",
    ]


def test_pictures_are_up_to_date(repo_root: Path) -> None:
    spec = importlib.util.spec_from_file_location("picture", repo_root / "docs" / "picture.py")
    assert spec is not None
    assert spec.loader is not None
    picture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(picture)
    drawn = picture.draw_all()
    kernels = importlib.util.spec_from_file_location(
        "kernel_pages", repo_root / "docs" / "kernel_pages.py"
    )
    pages = importlib.util.module_from_spec(kernels)
    kernels.loader.exec_module(pages)
    drawn["roofline.svg"] = pages.roofline()
    folder = repo_root / "docs" / "assets"
    assert {path.name for path in folder.glob("*.svg")} == set(drawn)
    stale = [name for name, text in drawn.items() if (folder / name).read_text("utf-8") != text]
    assert stale == [], "run python docs/picture.py, and docs/kernel_pages.py --picture"


def test_what_runs_where_is_what_would_be_called(repo_root: Path) -> None:
    """Index scores have a kernel for Hopper alone; every operation has its row."""
    spec = importlib.util.spec_from_file_location(
        "kernel_pages", repo_root / "docs/kernel_pages.py"
    )
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", pages.support_page().split("\n## ")[0], re.M)
    cells = {name: row.split(" | ") for name, row in rows}
    registry = importlib.import_module("deepinfer.kernels.registry")
    assert set(cells) == {operation.name for operation in registry.operations()}
    for name in ("fp8_mqa_logits", "fp8_fp4_mqa_logits"):
        assert [cell == "torch" for cell in cells[name]] == [True, True, False, True, True]
    assert cells["gemm_nt"][2].startswith("**ran**")
    assert not any(cell == "torch" for cell in cells["cast_back"])


def test_times_of_kernels_have_lines(repo_root: Path) -> None:
    """Of the tables under "Speed"; `python docs/kernel_numbers.py` says which newer ones there are."""
    path = repo_root / "docs" / "kernel_numbers.py"
    spec = importlib.util.spec_from_file_location("kernel_numbers", path)
    numbers = importlib.util.module_from_spec(spec)
    sys.modules["kernel_numbers"] = numbers
    spec.loader.exec_module(numbers)
    missing, _ = numbers.report(numbers.lines())
    assert missing == []
    row = "## Speed\n\n| rows | ms |\n| --- | --- |\n| 8 | 0.12 / 3.4 |\n"
    found = list(numbers.times("x", row))
    assert [(t.label, t.figure) for t in found] == [("8", "0.12"), ("8", "3.4")]
    assert found[0].fits(0.1249)
    assert not found[0].fits(0.126)


def test_links_between_files_of_the_repository_lead_somewhere(repo_root: Path) -> None:
    broken = []
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", (repo_root / name).read_text()):
            if "://" not in target and not (repo_root / target).exists():
                broken.append(f"{name}: {target}")
    assert broken == []


def test_examples_in_docstrings_run(source_files: dict[str, Path]) -> None:
    with_examples = [name for name, path in source_files.items() if ">>> " in path.read_text()]
    failed = {}
    for name in with_examples:
        options = doctest.ELLIPSIS | doctest.REPORT_NDIFF
        result = doctest.testmod(importlib.import_module(name), optionflags=options)
        if result.failed:
            failed[name] = result.failed
        assert result.attempted
    assert failed == {}


def run_python(code: str, folder: Path, blocked: tuple[str, ...] = ()) -> None:
    prelude = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(name + " is blocked in this test", name=name)
sys.meta_path.insert(0, Blocked())
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", prelude + code],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def needs_nano(repo_root: Path) -> None:
    if not (repo_root / "src" / "deepinfer" / "assets" / "nano" / "config.json").is_file():
        pytest.skip("the embedded checkpoint is not in this checkout")


def test_readme_part_alone_runs_without_torch(repo_root: Path, tmp_path: Path) -> None:
    part_alone = blocks(repo_root / "README.md", "python")[0]
    run_python(part_alone, tmp_path, blocked=("torch", "triton"))
    expected = re.findall(r"print\(.*\)  # (.*)", part_alone)
    assert expected
    done = subprocess.run(
        [sys.executable, "-c", part_alone], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == expected


def test_readme_blocks_run(repo_root: Path, tmp_path: Path) -> None:
    needs_nano(repo_root)
    run_python("\n".join(blocks(repo_root / "README.md", "python")), tmp_path)


def test_numbers_of_the_readme_are_measured(build: ModuleType, repo_root: Path) -> None:
    text = (repo_root / "README.md").read_text()
    rows = re.findall(r"^\| \w+: .*\d \S+ \|$", text, re.MULTILINE)
    assert rows
    assert build.with_measured_values(text) == text, "run python docs/build.py --readme"
    other = text.replace(rows[0], re.sub(r"[\d.]+( \S+ \|)$", r"999\1", rows[0]))
    assert build.with_measured_values(other) == text
    with pytest.raises(ValueError, match="no line"):
        build.with_measured_values("| engine: never measured | 1 ms |\n")


def test_commands_of_the_readme_exist(repo_root: Path) -> None:
    script = (repo_root / "build.sh").read_text()
    for name in ("README.md", "CONTRIBUTING.md"):
        text = (repo_root / name).read_text()
        for action in re.findall(r"\./build\.sh (\w+)", text):
            assert re.search(rf"^{action}\)", script, re.MULTILINE), action
        for module in re.findall(r"python -m (deepinfer[\w.]*)", text):
            assert importlib.util.find_spec(module), module
