"""Who may act on the pool: one scheduler at a time. Any other one may look, and takes over when the lease runs out.

A lease alone cannot stop a scheduler that slept through its expiry, so every lease has a token that only grows, and
whoever executes actions refuses tokens below the highest it has seen (`Fence`).
"""

import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from vla_rlaif.pool.clock import Micros


@dataclass(frozen=True, kw_only=True)
class Lease:
    holder: str  # e.g. host:pid:random; unique to one run of one scheduler
    token: int  # grows with every change of the holder
    expires: Micros  # instant


def claim(current: Lease | None, *, holder: str, now: Micros, duration: Micros) -> Lease | None:
    """The lease that ``holder`` gets or renews; None while somebody else has it."""
    if current is None:
        return Lease(holder=holder, token=1, expires=now + duration)
    if current.holder == holder and now < current.expires:
        return Lease(holder=holder, token=current.token, expires=max(current.expires, now + duration))
    if now < current.expires:
        return None
    return Lease(holder=holder, token=current.token + 1, expires=now + duration)


class Fence:
    """Of one executor: the highest token it obeyed."""

    def __init__(self, token: int = 0) -> None:
        self.token = token

    def passes(self, token: int) -> bool:
        """Whether an action under this token may be executed; a newer scheduler shuts out the older ones."""
        self.token = max(self.token, token)
        return token == self.token


class FileLease:
    """The lease in a file that schedulers share. The caller passes the time, so nothing here waits."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def read(self) -> Lease | None:
        """Who has it, or had it last. Raises ValueError for a file that is no lease."""
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        try:
            data = json.loads(text)
            return Lease(holder=str(data["holder"]), token=int(data["token"]), expires=int(data["expires"]))
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{self._path} is not a lease ({error!r}): make sure no scheduler runs, and remove it."
            ) from None

    def claim(self, *, holder: str, now: Micros, duration: Micros) -> Lease | None:
        """Get or renew it; None while somebody else has it, and then this scheduler is read-only."""
        with self._path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # held for the few lines below; closing the file lets go
            lease = claim(self.read(), holder=holder, now=now, duration=duration)
            if lease is not None:
                self._write(lease)
            return lease

    def give_up(self, *, holder: str, now: Micros) -> None:
        """Let the next scheduler start at once. The token stays, so that the next one is higher."""
        with self._path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            current = self.read()
            if current is not None and current.holder == holder:
                self._write(Lease(holder=holder, token=current.token, expires=min(current.expires, now)))

    def _write(self, lease: Lease) -> None:
        draft = self._path.with_suffix(".tmp")
        with draft.open("w", encoding="utf-8") as file:
            json.dump(asdict(lease), file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._path)
