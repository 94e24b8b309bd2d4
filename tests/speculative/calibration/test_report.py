"""The calibration report against golden values and by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.core.errors import ConfigError, ShapeError
from deepinfer.speculative.calibration import auroc, calibration_report, expected_error

GOLDEN = json.loads((Path(__file__).parents[2] / "data" / "deepspec" / "golden.json").read_text())


def test_golden() -> None:
    metrics = GOLDEN["metrics"]
    survival = [item["cumulative_probs"] for item in metrics["rounds"]]
    accepted = [sum(item["accepted"]) for item in metrics["rounds"]]
    reports = calibration_report(survival, accepted, bins=metrics["num_coarse_bins"])
    assert len(reports) == metrics["block_size"]
    for report, wanted in zip(reports, metrics["expect"], strict=True):
        assert report.position == wanted["position"]
        assert report.count == wanted["total_weight"]
        assert report.ece == pytest.approx(wanted["ece"], abs=1e-6)
        assert report.brier == pytest.approx(wanted["brier"], abs=1e-6)
        assert report.mean_prediction == pytest.approx(wanted["pred_mean"], abs=1e-6)
        assert report.mean_outcome == pytest.approx(wanted["target_mean"], abs=1e-6)
        if wanted["auc"] is None or math.isnan(wanted["auc"]):
            assert math.isnan(report.auroc)
        else:
            assert report.auroc == pytest.approx(wanted["auc"], abs=1e-6)
        for found, bin_ in zip(report.reliability, wanted["reliability"], strict=True):
            assert (found.low, found.high) == pytest.approx(bin_["range"])
            assert found.mean_prediction == pytest.approx(bin_["avg_pred"], abs=1e-6)
            assert found.mean_outcome == pytest.approx(bin_["avg_target"], abs=1e-6)
            assert found.count == bin_["weight"]


@given(st.lists(st.tuples(st.integers(0, 8), st.booleans()), min_size=1, max_size=40))
def test_auroc_is_the_share_of_pairs_in_order(pairs: list[tuple[int, bool]]) -> None:
    scores = [score / 8 for score, _ in pairs]
    labels = [int(label) for _, label in pairs]
    high = [s for s, label in zip(scores, labels, strict=True) if label]
    low = [s for s, label in zip(scores, labels, strict=True) if not label]
    found = auroc(scores, labels)
    if not high or not low:
        assert math.isnan(found)
        return
    share = np.mean([(a > b) + 0.5 * (a == b) for a in high for b in low])
    assert found == pytest.approx(share)


def test_expected_error_by_hand() -> None:
    assert expected_error([0.1, 0.1, 0.9, 1.0], [0, 1, 1, 1], bins=2) == pytest.approx(
        (2 * 0.4 + 2 * 0.05) / 4
    )
    assert math.isnan(expected_error([], []))


def test_only_verified_drafts_belong_in() -> None:
    reports = calibration_report([[0.9, 0.5], [0.8]], [1, 1], bins=10)
    assert [report.count for report in reports] == [2, 1]
    assert reports[1].mean_outcome == 0.0


def test_bad_input() -> None:
    with pytest.raises(ShapeError, match="accepted"):
        calibration_report([[0.5]], [1, 1])
    with pytest.raises(ConfigError, match="bins"):
        calibration_report([[0.5]], [1], bins=0)
    assert calibration_report([], []) == ()
