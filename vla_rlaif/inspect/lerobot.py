"""Any LeRobotDataset, format v3.0, as a source: ours or recorded by another program. Reads one episode at a time.

Axes as in source.py.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vla_rlaif.inspect.source import BytesCache, Frames, Numbers, Sizes, say_ids
from vla_rlaif.inspect.table import EpisodeTable, bare_table
from vla_rlaif.lerobot_files import (
    ACTION,
    IMAGES,
    STATE,
    decode_video,
    episode_rows,
    open_files,
    read_notes,
    whole_columns,
)
from vla_rlaif.local_page.sheets import encode_sheet

SUCCESS, REWARD = "next.success", "next.reward"
OURS = ("truth", "valid", "seed", "group", "member", "version")  # of rollout.*, constant in an episode


class LeRobotSource:
    """A Source. Raises ValueError for what is no LeRobotDataset, an old one or a half-written one. Videos are decoded
    when they are looked at."""

    def __init__(self, path: Path) -> None:
        self.path, self._files = path, open_files(path)
        notes = read_notes(path)
        self._chunk = notes["chunk"] if notes is not None and notes["kind"] == "episodes" else None
        self._cameras = {key.removeprefix(IMAGES): key for key in self._files.cameras}
        self._cache = BytesCache()
        self.table = self._read_table()
        self._row = {name: row for row, name in enumerate(self.table.id)}

    def sizes(self, name: str) -> Sizes:
        self._number(name)
        return {camera: self._files.cameras[key] for camera, key in self._cameras.items()}

    def numbers(self, name: str) -> Numbers:
        episode, features = self._number(name), self._files.features
        names = [key for key in (STATE, ACTION, "rollout.logp", "rollout.executed") if key in features]
        values, length = episode_rows(self._files, episode, names), int(self._files.lengths[episode])
        action = values[ACTION] if ACTION in values else np.zeros((length, 0))
        chunk = 1 if self._chunk is None else self._chunk
        return Numbers(
            state=values[STATE] if STATE in values else np.zeros((length, 0)),
            action=action.reshape(length, chunk, -1),
            logp=values["rollout.logp"] if "rollout.logp" in values else np.zeros((length, 0)),
            executed=(values["rollout.executed"][:, 0] if "rollout.executed" in values else np.ones(length, np.int64)),
            progress=None,
        )

    def sheet(self, name: str, camera: str) -> bytes:
        if (kept := self._cache.get((name, camera))) is not None:
            return kept
        data = encode_sheet(self._frames(name, camera))
        self._cache.keep((name, camera), data)
        return data

    def frames(self, name: str) -> Frames:
        return {camera: self._frames(name, camera) for camera in self._cameras}

    def _frames(self, name: str, camera: str) -> np.ndarray:
        episode = self._number(name)
        if camera not in self._cameras:
            raise ValueError(f"{self.path} has no camera {camera!r}; it has {', '.join(self._cameras)}.")
        key = self._cameras[camera]
        if self._files.features[key]["dtype"] == "video":
            return decode_video(self._files, key, episode)
        return episode_rows(self._files, episode, [key])[key]

    def _number(self, name: str) -> int:
        if name not in self._row:
            raise ValueError(f"{self.path} has no episode {name!r}; it has {say_ids(self.table)}.")
        return self._row[name]

    def _read_table(self) -> EpisodeTable:
        files = self._files
        num, flat = files.num_episodes, [k for k in (SUCCESS, REWARD) if k in files.features]
        own = [f"rollout.{name}" for name in OURS if f"rollout.{name}" in files.features]
        read = whole_columns(files, ["episode_index", "task_index", *flat, *own])
        columns = {name: values[:, 0] for name, values in read.items()}
        episode = columns["episode_index"]
        first = np.searchsorted(episode, np.arange(num))
        table = replace(
            bare_table(num),
            instruction=tuple(files.tasks[task] for task in columns["task_index"][first].tolist()),
            decisions=files.lengths.astype(np.int64),
        )
        if SUCCESS in flat:
            any_success = np.bincount(episode, columns[SUCCESS].astype(np.float64), num) > 0
            table = replace(table, success=any_success.astype(np.float64))
        if REWARD in flat:
            table = replace(table, reward=np.bincount(episode, columns[REWARD].astype(np.float64), num))
        known: dict[str, Any] = {name.removeprefix("rollout."): columns[name][first] for name in own}
        return replace(table, **known)
