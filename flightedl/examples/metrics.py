"""How good predicted probabilities are, in NumPy.

``log_loss`` asks whether the probabilities are right, ``area_under_curve`` only whether they are in the right order.
Both are exact, not sampled.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flightedl.errors import UsageError


def log_loss(labels: npt.NDArray[Any], probabilities: npt.NDArray[Any]) -> float:
    """Mean negative log-likelihood in nats.

    Args:
        labels: Shape (n,), 0 or 1.
        probabilities: Shape (n,), of label 1; clipped to [1e-7, 1 - 1e-7], so that one certain mistake is not infinite.

    Raises:
        UsageError: There are no labels.
    """
    if labels.size == 0:
        raise UsageError("the log loss of no records is not defined: evaluate on at least one record")
    clipped = np.clip(probabilities.astype(np.float64), 1e-7, 1 - 1e-7)
    return float(-np.mean(np.where(labels > 0, np.log(clipped), np.log1p(-clipped))))


def area_under_curve(labels: npt.NDArray[Any], scores: npt.NDArray[Any]) -> float:
    """Area under the ROC curve: the chance that a random 1 is scored above a random 0, ties counting half.

    Computed as the Mann-Whitney statistic from average ranks: (sum of ranks of the ones - m(m+1)/2) / (m * k), where
    m and k are the numbers of ones and zeros.

    Args:
        labels: Shape (n,), 0 or 1.
        scores: Shape (n,), any order-preserving measure of how likely label 1 is.

    Raises:
        UsageError: All labels are the same.
    """
    positive = labels > 0
    ones = int(positive.sum())
    zeros = positive.size - ones
    if ones == 0 or zeros == 0:
        raise UsageError("the area under the curve needs both labels, but all records have the same one")
    _, position, counts = np.unique(scores, return_inverse=True, return_counts=True)
    average_rank = np.cumsum(counts) - (counts - 1) / 2
    rank_sum = float(average_rank[position][positive].sum())
    return (rank_sum - ones * (ones + 1) / 2) / (ones * zeros)
