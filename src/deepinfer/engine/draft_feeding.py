"""What a drafter learns of the tokens that stay, and a schedule of how drafts fared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from deepinfer.engine.step_batch import kept_places
from deepinfer.engine.step_state import RunningRow, RunningStep
from deepinfer.models.deepseek_v41.batch import to_device

__all__ = ["feed_drafter", "teach_lengths"]


def feed_drafter(
    step: RunningStep, drafter: Any, rows: Sequence[tuple[RunningRow, list[int]]], window: int
) -> None:
    """Gives a drafter the features of tokens that stay, or tells it which stay where the step gave them itself.

    Args:
        step: The step.
        drafter: Has `observe`, and `settle` when steps feed it.
        rows: Rows, and the tokens chosen in each.
        window: Tokens from the end of a row that are worth having.
    """
    fed = [(running, tokens) for running, tokens in rows if running.is_fed]
    if fed:
        drafter.settle(
            [running.row.slot for running, _ in fed],
            [running.start for running, _ in fed],
            [running.end + len(tokens) - 1 for running, tokens in fed],
        )
    others = [
        (running, tokens)
        for running, tokens in rows
        if not running.is_fed and running.offset >= step.features_from
    ]
    found = _settled_features(step, others, window)
    if found is not None:
        drafter.observe(*found)


def teach_lengths(step: RunningStep, lengths: Any) -> None:
    """Tells a policy how far the drafts of a step were accepted.

    Args:
        step: The step; its tokens were compared with the drafts.
        lengths: Has `learn(confidences, verified, accepted, margins=)`, or cannot learn.
    """
    learn = getattr(lengths, "learn", None)
    if learn is None or not getattr(lengths, "wants_outcomes", True):
        return
    known = [
        (running.confidences, len(running.draft), len(tokens) - 1, running.margins)
        for running, tokens in zip(step.rows, step.tokens, strict=True)
        if running.draft and running.confidences and tokens
    ]
    if known:
        confidences, verified, accepted, margins = zip(*known, strict=True)
        learn(confidences, verified, accepted, margins=margins)


def _settled_features(
    step: RunningStep, rows: Sequence[tuple[RunningRow, list[int]]], window: int
) -> tuple[Tensor, list[int], list[int]] | None:
    """Draft features of the tokens that stay.

    Args:
        step: The step.
        rows: Rows, and the tokens chosen in each.
        window: Tokens from the end of a row that are worth having.

    Returns:
        Features, shape [tokens, features], and their positions and slots; None when there are none.
    """
    places: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    for running, tokens in rows:
        count = running.end - running.start + max(0, len(tokens) - 1)
        skip = max(0, count - window, running.row.full_start - running.start)
        places += range(running.offset + skip, running.offset + count)
        positions += range(running.start + skip, running.start + count)
        slots += [running.row.slot] * max(0, count - skip)
    features = step.features
    if features is None or not places:
        return None
    places = [place - step.features_from for place in kept_places(step, places)]
    if len(places) < features.shape[0]:
        features = features[to_device(np.array(places), features.device)]
    return features, positions, slots
