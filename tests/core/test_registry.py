from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

from deepinfer.core.clock import FakeClock
from deepinfer.core.errors import ConfigError
from deepinfer.core.registry import Registry


def make() -> Registry[FakeClock]:
    registry: Registry[FakeClock] = Registry("clock")
    registry.register("fake", "deepinfer.core.clock:FakeClock")
    registry.register("later", lambda start_s: FakeClock(start_s + 1))
    return registry


def test_create_by_name() -> None:
    registry = make()
    assert registry.create("fake", 2.0).now() == 2.0
    assert registry.create("later", start_s=2.0).now() == 3.0
    assert registry.create("deepinfer.core.clock:FakeClock", 4.0).now() == 4.0
    assert registry.names() == tuple(registry) == ("fake", "later")
    assert "fake" in registry
    assert "other" not in registry
    assert repr(registry) == "Registry('clock', fake, later)"


def test_unknown_name_names_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="no clock 'fak'; did you mean 'fake'"):
        make().get("fak")
    with pytest.raises(ConfigError, match="Known: none"):
        Registry("thing").get("x")
    with pytest.raises(ConfigError, match="no clock 3"):
        make().get(3)  # type: ignore[arg-type]


def test_names_are_not_replaced_silently() -> None:
    registry = make()
    with pytest.raises(ConfigError, match="already registered"):
        registry.register("fake", FakeClock)
    registry.register("fake", lambda: FakeClock(9.0), replace=True)
    assert registry.create("fake").now() == 9.0


@pytest.mark.parametrize("name", ["", "a:b", 3])
def test_malformed_names(name: object) -> None:
    with pytest.raises(ConfigError, match="without a colon"):
        make().register(name, FakeClock)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "target", ["no.such.module:X", "deepinfer.core.clock:Nothing", "deepinfer.core.nothing:X"]
)
def test_missing_targets(target: str) -> None:
    with pytest.raises(ConfigError, match="cannot be found"):
        make().get(target)


def test_a_target_that_fails_inside_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_more.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        make().get("needs_more:X")


def test_plug_ins_load_only_when_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "plugged.py").write_text("class Clock:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = metadata.EntryPoint("plugged", "plugged:Clock", "deepinfer.clocks")
    monkeypatch.setattr(
        metadata, "entry_points", lambda group: [entry] if group == "deepinfer.clocks" else []
    )
    registry: Registry[object] = Registry("clock", group="deepinfer.clocks")
    assert registry.names() == ("plugged",)
    assert "plugged" in registry
    assert "plugged" not in sys.modules
    assert type(registry.create("plugged")).__name__ == "Clock"
    sys.modules.pop("plugged")


def test_two_registries_share_nothing() -> None:
    first, second = make(), make()
    first.register("mine", FakeClock)
    assert "mine" not in second
