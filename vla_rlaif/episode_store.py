"""A durable store of played groups: rollout workers append to it, a trainer takes from it within its staleness bound.

    store/<worker>/manifest.json  episodes-00000.npz ...     one writer a folder, one weights version a shard

The trainer keeps the place up to which it has read each worker's folder in its own checkpoint, so every episode is used
once or counted as evicted, whatever dies in between.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vla_rlaif.dataset import append_episodes, num_shards, read_shard
from vla_rlaif.rollout import concatenate, take
from vla_rlaif.types import Episodes


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What one step gets from the store, and how many episodes will not be used."""

    episodes: Episodes | None  # of one version; None: there is no version with enough groups
    evicted: int  # too old, or left over when a newer version was begun


class EpisodeStore:
    """``read`` says how many shards of each worker are done with; it is part of the trainer's checkpoint."""

    def __init__(self, folder: Path, read: Mapping[str, int] | None = None):
        self.folder = folder
        self.read = dict(read or {})

    def append(self, worker: str, episodes: Episodes) -> None:
        """Whole groups of one version, by the only writer of that name; its versions never decrease."""
        append_episodes(self.folder / worker, episodes, {"worker": worker})

    def take(self, *, num_groups: int, group_size: int, version: int, staleness: int) -> Taken:
        """Exactly ``num_groups`` groups of the oldest version that has them and is at most ``staleness`` updates old.

        Shards of versions that the trainer has not reached (it went back to a checkpoint) wait.
        """
        unread = [shard for shard in self._unread() if shard.episodes.version <= version]
        old = [shard for shard in unread if shard.episodes.version < version - staleness]
        evicted = self._done_with(old)
        usable = [shard for shard in unread if shard.episodes.version >= version - staleness]
        wanted = num_groups * group_size
        for acted in sorted({shard.episodes.version for shard in usable}):
            chosen, total = [], 0
            for shard in usable:
                if shard.episodes.version == acted and total < wanted:
                    chosen.append(shard)
                    total += shard.num_episodes
            if total >= wanted:
                evicted += self._done_with([shard for shard in usable if shard.episodes.version < acted])
                self._done_with(chosen)
                merged = concatenate([_renumbered(shard.episodes, part) for part, shard in enumerate(chosen)])
                return Taken(episodes=take(merged, np.arange(wanted)), evicted=evicted + total - wanted)
        return Taken(episodes=None, evicted=evicted)

    def _unread(self) -> list["_Shard"]:
        workers = sorted(p.name for p in self.folder.iterdir()) if self.folder.exists() else []
        return [
            _Shard(worker, index, read_shard(self.folder / worker, index))
            for worker in workers
            for index in range(self.read.get(worker, 0), num_shards(self.folder / worker))
        ]

    def _done_with(self, shards: list["_Shard"]) -> int:
        """Never come back to them; the number of their episodes."""
        for shard in shards:
            self.read[shard.worker] = max(self.read.get(shard.worker, 0), shard.index + 1)
        return sum(shard.num_episodes for shard in shards)


@dataclass(frozen=True)
class _Shard:
    worker: str
    index: int
    episodes: Episodes

    @property
    def num_episodes(self) -> int:
        return len(self.episodes.success)


def _renumbered(episodes: Episodes, part: int) -> Episodes:
    """Workers number their groups alone: ids that differ between the parts of a batch."""
    groups = np.unique(episodes.starts.group, return_inverse=True)[1] + 1_000_000 * part
    return replace(episodes, starts=replace(episodes.starts, group=groups))
