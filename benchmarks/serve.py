"""How many robots a policy server answers, how fast, and what batching gains.

The robots are in another process; each has one request at a time and pauses between a reply and the next request.
Sides: batches of one; batches of ``max_batch``; the same with a weight swap every ``swap_every_s``. Latency is the
robot's: from sending a request to holding the reply. With ``think_ms`` 0 the robots ask as fast as they are answered,
so that the rate is the server's limit and the latency is robots / rate. "failed" counts requests without an action.

    python benchmarks/serve.py --policy octo --robots 200 --out serve.json
"""

import asyncio
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro
from prometheus_client.parser import text_string_to_metric_families
from websockets.asyncio.client import connect

from vla_rlaif.interfaces import Policy
from vla_rlaif.serve.protocol import encode
from vla_rlaif.serve.server import PolicyServer
from vla_rlaif.serve.settings import ServeSettings
from vla_rlaif.types import EnvSpec, Weights


@dataclass(frozen=True, kw_only=True)
class Options:
    policy: Literal["gaussian", "octo"] = "gaussian"
    """Gaussian: linear in the state, JAX. Octo: the tiny one of config.py, two cameras of 64 pixels."""
    robots: int = 200
    requests: int = 10
    """Of each robot, in each round."""
    rounds: int = 5
    """Sides take turns, so that a change of load meets them all. Medians are reported."""
    think_ms: float = 0.0
    """Mean pause of a robot between a reply and its next request; uniform from 0 to twice that."""
    max_batch: int = 32
    max_wait_ms: float = 5.0
    swap_every_s: float = 0.5
    out: Path | None = None
    """Where to write the report as JSON."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One round of one side."""

    failed: int  # requests without an action
    rate: float  # actions a second
    p50_ms: float
    p99_ms: float
    max_ms: float
    mean_batch: float
    batches: dict[str, int]  # calls of the policy by the size they were padded to
    call_ms: float  # mean of a call of the policy
    cpu_ms: float  # of the server's process, for one action
    swaps: int


def main(options: Options) -> None:
    spec, make = served(options.policy)
    name = f"batches of {options.max_batch}"
    sides: dict[str, tuple[int, bool]] = {"batches of 1": (1, False), name: (options.max_batch, False)}
    sides[f"{name}, swapping"] = options.max_batch, True
    samples: dict[str, list[Sample]] = {side: [] for side in sides}
    for _ in range(options.rounds):
        for side, (max_batch, is_swapping) in sides.items():
            samples[side].append(asyncio.run(measure(options, spec, make, max_batch, is_swapping)))
    gain = statistics.median(b.rate / a.rate for a, b in zip(samples["batches of 1"], samples[name], strict=True))
    print_report(options, samples)
    print(f"gain of batching: {gain:.2f}; batch sizes without swaps: {samples[name][0].batches}")
    if options.out is not None:
        machine = {"platform": platform.platform(), "cores": os.cpu_count(), "load": os.getloadavg()}
        raw = {side: [asdict(sample) for sample in taken] for side, taken in samples.items()}
        report = {"options": asdict(options), "machine": machine, "gain": gain, "samples": raw}
        options.out.write_text(json.dumps(report, indent=1, default=str))


def print_report(options: Options, samples: dict[str, list[Sample]]) -> None:
    print(
        f"{options.policy}, {options.robots} robots, {options.requests} requests each, think {options.think_ms:g} ms, "
        f"{options.rounds} rounds; load {os.getloadavg()[0]:.1f}"
    )
    columns = {"actions/s": "rate", "p50 ms": "p50_ms", "p99 ms": "p99_ms", "max ms": "max_ms", "batch": "mean_batch"}
    columns |= {"call ms": "call_ms", "CPU ms": "cpu_ms"}
    print(f"{'':26}" + "".join(f"{head:>10}" for head in (*columns, "swaps", "failed")))
    for side, taken in samples.items():
        medians = [statistics.median(getattr(sample, name) for sample in taken) for name in columns.values()]
        totals = (sum(sample.swaps for sample in taken), sum(sample.failed for sample in taken))
        print(f"{side:26}" + "".join(f"{m:10.1f}" for m in medians) + "".join(f"{total:10}" for total in totals))


def served(name: str) -> tuple[EnvSpec, Callable[[], Policy]]:
    """A spec and what makes the policy for it."""
    from vla_rlaif.build import build_policy
    from vla_rlaif.policy_config import GaussianConfig, OctoConfig

    if name == "gaussian":
        spec = EnvSpec(
            **{"cameras": ("primary",), "image_size": 16, "state_dim": 4, "action_dim": 2, "chunk": 4},
            **{"max_decisions": 4, "instructions": ("reach the goal",)},
        )
        return spec, lambda: build_policy(GaussianConfig(), spec, 0)
    spec = EnvSpec(
        **{"cameras": ("primary", "wrist"), "image_size": 64, "state_dim": 8, "action_dim": 7, "chunk": 4},
        **{"max_decisions": 4, "instructions": ("reach the red cube",)},
    )
    return spec, lambda: build_policy(OctoConfig(), spec, 0)


async def measure(
    options: Options, spec: EnvSpec, make: Callable[[], Policy], max_batch: int, is_swapping: bool
) -> Sample:
    settings = ServeSettings(
        port=0,
        max_batch=max_batch,
        max_wait_ms=options.max_wait_ms,
        max_queue=max(options.robots, max_batch),
        max_connections=options.robots,
        deadline_ms=60_000.0,
        ping_timeout_s=60.0,
    )
    weights = {name: np.asarray(value) for name, value in make().params.items()}  # pyright: ignore[reportAttributeAccessIssue]
    async with PolicyServer(make, spec, settings) as server:
        swapping = asyncio.create_task(swap(server, weights, options.swap_every_s)) if is_swapping else None
        cpu_s = time.process_time()
        output = await robots_apart(options, spec, server.port)
        cpu_s = time.process_time() - cpu_s
        if swapping is not None:
            swapping.cancel()
        text = server.metrics.text().decode()
    samples = {
        (s.name.removeprefix("vla_rlaif_serve_"), s.labels.get("le")): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }
    calls = samples["batch_size_count", None]
    sizes = sorted(
        (float(le), value) for (sample, le), value in samples.items() if sample == "batch_size_bucket" and le
    )
    below = [0.0, *(count for _, count in sizes)]
    batches = {f"{s:g}": int(n - b) for (s, n), b in zip(sizes, below[:-1], strict=True)}
    latency_ms = 1e3 * np.array(output["latency_s"])
    return Sample(
        failed=output["failed"],
        rate=len(latency_ms) / output["wall_s"],
        p50_ms=float(np.percentile(latency_ms, 50)),
        p99_ms=float(np.percentile(latency_ms, 99)),
        max_ms=float(latency_ms.max()),
        mean_batch=samples["batch_size_sum", None] / calls,
        batches={size: num for size, num in batches.items() if num},
        call_ms=1e3 * samples["policy_seconds_sum", None] / calls,
        cpu_ms=1e3 * cpu_s / len(latency_ms),
        swaps=server.version,
    )


async def swap(server: PolicyServer, weights: Weights, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        await server.stage(weights, server.version + 1)
        server.commit(server.version + 1)


async def robots_apart(options: Options, spec: EnvSpec, port: int) -> dict[str, Any]:
    """All robots, in a process of their own: what they do costs the server's process nothing."""
    arguments = {
        "port": port,
        "robots": options.robots,
        "requests": options.requests,
        "think_s": options.think_ms / 1e3,
    }
    arguments |= {"cameras": len(spec.cameras), "side": spec.image_size, "state_dim": spec.state_dim}
    arguments |= {"prompt": spec.instructions[0]}
    command = (sys.executable, __file__, "--as-robots", json.dumps(arguments))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0, "the robots' process failed"
    return json.loads(output)


async def play(a: dict[str, Any]) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    keys = ("observation/image", "observation/wrist_image")[: a["cameras"]]
    latency_s: list[float] = []
    failed = 0
    everyone = asyncio.Barrier(a["robots"])

    async def robot(seed: int) -> tuple[float, float]:
        nonlocal failed
        message = {key: rng.integers(0, 256, (a["side"], a["side"], 3), np.uint8) for key in keys}
        state = rng.normal(size=a["state_dim"]).astype(np.float32)
        data = encode({**message, "observation/state": state, "prompt": a["prompt"]})
        pauses = np.random.default_rng(seed).uniform(0, 2 * a["think_s"], a["requests"])
        async with connect(f"ws://127.0.0.1:{a['port']}", compression=None, ping_interval=None) as socket:
            await socket.recv()
            await everyone.wait()
            began = time.perf_counter()
            for pause in pauses:
                await asyncio.sleep(pause)
                sent = time.perf_counter()
                await socket.send(data)
                if isinstance(await socket.recv(), bytes):
                    latency_s.append(time.perf_counter() - sent)
                else:
                    failed += 1
            return began, time.perf_counter()

    times = await asyncio.gather(*(robot(seed) for seed in range(a["robots"])))
    wall_s = max(end for _, end in times) - min(began for began, _ in times)
    return {"latency_s": latency_s, "failed": failed, "wall_s": wall_s}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-robots"]:
        print(json.dumps(asyncio.run(play(json.loads(sys.argv[2])))))
    else:
        main(tyro.cli(Options))
