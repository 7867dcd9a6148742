"""How far labels can be trusted: agreement beyond chance, position bias, rates of ties, skips and contradictions.

Percent agreement says little where one answer is frequent: kappa and alpha are 0 for agreement by chance, 1 for full.
Axes: M pairs, R labellers; an answer is one of 0 (the second is better), 1 (a tie), 2 (the first), -1 (none).
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from vla_rlaif.checkpoint import write_whole
from vla_rlaif.preferences.store import Preference

NUM_ANSWERS = 3


@dataclass(frozen=True, kw_only=True)
class LabellerFigures:
    """Of one labeller's records in force. Rates are of all of them; NaN where there is nothing to measure on."""

    labeller: str
    num: int
    tie_rate: float
    skip_rate: float
    num_both_orders: int  # pairs that were asked in both orders; the next three are of these
    inconsistent_rate: float  # preferred the clip in the same place both times
    position_bias: float  # mean of p_AB - (1 - p_BA): above 0 it favours what it sees first
    order_kappa: float  # Cohen's kappa between its answers in the two orders


@dataclass(frozen=True, kw_only=True)
class PairFigures:
    """Of two labellers, on the pairs that both have answered."""

    labellers: tuple[str, str]
    num: int
    raw: float  # share of equal answers
    kappa: float


@dataclass(frozen=True, kw_only=True)
class Agreement:
    labellers: tuple[LabellerFigures, ...]
    pairs: tuple[PairFigures, ...]
    alpha: float  # Krippendorff's, of all labellers together; NaN unless two have answered some pair


def measure_agreement(records: Sequence[Preference]) -> Agreement:
    """Of records in force. Of several answers of a labeller to a pair the newest counts."""
    names = sorted({record.labeller for record in records})
    answers = _by_pair(records, names)
    return Agreement(
        labellers=tuple(_of_one(name, [r for r in records if r.labeller == name]) for name in names),
        pairs=tuple(
            _of_two((names[i], names[j]), answers[i], answers[j]) for i, j in combinations(range(len(names)), 2)
        ),
        alpha=krippendorff_alpha(answers),
    )


def cohen_kappa(first: Int[np.ndarray, " M"], second: Int[np.ndarray, " M"]) -> float:
    """Cohen 1960: (p_o - p_e) / (1 - p_e) over the pairs that both have answered. NaN without any, or where chance
    alone makes them agree always."""
    both = (first >= 0) & (second >= 0)
    if not both.any():
        return float("nan")
    first, second = first[both], second[both]
    observed = float((first == second).mean())
    share = [np.bincount(answers, minlength=NUM_ANSWERS) / len(answers) for answers in (first, second)]
    expected = float(share[0] @ share[1])
    return float("nan") if expected == 1 else (observed - expected) / (1 - expected)


def krippendorff_alpha(answers: Int[np.ndarray, "R M"]) -> float:
    """Nominal alpha, 1 - D_o / D_e, for any number of labellers and missing answers (Krippendorff 2011, "Computing
    Krippendorff's alpha-reliability"). NaN if no pair has two answers, or if all answers are one and the same."""
    size = int(answers.max(initial=0)) + 1
    counts = np.stack([(answers == value).sum(axis=0) for value in range(size)])  # answers x pairs
    num = counts.sum(axis=0)
    counts, num = counts[:, num >= 2], num[num >= 2]
    total = counts.sum(axis=1)  # of each answer, among those that can be paired
    n = int(total.sum())
    expected = float(n * n - (total**2).sum())
    if not expected:
        return float("nan")
    disagreeing = float(((num**2 - (counts**2).sum(axis=0)) / (num - 1)).sum())
    return 1 - (n - 1) * disagreeing / expected


def to_answers(p_first: Float[np.ndarray, " M"]) -> Int[np.ndarray, " M"]:
    answers = np.where(p_first > 0.5, 2, np.where(p_first < 0.5, 0, 1))
    return np.where(np.isnan(p_first), -1, answers)


def describe_agreement(found: Agreement) -> list[str]:
    """Lines for people."""
    lines = []
    for one in found.labellers:
        lines.append(f"{one.labeller}: {one.num} labels, {one.tie_rate:.1%} ties, {one.skip_rate:.1%} skips")
        if one.num_both_orders:
            lines.append(
                f"  asked in both orders {one.num_both_orders} times: {one.inconsistent_rate:.1%} inconsistent, "
                f"position bias {one.position_bias:+.3f}, kappa between the orders {one.order_kappa:.3f}"
            )
    for two in found.pairs:
        lines.append(
            f"{two.labellers[0]} and {two.labellers[1]}: {two.num} pairs in common"
            + (f", Cohen's kappa {two.kappa:.3f} ({two.raw:.1%} equal)" if two.num else "")
        )
    if not np.isnan(found.alpha):
        lines.append(f"Krippendorff's alpha of all labellers: {found.alpha:.3f}")
    return lines


def write_agreement(found: Agreement, path: Path) -> None:
    """As JSON; NaN, which JSON lacks, becomes null."""
    write_whole(path, json.dumps(_without_nan(asdict(found)), indent=1).encode())


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(part) for part in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _of_one(name: str, records: Sequence[Preference]) -> LabellerFigures:
    both = np.array([r.both_orders for r in records if r.both_orders is not None], np.float64).reshape(-1, 2)
    asked = len(both) > 0
    nan = float("nan")
    return LabellerFigures(
        labeller=name,
        num=len(records),
        tie_rate=float(np.mean([r.is_tie for r in records])),
        skip_rate=float(np.mean([r.is_skip for r in records])),
        num_both_orders=len(both),
        inconsistent_rate=float(np.mean([r.is_inconsistent for r in records if r.both_orders])) if asked else nan,
        position_bias=float((both.sum(axis=1) - 1).mean()) if asked else nan,
        order_kappa=cohen_kappa(to_answers(both[:, 0]), to_answers(1 - both[:, 1])),
    )


def _of_two(names: tuple[str, str], first: Int[np.ndarray, " M"], second: Int[np.ndarray, " M"]) -> PairFigures:
    both = (first >= 0) & (second >= 0)
    raw = float((first == second)[both].mean()) if both.any() else float("nan")
    return PairFigures(labellers=names, num=int(both.sum()), raw=raw, kappa=cohen_kappa(first, second))


def _by_pair(records: Sequence[Preference], names: Sequence[str]) -> Int[np.ndarray, "R M"]:
    """Answers to each pair and segment, as if the smaller id had come first."""
    column: dict[tuple[object, ...], int] = {}
    cells: list[tuple[int, int, float]] = []
    for r in records:
        ids = sorted((r.first, r.second))
        place = column.setdefault((*ids, r.segment), len(column))
        p_first = float("nan") if r.p_first is None else r.p_first
        cells.append((names.index(r.labeller), place, p_first if r.first == ids[0] else 1 - p_first))
    answers = np.full((len(names), len(column)), -1)
    for row, place, p_first in cells:
        answers[row, place] = to_answers(np.array([p_first]))[0]
    return answers
