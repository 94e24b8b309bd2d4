"""Fits and models as files."""

from __future__ import annotations

import pytest

from deepinfer.core.errors import ConfigError
from deepinfer.speculative import StepCostModel
from deepinfer.speculative.calibration import (
    AcceptanceEstimator,
    OnlineTemperatureScaling,
    SequentialIsotonicScaling,
    SequentialTemperatureScaling,
)


@pytest.mark.parametrize(
    "kind",
    [
        AcceptanceEstimator,
        OnlineTemperatureScaling,
        SequentialIsotonicScaling,
        SequentialTemperatureScaling,
        StepCostModel,
    ],
)
@pytest.mark.parametrize("found", [b"{", b"\xff\xfe\x00", b""])
def test_files_of_something_else(kind, found, tmp_path) -> None:
    """Bytes that are no text end as text that is no JSON does."""
    path = tmp_path / "fit.json"
    path.write_bytes(found)
    with pytest.raises(ConfigError, match="no JSON"):
        kind.load(path)
