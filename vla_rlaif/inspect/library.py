"""What a path holds that can be looked at: a run, a folder of runs, a dataset, the record of a pool."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vla_rlaif.dataset import format_of
from vla_rlaif.inspect.datasets import DatasetSource
from vla_rlaif.inspect.run import Run, is_run
from vla_rlaif.inspect.source import Source

LOOK_S = 2.0  # between looks for new runs
DEPTH = 2  # of folders below the one that is opened
Kind = Literal["run", "dataset", "lerobot", "pool"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    name: str  # unique in the library; "." is the path itself
    kind: Kind
    path: Path


def open_source(path: Path) -> Source:
    """A run directory, a dataset of ours or a LeRobotDataset, for looking at its episodes.

    Raises ValueError for anything else, a folder of several among it.
    """
    kind = _kind_of(path)
    if kind is None or kind == "pool":
        raise ValueError(_not_one(path))
    return _opened(kind, path)


def open_run(path: Path) -> Run:
    """Raises ValueError if it is none."""
    if not is_run(path):
        raise ValueError(_not_one(path))
    return Run(path)


class Library:
    """Everything in a path, by name. Opened when it is first asked for, kept open, and looked for anew now and then."""

    def __init__(self, root: Path) -> None:
        """Raises ValueError if there is nothing to look at."""
        self.root = root
        self._entries: dict[str, Entry] = {}
        self._opened: dict[str, Source] = {}
        self._looked = float("-inf")
        if not self.entries():
            raise ValueError(_not_one(root))

    def entries(self) -> list[Entry]:
        if time.monotonic() - self._looked > LOOK_S:
            self._entries = {entry.name: entry for entry in _find(self.root)}
            self._opened = {name: source for name, source in self._opened.items() if name in self._entries}
            self._looked = time.monotonic()
        return list(self._entries.values())

    def entry(self, name: str) -> Entry:
        if name not in self._entries:
            self.entries()  # it may be new
        if name not in self._entries:
            raise ValueError(f"{self.root} has no {name!r}; reload the list.")
        return self._entries[name]

    def source(self, name: str) -> Source:
        """Raises ValueError for what cannot be read, and for a pool, which has no episodes."""
        entry = self.entry(name)
        if entry.kind == "pool":
            raise ValueError(f"{entry.path} is the record of a pool and has no episodes.")
        if name not in self._opened:
            self._opened[name] = _opened(entry.kind, entry.path)
        return self._opened[name]


def _opened(kind: Kind, path: Path) -> Source:
    if kind == "run":
        return Run(path)
    if kind == "lerobot":
        from vla_rlaif.inspect.lerobot import LeRobotSource

        return LeRobotSource(path)
    return DatasetSource(path)


def _find(root: Path) -> list[Entry]:
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder; wanted a run directory, a folder of runs or a dataset.")
    kind = _kind_of(root)
    if kind is not None:
        return [Entry(name=".", kind=kind, path=root)]
    return list(_below(root, "", DEPTH))


def _below(folder: Path, prefix: str, depth: int) -> list[Entry]:
    found: list[Entry] = []
    for child in sorted(folder.iterdir()):
        if not child.is_dir() or child.name.startswith(".") or child.suffix in (".part", ".old"):
            continue
        kind, name = _kind_of(child), f"{prefix}{child.name}"
        if kind is not None:
            found.append(Entry(name=name, kind=kind, path=child))
        elif depth > 1:
            found += _below(child, f"{name}/", depth - 1)
    return found


def _kind_of(folder: Path) -> Kind | None:
    if is_run(folder):
        return "run"
    if (folder / "record.json").is_file() and (folder / "record.jsonl").is_file():
        return "pool"
    found = format_of(folder)
    return None if found is None else "dataset" if found == "npz" else "lerobot"


def _not_one(path: Path) -> str:
    if not path.exists():
        return f"{path} does not exist; wanted a run directory, a folder of runs or a dataset."
    return (
        f"{path} holds nothing to look at: no run (config.yaml or metrics.jsonl), no dataset (manifest.json) and "
        "no LeRobotDataset (meta/info.json), nor does a folder in it. `vla-rlaif train` and `collect` make them."
    )
