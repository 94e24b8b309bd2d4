from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

import deepinfer
from deepinfer.core import clock
from deepinfer.core.errors import MissingDependency
from deepinfer.core.lazy import lazy_exports, optional_import


def test_lazy_attributes_load_once(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("made_up")
    monkeypatch.setitem(sys.modules, "made_up", package)
    get, listing = lazy_exports(
        "made_up", {"FakeClock": "deepinfer.core.clock", "clock": "deepinfer.core.clock:"}
    )
    assert get("FakeClock") is clock.FakeClock
    assert vars(package)["FakeClock"] is clock.FakeClock
    assert get("clock") is clock
    assert {"FakeClock", "clock"} <= set(listing())
    with pytest.raises(AttributeError, match="module 'made_up' has no attribute 'nothing'"):
        get("nothing")


def test_lazy_attribute_says_which_package_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_more.py").write_text("import a_package_that_is_not_there.part\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    get, _ = lazy_exports("made_up", {"Part": "needs_more", "Gone": "deepinfer.core.gone"})
    with pytest.raises(MissingDependency, match=r"made_up\.Part needs a_package") as caught:
        get("Part")
    assert caught.value.command == "pip install a_package_that_is_not_there"
    with pytest.raises(ModuleNotFoundError, match=r"deepinfer\.core\.gone"):
        get("Gone")


def test_package_refuses_unknown_attributes() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Enigne'"):
        deepinfer.Enigne  # noqa: B018
    assert set(deepinfer.__all__) <= set(dir(deepinfer))


def test_optional_import() -> None:
    assert optional_import("json") is __import__("json")
    with pytest.raises(MissingDependency, match=r'pip install "deepinfer-sdk\[viz\]"') as caught:
        optional_import("no_such_package.part", extra="viz")
    assert caught.value.package == "no_such_package"
    assert caught.value.extra == "viz"
    with pytest.raises(MissingDependency, match="pip install other-name"):
        optional_import("no_such_package", package="other-name")


def test_optional_import_does_not_hide_what_a_package_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_there.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        optional_import("half_there")
