"""Without `transformers` its targets say what to install, and nothing else needs it."""

from __future__ import annotations

import sys

import pytest

from deepinfer.adapters import TransformersTarget
from deepinfer.core.errors import MissingDependency


def test_a_target_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependency, match="pip install transformers") as caught:
        TransformersTarget(object())
    assert caught.value.package == "transformers"
