"""From timed steps to a model of what drafting and verifying cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from deepinfer.speculative import StepCostModel

__all__ = ["fit_costs"]

_FAINT = 1e-2
_LEAST = 1e-9
_LEAST_SHARE = 0.05  # of the fastest step: rows are not free, whatever noise says


def fit_costs(
    samples: Sequence[tuple[int, int, float, float]],
    rounded: Callable[[int], int] | None = None,
    *,
    fingerprint: str = "",
) -> StepCostModel:
    """Takes steps apart into what rows cost and what requests add: `seconds = f(rows) + g(requests)`.

    Both are found by least squares; `f` does not fall. Only their sum means much: `g` is what drafting was seen to take, as far
    as the steps leave that open.

    Args:
        samples: Requests, rows, seconds, and seconds of them spent drafting, of each step; of equal steps the fastest
            counts, since what disturbs a step only adds to it. Steps with as many rows as requests verified nothing.
        rounded: Rows that a step is padded to; None for as many as it has.
        fingerprint: What the samples hold for.

    Returns:
        The model.
    """
    steps: dict[tuple[int, int], tuple[float, float]] = {}
    for count, rows, value, drafting in samples:
        key = (count, rows)
        steps[key] = min(steps.get(key, (np.inf, 0.0)), (max(_LEAST, value), drafting))
    plain = {count: value for (count, rows), (value, _) in steps.items() if rows <= count}
    drafted = {key: value for key, value in steps.items() if key[1] > key[0]}
    size_of = rounded or int
    if not drafted:
        counts = sorted(plain)
        return StepCostModel(counts, [plain[count] for count in counts], fingerprint=fingerprint)
    keys = sorted(drafted)
    total = np.array([drafted[key][0] for key in keys])
    requests, request_at = np.unique([key[0] for key in keys], return_inverse=True)
    sizes, size_at = np.unique([size_of(key[1]) for key in keys], return_inverse=True)
    seen = np.array([min(v[1] for k, v in drafted.items() if k[0] == count) for count in requests])
    # One unknown a size and one a number of requests; faint equations say what drafting alone was seen to take.
    equations = np.zeros((len(keys) + len(requests), len(sizes) + len(requests)))
    at = np.arange(len(keys))
    equations[at, size_at] = equations[at, len(sizes) + request_at] = 1.0
    equations[len(keys) :, len(sizes) :] = _FAINT * np.eye(len(requests))
    found = np.linalg.lstsq(equations, np.concatenate([total, _FAINT * seen]))[0]
    # No size takes longer than a larger one: what does was disturbed.
    by_rows = np.minimum.accumulate(found[: len(sizes)][::-1])[::-1]
    rest = total - by_rows[size_at]
    extra = np.array([rest[request_at == at].min() for at in range(len(requests))])
    least = min(float(extra.min()), 0.0)
    extra, by_rows = extra - least, np.maximum(_LEAST_SHARE * total.min(), by_rows + least)
    by_rows = (
        by_rows + _LEAST * sizes
    )  # of plans that take as long the one with fewer rows is better
    graph_sizes: Sequence[int] = ()
    if rounded is not None:
        graph_sizes = sorted({rounded(rows) for rows in range(1, int(sizes[-1]) + 1)})
    return StepCostModel(
        sizes.tolist(),
        by_rows.tolist(),
        graph_sizes=graph_sizes,
        draft=dict(zip(requests.tolist(), extra.tolist(), strict=True)),
        plain=plain,
        fingerprint=fingerprint,
    )
