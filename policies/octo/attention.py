"""Who attends to whom: upstream's block-wise causal rule, computed for all token pairs at once.

Source: octo-models/octo, BlockTransformer (the original loops over pairs in Python at every trace).
Axes: L tokens of the whole sequence; row attends to column.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

Kind = Literal["task", "obs", "readout"]


class Span(NamedTuple):
    """A run of tokens of one group: the whole group for a task, one timestep of it otherwise."""

    kind: Kind
    name: str
    num_tokens: int


def _owners(spans: Sequence[Span], correct: bool) -> Int[np.ndarray, " n"]:
    """Index of the span that each token belongs to.

    v1.0 checkpoints were trained with the first token of every span but the first taken for the previous span's.
    """
    ends = np.cumsum([span.num_tokens for span in spans])
    return np.searchsorted(ends, np.arange(ends[-1]), side="right" if correct else "left")


def attention_rule(
    prefix: Sequence[Span], step: Sequence[Span], horizon: int, *, correct: bool = True
) -> Bool[np.ndarray, "L L"]:
    """The rule for the prefix followed by ``horizon`` repetitions of ``step``.

    Everyone sees the task. Observations see observations up to their own time; a readout sees those and earlier tokens
    of itself; nobody else sees a readout.
    """
    spans = [prefix[i] for i in _owners(prefix, correct)] if prefix else []
    time = [-1] * len(spans)
    owners = _owners(step, correct)
    for t in range(horizon):
        spans += [step[i] for i in owners]
        time += [t] * len(owners)
    kind, name, when = np.array([s.kind for s in spans]), np.array([s.name for s in spans]), np.array(time)
    row, column = kind[:, None], kind[None, :]
    same_readout = (row == "readout") & (column == "readout") & (name[:, None] == name[None, :])
    allowed = (column == "task") | ((column == "obs") & (row != "task")) | same_readout
    return allowed & (when[None, :] <= when[:, None])
