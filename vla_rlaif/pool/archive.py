"""The record of a live pool on disk, in its `state_dir`, and what people see of it.

record.json    the sums of the ledger, written at every look
record.jsonl   one line for every change of who has what, every handover, delay and violation
status.json    what the scheduler saw, wanted and did last
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vla_rlaif.pool.accounts import Breach
from vla_rlaif.pool.calendar import AHEAD, compile_timeline
from vla_rlaif.pool.clock import Micros
from vla_rlaif.pool.config import PoolConfig
from vla_rlaif.pool.ledger import NOBODY, Handover, Lateness, Ledger
from vla_rlaif.pool.live_clock import LiveClock
from vla_rlaif.pool.record import UNSEEN, Counts, Record
from vla_rlaif.pool.simulate import Simulation


class Archive:
    def __init__(self, state_dir: Path) -> None:
        self._sums, self._events = state_dir / "record.json", state_dir / "record.jsonl"
        self._status = state_dir / "status.json"
        self._written: Counter[str] = Counter()  # events of this scheduler, by kind
        self._last: Counts | None = None

    def open(self, clock: LiveClock, config: PoolConfig, now: Micros) -> Record:
        """Go on with what is there. Raises ValueError for the record of a pool of another size."""
        if not self._sums.exists():
            ledger = Ledger(start=now, num_gpus=config.pool.num_gpus)
            return Record(clock, ledger, {(NOBODY, UNSEEN): config.pool.num_gpus})
        data = json.loads(self._sums.read_text())
        if data["num_gpus"] != config.pool.num_gpus:
            raise ValueError(
                f"{self._sums} is of a pool of {data['num_gpus']} GPUs, this one has {config.pool.num_gpus}: "
                "choose another state_dir."
            )
        record = Record(clock, _ledger(data), _counts(data["counts"]))
        record.latency.update({(is_in, p99): duration for is_in, p99, duration in data["latency"]})
        return record

    def write(self, record: Record, status: Mapping[str, Any]) -> None:
        with self._events.open("a", encoding="ascii") as file:
            for kind, fields in self._news(record):
                file.write(json.dumps({kind: fields}) + "\n")
        ledger = record.ledger
        data: dict[str, Any] = {"start": ledger.start, "now": ledger.now, "num_gpus": ledger.num_gpus}
        data["spent"] = [[*key, n] for key, n in ledger.spent.items()]
        data |= {name: dict(counter) for name, counter in _counters(ledger).items()}
        data["counts"] = _rows(record.counts)
        data["latency"] = [[*key, duration] for key, duration in record.latency.items()]
        _replace(self._sums, data)
        _replace(self._status, status)

    def status(self) -> dict[str, Any] | None:
        """None before the first look."""
        return json.loads(self._status.read_text()) if self._status.exists() else None

    def history(self, config: PoolConfig) -> Simulation:
        """What happened, as tables and strip charts want it. Raises ValueError before the first look."""
        if not self._sums.exists():
            raise ValueError(f"{self._sums} does not exist: no scheduler has looked at this pool yet.")
        data = json.loads(self._sums.read_text())
        ledger, breaches, series = _ledger(data), [], []
        for is_in, p99_ms, duration in data["latency"]:
            ledger.record_latency(p99_ms, duration, in_transition=is_in)
        for kind, fields in self._read_events():
            match kind:
                case "handover":
                    ledger.handovers.append(Handover(**fields))
                case "lateness":
                    ledger.lateness.append(Lateness(**fields))
                case "breach":
                    breaches.append(Breach(**fields))
                case _:
                    series.append((fields["at"], dict(_counts(fields["gpus"]))))
        return Simulation(
            config=config,
            timeline=compile_timeline(config, ledger.start, ledger.now + AHEAD),
            start=ledger.start,
            end=ledger.now,
            ledger=ledger,
            series=[(at, counts) for at, counts in series if at < ledger.now],
            breaches=breaches,
        )

    def _news(self, record: Record) -> Iterator[tuple[str, dict[str, Any]]]:
        if record.counts != self._last:
            self._last = dict(record.counts)
            yield "counts", {"at": record.ledger.now, "gpus": _rows(record.counts)}
        lists = {
            "handover": record.ledger.handovers,
            "lateness": record.ledger.lateness,
            "breach": record.breaches,
        }
        for kind, entries in lists.items():
            for entry in entries[self._written[kind] :]:
                yield kind, asdict(entry)
            self._written[kind] = len(entries)

    def _read_events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for line in self._events.read_text(encoding="ascii").splitlines():
            if line.endswith("}}"):  # else the scheduler was killed in the middle of it
                yield from json.loads(line).items()


def _counters(ledger: Ledger) -> dict[str, Counter[str]]:
    return {
        "below": ledger.below,
        "missing": ledger.missing,
        "preemptions": ledger.preemptions,
        "kills": ledger.kills,
        "lost": ledger.lost,
        "carried": ledger.carried,
    }


def _ledger(data: Mapping[str, Any]) -> Ledger:
    """The sums; not the lists."""
    ledger = Ledger(start=data["start"], num_gpus=data["num_gpus"])
    ledger.now = data["now"]
    ledger.spent.update({(role, window, state): n for role, window, state, n in data["spent"]})
    for name, counter in _counters(ledger).items():
        counter.update(data[name])
    return ledger


def _rows(counts: Counts) -> list[list[str | int]]:
    return [[role, state, n] for (role, state), n in counts.items()]


def _counts(rows: list[list[Any]]) -> Counts:
    return {(role, state): n for role, state, n in rows}


def _replace(path: Path, data: Mapping[str, Any]) -> None:
    """Whole or not at all. Written every second or so, hence not synced to the disk: only a power cut loses some."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(data), encoding="ascii")
    os.replace(part, path)
