"""What episodes are read from. Axes of one episode: F frames, T decisions (T = F - 1, or F where each frame has an
action), H actions of a chunk, A action dims, P state dims, S sub-steps of a log-prob.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int, UInt8

from vla_rlaif.inspect.table import EpisodeTable

Frames = Mapping[str, UInt8[np.ndarray, "F height width 3"]]  # by camera
Sizes = Mapping[str, tuple[int, int]]  # height and width by camera, pixels


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """One episode without its frames, up to its end."""

    state: Float[np.ndarray, "F P"]  # env units
    action: Float[np.ndarray, "T H A"]  # env units
    logp: Float[np.ndarray, "T S"]  # nats; S is 0 where nobody recorded them
    executed: Int[np.ndarray, " T"]  # env steps of each chunk that ran
    progress: Float[np.ndarray, " F"] | None  # as the reward model sees it


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One episode whole."""

    id: str
    about: EpisodeTable  # of this one row
    numbers: Numbers
    frames: Frames


@runtime_checkable
class Source(Protocol):
    """Episodes by id. May be used from several threads; holds their frames no longer than it must."""

    @property
    def path(self) -> Path: ...

    @property
    def table(self) -> EpisodeTable:
        """As it is on disk now."""
        ...

    def sizes(self, name: str) -> Sizes:
        """Of the cameras of an episode. Raises ValueError if there is no such episode."""
        ...

    def numbers(self, name: str) -> Numbers: ...

    def sheet(self, name: str, camera: str) -> bytes:
        """All frames of a camera as one WebP picture (local_page/sheets.py)."""
        ...

    def frames(self, name: str) -> Frames: ...


def load_episode(source: Source, name: str) -> Episode:
    table = source.table
    if name not in table.id:
        raise ValueError(f"{source.path} has no episode {name!r}; it has {say_ids(table)}.")
    about = table.taken(np.array([table.id.index(name)]))
    return Episode(id=name, about=about, numbers=source.numbers(name), frames=source.frames(name))


def load_group(source: Source, name: str) -> tuple[Episode, ...]:
    """All members of an episode's group that are there, by member."""
    table = source.table
    if name not in table.id:
        raise ValueError(f"{source.path} has no episode {name!r}; it has {say_ids(table)}.")
    rows = np.flatnonzero(table.group_of == table.group_of[table.id.index(name)])
    return tuple(load_episode(source, table.id[row]) for row in rows[np.argsort(table.member[rows])].tolist())


def say_ids(table: EpisodeTable) -> str:
    return f"{table.id[0]!r} to {table.id[-1]!r}" if table.id else "none"


class BytesCache:
    """Pictures by key. The least recently used ones go when ``max_bytes`` are held."""

    def __init__(self, max_bytes: int = 128 * 2**20) -> None:
        self._max_bytes, self._kept, self._num_bytes = max_bytes, OrderedDict[tuple[str, str], bytes](), 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def get(self, key: tuple[str, str]) -> bytes | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def keep(self, key: tuple[str, str], data: bytes) -> None:
        with self._lock:
            self._num_bytes += len(data) - len(self._kept.pop(key, b""))
            self._kept[key] = data
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= len(self._kept.popitem(last=False)[1])
