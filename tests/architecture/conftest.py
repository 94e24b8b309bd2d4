"""What there is to check: packages and modules, found on disk so that a new part needs no list."""

from __future__ import annotations

from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "deepinfer"

# Packages that import without torch.
LIGHT = {
    "deepinfer",
    "deepinfer.core",
    "deepinfer.balancers",
    "deepinfer.scheduling",
    "deepinfer.grammar",
    "deepinfer.cache",
    "deepinfer.speculative",
}


def module_name(path: Path) -> str:
    parts = ["deepinfer", *path.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts).removesuffix(".__init__")


def packages() -> list[str]:
    return sorted(module_name(path) for path in SOURCE.rglob("__init__.py"))


@pytest.fixture(scope="session")
def all_packages() -> list[str]:
    return packages()


@pytest.fixture(scope="session")
def source_files() -> dict[str, Path]:
    """Every module's file by its dotted name."""
    return {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "package" in metafunc.fixturenames:
        metafunc.parametrize("package", packages())
    if "light_package" in metafunc.fixturenames:
        metafunc.parametrize("light_package", [name for name in packages() if name in LIGHT])
