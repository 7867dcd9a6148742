"""Parts of episode shards without the rest: the index of a folder, and the frames of single episodes.

A shard of a few hundred episodes holds hundreds of megabytes of frames; nothing here ever holds more than what it
returns.

Axes: N episodes of a folder, T decisions, F frames.
"""

import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from vla_rlaif.dataset import kind_of
from vla_rlaif.types import Episodes, Starts

_INDEX = ("mask", "valid", "success", "truth", "executed", "starts/seed", "starts/group", "starts/member")


@dataclass(frozen=True, kw_only=True)
class ShardIndex:
    """One shard, read without its frames, states and actions."""

    path: Path
    episodes: Episodes  # no images, and states and actions of no dims
    sizes: Mapping[str, tuple[int, int]]  # height and width of each camera, pixels


def read_index(folder: Path) -> list[ShardIndex]:
    """Every shard of a folder of episodes."""
    if (found := kind_of(folder)) != "episodes":
        raise ValueError(
            f"{folder} holds {found}, wanted episodes of a policy; `vla-rlaif collect --policy` makes them."
        )
    names = json.loads((folder / "manifest.json").read_text())["shards"]
    return [_read_shard(folder / name) for name in names]


def read_frames(path: Path, rows: Sequence[int], cameras: Sequence[str]) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """The frames of some rows, in ascending order of rows, in one pass over each camera: [F height width 3]."""
    wanted = sorted(set(rows))
    with _opened(path) as file:
        members = {camera: _rows(file, f"images/{camera}.npy", wanted) for camera in cameras}
        for row in wanted:
            yield row, {camera: next(frames) for camera, frames in members.items()}


def _read_shard(path: Path) -> ShardIndex:
    with _opened(path) as file:
        arrays = {name: _whole(file, f"{name}.npy") for name in _INDEX}
        instruction = tuple(_whole(file, "instruction.npy").tolist())
        version = int(_whole(file, "version.npy"))
        sizes = {}
        for member in file.namelist():
            if member.startswith("images/"):
                with _member(file, member) as data:
                    (_, _, height, width, _), _, _ = _header(data)
                sizes[member.removeprefix("images/").removesuffix(".npy")] = (height, width)
    starts = Starts(**{k.removeprefix("starts/"): arrays.pop(k) for k in _INDEX if k.startswith("starts/")})
    num, decisions = arrays["mask"].shape
    bare = Episodes(
        images={},
        trace={},
        state=np.zeros((num, decisions + 1, 0), np.float32),
        action=np.zeros((num, decisions, 0, 0), np.float32),
        logp=np.zeros((num, decisions, 0), np.float32),
        instruction=instruction,
        starts=starts,
        version=version,
        **arrays,
    )
    return ShardIndex(path=path, episodes=bare, sizes=sizes)


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as file:
            yield file
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path} is damaged or missing: {error}. Collect the dataset again.") from None


def _whole(file: zipfile.ZipFile, member: str) -> np.ndarray:
    with file.open(member) as data:
        return np.lib.format.read_array(data, allow_pickle=False)


def _member(file: zipfile.ZipFile, name: str) -> zipfile.ZipExtFile:
    data = file.open(name)
    assert isinstance(data, zipfile.ZipExtFile), "opened for reading"
    return data


def _header(data: zipfile.ZipExtFile) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether it is in Fortran order, dtype."""
    version = np.lib.format.read_magic(data)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(data)


def _rows(file: zipfile.ZipFile, member: str, wanted: Sequence[int]) -> Iterator[UInt8[np.ndarray, "F height width 3"]]:
    """Rows of the leading axis, ascending."""
    with _member(file, member) as data:
        shape, is_fortran, dtype = _header(data)
        if is_fortran:
            raise ValueError(f"{member} is stored in Fortran order, wanted row by row")
        size, begin = prod(shape[1:]) * dtype.itemsize, data.tell()
        for row in wanted:
            data.seek(begin + row * size)  # forwards: inflates what lies between, a piece at a time
            frames = data.read(size)
            if len(frames) != size:
                raise EOFError(f"{member} ends before row {row}")
            yield np.frombuffer(frames, dtype).reshape(shape[1:])
