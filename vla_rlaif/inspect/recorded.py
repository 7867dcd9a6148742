"""The episodes that a run keeps as it trains, as ``vla_rlaif.recording`` writes them. Follows a running job.

Axes as in source.py.
"""

import json
import os
import threading
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vla_rlaif.inspect.source import Frames, Numbers, Sizes, say_ids
from vla_rlaif.inspect.table import EpisodeTable, bare_table, empty_table, joined
from vla_rlaif.local_page.sheets import decode_sheet
from vla_rlaif.recording import FORMAT, INDEX

NUMBERS = ("state", "action", "logp", "executed", "mask")


@dataclass(frozen=True)
class _Place:
    """Where an episode lies."""

    file: str
    place: int
    sizes: Sizes
    decisions: int


class RecordedSource:
    """A Source over ``run_dir/episodes``, which may be missing or grow. Holds the index and no frames."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._index, self._lock = folder / INDEX, threading.Lock()
        self._mark: tuple[int, int] = (0, 0)  # inode of what was read, and how many bytes of it
        self._parts: list[EpisodeTable] = []
        self._places: dict[str, _Place] = {}
        self._table = empty_table()

    @property
    def table(self) -> EpisodeTable:
        with self._lock:
            self._follow()
            return self._table

    def sizes(self, name: str) -> Sizes:
        return self._place(name).sizes

    def numbers(self, name: str) -> Numbers:
        here = self._place(name)
        path = self.path / here.file
        arrays = {key: _read(path, f"numbers/{key}.npy", here.place) for key in NUMBERS}
        num = here.decisions
        return Numbers(
            state=arrays["state"][: num + 1],
            action=arrays["action"][:num],
            logp=arrays["logp"][:num],
            executed=arrays["executed"][:num],
            progress=_progress(path, here.place, num),
        )

    def sheet(self, name: str, camera: str) -> bytes:
        here = self._place(name)
        if camera not in here.sizes:
            raise ValueError(f"episode {name} has no camera {camera!r}; it has {', '.join(here.sizes)}.")
        with _Opened(self.path / here.file) as file:
            return file.read(f"frames/{camera}/{here.place}.webp")

    def frames(self, name: str) -> Frames:
        here = self._place(name)
        return {c: decode_sheet(self.sheet(name, c), here.decisions + 1, size) for c, size in here.sizes.items()}

    def _place(self, name: str) -> _Place:
        if name not in self._places:
            table = self.table
            if name not in self._places:
                raise ValueError(f"{self.path} has no episode {name!r}; it has {say_ids(table)}.")
        return self._places[name]

    def _follow(self) -> None:
        """Read what was added to the index; all of it, if the run went back to a checkpoint or was started anew."""
        try:
            with self._index.open("rb") as file:
                inode, size = _identity(file.fileno())
                if (inode, size) == self._mark:
                    return
                if inode != self._mark[0] or size < self._mark[1]:
                    self._mark, self._parts, self._places = (inode, 0), [], {}
                file.seek(self._mark[1])
                data = file.read()
        except FileNotFoundError:
            self._mark, self._parts, self._places, self._table = (0, 0), [], {}, empty_table()
            return
        whole = data[: data.rfind(b"\n") + 1]  # the run may be in the middle of a line
        for line in whole.splitlines():
            self._add(_parse(line, self._index))
        self._mark = (inode, self._mark[1] + len(whole))
        self._table = joined(self._parts) if self._parts else empty_table()

    def _add(self, line: Mapping[str, Any]) -> None:
        ids = [f"{line['step']}:{row}" for row in line["row"]]
        sizes = {camera: (height, width) for camera, (height, width) in line["cameras"].items()}
        number = lambda name: np.array(line[name], np.float64)  # noqa: E731 # null becomes NaN
        self._parts.append(
            replace(
                bare_table(len(ids), origin="train"),
                id=tuple(ids),
                instruction=tuple(line["instruction"]),
                step=np.full(len(ids), line["step"]),
                version=np.full(len(ids), line["version"]),
                **{name: np.array(line[name], np.int64) for name in ("group", "member", "seed", "decisions")},
                **{name: number(name) for name in ("reward", "advantage", "success", "truth")},
                valid=np.array(line["valid"], bool),
            )
        )
        for place, name in enumerate(ids):
            self._places[name] = _Place(line["file"], place, sizes, line["decisions"][place])


def _identity(descriptor: int) -> tuple[int, int]:
    """Inode and size."""
    found = os.fstat(descriptor)
    return found.st_ino, found.st_size


def _parse(line: bytes, path: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged: {error}. Its other files are whole; train again to record anew."
        ) from None
    if data.get("format") != FORMAT:
        raise ValueError(f"{path} has format {data.get('format')!r}; this version reads {FORMAT}.")
    return data


class _Opened:
    """A step's file. Raises ValueError for one that is damaged, or gone because the run went back before it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> zipfile.ZipFile:
        try:
            self._file = zipfile.ZipFile(self._path)
        except (zipfile.BadZipFile, OSError) as error:
            raise self._problem(error) from None
        return self._file

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        self._file.close()
        if isinstance(error, zipfile.BadZipFile | zlib.error | EOFError | OSError | KeyError):
            raise self._problem(error) from None

    def _problem(self, error: BaseException) -> ValueError:
        return ValueError(
            f"{self._path} is damaged or missing: {error}. The run may have gone back to a checkpoint: list it again."
        )


def _read(path: Path, member: str, place: int) -> np.ndarray:
    with _Opened(path) as file, file.open(member) as data:
        return np.lib.format.read_array(data, allow_pickle=False)[place]


def _progress(path: Path, place: int, num: int) -> np.ndarray | None:
    member = "numbers/progress.npy"
    with _Opened(path) as file:
        has_progress = member in file.namelist()
    return _read(path, member, place)[: num + 1] if has_progress else None
