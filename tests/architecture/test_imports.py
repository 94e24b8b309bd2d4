"""What an import costs and does: each package alone, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PREAMBLE = """
import json, logging, os, sys, time, traceback

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked in this test", name=name)

def handlers():
    loggers = [logging.getLogger()]
    loggers += [x for x in logging.Logger.manager.loggerDict.values() if isinstance(x, logging.Logger)]
    return {
        (x.name, type(h).__name__)
        for x in loggers
        for h in x.handlers
        if not isinstance(h, logging.NullHandler)
    }

sys.meta_path.insert(0, Blocked())
"""

LIGHT = """
before = handlers()
begin = time.process_time()
__import__(NAME)
seconds = time.process_time() - begin
print(json.dumps([seconds, sorted(handlers() - before), sorted(sys.modules)]))
"""

EVERY_MODULE = """
before = handlers()
needing = []
for name in NAMES:
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in BLOCKED:
            raise
        needing.append(name)
print(json.dumps([needing, sorted(handlers() - before)]))
"""

# Light packages that hold modules for which torch may load on first use.
PARTLY_HEAVY = {"deepinfer.cache", "deepinfer.speculative"}

# torch takes seconds to load, so one process loads it and forks once a package.
HEAVY = """
import importlib
import torch

def probe(name):
    found = {"error": None}
    before = handlers()
    try:
        importlib.import_module(name)
    except BaseException:
        found["error"] = traceback.format_exc()
    found["handlers"] = sorted(handlers() - before)
    found["cuda_initialised"] = torch.cuda.is_initialized()
    found["roots"] = sorted({m.partition(".")[0] for m in sys.modules})
    return found

results = {}
for name in NAMES:
    read, write = os.pipe()
    if os.fork() == 0:
        sink = os.memfd_create("output")
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        found = probe(name)
        sys.stdout.flush()
        sys.stderr.flush()
        os.lseek(sink, 0, 0)
        found["output"] = os.read(sink, 100_000).decode(errors="replace")
        with os.fdopen(write, "w") as file:
            json.dump(found, file)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        results[name] = json.load(file)
    os.wait()
print(json.dumps(results))
"""

# Processor time of the importing process, so that neighbours on the machine do not count.
LIGHT_LIMIT_S = 0.3


def run(code: str, **names: Any) -> Any:
    given = "".join(f"{name} = {value!r}\n" for name, value in {"BLOCKED": (), **names}.items())
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", given + PREAMBLE + code],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)  # fails on any other output


def roots(modules: list[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


def test_light_package_is_fast_quiet_and_without_torch(light_package: str) -> None:
    probes = [run(LIGHT, NAME=light_package) for _ in range(3)]
    assert min(seconds for seconds, _, _ in probes) < LIGHT_LIMIT_S
    _, new_handlers, modules = probes[0]
    assert new_handlers == []
    assert not roots(modules) & {"torch", "triton", "transformers", "matplotlib", "safetensors"}


def test_light_package_works_where_torch_is_absent(
    light_package: str, source_files: dict[str, Path]
) -> None:
    inner = [name for name in source_files if name.startswith(f"{light_package}.")]
    names = [light_package] if light_package == "deepinfer" else [light_package, *inner]
    blocked = ("torch", "triton", "transformers", "matplotlib")
    needing, new_handlers = run(EVERY_MODULE, NAMES=names, BLOCKED=blocked)
    assert new_handlers == []
    if light_package not in PARTLY_HEAVY:
        assert needing == []


@pytest.mark.parametrize("name", ["deepinfer", "deepinfer.core"])
def test_core_needs_the_standard_library_only(name: str) -> None:
    bare = roots(run("print(json.dumps(sorted(sys.modules)))"))  # an environment's .pth hooks
    _, _, modules = run(LIGHT, NAME=name)
    assert roots(modules) - bare - set(sys.stdlib_module_names) == {"deepinfer"}


@pytest.fixture(scope="module")
def probed(all_packages: list[str]) -> dict[str, Any]:
    blocked = ("triton", "transformers", "matplotlib")
    return run(HEAVY, NAMES=all_packages, BLOCKED=blocked)  # type: ignore[no-any-return]


def test_every_package_imports_alone_and_quietly(package: str, probed: dict[str, Any]) -> None:
    found = probed[package]
    assert found["error"] is None, found["error"]
    assert found["output"] == ""
    assert found["handlers"] == []
    assert not found["cuda_initialised"]


def test_nothing_loads_the_support_packages(package: str, probed: dict[str, Any]) -> None:
    if package.split(".")[:2] not in (["deepinfer", "viz"], ["deepinfer", "testing"]):
        assert not {"pytest", "hypothesis"} & set(probed[package]["roots"])
