"""Episodes on disk joined with the preference records about them, for labelling and fitting outside a run.

Axes: N episodes of a folder, M records.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, Int

from vla_rlaif.dataset import load_episodes
from vla_rlaif.preferences.sampling import split_by_group
from vla_rlaif.preferences.store import Preference
from vla_rlaif.rollout import concatenate
from vla_rlaif.types import Episodes, Starts


@dataclass(frozen=True, kw_only=True)
class Labels:
    """Records as rows of the episodes that they name, oldest first."""

    pairs: Int[np.ndarray, "M 2"]
    p_first: Float[np.ndarray, " M"]  # NaN is a skip
    held_out: Bool[np.ndarray, " M"]


def gather_episodes(data: Path) -> tuple[list[str], Episodes]:
    """All shards of a folder as one, with the ids of their episodes; without what only the policy understands.

    Groups are numbered anew by start state: shards number theirs from wherever they began.
    """
    shards = load_episodes(data)
    shape = _shape(shards[0][1])
    for number, (_, episodes) in enumerate(shards):
        if _shape(episodes) != shape:
            raise ValueError(
                f"{data}: shard {number} was collected in another env than shard 0 ({_shape(episodes)}, not {shape}); "
                "keep the episodes of one env config in a folder."
            )
    merged = concatenate([replace(e, version=0, trace={}, logp=e.logp[..., :0]) for _, e in shards])
    group = np.unique(merged.starts.seed, return_inverse=True)[1]
    starts = Starts(seed=merged.starts.seed, group=group, member=merged.starts.member)
    return [i for ids, _ in shards for i in ids], replace(merged, starts=starts)


def join(records: Sequence[Preference], ids: Sequence[str], episodes: Episodes, *, store: Path, data: Path) -> Labels:
    """``store`` and ``data`` are named in the messages: records of other episodes are a mix-up of folders."""
    row = {name: index for index, name in enumerate(ids)}
    unknown = sorted({i for r in records for i in (r.first, r.second) if i not in row})
    if unknown:
        raise ValueError(
            f"{store} has labels of {len(unknown)} episodes that {data} does not hold, the first is {unknown[0]!r} "
            f"(it holds {ids[0]!r} to {ids[-1]!r}). Pass the folder whose episodes were labelled."
        )
    for r in records:
        text, length = episodes.instruction[row[r.first]], episodes.mask.shape[1]
        if r.instruction != text or r.segment[1] > length:
            raise ValueError(
                f"{store} labelled episode {r.first!r} as {r.instruction!r} over decisions {r.segment}, but in {data} "
                f"it is {text!r} over {(0, length)}. Pass the folder whose episodes were labelled."
            )
    return Labels(
        pairs=np.array([(row[r.first], row[r.second]) for r in records], np.int64).reshape(-1, 2),
        p_first=np.array([np.nan if r.p_first is None else r.p_first for r in records], np.float64),
        held_out=np.array([r.held_out for r in records], bool),
    )


def held_out_rows(episodes: Episodes, known: Labels, share: float, seed: int) -> Bool[np.ndarray, " N"]:
    """Labelled episodes stay on their side and take the rest of their group along; new groups are split by share."""
    group = episodes.starts.group
    is_held, is_trained = np.zeros(len(group), bool), np.zeros(len(group), bool)
    is_held[known.pairs[known.held_out]] = True
    is_trained[known.pairs[~known.held_out]] = True
    held = np.isin(group, group[is_held]) & ~is_trained
    is_new = ~np.isin(group, group[is_held | is_trained])
    if is_trained.any() and len(np.unique(group[is_new & episodes.valid])) < 2:
        return held  # a lone new group would be split by episode
    return held | (is_new & split_by_group(group, episodes.valid & is_new, share, seed))


def rows_of_others(records: Sequence[Preference], labeller: str, num: int, seed: int) -> Int[np.ndarray, " R"]:
    """At most ``num`` records of other labellers, drawn at random: of each pair one, and of none that ``labeller`` has
    answered itself. For measuring agreement."""
    done = {frozenset((r.first, r.second)) for r in records if r.labeller == labeller}
    rows: dict[frozenset[str], int] = {}
    for row, record in enumerate(records):
        pair = frozenset((record.first, record.second))
        if pair not in done:
            rows.setdefault(pair, row)
    return np.random.default_rng(seed).permutation(np.array(list(rows.values()), np.int64))[:num]


def _shape(e: Episodes) -> dict[str, tuple[int, ...]]:
    cameras = {f"images/{name}": images.shape[1:] for name, images in e.images.items()}
    return {**cameras, "state": e.state.shape[1:], "action": e.action.shape[1:]}
