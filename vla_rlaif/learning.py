"""What both learners share and neither backend knows: how a batch is cut up, and how its metrics are put together.

Axes: D demonstrated steps, H chunk, A action dims, B rows of a micro-batch, K numbers of a mean.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from vla_rlaif.config import LearnerConfig
from vla_rlaif.types import Batch, Observation

Micro = tuple[np.ndarray, np.ndarray]  # row indices and which of them are real, both of one static length


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """Demonstrations that the policy must not forget: every optimiser update adds ``coef`` times the imitation loss of
    ``batch`` drawn steps to its loss."""

    obs: Observation  # leaves "D ..."
    action: Float[np.ndarray, "D H A"]  # env units
    coef: float
    batch: int
    samples: int = 1  # (time, noise) draws per step, for policies that use them


@dataclass(frozen=True, kw_only=True)
class Rows:
    """One micro-batch on the host."""

    inputs: Mapping[str, np.ndarray]  # leaves "B ..."
    advantage: Float[np.ndarray, " B"]
    mask: Bool[np.ndarray, " B"]
    logp_acted: Float[np.ndarray, "B S"] | None
    reference: Float[np.ndarray, "B S K"] | None


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """Demonstrated steps of one micro-batch on the host."""

    inputs: Mapping[str, np.ndarray]  # leaves "B ..."
    action: Float[np.ndarray, "B H A"]
    weight: float  # of their imitation loss, a mean over rows
    samples: int


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one call of ``update`` does."""

    minibatches: Iterable[Sequence[Rows]]  # their micro-batches; read once
    orders: Sequence[Sequence[int]]  # of the minibatches, one an epoch
    num_valid: float  # what the loss of a minibatch is divided by
    kl_coef: float | None  # in force; None: the algorithm's own
    anchors: Iterator[Sequence[Chunks]]  # the demonstrated micro-batches of each optimiser update; endless, or empty
    seed: int


def divide(
    inputs: Mapping[str, np.ndarray],
    batch: Batch,
    seed: int,
    config: LearnerConfig,
    anchor: Anchor | None,
    anchor_inputs: Mapping[str, np.ndarray],
) -> Work:
    """Cut up a batch; ``anchor_inputs`` are those of all steps of the anchor.

    The composition of the minibatches is fixed for the call, only their order changes from epoch to epoch, so that at
    lr 0 every ratio is exactly 1 in every epoch.
    """
    rng = np.random.default_rng(seed)
    parts = split_minibatches(rng, len(batch.mask), config.minibatch, config.micro_batches, batch.unit)

    def rows(index: np.ndarray, valid: np.ndarray) -> Rows:
        return Rows(
            inputs={k: v[index] for k, v in inputs.items()},
            advantage=batch.advantage[index],
            mask=valid & batch.mask[index],
            logp_acted=None if batch.logp_acted is None else batch.logp_acted[index],
            reference=None if batch.reference is None else batch.reference[index],
        )

    return Work(
        minibatches=([rows(*one) for one in part] for part in parts),
        orders=[rng.permutation(len(parts)).tolist() for _ in range(config.epochs)],
        num_valid=batch.num_valid / len(parts),
        kl_coef=batch.kl_coef,
        anchors=iter(()) if anchor is None else _anchor_chunks(anchor_inputs, anchor, seed, config.micro_batches),
        seed=seed,
    )


def share(work: Work, index: int, num: int) -> Work:
    """The part of rank ``index`` of ``num``: an equal share of the rows of every micro-batch, in order."""

    def mine(value: np.ndarray) -> np.ndarray:
        return np.split(value, num)[index]

    def rows(one: Rows) -> Rows:
        return Rows(
            inputs={k: mine(v) for k, v in one.inputs.items()},
            advantage=mine(one.advantage),
            mask=mine(one.mask),
            logp_acted=None if one.logp_acted is None else mine(one.logp_acted),
            reference=None if one.reference is None else mine(one.reference),
        )

    def chunks(one: Chunks) -> Chunks:
        return replace(one, inputs={k: mine(v) for k, v in one.inputs.items()}, action=mine(one.action))

    return replace(
        work,
        minibatches=([rows(one) for one in minibatch] for minibatch in work.minibatches),
        anchors=([chunks(one) for one in drawn] for drawn in work.anchors),
    )


def _anchor_chunks(
    inputs: Mapping[str, np.ndarray], anchor: Anchor, seed: int, micro_batches: int
) -> Iterator[list[Chunks]]:
    """Demonstrated steps for each optimiser update of one batch; ``inputs`` are those of all steps. They depend on
    ``seed`` only, so a resumed run draws the same."""
    rng = np.random.default_rng((seed, 1))  # not the stream that cuts up the batch
    while True:
        drawn = np.split(rng.integers(0, len(anchor.action), anchor.batch), micro_batches)
        yield [
            Chunks(
                inputs={k: v[i] for k, v in inputs.items()},
                action=anchor.action[i],
                weight=anchor.coef / micro_batches,
                samples=anchor.samples,
            )
            for i in drawn
        ]


def is_kernel(name: str, num_axes: int) -> bool:
    """Whether weight decay is for a parameter, by the names of flax and of torch."""
    return "kernel" in name or (name.endswith("weight") and num_axes > 1)


def fitted_names(parameters: Collection[str], imitable: Collection[str], frozen: Sequence[str]) -> list[str]:
    """The imitable parameters that match none of the patterns (fnmatch's, where * also matches / and .).

    Raises:
        ValueError: a pattern matches no parameter at all, or nothing is left.
    """
    for pattern in frozen:
        if not any(fnmatchcase(name, pattern) for name in parameters):
            some = ", ".join(sorted(parameters)[:3])
            raise ValueError(
                f"imitate.frozen {pattern!r} matches none of the {len(parameters)} parameters ({some}, ...); "
                "a pattern matches whole names, so start and end it with * if need be."
            )
    names = [k for k in sorted(imitable) if not any(fnmatchcase(k, pattern) for pattern in frozen)]
    if not names:
        raise ValueError(f"imitate.frozen {list(frozen)} leaves no parameter to fit; remove a pattern.")
    return names


def split_minibatches(
    rng: np.random.Generator, num_rows: int, minibatch: int, micro_batches: int, unit: int = 1
) -> list[list[Micro]]:
    """Rows shuffled and split evenly into minibatches, each padded to ``micro_batches`` micro-batches of equal size.

    Even parts, so that no last minibatch takes a full-sized step on a few rows. ``unit`` rows that follow each other
    stay together; then a minibatch has as many units as fit in it.
    """
    if unit > 1:
        units = split_minibatches(rng, num_rows // unit, units_of(minibatch, micro_batches, unit), micro_batches)
        rows = np.arange(num_rows).reshape(-1, unit)
        return [[(rows[i].ravel(), np.repeat(valid, unit)) for i, valid in micro] for micro in units]
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


def units_of(minibatch: int, micro_batches: int, unit: int) -> int:
    """How many units of ``unit`` rows a minibatch has, equally many in each of its micro-batches.

    Raises ValueError if that is none.
    """
    num = minibatch // micro_batches // unit * micro_batches
    if not num:
        raise ValueError(
            f"learner.minibatch {minibatch} in {micro_batches} micro-batches has no room for {unit} decisions that "
            f"belong together; set it to at least {micro_batches * unit}."
        )
    return num


def padded_rows(num_rows: int, size: int) -> Iterator[tuple[np.ndarray, int]]:
    """Row indices in order, ``size`` of them at a time, and how many of those are real: the last ones repeat."""
    for first in range(0, num_rows, size):
        num = min(size, num_rows - first)
        yield first + np.minimum(np.arange(size), num - 1), num


def merge_micro_batches(metrics: Sequence[Mapping[str, Any]], rows: Sequence[float]) -> dict[str, float]:
    """The loss is a sum of parts; the rest are means over rows (padding does not count), the ratio error a maximum. The
    anchor has rows of its own, as many in every part."""
    values = [{k: float(v) for k, v in m.items()} for m in metrics]
    merged = {k: float(np.average([m[k] for m in values], weights=rows)) for k in values[0]}
    merged["loss"] = sum(m["loss"] for m in values)
    if "ratio_error" in merged:
        merged["ratio_error"] = max(m["ratio_error"] for m in values)
    if "anchor_loss" in merged:
        merged["anchor_loss"] = float(np.mean([m["anchor_loss"] for m in values]))
    return merged


def summarise(log: Sequence[Mapping[str, float]], *, braked: bool) -> dict[str, float]:
    """One step's optimiser updates as one line of metrics: means, and the ratio error before the first of them."""
    mean = {k: float(np.mean([m[k] for m in log])) for k in log[0]}
    first = {"ratio_error_first": log[0]["ratio_error"]} if "ratio_error" in mean else {}
    return {**mean, **first, "updates": float(len(log)), "braked": float(braked)}
