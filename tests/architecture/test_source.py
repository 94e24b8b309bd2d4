"""Shape of the source: size of files, docstrings, exports, and what may not occur in them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

MAX_LINES = 400
Function = ast.FunctionDef | ast.AsyncFunctionDef


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def is_public(name: str) -> bool:
    return not any(part.startswith("_") for part in name.removeprefix("deepinfer").split("."))


def public_definitions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef | Function) and not node.name.startswith("_"):
            yield node.name, node
            if isinstance(node, ast.ClassDef):
                for member in node.body:
                    if isinstance(member, Function) and not member.name.startswith("_"):
                        yield f"{node.name}.{member.name}", member


def parameters(function: Function) -> dict[str, str]:
    arguments = function.args
    listed = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    listed += [extra for extra in (arguments.vararg, arguments.kwarg) if extra]
    return {
        argument.arg: ast.unparse(argument.annotation) if argument.annotation else ""
        for argument in listed
        if argument.arg not in ("self", "cls") and not argument.arg.startswith("_")
    }


def args_section(docstring: str) -> dict[str, str] | None:
    match = re.search(r"^Args:\n((?:(?: {4}.*)?\n)*)", docstring + "\n", re.MULTILINE)
    if match is None:
        return None
    entries = re.split(r"^ {4}\*{0,2}(\w+)(?: \([^)]*\))?:", match.group(1), flags=re.MULTILINE)
    return dict(zip(entries[1::2], entries[2::2], strict=True))


def test_files_are_short(source_files: dict[str, Path]) -> None:
    lines = {name: len(path.read_text().splitlines()) for name, path in source_files.items()}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def test_public_definitions_are_documented(source_files: dict[str, Path]) -> None:
    missing = []
    for module, path in source_files.items():
        tree = parse(path)
        if not ast.get_docstring(tree):
            missing.append(module)
        if is_public(module):
            missing += [
                f"{module}.{name}"
                for name, node in public_definitions(tree)
                if not ast.get_docstring(node)  # type: ignore[arg-type]
            ]
    assert missing == []


def test_docstrings_agree_with_signatures(source_files: dict[str, Path]) -> None:
    wrong = []
    for module, path in source_files.items():
        if not is_public(module):
            continue
        for name, node in public_definitions(parse(path)):
            docstring = ast.get_docstring(node) if isinstance(node, Function) else None
            section = args_section(docstring) if docstring else None
            if section is not None and list(section) != list(parameters(node)):  # type: ignore[arg-type]
                wrong.append(f"{module}.{name}: documents {list(section)}")
    assert wrong == []


def test_documented_tensors_have_shapes(source_files: dict[str, Path]) -> None:
    wrong = []
    for module, path in source_files.items():
        if not is_public(module):
            continue
        for name, node in public_definitions(parse(path)):
            if not isinstance(node, Function):
                continue
            section = args_section(ast.get_docstring(node) or "") or {}
            annotated = parameters(node)
            wrong += [
                f"{module}.{name}({argument})"
                for argument, text in section.items()
                if re.match(r"([\w.]+\.)?(Tensor|ndarray|NDArray)\b", annotated.get(argument, ""))
                and not re.search(r"shape|scalar|\[", text)
            ]
    assert wrong == []


def test_public_modules_list_their_exports(source_files: dict[str, Path]) -> None:
    wrong = []
    for module, path in source_files.items():
        if not is_public(module) or path.name == "__main__.py":
            continue
        tree = parse(path)
        if path.name == "__init__.py":
            continue  # test_public_api looks at packages as they are at run time
        exports = next(
            (
                ast.literal_eval(node.value)
                for node in tree.body
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            ),
            None,
        )
        if exports is None:
            wrong.append(f"{module}: no literal __all__")
            continue
        defined = {name for name, _ in public_definitions(tree) if "." not in name}
        assigned = {
            name.id
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for name in ast.walk(node)
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        }
        imported = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        absent = set(exports) - defined - assigned - imported
        if absent:
            wrong.append(f"{module}: __all__ names {sorted(absent)}, which is not there")
    assert wrong == []


def test_no_module_state(source_files: dict[str, Path]) -> None:
    found = [
        f"{module}:{node.lineno}"
        for module, path in source_files.items()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Global)
    ]
    assert found == []


def test_no_prints_and_no_logging_set_up(source_files: dict[str, Path]) -> None:
    calls = {"logging.basicConfig", "warnings.simplefilter", "warnings.filterwarnings"}
    found = [
        f"{module}:{node.lineno} {ast.unparse(node.func)}"
        for module, path in source_files.items()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call)
        and (
            ast.unparse(node.func) in calls
            or (ast.unparse(node.func) == "print" and path.name not in ("__main__.py", "env.py"))
        )
    ]
    assert found == []


def test_errors_raised_in_the_source_are_checked_by_a_test(
    source_files: dict[str, Path], repo_root: Path
) -> None:
    from deepinfer.core import errors

    raised = set()
    for path in source_files.values():
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Raise) and node.exc is not None:
                raised |= set(re.findall(r"\w+", ast.unparse(node.exc))) & set(errors.__all__)
    tests = [p for p in (repo_root / "tests").rglob("test_*.py") if p.name != "test_errors.py"]
    expected = {
        name
        for path in tests
        for line in path.read_text().splitlines()
        if not line.startswith(("import ", "from "))
        for name in re.findall(r"\w+", line)
    }
    assert raised - expected == set()


def test_imported_packages_are_declared(source_files: dict[str, Path], repo_root: Path) -> None:
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]
    declared = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        declared += extra
    names = {re.match(r"[\w.-]+", item).group().replace("-", "_") for item in declared}  # type: ignore[union-attr]
    known = names | {"deepinfer"} | set(sys.stdlib_module_names)
    unknown = set()
    for module, path in source_files.items():
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Import):
                roots = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                roots = {(node.module or "").partition(".")[0]}
            else:
                continue
            unknown |= {f"{module}: {root}" for root in roots - known}
    assert unknown == set()


def test_tracked_files_name_no_place_of_one_machine(repo_root: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=repo_root, capture_output=True, text=True
    )
    if listed.returncode != 0:
        return  # an unpacked sdist
    pattern = re.compile(r"(?<![\w.])/(work|home|root|Users)/\w")
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        path = repo_root / name
        if not path.is_file() or path == Path(__file__):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if pattern.search(text):
            found.append(name)
    assert found == []
