"""What a learned reward can be trusted with, in figures: the card that is written beside a model and into a run.

Everything is of data that the model was not trained on, as far as there is any. Axes: N episodes, M held-out pairs, B
bins, K clips' ends.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from vla_rlaif.checkpoint import write_whole
from vla_rlaif.metrics import wilson
from vla_rlaif.preferences.data import kendall_tau, pair_accuracy
from vla_rlaif.reward_card_data import Bin, Card, Gate, Judged, Mistake, Rate, Task
from vla_rlaif.success_threshold import CrossFit, clustered_interval, cross_fit

FORMAT = "vla_rlaif reward card 1"
NUM_BINS = 10
NUM_MISTAKES = 6


def make_card(judged: Judged, about: Mapping[str, str]) -> Card:
    j = judged
    tau, against = _tau(j)
    gap = _gap(j.score, j.success)
    won = (j.clip_success > 0.5) & np.isfinite(j.threshold)
    recall = _share((j.clip_p > j.threshold)[won])
    false_positives, note, by_kind = _false_positives(j)
    accuracy, inside = _accuracy(j, np.ones(len(j.pairs), bool)), _within_group(j.score, j.group)
    return Card(
        about=about,
        accuracy=accuracy,
        tau=tau,
        tau_against=against,
        ece=_ece(reliability := _reliability(j.p_first, j.label)),
        reliability=reliability,
        success_failure_gap=gap,
        threshold=j.threshold,
        recall=recall,
        false_positives=false_positives,
        false_positives_note=note,
        by_kind=({} if math.isnan(recall.rate) else {"succeeded": recall}) | by_kind,
        within_group_std=inside,
        tasks=_tasks(j),
        gates=_gates(accuracy, tau, gap, false_positives, note, j.false_positive_rate, inside),
        mistakes=_mistakes(j),
        num_episodes=int((~np.isnan(j.score)).sum()),
        num_ties=int((j.label == 0.5).sum()),
    )


def write_card_json(card: Card, path: Path) -> None:
    """NaN, which JSON lacks, becomes null."""
    write_whole(path, json.dumps(_plain({"format": FORMAT, **asdict(card)}), indent=1).encode())


def failed_gates(card: Card) -> list[str]:
    """One sentence for each gate that the reward does not pass."""
    return [f"{g.name} is {g.value:.3g}, wanted {g.wanted}" for g in card.gates if g.passed is False]


def _accuracy(j: Judged, chosen: Bool[np.ndarray, " M"]) -> Rate:
    """Of the decided pairs among ``chosen``. Equal scores are half right, so the count is rounded for the interval."""
    decided = chosen & (j.label != 0.5) & ~np.isnan(j.score[j.pairs]).any(axis=1)
    num = int(decided.sum())
    if not num:
        return Rate(rate=math.nan, low=math.nan, high=math.nan, num=0)
    rate = pair_accuracy(j.score, j.pairs[decided], j.label[decided])
    low, high = wilson(round(rate * num), num)
    return Rate(rate=rate, low=low, high=high, num=num)


def _share(hits: Bool[np.ndarray, " K"]) -> Rate:
    if not len(hits):
        return Rate(rate=math.nan, low=math.nan, high=math.nan, num=0)
    low, high = wilson(int(hits.sum()), len(hits))
    return Rate(rate=float(hits.mean()), low=low, high=high, num=len(hits))


def _false_positives(j: Judged) -> tuple[Rate, str, dict[str, Rate]]:
    """In all, how they were judged, and by kind. A clip of success 0.5 is no negative."""
    none = _share(np.empty(0, bool))
    if math.isnan(j.false_positive_rate):
        return none, "The reward has no head success.", {}
    lost = j.clip_success < 0.5
    kinds, source = np.array(j.clip_kinds, dtype=np.str_)[lost], j.clip_source[lost]
    found = cross_fit(j.clip_p[lost], source, j.false_positive_rate)
    if found.above is None:
        return none, _needed(found, j.false_positive_rate), {}
    low, high = clustered_interval(found.above, source)
    rate = Rate(rate=float(found.above.mean()), low=low, high=high, num=len(source))
    note = (
        f"Each half of the start states ({found.sizes[0]} and {found.sizes[1]} negatives) is judged by the threshold "
        "of the other; the interval allows for clips of one start state being alike."
    )
    return rate, note, {str(kind): _share(found.above[kinds == kind]) for kind in np.unique(kinds)}


def _needed(found: CrossFit, rate: float) -> str:
    return (
        f"A threshold at the rate {rate:.3g} needs {found.needed} held-out negatives in each half of the start states, "
        f"and there are {found.sizes[0]} and {found.sizes[1]}."
    )


def _tau(j: Judged) -> tuple[float, str]:
    """Kendall's tau-b of the scores against the truth, successes being equally good as labellers have them; without a
    truth, what the held-out labels say: agreeing minus disagreeing pairs, over all decided ones."""
    if j.truth is not None and not np.isnan(j.truth).all():
        truth = j.truth.astype(np.float64)
        if j.success is not None:
            truth = np.where(j.success == 1, np.nanmax(truth), truth)
        return kendall_tau(j.score, truth), "truth, successes tied"
    accuracy = _accuracy(j, np.ones(len(j.pairs), bool)).rate
    return 2 * accuracy - 1, "labels of held-out pairs"


def _gap(score: Float[np.ndarray, " N"], success: Float[np.ndarray, " N"] | None) -> float:
    if success is None:
        return math.nan
    known = ~np.isnan(score) & ~np.isnan(success)
    won, lost = score[known & (success == 1)], score[known & (success == 0)]
    if not len(won) or not len(lost):
        return math.nan
    return float((won.mean() - lost.mean()) / (score[known].std() + 1e-12))


def _within_group(score: Float[np.ndarray, " N"], group: Int[np.ndarray, " N"]) -> float:
    known = ~np.isnan(score)
    score, group = score[known], group[known]
    stds = [score[group == g].std() for g in np.unique(group) if (group == g).sum() > 1]
    return float(np.mean(stds) / (score.std() + 1e-12)) if stds else math.nan


def _reliability(p: Float[np.ndarray, " M"], label: Float[np.ndarray, " M"]) -> tuple[Bin, ...]:
    """As ``bradley_terry.expected_calibration_error`` bins them."""
    confidence, right = np.maximum(p, 1 - p), np.where(p >= 0.5, label, 1 - label)
    index = np.minimum(((confidence - 0.5) * 2 * NUM_BINS).astype(int), NUM_BINS - 1)
    edges = np.linspace(0.5, 1, NUM_BINS + 1)
    return tuple(
        Bin(
            low=float(edges[b]),
            high=float(edges[b + 1]),
            confidence=float(confidence[index == b].mean()),
            accuracy=float(right[index == b].mean()),
            num=int((index == b).sum()),
        )
        for b in np.unique(index)
    )


def _ece(bins: Sequence[Bin]) -> float:
    num = sum(b.num for b in bins)
    return sum(b.num * abs(b.confidence - b.accuracy) for b in bins) / num if num else math.nan


def _tasks(j: Judged) -> tuple[Task, ...]:
    said = np.array(j.instruction, dtype=np.str_)
    tasks = []
    for text in dict.fromkeys(j.instruction):
        rows = said == text
        success = None if j.success is None else j.success[rows]
        chosen = (said[j.pairs] == text).all(axis=1) if len(j.pairs) else np.empty(0, bool)
        gap, num = _gap(j.score[rows], success), int(rows.sum())
        tasks.append(Task(instruction=text, accuracy=_accuracy(j, chosen), gap=gap, episodes=num))
    return tuple(tasks)


def _mistakes(j: Judged) -> tuple[Mistake, ...]:
    wrong = (j.p_first - 0.5) * (j.label - 0.5) < 0
    order = np.argsort(-np.abs(j.p_first - 0.5), kind="stable")
    return tuple(
        Mistake(
            first=j.ids[int(j.pairs[m, 0])],
            second=j.ids[int(j.pairs[m, 1])],
            label=float(j.label[m]),
            p_first=float(j.p_first[m]),
        )
        for m in order[wrong[order]][:NUM_MISTAKES]
    )


def _gates(
    accuracy: Rate, tau: float, gap: float, false_positives: Rate, note: str, wanted_rate: float, inside: float
) -> tuple[Gate, ...]:
    """How well values grow along a clip is no gate: a constant ramp is perfect at it."""

    def gate(name: str, value: float, wanted: str, is_good: bool, needs: str = "") -> Gate:
        if math.isnan(value):
            return Gate(name=name, value=value, wanted=wanted, passed=None, note=needs)
        return Gate(name=name, value=value, wanted=wanted, passed=is_good)

    return (
        gate("held-out pairwise accuracy, low end of its interval", accuracy.low, "at least 0.6", accuracy.low >= 0.6),
        gate("Kendall tau across episodes", tau, "at least 0.4", tau >= 0.4),
        gate("success-failure gap in standard deviations", gap, "at least 0.5", gap >= 0.5),
        gate(
            "false positives at thresholds of other clips, low end of their interval",
            false_positives.low,
            "not asked for" if math.isnan(wanted_rate) else f"at most the rate that was asked for, {wanted_rate:.3g}",
            false_positives.low <= wanted_rate,
            note,
        ),
        gate("standard deviation within start states, of all episodes' one", inside, "at least 0.1", inside >= 0.1),
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
