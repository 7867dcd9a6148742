"""How long planning and simulating take, and what the example calendar achieves: 30 days of 64 GPUs.

    python benchmarks/pool.py --out pool.json

CPU seconds of one thread, so that other load on the machine counts little; the best of the repetitions.
"""

import json
import platform
import statistics
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import tyro

from vla_rlaif.pool.calendar import around
from vla_rlaif.pool.checks import load_pool
from vla_rlaif.pool.clock import DAY, HOUR, resolve, zone_of
from vla_rlaif.pool.config import PoolConfig
from vla_rlaif.pool.simulate import Simulation, simulate
from vla_rlaif.pool.staleness import total
from vla_rlaif.pool.trace import node_failures


@dataclass(frozen=True)
class Options:
    config: tyro.conf.Positional[Path] = Path("configs/pool_factory.yaml")
    days: int = 30
    start: str = "2026-10-12T00:00"
    """Wall clock. The default month holds the end of summer time and, from 2 November, an exception."""
    repetitions: int = 3
    out: Path | None = None


def main(options: Options) -> None:
    moment = datetime.fromisoformat(options.start)
    config = load_pool(options.config, now=0)
    start = resolve(moment, zone_of(config.timezone))
    rows = {}
    for per_day in (0.0, 1.0):
        samples = [measure(config, start, options.days, per_day) for _ in range(options.repetitions)]
        seconds, run = min(samples, key=lambda sample: sample[0])
        rows[f"{per_day:g} node failures a day"] = figures(run, seconds)
    begin = time.process_time()
    around(config, start)
    rows["compile"] = {"seconds": round(time.process_time() - begin, 4)}
    for name, row in rows.items():
        print(name)
        for key, value in row.items():
            print(f"  {key}: {value}")
    if options.out is not None:
        machine = {"python": platform.python_version(), "machine": platform.machine()}
        options.out.write_text(json.dumps({"machine": machine} | rows, indent=1))


def measure(config: PoolConfig, start: int, days: int, per_day: float) -> tuple[float, Simulation]:
    """CPU seconds of one simulation, failures included."""
    begin = time.process_time()
    events = node_failures(config, start=start, end=start + days * DAY, per_day=per_day, repair=HOUR, seed=0)
    run = simulate(config, start=start, days=float(days), events=events)
    return time.process_time() - begin, run


def figures(run: Simulation, seconds: float) -> dict[str, object]:
    ledger, use = run.ledger, total(run.uses.values())
    worst = [entry.late / 1e6 for entry in ledger.lateness]
    return {
        "CPU seconds": round(seconds, 2),
        "plans": run.num_plans,
        "milliseconds per plan, simulated pool included": round(1e3 * seconds / run.num_plans, 3),
        "useful share of GPU time": round(ledger.useful_share, 5),
        "GPU time is exact": ledger.total == ledger.num_gpus * (run.end - run.start),
        "seconds below the minimum": {role: ledger.below[role] / 1e6 for role in run.config.ranked},
        "kills": dict(ledger.kills),
        "GPU-hours lost": {role: round(lost / HOUR, 2) for role, lost in ledger.lost.items()},
        "handover p50, p95 (s)": [round((ledger.transition(share) or 0) / 1e6, 1) for share in (0.5, 0.95)],
        "late at a boundary: median, worst (s)": [round(statistics.median(worst), 1), round(max(worst), 1)],
        "GPU-hours that staleness would discard": round(use.discarded, 1),
    }


if __name__ == "__main__":
    main(tyro.cli(Options))
