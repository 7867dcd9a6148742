"""A live pool from day to night and back, in compressed time on Ray with fake GPUs: what robots and training notice.

A real small training run is drained at night, its GPUs collect, and in the morning it goes on; robots ask the policy
servers all the time; schedulers are killed at random in the middle of transitions (--kills). Printed: failed requests,
p99 in and out of transitions, lateness at the boundaries, the loss curve against an uninterrupted run's, what became of
the collected groups, and whether anything was done twice. Times are real seconds unless they say pool time.

    python benchmarks/pool_live.py --size small --kills 5
    python benchmarks/pool_live.py --size factory --out factory.json
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro
import yaml
from pool_rehearsal import Robots, Schedulers, Watcher, cluster, write_yaml
from pool_scenes import factory, hourly, remember_durations, run_of, small

from vla_rlaif.config import load_config
from vla_rlaif.dataset import num_shards, read_shard
from vla_rlaif.metrics import read_metrics
from vla_rlaif.pool.archive import Archive
from vla_rlaif.pool.calendar import shares_of
from vla_rlaif.pool.checks import load_pool
from vla_rlaif.pool.clock import HOUR, format_duration
from vla_rlaif.pool.committed import committed_step
from vla_rlaif.pool.config import PoolConfig
from vla_rlaif.pool.ledger import Ledger
from vla_rlaif.pool.live_clock import start_clock
from vla_rlaif.pool.replica import read_audit
from vla_rlaif.pool.simulate import Simulation
from vla_rlaif.pool.store import PoolStore

WAIT_S = 60.0  # for a standby to take over


@dataclass(frozen=True, kw_only=True)
class Options:
    size: Literal["small", "hourly", "factory"] = "small"
    """small: 8 GPUs on one node, a short night. hourly: the same, day and night take turns every hour, for many kills.
    factory: the calendar of configs/pool_factory.yaml on 8 x 8, a replica is a node."""
    kills: int = 0
    """Schedulers killed with SIGKILL, each at a random moment of a transition."""
    dead_node: bool = False
    """In the factory, kill a node on the morning after."""
    unit_s: float | None = None
    """What a process takes to load JAX here and now, in seconds: windows and deadlines are multiples of it. Default:
    measured before the rehearsal."""
    staleness: int = 0
    """With 0 the loss curve must not depend on who played the groups."""
    robots: int = 4
    pause_s: float = 0.2
    """Mean pause of a robot between a reply and its next request."""
    limit_s: float = 1200.0
    """The rehearsal ends with the run, and is given up after so long."""
    seed: int = 0
    folder: Path | None = None
    """Where the pool, the run and the record go; default: a temporary folder."""
    out: Path | None = None
    """Where to write the figures as JSON."""
    picture: Path | None = None
    """.svg or .png of what every GPU did."""


def main(options: Options) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        figures = rehearse(options, folder)
    for name, value in figures.items():
        print(f"{name}: {value}")
    if options.out is not None:
        options.out.write_text(json.dumps({"options": asdict(options), **figures}, indent=1, default=str))


def rehearse(options: Options, folder: Path) -> dict[str, Any]:
    state_dir = folder / "state"
    unit_s = options.unit_s or seconds_to_load()
    scene = {"small": small, "hourly": hourly, "factory": factory}[options.size](unit_s)
    pool = write_yaml(folder / "pool.yaml", scene.pool | {"state_dir": str(state_dir)})
    run = write_yaml(folder / "run.yaml", run_of(options.size, folder, unit_s, staleness=options.staleness))
    config, steps = load_pool(pool, now=0), load_config(run).loop.steps
    remember_durations(PoolStore(state_dir / "pool.sqlite"), options.size, scene.speed, unit_s)
    kills: list[float] = []
    with cluster(config.pool.nodes, config.pool.gpus_per_node) as nodes:
        clock = start_clock(state_dir / "clock.json", pool=scene.start, speed=scene.speed)
        schedulers = Schedulers(
            pool, run, str(nodes.address), folder / "schedulers.log", lease_s=max(2.0, 1.5 * unit_s)
        )
        schedulers.start()
        if options.kills:
            schedulers.start()
        begun = time.monotonic()
        rng, is_whole = random.Random(options.seed), options.dead_node
        with Watcher(state_dir) as watcher:
            while not any((state_dir / "endpoints").glob("*.json")):
                assert time.monotonic() - begun < options.limit_s, "no server came up"
                time.sleep(0.1)
            with Robots(state_dir / "endpoints", options.robots, options.pause_s) as robots:
                while committed_step(folder / "run") < steps or len(kills) < options.kills:
                    if time.monotonic() - begun > options.limit_s or (scene.end and clock.now() > scene.end):
                        break
                    if is_whole and scene.death and clock.now() > scene.death:
                        nodes.remove_node(next(iter(nodes.worker_nodes)), allow_graceful=False)
                        is_whole = False
                    if len(kills) < options.kills and watcher.is_in_transition():
                        kills.append(kill_one(schedulers, watcher, state_dir, rng))
                    time.sleep(0.2)
        schedulers.stop()
    end = clock.now()
    figures: dict[str, Any] = {"machine": f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"}
    figures |= {"unit_s": round(unit_s, 2), "speed": round(scene.speed, 1)}
    figures |= {"pool time": format_duration(end - scene.start), "real seconds": round(time.monotonic() - begun, 1)}
    figures |= serving(robots, watcher) | bookkeeping(state_dir, config, options.picture) | collected(folder)
    figures |= training(folder, run)
    figures["kills"] = len(kills)
    figures["read_only_schedulers"] = (folder / "schedulers.log").read_text().count("is read-only")
    figures["takeover_s"] = round(statistics.median(kills), 2) if kills else None
    return figures


def seconds_to_load() -> float:
    """Median of three."""
    times = []
    for _ in range(3):
        begun = time.monotonic()
        subprocess.run([sys.executable, "-c", "import jax; jax.devices()"], check=True)
        times.append(time.monotonic() - begun)
    return statistics.median(times)


def kill_one(schedulers: Schedulers, watcher: Watcher, state_dir: Path, rng: random.Random) -> float:
    """Kill the scheduler in charge within the next second; real seconds until another one has planned."""
    time.sleep(rng.uniform(0, 1))
    lease = json.loads((state_dir / "lease.json").read_text())
    killed = time.monotonic()
    schedulers.kill(lease["holder"])
    schedulers.start()
    while (watcher.status() or {}).get("holder") in (None, lease["holder"]):
        assert time.monotonic() - killed < WAIT_S, "no scheduler took over"
        time.sleep(0.02)
    return time.monotonic() - killed


def serving(robots: Robots, watcher: Watcher) -> dict[str, Any]:
    served = [r for r in robots.requests if r.is_served]
    inside = [r.seconds for r in served if watcher.was_in_transition(r)]
    outside = [r.seconds for r in served if not watcher.was_in_transition(r)]
    figure = lambda seconds, share: round(1e3 * float(np.percentile(seconds, share)), 1) if seconds else None  # noqa: E731
    return {
        "requests": len(robots.requests),
        "failed_requests": len(robots.requests) - len(served),
        "troubles": sorted({r.trouble for r in robots.requests if not r.is_served})[:5],
        "requests_in_transitions": len(inside),
        "p50_ms_in_transitions": figure(inside, 50),
        "p50_ms_outside": figure(outside, 50),
        "p99_ms_in_transitions": figure(inside, 99),
        "p99_ms_outside": figure(outside, 99),
        "slowest_ms": figure([r.seconds for r in served], 100),
    }


def bookkeeping(state_dir: Path, config: PoolConfig, picture: Path | None) -> dict[str, Any]:
    """Of the ledger and the audit."""
    sim = Archive(state_dir).history(config)
    ledger = sim.ledger
    keys = Counter((line["by"], line["key"]) for line in read_audit(state_dir / "audit.jsonl"))
    if picture is not None:
        from vla_rlaif.pool.charts import save, simulation_strip

        save([simulation_strip(sim, title="what every GPU did")], picture)
    late = {f"late {e.role} into {e.window}": format_duration(e.late) for e in ledger.lateness if e.arrived}
    handovers = [ledger.transition(share) for share in (0.5, 0.95)]
    return {
        "orders": sum(keys.values()),
        "out_of_order": out_of_order(state_dir),
        "done_twice": sum(n - 1 for n in keys.values()),
        "ledger_exact": ledger.total == config.pool.num_gpus * (ledger.now - ledger.start),
        "useful_share": round(ledger.useful_share, 4),
        "unseen_gpu_hours": round(sum(n for (_, _, s), n in ledger.spent.items() if s == "unseen") / HOUR, 2),
        "seconds_below_min (pool time)": {role: round(n / 1e6, 1) for role, n in ledger.below.items()},
        "of them after all stood for the first time": below_once_up(sim, config),
        "forced_ends": dict(ledger.kills),
        "handover_p50_p95 (pool time)": [None if h is None else format_duration(h) for h in handovers],
        "lateness (pool time)": late,
        "breaches": [f"{b.role} {b.active}/{b.minimum} for {format_duration(b.end - b.start)}" for b in sim.breaches],
    }


def below_once_up(sim: Simulation, config: PoolConfig) -> dict[str, float]:
    """Pool seconds below the minimum by role, not counting the pool's start from nothing."""
    ends = [at for at, _ in sim.series[1:]] + [sim.end]
    ledger: Ledger | None = None
    for (at, counts), end in zip(sim.series, ends, strict=True):
        for interval in sim.timeline.between(at, end):
            minimums = {role: share.min for role, share in shares_of(config, interval).items()}
            if ledger is None and all(counts.get((role, "active"), 0) >= n for role, n in minimums.items()):
                ledger = Ledger(start=max(at, interval.start), num_gpus=config.pool.num_gpus)
            if ledger is not None:
                ledger.advance(min(end, interval.end), window=interval.window, held=counts, minimums=minimums)
    assert ledger is not None, "the minimums were never reached"
    return {role: round(n / 1e6, 1) for role, n in ledger.below.items()}


def out_of_order(state_dir: Path) -> int:
    """Orders that came before one that must precede them: a newcomer is synced before it is admitted, one that leaves
    has drained before its checkpoint is verified, and is released last."""
    rank = {name: i for i, name in enumerate(("acquire", "warm", "sync", "admit", "drain", "leave", "checkpoint"))}
    rank |= {"release": len(rank), "kill": len(rank)}
    reached: dict[str, int] = {}
    wrong = 0
    for line in read_audit(state_dir / "audit.jsonl"):
        kind, replica = line["key"].split(":")[:2]
        if kind in rank:
            wrong += rank[kind] < reached.get(replica, 0)
            reached[replica] = rank[kind]
    return wrong


def collected(folder: Path) -> dict[str, Any]:
    """Groups in the store, and whether any is there twice."""
    lanes = sorted((folder / "store").glob("*")) if (folder / "store").exists() else []
    versions = [[read_shard(lane, i).version for i in range(num_shards(lane))] for lane in lanes]
    history = read_metrics(folder / "run" / "metrics.jsonl")
    used = [line for line in history if line["stored/used"]]
    return {
        "groups_collected": sum(map(len, versions)),
        "groups_twice": sum(len(v) - len(set(v)) for v in versions),
        "episodes_used": int(sum(line["stored/used"] for line in used)),
        "episodes_evicted": int(sum(line["stored/evicted"] for line in history)),
        "ages_used": dict(Counter(int(line["stored/age"]) for line in used)),
    }


def training(folder: Path, run: Path) -> dict[str, Any]:
    """The loss curve against that of one process that is never interrupted and knows no store."""
    live = read_metrics(folder / "run" / "metrics.jsonl")
    log = (folder / "run" / "trainer.log").read_text().splitlines()
    launches = [json.loads(path.read_text()) for path in (folder / "run").glob("launch-*.json")]
    data = yaml.safe_load(run.read_text()) | {"out": str(folder / "straight")}
    data["loop"] |= {"stored": None, "steps": min(len(live) + 1, data["loop"]["steps"])}  # the last step validates
    first = max(order["devices"] for order in launches)
    micro = next(order["micro_batches"] for order in launches if order["devices"] == first)
    data["learner"] |= {"devices": first, "micro_batches": micro}
    order = folder / "straight.json"
    order.write_text(json.dumps({"config": data, "devices": first, "micro_batches": micro}))
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={first}", "POOL_REHEARSAL_PAUSE_S": "0"}
    command = [sys.executable, "-m", "vla_rlaif.pool.trainer", str(order)]
    # Its stdin stays open: closing it would end it.
    with subprocess.Popen(command, env=os.environ | flags, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        assert process.wait() == 0, "the uninterrupted run failed"
    straight = read_metrics(folder / "straight" / "metrics.jsonl")
    pairs = list(zip([_comparable(a) for a in live], [_comparable(b) for b in straight], strict=False))
    equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    worst = max((abs(a["loss"] - b["loss"]) for a, b in pairs if "loss" in a), default=0.0)
    return {
        "steps": len(live),
        "each_step_once": [line["step"] for line in live] == list(range(len(live))),
        "train_gpus": dict(sorted(Counter(order["devices"] for order in launches).items())),
        "resumed_at": [int(line.rsplit(" ", 1)[1]) for line in log if line.startswith("resuming at step")],
        "metrics_bit_equal_until_step": equal,
        "loss_max_difference": worst,
        "success_equal": all(a["rollout/success"] == b["rollout/success"] for a, b in pairs),
        "success_first_last": [live[0]["rollout/success"], live[-1]["rollout/success"]],
    }


def _comparable(line: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on time, or on where the groups came from."""
    return {k: v for k, v in line.items() if not k.startswith(("time/", "minutes", "jax/", "stored/"))}


if __name__ == "__main__":
    main(tyro.cli(Options))
