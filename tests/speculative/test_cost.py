"""The cost of a step: rounded up to graphs, straight above them, never falling."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deepinfer.core.errors import ConfigError
from deepinfer.speculative import StepCostModel


def test_rows_are_rounded_up_to_the_graph_that_runs_them() -> None:
    """A table that rounds down prices 121 rows like 96: 9.4 ms that take 10.2."""
    cost = StepCostModel([96, 128], [9.4e-3, 10.2e-3], graph_sizes=[96, 128])
    assert cost.seconds(1, [1, 96, 97, 121, 128]).tolist() == [
        9.4e-3,
        9.4e-3,
        10.2e-3,
        10.2e-3,
        10.2e-3,
    ]
    assert cost.seconds(1, 160) == pytest.approx(11.0e-3)


def test_between_samples_it_is_straight_without_graphs() -> None:
    cost = StepCostModel([10, 20], [1.0, 2.0])
    assert cost.seconds(1, [5, 10, 15, 20, 30]) == pytest.approx([1.0, 1.0, 1.5, 2.0, 3.0])


def test_noise_never_makes_rows_free() -> None:
    cost = StepCostModel.from_samples([8, 16, 16, 16, 32], [1.0, 9.0, 1.2, 1.1, 0.9])
    assert cost.seconds(1, [8, 16, 32]).tolist() == [1.0, 1.2, 1.2]
    table = cost.table(200)
    assert (np.diff(table[1:]) >= 0).all()


def test_drafting_is_priced_by_requests() -> None:
    cost = StepCostModel([1], [1.0], draft={4: 0.1, 8: 0.2})
    assert [cost.draft_seconds(n) for n in (0, 1, 4, 6, 8, 16)] == pytest.approx(
        [0.0, 0.1, 0.1, 0.15, 0.2, 0.4]
    )
    assert cost.seconds(8, 5) == pytest.approx(1.2)
    assert StepCostModel.additive(1.0, 0.5, request_s=0.25).seconds(2, 4) == pytest.approx(3.5)


def test_files_and_fingerprints(tmp_path: Path) -> None:
    cost = StepCostModel(
        [1, 8], [1.0, 2.0], graph_sizes=[8], draft={2: 0.5}, fingerprint="H200/nano"
    )
    cost.save(tmp_path / "cost.json")
    other = StepCostModel.load(tmp_path / "cost.json", fingerprint="H200/nano")
    assert other.to_dict() == cost.to_dict()
    with pytest.raises(ConfigError, match="fingerprint"):
        StepCostModel.load(tmp_path / "cost.json", fingerprint="B200/nano")
    (tmp_path / "cost.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cost\.json"):
        StepCostModel.load(tmp_path / "cost.json")


@pytest.mark.parametrize(
    ("tokens", "seconds"),
    [
        ([], []),
        ([2, 1], [1.0, 1.0]),
        ([1], [0.0]),
        ([1, 2], [1.0]),
        ([0], [1.0]),
        ([1], [float("nan")]),
    ],
)
def test_bad_samples(tokens: list[int], seconds: list[float]) -> None:
    with pytest.raises(ConfigError):
        StepCostModel(tokens, seconds)


def test_flat_tables_say_so() -> None:
    assert StepCostModel([1, 8], [1.0, 1.0]).is_flat
    assert not StepCostModel([1, 8], [1.0, 1.1]).is_flat


def test_one_noisy_sample_makes_no_rows_free() -> None:
    cost = StepCostModel.from_samples([64, 128, 256], [2.0e-3, 2.4e-3, 2.39e-3])
    assert cost.seconds(1, 448) == pytest.approx(2.8e-3)
    draft = StepCostModel([1], [1.0], draft={2: 0.1, 4: 0.3, 6: 0.29})
    assert draft.draft_seconds(10) == pytest.approx(0.48)
    steep = StepCostModel([8, 16, 24], [1.0, 1.0, 1.8])
    assert steep.seconds(1, 32) == pytest.approx(2.6)


@pytest.mark.parametrize("rows", [[-1], [1.7], "3", [None]])
def test_rows_that_are_none(rows: object) -> None:
    with pytest.raises(ConfigError, match="num_tokens"):
        StepCostModel.additive(1.0, 1.0).seconds(1, rows)
    assert StepCostModel.additive(1.0, 1.0).seconds(1, [3.0, 0]).tolist() == [4.0, 2.0]


@pytest.mark.parametrize(
    "options",
    [{"draft": {1.5: 0.1}}, {"draft": [(1, 0.1)]}, {"draft": {"a": 0.1}}, {"graph_sizes": 3}],
)
def test_bad_options(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        StepCostModel([1, 8], [1.0, 2.0], **options)
    with pytest.raises(ConfigError, match="tokens"):
        StepCostModel.from_samples([1.7, 2.2], [1.0, 2.0])
