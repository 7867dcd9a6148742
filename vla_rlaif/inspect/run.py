"""A run directory, finished, going on, half-written or old: whatever it has is shown, and what is damaged is said."""

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from vla_rlaif.inspect.clips import ClipsSource
from vla_rlaif.inspect.metrics_columns import MetricsColumns
from vla_rlaif.inspect.recorded import RecordedSource
from vla_rlaif.inspect.source import Frames, Numbers, Sizes, Source
from vla_rlaif.inspect.table import EpisodeTable, empty_table, joined
from vla_rlaif.metrics import FILE_NAME
from vla_rlaif.preferences.store import Preference, PreferenceStore

EVIDENCE = ("config.yaml", FILE_NAME, "result.json")  # any of these makes a folder a run
STORE_TIMEOUT_S = 1.0
Loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in EVIDENCE)


class Run:
    """A Source of the episodes that were kept and of the test clips, and all else that a run directory holds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = MetricsColumns(path)
        self._recorded, self._clips = RecordedSource(path / "episodes"), ClipsSource(path / "clips.npz")
        self._json: dict[str, tuple[int, Any]] = {}
        self._lock = threading.Lock()
        self._joined: tuple[tuple[EpisodeTable, ...], EpisodeTable] = ((), empty_table())
        self._problems: dict[str, str] = {}

    # ---- the episodes

    @property
    def table(self) -> EpisodeTable:
        recorded = self._tried("episodes", lambda: self._recorded.table)
        clips = self._tried("clips.npz", lambda: self._clips.table)
        parts = tuple(part for part in (recorded, clips) if part is not None and part.id)
        with self._lock:
            before, whole = self._joined
            if len(before) != len(parts) or any(a is not b for a, b in zip(before, parts, strict=True)):
                whole = joined(list(parts)) if parts else empty_table()
                self._joined = parts, whole
            return whole

    def sizes(self, name: str) -> Sizes:
        return self._source(name).sizes(name)

    def numbers(self, name: str) -> Numbers:
        return self._source(name).numbers(name)

    def sheet(self, name: str, camera: str) -> bytes:
        return self._source(name).sheet(name, camera)

    def frames(self, name: str) -> Frames:
        return self._source(name).frames(name)

    def _source(self, name: str) -> Source:
        return self._clips if name.startswith(("before:", "after:")) else self._recorded

    # ---- the rest

    @property
    def config(self) -> Mapping[str, Any] | None:
        return self._file("config.yaml", lambda text: yaml.load(text, Loader))

    @property
    def result(self) -> Mapping[str, Any] | None:
        """Written when the run has finished."""
        return self._file("result.json", json.loads)

    @property
    def manifest(self) -> Mapping[str, Any] | None:
        return self._file("manifest.json", json.loads)

    @property
    def card(self) -> Mapping[str, Any] | None:
        """Of the reward model: ``reward_card.json``."""
        return self._file("reward_card.json", json.loads)

    def setting(self, *keys: str) -> Any:
        """A value of the config by its path; None where it has no such key."""
        value: Any = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def preferences(self) -> tuple[Preference, ...]:
        """The records in force, oldest first."""
        path = self.path / "preferences.sqlite"
        if not path.exists():
            return ()

        def read() -> tuple[Preference, ...]:
            with PreferenceStore(path, timeout_s=STORE_TIMEOUT_S) as store:
                return store.records()

        return self._tried("preferences.sqlite", read) or ()

    @property
    def problems(self) -> list[str]:
        """What could not be read when it was last asked for."""
        return [*self._problems.values(), *self.metrics.problems[:5]]

    def _file(self, name: str, parse: Callable[[str], Any]) -> Any:
        """Parsed once for each time that it is written. None if it is missing, damaged or no mapping."""
        path = self.path / name
        if not path.is_file():
            self._problems.pop(name, None)
            return None
        mark = path.stat().st_mtime_ns
        if name not in self._json or self._json[name][0] != mark:
            self._json[name] = mark, self._tried(name, lambda: _mapping(path, parse))
        return self._json[name][1]

    def _tried[T](self, name: str, read: Callable[[], T]) -> T | None:
        try:
            found = read()
        except (ValueError, OSError) as error:
            self._problems[name] = str(error)
            return None
        self._problems.pop(name, None)
        return found


def _mapping(path: Path, parse: Callable[[str], Any]) -> Mapping[str, Any]:
    try:
        data = parse(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is damaged: {error}. Restore or delete it.") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a {type(data).__name__}; wanted a mapping of names to values.")
    return data
