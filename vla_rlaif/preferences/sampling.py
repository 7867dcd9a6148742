"""Which episodes to compare. Pairs are row indices of one batch of episodes.

No pair joins an episode with itself, repeats another pair in either order, or holds an invalid episode. Which of the
two comes first is random, so that a labeller's position bias does not become a bias of the data.
Axes besides those of ``types.py``: E ensemble members, C candidate pairs, R rows to choose from, X excluded pairs.
"""

from collections.abc import Callable, Mapping
from typing import Literal, get_args

import numpy as np
from jaxtyping import Bool, Float, Int

from vla_rlaif.types import Episodes

Strategy = Literal["uniform", "within_group", "disagreement", "entropy"]
OVERSAMPLING = 10  # candidates per wanted pair for the two ensemble strategies, as in B-Pref (Lee et al. 2021)


def num_available_pairs(
    episodes: Episodes, rows: Int[np.ndarray, " R"] | None = None, exclude: Int[np.ndarray, "X 2"] | None = None
) -> tuple[int, int]:
    """Distinct pairs of valid episodes among ``rows`` (all rows by default), and how many of them share a group."""
    group = episodes.starts.group[_candidates(episodes, rows, exclude)]
    return len(group), int((group[:, 0] == group[:, 1]).sum())


def sample_pairs(
    episodes: Episodes,
    num_pairs: int,
    seed: int,
    *,
    mix: Mapping[Strategy, float],
    rows: Int[np.ndarray, " R"] | None = None,
    scores: Float[np.ndarray, "E N"] | None = None,
    exclude: Int[np.ndarray, "X 2"] | None = None,
) -> Int[np.ndarray, "M 2"]:
    """``num_pairs`` distinct pairs, split over strategies by the shares in ``mix`` (e.g. half within a group).

    ``rows`` restricts the choice to some episodes, ``exclude`` names pairs that are not wanted (in either order).
    ``scores`` are the ensemble's, divided by its temperature, for "disagreement" and "entropy". The first strategies of
    ``mix`` get their pairs first; roundings go to the last.
    """
    unknown = sorted(set(mix) - set(get_args(Strategy)))
    if unknown or not mix or min(mix.values()) < 0 or not np.isclose(sum(mix.values()), 1.0):
        raise ValueError(f"A pair mix needs shares that sum to 1 over {list(get_args(Strategy))}, got {dict(mix)}.")
    left = _candidates(episodes, rows, exclude)
    if num_pairs > len(left):
        raise ValueError(
            f"Asked for {num_pairs} pairs, but {_num_valid(episodes, rows)} valid episodes make only {len(left)}: "
            "collect more episodes or ask for fewer pairs."
        )
    rng = np.random.default_rng(seed)
    bounds = np.round(np.cumsum([0.0, *mix.values()]) * num_pairs).astype(int)
    chosen: list[np.ndarray] = []
    for strategy, num in zip(mix, np.diff(bounds), strict=True):
        if num:
            taken = STRATEGIES[strategy](left, int(num), rng, episodes.starts.group, scores)
            chosen.append(left[taken])
            left = np.delete(left, taken, axis=0)
    pairs = np.concatenate([np.empty((0, 2), np.int64), *chosen])
    swap = rng.random(len(pairs)) < 0.5
    pairs[swap] = pairs[swap, ::-1]
    return rng.permutation(pairs)


def _num_valid(episodes: Episodes, rows: Int[np.ndarray, " R"] | None) -> int:
    return int((episodes.valid if rows is None else episodes.valid[rows]).sum())


def _candidates(
    episodes: Episodes, rows: Int[np.ndarray, " R"] | None, exclude: Int[np.ndarray, "X 2"] | None
) -> Int[np.ndarray, "C 2"]:
    rows = np.arange(len(episodes.valid)) if rows is None else np.unique(rows)
    rows = rows[episodes.valid[rows]]
    first, second = np.triu_indices(len(rows), k=1)
    pairs = np.stack([rows[first], rows[second]], axis=1).astype(np.int64)
    if exclude is None:
        return pairs
    code = np.array([len(episodes.valid), 1])  # of a pair in ascending order, as one number
    return pairs[~np.isin(pairs @ code, np.sort(exclude, axis=1) @ code)]


def _uniform(
    pairs: Int[np.ndarray, "C 2"],
    num: int,
    rng: np.random.Generator,
    group: Int[np.ndarray, " N"],
    scores: Float[np.ndarray, "E N"] | None,
) -> Int[np.ndarray, " M"]:
    return rng.choice(len(pairs), num, replace=False)


def _within_group(
    pairs: Int[np.ndarray, "C 2"],
    num: int,
    rng: np.random.Generator,
    group: Int[np.ndarray, " N"],
    scores: Float[np.ndarray, "E N"] | None,
) -> Int[np.ndarray, " M"]:
    same = np.flatnonzero(group[pairs[:, 0]] == group[pairs[:, 1]])
    if num > len(same):
        raise ValueError(
            f"Asked for {num} pairs within a group, but only {len(same)} exist: play larger groups, ask for fewer "
            "pairs or lower the share of within_group in the mix."
        )
    return rng.choice(same, num, replace=False)


def _disagreement(
    pairs: Int[np.ndarray, "C 2"],
    num: int,
    rng: np.random.Generator,
    group: Int[np.ndarray, " N"],
    scores: Float[np.ndarray, "E N"] | None,
) -> Int[np.ndarray, " M"]:
    """The pairs on whose order the members differ most (std of their probabilities)."""
    return _top(pairs, num, rng, scores, lambda probability: probability.std(axis=0))


def _entropy(
    pairs: Int[np.ndarray, "C 2"],
    num: int,
    rng: np.random.Generator,
    group: Int[np.ndarray, " N"],
    scores: Float[np.ndarray, "E N"] | None,
) -> Int[np.ndarray, " M"]:
    """The pairs whose mean probability is nearest to one half, which is what ranks by entropy."""
    return _top(pairs, num, rng, scores, lambda probability: -np.abs(probability.mean(axis=0) - 0.5))


def _top(
    pairs: Int[np.ndarray, "C 2"],
    num: int,
    rng: np.random.Generator,
    scores: Float[np.ndarray, "E N"] | None,
    value: Callable[[Float[np.ndarray, "E C"]], Float[np.ndarray, " C"]],
) -> Int[np.ndarray, " M"]:
    if scores is None:
        raise ValueError("Pairs by disagreement or entropy need the scores of a fitted ensemble: pass ``scores``.")
    pool = rng.choice(len(pairs), min(len(pairs), OVERSAMPLING * num), replace=False)
    delta = scores[:, pairs[pool, 0]] - scores[:, pairs[pool, 1]]
    probability = 1 / (1 + np.exp(-np.clip(delta, -50, 50)))
    return pool[np.argsort(-value(probability), kind="stable")[:num]]


STRATEGIES: Mapping[Strategy, Callable[..., Int[np.ndarray, " M"]]] = {
    "uniform": _uniform,
    "within_group": _within_group,
    "disagreement": _disagreement,
    "entropy": _entropy,
}


def split_by_group(
    group: Int[np.ndarray, " N"], valid: Bool[np.ndarray, " N"], share: float, seed: int
) -> Bool[np.ndarray, " N"]:
    """Episodes to hold out: whole groups, so that no episode (nor its start) is on both sides of the split.

    At least one group and never all of them. A single group is split by episode instead.
    """
    unit = group if len(np.unique(group[valid])) > 1 else np.arange(len(group))
    units = np.unique(unit[valid])
    if share == 0 or len(units) < 2:
        return np.zeros(len(group), bool)
    num_held = min(max(int(np.ceil(share * len(units))), 1), len(units) - 1)
    held = np.random.default_rng(seed).choice(units, num_held, replace=False)
    return np.isin(unit, held)
