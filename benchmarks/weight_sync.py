"""How long new weights take from the learner to two rollout workers, each in a process of its own.

    python benchmarks/weight_sync.py --out weight_sync.json              # about 15 minutes on two cores
    python benchmarks/weight_sync.py --millions 2 --repeats 3            # to see that it works
    python benchmarks/weight_sync.py --parts network --out network.json  # as root: two network namespaces

Everything is measured from the learner's arrays on the host until both workers have committed: manifest, packing,
checksums on both sides, staging and votes included. It is compared with one memcpy of the same bytes by one thread,
with the bare collective (gloo, one operation, no checks) and with the bare object store (put, get, copy; no checks).
Medians and bests; the first rounds, in which memory is taken from the system, are left out.
"""

import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import ray
import tyro
import weight_sync_network as network
from weight_sync_bench import Bench


@dataclass(frozen=True)
class Options:
    millions: tuple[float, ...] = (27.0, 93.0, 450.0)
    """Of float32 parameters, all of them trained."""
    repeats: int = 7
    receivers: int = 2
    parts: tuple[Literal["host", "dead", "network"], ...] = ("host", "dead")
    bucket_mb: int = 8
    store_gb: float = 8.0
    """Of Ray's object store: it holds up to three versions."""
    torch_up_to: float = 100.0
    """Millions of parameters up to which `ray.put(torch tensor)` is measured: it takes many seconds."""
    address: str = ""
    """Of a Ray cluster that runs; empty: start one. The part `network` sets it for itself."""
    out: Path | None = None


def make_bench(options: Options, millions: float, *, apart: bool) -> Bench:
    return Bench(
        millions,
        receivers=options.receivers,
        repeats=options.repeats,
        bucket_mb=options.bucket_mb,
        apart=apart,
    )


def one_size(options: Options, millions: float, *, apart: bool) -> dict[str, Any]:
    """Each transport has fresh workers: the memory of all together might not fit."""
    found: dict[str, Any] = {"millions": millions}
    flat_mb = -(-round(millions * 4e6 * 1.1) >> 20)
    rows: dict[str, Callable[[Bench], Any]] = {
        "shared_memory": lambda bench: bench.transport("shared_memory", copying=True),
        "process_group": lambda bench: bench.transport("process_group"),
        "relay": lambda bench: bench.transport("relay"),
        "process_group_flat": lambda bench: bench.transport("process_group", bucket_mb=flat_mb),
        "object_store": lambda bench: bench.transport("object_store"),
    }
    del rows["shared_memory" if apart else "relay"]
    for name, measure in rows.items():
        bench = make_bench(options, millions, apart=apart)
        try:
            found[name] = measure(bench)
            say(f"{millions:g} M {name}", found[name])
            if name == "process_group":
                found["memcpy_s"], found["streamed_memcpy_s"] = bench.memcpy()
                bench.make_room()
                found["bare_gloo_flat"] = bench.collective(bench.num_bytes)
                found["bare_gloo_buckets"] = bench.collective(options.bucket_mb << 20)
                say(f"{millions:g} M bare", {k: v for k, v in found.items() if k.startswith("bare") or "memcpy" in k})
            if name == "object_store":
                bench.make_room()
                found["bare_ray_numpy"] = bench.object_store(as_torch=False)
                if millions <= options.torch_up_to:
                    found["bare_ray_torch"] = bench.object_store(as_torch=True)
                say(f"{millions:g} M bare", {k: v for k, v in found.items() if k.startswith("bare_ray")})
            found["num_bytes"] = bench.num_bytes
        finally:
            bench.close()
    return found


def dead_receivers(options: Options, *, apart: bool) -> dict[str, Any]:
    found = {}
    for transport in ("process_group", "relay" if apart else "shared_memory"):
        bench = make_bench(options, sorted(options.millions)[len(options.millions) // 2], apart=apart)
        try:
            found[transport] = bench.dead(transport)
            say(f"killed -9 in mid-transfer, {transport}", found[transport])
        finally:
            bench.close()
    return found


def goals(row: dict[str, Any], *, apart: bool) -> dict[str, float]:
    """What docs/weight_sync.md promises, as ratios."""
    store = min(row[name]["total_s"] for name in ("object_store", "bare_ray_numpy"))
    if apart:
        best, raw = row["relay"]["total_s"], min(row[f"bare_gloo_{way}"]["total_s"] for way in ("flat", "buckets"))
        return {"object_store / ours": store / best, "bare collective / ours": raw / best}
    ours = row["shared_memory"]["total_s"]
    return {
        "ours / memcpy": ours / row["memcpy_s"],
        "ours / streamed memcpy": ours / row["streamed_memcpy_s"],
        "object_store / ours": store / ours,
    }


def measure(options: Options, *, apart: bool) -> dict[str, Any]:
    timed = "host" in options.parts or apart
    sizes = [one_size(options, millions, apart=apart) for millions in options.millions if timed]
    for row in sizes:
        row["goals"] = goals(row, apart=apart)
        say(f"{row['millions']:g} M", row["goals"])
    return {"sizes": sizes} | ({"dead": dead_receivers(options, apart=apart)} if "dead" in options.parts else {})


def say(what: str, numbers: dict[str, Any]) -> None:
    def text(value: Any) -> str:
        return f"{value:.4f}" if isinstance(value, float) else str(value)

    def line(value: Any) -> str:
        return " ".join(f"{k}={text(v)}" for k, v in value.items()) if isinstance(value, dict) else text(value)

    print(f"{what}: " + ", ".join(f"{name} {line(value)}" for name, value in numbers.items()), flush=True)


def main(options: Options) -> None:
    machine = {"platform": platform.platform(), "cpus": len(os.sched_getaffinity(0)), "load": os.getloadavg()}
    result: dict[str, Any] = {"machine": machine, "options": asdict(options)}
    variables = {"RAY_AUTH_MODE": "disabled", "RAY_raylet_start_wait_time_s": "180"}
    variables["RAY_prestart_worker_first_driver"] = "0"  # else as many processes as there are CPUs start for nothing
    os.environ.update(variables)
    if options.address:
        ray.init(address=options.address, log_to_driver=False)
        result |= measure(options, apart=True)
        ray.shutdown()
    else:
        if "host" in options.parts or "dead" in options.parts:
            ray.init(
                address="local",
                num_cpus=options.receivers + 3,
                object_store_memory=round(options.store_gb * 1e9),
                include_dashboard=False,
                log_to_driver=False,
            )
            result["host"] = measure(options, apart=False)
            ray.shutdown()
        if "network" in options.parts:
            arguments = ["--repeats", str(options.repeats), "--receivers", str(options.receivers)]
            arguments += ["--bucket-mb", str(options.bucket_mb), "--torch-up-to", str(options.torch_up_to)]
            arguments += ["--millions", *map(str, options.millions), "--parts", "network", "dead"]
            result["network"] = network.run(Path(__file__), arguments, store_gb=options.store_gb)
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1, default=str))


if __name__ == "__main__":
    main(tyro.cli(Options))
