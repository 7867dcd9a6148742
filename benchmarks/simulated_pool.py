"""The layouts of docs/cluster.md on real Ray with simulated nodes, and how soon a death is noticed.

    python -m benchmarks.simulated_pool layouts   # 8 nodes of 8 GPUs and 4 without: places are reserved, nobody starts
    python -m benchmarks.simulated_pool workers   # real workers of this machine: round trip, kill -9, return
    python -m benchmarks.simulated_pool node      # two nodes of which one dies

Simulated nodes are processes of this machine that pretend. Twelve of them take about 1.5 GB, and where nothing else
runs they are there within a minute.
"""

import os
import signal
import statistics
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import tyro
import yaml

from vla_rlaif.cluster_config import RayClusterConfig
from vla_rlaif.dist.answers import WorkerFailure, answers
from vla_rlaif.dist.cluster import WorkerContext

DOCS = Path(__file__).parents[1] / "docs" / "cluster.md"
STORE = 80 * 2**20  # bytes of each node's object store, the least that Ray allows
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_raylet_start_wait_time_s": "180",
    "RAY_prestart_worker_first_driver": "0",
}


class Sleeper:
    """A worker that does nothing."""

    def __init__(self, context: WorkerContext) -> None:
        self.name = context.name

    def sleep(self, seconds: float) -> str:
        time.sleep(seconds)
        return self.name


def make_sleeper(context: WorkerContext) -> Sleeper:
    return Sleeper(context)


def layouts() -> dict[str, dict[str, Any]]:
    """The cluster sections that docs/cluster.md lists, by name."""
    blocks = [block.split("```")[0] for block in DOCS.read_text().split("```yaml\n")[1:]]
    named = [block.split("\n", 1) for block in blocks if block.startswith("# layout: ")]
    return {head.removeprefix("# layout: "): yaml.safe_load(text) for head, text in named}


def config_of(**settings: Any) -> RayClusterConfig:
    return RayClusterConfig.model_validate({"type": "ray", "address": "local", **settings})


def place_layouts() -> None:
    """Reserve every layout, and give it back."""
    import ray
    from ray.cluster_utils import Cluster

    from vla_rlaif.dist.ray_cluster import RayCluster

    begun = time.monotonic()
    pool = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": STORE})
    for _ in range(8):
        pool.add_node(num_cpus=96, num_gpus=8, labels={"kind": "gpu"}, object_store_memory=STORE)
    for _ in range(4):
        pool.add_node(num_cpus=128, labels={"kind": "cpu"}, object_store_memory=STORE)
    pool.connect()
    print(f"12 nodes after {time.monotonic() - begun:.1f} s", flush=True)
    for name, layout in layouts().items():
        for strategy in ("pack", "spread"):
            config = config_of(strategy=strategy, **layout)
            begun = time.monotonic()
            cluster = RayCluster(config)
            taken = time.monotonic() - begun
            places = [each for role in config.roles.present() for each in cluster.lend(role, 0, 1)]
            nodes = {each.home.node.name for each in places}
            print(f"{name}, {strategy}: {len(places)} workers on {len(nodes)} nodes after {taken:.2f} s", flush=True)
            cluster.close()
    for roles in ({"learner": {"workers": 65, "gpus": 1}}, {"learner": {"workers": 17, "gpus": 3}}):
        try:
            RayCluster(config_of(roles=roles))
        except ValueError as error:
            print(f"refused: {error}")
    ray.shutdown()
    pool.shutdown()


def measure_workers(repetitions: int) -> None:
    """Deaths of real workers, busy and idle."""
    from vla_rlaif.dist.ray_cluster import RayCluster
    from vla_rlaif.dist.ray_handle import RayHandle

    roles = {"rollout": {"workers": 2, "cpus": 0.4}, "learner": {"cpus": 0.4}, "reward": {"cpus": 0.4}}
    cluster = RayCluster(config_of(roles=roles, faults={"max_restarts": 2 * repetitions}))
    begun = time.monotonic()
    group = cluster.start("rollout", make_sleeper, 2)
    print(f"2 workers after {time.monotonic() - begun:.1f} s")
    handle = group.handles[0]
    times = []
    for _ in range(500):
        begun = time.monotonic()
        answers([handle.ask(partial(Sleeper.sleep, seconds=0.0))], 10.0, "nothing")
        times.append(time.monotonic() - begun)
    print(f"question and answer: {1e3 * statistics.median(times):.2f} ms (median)")
    noticed: dict[str, list[float]] = {"busy": [], "idle": []}
    back: list[float] = []
    for number in range(2 * repetitions):
        assert isinstance(handle, RayHandle)
        kind = "busy" if number % 2 else "idle"
        if kind == "busy":
            handle.ask(partial(Sleeper.sleep, seconds=60.0))
        time.sleep(0.5)
        begun = time.monotonic()
        os.kill(handle.pid, signal.SIGKILL)
        while handle.name in group.health.living:
            time.sleep(0.001)
        noticed[kind].append(time.monotonic() - begun)
        begun = time.monotonic()
        handle = group.restart(handle)
        back.append(time.monotonic() - begun)
    for kind, seconds in noticed.items():
        print(f"kill -9 of a worker that is {kind}: noticed after {1e3 * max(seconds):.0f} ms at most")
    print(f"the next incarnation is built after {statistics.median(back):.1f} s (median)")
    cluster.close()


def lose_a_node() -> None:
    """A worker whose node dies comes back on the other one."""
    import ray
    from ray.cluster_utils import Cluster

    from vla_rlaif.dist.ray_cluster import RayCluster

    pool = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": STORE})
    gpu_nodes = [pool.add_node(num_cpus=3, num_gpus=2, object_store_memory=STORE) for _ in range(2)]
    pool.connect()
    roles = {"rollout": {"workers": 2, "gpus": 1}, "learner": {"cpus": 0.4}, "reward": {"cpus": 0.4}}
    cluster = RayCluster(config_of(roles=roles, strategy="spread"))
    group = cluster.start("rollout", make_sleeper, 2)
    lost = group.handles[1]
    [home] = [each.home.node.name for each in cluster.lend("rollout", 1, 2)]
    lost.ask(partial(Sleeper.sleep, seconds=600.0))
    begun = time.monotonic()
    pool.remove_node(next(node for node in gpu_nodes if node.node_id == home), allow_graceful=False)
    while lost.name in group.health.living:
        time.sleep(0.01)
    print(f"death of a node: its worker is known to be dead after {time.monotonic() - begun:.1f} s")
    while group.handles[1] is lost:
        try:
            group.restart(lost)
        except WorkerFailure as failure:
            print(f"not yet: {failure.worker} after {time.monotonic() - begun:.1f} s")
    print(f"it is back on the other node after {time.monotonic() - begun:.1f} s")
    cluster.close()
    ray.shutdown()
    pool.shutdown()


@dataclass(frozen=True)
class Options:
    what: tyro.conf.Positional[Literal["layouts", "workers", "node"]]
    repetitions: int = 5  # deaths of each kind


if __name__ == "__main__":
    options = tyro.cli(Options, description=__doc__)
    os.environ.update(ENVIRONMENT)
    if options.what == "layouts":
        place_layouts()
    elif options.what == "workers":
        measure_workers(options.repetitions)
    else:
        lose_a_node()
