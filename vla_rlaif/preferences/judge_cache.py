"""Answers on disk by the content of the question: what was asked once is never asked again.

A key is 32 bytes of ``Question.digest``; L labels. Invalid answers are not kept. Several processes may share a file.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from vla_rlaif.preferences.sqlite import Database, Kind

KIND = Kind(
    name="judge cache",
    application_id=0x564C4A43,  # "VLJC"
    version=1,
    statements=("CREATE TABLE answer (key BLOB PRIMARY KEY, probabilities BLOB NOT NULL) STRICT, WITHOUT ROWID",),
    remedy="delete it; what it held will be asked again.",
    durable=False,
)


class JudgeCache:
    """Open it in the thread that uses it."""

    def __init__(self, path: Path, *, timeout_s: float = 10.0) -> None:
        self._database = Database(path, KIND, timeout_s=timeout_s)

    def get(self, key: bytes) -> Float[np.ndarray, " L"] | None:
        found = self._database.execute("SELECT probabilities FROM answer WHERE key = ?", (key,))
        return np.frombuffer(found[0][0], np.float64).copy() if found else None

    def put(self, items: Sequence[tuple[bytes, Float[np.ndarray, " L"]]]) -> None:
        """All or none. What is there already stays."""
        with self._database.transaction():
            for key, probabilities in items:
                values = (key, probabilities.astype(np.float64).tobytes())
                self._database.execute("INSERT OR IGNORE INTO answer (key, probabilities) VALUES (?, ?)", values)

    def close(self) -> None:
        self._database.close()
