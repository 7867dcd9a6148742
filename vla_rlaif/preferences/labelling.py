"""From episodes to labels, the same way during a run and offline: which pairs, what the labeller says, what is kept.

Axes besides those of ``types.py``: E ensemble members in scores, R rows to choose from, X pairs left out.
"""

import time
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from vla_rlaif.interfaces import DetailedLabeller, Labeller
from vla_rlaif.preferences.data import Answers, EpisodeFeatures, PairData
from vla_rlaif.preferences.sampling import Strategy, num_available_pairs, sample_pairs
from vla_rlaif.preferences.store import Preference
from vla_rlaif.types import Episodes


def choose_pairs(
    episodes: Episodes,
    num: int,
    rows: Int[np.ndarray, " R"],
    seed: int,
    *,
    mix: Mapping[Strategy, float],
    scores: Float[np.ndarray, "E N"] | None = None,
    exclude: Int[np.ndarray, "X 2"] | None = None,
) -> Int[np.ndarray, "M 2"]:
    """At most ``num`` pairs. Where an exact mix cannot be had, the rest is drawn uniformly: a broken simulation or a
    small group should not end a run. Whoever calls counts the pairs within a group and tells."""
    num_all, num_in_group = num_available_pairs(episodes, rows, exclude)
    num = min(num, num_all)
    shares = dict(mix)
    in_group = min(shares.pop("within_group", 0.0), num_in_group / max(num, 1))
    if scores is None:  # nothing disagrees yet
        shares = {}
    else:
        shares.pop("uniform", None)
    exact: dict[Strategy, float] = {"within_group": in_group, **shares}
    exact["uniform"] = max(0.0, 1.0 - sum(exact.values()))
    return sample_pairs(episodes, num, seed, mix=exact, rows=rows, scores=scores, exclude=exclude)


def ask(labeller: Labeller, episodes: Episodes, pairs: Int[np.ndarray, "M 2"], seed: int) -> Answers:
    """The labeller's answers, checked."""
    if isinstance(labeller, DetailedLabeller):
        answers = labeller.answers(episodes, pairs, seed)
    else:
        answers = Answers(p_first=np.asarray(labeller.label(episodes, pairs, seed)))
    labels = answers.p_first
    in_range = np.isnan(labels) | ((labels >= 0) & (labels <= 1))
    if labels.shape != (len(pairs),) or not in_range.all():
        raise ValueError(
            f"The labeller {labeller.name!r} must give {len(pairs)} probabilities in [0, 1] or NaN, got "
            f"shape {labels.shape} and values {np.unique(labels)[:5]}."
        )
    return answers


def answer_counts(answers: Answers) -> dict[str, float]:
    """What is worth watching of a labeller that asks a model, in both orders perhaps; empty for others."""
    asked = {"labels/asked": float(answers.num_asked), "labels/invalid": float(answers.num_invalid)}
    if answers.both_orders is None:
        return asked if answers.num_asked else {}
    both = answers.both_orders[~np.isnan(answers.both_orders).any(axis=1)]
    inconsistent = (both[:, 0] - 0.5) * (both[:, 1] - 0.5) > 0
    return {
        "labels/inconsistent": float(inconsistent.sum()),
        "labels/position_bias": float((both.sum(axis=1) - 1).mean()) if len(both) else float("nan"),
        **asked,
    }


def make_records(
    episodes: Episodes,
    ids: Sequence[str],
    pairs: Int[np.ndarray, "M 2"],
    answers: Answers,
    held_out: Bool[np.ndarray, " M"],
    *,
    labeller: str,
    step: int,
) -> list[Preference]:
    """What the store keeps; a label of NaN is a skip. A pair that was not answered in both orders has none."""
    now, labels = time.time(), answers.p_first
    both = np.full((len(pairs), 2), np.nan) if answers.both_orders is None else answers.both_orders
    return [
        Preference(
            first=ids[int(first)],
            second=ids[int(second)],
            segment=(0, episodes.mask.shape[1]),
            instruction=episodes.instruction[int(first)],
            p_first=None if np.isnan(label) else float(label),
            labeller=labeller,
            step=step,
            held_out=bool(held),
            time=now,
            both_orders=None if np.isnan(orders).any() else (float(orders[0]), float(orders[1])),
        )
        for (first, second), label, orders, held in zip(pairs, labels, both, held_out, strict=True)
    ]


def make_pair_data(
    features: EpisodeFeatures,
    pairs: Int[np.ndarray, "M 2"],
    labels: Float[np.ndarray, " M"],
    held_out: Bool[np.ndarray, " M"],
) -> tuple[Int[np.ndarray, " R"], PairData]:
    """Only the episodes that a pair needs, with their rows in ``features``. Skips are dropped, ties kept."""
    usable = ~np.isnan(labels)
    rows, index = np.unique(pairs[usable], return_inverse=True)
    data = PairData(
        values=features.values[rows],
        live=features.live[rows],
        pairs=index.reshape(-1, 2),
        target=labels[usable].astype(np.float64),
        held_out=held_out[usable],
    )
    return rows, data
