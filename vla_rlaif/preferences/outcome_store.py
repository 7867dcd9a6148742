"""Which episodes ended in success, as somebody said: an append-only SQLite file beside the preference store."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from vla_rlaif.preferences.sqlite import Database, Kind, append_only

KIND = Kind(
    name="outcome store",
    application_id=0x564C4F43,  # "VLOC"
    version=1,
    statements=(
        """CREATE TABLE outcome (
    id INTEGER PRIMARY KEY, episode TEXT NOT NULL, instruction TEXT NOT NULL, p_success REAL,
    labeller TEXT NOT NULL, step INTEGER NOT NULL, time REAL NOT NULL
) STRICT""",
        *append_only("outcome"),
    ),
    remedy="restore it from a copy, or move it away to start a new one.",
    durable=True,
)
COLUMNS = "episode, instruction, p_success, labeller, step, time"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One answer to: did this episode end in success?"""

    episode: str  # id
    instruction: str
    p_success: float | None  # None: could not be said
    labeller: str  # name with version and settings
    step: int  # of the run
    time: float  # seconds since 1970

    def __post_init__(self) -> None:
        if self.p_success is not None and not 0 <= self.p_success <= 1:
            raise ValueError(f"p_success is a probability in [0, 1], or None; got {self.p_success}.")


class OutcomeStore:
    """For one thread at a time. Of several answers about an episode the newest counts."""

    def __init__(self, path: Path, *, timeout_s: float = 10.0) -> None:
        self._database = Database(path, KIND, timeout_s=timeout_s)

    def append(self, outcomes: Sequence[Outcome]) -> None:
        """All or none."""
        with self._database.transaction():
            for o in outcomes:
                row = (o.episode, o.instruction, o.p_success, o.labeller, o.step, o.time)
                self._database.execute(f"INSERT INTO outcome ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)", row)

    def newest(self) -> dict[str, Outcome]:
        """By episode id."""
        rows = self._database.execute(f"SELECT {COLUMNS} FROM outcome ORDER BY id")
        names = COLUMNS.split(", ")
        return {row[0]: Outcome(**dict(zip(names, row, strict=True))) for row in rows}

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> "OutcomeStore":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def outcome_path(store: Path) -> Path:
    """Where the outcomes are that belong to a preference store."""
    return store.with_suffix(".outcomes.sqlite")
