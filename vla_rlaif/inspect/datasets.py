"""Datasets of ours as sources: shards of episodes or of demonstrations, read a row at a time.

Axes as in source.py; N episodes of a shard.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vla_rlaif.dataset import kind_of
from vla_rlaif.inspect.npz_rows import Shard
from vla_rlaif.inspect.source import BytesCache, Frames, Numbers, Sizes, say_ids
from vla_rlaif.inspect.table import EpisodeTable, bare_table, empty_table, joined
from vla_rlaif.local_page.sheets import encode_sheet

EPISODE_COLUMNS = ("mask", "success", "truth", "valid", "starts/seed", "starts/group", "starts/member")


@dataclass(frozen=True)
class _Place:
    shard: Shard
    row: int
    frames: int
    decisions: int


class DatasetSource:
    """A Source over a folder that `collect` wrote. It does not follow one that grows: open it again."""

    def __init__(self, path: Path) -> None:
        self.path, kind = path, kind_of(path)
        names = json.loads((path / "manifest.json").read_text())["shards"]
        self._shards = [Shard(path / name) for name in names]
        read = _episodes if kind == "episodes" else _demonstrations
        parts = [read(shard, number) for number, shard in enumerate(self._shards)]
        self.table = joined(parts) if parts else empty_table()
        extra = 1 if kind == "episodes" else 0  # the frame after the last decision
        self._places = {
            name: _Place(shard, row, int(num) + extra, int(num))
            for shard, part in zip(self._shards, parts, strict=True)
            for row, (name, num) in enumerate(zip(part.id, part.decisions, strict=True))
        }
        self._has_logp, self._cache = kind == "episodes", BytesCache()

    def sizes(self, name: str) -> Sizes:
        return self._place(name).shard.sizes

    def numbers(self, name: str) -> Numbers:
        here = self._place(name)
        row = lambda member: here.shard.row(member, here.row)  # noqa: E731
        action = row("action")[: here.decisions]
        if not self._has_logp:
            action = action[:, None]  # a demonstrator chooses one action at a time
        return Numbers(
            state=row("state")[: here.frames],
            action=action,
            logp=row("logp")[: here.decisions] if self._has_logp else np.zeros((here.decisions, 0)),
            executed=row("executed")[: here.decisions] if self._has_logp else np.ones(here.decisions, np.int64),
            progress=None,
        )

    def sheet(self, name: str, camera: str) -> bytes:
        if (kept := self._cache.get((name, camera))) is not None:
            return kept
        here = self._place(name)
        if camera not in here.shard.sizes:
            raise ValueError(f"{self.path} has no camera {camera!r}; it has {', '.join(here.shard.sizes)}.")
        data = encode_sheet(here.shard.row(f"images/{camera}", here.row)[: here.frames])
        self._cache.keep((name, camera), data)
        return data

    def frames(self, name: str) -> Frames:
        here = self._place(name)
        return {c: here.shard.row(f"images/{c}", here.row)[: here.frames] for c in here.shard.sizes}

    def _place(self, name: str) -> _Place:
        if name not in self._places:
            raise ValueError(f"{self.path} has no episode {name!r}; it has {say_ids(self.table)}.")
        return self._places[name]


def _episodes(shard: Shard, number: int) -> EpisodeTable:
    arrays: Mapping[str, np.ndarray] = {name: shard.whole(name) for name in EPISODE_COLUMNS}
    version, num = int(shard.whole("version")), len(arrays["success"])
    return replace(
        _table(shard, number, num),
        group=arrays["starts/group"].astype(np.int64),
        member=arrays["starts/member"].astype(np.int64),
        seed=arrays["starts/seed"].astype(np.int64),
        version=np.full(num, version),
        success=arrays["success"].astype(np.float64),
        truth=arrays["truth"].astype(np.float64),
        valid=arrays["valid"],
        decisions=arrays["mask"].sum(axis=1),
    )


def _demonstrations(shard: Shard, number: int) -> EpisodeTable:
    success, mask = shard.whole("success"), shard.whole("mask")
    table = _table(shard, number, len(success))
    return replace(table, success=success.astype(np.float64), decisions=mask.sum(axis=1))


def _table(shard: Shard, number: int, num: int) -> EpisodeTable:
    texts: Sequence[str] = shard.whole("instruction").tolist()
    ids = tuple(f"{number}:{row}" for row in range(num))
    return replace(bare_table(num), id=ids, instruction=tuple(texts), step=np.full(num, number))
