"""Report of the environment: `python -m deepinfer env [--json]`, or `python -m deepinfer.env`.

Uses the standard library only, imports none of the packages it reports on, and never fails: a fact that cannot
be found is reported as the reason why.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

from deepinfer.core.variables import VARIABLES, variable_problems

__all__ = ["collect", "format_report", "main", "write_out"]

_OTHER_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "OMP_NUM_THREADS",
    "TRITON_CACHE_DIR",
    "TRITON_INTERPRET",
)
_PROBE_TIMEOUT_S = 5.0


def collect(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Gathers the report.

    Args:
        environ: The environment to report on; the process's own when None.

    Returns:
        Sections "deepinfer", "python", "platform", "packages", "accelerators", "variables" and "problems", of
        plain values ready for JSON.
    """
    environ = os.environ if environ is None else environ
    return {
        "deepinfer": _guard(_deepinfer),
        "python": _guard(_python),
        "platform": _guard(_platform),
        "packages": _guard(_packages),
        "accelerators": _guard(_accelerators),
        "variables": _guard(lambda: _variables(environ)),
        "problems": _guard(lambda: variable_problems(environ)),
    }


def format_report(report: Mapping[str, Any]) -> str:
    """Turns a report into aligned text.

    Args:
        report: What `collect` returned.

    Returns:
        Several lines without a final newline.
    """
    lines: list[str] = []
    for section, content in report.items():
        if isinstance(content, Mapping):
            lines.append(section)
            width = max((len(str(key)) for key in content), default=0)
            lines.extend(f"  {key!s:<{width}}  {_text(value)}" for key, value in content.items())
        elif section == "problems" and content and not isinstance(content, str):
            lines += [section, *(f"  {problem}" for problem in content)]
        else:
            lines.append(f"{section}: {_text(content)}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report.

    Args:
        argv: Command-line arguments; the process's own when None.

    Returns:
        Exit status, as `write_out` says.
    """
    parser = argparse.ArgumentParser(
        prog="python -m deepinfer env", description="Report the environment."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    report = collect()
    return write_out(json.dumps(report, indent=2) if options.json else format_report(report))


def write_out(text: str) -> int:
    """Writes text to standard output, whatever that can take.

    Characters that its encoding lacks are written as escapes. A reader that went away, as `head` does, is no error.

    Args:
        text: The text, without a final newline.

    Returns:
        Exit status: 0, or 1 when the text could not be written.
    """
    out = sys.stdout
    if out is None:  # it was closed before Python started
        return 0
    encoding = getattr(out, "encoding", None) or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=out, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # for the flush at exit
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
        print(f"the report cannot be written: {error}", file=sys.stderr)
        return 1
    return 0


def _text(value: object) -> str:
    if isinstance(value, list):
        return "none" if not value else "; ".join(_text(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    return "-" if value is None else str(value)


def _guard(probe: Callable[[], Any]) -> Any:
    try:
        return probe()
    except Exception as error:  # the report must come out whatever the machine is like
        return f"not found: {type(error).__name__}: {error}"


def _deepinfer() -> dict[str, Any]:
    from deepinfer import __version__

    return {"version": __version__, "folder": os.path.dirname(os.path.abspath(__file__))}


def _python() -> dict[str, Any]:
    return {
        "version": platform.python_version(),
        "implementation": platform.python_implementation(),
        "executable": sys.executable,
    }


def _platform() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "machine": platform.machine(),
        "cpu": _guard(_cpu_name),
        "cores": _guard(_cores),
        "memory_bytes": _guard(lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
    }


def _cores() -> int | None:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count()


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.lower().startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _packages() -> dict[str, str]:
    names = ["torch", "triton", "torch-npu", *_requirements()]
    found = {}
    for name in dict.fromkeys(names):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _requirements() -> list[str]:
    try:
        requirements = metadata.requires("deepinfer-sdk") or []
    except metadata.PackageNotFoundError:
        return ["numpy", "safetensors", "huggingface-hub", "tokenizers"]
    names = (re.match(r"[A-Za-z0-9._-]+", requirement) for requirement in requirements)
    return [match.group() for match in names if match]


def _accelerators() -> dict[str, Any]:
    return {"nvidia": _guard(_nvidia), "ascend": _guard(_ascend)}


def _run(*command: str) -> str:
    return subprocess.run(
        command,
        capture_output=True,
        check=True,
        encoding="utf-8",
        errors="replace",
        stdin=subprocess.DEVNULL,
        timeout=_PROBE_TIMEOUT_S,
    ).stdout


def _nvidia() -> list[dict[str, str]] | str:
    if shutil.which("nvidia-smi") is None:
        return "not found: no nvidia-smi"
    fields = ("name", "memory.total", "compute_cap", "driver_version")
    out = _run("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    rows = [[cell.strip() for cell in line.split(",")] for line in out.splitlines() if line.strip()]
    return [dict(zip(fields, row, strict=False)) for row in rows] or "not found: no GPU listed"


def _ascend() -> list[str] | str:
    if shutil.which("npu-smi") is None:
        return "not found: no npu-smi"
    return [line.strip() for line in _run("npu-smi", "info", "-l").splitlines() if line.strip()]


def _variables(environ: Mapping[str, str]) -> dict[str, Any]:
    names = (*(variable.name for variable in VARIABLES), *_OTHER_VARIABLES)
    return {name: environ.get(name) for name in names}


if __name__ == "__main__":
    sys.exit(main())
