"""Rows of the arrays of one .npz file, without the rest: a shard holds hundreds of megabytes of frames."""

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from math import prod
from pathlib import Path

import numpy as np


class Shard:
    """May be used from any thread: every read opens the file anew."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """Height and width of each camera, pixels."""
        with self._opened() as file:
            cameras = [name for name in file.namelist() if name.startswith("images/")]
            shapes = {name: _header(file, name)[0] for name in cameras}
        return {n.removeprefix("images/").removesuffix(".npy"): (s[2], s[3]) for n, s in shapes.items()}

    def whole(self, name: str) -> np.ndarray:
        with self._opened() as file, file.open(f"{name}.npy") as data:
            return np.lib.format.read_array(data, allow_pickle=False)

    def row(self, name: str, row: int) -> np.ndarray:
        """One row of the leading axis. What lies before it is inflated a piece at a time and not kept."""
        with self._opened() as file:
            shape, dtype, begin = _header(file, f"{name}.npy")
            size = prod(shape[1:]) * dtype.itemsize
            with file.open(f"{name}.npy") as data:
                data.seek(begin + row * size)
                found = data.read(size)
        if len(found) != size:
            raise self._problem(f"{name} ends before row {row}")
        return np.frombuffer(found, dtype).reshape(shape[1:])

    @contextmanager
    def _opened(self) -> Iterator[zipfile.ZipFile]:
        try:
            with zipfile.ZipFile(self.path) as file:
                yield file
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, KeyError) as error:
            raise self._problem(error) from None

    def _problem(self, error: object) -> ValueError:
        return ValueError(f"{self.path} is damaged or missing: {error}. Collect the dataset again.")


def _header(file: zipfile.ZipFile, member: str) -> tuple[tuple[int, ...], np.dtype, int]:
    """Shape, dtype, and where the numbers begin."""
    with file.open(member) as data:
        version = np.lib.format.read_magic(data)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(data)
        if is_fortran:
            raise ValueError(f"{member} is stored in Fortran order, wanted row by row")
        return shape, dtype, data.tell()
