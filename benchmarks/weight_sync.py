"""How long new weights take from the learner to two rollout workers, each in a process of its own.

    python benchmarks/weight_sync.py --out weight_sync.json              # about 15 minutes on two cores
    python benchmarks/weight_sync.py --millions 2 --repeats 3            # to see that it works
    python benchmarks/weight_sync.py --parts network --out network.json  # as root: two network namespaces

Everything is measured from the learner's arrays on the host until both workers have committed: manifest, packing,
checksums on both sides, staging and votes included. It is compared with one memcpy of the same bytes by one thread,
with the bare collective (gloo, one operation, no checks) and with the bare object store (put, get, copy; no checks),
in turns with ours: with a learner as it is started here, whose copies pass by the cache, and with plain processes.
Medians and bests; the first rounds, in which memory is taken from the system, are left out.
"""

import contextlib
import json
import os
import platform
from collections.abc import Callable, Iterator
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
    ours = "relay" if apart else "shared_memory"
    rows: dict[str, Callable[[Bench], Any]] = {
        "turns_plain": lambda bench: bench.turns(ours),  # first: what Ray's store has used once stays in memory
        "turns": lambda bench: bench.turns(ours),
        ours: lambda bench: bench.transport(ours, copying=not apart),
        "process_group": lambda bench: bench.transport("process_group"),
        "process_group_flat": lambda bench: bench.transport("process_group", bucket_mb=flat_mb),
        "object_store": lambda bench: bench.transport("object_store"),
    }
    for name, measure in rows.items():
        with plain_processes() if name.endswith("plain") else contextlib.nullcontext():
            bench = make_bench(options, millions, apart=apart)
        try:
            found[name] = measure(bench)
            say(f"{millions:g} M {name}", found[name])
            if name == "process_group":
                bench.make_room()
                found["bare_gloo_flat"] = bench.bare(bench.collective(bench.num_bytes))
                say(f"{millions:g} M bare", {"bare_gloo_flat": found["bare_gloo_flat"]})
            if name == "object_store" and millions <= options.torch_up_to:
                bench.make_room()
                found["bare_ray_torch"] = bench.bare(bench.object_store(as_torch=True), 2)
                say(f"{millions:g} M bare", {"bare_ray_torch": found["bare_ray_torch"]})
            found["num_bytes"] = bench.num_bytes
        finally:
            bench.close()
    return found


@contextlib.contextmanager
def plain_processes() -> Iterator[None]:
    """Learners that start in it have glibc's own settings: it takes no notice of a value below its least."""
    os.environ["GLIBC_TUNABLES"] = "glibc.cpu.x86_non_temporal_threshold=0"
    try:
        yield
    finally:
        del os.environ["GLIBC_TUNABLES"]


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


def measure(options: Options, *, apart: bool) -> dict[str, Any]:
    timed = "host" in options.parts or apart
    sizes = [one_size(options, millions, apart=apart) for millions in options.millions if timed]
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
