"""What a labeller can be shown: the episodes of a folder or of a round of training, without holding their frames.

Axes: N episodes, F frames of one episode.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt8

from vla_rlaif.dataset import format_of, load_episodes
from vla_rlaif.label_page.shards import ShardIndex, read_frames, read_index
from vla_rlaif.rollout import concatenate
from vla_rlaif.types import Episodes, Starts

Frames = Mapping[str, UInt8[np.ndarray, "F height width 3"]]  # by camera


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What the page must know of an episode before it has its frames."""

    instruction: str
    num_frames: int  # up to the end of the episode; the frames after it repeat the last
    sizes: Mapping[str, tuple[int, int]]  # height and width of each camera, pixels


@runtime_checkable
class Catalogue(Protocol):
    """Episodes by id. ``frames`` may be called in any thread, one call at a time."""

    def shown(self, name: str) -> Shown | None:
        """None: there is no such episode."""
        ...

    def frames(self, names: Sequence[str]) -> Mapping[str, Frames]:
        """The frames of some episodes, without what follows their ends."""
        ...


class FolderCatalogue:
    """A folder that `collect` wrote. Opening it reads its index; frames are read when they are asked for.

    A LeRobotDataset has no such index and is held in memory whole.
    """

    def __init__(self, folder: Path, cameras: Sequence[str] = ()) -> None:
        if format_of(folder) == "lerobot":
            loaded = [episodes for _, episodes in load_episodes(folder)]
            self._shards = [_index_of(folder, episodes) for episodes in loaded]
            self._loaded: list[Episodes] | None = loaded
        else:
            self._shards, self._loaded = read_index(folder), None
        found = self._shards[0].sizes
        for number, shard in enumerate(self._shards):
            if shard.sizes != found or shard.episodes.mask.shape[1:] != self._shards[0].episodes.mask.shape[1:]:
                raise ValueError(
                    f"{folder}: shard {number} was collected in another env than shard 0; keep the episodes of one "
                    "env config in a folder."
                )
        unknown = sorted(set(cameras) - set(found))
        if unknown:
            raise ValueError(f"{folder} has no camera {unknown[0]!r}; it has {', '.join(found)}.")
        self._sizes = {name: found[name] for name in cameras or found}
        self.ids = [f"{s}:{row}" for s, shard in enumerate(self._shards) for row in range(len(shard.episodes.valid))]
        self._row = {name: row for row, name in enumerate(self.ids)}
        self.episodes = _merged([shard.episodes for shard in self._shards])
        self._num_frames = self.episodes.num_decisions + 1

    def shown(self, name: str) -> Shown | None:
        if name not in self._row:
            return None
        row = self._row[name]
        return Shown(
            instruction=self.episodes.instruction[row], num_frames=int(self._num_frames[row]), sizes=self._sizes
        )

    def frames(self, names: Sequence[str]) -> dict[str, Frames]:
        found: dict[str, Frames] = {}
        for shard in sorted({int(name.partition(":")[0]) for name in names}):
            rows = [int(name.partition(":")[2]) for name in names if int(name.partition(":")[0]) == shard]
            for row, images in self._read(shard, rows):
                name = f"{shard}:{row}"
                found[name] = {camera: frames[: self._num_frames[self._row[name]]] for camera, frames in images.items()}
        return found

    def _read(self, shard: int, rows: Sequence[int]) -> Sequence[tuple[int, Frames]]:
        if self._loaded is None:
            return list(read_frames(self._shards[shard].path, rows, list(self._sizes)))
        images = self._loaded[shard].images
        return [(row, {camera: images[camera][row] for camera in self._sizes}) for row in rows]


def _index_of(folder: Path, episodes: Episodes) -> ShardIndex:
    sizes = {camera: (images.shape[2], images.shape[3]) for camera, images in episodes.images.items()}
    return ShardIndex(path=folder, episodes=_bare(episodes), sizes=sizes)


def _bare(e: Episodes) -> Episodes:
    return replace(
        e, images={}, trace={}, state=e.state[..., :0], action=e.action[:, :, :0, :0], logp=e.logp[..., :0], version=0
    )


def _merged(parts: Sequence[Episodes]) -> Episodes:
    """All as one. Groups are numbered anew by start state: shards number theirs from wherever they began."""
    merged = concatenate([_bare(part) for part in parts])
    group = np.unique(merged.starts.seed, return_inverse=True)[1]
    return replace(merged, starts=Starts(seed=merged.starts.seed, group=group, member=merged.starts.member))
