"""Fixtures and skips that every part of the suite shares."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

# Several test processes share few cores, and one thread makes sums reproducible.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The repository's root folder."""
    return ROOT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of the large test data that is not in the repository; skips the test without it."""
    given = os.environ.get("DEEPINFER_SHARED_DATA")
    folder = Path(given) if given else ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"no test data in {folder}; set DEEPINFER_SHARED_DATA to a folder that has it")
    return folder


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every attempt to connect to another machine an error."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"the network was used: {args[1:] or args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--hub", action="store_true", help="run the tests that need the network")
    parser.addoption("--benchmark", action="store_true", help="run the measuring tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpus: int | None = None
    for item in items:
        for marker in ("hub", "benchmark"):
            if item.get_closest_marker(marker) and not config.getoption(f"--{marker}"):
                item.add_marker(pytest.mark.skip(reason=f"runs only with --{marker}"))
        needed = 2 if item.get_closest_marker("multi_gpu") else 1
        if item.get_closest_marker("gpu") or item.get_closest_marker("multi_gpu"):
            if gpus is None:
                import torch

                gpus = torch.cuda.device_count()
            if gpus < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA GPU, found {gpus}"))
