"""How far people agree with themselves and with each other, on the pairs that were labelled more than once.

An answer counts as better, tie or worse; skips are left out.
Axes: M pairs with several answers, R people.
"""

import itertools
import math
from typing import Any

import numpy as np
from jaxtyping import Int

from vla_rlaif.label_page.desk import LabelDesk
from vla_rlaif.preferences.agreement import cohen_kappa, krippendorff_alpha, to_answers

MIN_PAIRS = 10  # a kappa of fewer is noise


def with_self(desk: LabelDesk, name: str) -> dict[str, Any]:
    """Of the person's own repetitions: how many, and how many got the same answer as the time before."""
    couples = []
    for key in desk.repeated():
        mine = _values(desk, key, name)
        couples += list(itertools.pairwise(mine.tolist()))
    return {"count": len(couples), "same": sum(a == b for a, b in couples)}


def with_others(desk: LabelDesk, name: str) -> dict[str, Any]:
    """The person's newest answers beside the others', a pair counted once for each of them. Cohen's kappa is null where
    it is not defined or rests on fewer than ``MIN_PAIRS``."""
    couples = []
    for key in desk.repeated():
        mine = _values(desk, key, name)
        for other in {other for other, _ in desk.opinions(key)} - {name}:
            theirs = _values(desk, key, other)
            if len(mine) and len(theirs):
                couples.append((mine[-1], theirs[-1]))
    first, second = np.array(couples, np.int64).reshape(-1, 2).T
    return {
        "count": len(couples),
        "same": int((first == second).sum()),
        "kappa": _or_null(cohen_kappa(first, second)) if len(couples) >= MIN_PAIRS else None,
    }


def alpha(desk: LabelDesk) -> float | None:
    """Krippendorff's alpha of everybody's newest answers; null where fewer than ``MIN_PAIRS`` have two."""
    names = sorted(desk.people)
    rows = [
        [values[-1] if len(values := _values(desk, key, name)) else -1 for name in names] for key in desk.repeated()
    ]
    answers = np.array(rows, np.int64).reshape(-1, len(names)).T
    is_common = (answers >= 0).sum(axis=0) > 1
    return _or_null(krippendorff_alpha(answers[:, is_common])) if is_common.sum() >= MIN_PAIRS else None


def _values(desk: LabelDesk, key: frozenset[str], name: str) -> Int[np.ndarray, " M"]:
    """A person's answers about a pair in order, as if the same episode had always been on the left."""
    left = min(key)
    mine = [turn for other, turn in desk.opinions(key) if other == name and turn.p_first is not None]
    p_first = [turn.p_first if turn.pair.first == left else 1 - (turn.p_first or 0.0) for turn in mine]
    return to_answers(np.array(p_first, np.float64))


def _or_null(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 3)
