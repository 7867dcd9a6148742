"""What tests do to files of SQLite."""

from pathlib import Path


def damage(path: Path) -> None:
    """The first page, by which the file is known, stays; what is behind it becomes noise."""
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    path.write_bytes(data)
