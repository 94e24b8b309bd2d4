"""The assignment of rows to columns with the largest sum."""

from __future__ import annotations

import numpy as np

from deepinfer.balancers.expert_parallel._arrays import IntArray

__all__ = ["best_assignment"]


def best_assignment(gain: IntArray) -> IntArray:
    """Assigns each row a column of its own so that the sum of gains is largest (shortest augmenting paths).

    Args:
        gain: Gain of each pair, shape [n, n], int64.

    Returns:
        Column of each row, shape [n], int64.
    """
    size = len(gain)
    cost = gain.max() - gain
    row_price = cost.min(1)
    column_price = np.zeros(size, cost.dtype)
    column_of = np.full(size, -1)
    row_of = np.full(size, -1)
    for first in range(size):  # pairs that need no search
        for free in np.flatnonzero(cost[first] == row_price[first]):
            if row_of[free] < 0:
                column_of[first], row_of[free] = free, first
                break
    far = np.iinfo(np.int64).max // 4
    for start in np.flatnonzero(column_of < 0).tolist():
        distance = np.full(size, far)
        before = np.full(size, -1)
        done = np.zeros(size, bool)
        row: int = start
        reached: int = 0
        while True:
            step = reached + cost[row] - row_price[row] - column_price
            closer = ~done & (step < distance)
            distance[closer] = step[closer]
            before[closer] = row
            column = int(np.where(done, far, distance).argmin())
            reached = int(distance[column])
            done[column] = True
            if row_of[column] < 0:
                break
            row = int(row_of[column])
        passed = done & (distance < reached)
        row_price[row_of[passed]] += reached - distance[passed]
        row_price[start] += reached
        column_price[passed] -= reached - distance[passed]
        while True:
            row = int(before[column])
            row_of[column] = row
            column_of[row], column = column, int(column_of[row])
            if row == start:
                break
    return column_of
