"""What both learners share and neither backend knows: how a batch is cut up, and how its metrics are put together."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Micro = tuple[np.ndarray, np.ndarray]  # row indices and which of them are real, both of one static length


def split_minibatches(rng: np.random.Generator, num_rows: int, minibatch: int, micro_batches: int) -> list[list[Micro]]:
    """Rows shuffled and split evenly into minibatches, each padded to ``micro_batches`` micro-batches of equal size.

    Even parts, so that no last minibatch takes a full-sized step on a few rows.
    """
    size = minibatch // micro_batches
    minibatches = []
    for rows in np.array_split(rng.permutation(num_rows), -(-num_rows // minibatch)):
        micro = []
        for first in range(0, minibatch, size):
            chosen = rows[first : first + size]
            index = np.resize(chosen, size) if len(chosen) else np.zeros(size, np.int64)
            micro.append((index, np.arange(size) < len(chosen)))
        minibatches.append(micro)
    return minibatches


def merge_micro_batches(metrics: Sequence[Mapping[str, Any]], rows: Sequence[float]) -> dict[str, float]:
    """The loss is a sum of parts; the rest are means over rows (padding does not count), the ratio error a maximum."""
    values = [{k: float(v) for k, v in m.items()} for m in metrics]
    merged = {k: float(np.average([m[k] for m in values], weights=rows)) for k in values[0]}
    merged["loss"] = sum(m["loss"] for m in values)
    merged["ratio_error"] = max(m["ratio_error"] for m in values)
    return merged


def summarise(log: Sequence[Mapping[str, float]], *, braked: bool) -> dict[str, float]:
    """One step's optimiser updates as one line of metrics: means, and the ratio error before the first of them."""
    mean = {k: float(np.mean([m[k] for m in log])) for k in log[0]}
    return {**mean, "ratio_error_first": log[0]["ratio_error"], "updates": float(len(log)), "braked": float(braked)}
