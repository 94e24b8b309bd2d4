"""Blocks written down."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.core.errors import ConfigError, ShapeError
from deepinfer.core.protocols import VerifyLengthPolicy
from deepinfer.speculative import AcceptanceEstimator, BlockRecorder, SequentialTemperatureScaling


def test_blocks_of_several_lengths() -> None:
    recorder = BlockRecorder(3)
    assert isinstance(recorder, VerifyLengthPolicy)
    assert len(recorder) == 0
    assert recorder.logits.shape == recorder.margins.shape == (0, 3)
    assert recorder.choose([[0.5], []], 2) == [3, 3]
    assert recorder.trim([[0.5]], [1]) == [1]
    recorder.learn([[0.5, 1.0, 0.0], [0.9]], [3, 1], [2, 0], margins=[[1.0, 2.0, 3.0], []])
    recorder.learn([[0.5] * 5], [3], [3])
    assert recorder.verified.tolist() == [3, 1, 3]
    assert recorder.accepted.tolist() == [2, 0, 3]
    assert np.isfinite(recorder.logits[0]).all()
    assert np.isnan(recorder.logits[1, 1:]).all()
    assert np.isnan(recorder.margins[1:]).all()


def test_an_engine_fills_it(monkeypatch) -> None:
    deepinfer = pytest.importorskip("deepinfer")
    pytest.importorskip("torch")
    recorder = BlockRecorder(5)
    options = {"max_num_seqs": 2, "max_model_len": 256, "rounding": "none"}
    params = deepinfer.SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    with deepinfer.Engine.from_pretrained(
        "nano", drafter="dspark", verify=recorder, **options
    ) as engine:
        outputs = engine.generate(["import os\n", "def main():\n"], params)
    assert recorder.verified.sum() == sum(o.usage.verified for o in outputs)
    assert recorder.accepted.sum() == sum(o.usage.accepted for o in outputs)
    assert len(recorder) > 10
    whole = recorder.verified == 5
    assert np.isfinite(recorder.margins[whole]).all()
    AcceptanceEstimator(5).fit(
        recorder.logits, recorder.margins, recorder.accepted, recorder.verified
    )
    SequentialTemperatureScaling().fit(recorder.logits[whole], recorder.accepted[whole])


def test_what_does_not_fit() -> None:
    for wrong in (0, -1, "a", 1.5):
        with pytest.raises(ConfigError, match="num_drafts"):
            BlockRecorder(wrong)
    recorder = BlockRecorder(1)
    for arguments in (([[0.5]], [1], []), ([[0.5]], [1, 1], [1, 1]), ([], [1], [1])):
        with pytest.raises(ShapeError, match="blocks"):
            recorder.learn(*arguments)
    with pytest.raises(ShapeError, match="margins"):
        recorder.learn([[0.5]], [1], [1], margins=[[1.0], [2.0]])
    assert len(recorder) == 0
