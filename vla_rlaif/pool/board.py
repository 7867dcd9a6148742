"""Which GPUs were given to whom. Lives in one detached named actor, so it outlives every scheduler; knows no Ray.

A claim is written before anything is created and wiped after everything is removed: a scheduler that dies in between
leaves a claim from which the next one finishes the job, in either direction.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path

from vla_rlaif.pool.lease import Fence
from vla_rlaif.pool.replica import Answer, Claim, write_audit
from vla_rlaif.pool.state import Gpu


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Ages are real seconds."""

    claim: Claim
    age_s: float
    is_created: bool  # its actor was asked for
    leaving_s: float | None  # since its release was ordered
    kill: bool  # without asking it


@dataclass(frozen=True)
class _Row:
    claim: Claim
    since: float
    is_created: bool = False
    leaving: float | None = None
    kill: bool = False


class Board:
    def __init__(self, audit: Path) -> None:
        self._audit, self._fence = audit, Fence()
        self._rows: dict[str, _Row] = {}
        self._generation: dict[Gpu, int] = {}
        self._keys: set[str] = set()

    def claim(self, token: int, key: str, claim: Claim) -> Answer:
        """Give GPUs to a replica. The assert would be two plans that contradict each other."""
        if (answer := self._admit(token, key)) != "begun":
            return answer
        taken = {gpu for row in self._rows.values() for gpu in row.claim.gpus}
        assert not taken & set(claim.gpus), f"{claim.replica} claims GPUs that are not free"
        self._put(claim)
        write_audit(self._audit, by="board", key=key, token=token)
        return "begun"

    def adopt(self, claim: Claim) -> None:
        """A replica that is there and has no claim: the board was lost with its node, and is made anew."""
        if claim.replica not in self._rows:
            self._put(claim)
            self._rows[claim.replica] = replace(self._rows[claim.replica], is_created=True)

    def created(self, name: str) -> None:
        if name in self._rows:
            self._rows[name] = replace(self._rows[name], is_created=True)

    def release(self, token: int, key: str, name: str, *, kill: bool) -> Answer:
        """Order the end of a replica."""
        if (answer := self._admit(token, key)) != "begun":
            return answer
        if name not in self._rows:
            return "known"
        row = self._rows[name]
        leaving = time.monotonic() if row.leaving is None else row.leaving
        self._rows[name] = replace(row, leaving=leaving, kill=kill or row.kill)
        write_audit(self._audit, by="board", key=key, token=token)
        return "begun"

    def wipe(self, token: int, name: str) -> Answer:
        """Nothing of the replica is left; its GPUs are free."""
        if not self._fence.passes(token):
            return "fenced"
        return "known" if self._rows.pop(name, None) is None else "begun"

    def entries(self, token: int) -> tuple[Entry, ...]:
        """To ask shuts out older schedulers."""
        self._fence.passes(token)
        now = time.monotonic()
        return tuple(
            Entry(
                claim=row.claim,
                age_s=now - row.since,
                is_created=row.is_created,
                leaving_s=None if row.leaving is None else now - row.leaving,
                kill=row.kill,
            )
            for row in self._rows.values()
        )

    def generation(self) -> dict[Gpu, int]:
        return dict(self._generation)

    def _admit(self, token: int, key: str) -> Answer:
        if not self._fence.passes(token):
            return "fenced"
        if key in self._keys:
            return "known"
        self._keys.add(key)
        return "begun"

    def _put(self, claim: Claim) -> None:
        self._rows[claim.replica] = _Row(claim, time.monotonic())
        for gpu in claim.gpus:
            self._generation[gpu] = max(self._generation.get(gpu, 0), _number(claim)) + 1


def _number(claim: Claim) -> int:
    """The generation in a replica's name, so that a new board goes on counting behind it."""
    last = claim.replica.rsplit("-", 1)[-1]
    return int(last) if last.isdigit() else 0
