"""Fits and models as files."""

from __future__ import annotations

import pytest

from deepinfer.core.errors import ConfigError
from deepinfer.speculative import StepCostModel
from deepinfer.speculative.calibration import (
    AcceptanceEstimator,
    MarginEstimator,
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
@pytest.mark.parametrize("found", [b"{", b"\xff\xfe\x00", b"", b"[" * 100_000])
def test_files_of_something_else(kind, found, tmp_path) -> None:
    """Bytes that are no text end as text that is no JSON does."""
    path = tmp_path / "fit.json"
    path.write_bytes(found)
    with pytest.raises(ConfigError, match="no JSON"):
        kind.load(path)


SCALED = SequentialTemperatureScaling().fit([[1.0]] * 4, [1, 1, 0, 0])
BENT = SequentialIsotonicScaling().fit([[1.0]] * 4, [1, 1, 0, 0])
LEARNT = OnlineTemperatureScaling(1)
COST = StepCostModel([1, 8], [1.0, 2.0], graph_sizes=[8], draft={2: 0.5})


@pytest.mark.parametrize(
    ("made", "changes"),
    [
        (SCALED, {"temperatures": (None, 3, "x", {}, [], [0.0], [["a"]], [[1.0]], ["x"])}),
        (BENT, {"temperatures": (None, 3, "x", {}, [["a"]]), "curves": (None, 3, [None])}),
        (LEARNT, {"trials": ([[-1.0] * 64],), "hits": ([[1.0] * 64], None, [["a"] * 64])}),
        (
            COST,
            {
                "tokens": (None, 5, "ab", [1.5, 2]),
                "seconds": (None, 5, "ab", ["a", "b"]),
                "graph_sizes": (None, 5),
                "draft": (None, 5, [[1]], [["x", 1]], [[1.5, 1.0]]),
                "plain": (5, [[1]]),
            },
        ),
    ],
)
def test_values_that_are_none_of_a_fit(made, changes) -> None:
    type(made).from_dict(made.to_dict())
    for name, values in changes.items():
        for value in values:
            with pytest.raises(ConfigError):
                type(made).from_dict({**made.to_dict(), name: value})
        left = {key: value for key, value in made.to_dict().items() if key != name}
        if name not in ("graph_sizes", "draft", "plain"):
            with pytest.raises(ConfigError):
                type(made).from_dict(left)


def test_fits_say_what_they_are() -> None:
    found = (SCALED, BENT, LEARNT, AcceptanceEstimator(2), MarginEstimator(2))
    shown = [repr(made) for made in found]
    assert [text[: text.index("(")] for text in shown] == [type(made).__name__ for made in found]
    assert shown[3] == "AcceptanceEstimator(2, not fitted, 0 trials)"


@pytest.mark.parametrize("kind", [SequentialIsotonicScaling, SequentialTemperatureScaling])
def test_nothing_is_saved_before_the_fit(kind, tmp_path) -> None:
    with pytest.raises(ConfigError, match="call fit first"):
        kind().save(tmp_path / "fit.json")
    assert not list(tmp_path.iterdir())
